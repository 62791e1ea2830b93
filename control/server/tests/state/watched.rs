//! How agreements are watched: what operations took, that they hang or fail, and of which collective they are.

use super::agreements::{agreed, broken_clauses, formed};
use super::fabric::Fabric;
use super::world::{SECOND, operation as timed};
use harmonaize_abi::session::{Clause, Constraints};
use harmonaize_abi::{Collective, CommunicatorId, Nanos};
use harmonaize_api::v1::{self, from_agent};
use harmonaize_server::state::testing::Testing as _;
use harmonaize_server::state::{Fact, RequestRefusal};
use std::time::Duration;

const MB: u64 = 1_000_000;
const MS: Duration = Duration::from_millis(1);

/// An operation as both agents tell of it: called by the one, and so much later by the other.
fn report_operation(fabric: &mut Fabric, id: u64, operation: u64, bytes: u64, times: (Duration, Duration)) {
    report_operation_as(fabric, id, (operation, None), bytes, times);
}

/// The same of a collective, by its code; of none, as agents that cannot say.
fn report_operation_as(
    fabric: &mut Fabric,
    id: u64,
    (operation, collective): (u64, Option<u32>),
    bytes: u64,
    (late, took): (Duration, Duration),
) {
    let began = 1_000_000_000_000 + operation * 1_000_000_000;
    let (late, took) = (late.as_nanos() as u64, took.as_nanos() as u64);
    for (participant, called) in [(0, began), (1, began + late)] {
        let session = fabric.session(id, participant as usize);
        let times = (called, began + late + took);
        let told = v1::Operation { collective, ..timed(id, operation, bytes, participant, times) };
        fabric.state.take_operation(fabric.now, session, &told);
    }
}

#[test]
fn operation_times_are_checked_against_the_promise() {
    let (mut fabric, ids) = formed(10, &[("a", &[0, 4])]);
    let wanted = Constraints::new().p99(1 << 16, MS * 10).min_busbw(40 * MB);
    agreed(fabric.negotiate("a", "c0", Some(&wanted)));
    fabric.run(SECOND * 2);
    let from = fabric.here();
    // Not the provider's: a rank that calls a second late.
    (0..50).for_each(|n| report_operation(&mut fabric, ids[0], n, 1 << 16, (SECOND, MS * 5)));
    fabric.run(SECOND * 2);
    assert_eq!(
        (broken_clauses(&mut fabric, from), fabric.agreement("a", "c0").record.operations),
        (vec![], 50)
    );
    (50..53).for_each(|n| report_operation(&mut fabric, ids[0], n, 1 << 16, (MS, MS * 15)));
    (53..57).for_each(|n| report_operation(&mut fabric, ids[0], n, 4 << 20, (MS, MS * 200)));
    fabric.run(SECOND * 2);
    assert_eq!(broken_clauses(&mut fabric, from), [vec![v1::Clause::Completion, v1::Clause::Bandwidth]]);
    let agreement = fabric.agreement("a", "c0");
    assert_eq!(agreement.broken, [Clause::Completion, Clause::Bandwidth]);
    assert_eq!((agreement.record.late, agreement.record.breaches), (3, 2));
    assert!((agreement.record.busbw / MB).abs_diff(21) <= 1, "{agreement:?}");
    // What is old says nothing any more.
    fabric.run(SECOND * 40);
    assert!(fabric.agreement("a", "c0").broken.is_empty());
    // An operation of which an agent never tells costs no more than its place.
    for operation in 100..1000 {
        let session = fabric.session(ids[0], 0);
        let told = timed(ids[0], operation, 1, 0, (1, 2));
        fabric.state.take_operation(fabric.now, session, &told);
    }
    assert_eq!(fabric.agreement("a", "c0").record.operations, 57);
}

/// What both agents report of an operation that has not ended after so long. Of a rank that has not called it, if any, they
/// report nothing.
fn open_of(fabric: &mut Fabric, id: u64, operation: u64, so_far: Duration, missing: Option<u32>) {
    let called_ns = 1_000_000_000_000 + operation * 1_000_000_000;
    let at = Nanos(called_ns).after(so_far);
    for participant in (0..2).filter(|rank| missing != Some(*rank)) {
        let told = timed(id, operation, 1 << 16, participant, (called_ns, 0));
        fabric.state.take_open_operation(fabric.now, at, &told);
    }
}

