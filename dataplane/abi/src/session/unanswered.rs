//! Questions that are not answered.

use super::Bounded;
use alloc::string::String;
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// Why a question to the provider is not answered.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Unanswered {
    /// Too many came from this tenant's processes here lately. It was not looked at.
    TooOften {
        /// After so long the next will be.
        again: Duration,
    },
    /// For people.
    Refused(String),
}

impl From<String> for Unanswered {
    fn from(why: String) -> Self {
        Self::Refused(why)
    }
}

impl From<&str> for Unanswered {
    fn from(why: &str) -> Self {
        Self::Refused(why.into())
    }
}

impl Bounded for Unanswered {
    fn bounded(self) -> Self {
        match self {
            Self::Refused(why) => Self::Refused(why.bounded()),
            Self::TooOften { .. } => self,
        }
    }
}
