//! Two racks, two spines: what happens there, and what the plan must say.

use super::super::*;
use super::world::*;
use crate::conditions::LinkUse;

#[test]
fn connections_spread_over_uncongested_spines() {
    let topology = leaf_spine(2, 2, 4, 1000, 1000);
    let mut conditions = Conditions::clear(&topology);
    let forming = [job(1, &[0, 1, 2, 3, 4, 5, 6, 7], 2)];
    let first = planned(&request(&topology, &conditions, &forming));
    assert_eq!(first.assignments[0].order, [0, 1, 2, 3, 4, 5, 6, 7]);
    let on = |plan: &Plan, spine| crossing(&topology, &plan.assignments[0], spine);
    assert_eq!((on(&first, "spine0"), on(&first, "spine1")), (2, 2));
    assert_eq!(first.assignments[0].share, mbit(1000));
    assert_eq!(first.assignments[0].reason, AssignmentReason::Forms);

    let jobs = run(&forming, &first);
    let calm = planned(&request(&topology, &conditions, &jobs));
    assert!(!calm.assignments[0].changed);
    assert!(matches!(calm.reason, PlanReason::NothingBetter(_)));
    assert_eq!(
        calm.reason.to_string(),
        "no change: nothing better was found; mean slowdown 1.00, worst 1.00"
    );

    // Cross traffic takes 700 Mbit/s from leaf0 to spine0: one connection there is too many.
    conditions.set_available(link(&topology, "leaf0", "spine0"), mbit(300));
    let moved = planned(&request(&topology, &conditions, &jobs));
    assert!(moved.assignments[0].changed);
    assert_eq!(moved.assignments[0].share, mbit(1000));
    assert_eq!(moved.assignments[0].reason.code(), "link_congested");
    assert_eq!(
        moved.assignments[0].reason.to_string(),
        "leaf0 -> spine0 has 300Mbit/s of 1Gbit/s left: 1 of 16 connections take another path, \
         predicted slowdown 1.00 instead of 1.67"
    );
    let jobs = run(&jobs, &moved);
    assert!(!planned(&request(&topology, &conditions, &jobs)).assignments[0].changed);
    // It ends: there is nothing to gain, so nothing moves back.
    let conditions = Conditions::clear(&topology);
    assert!(!planned(&request(&topology, &conditions, &jobs)).assignments[0].changed);
}

#[test]
fn back_again_where_that_gains() {
    let topology = leaf_spine(2, 2, 4, 1000, 500);
    let clear = Conditions::clear(&topology);
    let forming = [job(1, &[0, 1, 2, 3, 4, 5, 6, 7], 4)];
    let jobs = run(&forming, &planned(&request(&topology, &clear, &forming)));
    let mut congested = clear.clone();
    congested.set_available(link(&topology, "leaf0", "spine1"), mbit(100));
    congested.set_available(link(&topology, "spine1", "leaf1"), mbit(100));
    let away = planned(&request(&topology, &congested, &jobs));
    assert_eq!(away.assignments[0].share, mbit(500));
    assert_eq!(away.before.slowdown, 5.0);
    let jobs = run(&jobs, &away);
    let back = planned(&request(&topology, &clear, &jobs));
    assert_eq!((back.assignments[0].changed, back.assignments[0].share), (true, mbit(1000)));
}

#[test]
fn zigzag_rank_order_is_corrected() {
    let topology = leaf_spine(2, 2, 4, 1000, 1000);
    let conditions = Conditions::clear(&topology);
    let bad = [job(1, &[0, 4, 1, 5, 2, 6], 2), job(2, &[3, 7], 2)];
    let plan = planned(&request(&topology, &conditions, &bad));
    assert_eq!(plan.assignments[0].order, [0, 2, 4, 1, 3, 5]);
    assert_eq!(plan.after, Score { slowdown: 1.0, worst: 1.0, unreachable_jobs: 0, unmet_guarantees: 0.0 });
    // The ways of a pair mirror each other.
    let pair = &plan.assignments[1];
    assert_eq!(pair.edges[0].paths[0].reversed(), pair.edges[1].paths[0]);
}

