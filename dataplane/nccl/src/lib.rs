//! The tenant's library with NCCL's ABI, of release 2.32: programs that call NCCL on host memory use the provider's collectives.
//!
//! A call blocks until its operation has ended, or, in a group, the group's end does. So streams mean nothing here, and are not
//! looked at. Memory of a device is refused.
//!
//! Architecture invariant: handles are numbers in a table and never addresses. What is behind a caller's pointer is read or
//! written in an unsafe block that says what the caller has promised. No panic leaves an entry.
#![allow(non_camel_case_types, non_snake_case, non_upper_case_globals)] // NCCL's names
#![allow(clippy::not_unsafe_ptr_arg_deref)] // all callers are C's, to whom NCCL's header says what pointers point to

pub mod collectives;
pub mod communicator;
mod device;
pub mod group;
pub mod memory;
mod registry;
pub mod result;
pub mod unsupported;
