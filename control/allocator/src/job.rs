//! What a tenant asks for. It is a training with the workers and the batch that it was tuned for, and ranges within which it
//! may run.

use crate::goodput::LocalBatch;
use crate::inventory::{Inventory, Kind, KindId};
use crate::model::Model;
use crate::profile::ProfileError;
use std::ops::RangeInclusive;
use thiserror::Error;

/// A job.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// Its name, for people.
    pub name: String,
    /// Seconds from the beginning until it arrives.
    pub arrival: f64,
    /// The place of its model in the models' list.
    pub model: usize,
    /// The workers that it was tuned for.
    pub workers: u32,
    /// The batch over all workers that it was tuned for.
    pub batch: u32,
    /// Within what it may be changed.
    pub ranges: Ranges,
}

/// Within what a job may be changed.
#[derive(Debug, Clone, PartialEq)]
pub struct Ranges {
    /// Workers, one accelerator each.
    pub workers: RangeInclusive<u32>,
    /// Kinds on which it may run; any of the inventory's where there are none.
    pub kinds: Vec<KindId>,
    /// Batches over all workers.
    pub batch: RangeInclusive<u32>,
}

impl Job {
    /// Whether it may run on a kind.
    pub fn may_use(&self, kind: KindId) -> bool {
        self.ranges.kinds.is_empty() || self.ranges.kinds.contains(&kind)
    }

    /// Steps a second on a kind, as the job was tuned and with hosts filled one by one. `None` where it cannot run there; a hole where
    /// the profile does not cover it.
    pub(crate) fn tuned_speed(
        &self,
        model: &Model,
        (id, kind): (KindId, &Kind),
    ) -> Option<Result<f64, ProfileError>> {
        if !self.may_use(id) || self.workers > kind.capacity() || self.workers == 0 {
            return None;
        }
        let profile = model.profile(id)?;
        let shape = kind.filled(self.workers);
        let samples = f64::from(self.batch) / f64::from(self.workers);
        let Some(most) = profile.most_samples(&shape) else {
            return Some(Err(profile.hole(&shape, samples.ceil() as u32)));
        };
        let mut local = LocalBatch::split(samples, most, self.workers == 1);
        let passes = self.workers.saturating_mul(local.accumulated + 1);
        local.samples = local.samples.min(model.batches().1 / passes.max(1));
        let speed = profile.step_time(&shape, local.samples).map(|time| {
            let accumulated = f64::from(local.accumulated) * (time.step - time.exchange);
            1.0 / ((time.step + accumulated) * model.facts().slowdown)
        });
        Some(speed)
    }
}

/// Why a job can never run as it asks, and what could.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum RangeError {
    /// An arrival that is no time.
    #[error("job {job} arrives at {arrival}, which is no time: the earliest is 0 s")]
    Arrival {
        /// The job's name.
        job: String,
        /// What was given.
        arrival: f64,
    },
    /// No such model.
    #[error("job {job} trains model number {model}, and there are {models}")]
    Model {
        /// The job's name.
        job: String,
        /// What was given.
        model: usize,
        /// How many models there are.
        models: usize,
    },
    /// A range without members, or what was tuned for lies outside of it.
    #[error("job {job}: {what} of {least} to {most} do not hold {tuned}; the nearest that do are {} to {}", (*least).min(*tuned).max(1), (*most).max(*tuned))]
    Empty {
        /// The job's name.
        job: String,
        /// Workers or batches.
        what: &'static str,
        /// The range's least.
        least: u32,
        /// The range's most.
        most: u32,
        /// What the job was tuned for.
        tuned: u32,
    },
    /// None of its kinds is in the inventory, or none can run its model.
    #[error("job {job} may run on no kind of the inventory; {} could run it", if able.is_empty() { "none" } else { able })]
    Kinds {
        /// The job's name.
        job: String,
        /// Names of kinds that could.
        able: String,
    },
    /// More workers than any of its kinds has.
    #[error("job {job} needs {workers} workers of one kind; the nearest that fits are {most}, on {kind}")]
    Workers {
        /// The job's name.
        job: String,
        /// The workers that it was tuned for.
        workers: u32,
        /// The most that there are.
        most: u32,
        /// Where.
        kind: String,
    },
    /// Batches that were never recorded.
    #[error(
        "job {job}: batches of {least} to {most}, and its model was trained with {recorded_least} to {recorded_most}"
    )]
    Batch {
        /// The job's name.
        job: String,
        /// The range's least.
        least: u32,
        /// The range's most.
        most: u32,
        /// The smallest recorded.
        recorded_least: u32,
        /// The largest recorded.
        recorded_most: u32,
    },
    /// No profile covers the placement that it was tuned for.
    #[error(
        "job {job} was tuned for {workers} workers and a batch of {batch}, of which no kind's speed is known; on {kind}: {hole}"
    )]
    Hole {
        /// The job's name.
        job: String,
        /// The workers that it was tuned for.
        workers: u32,
        /// The batch that it was tuned for.
        batch: u32,
        /// The first kind with room for it.
        kind: String,
        /// What that kind's profile lacks, and the nearest that it has.
        hole: ProfileError,
    },
    /// Fewer samples for each worker than a pass has.
    #[error("job {job}: a batch of {batch} gives {workers} workers less than a pass of {pass} samples; the nearest is {}", u64::from(*pass) * u64::from(*workers))]
    Pass {
        /// The job's name.
        job: String,
        /// The largest batch.
        batch: u32,
        /// The fewest workers.
        workers: u32,
        /// The fewest samples of a pass.
        pass: u32,
    },
}

