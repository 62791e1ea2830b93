//! Jobs: who gets which hosts, what runners are told, and what holds whatever happens.

use super::world::{SECOND, World, hello, join_of, settings};
use harmonaize_abi::session::{
    ElasticOrder, HostPrice, JobBid, PricedOrder, RecallReason, RunnerOrder, RunnerReport, WorkerPlace,
    WorkerState,
};
use harmonaize_abi::{Nanos, Rank};
use harmonaize_api::v1::{self, AllocationReason, JobPhase, JoinRefusedKind, from_agent};
use harmonaize_server::state::{AllocatorSettings, LivePolicy, RequestRefusal, SessionId, Settings, Terms};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

pub(super) const ROUND: Duration = Duration::from_secs(30);

pub(super) fn allocating(policy: LivePolicy) -> Settings {
    let allocator = Some(AllocatorSettings { policy, round: ROUND, notice: SECOND * 5 });
    Settings { allocator, ..settings(4) }
}

/// A runner that is played.
#[derive(Clone, Debug)]
pub(super) struct Runner {
    pub host: usize,
    pub tenant: String,
    pub report: RunnerReport,
    pub elastic: bool,
    /// What it says that its job bids.
    pub bid: Option<JobBid>,
    /// The price that it was told last.
    pub price: Option<HostPrice>,
    /// How many workers it has started.
    pub started: u32,
    /// The number of its open question.
    open: Option<u64>,
    /// It ends no worker that it is told to.
    stubborn: bool,
    /// What it was told, but to wait, to start one beside others, or that its worker runs on.
    pub orders: Vec<RunnerOrder>,
    pub refused: String,
    over: Option<bool>,
}

pub(super) struct Play {
    pub world: World,
    pub settings: Settings,
    pub agents: BTreeMap<usize, SessionId>,
    pub runners: BTreeMap<u64, Runner>,
    requests: u64,
    numbering: Numbering,
    /// What the clock said when control started last.
    clock: Duration,
    /// Joins that were refused.
    turned_away: Vec<v1::JoinRefused>,
    /// Faults were over long ago.
    calm: bool,
    /// What runners that come say that their jobs bid, by job.
    pub bids: BTreeMap<String, JobBid>,
    /// What bids were answered.
    pub bid_answers: Vec<v1::BidSet>,
}

/// A generation of a job: the job's tenant, its name, when it came, and the generation.
type Generation = (String, String, Duration, u64);

/// The places that were given since control started.
#[derive(Default)]
struct Numbering {
    /// How many workers a generation has.
    sizes: BTreeMap<Generation, u32>,
    /// The runner of each rank.
    ranks: BTreeMap<(Generation, Rank), u64>,
    /// Ranks of workers that ran on to another generation: before and after.
    survivors: BTreeMap<(Generation, u64), BTreeMap<Rank, Rank>>,
    /// Generations of workers that control did not start, by tenant and job. Of them it may not know the ranks.
    unknown: BTreeMap<(String, String), u64>,
}

impl Numbering {
    /// A worker has a place, and had another one where it ran on.
    fn given(&mut self, generation: &Generation, runner: u64, place: WorkerPlace, had: Option<WorkerPlace>) {
        let (tenant, job, came, _) = generation.clone();
        let size = *self.sizes.entry(generation.clone()).or_insert(place.workers);
        assert_eq!(size, place.workers, "{generation:?} has two sizes");
        let holder = *self.ranks.entry((generation.clone(), place.rank)).or_insert(runner);
        assert_eq!(holder, runner, "two runners of {place:?} of {generation:?}");
        let unknown = self.unknown.get(&(tenant.clone(), job.clone())).copied().unwrap_or(0);
        if let Some(had) = had.filter(|had| had.generation > unknown) {
            let before = (tenant, job, came, had.generation);
            let kept = self.survivors.entry((before, place.generation)).or_default();
            kept.insert(had.rank, place.rank);
            assert!(kept.values().is_sorted(), "workers that stay changed their order: {kept:?}");
        }
    }
}

impl Play {
    /// Four hosts with agents, some time after control started.
    pub(super) fn new(policy: LivePolicy) -> Self {
        let mut play = Self::with(allocating(policy));
        play.world.wait(ROUND);
        play
    }

    pub(super) fn with(settings: Settings) -> Self {
        let world = World::new(settings.clone(), 3);
        let (agents, runners) = (BTreeMap::new(), BTreeMap::new());
        let numbering = Numbering::default();
        let (clock, turned_away, calm) = (Duration::ZERO, Vec::new(), false);
        let (bids, bid_answers) = (BTreeMap::new(), Vec::new());
        let mut play = Self {
            world,
            settings,
            agents,
            runners,
            requests: 0,
            numbering,
            clock,
            turned_away,
            calm,
            bids,
            bid_answers,
        };
        play.connect_all();
        play
    }

    fn connect_all(&mut self) {
        for host in 0..self.settings.topology.hosts().len() {
            if !self.agents.contains_key(&host) {
                let session = self.world.hello(hello(host, vec![]));
                self.world.ignore(&[session]);
                self.agents.insert(host, session);
            }
        }
    }

    pub(super) fn add(&mut self, host: usize, tenant: &str, job: &str, workers: (u32, u32)) -> u64 {
        self.add_one(host, (tenant, job), workers, false)
    }

    pub(super) fn add_one(
        &mut self,
        host: usize,
        (tenant, job): (&str, &str),
        workers: (u32, u32),
        elastic: bool,
    ) -> u64 {
        let number = self.runners.len() as u64 + self.requests * 1000;
        let report = RunnerReport { runner: number, job: job.to_owned(), workers, state: WorkerState::None };
        let runner = Runner {
            host,
            tenant: tenant.to_owned(),
            report,
            elastic,
            bid: self.bids.get(job).copied(),
            price: None,
            started: 0,
            open: None,
            stubborn: false,
            orders: Vec::new(),
            refused: String::new(),
            over: None,
        };
        self.runners.insert(number, runner);
        self.ask(number);
        number
    }

    pub(super) fn add_all(&mut self, tenant: &str, job: &str, workers: (u32, u32)) -> Vec<u64> {
        (0..4).map(|host| self.add(host, tenant, job, workers)).collect()
    }

    /// Runners of an elastic job of tenant `a`.
    pub(super) fn add_elastic(&mut self, workers: (u32, u32)) -> Vec<u64> {
        (0..4).map(|host| self.add_one(host, ("a", "bert"), workers, true)).collect()
    }

    /// A runner asks, unless it does already or cannot.
    fn ask(&mut self, number: u64) {
        let Some(runner) = self.runners.get_mut(&number) else { return };
        let Some(session) = self.agents.get(&runner.host).copied() else { return };
        if runner.open.is_some() || runner.over.is_some() {
            return;
        }
        self.requests += 1;
        runner.open = Some(self.requests);
        let report = (runner.report.clone(), runner.elastic);
        let asked = v1::AwaitOrder::of(self.requests, &runner.tenant, report, SECOND);
        let asked = v1::AwaitOrder { bid: runner.bid.map(Into::into), ..asked };
        self.world.send(session, from_agent::Message::AwaitOrder(asked));
        self.listen();
    }

