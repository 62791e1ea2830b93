//! Who gets what in the next round: one trait, and a policy a file.

mod elastic;
mod fifo;
mod gavel;
mod least_attained;
mod market;
mod pollux;
mod sia;
mod tuned;

pub use fifo::Fifo;
pub use gavel::Gavel;
pub use least_attained::LeastAttained;
pub use market::MarketPolicy;
pub use pollux::{Pollux, PolluxSettings};
pub use sia::{Sia, SiaSettings};

use crate::allocation::Allocation;
use crate::goodput::{Noise, StepModel};
use crate::inventory::Inventory;
use crate::job::Job;
use crate::market::MarketError;
use crate::model::Model;
use thiserror::Error;

/// A job that has arrived and not ended, as policies see it.
#[derive(Debug, Clone)]
pub struct Candidate<'a> {
    /// The job's number: the same in all rounds.
    pub number: usize,
    /// What it asks for.
    pub job: &'a Job,
    /// What it trains.
    pub model: &'a Model,
    /// Seconds since it arrived.
    pub age: f64,
    /// How often it was restarted: its first start is none.
    pub restarts: u32,
    /// Seconds of accelerators that it has had.
    pub attained: f64,
    /// Whether it is starting: it should keep what it has.
    pub is_starting: bool,
    /// What it has.
    pub current: Option<&'a Allocation>,
    /// What its steps take by kind, fitted to what was measured of it; `None` where it has not run.
    pub fitted: &'a [Option<StepModel>],
    /// The noise of its gradients, measured last.
    pub noise: Option<Noise>,
    /// The most workers with which it has run, on any kind.
    pub most_workers: u32,
}

/// What is decided about.
#[derive(Debug, Clone, Copy)]
pub struct Round<'a> {
    /// What there is.
    pub inventory: &'a Inventory,
    /// Seconds until the next round.
    pub seconds: f64,
    /// All jobs that have arrived and not ended, in order of arrival.
    pub jobs: &'a [Candidate<'a>],
}

/// Why a policy cannot decide.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum PolicyError {
    /// Sia's cost of a job that gets nothing is no finite number.
    #[error("policy Sia: a job that gets nothing costs {0}, which must be finite")]
    IdleCost(f64),
    /// What jobs must get is more than there is.
    #[error("policy Sia: jobs that must get what they have do not fit")]
    DoNotFit,
    /// Pollux' worth of an idle job, to the power of its fairness, is no finite number.
    #[error("policy Pollux: an idle job is worth {idle_worth}, which to the power {fairness} must be finite")]
    IdleWorth {
        /// The setting.
        idle_worth: f64,
        /// The other.
        fairness: f64,
    },
    /// The market takes no such price or bid.
    #[error("policy Market: {0}")]
    Market(#[from] MarketError),
    /// A value that is no number.
    #[error("policy {policy}: the value of job {job} is no number")]
    Value {
        /// The policy's name.
        policy: &'static str,
        /// The job's name.
        job: String,
    },
}

/// Decides, round by round.
pub trait Policy {
    /// The policy's name.
    fn name(&self) -> &'static str;

    /// Whether it gives nothing to jobs whose speeds, as they were tuned, are unknown on all kinds. Such jobs are refused beforehand.
    fn needs_tuned_speeds(&self) -> bool {
        false
    }

    /// What each of the round's jobs has until the next round, in the order of the round's jobs. Those are accelerators that the
    /// inventory has, each given once.
    ///
    /// # Errors
    ///
    /// The policy's program has no solution.
    fn allocate(&mut self, round: &Round<'_>) -> Result<Vec<Option<Allocation>>, PolicyError>;
}

impl<P: Policy + ?Sized> Policy for &mut P {
    fn name(&self) -> &'static str {
        (**self).name()
    }

    fn needs_tuned_speeds(&self) -> bool {
        (**self).needs_tuned_speeds()
    }

    fn allocate(&mut self, round: &Round<'_>) -> Result<Vec<Option<Allocation>>, PolicyError> {
        (**self).allocate(round)
    }
}