#[test]
fn a_hanging_operation_counts_as_late() {
    let (mut fabric, ids) = formed(15, &[("a", &[0, 4])]);
    agreed(fabric.negotiate("a", "c0", Some(&Constraints::new().p99(1 << 16, MS * 10))));
    fabric.run(SECOND * 2);
    let from = fabric.here();
    (0..50).for_each(|n| report_operation(&mut fabric, ids[0], n, 1 << 16, (MS, MS * 5)));
    open_of(&mut fabric, ids[0], 50, SECOND * 60, Some(1));
    fabric.run(SECOND * 2);
    assert_eq!(
        broken_clauses(&mut fabric, from),
        Vec::<Vec<v1::Clause>>::new(),
        "a rank has not called: the tenant's"
    );
    open_of(&mut fabric, ids[0], 50, SECOND * 3, None);
    fabric.run(SECOND * 2);
    assert_eq!(broken_clauses(&mut fabric, from), [vec![v1::Clause::Completion]]);
    assert_eq!(fabric.agreement("a", "c0").record.late, 0);
    report_operation(&mut fabric, ids[0], 50, 1 << 16, (MS, SECOND * 4));
    let record = fabric.agreement("a", "c0").record;
    assert_eq!((record.operations, record.late, record.breaches), (51, 1, 1));
    fabric.run(SECOND * 40);
    assert_eq!(broken_clauses(&mut fabric, from), [vec![v1::Clause::Completion], vec![]]);
}

#[test]
fn only_the_providers_failures_break_a_promise() {
    use v1::FailureKind as Kind;
    let cases: [(Kind, &[u32], bool); 6] = [
        (Kind::Timeout, &[], true),
        (Kind::Internal, &[0], true),
        // A rank that never called, one that is lost, calls that differ, and an abort.
        (Kind::Timeout, &[1], false),
        (Kind::RanksLost, &[1], false),
        (Kind::Mismatch, &[0, 1], false),
        (Kind::Aborted, &[1], false),
    ];
    for (kind, ranks, breaks) in cases {
        let (mut fabric, ids) = formed(16, &[("a", &[0, 4])]);
        agreed(fabric.negotiate("a", "c0", Some(&Constraints::new().p99(1 << 16, MS * 10).weight(2))));
        fabric.run(SECOND * 2);
        let from = fabric.here();
        let session = fabric.session(ids[0], 0);
        let (communicator, ranks) = (ids[0], ranks.to_vec());
        let failed = v1::Failed { communicator, kind: kind.into(), ranks, ..Default::default() };
        fabric.send(session, from_agent::Message::Failed(failed));
        fabric.run(SECOND * 2);
        let expected = if breaks { vec![vec![v1::Clause::Completion]] } else { Vec::new() };
        assert_eq!(broken_clauses(&mut fabric, from), expected, "{kind:?}");
        let facts = fabric.facts.iter().filter(|(_, fact)| matches!(fact, Fact::AgreementBroken { .. }));
        assert_eq!(facts.count(), usize::from(breaks), "operators see it too");
        // What was kept goes with the agreement to the communicator that goes on.
        let left = fabric.state.take_agreement(CommunicatorId(ids[0])).unwrap();
        assert!(format!("{left:?}").contains(&format!("late: {}", u64::from(breaks))));
    }
}

#[test]
fn a_target_is_held_against_its_own_collective() {
    let (mut fabric, ids) = formed(17, &[("a", &[0, 4])]);
    let gather = Some(u32::from(Collective::AllGather.code()));
    let wanted = Constraints::new().p99_of(Collective::AllGather, 1 << 16, MS * 10);
    assert_eq!(agreed(fabric.negotiate("a", "c0", Some(&wanted))).constraints, wanted);
    fabric.run(SECOND * 2);
    let from = fabric.here();
    // As agents tell who cannot say, AllReduces, and what no version of now knows.
    for (of_one, collective) in [None, Some(0), Some(200)].into_iter().enumerate() {
        let numbers = of_one as u64 * 10..of_one as u64 * 10 + 10;
        numbers
            .for_each(|n| report_operation_as(&mut fabric, ids[0], (n, collective), 1 << 16, (MS, MS * 15)));
    }
    fabric.run(SECOND * 2);
    assert_eq!(broken_clauses(&mut fabric, from), Vec::<Vec<v1::Clause>>::new());
    (30..33).for_each(|n| report_operation_as(&mut fabric, ids[0], (n, gather), 1 << 16, (MS, MS * 15)));
    fabric.run(SECOND * 2);
    assert_eq!(broken_clauses(&mut fabric, from), [vec![v1::Clause::Completion]]);
    let record = fabric.agreement("a", "c0").record;
    assert_eq!((record.operations, record.late), (33, 3));
    // A target for a collective of later versions is not taken for another.
    let mut strange = v1::Constraints::from(&wanted);
    strange.completions[0].collective = 200;
    let refused = fabric.propose("a", "c0", Some(strange)).unwrap().unwrap_err();
    assert_eq!(refused, RequestRefusal::UnknownCollective(200).into());
}
