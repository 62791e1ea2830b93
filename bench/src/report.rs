//! What the programs print: lines that testkit describes, one JSON object a line on standard output.

use crate::communicator::Cost;
use crate::training::{Outcome, Step};
pub use harmonaize_testkit::lines::{Line, now_us, print};

impl From<&Step> for Line {
    fn from(step: &Step) -> Self {
        let Cost { collective, copies, wire_bytes, algorithm } = step.cost;
        Self::Step {
            at_us: now_us(),
            step: step.number,
            loss: f64::from(step.loss),
            bytes: step.bytes as u64,
            collective_us: collective.as_micros() as u64,
            copies_us: copies.as_micros() as u64,
            compute_us: step.compute.as_micros() as u64,
            wire_bytes,
            algorithm: algorithm.to_owned(),
            correct: step.correct.map(|correct| correct as u64),
        }
    }
}

impl From<&Outcome> for Line {
    fn from(outcome: &Outcome) -> Self {
        Self::Trained {
            at_us: now_us(),
            correct: outcome.correct as u64,
            tested: outcome.tested as u64,
            digest: outcome.digest.clone(),
        }
    }
}
