//! Suite cooperation: what it is worth to a tenant to be told and asked, and what it costs others, on two racks and two spines with
//! real agents.

mod adversary;
mod subscribers;

use super::part::{self, Outcome, Part};
use crate::workspace::Binaries;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// How much is measured.
#[derive(Debug, Clone)]
pub struct Effort {
    /// Rounds, each of all contestants in turn.
    pub rounds: usize,
    /// Show that everything runs, and measure nothing worth a figure.
    pub smoke: bool,
    /// Parts alone; all if empty.
    pub only: Vec<String>,
}

impl Effort {
    /// For figures.
    pub fn new(rounds: usize, only: &[String]) -> Self {
        Self { rounds, smoke: false, only: only.to_vec() }
    }

    /// A short round.
    pub fn smoke(only: &[String]) -> Self {
        Self { rounds: 1, smoke: true, only: only.to_vec() }
    }
}

/// What all parts work with.
struct Suite {
    effort: Effort,
    binaries: Binaries,
    stop: Arc<AtomicBool>,
}

const PARTS: &[Part<Suite>] =
    &[("adversary", adversary::adversary), ("subscribers", subscribers::subscribers)];

/// Measures.
pub fn run(effort: Effort, binaries: Binaries, stop: Arc<AtomicBool>) -> Outcome {
    let suite = Suite { effort, binaries, stop };
    part::run(&suite, PARTS, &suite.effort.only)
}
