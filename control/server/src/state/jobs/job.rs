//! One job: its runners, the workers that it has, and what each runner is to do.

use super::failures::{Failures, Persisted};
use super::round::Quote;
use crate::state::output::SessionId;
use harmonaize_abi::Rank;
use harmonaize_abi::session::{ElasticOrder, JobBid, RecallReason, RunnerOrder, WorkerPlace, WorkerState};
use harmonaize_api::v1::AllocationReason;
use harmonaize_planner::HostId;
use harmonaize_units::Gcra;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// How long after its notice a worker may be reported to run: then its runner ignores the recall.
pub(super) const IGNORED: Duration = Duration::from_secs(10);

/// How long a round between two others waits for more to happen. An elastic job that has lost a worker waits as long: others may be lost
/// with it.
pub(super) const GATHER: Duration = Duration::from_secs(1);

/// How many generations of a job may end because a worker failed, before that is forgotten. One more, and the job is over.
const MOST_FAILURES: u32 = 3;

/// A runner by its host and its own number.
pub(super) type RunnerKey = (HostId, u64);

/// A question that waits for an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Question {
    pub session: SessionId,
    /// The agent's number.
    pub request: u64,
    /// How long it waits.
    pub until: Duration,
}

/// A process that starts workers on a host.
#[derive(Clone, Debug)]
pub(super) struct Runner {
    /// What has become of its worker, as it says.
    pub state: WorkerState,
    /// The generation in which its worker starts, or started. What it says of earlier ones is over.
    pub started: u64,
    /// It was offered the place of this generation, and has not said that it runs.
    pub offered: Option<u64>,
    /// Since when its worker is to end.
    pub recalled: Option<Duration>,
    /// What it asks now.
    pub question: Option<Question>,
    /// When it asked last, or was answered.
    pub seen: Duration,
}

impl Runner {
    /// One that has just come, without a worker.
    pub(super) fn new(now: Duration) -> Self {
        let state = WorkerState::None;
        Self { state, started: 0, offered: None, recalled: None, question: None, seen: now }
    }

    /// Whether it goes on with a worker that it should have ended long ago.
    pub(super) fn ignores(&self, now: Duration, notice: Duration) -> bool {
        matches!(self.state, WorkerState::Running { .. })
            && self.recalled.is_some_and(|since| since.saturating_add(notice + IGNORED) <= now)
    }

    /// Whether its host may have a worker of it.
    pub(super) fn occupies(&self, now: Duration, notice: Duration) -> bool {
        match self.state {
            WorkerState::Running { .. } => !self.ignores(now, notice),
            WorkerState::None | WorkerState::Ended { .. } => self.offered.is_some(),
        }
    }

    /// Whether its worker has ended with success; none where it has not ended.
    fn end(&self) -> Option<bool> {
        match self.state {
            WorkerState::Ended { place, succeeded } if place.generation >= self.started => Some(succeeded),
            _ => None,
        }
    }
}

/// An elastic job has lost workers, and lacks them still.
#[derive(Clone, Copy, Debug)]
struct Loss {
    /// How many workers it had.
    had: usize,
    /// When it lost the last of them.
    at: Duration,
    /// Whether a round has decided since.
    decided: bool,
}

/// A job.
#[derive(Clone, Debug)]
pub(super) struct Job {
    /// Its number, in order of arrival.
    pub number: usize,
    pub arrived: Duration,
    /// The fewest and the most workers.
    pub workers: (u32, u32),
    /// Its workers run on when it gets more hosts or fewer.
    pub elastic: bool,
    /// Kinds of hosts that it may have; any where there are none.
    pub kinds: BTreeSet<String>,
    pub runners: BTreeMap<RunnerKey, Runner>,
    /// Counts its sets of workers.
    pub generation: u64,
    /// The last generation whose workers all started. Of an elastic job some run on in later ones.
    started: u64,
    /// The runners of the generation, by rank; none: it has no workers. A rank is unknown while control learns who runs.
    pub ranks: Vec<Option<RunnerKey>>,
    /// Why the generation's workers are to end.
    pub recall: Option<RecallReason>,
    /// The runners that the last round gave it, by rank.
    pub target: Vec<RunnerKey>,
    /// What its workers have had until `accounted`: time of hosts.
    pub attained: Duration,
    accounted: Duration,
    /// How often its workers have failed.
    failures: Failures,
    /// The last generation in which a worker failed.
    failed_in: u64,
    /// How many of the generation's workers are lost, of an elastic job.
    lost: usize,
    loss: Option<Loss>,
    /// Why one of the workers that started together is gone, of an elastic job; none: all are there, as far as control knows.
    parted: Option<RecallReason>,
    /// Whether its workers have started together, and have formed no communicator yet: of an elastic job.
    pub unformed: bool,
    /// Whether all workers succeeded, once it is over.
    pub over: Option<bool>,
    /// Why it has what it has, by the last round.
    pub reason: (AllocationReason, String),
    /// What it bids; the base price where its tenant has said nothing.
    pub bid: Option<JobBid>,
    /// How often that was changed of late.
    pub bid_changes: Gcra,
    /// The price of the kind that it has or bid for, by the last round.
    pub quote: Option<Quote>,
    /// What it bid then.
    pub quoted_bid: Option<JobBid>,
    /// When its generation began, or control learned of it.
    pub began: Duration,
    /// When it leaves, since it was outbid: no later because its workers start again.
    pub leaves: Option<Duration>,
    /// Since when it has won hosts that others have still.
    pub won: Option<Duration>,
}

