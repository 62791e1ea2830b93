//! Periodic jobs on one spine in virtual time: they compute, then share the spine fairly. Agents report their operations, and wait for
//! their turns.

use super::fabric::{CrossTraffic, Fabric};
use super::world::{SECOND, operation};
use harmonaize_abi::CommunicatorId;
use harmonaize_api::v1::{self, from_agent, to_agent};
use harmonaize_planner::{DirectedLink, Discipline, HostId, LinkId};
use harmonaize_server::state::testing::Testing as _;
use harmonaize_server::state::{Fact, TurnsEnd};
use rand::RngExt;
use std::time::Duration;

/// Some moment of CLOCK_REALTIME.
const REAL: u64 = 1_763_755_542_000_000_000;

/// How finely time goes, in milliseconds.
const TICK: f64 = 0.5;

/// How long a message takes between an agent and control, in milliseconds.
const MESSAGE: f64 = 1.0;

/// A job of one rank on each of four hosts. Times in milliseconds.
pub(super) struct Job {
    pub(super) id: u64,
    leader: usize,
    computes: f64,
    /// By how much of it that varies.
    varies: f64,
    /// How long it communicates where the spine is its own.
    alone: f64,
    quiet: f64,
    remaining: f64,
    began: f64,
    /// How it takes turns, and until when its operation waits.
    turns: Option<v1::Interleaving>,
    waits: Option<f64>,
    /// The turn that is not over.
    turn: Option<u64>,
    /// Its agent never says that a turn is over, or so much later.
    never_ends: bool,
    ends_late: f64,
    /// It tells of operations that take so much longer.
    lies: f64,
    /// On the way to its agent and to control, and when it is there.
    received: Vec<(f64, to_agent::Message)>,
    sent: Vec<(f64, from_agent::Message)>,
    /// Beginnings and ends of its iterations' communication.
    done: Vec<(f64, f64)>,
    notified: usize,
    reports: u64,
    /// How long it has run.
    clock: f64,
}

impl Job {
    /// Computes and communicates for so long, the first time after `starts`.
    fn on(fabric: &mut Fabric, leader: usize, computes: f64, alone: f64, starts: f64) -> Self {
        Self::of("a", fabric, leader, (computes, alone, starts))
    }

    /// The same of that tenant, called after its first host.
    pub(super) fn of(
        tenant: &str,
        fabric: &mut Fabric,
        leader: usize,
        (computes, alone, starts): (f64, f64, f64),
    ) -> Self {
        let hosts = [leader, leader + 1, leader + 4, leader + 5];
        let id = fabric.form(tenant, &format!("job{leader}"), &hosts);
        Self {
            id,
            leader,
            computes,
            varies: 0.01,
            alone,
            quiet: starts,
            remaining: 0.0,
            began: 0.0,
            turns: None,
            waits: None,
            turn: None,
            never_ends: false,
            ends_late: 0.0,
            lies: 0.0,
            received: Vec::new(),
            sent: Vec::new(),
            done: Vec::new(),
            notified: 0,
            reports: 0,
            clock: 0.0,
        }
    }

    /// What arrives: at its agent, and from there at control.
    fn exchange(&mut self, fabric: &mut Fabric, now: f64) {
        while self.received.first().is_some_and(|(at, _)| *at <= now) {
            match self.received.remove(0).1 {
                to_agent::Message::Interleaving(turns) => {
                    self.turns = Some(turns).filter(|turns| turns.max_wait_ns > 0)
                }
                to_agent::Message::GrantSlot(given) if self.turn == Some(given.slot) => self.waits = None,
                _ => {}
            }
        }
        self.waits = self.waits.filter(|until| *until > now && self.turns.is_some());
        while self.sent.first().is_some_and(|(at, _)| *at <= now) {
            let session = fabric.state.session_of(HostId(self.leader)).unwrap();
            fabric.send(session, self.sent.remove(0).1);
        }
    }

