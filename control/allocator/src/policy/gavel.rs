//! Gavel's largest sum of throughputs (Narayanan et al., "Heterogeneity-Aware Cluster Scheduling Policies for Deep Learning Workloads",
//! OSDI 2020). A linear program says which part of the time each job should have each kind, and rounds give it that.

use super::tuned::{Pool, steps_per_second};
use super::{Candidate, Policy, PolicyError, Round};
use crate::allocation::Allocation;
use crate::inventory::KindId;
use good_lp::{
    Expression, ProblemVariables, Solution, SolverModel, WithTimeLimit, constraint, microlp, variable,
};
use std::collections::BTreeMap;
use std::time::Duration;

/// What a job that no kind can hold counts as, in steps a second. It is as in Sia's artifact, so that the job shares in
/// the program.
const IMPOSSIBLE: f64 = 0.1;

/// The time that the linear program may take. Beyond it each job should have each kind for the same part of the time.
const LIMIT: Duration = Duration::from_secs(10);

/// Gavel, with the workers that jobs were tuned for.
#[derive(Debug, Clone)]
pub struct Gavel {
    limit: Duration,
    /// Seconds that each job has had each kind, and half a round beforehand.
    received: BTreeMap<(usize, KindId), f64>,
    /// The same of all jobs that ever were.
    given: BTreeMap<KindId, f64>,
}

impl Default for Gavel {
    fn default() -> Self {
        Self::new(LIMIT)
    }
}

/// Jobs that the program cannot tell apart: as fast on each kind, with as many workers.
struct Class {
    speeds: Vec<f64>,
    workers: u32,
    jobs: usize,
}

impl Policy for Gavel {
    fn name(&self) -> &'static str {
        "Gavel"
    }

    fn allocate(&mut self, round: &Round<'_>) -> Result<Vec<Option<Allocation>>, PolicyError> {
        for (kind, _) in round.inventory.kinds() {
            for candidate in round.jobs {
                self.received.entry((candidate.number, kind)).or_insert_with(|| {
                    *self.given.entry(kind).or_default() += round.seconds / 2.0;
                    round.seconds / 2.0
                });
            }
        }
        let parts = parts(round, self.limit);
        let placed = self.choose(round, &parts);
        let given = assign(round, placed);
        for (candidate, allocation) in round.jobs.iter().zip(&given) {
            let Some(allocation) = allocation else { continue };
            *self.received.entry((candidate.number, allocation.kind)).or_default() += round.seconds;
            *self.given.entry(allocation.kind).or_default() += round.seconds;
        }
        Ok(given)
    }
}

impl Gavel {
    /// With a time of its own for the linear program, a day at most.
    pub fn new(limit: Duration) -> Self {
        let limit = limit.min(Duration::from_secs(86_400));
        Self { limit, received: BTreeMap::new(), given: BTreeMap::new() }
    }

    /// On which kind each job runs in this round: those furthest behind their part first.
    fn choose(&self, round: &Round<'_>, parts: &[Vec<f64>]) -> Vec<Option<KindId>> {
        let mut left: Vec<u32> = round.inventory.kinds().map(|(_, kind)| kind.capacity()).collect();
        let mut queue: Vec<(usize, KindId, f64, f64)> = Vec::new();
        for (kind, _) in round.inventory.kinds() {
            let given = self.given.get(&kind).copied().unwrap_or(0.0);
            let jobs = round.jobs.iter().zip(parts).enumerate();
            let able = |candidate: &Candidate<'_>| {
                candidate.job.may_use(kind) && candidate.model.profile(kind).is_some()
            };
            for (place, (candidate, parts)) in jobs.filter(|(_, (candidate, _))| able(candidate)) {
                let part = parts.get(kind.0).copied().unwrap_or(0.0);
                let received = self.received.get(&(candidate.number, kind)).copied().unwrap_or(0.0);
                queue.push((place, kind, part * given / received, part));
            }
        }
        queue.sort_by(|one, other| other.2.total_cmp(&one.2).then(other.3.total_cmp(&one.3)));
        let mut chosen: Vec<Option<KindId>> = vec![None; round.jobs.len()];
        for (place, kind, ..) in queue {
            let (Some(chosen), Some(candidate)) = (chosen.get_mut(place), round.jobs.get(place)) else {
                continue;
            };
            let workers = candidate.job.workers;
            if let Some(left) = left.get_mut(kind.0).filter(|left| **left >= workers)
                && chosen.is_none()
            {
                *left -= workers;
                *chosen = Some(kind);
            }
        }
        chosen
    }
}

