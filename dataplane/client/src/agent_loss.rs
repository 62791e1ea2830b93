//! How an agent was seen to be lost.

use harmonaize_abi::session::MessageError;
use harmonaize_shm::EndError;
use rustix::io::Errno;
use std::sync::Arc;

/// How an agent was seen to be lost.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AgentLoss {
    /// It closed the connection.
    #[error("it closed the connection")]
    Closed,
    /// It sent a message that cannot be read.
    #[error("it sent nonsense ({0})")]
    Nonsense(MessageError),
    /// A request cannot be written as a message.
    #[error("a request cannot be sent to it: {0}")]
    Request(MessageError),
    /// The kernel refused a call on the connection.
    #[error("{call}: {source}")]
    System {
        /// Which call.
        call: &'static str,
        /// What it said.
        source: Errno,
    },
    /// The attachment's queues or memory cannot be used any more.
    #[error("{0}")]
    Attachment(Arc<EndError>),
    /// It handed over to another agent, which cannot be used.
    #[error("its successor cannot be used: {0}")]
    Successor(Arc<EndError>),
    /// Nobody holds the client any more.
    #[error("this process has detached")]
    Detached,
}
