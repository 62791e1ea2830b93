//! Results, and the text of the last failure.

use crate::registry::ncclComm_t;
use harmonaize_client::{Error, Status};
use harmonaize_staging::cuda::CudaError;
use harmonaize_staging::stream;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// NCCL's result codes.
pub(crate) type ncclResult_t = c_int;

pub(crate) const ncclSuccess: ncclResult_t = 0;
pub(crate) const ncclUnhandledCudaError: ncclResult_t = 1;
pub(crate) const ncclSystemError: ncclResult_t = 2;
pub(crate) const ncclInternalError: ncclResult_t = 3;
pub(crate) const ncclInvalidArgument: ncclResult_t = 4;
pub(crate) const ncclInvalidUsage: ncclResult_t = 5;
pub(crate) const ncclRemoteError: ncclResult_t = 6;
pub(crate) const ncclInProgress: ncclResult_t = 7;
pub(crate) const ncclTimeout: ncclResult_t = 8;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Why an entry fails.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) result: ncclResult_t,
    text: String,
}

impl Failure {
    pub(crate) fn argument(text: impl Into<String>) -> Self {
        Self { result: ncclInvalidArgument, text: text.into() }
    }

    pub(crate) fn usage(text: impl Into<String>) -> Self {
        Self { result: ncclInvalidUsage, text: text.into() }
    }

    pub(crate) fn internal(text: impl Into<String>) -> Self {
        Self { result: ncclInternalError, text: text.into() }
    }

    /// Keeps the text as the last of this thread.
    fn keep(self) -> ncclResult_t {
        let Self { result, mut text } = self;
        text.retain(|letter| letter != '\0');
        // Not where the thread is ending and has none any more.
        let _ = LAST.try_with(|last| *last.borrow_mut() = CString::new(text).unwrap_or_default());
        result
    }
}

impl From<stream::Failure> for Failure {
    fn from(failure: stream::Failure) -> Self {
        let result = match &failure {
            stream::Failure::Client(error) => return Self::of(error),
            stream::Failure::Cuda(_) => ncclUnhandledCudaError,
            stream::Failure::Captured => ncclInvalidUsage,
        };
        Self { result, text: failure.to_string() }
    }
}

impl From<CudaError> for Failure {
    fn from(error: CudaError) -> Self {
        Self { result: ncclUnhandledCudaError, text: error.to_string() }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::of(&error)
    }
}

impl Failure {
    fn of(error: &Error) -> Self {
        let result = match error {
            Error::Operation { status, .. } => match status {
                Status::Timeout => ncclTimeout,
                Status::RankLost | Status::Destroyed | Status::Dissolved | Status::Aborted => ncclRemoteError,
                Status::Internal => ncclInternalError,
                _ => ncclInvalidUsage,
            },
            Error::Aborted { .. } | Error::AgentLost { .. } | Error::Detached { .. } => ncclRemoteError,
            Error::Join { .. } | Error::Split { .. } | Error::Regroup { .. } => ncclRemoteError,
            Error::Dtype { .. } | Error::Reduction { .. } | Error::Shape(_) => ncclInvalidArgument,
            Error::OutOfRange { .. } => ncclInvalidArgument,
            Error::Forked | Error::InUse { .. } | Error::Environment { .. } => ncclInvalidUsage,
            Error::Protocol(_) => ncclInternalError,
            _ => ncclSystemError,
        };
        Self { result, text: error.to_string() }
    }
}

/// Runs an entry, and answers as NCCL does.
pub(crate) fn entry(run: impl FnOnce() -> Result<(), Failure>) -> ncclResult_t {
    let ended = catch_unwind(AssertUnwindSafe(run));
    match ended.unwrap_or_else(|_| Err(Failure::internal("a panic of the library"))) {
        Ok(()) => ncclSuccess,
        Err(failure) => failure.keep(),
    }
}

/// Writes to where the caller wants it.
pub(crate) fn give<T>(value: T, to: *mut T, what: &str) -> Result<(), Failure> {
    if to.is_null() {
        return Err(Failure::argument(format!("{what} is NULL")));
    }
    // SAFETY: the caller gives a place for a value of this type.
    unsafe { to.write(value) };
    Ok(())
}

fn text(result: ncclResult_t) -> &'static CStr {
    match result {
        ncclSuccess => c"no error",
        ncclUnhandledCudaError => c"unhandled CUDA error",
        ncclSystemError => c"system error: ncclGetLastError says which",
        ncclInternalError => c"internal error: ncclGetLastError says which",
        ncclInvalidArgument => c"invalid argument: ncclGetLastError says which",
        ncclInvalidUsage => c"invalid usage: ncclGetLastError says how",
        ncclRemoteError => c"remote error: a rank or the service failed, or somebody aborted",
        ncclInProgress => c"in progress",
        ncclTimeout => c"ranks did not call in time",
        _ => c"no result of this version",
    }
}

/// A short text of a result; never NULL.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(result: ncclResult_t) -> *const c_char {
    text(result).as_ptr()
}

/// The last failure of the calling thread, whatever the communicator; never NULL, and empty where no call of it has failed. Valid
/// until the thread's next call that fails, or its end.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(_comm: ncclComm_t) -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}
