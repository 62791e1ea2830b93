//! Jobs of tenants. Their runners wait on hosts, a round gives hosts to jobs, and runners get orders to start workers or to end them.
//!
//! A runner says all of itself with each question. So a control that has just started learns who runs where, and decides nothing before
//! its first round.

mod bids;
mod claims;
mod failures;
mod job;
pub(crate) mod links;
mod round;
pub(crate) mod what_if;

use crate::state::breach::Breach;
use crate::state::ctx::Ctx;
use crate::state::effects::Effects;
use crate::state::output::{Fact, SessionId};
use crate::state::refusal::RequestRefusal;
use crate::state::settings::{AllocatorSettings, LivePolicy, Settings};
use crate::state::tenants::elsewhere::turn_away;
use crate::state::tenants::joins::job_named;
use crate::state::view::View;
use crate::state::world::operator::Operator;
use bids::{disclosed, first_bid, leaves_at, next_round, take_change};
use claims::Claims;
use failures::StoredJobs;
use harmonaize_abi::session::{
    ElasticOrder, JobBid, Price, RunnerError, RunnerOrder, RunnerReport, WorkerState,
};
use harmonaize_api::v1::{self, JobPhase, to_agent};
use harmonaize_planner::HostId;
use harmonaize_store::{Change, Job as Stored};
use job::{GATHER, IGNORED, Job, Question, Runner, RunnerKey, Step};
use links::{Links, Predictions};
use round::{Quote, Rules, Wish};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Longest wait: then the runner is told that there is nothing, and asks again.
const LONGEST: Duration = Duration::from_secs(60);

/// How long a runner may be silent between two questions while its host's agent is there.
const SILENCE: Duration = Duration::from_secs(15);

/// How long after a round about what elastic jobs have lost another one may be.
const PLAN_AGAIN: Duration = Duration::from_secs(5);

/// Most jobs of a tenant, and runners of a job.
const MOST_JOBS: usize = 256;
const MOST_RUNNERS: usize = 4096;

/// A tenant's name, and its job's.
pub(crate) type JobKey = (String, String);

/// All jobs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Jobs {
    jobs: BTreeMap<JobKey, Job>,
    /// How many there have been.
    count: usize,
    /// When a round decides about all jobs.
    round: Option<Duration>,
    /// When one decides about those that wait, on hosts that nobody has.
    extra_round: Option<Duration>,
    /// When one decides about elastic jobs that have lost workers, too.
    lost_round: Option<Duration>,
    /// When the last one of these did.
    planned_again: Option<Duration>,
    /// Whether there was a round.
    settled: bool,
    /// Those that may be stranded: see [`Jobs::stranded`].
    stranded: BTreeSet<JobKey>,
    /// What is stored of them.
    stored: StoredJobs,
    /// Prices by kind, by the last round about all jobs.
    prices: BTreeMap<String, Price>,
    /// Hosts that jobs have won by it, and others have yet.
    claims: Claims,
    /// Nothing is due before.
    due: Option<Duration>,
}

impl Jobs {
    /// Takes up what an earlier start left, at time 0. Without an allocator nothing is kept of jobs.
    pub(crate) fn restore(
        &mut self,
        settings: &Settings,
        operator: &Operator,
        records: BTreeMap<JobKey, Stored>,
    ) {
        let until = settings.allocator.map_or(Duration::ZERO, |_| settings.lease.saturating_add(SILENCE));
        self.stored.restore(operator, records, until);
        if settings.allocator.is_none() {
            self.stored.expire(Duration::ZERO);
        }
        self.due = self.stored.next_timeout();
    }

    /// Has what has changed of jobs stored.
    pub(crate) fn store(&mut self, ctx: &Ctx<'_>, effects: &mut Effects) {
        let jobs = &self.jobs;
        self.stored.store(ctx.operator, effects, |key| jobs.get(key).map(Job::persisted));
    }

    /// Some of this could not be stored.
    pub(crate) fn store_again(&mut self, now: Duration, changes: &[Change]) {
        self.stored.store_again(now, changes);
        if let Some(at) = self.stored.next_timeout() {
            note(&mut self.due, at);
        }
    }

    /// A runner says how it stands, and asks what to do.
    ///
    /// # Errors
    /// Where the agent broke the protocol.
    pub(crate) fn await_order(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        from: SessionId,
        message: &v1::AwaitOrder,
    ) -> Result<(), Breach> {
        let request = message.request;
        let open = self.jobs.values().flat_map(|job| job.runners.values());
        let same = |question: Question| (question.session, question.request) == (from, request);
        if open.filter_map(|runner| runner.question).any(same) {
            return Err(Breach::OrderTwice);
        }
        let outcome = match self.take_report(ctx, effects, from, message) {
            Ok(()) => return Ok(()),
            Err(Refused::Request(why)) => Err(why),
            Err(Refused::Order(order)) => Ok(order.into()),
        };
        send(effects, from, request, outcome);
        Ok(())
    }

