//! What the checker says of wrong programs: who, which step, why.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use common::{Case, Grouping, Reach};
use harmonaize_abi::{Collective, Rank};
use harmonaize_plan::{
    Access, Algorithm, Buffer, CheckError, Encoding, Fault, Found, Operand, Part, Participant, Program,
    Request, Retention, Slot, Stage, Step, StepKind, Wait,
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

fn allreduce(per_host: u32, ranks: u32, retention: Retention, reach: Reach) -> Case {
    let request = common::plain(Collective::AllReduce, Rank(0));
    Case {
        plan: Grouping::PerHost(per_host).plan(ranks),
        request,
        retention: Some(retention),
        reach,
        scaled: false,
    }
}

fn fault(participant: u32, step: u32, fault: Fault) -> CheckError {
    CheckError::Step { participant: Participant(participant), step, fault }
}

/// A ring of single ranks whose steps receive and send at once.
fn fused(case: &Case) -> Vec<Program> {
    let mut programs = case.programs();
    for program in &mut programs {
        let mut steps: Vec<Step> = Vec::new();
        for step in program.steps.drain(..) {
            let forwards = matches!(step.sources[0].buffer, Buffer::Staging(_) | Buffer::Output(_));
            match steps.last_mut() {
                Some(last) if forwards => last.destinations.extend(step.destinations),
                _ => steps.push(Step { after: vec![], ..step }),
            }
        }
        // Every send is over before its slot is used again.
        for index in 2..steps.len() as u32 {
            steps[index as usize].after = vec![index - 2];
        }
        program.steps = steps;
    }
    programs
}

#[test]
fn a_fused_ring_needs_two_landing_slots() {
    let case = allreduce(1, 4, Retention::KeepInputs, Reach::Mapped);
    let programs = fused(&case);
    let wait = Wait::Credit(Participant(1));
    let deadlock = CheckError::Deadlock { participant: Participant(0), step: 1, wait };
    assert_eq!(case.check(&programs, 1), Err(deadlock));
    assert_eq!(case.check(&programs, 2).unwrap().messages, 24);
}

#[test]
fn nobody_moves_without_landing_slots() {
    let case = allreduce(1, 2, Retention::KeepInputs, Reach::Mapped);
    let wait = Wait::Credit(Participant(1));
    let deadlock = CheckError::Deadlock { participant: Participant(0), step: 0, wait };
    assert_eq!(case.check(&case.programs(), 0), Err(deadlock));
}

#[test]
fn a_rank_left_out_or_counted_twice_is_named() {
    let case = allreduce(2, 4, Retention::KeepInputs, Reach::Mapped);
    let mut programs = case.programs();
    let step =
        programs[1].steps.iter().position(|step| step.kind == StepKind::Reduce { last: true }).unwrap();
    let right = programs[1].steps[step].sources.clone();
    programs[1].steps[step].sources.pop();
    assert_eq!(case.check(&programs, 1), Err(fault(1, step as u32, Fault::Incomplete(Rank(3)))));
    programs[1].steps[step].sources = [right[0], right[1], right[2], right[1]].to_vec();
    assert_eq!(case.check(&programs, 1), Err(fault(1, step as u32, Fault::Twice(Rank(2)))));
}

#[test]
fn an_average_is_divided_once_and_at_the_end() {
    let case = allreduce(2, 4, Retention::KeepInputs, Reach::Mapped);
    let kinds = |programs: &mut Vec<Program>, from: bool, to: bool| -> u32 {
        let steps = &mut programs[0].steps;
        let at = steps.iter().position(|step| step.kind == StepKind::Reduce { last: from }).unwrap();
        steps[at].kind = StepKind::Reduce { last: to };
        at as u32
    };
    let mut early = case.programs();
    let step = kinds(&mut early, false, true);
    assert_eq!(case.check(&early, 1), Err(fault(0, step, Fault::Incomplete(Rank(2)))));
    let mut never = case.programs();
    kinds(&mut never, true, false);
    let unfinished = CheckError::Output { rank: Rank(0), block: 0, found: Found::Unfinished };
    assert_eq!(case.check(&never, 1), Err(unfinished));
}

#[test]
fn an_input_in_place_stays_until_the_acknowledgement() {
    let held = allreduce(1, 2, Retention::HoldOutputs, Reach::Mapped);
    let plain = allreduce(1, 2, Retention::KeepInputs, Reach::Mapped);
    let refused = held.check(&plain.programs(), 1).unwrap_err();
    let CheckError::Step { fault: Fault::Uncommitted(_), .. } = refused else { panic!("{refused}") };
    let copied = allreduce(1, 2, Retention::CopyInputs, Reach::Mapped);
    let refused = copied.check(&plain.programs(), 1).unwrap_err();
    assert_eq!(refused, fault(0, 0, Fault::Copied));
    let refused = plain.check(&copied.programs(), 1).unwrap_err();
    assert_eq!(refused, fault(0, 0, Fault::Copying));
}

/// In place a ReduceScatter's result lies where another attempt reads. A block that is gathered lies where it is, unless it is coded.
#[test]
fn in_place_the_own_block_alone_is_shared() {
    let case = |collective, coded, retention| {
        let request = harmonaize_plan::Request { coded, ..common::plain(collective, Rank(0)) };
        let plan = Grouping::PerHost(2).plan(6);
        Case { plan, request, retention: Some(retention), reach: Reach::Mapped, scaled: false }
    };
    for (collective, coded) in [(Collective::ReduceScatter, false), (Collective::AllGather, true)] {
        let held = case(collective, coded, Retention::HoldOutputs);
        let plain = case(collective, coded, Retention::KeepInputs);
        let refused = held.check(&plain.programs(), 1).unwrap_err();
        assert!(matches!(refused, CheckError::Step { fault: Fault::Uncommitted(_), .. }), "{refused}");
        assert!(held.check(&held.programs(), 1).is_ok());
    }
    let held = case(Collective::AllGather, false, Retention::HoldOutputs);
    let plain = case(Collective::AllGather, false, Retention::KeepInputs);
    assert!(held.check(&plain.programs(), 1).is_ok());
}

/// Who keeps its own block as it was, while the others decode it, ends with other bits.
#[test]
fn all_ranks_end_with_the_same_gathered_bits() {
    let request = harmonaize_plan::Request { coded: true, ..common::plain(Collective::AllGather, Rank(0)) };
    let (plan, retention) = (Grouping::PerHost(1).plan(3), Some(Retention::KeepInputs));
    let case = Case { plan, request, retention, reach: Reach::Mapped, scaled: false };
    let mut programs = case.programs();
    let steps = &mut programs[1].steps;
    let decodes = |step: &Step| {
        step.destinations.iter().any(|to| matches!(to.buffer, Buffer::Output(_)))
            && step.sources.iter().any(|from| matches!(from.buffer, Buffer::Staging(_)))
    };
    let own = steps.iter().position(decodes).unwrap();
    let (place, part) = (Buffer::Input(Rank(1)), Part::whole(0));
    steps[own].sources = vec![Operand::exact(place, part)];
    let different = CheckError::Output { rank: Rank(1), block: 1, found: Found::Different };
    assert_eq!(case.check(&programs, 1), Err(different));
}

/// The result of another block, or a block of another rank, is somewhere else.
#[test]
fn blocks_that_change_places_are_found() {
    let case = |collective| {
        let request = common::plain(collective, Rank(0));
        let (plan, retention) = (Grouping::PerHost(2).plan(4), Some(Retention::KeepInputs));
        Case { plan, request, retention, reach: Reach::Mapped, scaled: false }
    };
    let gather = case(Collective::AllGather);
    let mut programs = gather.programs();
    for operand in programs[0].steps.iter_mut().flat_map(|step| &mut step.destinations) {
        if matches!(operand.buffer, Buffer::Output(Rank(1))) && operand.part.block >= 2 {
            operand.part.block ^= 1;
        }
    }
    // Of another length, for all that the checker knows.
    let other = Part::whole(3);
    assert_eq!(gather.check(&programs, 1), Err(fault(0, 2, Fault::Part(other))));
    let scatter = case(Collective::ReduceScatter);
    let mut programs = scatter.programs();
    for program in &mut programs {
        for operand in program.steps.iter_mut().flat_map(|step| &mut step.destinations) {
            if let Buffer::Output(Rank(rank)) = operand.buffer {
                operand.buffer = Buffer::Output(Rank(rank ^ 1));
            }
        }
    }
    let refused = scatter.check(&programs, 1);
    assert!(matches!(refused, Err(CheckError::Step { fault: Fault::Part(_), .. })), "{refused:?}");
}

/// Ranks' counts may differ. The operands of a step, and both ends of a message, have the length of the same one.
#[test]
fn lengths_follow_from_the_same_count_at_both_ends() {
    let uneven = Collective::ALL.iter().copied().filter(|one| one.can_be_uneven());
    for collective in uneven {
        let request = common::plain(collective, Rank(0));
        let case = Case {
            plan: Grouping::PerHost(1).plan(4),
            request,
            retention: None,
            reach: Reach::Remote,
            scaled: false,
        };
        let right = case.programs();
        let talks = |operand: &Operand| matches!(operand.buffer, Buffer::Peer(_));
        let sender = right
            .iter()
            .position(|program| program.steps.iter().any(|step| step.destinations.iter().any(talks)));
        let sender = sender.unwrap();
        let at = right[sender].steps.iter().position(|step| step.destinations.iter().any(talks)).unwrap();
        let mut one = case.programs();
        let step = &mut one[sender].steps[at];
        let to = step.destinations.iter_mut().find(|operand| talks(operand)).unwrap();
        to.part.block = (to.part.block + 1) % collective.counts(4);
        let refused = case.check(&one, 1);
        assert!(matches!(refused, Err(CheckError::Step { fault: Fault::Part(_), .. })), "{refused:?}");
        let mut whole = case.programs();
        for operand in whole[sender]
            .steps
            .iter_mut()
            .flat_map(|step| step.sources.iter_mut().chain(&mut step.destinations))
        {
            if !matches!(operand.buffer, Buffer::Input(_) | Buffer::Output(_)) {
                operand.part.block = (operand.part.block + 1) % collective.counts(4);
            }
        }
        assert!(case.check(&whole, 1).is_err(), "{collective}");
        assert!(case.check_alone(&whole).is_err(), "{collective}");
    }
}

#[test]
fn memory_is_reached_as_it_can_be() {
    let mapped = allreduce(2, 4, Retention::KeepInputs, Reach::Mapped);
    let remote = allreduce(2, 4, Retention::KeepInputs, Reach::Remote);
    assert_eq!(remote.check(&mapped.programs(), 1), Err(fault(0, 0, Fault::Access(Rank(0)))));
    assert_eq!(mapped.check(&remote.programs(), 1), Err(fault(0, 0, Fault::Access(Rank(0)))));
    assert_eq!(Reach::Remote.of(Rank(0)), Access::Remote);
}

#[test]
fn staging_is_not_overwritten_while_it_is_sent() {
    let case = allreduce(2, 10, Retention::KeepInputs, Reach::Mapped);
    let mut programs = case.programs();
    let waiting = programs[3].steps.iter().position(|step| !step.after.is_empty()).unwrap();
    let sent = core::mem::take(&mut programs[3].steps[waiting].after)[0];
    assert_eq!(case.check(&programs, 1), Err(fault(3, waiting as u32, Fault::Unordered(sent))));
}

#[test]
fn a_slot_must_hold_what_is_put_there() {
    let case = allreduce(2, 4, Retention::KeepInputs, Reach::Mapped);
    let mut programs = case.programs();
    programs[1].slots[0] += 1;
    assert_eq!(case.check(&programs, 1), Err(fault(1, 0, Fault::SlotSize(Slot(0)))));
}

/// A coded exchange between four, the first step of participant 0 that `which` finds, and what becomes of it.
fn coded(which: impl Fn(&Step) -> bool, damage: impl Fn(&mut Step)) -> Result<(), Fault> {
    let mut case = allreduce(1, 4, Retention::KeepInputs, Reach::Mapped);
    case.request.coded = true;
    let mut programs = case.programs();
    assert_eq!(case.check(&programs, 1).unwrap().encodings, 2);
    let at = programs[0].steps.iter().position(which).unwrap();
    damage(&mut programs[0].steps[at]);
    match case.check(&programs, 1) {
        Ok(_) => Ok(()),
        Err(CheckError::Step { participant: Participant(0), fault, .. }) => Err(fault),
        // What is sent in another form is not what the receiver expects.
        Err(CheckError::Step { fault: Fault::Message(Participant(0)), .. }) => {
            Err(Fault::Message(Participant(0)))
        }
        Err(other) => panic!("{other}"),
    }
}

const CONTRIBUTION: Encoding = Encoding::Coded(Stage::Contribution);
const RESULT: Encoding = Encoding::Coded(Stage::Result);

fn encodes(to: Encoding) -> impl Fn(&Step) -> bool {
    move |step| {
        let exact = step.sources.first().is_some_and(|from| from.encoding == Encoding::Exact);
        exact && step.kind == StepKind::Move && step.destinations.first().is_some_and(|of| of.encoding == to)
    }
}

#[test]
fn coded_elements_are_what_the_engine_can_do() {
    let none = |_: &mut Step| {};
    assert_eq!(coded(encodes(CONTRIBUTION), none), Ok(()));
    // Sent without a slot to encode into; to two slots; kept in one form and sent in another.
    let unkept = |step: &mut Step| step.destinations.truncate(0);
    assert_eq!(coded(encodes(CONTRIBUTION), unkept), Err(Fault::Destinations));
    let unkept = |step: &mut Step| step.destinations = step.destinations.split_off(1);
    assert_eq!(coded(encodes(CONTRIBUTION), unkept), Err(Fault::Encoding));
    let twice = |step: &mut Step| {
        let first = step.destinations[0];
        step.destinations.push(Operand { buffer: Buffer::Staging(Slot(4)), ..first });
    };
    assert_eq!(coded(encodes(CONTRIBUTION), twice), Err(Fault::Encoding));
    let mixed = |step: &mut Step| step.destinations[1].encoding = Encoding::Exact;
    assert_eq!(coded(encodes(CONTRIBUTION), mixed), Err(Fault::Encoding));
    // A stage that it is not.
    let staged = |form| move |step: &mut Step| step.destinations.iter_mut().for_each(|to| to.encoding = form);
    assert_eq!(coded(encodes(CONTRIBUTION), staged(RESULT)), Err(Fault::Stage));
    assert_eq!(coded(encodes(RESULT), staged(CONTRIBUTION)), Err(Fault::Stage));
    // Added to a sum that is somewhere else, or from staging.
    let adds = |step: &Step| step.sources.iter().any(|from| from.encoding == CONTRIBUTION);
    let elsewhere = |step: &mut Step| step.destinations[0].buffer = Buffer::Staging(Slot(4));
    assert_eq!(coded(adds, elsewhere), Err(Fault::Encoding));
    let turned = |step: &mut Step| step.sources.reverse();
    assert_eq!(coded(adds, turned), Err(Fault::Encoding));
    let result = |step: &mut Step| step.sources[1].encoding = RESULT;
    assert_eq!(coded(adds, result), Err(Fault::Encoding));
    // Decoded on the way to a peer.
    let decodes = |step: &Step| {
        step.sources.first().is_some_and(|from| from.encoding == RESULT)
            && step.destinations.iter().all(|to| to.encoding == Encoding::Exact)
    };
    let forwarded = |step: &mut Step| {
        let part = step.sources[0].part;
        step.destinations.push(Operand::exact(Buffer::Peer(Participant(1)), part));
    };
    assert_eq!(coded(decodes, forwarded), Err(Fault::Encoding));
    let read = |step: &mut Step| step.sources[0].encoding = Encoding::Exact;
    assert_eq!(coded(decodes, read), Err(Fault::Undefined));
}

#[test]
fn all_ranks_get_what_was_encoded_the_owner_too() {
    let mut case = allreduce(1, 4, Retention::KeepInputs, Reach::Mapped);
    case.request.coded = true;
    let mut programs = case.programs();
    // The owner's outputs take the exact sum.
    let own = programs[0].steps.iter().position(encodes(RESULT)).unwrap();
    let sum = programs[0].steps[own].sources[0];
    let decodes = |step: &Step| step.destinations.iter().any(|to| matches!(to.buffer, Buffer::Output(_)));
    let at = programs[0].steps.iter().position(decodes).unwrap();
    programs[0].steps[at].sources = vec![sum];
    let different = |rank| CheckError::Output { rank: Rank(rank), block: 0, found: Found::Different };
    assert_eq!(case.check(&programs, 1), Err(different(1)));
    // In what is not coded, nothing is.
    let programs = case.programs();
    case.request.coded = false;
    assert_eq!(case.check(&programs, 1), Err(fault(0, 0, Fault::Encoding)));
}

#[test]
fn what_is_moved_is_encoded_once_and_never_added() {
    const MOVED: Encoding = Encoding::Coded(Stage::Moved);
    let run = |case: &Case, from: Encoding, to: Encoding| {
        let mut programs = case.programs();
        let operands = programs.iter_mut().flat_map(|program| &mut program.steps);
        for operand in operands.flat_map(|step| step.sources.iter_mut().chain(&mut step.destinations)) {
            if operand.encoding == from {
                operand.encoding = to;
            }
        }
        case.check(&programs, 1).map(|report| report.encodings)
    };
    let mut sum = allreduce(1, 4, Retention::KeepInputs, Reach::Mapped);
    let mut moved = sum.clone();
    moved.request.collective = Collective::AllToAll;
    (sum.request.coded, moved.request.coded) = (true, true);
    assert_eq!(run(&moved, MOVED, MOVED), Ok(1));
    // A contribution is decoded by being added alone; a sum is no input, and an input no sum.
    assert!(matches!(run(&moved, MOVED, CONTRIBUTION), Err(CheckError::Step { fault: Fault::Encoding, .. })));
    assert!(matches!(run(&moved, MOVED, RESULT), Err(CheckError::Step { fault: Fault::Stage, .. })));
    assert!(matches!(run(&sum, RESULT, MOVED), Err(CheckError::Step { fault: Fault::Stage, .. })));
    moved.request.coded = false;
    let exact = moved.programs();
    moved.request.coded = true;
    let coded = moved.programs();
    moved.request.coded = false;
    assert!(moved.check(&exact, 1).is_ok());
    assert!(matches!(moved.check(&coded, 1), Err(CheckError::Step { fault: Fault::Encoding, .. })));
}

#[test]
fn garbage_is_refused_without_a_panic() {
    let case = allreduce(2, 6, Retention::HoldOutputs, Reach::Mixed);
    for seed in 0..3000 {
        let random = &mut ChaCha8Rng::seed_from_u64(seed);
        let programs: Vec<Program> = (0..3).map(|_| garbage(random)).collect();
        let landing_slots = random.random_range(0..3);
        assert!(case.check(&programs, landing_slots).is_err(), "seed {seed}");
    }
}

fn garbage(random: &mut ChaCha8Rng) -> Program {
    let number = |random: &mut ChaCha8Rng| match random.random_range(0..12) {
        0 => u32::MAX,
        1 => u32::MAX - 1,
        small => small % 4,
    };
    let operands = |random: &mut ChaCha8Rng, most: usize, index: u32, of: u32| -> Vec<Operand> {
        (0..random.random_range(0..=most))
            .map(|_| {
                let place = match random.random_range(0..4) {
                    0 => Buffer::Input(Rank(number(random))),
                    1 => Buffer::Output(Rank(number(random))),
                    2 => Buffer::Staging(Slot(number(random) as u16)),
                    _ => Buffer::Peer(Participant(number(random))),
                };
                let form =
                    if random.random_ratio(1, 20) { Encoding::Coded(Stage::Result) } else { Encoding::Exact };
                Operand { buffer: place, part: Part { block: number(random) % 5, index, of }, encoding: form }
            })
            .collect()
    };
    let steps = (0..random.random_range(1..6))
        .map(|_| {
            let (index, of) = if random.random() { (0, 1) } else { (number(random), number(random)) };
            let kinds = [
                StepKind::Move,
                StepKind::Fetch,
                StepKind::Store,
                StepKind::Reduce { last: random.random() },
            ];
            Step {
                kind: kinds[random.random_range(0..4)],
                sources: operands(random, 3, index, of),
                destinations: operands(random, 3, index, of),
                after: (0..random.random_range(0..2)).map(|_| number(random)).collect(),
                committed: random.random_ratio(1, 8),
            }
        })
        .collect();
    let slots = (0..random.random_range(0..4)).map(|_| number(random)).collect();
    Program { steps, slots, copying: if random.random_ratio(1, 6) { number(random) } else { 0 } }
}

/// A program that is right otherwise sends inputs from where they lie. Where they are to be multiplied, that is refused.
#[test]
fn an_input_that_is_sent_before_it_is_multiplied_is_refused() {
    for (collective, algorithm) in [
        (Collective::AllReduce, Algorithm::Ring),
        (Collective::AllReduce, Algorithm::OneShot),
        (Collective::AllReduce, Algorithm::TwoShot),
        (Collective::ReduceScatter, Algorithm::Ring),
        (Collective::ReduceScatter, Algorithm::OneShot),
        (Collective::Reduce, Algorithm::Ring),
        (Collective::AllReduce, Algorithm::RecursiveDoubling),
        (Collective::AllReduce, Algorithm::RecursiveHalving),
        (Collective::AllReduce, Algorithm::Hierarchical),
        (Collective::Reduce, Algorithm::BinomialTree),
    ] {
        let request = Request { collective, root: Rank(0), coded: false, algorithm };
        let retention = Some(Retention::KeepInputs);
        let case = Case {
            plan: Grouping::PerHost(1).plan(3),
            request,
            retention,
            reach: Reach::Mapped,
            scaled: false,
        };
        let programs = case.programs();
        case.check(&programs, 1).unwrap();
        let scaled = Case { scaled: true, ..case };
        let error = scaled.check(&programs, 1).unwrap_err();
        assert!(matches!(error, CheckError::Step { fault: Fault::Unscaled, .. }), "{request:?}: {error}");
        scaled.check(&scaled.programs(), 1).unwrap();
    }
}
