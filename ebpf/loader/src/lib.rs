//! Loads the telemetry programs into the kernel, attaches them to interfaces, and reads what they counted and told.
//!
//! A [`Collector`] is what telemetry is read from. [`Programs`] is the real one: one loaded pair of programs with their tables.
//! It pins nothing: when it is dropped, or its process ends, programs, tables and (with tcx) their places on the interfaces
//! are gone. [`fake::Fake`] stands in for it in tests. The programs come as a committed object, so no BPF tool chain is needed to
//! build this crate; `cargo xtask ebpf build` makes the object from its source.

mod attachment;
mod clock;
mod collector;
mod dcqcn;
mod diagnosis;
mod endpoints;
mod error;
pub mod fake;
mod interfaces;
mod kernel;
mod netlink;
mod programs;
mod queue_pair_counters;
mod rdma;
mod read;
mod sys;
mod trial;

pub use attachment::{AttachMode, Change};
pub use clock::Offset;
pub use collector::{AttachedInterface, Collector};
pub use dcqcn::{Dcqcn, read_dcqcn};
pub use endpoints::{Endpoints, QueuePairs};
pub use error::Error;
pub use harmonaize_core_c::{Options as EndpointOptions, own_namespace};
pub use interfaces::{interface_with, interfaces_up};
pub use kernel::{Capability, Kernel};
pub use programs::{Cost, Options, ProgramCost, Programs};
pub use queue_pair_counters::{NotCounted, QueuePairCounter, QueuePairCounters, read_queue_pair_counters};
pub use rdma::{PortCounter, PortCounters, RdmaPort, read_rdma_ports};
pub use read::{Counters, Flows};
pub use trial::Trial;

/// The programs, built from `ebpf/programs`.
pub const OBJECT: &[u8] = aya::include_bytes_aligned!("../../objects/telemetry.o");
/// The same, built to tell rare things with their reasons.
pub const DIAGNOSIS: &[u8] = aya::include_bytes_aligned!("../../objects/diagnosis.o");
