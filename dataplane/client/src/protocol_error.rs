//! How an agent and this library did not understand each other.

use harmonaize_abi::session::MessageError;
use std::time::Duration;

/// How the agent broke the protocol, or that it is of another version.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// A message cannot be read or written; [`MessageError::Version`] where the agent is of another version.
    #[error("{0}{remedy}", remedy = remedy(.0))]
    Message(MessageError),
    /// The agent closed the connection before the attachment stood.
    #[error("the agent closed the connection during the handshake")]
    Closed,
    /// The agent was silent before the attachment stood.
    #[error("the agent did not answer the handshake in time")]
    Silent,
    /// No answer came to a request about memory.
    #[error("no answer from the agent within {0:?}")]
    NoAnswer(Duration),
    /// The answer belongs to another request.
    #[error("the agent answered {0} with something else")]
    Unexpected(RequestKind),
    /// The agent refused a proposal that nobody made.
    #[error("the agent refused what was not proposed")]
    NotProposed,
    /// The descriptors of an attachment did not all come, or more did.
    #[error("{came} descriptors came with the agent's welcome, not {needed}")]
    Descriptors {
        /// How many came.
        came: usize,
        /// How many the attachment has.
        needed: usize,
    },
    /// An operation ended with a status that this library does not know.
    #[error("completion with the unknown status {0}; the agent is newer than this library")]
    Status(u16),
    /// An operation is neither in flight nor ended.
    #[error("operation neither in flight nor ended")]
    NoResult,
    /// A rank asked to be in a communicator of a split, and got none.
    #[error("a split with a color gave no communicator")]
    NoCommunicator,
    /// A communicator's name has a NUL in it.
    #[error("the agent named a communicator with a NUL")]
    Name,
}

/// What the agent was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RequestKind {
    /// To join, regroup or split.
    Join,
    /// To take a budget.
    Budget,
    /// For events.
    Events,
    /// For more memory.
    Memory,
    /// To map memory of the process.
    Registration,
    /// To let such memory go.
    Unregistration,
    /// For a runner's order, or to take a bid.
    Runner,
    /// What to do in the next iteration.
    Iteration,
    /// To take hints.
    Hints,
    /// For an agreement.
    Proposal,
}

impl std::fmt::Display for RequestKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Join => "a join",
            Self::Budget => "a budget",
            Self::Events => "a question for events",
            Self::Memory => "a request for memory",
            Self::Registration => "a registration",
            Self::Unregistration => "the end of a registration",
            Self::Runner => "a runner",
            Self::Iteration => "an iteration",
            Self::Hints => "hints",
            Self::Proposal => "a proposal",
        })
    }
}

fn remedy(error: &MessageError) -> &'static str {
    match error {
        MessageError::Version(_) => "; install the client library that belongs to this agent",
        MessageError::Length(_) | MessageError::Magic | MessageError::Malformed => "",
    }
}