    /// Calls an operation, and asks for its turn where it takes turns.
    fn call(&mut self, now: f64) {
        // The call comes when it comes; what it waits for is nobody's business.
        (self.began, self.remaining) = (now, self.alone);
        self.quiet = 0.0;
        if let Some(turns) = self.turns {
            let turn = self.done.len() as u64;
            self.waits = Some(now + turns.max_wait_ns as f64 / 1e6);
            self.turn = Some(turn);
            let wanted = v1::RequestSlot { communicator: self.id, slot: turn };
            self.sent.push((now + MESSAGE, from_agent::Message::RequestSlot(wanted)));
        }
    }

    fn ends(&mut self, now: f64, varied: f64) {
        self.done.push((self.began, now));
        self.quiet = self.computes * varied;
        if let Some(turn) = self.turn.take().filter(|_| !self.never_ends) {
            let done = v1::ReleaseSlot { communicator: self.id, slot: turn };
            self.sent.push((now + MESSAGE + self.ends_late, from_agent::Message::ReleaseSlot(done)));
        }
    }

    fn communicates(&self) -> bool {
        self.remaining > 0.0 && self.quiet <= 0.0 && self.waits.is_none()
    }

    fn operation(&self, number: usize, (began, ended): (f64, f64)) -> v1::Operation {
        let at = |time: f64| REAL + (time * 1e6) as u64;
        let times = (at(began), at(ended + self.lies));
        v1::Operation { complete: true, ..operation(self.id, number as u64, self.bytes(), 0, times) }
    }

    /// Of an operation: 2(n-1)/n of them cross each link of 1 Gbit/s.
    pub(super) fn bytes(&self) -> u64 {
        ((self.alone + self.lies) * 1e6 / 12.0) as u64
    }

    fn report(&mut self, fabric: &mut Fabric) {
        self.reports += 1;
        let new = self.done.iter().enumerate().skip(self.notified);
        let operations = new.map(|(number, times)| self.operation(number, *times)).collect();
        self.notified = self.done.len();
        let report = v1::TelemetryReport { sequence: self.reports, operations, ..Default::default() };
        let session = fabric.state.session_of(HostId(self.leader)).unwrap();
        fabric.send(session, from_agent::Message::Telemetry(report));
    }

    /// How many iterations it has done.
    pub(super) fn done(&self) -> usize {
        self.done.len()
    }

    /// The mean iteration from one moment to another.
    pub(super) fn iteration(&self, from: f64, to: f64) -> f64 {
        let ends: Vec<f64> =
            self.done.iter().map(|(_, ended)| *ended).filter(|at| (from..to).contains(at)).collect();
        (ends[ends.len() - 1] - ends[0]) / (ends.len() - 1) as f64
    }
}

/// All that can be on the first spine alone.
pub(super) fn one_spine(seed: u64) -> Fabric {
    let mut fabric = Fabric::new(seed, 1);
    fabric.state.settings_mut().telemetry_interval = SECOND;
    fabric.run(SECOND * 3);
    fabric.drain("spine1");
    fabric
}

/// Lets the jobs run for so many seconds.
pub(super) fn run(fabric: &mut Fabric, jobs: &mut [Job], seconds: u32) {
    let ticks = (f64::from(seconds) * 1e3 / TICK) as u64;
    let began = fabric.now;
    let before = jobs.iter().map(|job| job.clock).fold(0.0, f64::max);
    for tick in 0..ticks {
        let passed = tick as f64 * TICK;
        let now = before + passed;
        fabric.run((began + Duration::from_secs_f64(passed / 1e3)).saturating_sub(fabric.now));
        jobs.iter_mut().for_each(|job| job.exchange(fabric, now));
        for message in fabric.tenants.others.drain(..) {
            let id = match &message {
                to_agent::Message::Interleaving(turns) => turns.communicator,
                to_agent::Message::GrantSlot(given) => given.communicator,
                _ => continue,
            };
            let job = jobs.iter_mut().find(|job| job.id == id).unwrap();
            job.received.push((now + MESSAGE, message));
        }
        jobs.iter_mut().filter(|job| job.remaining <= 0.0 && job.quiet <= 0.0).for_each(|job| job.call(now));
        let sharing = jobs.iter().filter(|job| job.communicates()).count() as f64;
        for job in jobs.iter_mut() {
            if job.communicates() {
                job.remaining -= TICK / sharing;
                if job.remaining <= 0.0 {
                    job.ends(now + TICK, 1.0 + fabric.rng.random_range(-job.varies..=job.varies));
                }
            } else if job.waits.is_none() {
                job.quiet -= TICK;
            }
            // Agents report at moments of their own.
            if (tick + 700 * job.leader as u64).is_multiple_of((1e3 / TICK) as u64) {
                job.report(fabric);
            }
        }
    }
    jobs.iter_mut().for_each(|job| job.clock = before + f64::from(seconds) * 1e3);
}