#[test]
fn drained_and_failed_spines_are_avoided() {
    let topology = leaf_spine(2, 2, 2, 1000, 500);
    for usable in [LinkUse::Avoid, LinkUse::Failed] {
        let mut conditions = Conditions::clear(&topology);
        let forming = [job(1, &[0, 1, 2, 3], 2)];
        let jobs = run(&forming, &planned(&request(&topology, &conditions, &forming)));
        conditions.restrict(link(&topology, "leaf1", "spine0").link, usable);
        let plan = planned(&request(&topology, &conditions, &jobs));
        assert!(plan.assignments[0].changed, "{plan:?}");
        assert_eq!(crossing(&topology, &plan.assignments[0], "spine0"), 0);
        assert_eq!(plan.assignments[0].share, mbit(500));
        let jobs = run(&jobs, &plan);
        // The other goes too: drained links serve where there is no other way, dead ones do not.
        conditions.restrict(link(&topology, "leaf0", "spine1").link, usable);
        let plan = planned(&request(&topology, &conditions, &jobs));
        let expected = if usable == LinkUse::Failed { (1, false, Rate(0)) } else { (0, true, mbit(1000)) };
        assert_eq!(
            (plan.after.unreachable_jobs, plan.assignments[0].changed, plan.assignments[0].share),
            expected
        );
    }
}

#[test]
fn unlisted_paths_do_not_replace_drained_spine() {
    let topology = leaf_spine(2, 2, 4, 1000, 1000);
    let mut conditions = Conditions::clear(&topology);
    conditions.restrict(link(&topology, "leaf0", "spine1").link, LinkUse::Avoid);
    conditions.restrict(link(&topology, "leaf1", "spine1").link, LinkUse::Avoid);
    let forming = [job(1, &[0, 1, 4, 5], 2), job(2, &[2, 3, 6, 7], 2)];
    let jobs = run(&forming, &planned(&request(&topology, &conditions, &forming)));
    let ends = |job: &Job| {
        let order = job.current.as_ref().unwrap().order.clone();
        let pairs = order.clone().into_iter().zip(order.into_iter().cycle().skip(1));
        let host = |at: u32| job.hosts[at as usize];
        pairs.map(|(from, to)| (host(from), host(to))).collect::<Vec<_>>()
    };
    let paths = |(from, to): (HostId, HostId)| ((from, to), topology.equal_cost_paths(from, to));
    let known: BTreeMap<_, _> = jobs.iter().flat_map(ends).map(paths).collect();
    let routes = Routes::Listed(&known);
    // Other orders have hops whose ways are not known yet. Spread over both spines they would look twice as wide.
    let stays = planned(&Request { routes, ..request(&topology, &conditions, &jobs) });
    assert_eq!(
        stays.assignments.iter().map(|job| job.changed).collect::<Vec<_>>(),
        [false, false],
        "{stays:?}"
    );

    // And whose own ways are not known leaves them for some that are, however narrow.
    let unknown = |job: &Job| {
        let current = job.current.clone().unwrap();
        let hops = vec![RingEdge::default(); current.edges.len()];
        Job { current: Some(Current { edges: hops, ..current }), ..job.clone() }
    };
    let jobs: Vec<Job> = jobs.iter().map(unknown).collect();
    let leaves = planned(&Request { routes, ..request(&topology, &conditions, &jobs) });
    for assignment in &leaves.assignments {
        assert_eq!((assignment.changed, crossing(&topology, assignment, "spine1")), (true, 0), "{leaves:?}");
    }
}

