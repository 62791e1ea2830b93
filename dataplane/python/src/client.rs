//! Attaching to the agent, and what is asked of the provider.

use crate::blocking::{duration, interruptible, optional};
use crate::communicator::Communicator;
use crate::dictionaries::{self, ConstraintsDictionary, HintsDictionary, KnobsDictionary};
use crate::dtype;
use crate::errors::{argument, raised};
use crate::events::Events;
use crate::region::Region;
use crate::staged::OpenCalls;
use crate::tensor::{Shape, Tensor, copied};
use harmonaize_client as client;
use harmonaize_client::{
    Access, AttachOptions, EventCursor, JoinOptions, Place, Rank, RegroupOptions, job_from_env,
};
use pyo3::prelude::*;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// What a client and its communicators share.
pub(crate) struct Attachment {
    pub(crate) client: client::Client,
    /// Entries of the rings.
    pub(crate) entries: u32,
    pub(crate) open: OpenCalls,
}

/// An attachment to the agent. Ends when it, its communicators and its operations are gone.
#[pyclass(frozen, module = "harmonaize")]
pub(crate) struct Client {
    inner: Arc<Attachment>,
}

/// Error feedback of one tensor of float32.
#[pyclass(frozen, module = "harmonaize")]
pub(crate) struct Feedback {
    pub(crate) inner: client::Feedback,
}

