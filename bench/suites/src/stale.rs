//! Which rows of the page of results are stale: too many commits of the rooms that they measure are newer.

use anyhow::{Context, Result, ensure};

/// Commits of the measured rooms after which a row is stale.
pub const MOST_COMMITS: usize = 50;
/// What a stale row says behind its date.
const MARK: &str = ", stale";
/// Columns that a table of results has.
const COLUMNS: [&str; 3] = ["command", "date", "commit"];

/// What was found on a page.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Marked {
    /// The page, with its rows marked.
    pub text: String,
    /// Rows with a date and a commit.
    pub rows: usize,
    /// Those that are stale.
    pub stale: usize,
    /// Rows whose rooms or commit are not known, as the page has them.
    pub unknown: Vec<String>,
}

/// Marks a page's rows. `rooms` gives the folders that a command measures; `newer` the number of their commits since one.
pub fn mark(
    page: &str,
    rooms: impl Fn(&str) -> Option<Vec<String>>,
    newer: impl Fn(&str, &[String]) -> Result<usize>,
) -> Marked {
    let mut marked = Marked::default();
    let mut columns: Option<[usize; 3]> = None;
    for line in page.split_inclusive('\n') {
        let cells: Vec<&str> = line.trim_end().split('|').collect();
        if cells.len() < 3 {
            columns = None;
        } else if columns.is_none() {
            let [command, date, commit] =
                COLUMNS.map(|name| cells.iter().position(|cell| cell.trim() == name));
            columns = command.zip(date).zip(commit).map(|((command, date), commit)| [command, date, commit]);
        } else if let Some([command, date, commit]) = columns
            && let [Some(command), Some(day), Some(commit)] = [command, date, commit].map(|at| cells.get(at))
            && day.trim().starts_with("20")
        {
            marked.rows += 1;
            let commit = commit.trim().trim_matches('`');
            let age = rooms(command.trim()).context("unknown rooms").and_then(|rooms| newer(commit, &rooms));
            match age {
                Ok(age) => {
                    let stale = age > MOST_COMMITS;
                    marked.stale += usize::from(stale);
                    let day = day.trim().trim_end_matches(MARK);
                    let own = format!(" {day}{} ", if stale { MARK } else { "" });
                    let mut cells: Vec<String> = cells.iter().map(|cell| (*cell).to_owned()).collect();
                    if let Some(cell) = cells.get_mut(date) {
                        *cell = own;
                    }
                    marked.text += &(cells.join("|") + "\n");
                    continue;
                }
                Err(error) => marked.unknown.push(format!("{}: {error:#}", command.trim())),
            }
        }
        marked.text += line;
    }
    marked
}

/// The folders that a command measures. Those of a suite are in its table; `cargo ... -p CRATE` has the crate's area;
/// all else has all areas.
pub fn rooms(command: &str) -> Option<Vec<String>> {
    let command = command.split('`').nth(1).unwrap_or(command);
    // What is set for it alone stands before a command.
    let words: Vec<&str> = command.split_whitespace().skip_while(|word| word.contains('=')).collect();
    let owned = |rooms: &[&str]| Some(rooms.iter().map(|room| (*room).to_owned()).collect());
    match words.as_slice() {
        ["cargo", "xtask", "softroce", ..] => {
            crate::suites::named("rdma").and_then(|suite| owned(suite.rooms))
        }
        ["cargo", "xtask", "bench", suite, ..] => {
            crate::suites::named(suite).and_then(|suite| owned(suite.rooms))
        }
        ["cargo", ..] => {
            let short = words.iter().find_map(|word| word.strip_prefix("harmonaize-")).unwrap_or_default();
            let root = harmonaize_testkit::workspace::root();
            let areas = ["dataplane", "control", "ebpf"];
            let own: Vec<&str> = areas
                .into_iter()
                .filter(|area| !short.is_empty() && root.join(area).join(short).is_dir())
                .collect();
            owned(if own.is_empty() { &areas } else { &own })
        }
        [suite, ..] => crate::suites::named(suite).and_then(|suite| owned(suite.rooms)),
        [] => None,
    }
}

/// The number of commits of these folders that are newer than one.
///
/// # Errors
/// Where git does not know the commit, or its history is not whole.
pub fn newer(commit: &str, rooms: &[String]) -> Result<usize> {
    let shallow = crate::report::git(&["rev-parse", "--is-shallow-repository"])?;
    ensure!(shallow == "false", "the history is shallow");
    let range = format!("{commit}..HEAD");
    let mut arguments = vec!["rev-list", "--count", &range, "--"];
    arguments.extend(rooms.iter().map(String::as_str));
    crate::report::git(&arguments)?.parse().context("git counts no commits")
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# Results\n\n| case | command | date | commit | n |\n|---|---|---|---|---|\n\
                        | a | `shaped` | 2026-11-21 | `old` | 5 |\n| b | `shaped` | 2026-11-23, stale | `new` | 5 |\n\
                        | c | `shaped` | 2026-11-20, stale | `old` | 5 |\n| d | `nobody` | 2026-11-20 | `old` | 5 |\n\n\
                        | other | table |\n|---|---|\n| 2026-11-21 | `old` |\n";

    #[test]
    fn rows_of_more_than_fifty_commits_are_stale() {
        let newer = |commit: &str, rooms: &[String]| {
            assert_eq!(rooms, ["dataplane"]);
            Ok(if commit == "old" { MOST_COMMITS + 1 } else { MOST_COMMITS })
        };
        let rooms = |command: &str| (command == "`shaped`").then(|| vec!["dataplane".to_owned()]);
        let marked = mark(PAGE, rooms, newer);
        assert_eq!((marked.rows, marked.stale, marked.unknown.len()), (4, 2, 1));
        let expected = PAGE
            .replace("2026-11-21 | `old` | 5", "2026-11-21, stale | `old` | 5")
            .replace("2026-11-23, stale", "2026-11-23");
        assert_eq!(marked.text, expected);
        assert_eq!(mark(&marked.text, rooms, newer).text, expected, "marking again changes nothing");
    }

    #[test]
    fn every_command_of_the_results_has_its_rooms() {
        let page = harmonaize_testkit::workspace::root().join("docs/performance/README.md");
        let text = std::fs::read_to_string(page).unwrap();
        let marked = mark(&text, rooms, |_, rooms| {
            let missing =
                rooms.iter().find(|room| !harmonaize_testkit::workspace::root().join(room).exists());
            missing.map_or(Ok(0), |room| anyhow::bail!("there is no {room}"))
        });
        assert!(marked.rows > 50, "{}", marked.rows);
        assert_eq!(marked.unknown, Vec::<String>::new());
    }
}
