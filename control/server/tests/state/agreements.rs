//! What tenants propose and are promised: against what others have, on disk, in plans, as measured, and after a restart.

use super::fabric::Fabric;
use super::world::{SECOND, settings_of};
use harmonaize_abi::session::{
    BatchChoice, BatchKnobs, Budget, Checkpoint, ChoiceReason, Clause, Constraints, Knobs, LearningRate,
    Negotiated, Priority, Reason, Refusal,
};
use harmonaize_abi::{CommunicatorId, Nanos};
use harmonaize_api::v1::{self, EventKind};
use harmonaize_server::state::testing::Testing as _;
use harmonaize_server::state::{Controller, Fact, Output, RequestRefusal};
use harmonaize_store::Change;
use std::time::Duration;

const MB: u64 = 1_000_000;
const MS: Duration = Duration::from_millis(1);

/// A fabric with communicators in use: each a tenant's, and its hosts. Called after their numbers: "c0", "c1"..
pub(super) fn formed(seed: u64, communicators: &[(&str, &[usize])]) -> (Fabric, Vec<u64>) {
    let mut fabric = Fabric::traced(seed, 1);
    let form = |(index, (tenant, hosts)): (usize, &(&str, &[usize]))| {
        let id = fabric.form(tenant, &format!("c{index}"), hosts);
        fabric.run(SECOND * 3);
        id
    };
    let ids = communicators.iter().enumerate().map(form).collect();
    (fabric, ids)
}

pub(super) fn agreed(outcome: Option<Result<Negotiated, Refusal>>) -> harmonaize_abi::session::Agreement {
    match outcome {
        Some(Ok(Negotiated::Agreed(agreement))) => agreement,
        other => panic!("{other:?}"),
    }
}

fn refused(outcome: Option<Result<Negotiated, Refusal>>) -> (Vec<Reason>, Option<Constraints>) {
    match outcome {
        Some(Ok(Negotiated::Refused { reasons, counter })) => (reasons, counter),
        other => panic!("{other:?}"),
    }
}

/// Megabits a second that each host sends to the next by the plan, and what it is held to.
fn planned(fabric: &Fabric, id: u64) -> (u64, Option<u64>) {
    let epoch = fabric.epoch(id);
    (epoch.share.unwrap().0 / MB, epoch.planned_limit.map(|limit| limit.0 / MB))
}

/// What was told of agreements from a place in the feed on.
pub(super) fn broken_clauses(fabric: &mut Fabric, from: v1::EventCursor) -> Vec<Vec<v1::Clause>> {
    let events = fabric.events_of(from, EventKind::AgreementBroken).into_iter();
    events.map(|event| event.clauses().collect()).collect()
}

#[test]
fn a_promise_is_stored_and_in_every_plan() {
    // All three share the link of host 0 with one another, or of host 4.
    let (mut fabric, ids) = formed(1, &[("a", &[0, 4]), ("b", &[0, 4])]);
    assert_eq!(fabric.agreement("a", "c0").number, 0);
    assert_eq!([0, 1].map(|at| planned(&fabric, ids[at])), [(500, None); 2]);
    let wanted = Constraints::new().min_busbw(80 * MB).aggregation(false);
    let agreement = agreed(fabric.negotiate("a", "c0", Some(&wanted)));
    assert_eq!((agreement.number, &agreement.constraints), (1, &wanted));
    assert!(agreement.broken.is_empty());
    let record = fabric.tenants.stored.agreements[&CommunicatorId(ids[0])].clone();
    assert_eq!((record.number, record.rate_bits / MB), (1, 721));
    fabric.run(SECOND * 3);
    // The other is held to what is left, by an epoch that goes on with all its links.
    assert_eq!([0, 1].map(|at| planned(&fabric, ids[at])), [(721, None), (278, Some(278))]);
    let recipe = fabric.recipe_of(4, ids[1]);
    assert!(recipe.epoch > 1 && recipe.peers.iter().all(|peer| peer.reused && peer.rate_bps / MB == 278));
    assert_eq!(fabric.agreement("a", "c0"), agreement);
    let facts = fabric.facts.iter().filter(|(_, fact)| matches!(fact, Fact::Agreed { number: 1, .. }));
    assert_eq!(facts.count(), 1);
    // Given back, it is everybody's again.
    assert_eq!(agreed(fabric.negotiate("a", "c0", Some(&Constraints::new()))).number, 2);
    fabric.run(SECOND * 3);
    assert_eq!([0, 1].map(|at| planned(&fabric, ids[at])), [(500, None); 2]);
    assert!(fabric.recipe_of(4, ids[1]).peers.iter().all(|peer| peer.rate_bps == 0));
    // It ends with its communicator.
    fabric.dissolve(ids[0]);
    assert!(fabric.tenants.stored.agreements.is_empty());
    let gone = fabric.negotiate("a", "c0", None).unwrap().unwrap_err();
    assert!(matches!(gone, Refusal::NoCommunicator(_)), "{gone}");
}

