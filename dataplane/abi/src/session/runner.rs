//! What a launcher of workers on a host says of itself, and what the provider has it do.

use super::is_name;
use crate::Rank;
use alloc::string::String;
use serde::{Deserialize, Serialize};

/// A bit of the id of [`Request::Detail`](super::Request::Detail), of whichever communicator: the process wants to be a runner.
/// An agent that reads [`Request::Runner`](super::Request::Runner) answers
/// [`Answer::TakesRunners`](super::Answer::TakesRunners), and one of an earlier release as ever.
pub const RUNNERS: u64 = 1 << 60;

/// Where a worker stands among those of its job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerPlace {
    /// Counts the job's sets of workers, from 1. Workers of two generations never belong together.
    pub generation: u64,
    /// Its rank, below `workers`.
    pub rank: Rank,
    /// How many workers the generation has.
    pub workers: u32,
}

/// What has become of a runner's worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WorkerState {
    /// There is none, and none has ended since the last offer.
    None,
    /// It runs.
    Running {
        /// Its place.
        place: WorkerPlace,
        /// Whether it was asked to end.
        stopping: bool,
    },
    /// It has ended.
    Ended {
        /// Its place.
        place: WorkerPlace,
        /// Whether with exit status 0.
        succeeded: bool,
    },
}

/// What a runner says of itself: all of it, each time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunnerReport {
    /// The runner's own number, which it has chosen at random.
    pub runner: u64,
    /// The job's name.
    pub job: String,
    /// The fewest and the most workers of the job.
    pub workers: (u32, u32),
    /// What has become of its worker.
    pub state: WorkerState,
}

/// Why a runner's report makes no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunnerError {
    /// Names of jobs are as those of communicators, without `/` and `#`.
    Job,
    /// A range without members, or of no workers: this one.
    Workers {
        /// The fewest.
        least: u32,
        /// The most.
        most: u32,
    },
    /// A rank beyond the workers, or a generation that was never given.
    Place,
}

impl core::fmt::Display for RunnerError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Job => f.write_str("no job can have this name: 1 to 128 visible bytes, no `/` and no `#`"),
            Self::Workers { least, most } => {
                let (nearest, larger) = ((*least).max(1), (*most).max(*least).max(1));
                write!(
                    f,
                    "no number of workers is in {least}..{most}; the nearest range is {nearest}..{larger}"
                )
            }
            Self::Place => f.write_str("a worker of a place that is never given"),
        }
    }
}

impl core::error::Error for RunnerError {}

impl RunnerReport {
    /// Whether it makes sense.
    ///
    /// # Errors
    /// What makes none; of a range with the nearest that does.
    pub fn check(&self) -> Result<(), RunnerError> {
        if !is_name(&self.job) || self.job.contains(['/', '#']) {
            return Err(RunnerError::Job);
        }
        let (least, most) = self.workers;
        if least == 0 || least > most {
            return Err(RunnerError::Workers { least, most });
        }
        match self.state {
            WorkerState::Running { place, .. } | WorkerState::Ended { place, .. }
                if place.generation == 0 || place.rank.0 >= place.workers =>
            {
                Err(RunnerError::Place)
            }
            _ => Ok(()),
        }
    }
}

/// Why a worker is to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RecallReason {
    /// For what a later release knows.
    Unknown,
    /// The job goes on with more workers, or fewer.
    Resized,
    /// The job has no workers for now.
    Suspended,
    /// A worker's runner is gone.
    WorkerLost,
    /// A worker has failed.
    WorkerFailed,
    /// Its generation is over.
    Outdated,
}

/// What a runner is to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RunnerOrder {
    /// Nothing new; ask again.
    Wait,
    /// Start a worker.
    Offer {
        /// Its place.
        place: WorkerPlace,
        /// How long a worker has to end when it is asked to, in nanoseconds.
        notice_ns: u64,
    },
    /// End the worker of this generation.
    Recall {
        /// Its generation.
        generation: u64,
        /// Why.
        reason: RecallReason,
        /// How long it has for that, in nanoseconds. Then it is killed.
        notice_ns: u64,
    },
    /// The job is over.
    Over {
        /// Whether all its workers have succeeded.
        succeeded: bool,
    },
    /// The job can never run as it is.
    Infeasible {
        /// Why, for people.
        text: String,
        /// The fewest and the most workers of the nearest range that could.
        nearest: (u32, u32),
    },
}

/// What a runner of an elastic job is to do. The workers of such a job run on when it gets more hosts or fewer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ElasticOrder {
    /// What a runner of any job may be told. An offer is a place in a generation whose workers all start.
    Order(RunnerOrder),
    /// The worker runs on, at a place in a later generation. A runner without one does nothing.
    Resize {
        /// Its place.
        place: WorkerPlace,
    },
    /// Start a worker beside those that run on.
    Enter {
        /// Its place.
        place: WorkerPlace,
        /// How long a worker has to end when it is asked to, in nanoseconds.
        notice_ns: u64,
    },
}

impl ElasticOrder {
    /// The order as a runner of any other job gets it. What is for elastic jobs alone is nothing to do.
    pub fn of_any_job(self) -> RunnerOrder {
        match self {
            Self::Order(order) => order,
            Self::Resize { .. } | Self::Enter { .. } => RunnerOrder::Wait,
        }
    }
}

impl From<RunnerOrder> for ElasticOrder {
    fn from(order: RunnerOrder) -> Self {
        Self::Order(order)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(job: &str, workers: (u32, u32), state: WorkerState) -> RunnerReport {
        RunnerReport { runner: 1, job: job.into(), workers, state }
    }

    #[test]
    fn ranges_without_members_are_refused_with_the_nearest() {
        let check = |workers| report("job", workers, WorkerState::None).check();
        assert_eq!((check((1, 1)), check((2, 8))), (Ok(()), Ok(())));
        let text = |workers| alloc::string::ToString::to_string(&check(workers).unwrap_err());
        assert!(text((0, 4)).ends_with("the nearest range is 1..4"), "{}", text((0, 4)));
        assert!(text((8, 2)).ends_with("the nearest range is 8..8"), "{}", text((8, 2)));
        assert!(text((0, 0)).ends_with("the nearest range is 1..1"), "{}", text((0, 0)));
    }

    #[test]
    fn names_and_places_that_are_never_given_are_refused() {
        for job in ["", "a/b", "/a", "a#1", "a\n"] {
            assert_eq!(report(job, (1, 1), WorkerState::None).check(), Err(RunnerError::Job), "{job:?}");
        }
        for (generation, rank, workers) in [(0, 0, 1), (1, 1, 1), (1, 0, 0)] {
            let place = WorkerPlace { generation, rank: Rank(rank), workers };
            let state = WorkerState::Ended { place, succeeded: true };
            assert_eq!(report("job", (1, 1), state).check(), Err(RunnerError::Place), "{place:?}");
        }
    }
}
