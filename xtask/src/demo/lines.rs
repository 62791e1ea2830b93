//! The lines of JSON that the tenants' programs print, read from their logs while they run.

use anyhow::{Context, Result};
use serde::Deserialize;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// One line; the programs in `bench` say what each field means. Times in microseconds.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[expect(missing_docs, reason = "each field is documented where it is printed, in bench")]
pub enum Line {
    Start {
        at_us: u64,
        rank: usize,
        ranks: usize,
    },
    Step {
        at_us: u64,
        step: usize,
        loss: f64,
        bytes: u64,
        collective_us: u64,
        copies_us: u64,
        compute_us: u64,
        wire_bytes: u64,
        algorithm: String,
    },
    Trained {
        at_us: u64,
        correct: u64,
        tested: u64,
        digest: String,
    },
    Round {
        at_us: u64,
        round: u64,
        bytes: u64,
        collective_us: u64,
        wire_bytes: u64,
    },
    Damaged {
        at_us: u64,
        what: String,
    },
    Stopped {
        at_us: u64,
        rounds: u64,
        verified_bytes: u64,
    },
    Told {
        at_us: u64,
        what: String,
    },
    Served {
        request: u64,
        collective_us: u64,
    },
    Promised {
        asked_us: u64,
        p99_us: u64,
    },
    Kept {
        operations: u64,
        late: u64,
        breaches: u64,
    },
}

/// A log that grows: gives each whole line once.
#[derive(Debug)]
pub struct Tail {
    file: File,
    rest: Vec<u8>,
}

impl Tail {
    /// Follows a log from its start.
    pub fn open(log: &Path) -> Result<Self> {
        let file = File::open(log).with_context(|| format!("cannot read {}", log.display()))?;
        Ok(Self { file, rest: Vec::new() })
    }

    /// The lines that have been finished since the last call. What is no line of ours (a warning, an error's text) is left
    /// in the log for people.
    pub fn lines(&mut self) -> Result<Vec<Line>> {
        self.file.read_to_end(&mut self.rest)?;
        let whole = self.rest.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        let finished: Vec<u8> = self.rest.drain(..whole).collect();
        let lines = finished.split(|byte| *byte == b'\n');
        Ok(lines.filter_map(|line| serde_json::from_slice(line).ok()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

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

    /// The very line that bench's own test prints.
    #[test]
    fn a_step_is_read_as_it_is_printed() {
        let text = r#"{"event":"step","at_us":1,"step":2,"loss":0.5,"bytes":4,"collective_us":5,"copies_us":6,"compute_us":7,"wire_bytes":8,"algorithm":"ring"}"#;
        let Line::Step { step: 2, loss, wire_bytes: 8, .. } = serde_json::from_str(text).unwrap() else {
            panic!("not a step");
        };
        assert!((loss - 0.5).abs() < 1e-12);
    }
}
