//! What tenants are told while their communicators run, and who of them.

use super::fabric::{Fabric, Stranger};
use super::world::SECOND;
use crate::state::Instruction;
use harmonaize_api::v1::{self, EventKind, EventLevel};
use harmonaize_store::WithdrawalKind;
use std::time::Duration;

const EVERYONE: [usize; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

/// A fabric with a communicator of tenant a over some hosts in use.
fn formed(seed: u64, hosts: &[usize]) -> (Fabric, u64) {
    let mut fabric = Fabric::new(seed, 1);
    fabric.run(SECOND * 3);
    let id = fabric.form("a", "world", hosts);
    fabric.run(SECOND * 3);
    (fabric, id)
}

/// Reads on until nothing comes for three ticks: kinds, levels and ranks; and where that ends.
fn told(
    fabric: &mut Fabric,
    from: v1::EventCursor,
) -> (Vec<(EventKind, EventLevel, Vec<u32>)>, v1::EventCursor) {
    let (mut events, mut cursor) = (Vec::new(), from);
    for request in 1000.. {
        fabric.read(0, request, "a", Some(cursor), SECOND * 3);
        fabric.run(SECOND * 4);
        let read = fabric.read.pop().unwrap();
        assert_eq!((read.request, read.refused.as_str(), read.missed), (request, "", 0));
        cursor = read.cursor.unwrap();
        if read.events.is_empty() {
            break;
        }
        for event in read.events {
            assert_eq!((event.communicator.as_str(), event.since_ns % 1_000_000_000), ("world", 0));
            events.push((event.kind(), event.level(), event.ranks));
        }
    }
    (events, cursor)
}

/// All that has been told by now, and where that ends.
fn everything(fabric: &mut Fabric, mut cursor: v1::EventCursor) -> (Vec<v1::TenantEvent>, v1::EventCursor) {
    let mut events = Vec::new();
    loop {
        fabric.read(0, 1, "a", Some(cursor), Duration::ZERO);
        let read = fabric.read.pop().unwrap();
        cursor = read.cursor.unwrap();
        if read.events.is_empty() {
            return (events, cursor);
        }
        events.extend(read.events);
    }
}

/// Where who asks now stands.
fn here(fabric: &mut Fabric) -> v1::EventCursor {
    fabric.read(0, 1, "a", None, Duration::ZERO);
    let read = fabric.read.pop().unwrap();
    assert!(read.events.is_empty() && read.refused.is_empty(), "{read:?}");
    read.cursor.unwrap()
}

pub(super) fn withdraw(
    fabric: &mut Fabric,
    target: &str,
    kind: WithdrawalKind,
    (from_ns, until_ns): (u64, u64),
) {
    let targets = vec![target.to_owned()];
    let instruction = Instruction::Withdraw { targets, kind, from_ns, until_ns, reason: String::new() };
    let changes = fabric.state.consider(fabric.now, &instruction).unwrap();
    fabric.state.carry_out(fabric.now, &changes);
    fabric.settle();
}

pub(super) fn restore(fabric: &mut Fabric, target: &str, kind: WithdrawalKind) {
    let instruction = Instruction::Restore { targets: vec![target.to_owned()], kind };
    let changes = fabric.state.consider(fabric.now, &instruction).unwrap();
    fabric.state.carry_out(fabric.now, &changes);
    fabric.settle();
}

#[test]
fn a_lost_rank_is_told_at_the_next_tick_to_who_waits() {
    let (mut fabric, _) = formed(1, &[1, 2, 5]);
    let from = here(&mut fabric);
    fabric.read(0, 7, "a", Some(from), SECOND * 30);
    fabric.run(SECOND * 3);
    assert!(fabric.read.is_empty(), "nothing has happened");
    fabric.kill(5);
    fabric.run(SECOND * 2);
    let read = fabric.read.pop().unwrap();
    assert_eq!((read.request, read.events.len()), (7, 1));
    assert_eq!((read.events[0].kind(), read.events[0].ranks.as_slice()), (EventKind::Failure, &[2][..]));
}

#[test]
fn ranks_are_named_before_their_host_is_taken_away_and_when_it_is_back() {
    let (mut fabric, _) = formed(2, &[0, 3, 6]);
    let from = here(&mut fabric);
    let now = fabric.now.as_nanos() as u64;
    let window = (now + 60_000_000_000, now + 90_000_000_000);
    withdraw(&mut fabric, "h6", WithdrawalKind::Maintenance, window);
    let (events, from) = told(&mut fabric, from);
    assert_eq!(events, [(EventKind::Maintenance, EventLevel::None, vec![2])]);
    // Of another host, nothing; a second communicator hears of it as it forms.
    withdraw(&mut fabric, "h1", WithdrawalKind::Drain, (0, 0));
    restore(&mut fabric, "h1", WithdrawalKind::Drain);
    restore(&mut fabric, "h6", WithdrawalKind::Maintenance);
    let (events, _) = told(&mut fabric, from);
    assert_eq!(events, [(EventKind::Maintenance, EventLevel::None, vec![])]);
}

#[test]
fn congestion_is_told_when_it_slows_and_when_it_is_over() {
    let (mut fabric, id) = formed(3, &EVERYONE);
    let from = here(&mut fabric);
    // Half of both spines, which no plan avoids.
    for (number, spine) in ["spine0", "spine1"].into_iter().enumerate() {
        for (rack, (from, to)) in [("leaf0", spine), (spine, "leaf1")].into_iter().enumerate() {
            let link = fabric.link(from, to);
            fabric.strangers.insert((number * 2 + rack) as u32, Stranger { link, bits: 600_000_000 });
        }
    }
    fabric.look_all();
    let (events, from) = told(&mut fabric, from);
    let levels = |events: &[(EventKind, EventLevel, Vec<u32>)]| -> Vec<EventLevel> {
        assert!(events.iter().all(|(.., ranks)| ranks.is_empty()), "{events:?}");
        let congestion = events.iter().filter(|(kind, ..)| *kind == EventKind::Congestion);
        congestion.map(|(_, level, _)| *level).collect()
    };
    let last = levels(&events).last().copied();
    assert!(matches!(last, Some(EventLevel::Mild | EventLevel::Severe)), "{events:?}");
    fabric.strangers.clear();
    fabric.look_all();
    fabric.run(SECOND * 60);
    let (events, _) = told(&mut fabric, from);
    assert_eq!(levels(&events).last(), Some(&EventLevel::None), "{events:?}");
    assert!(fabric.ids().contains(&id));
}

#[test]
fn a_tenants_own_communicators_are_no_congestion_to_each_other() {
    let (mut fabric, _) = formed(6, &[0, 4]);
    let from = here(&mut fabric);
    // All share the hosts' own links, and some those between racks.
    for (number, hosts) in [[0, 5], [1, 4], [0, 4], [2, 6], [3, 7]].iter().enumerate() {
        fabric.form("a", &format!("other{number}"), hosts);
        fabric.run(SECOND * 3);
    }
    let (told, from) = everything(&mut fabric, from);
    let congestion = told.iter().filter(|event| event.kind() == EventKind::Congestion);
    assert_eq!(congestion.count(), 0, "{told:?}");
    // Another tenant's is.
    for number in 0..3 {
        fabric.form("b", &format!("b{number}"), &[0, 4]);
    }
    fabric.run(SECOND * 3);
    let (told, _) = everything(&mut fabric, from);
    let mut congested: Vec<String> = told
        .into_iter()
        .filter(|event| event.kind() == EventKind::Congestion && event.level() != EventLevel::None)
        .map(|event| event.communicator)
        .collect();
    congested.sort();
    congested.dedup();
    let all = ["other0", "other1", "other2", "other3", "other4", "world"];
    assert_eq!(congested, all, "whichever of them are slowed");
}

#[test]
fn a_window_is_told_ten_minutes_before_and_not_sooner() {
    let (mut fabric, _) = formed(7, &[0, 3, 6]);
    let from = here(&mut fabric);
    let from_ns = (fabric.now + SECOND * 3600).as_nanos() as u64;
    withdraw(&mut fabric, "h3", WithdrawalKind::Maintenance, (from_ns, from_ns + 60_000_000_000));
    fabric.run(SECOND * 2990);
    let (events, from) = told(&mut fabric, from);
    assert_eq!(events, []);
    fabric.run(SECOND * 20);
    let (events, _) = told(&mut fabric, from);
    assert_eq!(events, [(EventKind::Maintenance, EventLevel::None, vec![1])]);
}

#[test]
fn while_something_is_drained_others_traffic_is_still_told_apart() {
    let (mut fabric, _) = formed(6, &[0, 4]);
    fabric.form("b", "other", &[1, 5]);
    fabric.run(SECOND * 3);
    let from = here(&mut fabric);
    // Both pairs share the spine that is left.
    withdraw(&mut fabric, "spine0", WithdrawalKind::Drain, (0, 0));
    let (events, from) = told(&mut fabric, from);
    let slow = |events: &[(EventKind, EventLevel, Vec<u32>)]| {
        let slow = |(kind, level, _): &(EventKind, EventLevel, Vec<u32>)| {
            matches!(kind, EventKind::Congestion | EventKind::Capacity).then_some((*kind, *level))
        };
        events.iter().filter_map(slow).collect::<Vec<_>>()
    };
    let drained = slow(&events);
    assert!(
        matches!(drained.as_slice(), [(EventKind::Capacity, level)] if *level > EventLevel::None),
        "{events:?}"
    );
    let link = fabric.link("leaf0", "spine1");
    fabric.strangers.insert(0, Stranger { link, bits: 700_000_000 });
    fabric.look_all();
    let (events, from) = told(&mut fabric, from);
    let congested = slow(&events);
    assert!(
        !congested.is_empty() && congested.iter().all(|(kind, _)| *kind == EventKind::Congestion),
        "{events:?}"
    );
    assert!(congested.last().is_some_and(|(_, level)| *level > EventLevel::None), "{events:?}");
    fabric.strangers.clear();
    fabric.look_all();
    fabric.run(SECOND * 60);
    let (events, from) = told(&mut fabric, from);
    assert_eq!(slow(&events).last(), Some(&(EventKind::Congestion, EventLevel::None)), "{events:?}");
    restore(&mut fabric, "spine0", WithdrawalKind::Drain);
    fabric.run(SECOND * 10);
    let (events, _) = told(&mut fabric, from);
    let whole = slow(&events);
    assert!(whole.contains(&(EventKind::Capacity, EventLevel::None)), "{events:?}");
    assert!(whole.last().is_some_and(|(_, level)| *level == EventLevel::None), "{events:?}");
}

#[test]
fn a_tenant_hears_nothing_of_others_and_a_foreign_cursor_is_refused() {
    let (mut fabric, _) = formed(4, &[1, 2]);
    fabric.form("b", "world", &[3, 4]);
    fabric.run(SECOND * 3);
    let from = here(&mut fabric);
    fabric.read(0, 2, "b", Some(from), SECOND);
    assert!(fabric.read.pop().unwrap().refused.contains("not of this feed"));
    fabric.kill(4);
    assert_eq!(told(&mut fabric, from).0, []);
    fabric.read(0, 3, "b", None, SECOND);
    fabric.read(0, 4, "nobody", None, SECOND);
    assert!(fabric.read.pop().unwrap().refused.contains("does not know this tenant"));
    let ahead = v1::EventCursor { next: from.next + 9, ..from };
    fabric.read(0, 5, "a", Some(ahead), SECOND);
    assert!(fabric.read.pop().unwrap().refused.contains("beyond event"));
}

#[test]
fn who_waits_too_much_or_goes_away_costs_nothing() {
    let (mut fabric, _) = formed(5, &[1, 2]);
    for request in 0..4096 {
        fabric.read(6, request, "a", None, SECOND * 600);
    }
    assert!(fabric.read.is_empty());
    fabric.read(6, 5000, "a", None, SECOND);
    assert!(fabric.read.pop().unwrap().refused.contains("too many"));
    // No wait is longer than a minute.
    fabric.run(SECOND * 62);
    assert_eq!(fabric.read.len(), 4096);
    fabric.read.clear();
    fabric.read(6, 1, "a", None, SECOND * 30);
    fabric.kill(6);
    fabric.run(SECOND * 31);
    assert!(fabric.read.is_empty() && fabric.state.next_deadline().is_none_or(|at| at > fabric.now));
}
