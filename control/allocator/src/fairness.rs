//! Finish-time fairness (Mahajan et al., "Themis", NSDI 2020). It is how long a job took, over how long it takes with a share of the
//! inventory of its own. Shares and means are those of Sia's artifact.

use crate::inventory::{Inventory, Kind, KindId};
use crate::job::Job;
use crate::model::Model;
use crate::policy::Policy;
use crate::simulator::{JobOutcome, Outcome, Settings, SimulationError, simulate};

/// Makes a policy that has decided nothing yet.
pub type MakePolicy<'a> = &'a dyn Fn() -> Box<dyn Policy>;

/// What jobs are run alone with.
struct Alone<'a> {
    inventory: &'a Inventory,
    models: &'a [Model],
    policy: MakePolicy<'a>,
    settings: Settings,
}

/// Each job's completion time over that with a share of its own: above 1, sharing cost the job time. The share is the inventory's
/// accelerators divided by how many jobs there were in the mean while it was there. `None` for a job that cannot run alone on any kind.
///
/// The time alone is the mean over kinds, weighted by their accelerators. Between whole workers it lies on a line. A share below the fewest
/// workers of a job takes longer in proportion.
///
/// # Errors
///
/// The policy cannot decide, or a job alone does not end within the rounds.
pub fn finish_time_ratios(
    inventory: &Inventory,
    models: &[Model],
    (jobs, outcome): (&[Job], &Outcome),
    policy: MakePolicy<'_>,
    settings: Settings,
) -> Result<Vec<Option<f64>>, SimulationError> {
    let alone = Alone { inventory, models, policy, settings };
    jobs.iter().zip(&outcome.jobs).map(|(job, ended)| alone.ratio(job, ended)).collect()
}

impl Alone<'_> {
    fn ratio(&self, job: &Job, ended: &JobOutcome) -> Result<Option<f64>, SimulationError> {
        let share = self.inventory.capacity() as f64 / ended.contention;
        let (mut sum, mut weights) = (0.0, 0.0);
        for (id, kind) in self.inventory.kinds().filter(|(id, _)| job.may_use(*id)) {
            if let Some(time) = self.with_share(job, (id, kind), share)? {
                sum += f64::from(kind.capacity()) * time;
                weights += f64::from(kind.capacity());
            }
        }
        Ok(Some(ended.completion_time() * weights / sum).filter(|ratio| ratio.is_finite()))
    }

    /// Seconds that a job takes with a share of a kind; `None` where it cannot run there.
    fn with_share(
        &self,
        job: &Job,
        (id, kind): (KindId, &Kind),
        share: f64,
    ) -> Result<Option<f64>, SimulationError> {
        let range = &job.ranges.workers;
        let (least, most) = match self.settings.adapts_batch {
            true => (*range.start(), *range.end().min(&kind.job_capacity())),
            false => (job.workers, job.workers),
        };
        if share <= f64::from(least) {
            let time = self.with_workers(job, id, least)?;
            return Ok(time.map(|time| time * f64::from(least) / share));
        }
        if share >= f64::from(most) {
            return self.with_workers(job, id, most);
        }
        let fewer = share.floor() as u32;
        let Some(longer) = self.with_workers(job, id, fewer)? else { return Ok(None) };
        let part = share - f64::from(fewer);
        if part == 0.0 {
            return Ok(Some(longer));
        }
        let shorter = self.with_workers(job, id, fewer + 1)?;
        Ok(shorter.map(|shorter| longer + part * (shorter - longer)))
    }

    /// Seconds that a job takes alone with up to so many workers of a kind. It arrives as long after a round's begin as it did.
    fn with_workers(&self, job: &Job, id: KindId, most: u32) -> Result<Option<f64>, SimulationError> {
        let mut job = job.clone();
        job.arrival %= f64::from(self.settings.round);
        job.ranges.kinds = vec![id];
        job.ranges.workers = *job.ranges.workers.start()..=most;
        job.workers = job.workers.min(most);
        let mut policy = (self.policy)();
        let jobs = std::slice::from_ref(&job);
        match simulate(self.inventory, self.models, jobs, policy.as_mut(), self.settings) {
            Ok(outcome) => Ok(outcome.jobs.first().map(JobOutcome::completion_time)),
            // It cannot run there, or nothing was measured of what it would do there.
            Err(
                SimulationError::Range(_) | SimulationError::Profile { .. } | SimulationError::Unknown { .. },
            ) => Ok(None),
            Err(error) => Err(error),
        }
    }
}
