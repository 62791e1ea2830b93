//! Sia (Subramanya et al., SOSP 2023): each round an integer program chooses one configuration for each job. It goes by goodput
//! that is fitted while jobs run, against what a restart would cost.

use super::elastic::{Size, assign, pinned, sizes};
use super::{Candidate, Policy, PolicyError, Round};
use crate::allocation::Allocation;
use crate::inventory::KindId;
use crate::program::{Configuration, Program};
use std::time::Duration;

/// Sia's constants; the defaults are the artifact's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SiaSettings {
    /// The exponent of goodput: below 0, costs are minimised, and the further below the fairer.
    pub fairness: f64,
    /// What a job without anything costs; the slowest configuration costs 1.
    pub idle_cost: f64,
    /// The time that its program may take. What is best by then is decided.
    pub limit: Duration,
}

impl Default for SiaSettings {
    fn default() -> Self {
        Self { fairness: -0.5, idle_cost: 1.1, limit: Duration::from_secs(10) }
    }
}

/// Sia's policy. Jobs start with one worker, or the fewest of their range, and may double.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sia {
    settings: SiaSettings,
}

impl Sia {
    /// With constants of its own.
    pub fn new(settings: SiaSettings) -> Self {
        Self { settings }
    }

    /// The integer program of a round: the smaller the better.
    ///
    /// # Errors
    ///
    /// A goodput that is no number.
    pub fn program(&self, round: &Round<'_>) -> Result<Program, PolicyError> {
        let capacity = round.inventory.kinds().map(|(_, kind)| kind.capacity()).collect();
        let mut program = Program { capacity, idle_cost: self.settings.idle_cost, jobs: Vec::new() };
        for candidate in round.jobs {
            let configurations = match pinned(candidate) {
                Some(current) => {
                    vec![Configuration { kind: current.kind, workers: current.workers(), cost: f64::MIN }]
                }
                None => self.configurations(round, candidate)?,
            };
            program.jobs.push(configurations);
        }
        Ok(program)
    }

    /// What a job may get, with costs.
    fn configurations(
        &self,
        round: &Round<'_>,
        candidate: &Candidate<'_>,
    ) -> Result<Vec<Configuration>, PolicyError> {
        let cost = |Size { kind, workers, worth }| {
            let cost = (worth.powf(self.settings.fairness) * 100.0).round_ties_even() / 100.0;
            Configuration { kind, workers, cost }
        };
        let configurations: Vec<Configuration> = sizes(round, candidate).into_iter().map(cost).collect();
        if configurations.iter().any(|it| !it.cost.is_finite()) {
            return Err(PolicyError::Value { policy: "Sia", job: candidate.job.name.clone() });
        }
        Ok(configurations)
    }
}

impl Policy for Sia {
    fn name(&self) -> &'static str {
        "Sia"
    }

    fn allocate(&mut self, round: &Round<'_>) -> Result<Vec<Option<Allocation>>, PolicyError> {
        let chosen = self.program(round)?.solve(self.settings.limit)?;
        let sizes: Vec<Option<(KindId, u32)>> =
            chosen.iter().map(|choice| choice.map(|choice| (choice.kind, choice.workers))).collect();
        Ok(assign(round, &sizes))
    }
}
