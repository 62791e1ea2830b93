//! Calls that wait: without the interpreter's lock, and so that Ctrl-C ends them.

use crate::errors::raised;
use harmonaize_client::Error;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long a call may not see that there was a signal.
pub(crate) const SLICE: Duration = Duration::from_millis(50);

/// A time in seconds as Python gives it; infinity and none are forever.
pub(crate) fn duration(seconds: Option<f64>) -> PyResult<Duration> {
    match seconds {
        None => Ok(Duration::MAX),
        Some(seconds) if seconds == f64::INFINITY => Ok(Duration::MAX),
        Some(seconds) => Duration::try_from_secs_f64(seconds)
            .map_err(|error| PyValueError::new_err(format!("{seconds} s: {error}"))),
    }
}

/// The same where none stays none.
pub(crate) fn optional(seconds: Option<f64>) -> PyResult<Option<Duration>> {
    seconds.map(|seconds| duration(Some(seconds))).transpose()
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a call that cannot be cut into pieces on a thread of its own. After Ctrl-C the call goes on there, and nobody has what comes of it.
pub(crate) fn interruptible<T: Send + 'static>(
    py: Python<'_>,
    call: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> PyResult<T> {
    let (done, ended) = channel();
    let ended = Mutex::new(ended);
    let thread = std::thread::Builder::new().name("harmonaize-call".into());
    thread.spawn(move || done.send(call()))?;
    loop {
        match py.detach(|| lock(&ended).recv_timeout(SLICE)) {
            Ok(result) => return result.map_err(|error| raised(py, &error)),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(PyRuntimeError::new_err("the call has panicked; its text is on standard error"));
            }
        }
    }
}
