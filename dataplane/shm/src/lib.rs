//! Memory shared with tenants and handed to transports. It is mappings that never become Rust references, the rings,
//! and both ends of an attachment.
//!
//! Invariant: what the other side of an attachment can write is copied once, checked, and then used; it never panics,
//! blocks or leads out of bounds.

mod breach;
mod doorbell;
mod end;
mod fork;
mod mapped;
mod memory;
mod passing;
mod regions;
mod remote;
mod ring;
mod segment;

pub use breach::Breach;
pub use end::{AgentEnd, EndError, InheritEnd, TenantEnd};
pub use fork::{DroppedByOwner, ForkGuard};
pub use mapped::{InheritedEnd, MappedEnd, MappedTenant};
pub use memory::{FileId, Lease, Memory, MemoryError, Pin, Span, check_range};
pub use passing::{receive_with_descriptors, send_with_descriptors};
pub use regions::Regions;
pub use remote::{REMOTE_DEPTH, RemoteEnd, RemoteTenant};
pub use ring::RingError;

/// Most entries that a ring may have.
pub const MAX_ENTRIES: u32 = 4096;