#[test]
fn exchanges_leave_what_others_are_promised_too() {
    // Four hosts of one tenant exchange over both spines, beside a pair that is promised most of its links.
    let (mut fabric, ids) = formed(14, &[("b", &[0, 1, 4, 5]), ("a", &[0, 4]), ("b", &[2, 3, 6])]);
    let held = |fabric: &Fabric, id: u64, host: usize| -> Vec<u64> {
        fabric.recipe_of(host, id).peers.iter().map(|peer| peer.rate_bps / MB).collect()
    };
    assert_eq!(held(&fabric, ids[0], 0), [0, 0, 0]);
    agreed(fabric.negotiate("a", "c1", Some(&Constraints::new().min_busbw(60 * MB))));
    fabric.run(SECOND * 3);
    let promised = fabric.state.promised_rate(CommunicatorId(ids[1])).0 / MB;
    // What is left of the pair's own links, for all that host 0 sends; the ring's next may have all of it.
    let (left, share) = (1000 - promised, planned(&fabric, ids[0]).0);
    for host in [0, 1, 4, 5] {
        let mut rates = held(&fabric, ids[0], host);
        rates.sort_unstable();
        assert!(rates[0] > 0 && rates[1] * 3 <= left + 3 && share <= left, "{rates:?} {share} {left}");
    }
    // Those who share no host's link are held where they cross a spine.
    assert!(held(&fabric, ids[2], 2).iter().any(|rate| *rate > 0));
    assert_eq!(held(&fabric, ids[1], 0), [0], "who has the promise is not held");
    agreed(fabric.negotiate("a", "c1", Some(&Constraints::new())));
    fabric.run(SECOND * 3);
    assert_eq!(held(&fabric, ids[0], 0), [0, 0, 0]);
    assert_eq!(held(&fabric, ids[2], 2), [0, 0]);
}

/// Ranks of a communicator go on as another; returns the new one's id. They are those on these hosts, of the rank that each has.
fn regrouped(fabric: &mut Fabric, id: u64, name: &str, members: &[(usize, u32)]) -> u64 {
    let before = fabric.ids();
    for (host, rank) in members {
        fabric.regroup(*host, "a", name, (id, *rank));
    }
    fabric.run(SECOND * 3);
    *fabric.ids().difference(&before).next().expect("it went on")
}

#[test]
fn an_agreement_passes_to_the_successor_at_once() {
    let (mut fabric, ids) = formed(8, &[("a", &[0, 4, 5]), ("b", &[0, 4])]);
    let wanted = Constraints::new().min_busbw(60 * MB).weight(2);
    let before = agreed(fabric.negotiate("a", "c0", Some(&wanted)));
    fabric.run(SECOND * 3);
    let from = fabric.here();
    // Twice as much would not fit: what the one before has goes over with its ranks.
    let id = regrouped(&mut fabric, ids[0], "c0", &[(0, 0), (4, 1)]);
    let after = fabric.agreement("a", "c0");
    assert_eq!((after.number, &after.constraints), (before.number + 1, &wanted));
    assert_eq!(fabric.tenants.stored.agreements.keys().copied().collect::<Vec<_>>(), [CommunicatorId(id)]);
    assert!(after.broken.is_empty() && planned(&fabric, id).0 >= 540, "{after:?}");
    assert_eq!(broken_clauses(&mut fabric, from), Vec::<Vec<v1::Clause>>::new());
}