    fn take_report(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        from: SessionId,
        message: &v1::AwaitOrder,
    ) -> Result<(), Refused> {
        let allocator = ctx.settings.allocator.ok_or(RequestRefusal::NoAllocator)?;
        let host = ctx.sessions.get(&from).ok_or(RequestRefusal::NoSession)?.host;
        if !ctx.settings.tenants.contains(&message.tenant) {
            let refused = turn_away(message, RequestRefusal::UnknownTenant);
            return Err(refused.map_or_else(Refused::Request, Refused::Order));
        }
        let report = message.report();
        check(ctx, &message.tenant, &report)?;
        let bid = message.bid.map(JobBid::from);
        bid.map_or(Ok(()), |bid| bid.check()).map_err(RequestRefusal::Bid)?;
        let key = (message.tenant.clone(), report.job.clone());
        let runner = (host, report.runner);
        self.admit(ctx.now, allocator, (&key, runner), (&report, message.elastic))?;
        let adopts = !self.settled && !self.taken_hosts(&key).contains(&host);
        let Some(job) = self.jobs.get_mut(&key) else { return Err(RequestRefusal::JobGone.into()) };
        if job.bid.is_none() && bid.is_some() {
            job.bid = bid;
            self.stored.changed(key.clone());
        }
        let known = job.runners.entry(runner).or_insert_with(|| Runner::new(ctx.now));
        let occupied = known.occupies(ctx.now, allocator.notice);
        known.state = report.state;
        known.offered = None;
        // What is to end since before control began has its notice from now on.
        known.recalled = match report.state {
            WorkerState::Running { stopping: true, .. } => known.recalled.or(Some(ctx.now)),
            WorkerState::Running { .. } => known.recalled,
            WorkerState::None | WorkerState::Ended { .. } => None,
        };
        let wait = Duration::from_nanos(message.wait_ns).min(LONGEST);
        let question =
            Question { session: from, request: message.request, until: ctx.now.saturating_add(wait) };
        if let Some(earlier) = known.question.replace(question) {
            send(effects, earlier.session, earlier.request, Ok(RunnerOrder::Wait.into()));
        }
        known.seen = ctx.now;
        let frees = occupied && !known.occupies(ctx.now, allocator.notice);
        if adopts
            && let WorkerState::Running { place, stopping: false }
            | WorkerState::Ended { place, succeeded: true } = report.state
        {
            job.adopt(ctx.now, runner, place);
        }
        note(&mut self.due, question.until);
        match frees {
            true => self.advance_all(ctx, effects, allocator),
            false => self.advance(ctx, effects, allocator, &key),
        }
        Ok(())
    }

    /// A tenant changes what its job bids. It counts from the next round on.
    pub(crate) fn set_bid(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        from: SessionId,
        message: &v1::SetBid,
    ) {
        let outcome = self.take_bid(ctx, message).map_err(|refusal| refusal.to_string());
        effects.send(from, to_agent::Message::BidSet(v1::BidSet::answer(message.request, outcome)));
    }

    fn take_bid(&mut self, ctx: &Ctx<'_>, message: &v1::SetBid) -> Result<(), RequestRefusal> {
        let market = ctx.settings.allocator.filter(|allocator| allocator.policy == LivePolicy::Market);
        let allocator = market.ok_or(RequestRefusal::NoMarket)?;
        if !ctx.settings.tenants.contains(&message.tenant) {
            return Err(RequestRefusal::UnknownTenant);
        }
        let bid = JobBid::from(message.bid.ok_or(RequestRefusal::NoBid)?);
        bid.check()?;
        let key = (message.tenant.clone(), message.job.clone());
        let job = self.jobs.get_mut(&key).filter(|job| job.over.is_none()).ok_or(RequestRefusal::NoJob)?;
        if job.bid != Some(bid) {
            take_change(ctx.now, &mut job.bid_changes)?;
            job.bid = Some(bid);
            self.stored.changed(key);
            self.schedule(ctx.now, allocator);
        }
        Ok(())
    }

    /// Finds a place for a runner among its job's, and one for the job among its tenant's.
    fn admit(
        &mut self,
        now: Duration,
        allocator: AllocatorSettings,
        (key, runner): (&JobKey, RunnerKey),
        (report, elastic): (&RunnerReport, bool),
    ) -> Result<(), Refused> {
        let known = self.jobs.get(key);
        let same = |job: &Job| (job.workers, job.elastic) == (report.workers, elastic);
        if known.is_some_and(|job| job.runners.contains_key(&runner) && same(job)) {
            return Ok(());
        }
        match known {
            Some(job) if job.workers != report.workers => {
                let (least, most) = job.workers;
                let text = format!("the job's other runners say {least}..{most} workers");
                return Err(Refused::Order(RunnerOrder::Infeasible { text, nearest: job.workers }));
            }
            Some(job) if job.elastic != elastic => {
                let are = if job.elastic { "are elastic" } else { "are not elastic" };
                let text = format!("the job's other runners {are}; start all with --elastic, or none");
                return Err(Refused::Order(RunnerOrder::Infeasible { text, nearest: job.workers }));
            }
            Some(job) if job.over.is_some() && report.state == WorkerState::None => {
                return Err(RequestRefusal::JobOver.into());
            }
            Some(job) if job.runners.len() >= MOST_RUNNERS => {
                return Err(RequestRefusal::TooManyRunners(MOST_RUNNERS).into());
            }
            Some(_) => {}
            None => {
                if self.has_most_jobs(&key.0) {
                    return Err(RequestRefusal::TooManyJobs(MOST_JOBS).into());
                }
                self.add(now, allocator, key.clone(), (report.workers, elastic));
            }
        }
        self.schedule(now, allocator);
        if self.jobs.get(key).is_some_and(Job::has_loss) {
            self.plan_again(now);
        }
        Ok(())
    }