/// When communicators began to take turns, and when they no longer did.
pub(super) fn groups(fabric: &Fabric) -> (Vec<Duration>, Vec<(Duration, TurnsEnd)>) {
    let begun = fabric.facts.iter().filter(|(_, fact)| matches!(fact, Fact::TakesTurns { .. }));
    let over = fabric.facts.iter().filter_map(|(at, fact)| match fact {
        Fact::TurnsOver { why, .. } => Some((*at, *why)),
        _ => None,
    });
    (begun.map(|(at, _)| *at).collect(), over.collect())
}

fn job_mean(jobs: &[Job]) -> f64 {
    jobs.iter().map(|job| job.iteration(5_000.0, f64::MAX)).sum::<f64>() / jobs.len() as f64
}

/// The mean iteration of jobs that compute and communicate for so long. It leaves out the first 15 s of 90. The first is on
/// hosts from 0 on.
fn course(seed: u64, turns: bool, times: &[(f64, f64)], varies: f64) -> (Vec<f64>, Fabric) {
    let mut fabric = one_spine(seed);
    fabric.state.settings_mut().turns = turns;
    let mut jobs = Vec::new();
    for (index, (computes, alone)) in times.iter().enumerate() {
        let starts = fabric.rng.random_range(0.0..*computes);
        jobs.push(Job::on(
            &mut fabric,
            if times.len() > 2 { index } else { 2 * index },
            *computes,
            *alone,
            starts,
        ));
    }
    jobs.iter_mut().for_each(|job| job.varies = varies);
    run(&mut fabric, &mut jobs, 90);
    (jobs.iter().map(|job| job.iteration(15_000.0, 90_000.0)).collect(), fabric)
}

/// What turns gain each of those jobs: with fair sharing, with turns, as means over seeds.
fn gains(times: &[(f64, f64)], varies: f64) -> Vec<f64> {
    let seeds = 5;
    let mut sums = vec![(0.0, 0.0); times.len()];
    for seed in 0..seeds {
        let ((fair, _), (given, fabric)) =
            (course(seed, false, times, varies), course(seed, true, times, varies));
        let (begun, over) = groups(&fabric);
        eprintln!(
            "seed {seed}, varies {varies}: {fair:.1?} ms fairly, {given:.1?} with turns; {begun:?} {over:?}"
        );
        for ((all_fair, all_given), (fair, given)) in sums.iter_mut().zip(fair.iter().zip(&given)) {
            *all_fair += fair;
            *all_given += given;
        }
    }
    let gains: Vec<f64> = sums.iter().map(|(fair, given)| fair / given).collect();
    eprintln!("{times:?}, varies {varies}: gains {gains:.3?}");
    gains
}

