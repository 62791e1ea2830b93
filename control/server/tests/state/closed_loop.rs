//! The closed loop over hours of virtual time: strangers come and go, agents lie, are late, and die; spines die.

use super::fabric::{CrossTraffic, EVERYONE, Fabric, MS, two_by_two};
use super::world::SECOND;
use harmonaize_planner::{AssignmentReason, DirectedLink, HostId, Node, Path, Topology};
use harmonaize_server::state::testing::Testing as _;
use harmonaize_server::state::{Fact, Outcome, Reason, Trigger};
use rand::RngExt;
use std::collections::BTreeSet;
use std::time::Duration;

/// Two communicators that share no host, each over both racks: together they fill both spines.
fn halves(seed: u64) -> (Fabric, [u64; 2]) {
    let mut fabric = Fabric::traced(seed, 1);
    let ids = [fabric.form("a", "own", &[0, 1, 4, 5]), fabric.form("b", "others", &[2, 3, 6, 7])];
    fabric.run(SECOND * 10);
    (fabric, ids)
}

/// Four communicators of two hosts each, one in each rack: two on each spine.
fn quarters(seed: u64) -> (Fabric, [u64; 4]) {
    let mut fabric = Fabric::traced(seed, 1);
    let ids = [0, 1, 2, 3].map(|host| fabric.form("a", &format!("c{host}"), &[host, host + 4]));
    fabric.run(SECOND * 10);
    (fabric, ids)
}

/// How many connections of a communicator's ring cross a link.
fn crossing(fabric: &Fabric, id: u64, link: DirectedLink) -> usize {
    fabric.own_paths(id).iter().filter(|path| path.links().contains(&link)).count()
}

/// The link out of the first rack that a communicator's ring crosses.
fn uplink(fabric: &Fabric, id: u64) -> DirectedLink {
    let links = ["spine0", "spine1"].map(|spine| fabric.link("leaf0", spine));
    *links.iter().find(|link| crossing(fabric, id, **link) > 0).expect("it leaves the rack")
}

/// How much slower all is predicted to be than on an idle fabric.
fn slowdown(fabric: &mut Fabric) -> f64 {
    fabric.state.predicted_slowdown(fabric.now).unwrap()
}

#[test]
fn paths_are_known_before_they_are_needed() {
    let (fabric, id) = Fabric::formed(1, 2, &EVERYONE);
    let topology = Topology::parse(&two_by_two()).unwrap();
    for (one, from) in topology.hosts().iter().enumerate() {
        for other in 0..topology.hosts().len() {
            let pair = (HostId(one), HostId(other));
            let known = fabric.state.known_paths(pair.0, pair.1);
            let expected = if one == other { 0 } else { topology.equal_cost_paths(pair.0, pair.1).len() };
            assert_eq!(known, expected, "{} to {other}", from.name);
        }
    }
    assert_eq!(fabric.switch_count(id), 0, "it began with known paths");
    let spines = ["spine0", "spine1"].map(|spine| crossing(&fabric, id, fabric.link("leaf0", spine)));
    assert_eq!(spines, [1, 1], "the two connections of the hop between racks are spread");
}

#[test]
fn a_verified_report_changes_the_plan_at_once() {
    for seed in 0..8 {
        let (mut fabric, id) = Fabric::formed(seed, 1, &EVERYONE);
        let link = uplink(&fabric, id);
        fabric.cross(1, link, 500_000_000);
        fabric.run(SECOND * 20);
        assert_eq!(crossing(&fabric, id, link), 0, "seed {seed}: it left the link");
        assert_eq!(fabric.switch_count(id), 1, "seed {seed}: with one switch");
        let decision = fabric.state.queries(Duration::ZERO).decisions().last().unwrap().clone();
        let Trigger::CongestionReport(noticed) = &decision.trigger else { panic!("{:?}", decision.trigger) };
        assert!(decision.at - noticed.received <= MS * 30, "as soon as a train has told: {decision:?}");
        let [changed] = decision.changes.as_slice() else { panic!("{decision:?}") };
        assert_eq!((changed.communicator.0, &changed.outcome), (id, &Outcome::InUse));
        assert_eq!(decision.reason.code(), "changes");
        let moved = matches!(changed.reason, Reason::Planned(AssignmentReason::Changes { .. }));
        assert!(moved, "{:?}", changed.reason);
        let took = changed.switched.unwrap() - decision.at;
        assert!(took < MS * 100, "seed {seed}: {took:?}");
        assert!(decision.after.slowdown < decision.before.slowdown, "{decision:?}");
        fabric.calm();
        fabric.run(SECOND * 30);
        assert!(fabric.state.congested_links().is_empty(), "seed {seed}: nothing is thought of the fabric");
        assert!(slowdown(&mut fabric) < 1.01);
    }
}