    fn has_most_jobs(&self, tenant: &str) -> bool {
        self.jobs.keys().filter(|(owner, _)| owner == tenant).count() >= MOST_JOBS
    }

    /// A job has come.
    fn add(
        &mut self,
        now: Duration,
        allocator: AllocatorSettings,
        key: JobKey,
        (workers, elastic): ((u32, u32), bool),
    ) {
        self.settled |= self.jobs.is_empty() && now >= allocator.round;
        let mut job = Job::new(self.count, now, workers, elastic);
        job.restore(self.stored.take(&key));
        self.jobs.insert(key, job);
        self.count += 1;
    }

    /// Runners have come: a round decides soon.
    fn schedule(&mut self, now: Duration, allocator: AllocatorSettings) {
        // The first round waits until those that ran before control did have come back.
        let soon = now.saturating_add(GATHER);
        match self.round {
            None => self.round = Some(if self.settled { soon } else { soon.max(allocator.round) }),
            Some(_) => self.extra_round = self.extra_round.or(Some(soon)),
        }
        note(&mut self.due, soon);
    }

    /// An elastic job has lost a worker, or may get one again: a round decides soon, but not too often.
    fn plan_again(&mut self, now: Duration) {
        let soon = now.saturating_add(GATHER);
        let earliest = self.planned_again.map_or(soon, |last| soon.max(last.saturating_add(PLAN_AGAIN)));
        let at = *self.lost_round.get_or_insert(earliest);
        note(&mut self.due, at);
    }

    /// The runner that asked is gone.
    pub(crate) fn cancel(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, session: SessionId, request: u64) {
        let Some(allocator) = ctx.settings.allocator else { return };
        for job in self.jobs.values_mut() {
            let of = |runner: &Runner| {
                runner.question.is_some_and(|it| (it.session, it.request) == (session, request))
            };
            job.runners.retain(|_, runner| !of(runner));
        }
        self.after_loss(ctx, effects, allocator);
    }

    /// A session is over: what runs on its host goes on, for a lease.
    pub(crate) fn session_ended(&mut self, now: Duration, session: SessionId) {
        for runner in self.jobs.values_mut().flat_map(|job| job.runners.values_mut()) {
            if runner.question.take_if(|question| question.session == session).is_some() {
                runner.seen = now;
                note(&mut self.due, now.saturating_add(SILENCE));
            }
        }
    }

    /// A tenant is no more.
    pub(crate) fn forget_tenant(&mut self, effects: &mut Effects, tenant: &str) {
        self.stored.forget_tenant(tenant);
        for (key, job) in self.jobs.extract_if(.., |(owner, _), _| owner == tenant) {
            self.stored.changed(key);
            for question in job.runners.values().filter_map(|runner| runner.question) {
                let unknown = Err(RequestRefusal::UnknownTenant);
                send(effects, question.session, question.request, unknown);
            }
        }
    }

    /// A communicator of a tenant is in use.
    pub(crate) fn formed(&mut self, tenant: &str, name: &str) {
        let key = (tenant.to_owned(), job_named(name).to_owned());
        if let Some(job) = self.jobs.get_mut(&key) {
            if std::mem::take(&mut job.unformed) {
                self.stored.changed(key.clone());
            }
            self.stranded.remove(&key);
        }
    }

    /// Control has learned who runs. Communicators that are in use since before it began have formed, though it may not have been stored.
    fn recovered(&mut self, ctx: &Ctx<'_>) {
        self.settled = true;
        for known in ctx.communicators.values().filter(|known| !known.is_forming()) {
            self.formed(&known.tenant, &known.name);
        }
    }

    /// Elastic jobs of which a worker is gone before a communicator has formed. Those that join wait for it in vain.
    pub(crate) fn stranded(&self) -> Vec<JobKey> {
        let is = |key: &&JobKey| self.jobs.get(*key).is_some_and(Job::is_stranded);
        self.stranded.iter().filter(is).cloned().collect()
    }

    /// Has all workers of a stranded job end, and start together again.
    pub(crate) fn restart(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, key: &JobKey) {
        let Some(allocator) = ctx.settings.allocator else { return };
        let Some(job) = self.jobs.get_mut(key) else { return };
        if let Some(step) = job.recall_stranded() {
            fact(ctx, effects, key, job, step);
            self.advance(ctx, effects, allocator, key);
        }
    }

