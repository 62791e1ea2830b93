//! What all programs have alike. That is their version with its build, their manual, a daemon's log, what it reports to
//! systemd, and how commands reach other hosts.
#![forbid(unsafe_code)]

mod log;
mod manual;
pub mod remote;
mod service;

pub use log::{LogArguments, has_colours};
pub use service::{Watchdog, ready, stopping, succeeded_by};

use clap::Parser;
use std::pin::Pin;
use std::sync::LazyLock;

/// A future behind a pointer: its code is compiled with the crate that makes it. Otherwise each program and each test that waits for it
/// compiles all of it anew.
pub type Compiled<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The option, of all programs, that writes their manual. It must come first.
const MANUAL: &str = "--manual";

/// Version and build, such as `0.1.0+g1a2b3c4d5e6f`; without a build where the compiler was given none.
///
/// The build is the compiler's variable `HARMONAIZE_BUILD`. `cargo xtask package` sets it. No other build does, so that a commit
/// makes nothing to be built anew.
pub fn version() -> &'static str {
    static VERSION: LazyLock<String> =
        LazyLock::new(|| versioned(env!("CARGO_PKG_VERSION"), option_env!("HARMONAIZE_BUILD")));
    &VERSION
}

fn versioned(version: &str, build: Option<&str>) -> String {
    match build.filter(|build| !build.is_empty()) {
        Some(build) => format!("{version}+{build}"),
        None => version.to_owned(),
    }
}

/// The program's arguments, whose `--version` has the build. An error, or what the arguments ask to be printed, ends the process.
///
/// `--manual FOLDER` writes man pages and completions of bash, zsh and fish there instead, and ends the process.
pub fn parse<P: Parser>() -> P {
    let command = P::command().version(version());
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_some_and(|first| first == MANUAL) {
        let written = match arguments.next() {
            Some(folder) => manual::write(command, folder.as_ref()),
            None => Err(std::io::Error::other("--manual takes a folder")),
        };
        match written {
            Ok(()) => std::process::exit(0),
            Err(error) => {
                eprintln!("cannot write the manual: {error}");
                std::process::exit(1)
            }
        };
    }
    P::from_arg_matches(&command.get_matches()).unwrap_or_else(|error| error.exit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_has_its_build() {
        assert_eq!(versioned("0.1.0", Some("g1a2b")), "0.1.0+g1a2b");
        for none in [None, Some("")] {
            assert_eq!(versioned("0.1.0", none), "0.1.0");
        }
        assert!(version().starts_with(env!("CARGO_PKG_VERSION")));
    }
}