    /// Takes answers in and carries orders out.
    fn listen(&mut self) {
        for session in self.agents.values().copied().collect::<Vec<_>>() {
            let received = self.world.received(session);
            self.turned_away.extend(every!(received.clone(), JoinRefused));
            self.bid_answers.extend(every!(received.clone(), BidSet));
            for answer in every!(received, RunnerOrder) {
                let of = |(_, runner): &(&u64, &Runner)| runner.open == Some(answer.request);
                let Some((number, _)) = self.runners.iter().find(of) else { continue };
                let number = *number;
                let priced = answer.clone().priced_outcome();
                if let (Ok(PricedOrder { price: Some(price), .. }), Some(runner)) =
                    (priced, self.runners.get_mut(&number))
                {
                    runner.price = Some(price);
                }
                match answer.outcome() {
                    Err(refused) => {
                        let runner = self.runners.get_mut(&number).unwrap();
                        (runner.open, runner.refused) = (None, refused.to_string());
                    }
                    Ok(order) => self.execute(number, order),
                }
            }
        }
    }

    /// A runner does what it is told.
    fn execute(&mut self, number: u64, order: ElasticOrder) {
        self.check_recall(number, &order);
        let before = self.place(number);
        let runner = self.runners.get_mut(&number).unwrap();
        runner.open = None;
        let starts = runner.started;
        runner.execute(order);
        let (runs_on, key) = (runner.started == starts, (runner.tenant.clone(), runner.report.job.clone()));
        let Some(place) = self.place(number).filter(|place| Some(*place) != before) else { return };
        let Some(job) = self.job(&key) else { return };
        let came = self.world.now - Duration::from_nanos(job.age_ns);
        let generation = (key.0, key.1, came, place.generation);
        self.numbering.given(&generation, number, place, before.filter(|_| runs_on));
    }

    fn job(&self, (tenant, name): &(String, String)) -> Option<v1::JobStatus> {
        self.jobs().into_iter().find(|job| (&job.tenant, &job.job) == (tenant, name))
    }

    /// Of an elastic job that is resized those workers alone end that have no place any more.
    fn check_recall(&self, number: u64, order: &ElasticOrder) {
        let runner = &self.runners[&number];
        let resized = |order: &ElasticOrder| {
            matches!(order, ElasticOrder::Order(RunnerOrder::Recall { reason: RecallReason::Resized, .. }))
        };
        let key = (runner.tenant.clone(), runner.report.job.clone());
        let Some(job) = self.job(&key).filter(|_| runner.elastic && resized(order)) else { return };
        let others = || {
            let of = |other: &&Runner| (&other.tenant, &other.report.job) == (&key.0, &key.1);
            self.runners.iter().filter(|(other, _)| **other != number).map(|(_, other)| other).filter(of)
        };
        let has_place = job.hosts.contains(&format!("h{}", runner.host));
        match job.phase() {
            JobPhase::Running => {
                let twin = others().any(|other| other.host == runner.host);
                assert!(!has_place || twin, "{runner:?} has a place, and was told to end: {job:?}");
            }
            JobPhase::Recalled if self.calm => {
                let ended = |other: &Runner| matches!(other.report.state, WorkerState::Ended { .. });
                assert!(others().any(ended), "all workers of {job:?} were told to end");
            }
            _ => {}
        }
    }

    /// A tenant changes what its job bids, through any agent. Returns why not, or nothing.
    pub(super) fn set_bid(&mut self, tenant: &str, job: &str, bid: Option<v1::JobBid>) -> String {
        let Some(session) = self.agents.values().next().copied() else { return "no agent".to_owned() };
        self.requests += 1;
        let (request, tenant, job) = (self.requests, tenant.to_owned(), job.to_owned());
        self.world.send(session, from_agent::Message::SetBid(v1::SetBid { request, tenant, job, bid }));
        self.listen();
        let answer = self.bid_answers.pop().unwrap();
        assert_eq!(answer.request, request);
        answer.refused
    }

    /// Time goes by; whoever may asks again.
    pub(super) fn wait(&mut self, time: Duration) {
        self.world.wait(time);
        self.listen();
        self.ask_all();
    }

    fn ask_all(&mut self) {
        self.runners.keys().copied().collect::<Vec<_>>().into_iter().for_each(|number| self.ask(number));
    }

    pub(super) fn wait_seconds(&mut self, seconds: u32) {
        (0..seconds).for_each(|_| self.wait(SECOND));
    }

    /// Waits until something holds, so many seconds at most; how many it took.
    fn wait_until(&mut self, most: u32, holds: impl Fn(&Self) -> bool) -> u32 {
        for seconds in 0..most {
            if holds(self) {
                return seconds;
            }
            self.wait(SECOND);
        }
        assert!(holds(self), "not within {most} s: {:#?} {:#?}", self.jobs(), self.runners);
        most
    }

    /// The agent of a host is gone, and what its runners ask with it.
    fn lose_agent(&mut self, host: usize) {
        let Some(session) = self.agents.remove(&host) else { return };
        self.world.gone(session);
        let there = self.runners.values_mut().filter(|runner| runner.host == host);
        there.for_each(|runner| runner.open = None);
    }

    /// A worker has ended: its runner says so with its next question.
    fn end(&mut self, number: u64, succeeded: bool) {
        let runner = self.runners.get_mut(&number).unwrap();
        let WorkerState::Running { place, .. } = runner.report.state else { panic!("no worker: {runner:?}") };
        runner.report.state = WorkerState::Ended { place, succeeded };
        self.wait(SECOND * 2);
    }

    /// A worker of tenant `a` joins a communicator of three.
    fn join(&mut self, number: u64, name: &str, rank: u32) {
        self.requests += 1;
        let join = v1::Join { request: self.requests, ..join_of("a", name, rank, 3) };
        self.world.send(self.agents[&self.runners[&number].host], from_agent::Message::Join(join));
        self.listen();
    }

    /// A runner dies, and its worker with it.
    pub(super) fn die(&mut self, number: u64) {
        let Some(runner) = self.runners.remove(&number) else { return };
        if let (Some(request), Some(session)) = (runner.open, self.agents.get(&runner.host)) {
            let gone = v1::CancelOrder { request };
            self.world.send(*session, from_agent::Message::CancelOrder(gone));
            self.listen();
        }
    }

    pub(super) fn place(&self, number: u64) -> Option<WorkerPlace> {
        match self.runners.get(&number)?.report.state {
            WorkerState::Running { place, .. } => Some(place),
            _ => None,
        }
    }

    pub(super) fn jobs(&self) -> Vec<v1::JobStatus> {
        self.world.state.queries(self.world.now).jobs().jobs
    }

    /// Hosts with a worker of a runner that does as it is told.
    fn occupied(&self) -> Vec<usize> {
        let obeys = |runner: &&Runner| !runner.stubborn;
        let runs = |runner: &&Runner| matches!(runner.report.state, WorkerState::Running { .. });
        self.runners.values().filter(obeys).filter(runs).map(|runner| runner.host).collect()
    }

