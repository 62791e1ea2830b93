//! Aggregation on the way: workers send their parts of a tensor once, and an aggregator sends each the sum.
//!
//! Pure state machines of both sides, of the [`Pool`] that tenants share, and of what the workers agree on when a session ends. The
//! protocol, and why no chunk is lost or counted twice, is in `docs/protocol.md`.
//!
//! Architecture invariant: no clock, socket, thread, file or async runtime; all time and all packets are arguments. Nothing is
//! allocated for a packet.
#![forbid(unsafe_code)]

mod aggregator;
mod agreement;
mod communicator;
mod losses;
pub mod packet;
mod pool;
mod rtt;
mod sum;
mod worker;

pub use aggregator::{Aggregator, Counters, Grant, GrantError, Outbox, Parent, Recipient, Unrecognized};
pub use agreement::{Agreement, Audience, Leader, Summation};
pub use packet::{Key, worker_key};
pub use pool::{Pool, PoolError, Share};
pub use sum::PayloadFormat;
pub use worker::{
    Codes, Event, MAX_WINDOWS_AHEAD, Reason, Task, Tensors, Worker, WorkerConfig, WorkerCounters,
};