#[test]
fn an_agreement_passes_on_or_ends_countered() {
    for narrower in [false, true] {
        let (mut fabric, ids) = formed(9, &[("a", &[0, 4, 5]), ("b", &[1, 5])]);
        let wanted = Constraints::new().min_busbw(60 * MB);
        agreed(fabric.negotiate("a", "c0", Some(&wanted)));
        fabric.run(SECOND * 3);
        let from = fabric.here();
        fabric.kill(5);
        fabric.run(SECOND);
        assert!(fabric.tenants.stored.agreements.is_empty(), "it ends with its communicator");
        if narrower {
            // Meanwhile another is promised what is there.
            fabric.form("b", "c2", &[0, 4]);
            fabric.run(SECOND * 3);
            agreed(fabric.negotiate("b", "c2", Some(&Constraints::new().min_busbw(56 * MB))));
        }
        let id = regrouped(&mut fabric, ids[0], "c0", &[(0, 0), (4, 1)]);
        let after = fabric.agreement("a", "c0");
        let events = ended(&mut fabric, from);
        if !narrower {
            assert_eq!((after.number, &after.constraints, events.len()), (2, &wanted, 0));
            assert!(fabric.tenants.stored.agreements.contains_key(&CommunicatorId(id)));
            continue;
        }
        assert_eq!((after.number, events), (0, vec![vec![v1::Clause::Bandwidth]]));
        let counter = refused(fabric.negotiate("a", "c0", Some(&wanted))).1.unwrap();
        agreed(fabric.negotiate("a", "c0", Some(&counter)));
    }
}

/// Agreements that ended, from a place in the feed on.
fn ended(fabric: &mut Fabric, from: v1::EventCursor) -> Vec<Vec<v1::Clause>> {
    fabric.run(SECOND * 2);
    let events = fabric.events_of(from, EventKind::AgreementEnded).into_iter();
    events.map(|event| event.clauses().collect()).collect()
}

#[test]
fn a_weight_is_a_share() {
    let (mut fabric, ids) = formed(2, &[("a", &[0, 4]), ("b", &[0, 4])]);
    agreed(fabric.negotiate("a", "c0", Some(&Constraints::new().weight(4))));
    fabric.run(SECOND * 3);
    assert_eq!([0, 1].map(|at| planned(&fabric, ids[at])), [(800, Some(800)), (200, Some(200))]);
    agreed(fabric.negotiate("b", "c1", Some(&Constraints::new().priority(Priority::High))));
    fabric.run(SECOND * 3);
    assert_eq!([0, 1].map(|at| planned(&fabric, ids[at])), [(500, None); 2]);
}

#[test]
fn too_much_is_countered_with_the_rest() {
    let (mut fabric, ids) = formed(3, &[("a", &[0, 4]), ("b", &[0, 4])]);
    agreed(fabric.negotiate("a", "c0", Some(&Constraints::new().min_busbw(80 * MB))));
    let wanted = Constraints::new().min_busbw(60 * MB);
    let (reasons, counter) = refused(fabric.negotiate("b", "c1", Some(&wanted)));
    assert_eq!(reasons.len(), 1);
    assert!(reasons[0].clause == Clause::Bandwidth && reasons[0].text.contains("60000000"), "{reasons:?}");
    let counter = counter.unwrap();
    assert_eq!(counter, Constraints::new().min_busbw(18 * MB));
    assert_eq!(agreed(fabric.negotiate("b", "c1", Some(&counter))).constraints, counter);
    fabric.run(SECOND * 3);
    let (first, second) = (planned(&fabric, ids[0]).0, planned(&fabric, ids[1]).0);
    assert!(first >= 721 && second >= 158 && first + second <= 1000, "{first} {second}");
    // Once the first has given up some, the second can have it.
    agreed(fabric.negotiate("a", "c0", Some(&Constraints::new().min_busbw(30 * MB))));
    agreed(fabric.negotiate("b", "c1", Some(&wanted)));
}