impl Job {
    /// Whether the job can run some time, alone in the inventory.
    ///
    /// # Errors
    ///
    /// Why it cannot, and the nearest that could.
    pub fn check(&self, inventory: &Inventory, models: &[Model]) -> Result<(), RangeError> {
        let job = || self.name.clone();
        if !(self.arrival.is_finite() && self.arrival >= 0.0) {
            return Err(RangeError::Arrival { job: job(), arrival: self.arrival });
        }
        let model = models.get(self.model).ok_or_else(|| RangeError::Model {
            job: job(),
            model: self.model,
            models: models.len(),
        })?;
        let (least, most) = (*self.ranges.workers.start(), *self.ranges.workers.end());
        if least == 0 || !self.ranges.workers.contains(&self.workers) {
            let what = "workers";
            return Err(RangeError::Empty { job: job(), what, least, most, tuned: self.workers });
        }
        let (smallest, largest) = (*self.ranges.batch.start(), *self.ranges.batch.end());
        if !self.ranges.batch.contains(&self.batch) {
            let (least, most, tuned) = (smallest, largest, self.batch);
            return Err(RangeError::Empty { job: job(), what: "batches", least, most, tuned });
        }
        let able = || inventory.kinds().filter(|(kind, _)| model.profile(*kind).is_some());
        let mut usable = able().filter(|(kind, _)| self.may_use(*kind)).peekable();
        if usable.peek().is_none() {
            let names: Vec<&str> = able().map(|(_, kind)| kind.name.as_str()).collect();
            return Err(RangeError::Kinds { job: job(), able: names.join(", ") });
        }
        let (recorded_least, recorded_most) = model.batches();
        if smallest < recorded_least || largest > recorded_most {
            let (least, most) = (smallest, largest);
            return Err(RangeError::Batch { job: job(), least, most, recorded_least, recorded_most });
        }
        let usable: Vec<(KindId, &Kind)> = usable.collect();
        let widest = usable.iter().max_by_key(|(_, kind)| kind.job_capacity());
        if let Some((_, kind)) = widest.filter(|(_, kind)| kind.job_capacity() < self.workers) {
            let (workers, most, kind) = (self.workers, kind.job_capacity(), kind.name.clone());
            return Err(RangeError::Workers { job: job(), workers, most, kind });
        }
        let passes = usable.iter().filter_map(|(kind, _)| Some(model.profile(*kind)?.local_batch().0));
        let pass = passes.min().unwrap_or(1);
        if u64::from(pass) * u64::from(least) > u64::from(largest) {
            return Err(RangeError::Pass { job: job(), batch: largest, workers: least, pass });
        }
        Ok(())
    }

    /// Whether a profile covers the placement that the job was tuned for, on any kind that it may use. A policy that asks for speeds of
    /// those placements gives the job nothing otherwise.
    ///
    /// # Errors
    ///
    /// What the first kind's profile lacks.
    pub fn check_tuned(&self, inventory: &Inventory, models: &[Model]) -> Result<(), RangeError> {
        let Some(model) = models.get(self.model) else {
            return Err(RangeError::Model {
                job: self.name.clone(),
                model: self.model,
                models: models.len(),
            });
        };
        let speeds = inventory.kinds().filter_map(|kind| Some((kind.1, self.tuned_speed(model, kind)?)));
        let mut first = None;
        for (kind, speed) in speeds {
            match speed {
                Ok(_) => return Ok(()),
                Err(hole) => first = first.or(Some((kind, hole))),
            }
        }
        let Some((kind, hole)) = first else { return Ok(()) };
        let (job, kind) = (self.name.clone(), kind.name.clone());
        Err(RangeError::Hole { job, workers: self.workers, batch: self.batch, kind, hole })
    }
}
