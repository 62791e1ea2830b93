//! What tenants agree on beside rates. They agree on what becomes of a communicator that fails, and that nothing is summed on the way.

use super::aggregation::{able, aggregator, change_over, grants, plan, revoked};
use super::agreements::{agreed, formed};
use super::fabric::Fabric;
use super::world::{SECOND, World, join_of, settings};
use harmonaize_abi::CommunicatorId;
use harmonaize_abi::session::{Clause, Constraints, Negotiated, OnFailure};
use harmonaize_api::v1::{self, EventKind, JoinRefusedKind, from_agent, to_agent};
use harmonaize_server::state::testing::Testing as _;
use harmonaize_server::state::{Fact, SessionId};
use std::time::Duration;

const MB: u64 = 1_000_000;

/// What others cannot have beside what the first has.
const MUCH: u64 = 56 * MB;

pub(super) fn with(policy: OnFailure) -> Constraints {
    Constraints::new().min_busbw(60 * MB).on_failure(policy)
}

pub(super) fn within(time: Duration) -> Constraints {
    with(OnFailure::Regroup { within: time })
}

/// An agreement of `a` for a communicator on hosts 0, 4 and 5, with one of `b` beside it. The agent on host 5 dies. With a place in the
/// feed of `a` before.
pub(super) fn failed(policy: &Constraints) -> (Fabric, u64, v1::EventCursor) {
    let (mut fabric, ids) = formed(9, &[("a", &[0, 4, 5]), ("b", &[0, 4])]);
    agreed(fabric.negotiate("a", "c0", Some(policy)));
    fabric.run(SECOND * 3);
    let from = fabric.here();
    fabric.kill(5);
    fabric.run(SECOND * 2);
    (fabric, ids[0], from)
}

/// What `a` is told of a kind within the next two seconds, and was before.
fn told(fabric: &mut Fabric, from: v1::EventCursor, kind: EventKind) -> Vec<v1::TenantEvent> {
    fabric.run(SECOND * 2);
    fabric.events_of(from, kind)
}

/// What those were told who did not get in, since this was asked last.
pub(super) fn turned_away(fabric: &mut Fabric) -> Vec<v1::JoinRefused> {
    every!(std::mem::take(&mut fabric.tenants.others), JoinRefused)
}

/// Whether the other tenant can have much.
pub(super) fn much_is_free(fabric: &mut Fabric) -> bool {
    let outcome = fabric.negotiate("b", "c1", Some(&Constraints::new().min_busbw(MUCH)));
    match outcome {
        Some(Ok(Negotiated::Agreed(_))) => true,
        Some(Ok(Negotiated::Refused { .. })) => false,
        other => panic!("{other:?}"),
    }
}

#[test]
fn with_policy_end_nothing_is_kept() {
    let (mut fabric, ids) = formed(9, &[("a", &[0, 4, 5]), ("b", &[0, 4])]);
    agreed(fabric.negotiate("a", "c0", Some(&with(OnFailure::End))));
    fabric.run(SECOND * 3);
    let from = fabric.here();
    assert!(!much_is_free(&mut fabric));
    turned_away(&mut fabric);
    // One has noticed before control has, and waits for the others.
    fabric.regroup_within(0, "a", "c0", (ids[0], 0), SECOND * 50);
    fabric.kill(5);
    fabric.run_until_quiet();
    fabric.regroup(4, "a", "c0", (ids[0], 1));
    let refused = turned_away(&mut fabric);
    assert_eq!(refused.iter().map(v1::JoinRefused::kind).collect::<Vec<_>>(), [JoinRefusedKind::Over; 2]);
    assert!(refused[0].text.contains("agreed on that it ends where it fails"), "{refused:?}");
    assert!(fabric.tenants.stored.agreements.is_empty() && much_is_free(&mut fabric));
    let lost = told(&mut fabric, from, EventKind::Failure);
    assert_eq!((lost[0].ranks.as_slice(), lost[0].at_ns), (&[2][..], 0));
    for (host, rank) in [(0, 0), (4, 1)] {
        fabric.ask(host, from_agent::Message::Leave(v1::Leave { communicator: ids[0], rank, request: 0 }));
    }
    // The lost one would be told, if it came back within the lease.
    fabric.run(SECOND * 30);
    assert!(fabric.state.keeps_no_past());
    assert_eq!(told(&mut fabric, from, EventKind::AgreementEnded), []);
    // It is over, and its name is free.
    fabric.form("a", "c0", &[0, 4]);
    fabric.run(SECOND * 3);
    assert_eq!(fabric.agreement("a", "c0").number, 0);
}

