//! The lines that tenants' programs print, one JSON object each, and their logs read while they run.

use anyhow::{Context, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// One line. Times in microseconds; `at_us` counts from 1970, so that the lines of several processes can be put in order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Line {
    /// The rank is joined and begins.
    Start {
        /// When.
        at_us: u64,
        /// This rank.
        rank: usize,
        /// Of how many.
        ranks: usize,
    },
    /// A step of the training.
    Step {
        /// When it ended.
        at_us: u64,
        /// From 0.
        step: usize,
        /// Mean cross entropy over the whole batch.
        loss: f64,
        /// Bytes of the tensor.
        bytes: u64,
        /// From submission to completion.
        collective_us: u64,
        /// Copies into and out of the tensor.
        copies_us: u64,
        /// All else.
        compute_us: u64,
        /// Tensor bytes that this rank's host sent, from the receipt.
        wire_bytes: u64,
        /// Kind of algorithm, from the receipt; empty where there is none.
        algorithm: String,
        /// Test images told right after it, where that was asked for.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        correct: Option<u64>,
    },
    /// The training has ended.
    Trained {
        /// When.
        at_us: u64,
        /// Test images told right.
        correct: u64,
        /// Test images.
        tested: u64,
        /// Of the final parameters.
        digest: String,
    },
    /// A round of AllToAll, every received byte checked and right.
    Round {
        /// When it ended.
        at_us: u64,
        /// From 0.
        round: u64,
        /// Bytes of the tensor: a block from every rank.
        bytes: u64,
        /// From submission to completion.
        collective_us: u64,
        /// Tensor bytes that this rank's host sent, from the receipt.
        wire_bytes: u64,
    },
    /// A received block is not what its source sent.
    Damaged {
        /// When it was seen.
        at_us: u64,
        /// Which block, and where.
        what: String,
    },
    /// All rounds were right, and all ranks have agreed to stop.
    Stopped {
        /// When.
        at_us: u64,
        /// How many rounds.
        rounds: u64,
        /// Bytes received and checked.
        verified_bytes: u64,
    },
    /// The provider has told its tenant something.
    Notified {
        /// When it was read.
        at_us: u64,
        /// Of which communicator, and what.
        what: String,
        /// Whether it says that something agreed on is not kept, or is kept again.
        agreement_broken: bool,
    },
    /// A request is answered.
    Served {
        /// When.
        at_us: u64,
        /// From 0.
        request: u64,
        /// From submission to completion.
        collective_us: u64,
    },
    /// What was agreed on for requests.
    Promised {
        /// When.
        at_us: u64,
        /// The 99th percentile that was asked for.
        requested_us: u64,
        /// And that is promised; 0 where nothing is.
        p99_us: u64,
    },
    /// How it was kept, as the provider has measured it.
    Compliance {
        /// When it was asked.
        at_us: u64,
        /// Operations that were looked at.
        operations: u64,
        /// Those that took longer than promised.
        late: u64,
        /// How often it ceased to be kept.
        breaches: u64,
    },
}

/// Now, in microseconds from 1970.
pub fn now_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64)
}

impl Line {
    /// Prints the line, whole, and flushes it.
    pub fn print(&self) -> Result<()> {
        print(self)
    }
}

/// Prints a line of JSON, whole, and flushes it.
pub fn print(line: &impl Serialize) -> Result<()> {
    let mut text = serde_json::to_string(line)?;
    text.push('\n');
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// How a line of a program begins.
const BEGINS: &[u8] = b"{\"event\":";

/// The whole lines of a log so far that are of this kind. Who started the program may write into the same log: part of its text may
/// stand before a line, which is written at once.
///
/// # Errors
/// Where the log cannot be read.
pub fn whole<T: DeserializeOwned>(log: &Path) -> Result<Vec<T>> {
    let bytes = std::fs::read(log).with_context(|| format!("cannot read {}", log.display()))?;
    let end = bytes.iter().rposition(|byte| *byte == b'\n').unwrap_or(0);
    let lines = bytes.get(..end).unwrap_or_default().split(|byte| *byte == b'\n');
    let own = |line: &[u8]| {
        let begin = line.windows(BEGINS.len()).position(|word| word == BEGINS)?;
        // What is no such line (a warning, an error's text) is for people.
        serde_json::from_slice(line.get(begin..)?).ok()
    };
    Ok(lines.filter_map(own).collect())
}

/// A log that grows: gives each whole line once.
#[derive(Debug)]
pub struct Tail {
    file: File,
    partial_line: Vec<u8>,
}

impl Tail {
    /// Follows a log from its start.
    pub fn open(log: &Path) -> Result<Self> {
        let file = File::open(log).with_context(|| format!("cannot read {}", log.display()))?;
        Ok(Self { file, partial_line: Vec::new() })
    }

    /// The lines that have been finished since the last call. What is no line of ours (a warning, an error's text) is left
    /// in the log for people.
    pub fn lines(&mut self) -> Result<Vec<Line>> {
        self.file.read_to_end(&mut self.partial_line)?;
        let whole = self.partial_line.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        let finished: Vec<u8> = self.partial_line.drain(..whole).collect();
        let lines = finished.split(|byte| *byte == b'\n');
        Ok(lines.filter_map(|line| serde_json::from_slice(line).ok()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_given_once_and_whole() {
        let mut log = tempfile::NamedTempFile::new().unwrap();
        let mut tail = Tail::open(log.path()).unwrap();
        assert_eq!(tail.lines().unwrap(), []);
        write!(log, "a warning\n{{\"event\":\"stopped\",\"at_us\":1,\"rounds\":2,").unwrap();
        assert_eq!(tail.lines().unwrap(), []);
        writeln!(log, "\"verified_bytes\":3}}").unwrap();
        assert_eq!(tail.lines().unwrap(), [Line::Stopped { at_us: 1, rounds: 2, verified_bytes: 3 }]);
        assert_eq!(tail.lines().unwrap(), []);
    }

    #[test]
    fn whole_lines_are_read_behind_others_text() {
        let mut log = tempfile::NamedTempFile::new().unwrap();
        let stopped = |rounds| Line::Stopped { at_us: 1, rounds, verified_bytes: 3 };
        let text = |rounds| serde_json::to_string(&stopped(rounds)).unwrap();
        write!(log, "a runner\n{}\na/job: rank {}\n 1 starts\n{{\"event\":\n{}", text(1), text(2), text(3))
            .unwrap();
        assert_eq!(whole::<Line>(log.path()).unwrap(), [stopped(1), stopped(2)]);
        assert!(whole::<Line>(Path::new("/missing")).is_err());
    }

    #[test]
    fn a_step_survives_its_text() {
        let line = Line::Step {
            at_us: 1,
            step: 2,
            loss: 0.5,
            bytes: 4,
            collective_us: 5,
            copies_us: 6,
            compute_us: 7,
            wire_bytes: 8,
            algorithm: "ring".into(),
            correct: None,
        };
        let text = serde_json::to_string(&line).unwrap();
        assert!(!text.contains("correct"), "{text}");
        assert_eq!(serde_json::from_str::<Line>(&text).unwrap(), line);
    }
}
