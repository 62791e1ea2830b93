//! What holds for every plan, from random fabrics, conditions and jobs.

use super::super::*;
use super::world::*;
use crate::conditions::LinkUse;
use harmonaize_topology::{LinkId, Topology};
use rand::{Rng, RngExt, SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;

pub(super) fn damaged(rng: &mut impl Rng, topology: &Topology, part: f64) -> Conditions {
    let mut conditions = Conditions::clear(topology);
    for (index, link) in topology.links().iter().enumerate() {
        let id = LinkId(index);
        for forward in [true, false] {
            if rng.random_bool(part) {
                let left = Rate(link.rate.0 / 100 * rng.random_range(0..100));
                conditions.set_available(DirectedLink { link: id, forward }, left);
            }
        }
        if rng.random_bool(part / 2.0) {
            conditions.restrict(id, if rng.random() { LinkUse::Avoid } else { LinkUse::Failed });
        }
    }
    conditions
}

pub(super) fn jobs(rng: &mut impl Rng, hosts: usize) -> Vec<Job> {
    let count = rng.random_range(0..6);
    let each = |communicator| {
        let mut all: Vec<usize> = (0..hosts).collect();
        all.shuffle(rng);
        all.truncate(rng.random_range(1..=hosts.min(9)));
        let mut job = job(communicator, &all, rng.random_range(0..5));
        job.weight = rng.random_range(0..4);
        job.rate_limit = rng.random_bool(0.2).then(|| mbit(rng.random_range(1..900)));
        job.movable = rng.random_bool(0.9);
        job
    };
    (0..count).map(each).collect()
}

/// Plans are checked at each step of a random walk of conditions. The same request gives the same plan. What does not change is what
/// ran. A change that nothing forces makes the whole no worse.
#[test]
fn plans_stay_valid_under_random_conditions() {
    for seed in 0..40 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let (leaves, spines, each) = (rng.random_range(1..4), rng.random_range(1..4), rng.random_range(1..4));
        let topology = leaf_spine(leaves, spines, each, 1000, [300, 1000][rng.random_range(0..2)]);
        let mut jobs = jobs(&mut rng, leaves * each);
        let policy = Policy { search_budget: 200_000, ..Policy::default() };
        for step in 0..6 {
            let damage = if step % 2 == 0 { 0.3 } else { 0.05 };
            let conditions = damaged(&mut rng, &topology, damage);
            let request = Request { policy, ..request(&topology, &conditions, &jobs) };
            let plan = planned(&request);
            assert_eq!(plan, super::super::plan(&request), "seed {seed} step {step}");
            let mut forced = false;
            for (job, assignment) in jobs.iter().zip(&plan.assignments) {
                let Some(current) = &job.current else { continue };
                let same = current.order == assignment.order && current.edges == assignment.edges;
                assert!(assignment.changed || same, "seed {seed} step {step}: {job:?} {assignment:?}");
                assert!(job.movable || !assignment.changed, "seed {seed} step {step}");
                let paths = current.edges.iter().flat_map(|hop| &hop.paths);
                forced |= paths.into_iter().any(|path| conditions.path(path) != LinkUse::Open);
            }
            if step > 0 && !forced {
                let (before, after) = (plan.before, plan.after);
                assert!(
                    after.unreachable_jobs <= before.unreachable_jobs,
                    "seed {seed} step {step}: {before:?} {after:?}"
                );
                let better = after.unreachable_jobs < before.unreachable_jobs
                    || after.slowdown <= before.slowdown * (1.0 + 1e-9);
                assert!(better, "seed {seed} step {step}: {before:?} {after:?}");
            }
            jobs = run(&jobs, &plan);
        }
        // The conditions stay: after at most a few plans nothing changes any more.
        let conditions = damaged(&mut rng, &topology, 0.3);
        let settles = (0..6).any(|_| {
            let request = Request { policy, ..request(&topology, &conditions, &jobs) };
            let plan = planned(&request);
            jobs = run(&jobs, &plan);
            plan.assignments.iter().all(|assignment| !assignment.changed)
        });
        assert!(settles, "seed {seed}");
    }
}

/// Where only some paths can be had, no others are taken; pairs without any are spread.
#[test]
fn only_listed_paths_are_used() {
    for seed in 0..40 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let topology = leaf_spine(2, 3, 3, 1000, 1000);
        let conditions = damaged(&mut rng, &topology, 0.1);
        let mut known = BTreeMap::new();
        for (low, high) in (0..6).flat_map(|low| (low + 1..6).map(move |high| (HostId(low), HostId(high)))) {
            let mut paths = topology.equal_cost_paths(low, high);
            paths.retain(|_| rng.random_bool(0.6));
            known.insert((high, low), paths.iter().map(Path::reversed).collect::<Vec<_>>());
            known.insert((low, high), paths);
        }
        let jobs = jobs(&mut rng, 6);
        let request = Request { routes: Routes::Listed(&known), ..request(&topology, &conditions, &jobs) };
        let plan = planned(&request);
        for (job, assignment) in jobs.iter().zip(&plan.assignments) {
            let next = assignment.order.iter().cycle().skip(1);
            for ((from, to), hop) in assignment.order.iter().zip(next).zip(&assignment.edges) {
                let paths = &known[&(job.hosts[*from as usize], job.hosts[*to as usize])];
                assert!(hop.paths.iter().all(|path| paths.contains(path)), "seed {seed}");
                let usable = paths.iter().any(|path| {
                    conditions.path(path).max(conditions.path(&path.reversed())) != LinkUse::Failed
                });
                assert_eq!(hop.paths.is_empty(), !usable, "seed {seed}");
            }
        }
        let hashed = Request { routes: Routes::Hashed, ..request };
        let plan = planned(&hashed);
        assert!(plan.assignments.iter().flat_map(|found| &found.edges).all(|hop| hop.paths.is_empty()));
    }
}