/// What a job did by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Its workers are to end.
    Recalled(RecallReason),
    /// It is over: whether all workers succeeded.
    Over(bool),
    /// It has no workers any more.
    Stopped,
    /// It has a new generation of workers.
    Started,
    /// It has one in which some workers run on.
    Resized,
}

impl Job {
    pub(super) fn new(number: usize, arrived: Duration, workers: (u32, u32), elastic: bool) -> Self {
        Self {
            number,
            arrived,
            workers,
            elastic,
            kinds: BTreeSet::new(),
            runners: BTreeMap::new(),
            generation: 0,
            started: 0,
            ranks: Vec::new(),
            recall: None,
            target: Vec::new(),
            attained: Duration::ZERO,
            accounted: arrived,
            failures: Failures::default(),
            failed_in: 0,
            lost: 0,
            loss: None,
            parted: None,
            unformed: false,
            over: None,
            reason: (AllocationReason::New, "no round has decided about it yet".to_owned()),
            bid: None,
            bid_changes: Gcra::default(),
            quote: None,
            quoted_bid: None,
            began: arrived,
            leaves: None,
            won: None,
        }
    }

    /// What is stored of it.
    pub(super) fn persisted(&self) -> Persisted {
        let Self { failures, unformed, bid, leaves, .. } = *self;
        Persisted { failures, unformed, bid, leaves }
    }

    /// Goes on with what was stored of it.
    pub(super) fn restore(&mut self, persisted: Persisted) {
        let Persisted { failures, unformed, bid, leaves } = persisted;
        (self.failures, self.unformed, self.bid, self.leaves) = (failures, unformed, bid, leaves);
    }

    /// What its workers have had by now.
    pub(super) fn attained(&self, now: Duration) -> Duration {
        let workers = u32::try_from(self.ranks.len()).unwrap_or(u32::MAX);
        self.attained.saturating_add(now.saturating_sub(self.accounted).saturating_mul(workers))
    }

    /// Generations that ended because a worker failed, as far as they are not forgotten.
    pub(super) fn failures(&self, now: Duration) -> u32 {
        self.failures.recent(now)
    }

    /// Why it has what it has, for people.
    pub(super) fn reason_text(&self, now: Duration) -> String {
        let text = &self.reason.1;
        let wait = self.failures.backoff_until().saturating_sub(now);
        if self.over.is_some() || wait.is_zero() {
            return text.clone();
        }
        let (seconds, failures) = (wait.as_millis().div_ceil(1000), self.failures.waited_for());
        format!("{text}; workers start in {seconds} s, after {failures} failures without a day between them")
    }

    /// Whether its workers may start, as far as failures go.
    pub(super) fn may_start(&self, now: Duration) -> bool {
        self.failures.backoff_until() <= now
    }

    /// When it may go on though nothing has happened.
    pub(super) fn wakes(&self, now: Duration) -> Option<Duration> {
        let gathered = self.loss.map(|loss| loss.at.saturating_add(GATHER));
        let times = [gathered, Some(self.failures.backoff_until())];
        times.into_iter().flatten().filter(|at| *at > now && self.over.is_none()).min()
    }

    /// Whether it lacks workers that it has lost.
    pub(super) fn has_loss(&self) -> bool {
        self.over.is_none() && self.loss.is_some()
    }

    /// Whether no round has decided since it lost a worker.
    pub(super) fn awaits_round(&self) -> bool {
        self.over.is_none() && self.loss.is_some_and(|loss| !loss.decided)
    }

    /// Whether it has lost a worker just now: others may be lost with it.
    pub(super) fn gathers(&self, now: Duration) -> bool {
        self.loss.is_some_and(|loss| loss.at.saturating_add(GATHER) > now)
    }