#[test]
fn reports_after_false_ones_are_verified_later() {
    for seed in 0..8 {
        let (mut fabric, id) = Fabric::formed(seed, 1, &EVERYONE);
        let link = uplink(&fabric, id);
        fabric.report_starved(id, link);
        let mut waited = (0..1000).take_while(|_| {
            fabric.run(MS);
            fabric.state.verified_reports().1 == 0
        });
        assert!(waited.by_ref().count() < 1000, "seed {seed}: a train shows that nobody is there");
        fabric.cross_traffic.insert(1, CrossTraffic { link, bits: 500_000_000 });
        // Said once, within the 40 ms in which no train is sent.
        fabric.report_starved(id, link);
        fabric.run(MS * 30);
        assert_eq!(fabric.state.verified_reports(), (0, 1), "seed {seed}: not yet");
        fabric.run(MS * 170);
        assert_eq!(fabric.state.verified_reports(), (1, 1), "seed {seed}");
        assert_eq!(crossing(&fabric, id, link), 0, "seed {seed}: it left the link");
    }
}

#[test]
fn hours_of_cross_traffic_bring_no_flapping() {
    for seed in 0..2 {
        eprintln!("seed {seed}");
        let (mut fabric, ids) = quarters(seed);
        let links = [("leaf0", "spine0"), ("leaf0", "spine1"), ("spine0", "leaf1"), ("spine1", "leaf0")];
        let (end, idle) = (fabric.now + SECOND * 3600, slowdown(&mut fabric));
        let (mut onsets, mut worst) = (0, idle);
        while fabric.now < end {
            let at = fabric.now;
            let before = ids.map(|id| fabric.switch_count(id));
            let (from, to) = links[fabric.rng.random_range(0..links.len())];
            let (link, bits) = (fabric.link(from, to), fabric.rng.random_range(5..9) * 100_000_000);
            fabric.cross(1, link, bits);
            let lasts = Duration::from_millis(fabric.rng.random_range(2_000..60_000));
            fabric.run(lasts);
            let during = ids.map(|id| fabric.switch_count(id));
            fabric.calm();
            let quiet = Duration::from_millis(fabric.rng.random_range(20_000..60_000));
            fabric.run(quiet);
            let after = ids.map(|id| fabric.switch_count(id));
            // Once by the report; once more where a probe tells that reports said too much or too little.
            let most =
                |from: [usize; 4], to: [usize; 4]| from.iter().zip(to).map(|(from, to)| to - from).max();
            assert!(
                most(before, during) <= Some(2),
                "seed {seed}: in the onset at {at:?}: {before:?} {during:?}"
            );
            assert!(
                most(during, after) <= Some(2),
                "seed {seed}: after the onset at {at:?}: {during:?} {after:?}"
            );
            worst = worst.max(slowdown(&mut fabric));
            onsets += 1;
        }
        assert!(onsets > 45, "{onsets}");
        assert_eq!(fabric.ids(), BTreeSet::from(ids), "seed {seed}: nothing was lost");
        let counts = fabric.state.queries(Duration::ZERO).decision_counts();
        assert_eq!((counts.given_up, counts.unfit), (0, 0));
        let all: usize = ids.iter().map(|id| fabric.switch_count(*id)).sum();
        eprintln!(
            "seed {seed}: {all} switches of four in {onsets} onsets; slowdown {idle}, {worst} at most when calm"
        );
        assert!((onsets / 2..=onsets * 4).contains(&all), "seed {seed}: {all} switches, {onsets} onsets");
    }
}

