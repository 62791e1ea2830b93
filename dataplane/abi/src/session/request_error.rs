//! Questions that are not answered.

use super::Bounded;
use alloc::string::String;
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

impl Bounded for RequestError {
    fn bounded(self) -> Self {
        match self {
            Self::Refused(why) => Self::Refused(why.bounded()),
            Self::TooOften { .. } => self,
        }
    }
}
