//! Turns on a shared link: known cases, and a fluid simulation that shows what a hold is worth.

use super::*;
use crate::plan::{Plan, Policy, Request, Routes, plan};
use crate::units::{Bytes, Rate};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// `pairs` pairs of hosts on two leaves that one link of 1 Gbit/s joins.
fn dumbbell(pairs: usize) -> Topology {
    let mut text = "switch = [{ name = \"a\" }, { name = \"b\" }]\nlink = [{ from = \"a\", to = \"b\", rate = \"1Gbit/s\" }".to_owned();
    for host in 0..2 * pairs {
        let leaf = ["a", "b"][host % 2];
        text += &format!(", {{ from = \"h{host}\", to = \"{leaf}\", rate = \"1Gbit/s\" }}");
    }
    text += "]\n";
    for host in 0..2 * pairs {
        text += &format!("[[host]]\nname = \"h{host}\"\n");
    }
    Topology::parse(&text).unwrap()
}

const MS: u64 = 1_000_000;

/// Bytes of which a pair sends each other as much as takes so many milliseconds at 1 Gbit/s.
fn lasting(ms: u64) -> Bytes {
    Bytes(ms * 125_000)
}

/// A pair that computes and communicates for so long if alone, as it was seen: period, busy part and beginning in milliseconds.
fn pair(index: usize, alone: u64, period: u64, busy: u64, began: u64) -> Job {
    let rhythm = Rhythm {
        period: Nanos(period * MS),
        busy: Nanos(busy * MS),
        bytes: lasting(alone),
        began: Nanos(began * MS),
        ..Rhythm::default()
    };
    Job {
        communicator: index as u64,
        hosts: vec![HostId(2 * index), HostId(2 * index + 1)],
        connections: 1,
        weight: 1,
        promised: Rate(0),
        limit: None,
        operation: Bytes(0),
        rhythm: Some(rhythm),
        current: None,
        movable: true,
    }
}

fn holds(jobs: &[Job]) -> Vec<(u64, f64)> {
    holds_of(jobs, &jobs.iter().map(|job| job.communicator).collect())
}

/// The jobs' fabric, on which nothing is wrong, and their plan.
fn planned(jobs: &[Job]) -> (Topology, Conditions, Plan) {
    let topology = dumbbell(jobs.len());
    let conditions = Conditions::clear(&topology);
    let request = Request {
        topology: &topology,
        conditions: &conditions,
        jobs,
        routes: Routes::All,
        policy: Policy::default(),
    };
    let plan = plan(&request);
    (topology, conditions, plan)
}

/// Who should take turns with whom, where these do already.
fn turns_of(jobs: &[Job], taking: &[u64]) -> Vec<(u64, u64, Vec<u64>)> {
    let (topology, conditions, plan) = planned(jobs);
    let taking = taking.iter().copied().collect();
    let turns = turns(&topology, &conditions, jobs, &plan.assignments, &taking);
    turns
        .into_iter()
        .map(|turn| (turn.communicator, turn.busy.0 / MS, turn.beside.into_iter().collect()))
        .collect()
}

#[test]
fn turns_are_given_where_they_pay_and_as_long_as_they_do() {
    let colliding = [pair(0, 40, 140, 80, 1000), pair(1, 40, 140, 80, 1000)];
    assert_eq!(turns_of(&colliding, &[]), [(0, 40, vec![1]), (1, 40, vec![0])]);
    // They are apart: nothing is gained yet; but once they take turns, that is why.
    let apart = [pair(0, 40, 100, 40, 1000), pair(1, 40, 100, 40, 1050)];
    assert!(turns_of(&apart, &[]).is_empty() && turns_of(&apart, &[0]).is_empty());
    assert_eq!(turns_of(&apart, &[0, 1]).len(), 2);
    // Three whose busy parts fill the period, and a third that comes to two.
    let three = [0, 1, 2].map(|index| pair(index, 40, 200, 120, 1000));
    assert_eq!(turns_of(&three, &[0, 1])[2], (2, 40, vec![0, 1]));
}

#[test]
fn no_turns_where_nothing_is_gained() {
    // Always busy; periods that do not fit; no rhythm; a hundredth each.
    for taking in [&[][..], &[0, 1]] {
        assert!(turns_of(&[pair(0, 100, 200, 200, 0), pair(1, 100, 200, 200, 0)], taking).is_empty());
        assert!(turns_of(&[pair(0, 40, 140, 80, 0), pair(1, 40, 171, 80, 0)], taking).is_empty());
        let quiet = Job { rhythm: None, ..pair(1, 40, 140, 80, 0) };
        assert!(turns_of(&[pair(0, 40, 140, 80, 0), quiet], taking).is_empty());
        assert!(turns_of(&[pair(0, 2, 102, 4, 0), pair(1, 2, 102, 4, 0)], taking).is_empty());
    }
}

