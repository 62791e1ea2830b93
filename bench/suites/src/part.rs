//! A suite made of parts, each of which may fail without the others.

use super::row::Row;
use anyhow::{Result, bail};

/// What came of a suite.
#[derive(Debug, Default)]
pub struct Outcome {
    /// A row for each bar that was measured.
    pub rows: Vec<Row>,
    /// Parts that failed; what they measured before is in the rows.
    pub problems: Vec<String>,
}

/// A part's name, and the part.
pub type Part<S> = (&'static str, fn(&S) -> Result<Vec<Row>>);

/// The parts' names.
pub fn names<S>(parts: &[Part<S>]) -> Vec<&'static str> {
    parts.iter().map(|(name, _)| *name).collect()
}

/// An error where a part is asked for that the suite does not have.
pub fn check_names(suite: &str, parts: &[&str], only: &[String]) -> Result<()> {
    let Some(unknown) = only.iter().find(|only| !parts.contains(&only.as_str())) else { return Ok(()) };
    if parts.is_empty() {
        bail!("the suite {suite} has no parts; leave --only out");
    }
    bail!("the suite {suite} has no part {unknown}; it has {}", parts.join(", "))
}

/// Runs the parts of those names, all where none is named.
pub fn run<S>(suite: &S, parts: &[Part<S>], only: &[String]) -> Outcome {
    let mut outcome = Outcome::default();
    for (name, part) in parts {
        if !only.is_empty() && !only.iter().any(|only| only == name) {
            continue;
        }
        match part(suite) {
            Ok(rows) => outcome.rows.extend(rows),
            Err(error) => {
                eprintln!("error: {name}: {error:#}");
                outcome.problems.push(format!("{name}: {error:#}"));
            }
        }
    }
    outcome
}
