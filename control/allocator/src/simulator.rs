//! Jobs and a policy in virtual time: rounds, restarts, and progress by profiles.
//!
//! A round first lets all jobs run for its seconds, then asks the policy. A job that gets another kind, or other numbers of workers on
//! its hosts, restarts, which costs its model's seconds; other accelerators of the same shape cost nothing. That, how progress
//! follows from profiles, and how batches are chosen are those of Sia's artifact (Subramanya et al., "Sia", SOSP 2023), so that both can be
//! compared.

use crate::allocation::{Allocation, AllocationError, check};
use crate::fit::{Measured, fit};
use crate::goodput::{LocalBatch, Noise, StepModel, best, ceiling};
use crate::inventory::{Inventory, KindId};
use crate::job::{Job, RangeError};
use crate::model::Model;
use crate::policy::{Candidate, Policy, PolicyError, Round};
use crate::profile::ProfileError;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use thiserror::Error;

/// How a simulation runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    /// Seconds of a round.
    pub round: u32,
    /// Whether jobs choose their batches by goodput; otherwise they have those that they were tuned for.
    pub adapts_batch: bool,
    /// The most rounds.
    pub rounds: usize,
}

/// Why a simulation ends before its jobs.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum SimulationError {
    /// A job can never run.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// The policy cannot decide.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The policy gives what is not there.
    #[error("policy {policy}, round {round}: {error}")]
    Allocation {
        /// The policy's name.
        policy: &'static str,
        /// The round, from 0.
        round: usize,
        /// What is wrong.
        error: AllocationError,
    },
    /// A job runs where its profile says nothing.
    #[error("job {job} on {kind}: {error}")]
    Profile {
        /// The job's name.
        job: String,
        /// The kind's name.
        kind: String,
        /// What is missing.
        error: ProfileError,
    },
    /// A job runs on a kind for which its model has no profile, or longer than its records.
    #[error("job {job}: its model has no profile or no record for what it does")]
    Unknown {
        /// The job's name.
        job: String,
    },
    /// Rounds of no time.
    #[error("rounds need at least one second")]
    Round,
    /// Jobs that do not end.
    #[error("{unfinished} of {jobs} jobs have not ended after {rounds} rounds")]
    Endless {
        /// Those that have not.
        unfinished: usize,
        /// All jobs.
        jobs: usize,
        /// How often was decided.
        rounds: usize,
    },
}

/// What became of a job.
#[derive(Debug, Clone, PartialEq)]
pub struct JobOutcome {
    /// When it arrived, in seconds.
    pub arrival: f64,
    /// When it was first given something, in seconds.
    pub started: f64,
    /// When it ended, in seconds.
    pub ended: f64,
    /// How often it was restarted.
    pub restarts: u32,
    /// Seconds of accelerators by kind, each round counted whole.
    pub given: Vec<f64>,
    /// How many jobs there were, itself among them: the mean over the decisions from its arrival to its end.
    pub contention: f64,
}

impl JobOutcome {
    /// The job's completion time: seconds from arrival to end.
    pub fn completion_time(&self) -> f64 {
        self.ended - self.arrival
    }
}

/// What became of all jobs.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// In the jobs' order.
    pub jobs: Vec<JobOutcome>,
    /// How often was decided.
    pub rounds: usize,
}

impl Outcome {
    fn mean(&self, of: impl Fn(&JobOutcome) -> f64) -> f64 {
        self.jobs.iter().map(of).sum::<f64>() / self.jobs.len().max(1) as f64
    }

    /// The mean job completion time, in hours.
    pub fn mean_completion_hours(&self) -> f64 {
        self.mean(JobOutcome::completion_time) / 3600.0
    }

    /// Hours from the first arrival to the last end.
    pub fn makespan_hours(&self) -> f64 {
        let first = self.jobs.iter().map(|job| job.arrival).fold(f64::INFINITY, f64::min);
        let last = self.jobs.iter().map(|job| job.ended).fold(0.0, f64::max);
        if self.jobs.is_empty() { 0.0 } else { (last - first) / 3600.0 }
    }

    /// The mean number of restarts.
    pub fn mean_restarts(&self) -> f64 {
        self.mean(|job| f64::from(job.restarts))
    }

    /// The mean hours of accelerators of a job.
    pub fn mean_accelerator_hours(&self) -> f64 {
        self.mean(|job| job.given.iter().sum()) / 3600.0
    }
}

