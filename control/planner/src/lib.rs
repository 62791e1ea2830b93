//! What control decides from the provider's topology: which order a ring takes and which sizes its segments have. Pure:
//! text and values in, values out.
//!
//! Architecture invariant: no clock, socket, thread or file; a topology comes as text.
#![forbid(unsafe_code)]

mod order;
mod routes;
mod text;
mod topology;
mod tuning;
mod units;

pub use order::{order, ring_crossings};
pub use routes::Route;
pub use text::{Position, TextError, parse_toml};
pub use topology::{Host, HostId, Link, LinkId, Node, Switch, SwitchId, SwitchKind, Topology, TopologyError};
pub use tuning::{Tuning, tuning};
pub use units::{Bytes, Nanos, Rate, UnitError};