#[pymethods]
impl Feedback {
    /// Forgets what is owed.
    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        self.inner.reset().map_err(|error| raised(py, &error))
    }
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (socket = None, *, arena_bytes = 64 << 20, max_arena_bytes = None, entries = 64, timeout = 10.0, access = "mapped"))]
    fn new(
        py: Python<'_>,
        socket: Option<PathBuf>,
        arena_bytes: u64,
        max_arena_bytes: Option<u64>,
        entries: u32,
        timeout: f64,
        access: &str,
    ) -> PyResult<Self> {
        let access = match access {
            "mapped" => Access::Mapped,
            "remote" => Access::Remote,
            other => {
                return Err(argument(py, &format!("there is no access {other:?}; there are mapped, remote")));
            }
        };
        let options = AttachOptions {
            access,
            arena_bytes,
            max_arena_bytes: max_arena_bytes.unwrap_or(u64::MAX),
            entries,
            timeout: duration(Some(timeout))?,
            ..AttachOptions::default()
        };
        let client = interruptible(py, move || match socket {
            Some(socket) => client::Client::attach(socket, options),
            None => client::Client::from_env(options),
        })?;
        let open = OpenCalls::default();
        Ok(Self { inner: Arc::new(Attachment { client, entries, open }) })
    }

    /// Becomes a rank of the communicator `name`, and waits until all have come.
    #[pyo3(signature = (name, rank = None, ranks = None, *, timeout = 60.0, job = None, budget = None, operation_timeout = None))]
    #[expect(clippy::too_many_arguments, reason = "they are Python's keywords")]
    fn join(
        &self,
        py: Python<'_>,
        name: String,
        rank: Option<u32>,
        ranks: Option<u32>,
        timeout: f64,
        job: Option<String>,
        budget: Option<Bound<'_, PyAny>>,
        operation_timeout: Option<f64>,
    ) -> PyResult<Communicator> {
        let (rank, ranks) = match (rank, ranks) {
            (Some(rank), Some(ranks)) => (rank, ranks),
            _ => {
                let place = Place::from_env().map_err(|error| argument(py, &error.to_string()))?;
                (rank.unwrap_or(place.rank.0), ranks.unwrap_or(place.ranks))
            }
        };
        let options = JoinOptions {
            timeout: duration(Some(timeout))?,
            budget: budget.map_or(Ok(client::Budget::Exact), |budget| dictionaries::budget(&budget))?,
            job: job.unwrap_or_else(job_from_env),
            operation_timeout: optional(operation_timeout)?,
        };
        let attachment = Arc::clone(&self.inner);
        let joined =
            interruptible(py, move || attachment.client.join_with(&name, Rank(rank), ranks, &options))?;
        Ok(Communicator::new(joined, Arc::clone(&self.inner)))
    }

    /// Becomes a rank of a communicator that runs already, once its members regroup.
    #[pyo3(signature = (name, *, timeout = 60.0, min_ranks = 1, key = None))]
    fn enter(
        &self,
        py: Python<'_>,
        name: String,
        timeout: f64,
        min_ranks: u32,
        key: Option<u32>,
    ) -> PyResult<Communicator> {
        let options =
            RegroupOptions { timeout: duration(Some(timeout))?, min_ranks, key, operation_timeout: None };
        let attachment = Arc::clone(&self.inner);
        let entered = interruptible(py, move || attachment.client.enter(&name, &options))?;
        Ok(Communicator::new(entered, Arc::clone(&self.inner)))
    }

    /// A tensor in the arena. Its contents are unspecified.
    fn tensor(&self, py: Python<'_>, dtype: &Bound<'_, PyAny>, shape: Shape) -> PyResult<Tensor> {
        Tensor::new(py, &self.inner.client, dtype::parse(dtype)?, shape)
    }

    /// Has the agent map the process's own memfd, or a part of it: see `Region`.
    #[pyo3(signature = (memfd, *, offset = 0, nbytes = None))]
    fn register(&self, memfd: &Bound<'_, PyAny>, offset: u64, nbytes: Option<u64>) -> PyResult<Region> {
        Region::register(&self.inner.client, memfd, offset, nbytes)
    }

    /// A tensor in the arena with the type, shape and contents of an object that has the buffer protocol.
    fn copy_of<'py>(&self, array: &Bound<'py, PyAny>) -> PyResult<Bound<'py, Tensor>> {
        copied(&self.inner.client, array)
    }

    /// Error feedback for a tensor of so many float32.
    fn feedback(&self, py: Python<'_>, elements: u64) -> PyResult<Feedback> {
        let inner = py.detach(|| self.inner.client.feedback(elements)).map_err(|error| raised(py, &error))?;
        Ok(Feedback { inner })
    }

    /// Bytes of the arena, with what it has grown by.
    #[getter]
    fn arena_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        self.inner.client.arena_bytes().map_err(|error| raised(py, &error))
    }

    /// Makes the arena larger by at least so many bytes.
    fn grow(&self, py: Python<'_>, bytes: u64) -> PyResult<()> {
        py.detach(|| self.inner.client.grow(bytes)).map_err(|error| raised(py, &error))
    }

    /// A reader of the tenant's events.
    #[pyo3(signature = (cursor = None))]
    fn events(&self, cursor: Option<(u64, u64)>) -> Events {
        Events::new(self.inner.client.events(cursor.map(|(feed, next)| EventCursor { feed, next })))
    }

    /// Proposes what the provider shall promise for a communicator; what came of it.
    fn propose<'py>(
        &self,
        py: Python<'py>,
        communicator: String,
        constraints: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let wanted =
            dictionaries::read::<ConstraintsDictionary>(constraints, "constraints")?.constraints(py)?;
        let attachment = Arc::clone(&self.inner);
        let outcome = interruptible(py, move || attachment.client.propose(&communicator, &wanted))?;
        dictionaries::write(py, &dictionaries::of_negotiated(&outcome))
    }

    /// Proposes, and takes each counter-offer until something is agreed on.
    fn negotiate<'py>(
        &self,
        py: Python<'py>,
        communicator: String,
        constraints: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let wanted =
            dictionaries::read::<ConstraintsDictionary>(constraints, "constraints")?.constraints(py)?;
        let attachment = Arc::clone(&self.inner);
        let outcome = interruptible(py, move || {
            attachment.client.negotiate(&communicator, &wanted, |counter, _| Some(counter.clone()))
        })?;
        dictionaries::write(py, &dictionaries::of_negotiated(&outcome))
    }

    /// What is promised for a communicator, and how it was kept.
    fn agreement<'py>(&self, py: Python<'py>, communicator: String) -> PyResult<Bound<'py, PyAny>> {
        let attachment = Arc::clone(&self.inner);
        let agreement = interruptible(py, move || attachment.client.agreement(&communicator))?;
        dictionaries::write(py, &dictionaries::of_agreement(&agreement))
    }

    /// Says what a communicator is going to do.
    fn hint(&self, py: Python<'_>, communicator: String, hints: &Bound<'_, PyAny>) -> PyResult<()> {
        let hints = dictionaries::read::<HintsDictionary>(hints, "hints")?.hints(py)?;
        let attachment = Arc::clone(&self.inner);
        interruptible(py, move || attachment.client.hint(&communicator, &hints))
    }

    /// What the provider chooses for the next iteration of a communicator's job.
    fn iteration<'py>(
        &self,
        py: Python<'py>,
        communicator: String,
        knobs: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (knobs, batch) = dictionaries::read::<KnobsDictionary>(knobs, "knobs")?.knobs(py)?;
        let attachment = Arc::clone(&self.inner);
        let chosen = interruptible(py, move || match batch {
            Some(batch) => attachment.client.iteration_with_batch(&communicator, &knobs, &batch),
            None => attachment.client.iteration(&communicator, &knobs).map(|choice| (choice, None)),
        })?;
        dictionaries::write(py, &dictionaries::of_choice(chosen))
    }
}

/// How long calls that make communicators wait where nothing is said.
pub(crate) const JOIN_WITHIN: Duration = Duration::from_secs(60);