    /// No host has two workers, and no two workers are of one rank.
    pub(super) fn check(&self) {
        let occupied = self.occupied();
        let hosts: BTreeSet<usize> = occupied.iter().copied().collect();
        assert_eq!(hosts.len(), occupied.len(), "two workers on a host: {:#?}", self.runners);
        let mut ranks = BTreeSet::new();
        for runner in self.runners.values().filter(|runner| !runner.stubborn) {
            if let WorkerState::Running { place, stopping: false } = runner.report.state
                && self.agents.contains_key(&runner.host)
            {
                let key = (&runner.tenant, &runner.report.job, place.generation, place.rank);
                assert!(ranks.insert(key), "two workers of a rank: {:#?}", self.runners);
            }
        }
        for job in self.jobs() {
            let workers = job.hosts.len() as u32;
            assert!(workers <= job.workers_max, "{job:?}");
            assert!(!job.reason_text.is_empty() && job.reason() != AllocationReason::Unspecified);
        }
    }
}

impl Runner {
    /// Its worker has a place from now on.
    fn run_at(&mut self, place: WorkerPlace) {
        let (least, most) = self.report.workers;
        assert!(place.rank.0 < place.workers && (least..=most).contains(&place.workers), "{place:?}");
        self.report.state = WorkerState::Running { place, stopping: false };
    }

    /// Starts a worker.
    fn start(&mut self, place: WorkerPlace) {
        assert!(!matches!(self.report.state, WorkerState::Running { .. }), "offered beside a worker");
        self.started += 1;
        self.run_at(place);
    }

    fn execute(&mut self, order: ElasticOrder) {
        let order = match order {
            ElasticOrder::Order(order) => order,
            ElasticOrder::Enter { place, .. } => {
                assert!(self.elastic, "{place:?}");
                return self.start(place);
            }
            ElasticOrder::Resize { place } => {
                assert!(self.elastic, "{place:?}");
                // It may have ended meanwhile.
                if let WorkerState::Running { place: had, stopping: false } = self.report.state {
                    assert!(had.generation < place.generation, "{had:?} {place:?}");
                    self.run_at(place);
                }
                return;
            }
        };
        match &order {
            RunnerOrder::Wait => return,
            RunnerOrder::Offer { place, .. } => self.start(*place),
            RunnerOrder::Recall { generation, .. } => {
                // It may have ended meanwhile.
                let WorkerState::Running { place, .. } = self.report.state else { return };
                assert_eq!(place.generation, *generation);
                self.report.state = match self.stubborn {
                    true => WorkerState::Running { place, stopping: true },
                    false => WorkerState::Ended { place, succeeded: false },
                };
            }
            RunnerOrder::Over { succeeded } => self.over = Some(*succeeded),
            RunnerOrder::Infeasible { .. } => {}
        }
        self.orders.push(order);
    }
}

#[test]
fn a_job_gets_a_rank_on_each_host() {
    let mut play = Play::new(LivePolicy::Fifo);
    let runners = play.add_all("a", "bert", (2, 3));
    play.wait_seconds(3);
    let ranks: BTreeSet<Rank> = runners.iter().filter_map(|it| Some(play.place(*it)?.rank)).collect();
    assert_eq!(ranks, [0, 1, 2].map(Rank).into());
    let job = &play.jobs()[0];
    assert_eq!((job.phase(), job.reason(), job.generation), (JobPhase::Running, AllocationReason::Most, 1));
    play.wait_seconds(70);
    assert_eq!(play.jobs()[0].generation, 1, "nothing changes while nobody else comes");
    assert!(play.jobs()[0].attained_ns >= 70 * 3 * 1_000_000_000);
}

#[test]
fn a_second_job_gets_what_the_first_has_to_spare() {
    let mut play = Play::new(LivePolicy::Fifo);
    let first = play.add_all("a", "bert", (1, 4));
    play.wait_seconds(3);
    let second = play.add_all("b", "gpt", (2, 2));
    play.wait_seconds(3);
    assert_eq!(play.jobs()[1].reason(), AllocationReason::NoRoom);
    for _ in 0..40 {
        play.wait(SECOND);
        play.check();
    }
    let workers = |play: &Play, of: &[u64]| of.iter().filter(|it| play.place(**it).is_some()).count();
    assert_eq!((workers(&play, &first), workers(&play, &second)), (2, 2));
    let recalled = |it: &u64| {
        play.runners[it].orders.iter().any(|order| {
            matches!(
                order,
                RunnerOrder::Recall { reason: RecallReason::Resized, notice_ns: 5_000_000_000, .. }
            )
        })
    };
    assert!(first.iter().all(recalled));
    assert!(first.iter().filter_map(|it| play.place(*it)).all(|place| place.generation == 2));
}

#[test]
fn least_attained_alternates_jobs() {
    let mut play = Play::new(LivePolicy::LeastAttained);
    play.add_all("a", "bert", (4, 4));
    play.wait_seconds(3);
    play.add_all("b", "gpt", (4, 4));
    let mut generations = BTreeMap::new();
    for _ in 0..200 {
        play.wait(SECOND);
        play.check();
        for job in play.jobs() {
            generations.insert(job.job.clone(), job.generation);
        }
    }
    assert!(generations.values().all(|count| *count >= 2), "{generations:?}");
}

#[test]
fn whoever_starts_was_listed_first_of_those_that_wait() {
    let mut play = Play::new(LivePolicy::LeastAttained);
    for (tenant, job) in [("a", "j0"), ("b", "j1"), ("b", "j2")] {
        play.add_all(tenant, job, (4, 4));
    }
    let mut starts = Vec::new();
    for _ in 0..300 {
        let before = play.jobs();
        let first = before.iter().find(|job| job.phase() == JobPhase::Waiting);
        let first = first.map(|job| job.job.clone());
        play.wait(SECOND);
        let known = |job: &v1::JobStatus| before.iter().find(|before| before.job == job.job).cloned();
        let later = |job: &v1::JobStatus| known(job).is_some_and(|known| known.generation < job.generation);
        if let Some(started) = play.jobs().into_iter().find(later) {
            assert_eq!(Some(&started.job), first.as_ref(), "{before:#?}");
            starts.push(started.job);
        }
    }
    assert!(starts.len() > 5, "{starts:?}");
    assert_eq!(starts[..3], ["j0", "j1", "j2"]);
}

#[test]
fn fifo_lists_jobs_by_arrival() {
    let mut play = Play::new(LivePolicy::Fifo);
    play.add_all("b", "first", (4, 4));
    play.wait_seconds(3);
    play.add_all("a", "second", (4, 4));
    play.wait_seconds(3);
    let names: Vec<String> = play.jobs().into_iter().map(|job| job.job).collect();
    assert_eq!(names, ["first", "second"]);
}

