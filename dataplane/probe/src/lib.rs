//! Which way packets take to another agent, and how much of that way is free.
//!
//! A [`Tracer`] sends packets of a connection's addresses and ports that die on the way and hears where: so is told which of several
//! equal paths the fabric's hash gives to the connection. A [`Prober`] finds a way over given switches by the same means,
//! and sends trains of packets back to back over it; the [`Answerer`] at the other agent measures how far apart they come.
//!
//! None of it disturbs: a packet that is to die has a wrong checksum and neither SYN nor ACK, so that no host takes it for
//! anything should it arrive; nothing is sent to, or believed from, whoever was not asked. Trains and
//! their answers bear a tag by a key that control gives both ends. IPv4 alone.

mod answer;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod packet;
mod probe;
mod sys;
mod trace;
mod tracer;
mod train;

pub use answer::Answerer;
pub use packet::Protocol;
pub use probe::{ProbeError, ProbeResult, Prober, TrainConfig};
pub use trace::{Question, Trace, TracedRoute};
pub use tracer::Tracer;
pub use train::TrainKey;

/// Most connections that are traced in one go.
pub const MAX_PAIRS: usize = 64;
/// Most switches on a way.
pub const MAX_HOPS: u8 = 16;
/// Most bytes of a train.
pub const MAX_TRAIN: u32 = 1 << 20;
/// Most trains in one go.
pub const MAX_TRAINS: u32 = 4;