/// Wrong plans are found out, whatever is wrong with them.
#[test]
fn check_rejects_invalid_plans() {
    let topology = leaf_spine(2, 2, 2, 1000, 1000);
    let mut conditions = Conditions::clear(&topology);
    conditions.restrict(link(&topology, "leaf0", "spine1").link, LinkUse::Failed);
    let jobs = [job(7, &[0, 1, 2, 3], 2), job(8, &[1, 2], 1)];
    let request = request(&topology, &conditions, &jobs);
    let right = planned(&request);
    let wrong = |change: &dyn Fn(&mut Plan)| {
        let mut plan = right.clone();
        change(&mut plan);
        check(&request, &plan).unwrap_err()
    };
    let dead = topology.equal_cost_paths(HostId(1), HostId(2))[1].clone();
    let (first, second) = (CommunicatorId(7), CommunicatorId(8));
    let cases = [
        (
            wrong(&|plan| plan.assignments.swap(0, 1)),
            CheckError::Jobs { jobs: 2, found: 2 },
            "the plan is for 2 communicators in an order of its own, not for these 2",
        ),
        (
            wrong(&|plan| drop(plan.assignments.pop())),
            CheckError::Jobs { jobs: 2, found: 1 },
            "the plan is for 1 communicators in an order of its own, not for these 2",
        ),
        (
            wrong(&|plan| plan.assignments[0].order[0] = 3),
            CheckError::Order(first),
            "communicator 7: the order does not name each participant once",
        ),
        (
            wrong(&|plan| plan.assignments[0].order.swap(0, 1)),
            CheckError::Path { communicator: first, edge: 0 },
            "communicator 7: a path of hop 0 does not lead from its host to the next",
        ),
        (
            wrong(&|plan| drop(plan.assignments[0].edges.pop())),
            CheckError::Edges(first),
            "communicator 7: the hops do not go along the order",
        ),
        (
            wrong(&|plan| plan.assignments[1].edges[1].paths.clear()),
            CheckError::Edges(second),
            "communicator 8: the hops do not go along the order",
        ),
        (
            wrong(&|plan| {
                plan.assignments[1].edges[1].paths = vec![dead.reversed()];
                plan.assignments[1].edges[0].paths = vec![dead.clone()];
            }),
            CheckError::Forbidden { communicator: second, edge: 0, link: "leaf0 -> spine1".to_owned() },
            "communicator 8: hop 0 crosses leaf0 -> spine1, though there is another way",
        ),
    ];
    for (found, expected, text) in cases {
        assert_eq!((found.to_string().as_str(), &found), (text, &expected));
    }
    // Which of the ring's links is found first is open.
    let found = wrong(&|plan| plan.assignments[0].share = mbit(1001));
    let CheckError::Overcommitted { shares, available, .. } = &found else { panic!("{found}") };
    assert!(shares.0 >= mbit(1001).0 && *available == mbit(1000), "{found}");
}

/// Connections of a hop keep apart from shared risks where paths are alike otherwise.
#[test]
fn connections_avoid_one_duct() {
    let mut text = String::new();
    for (spine, risk) in [(0, "duct-1"), (1, "duct-1"), (2, "duct-2")] {
        text += &format!("[[switch]]\nname = \"s{spine}\"\n");
        for leaf in ["a", "b"] {
            text += &format!(
                "[[link]]\nfrom = \"{leaf}\"\nto = \"s{spine}\"\nrate = \"1Gbit/s\"\nrisk = [\"{risk}\"]\n"
            );
        }
    }
    text += "[[switch]]\nname = \"a\"\n[[switch]]\nname = \"b\"\n";
    for (host, leaf) in ["a", "b"].iter().enumerate() {
        text += &format!(
            "[[host]]\nname = \"h{host}\"\n[[link]]\nfrom = \"h{host}\"\nto = \"{leaf}\"\nrate = \"1Gbit/s\"\n"
        );
    }
    let topology = Topology::parse(&text).unwrap();
    let conditions = Conditions::clear(&topology);
    let jobs = [job(1, &[0, 1], 2)];
    let plan = planned(&request(&topology, &conditions, &jobs));
    assert_eq!(crossing(&topology, &plan.assignments[0], "s2"), 2, "there and back: {plan:?}");
}