#[test]
fn infeasible_ranges_are_refused_with_the_nearest() {
    let mut settings = allocating(LivePolicy::Fifo);
    settings.terms.insert("b".to_owned(), Terms { ranks: Some(3), ..Terms::default() });
    settings.hosts.insert("a".to_owned(), ["h0", "h1"].map(str::to_owned).into());
    let mut play = Play::with(settings);
    let nearest = |play: &Play, number: u64| match play.runners[&number].orders.as_slice() {
        [RunnerOrder::Infeasible { text, nearest }] => {
            assert!(text.contains(&format!("{}..{}", nearest.0, nearest.1)), "{text}");
            *nearest
        }
        other => panic!("{other:?}"),
    };
    let cases = [("a", (3, 9), (2, 2)), ("b", (4, 4), (3, 3)), ("b", (0, 2), (1, 2)), ("b", (5, 2), (5, 5))];
    for (at, (tenant, workers, expected)) in cases.into_iter().enumerate() {
        let number = play.add(0, tenant, &format!("job{at}"), workers);
        assert_eq!(nearest(&play, number), expected);
    }
    assert!(play.jobs().is_empty());
    play.add(0, "b", "job", (1, 2));
    let other = play.add(1, "b", "job", (1, 3));
    assert_eq!(nearest(&play, other), (1, 2));
    // A tenant that operators want elsewhere learns nothing else.
    let elsewhere = play.add(3, "a", "job", (1, 1));
    assert_eq!(play.runners[&elsewhere].refused, RequestRefusal::Elsewhere.to_string());
}

#[test]
fn a_worker_where_its_tenant_may_not_be_is_ended() {
    let mut play = Play::new(LivePolicy::Fifo);
    let runners = [0, 1].map(|host| play.add(host, "a", "bert", (1, 2)));
    play.wait_seconds(3);
    assert_eq!(play.place(runners[1]).map(|place| place.workers), Some(2));
    let hosts = BTreeMap::from([("a".to_owned(), ["h0".to_owned()].into())]);
    let again = Settings { hosts, ..play.settings.clone() };
    play.world.state.configure(play.world.now, again).unwrap();
    play.wait_seconds(60);
    assert_eq!(play.place(runners[1]), None, "{:?}", play.jobs());
    assert_eq!(play.runners[&runners[1]].refused, RequestRefusal::Elsewhere.to_string());
    let place = play.place(runners[0]).map(|place| (place.generation, place.workers));
    assert_eq!(place, Some((2, 1)), "{:?}", play.jobs());
}

#[test]
fn workers_of_a_removed_tenant_are_ended() {
    let mut play = Play::new(LivePolicy::Fifo);
    let runner = play.add(0, "a", "bert", (1, 1));
    play.wait_seconds(3);
    assert!(play.place(runner).is_some());
    let again = Settings { tenants: vec!["b".to_owned()], ..play.settings.clone() };
    play.world.state.configure(play.world.now, again).unwrap();
    play.wait_seconds(3);
    assert_eq!((play.place(runner), play.jobs()), (None, vec![]));
}

#[test]
fn the_tenants_quota_of_ranks_bounds_workers() {
    let mut settings = allocating(LivePolicy::Fifo);
    let bound = |settings: &mut Settings, ranks| {
        settings.terms.insert("a".to_owned(), Terms { ranks: Some(ranks), ..Terms::default() });
    };
    bound(&mut settings, 3);
    let mut play = Play::with(settings.clone());
    play.world.wait(ROUND);
    let runners = play.add_all("a", "bert", (1, 4));
    play.wait_seconds(40);
    let places = |play: &Play| -> Vec<(u64, u32)> {
        let places = runners.iter().filter_map(|it| play.place(*it));
        places.map(|place| (place.generation, place.workers)).collect()
    };
    assert_eq!(places(&play), [(1, 3); 3]);
    assert_eq!(play.jobs()[0].reason(), AllocationReason::Most);
    // With a lower limit those that run are recalled by the next round.
    bound(&mut settings, 2);
    play.world.state.configure(play.world.now, settings).unwrap();
    play.world.run_until_quiet();
    play.wait_seconds(40);
    assert_eq!(places(&play), [(2, 2); 2]);
}

#[test]
fn a_job_without_the_section_is_refused() {
    let mut play = Play::with(settings(4));
    let number = play.add(0, "a", "bert", (1, 1));
    assert_eq!(play.runners[&number].refused, RequestRefusal::NoAllocator.to_string());
}

#[test]
fn a_runner_that_dies_gives_its_place_back() {
    let mut play = Play::new(LivePolicy::Fifo);
    let runners = play.add_all("a", "bert", (2, 4));
    play.wait_seconds(3);
    play.die(runners[1]);
    play.wait_seconds(3);
    let places: Vec<WorkerPlace> = runners.iter().filter_map(|it| play.place(*it)).collect();
    assert_eq!(places.len(), 3);
    assert!(places.iter().all(|place| (place.generation, place.workers) == (2, 3)), "{places:?}");
    // Silence is death, too.
    play.runners.remove(&runners[0]);
    play.wait_seconds(20);
    let places: Vec<WorkerPlace> = runners.iter().filter_map(|it| play.place(*it)).collect();
    assert!(places.iter().all(|place| place.workers == 2), "{places:?}");
}

#[test]
fn a_restarted_control_learns_who_runs_where() {
    let mut play = Play::new(LivePolicy::Fifo);
    let runners = play.add_all("a", "bert", (2, 4));
    play.wait_seconds(3);
    let before: Vec<Option<WorkerPlace>> = runners.iter().map(|it| play.place(*it)).collect();
    assert!(before.iter().all(Option::is_some));
    play.restart();
    play.wait_seconds(100);
    let after: Vec<Option<WorkerPlace>> = runners.iter().map(|it| play.place(*it)).collect();
    assert_eq!(before, after);
    assert_eq!((play.jobs()[0].phase(), play.jobs()[0].generation), (JobPhase::Running, 1));
}

#[test]
fn a_job_is_over_once_all_have_succeeded() {
    let mut play = Play::new(LivePolicy::Fifo);
    let runners = play.add_all("a", "bert", (2, 2));
    play.wait_seconds(3);
    let running: Vec<u64> = runners.iter().copied().filter(|it| play.place(*it).is_some()).collect();
    play.end(running[0], true);
    assert_eq!(play.jobs()[0].phase(), JobPhase::Running, "one runs still");
    play.end(running[1], true);
    play.wait_seconds(2);
    assert!(runners.iter().all(|it| play.runners[it].over == Some(true)), "{:#?}", play.runners);
    assert!(play.jobs().is_empty());
}

#[test]
fn a_job_whose_workers_fail_again_and_again_is_over() {
    let mut play = Play::new(LivePolicy::Fifo);
    let runners = [0, 1].map(|host| play.add(host, "a", "bert", (2, 2)));
    fail(&mut play, &runners, 4);
    play.wait_seconds(3);
    assert!(runners.iter().all(|it| play.runners[it].over == Some(false)), "{:#?}", play.runners);
}

/// The worker of the first runner fails so often, each time a moment after it started.
fn fail(play: &mut Play, runners: &[u64], times: u32) {
    for _ in 0..times {
        play.wait_until(400, |play| runners.iter().all(|runner| play.place(*runner).is_some()));
        play.end(runners[0], false);
    }
}

#[test]
fn failures_are_forgotten_after_an_hour_without() {
    let mut play = Play::new(LivePolicy::Fifo);
    let runners = [0, 1].map(|host| play.add(host, "a", "bert", (2, 2)));
    fail(&mut play, &runners, 3);
    assert_eq!(play.jobs()[0].failures, 3);
    (0..370).for_each(|_| play.wait(SECOND * 10));
    assert_eq!((play.jobs()[0].phase(), play.jobs()[0].failures), (JobPhase::Running, 0));
    fail(&mut play, &runners, 3);
    play.wait_until(400, |play| play.place(runners[0]).is_some());
    assert_eq!((play.jobs()[0].phase(), play.jobs()[0].failures), (JobPhase::Running, 3));
    fail(&mut play, &runners, 1);
    play.wait_seconds(3);
    assert!(runners.iter().all(|it| play.runners[it].over == Some(false)), "{:#?}", play.runners);
}