#[test]
fn two_jobs_that_begin_together_soon_take_turns() {
    for seed in 0..6 {
        let mut fabric = one_spine(seed);
        let late = fabric.rng.random_range(0.0..10.0);
        let mut jobs = [0, 2].map(|leader| {
            let starts = if leader == 0 { 10.0 } else { 10.0 + late };
            Job::on(&mut fabric, leader, 60.0, 60.0, starts)
        });
        let from = fabric.now;
        run(&mut fabric, &mut jobs, 60);
        let (begun, over) = groups(&fabric);
        // Five iterations of 180 ms, and a report of each.
        assert!(begun.iter().all(|at| *at < from + 3 * SECOND), "seed {seed}: {begun:?} from {from:?} on");
        for job in &jobs {
            let (first, last) = (job.iteration(0.0, 1_500.0), job.iteration(15_000.0, 60_000.0));
            eprintln!(
                "seed {seed}: {first:.1} ms an iteration, then {last:.1}; turns from {begun:?}, over {over:?}"
            );
            assert!(first > 165.0 && first / last > 1.35, "seed {seed}: {first} then {last}");
            let words = fabric.state.queries(Duration::ZERO).plans(CommunicatorId(job.id)).unwrap().plans[0]
                .interleaving
                .clone();
            assert!(words.starts_with("takes turns with a/job"), "{words}");
        }
        assert!(begun.len() == 2 && over.is_empty(), "seed {seed}: {begun:?} {over:?}");
    }
}

#[test]
fn iterations_are_shorter_with_turns_than_shared_fairly() {
    for varies in [0.02, 0.1] {
        let two = gains(&[(60.0, 60.0), (60.0, 60.0)], varies);
        assert!(two.iter().all(|gain| *gain > 1.2), "{two:?}");
    }
    let three = gains(&[(90.0, 40.0), (90.0, 40.0), (90.0, 40.0)], 0.02);
    assert!(three.iter().all(|gain| *gain > 1.1), "{three:?}");
    let double = gains(&[(140.0, 60.0), (70.0, 30.0)], 0.02);
    assert!(double.iter().all(|gain| *gain > 1.0), "{double:?}");
}

#[test]
fn who_takes_turns_already_is_left_alone() {
    for seed in 0..4 {
        let mut fabric = one_spine(seed);
        let mut jobs =
            [(0, 10.0), (2, 80.0)].map(|(leader, starts)| Job::on(&mut fabric, leader, 80.0, 50.0, starts));
        jobs.iter_mut().for_each(|job| job.varies = 0.0);
        run(&mut fabric, &mut jobs, 30);
        assert_eq!(groups(&fabric), (Vec::new(), Vec::new()), "seed {seed}");
        assert!((job_mean(&jobs) - 130.0).abs() < 2.0, "seed {seed}");
    }
}

#[test]
fn aperiodic_or_crowded_jobs_take_no_turns() {
    for (computes, alone, varies) in [(60.0, 40.0, 0.9), (2.0, 60.0, 0.0)] {
        let mut fabric = one_spine(1);
        let mut jobs = [0, 2].map(|leader| Job::on(&mut fabric, leader, computes, alone, 10.0));
        jobs.iter_mut().for_each(|job| job.varies = varies);
        run(&mut fabric, &mut jobs, 30);
        let (begun, _) = groups(&fabric);
        assert!(begun.is_empty(), "{computes} {alone}: {begun:?}");
    }
}

/// One never says that its turn is over. The other loses little before it is left out, and then as much as by sharing fairly.
#[test]
fn who_never_ends_its_turn_is_left_out() {
    for seed in 0..4 {
        let mut fabric = one_spine(seed);
        let mut jobs = [0, 2].map(|leader| Job::on(&mut fabric, leader, 60.0, 60.0, 10.0));
        jobs[1].never_ends = true;
        run(&mut fabric, &mut jobs, 30);
        let (begun, over) = groups(&fabric);
        assert!(
            begun.len() >= 2 && over.iter().any(|(_, why)| *why == TurnsEnd::MuchLonger),
            "seed {seed}: {over:?}"
        );
        let worst = jobs[0].done.iter().map(|(began, ended)| ended - began).fold(0.0, f64::max);
        let mean = jobs[0].iteration(5_000.0, 30_000.0);
        eprintln!(
            "seed {seed}: {mean:.1} ms an iteration, its longest operation {worst:.1} ms; {begun:?} {over:?}"
        );
        // Twice what it takes alone, and 10 ms; then its own, and messages.
        assert!(worst < 130.0 + 120.0 + 5.0 * MESSAGE && mean < 185.0, "seed {seed}: {worst} {mean}");
    }
}

