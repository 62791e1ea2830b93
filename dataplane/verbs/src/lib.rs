//! RDMA verbs as safe types: devices, protection domains, registered memory, completion queues and queue pairs.
//!
//! What the type system keeps right: a queue pair sends only once connected; memory behind a work request lives, and stays
//! registered, until its completion was settled or the queue pair is gone; completions come from a completion queue alone.
//! Under the types stands one trait of raw calls with two implementations: libibverbs, in `harmonaize-libibverbs`, and
//! (feature `fake`) a fabric inside the process that moves the bytes itself and breaks on demand.
#![forbid(unsafe_code)]

mod address;
pub mod attachment;
pub mod calls;
mod completion;
mod datagram;
mod device;
mod error;
#[cfg(feature = "fake")]
pub mod fake;
mod function;
mod queue_pair;
mod region;
mod work;

pub use address::{Gid, GidEntry, GidKind, Mtu, flow_label, source_port_on_wire, udp_source_port};
pub use completion::{Completion, CompletionQueue, Opcode, Status};
pub use datagram::{AddressHandle, Datagram, Delivered, GRH_BYTES, Received};
pub use device::{AsyncEvent, Device, Devices, Limits, LinkLayer, Port, PortRef, PortState};
pub use error::{Call, VerbsError};
pub use function::{Function, PortOptions};
pub use queue_pair::{Connected, Depths, Endpoint, Path, QueuePair, Unconnected};
pub use region::{Access, Domain, Local, Region, Registrations};
pub use work::{RemoteAddress, Work};