#[test]
fn a_fast_intermittent_flow_brings_no_flapping() {
    for seed in 0..2 {
        let (mut fabric, ids) = quarters(seed);
        let link = fabric.link("leaf0", "spine0");
        let (began, end) = (fabric.now, fabric.now + SECOND * 300);
        while fabric.now < end {
            fabric.cross(1, link, 800_000_000);
            fabric.run(MS * 300);
            fabric.calm();
            fabric.run(MS * 300);
        }
        let minutes = (fabric.now - began).as_secs() as usize / 60;
        let counts = ids.map(|id| fabric.switch_count(id));
        eprintln!(
            "seed {seed}: {counts:?} switches in {minutes} minutes of a flow that comes and goes each 600 ms"
        );
        assert!(
            counts.iter().all(|count| *count <= minutes * 8),
            "seed {seed}: {counts:?} in {minutes} minutes"
        );
        assert_eq!(fabric.ids(), BTreeSet::from(ids));
    }
}

#[test]
fn a_liar_moves_its_own_communicators_alone() {
    for seed in 0..2 {
        eprintln!("seed {seed}");
        let (mut fabric, [own, others]) = halves(seed);
        let before = fabric.switch_count(others);
        fabric.lies(0);
        fabric.run(SECOND * 300);
        assert_eq!(fabric.switch_count(others) - before, 0, "seed {seed}");
        assert!(fabric.switch_count(own) <= 5 * 8, "seed {seed}: {}", fabric.switch_count(own));
        assert_eq!(fabric.ids(), BTreeSet::from([own, others]));
        let (taken, dropped, refused) = fabric.state.report_counts("h0");
        assert!(taken <= 300 * 100 + 101 && dropped + refused > 10_000, "{taken} {dropped} {refused}");
        assert!(fabric.state.failed_links().is_empty(), "seed {seed}: nothing failed on its word alone");
        // What honest agents tell still counts.
        let link = uplink(&fabric, others);
        fabric.cross(1, link, 700_000_000);
        let before = fabric.switch_count(others);
        fabric.run(SECOND * 5);
        assert!(fabric.switch_count(others) - before <= 1, "seed {seed}");
    }
}

#[test]
fn a_death_in_mid_change_costs_one_communicator() {
    for seed in 0..4 {
        let (mut fabric, own) = Fabric::formed(seed, 1, &EVERYONE);
        let link = uplink(&fabric, own);
        fabric.cross(1, link, 500_000_000);
        // Until the change is on its way; a report that is lost is told again a second later.
        let pending = |fabric: &Fabric| fabric.communicator(own).next.is_some();
        for _ in 0..3000 {
            if !pending(&fabric) {
                fabric.run(MS);
            }
        }
        assert!(pending(&fabric), "seed {seed}");
        let host = [0, 1, 4, 5][seed as usize];
        fabric.kill(host);
        assert!(fabric.ids().is_empty(), "seed {seed}");
        fabric.run(SECOND);
        fabric.connect(host);
        let again = fabric.form("a", "own", &EVERYONE);
        fabric.run(SECOND * 5);
        assert_eq!(fabric.ids(), BTreeSet::from([again]), "seed {seed}");
        assert!(fabric.communicator(again).next.is_none(), "seed {seed}");
    }
}

#[test]
fn an_unprepared_agent_delays_changes_ever_longer() {
    let (mut fabric, id) = Fabric::formed(3, 1, &EVERYONE);
    fabric.deaf(2, true);
    let link = uplink(&fabric, id);
    fabric.cross(1, link, 600_000_000);
    fabric.run(SECOND * 300);
    assert_eq!(fabric.switch_count(id), 0);
    let counts = fabric.state.queries(Duration::ZERO).decision_counts();
    assert!((4..=10).contains(&counts.given_up), "{counts:?}");
    fabric.deaf(2, false);
    fabric.run(SECOND * 75);
    assert_eq!(crossing(&fabric, id, link), 0, "then it is changed");
    assert_eq!(fabric.switch_count(id), 1);
}