/// Jobs find each other's queues and take them for strangers', for what they get: turns are given all the same.
#[test]
fn what_looks_like_strangers_keeps_nobody_from_turns() {
    for seed in 0..4 {
        let mut fabric = one_spine(seed);
        let mut jobs = [0, 2].map(|leader| Job::on(&mut fabric, leader, 60.0, 60.0, 10.0));
        // Next to nothing seems to be left of the way to one of the second job's hosts.
        let link = DirectedLink { link: LinkId(2), forward: false };
        fabric.cross_traffic.insert(0, CrossTraffic { link, bits: 875_000_000 });
        run(&mut fabric, &mut jobs, 20);
        assert!(fabric.state.congested_links().contains(&link), "seed {seed}");
        let (begun, over) = groups(&fabric);
        assert!(begun.len() == 2 && over.is_empty(), "seed {seed}: {begun:?} {over:?}");
        assert!(job_mean(&jobs) < 135.0, "seed {seed}");
    }
}

/// An agent reports operations that take far longer than they do, and keeps its turns for as long. The other is soon rid of it.
#[test]
fn who_lies_about_its_turns_costs_others_little() {
    for seed in 0..4 {
        let mut fabric = one_spine(seed);
        let mut jobs = [(0, 60.0, 60.0), (2, 470.0, 10.0)]
            .map(|(leader, computes, alone)| Job::on(&mut fabric, leader, computes, alone, 10.0));
        (jobs[1].lies, jobs[1].ends_late) = (400.0, 390.0);
        run(&mut fabric, &mut jobs, 60);
        let (begun, over) = groups(&fabric);
        let worst = jobs[0].done.iter().map(|(began, ended)| ended - began).fold(0.0, f64::max);
        let mean = jobs[0].iteration(5_000.0, 60_000.0);
        eprintln!(
            "seed {seed}: {mean:.1} ms an iteration, its longest operation {worst:.1} ms; {begun:?} {over:?}"
        );
        assert!(over.iter().any(|(_, why)| *why == TurnsEnd::WaitsLess), "seed {seed}: {over:?}");
        assert!(worst < 130.0 + 70.0 + 5.0 * MESSAGE && mean < 135.0, "seed {seed}: {worst} {mean}");
    }
}

/// An agent asks for turns, and says that they are over, as fast as it can. It is heard so often, and is left out; the other loses nothing.
#[test]
fn a_flood_of_turn_requests_is_left_out() {
    let mut fabric = one_spine(1);
    let mut jobs = [0, 2].map(|leader| Job::on(&mut fabric, leader, 60.0, 60.0, 10.0));
    run(&mut fabric, &mut jobs, 20);
    assert_eq!(groups(&fabric).0.len(), 2);
    fabric.tenants.others.clear();
    for turn in 0..50_000 {
        // Its own, which nobody asked for, and one that is not there.
        for communicator in [jobs[1].id, 77] {
            let wanted = v1::RequestSlot { communicator, slot: turn };
            fabric.ask(2, from_agent::Message::RequestSlot(wanted));
            fabric.ask(2, from_agent::Message::ReleaseSlot(v1::ReleaseSlot { communicator, slot: turn }));
        }
    }
    assert!(fabric.tenants.others.len() < 2100, "{} answers", fabric.tenants.others.len());
    let heard = fabric.state.telemetry_of(fabric.now, HostId(2));
    assert_eq!(heard.slot_requests_dropped, 200_000 - 2 * 2000, "the two are counted apart");
    assert_eq!(fabric.state.telemetry_of(fabric.now, HostId(0)).slot_requests_dropped, 0);
    let noted = |fact: &Fact| matches!(fact, Fact::TelemetryRefused { host, .. } if host == "h2");
    let noted = fabric.facts.iter().filter(|(_, fact)| noted(fact)).count();
    assert!((1..=18).contains(&noted), "{noted} lines");
    let (_, over) = groups(&fabric);
    assert!(over.iter().any(|(_, why)| *why == TurnsEnd::TooFast), "{over:?}");
    run(&mut fabric, &mut jobs, 20);
    assert!(jobs[0].iteration(22_000.0, 40_000.0) < 185.0, "as by sharing fairly");
}