#[test]
fn a_promise_is_kept_for_members_in_time() {
    let wanted = within(SECOND * 30);
    let (mut fabric, id, from) = failed(&wanted);
    assert!(!much_is_free(&mut fabric), "it is kept for them");
    let kept = |fact: &Fact| matches!(fact, Fact::Kept { within, .. } if *within == SECOND * 30);
    assert!(fabric.facts.iter().any(|(_, fact)| kept(fact)));
    let lost = told(&mut fabric, from, EventKind::Failure);
    let (until, since) = (lost[0].at_ns, lost[0].since_ns);
    assert!(until - since >= 30_000_000_000 && until - since <= 31_000_000_000, "{lost:?}");
    // Its place is, too: five more make six.
    for name in ["d0", "d1", "d2", "d3", "d4"] {
        fabric.form("a", name, &[2, 6]);
    }
    turned_away(&mut fabric);
    fabric.ask(1, from_agent::Message::Join(join_of("a", "d5", 0, 1)));
    assert_eq!(turned_away(&mut fabric)[0].kind(), JoinRefusedKind::Limit);

    let before = fabric.ids();
    fabric.regroup(0, "a", "c0", (id, 0));
    fabric.regroup(4, "a", "c0", (id, 1));
    fabric.run(SECOND * 3);
    let next = *fabric.ids().difference(&before).next().expect("it went on");
    let after = fabric.agreement("a", "c0");
    assert_eq!((after.number, &after.constraints), (2, &wanted));
    assert!(!much_is_free(&mut fabric));
    // Nothing more comes of the time that was agreed on; and the next failure is treated alike.
    fabric.run(SECOND * 40);
    assert_eq!(told(&mut fabric, from, EventKind::AgreementEnded), []);
    fabric.kill(4);
    fabric.run(SECOND * 2);
    let kept = |fact: &Fact| matches!(fact, Fact::Kept { communicator, .. } if *communicator == CommunicatorId(next));
    assert!(!fabric.ids().contains(&next) && fabric.facts.iter().any(|(_, fact)| kept(fact)));
    assert_eq!(told(&mut fabric, from, EventKind::Failure).len(), 2);
}

#[test]
fn a_promise_is_free_after_the_regroup_time() {
    let (mut fabric, id, from) = failed(&within(SECOND * 10));
    fabric.run(SECOND * 4);
    assert!(!much_is_free(&mut fabric));
    assert_eq!(told(&mut fabric, from, EventKind::AgreementEnded), []);
    fabric.run(SECOND * 3);
    let ended = told(&mut fabric, from, EventKind::AgreementEnded);
    assert_eq!(ended.len(), 1);
    assert_eq!(ended[0].clauses().collect::<Vec<_>>(), [v1::Clause::OnFailure]);
    assert!(fabric.facts.iter().any(|(_, fact)| matches!(fact, Fact::NotRegrouped { .. })));
    assert!(much_is_free(&mut fabric));
    turned_away(&mut fabric);
    fabric.regroup(0, "a", "c0", (id, 0));
    let refused = turned_away(&mut fabric).remove(0);
    assert_eq!(refused.kind(), JoinRefusedKind::Over);
    assert!(refused.text.contains("had 10s to regroup"), "{refused:?}");
    // Nothing waits or is due any more.
    fabric.run(SECOND * 20);
    assert_eq!(told(&mut fabric, from, EventKind::AgreementEnded).len(), 1);
}