    /// When [`Jobs::expire`] has something to do.
    pub(crate) fn next_timeout(&self) -> Option<Duration> {
        self.due
    }

    /// Gives up runners that are silent, decides where a round is due, and answers who has waited long enough.
    pub(crate) fn expire(&mut self, view: &View<'_>, effects: &mut Effects) {
        let ctx = &view.ctx;
        if self.due.is_none_or(|at| at > ctx.now) {
            return;
        }
        self.stored.expire(ctx.now);
        let Some(allocator) = ctx.settings.allocator else {
            self.due = self.stored.next_timeout();
            return;
        };
        for job in self.jobs.values_mut() {
            job.runners.retain(|key, runner| gone_at(ctx, *key, runner).is_none_or(|at| at > ctx.now));
        }
        if self.round.is_some_and(|at| at <= ctx.now) {
            if !self.settled {
                self.recovered(ctx);
            }
            self.lost_round = None;
            self.decide(ctx, &Links::new(view), effects, allocator, Scope::All);
            self.extra_round = None;
            // Whoever is outbid leaves when that is cheap for it.
            let leaves = self.jobs.values().filter_map(|job| job.leaves);
            self.round = Some(next_round(ctx.now, allocator.round, leaves));
        } else {
            let extra = self.extra_round.take_if(|at| *at <= ctx.now).is_some();
            let lost = self.lost_round.take_if(|at| *at <= ctx.now).is_some();
            if (extra || lost) && self.settled {
                let scope = if lost { Scope::Lost } else { Scope::Waiting };
                self.planned_again = lost.then_some(ctx.now).or(self.planned_again);
                self.decide(ctx, &Links::new(view), effects, allocator, scope);
            }
        }
        self.after_loss(ctx, effects, allocator);
        self.round = self.round.filter(|_| !self.jobs.is_empty());
        self.due = self.next_due(ctx, allocator);
    }

    fn next_due(&self, ctx: &Ctx<'_>, allocator: AllocatorSettings) -> Option<Duration> {
        let runners = self.jobs.values().flat_map(|job| &job.runners);
        let dues = runners.flat_map(|(key, runner)| {
            let ignored = runner.recalled.map(|at| at.saturating_add(allocator.notice + IGNORED));
            let ignored = ignored.filter(|at| *at > ctx.now);
            let question = runner.question.map(|question| question.until);
            [ignored, question, gone_at(ctx, *key, runner)]
        });
        let wakes = self.jobs.values().map(|job| job.wakes(ctx.now));
        let own = [self.round, self.extra_round, self.lost_round, self.stored.next_timeout()];
        dues.chain(wakes).chain(own).flatten().min()
    }

    /// Runners may be gone: jobs go on without them, and what is empty is forgotten.
    fn after_loss(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, allocator: AllocatorSettings) {
        let gone = self.jobs.extract_if(.., |_, job| job.runners.is_empty());
        gone.for_each(|(key, _)| self.stored.changed(key));
        self.advance_all(ctx, effects, allocator);
    }

    fn advance_all(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, allocator: AllocatorSettings) {
        let keys: Vec<JobKey> = self.jobs.keys().cloned().collect();
        keys.iter().for_each(|key| self.advance(ctx, effects, allocator, key));
    }

    /// Goes on with a job as far as it can, and answers its runners.
    fn advance(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, allocator: AllocatorSettings, key: &JobKey) {
        let settled = self.settled;
        self.stranded.remove(key);
        loop {
            let Some(job) = self.jobs.get_mut(key) else { return };
            let kept = job.persisted();
            let mut step = job.advance(ctx.now, allocator.notice, settled);
            if let Some(at) = job.wakes(ctx.now) {
                note(&mut self.due, at);
            }
            if job.awaits_round() {
                self.plan_again(ctx.now);
            }
            if step.is_none() && settled {
                step = self.start(ctx, allocator, key);
            }
            if self.jobs.get(key).map(Job::persisted) != Some(kept) {
                self.stored.changed(key.clone());
            }
            let (Some(step), Some(job)) = (step, self.jobs.get(key)) else { break };
            if matches!(step, Step::Stopped | Step::Over(_)) {
                let extra_round = *self.extra_round.get_or_insert(ctx.now.saturating_add(GATHER));
                note(&mut self.due, extra_round);
            }
            fact(ctx, effects, key, job, step);
        }
        if self.jobs.get(key).is_some_and(Job::is_stranded) {
            self.stranded.insert(key.clone());
        }
        self.answer(ctx, effects, allocator, key);
    }