/// A host's agent leads communicators of two tenants: what it says for the one is not counted against the other.
#[test]
fn a_flood_for_one_tenant_leaves_out_no_other() {
    let mut fabric = one_spine(1);
    let mut jobs = [0, 2].map(|leader| Job::on(&mut fabric, leader, 60.0, 60.0, 10.0));
    run(&mut fabric, &mut jobs, 20);
    assert_eq!(groups(&fabric).0.len(), 2);
    let (flooded, quiet) = (fabric.form("b", "flooded", &[2, 3]), jobs[1].id);
    for slot in 0..10_000 {
        let mut chosen = vec![flooded];
        chosen.extend((slot % 1000 == 999).then_some(quiet));
        for communicator in chosen {
            let slot = 1_000_000 + slot;
            fabric.ask(2, from_agent::Message::RequestSlot(v1::RequestSlot { communicator, slot }));
            fabric.ask(2, from_agent::Message::ReleaseSlot(v1::ReleaseSlot { communicator, slot }));
        }
    }
    let heard = fabric.state.telemetry_of(fabric.now, HostId(2));
    assert_eq!(heard.slot_requests_dropped, 20_000 - 2000, "all of one tenant's");
    let (_, over) = groups(&fabric);
    assert!(over.iter().all(|(_, why)| *why != TurnsEnd::TooFast), "{over:?}");
    let plans = fabric.state.queries(fabric.now).plans(CommunicatorId(quiet)).unwrap();
    assert_ne!(plans.plans[0].interleaving_reason_code, "");
}

/// Where one is busy for most of the time, the other's short operations lose less by sharing than by waiting.
#[test]
fn short_operations_do_not_wait_for_long_ones() {
    let gains = gains(&[(80.0, 400.0), (60.0, 60.0)], 0.02);
    assert!(gains.iter().all(|gain| *gain > 0.95), "{gains:?}");
}

#[test]
fn turns_end_with_what_made_them_pay() {
    // One computes much longer from now on, at times of no period; the other goes on alone; then a communicator ends.
    let mut fabric = one_spine(3);
    let mut jobs = [0, 2].map(|leader| Job::on(&mut fabric, leader, 60.0, 60.0, 10.0));
    run(&mut fabric, &mut jobs, 20);
    assert_eq!(groups(&fabric).0.len(), 2);
    (jobs[1].computes, jobs[1].varies) = (400.0, 0.9);
    run(&mut fabric, &mut jobs, 40);
    let (_, over) = groups(&fabric);
    assert!(over.len() == 2 && over.iter().all(|(_, why)| *why == TurnsEnd::NoGain), "{over:?}");
    assert!(!fabric.state.is_interleaved());
    let alone = jobs[0].iteration(55_000.0, 60_000.0);
    assert!(alone < 150.0, "{alone}");
}

#[test]
fn what_is_promised_is_left_alone() {
    let mut fabric = one_spine(2);
    let mut jobs = [0, 2].map(|leader| Job::on(&mut fabric, leader, 60.0, 60.0, 10.0));
    run(&mut fabric, &mut jobs, 1);
    let wanted = harmonaize_abi::session::Constraints::new().min_busbw(1_000_000);
    fabric.negotiate("a", "job2", Some(&wanted)).unwrap().unwrap();
    run(&mut fabric, &mut jobs, 20);
    assert!(groups(&fabric).0.is_empty());
}

/// Three whose busy parts do not fit into their period always wait. That makes nobody a straggler. Two that fit do not wait.
#[test]
fn delayed_operations_accuse_no_ranks_or_links() {
    for (count, waits) in [(3, true), (2, false)] {
        let mut fabric = one_spine(1);
        let hosts = |job: usize| if count > 2 { job } else { 2 * job };
        let mut jobs: Vec<Job> =
            (0..count).map(|job| Job::on(&mut fabric, hosts(job), 60.0, 60.0, 10.0)).collect();
        run(&mut fabric, &mut jobs, 40);
        assert_eq!(groups(&fabric).0.len(), count);
        for job in &jobs {
            let number = job.done.len() - 1;
            let told = job.operation(number, job.done[number]);
            assert_eq!(fabric.state.was_delayed(&told), waits, "{:?}", job.done[number]);
            assert!(job.iteration(20_000.0, 40_000.0) < 60.0 * count as f64 + 10.0);
        }
    }
}

