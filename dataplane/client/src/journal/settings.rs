//! What the variables ask for.

use crate::{Error, Place};
use std::path::PathBuf;

/// The variable that asks for a log.
const DEBUG: &str = "HARMONAIZE_DEBUG";
/// The variable with the file of metrics.
const METRICS: &str = "HARMONAIZE_METRICS";
/// The variable with the file of operations.
const OPERATIONS: &str = "HARMONAIZE_OPERATIONS";

/// How much the process logs of its own operations on standard error: `HARMONAIZE_DEBUG`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DebugLevel {
    /// Joins, failures with the ranks that are late or lost, operations that take long, and a sum every 10 s.
    Info,
    /// Each operation as well.
    Trace,
}

impl DebugLevel {
    /// What the environment asks for, if anything.
    ///
    /// # Errors
    /// [`Error::Environment`] where the value is none of `info` and `trace`.
    pub fn from_env() -> Result<Option<Self>, Error> {
        Self::from_variables(&crate::environment::variable)
    }

    fn from_variables(value: &impl Fn(&str) -> Option<String>) -> Result<Option<Self>, Error> {
        match value(DEBUG) {
            None => Ok(None),
            Some(text) if text.eq_ignore_ascii_case("info") => Ok(Some(Self::Info)),
            Some(text) if text.eq_ignore_ascii_case("trace") => Ok(Some(Self::Trace)),
            Some(text) => Err(Error::environment(DEBUG, format!("{DEBUG}={text} is none of info and trace"))),
        }
    }
}

/// What the variables ask for.
#[derive(Debug, Default)]
pub(super) struct Settings {
    pub(super) debug: Option<DebugLevel>,
    pub(super) metrics: Option<PathBuf>,
    pub(super) operations: Option<PathBuf>,
    /// Of the process, as its launcher says.
    pub(super) rank: Option<u32>,
}

impl Settings {
    pub(super) fn from_variables(value: impl Fn(&str) -> Option<String>) -> Result<Self, Error> {
        let debug = DebugLevel::from_variables(&value)?;
        let (metrics, operations) = (value(METRICS), value(OPERATIONS));
        if metrics.is_none() && operations.is_none() {
            return Ok(Self { debug, ..Self::default() });
        }
        let place = Place::from_variables(&value);
        let rank = place.as_ref().ok().map(|place| place.rank.0);
        let file = |variable, pattern: Option<String>| {
            pattern.map(|pattern| expand(variable, &pattern, rank)).transpose()
        };
        let (metrics_file, operations) = (file(METRICS, metrics.clone())?, file(OPERATIONS, operations)?);
        if let (Some(pattern), Ok(place)) = (&metrics, &place)
            && place.ranks > 1
            && !pattern.contains("%r")
            && !pattern.contains("%p")
        {
            let text = format!(
                "{METRICS}={pattern} is one file of {} ranks, each of which would write it: put %r, the rank, into its name",
                place.ranks
            );
            return Err(Error::environment(METRICS, text));
        }
        Ok(Self { debug, metrics: metrics_file, operations, rank })
    }

    /// Whether nothing is asked for.
    pub(super) fn is_empty(&self) -> bool {
        self.debug.is_none() && self.metrics.is_none() && self.operations.is_none()
    }
}

/// Puts rank (`%r`), process (`%p`) and host (`%h`) into a file's name.
fn expand(variable: &'static str, pattern: &str, rank: Option<u32>) -> Result<PathBuf, Error> {
    let mut path = String::new();
    let mut letters = pattern.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            path.push(letter);
            continue;
        }
        match letters.next() {
            Some('%') => path.push('%'),
            Some('p') => path += &std::process::id().to_string(),
            Some('h') => {
                let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
                path += host.trim_end();
            }
            Some('r') => match rank {
                Some(rank) => path += &rank.to_string(),
                None => {
                    let text = format!(
                        "{variable}={pattern} has %r, and no launcher has set a rank: set RANK and WORLD_SIZE, or take %p, the \
                         process's number"
                    );
                    return Err(Error::environment(variable, text));
                }
            },
            other => {
                let other = other.map(String::from).unwrap_or_default();
                let text = format!(
                    "{variable}={pattern} has %{other}: there are %r (rank), %p (process), %h (host) and %%"
                );
                return Err(Error::environment(variable, text));
            }
        }
    }
    Ok(PathBuf::from(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(variables: &[(&str, &str)]) -> Result<Settings, Error> {
        Settings::from_variables(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn nothing_set_is_nothing_asked_for() {
        assert!(settings(&[]).unwrap().is_empty());
        assert!(settings(&[("RANK", "0"), ("WORLD_SIZE", "2")]).unwrap().is_empty());
        assert_eq!(settings(&[(DEBUG, "info")]).unwrap().debug, Some(DebugLevel::Info));
        assert_eq!(settings(&[(DEBUG, "TRACE")]).unwrap().debug, Some(DebugLevel::Trace));
    }

    #[test]
    fn names_of_files_have_rank_and_process() {
        let (rank, ranks) = (("RANK", "3"), ("WORLD_SIZE", "4"));
        let found = settings(&[rank, ranks, (METRICS, "/m/%r.prom"), (OPERATIONS, "o%%%p.jsonl")]).unwrap();
        assert_eq!(found.metrics.unwrap(), PathBuf::from("/m/3.prom"));
        assert_eq!(found.operations.unwrap(), PathBuf::from(format!("o%{}.jsonl", std::process::id())));
    }

    #[test]
    fn bad_values_name_their_variable() {
        let (rank, ranks) = (("RANK", "0"), ("WORLD_SIZE", "4"));
        for (variables, names) in [
            (&[(DEBUG, "loud")][..], DEBUG),
            (&[(OPERATIONS, "%r.jsonl")], OPERATIONS),
            (&[(OPERATIONS, "%x")], OPERATIONS),
            (&[(METRICS, "a%")], METRICS),
            (&[(METRICS, "one.prom"), rank, ranks], METRICS),
        ] {
            match settings(variables) {
                Err(Error::Environment { variable, text }) => {
                    assert_eq!(variable, names);
                    assert!(text.contains(names), "{text}");
                }
                other => panic!("{variables:?}: {other:?}"),
            }
        }
    }
}
