//! A round: which hosts each job has until the next, by a policy of the allocator.

use crate::state::settings::LivePolicy;
use harmonaize_allocator::{
    Allocation, AllocationError, Candidate, Epoch, Facts, Fifo, Inventory, InventoryError, Job, Kind, KindId,
    LeastAttained, Model, ModelError, Noise, Placement, Policy, PolicyError, Profile, ProfileError, Ranges,
    Round, StepTime,
};
use harmonaize_api::v1::AllocationReason;
use harmonaize_planner::HostId;
use std::collections::{BTreeMap, BTreeSet};
use std::num::TryFromIntError;
use std::time::Duration;

/// Why a policy cannot decide. The text goes to operators.
#[derive(Debug, thiserror::Error)]
pub(super) enum ShareError {
    /// More hosts than are counted.
    #[error(transparent)]
    Hosts(#[from] TryFromIntError),
    /// The hosts make no inventory.
    #[error(transparent)]
    Inventory(#[from] InventoryError),
    /// The jobs make no profile.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// The jobs make no model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The policy fails.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The policy gives what is not there.
    #[error(transparent)]
    Allocation(#[from] AllocationError),
}

/// A job that a round decides about.
#[derive(Clone, Debug)]
pub(super) struct Wish {
    /// The job's number, in order of arrival.
    pub number: usize,
    /// The fewest and the most workers.
    pub workers: (u32, u32),
    /// Since when it is there.
    pub arrived: Duration,
    /// What its workers have had: time of hosts.
    pub attained: Duration,
    /// Hosts where it may have a worker.
    pub hosts: BTreeSet<HostId>,
    /// How many it could have without other jobs.
    pub most_hosts: usize,
    /// Hosts that it has, by rank.
    pub current: Vec<HostId>,
}

/// What a round decided about a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Share {
    /// Its hosts, by rank: those that it had come first. None: it waits.
    pub hosts: Vec<HostId>,
    /// Why.
    pub reason: AllocationReason,
    /// The same for people.
    pub text: String,
}

impl Share {
    fn none(reason: AllocationReason, text: String) -> Self {
        Self { hosts: Vec::new(), reason, text }
    }
}

/// What each job has until the next round: the policy gives the fewest workers of a job's range, or nothing. Hosts that are left over go
/// to those that run, one to each in turn.
///
/// # Errors
/// Why the policy cannot decide.
pub(super) fn share(policy: LivePolicy, now: Duration, wishes: &[Wish]) -> Result<Vec<Share>, ShareError> {
    let named = policy.name();
    let mut shares: Vec<Share> = wishes
        .iter()
        .map(|wish| {
            let (hosts, least) = (wish.most_hosts, wish.workers.0);
            if hosts >= least as usize {
                return Share::none(AllocationReason::NoRoom, String::new());
            }
            let text = format!("its runners are on {hosts} hosts that may be used, and it needs {least}");
            Share::none(AllocationReason::TooFewRunners, text)
        })
        .collect();
    let feasible = |wish: &Wish| wish.workers.0 > 0 && wish.hosts.len() >= wish.workers.0 as usize;
    // Between rounds, too, nobody passes by an earlier job that could use what is free.
    let lacks = |wish: &Wish| !feasible(wish) && wish.most_hosts >= wish.workers.0 as usize;
    let first = wishes.iter().position(lacks).filter(|_| policy == LivePolicy::Fifo);
    let reached = wishes.iter().take(first.unwrap_or(wishes.len()));
    let considered: Vec<usize> =
        reached.enumerate().filter(|(_, wish)| feasible(wish)).map(|(at, _)| at).collect();
    let of = |at: &usize| wishes.get(*at);
    let pool: BTreeSet<HostId> =
        considered.iter().filter_map(of).flat_map(|wish| wish.hosts.iter().copied()).collect();
    let pool: Vec<HostId> = pool.into_iter().collect();
    let given = decide(policy, now, &pool, &considered.iter().filter_map(of).collect::<Vec<_>>())?;

    let mut places = Places::new(wishes);
    // Who has hosts keeps them before others are placed.
    let has = |at: &usize| of(at).is_some_and(|wish| !wish.current.is_empty());
    let (keep, new): (Vec<_>, Vec<_>) = considered.iter().zip(given).partition(|(at, _)| has(at));
    let mut running = Vec::new();
    for (at, given) in keep.into_iter().chain(new) {
        let (Some(wish), Some(share)) = (wishes.get(*at), shares.get_mut(*at)) else { continue };
        *share = Share::none(AllocationReason::NoRoom, String::new());
        let Some(given) = given else { continue };
        let preferred = given.accelerators.iter().filter_map(|each| pool.get(*each as usize).copied());
        let hosts = places.take(wish, &preferred.collect::<Vec<_>>(), wish.workers.0 as usize);
        if !hosts.is_empty() {
            share.hosts = hosts;
            running.push(*at);
        }
    }
    running.sort_unstable();
    loop {
        let mut grew = false;
        for at in &running {
            let (Some(wish), Some(share)) = (wishes.get(*at), shares.get_mut(*at)) else { continue };
            if share.hosts.len() < wish.workers.1 as usize {
                let more = places.take(wish, &[], 1);
                grew |= !more.is_empty();
                share.hosts.extend(more);
            }
        }
        if !grew {
            break;
        }
    }
    for (wish, share) in wishes.iter().zip(&mut shares) {
        share.hosts = by_rank(&wish.current, &share.hosts);
        let (has, (least, most)) = (share.hosts.len(), wish.workers);
        (share.reason, share.text) = match share.reason {
            AllocationReason::TooFewRunners => continue,
            _ if has == 0 => (
                AllocationReason::NoRoom,
                format!("policy {named} gives hosts that it could use to other jobs"),
            ),
            _ if has >= most as usize => (AllocationReason::Most, format!("it has all {most} that it may")),
            _ if has > least as usize => {
                let more = has - least as usize;
                (
                    AllocationReason::Spare,
                    format!("{more} of {has} are spare, and go once another job needs them"),
                )
            }
            _ => (
                AllocationReason::Least,
                format!("policy {named} gives it its fewest, {least}; no other is spare"),
            ),
        };
    }
    Ok(shares)
}

/// A job's place in the policy's order: the least goes first.
pub(super) fn precedence(policy: LivePolicy, attained: Duration, number: usize) -> (Duration, usize) {
    match policy {
        LivePolicy::Fifo => (Duration::ZERO, number),
        LivePolicy::LeastAttained => (attained, number),
    }
}

/// Returns what the policy gives of the pool's hosts. It sees them as alike: how fast live jobs are on which is not known.
fn decide(
    policy: LivePolicy,
    now: Duration,
    pool: &[HostId],
    wishes: &[&Wish],
) -> Result<Vec<Option<Allocation>>, ShareError> {
    if pool.is_empty() {
        return Ok(Vec::new());
    }
    let hosts = u32::try_from(pool.len())?;
    let kind = Kind { name: "hosts".to_owned(), hosts, accelerators: 1, job_hosts: hosts };
    let inventory = Inventory::new(vec![kind])?;
    let model = any_model(wishes.iter().map(|wish| wish.workers.0))?;
    let jobs: Vec<Job> = wishes
        .iter()
        .map(|wish| {
            let (least, most) = wish.workers;
            Job {
                name: wish.number.to_string(),
                arrival: wish.arrived.as_secs_f64(),
                model: 0,
                workers: least,
                batch: least,
                ranges: Ranges { workers: least..=most, kinds: Vec::new(), batch: least..=least },
            }
        })
        .collect();
    let current: Vec<Option<Allocation>> = wishes
        .iter()
        .map(|wish| {
            let place = |host: &HostId| u32::try_from(pool.binary_search(host).ok()?).ok();
            let usable = wish.current.iter().filter(|host| wish.hosts.contains(host));
            let accelerators: Vec<u32> = usable.filter_map(place).take(wish.workers.0 as usize).collect();
            let whole = accelerators.len() == wish.workers.0 as usize;
            whole.then_some(Allocation { kind: KindId(0), accelerators })
        })
        .collect();
    let candidates: Vec<Candidate<'_>> = wishes
        .iter()
        .zip(&jobs)
        .zip(&current)
        .map(|((wish, job), current)| Candidate {
            number: wish.number,
            job,
            model: &model,
            age: now.saturating_sub(wish.arrived).as_secs_f64(),
            restarts: 0,
            attained: wish.attained.as_secs_f64(),
            is_starting: false,
            current: current.as_ref(),
            fitted: &[],
            noise: None,
            most_workers: wish.workers.1,
        })
        .collect();
    let round = Round { inventory: &inventory, seconds: 0.0, jobs: &candidates };
    let given = match policy {
        LivePolicy::Fifo => Fifo.allocate(&round),
        LivePolicy::LeastAttained => LeastAttained.allocate(&round),
    };
    let given = given?;
    harmonaize_allocator::check(&inventory, &given)?;
    Ok(given)
}

/// A model whose steps take as long with any of these numbers of workers.
fn any_model(workers: impl Iterator<Item = u32>) -> Result<Model, ShareError> {
    let counts: BTreeSet<u32> = workers.chain([1]).collect();
    let placement = |count: u32| Placement {
        shape: vec![1; count as usize],
        batch: 1,
        time: StepTime { step: 1.0, exchange: 0.0 },
    };
    let profile = Profile::new(counts.into_iter().map(placement).collect(), Vec::new(), None);
    let epoch = Epoch { progress: 1.0, noise: Noise { square: 1.0, variance: 1.0 } };
    let records = BTreeMap::from([(1, vec![epoch]), (u32::MAX, vec![epoch])]);
    let facts = Facts { name: "any".to_owned(), epochs: 1, restart: 0.0, restart_guess: 0.0, slowdown: 1.0 };
    Ok(Model::new(facts, records, vec![Some(profile?)])?)
}

/// Hosts that are taken, and how many jobs may use each.
struct Places {
    taken: BTreeSet<HostId>,
    users: BTreeMap<HostId, usize>,
}

impl Places {
    fn new(wishes: &[Wish]) -> Self {
        let mut users: BTreeMap<HostId, usize> = BTreeMap::new();
        for host in wishes.iter().flat_map(|wish| &wish.hosts) {
            *users.entry(*host).or_default() += 1;
        }
        Self { taken: BTreeSet::new(), users }
    }

    /// Takes so many hosts for a job, or none. First those that it has, then those that fewest others may use, of them preferred ones.
    fn take(&mut self, wish: &Wish, preferred: &[HostId], count: usize) -> Vec<HostId> {
        let place = |host: &HostId| {
            let had = !wish.current.contains(host);
            (had, self.users.get(host).copied().unwrap_or(0), !preferred.contains(host), *host)
        };
        let mut free: Vec<HostId> =
            wish.hosts.iter().filter(|host| !self.taken.contains(host)).copied().collect();
        if free.len() < count {
            return Vec::new();
        }
        free.sort_by_key(place);
        free.truncate(count);
        self.taken.extend(&free);
        free
    }
}

/// Hosts by rank: those that a job had in their order, then the others.
fn by_rank(before: &[HostId], hosts: &[HostId]) -> Vec<HostId> {
    let mut others: Vec<HostId> = hosts.iter().filter(|host| !before.contains(host)).copied().collect();
    others.sort_unstable();
    before.iter().filter(|host| hosts.contains(host)).copied().chain(others).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(numbers: &[usize]) -> Vec<HostId> {
        numbers.iter().copied().map(HostId).collect()
    }

    fn wish(number: usize, workers: (u32, u32), on: &[usize], current: &[usize]) -> Wish {
        let arrived = Duration::from_secs(number as u64);
        let attained = Duration::from_secs(10 * current.len() as u64);
        let (on, current, most_hosts) = (hosts(on).into_iter().collect(), hosts(current), on.len());
        Wish { number, workers, arrived, attained, hosts: on, most_hosts, current }
    }

    fn shared(policy: LivePolicy, wishes: &[Wish]) -> Vec<(Vec<HostId>, AllocationReason)> {
        let shares = share(policy, Duration::from_secs(100), wishes).unwrap();
        shares.into_iter().map(|share| (share.hosts, share.reason)).collect()
    }

    #[test]
    fn one_job_alone_has_all_that_it_may() {
        let shares = shared(LivePolicy::Fifo, &[wish(0, (2, 3), &[0, 1, 2, 3], &[])]);
        assert_eq!(shares, [(hosts(&[0, 1, 2]), AllocationReason::Most)]);
    }

    #[test]
    fn who_has_spare_hosts_makes_room_and_keeps_its_first() {
        let wishes = [wish(0, (1, 4), &[0, 1, 2, 3], &[3, 2, 1, 0]), wish(1, (2, 2), &[0, 1, 2, 3], &[])];
        let shares = shared(LivePolicy::Fifo, &wishes);
        assert_eq!(shares[0].1, AllocationReason::Spare);
        assert_eq!((shares[0].0.len(), shares[1].0.len()), (2, 2));
        assert!(shares[0].0.iter().all(|host| !shares[1].0.contains(host)));
    }

    #[test]
    fn too_few_runners_hold_nobody_back() {
        let wishes = [wish(0, (3, 3), &[0, 1], &[]), wish(1, (2, 2), &[0, 1], &[])];
        let shares = shared(LivePolicy::Fifo, &wishes);
        assert_eq!(shares[0], (vec![], AllocationReason::TooFewRunners));
        assert_eq!(shares[1], (hosts(&[0, 1]), AllocationReason::Most));
    }

    #[test]
    fn first_in_is_not_passed_by_between_rounds() {
        // The first could have three hosts, of which two are others'.
        let first = Wish { most_hosts: 3, ..wish(0, (2, 2), &[0], &[]) };
        let wishes = [first, wish(1, (1, 1), &[0], &[])];
        let fifo = shared(LivePolicy::Fifo, &wishes);
        assert_eq!([&fifo[0].0, &fifo[1].0], [&hosts(&[]), &hosts(&[])]);
        assert_eq!(shared(LivePolicy::LeastAttained, &wishes)[1].0, hosts(&[0]));
    }

    #[test]
    fn first_in_waits_for_nobody_and_least_attained_takes_turns() {
        let wishes = [wish(0, (2, 2), &[0, 1], &[0, 1]), wish(1, (2, 2), &[0, 1], &[])];
        let fifo = shared(LivePolicy::Fifo, &wishes);
        assert_eq!((fifo[0].0.len(), fifo[1].clone()), (2, (vec![], AllocationReason::NoRoom)));
        let least = shared(LivePolicy::LeastAttained, &wishes);
        assert_eq!((least[0].clone(), least[1].0.len()), ((vec![], AllocationReason::NoRoom), 2));
    }

    #[test]
    fn a_job_is_placed_where_its_runners_are() {
        let wishes = [wish(0, (1, 1), &[0, 1, 2], &[]), wish(1, (1, 1), &[0], &[])];
        assert_eq!(shared(LivePolicy::Fifo, &wishes)[1].0, hosts(&[0]));
    }
}
