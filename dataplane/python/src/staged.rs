//! Operations on torch's memory. Whoever waits copies out. Where nobody waits, because a future was asked for or the handle is gone, the
//! attachment's completion thread does.

use crate::blocking::{SLICE, duration, lock};
use crate::client::Attachment;
use crate::errors::{failed, raised};
use crate::operation::Receipt;
use harmonaize_client as client;
use harmonaize_client::{Communicator, Error};
use harmonaize_staging::cuda::Stream;
use harmonaize_staging::stream::{Back, Batch, Failure, Lane, Outcome, Submission};
use harmonaize_staging::{Call, Flight, Landing};
use pyo3::prelude::*;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Copies an output out while its memory is kept.
fn copy_out(landing: &Landing) -> Result<(), Error> {
    // SAFETY: `harmonaize.torch` gives addresses of tensors that the call's `keep` holds until it has ended.
    unsafe { landing.copy_out() }
}

/// Starts a call whose memory is kept.
fn start(call: &Call, client: &client::Client, members: &Communicator) -> Result<Flight, Error> {
    // SAFETY: as in `copy_out`.
    unsafe { call.start(client, members) }
}

/// How long a call waits for an entry of the rings before it looks again.
const FULL: Duration = Duration::from_micros(50);

/// A call of [`Call`] in flight, for `harmonaize.torch`.
#[pyclass(frozen, module = "harmonaize")]
pub(crate) struct Staged {
    memory: Memory,
}

/// Whose memory the call is on.
enum Memory {
    Host(Arc<Shared>),
    /// A device's: streams copy it.
    Device(Arc<Batch>),
}

pub(crate) struct Shared {
    stage: Mutex<Stage>,
    ended: Condvar,
}

enum Stage {
    /// Whoever waits sees to it.
    InFlight(Box<(Flight, Py<PyAny>)>),
    /// The completion thread sees to it, and calls these back.
    Handed(Vec<Py<PyAny>>),
    Ended(Outcome),
}

impl Shared {
    /// Notes the end, and gives those that are to be called back.
    fn end(&self, outcome: Outcome) -> Vec<Py<PyAny>> {
        let before = std::mem::replace(&mut *lock(&self.stage), Stage::Ended(outcome));
        self.ended.notify_all();
        match before {
            Stage::Handed(callbacks) => callbacks,
            Stage::InFlight(_) | Stage::Ended(_) => Vec::new(),
        }
    }

    /// Has the completion thread see to the end, and then call `callback`. What it ended with, where it has: then nothing is called.
    fn hand_over(self: &Arc<Self>, callback: Option<Py<PyAny>>) -> Result<Option<Outcome>, Failure> {
        let mut stage = lock(&self.stage);
        let held = match &mut *stage {
            Stage::Ended(outcome) => return Ok(Some(outcome.clone())),
            Stage::Handed(callbacks) => {
                callbacks.extend(callback);
                return Ok(None);
            }
            Stage::InFlight(_) => {
                std::mem::replace(&mut *stage, Stage::Handed(callback.into_iter().collect()))
            }
        };
        drop(stage);
        let Stage::InFlight(held) = held else { return Ok(None) };
        let (Flight { operation, landing }, keep) = *held;
        let shared = Arc::clone(self);
        let handed = operation.on_completion(move |result| {
            let outcome =
                result.and_then(|receipt| copy_out(&landing).map(|()| receipt)).map_err(Failure::from);
            let callbacks = shared.end(outcome.clone());
            // Nothing where the interpreter ends.
            Python::try_attach(|py| {
                callbacks.iter().for_each(|callback| call(py, callback, &outcome));
                drop((callbacks, keep));
            });
        });
        handed.map(|()| None).map_err(|error| {
            let failure = Failure::from(error);
            self.end(Err(failure.clone()));
            failure
        })
    }

    /// Whether it is in flight, and nobody waits for it now: a thread that does has the lock.
    fn is_open(&self) -> bool {
        self.stage.try_lock().is_ok_and(|stage| matches!(*stage, Stage::InFlight(_)))
    }
}

/// Calls of an attachment that nobody has waited for yet, oldest first.
#[derive(Default)]
pub(crate) struct OpenCalls(Mutex<VecDeque<Weak<Shared>>>);

impl OpenCalls {
    /// Adds one. So that not all entries of the rings are taken by ends that nobody looks at, the oldest goes to the completion thread
    /// where there are more than `most`.
    fn add(&self, call: &Arc<Shared>, most: usize) -> Result<(), Failure> {
        let mut calls = lock(&self.0);
        calls.push_back(Arc::downgrade(call));
        let closed = |call: &Weak<Shared>| call.upgrade().is_none_or(|call| !call.is_open());
        while calls.front().is_some_and(closed) {
            calls.pop_front();
        }
        let oldest = if calls.len() > most { calls.pop_front() } else { None };
        drop(calls);
        match oldest.and_then(|oldest| oldest.upgrade()) {
            Some(oldest) => oldest.hand_over(None).map(drop),
            None => Ok(()),
        }
    }
}

/// What a look at a call gives: what it held, and how it ended if it has.
type Seen = (Option<Box<(Flight, Py<PyAny>)>>, Option<Outcome>);

