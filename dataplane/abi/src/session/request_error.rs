//! Questions that are not answered.

use super::Bounded;
use alloc::string::{String, ToString};
use core::fmt;
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// Why a question to the provider is not answered.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RequestError {
    /// Too many came from this tenant's processes here lately. It was not looked at.
    TooOften {
        /// After so long the next will be.
        retry_after: Duration,
    },
    /// For people.
    Refused(String),
}

impl From<String> for RequestError {
    fn from(why: String) -> Self {
        Self::Refused(why)
    }
}

impl From<&str> for RequestError {
    fn from(why: &str) -> Self {
        Self::Refused(why.into())
    }
}

/// As processes read it that do not know [`Answer::NoCommunicator`](super::Answer::NoCommunicator).
impl From<Refusal> for RequestError {
    fn from(why: Refusal) -> Self {
        match why {
            Refusal::NoCommunicator(text) | Refusal::Other(text) => Self::Refused(text),
        }
    }
}

impl Bounded for RequestError {
    fn bounded(self) -> Self {
        match self {
            Self::Refused(why) => Self::Refused(why.bounded()),
            Self::TooOften { .. } => self,
        }
    }
}

/// A bit of the id of [`Request::Negotiate`](super::Request::Negotiate), [`Request::Iteration`](super::Request::Iteration) and
/// [`Request::Hint`](super::Request::Hint): the process reads [`Answer::NoCommunicator`](super::Answer::NoCommunicator). An agent that
/// does not know it answers with [`RequestError::Refused`].
pub const TYPED_REFUSALS: u64 = 1 << 62;

/// Why an agent refuses a question itself. The process reads the text of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentRefusal {
    /// The agent has no session with control.
    Away,
    /// The same for a runner, or control allocates no hosts.
    NoJobs,
    /// A name that no job can have.
    JobName,
    /// A name that no communicator can have.
    CommunicatorName,
    /// A handle that this attachment has not joined.
    UnknownCommunicator,
    /// The process waits for events already.
    AwaitsEvents,
    /// It waits for the answer to a proposal.
    AwaitsTerms,
    /// It waits for a choice for its next iteration.
    AwaitsChoice,
    /// It waits for the answer to hints.
    AwaitsHints,
    /// It waits for an order to its worker.
    AwaitsOrder,
    /// It waits for the answer to another question of the kind.
    AwaitsAnswer,
}

impl fmt::Display for AgentRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Away => "the provider cannot be asked now; ask again later",
            Self::NoJobs => {
                "the provider cannot be asked now, or allocates no hosts to jobs; ask again later"
            }
            Self::JobName => "no job can have this name: 1 to 128 visible bytes, no `/` and no `#`",
            Self::CommunicatorName => "no communicator can have this name",
            Self::UnknownCommunicator => "no such communicator on this attachment",
            Self::AwaitsEvents => "this process waits for events already; one can at a time",
            Self::AwaitsTerms => "this process waits for an answer already; propose again after it",
            Self::AwaitsChoice => "this process waits for a choice already",
            Self::AwaitsHints => "this process waits for an answer to hints already",
            Self::AwaitsOrder => "this process waits for something to do already; one worker a process",
            Self::AwaitsAnswer => "this process waits for an answer already",
        })
    }
}

impl From<AgentRefusal> for RequestError {
    fn from(why: AgentRefusal) -> Self {
        Self::Refused(why.to_string())
    }
}

impl From<AgentRefusal> for Refusal {
    fn from(why: AgentRefusal) -> Self {
        Self::Other(why.to_string())
    }
}

/// Why the provider refuses a question, on its way to the process. Each has a text for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// No communicator of the tenant's that runs has the name.
    NoCommunicator(String),
    /// Anything else.
    Other(String),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoCommunicator(text) | Self::Other(text) => f.write_str(text),
        }
    }
}

impl From<String> for Refusal {
    fn from(text: String) -> Self {
        Self::Other(text)
    }
}

impl From<&str> for Refusal {
    fn from(text: &str) -> Self {
        Self::Other(text.into())
    }
}
