//! Configurations of communicators and of calls. They tune NCCL's own kernels, so little of them matters here. What a caller would miss
//! is refused.

use crate::result::Failure;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::offset_of;

/// What NCCL's initializers mark a configuration with.
const MAGIC: c_uint = 0xcafe_beef;
/// A number that the caller has not set.
const UNSET: c_int = c_int::MIN;

/// What each configuration begins with. Newer releases have more fields at the end.
#[repr(C)]
struct Head {
    size: usize,
    magic: c_uint,
    _version: c_uint,
}

/// A communicator's configuration, as far as it matters.
#[repr(C)]
pub struct ncclConfig_t {
    _head: Head,
    blocking: c_int,
}

/// A collective's configuration, as far as it matters.
#[repr(C)]
pub struct ncclCollConfig_t {
    _head: Head,
    _extensions: *mut c_void,
    _blocks: [c_int; 4],
    /// Which of NCCL's algorithms may be used, and whether no other may.
    alg_selection: *const c_char,
    force_alg_selection: c_int,
    _policy: c_int,
    _profiler_tag: u64,
    /// Since release 2.32.
    launch_completion_event: *mut c_void,
}

/// The bytes of a configuration; 0 where there is none.
fn size(config: *const Head) -> Result<usize, Failure> {
    if config.is_null() {
        return Ok(0);
    }
    // SAFETY: the caller gives a configuration, which begins so.
    let Head { size, magic, .. } = unsafe { config.read() };
    match magic {
        MAGIC => Ok(size),
        _ => Err(Failure::argument("the configuration was not made with NCCL's initializer")),
    }
}

/// Checks a communicator's. Calls have formed it when they return, whether they may block or not.
pub(crate) fn check(config: *const ncclConfig_t) -> Result<(), Failure> {
    if size(config.cast())? < size_of::<ncclConfig_t>() {
        return Ok(());
    }
    // SAFETY: the configuration is as large as it says.
    match unsafe { (*config).blocking } {
        UNSET | 0 | 1 => Ok(()),
        other => Err(Failure::argument(format!("blocking is {other}; it must be 0 or 1"))),
    }
}

/// Checks a collective's.
pub(crate) fn check_collective(config: *const ncclCollConfig_t) -> Result<(), Failure> {
    let bytes = size(config.cast())?;
    if bytes >= offset_of!(ncclCollConfig_t, launch_completion_event) {
        // SAFETY: the configuration is as large as it says.
        let (selection, forced) = unsafe { ((*config).alg_selection, (*config).force_alg_selection) };
        check_selection(selection, forced != 0)?;
    }
    if bytes < size_of::<ncclCollConfig_t>() {
        return Ok(());
    }
    // SAFETY: the configuration is as large as it says.
    let event = unsafe { (*config).launch_completion_event };
    match event.is_null() {
        true => Ok(()),
        false => Err(Failure::usage("launchCompletionEvent: this library launches no kernels")),
    }
}

/// Checks a selection of algorithms. An empty one leaves the choice open, as none does.
fn check_selection(selection: *const c_char, forced: bool) -> Result<(), Failure> {
    if !forced || selection.is_null() {
        return Ok(());
    }
    // SAFETY: the caller gives a text that ends.
    let text = unsafe { CStr::from_ptr(selection) }.to_string_lossy();
    match text.is_empty() {
        true => Ok(()),
        false => Err(Failure::argument(format!(
            "algSelection \"{text}\": the provider chooses algorithms; set forceAlgSelection to 0 to let it"
        ))),
    }
}
