//! NCCL's tuner and profiler plugins, of the interfaces' version 6, for tenants who keep stock NCCL.
//!
//! The profiler notes collectives in the process's journal, and takes the process's first communicator to the provider, which then
//! tells of its congestion. The tuner reckons with a level of congestion once the program has said so, at all ranks alike: ranks that
//! choose different algorithms for one collective hang, so no rank goes by what it hears by itself.
//!
//! Architecture invariant: no function waits for the agent, and no panic leaves one. NCCL is told of success whatever happens here. The
//! end of a communicator alone waits, until the process's own journal is written, for 2 s at most.
#![allow(non_camel_case_types, non_snake_case, non_upper_case_globals)] // NCCL's names
#![allow(clippy::not_unsafe_ptr_arg_deref)] // all callers are NCCL, whose headers say what pointers point to

pub mod agent;
pub mod profiler;
pub mod tuner;

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// NCCL's type of results.
pub type ncclResult_t = c_int;

/// NCCL's function that logs, which nothing here calls.
pub type ncclDebugLogger_t = Option<extern "C" fn()>;

/// Runs an entry. NCCL goes on as without a plugin, whatever happens in it.
fn entry(run: impl FnOnce()) -> ncclResult_t {
    let _ = catch_unwind(AssertUnwindSafe(run));
    0
}
