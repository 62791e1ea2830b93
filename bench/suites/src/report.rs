//! What a run of a suite hands out: its rows, and where they come from.

use crate::row::{Row, table};
use anyhow::Result;
use harmonaize_testkit::workspace;
use serde::{Deserialize, Serialize};
use std::process::Command;
use std::time::SystemTime;

/// Where rows come from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Provenance {
    /// The command line.
    pub command: String,
    /// The day, in UTC, as 2026-11-24.
    pub date: String,
    /// The commit of the tree, with `+changes` where files differ from it.
    pub commit: String,
    /// Processor, cores, memory, kernel and TCP congestion control.
    pub machine: String,
    /// The profile of the measured programs.
    pub profile: String,
    /// Interleaved runs of each contestant: the fewest and the most of any row.
    pub runs: [usize; 2],
}

/// Rows with where they come from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Where the rows come from.
    pub provenance: Provenance,
    /// A row for each bar, and for each figure that is only stated.
    pub rows: Vec<Row>,
}

impl Provenance {
    /// Of this process, this tree and this machine.
    pub fn here(rows: &[Row]) -> Self {
        let words: Vec<String> = std::env::args().skip(1).collect();
        let date = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
        let measured = || rows.iter().map(|row| row.runs).filter(|runs| *runs > 0);
        Self {
            command: format!("cargo xtask {}", words.join(" ")),
            date: date.split('T').next().unwrap_or_default().to_owned(),
            commit: commit().unwrap_or_else(|_| "unknown".to_owned()),
            machine: machine(),
            profile: profile(),
            runs: [measured().min().unwrap_or(0), measured().max().unwrap_or(0)],
        }
    }

    /// Names with what they stand for.
    pub(crate) fn facts(&self) -> [(&'static str, String); 6] {
        let Self { command, date, commit, machine, profile, runs: [fewest, most] } = self;
        let runs = if fewest == most { fewest.to_string() } else { format!("{fewest} to {most}") };
        [
            ("command", format!("`{command}`")),
            ("date", date.clone()),
            ("commit", format!("`{commit}`")),
            ("machine", machine.clone()),
            ("profile", profile.clone()),
            ("runs", runs),
        ]
    }

    fn lines(&self) -> String {
        self.facts().iter().map(|(name, what)| format!("- {name}: {what}\n")).collect()
    }
}

impl Report {
    /// The rows that this process measured.
    pub fn new(rows: Vec<Row>) -> Self {
        Self { provenance: Provenance::here(&rows), rows }
    }

    /// Provenance, then a table.
    pub fn markdown(&self) -> String {
        format!("{}\n{}", self.provenance.lines(), table(&self.rows))
    }

    /// How many rows do not reach their bar, of those that have one.
    pub fn judged(&self) -> (usize, usize) {
        let judged = self.rows.iter().filter(|row| row.pass.is_some());
        (self.rows.iter().filter(|row| row.failed()).count(), judged.count())
    }
}

/// What git prints, in the tree's root.
///
/// # Errors
/// Where git is not there, or fails.
pub fn git(arguments: &[&str]) -> Result<String> {
    let mut git = Command::new("git");
    Ok(harmonaize_testkit::job::printed(git.current_dir(workspace::root()).args(arguments))?
        .trim()
        .to_owned())
}

fn commit() -> Result<String> {
    let changed = !git(&["status", "--porcelain", "--untracked-files=no"])?.is_empty();
    Ok(git(&["rev-parse", "--short", "HEAD"])? + if changed { "+changes" } else { "" })
}

/// `cargo xtask bench` builds the release profile, unless programs are given.
fn profile() -> String {
    match std::env::var("HARMONAIZE_BINARIES") {
        Ok(folder) => format!("as built in HARMONAIZE_BINARIES={folder}"),
        Err(_) => "release".to_owned(),
    }
}

fn machine() -> String {
    let first = |path: &str, key: &str| {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let line = text.lines().find(|line| line.starts_with(key)).unwrap_or_default();
        line.split_once(':').map_or(line, |(_, value)| value).trim().to_owned()
    };
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    format!(
        "{}, {cores} cores, {} of memory, kernel {}, TCP congestion control {}",
        first("/proc/cpuinfo", "model name"),
        first("/proc/meminfo", "MemTotal"),
        first("/proc/sys/kernel/osrelease", ""),
        first("/proc/sys/net/ipv4/tcp_congestion_control", "")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::Case;

    #[test]
    fn a_report_says_where_its_rows_come_from() {
        let case = Case::more("s", "c", 1.0);
        let rows = vec![
            case.compare(&[1.0; 5], &[2.0; 5], "r"),
            case.compare(&[2.0; 7], &[1.0; 7], "r"),
            case.clone().stated().compare(&[1.0; 6], &[9.0; 6], "r"),
            case.missing("r", "gone"),
        ];
        let report = Report::new(rows);
        assert_eq!(report.judged(), (2, 3), "a stated row is not judged");
        assert_eq!(report.provenance.runs, [5, 7]);
        let text = report.markdown();
        for line in [
            "- command: `cargo xtask ",
            "- date: 20",
            "- commit: `",
            "- machine: ",
            "- profile: ",
            "- runs: 5 to 7",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
        let json = serde_json::to_string(&report).unwrap();
        assert!(json.starts_with("{\"provenance\":"));
        assert_eq!(serde_json::from_str::<Report>(&json).unwrap().provenance, report.provenance);
    }
}
