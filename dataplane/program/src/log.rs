//! A daemon's log on standard error: what is logged, and how a line looks.

use std::ffi::OsStr;
use std::io::{Error, ErrorKind, IsTerminal, Result};
use tracing_subscriber::EnvFilter;

/// What a daemon's arguments ask of its log.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct LogArguments {
    /// What to log, such as `debug` or `harmonaize_server=debug`; the environment's RUST_LOG otherwise.
    #[arg(long, value_name = "FILTER")]
    log: Option<String>,
    /// Log as JSON, one object a line.
    #[arg(long)]
    log_json: bool,
}

impl LogArguments {
    /// Starts the log of this process. It has colours on a terminal alone, and there where `NO_COLOR` is empty.
    ///
    /// # Errors
    /// If the filter of the arguments is none, or the process has a log already.
    pub fn start(&self) -> Result<()> {
        let filter = match &self.log {
            Some(filter) => EnvFilter::try_new(filter).map_err(|error| wrong(filter, &error))?,
            None => EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info")),
        };
        let colours = has_colours(std::io::stderr().is_terminal(), std::env::var_os("NO_COLOR").as_deref());
        // A line that cannot be written is lost. To say so on standard error would panic.
        let log = tracing_subscriber::fmt().log_internal_errors(false).with_env_filter(filter);
        let log = log.with_ansi(colours).with_writer(std::io::stderr);
        let started = if self.log_json { log.json().try_init() } else { log.with_target(false).try_init() };
        started.map_err(Error::other)
    }
}

/// An error that names the filter as it was given.
fn wrong(filter: &str, error: &dyn std::fmt::Display) -> Error {
    Error::new(ErrorKind::InvalidInput, format!("--log {filter}: {error}"))
}

/// Whether text has colours, by whether it goes to a terminal and by the variable `NO_COLOR`.
pub fn has_colours(terminal: bool, no_color: Option<&OsStr>) -> bool {
    terminal && no_color.is_none_or(OsStr::is_empty)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_are_for_terminals_that_want_them() {
        let set = |text: &'static str| Some(OsStr::new(text));
        assert!(has_colours(true, None) && has_colours(true, set("")));
        assert!(!has_colours(true, set("1")));
        assert!(!has_colours(false, None) && !has_colours(false, set("")));
    }

    #[test]
    fn a_wrong_filter_is_named() {
        let arguments = LogArguments { log: Some("harmonaize=loudly".to_owned()), ..LogArguments::default() };
        let error = arguments.start().unwrap_err().to_string();
        assert!(error.starts_with("--log harmonaize=loudly: "), "{error}");
    }
}