    /// A round has set its target; one about `all` jobs settles what it lost.
    pub(super) fn decided(&mut self, all: bool) {
        let lacks = |loss: &Loss| !all && self.target.len() < loss.had;
        self.loss = self.loss.filter(lacks).map(|loss| Loss { decided: true, ..loss });
    }

    /// It has lost a worker.
    fn lose(&mut self, now: Duration) {
        let had = self.loss.map_or(0, |loss| loss.had).max(self.ranks.len());
        self.loss = Some(Loss { had, at: now, decided: false });
    }

    /// Sees which of the generation's workers are lost: failed, without a runner, or beyond their notice.
    fn note_loss(&mut self, now: Duration, notice: Duration) {
        let is_lost = |member: &&RunnerKey| {
            let runner = self.runners.get(*member);
            runner.is_none_or(|runner| runner.end() == Some(false) || runner.ignores(now, notice))
        };
        let lost = self.ranks.iter().flatten().filter(is_lost).count();
        if lost > self.lost {
            self.lose(now);
            let failed = self.ends().contains(&Some(false));
            let reason = if failed { RecallReason::WorkerFailed } else { RecallReason::WorkerLost };
            self.parted.get_or_insert(reason);
        }
        self.lost = lost;
    }

    /// Whether its workers can form no first communicator: one of those that started together is gone. Who starts in its place enters,
    /// and does not meet those that join.
    pub(super) fn is_stranded(&self) -> bool {
        let runs = self.over.is_none() && self.recall.is_none() && !self.ranks.is_empty();
        runs && self.parted.is_some() && self.unformed
    }

    /// Has all workers of one that is stranded end, so that they start together again.
    pub(super) fn recall_stranded(&mut self) -> Option<Step> {
        let reason = self.parted.filter(|_| self.is_stranded())?;
        self.recall = Some(reason);
        Some(Step::Recalled(reason))
    }

    fn account(&mut self, now: Duration) {
        self.attained = self.attained(now);
        self.accounted = now;
    }

    /// The rank of a runner in the generation.
    fn rank_of(&self, runner: RunnerKey) -> Option<Rank> {
        let at = self.ranks.iter().position(|member| *member == Some(runner))?;
        u32::try_from(at).ok().map(Rank)
    }

    /// The ranks of all runners that have one.
    pub(super) fn rank_of_each(&self) -> BTreeMap<RunnerKey, Rank> {
        let ranks = (0..).zip(&self.ranks);
        ranks.filter_map(|(rank, member)| Some(((*member)?, Rank(rank)))).collect()
    }

    /// Whether a runner's worker has failed, and none has started since.
    pub(super) fn has_failed(&self, runner: RunnerKey) -> bool {
        self.runners.get(&runner).is_some_and(|runner| runner.end() == Some(false))
    }

    /// Hosts of its workers, by rank.
    pub(super) fn hosts(&self) -> impl Iterator<Item = HostId> {
        self.ranks.iter().flatten().map(|(host, _)| *host)
    }

    /// Hosts that it may have a worker on, or has given to its workers. Where a runner is gone, so is its worker.
    pub(super) fn busy(&self, now: Duration, notice: Duration) -> impl Iterator<Item = HostId> {
        let given = self.ranks.iter().flatten().filter(move |member| self.runners.contains_key(*member));
        given.map(|(host, _)| *host).chain(self.occupied(now, notice))
    }

    /// Hosts that it may have a worker on.
    pub(super) fn occupied(&self, now: Duration, notice: Duration) -> impl Iterator<Item = HostId> {
        let own = self.runners.iter().filter(move |(_, runner)| runner.occupies(now, notice));
        own.map(|((host, _), _)| *host)
    }

    /// Whether a runner's worker runs on when the job is resized: it runs, or is about to start.
    pub(super) fn keeps(&self, key: RunnerKey) -> bool {
        let Some(runner) = self.runners.get(&key).filter(|runner| runner.recalled.is_none()) else {
            return false;
        };
        match runner.state {
            WorkerState::Running { stopping, .. } => !stopping,
            WorkerState::None | WorkerState::Ended { .. } => {
                runner.end().is_none() && self.rank_of(key).is_some()
            }
        }
    }

    /// Takes in a worker that runs since before control did: of several generations the latest is the job's.
    pub(super) fn adopt(&mut self, now: Duration, runner: RunnerKey, place: WorkerPlace) {
        if place.generation > self.generation {
            self.account(now);
            self.generation = place.generation;
            self.began = now;
            self.ranks = vec![None; place.workers as usize];
        }
        let fits = place.generation == self.generation && place.workers as usize == self.ranks.len();
        let fits = fits && self.rank_of(runner).is_none();
        if let Some(free) = self.ranks.get_mut(place.rank.0 as usize).filter(|free| fits && free.is_none()) {
            *free = Some(runner);
        }
    }

