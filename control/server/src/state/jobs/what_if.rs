//! What the next round would give to jobs if one more came, hosts came or went, or another policy allocated. It is decided over
//! copies, by the code that decides rounds.

use super::bids::first_bid;
use super::job::{Job, Runner};
use super::links::Links;
use super::{JobKey, Jobs, MOST_JOBS, Scope, millionths, most_workers, over_limit, round};
use crate::state::ctx::Ctx;
use crate::state::effects::Effects;
use crate::state::output::SessionId;
use crate::state::settings::{AllocatorSettings, LivePolicy, Settings, UnknownPolicy};
use crate::state::view::View;
use crate::state::world::handovers::HandOvers;
use crate::state::world::operator::Operator;
use harmonaize_abi::session::{BidError, JobBid, RunnerError, RunnerReport, WorkerState};
use harmonaize_api::v1::{self, JobChange};
use harmonaize_planner::{Beside, HostId};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Why a question has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WhatIfError {
    /// Jobs get no hosts.
    #[error("control allocates no hosts: its configuration has no [allocator]")]
    NoAllocator,
    /// Nothing is assumed.
    #[error("nothing is assumed: name a job, a host or a policy")]
    Nothing,
    /// There is no such policy.
    #[error(transparent)]
    Policy(#[from] UnknownPolicy),
    /// The topology has no such host.
    #[error("the topology has no host `{0}`")]
    Host(String),
    /// The topology has no host of such a kind.
    #[error("the topology has no host of kind `{kind}`; its kinds are: {available}")]
    Kind {
        /// The kind.
        kind: String,
        /// Those that it has.
        available: String,
    },
    /// A host is to be there, and not.
    #[error("host `{0}` is to serve, and not to serve; name it once")]
    Contradiction(String),
    /// No runner could wait anywhere.
    #[error("no host has an agent where a runner of the job could wait; start agents, or name hosts")]
    NoAgent,
    /// There is no such tenant.
    #[error("there is no tenant `{0}`")]
    Tenant(String),
    /// A name that no job can have, or a range without members.
    #[error(transparent)]
    Job(#[from] RunnerError),
    /// A bid that makes no sense.
    #[error(transparent)]
    Bid(#[from] BidError),
    /// More workers than a job of the tenant may have.
    #[error("{}", over_limit(*range, *most))]
    Workers {
        /// The fewest and the most workers that it was to have.
        range: (u32, u32),
        /// As many as it may have.
        most: u32,
    },
    /// The job is there.
    #[error("job `{0}` is there, and keeps its range; name another")]
    JobThere(String),
    /// The tenant has as many jobs as it may.
    #[error("tenant `{0}` has {MOST_JOBS} jobs, as many as it may")]
    MostJobs(String),
    /// The policy cannot decide.
    #[error("the policy cannot decide: {0}")]
    Undecided(String),
}

/// Everything that an answer is made from: taken from the state at once, decided where nobody waits for it.
#[derive(Debug)]
pub struct WhatIf {
    now: Duration,
    settings: Settings,
    allocator: AllocatorSettings,
    facts: Facts,
    links: Links,
    jobs: Jobs,
    assumed: Assumed,
}

/// What a round reads beside settings and jobs.
#[derive(Debug)]
struct Facts {
    hosts: BTreeMap<HostId, SessionId>,
    operator: Operator,
}

/// What is as if it were so.
#[derive(Debug)]
struct Assumed {
    job: Option<AssumedJob>,
    without: BTreeSet<HostId>,
    with: BTreeSet<HostId>,
    policy: LivePolicy,
}

/// A job that comes now.
#[derive(Debug)]
struct AssumedJob {
    key: JobKey,
    workers: (u32, u32),
    /// Where its runners wait.
    hosts: BTreeSet<HostId>,
    /// Kinds of hosts that it may have; any where there are none.
    kinds: BTreeSet<String>,
    /// What it bids; the base price where there is nothing.
    bid: Option<JobBid>,
}

/// Jobs behind the next round about all of them, and when that is.
struct Outcome {
    jobs: Jobs,
    at: Duration,
}

impl WhatIf {
    /// Copies what an answer is made from.
    ///
    /// # Errors
    /// What of the question makes no sense, or names what is not there.
    pub(crate) fn new(
        view: &View<'_>,
        jobs: &Jobs,
        request: &v1::WhatIfRequest,
    ) -> Result<Self, WhatIfError> {
        let ctx = &view.ctx;
        let v1::WhatIfRequest { job, without_hosts, with_hosts, policy } = request;
        let allocator = ctx.settings.allocator.ok_or(WhatIfError::NoAllocator)?;
        if job.is_none() && without_hosts.is_empty() && with_hosts.is_empty() && policy.is_empty() {
            return Err(WhatIfError::Nothing);
        }
        let policy = match policy.as_str() {
            "" => allocator.policy,
            name => LivePolicy::named(name)?,
        };
        let (without, with) = (hosts(ctx, without_hosts)?, hosts(ctx, with_hosts)?);
        if let Some(both) = without.intersection(&with).next() {
            return Err(WhatIfError::Contradiction(ctx.host_name(*both)));
        }
        let job = job.as_ref().map(|job| assumed_job(ctx, jobs, job, &with)).transpose()?;
        Ok(Self {
            now: ctx.now,
            settings: ctx.settings.clone(),
            allocator,
            facts: Facts { hosts: ctx.hosts.clone(), operator: ctx.operator.clone() },
            links: Links::new(view),
            jobs: jobs.clone(),
            assumed: Assumed { job, without, with, policy },
        })
    }

    /// Decides. With thousands of hosts it takes seconds.
    ///
    /// # Errors
    /// Where the policy cannot decide.
    pub fn reply(self) -> Result<v1::WhatIfReply, WhatIfError> {
        let Self { now, settings, allocator, facts, links, jobs: known, assumed } = &self;
        let mut jobs = known.clone();
        // Until control has learned who runs where, nobody is to end or to start.
        let settled = jobs.settled;
        for job in jobs.jobs.values_mut().filter(|job| settled && job.over.is_none()) {
            job.assume_target(*now, allocator.notice);
        }
        let otherwise =
            with_ctx(settings, facts, *now, |ctx| next_round(ctx, links, *allocator, jobs.clone()))?.jobs;

        let facts = assumed.facts(facts);
        let outcome = |workers: Option<(u32, u32)>| {
            let allocator = AllocatorSettings { policy: assumed.policy, ..*allocator };
            with_ctx(settings, &facts, *now, |ctx| {
                let mut jobs = jobs.clone();
                assumed.come(ctx, allocator, &mut jobs, workers);
                next_round(ctx, links, allocator, jobs)
            })
        };
        let Outcome { jobs: after, at } = outcome(None)?;
        let nearest = match &assumed.job {
            Some(job) if targets(&after, &job.key).is_empty() => {
                let most = u32::try_from(job.hosts.len()).unwrap_or(u32::MAX);
                let runs = |least: u32| -> Result<bool, WhatIfError> {
                    let outcome = outcome(Some((least, job.workers.1)))?;
                    Ok(!targets(&outcome.jobs, &job.key).is_empty())
                };
                nearest(job.workers.0.min(most.saturating_add(1)), runs)?.map(|least| (least, job.workers.1))
            }
            _ => None,
        };

        let names = |hosts: &[HostId]| hosts.iter().map(|host| settings.host_name(*host)).collect();
        let mut order: Vec<(&JobKey, &Job)> =
            after.jobs.iter().filter(|(_, job)| job.over.is_none()).collect();
        order.sort_by_key(|(_, job)| {
            let bid = first_bid(settings, job);
            round::precedence(assumed.policy, (job.attained(at), bid), job.number)
        });
        let forecast = |(key, job): (&JobKey, &Job)| {
            let has: Vec<HostId> = known.jobs.get(key).into_iter().flat_map(Job::hosts).collect();
            let gets = targets(&after, key);
            let is_assumed = assumed.job.as_ref().is_some_and(|assumed| assumed.key == *key);
            let predict = |beside: Beside<'_>| (beside.all_reduce(&gets), beside.operation.0);
            let (predicted, operation_bytes) = links.beside(&settings.topology, key, predict);
            let (nearest_min, nearest_max) = nearest.filter(|_| is_assumed).unwrap_or_default();
            v1::JobForecast {
                tenant: key.0.clone(),
                job: key.1.clone(),
                workers_min: job.workers.0,
                workers_max: job.workers.1,
                assumed: is_assumed,
                change: change(&has, &gets).into(),
                hosts_now: names(&has),
                hosts_otherwise: names(&targets(&otherwise, key)),
                hosts: names(&gets),
                reason: job.reason.0.into(),
                reason_text: job.reason.1.clone(),
                nearest_min,
                nearest_max,
                predicted_ns: predicted.map_or(0, nanos),
                operation_bytes,
                kind: gets.first().map_or("", |host| settings.topology.kind(*host)).to_owned(),
                price_millionths: millionths(job.quote.as_ref()),
            }
        };
        Ok(v1::WhatIfReply {
            policy: assumed.policy.name().to_owned(),
            round_ns: nanos(at.saturating_sub(*now)),
            jobs: order.into_iter().map(forecast).collect(),
        })
    }
}

impl Assumed {
    /// What a round reads, as if.
    fn facts(&self, facts: &Facts) -> Facts {
        let mut hosts = facts.hosts.clone();
        for host in &self.with {
            // Nothing is sent to it.
            hosts.entry(*host).or_insert(SessionId(0));
        }
        Facts { hosts, operator: facts.operator.with_hosts_drained(&self.without, &self.with) }
    }

    /// Adds assumed runners: those of the job, and those on hosts that are to serve. The job has the range of `workers` where
    /// there is one, and else its own.
    fn come(
        &self,
        ctx: &Ctx<'_>,
        allocator: AllocatorSettings,
        jobs: &mut Jobs,
        workers: Option<(u32, u32)>,
    ) {
        let mut come = false;
        for ((tenant, _), job) in jobs.jobs.iter_mut().filter(|(_, job)| job.over.is_none()) {
            for host in self.with.iter().copied() {
                let waits = job.runners.keys().any(|(known, _)| *known == host);
                if !waits && !ctx.is_elsewhere(tenant, &ctx.host_name(host)) {
                    job.runners.insert((host, 0), Runner::new(ctx.now));
                    come = true;
                }
            }
        }
        if let Some(AssumedJob { key, workers: range, hosts, kinds, bid }) = &self.job {
            jobs.add(ctx.now, allocator, key.clone(), (workers.unwrap_or(*range), false));
            if let Some(job) = jobs.jobs.get_mut(key) {
                job.kinds = kinds.clone();
                job.bid = *bid;
                job.runners = hosts.iter().map(|host| ((*host, 0), Runner::new(ctx.now))).collect();
            }
            come = true;
        }
        if come {
            jobs.schedule(ctx.now, allocator);
        }
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Finds hosts by their names.
fn hosts(ctx: &Ctx<'_>, names: &[String]) -> Result<BTreeSet<HostId>, WhatIfError> {
    let find = |name: &String| {
        let found = ctx.settings.topology.host(name);
        found.ok_or_else(|| WhatIfError::Host(shown(name)))
    };
    names.iter().map(find).collect()
}

/// Checks that the topology has each of these kinds.
fn checked_kinds(ctx: &Ctx<'_>, kinds: &[String]) -> Result<BTreeSet<String>, WhatIfError> {
    let topology = &ctx.settings.topology;
    let known: BTreeSet<&str> = topology.hosts_there().filter_map(|(_, host)| host.kind.as_deref()).collect();
    match kinds.iter().find(|kind| !known.contains(kind.as_str())) {
        None => Ok(kinds.iter().cloned().collect()),
        Some(kind) => {
            let known: Vec<&str> = known.into_iter().take(16).collect();
            let available = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            Err(WhatIfError::Kind { kind: shown(kind), available })
        }
    }
}

/// As much of a caller's text as an error repeats.
fn shown(text: &str) -> String {
    text.chars().take(128).collect()
}

/// Checks a job as its runners' reports would be.
fn assumed_job(
    ctx: &Ctx<'_>,
    jobs: &Jobs,
    assumed: &v1::AssumedJob,
    with: &BTreeSet<HostId>,
) -> Result<AssumedJob, WhatIfError> {
    let v1::AssumedJob { tenant, job, workers_min, workers_max, hosts: names, kinds, bid } = assumed;
    let range = (*workers_min, *workers_max);
    let report = RunnerReport { runner: 0, job: job.clone(), workers: range, state: WorkerState::None };
    report.check()?;
    let bid = bid.map(JobBid::from);
    bid.map_or(Ok(()), |bid| bid.check())?;
    if !tenant.is_empty() && !ctx.settings.tenants.contains(tenant) {
        return Err(WhatIfError::Tenant(shown(tenant)));
    }
    let most = most_workers(ctx, tenant);
    if range.0 > most {
        return Err(WhatIfError::Workers { range, most });
    }
    let key = (tenant.clone(), job.clone());
    if jobs.jobs.contains_key(&key) {
        return Err(WhatIfError::JobThere(format!("{tenant}/{job}")));
    }
    if jobs.has_most_jobs(tenant) {
        return Err(WhatIfError::MostJobs(tenant.clone()));
    }
    let hosts: BTreeSet<HostId> = match names.as_slice() {
        [] => ctx.hosts.keys().chain(with).copied().collect(),
        names => hosts(ctx, names)?,
    };
    if hosts.is_empty() {
        return Err(WhatIfError::NoAgent);
    }
    Ok(AssumedJob { key, workers: range, hosts, kinds: checked_kinds(ctx, kinds)?, bid })
}

/// Has these facts read as a round reads the state.
fn with_ctx<T>(settings: &Settings, facts: &Facts, now: Duration, read: impl FnOnce(&Ctx<'_>) -> T) -> T {
    let Facts { hosts, operator } = facts;
    let (sessions, communicators, iterations) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    read(&Ctx {
        now,
        settings,
        sessions: &sessions,
        hosts,
        communicators: &communicators,
        iterations: &iterations,
        operator,
        handovers: &HandOvers::default(),
    })
}

/// Jobs behind the next round about all, and behind the one before it about those that wait or have lost workers.
fn next_round(
    ctx: &Ctx<'_>,
    links: &Links,
    allocator: AllocatorSettings,
    mut jobs: Jobs,
) -> Result<Outcome, WhatIfError> {
    let at = jobs.round.unwrap_or(ctx.now).max(ctx.now);
    let before = |round: Option<Duration>| round.filter(|round| *round < at);
    let (extra, lost) = (before(jobs.extra_round), before(jobs.lost_round));
    if let Some(first) = extra.into_iter().chain(lost).min().filter(|_| jobs.settled) {
        let ctx = Ctx { now: first.max(ctx.now), ..*ctx };
        let scope = if lost.is_some() { Scope::Lost } else { Scope::Waiting };
        // Nobody is told anything.
        jobs.decide(&ctx, links, &mut Effects::default(), allocator, scope);
    }
    let targets = jobs.set_targets(&Ctx { now: at, ..*ctx }, links, allocator, Scope::All);
    targets.map_err(|error| WhatIfError::Undecided(error.to_string()))?;
    Ok(Outcome { jobs, at })
}

/// Hosts that the last round gave to a job, by rank.
fn targets(jobs: &Jobs, key: &JobKey) -> Vec<HostId> {
    let target = jobs.jobs.get(key).map(|job| job.target.as_slice()).unwrap_or_default();
    target.iter().map(|(host, _)| *host).collect()
}

/// Finds the most workers, below so many, that run as a job's fewest; none where not even one does. Fewer run where more do.
fn nearest<E>(least: u32, runs: impl Fn(u32) -> Result<bool, E>) -> Result<Option<u32>, E> {
    let (mut enough, mut too_many) = (0, least);
    while too_many.saturating_sub(enough) > 1 {
        let between = enough + (too_many - enough) / 2;
        if runs(between)? {
            enough = between;
        } else {
            too_many = between;
        }
    }
    Ok(Some(enough).filter(|enough| *enough > 0))
}

/// What becomes of workers on these hosts when a job gets those.
fn change(has: &[HostId], gets: &[HostId]) -> JobChange {
    match (has.len(), gets.len()) {
        (0, 0) => JobChange::Waits,
        (0, _) => JobChange::Starts,
        (_, 0) => JobChange::Stops,
        (before, after) if before < after => JobChange::Grows,
        (before, after) if before > after => JobChange::Shrinks,
        _ if has.iter().all(|host| gets.contains(host)) => JobChange::Stays,
        _ => JobChange::Moves,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_change_has_its_name() {
        let cases: [(&[usize], &[usize], JobChange); 8] = [
            (&[], &[], JobChange::Waits),
            (&[], &[1], JobChange::Starts),
            (&[1], &[], JobChange::Stops),
            (&[1], &[1, 2], JobChange::Grows),
            (&[1, 2], &[3], JobChange::Shrinks),
            (&[1, 2], &[1, 2], JobChange::Stays),
            (&[1, 2], &[2, 1], JobChange::Stays),
            (&[1, 2], &[2, 3], JobChange::Moves),
        ];
        let hosts = |numbers: &[usize]| numbers.iter().copied().map(HostId).collect::<Vec<_>>();
        for (has, gets, expected) in cases {
            assert_eq!(change(&hosts(has), &hosts(gets)), expected, "{has:?} {gets:?}");
        }
    }

    #[test]
    fn the_nearest_is_the_most_that_runs() {
        for (least, room) in [(2, 1), (9, 8), (9, 1), (100, 37), (4, 0), (1, 0)] {
            let found = nearest(least, |workers| Ok::<_, ()>(workers <= room));
            assert_eq!(found, Ok(Some(room).filter(|room| *room > 0)), "{least} {room}");
        }
    }
}