#[test]
fn late_members_are_left_behind() {
    let wanted = within(SECOND * 10);
    let (mut fabric, ids) = formed(9, &[("a", &[0, 1, 4, 5]), ("b", &[0, 4])]);
    agreed(fabric.negotiate("a", "c0", Some(&wanted)));
    fabric.run(SECOND * 3);
    fabric.kill(5);
    fabric.run(SECOND);
    for (host, rank) in [(0, 0), (4, 2)] {
        fabric.regroup_within(host, "a", "c0", (ids[0], rank), SECOND * 50);
    }
    let before = fabric.ids();
    fabric.run(SECOND * 8);
    assert_eq!(fabric.ids(), before, "host 1 may come yet");
    fabric.run(SECOND * 4);
    let next = *fabric.ids().difference(&before).next().expect("it went on");
    assert_eq!(fabric.communicator(next).ranks, 2);
    assert_eq!((fabric.agreement("a", "c0").number, fabric.agreement("a", "c0").constraints), (2, wanted));
    // Who comes late is a newcomer to the next.
    turned_away(&mut fabric);
    fabric.regroup(1, "a", "c0", (ids[0], 1));
    assert_eq!(turned_away(&mut fabric), []);
}

#[test]
fn what_is_kept_ends_without_members_or_anew() {
    // All members go.
    let (mut fabric, id, _) = failed(&within(SECOND * 100));
    for (host, rank) in [(0, 0), (4, 1)] {
        assert!(!much_is_free(&mut fabric));
        fabric.ask(host, from_agent::Message::Leave(v1::Leave { communicator: id, rank, request: 0 }));
    }
    assert!(much_is_free(&mut fabric));
    // They join by the same name instead.
    let (mut fabric, _, from) = failed(&within(SECOND * 100));
    fabric.form("a", "c0", &[0, 4]);
    fabric.run(SECOND * 3);
    assert!(much_is_free(&mut fabric));
    fabric.run(SECOND * 100);
    assert_eq!(told(&mut fabric, from, EventKind::AgreementEnded), []);
}

#[test]
fn operators_end_retained_communicators() {
    let (mut fabric, id, from) = failed(&within(SECOND * 100));
    assert!(!much_is_free(&mut fabric));
    turned_away(&mut fabric);
    fabric.regroup_within(0, "a", "c0", (id, 0), SECOND * 50);
    assert!(fabric.dissolve(id));
    assert!(!fabric.state.dissolve(fabric.now, CommunicatorId(id), "over"), "there is nothing more to end");
    fabric.run_until_quiet();
    assert!(much_is_free(&mut fabric));
    let refused = turned_away(&mut fabric);
    assert_eq!(refused.iter().map(v1::JoinRefused::kind).collect::<Vec<_>>(), [JoinRefusedKind::Over]);
    assert_eq!(told(&mut fabric, from, EventKind::AgreementEnded).len(), 1);
}

#[test]
fn nobody_waits_for_members_of_older_generations() {
    let (mut fabric, _) = formed(9, &[("a", &[0, 4, 5])]);
    fabric.run(SECOND * 3);
    fabric.kill(5);
    fabric.form("a", "c0", &[2, 6]);
    fabric.run(SECOND * 3);
    agreed(fabric.negotiate("a", "c0", Some(&Constraints::new().on_failure(OnFailure::End))));
    fabric.run(SECOND);
    fabric.kill(6);
    fabric.run(SECOND);
    let before = fabric.ids();
    fabric.regroup(1, "a", "c0", (0, 0));
    fabric.run(SECOND * 3);
    assert_eq!(fabric.ids().difference(&before).count(), 1, "it begins anew");
}

