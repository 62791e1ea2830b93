//! Which links a new epoch has from the one before, and whose ports they are.

use super::fabric::{EVERYONE, Fabric};
use super::world::SECOND;
use harmonaize_abi::CommunicatorId;
use harmonaize_api::v1::{self, from_agent, to_agent};
use harmonaize_server::state::Output;
use harmonaize_server::state::testing::Testing as _;
use std::collections::{BTreeMap, BTreeSet};

fn links(fabric: &Fabric, id: u64) -> BTreeMap<(u32, u32), Vec<u16>> {
    fabric.epoch(id).links.clone()
}

/// Ports that are taken are those of the links, each once.
fn no_port_is_lost(fabric: &Fabric, id: u64) {
    let known = fabric.communicator(id);
    let host = |at: u32| known.members[at as usize].host;
    let current = known.current.as_ref().unwrap();
    let of_links = current.links.iter().flat_map(|((low, high), ports)| {
        let first = host(*low).min(host(*high));
        ports.iter().map(move |port| (first, *port))
    });
    let of_links: BTreeSet<_> = of_links.collect();
    assert_eq!(current.ports.iter().copied().collect::<BTreeSet<_>>(), of_links);
    assert_eq!(current.ports.len(), of_links.len());
    assert!(fabric.state.reserved_ports().is_subset(&of_links), "a port stays taken");
}

/// By pair: whether each end was told to go on with the link.
fn reused_links(fabric: &mut Fabric) -> BTreeMap<(u32, u32), Vec<bool>> {
    let mut told: BTreeMap<_, Vec<bool>> = BTreeMap::new();
    for output in fabric.state.take_outputs() {
        let Output::Send(_, to_agent::Message::Change(recipe)) = output else { continue };
        for peer in &recipe.peers {
            let (me, other) = (recipe.me, peer.participant);
            told.entry((me.min(other), me.max(other))).or_default().push(peer.reused);
            assert_eq!(peer.reused, peer.secret.is_empty() && peer.link.is_empty());
        }
    }
    told
}

#[test]
fn a_reversed_ring_needs_no_new_link() {
    let (mut fabric, id) = Fabric::formed(1, 2, &EVERYONE);
    let before = links(&fabric, id);
    let known = fabric.communicator(id);
    let order = known.current.unwrap().order;
    let order: Vec<String> =
        order.iter().rev().map(|at| format!("h{}", known.members[*at as usize].host.0)).collect();
    let in_order = fabric.state.reorder(fabric.now, CommunicatorId(id), &order).unwrap();
    let epoch = in_order.into();
    let told = reused_links(&mut fabric);
    assert_eq!(told.len(), 28);
    assert!(told.values().all(|ends| *ends == [true, true]), "{told:?}");
    let sessions: Vec<_> =
        fabric.communicator(id).members.iter().map(|member| member.session.unwrap()).collect();
    for session in &sessions {
        let prepared = from_agent::Message::Prepared(v1::Prepared { communicator: id, epoch, links: None });
        fabric.state.message(fabric.now, *session, prepared.into());
    }
    for session in &sessions {
        let switched = v1::Switched { communicator: id, epoch, first_segment: 7 };
        fabric.state.message(fabric.now, *session, from_agent::Message::Switched(switched).into());
    }
    assert_eq!(fabric.epoch(id).epoch, in_order);
    assert_eq!(links(&fabric, id), before);
    no_port_is_lost(&fabric, id);
}

#[test]
fn an_abandoned_change_keeps_the_ports_in_use() {
    let (mut fabric, id) = Fabric::formed(2, 1, &EVERYONE);
    let before = links(&fabric, id);
    let order: Vec<String> = [0, 4, 1, 5, 2, 6, 3, 7].iter().map(|host| format!("h{host}")).collect();
    let epoch = fabric.state.reorder(fabric.now, CommunicatorId(id), &order).unwrap().into();
    let session = fabric.session(id, 3);
    let failed = v1::PrepareFailed { communicator: id, epoch, reason: "no".to_owned() };
    fabric.state.message(fabric.now, session, from_agent::Message::PrepareFailed(failed).into());
    assert!(fabric.communicator(id).next.is_none());
    assert_eq!(links(&fabric, id), before);
    no_port_is_lost(&fabric, id);
}

/// Within a rack there is one way: whatever happens on a spine, those links stay.
#[test]
fn cross_traffic_on_a_spine_keeps_rack_links() {
    for seed in 0..6 {
        println!("seed {seed}");
        let (mut fabric, id) = Fabric::formed(seed, 1 + seed as u32 % 2, &EVERYONE);
        let before = links(&fabric, id);
        let ways = ["spine0", "spine1"].map(|spine| fabric.link("leaf0", spine));
        let paths = fabric.own_paths(id);
        let used = ways.iter().find(|link| paths.iter().any(|path| path.links().contains(link)));
        let link = *used.expect("it leaves the rack");
        fabric.cross(1, link, 700_000_000);
        fabric.run(SECOND * 2);
        let after = links(&fabric, id);
        let host = |at: u32| fabric.communicator(id).members[at as usize].host.0;
        let made = after.iter().filter(|(ends, ports)| before[ends] != **ports);
        let made: Vec<_> = made.map(|(ends, _)| (host(ends.0), host(ends.1))).collect();
        assert!(made.iter().all(|(low, high)| low / 4 != high / 4), "{made:?}");
        no_port_is_lost(&fabric, id);
    }
}