    /// Begins a generation of a job that wants one. First nobody may have a worker left on the hosts where the job is to start some.
    ///
    /// One that is resized goes on without those hosts until then, if the others are enough. So it does without workers that start later,
    /// because some have failed, and without hosts whose agents are away.
    fn start(&mut self, ctx: &Ctx<'_>, allocator: AllocatorSettings, key: &JobKey) -> Option<Step> {
        let job = self.jobs.get(key)?;
        let resizes = job.resizes();
        if (!resizes && !job.wants_start()) || (resizes && job.gathers(ctx.now)) {
            return None;
        }
        let (now, notice) = (ctx.now, allocator.notice);
        let others = self.jobs.iter().filter(|(other, _)| *other != key);
        let mut busy: BTreeSet<HostId> = others.flat_map(|(_, job)| job.busy(now, notice)).collect();
        busy.extend(job.occupied(now, notice));
        let may_start = job.may_start(now);
        let is_free = |runner: &RunnerKey| {
            let free = may_start && !busy.contains(&runner.0) && ctx.hosts.contains_key(&runner.0);
            free || (resizes && job.keeps(*runner))
        };
        let members: Vec<RunnerKey> = job.target.iter().filter(|it| is_free(it)).copied().collect();
        let whole = members.len() == job.target.len();
        let job = self.jobs.get_mut(key)?;
        if !resizes {
            return whole.then(|| job.start(now));
        }
        let members = match whole {
            true => members,
            false => members.into_iter().filter(|it| job.keeps(*it)).collect(),
        };
        job.resize(now, members)
    }

    /// Answers those runners of a job that have something to do, or have waited long enough.
    fn answer(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, allocator: AllocatorSettings, key: &JobKey) {
        let settled = self.settled;
        let Some(job) = self.jobs.get_mut(key) else { return };
        let ranks = job.rank_of_each();
        let kind = job.hosts().next().map(|host| ctx.settings.topology.kind(host));
        let price = kind.and_then(|kind| disclosed(job.quote.as_ref(), kind, job.quoted_bid));
        let due: Vec<(RunnerKey, Question, ElasticOrder)> = job
            .runners
            .iter()
            .filter_map(|(runner, known)| {
                let question = known.question?;
                let rank = ranks.get(runner).copied();
                let order = job.order(rank, known, allocator.notice).filter(|_| settled);
                let waited = (question.until <= ctx.now).then_some(RunnerOrder::Wait.into());
                Some((*runner, question, order.or(waited)?))
            })
            .collect();
        for (runner, question, order) in due {
            if let ElasticOrder::Order(RunnerOrder::Over { .. }) = order {
                job.runners.remove(&runner);
            } else if let Some(known) = job.runners.get_mut(&runner) {
                known.question = None;
                known.seen = ctx.now;
                match order {
                    ElasticOrder::Order(RunnerOrder::Offer { place, .. })
                    | ElasticOrder::Enter { place, .. } => known.offered = Some(place.generation),
                    ElasticOrder::Order(RunnerOrder::Recall { .. }) => {
                        let since = *known.recalled.get_or_insert(ctx.now);
                        note(&mut self.due, since.saturating_add(allocator.notice + IGNORED));
                    }
                    _ => {}
                }
            }
            note(&mut self.due, ctx.now.saturating_add(SILENCE));
            let answer = v1::RunnerOrder::answer(question.request, Ok(order)).priced(price.clone());
            effects.send(question.session, to_agent::Message::RunnerOrder(answer));
        }
        if job.runners.is_empty() {
            self.jobs.remove(key);
            self.stored.changed(key.clone());
        }
    }

    /// A round.
    fn decide(
        &mut self,
        ctx: &Ctx<'_>,
        links: &Links,
        effects: &mut Effects,
        allocator: AllocatorSettings,
        scope: Scope,
    ) {
        match self.set_targets(ctx, links, allocator, scope) {
            Ok(()) => self.advance_all(ctx, effects, allocator),
            Err(error) => effects.fact(Fact::JobsUndecided { why: error.to_string() }),
        }
    }

