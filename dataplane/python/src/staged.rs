//! Operations on memory that somebody else owns, such as torch's: copied into the arena before, and out of it after.
//!
//! The arena is the pool of staging memory: its pages stay, and taking a piece costs a lookup. Whoever waits copies out. Where nobody
//! waits, because a future was asked for or the handle is gone, the attachment's completion thread does.

use crate::blocking::{SLICE, duration, lock};
use crate::client::Attachment;
use crate::errors::raised;
use crate::operation::Receipt;
use harmonaize_client as client;
use harmonaize_client::{Collective, Communicator, Direction, Dtype, Error, Rank, ReduceOp};
use pyo3::prelude::*;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How long a call waits for an entry of the rings before it looks again.
const FULL: Duration = Duration::from_micros(50);

/// Where a piece of memory begins, and its bytes.
type Piece = (usize, usize);

/// What is called, with torch's memory.
pub(crate) struct Call {
    /// Of a [`Collective`] or a [`Direction`].
    pub(crate) code: u8,
    pub(crate) dtype: u8,
    pub(crate) reduce: u8,
    /// The root, or the rank at the other end; any where it is [`u32::MAX`].
    pub(crate) root: u32,
    /// One after the other they are the operation's input.
    pub(crate) inputs: Vec<Piece>,
    /// One after the other they become the operation's output.
    pub(crate) outputs: Vec<Piece>,
    /// Where blocks differ in size: what is sent, what is received, and the most of any two ranks. Of all but an AllToAll the first alone.
    pub(crate) counts: Option<(Vec<u64>, Vec<u64>, u64)>,
}

/// A call in flight.
struct Flight {
    operation: client::Operation,
    landing: Landing,
}

/// What is to be copied out.
struct Landing {
    /// The staging memory, and where in it the output begins, in bytes.
    from: Option<(client::Tensor, usize)>,
    outputs: Vec<Piece>,
}

fn bytes(pieces: &[Piece]) -> usize {
    pieces.iter().fold(0_usize, |sum, (_, bytes)| sum.saturating_add(*bytes))
}

fn unknown(what: &str, code: u8) -> Error {
    Error::Shape(format!("{what} of the unknown code {code}"))
}

/// Copies pieces into staging memory, from a byte on.
fn copy_in(staging: &client::Tensor, at: usize, pieces: &[Piece]) -> Result<(), Error> {
    let view = staging.view_mut()?;
    let mut at = at;
    for (address, bytes) in pieces.iter().filter(|(_, bytes)| *bytes > 0) {
        let room = view.range(at, *bytes);
        let room = room.ok_or_else(|| Error::Shape("inputs do not fit the operation".into()))?;
        // SAFETY: the caller keeps tensors at these addresses, of so many bytes; staging memory is nobody else's.
        unsafe { std::ptr::copy_nonoverlapping(*address as *const u8, room.pointer(), *bytes) };
        at += bytes;
    }
    Ok(())
}

impl Landing {
    const NONE: Self = Self { from: None, outputs: Vec::new() };

    fn copy_out(&self) -> Result<(), Error> {
        let Some((staging, at)) = &self.from else { return Ok(()) };
        let view = staging.view()?;
        let mut at = *at;
        for (address, bytes) in self.outputs.iter().filter(|(_, bytes)| *bytes > 0) {
            let piece = view.range(at, *bytes);
            let piece = piece.ok_or_else(|| Error::Shape("outputs do not fit the operation".into()))?;
            // SAFETY: the caller keeps tensors at these addresses, of so many bytes, until this is dropped.
            unsafe { std::ptr::copy_nonoverlapping(piece.pointer(), *address as *mut u8, *bytes) };
            at += bytes;
        }
        Ok(())
    }
}