/// Three jobs that compute and communicate for so long, on hosts from 0, 1 and 2 on. All three take turns, and all their turns are over.
fn interleaved_jobs(seed: u64, times: [(f64, f64); 3], lies: [f64; 3]) -> (Fabric, [Job; 3]) {
    let mut fabric = one_spine(seed);
    let mut jobs = [0, 1, 2].map(|leader| {
        let (computes, alone) = times[leader];
        Job::on(&mut fabric, leader, computes, alone, 10.0)
    });
    jobs.iter_mut().zip(lies).for_each(|(job, lies)| job.lies = lies);
    run(&mut fabric, &mut jobs, 20);
    let (begun, over) = groups(&fabric);
    assert!(begun.len() == 3 && over.is_empty(), "{begun:?} {over:?}");
    for job in &mut jobs {
        job.sent.drain(..).for_each(|(_, message)| fabric.ask(job.leader, message));
        job.turn.take().into_iter().for_each(|turn| release(&mut fabric, job, turn));
    }
    fabric.tenants.others.clear();
    (fabric, jobs)
}

fn request(fabric: &mut Fabric, job: &Job, slot: u64) {
    let wanted = v1::RequestSlot { communicator: job.id, slot };
    fabric.ask(job.leader, from_agent::Message::RequestSlot(wanted));
}

fn release(fabric: &mut Fabric, job: &Job, slot: u64) {
    let done = v1::ReleaseSlot { communicator: job.id, slot };
    fabric.ask(job.leader, from_agent::Message::ReleaseSlot(done));
}

/// Whose slots were granted since it was last asked.
fn granted(fabric: &mut Fabric, jobs: &[Job]) -> Vec<usize> {
    let grants = fabric.tenants.others.drain(..).filter_map(|message| match message {
        to_agent::Message::GrantSlot(grant) => jobs.iter().position(|job| job.id == grant.communicator),
        _ => None,
    });
    grants.collect()
}

/// Slots beyond those that jobs have asked for.
const LATER: u64 = 1_000_000;

#[test]
fn the_one_with_least_left_goes_first() {
    let (mut fabric, jobs) = interleaved_jobs(1, [(110.0, 50.0), (90.0, 70.0), (130.0, 30.0)], [0.0; 3]);
    for (discipline, order) in
        [(Discipline::LeastRemaining, [2, 1]), (Discipline::FirstComeFirstServed, [1, 2])]
    {
        fabric.state.serve_turns_by(discipline);
        for job in &jobs {
            request(&mut fabric, job, LATER);
        }
        assert_eq!(granted(&mut fabric, &jobs), [0], "{discipline:?}");
        release(&mut fabric, &jobs[0], LATER);
        assert_eq!(granted(&mut fabric, &jobs), [order[0]], "{discipline:?}");
        release(&mut fabric, &jobs[order[0]], LATER);
        assert_eq!(granted(&mut fabric, &jobs), [order[1]], "{discipline:?}");
        release(&mut fabric, &jobs[order[1]], LATER);
    }
}

#[test]
fn equal_jobs_go_as_they_ask() {
    let (mut fabric, jobs) = interleaved_jobs(2, [(110.0, 40.0); 3], [0.0; 3]);
    for order in [[0, 1, 2], [2, 1, 0]] {
        order.iter().for_each(|job| request(&mut fabric, &jobs[*job], LATER));
        for job in order {
            assert_eq!(granted(&mut fabric, &jobs), [job]);
            release(&mut fabric, &jobs[job], LATER);
        }
    }
}

