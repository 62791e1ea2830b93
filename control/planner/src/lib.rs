//! What control decides from the provider's topology and from what is measured on it: which way rings go, which paths their
//! connections take, who has which share, who waits for whom, and which sizes segments have. Pure: values in, values out.
//!
//! Architecture invariant: no clock, socket, thread or file; a topology comes as text, time as a number.
#![forbid(unsafe_code)]

mod aggregation;
mod conditions;
mod direct;
mod estimates;
mod exchange;
mod groups;
mod hose;
mod order;
mod path;
mod plan;
mod rhythm;
mod stagger;
mod text;
mod topology;
mod tuning;
mod units;

pub use aggregation::{Aggregated, Aggregation, Leaf, Offer, aggregation};
pub use conditions::{Conditions, Drains, Use};
pub use direct::{Direct, Reach, delays, farthest};
pub use estimates::{Cause, Connection, Estimate, Estimates, Level, Probe, Verdict};
pub use exchange::{exchange_rate, exchange_usage, line_rate};
pub use groups::{Groups, GroupsError};
pub use hose::{Hose, Promised, Room};
pub use order::{order, ring_crossings};
pub use path::{DirectedLink, MOST_PATHS, Path, TraceError, Ways};
pub use plan::{
    Assignment, CheckError, Current, GIVES_WAY, Hop, Job, Plan, Policy, Request, Routes, Score, Task, check,
    other_paths, plan, prefer,
};
pub use rhythm::{Operation, Rhythm};
pub use stagger::{Hold, Turn, alone, stagger, turns};
pub use text::{Position, TextError, parse_toml};
pub use topology::{
    Aggregator, AggregatorId, Host, HostId, Link, LinkId, Node, Switch, SwitchId, SwitchKind, Topology,
    TopologyError,
};
pub use tuning::{Tuning, tuning};
pub use units::{Bytes, Nanos, Rate, UnitError};