#[test]
fn others_move_for_a_promise() {
    // Three pairs across two spines: two share one, whichever they are.
    let (mut fabric, ids) = formed(4, &[("b", &[1, 5]), ("b", &[2, 6]), ("a", &[0, 4])]);
    for (tenant, name) in [("b", "c0"), ("b", "c1"), ("a", "c2")] {
        agreed(fabric.negotiate(tenant, name, Some(&Constraints::new().min_busbw(47 * MB))));
        fabric.run(SECOND * 3);
    }
    let shares: Vec<u64> = ids.iter().map(|id| planned(&fabric, *id).0).collect();
    assert!(shares.iter().all(|share| *share >= 413), "{shares:?}");
    fabric.read(0, 1, "b", None, Duration::ZERO);
    let from = fabric.read.pop().unwrap().cursor;
    let links = |fabric: &Fabric| ids.iter().map(|id| fabric.epoch(*id).links.clone()).collect::<Vec<_>>();
    let before = links(&fabric);
    // 721 fit beside none of the others, so these must share the other spine.
    agreed(fabric.negotiate("a", "c2", Some(&Constraints::new().min_busbw(82 * MB))));
    fabric.run(SECOND * 5);
    // Who moves is not told so: it would know that it shares links with what was promised.
    assert_ne!(links(&fabric), before);
    fabric.read(0, 1, "b", from, Duration::ZERO);
    let events = fabric.read.pop().unwrap().events;
    assert!(events.iter().all(|event| event.kind() != EventKind::PlanChanged), "{events:?}");
    let shares: Vec<u64> = ids.iter().map(|id| planned(&fabric, *id).0).collect();
    assert!(shares[0] >= 413 && shares[1] >= 413 && shares[2] >= 721, "{shares:?}");
}

#[test]
fn the_operator_bounds_weights() {
    let mut settings = settings_of(&super::fabric::two_by_two());
    settings.most_weight = 2;
    let mut fabric = Fabric::of(settings, 5, 1, 0);
    fabric.run(SECOND * 3);
    fabric.form("a", "c0", &[0, 4]);
    fabric.run(SECOND * 3);
    let wanted = Constraints::new().weight(3).min_busbw(82 * MB);
    let (reasons, counter) = refused(fabric.negotiate("a", "c0", Some(&wanted)));
    let clauses: Vec<Clause> = reasons.iter().map(|reason| reason.clause).collect();
    assert_eq!(clauses, [Clause::Weight], "{reasons:?}");
    let agreement = agreed(fabric.negotiate("a", "c0", counter.as_ref()));
    assert_eq!(agreement.constraints.weight, 2);
}

#[test]
fn senseless_and_foreign_proposals_are_refused() {
    let (mut fabric, _) = formed(6, &[("a", &[0, 4])]);
    let low = Constraints::new().priority(Priority::Low).min_busbw(MB);
    let (reasons, counter) = refused(fabric.negotiate("a", "c0", Some(&low)));
    assert!(reasons.len() == 1 && reasons[0].clause == Clause::Priority, "{reasons:?}");
    assert_eq!(counter, Some(Constraints::new().min_busbw(MB)));
    let budget = Constraints::new().budget(Budget::Vnmse(f64::NAN));
    let (reasons, counter) = refused(fabric.negotiate("a", "c0", Some(&budget)));
    assert!(reasons.len() == 1 && reasons[0].clause == Clause::Budget, "{reasons:?}");
    assert_eq!(counter, Some(Constraints::new()));
    let both = budget.weight(99);
    let (reasons, counter) = refused(fabric.negotiate("a", "c0", Some(&both)));
    let clauses: Vec<Clause> = reasons.iter().map(|reason| reason.clause).collect();
    assert_eq!(clauses[0], Clause::Weight);
    assert_eq!(clauses.last(), Some(&Clause::Budget));
    agreed(fabric.negotiate("a", "c0", counter.as_ref()));
    let of_others = fabric.negotiate("b", "c0", None).unwrap().unwrap_err();
    let of_nobody = fabric.negotiate("b", "cx", None).unwrap().unwrap_err();
    assert!(matches!(of_others, Refusal::NoCommunicator(_)), "{of_others}");
    let renamed = Refusal::NoCommunicator(of_others.to_string().replace("c0", "cx"));
    assert_eq!(renamed, of_nobody, "that another has it is not told");
    let stranger = fabric.negotiate("nobody", "c0", None).unwrap().unwrap_err();
    assert_eq!(stranger, RequestRefusal::UnknownTenant.into());
    assert!(fabric.iteration("b", "c0", &Knobs::default()).is_err());
    let senseless = Knobs { accumulate: (3, 2), checkpoint: None };
    let why = RequestRefusal::Knobs(senseless.check().unwrap_err());
    assert_eq!(fabric.iteration("a", "c0", &senseless).unwrap_err(), why.into());
}