#[test]
fn a_dead_spine_is_left_and_comes_back() {
    for seed in 0..4 {
        let (mut fabric, [first, second]) = halves(seed);
        let idle = slowdown(&mut fabric);
        let topology = fabric.topology.clone();
        let spine = topology.switch("spine0").unwrap();
        let links: BTreeSet<_> = topology.links_at(Node::Switch(spine)).iter().copied().collect();
        fabric.dead.clone_from(&links);
        fabric.run(SECOND * 60);
        assert_eq!(fabric.state.failed_links(), links, "seed {seed}");
        // Whoever forms now knows.
        let third = fabric.form("b", "third", &[1, 2, 5, 6]);
        fabric.run(SECOND * 5);
        for id in [first, second, third] {
            assert_eq!(crossing(&fabric, id, fabric.link("leaf0", "spine0")), 0, "seed {seed}");
        }
        fabric.dead.clear();
        fabric.run(SECOND * 60);
        assert!(fabric.state.failed_links().is_empty(), "seed {seed}");
        assert!(fabric.state.congested_links().is_empty(), "seed {seed}");
        assert!(fabric.dissolve(third));
        fabric.run(SECOND * 5);
        assert_eq!(fabric.ids(), BTreeSet::from([first, second]));
        assert!(slowdown(&mut fabric) <= idle * 1.05, "seed {seed}");
        let unfit = fabric.facts.iter().filter(|(_, fact)| matches!(fact, Fact::PlanUnfit { .. })).count();
        assert_eq!(unfit, 0);
    }
}

/// Packets of traces that went over a spine so far.
fn traced_over(fabric: &Fabric, spine: &str) -> u64 {
    let spine = fabric.topology.switch(spine).unwrap();
    let links = fabric.topology.links_at(Node::Switch(spine));
    links.iter().filter_map(|link| fabric.traced_over.get(link)).sum()
}

#[test]
fn a_known_fabric_is_rarely_traced() {
    for seed in 0..4 {
        let mut fabric = Fabric::traced(seed, 2);
        let first = fabric.traced;
        assert!((500..8000).contains(&first), "seed {seed}: {first} packets to learn 28 pairs");
        fabric.run(SECOND * 600);
        let idle = fabric.traced - first;
        assert!(idle < 600 * 2, "seed {seed}: {idle} packets in ten idle minutes");
        fabric.form("a", "world", &EVERYONE);
        fabric.run(SECOND * 5);
        let before = fabric.traced;
        fabric.run(SECOND * 600);
        let used = fabric.traced - before;
        assert!(used < 600 * 10, "seed {seed}: {used} packets in ten minutes with a communicator");
    }
}

#[test]
fn what_is_drained_is_neither_used_nor_traced() {
    for seed in 0..8 {
        let mut fabric = Fabric::traced(seed, 2);
        let id = fabric.form("a", "first", &[0, 1, 4, 5]);
        fabric.run(SECOND * 3);
        fabric.drain("spine0");
        // Answers to questions that are under way.
        fabric.run(MS * 200);
        let before = traced_over(&fabric, "spine0");
        assert!(fabric.all_paths(id).iter().all(|path| !crosses(&fabric, path, "spine0")), "seed {seed}");
        // Time and one more communicator change nothing.
        fabric.run(SECOND * 400);
        fabric.form("b", "second", &[2, 3, 6, 7]);
        fabric.run(SECOND * 400);
        assert_eq!(traced_over(&fabric, "spine0"), before, "seed {seed}");
        let across = |fabric: &Fabric| {
            let all = fabric.ids().into_iter().flat_map(|id| fabric.all_paths(id));
            all.filter(|path| crosses(fabric, path, "spine0")).count()
        };
        assert_eq!(across(&fabric), 0, "seed {seed}");
        fabric.end_drain("spine0");
        fabric.run(SECOND * 60);
        assert!(traced_over(&fabric, "spine0") > before, "seed {seed}: it is looked at again");
        assert!(across(&fabric) > 0, "seed {seed}: and used");
    }
}

fn crosses(fabric: &Fabric, path: &Path, switch: &str) -> bool {
    fabric.topology.switches_of(path).contains(&fabric.topology.switch(switch).unwrap())
}