    /// Goes on with what the runners of the generation say. `complete`: every rank must be known.
    pub(super) fn advance(&mut self, now: Duration, notice: Duration, complete: bool) -> Option<Step> {
        if self.over.is_some() {
            return None;
        }
        let able = |runner: &Runner| !runner.ignores(now, notice);
        self.target.retain(|runner| self.runners.get(runner).is_some_and(able));
        if self.target.len() < self.workers.0 as usize {
            self.target.clear();
        }
        if self.ranks.is_empty() {
            return None;
        }
        if self.recall.is_some() {
            if self.runners.values().any(|runner| runner.occupies(now, notice)) {
                return None;
            }
            if self.elastic && self.runners.values().any(|runner| runner.ignores(now, notice)) {
                self.lose(now);
            }
            self.account(now);
            self.ranks.clear();
            self.recall = None;
            return Some(Step::Stopped);
        }
        let ends = self.ends();
        let failed = ends.contains(&Some(false));
        if failed && self.failed_in != self.generation {
            self.failed_in = self.generation;
            self.failures.add(now);
        }
        if self.elastic && complete {
            self.note_loss(now, notice);
        }
        let step = if failed && self.failures(now) > MOST_FAILURES {
            Step::Over(false)
        } else if ends.iter().all(|end| *end == Some(true)) {
            Step::Over(true)
        } else if self.elastic && (!complete || self.resizes() || self.awaits_replacement()) {
            return None;
        } else if failed {
            Step::Recalled(RecallReason::WorkerFailed)
        } else if self.has_lost(complete) {
            Step::Recalled(RecallReason::WorkerLost)
        } else if complete && !self.is_on_target() {
            Step::Recalled(match self.target.is_empty() {
                true => RecallReason::Suspended,
                false => RecallReason::Resized,
            })
        } else {
            return None;
        };
        match step {
            Step::Over(succeeded) => {
                self.account(now);
                self.over = Some(succeeded);
                self.ranks.clear();
                self.target.clear();
                let text = match succeeded {
                    true => "all its workers succeeded".to_owned(),
                    false => format!("its workers failed {} times", self.failures(now)),
                };
                self.reason = (AllocationReason::Over, text);
            }
            Step::Recalled(reason) => self.recall = Some(reason),
            Step::Stopped | Step::Started | Step::Resized => {}
        }
        Some(step)
    }

    /// By rank whether the generation's workers have ended with success; none where they have not ended.
    fn ends(&self) -> Vec<Option<bool>> {
        let end = |member: &Option<RunnerKey>| self.runners.get(member.as_ref()?)?.end();
        self.ranks.iter().map(end).collect()
    }

    /// Whether a rank of the generation has no runner. `complete`: every rank must be known.
    fn has_lost(&self, complete: bool) -> bool {
        self.ranks.iter().any(|member| match member {
            Some(runner) => !self.runners.contains_key(runner),
            None => complete,
        })
    }

    fn is_on_target(&self) -> bool {
        let has: BTreeSet<RunnerKey> = self.ranks.iter().flatten().copied().collect();
        has == self.target.iter().copied().collect()
    }

    /// In a copy: its workers have ended and started as they are to.
    pub(super) fn assume_target(&mut self, now: Duration, notice: Duration) {
        let failed = self.ends().contains(&Some(false));
        // Without a target the round about what it has lost comes first, and keeps who runs on.
        let waits = self.target.is_empty() && self.awaits_replacement();
        if self.recall.is_none() && (waits || self.is_on_target() && !failed) {
            return;
        }
        self.account(now);
        self.ranks = self.target.iter().copied().map(Some).collect();
        self.recall = None;
        for runner in self.runners.values_mut().filter(|runner| !runner.ignores(now, notice)) {
            *runner = Runner { seen: runner.seen, ..Runner::new(now) };
        }
    }

    /// Whether it only waits for its hosts.
    pub(super) fn wants_start(&self) -> bool {
        self.over.is_none() && self.ranks.is_empty() && !self.target.is_empty()
    }

    /// Whether it is to go on with other workers beside some that run on.
    ///
    /// Not once a worker has succeeded: the job is about to be over.
    pub(super) fn resizes(&self) -> bool {
        let runs = self.over.is_none() && self.recall.is_none() && !self.ranks.is_empty();
        let ends = self.ends();
        self.elastic
            && runs
            && (ends.contains(&Some(false)) || self.has_lost(true) || !self.is_on_target())
            && !ends.contains(&Some(true))
            && self.target.iter().any(|runner| self.keeps(*runner))
    }

