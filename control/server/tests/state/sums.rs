//! What tenants agree on for their sums. Aggregators and agents are notified of it by the next epoch, which comes at
//! once.

use super::aggregation::{able as can_aggregate, aggregator, change_over, grants, plan, revoked, settings};
use super::direct::sizes;
use super::world::{SECOND, World, join_of, running};
use harmonaize_abi::session::{Clause, Constraints, MAX_TARGET_BYTES, Negotiated};
use harmonaize_api::v1::{self, from_agent, to_agent};
use harmonaize_planner::AggregationReason;
use harmonaize_server::state::{Output, SessionId, Settings};

/// Four hosts and an aggregator.
fn able() -> (World, SessionId, Vec<SessionId>) {
    running_on(&[], &vec![vec![]; 4])
}

/// The same, which run something and have granted something already.
fn running_on(granted: &[u64], recipes: &[Vec<v1::Recipe>]) -> (World, SessionId, Vec<SessionId>) {
    let mut world = World::new(settings(4), 5 + granted.len() as u8);
    let agg = world.hello(aggregator(granted));
    let agent =
        |(host, recipes): (usize, &Vec<v1::Recipe>)| world.hello(can_aggregate(host, recipes.clone()));
    let sessions: Vec<SessionId> = recipes.iter().enumerate().map(agent).collect();
    for session in sessions.iter().chain([&agg]) {
        assert_eq!(every!(world.received(*session), Refused), []);
    }
    (world, agg, sessions)
}

/// What comes of a proposal; what is to be stored is.
fn propose(world: &mut World, session: SessionId, wanted: &Constraints) -> Negotiated {
    let (tenant, communicator) = ("a".to_owned(), "world".to_owned());
    let asked = v1::Negotiate { request: 1, tenant, communicator, propose: Some(wanted.into()) };
    world.state.message(world.now, session, from_agent::Message::Negotiate(asked).into());
    let mut kept = Vec::new();
    for output in world.state.take_outputs() {
        match output {
            Output::Send(session, message) => world.got.entry(session).or_default().push(message),
            Output::Keep(changes) => kept.extend(changes),
            _ => {}
        }
    }
    world.state.apply_stored(world.now, &kept);
    world.run_until_quiet();
    world.wait(SECOND);
    let heard = world.got.entry(session).or_default();
    let at = heard.iter().position(|message| matches!(message, to_agent::Message::Negotiated(_))).unwrap();
    let to_agent::Message::Negotiated(told) = heard.remove(at) else { panic!("looked for it") };
    told.outcome().unwrap()
}

fn in_use(world: &mut World, sessions: &[SessionId]) -> (u64, v1::Aggregation) {
    let recipes = world.join_all(sessions, &join_of("a", "world", 0, 0));
    let id = recipes[0].communicator;
    world.prepare(sessions, id, 1);
    (id, recipes[0].aggregation.clone().unwrap())
}

#[test]
fn hosts_and_aggregators_sum_in_order() {
    let (mut world, agg, sessions) = able();
    let (id, told) = in_use(&mut world, &sessions);
    assert!(told.small_operations);
    let [grant] = grants(&mut world, agg).try_into().unwrap();
    assert!(!grant.ordered);
    let ordered = Constraints::new().ordered(true);
    assert!(matches!(propose(&mut world, sessions[0], &ordered), Negotiated::Agreed(_)));
    let recipes = change_over(&mut world, &sessions, id, 2);
    let [grant] = grants(&mut world, agg).try_into().unwrap();
    assert!(
        grant.ordered && grant.guaranteed_units >= 2 * 4 && grant.guaranteed_units <= grant.max_units,
        "{grant:?}"
    );
    for recipe in &recipes {
        assert_eq!(sizes(recipe).1, MAX_TARGET_BYTES);
        assert!(recipe.coding.is_none() && recipe.aggregation.is_some());
        assert!(recipe.peers.iter().all(|peer| peer.reused), "links go on");
    }
    assert!(plan(&world, id).aggregation_reason.contains("agg0"), "{:?}", plan(&world, id));
    // Asked for again nothing changes; given back it is as before.
    propose(&mut world, sessions[0], &ordered);
    assert!(world.is_quiet(&sessions));
    propose(&mut world, sessions[0], &Constraints::new());
    let recipes = change_over(&mut world, &sessions, id, 3);
    assert!(sizes(&recipes[0]).1 < MAX_TARGET_BYTES);
    assert!(!grants(&mut world, agg)[0].ordered);
}

#[test]
fn order_is_not_promised_to_too_many_hosts() {
    let mut world = World::new(Settings { most_ranks: 65, ..super::world::settings(65) }, 5);
    let sessions: Vec<SessionId> = (0..65).map(|host| world.agent(host)).collect();
    world.form(&sessions, "world");
    let ordered = Constraints::new().ordered(true).weight(1);
    let Negotiated::Refused { reasons, counter } = propose(&mut world, sessions[0], &ordered) else {
        panic!("promised")
    };
    assert!(reasons.len() == 1 && reasons[0].clause == Clause::Order, "{reasons:?}");
    assert!(reasons[0].text.contains("too many hosts"), "{reasons:?}");
    assert_eq!(counter, Some(Constraints::new()));
}

#[test]
fn a_tenant_may_refuse_aggregators() {
    let (mut world, agg, sessions) = able();
    let (id, _) = in_use(&mut world, &sessions);
    let [grant] = grants(&mut world, agg).try_into().unwrap();
    propose(&mut world, sessions[3], &Constraints::new().aggregation(false));
    let recipes = change_over(&mut world, &sessions, id, 2);
    assert!(recipes.iter().all(|recipe| recipe.aggregation.is_none()));
    assert_eq!(world.epoch(id).aggregation_reason, AggregationReason::NotWanted);
    world.wait(SECOND * 5);
    assert_eq!(revoked(&mut world, agg), [grant.communicator]);
}

#[test]
fn order_agreed_on_after_a_restart_takes_effect() {
    let (mut world, agg, sessions) = able();
    let recipes = world.join_all(&sessions, &join_of("a", "world", 0, 0));
    world.prepare(&sessions, recipes[0].communicator, 1);
    let grant = grants(&mut world, agg)[0].communicator;
    let told: Vec<_> = recipes.iter().map(running).collect();
    let (mut world, agg, sessions) = running_on(&[grant], &told);
    propose(&mut world, sessions[0], &Constraints::new().ordered(true));
    let recipes = world.recipes(&sessions);
    assert!(recipes.iter().all(|recipe| recipe.epoch > 1), "{recipes:?}");
    assert!(grants(&mut world, agg).iter().any(|grant| grant.ordered));
}
