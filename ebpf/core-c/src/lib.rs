//! Loads the programs that read the kernel's own structures: TCP's sockets, and the life of RDMA's queue pairs.
//!
//! They are C, because only its compiler notes which field of which structure is read, so that libbpf finds it in whatever
//! kernel they are loaded into (CO-RE). They come as committed objects, so no compiler of C for the kernel's machine is needed to
//! build this crate; `cargo xtask ebpf build` makes them from `programs/`. libbpf is built along, from its crate, and needs libelf
//! and zlib. Nothing is pinned: when a [`Tracing`] is dropped or its process ends, its programs and tables are gone.

mod error;
mod print;
mod tracing;

pub use error::{Error, Missing};
pub use tracing::{Options, TracepointMode, Tracing, own_namespace};

/// The programs for this machine: where a call's arguments are depends on its architecture.
#[cfg(target_arch = "aarch64")]
pub const OBJECT: &[u8] = include_bytes!("../../objects/endpoints-aarch64.o");
/// The programs for this machine: where a call's arguments are depends on its architecture.
#[cfg(not(target_arch = "aarch64"))]
pub const OBJECT: &[u8] = include_bytes!("../../objects/endpoints-x86_64.o");