#[test]
fn a_job_that_fails_now_and_then_waits_longer_each_time() {
    let mut play = Play::new(LivePolicy::Fifo);
    let runners = [0, 1].map(|host| play.add(host, "a", "bert", (2, 2)));
    for (failures, wait) in (1..).zip([0, 10, 20, 40, 80, 160, 300, 300]) {
        fail(&mut play, &runners, 1);
        let text = play.jobs()[0].reason_text.clone();
        let told = text.contains(&format!("after {failures} failures without a day between them"));
        assert_eq!(told, wait > 0, "{text}");
        let waited = play.wait_until(400, |play| play.place(runners[0]).is_some());
        assert!((wait..=wait + 4).contains(&waited), "failure {failures}: {waited} s, and not {wait}");
        (0..370).for_each(|_| play.wait(SECOND * 10));
        assert_eq!((play.jobs()[0].phase(), play.jobs()[0].failures), (JobPhase::Running, 0));
        assert!(!play.jobs()[0].reason_text.contains("failures"), "{:?}", play.jobs());
    }
}

fn nanos(time: Duration) -> Nanos {
    Nanos(time.as_nanos().try_into().unwrap())
}

/// Two runners whose workers have failed three times. Now they wait for 20 s.
fn failed_thrice() -> (Play, [u64; 2]) {
    let mut play = Play::new(LivePolicy::Fifo);
    let runners = [0, 1].map(|host| play.add(host, "a", "bert", (2, 2)));
    fail(&mut play, &runners, 3);
    (play, runners)
}

#[test]
fn failures_and_waits_outlive_a_restart_of_control() {
    let (mut play, runners) = failed_thrice();
    play.restart();
    play.wait_seconds(2);
    let job = play.jobs().remove(0);
    assert_eq!(job.failures, 3, "{job:?}");
    assert!(job.reason_text.contains("after 3 failures"), "{job:?}");
    play.restart();
    fail(&mut play, &runners, 1);
    play.wait_seconds(3);
    assert!(runners.iter().all(|it| play.runners[it].over == Some(false)), "{:#?}", play.runners);
    assert!(play.world.stored.jobs.is_empty(), "nothing is kept of a job that is over");
}

#[test]
fn time_without_control_counts_for_failures() {
    let (mut play, runners) = failed_thrice();
    play.clock += Duration::from_secs(3600);
    play.restart();
    play.wait_until(100, |play| play.place(runners[0]).is_some());
    let job = play.jobs().remove(0);
    assert_eq!((job.failures, job.reason_text.contains("failures")), (0, false), "{job:?}");
    // The waits begin anew after a day alone.
    play.end(runners[0], false);
    let job = play.jobs().remove(0);
    assert!(job.failures == 1 && job.reason_text.contains("after 4 failures"), "{job:?}");
}

#[test]
fn failures_of_jobs_that_do_not_come_back_are_forgotten() {
    let (mut play, _) = failed_thrice();
    play.runners.clear();
    play.restart();
    play.wait_seconds(40);
    assert_eq!(play.world.stored.jobs.len(), 1, "agents may come back still");
    play.wait_seconds(10);
    assert!(play.world.stored.jobs.is_empty());
    // Nor is anything kept of one whose runners are gone.
    let (mut play, runners) = failed_thrice();
    play.wait_seconds(2);
    assert_eq!(play.world.stored.jobs.len(), 1);
    runners.into_iter().for_each(|runner| play.die(runner));
    assert!(play.world.stored.jobs.is_empty());
}

#[test]
fn a_control_of_before_has_stored_no_failures() {
    let (mut play, _) = failed_thrice();
    play.world.stored.jobs.clear();
    play.restart();
    play.wait_seconds(2);
    assert_eq!(play.jobs()[0].failures, 0);
}

#[test]
fn failures_that_could_not_be_stored_are_stored_later() {
    let (mut play, _) = failed_thrice();
    let stored = std::mem::take(&mut play.world.stored);
    play.world.state.store_failed(play.world.now, &stored.clone().changes());
    play.wait_seconds(3);
    assert!(play.world.stored.jobs.is_empty());
    play.wait_seconds(4);
    assert_eq!(play.world.stored.jobs, stored.jobs);
}

#[test]
fn a_recalled_worker_holds_its_host_during_notice() {
    let mut play = Play::new(LivePolicy::Fifo);
    let first = play.add(0, "a", "bert", (1, 2));
    let second = play.add(1, "a", "bert", (1, 2));
    play.wait_seconds(3);
    play.runners.get_mut(&first).unwrap().stubborn = true;
    play.die(second);
    play.wait_seconds(3);
    // The job has stopped as far as it could; its one runner goes on with the old worker.
    assert_eq!(play.jobs()[0].phase(), JobPhase::Recalled);
    let other = play.add(0, "b", "gpt", (1, 1));
    play.wait_seconds(60);
    assert!(play.place(other).is_some(), "{:?}", play.jobs());
}

#[test]
fn an_elastic_job_is_resized_while_its_workers_run() {
    let mut play = Play::new(LivePolicy::Fifo);
    let first = play.add_elastic((1, 4));
    play.wait_seconds(3);
    let second = play.add_all("b", "gpt", (2, 2));
    play.wait_seconds(40);
    let jobs = play.jobs();
    assert_eq!(
        jobs.iter().map(|job| (job.tenant.as_str(), job.elastic)).collect::<Vec<_>>(),
        [("a", true), ("b", false)]
    );
    let places = |play: &Play| -> Vec<(u64, u64, u32)> {
        let places = first.iter().filter_map(|it| Some((*it, play.place(*it)?)));
        places.map(|(runner, place)| (runner, place.generation, place.workers)).collect()
    };
    let kept = places(&play);
    assert_eq!(
        kept.iter().map(|(_, generation, workers)| (*generation, *workers)).collect::<Vec<_>>(),
        [(2, 2); 2]
    );
    let kept: BTreeSet<u64> = kept.into_iter().map(|(runner, ..)| runner).collect();
    assert_eq!(second.iter().filter(|it| play.place(**it).is_some()).count(), 2);
    for runner in &first {
        let ended = play.runners[runner]
            .orders
            .iter()
            .any(|order| matches!(order, RunnerOrder::Recall { reason: RecallReason::Resized, .. }));
        assert_eq!(ended, !kept.contains(runner), "{:#?}", play.runners[runner]);
    }
    // It grows again, and those that ran on do so once more.
    second.into_iter().for_each(|runner| play.die(runner));
    play.wait_seconds(40);
    assert_eq!(places(&play), first.iter().map(|runner| (*runner, 3, 4)).collect::<Vec<_>>());
    for runner in &first {
        let started = if kept.contains(runner) { 1 } else { 2 };
        assert_eq!(play.runners[runner].started, started, "{:#?}", play.runners[runner]);
    }
}

