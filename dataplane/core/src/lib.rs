//! A communicator at one participant, as a state machine without socket, clock or thread.
//!
//! Calls of local ranks, messages of peers and the passing of time go in; steps to execute, messages to send and
//! completions come out of [`Communicator::poll`]. The caller (the engine, or a simulator) executes each action before
//! the next call: memory operands first, then the sends in order. This room touches no byte of a tensor.
//!
//! Operations are cut into segments, numbered per communicator; channels run segments side by side, each one segment's
//! program after another. Acknowledgements flow up and down a tree; until every participant has acknowledged a segment its
//! inputs survive (see [`harmonaize_plan::Retention`]). A new plan takes over at a segment that all agree on.
//!
//! Architecture invariant: no clock, socket, thread, file or async runtime; all time and all messages are arguments.
#![forbid(unsafe_code)]

mod ack_tree;
mod aggregation;
mod channel;
mod communicator;
mod departure;
mod epoch;
mod execute;
mod failure;
mod inquiry;
mod interleave;
mod message;
mod operation;
mod post;
mod report;
mod stream;
mod switch;

pub use aggregation::{Aggregation, AggregationReport};
pub use channel::{Resume, Segment};
pub use communicator::{Action, CodingReport, Communicator, Config, PeerMessage, Receipt};
pub use epoch::{EpochPlan, Timeouts};
pub use failure::Failure;
pub use interleave::Interleaving;
pub use message::{Control, Header, Kind, MAX_MESSAGE, Message, PROTOCOL_VERSION, Payload};
pub use operation::Call;
pub use report::InFlight;

/// Nanoseconds since some instant that the caller chose once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanos(pub u64);

impl Nanos {
    /// This much later.
    pub const fn after(self, span: Nanos) -> Nanos {
        Nanos(self.0.saturating_add(span.0))
    }
}

/// Why a request to the communicator was not taken. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CoreError {
    /// The plan cannot be run.
    #[error("plan refused: {0}")]
    BadPlan(&'static str),
    /// The plan has no program for this operation.
    #[error("plan: {0}")]
    Plan(#[from] harmonaize_plan::PlanError),
    /// Too many operations in flight.
    #[error("too many operations in flight")]
    Full,
    /// The rank is not one of this participant's.
    #[error("rank {0} is not local")]
    NotLocal(harmonaize_abi::Rank),
    /// The communicator has ended.
    #[error("the communicator has ended: {0}")]
    Ended(Failure),
}