#[test]
fn many_changes_ask_for_more_gain() {
    let topology = leaf_spine(2, 2, 1, 1000, 1000);
    let mut conditions = Conditions::clear(&topology);
    let forming = [job(1, &[0, 1], 1)];
    let mut jobs = run(&forming, &planned(&request(&topology, &conditions, &forming)));
    let path = jobs[0].current.as_ref().unwrap().edges[0].paths[0].clone();
    conditions.set_available(path.links()[1], mbit(770));
    for (recent, changed) in [(0, true), (2, true), (3, true), (4, false), (40, false)] {
        jobs[0].current.as_mut().unwrap().recent_changes = recent;
        let plan = planned(&request(&topology, &conditions, &jobs));
        assert_eq!(plan.assignments[0].changed, changed, "{recent}: {plan:?}");
        if !changed {
            assert_eq!(
                plan.assignments[0].reason.to_string(),
                "stays: another plan would gain 30%, too little for a change"
            );
        }
    }
}

#[test]
fn weights_split_a_link_and_are_rate_limited() {
    let topology = leaf_spine(2, 1, 2, 1000, 900);
    let conditions = Conditions::clear(&topology);
    let mut jobs = [job(1, &[0, 2], 1), job(2, &[1, 3], 1)];
    let plan = planned(&request(&topology, &conditions, &jobs));
    assert_eq!([0, 1].map(|job| plan.assignments[job].share), [mbit(450); 2]);
    assert_eq!([0, 1].map(|job| plan.assignments[job].rate_limit), [None; 2]);
    jobs[1].weight = 2;
    let plan = planned(&request(&topology, &conditions, &jobs));
    assert_eq!([0, 1].map(|job| plan.assignments[job].rate_limit), [Some(mbit(300)), Some(mbit(600))]);
    jobs[1].rate_limit = Some(mbit(100));
    let plan = planned(&request(&topology, &conditions, &jobs));
    assert_eq!([0, 1].map(|job| plan.assignments[job].share), [mbit(800), mbit(100)]);
    assert_eq!([0, 1].map(|job| plan.assignments[job].rate_limit), [None, Some(mbit(100))]);
}

#[test]
fn periodic_jobs_slow_only_while_communicating() {
    let topology = leaf_spine(2, 2, 4, 1000, 1000);
    let rhythm = IterationPattern { period: Nanos(100), busy: Nanos(10), ..IterationPattern::default() };
    let training = Job { iteration_pattern: Some(rhythm), ..job(1, &[0, 1, 2, 3, 4, 5, 6, 7], 2) };
    let clear = Conditions::clear(&topology);
    let forming = [training.clone()];
    let first = planned(&request(&topology, &clear, &forming));
    assert_eq!((first.assignments[0].share, first.assignments[0].slowdown), (mbit(100), 1.0));
    let mut conditions = clear.clone();
    for spine in ["spine0", "spine1"] {
        conditions.set_available(link(&topology, "leaf0", spine), mbit(100));
    }
    // All that it sends on average is there, and its operations have a fifth of what they had.
    let jobs = run(&forming, &first);
    let congested = planned(&request(&topology, &conditions, &jobs));
    let part = &congested.assignments[0];
    assert_eq!((part.share, part.changed), (mbit(100), false));
    assert!((part.slowdown - 5.0).abs() < 1e-6, "{part:?}");
    assert!(part.time.0.abs_diff(first.assignments[0].time.0 * 5) <= 5, "{part:?}");
    // Beside one who always communicates it has its half while it does; that one has hardly less for it.
    let pair = [Job { iteration_pattern: Some(rhythm), ..job(1, &[0, 4], 1) }, job(2, &[1, 5], 1)];
    let mut single = clear.clone();
    single.restrict(link(&topology, "leaf0", "spine1").link, LinkUse::Failed);
    let beside = planned(&request(&topology, &single, &pair));
    assert_eq!(beside.assignments[1].share, mbit(900));
    assert!((beside.assignments[0].slowdown - 2.0).abs() < 1e-6, "{beside:?}");
}