fn holds_of(jobs: &[Job], only: &BTreeSet<u64>) -> Vec<(u64, f64)> {
    let (topology, conditions, plan) = planned(jobs);
    let holds = stagger(&topology, &conditions, jobs, &plan.assignments, only);
    holds.into_iter().map(|hold| (hold.communicator, hold.hold.0 as f64 / MS as f64)).collect()
}

#[test]
fn two_that_collide_take_turns() {
    // Each computes 60 ms and communicates 40 ms if alone, 80 together.
    let found = holds(&[pair(0, 40, 140, 80, 1000), pair(1, 40, 140, 80, 1000)]);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].0 == 1 && (40.0..=60.0).contains(&found[0].1), "{found:?}");
    // They do already.
    assert!(holds(&[pair(0, 40, 100, 40, 1000), pair(1, 40, 100, 40, 1050)]).is_empty());
}

#[test]
fn whoever_needs_the_shorter_hold_is_held() {
    // The second begins just before the first: it would have to wait for all of it, the first for less.
    let found = holds(&[pair(0, 50, 145, 95, 1005), pair(1, 50, 145, 95, 1000)]);
    let [(0, hold)] = found.as_slice() else { panic!("{found:?}") };
    assert!((42.0..=50.0).contains(hold), "{found:?}");
}

#[test]
fn who_may_not_be_held_is_not() {
    // The first would need the shorter hold.
    let jobs = [pair(0, 50, 145, 95, 1005), pair(1, 50, 145, 95, 1000)];
    let found = holds_of(&jobs, &BTreeSet::from([1]));
    let [(1, hold)] = found.as_slice() else { panic!("{found:?}") };
    assert!((50.0..=58.0).contains(hold), "{found:?}");
    assert!(holds_of(&jobs, &BTreeSet::new()).is_empty());
}

#[test]
fn what_a_tenant_says_of_its_job_alone_is_enough() {
    // The same as two that collide, of which one was not measured: 60 ms of computing, and 40 of bytes.
    let mut said = pair(1, 40, 100, 1, 1000);
    if let Some(rhythm) = &mut said.rhythm {
        rhythm.busy = Nanos(0);
    }
    let found = holds_of(&[pair(0, 40, 140, 80, 1000), said], &BTreeSet::from([1]));
    assert!(found.len() == 1 && found[0].0 == 1 && (40.0..=60.0).contains(&found[0].1), "{found:?}");
    let topology = dumbbell(1);
    assert_eq!(alone(&topology, &[HostId(0), HostId(1)], lasting(40)), Nanos(40 * MS));
}

#[test]
fn nothing_is_held_where_turns_do_not_help() {
    // Always busy; periods that do not fit; no rhythm; a tenth each.
    assert!(holds(&[pair(0, 40, 80, 80, 0), pair(1, 40, 80, 80, 0)]).len() <= 1);
    assert!(holds(&[pair(0, 100, 100, 100, 0), pair(1, 100, 100, 100, 0)]).is_empty());
    assert!(holds(&[pair(0, 40, 140, 80, 0), pair(1, 40, 171, 80, 0)]).is_empty());
    let quiet = Job { rhythm: None, ..pair(1, 40, 140, 80, 0) };
    assert!(holds(&[pair(0, 40, 140, 80, 0), quiet]).is_empty());
    assert!(holds(&[pair(0, 2, 102, 4, 0), pair(1, 2, 102, 4, 0)]).is_empty());
}

#[test]
fn a_job_of_half_the_period_fits_in_between() {
    let found = holds(&[pair(0, 60, 200, 80, 0), pair(1, 20, 110, 40, 0)]);
    assert_eq!(found.len(), 1, "{found:?}");
    let found = holds(&[pair(0, 30, 130, 60, 0), pair(1, 30, 130, 60, 0), pair(2, 30, 130, 60, 0)]);
    assert_eq!(found.iter().map(|(job, _)| *job).collect::<Vec<_>>(), [1, 2]);
}

