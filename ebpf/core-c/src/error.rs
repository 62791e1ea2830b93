//! What can go wrong, and what is missing then.

use std::fmt;
use std::io;

/// Why none of the programs can be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The kernel does not describe its types, so that none of its structures can be read.
    #[error(
        "there is no type information of this kernel at {path}; a file of it for this kernel may be given instead"
    )]
    Types {
        /// Where it was looked for.
        path: String,
    },
    /// The kernel denies what is asked.
    #[error("the kernel denies loading programs that read its structures: {source}")]
    Denied {
        /// What the call returned.
        source: io::Error,
    },
    /// The programs could not be loaded.
    #[error(
        "the programs that read the kernel's structures cannot be loaded ({reason}); the end of the log:\n{log}"
    )]
    Refused {
        /// Why.
        reason: String,
        /// The last lines of what the library and the kernel's verifier said.
        log: String,
    },
    /// The object is not one of this version.
    #[error("the object of the programs that read the kernel's structures cannot be used: {reason}")]
    Object {
        /// Why.
        reason: String,
    },
}

/// What could not be had although the rest could.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    /// What is missing.
    pub what: &'static str,
    /// Why.
    pub why: String,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.why)
    }
}

impl Error {
    pub(crate) fn object(reason: impl Into<String>) -> Self {
        Self::Object { reason: reason.into() }
    }
}