/// Places of workers that have run on since they first started.
fn run_on(play: &Play, runners: &[u64]) -> Vec<(u64, Rank, u32)> {
    let place = |it: &u64| {
        assert_eq!(play.runners[it].started, 1, "{:#?}", play.runners[it]);
        play.place(*it)
    };
    let places = runners.iter().filter_map(place);
    places.map(|place| (place.generation, place.rank, place.workers)).collect()
}

#[test]
fn an_elastic_job_goes_on_without_a_lost_runner() {
    let mut play = Play::new(LivePolicy::Fifo);
    let runners = play.add_elastic((2, 4));
    play.wait_seconds(3);
    play.die(runners[1]);
    play.wait_seconds(3);
    let left = [runners[0], runners[2], runners[3]];
    assert_eq!(run_on(&play, &left), [0, 1, 2].map(|rank| (2, Rank(rank), 3)));
    // Below its fewest it cannot.
    play.die(runners[0]);
    // Control hears of the next one by the question that it asks again.
    play.wait_seconds(1);
    play.die(runners[2]);
    play.wait_seconds(3);
    assert_eq!(play.place(runners[3]), None);
}

/// An elastic job of three workers, with a runner to spare: the runners of its ranks, and that one.
fn three_and_another(play: &mut Play) -> ([u64; 3], u64) {
    let runners = play.add_elastic((3, 3));
    play.wait_seconds(3);
    let mut members = [0; 3];
    let mut spare = None;
    for runner in runners {
        match play.place(runner) {
            Some(place) => members[place.rank.0 as usize] = runner,
            None => spare = Some(runner),
        }
    }
    (members, spare.unwrap())
}

/// Two workers have run on since they first started, and another is beside them since.
fn assert_replaced(play: &Play, kept: [u64; 2], new: u64, starts: u32) {
    assert_eq!(run_on(play, &kept), [0, 1].map(|rank| (2, Rank(rank), 3)));
    let place = WorkerPlace { generation: 2, rank: Rank(2), workers: 3 };
    assert_eq!((play.place(new), play.runners[&new].started), (Some(place), starts), "{:?}", play.jobs());
}

#[test]
fn a_failed_worker_of_an_elastic_job_starts_beside_the_others() {
    let mut play = Play::new(LivePolicy::Fifo);
    let ([first, failed, last], spare) = three_and_another(&mut play);
    play.end(failed, false);
    play.wait_seconds(3);
    assert_replaced(&play, [first, last], failed, 2);
    assert_eq!((play.place(spare), play.jobs()[0].failures), (None, 1));
}

/// All three have started together again, after one failure, and can join.
fn assert_together(play: &mut Play, members: [u64; 3], refused: usize) {
    let kinds: Vec<JoinRefusedKind> = play.turned_away.iter().map(v1::JoinRefused::kind).collect();
    assert_eq!(kinds, vec![JoinRefusedKind::RankLost; refused]);
    let job = play.jobs().remove(0);
    assert_eq!((job.phase(), job.failures), (JobPhase::Running, 1), "{job:?}");
    let places = members.map(|member| play.place(member).unwrap());
    assert!(
        places.iter().all(|place| (place.generation, place.workers) == (job.generation, 3)),
        "{places:?}"
    );
    for (member, place) in members.into_iter().zip(places) {
        assert!(play.runners[&member].started > 1, "it has started again");
        play.join(member, "bert", place.rank.0);
    }
    assert_eq!(play.turned_away.len(), refused);
    assert_eq!(play.world.status().communicators.len(), 1, "it forms");
}

#[test]
fn all_start_again_where_one_fails_while_others_join() {
    for name in ["bert", "bert/world"] {
        let mut play = Play::new(LivePolicy::Fifo);
        let ([first, failed, last], _) = three_and_another(&mut play);
        play.join(first, name, 0);
        play.join(last, name, 2);
        play.end(failed, false);
        play.wait_seconds(3);
        assert_together(&mut play, [first, failed, last], 2);
    }
}

#[test]
fn all_start_again_where_one_joins_after_another_has_failed() {
    let mut play = Play::new(LivePolicy::Fifo);
    let ([first, failed, last], _) = three_and_another(&mut play);
    play.end(failed, false);
    play.wait_seconds(3);
    assert_replaced(&play, [first, last], failed, 2);
    // It has not read its new place, and would wait for who enters.
    play.join(first, "bert", 0);
    play.wait_seconds(3);
    assert_together(&mut play, [first, failed, last], 1);
}

#[test]
fn all_start_again_where_one_fails_after_control_has_restarted() {
    let mut play = Play::new(LivePolicy::Fifo);
    let ([first, failed, last], _) = three_and_another(&mut play);
    play.restart();
    play.wait_seconds(35);
    play.join(first, "bert", 0);
    play.join(last, "bert", 2);
    play.end(failed, false);
    play.wait_seconds(3);
    assert_together(&mut play, [first, failed, last], 2);
    // The communicator of the second start is forming yet.
    let stored = play.world.stored.jobs.values().next().map(|job| (job.failures, job.unformed));
    assert_eq!(stored, Some((1, true)));
}

#[test]
fn all_start_again_where_one_has_failed_while_control_was_away() {
    let mut play = Play::new(LivePolicy::Fifo);
    let ([first, failed, last], _) = three_and_another(&mut play);
    let place = play.place(failed).unwrap();
    play.runners.get_mut(&failed).unwrap().report.state = WorkerState::Ended { place, succeeded: false };
    play.restart();
    play.wait_seconds(35);
    // It waits for who enters in the failed one's place, in vain.
    play.join(first, "bert", 0);
    play.wait_seconds(3);
    let kinds: Vec<JoinRefusedKind> = play.turned_away.iter().map(v1::JoinRefused::kind).collect();
    assert_eq!(kinds, [JoinRefusedKind::RankLost]);
    let job = play.jobs().remove(0);
    let places = play.runners.keys().filter_map(|runner| play.place(*runner));
    let generations: Vec<u64> = places.map(|place| place.generation).collect();
    assert_eq!((job.phase(), generations), (JobPhase::Running, vec![job.generation; 3]));
    assert!([first, last].iter().all(|member| play.runners[member].started == 2), "{:#?}", play.runners);
}

#[test]
fn workers_run_on_where_a_communicator_has_formed_before_control_restarted() {
    let mut play = Play::new(LivePolicy::Fifo);
    let ([first, failed, last], _) = three_and_another(&mut play);
    let unformed = |play: &Play| play.world.stored.jobs.values().filter(|job| job.unformed).count();
    assert_eq!(unformed(&play), 1);
    let sessions = [first, failed, last].map(|runner| play.agents[&play.runners[&runner].host]);
    play.world.ignore(&sessions);
    play.world.form(&sessions, "bert");
    assert!(play.world.stored.jobs.is_empty(), "it has formed");
    play.restart();
    play.wait_seconds(35);
    play.join(first, "bert/other", 0);
    play.end(failed, false);
    play.wait_seconds(3);
    assert_replaced(&play, [first, last], failed, 2);
    assert_eq!(play.turned_away, []);
}

