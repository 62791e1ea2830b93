//! Sia (Subramanya et al., SOSP 2023): each round an integer program chooses one configuration for each job, by goodput that is
//! fitted while jobs run, against what a restart would cost.

use super::{Candidate, Policy, PolicyError, Round};
use crate::allocation::{Allocation, Free};
use crate::goodput::best;
use crate::inventory::{Kind, KindId};
use crate::job::Job;
use crate::program::{Configuration, Program};

/// Sia's constants; the defaults are the artifact's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SiaSettings {
    /// The exponent of goodput: below 0, costs are minimised, and the further below the fairer.
    pub fairness: f64,
    /// What a job without anything costs; the slowest configuration costs 1.
    pub idle_cost: f64,
}

impl Default for SiaSettings {
    fn default() -> Self {
        Self { fairness: -0.5, idle_cost: 1.1 }
    }
}

/// The most workers of a job: Sia's profiles have no more.
const MOST_WORKERS: u32 = 64;

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
            let pinned = candidate.current.filter(|_| candidate.is_starting);
            let configurations = match pinned {
                // Who is starting keeps what it has.
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
        let job = candidate.job;
        let most = (2 * candidate.most_workers).clamp(1, MOST_WORKERS).min(*job.ranges.workers.end());
        let most = most.max(*job.ranges.workers.start());
        let mut found: Vec<(KindId, u32, f64)> = Vec::new();
        for (id, kind) in round.inventory.kinds().filter(|(id, _)| job.may_use(*id)) {
            let sizes = sizes_of(job, kind, most);
            for workers in sizes.iter().copied() {
                if let Some(goodput) = goodput(round, candidate, (id, kind), workers).filter(|it| *it > 0.0) {
                    found.push((id, workers, goodput));
                }
            }
            // Nothing is known yet: all kinds are alike, with as few as possible.
            if candidate.noise.is_none()
                && candidate.model.profile(id).is_some()
                && let Some(workers) = sizes.first()
            {
                found.push((id, *workers, 1.0));
            }
        }
        let slowest = found.iter().map(|(.., goodput)| *goodput).fold(f64::INFINITY, f64::min);
        let factor = restart_factor(candidate);
        let cost = |(kind, workers, goodput): (KindId, u32, f64)| {
            let stays = candidate.current.is_some_and(|it| it.kind == kind && it.workers() == workers);
            let part = if stays || candidate.current.is_none() { 1.0 } else { factor };
            let worth = (goodput / slowest * part).max(1e-4);
            let cost = (worth.powf(self.settings.fairness) * 100.0).round_ties_even() / 100.0;
            Configuration { kind, workers, cost }
        };
        let configurations: Vec<Configuration> = found.into_iter().map(cost).collect();
        if configurations.iter().any(|it| !it.cost.is_finite()) {
            return Err(PolicyError::Value { policy: "Sia", job: job.name.clone() });
        }
        Ok(configurations)
    }
}

/// Which part of a job's worth remains if it restarts now, by how much it has already lost so.
fn restart_factor(candidate: &Candidate<'_>) -> f64 {
    let restart = candidate.model.facts().restart_guess;
    if candidate.age < restart {
        return 1.0;
    }
    (candidate.age - f64::from(candidate.restarts) * restart).max(0.0) / (candidate.age + restart)
}

/// How many workers a job may have on a kind: powers of two within a host, and whole hosts.
fn sizes(kind: &Kind) -> impl Iterator<Item = u32> {
    let (host, hosts) = (kind.accelerators, kind.hosts.min(kind.job_hosts));
    let within = (0..u32::BITS).map(|power| 1 << power).take_while(move |workers| *workers < host);
    within.chain((1..=hosts).map(move |hosts| hosts * host))
}

/// How many workers a job may have on a kind, the fewest first: Sia's sizes in its range up to `most`. Where its range has only larger ones,
/// the smallest of them. Where it has none, its fewest and what it was tuned for, so that no range waits for ever.
fn sizes_of(job: &Job, kind: &Kind, most: u32) -> Vec<u32> {
    let range = &job.ranges.workers;
    let mut in_range: Vec<u32> = sizes(kind).filter(|workers| range.contains(workers)).collect();
    let few = in_range.iter().filter(|workers| **workers <= most).count();
    if !in_range.is_empty() {
        in_range.truncate(few.max(1));
        return in_range;
    }
    let mut own = vec![*range.start(), job.workers];
    own.dedup();
    own.retain(|workers| *workers <= most && *workers <= kind.job_capacity());
    own
}

/// The best goodput of a job on so many workers that fill hosts: by what was measured on that kind, or else on another one, times how
/// much faster one worker is here. `None` where nothing is known.
///
/// Batches are those up to the one that the job was tuned for, as in the artifact; what runs may use its whole range.
fn goodput(
    round: &Round<'_>,
    candidate: &Candidate<'_>,
    (id, kind): (KindId, &Kind),
    workers: u32,
) -> Option<f64> {
    let model = candidate.model;
    let noise = candidate.noise?;
    let here = model.profile(id)?;
    let known = |(id, kind)| Some((kind, model.profile(id)?, candidate.fitted.get(id.0).copied().flatten()?));
    let (kind, profile, fitted) = known((id, kind)).or_else(|| round.inventory.kinds().find_map(known))?;
    let batches = (*candidate.job.ranges.batch.start(), candidate.job.batch);
    let range = model.range(profile, batches, profile.local_batch().1);
    let found = best(&fitted, noise, kind.hosts_of(workers), workers, range)?;
    let faster = here.single_rate() / profile.single_rate();
    Some(found.goodput * faster)
}

impl Policy for Sia {
    fn name(&self) -> &'static str {
        "Sia"
    }

    fn allocate(&mut self, round: &Round<'_>) -> Result<Vec<Option<Allocation>>, PolicyError> {
        let chosen = self.program(round)?.solve()?;
        let mut given: Vec<Option<Allocation>> = vec![None; round.jobs.len()];
        for (id, kind) in round.inventory.kinds() {
            let on_kind = given.iter_mut().zip(&chosen);
            let on_kind = on_kind.filter_map(|(given, chosen)| {
                let chosen = chosen.as_ref().filter(|chosen| chosen.kind == id)?;
                Some((given, chosen.workers))
            });
            let mut on_kind: Vec<(&mut Option<Allocation>, u32)> = on_kind.collect();
            on_kind.sort_by_key(|(_, workers)| std::cmp::Reverse(*workers));
            let mut free = Free::all(kind);
            let mut host = 0;
            for (given, workers) in on_kind {
                let accelerators = place(kind, &mut free, &mut host, workers);
                *given = Some(Allocation { kind: id, accelerators });
            }
        }
        Ok(given)
    }
}

/// Places a job beginning at a host: whole hosts first, then whatever hosts have. The next job begins where this one ends.
fn place(kind: &Kind, free: &mut Free, host: &mut u32, workers: u32) -> Vec<u32> {
    let mut accelerators = Vec::with_capacity(workers as usize);
    let mut left = workers;
    for whole in [true, false] {
        for _ in 0..kind.hosts {
            if left == 0 || (whole && left < kind.accelerators) {
                break;
            }
            if !whole || free.of_host(kind, *host) == kind.accelerators {
                let taken = free.take_of_host(kind, *host, left);
                left -= u32::try_from(taken.len()).unwrap_or(left).min(left);
                accelerators.extend(taken);
            }
            *host = (*host + 1) % kind.hosts;
        }
    }
    accelerators
}
