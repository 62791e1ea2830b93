//! State that outlives the loss of ranks.

use crate::blocking::{duration, interruptible, lock};
use crate::communicator::Communicator;
use crate::dtype;
use crate::errors::raised;
use crate::operation::in_slices;
use crate::tensor::Tensor;
use harmonaize_client as client;
use harmonaize_client::{Error, Rank};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

/// Tensors whose contents survive the loss of ranks. Its memory is free when it is gone.
#[pyclass(frozen, module = "harmonaize")]
pub(crate) struct Protection {
    inner: Arc<Mutex<client::Protection>>,
}

/// Runs a call on what a lock has, and lets Ctrl-C end it.
fn alone<T: Send + 'static>(
    py: Python<'_>,
    inner: &Arc<Mutex<client::Protection>>,
    call: impl FnOnce(&mut client::Protection) -> Result<T, Error> + Send + 'static,
) -> PyResult<T> {
    let inner = Arc::clone(inner);
    interruptible(py, move || call(&mut lock(&inner)))
}

/// What a lock has, once no other call uses it, if that is in so long: others may wait for their ranks.
fn within(
    inner: &Mutex<client::Protection>,
    patience: Duration,
) -> Result<MutexGuard<'_, client::Protection>, Error> {
    let begun = Instant::now();
    loop {
        match inner.try_lock() {
            Ok(free) => return Ok(free),
            Err(TryLockError::Poisoned(poisoned)) => return Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => {}
        }
        let waited = begun.elapsed();
        if waited >= patience {
            return Err(Error::WaitTimeout { what: "another call on this protection".into(), waited });
        }
        std::thread::sleep(patience.saturating_sub(waited).min(Duration::from_millis(1)));
    }
}

pub(crate) fn ranks(of: Vec<u32>) -> Vec<Rank> {
    of.into_iter().map(Rank).collect()
}

impl Protection {
    pub(crate) fn new(inner: client::Protection) -> Self {
        Self { inner: Arc::new(Mutex::new(inner)) }
    }
}

#[pymethods]
impl Protection {
    /// Seals a step: snapshots the tensors, and begins to send the snapshot to other ranks. False where it is not sealed.
    fn seal(&self, py: Python<'_>, step: u64) -> PyResult<bool> {
        alone(py, &self.inner, move |protection| protection.seal(step))
    }

    /// Begins to seal a step: the agent copies the tensors, which may be written again once `end_seal` has returned. False where it is not
    /// sealed.
    fn begin_seal(&self, py: Python<'_>, step: u64) -> PyResult<bool> {
        alone(py, &self.inner, move |protection| protection.begin_seal(step))
    }

    /// Waits until the tensors are copied that `begin_seal` has begun with, at most `timeout` seconds.
    #[pyo3(signature = (timeout = None))]
    fn end_seal(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        in_slices(py, duration(timeout)?, |slice| within(&self.inner, slice)?.end_seal(slice))
    }

    /// Waits until the replicas of the last sealed step are where they belong, at most `timeout` seconds.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        in_slices(py, duration(timeout)?, |slice| within(&self.inner, slice)?.wait(slice))
    }

    /// The newest step of which this rank knows that all ranks have it whole.
    #[getter]
    fn committed(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        in_slices(py, Duration::MAX, |slice| Ok(within(&self.inner, slice)?.committed()))
    }

    /// Goes back to the newest step that is whole of all ranks, and returns the states of these others beside.
    #[pyo3(signature = (next, of = Vec::new()))]
    fn restore(&self, py: Python<'_>, next: &Bound<'_, Communicator>, of: Vec<u32>) -> PyResult<Restored> {
        let (next, of) = (Arc::clone(&next.get().inner), ranks(of));
        let restored = alone(py, &self.inner, move |protection| protection.restore(&next, &of))?;
        Restored::new(py, restored)
    }

    /// Writes this rank's last sealed state to a file of safetensors; which step.
    fn write_safetensors(&self, py: Python<'_>, path: PathBuf) -> PyResult<u64> {
        alone(py, &self.inner, move |protection| protection.write_safetensors(path))
    }
}

/// What came of a restore.
#[pyclass(frozen, module = "harmonaize")]
pub(crate) struct Restored {
    step: u64,
    lost: Vec<u32>,
    states: Vec<Py<RankState>>,
}

impl Restored {
    pub(crate) fn new(py: Python<'_>, restored: client::Restored) -> PyResult<Self> {
        let states =
            restored.states.into_iter().map(|state| Py::new(py, RankState { inner: Arc::new(state) }));
        Ok(Self {
            step: restored.step,
            lost: restored.lost.into_iter().map(|rank| rank.0).collect(),
            states: states.collect::<PyResult<_>>()?,
        })
    }
}

#[pymethods]
impl Restored {
    /// The step that all states are of.
    #[getter]
    fn step(&self) -> u64 {
        self.step
    }

    /// Ranks of then, of which no process takes part.
    #[getter]
    fn lost(&self) -> Vec<u32> {
        self.lost.clone()
    }

    /// The states that this rank asked for, in that order.
    #[getter]
    fn states(&self, py: Python<'_>) -> Vec<Py<RankState>> {
        self.states.iter().map(|state| state.clone_ref(py)).collect()
    }

    fn __repr__(&self) -> String {
        format!("Restored(step={}, lost={:?}, {} states)", self.step, self.lost, self.states.len())
    }
}

/// The state of a rank at a step.
#[pyclass(frozen, module = "harmonaize")]
pub(crate) struct RankState {
    inner: Arc<client::RankState>,
}

#[pymethods]
impl RankState {
    /// Whose state it is, by the ranks of then.
    #[getter]
    fn rank(&self) -> u32 {
        self.inner.rank().0
    }

    /// Of which step.
    #[getter]
    fn step(&self) -> u64 {
        self.inner.step()
    }

    /// Types and elements of its tensors, by their names.
    #[getter]
    fn tensors(&self) -> BTreeMap<String, (&'static str, u64)> {
        let named = self.inner.tensors();
        named.map(|(name, dtype, count)| (name.to_owned(), (dtype::numpy_name(dtype), count))).collect()
    }

    /// Elements along each dimension of its tensors, by their names.
    #[getter]
    fn shapes<'py>(&self, py: Python<'py>) -> PyResult<BTreeMap<String, Bound<'py, PyTuple>>> {
        let shape = |(name, ..): (&str, _, _)| {
            Ok((name.to_owned(), PyTuple::new(py, self.inner.shape(name).unwrap_or_default())?))
        };
        self.inner.tensors().map(shape).collect()
    }

    /// Copies a tensor of it into one of the same type and number of elements.
    fn read(&self, py: Python<'_>, name: &str, into: &Bound<'_, Tensor>) -> PyResult<()> {
        let into = &into.get().inner;
        py.detach(|| self.inner.read(name, into)).map_err(|error| raised(py, &error))
    }

    /// Writes it to a file of safetensors.
    fn write_safetensors(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        let state = Arc::clone(&self.inner);
        interruptible(py, move || state.write_safetensors(path))
    }

    fn __repr__(&self) -> String {
        format!("RankState(rank {}, step {})", self.rank(), self.step())
    }
}