    /// Whether workers that run on wait for the round that decides about those that are lost.
    fn awaits_replacement(&self) -> bool {
        self.awaits_round()
            && !self.ends().contains(&Some(true))
            && self.ranks.iter().flatten().any(|runner| self.keeps(*runner))
    }

    /// Begins a generation on the hosts that the last round gave it.
    pub(super) fn start(&mut self, now: Duration) -> Step {
        let members = self.target.clone();
        self.begin(now, &members, &members);
        self.started = self.generation;
        (self.parted, self.unformed) = (None, self.elastic);
        Step::Started
    }

    /// Goes on with these in another generation; not where they are too few, or those that it has. Workers that run on keep their
    /// order, and new ones come last.
    pub(super) fn resize(&mut self, now: Duration, mut members: Vec<RunnerKey>) -> Option<Step> {
        let ranks = self.rank_of_each();
        members.sort_by_cached_key(|runner| {
            (!self.keeps(*runner), ranks.get(runner).map_or(u32::MAX, |rank| rank.0))
        });
        let new: Vec<RunnerKey> = members.iter().filter(|runner| !self.keeps(**runner)).copied().collect();
        let same = self.ranks.iter().copied().eq(members.iter().copied().map(Some));
        if (same && new.is_empty()) || members.len() < self.workers.0 as usize {
            return None;
        }
        let stays = |member: &Option<RunnerKey>| {
            member.is_some_and(|runner| members.contains(&runner) && !new.contains(&runner))
        };
        if !self.ranks.iter().all(stays) {
            self.parted.get_or_insert(RecallReason::Resized);
        }
        self.begin(now, &members, &new);
        Some(Step::Resized)
    }

    /// Begins a generation of these, by rank, of whom some are `new`.
    fn begin(&mut self, now: Duration, members: &[RunnerKey], new: &[RunnerKey]) {
        self.account(now);
        // Whatever a runner says of earlier workers is of an earlier generation.
        let reported = self.runners.values().filter_map(|runner| match runner.state {
            WorkerState::Running { place, .. } | WorkerState::Ended { place, .. } => Some(place.generation),
            WorkerState::None => None,
        });
        self.generation = reported.chain([self.generation]).max().unwrap_or(0).saturating_add(1);
        self.ranks = members.iter().copied().map(Some).collect();
        self.began = now;
        self.lost = 0;
        // A runner may say that its worker failed in a generation beyond all: then each start is a failure of its own.
        self.failed_in = 0;
        for key in new {
            if let Some(runner) = self.runners.get_mut(key) {
                runner.started = self.generation;
            }
        }
    }

    /// What a runner of this rank is to do; nothing new where none.
    pub(super) fn order(
        &self,
        rank: Option<Rank>,
        runner: &Runner,
        notice: Duration,
    ) -> Option<ElasticOrder> {
        let notice_ns = u64::try_from(notice.as_nanos()).unwrap_or(u64::MAX);
        let (generation, workers) = (self.generation, u32::try_from(self.ranks.len()).unwrap_or(u32::MAX));
        let rank = rank.filter(|_| self.recall.is_none());
        let place = rank.map(|rank| WorkerPlace { generation, rank, workers });
        let order = match (runner.state, self.over) {
            (WorkerState::Running { stopping: true, .. }, _) => return None,
            (WorkerState::Running { place: has, .. }, _) => match place {
                Some(place) if place == has => return None,
                Some(place) if self.elastic => return Some(ElasticOrder::Resize { place }),
                _ => {
                    let own = self.recall.filter(|_| has.generation == generation || self.elastic);
                    let failed = (self.over == Some(false)).then_some(RecallReason::WorkerFailed);
                    let others = (self.elastic && !self.ranks.is_empty()).then_some(RecallReason::Resized);
                    let reason = own.or(failed).or(others).unwrap_or(RecallReason::Outdated);
                    RunnerOrder::Recall { generation: has.generation, reason, notice_ns }
                }
            },
            (_, Some(succeeded)) => RunnerOrder::Over { succeeded },
            (WorkerState::Ended { place, .. }, None) if place.generation >= runner.started => return None,
            (WorkerState::None | WorkerState::Ended { .. }, None) => {
                let place = place?;
                if self.elastic && generation != self.started {
                    return Some(ElasticOrder::Enter { place, notice_ns });
                }
                RunnerOrder::Offer { place, notice_ns }
            }
        };
        Some(order.into())
    }
}
