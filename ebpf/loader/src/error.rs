//! What can go wrong, and what is missing then.

use crate::kernel::Capability;
use aya::maps::MapError;
use aya::programs::ProgramError;
use std::io;

/// The most lines of the verifier's log that an error carries: the last ones, which say why.
const LOG_LINES: usize = 25;

/// Why telemetry cannot be had, or not read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The process lacks capabilities.
    #[error("telemetry needs {}, which this process does not have", names(.missing))]
    Privilege {
        /// Those that it lacks.
        missing: Vec<Capability>,
    },
    /// The process has the capabilities, and the kernel denies the call: a user namespace, a security module, lockdown.
    #[error("the kernel denies {call} although the capabilities are there")]
    Denied {
        /// What was denied.
        call: String,
    },
    /// The kernel lacks something.
    #[error("this kernel ({release}) has no {what}, which telemetry needs")]
    Kernel {
        /// The kernel's release.
        release: String,
        /// What it lacks.
        what: &'static str,
    },
    /// The verifier refused a program.
    #[error("the kernel's verifier refused the program {program} ({source}); the end of its log:\n{log}")]
    Refused {
        /// The program.
        program: String,
        /// The last lines of the log.
        log: String,
        /// What the call returned.
        source: io::Error,
    },
    /// The object is not one of this version.
    #[error("the object of the programs cannot be used: {reason}")]
    Object {
        /// Why.
        reason: String,
    },
    /// There is no such interface in this network namespace.
    #[error("there is no interface named {name} in this network namespace")]
    NoInterface {
        /// The name that was given.
        name: String,
    },
    /// The interface has the programs already.
    #[error("the programs are attached to {name} already")]
    Attached {
        /// Its name.
        name: String,
    },
    /// The interface does not have the programs.
    #[error("the programs are not attached to {name}")]
    NotAttached {
        /// The name that was given.
        name: String,
    },
    /// Too many interfaces whose indices lie close to one another, modulo the number of places.
    #[error("the interface with index {index} finds no place beside those that have the programs already")]
    NoSlot {
        /// Its index.
        index: u32,
    },
    /// The programs could not be attached.
    #[error("cannot attach the programs to {name}: {reason}")]
    Attach {
        /// The interface.
        name: String,
        /// What the kernel said.
        reason: String,
    },
    /// A call failed.
    #[error("{call} failed: {source}")]
    Call {
        /// The call, and on what.
        call: String,
        /// What it returned.
        source: io::Error,
    },
    /// A table could not be used.
    #[error("the map {map} cannot be used: {source}")]
    Map {
        /// Its name.
        map: &'static str,
        /// What was wrong.
        source: MapError,
    },
}

fn names(missing: &[Capability]) -> String {
    missing.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ")
}

impl Error {
    pub(crate) fn call(call: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Call { call: call.into(), source: source.into() }
    }

    pub(crate) fn object(reason: impl Into<String>) -> Self {
        Self::Object { reason: reason.into() }
    }

    /// Why a program could not be loaded.
    pub(crate) fn loading(program: &str, error: ProgramError) -> Self {
        match error {
            ProgramError::LoadError { io_error, verifier_log } => {
                let log = tail(&verifier_log.to_string());
                if log.is_empty() && io_error.kind() == io::ErrorKind::PermissionDenied {
                    return Self::Denied { call: format!("loading {program}") };
                }
                Self::Refused { program: program.to_owned(), log, source: io_error }
            }
            other => Self::object(format!("{program}: {}", chain(&other))),
        }
    }

    /// Why tables could not be made, or the object not be read.
    pub(crate) fn opening(error: aya::EbpfError) -> Self {
        match error {
            aya::EbpfError::MapError(MapError::CreateError { name, io_error }) => {
                let call = format!("making the table {name}");
                if io_error.kind() == io::ErrorKind::PermissionDenied {
                    return Self::Denied { call };
                }
                Self::call(call, io_error)
            }
            other => Self::object(chain(&other)),
        }
    }
}

/// An error with what it came from.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        let more = inner.to_string();
        if !text.ends_with(&more) {
            text = format!("{text}: {more}");
        }
        source = inner.source();
    }
    text
}

fn tail(log: &str) -> String {
    let lines: Vec<&str> = log.lines().filter(|line| !line.trim_matches(['\0', ' ']).is_empty()).collect();
    lines.get(lines.len().saturating_sub(LOG_LINES)..).unwrap_or_default().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_log_is_kept() {
        let log: String = (0..40).map(|line| format!("line {line}\n")).collect::<String>() + "\n\0\0";
        let kept = tail(&log);
        assert_eq!(kept.lines().count(), LOG_LINES);
        assert_eq!((kept.lines().next(), kept.lines().last()), (Some("line 15"), Some("line 39")));
        assert_eq!(tail(""), "");
    }

    #[test]
    fn what_is_missing_is_named() {
        let error = Error::Privilege { missing: vec![Capability::Bpf, Capability::NetAdmin] };
        assert_eq!(
            error.to_string(),
            "telemetry needs CAP_BPF and CAP_NET_ADMIN, which this process does not have"
        );
    }
}