#[test]
fn all_start_again_where_a_runner_dies_while_others_join() {
    let mut play = Play::new(LivePolicy::Fifo);
    let ([first, lost, last], spare) = three_and_another(&mut play);
    play.join(first, "bert", 0);
    play.join(last, "bert", 2);
    play.die(lost);
    play.wait_seconds(5);
    assert_eq!(play.turned_away.len(), 2);
    let job = play.jobs().remove(0);
    assert_eq!((job.phase(), job.failures, job.hosts.len()), (JobPhase::Running, 0, 3), "{job:?}");
    let started = [first, last, spare].map(|runner| play.runners[&runner].started);
    assert_eq!(started, [2, 2, 1]);
}

#[test]
fn workers_run_on_where_a_communicator_has_formed() {
    let mut play = Play::new(LivePolicy::Fifo);
    let ([first, failed, last], _) = three_and_another(&mut play);
    let sessions = [first, failed, last].map(|runner| play.agents[&play.runners[&runner].host]);
    play.world.ignore(&sessions);
    play.world.form(&sessions, "bert");
    // Another communicator of the job waits for the one that fails: its ranks are told by its time-out.
    play.join(first, "bert/other", 0);
    play.end(failed, false);
    play.wait_seconds(3);
    assert_replaced(&play, [first, last], failed, 2);
    assert_eq!(play.turned_away, []);
}

#[test]
fn workers_of_another_job_join_on() {
    let mut play = Play::new(LivePolicy::Fifo);
    let ([first, failed, last], _) = three_and_another(&mut play);
    play.join(first, "gpt", 0);
    play.end(failed, false);
    play.wait_seconds(3);
    assert_replaced(&play, [first, last], failed, 2);
    assert_eq!(play.turned_away, []);
}

#[test]
fn a_last_generations_failure_ends_its_job() {
    for elastic in [false, true] {
        let mut play = Play::new(LivePolicy::Fifo);
        let runner = play.add_one(0, ("a", "bert"), (1, 1), elastic);
        play.wait_seconds(3);
        let place = WorkerPlace { generation: u64::MAX, ..play.place(runner).unwrap() };
        play.runners.get_mut(&runner).unwrap().report.state = WorkerState::Ended { place, succeeded: false };
        play.wait_seconds(120);
        assert_eq!(play.runners[&runner].over, Some(false), "{:?}", play.jobs());
    }
}

#[test]
fn a_failed_worker_goes_where_an_agent_is() {
    let mut play = Play::new(LivePolicy::Fifo);
    let ([failed, second, third], spare) = three_and_another(&mut play);
    play.end(failed, false);
    let host = play.runners[&failed].host;
    play.lose_agent(host);
    play.wait_seconds(3);
    assert_replaced(&play, [second, third], spare, 1);
}

#[test]
fn a_lost_worker_is_placed_anew_before_the_next_round() {
    let mut play = Play::new(LivePolicy::Fifo);
    let ([first, second, lost], spare) = three_and_another(&mut play);
    play.die(lost);
    play.wait_seconds(3);
    assert_replaced(&play, [first, second], spare, 1);
}

#[test]
fn a_worker_beyond_its_notice_is_replaced() {
    let mut play = Play::new(LivePolicy::Fifo);
    let ([first, stubborn, last], spare) = three_and_another(&mut play);
    // Its runner was asked to end, and cannot end it.
    let place = play.place(stubborn).unwrap();
    let runner = play.runners.get_mut(&stubborn).unwrap();
    (runner.stubborn, runner.report.state) = (true, WorkerState::Running { place, stopping: true });
    play.wait_seconds(10);
    assert_eq!(play.place(spare), None, "its notice is not over");
    play.wait_seconds(12);
    assert_replaced(&play, [first, last], spare, 1);
}

#[test]
fn workers_that_fail_together_are_one_failure() {
    let mut play = Play::new(LivePolicy::Fifo);
    let (members, _) = three_and_another(&mut play);
    for runner in [members[2], members[0]] {
        let place = play.place(runner).unwrap();
        play.runners.get_mut(&runner).unwrap().report.state = WorkerState::Ended { place, succeeded: false };
    }
    play.wait_seconds(5);
    assert_eq!(run_on(&play, &members[1..2]), [(2, Rank(0), 3)]);
    assert_eq!((play.jobs()[0].failures, play.jobs()[0].hosts.len()), (1, 3));
    let started = [members[0], members[2]].map(|runner| play.runners[&runner].started);
    assert_eq!(started, [2, 2]);
}

#[test]
fn an_elastic_job_goes_on_while_a_worker_waits_to_start() {
    let mut play = Play::new(LivePolicy::Fifo);
    let runners = play.add_elastic((2, 4));
    play.wait_seconds(3);
    play.end(runners[0], false);
    play.wait_seconds(4);
    assert_eq!(play.jobs()[0].hosts.len(), 4);
    // With the second failure it starts again after 10 s, and the others go on until then.
    play.end(runners[0], false);
    play.wait_seconds(4);
    let left = &runners[1..];
    assert_eq!(run_on(&play, left), [0, 1, 2].map(|rank| (3, Rank(rank), 3)));
    assert!(play.jobs()[0].reason_text.contains("after 2 failures"), "{:?}", play.jobs());
    play.wait_seconds(9);
    assert_eq!(run_on(&play, left), [0, 1, 2].map(|rank| (4, Rank(rank), 4)));
    assert_eq!(play.runners[&runners[0]].started, 3);
}

#[test]
fn a_job_losing_workers_often_is_planned_seldom() {
    let mut play = Play::new(LivePolicy::Fifo);
    let runners = play.add_elastic((1, 4));
    play.wait_seconds(3);
    let mut last = runners[3];
    for _ in 0..60 {
        play.die(last);
        last = play.add_one(3, ("a", "bert"), (1, 4), true);
        play.wait(SECOND);
    }
    let job = &play.jobs()[0];
    // It shrinks and grows once in 5 s; 60 times it would without a bound.
    assert!((12..=35).contains(&job.generation), "{job:?}");
    assert_eq!(run_on(&play, &runners[..3]).len(), 3);
    play.wait_seconds(7);
    assert_eq!(play.jobs()[0].hosts.len(), 4, "{:?}", play.jobs());
}

#[test]
fn whatever_is_lost_is_there_again_before_the_next_round() {
    for seed in seeds() {
        println!("seed {seed}");
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let policy = LivePolicy::ALL[rng.random_range(0..2)];
        let hosts = rng.random_range(4..=8_usize);
        let settings = Settings { allocator: allocating(policy).allocator, ..settings(hosts) };
        let mut play = Play::with(settings);
        play.world.wait(ROUND);
        let most = hosts as u32 - 1;
        let workers = (rng.random_range(1..=most), most);
        let runners: Vec<u64> =
            (0..hosts).map(|host| play.add_one(host, ("a", "bert"), workers, true)).collect();
        // The first round is a second away, and the next one 31.
        play.wait_seconds(rng.random_range(3..18));
        let mut members: Vec<u64> =
            runners.into_iter().filter(|runner| play.place(*runner).is_some()).collect();
        assert_eq!(members.len(), hosts - 1);
        let lost = members.remove(rng.random_range(0..members.len()));
        let host = play.runners[&lost].host;
        match rng.random_range(0..5) {
            0 => play.die(lost),
            1 => play.end(lost, false),
            2 => {
                play.end(lost, false);
                play.lose_agent(host);
            }
            3 => {
                play.die(lost);
                play.wait_seconds(rng.random_range(0..3));
                play.add_one(host, ("a", "bert"), workers, true);
            }
            _ => {
                let other = members.remove(rng.random_range(0..members.len()));
                let place = play.place(other).unwrap();
                play.runners.get_mut(&other).unwrap().report.state =
                    WorkerState::Ended { place, succeeded: false };
                play.end(lost, false);
            }
        }
        play.wait_seconds(8);
        play.check();
        let ran_on = run_on(&play, &members);
        assert_eq!(ran_on.len(), members.len(), "{:#?}", play.runners);
        let job = play.jobs().remove(0);
        let places: BTreeSet<(u64, Rank)> = play
            .runners
            .keys()
            .filter_map(|runner| play.place(*runner))
            .map(|place| (place.generation, place.rank))
            .collect();
        let expected = (0..most).map(|rank| (job.generation, Rank(rank))).collect();
        assert_eq!(places, expected, "{job:?}");
        assert_eq!(job.phase(), JobPhase::Running);
        assert!(ran_on.iter().map(|(_, rank, _)| rank).is_sorted(), "{ran_on:?}");
    }
}