/// Jobs that compute and then share a link fairly, in steps of 0.1 ms; each job's mean iteration over the last second of two, and when
/// its newest busy part began. A hold delays the first communication after the first second.
fn simulate(jobs: &[(f64, f64, f64)], held: &[f64]) -> Vec<(f64, f64, f64)> {
    struct Run {
        quiet: f64,
        left: f64,
        began: Vec<f64>,
        busy: Vec<f64>,
        hold: f64,
    }
    let step = 0.1;
    let mut runs: Vec<Run> = jobs
        .iter()
        .zip(held)
        .map(|((_, _, start), hold)| Run {
            quiet: *start,
            left: 0.0,
            began: Vec::new(),
            busy: Vec::new(),
            hold: *hold,
        })
        .collect();
    for tick in 0..30_000 {
        let now = f64::from(tick) * step;
        for (run, (_, communicates, _)) in runs.iter_mut().zip(jobs) {
            if run.left <= 0.0 && run.quiet <= 0.0 {
                if now >= 1000.0 && run.hold > 0.0 {
                    (run.quiet, run.hold) = (run.hold, 0.0);
                    continue;
                }
                run.left = *communicates;
                run.began.push(now);
            }
        }
        let sharing = runs.iter().filter(|run| run.left > 0.0).count() as f64;
        for (run, (computes, _, _)) in runs.iter_mut().zip(jobs) {
            if run.left > 0.0 {
                run.left -= step / sharing;
                if run.left <= 0.0 {
                    run.busy.push(now + step - run.began.last().unwrap());
                    run.quiet = *computes;
                }
            } else {
                run.quiet -= step;
            }
        }
    }
    let mean = |run: &Run| {
        let late: Vec<f64> = run.began.iter().copied().filter(|began| *began >= 2000.0).collect();
        (late[late.len() - 1] - late[0]) / (late.len() - 1) as f64
    };
    runs.iter().map(|run| (mean(run), *run.busy.last().unwrap(), *run.began.last().unwrap())).collect()
}

#[test]
fn a_hold_shortens_iterations_as_predicted() {
    for seed in 0..20 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let communicates = rng.random_range(20.0..50.0_f64).round();
        let computes = communicates * rng.random_range(1.3..2.5);
        let late = rng.random_range(0.0..communicates * 0.2);
        let both = [(computes, communicates, 10.0), (computes, communicates, 10.0 + late)];
        let before = simulate(&both, &[0.0, 0.0]);
        let jobs: Vec<Job> = before
            .iter()
            .enumerate()
            .map(|(index, (period, busy, began))| {
                let rhythm = Rhythm {
                    period: Nanos((period * MS as f64) as u64),
                    busy: Nanos((busy * MS as f64) as u64),
                    bytes: lasting(communicates as u64),
                    began: Nanos((began * MS as f64) as u64),
                    ..Rhythm::default()
                };
                Job { rhythm: Some(rhythm), ..pair(index, 1, 1, 1, 1) }
            })
            .collect();
        let found = holds(&jobs);
        assert_eq!(found.len(), 1, "seed {seed}: {found:?}");
        let held: Vec<f64> = [0, 1]
            .iter()
            .map(|job| found.iter().find(|hold| hold.0 == *job).map_or(0.0, |hold| hold.1))
            .collect();
        let after = simulate(&both, &held);
        let gain = before[0].0 / after[0].0;
        let best = (computes + 2.0 * communicates - late) / (computes + communicates);
        assert!(
            gain > 1.0 + (best - 1.0) * 0.9,
            "seed {seed}: {gain} of {best}, held {held:?}, {before:?}, {after:?}"
        );
    }
}

#[test]
fn rates_of_others_are_left_room() {
    // With others on the link, what is busy when alone is longer, and so are the holds.
    let topology = dumbbell(2);
    let mut conditions = Conditions::clear(&topology);
    let jobs = [pair(0, 20, 200, 160, 0), pair(1, 20, 200, 160, 0)];
    let request = Request {
        topology: &topology,
        conditions: &conditions,
        jobs: &jobs,
        routes: Routes::All,
        policy: Policy::default(),
    };
    let plan = plan(&request);
    for forward in [true, false] {
        conditions
            .set_available(DirectedLink { link: crate::topology::LinkId(0), forward }, Rate(500_000_000));
    }
    let holds = stagger(&topology, &conditions, &jobs, &plan.assignments, &BTreeSet::from([0, 1]));
    assert_eq!(holds.len(), 1);
    assert!((40 * MS..45 * MS).contains(&holds[0].hold.0), "{holds:?}");
    assert!(holds[0].reason.starts_with("2 periodic jobs meet on "), "{holds:?}");
}