/// Who has waited half of its patience is overtaken no more. So it waits no longer than for those that have their turns, or are overdue
/// too.
#[test]
fn nobody_overtakes_who_is_overdue() {
    let (mut fabric, jobs) = interleaved_jobs(1, [(110.0, 50.0), (90.0, 70.0), (130.0, 30.0)], [0.0; 3]);
    let patience = Duration::from_nanos(jobs[1].turns.unwrap().max_wait_ns);
    for (waits, next) in [(patience / 2 - Duration::from_millis(1), 2), (patience / 2, 1)] {
        request(&mut fabric, &jobs[0], LATER);
        request(&mut fabric, &jobs[1], LATER);
        fabric.run(waits);
        request(&mut fabric, &jobs[2], LATER);
        assert_eq!(granted(&mut fabric, &jobs), [0], "{waits:?}");
        release(&mut fabric, &jobs[0], LATER);
        assert_eq!(granted(&mut fabric, &jobs), [next], "{waits:?}");
        jobs.iter().for_each(|job| release(&mut fabric, job, LATER));
        fabric.tenants.others.clear();
    }
}

/// Who reports less than its turns take is ordered by what they take. It comes after those that report the truth, and nobody else has
/// less of it.
#[test]
fn who_reports_too_little_goes_last() {
    // 60 ms that are reported as 35, beside 45.
    let times = [(140.0, 40.0), (120.0, 60.0), (135.0, 45.0)];
    let order = |lies| {
        let (mut fabric, jobs) = interleaved_jobs(1, times, [0.0, lies, 0.0]);
        for job in &jobs {
            request(&mut fabric, job, LATER);
        }
        assert_eq!(granted(&mut fabric, &jobs), [0]);
        release(&mut fabric, &jobs[0], LATER);
        let first = granted(&mut fabric, &jobs);
        let means = jobs.iter().map(|job| job.iteration(10_000.0, 20_000.0)).collect::<Vec<_>>();
        (first, means)
    };
    let ((truth, honest), (lie, lying)) = (order(0.0), order(-25.0));
    eprintln!("iterations of {honest:.1?} ms, and {lying:.1?} where the second lies");
    assert_eq!((truth, lie), (vec![2], vec![2]));
    assert!(lying[0] < honest[0] * 1.02 && lying[2] < honest[2] * 1.02, "{honest:?} {lying:?}");
}

/// How long the communication of three jobs takes from the call, in the mean. They call at once, in each order once.
fn mean_completion(seed: u64, discipline: Discipline) -> f64 {
    let times = [(130.0, 30.0), (110.0, 50.0), (90.0, 70.0)];
    let (mut fabric, mut jobs) = interleaved_jobs(seed, times, [0.0; 3]);
    fabric.state.serve_turns_by(discipline);
    let mut all = Vec::new();
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let begin = jobs[0].clock;
        for (at, job) in (0..).zip(order) {
            // Whatever was under way is over.
            jobs[job].waits = None;
            (jobs[job].remaining, jobs[job].quiet) = (0.0, 50.0 + 2.0 * f64::from(at));
        }
        run(&mut fabric, &mut jobs, 1);
        for job in &mut jobs {
            let (began, ended) = *job.done.iter().find(|(began, _)| *began > begin + 40.0).unwrap();
            all.push(ended - began);
            job.sent.drain(..).for_each(|(_, message)| fabric.ask(job.leader, message));
            job.turn.take().into_iter().for_each(|turn| release(&mut fabric, job, turn));
        }
    }
    let (_, over) = groups(&fabric);
    assert!(over.is_empty(), "{over:?}");
    all.iter().sum::<f64>() / all.len() as f64
}

#[test]
fn three_jobs_end_sooner_than_first_come_first_served() {
    for seed in 0..3 {
        let [first, least] = [Discipline::FirstComeFirstServed, Discipline::LeastRemaining]
            .map(|discipline| mean_completion(seed, discipline));
        eprintln!("seed {seed}: {first:.1} ms first come, first served; {least:.1} ms least left first");
        assert!(least < first * 0.98, "{least} {first}");
    }
}