#[test]
fn a_restarted_control_goes_on_with_a_job_half_resized() {
    let mut play = Play::new(LivePolicy::Fifo);
    let runners = play.add_elastic((2, 4));
    play.wait_seconds(3);
    play.lose_agent(3);
    play.die(runners[0]);
    play.wait_seconds(3);
    let left = &runners[1..];
    assert_eq!(run_on(&play, left), [(2, Rank(0), 3), (2, Rank(1), 3), (1, Rank(3), 4)]);
    play.restart();
    play.wait_seconds(100);
    assert_eq!(run_on(&play, left), [0, 1, 2].map(|rank| (3, Rank(rank), 3)));
    assert_eq!(play.jobs()[0].phase(), JobPhase::Running);
}

#[test]
fn runners_of_a_job_are_elastic_all_or_none() {
    let mut play = Play::new(LivePolicy::Fifo);
    play.add_one(0, ("a", "bert"), (1, 2), true);
    let other = play.add(1, "a", "bert", (1, 2));
    match play.runners[&other].orders.as_slice() {
        [RunnerOrder::Infeasible { text, .. }] => assert!(text.contains("--elastic"), "{text}"),
        orders => panic!("{orders:?}"),
    }
}

impl Play {
    /// Control starts anew, and knows what is stored alone; agents come back at once.
    pub(super) fn restart(&mut self) {
        self.numbering = Numbering::default();
        for runner in self.runners.values() {
            if let WorkerState::Running { place, .. } = runner.report.state {
                let key = (runner.tenant.clone(), runner.report.job.clone());
                let unknown = self.numbering.unknown.entry(key).or_default();
                *unknown = place.generation.max(*unknown);
            }
        }
        self.clock += self.world.now;
        let stored = std::mem::take(&mut self.world.stored);
        self.world = World::new(self.settings.clone(), 4);
        self.world.state.restore(stored.clone(), nanos(self.clock));
        self.world.stored = stored;
        self.agents.clear();
        self.runners.values_mut().for_each(|runner| runner.open = None);
        self.connect_all();
        self.ask_all();
    }

    pub(super) fn step(&mut self, rng: &mut ChaCha8Rng, elastic: [bool; 5]) {
        const JOBS: [(&str, &str, (u32, u32)); 5] = [
            ("a", "j0", (1, 4)),
            ("a", "j1", (2, 2)),
            ("b", "j0", (3, 4)),
            ("b", "j2", (1, 1)),
            ("b", "j3", (2, 3)),
        ];
        let host = rng.random_range(0..4);
        let at = rng.random_range(0..self.runners.len().max(1));
        let chosen = self.runners.keys().nth(at).copied();
        match (rng.random_range(0..100), chosen) {
            (0..25, _) if self.runners.len() < 24 => {
                let at = rng.random_range(0..JOBS.len());
                let (tenant, job, workers) = JOBS[at];
                self.add_one(host, (tenant, job), workers, elastic[at]);
            }
            (25..32, Some(number)) => self.die(number),
            (32..45, Some(number)) => {
                let runner = self.runners.get_mut(&number).unwrap();
                if let WorkerState::Running { place, .. } = runner.report.state {
                    runner.report.state = WorkerState::Ended { place, succeeded: rng.random_range(0..4) > 0 };
                }
            }
            (45, Some(number)) => self.runners.get_mut(&number).unwrap().stubborn = true,
            (46..49, _) => self.lose_agent(host),
            (49..55, _) => {
                self.connect_all();
                self.ask_all();
            }
            (55, _) => self.restart(),
            // Whoever looks after a runner starts it again.
            (56..59, Some(number)) => {
                let Runner { host, tenant, report, elastic, .. } = self.runners[&number].clone();
                self.die(number);
                self.add_one(host, (tenant.as_str(), report.job.as_str()), report.workers, elastic);
            }
            // A worker fails, and its host's agent goes before or after that is known.
            (59..61, Some(number)) => {
                let runner = self.runners.get_mut(&number).unwrap();
                let host = runner.host;
                if let WorkerState::Running { place, .. } = runner.report.state {
                    runner.report.state = WorkerState::Ended { place, succeeded: false };
                }
                self.wait(Duration::from_millis(rng.random_range(0..2000)));
                self.lose_agent(host);
            }
            _ => self.wait(Duration::from_millis(rng.random_range(0..3000))),
        }
        self.runners.retain(|_, runner| runner.over.is_none());
        self.check();
    }
}

pub(super) fn seeds() -> Vec<u64> {
    match std::env::var("HARMONAIZE_SEED") {
        Ok(seed) => vec![seed.parse().unwrap()],
        Err(_) => (0..20).collect(),
    }
}

#[test]
fn no_host_has_two_workers_whatever_happens() {
    for seed in seeds() {
        println!("seed {seed}");
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let policy = LivePolicy::ALL[rng.random_range(0..LivePolicy::ALL.len())];
        let elastic = std::array::from_fn(|_| rng.random_range(0..2) == 0);
        let mut play = Play::new(policy);
        for _ in 0..500 {
            play.step(&mut rng, elastic);
        }
        play.calm_down();
    }
}

impl Play {
    /// All faults are over: whatever can run does, and ends.
    pub(super) fn calm_down(&mut self) {
        let play = self;
        play.connect_all();
        let stubborn: Vec<u64> =
            play.runners.iter().filter(|(_, runner)| runner.stubborn).map(|(number, _)| *number).collect();
        stubborn.into_iter().for_each(|number| play.die(number));
        for second in 0..1500 {
            play.calm = second > 300;
            play.wait(SECOND);
            if second % 50 == 49 {
                for runner in play.runners.values_mut() {
                    if let WorkerState::Running { place, stopping: false } = runner.report.state {
                        runner.report.state = WorkerState::Ended { place, succeeded: true };
                    }
                }
            }
            play.runners.retain(|_, runner| runner.over.is_none());
            play.check();
        }
        let left: Vec<v1::JobStatus> = play.jobs();
        assert!(
            left.iter().all(|job| job.reason() == AllocationReason::TooFewRunners),
            "{left:#?} {:#?}",
            play.runners
        );
    }
}