#[test]
fn floods_are_stopped_for_who_floods() {
    let (mut fabric, _) = formed(7, &[("a", &[0, 4]), ("a", &[1, 5]), ("b", &[2, 6])]);
    let wanted = |round: u64| Constraints::new().min_busbw(10 * MB + round);
    for round in 0..8 {
        agreed(fabric.negotiate("a", "c0", Some(&wanted(round))));
    }
    let stored = fabric.tenants.stored.clone();
    for round in 0..1000 {
        let flood = fabric.negotiate("a", "c0", Some(&wanted(round))).unwrap().unwrap_err().to_string();
        assert!(flood.contains("too many proposals") && flood.contains("the next in"), "{flood}");
    }
    assert!(fabric.tenants.stored == stored && fabric.agreement("a", "c0").number == 8);
    agreed(fabric.negotiate("a", "c1", Some(&wanted(0))));
    agreed(fabric.negotiate("b", "c2", Some(&wanted(0))));
    fabric.run(SECOND * 61);
    agreed(fabric.negotiate("a", "c0", Some(&wanted(9))));
}

#[test]
fn what_cannot_be_stored_is_not_promised() {
    let (mut fabric, ids) = formed(8, &[("a", &[0, 4]), ("b", &[0, 4])]);
    fabric.tenants.disk_full = true;
    let wanted = Constraints::new().min_busbw(80 * MB);
    let why = fabric.negotiate("a", "c0", Some(&wanted)).unwrap().unwrap_err();
    assert_eq!(why, RequestRefusal::NotStored.into());
    assert_eq!((fabric.agreement("a", "c0").number, planned(&fabric, ids[0]).0), (0, 500));
    (fabric.tenants.disk_full, fabric.tenants.disk_slow) = (false, true);
    assert!(fabric.negotiate("a", "c0", Some(&wanted)).is_none(), "answered before it is stored");
    let again = fabric.negotiate("a", "c0", Some(&wanted)).unwrap().unwrap_err();
    assert_eq!(again, RequestRefusal::ProposalPending.into());
    // What is being stored counts already.
    let (_, counter) = refused(fabric.negotiate("b", "c1", Some(&wanted)));
    assert!(counter.unwrap().min_busbw < 20 * MB);
    fabric.dissolve(ids[0]);
    let ended = RequestRefusal::CommunicatorEnded.to_string();
    assert_eq!(fabric.tenants.negotiated.pop().unwrap().refused, ended);
}

#[test]
fn a_passed_agreement_is_stored_with_its_plan() {
    let (mut fabric, ids) = formed(14, &[("a", &[0, 4]), ("a", &[0, 4])]);
    agreed(fabric.negotiate("a", "c0", Some(&Constraints::new().weight(2))));
    fabric.state.pass_agreement(fabric.now, CommunicatorId(ids[0]), CommunicatorId(ids[1]));
    let mut outputs = fabric.state.take_outputs();
    outputs.retain(|output| matches!(output, Output::Keep(_)));
    let [Output::Keep(job)] = outputs.as_slice() else { panic!("{outputs:?}") };
    let [Change::NoAgreement(before), Change::Agreement(record), Change::Plan(plan)] = job.as_slice() else {
        panic!("{job:?}")
    };
    assert_eq!((before.0, record.communicator, record.number), (ids[0], ids[1], 2));
    assert_eq!((plan.communicator, plan.name.as_str()), (ids[1], "c1"));
}

#[test]
fn a_breach_and_its_end_are_reported() {
    let (mut fabric, ids) = formed(9, &[("a", &[0, 4]), ("b", &[1, 5])]);
    let wanted = Constraints::new().min_busbw(80 * MB);
    agreed(fabric.negotiate("a", "c0", Some(&wanted)));
    agreed(fabric.negotiate("b", "c1", Some(&wanted)));
    fabric.run(SECOND * 3);
    let from = fabric.here();
    assert!(planned(&fabric, ids[0]).0 >= 721 && planned(&fabric, ids[1]).0 >= 721);
    fabric.drain("spine1");
    fabric.run(SECOND * 5);
    assert_eq!([planned(&fabric, ids[0]).0, planned(&fabric, ids[1]).0], [500, 500]);
    assert_eq!(fabric.agreement("a", "c0").broken, [Clause::Bandwidth]);
    fabric.end_drain("spine1");
    fabric.run(SECOND * 5);
    let agreement = fabric.agreement("a", "c0");
    assert_eq!((agreement.broken, agreement.record.breaches), (vec![], 1));
    assert_eq!(broken_clauses(&mut fabric, from), [vec![v1::Clause::Bandwidth], vec![]]);
    let of_a = |(_, fact): &&(Duration, Fact)| matches!(fact, Fact::AgreementBroken { communicator, .. } if *communicator == CommunicatorId(ids[0]));
    assert_eq!(fabric.facts.iter().filter(of_a).count(), 2);
}