/// Runs all jobs to their ends.
///
/// # Errors
///
/// A job that can never run, a policy that errs, a hole in a profile, or more rounds than allowed.
pub fn simulate(
    inventory: &Inventory,
    models: &[Model],
    jobs: &[Job],
    policy: &mut dyn Policy,
    settings: Settings,
) -> Result<Outcome, SimulationError> {
    if settings.round == 0 {
        return Err(SimulationError::Round);
    }
    let mut trainings = Vec::with_capacity(jobs.len());
    for job in jobs {
        job.check(inventory, models)?;
        if policy.needs_tuned_speeds() {
            job.check_tuned(inventory, models)?;
        }
        let model = models.get(job.model).ok_or_else(|| unknown(job))?;
        trainings.push(Training::new(inventory, job, model, settings.adapts_batch));
    }
    let seconds = f64::from(settings.round);
    for round in 0..settings.rounds {
        let before = round as f64 * seconds;
        for training in &mut trainings {
            training.run(before, seconds)?;
        }
        let now = before + seconds;
        decide(inventory, policy, &mut trainings, round, (now, seconds))?;
        if trainings.iter().all(|training| training.ended.is_some()) {
            let jobs = trainings.into_iter().filter_map(Training::outcome).collect();
            return Ok(Outcome { jobs, rounds: round + 1 });
        }
    }
    let unfinished = trainings.iter().filter(|training| training.ended.is_none()).count();
    Err(SimulationError::Endless { unfinished, jobs: jobs.len(), rounds: settings.rounds })
}

fn unknown(job: &Job) -> SimulationError {
    SimulationError::Unknown { job: job.name.clone() }
}

/// One decision, and what follows from it.
fn decide(
    inventory: &Inventory,
    policy: &mut dyn Policy,
    trainings: &mut [Training<'_>],
    round: usize,
    (now, seconds): (f64, f64),
) -> Result<(), SimulationError> {
    let is_active = |training: &Training<'_>| training.job.arrival <= now && training.ended.is_none();
    let active = trainings.iter().enumerate().filter(|(_, training)| is_active(training));
    let candidates: Vec<Candidate<'_>> =
        active.map(|(number, training)| training.candidate(number, now)).collect();
    if candidates.is_empty() {
        return Ok(());
    }
    let count = candidates.len();
    let given = policy.allocate(&Round { inventory, seconds, jobs: &candidates })?;
    let wrong = |error| SimulationError::Allocation { policy: policy.name(), round, error };
    if given.len() != candidates.len() {
        return Err(wrong(AllocationError::Count { given: given.len(), jobs: candidates.len() }));
    }
    check(inventory, &given).map_err(wrong)?;
    let numbers: Vec<usize> = candidates.iter().map(|candidate| candidate.number).collect();
    for (number, given) in numbers.into_iter().zip(given) {
        if let Some(training) = trainings.get_mut(number) {
            training.decisions += 1.0;
            training.present += count as f64;
            training.give(given, now, seconds)?;
        }
    }
    Ok(())
}

/// What a job runs on.
#[derive(Debug, Clone)]
struct Running {
    allocation: Allocation,
    shape: Vec<u32>,
    local: LocalBatch,
}

/// A job with what became of it until now.
struct Training<'a> {
    inventory: &'a Inventory,
    job: &'a Job,
    model: &'a Model,
    adapts_batch: bool,
    running: Option<Running>,
    epochs: usize,
    progress: f64,
    /// Seconds of a restart that are still to come.
    starting: f64,
    restarts: Option<u32>,
    started: Option<f64>,
    ended: Option<f64>,
    attained: f64,
    given: Vec<f64>,
    /// Decisions since it arrived, and the jobs that were there at each of them, added up.
    decisions: f64,
    present: f64,
    measured: Vec<BTreeMap<(u32, u32, u32), Measured>>,
    fitted: Vec<Option<StepModel>>,
    noise: Option<Noise>,
}

impl<'a> Training<'a> {
    fn new(inventory: &'a Inventory, job: &'a Job, model: &'a Model, adapts_batch: bool) -> Self {
        let kinds = inventory.kinds().len();
        Self {
            inventory,
            job,
            model,
            adapts_batch,
            running: None,
            epochs: 0,
            progress: 0.0,
            starting: 0.0,
            restarts: None,
            started: None,
            ended: None,
            attained: 0.0,
            given: vec![0.0; kinds],
            decisions: 0.0,
            present: 0.0,
            measured: vec![BTreeMap::new(); kinds],
            fitted: vec![None; kinds],
            noise: None,
        }
    }