    /// Sets what each job is to have by a round.
    ///
    /// # Errors
    /// Why the policy cannot decide. Nothing has changed then.
    fn set_targets(
        &mut self,
        ctx: &Ctx<'_>,
        links: &Links,
        allocator: AllocatorSettings,
        scope: Scope,
    ) -> Result<(), round::ShareError> {
        let taken: BTreeSet<(HostId, usize)> = match scope {
            Scope::All => BTreeSet::new(),
            Scope::Waiting | Scope::Lost => {
                let hosts = self.jobs.values().flat_map(|job| {
                    let targets = job.target.iter().map(|(host, _)| *host);
                    job.busy(ctx.now, allocator.notice).chain(targets).map(|host| (host, job.number))
                });
                hosts.collect()
            }
        };
        // A round about all jobs finds anew who has won what.
        let mut claims = match scope {
            Scope::All => Claims::default(),
            Scope::Waiting | Scope::Lost => self.claims.clone(),
        };
        claims.retain(|number| self.jobs.values().any(|job| job.number == number && job.over.is_none()));
        let reserved_by = ctx.now.saturating_add(allocator.notice);
        let is_free = |host: HostId, job: &Job| {
            let own = || job.hosts().any(|own| own == host);
            taken.range((host, 0)..=(host, usize::MAX)).all(|(_, number)| *number == job.number)
                && (!claims.reserves(host, job.number, reserved_by) || own())
        };
        let mut jobs: Vec<(&JobKey, &mut Job)> =
            self.jobs.iter_mut().filter(|(_, job)| job.over.is_none() && scope.includes(job)).collect();
        jobs.sort_by_key(|(_, job)| job.number);
        let usable: Vec<BTreeMap<HostId, RunnerKey>> =
            jobs.iter().map(|(key, job)| usable(ctx, allocator, &key.0, job)).collect();
        let topology = &ctx.settings.topology;
        let mut wishes: Vec<Wish> = jobs
            .iter()
            .zip(&usable)
            .map(|((key, job), usable)| Wish {
                key: (*key).clone(),
                number: job.number,
                // Runners of one whose fewest are too many are told so.
                workers: (job.workers.0, job.workers.1.min(most_workers(ctx, &key.0)).max(job.workers.0)),
                arrived: job.arrived,
                attained: job.attained(ctx.now),
                hosts: usable.keys().copied().filter(|host| is_free(*host, job)).collect(),
                most_hosts: round::most_of_one_kind(topology, usable.keys().copied()),
                current: job.hosts().filter(|host| usable.contains_key(host)).collect(),
                bid: job.bid,
                stays: false,
            })
            .collect();
        let market = &ctx.settings.market;
        let rules = Rules { policy: allocator.policy, base_prices: &market.base_prices };
        let decide =
            |wishes: &[Wish]| round::share(rules, ctx.now, wishes, Predictions::new(topology, links));
        let mut shared = decide(&wishes)?;
        let before: Vec<Option<Duration>> = jobs.iter().map(|(_, job)| job.leaves).collect();
        if scope == Scope::All {
            // Nobody waits longer for hosts that it has won.
            let won = jobs.iter().zip(&shared.shares).filter_map(|((_, job), share)| Some((job.won?, share)));
            let until: BTreeMap<HostId, Duration> = won
                .flat_map(|(since, share)| share.hosts.iter().map(move |host| (*host, since)))
                .map(|(host, since)| (host, since.saturating_add(market.longest_wait)))
                .collect();
            for (((_, job), wish), share) in jobs.iter_mut().zip(&mut wishes).zip(&shared.shares) {
                let has = wish.current.len();
                let may_stay = rules.policy == LivePolicy::Market
                    && job.recall.is_none()
                    && (wish.workers.0 as usize..=wish.workers.1 as usize).contains(&has);
                let loses = wish.current.iter().any(|host| !share.hosts.contains(host));
                let at = leaves_at(ctx.now, job.began, job.bid, market.longest_wait);
                // What an earlier start has stored is later where the clock was set back.
                let latest = ctx.now.saturating_add(market.longest_wait);
                let until =
                    wish.current.iter().filter_map(|host| until.get(host)).fold(latest, |a, b| a.min(*b));
                job.leaves = (may_stay && loses).then(|| job.leaves.unwrap_or(at).min(until));
                wish.stays = job.leaves.is_some_and(|at| at > ctx.now);
            }
            if wishes.iter().any(|wish| wish.stays) {
                let first = std::mem::replace(&mut shared, decide(&wishes)?);
                let leaves: Vec<Option<Duration>> = jobs.iter().map(|(_, job)| job.leaves).collect();
                claims = Claims::of(&wishes, &leaves, &first.shares, &shared.shares);
                if claims.withhold(&mut wishes, reserved_by) {
                    shared = decide(&wishes)?;
                }
            }
        }
        let mut changed = Vec::new();
        for (((((key, job), usable), wish), mut share), before) in
            jobs.into_iter().zip(&usable).zip(&wishes).zip(shared.shares).zip(before)
        {
            if scope == Scope::All && wish.current.iter().any(|host| !share.hosts.contains(host)) {
                // It leaves now. Once it is outbid again, it waits anew.
                job.leaves = None;
            }
            // Who gets hosts, in whichever round, waits for none any more.
            let waits = share.hosts.is_empty() && claims.has(job.number);
            job.won = waits.then(|| job.won.unwrap_or(ctx.now));
            // What it gets of another one's it has until the last of that one's hosts is free.
            job.leaves = job.leaves.or_else(|| claims.leaves(&share.hosts, job.number));
            if job.leaves != before {
                changed.push(key.clone());
            }
            if waits {
                share.text += "; it has won hosts that others keep until they leave";
            }
            let has = job.target.iter().filter(|runner| usable.get(&runner.0) == Some(*runner)).count();
            // Between rounds about all nobody loses what it can go on with.
            // Such a round asks nobody who has hosts, and has no price for a job that finds none.
            let says = scope == Scope::All
                || !share.hosts.is_empty()
                || share.quote.is_some()
                || job.quote.is_none();
            let keeps = scope != Scope::All && has >= job.workers.0 as usize && share.hosts.len() < has;
            if !keeps {
                job.target = share.hosts.iter().filter_map(|host| usable.get(host).copied()).collect();
                if says {
                    (job.reason, job.quote) = ((share.reason, share.text), share.quote);
                    job.quoted_bid = job.bid;
                }
            }
            job.decided(scope == Scope::All);
        }
        if scope == Scope::All {
            self.prices = shared.prices;
        }
        self.claims = claims;
        changed.into_iter().for_each(|key| self.stored.changed(key));
        Ok(())
    }

