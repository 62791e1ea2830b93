//! The lines that the programs print: one JSON object a line on standard output, each written at once.

use crate::communicator::Cost;
use crate::training::{Outcome, Step};
use anyhow::Result;
use serde::{Deserialize, Serialize};
use std::io::Write;
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
        loss: f32,
        /// Bytes of the tensor.
        bytes: usize,
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
        correct: Option<usize>,
    },
    /// The training has ended.
    Trained {
        /// When.
        at_us: u64,
        /// Test images told right.
        correct: usize,
        /// Test images.
        tested: usize,
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
        bytes: usize,
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
    Told {
        /// When it was read.
        at_us: u64,
        /// Of which communicator, and what.
        what: String,
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
        asked_us: u64,
        /// And that is promised; 0 where nothing is.
        p99_us: u64,
    },
    /// How it was kept, as the provider has measured it.
    Kept {
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
    /// A step's line.
    pub fn step(step: &Step) -> Self {
        let Cost { collective, copies, wire_bytes, algorithm } = step.cost;
        Self::Step {
            at_us: now_us(),
            step: step.number,
            loss: step.loss,
            bytes: step.bytes,
            collective_us: collective.as_micros() as u64,
            copies_us: copies.as_micros() as u64,
            compute_us: step.compute.as_micros() as u64,
            wire_bytes,
            algorithm: algorithm.to_owned(),
            correct: step.correct,
        }
    }

    /// A training's last line.
    pub fn trained(outcome: &Outcome) -> Self {
        Self::Trained {
            at_us: now_us(),
            correct: outcome.correct,
            tested: outcome.tested,
            digest: outcome.digest.clone(),
        }
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    /// `cargo xtask demo` reads exactly these.
    #[test]
    fn lines_are_what_readers_expect() {
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
        let text = r#"{"event":"step","at_us":1,"step":2,"loss":0.5,"bytes":4,"collective_us":5,"copies_us":6,"compute_us":7,"wire_bytes":8,"algorithm":"ring"}"#;
        assert_eq!(serde_json::to_string(&line).unwrap(), text);
        assert_eq!(serde_json::from_str::<Line>(text).unwrap(), line);
        let stopped = Line::Stopped { at_us: 1, rounds: 2, verified_bytes: 3 };
        let text = r#"{"event":"stopped","at_us":1,"rounds":2,"verified_bytes":3}"#;
        assert_eq!(serde_json::to_string(&stopped).unwrap(), text);
    }
}
