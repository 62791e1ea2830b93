//! The client's errors as Python's exceptions, with what to do about them.

use harmonaize_client::{Error, FailureDetail, ProtectionError, Rank, Status};
use harmonaize_staging::stream::Failure;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// The module with the classes, which are Python's own so that they may have two bases.
fn class<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyType>> {
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module = MODULE.get_or_try_init(py, || py.import("harmonaize._errors").map(Bound::unbind))?;
    Ok(module.bind(py).getattr(name)?.cast_into::<PyType>()?)
}

/// An exception of a class of ours.
fn made(py: Python<'_>, name: &str, text: &str, ranks: &[Rank], status: Option<&str>) -> PyErr {
    let make = || -> PyResult<PyErr> {
        let exception = class(py, name)?.call1((text,))?;
        exception.setattr("ranks", ranks.iter().map(|rank| rank.0).collect::<Vec<_>>())?;
        exception.setattr("status", status)?;
        Ok(PyErr::from_value(exception))
    };
    make().unwrap_or_else(|_| PyRuntimeError::new_err(text.to_owned()))
}

/// A call whose arguments do not fit.
pub(crate) fn argument(py: Python<'_>, text: &str) -> PyErr {
    made(py, "ArgumentError", text, &[], None)
}

/// The exception of a call on somebody else's memory.
pub(crate) fn failed(py: Python<'_>, failure: &Failure) -> PyErr {
    match failure {
        Failure::Client(error) => raised(py, error),
        Failure::Cuda(_) => made(py, "Error", &failure.to_string(), &[], None),
        Failure::Captured => argument(py, &failure.to_string()),
    }
}

/// The exception of state that is not protected, sealed or restored.
fn protection(py: Python<'_>, why: &ProtectionError, text: &str) -> PyErr {
    let (kind, ranks): (&str, &[Rank]) = match why {
        ProtectionError::NoRank { .. } | ProtectionError::Changed { .. } => return argument(py, text),
        ProtectionError::TooFewDomains { .. } => ("TooFewDomains", &[]),
        ProtectionError::NothingSealed => ("NothingSealed", &[]),
        ProtectionError::TooManyLost { ranks } => ("TooManyLost", ranks),
        ProtectionError::Differ(_) => ("Differ", &[]),
        ProtectionError::Peers { ranks } => ("Peers", ranks),
        ProtectionError::Damaged(_) => ("Damaged", &[]),
        ProtectionError::File { .. } => ("File", &[]),
        _ => ("Other", &[]),
    };
    made(py, "ProtectionError", text, ranks, Some(kind))
}

/// The exception of an error.
pub(crate) fn raised(py: Python<'_>, error: &Error) -> PyErr {
    let text = error.to_string();
    let late = |detail: &Option<Box<FailureDetail>>| {
        detail.as_ref().map(|detail| detail.ranks.clone()).unwrap_or_default()
    };
    match error {
        Error::Refused { kind, .. } | Error::Detached { kind, .. } => {
            made(py, "AgentError", &text, &[], Some(&format!("{kind:?}")))
        }
        Error::Connect { .. }
        | Error::Environment { .. }
        | Error::Unauthenticated { .. }
        | Error::Secret { .. }
        | Error::NoRdma
        | Error::Protocol(_)
        | Error::AgentLost { .. } => made(py, "AgentError", &text, &[], None),
        Error::Forked => {
            let more = "make a Client in each process, after the fork; of multiprocessing use the start method spawn";
            made(py, "ForkedError", &format!("{text}; {more}"), &[], None)
        }
        Error::Join { concerned, .. } | Error::Regroup { concerned, .. } | Error::Split { concerned, .. } => {
            made(py, "JoinError", &text, concerned, None)
        }
        Error::Aborted { by } => made(py, "AbortedError", &text, by.as_slice(), Some("Aborted")),
        Error::Operation { status: code, detail, .. } => {
            let remedy = match code {
                Status::Overlap => "; give each memory of its own, or one tensor for both",
                _ => "",
            };
            let text = text + remedy;
            made(py, "OperationError", &text, &late(detail), Some(&format!("{code:?}")))
        }
        Error::Protection(why) => protection(py, why, &text),
        Error::WaitTimeout { .. } => made(py, "WaitTimeout", &text, &[], None),
        Error::TimeoutTooLong { longest, .. } => {
            let error = argument(py, &text);
            // A caller may ask again for as long as is allowed.
            let _ = error.value(py).setattr("longest", longest.as_secs_f64());
            error
        }
        Error::OutOfRange { .. }
        | Error::Dtype { .. }
        | Error::Reduction { .. }
        | Error::Shape(_)
        | Error::Memory(_)
        | Error::Region(_)
        | Error::Foreign
        | Error::InUse { .. }
        | Error::GroupOpen
        | Error::GroupEnded => argument(py, &text),
        _ => made(py, "Error", &text, &[], None),
    }
}