impl Staged {
    /// Starts a call whose memory `keep` keeps, on a communicator of the attachment.
    pub(crate) fn start(
        py: Python<'_>,
        attachment: &Attachment,
        members: &Communicator,
        call: &Call,
        keep: Py<PyAny>,
    ) -> PyResult<Self> {
        loop {
            let flight = match py.detach(|| start(call, &attachment.client, members)) {
                Ok(flight) => flight,
                Err(Error::TooMany { .. }) => {
                    // The completion thread takes ends as they come.
                    py.detach(|| std::thread::sleep(FULL));
                    py.check_signals()?;
                    continue;
                }
                Err(error) => return Err(raised(py, &error)),
            };
            let stage = Mutex::new(Stage::InFlight(Box::new((flight, keep))));
            let shared = Arc::new(Shared { stage, ended: Condvar::new() });
            let most = attachment.entries as usize / 2;
            py.detach(|| attachment.open.add(&shared, most)).map_err(|failure| failed(py, &failure))?;
            return Ok(Self { memory: Memory::Host(shared) });
        }
    }

    /// Queues a call on a device's memory: one stream copies the inputs, and another one the outputs, once the operation has ended. Whose
    /// memory it is keeps it from being used again before both have done so.
    pub(crate) fn queue(
        py: Python<'_>,
        attachment: &Attachment,
        (members, lane): (Communicator, Lane),
        call: Call,
        (inputs, outputs): (Stream, Stream),
    ) -> PyResult<Self> {
        let queued = py.detach(|| {
            let part = Submission::new(&attachment.client, members, lane, call, inputs)?;
            // SAFETY: `harmonaize.torch` gives addresses of tensors that it has noted as used by both streams.
            unsafe { Batch::submit(vec![part], Back::AtEnd(outputs)) }
        });
        let batch = queued.map_err(|failure| failed(py, &failure))?;
        Ok(Self { memory: Memory::Device(batch) })
    }

    /// Waits for a while, or only looks.
    fn poll_once(&self, slice: Duration) -> Seen {
        match &self.memory {
            Memory::Host(shared) => shared.poll_once(slice),
            Memory::Device(batch) if slice.is_zero() => (None, batch.poll()),
            Memory::Device(batch) => (None, batch.wait(slice)),
        }
    }
}

impl Shared {
    /// Waits for a while, or only looks.
    fn poll_once(&self, slice: Duration) -> Seen {
        let mut stage = lock(&self.stage);
        if matches!(*stage, Stage::Handed(_)) && !slice.is_zero() {
            let waited = self.ended.wait_timeout(stage, slice);
            stage = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        match &mut *stage {
            Stage::Ended(result) => (None, Some(result.clone())),
            Stage::Handed(_) => (None, None),
            Stage::InFlight(held) => {
                let (flight, _) = &mut **held;
                let result = match slice.is_zero() {
                    true => flight.operation.poll().transpose(),
                    false => match flight.operation.wait(slice) {
                        Err(Error::WaitTimeout { .. }) => None,
                        ended => Some(ended),
                    },
                };
                let Some(result) = result else { return (None, None) };
                let result = result.and_then(|receipt| copy_out(&flight.landing).map(|()| receipt));
                let result = result.map_err(Failure::from);
                match std::mem::replace(&mut *stage, Stage::Ended(result.clone())) {
                    Stage::InFlight(held) => (Some(held), Some(result)),
                    _ => (None, Some(result)),
                }
            }
        }
    }
}

/// Calls back with none, or with the exception.
fn call(py: Python<'_>, callback: &Py<PyAny>, result: &Outcome) {
    let error = result.as_ref().err().map(|failure| failed(py, failure).into_value(py));
    if let Err(error) = callback.call1(py, (error,)) {
        error.write_unraisable(py, None);
    }
}

#[pymethods]
impl Staged {
    /// Waits until the outputs are there, at most `timeout` seconds.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Receipt> {
        let timeout = duration(timeout)?;
        let deadline = Instant::now().checked_add(timeout);
        loop {
            let left = deadline.map_or(SLICE, |at| at.saturating_duration_since(Instant::now()));
            let slice = left.min(SLICE).max(Duration::from_nanos(1));
            let (held, ended) = py.detach(|| self.poll_once(slice));
            drop(held);
            if let Some(result) = ended {
                return result.map(Receipt).map_err(|failure| failed(py, &failure));
            }
            py.check_signals()?;
            if deadline.is_some_and(|at| Instant::now() >= at) {
                let what = "the operation".into();
                return Err(raised(py, &Error::WaitTimeout { what, waited: timeout }));
            }
        }
    }

    /// The receipt if it has ended, else none.
    fn poll(&self, py: Python<'_>) -> PyResult<Option<Receipt>> {
        let (held, ended) = py.detach(|| self.poll_once(Duration::ZERO));
        drop(held);
        ended.transpose().map(|receipt| receipt.map(Receipt)).map_err(|failure| failed(py, &failure))
    }

    /// Has `callback` called at the end, with none or with the exception, on a thread of the attachment.
    fn then(&self, py: Python<'_>, callback: Py<PyAny>) -> PyResult<()> {
        let shared = match &self.memory {
            Memory::Host(shared) => shared,
            Memory::Device(batch) => {
                py.detach(|| {
                    batch.on_end(move |outcome| {
                        // Nothing where the interpreter ends.
                        Python::try_attach(|py| call(py, &callback, outcome));
                    });
                });
                return Ok(());
            }
        };
        let passed = callback.clone_ref(py);
        let ended = py.detach(|| shared.hand_over(Some(passed))).map_err(|failure| failed(py, &failure))?;
        if let Some(result) = ended {
            call(py, &callback, &result);
        }
        Ok(())
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        let Memory::Host(shared) = &self.memory else { return };
        let lands = match &*lock(&shared.stage) {
            Stage::InFlight(held) => !held.0.landing.is_empty(),
            Stage::Handed(_) | Stage::Ended(_) => false,
        };
        if lands {
            // What it was to write is written all the same. Where that cannot be, nobody is left to be told.
            let _ = shared.hand_over(None);
        }
    }
}
