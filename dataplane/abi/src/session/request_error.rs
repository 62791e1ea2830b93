//! Questions that are not answered.

use super::Bounded;
use alloc::string::String;
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