    /// Hosts where a job's runners wait or its workers run.
    pub(crate) fn hosts_of(&self, tenant: &str, name: &str) -> BTreeSet<HostId> {
        let known = self.jobs.get(&(tenant.to_owned(), name.to_owned())).into_iter();
        known.flat_map(|job| job.runners.keys().map(|(host, _)| *host).chain(job.hosts())).collect()
    }

    /// Hosts of other jobs' workers.
    fn taken_hosts(&self, key: &JobKey) -> BTreeSet<HostId> {
        self.jobs.iter().filter(|(other, _)| *other != key).flat_map(|(_, job)| job.hosts()).collect()
    }

    /// What operators see.
    pub(crate) fn reply(&self, ctx: &Ctx<'_>) -> v1::JobsReply {
        let runners = self.jobs.values().flat_map(|job| job.runners.keys());
        let hosts: BTreeSet<HostId> = runners.map(|(host, _)| *host).collect();
        let topology = &ctx.settings.topology;
        let mut kinds: BTreeMap<&str, u32> = BTreeMap::new();
        hosts.iter().for_each(|host| *kinds.entry(topology.kind(*host)).or_default() += 1);
        let policy = ctx.settings.allocator.map_or(LivePolicy::Fifo, |it| it.policy);
        let market = Some(&ctx.settings.market).filter(|_| policy == LivePolicy::Market);
        let named = market.is_some() || kinds.keys().any(|kind| !kind.is_empty());
        let kinds = kinds.into_iter().filter(|_| named);
        let kinds = kinds.map(|(kind, hosts)| {
            let base_price =
                market.and_then(|market| market.base_prices.get(kind)).copied().unwrap_or_default();
            let price = self.prices.get(kind).copied().unwrap_or(base_price);
            let (price_millionths, base_price_millionths) = (price.0, base_price.0);
            v1::KindOfHosts { kind: kind.to_owned(), hosts, price_millionths, base_price_millionths }
        });
        let mut jobs: Vec<(&JobKey, &Job)> = self.jobs.iter().collect();
        jobs.sort_by_key(|(_, job)| {
            let bid = first_bid(ctx.settings, job);
            round::precedence(policy, (job.attained(ctx.now), bid), job.number)
        });
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let status = |((tenant, name), job): (&JobKey, &Job)| {
            let phase = match (job.over, job.recall, job.ranks.is_empty()) {
                (Some(_), ..) => JobPhase::Over,
                (None, Some(_), _) => JobPhase::Recalled,
                (None, None, false) => JobPhase::Running,
                (None, None, true) => JobPhase::Waiting,
            };
            v1::JobStatus {
                tenant: tenant.clone(),
                job: name.clone(),
                workers_min: job.workers.0,
                workers_max: job.workers.1,
                phase: phase.into(),
                generation: job.generation,
                hosts: job.hosts().map(|host| ctx.host_name(host)).collect(),
                runners: count(job.runners.len()),
                age_ns: nanos(ctx.now.saturating_sub(job.arrived)),
                attained_ns: nanos(job.attained(ctx.now)),
                failures: job.failures(ctx.now),
                reason: job.reason.0.into(),
                reason_text: job.reason_text(ctx.now),
                elastic: job.elastic,
                kind: job.hosts().next().map_or("", |host| topology.kind(host)).to_owned(),
                bid: job.bid.map(Into::into),
                price_millionths: millionths(job.quote.as_ref()),
            }
        };
        v1::JobsReply {
            policy: ctx.settings.allocator.map_or_else(String::new, |it| it.policy.name().to_owned()),
            hosts: count(hosts.len()),
            jobs: jobs.into_iter().map(status).collect(),
            kinds: kinds.collect(),
        }
    }
}

/// What a round decides about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scope {
    /// All jobs.
    All,
    /// Those that wait, and hosts that nobody has.
    Waiting,
    /// The same, and elastic jobs that have lost workers.
    Lost,
}

impl Scope {
    fn includes(self, job: &Job) -> bool {
        let waits = job.ranks.is_empty() && job.target.is_empty();
        match self {
            Self::All => true,
            Self::Waiting => waits,
            Self::Lost => waits || job.has_loss(),
        }
    }
}

/// Why a runner's report is not taken.
enum Refused {
    /// The runner may try again.
    Request(RequestRefusal),
    /// Its job can never run so.
    Order(RunnerOrder),
}

impl From<RequestRefusal> for Refused {
    fn from(why: RequestRefusal) -> Self {
        Self::Request(why)
    }
}

