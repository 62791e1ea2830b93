//! Turns on a shared link: known cases.

use super::*;
use crate::plan::{Plan, Policy, Request, Routes, plan};
use harmonaize_abi::CommunicatorId;
use harmonaize_topology::text::{host, link, switch};
use harmonaize_units::{Bytes, Rate};

/// `pairs` pairs of hosts on two leaves that one link of 1 Gbit/s joins.
fn dumbbell(pairs: usize) -> Topology {
    let mut text = ["a", "b"].map(switch).concat() + &link("a", "b", "1Gbit/s", "0us");
    for at in 0..2 * pairs {
        text += &host(at, ["a", "b"][at % 2], "1Gbit/s", "0us");
    }
    Topology::parse(&text).unwrap()
}

const MS: u64 = 1_000_000;

/// Bytes of which a pair sends each other as much as takes so many milliseconds at 1 Gbit/s.
fn lasting(ms: u64) -> Bytes {
    Bytes(ms * 125_000)
}

/// A pair that computes and communicates for so long if alone. Its iterations were seen with a period, a busy part and a
/// beginning, in milliseconds.
fn pair(index: usize, alone: u64, period: u64, busy: u64, began: u64) -> Job {
    let rhythm = IterationPattern {
        period: Nanos(period * MS),
        busy: Nanos(busy * MS),
        bytes: lasting(alone),
        last_began: Nanos(began * MS),
        ..IterationPattern::default()
    };
    Job {
        communicator: CommunicatorId(index as u64),
        hosts: vec![HostId(2 * index), HostId(2 * index + 1)],
        connections: 1,
        weight: 1,
        guaranteed: Rate(0),
        rate_limit: None,
        operation: Bytes(0),
        iteration_pattern: Some(rhythm),
        current: None,
        movable: true,
    }
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
fn slots_of(jobs: &[Job], taking: &[u64]) -> Vec<(u64, u64, Vec<u64>)> {
    let (topology, conditions, plan) = planned(jobs);
    let taking = taking.iter().map(|id| CommunicatorId(*id)).collect();
    let turns = plan_interleaving(&topology, &conditions, jobs, &plan.assignments, &taking);
    turns
        .into_iter()
        .map(|turn| {
            (turn.communicator.0, turn.busy.0 / MS, turn.contenders.into_iter().map(u64::from).collect())
        })
        .collect()
}

#[test]
fn slots_are_granted_while_they_gain() {
    let colliding = [pair(0, 40, 140, 80, 1000), pair(1, 40, 140, 80, 1000)];
    assert_eq!(slots_of(&colliding, &[]), [(0, 40, vec![1]), (1, 40, vec![0])]);
    // They are apart: nothing is gained yet; but once they take turns, that is why.
    let apart = [pair(0, 40, 100, 40, 1000), pair(1, 40, 100, 40, 1050)];
    assert!(slots_of(&apart, &[]).is_empty() && slots_of(&apart, &[0]).is_empty());
    assert_eq!(slots_of(&apart, &[0, 1]).len(), 2);
    // Three whose busy parts fill the period, and a third that comes to two.
    let three = [0, 1, 2].map(|index| pair(index, 40, 200, 120, 1000));
    assert_eq!(slots_of(&three, &[0, 1])[2], (2, 40, vec![0, 1]));
}

#[test]
fn no_slots_without_gain() {
    // Always busy; periods that do not fit; no rhythm; a hundredth each.
    for taking in [&[][..], &[0, 1]] {
        assert!(slots_of(&[pair(0, 100, 200, 200, 0), pair(1, 100, 200, 200, 0)], taking).is_empty());
        assert!(slots_of(&[pair(0, 40, 140, 80, 0), pair(1, 40, 171, 80, 0)], taking).is_empty());
        let quiet = Job { iteration_pattern: None, ..pair(1, 40, 140, 80, 0) };
        assert!(slots_of(&[pair(0, 40, 140, 80, 0), quiet], taking).is_empty());
        assert!(slots_of(&[pair(0, 2, 102, 4, 0), pair(1, 2, 102, 4, 0)], taking).is_empty());
    }
}

#[test]
fn alone_only_the_bytes_count() {
    let topology = dumbbell(1);
    assert_eq!(isolated_time(&topology, &[HostId(0), HostId(1)], lasting(40)), Nanos(40 * MS));
}

#[test]
fn half_the_period_takes_turns_too() {
    let found = slots_of(&[pair(0, 60, 200, 80, 0), pair(1, 20, 110, 40, 0)], &[]);
    assert_eq!(found, [(0, 60, vec![1]), (1, 20, vec![0])]);
}

#[test]
fn cross_traffic_lengthens_busy_parts() {
    let jobs = [pair(0, 20, 200, 160, 0), pair(1, 20, 200, 160, 0)];
    let (topology, mut conditions, plan) = planned(&jobs);
    for forward in [true, false] {
        conditions
            .set_available(DirectedLink { link: harmonaize_topology::LinkId(0), forward }, Rate(500_000_000));
    }
    let found = plan_interleaving(&topology, &conditions, &jobs, &plan.assignments, &BTreeSet::new());
    assert_eq!(found.iter().map(|turn| turn.busy).collect::<Vec<_>>(), [Nanos(40 * MS); 2]);
    let reason = &found[0].reason;
    assert!(matches!(reason, InterleaveReason::Overlaps(Overlap { jobs: 2, .. })), "{reason:?}");
    let taking = jobs.iter().map(|job| job.communicator).collect();
    let found = plan_interleaving(&topology, &conditions, &jobs, &plan.assignments, &taking);
    assert_eq!(found[0].reason.code(), "would_overlap");
}
