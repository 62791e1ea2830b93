//! Memory shared with tenants and handed to transports: mappings that never become Rust references, and the rings.

mod memory;

pub use memory::{Memory, MemoryError, Span};