#[test]
fn an_agreed_budget_holds_for_all_ranks() {
    let (mut fabric, ids) = formed(11, &[("a", &[0, 1])]);
    agreed(fabric.negotiate("a", "c0", Some(&Constraints::new().budget(Budget::MatchBf16))));
    fabric.run(SECOND * 3);
    let budget = fabric.recipe_of(0, ids[0]).budget.unwrap();
    assert_eq!(Budget::from(&budget), Budget::MatchBf16);
    agreed(fabric.negotiate("a", "c0", Some(&Constraints::new().budget(Budget::Exact))));
    fabric.run(SECOND * 3);
    assert_eq!(fabric.recipe_of(0, ids[0]).budget, None);
}

#[test]
fn agreements_outlive_a_restart_of_control() {
    let (mut fabric, ids) = formed(12, &[("a", &[0, 4]), ("b", &[0, 4])]);
    let wanted = Constraints::new().min_busbw(80 * MB).p99(1 << 10, MS * 100);
    let agreement = agreed(fabric.negotiate("a", "c0", Some(&wanted)));
    agreed(fabric.negotiate("b", "c1", Some(&Constraints::new().weight(2))));
    fabric.run(SECOND * 3);
    let mut stored = fabric.tenants.stored.clone();
    stored.boot = Some(77);
    let mut again = Controller::new(settings_of(&super::fabric::two_by_two()), [9; 32]);
    again.restore(stored, Nanos(1_700_000_000_000_000_000));
    fabric.restarted(again, &ids[..1]);
    fabric.run(SECOND * 5);
    let told = fabric.agreement("a", "c0");
    assert_eq!((told.number, &told.constraints, told.since_ns), (1, &wanted, agreement.since_ns));
    assert_eq!(fabric.state.promised_rate(CommunicatorId(ids[0])).0 / MB, 721);
    // Whoever does not come back has nothing any more.
    fabric.run(SECOND * 40);
    let left: Vec<u64> = fabric.tenants.stored.agreements.keys().map(|id| id.0).collect();
    assert_eq!(left, ids[..1]);
}

#[test]
fn iterations_follow_what_the_tenant_has_been_told() {
    let (mut fabric, _) = formed(13, &[("a", &[0, 4])]);
    let knobs = |last: u32| Knobs {
        accumulate: (1, 16),
        checkpoint: Some(Checkpoint {
            every: SECOND * 600,
            cost: SECOND,
            last: SECOND * last,
            importance: Priority::Normal,
        }),
    };
    let choice = fabric.iteration("a", "c0", &knobs(10)).unwrap();
    assert_eq!((choice.accumulate, choice.checkpoint, choice.reason), (1, false, ChoiceReason::Usual));
    fabric.drain("h4");
    fabric.run(SECOND * 5);
    let choice = fabric.iteration("a", "c0", &knobs(100)).unwrap();
    assert_eq!((choice.checkpoint, choice.reason), (true, ChoiceReason::Maintenance));
    // Saved since.
    assert!(!fabric.iteration("a", "c0", &knobs(1)).unwrap().checkpoint);
    fabric.end_drain("h4");
    fabric.run(SECOND * 5);
    assert!(!fabric.iteration("a", "c0", &knobs(100)).unwrap().checkpoint);
    assert_eq!(fabric.iteration("a", "c0", &knobs(600)).unwrap().reason, ChoiceReason::Due);
}

