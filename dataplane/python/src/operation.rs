//! Operations in flight, and their receipts.

use crate::blocking::{SLICE, duration, lock};
use crate::errors::{argument, raised};
use harmonaize_client as client;
use harmonaize_client::{Algorithm, Error};
use pyo3::prelude::*;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// A collective, a send or a receive in flight.
#[pyclass(frozen, module = "harmonaize")]
pub(crate) struct Operation {
    inner: Mutex<client::Operation>,
}

impl Operation {
    pub(crate) fn new(inner: client::Operation) -> Self {
        Self { inner: Mutex::new(inner) }
    }
}

/// Calls `wait` with pieces of the time, and looks for signals between.
pub(crate) fn in_slices<T: Send>(
    py: Python<'_>,
    timeout: Duration,
    wait: impl Fn(Duration) -> Result<T, Error> + Sync,
) -> PyResult<T> {
    let deadline = Instant::now().checked_add(timeout);
    loop {
        let left = deadline.map_or(SLICE, |at| at.saturating_duration_since(Instant::now()));
        let error = match py.detach(|| wait(left.min(SLICE))) {
            Ok(value) => return Ok(value),
            Err(error) => error,
        };
        let Error::WaitTimeout { what, .. } = error else { return Err(raised(py, &error)) };
        py.check_signals()?;
        if deadline.is_some_and(|at| Instant::now() >= at) {
            return Err(raised(py, &Error::WaitTimeout { what, waited: timeout }));
        }
    }
}

#[pymethods]
impl Operation {
    /// Waits for the end, at most `timeout` seconds. Then it is still in flight, and can be waited for again.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Receipt> {
        in_slices(py, duration(timeout)?, |slice| lock(&self.inner).wait(slice)).map(Receipt)
    }

    /// The receipt if it has ended, else none. Never waits for other ranks.
    fn poll(&self, py: Python<'_>) -> PyResult<Option<Receipt>> {
        // A thread that waits has the lock.
        let Ok(mut operation) = self.inner.try_lock() else { return Ok(None) };
        Ok(operation.poll().map_err(|error| raised(py, &error))?.map(Receipt))
    }

    fn __repr__(&self) -> String {
        self.inner.try_lock().map_or_else(|_| "Operation".into(), |it| format!("Operation({})", it.called()))
    }
}

/// Waits until one of the operations has ended, and returns which, by its place.
#[pyfunction]
#[pyo3(signature = (operations, timeout = None))]
pub(crate) fn wait_any(
    py: Python<'_>,
    operations: Vec<Bound<'_, Operation>>,
    timeout: Option<f64>,
) -> PyResult<usize> {
    if operations.is_empty() {
        return Err(argument(py, "waiting for one of no operations"));
    }
    let deadline = Instant::now().checked_add(duration(timeout)?);
    let mut pause = Duration::from_micros(20);
    loop {
        for (place, operation) in operations.iter().enumerate() {
            let ended = operation.get().inner.try_lock().is_ok_and(|mut it| !matches!(it.poll(), Ok(None)));
            if ended {
                return Ok(place);
            }
        }
        if deadline.is_some_and(|at| Instant::now() >= at) {
            let what = format!("any of {} operations", operations.len());
            let waited = duration(timeout)?;
            return Err(raised(py, &Error::WaitTimeout { what, waited }));
        }
        py.detach(|| std::thread::sleep(pause));
        pause = (pause * 2).min(Duration::from_millis(1));
        py.check_signals()?;
    }
}

/// What an operation that succeeded cost.
#[pyclass(frozen, module = "harmonaize")]
pub(crate) struct Receipt(pub(crate) client::Receipt);

#[pymethods]
impl Receipt {
    /// Number of the operation on its communicator.
    #[getter]
    fn operation(&self) -> u64 {
        self.0.operation.0
    }

    /// The rank at the other end of a send or a receive.
    #[getter]
    fn peer(&self) -> Option<u32> {
        self.0.peer.map(|peer| peer.0)
    }

    /// Tensor bytes that this rank's host sent.
    #[getter]
    fn wire_bytes(&self) -> u64 {
        self.0.wire_bytes
    }

    /// Bits on the wire per element; 0 where nothing was sent.
    #[getter]
    fn bits_per_element(&self) -> f64 {
        self.0.bits_per_element
    }

    /// Which kind of algorithm ran.
    #[getter]
    fn algorithm(&self) -> String {
        match self.0.algorithm {
            Algorithm::None => "none".into(),
            Algorithm::WithinHost => "within host".into(),
            Algorithm::Ring => "ring".into(),
            Algorithm::Pairwise => "pairwise".into(),
            Algorithm::Chain => "chain".into(),
            Algorithm::Dissemination => "dissemination".into(),
            Algorithm::DirectCoded => "direct compressed".into(),
            Algorithm::OneShot => "one shot".into(),
            Algorithm::TwoShot => "two shot".into(),
            Algorithm::Aggregated => "aggregated".into(),
            other => format!("{other:?}").to_ascii_lowercase(),
        }
    }

    /// Whether a part was run another way than planned.
    #[getter]
    fn fallback(&self) -> bool {
        self.0.fallback
    }

    /// In which codec the tensor travelled.
    #[getter]
    fn codec(&self) -> &'static str {
        self.0.codec
    }

    /// Error (vNMSE) that the sum has at most.
    #[getter]
    fn error(&self) -> f32 {
        self.0.error
    }

    /// Error (vNMSE) that encoders measured.
    #[getter]
    fn measured_error(&self) -> f32 {
        self.0.measured_error
    }

    fn __repr__(&self) -> String {
        let (operation, bytes, algorithm) = (self.0.operation, self.0.wire_bytes, self.algorithm());
        format!(
            "Receipt(operation={operation}, wire_bytes={bytes}, algorithm={algorithm:?}, codec={:?})",
            self.0.codec
        )
    }
}
