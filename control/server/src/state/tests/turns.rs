//! Periodic jobs on one spine in virtual time: they compute, then share the spine fairly; agents tell of their operations, and do
//! what holds ask.

use super::fabric::Fabric;
use super::world::SECOND;
use crate::state::{Fact, Instruction};
use harmonaize_api::v1::{self, from_agent};
use harmonaize_planner::HostId;
use harmonaize_store::WithdrawalKind;
use rand::RngExt;
use std::time::Duration;

/// Some moment of CLOCK_REALTIME.
const REAL: u64 = 1_763_755_542_000_000_000;

/// How finely time goes, in milliseconds.
const TICK: f64 = 0.5;

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
    left: f64,
    began: f64,
    hold: Option<f64>,
    /// Beginnings and ends of its iterations' communication.
    done: Vec<(f64, f64)>,
    told: usize,
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
        let (done, began) = (Vec::new(), 0.0);
        let (varies, left, hold, told, reports, clock) = (0.01, 0.0, None, 0, 0, 0.0);
        Self {
            id,
            leader,
            computes,
            varies,
            alone,
            quiet: starts,
            left,
            began,
            hold,
            done,
            told,
            reports,
            clock,
        }
    }

    fn operation(&self, number: usize, (began, ended): (f64, f64)) -> v1::Operation {
        let at = |time: f64| REAL + (time * 1e6) as u64;
        let timing = v1::RankTiming {
            rank: 0,
            called_ns: at(began),
            ended_ns: at(ended),
            failed: false,
            ..Default::default()
        };
        v1::Operation {
            communicator: self.id,
            operation: number as u64,
            bytes: self.bytes(),
            ranks: vec![timing],
            whole: true,
            ..v1::Operation::default()
        }
    }

    /// Of an operation: 2(n-1)/n of them cross each link of 1 Gbit/s.
    pub(super) fn bytes(&self) -> u64 {
        (self.alone * 1e6 / 12.0) as u64
    }

    fn report(&mut self, fabric: &mut Fabric) {
        self.reports += 1;
        let new = self.done.iter().enumerate().skip(self.told);
        let operations = new.map(|(number, times)| self.operation(number, *times)).collect();
        self.told = self.done.len();
        let report = v1::TelemetryReport { sequence: self.reports, operations, ..Default::default() };
        let session = fabric.state.hosts[&HostId(self.leader)];
        fabric.state.message(fabric.now, session, from_agent::Message::Telemetry(report).into());
        fabric.settle();
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
    fabric.state.settings.telemetry_interval = SECOND;
    fabric.run(SECOND * 3);
    let (targets, kind) = (vec!["spine1".to_owned()], WithdrawalKind::Drain);
    let drain = Instruction::Withdraw { targets, kind, from_ns: 0, until_ns: 0, reason: String::new() };
    let changes = fabric.state.consider(fabric.now, &drain).unwrap();
    fabric.state.carry_out(fabric.now, &changes);
    fabric.settle();
    fabric
}

