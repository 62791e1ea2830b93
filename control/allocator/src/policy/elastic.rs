//! Jobs whose workers and batches may change. Here are the sizes that they may have, what each is worth, and where they are
//! placed. Sizes and worth are Sia's, so that policies that share them have the same choices.

use super::{Candidate, Round};
use crate::allocation::{Allocation, Free};
use crate::goodput::best;
use crate::inventory::{Kind, KindId};
use crate::job::Job;

/// The most workers of a job: Sia's profiles have no more.
const MOST_WORKERS: u32 = 64;

/// The least that a size is worth.
const LEAST_WORTH: f64 = 1e-4;

/// Workers of a kind that a job may get.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Size {
    pub(super) kind: KindId,
    pub(super) workers: u32,
    /// Goodput over that of the job's slowest size, less the part that a restart costs.
    pub(super) worth: f64,
}

/// What a job keeps in any case: what it has while it is starting.
pub(super) fn pinned<'a>(candidate: &Candidate<'a>) -> Option<&'a Allocation> {
    candidate.current.filter(|_| candidate.is_starting)
}

/// What a job may get, kind by kind, the fewest workers first. Jobs start with one worker, or the fewest of their range, and may double.
pub(super) fn sizes(round: &Round<'_>, candidate: &Candidate<'_>) -> Vec<Size> {
    let job = candidate.job;
    let most = (2 * candidate.most_workers).clamp(1, MOST_WORKERS).min(*job.ranges.workers.end());
    let most = most.max(*job.ranges.workers.start());
    let mut found: Vec<(KindId, u32, f64)> = Vec::new();
    for (id, kind) in round.inventory.kinds().filter(|(id, _)| job.may_use(*id)) {
        let Some(profile) = candidate.model.profile(id) else { continue };
        let busy = *job.ranges.batch.end() / profile.local_batch().0.max(1);
        let mut counts = counts(job, kind, (most, busy));
        // What no profile covers cannot be predicted, however good it might be.
        counts.retain(|workers| profile.most_samples(&kind.filled(*workers)).is_some());
        for workers in counts.iter().copied() {
            if let Some(goodput) = goodput(round, candidate, (id, kind), workers).filter(|it| *it > 0.0) {
                found.push((id, workers, goodput));
            }
        }
        // Nothing was measured yet: all kinds are alike, with as few as possible.
        if let (None, Some(workers)) = (candidate.noise, counts.first()) {
            found.push((id, *workers, 1.0));
        }
    }
    let slowest = found.iter().map(|(.., goodput)| *goodput).fold(f64::INFINITY, f64::min);
    let factor = restart_factor(candidate);
    let size = |(kind, workers, goodput): (KindId, u32, f64)| {
        let stays = candidate.current.is_some_and(|it| it.kind == kind && it.workers() == workers);
        let part = if stays || candidate.current.is_none() { 1.0 } else { factor };
        Size { kind, workers, worth: (goodput / slowest * part).max(LEAST_WORTH) }
    };
    found.into_iter().map(size).collect()
}

/// Which part of a job's worth remains if it restarts now, by how much it has already lost so.
fn restart_factor(candidate: &Candidate<'_>) -> f64 {
    let restart = candidate.model.facts().restart_guess;
    if candidate.age < restart {
        return 1.0;
    }
    (candidate.age - f64::from(candidate.restarts) * restart).max(0.0) / (candidate.age + restart)
}

/// The numbers of workers that a job may have on a kind, the fewest first. They are Sia's sizes in its range up to `most`. Where
/// its range has only larger ones, the smallest of them. Where it has none, its fewest and what it was tuned for, so that no
/// range waits for ever. More than `busy` have less than a pass each, even of the largest batch.
fn counts(job: &Job, kind: &Kind, (most, busy): (u32, u32)) -> Vec<u32> {
    let range = *job.ranges.workers.start()..=busy.min(*job.ranges.workers.end());
    let mut in_range: Vec<u32> = regular(kind).filter(|workers| range.contains(workers)).collect();
    let few = in_range.iter().filter(|workers| **workers <= most).count();
    if !in_range.is_empty() {
        in_range.truncate(few.max(1));
        return in_range;
    }
    let mut own = vec![*range.start(), job.workers];
    own.dedup();
    own.retain(|workers| *workers <= most.min(busy) && *workers <= kind.job_capacity());
    own
}

/// Sia's sizes on a kind: powers of two within a host, and whole hosts.
fn regular(kind: &Kind) -> impl Iterator<Item = u32> {
    let (host, hosts) = (kind.accelerators, kind.hosts.min(kind.job_hosts));
    let within = (0..u32::BITS).map(|power| 1 << power).take_while(move |workers| *workers < host);
    within.chain((1..=hosts).map(move |hosts| hosts * host))
}

/// The best goodput of a job on so many workers that fill hosts. It follows from what was measured on that kind, or else on another
/// one, times how much faster one worker is here. `None` where nothing was measured.
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
    let fit = |(id, kind)| Some((kind, model.profile(id)?, candidate.fitted.get(id.0).copied().flatten()?));
    let (kind, profile, fitted) = fit((id, kind)).or_else(|| round.inventory.kinds().find_map(fit))?;
    let batches = (*candidate.job.ranges.batch.start(), candidate.job.batch);
    let range = model.range(profile, batches, profile.local_batch().1);
    let found = best(&fitted, noise, kind.hosts_of(workers), workers, range)?;
    let faster = here.single_rate() / profile.single_rate();
    Some(found.goodput * faster)
}

/// Accelerators for what was chosen, the largest jobs first.
pub(super) fn assign(round: &Round<'_>, chosen: &[Option<(KindId, u32)>]) -> Vec<Option<Allocation>> {
    let mut given: Vec<Option<Allocation>> = vec![None; round.jobs.len()];
    for (id, kind) in round.inventory.kinds() {
        let on_kind = given.iter_mut().zip(chosen).filter_map(|(given, chosen)| {
            let (_, workers) = chosen.filter(|(kind, _)| *kind == id)?;
            Some((given, workers))
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
    given
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
