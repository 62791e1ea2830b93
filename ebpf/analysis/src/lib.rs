//! What the telemetry's records mean: which flows make up a job, when it communicates, which rank is late.
//!
//! Pure: no clock, socket, thread or file. Everything here consumes [`trace::Record`]s with `take`, is told of the time with
//! `advance`, and yields typed findings, so an analysis that runs beside the programs and one of a recorded trace are the
//! same code. Points in time are [`Nanos`] of CLOCK_MONOTONIC of the host that observed, sizes are bytes.
#![forbid(unsafe_code)]

pub mod congestion;
pub mod marks;
pub mod phases;
pub mod straggler;
pub mod trace;

pub use harmonaize_abi::{CommunicatorId, Epoch, Nanos};

/// The nanoseconds of a duration; the most there are for a longer one.
fn nanos(span: std::time::Duration) -> u64 {
    Nanos::from(span).0
}