    fn candidate(&self, number: usize, now: f64) -> Candidate<'_> {
        let ran_with = self.measured.iter().flat_map(|kind| kind.keys().map(|(_, workers, _)| *workers));
        Candidate {
            number,
            job: self.job,
            model: self.model,
            age: now - self.job.arrival,
            restarts: self.restarts.unwrap_or(0),
            attained: self.attained,
            is_starting: self.starting > 0.0,
            current: self.running.as_ref().map(|running| &running.allocation),
            fitted: &self.fitted,
            noise: self.noise,
            most_workers: ran_with.max().unwrap_or(0),
        }
    }

    fn outcome(self) -> Option<JobOutcome> {
        Some(JobOutcome {
            arrival: self.job.arrival,
            started: self.started?,
            ended: self.ended?,
            restarts: self.restarts.unwrap_or(0),
            given: self.given,
            contention: self.present / self.decisions,
        })
    }

    /// Has the job run on what it is given from now on.
    fn give(&mut self, given: Option<Allocation>, now: f64, seconds: f64) -> Result<(), SimulationError> {
        let Some(allocation) = given else {
            self.running = None;
            return Ok(());
        };
        let kind = self.inventory.kind(allocation.kind).ok_or_else(|| unknown(self.job))?;
        if let Some(given) = self.given.get_mut(allocation.kind.0) {
            *given += seconds * f64::from(allocation.workers());
        }
        let shape = allocation.shape(kind);
        if let Some(running) = &mut self.running
            && running.allocation.kind == allocation.kind
            && running.shape == shape
        {
            running.allocation = allocation;
            return Ok(());
        }
        self.starting = self.model.facts().restart;
        self.restarts = Some(self.restarts.map_or(0, |restarts| restarts + 1));
        self.started = self.started.or(Some(now));
        let local = self.local_batch(allocation.kind, &shape)?;
        self.running = Some(Running { allocation, shape, local });
        Ok(())
    }

    /// What each worker computes: by goodput, or of the batch that the job was tuned for. Adapting jobs may use the whole of their ranges, as
    /// in the artifact, whose policy predicts with no more than the batch that they were tuned for.
    fn local_batch(&self, kind: KindId, shape: &[u32]) -> Result<LocalBatch, SimulationError> {
        let (workers, hosts) = (shape.iter().sum::<u32>(), shape.len() as u32);
        let profile = self.model.profile(kind).ok_or_else(|| unknown(self.job))?;
        let least = profile.local_batch().0;
        let hole = || self.profile_error(kind, profile.hole(shape, least));
        let most = profile.most_samples(shape).ok_or_else(hole)?;
        let initial = self.model.batches().0;
        let (smallest, largest) = (*self.job.ranges.batch.start(), *self.job.ranges.batch.end());
        let known = self.fitted.get(kind.0).copied().flatten().zip(self.noise);
        let mut local = match known {
            Some((fitted, noise)) if self.adapts_batch => {
                let range = self.model.range(profile, (smallest, largest), most);
                let best = best(&fitted, noise, hosts, workers, range).ok_or_else(|| unknown(self.job))?;
                best.local
            }
            _ => {
                let first = smallest.max(profile.local_batch().0 * workers);
                let batch = if self.adapts_batch { first } else { self.job.batch };
                let samples = ceiling(f64::from(batch) / f64::from(workers));
                LocalBatch::split(samples, most, workers == 1 && batch > initial)
            }
        };
        let most = profile.most_samples_of(workers).unwrap_or(local.samples);
        local.samples = local.samples.min(most);
        let passes = workers.saturating_mul(local.accumulated + 1).max(1);
        local.samples = local.samples.min(largest / passes);
        if self.adapts_batch && u64::from(passes) * u64::from(local.samples) < u64::from(smallest) {
            // What fits a pass has become too little: more passes, or a batch that divides better.
            let alone_and_beyond = workers == 1 && smallest > initial;
            let samples = (profile.local_batch().0, most);
            let within = LocalBatch::within(workers, (smallest, largest), samples, alone_and_beyond);
            return Ok(within.unwrap_or(local));
        }
        Ok(local)
    }

    fn profile_error(&self, kind: KindId, error: ProfileError) -> SimulationError {
        let kind = self.inventory.kind(kind).map(|kind| kind.name.clone()).unwrap_or_default();
        SimulationError::Profile { job: self.job.name.clone(), kind, error }
    }

    /// Runs for so many seconds.
    fn run(&mut self, before: f64, seconds: f64) -> Result<(), SimulationError> {
        if self.ended.is_some() {
            return Ok(());
        }
        let Some(mut running) = self.running.clone() else { return Ok(()) };
        let workers = f64::from(running.allocation.workers());
        let delay = self.starting.min(seconds);
        self.starting -= delay;
        self.attained += seconds * workers;
        let (mut now, mut left) = (before + delay, seconds - delay);
        while left > 0.0 && self.ended.is_none() {
            let goodput = self.goodput(&running)?;
            let next = self.model.progress(self.epochs + 1).ok_or_else(|| unknown(self.job))?;
            if self.progress + goodput * left < next {
                self.progress += goodput * left;
                left = 0.0;
            } else {
                // Whole seconds, as the artifact counts.
                let took = ((next - self.progress) / goodput).round_ties_even().min(left);
                (now, left) = (now + took, left - took);
                (self.progress, self.epochs) = (next, self.epochs + 1);
                if self.epochs >= self.model.facts().epochs {
                    self.ended = Some(now);
                }
            }
            running.local = self.local_batch(running.allocation.kind, &running.shape)?;
        }
        if self.ended.is_some() {
            self.attained -= left * workers;
        }
        self.running = Some(running).filter(|_| self.ended.is_none());
        Ok(())
    }

    /// Steps of the initial batch a second that a job comes nearer to its end. What it takes is measured, and fitted where that is
    /// new.
    fn goodput(&mut self, running: &Running) -> Result<f64, SimulationError> {
        let kind = running.allocation.kind;
        let local = running.local;
        let (workers, hosts) = (running.allocation.workers(), running.shape.len() as u32);
        let batch = f64::from(workers) * local.total();
        let initial = self.model.batches().0;
        let noise = self.model.noise(batch as u32, self.epochs).ok_or_else(|| unknown(self.job))?;
        let gain = noise.gain(batch / f64::from(initial));
        let profile = self.model.profile(kind).ok_or_else(|| unknown(self.job))?;
        let time = profile.step_time(&running.shape, local.samples);
        let time = time.map_err(|error| self.profile_error(kind, error))?;
        self.noise = Some(noise);
        let compute = time.step - time.exchange;
        if self.adapts_batch
            && let (Some(measured), Some(fitted)) =
                (self.measured.get_mut(kind.0), self.fitted.get_mut(kind.0))
        {
            let new = Measured { hosts, workers, batch: local.samples, step: time.step, compute };
            if let Entry::Vacant(place) = measured.entry((hosts, workers, local.samples)) {
                place.insert(new);
                let all: Vec<Measured> = measured.values().copied().collect();
                *fitted = fit(&all);
            }
        }
        let seconds = time.step + compute * f64::from(local.accumulated);
        Ok(gain / seconds / self.model.facts().slowdown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::goodput::tests::MODEL;
    use crate::synthetic::Synthetic;

    #[test]
    fn adapted_batches_stay_within_their_range() {
        let made = Synthetic::new(1, 1, 60.0).unwrap();
        let (model, inventory) = (&made.models[0], &made.inventory);
        let kind = inventory.kind(KindId(0)).unwrap();
        // What it was recorded with begins at 64, and gradients without noise gain nothing by more.
        let mut job = Job { model: 0, workers: 1, batch: 300, ..made.jobs[0].clone() };
        job.ranges.batch = 300..=2000;
        assert_eq!(job.check(inventory, &made.models), Ok(()));
        for noise in [None, Some(Noise { square: 1.0, variance: 0.0 })] {
            let mut training = Training::new(inventory, &job, model, true);
            (training.fitted[0], training.noise) = (Some(MODEL), noise);
            for workers in 1..=kind.capacity() {
                let local = training.local_batch(KindId(0), &kind.filled(workers)).unwrap();
                let batch = f64::from(workers) * local.total();
                assert!((300.0..=2000.0).contains(&batch), "{workers} workers, {noise:?}: {local:?}");
            }
        }
    }
}
