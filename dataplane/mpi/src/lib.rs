//! `libharmonaize-mpi.so`: collectives of programs of MPI go by the provider, by MPI's profiling interface and `LD_PRELOAD`.
//!
//! A program's `MPI_...` finds this library first, which calls the MPI's own functions as `PMPI_...`. It is built without any MPI's
//! headers. Which ABI the program's MPI has is found when it starts: Open MPI's, or MPICH's, which Intel MPI shares.
//!
//! Architecture invariant: all ranks carry a call the same way, because only what MPI requires to be equal at all ranks decides, or what
//! they have agreed on by the MPI itself. Of a block that is a message, what its two ends have alike decides. No panic leaves an entry.
#![allow(non_snake_case)] // MPI's names
#![allow(clippy::not_unsafe_ptr_arg_deref)] // all callers are C's, to whom MPI's standard says what pointers point to

mod abi;
pub mod collectives;
mod communicator;
mod pmpi;
pub mod process;
mod reason;
pub mod request;
mod run;
mod task;
