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
mod action;
mod admission;
mod aggregation;
mod channel;
mod communicator;
mod counts;
mod departures;
mod epoch;
mod epoch_set;
mod error;
mod failure;
mod inquiries;
mod message;
mod operation;
mod p2p;
mod report;
mod scheduler;
mod shared;
mod stream;
mod switch;

pub use action::{Action, CodingReport, P2pReceipt, PeerMessage, Receipt};
pub use admission::Interleaving;
pub use aggregation::{Aggregation, AggregationReport, AggregationState};
pub use channel::{Resume, Segment};
pub use communicator::{Communicator, Config};
pub use epoch::EpochPlan;
pub use error::{BadPlan, CoreError};
pub use failure::Failure;
pub use harmonaize_abi::{
    ChannelId, Epoch, Nanos, OperationId, SegmentId, SegmentIndex, SlotId, StepId, Token,
};
pub use message::{Control, Header, Kind, MAX_MESSAGE, Message, PROTOCOL_VERSION, Payload};
pub use operation::Call;
pub use p2p::{P2pCall, p2p_staging_bytes};
pub use report::{InFlight, MessageInFlight};