/// The part of the time that each job should have each kind. Jobs of a class get the same, so that the outcome does not depend on
/// which of several best solutions the solver finds.
fn parts(round: &Round<'_>, limit: Duration) -> Vec<Vec<f64>> {
    let mut classes: Vec<Class> = Vec::new();
    let mut class_of: Vec<usize> = Vec::new();
    for candidate in round.jobs {
        let speeds = speeds(round, candidate);
        let workers = candidate.job.workers;
        let known = classes.iter().position(|class| class.speeds == speeds && class.workers == workers);
        let class = known.unwrap_or_else(|| {
            classes.push(Class { speeds, workers, jobs: 0 });
            classes.len() - 1
        });
        if let Some(class) = classes.get_mut(class) {
            class.jobs += 1;
        }
        class_of.push(class);
    }
    let kinds = round.inventory.kinds().len();
    let even = || vec![vec![1.0 / kinds as f64; kinds]; classes.len()];
    let by_class = solve(round, &classes, limit).unwrap_or_else(even);
    class_of.iter().map(|class| by_class.get(*class).cloned().unwrap_or_default()).collect()
}

fn speeds(round: &Round<'_>, candidate: &Candidate<'_>) -> Vec<f64> {
    let speed = |(id, kind)| {
        let speed = steps_per_second(candidate, id, kind);
        if speed > 0.0 || !candidate.job.may_use(id) { speed } else { IMPOSSIBLE }
    };
    round.inventory.kinds().map(speed).collect()
}

/// Returns a class's part of each kind, for each of its jobs. Returns `None` where the limit passes first, or the solver fails.
fn solve(round: &Round<'_>, classes: &[Class], limit: Duration) -> Option<Vec<Vec<f64>>> {
    let mut variables = ProblemVariables::new();
    let mut goal = Expression::default();
    let mut used: Vec<Expression> = round.inventory.kinds().map(|_| Expression::default()).collect();
    let mut shares = Vec::new();
    for class in classes {
        let of_class: Vec<_> = class.speeds.iter().map(|_| variables.add(variable().min(0.0))).collect();
        for ((share, speed), used) in of_class.iter().zip(&class.speeds).zip(&mut used) {
            goal.add_mul(*speed, *share);
            used.add_mul(class.workers, *share);
        }
        shares.push(of_class);
    }
    let mut program = variables.maximise(goal).using(microlp).with_time_limit(limit.as_secs_f64());
    for (used, (_, kind)) in used.into_iter().zip(round.inventory.kinds()) {
        program = program.with(constraint!(used <= kind.capacity()));
    }
    for (shares, class) in shares.iter().zip(classes) {
        let sum: Expression = shares.iter().sum();
        program = program.with(constraint!(sum <= class.jobs as f64));
    }
    let solved = program.solve().ok()?;
    let part = |share, class: &Class| {
        let part = solved.value(share) / class.jobs.max(1) as f64;
        ((part * 1e5).round_ties_even() / 1e5).clamp(0.0, 1.0) + 0.0
    };
    let of_class =
        |(shares, class): (&Vec<_>, &Class)| shares.iter().map(|share| part(*share, class)).collect();
    Some(shares.iter().zip(classes).map(of_class).collect())
}

/// Accelerators for the chosen: large jobs first, and who can stays.
fn assign(round: &Round<'_>, chosen: Vec<Option<KindId>>) -> Vec<Option<Allocation>> {
    let mut given: Vec<Option<Allocation>> = vec![None; round.jobs.len()];
    for pool in &mut Pool::all(round.inventory) {
        let on_kind = given.iter_mut().zip(round.jobs).zip(&chosen);
        let on_kind = on_kind.filter(|(_, chosen)| **chosen == Some(pool.id)).map(|(job, _)| job);
        let mut on_kind: Vec<(&mut Option<Allocation>, &Candidate<'_>)> = on_kind.collect();
        on_kind.sort_by_key(|(_, candidate)| std::cmp::Reverse(candidate.job.workers));
        for alike in on_kind.chunk_by_mut(|(_, one), (_, other)| one.job.workers == other.job.workers) {
            for (given, candidate) in alike.iter_mut() {
                let current = candidate.current.filter(|current| current.kind == pool.id);
                **given = current.filter(|current| pool.free.take(&current.accelerators)).cloned();
            }
            for (given, candidate) in alike.iter_mut().filter(|(given, _)| given.is_none()) {
                let accelerators = pool.free.take_lowest(candidate.job.workers);
                **given = accelerators.map(|accelerators| Allocation { kind: pool.id, accelerators });
            }
        }
    }
    given
}
