//! Agents that take own bursts for others' traffic, as they do where processors are busy: trains tell what is true.

use super::fabric::{EVERYONE, Fabric, MS};
use super::world::SECOND;
use harmonaize_planner::DirectedLink;
use harmonaize_server::state::Trigger;
use harmonaize_server::state::testing::Testing as _;
use std::collections::BTreeSet;
use std::time::Duration;

#[test]
fn own_bursts_change_nothing_and_hide_no_stranger() {
    for seed in 0..4 {
        let mut fabric = Fabric::traced(seed, 1);
        let id = fabric.form("a", "world", &EVERYONE);
        fabric.noisy = true;
        fabric.sample_all();
        fabric.run(SECOND * 120);
        assert_eq!(
            fabric.switch_count(id),
            0,
            "seed {seed}: {:#?}",
            fabric.state.queries(Duration::ZERO).decisions().last()
        );
        assert!(fabric.probes > 100, "seed {seed}: {} probes", fabric.probes);
        let spines = ["spine0", "spine1"].map(|spine| fabric.link("leaf0", spine));
        let crosses =
            |fabric: &Fabric, link| fabric.own_paths(id).iter().any(|path| path.links().contains(&link));
        let link = *spines.iter().find(|link| crosses(&fabric, **link)).unwrap();
        let began = fabric.now;
        fabric.cross(1, link, 500_000_000);
        fabric.run(SECOND * 60);
        assert_eq!(fabric.switch_count(id), 1, "seed {seed}: one switch an onset");
        assert!(!crosses(&fabric, link), "seed {seed}");
        let decision = fabric.state.queries(Duration::ZERO).decisions().last().unwrap().clone();
        assert!(matches!(decision.trigger, Trigger::CongestionReport(_)), "seed {seed}: {decision:?}");
        println!("seed {seed}: decided after {:?}", decision.at - began);
        // At worst it came right after trains that had shown complaints to be wrong.
        assert!(decision.at - began < MS * 700, "seed {seed}: {:?}", decision.at - began);
        fabric.cross_traffic.clear();
        fabric.run(SECOND * 10);
        assert_eq!(fabric.state.congested_links().len(), 0, "seed {seed}: all is thought to be free again");
        assert!(fabric.switch_count(id) <= 2, "seed {seed}");
        assert_eq!(fabric.ids(), BTreeSet::from([id]));
    }
}

#[test]
fn trains_do_not_meet() {
    let mut fabric = Fabric::traced(5, 1);
    let ids = [0, 1, 2, 3].map(|host| fabric.form("a", &format!("c{host}"), &[host, host + 4]));
    fabric.noisy = true;
    for (name, (from, to)) in
        [("leaf0", "spine0"), ("spine0", "leaf1"), ("leaf1", "spine1")].into_iter().enumerate()
    {
        let link = fabric.link(from, to);
        fabric.cross(name as u32, link, 600_000_000);
        fabric.run(SECOND * 20 + MS);
    }
    fabric.cross_traffic.clear();
    fabric.run(SECOND * 20);
    assert!(fabric.probes > 20, "{} probes", fabric.probes);
    assert_eq!(fabric.met, 0, "of {} probes", fabric.probes);
    assert_eq!(fabric.ids(), BTreeSet::from(ids));
}

/// How many connections of ours cross a link.
fn crossing(fabric: &Fabric, link: DirectedLink) -> usize {
    let all = fabric.ids().into_iter().flat_map(|id| fabric.own_paths(id));
    all.filter(|path| path.links().contains(&link)).count()
}

/// Two jobs: one over two racks, and one between two of its hosts. The traffic of the second comes to the same host by
/// another spine.
#[test]
fn own_traffic_on_the_last_link_hides_nothing() {
    for seed in 0..12 {
        let mut fabric = Fabric::traced(seed, 1);
        let ids = [fabric.form("b", "exchange", &[0, 4]), fabric.form("a", "training", &[0, 1, 4, 5])];
        fabric.run(SECOND * 10);
        (fabric.noisy, fabric.busy) = (true, 0.6);
        fabric.sample_all();
        let total = |fabric: &Fabric| ids.iter().map(|id| fabric.switch_count(*id)).sum::<usize>();
        let before = total(&fabric);
        fabric.run(SECOND * 600);
        assert_eq!(
            total(&fabric),
            before,
            "seed {seed}: {:#?}",
            fabric.state.queries(Duration::ZERO).decisions().last()
        );
        let links = ["spine0", "spine1"].map(|spine| fabric.link("leaf0", spine));
        let training = |fabric: &Fabric, link: DirectedLink| {
            fabric.own_paths(ids[1]).iter().any(|path| path.links().contains(&link))
        };
        let link = *links.iter().find(|link| training(&fabric, **link)).unwrap();
        let (began, crossed) = (fabric.now, crossing(&fabric, link));
        fabric.cross(1, link, 800_000_000);
        fabric.run(SECOND * 10);
        let decision = fabric.state.queries(Duration::ZERO).decisions().last().cloned();
        println!("seed {seed}: decided after {:?}", decision.as_ref().map(|decision| decision.at - began));
        assert!(decision.is_some() && crossing(&fabric, link) < crossed, "seed {seed}: {decision:?}");
        fabric.cross_traffic.clear();
        let ended = fabric.now;
        while !fabric.state.congested_links().is_empty() && fabric.now < ended + SECOND * 10 {
            fabric.run(MS * 100);
        }
        println!("seed {seed}: free again after {:?}", fabric.now - ended);
        assert!(fabric.now < ended + SECOND * 10, "seed {seed}: links are not thought to be free again");
    }
}