/// Whether a job can ever run as its runner says.
fn check(ctx: &Ctx<'_>, tenant: &str, report: &RunnerReport) -> Result<(), Refused> {
    let infeasible = |text: String, nearest| Err(Refused::Order(RunnerOrder::Infeasible { text, nearest }));
    match report.check() {
        Ok(()) => {}
        Err(error @ RunnerError::Workers { least, most }) => {
            return infeasible(error.to_string(), (least.max(1), most.max(least).max(1)));
        }
        Err(error) => return Err(RequestRefusal::Report(error).into()),
    }
    let most = most_workers(ctx, tenant);
    if report.workers.0 > most {
        return infeasible(over_limit(report.workers, most), (most, most));
    }
    match report.state {
        // A tenant may have had more before.
        WorkerState::Running { place, .. } | WorkerState::Ended { place, .. }
            if place.workers > ctx.settings.most_ranks =>
        {
            Err(RequestRefusal::NoSuchPlace.into())
        }
        _ => Ok(()),
    }
}

/// Why a range of workers is never given to a tenant whose jobs have so many at most.
fn over_limit((least, largest): (u32, u32), most: u32) -> String {
    format!(
        "{least}..{largest} workers, and this tenant's jobs have {most} at most; the nearest range is {most}..{most}"
    )
}

/// The most workers that a job of a tenant may have now.
fn most_workers(ctx: &Ctx<'_>, tenant: &str) -> u32 {
    // Hosts that the tenant is not bound to are the provider's to know.
    let listed = ctx.settings.hosts.get(tenant).and_then(|hosts| u32::try_from(hosts.len()).ok());
    let quota = ctx.settings.terms(tenant).ranks;
    let limits = [listed, quota].into_iter().flatten();
    limits.fold(ctx.settings.most_ranks, u32::min).max(1)
}

/// When a runner counts as gone; never while it asks. Where its host's agent is away it is waited for as ranks are.
fn gone_at(ctx: &Ctx<'_>, (host, _): RunnerKey, runner: &Runner) -> Option<Duration> {
    if runner.question.is_some() {
        return None;
    }
    let session = ctx.hosts.get(&host).and_then(|session| ctx.sessions.get(session));
    Some(match session {
        Some(session) => runner.seen.max(session.since).saturating_add(SILENCE),
        None => runner.seen.saturating_add(ctx.settings.lease.max(SILENCE)),
    })
}

/// Returns the hosts where a job may have a worker, and the runner of each. It is the runner that has the job's worker, or else the
/// first.
fn usable(
    ctx: &Ctx<'_>,
    allocator: AllocatorSettings,
    tenant: &str,
    job: &Job,
) -> BTreeMap<HostId, RunnerKey> {
    let members: BTreeSet<RunnerKey> =
        job.ranks.iter().flatten().copied().filter(|key| !job.has_failed(*key)).collect();
    let has = |key: &RunnerKey| members.contains(key);
    let mut usable: BTreeMap<HostId, RunnerKey> = BTreeMap::new();
    for (key, runner) in &job.runners {
        let there = has(key) || ctx.hosts.contains_key(&key.0);
        let kind = ctx.settings.topology.kind(key.0);
        let fits = job.kinds.is_empty() || job.kinds.contains(kind);
        let allowed = fits && !ctx.is_withdrawn(key.0) && !ctx.is_elsewhere(tenant, &ctx.host_name(key.0));
        let able = there && allowed && !runner.ignores(ctx.now, allocator.notice);
        if able && (has(key) || !usable.contains_key(&key.0)) {
            usable.insert(key.0, *key);
        }
    }
    usable
}

fn fact(ctx: &Ctx<'_>, effects: &mut Effects, (tenant, name): &JobKey, job: &Job, step: Step) {
    let (tenant, name, generation) = (tenant.clone(), name.clone(), job.generation);
    let hosts = || job.hosts().map(|host| ctx.host_name(host)).collect();
    let why = || job.reason.1.clone();
    effects.fact(match step {
        Step::Stopped => return,
        Step::Started => Fact::JobStarted { tenant, name, generation, hosts: hosts(), why: why() },
        Step::Resized => Fact::JobResized { tenant, name, generation, hosts: hosts(), why: why() },
        Step::Recalled(reason) => Fact::JobRecalled { tenant, name, generation, reason },
        Step::Over(succeeded) => Fact::JobOver { tenant, name, generation, succeeded },
    });
}

fn send(effects: &mut Effects, to: SessionId, request: u64, order: Result<ElasticOrder, RequestRefusal>) {
    let order = order.map_err(|why| why.to_string());
    effects.send(to, to_agent::Message::RunnerOrder(v1::RunnerOrder::answer(request, order)));
}

/// A quoted price for operators; 0 where nothing has one.
fn millionths(quote: Option<&Quote>) -> u64 {
    quote.map_or(0, |quote| quote.price.0)
}

fn note(due: &mut Option<Duration>, at: Duration) {
    *due = Some(due.map_or(at, |due| due.min(at)));
}
