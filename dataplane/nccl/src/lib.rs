//! The tenant's library with NCCL's ABI, of release 2.32: programs that call NCCL use the provider's collectives.
//!
//! On memory that CUDA knows a call returns at once, and its operation runs in its stream's order, as NCCL's do; how one failed,
//! `ncclCommGetAsyncError` says. On any other memory of the host's a call blocks until its operation has ended, or, in a group, the group's
//! end does.
//!
//! Architecture invariant: handles are numbers in a table and never addresses. What is behind a caller's pointer is read or
//! written in an unsafe block that says what the caller has promised. No panic leaves an entry.
#![allow(non_camel_case_types, non_snake_case, non_upper_case_globals)] // NCCL's names
#![allow(clippy::not_unsafe_ptr_arg_deref)] // all callers are C's, to whom NCCL's header says what pointers point to

pub mod collectives;
pub mod communicator;
pub mod config;
pub mod group;
pub mod memory;
mod registry;
pub mod result;
pub mod unsupported;