/// Lets the jobs run for so many seconds.
pub(super) fn run(fabric: &mut Fabric, jobs: &mut [Job], seconds: u32) {
    let ticks = (f64::from(seconds) * 1e3 / TICK) as u64;
    let (mut facts, began) = (fabric.facts.len(), fabric.now);
    let before = jobs.iter().map(|job| job.clock).fold(0.0, f64::max);
    for tick in 0..ticks {
        let passed = tick as f64 * TICK;
        let now = before + passed;
        fabric.run((began + Duration::from_secs_f64(passed / 1e3)).saturating_sub(fabric.now));
        for (_, fact) in &fabric.facts[facts..] {
            let Fact::Held { communicator, hold, .. } = fact else { continue };
            let held = jobs.iter_mut().find(|job| job.id == *communicator).unwrap();
            held.hold = Some(hold.as_secs_f64() * 1e3);
        }
        facts = fabric.facts.len();
        for job in jobs.iter_mut().filter(|job| job.left <= 0.0 && job.quiet <= 0.0) {
            // The call comes when it comes; what it waits for is nobody's business.
            job.began = now;
            job.left = job.alone;
            job.quiet = job.hold.take().unwrap_or(0.0);
        }
        let sharing = jobs.iter().filter(|job| job.left > 0.0 && job.quiet <= 0.0).count() as f64;
        for job in jobs.iter_mut() {
            if job.left > 0.0 && job.quiet <= 0.0 {
                job.left -= TICK / sharing;
                if job.left <= 0.0 {
                    job.done.push((job.began, now + TICK));
                    job.quiet = job.computes * (1.0 + fabric.rng.random_range(-job.varies..=job.varies));
                }
            } else {
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

/// When holds were sent, and for how long, in milliseconds.
pub(super) fn holds(fabric: &Fabric) -> Vec<(Duration, f64)> {
    let held = |(at, fact): &(Duration, Fact)| match fact {
        Fact::Held { hold, .. } => Some((*at, hold.as_secs_f64() * 1e3)),
        _ => None,
    };
    fabric.facts.iter().filter_map(held).collect()
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
        run(&mut fabric, &mut jobs, 60);
        let holds = holds(&fabric);
        for job in &jobs {
            let (first, last) = (job.iteration(0.0, 1_500.0), job.iteration(15_000.0, 60_000.0));
            eprintln!("seed {seed}: {first:.1} ms an iteration, then {last:.1}; holds {holds:?}");
            assert!(first > 165.0 && first / last > 1.35, "seed {seed}: {first} then {last}");
        }
        assert!((1..=8).contains(&holds.len()), "seed {seed}: {holds:?}");
        assert!(holds.iter().all(|(_, hold)| *hold < 60.0 * 1.2), "seed {seed}: {holds:?}");
    }
}

#[test]
fn who_takes_turns_already_is_left_alone() {
    for seed in 0..4 {
        let mut fabric = one_spine(seed);
        let mut jobs =
            [(0, 10.0), (2, 80.0)].map(|(leader, starts)| Job::on(&mut fabric, leader, 80.0, 50.0, starts));
        jobs.iter_mut().for_each(|job| job.varies = 0.0);
        run(&mut fabric, &mut jobs, 30);
        assert_eq!(holds(&fabric), [], "seed {seed}");
        assert!((job_mean(&jobs) - 130.0).abs() < 2.0, "seed {seed}");
    }
}

fn job_mean(jobs: &[Job]) -> f64 {
    jobs.iter().map(|job| job.iteration(5_000.0, f64::MAX)).sum::<f64>() / jobs.len() as f64
}

#[test]
fn jobs_that_drift_are_held_ever_more_rarely() {
    for seed in 0..4 {
        let mut fabric = one_spine(seed);
        let mut jobs = [(0, 60.0), (2, 63.0)]
            .map(|(leader, computes)| Job::on(&mut fabric, leader, computes, 50.0, 10.0));
        jobs.iter_mut().for_each(|job| job.varies = 0.05);
        run(&mut fabric, &mut jobs, 180);
        let holds = holds(&fabric);
        let most = holds.iter().map(|(at, _)| {
            let within = |(other, _): &&(Duration, f64)| (*at..*at + SECOND * 60).contains(other);
            holds.iter().filter(within).count()
        });
        let most = most.max().unwrap_or(0);
        eprintln!("seed {seed}: {} holds, {most} in a minute; {:.1} ms", holds.len(), job_mean(&jobs));
        assert!((1..=12).contains(&most), "seed {seed}: {holds:?}");
        // Together all the time they would take 60 and twice 50.
        assert!(job_mean(&jobs) < 150.0, "seed {seed}: {}", job_mean(&jobs));
    }
}

#[test]
fn what_has_no_rhythm_or_no_room_is_never_held() {
    for (computes, alone, varies) in [(60.0, 40.0, 0.9), (2.0, 60.0, 0.0)] {
        let mut fabric = one_spine(1);
        let mut jobs = [0, 2].map(|leader| Job::on(&mut fabric, leader, computes, alone, 10.0));
        jobs.iter_mut().for_each(|job| job.varies = varies);
        run(&mut fabric, &mut jobs, 30);
        let holds = holds(&fabric);
        assert!(holds.len() <= 1, "{computes} {alone}: {holds:?}");
        assert!(holds.iter().all(|(_, hold)| *hold <= alone * 1.2), "{holds:?}");
    }
}