#[test]
fn members_retry_after_an_unprepared_successor() {
    let mut world = World::new(settings(4), 7);
    let all: Vec<SessionId> = (0..4).map(|host| world.agent(host)).collect();
    let id = world.form(&all[..3], "world");
    let wanted = Constraints::new().on_failure(OnFailure::Regroup { within: SECOND * 5 });
    let (tenant, communicator) = ("a".to_owned(), "world".to_owned());
    let asked = v1::Negotiate { request: 1, tenant, communicator, propose: Some((&wanted).into()) };
    world.send(all[3], from_agent::Message::Negotiate(asked));
    world.dies(all[2]);
    let regroup = |world: &mut World| {
        let mut told = Vec::new();
        for (rank, session) in (0..).zip(&all[..2]) {
            world.received(*session);
            let regroup =
                Some(v1::Regroup { communicator: id, previous_rank: rank, key: rank, min_ranks: 1 });
            let join = v1::Join { request: 70 + u64::from(rank), regroup, ..join_of("a", "world", 0, 0) };
            world.send(*session, from_agent::Message::Join(join));
        }
        all[..2].iter().for_each(|session| told.extend(world.received(*session)));
        told
    };
    for _ in 0..2 {
        let told = regroup(&mut world);
        assert!(
            matches!(told.as_slice(), [to_agent::Message::Form(_), to_agent::Message::Form(_)]),
            "{told:?}"
        );
        // Nobody prepares it.
        world.wait(SECOND * 11);
    }
    world.wait(SECOND);
    let told = regroup(&mut world);
    assert!(
        matches!(told.as_slice(), [to_agent::Message::JoinRefused(first), to_agent::Message::JoinRefused(_)]
            if first.kind() == JoinRefusedKind::Over),
        "{told:?}"
    );
}

#[test]
fn operators_bound_the_regroup_time() {
    let (mut fabric, ids) = formed(9, &[("a", &[0, 4, 5])]);
    let asked = within(SECOND * 3000);
    let Some(Ok(Negotiated::Refused { reasons, counter })) = fabric.negotiate("a", "c0", Some(&asked)) else {
        panic!("agreed on")
    };
    assert_eq!(reasons.iter().map(|reason| reason.clause).collect::<Vec<_>>(), [Clause::OnFailure]);
    assert_eq!(counter.as_ref(), Some(&within(SECOND * 600)));
    agreed(fabric.negotiate("a", "c0", Some(&with(OnFailure::End))));
    fabric.run(SECOND * 3);
    fabric.dissolve(ids[0]);
    let before = fabric.ids();
    for (host, rank) in [(0, 0), (4, 1), (5, 2)] {
        fabric.regroup(host, "a", "c0", (ids[0], rank));
    }
    fabric.run(SECOND * 3);
    assert_eq!(fabric.ids().difference(&before).count(), 1);
}

#[test]
fn no_aggregator_while_the_tenant_wants_none() {
    let mut world = World::new(super::aggregation::settings(5), 1);
    let agg = world.hello(aggregator(&[]));
    let all = world.connect((0..5).map(|host| able(host, vec![])));
    let (ranks, asks) = (&all[..4], all[4]);
    let id = world.form(ranks, "world");
    world.wait(SECOND);
    world.ignore(ranks);
    let [first] = grants(&mut world, agg).try_into().unwrap();
    assert_eq!(plan(&world, id).aggregator, "agg0");
    let propose = |world: &mut World, wanted: &Constraints| {
        let (tenant, communicator) = ("a".to_owned(), "world".to_owned());
        let asked = v1::Negotiate { request: 1, tenant, communicator, propose: Some(wanted.into()) };
        world.send(asks, from_agent::Message::Negotiate(asked));
        let heard = world.received(asks);
        assert!(
            matches!(heard.as_slice(), [to_agent::Message::Negotiated(told)] if told.agreement.is_some())
        );
        world.wait(SECOND);
    };
    propose(&mut world, &Constraints::new().aggregation(false));
    let recipes = change_over(&mut world, ranks, id, 2);
    assert!(recipes.iter().all(|recipe| recipe.aggregation.is_none()), "{recipes:?}");
    assert_eq!(plan(&world, id).aggregator, "");
    world.wait(SECOND * 60);
    assert_eq!(revoked(&mut world, agg), [first.communicator]);
    // Nothing else brings it back, such as an aggregator that comes anew.
    world.gone(agg);
    let agg = world.hello(aggregator(&[]));
    world.wait(SECOND);
    assert_eq!(grants(&mut world, agg), []);
    assert!(world.is_quiet(ranks));
    propose(&mut world, &Constraints::new());
    let recipes = change_over(&mut world, ranks, id, 3);
    assert!(recipes.iter().all(|recipe| recipe.aggregation.is_some()));
    assert_eq!(grants(&mut world, agg).len(), 1);
}