impl Call {
    /// Copies the inputs in and starts the operation.
    fn start(&self, client: &client::Client, members: &Communicator) -> Result<Flight, Error> {
        let dtype = Dtype::from_code(self.dtype).ok_or_else(|| unknown("an element type", self.dtype))?;
        let reduce = ReduceOp::from_code(self.reduce).ok_or_else(|| unknown("a reduction", self.reduce))?;
        let (inputs, outputs) = (bytes(&self.inputs), bytes(&self.outputs));
        let size = dtype.size();
        let tensor = |bytes: usize| client.tensor(dtype, (bytes / size) as u64);
        let filled = |bytes: usize, at: usize| {
            let staging = tensor(bytes)?;
            copy_in(&staging, at, &self.inputs)?;
            Ok::<_, Error>(staging)
        };
        let (rank, ranks, root) = (members.rank(), members.ranks() as usize, Rank(self.root));
        let at_root = rank == root;
        let own = rank.0 as usize;
        if let Some(direction) = Direction::from_code(self.code) {
            let (staging, operation) = match direction {
                Direction::Send => {
                    let staging = filled(inputs, 0)?;
                    let operation = members.send(&staging, root)?;
                    (staging, operation)
                }
                Direction::Receive => {
                    let staging = tensor(outputs)?;
                    let operation = match self.root {
                        u32::MAX => members.recv_any(&staging)?,
                        _ => members.recv(&staging, root)?,
                    };
                    (staging, operation)
                }
            };
            return Ok(Flight {
                operation,
                landing: Landing { from: Some((staging, 0)), outputs: self.outputs.clone() },
            });
        }
        let collective =
            Collective::from_code(self.code).ok_or_else(|| unknown("a collective", self.code))?;
        // What stands before this rank's part, in bytes.
        let offset = |counts: &[u64], block: usize| match counts {
            [] => block * own,
            counts => counts.iter().take(own).sum::<u64>() as usize * size,
        };
        let counts = self.counts.as_ref().map_or(&[][..], |(counts, _, _)| counts);
        let part = |staging: &client::Tensor| {
            let start = counts.iter().take(own).sum::<u64>();
            staging.slice(start..start + counts.get(own).copied().unwrap_or(0))
        };
        let (operation, staging, at) = match collective {
            Collective::Barrier => {
                return Ok(Flight { operation: members.barrier()?, landing: Landing::NONE });
            }
            Collective::AllReduce => {
                let staging = filled(inputs, 0)?;
                (members.all_reduce_in_place(&staging, reduce)?, staging, 0)
            }
            Collective::Broadcast => {
                let staging = if at_root { filled(inputs, 0)? } else { tensor(outputs)? };
                (members.broadcast(&staging, root)?, staging, 0)
            }
            Collective::Reduce => {
                let staging = filled(inputs, 0)?;
                (members.reduce_in_place(&staging, reduce, root)?, staging, 0)
            }
            Collective::AllGather => {
                let staging = filled(outputs, offset(counts, inputs))?;
                let operation = match counts {
                    [] => members.all_gather_in_place(&staging)?,
                    counts => members.all_gather_v(&part(&staging)?, &staging, counts)?,
                };
                (operation, staging, 0)
            }
            Collective::ReduceScatter => {
                let staging = filled(inputs, 0)?;
                let operation = match counts {
                    [] => members.reduce_scatter_in_place(&staging, reduce)?,
                    counts => members.reduce_scatter_v(&staging, &part(&staging)?, reduce, counts)?,
                };
                (operation, staging, offset(counts, outputs))
            }
            Collective::Gather => {
                let staging =
                    if at_root { filled(outputs, offset(&[], inputs))? } else { filled(inputs, 0)? };
                (members.gather_in_place(&staging, root)?, staging, 0)
            }
            Collective::Scatter if at_root => {
                let staging = filled(inputs, 0)?;
                (members.scatter_in_place(&staging, root)?, staging, offset(&[], inputs / ranks.max(1)))
            }
            Collective::Scatter => {
                let staging = tensor(outputs)?;
                (members.scatter_in_place(&staging, root)?, staging, 0)
            }
            Collective::AllToAll => {
                let (from, into) = (filled(inputs, 0)?, tensor(outputs)?);
                let operation = match &self.counts {
                    None => members.all_to_all(&from, &into)?,
                    Some((send, recv, most)) => members.all_to_all_v(&from, send, &into, recv, *most)?,
                };
                (operation, into, 0)
            }
        };
        Ok(Flight {
            operation,
            landing: Landing { from: Some((staging, at)), outputs: self.outputs.clone() },
        })
    }
}

/// A call of [`Call`] in flight, for `harmonaize.torch`.
#[pyclass(frozen, module = "harmonaize")]
pub(crate) struct Staged {
    shared: Arc<Shared>,
}

pub(crate) struct Shared {
    stage: Mutex<Stage>,
    ended: Condvar,
}

/// How a call ended.
type Outcome = Result<client::Receipt, Arc<Error>>;

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
    fn hand_over(self: &Arc<Self>, callback: Option<Py<PyAny>>) -> Result<Option<Outcome>, Error> {
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
            let outcome = result.and_then(|receipt| landing.copy_out().map(|()| receipt)).map_err(Arc::new);
            let callbacks = shared.end(outcome.clone());
            // Nothing where the interpreter ends.
            Python::try_attach(|py| {
                callbacks.iter().for_each(|callback| call(py, callback, &outcome));
                drop((callbacks, keep));
            });
        });
        if let Err(error) = &handed {
            self.end(Err(Arc::new(Error::Protocol(error.to_string()))));
        }
        handed.map(|()| None)
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
    fn add(&self, call: &Arc<Shared>, most: usize) -> Result<(), Error> {
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
            let flight = match py.detach(|| call.start(&attachment.client, members)) {
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
            py.detach(|| attachment.open.add(&shared, most)).map_err(|error| raised(py, &error))?;
            return Ok(Self { shared });
        }
    }

    /// Waits for a while, or only looks.
    fn look(&self, slice: Duration) -> Seen {
        let mut stage = lock(&self.shared.stage);
        if matches!(*stage, Stage::Handed(_)) && !slice.is_zero() {
            let waited = self.shared.ended.wait_timeout(stage, slice);
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
                let result = result.and_then(|receipt| flight.landing.copy_out().map(|()| receipt));
                let result = result.map_err(Arc::new);
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
    let error = result.as_ref().err().map(|error| raised(py, error).into_value(py));
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
            let (held, ended) = py.detach(|| self.look(slice));
            drop(held);
            if let Some(result) = ended {
                return result.map(Receipt).map_err(|error| raised(py, &error));
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
        let (held, ended) = py.detach(|| self.look(Duration::ZERO));
        drop(held);
        ended.transpose().map(|receipt| receipt.map(Receipt)).map_err(|error| raised(py, &error))
    }

    /// Has `callback` called at the end, with none or with the exception, on a thread of the attachment.
    fn then(&self, py: Python<'_>, callback: Py<PyAny>) -> PyResult<()> {
        let passed = callback.clone_ref(py);
        let ended = py.detach(|| self.shared.hand_over(Some(passed))).map_err(|error| raised(py, &error))?;
        if let Some(result) = ended {
            call(py, &callback, &result);
        }
        Ok(())
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        let lands = match &*lock(&self.shared.stage) {
            Stage::InFlight(held) => !held.0.landing.outputs.is_empty(),
            Stage::Handed(_) | Stage::Ended(_) => false,
        };
        if lands {
            // What it was to write is written all the same. Where that cannot be, nobody is left to be told.
            let _ = self.shared.hand_over(None);
        }
    }
}
