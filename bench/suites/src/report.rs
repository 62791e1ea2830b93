//! What a run of a suite hands out: its rows, and where they come from.

use crate::row::{Row, figure, figures};
use anyhow::Result;
use harmonaize_testkit::workspace;
use serde::{Deserialize, Serialize};
use std::process::Command;
use std::time::SystemTime;

/// The columns of the pages of results, `docs/performance`.
const COLUMNS: &str = "| case | ours | reference | ratio | bar | met | command | date | commit | machine | profile | n |\n\
                       |---|---|---|---|---|---|---|---|---|---|---|---|\n";
/// The spread from which on a row shows it.
const WIDE: f64 = 1.0 / 3.0;

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

    /// Provenance, then a table with the columns of the pages of results.
    pub fn markdown(&self) -> String {
        let rows = self.rows.iter().map(|row| line(row, &self.provenance));
        format!("{}\n{COLUMNS}{}", self.provenance.lines(), rows.collect::<String>())
    }

    /// How many rows do not reach their bar, of those that have one.
    pub fn judged(&self) -> (usize, usize) {
        let judged = self.rows.iter().filter(|row| row.pass.is_some());
        (self.rows.iter().filter(|row| row.failed()).count(), judged.count())
    }
}

/// A row as the pages of results have it.
fn line(row: &Row, provenance: &Provenance) -> String {
    let Provenance { command, date, commit, machine, profile, .. } = provenance;
    let shown = |value: Option<f64>, range| value.map_or(String::new(), |_| figures(value, range));
    let name = if row.reference_name == "limit" { "the limit" } else { row.reference_name.as_str() };
    let reference = [shown(row.reference, row.reference_range), name.to_owned()];
    let reference: Vec<String> = reference.into_iter().filter(|part| !part.is_empty()).collect();
    let spread = row.spread.filter(|spread| *spread > WIDE && row.pass.is_some());
    let spread = spread.map_or(String::new(), |spread| format!(" (spread {:.0}%)", spread * 100.0));
    let met = row.pass.map_or("", |pass| if pass { "met" } else { "**missed**" });
    let model = machine.split(',').next().unwrap_or_default();
    let machine = ["Xeon", "EPYC"].into_iter().find(|name| model.contains(name)).unwrap_or(model);
    let cells = [
        titled(row),
        shown(row.ours, row.ours_range),
        reference.join(", "),
        row.ratio.map_or(String::new(), |_| figure(row.ratio)),
        row.bar.map_or(String::new(), |_| figure(row.bar)),
        format!("{met}{spread}"),
        format!("`{}`", command.strip_prefix("cargo xtask bench ").unwrap_or(command)),
        date.clone(),
        format!("`{commit}`"),
        machine.to_owned(),
        profile.clone(),
        if row.runs == 1 { "1 run".to_owned() } else { format!("{} runs", row.runs) },
    ];
    let cells = cells.map(|cell| cell.replace(['\n', '|'], " "));
    format!("| {} |\n", cells.join(" | "))
}

/// A row's case with its size and its ranks, the figure and the unit last.
fn titled(row: &Row) -> String {
    let units = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B")];
    let unit = units.into_iter().find(|(bytes, _)| row.size > 0 && row.size.is_multiple_of(*bytes));
    let size = unit.map(|(bytes, unit)| format!(", {} {unit}", row.size / bytes)).unwrap_or_default();
    let ranks = match row.ranks {
        0 => String::new(),
        1 => ", 1 rank".to_owned(),
        ranks => format!(", {ranks} ranks"),
    };
    match row.case.rsplit_once(": ") {
        Some((what, figure)) => format!("{what}{size}{ranks}: {figure}"),
        None => format!("{}{size}{ranks}", row.case),
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
    fn rows_fit_the_pages_of_results() {
        let page = std::fs::read_to_string(workspace::root().join("docs/performance/README.md")).unwrap();
        assert!(page.contains(COLUMNS), "the pages have other columns");
        let case = Case::less("s", "AllReduce: us", 0.5).of(64 << 20, 4);
        let rows = vec![
            case.limit(&[1.0, 9.0, 2.0], 40.0),
            case.clone().stated().compare(&[3.0], &[6.0], "a | b"),
            case.missing("Gloo", "gone"),
        ];
        let mut report = Report::new(rows);
        report.provenance = Provenance {
            command: "cargo xtask bench s --rounds 3".to_owned(),
            date: "2026-11-29".to_owned(),
            commit: "abc".to_owned(),
            machine: "Intel(R) Xeon(R) @ 2.1GHz, 2 cores".to_owned(),
            profile: "release".to_owned(),
            runs: [1, 3],
        };
        let text = report.markdown();
        let end = "| `s --rounds 3` | 2026-11-29 | `abc` | Xeon | release |";
        let expected = [
            format!(
                "| AllReduce, 64 MiB, 4 ranks: us | 2.000 (1.000 to 9.000) | 40.000, the limit | 20.000 | 2.000 | met (spread 178%) {end} 3 runs |"
            ),
            format!("| AllReduce, 64 MiB, 4 ranks: us | 3.000 | 6.000, a   b | 2.000 |  |  {end} 1 run |"),
            format!(
                "| AllReduce, 64 MiB, 4 ranks: us |  | Gloo (missing: gone) |  | 2.000 | **missed** {end} 0 runs |"
            ),
        ];
        assert!(text.ends_with(&(expected.join("\n") + "\n")), "{text}");
        let marked = crate::stale::mark(&text, |_| Some(Vec::new()), |_, _| Ok(0));
        assert_eq!((marked.rows, marked.text), (3, text));
    }

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