#[test]
fn batches_follow_the_noise_of_gradients() {
    let (mut fabric, _) = formed(13, &[("a", &[0, 4])]);
    let knobs = Knobs { accumulate: (2, 8), checkpoint: None };
    let batch = |trace, most| BatchKnobs {
        samples: (32, most),
        micro: (1, 64),
        initial: 32,
        rule: LearningRate::AdaScale,
        square: 1.0,
        trace,
        pass: Duration::ZERO,
        sample: Duration::from_millis(1),
        exchange: Duration::from_millis(100),
    };
    let mut chosen = |batch| {
        let (choice, batch) = fabric.iteration_with_batch("a", "c0", &knobs, &batch).unwrap();
        let BatchChoice { micro, learning_rate } = batch.unwrap();
        assert_eq!((choice.checkpoint, choice.reason), (false, ChoiceReason::Usual));
        (2 * choice.accumulate * micro, learning_rate)
    };
    assert_eq!(chosen(batch(0.0, 1024)), (32, 1.0));
    let (larger, rate) = chosen(batch(1000.0, 1024));
    assert!(
        (128..=1024).contains(&larger) && rate > 1.5 && rate < f64::from(larger) / 32.0,
        "{larger} {rate}"
    );
    // Without a batch as ever.
    assert_eq!(fabric.iteration("a", "c0", &knobs).unwrap().accumulate, 2);
    let refused = |fabric: &mut Fabric, batch| {
        fabric.iteration_with_batch("a", "c0", &knobs, &batch).unwrap_err().to_string()
    };
    let reversed = batch(1.0, 31);
    let why = RequestRefusal::Knobs(reversed.check().unwrap_err());
    assert_eq!(refused(&mut fabric, reversed), why.to_string());
    let few = BatchKnobs { micro: (20, 64), ..batch(1.0, 39) };
    assert!(refused(&mut fabric, few).contains("make 40 to 1024"));
}

/// Whether rates between pairs of hosts fit together, by every choice of spines. It is the exact planner of a fabric where that is all
/// there is to choose. Rates in Mbit/s of links that carry 1,000.
fn fits(demands: &[((usize, usize), f64)]) -> bool {
    let crosses = |(from, to): (usize, usize)| from / 4 != to / 4;
    (0..1_usize << demands.len()).any(|spines| {
        let mut load = std::collections::BTreeMap::new();
        for (index, (pair, rate)) in demands.iter().enumerate() {
            let mut add = |link: (&'static str, usize, usize)| *load.entry(link).or_insert(0.0) += rate;
            // Of two ranks each sends as much as it receives: a link's two ways are alike.
            add(("host", pair.0, 0));
            add(("host", pair.1, 0));
            if crosses(*pair) {
                let spine = spines >> index & 1;
                add(("leaf", pair.0 / 4, spine));
                add(("leaf", pair.1 / 4, spine));
            }
        }
        load.values().all(|load| *load <= 1000.0)
    })
}

#[test]
fn four_fifths_of_what_is_feasible_are_promised() {
    use rand::{RngExt, SeedableRng, seq::SliceRandom};
    let (mut feasible, mut accepted, mut impossible) = (0, 0, 0);
    for seed in 0..40_u64 {
        let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
        let mut hosts: Vec<usize> = (0..8).collect();
        hosts.shuffle(&mut rng);
        // Two pairs of each four hosts, so that links of hosts are shared too.
        let pairs: Vec<(usize, usize)> =
            [(0, 1), (2, 3), (0, 2), (4, 5)].map(|(a, b)| (hosts[a], hosts[b])).into();
        let communicators: Vec<[usize; 2]> = pairs.iter().map(|(from, to)| [*from, *to]).collect();
        let named: Vec<(&str, &[usize])> =
            communicators.iter().map(|hosts| ("a", hosts.as_slice())).collect();
        let (mut fabric, ids) = formed(seed, &named);
        let mut promised: Vec<((usize, usize), f64)> = Vec::new();
        for (index, pair) in pairs.iter().enumerate() {
            let busbw = rng.random_range(5..110) * MB;
            let demand = (*pair, busbw as f64 * 8.8 / 1e6);
            let with = [promised.as_slice(), &[demand]].concat();
            let outcome =
                fabric.negotiate("a", &format!("c{index}"), Some(&Constraints::new().min_busbw(busbw)));
            let agreed = matches!(outcome, Some(Ok(Negotiated::Agreed(_))));
            match fits(&with) {
                true => (feasible, accepted) = (feasible + 1, accepted + usize::from(agreed)),
                false => {
                    assert!(!agreed, "seed {seed}: {with:?} do not fit");
                    impossible += 1;
                }
            }
            if agreed {
                promised = with;
                fabric.run(SECOND * 3);
                for id in &ids {
                    let (share, needed) =
                        (planned(&fabric, *id).0, fabric.state.promised_rate(CommunicatorId(*id)).0 / MB);
                    assert!(share + 1 >= needed, "seed {seed}: {share} of {needed}");
                }
            }
        }
    }
    println!("{accepted} of {feasible} are promised; {impossible} do not fit");
    assert!(feasible >= 50 && accepted * 5 >= feasible * 4, "{accepted} of {feasible}");
}
