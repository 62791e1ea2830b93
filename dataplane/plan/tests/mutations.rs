//! The checker against an oracle. Right programs run right under any schedule, and of damaged ones the checker refuses
//! each that can go wrong. `HARMONAIZE_SEED` chooses another seed, `HARMONAIZE_RUNS` how many programs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use common::execute::execute;
use common::{Case, Grouping, RETENTIONS, Reach, requests};
use harmonaize_abi::Rank;
use harmonaize_plan::{Buffer, Encoding, Operand, Participant, Plan, Program, Slot, Stage, StepKind};
use rand::seq::{IndexedMutRandom, IndexedRandom, SliceRandom};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn random_case(random: &mut ChaCha8Rng) -> Case {
    let ranks = random.random_range(1..=12);
    let groupings = [
        Grouping::PerHost(64),
        Grouping::PerHost(1),
        Grouping::PerHost(2),
        Grouping::PerHost(5),
        Grouping::PerHost(9),
        Grouping::Uneven,
        Grouping::Shuffled(random.random_range(0..1000)),
    ];
    let plan = groupings.choose(random).unwrap().plan(ranks);
    let request = *requests(ranks).choose(random).unwrap();
    let retention = [Some(RETENTIONS[0]), Some(RETENTIONS[1]), Some(RETENTIONS[2]), None];
    let retention = *retention.choose(random).unwrap();
    let scaled = request.collective.reduces() && !request.coded && random.random_bool(0.3);
    Case { plan, request, retention, reach: *Reach::ALL.choose(random).unwrap(), scaled }
}

/// The same group in another order.
fn reordered(case: &Case, random: &mut ChaCha8Rng) -> Case {
    let mut order = case.plan.order().to_vec();
    order.shuffle(random);
    Case { plan: Plan::new(case.plan.group().clone(), order).unwrap(), ..case.clone() }
}

#[test]
fn right_programs_run_right_and_again_in_another_order() {
    let first = setting("HARMONAIZE_SEED", 1);
    for seed in first..first + setting("HARMONAIZE_RUNS", 3000) {
        let random = &mut ChaCha8Rng::seed_from_u64(seed);
        let case = random_case(random);
        let programs = case.programs();
        let again = reordered(&case, random).programs();
        let again = random.random::<bool>().then_some(again.as_slice());
        if let Err(error) = execute(&case, &programs, again, random) {
            panic!("seed {seed}: {case:?}: {error}");
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Damage {
    DropStep,
    SwapNeighbours,
    SwapSteps,
    DropAfter,
    OtherPart,
    OtherBlock,
    OtherSlot,
    OtherRank,
    OtherPeer,
    RepeatSource,
    DropSource,
    DropDestination,
    ToggleLast,
    SmallerSlot,
    CommitEarlier,
    CopyLess,
    OtherForm,
}

const DAMAGES: [Damage; 17] = [
    Damage::DropStep,
    Damage::SwapNeighbours,
    Damage::SwapSteps,
    Damage::DropAfter,
    Damage::OtherPart,
    Damage::OtherBlock,
    Damage::OtherSlot,
    Damage::OtherRank,
    Damage::OtherPeer,
    Damage::RepeatSource,
    Damage::DropSource,
    Damage::DropDestination,
    Damage::ToggleLast,
    Damage::SmallerSlot,
    Damage::CommitEarlier,
    Damage::CopyLess,
    Damage::OtherForm,
];

/// Always wrong.
const FATAL: [Damage; 4] = [Damage::DropStep, Damage::RepeatSource, Damage::DropSource, Damage::ToggleLast];

fn swap(program: &mut Program, a: usize, b: usize) {
    program.steps.swap(a, b);
    for step in &mut program.steps {
        for after in &mut step.after {
            *after = match *after as usize {
                at if at == a => b as u32,
                at if at == b => a as u32,
                at => at as u32,
            };
        }
    }
}

fn drop_step(program: &mut Program, index: usize) {
    program.steps.remove(index);
    if index < program.copying as usize {
        program.copying -= 1;
    }
    for step in &mut program.steps {
        step.after.retain(|after| *after as usize != index);
        for after in &mut step.after {
            *after -= u32::from(*after as usize > index);
        }
    }
}

/// Damages a program, or says that it has nothing to damage in this way.
fn damage(case: &Case, program: &mut Program, kind: Damage, random: &mut ChaCha8Rng) -> Option<()> {
    let steps = program.steps.len();
    if steps == 0 {
        return None;
    }
    let index = random.random_range(0..steps);
    match kind {
        Damage::DropStep => drop_step(program, index),
        Damage::SwapNeighbours if index + 1 < steps => swap(program, index, index + 1),
        Damage::SwapSteps => {
            let other = random.random_range(0..steps);
            if other == index {
                return None;
            }
            swap(program, index, other);
        }
        Damage::SmallerSlot => *program.slots.choose_mut(random)? += 1,
        Damage::CopyLess if program.copying > 0 => program.copying -= 1,
        Damage::DropAfter => {
            let waiting: Vec<usize> =
                (0..steps).filter(|index| !program.steps[*index].after.is_empty()).collect();
            let step = &mut program.steps[*waiting.choose(random)?];
            let at = random.random_range(0..step.after.len());
            step.after.remove(at);
        }
        Damage::CommitEarlier => {
            let first = program.steps.iter().position(|step| step.committed)?;
            program.steps[first].committed = false;
        }
        Damage::ToggleLast => match &mut program.steps[index].kind {
            StepKind::Reduce { last } => *last = !*last,
            _ => return None,
        },
        Damage::RepeatSource => {
            let source = *program.steps[index].sources.choose(random)?;
            program.steps[index].sources.push(source);
        }
        Damage::DropSource => {
            let step = &mut program.steps[index];
            let at = random.random_range(0..step.sources.len().max(1));
            if step.sources.is_empty() {
                return None;
            }
            step.sources.remove(at);
        }
        Damage::DropDestination => {
            let step = &mut program.steps[index];
            if step.destinations.is_empty() {
                return None;
            }
            let at = random.random_range(0..step.destinations.len());
            step.destinations.remove(at);
        }
        _ => return damage_operand(case, program, kind, index, random),
    }
    Some(())
}

fn damage_operand(
    case: &Case,
    program: &mut Program,
    kind: Damage,
    index: usize,
    random: &mut ChaCha8Rng,
) -> Option<()> {
    let slots = program.slots.len() as u16;
    let step = &mut program.steps[index];
    let mut operands: Vec<&mut Operand> = step.sources.iter_mut().chain(&mut step.destinations).collect();
    match kind {
        Damage::OtherPart => {
            let whole_step = random.random();
            let part = operands.first()?.part;
            let (index, of) = match random.random_range(0..3) {
                0 if part.of > 1 => ((part.index + 1) % part.of, part.of),
                1 => (part.index, part.of + 1),
                _ if part.of > 1 => (part.index % (part.of - 1), part.of - 1),
                _ => return None,
            };
            let only = random.random_range(0..operands.len());
            for (at, operand) in operands.iter_mut().enumerate() {
                if whole_step || at == only {
                    (operand.part.index, operand.part.of) = (index, of);
                }
            }
        }
        Damage::OtherBlock => {
            let operand = operands.choose_mut(random)?;
            operand.part.block = (operand.part.block + 1) % case.plan.group().ranks().max(2);
        }
        Damage::OtherSlot if slots > 1 => {
            let mut staged: Vec<_> =
                operands.iter_mut().filter(|operand| matches!(operand.buffer, Buffer::Staging(_))).collect();
            let operand = staged.choose_mut(random)?;
            if let Buffer::Staging(Slot(slot)) = operand.buffer {
                operand.buffer = Buffer::Staging(Slot((slot + random.random_range(1..slots)) % slots));
            }
        }
        Damage::OtherRank => {
            let other = Rank(random.random_range(0..case.plan.group().ranks()));
            let operand = operands.choose_mut(random)?;
            operand.buffer = match operand.buffer {
                Buffer::Input(rank) if rank != other => Buffer::Input(other),
                Buffer::Output(rank) if rank != other => Buffer::Output(other),
                _ => return None,
            };
        }
        Damage::OtherForm => {
            let stages = [Stage::Contribution, Stage::Result, Stage::Moved];
            let forms = [Encoding::Exact].into_iter().chain(stages.map(Encoding::Coded)).collect::<Vec<_>>();
            let (form, whole_step) = (*forms.choose(random)?, random.random());
            let only = random.random_range(0..operands.len());
            for (at, operand) in operands.iter_mut().enumerate() {
                if whole_step || at == only {
                    operand.encoding = form;
                }
            }
        }
        Damage::OtherPeer => {
            let other = Participant(random.random_range(0..case.plan.participants()));
            let operand = operands.choose_mut(random)?;
            operand.buffer = match operand.buffer {
                Buffer::Peer(peer) if peer != other => Buffer::Peer(other),
                _ => return None,
            };
        }
        _ => return None,
    }
    Some(())
}

#[derive(Default, Debug)]
struct Tally {
    refused: u64,
    harmless: u64,
    /// Refused although no schedule tried went wrong.
    cautious: u64,
    /// Refused by the participant alone, though right beside the others.
    strict: u64,
}

#[test]
fn damaged_programs_are_refused_unless_they_are_harmless() {
    let first = setting("HARMONAIZE_SEED", 1);
    let mut tallies: BTreeMap<Damage, Tally> = BTreeMap::new();
    for seed in first..first + setting("HARMONAIZE_RUNS", 6000) {
        let random = &mut ChaCha8Rng::seed_from_u64(seed);
        let case = random_case(random);
        let mut programs = case.programs();
        let again = reordered(&case, random).programs();
        let victim = random.random_range(0..programs.len());
        let kind = *DAMAGES.choose(random).unwrap();
        let before = programs[victim].clone();
        if damage(&case, &mut programs[victim], kind, random).is_none() || programs[victim] == before {
            continue;
        }
        let outcome = case.check(&programs, 1);
        let alone = case.check_alone(&programs);
        assert!(
            alone.is_err() || outcome.is_ok(),
            "seed {seed}: {kind:?} at {victim} passed alone\n{case:?}"
        );
        let mut goes_wrong = None;
        for run in 0..if outcome.is_ok() { 40 } else { 100 } {
            // With a copy, the first steps must be the same in both attempts: a damaged one is run again as it is.
            let again = if programs[victim].copying > 0 { &programs } else { &again };
            let again = (run % 2 == 1).then_some(again.as_slice());
            let sane = outcome.is_ok() || kind == Damage::DropAfter;
            goes_wrong = goes_wrong.or_else(|| {
                if sane { execute(&case, &programs, again, random).err() } else { Some(String::new()) }
            });
        }
        let tally = tallies.entry(kind).or_default();
        match (&outcome, goes_wrong) {
            (Ok(_), Some(error)) => {
                panic!(
                    "seed {seed}: {kind:?} at participant {victim} passed the checker, but {error}\n{case:?}"
                )
            }
            (Ok(_), None) => {
                assert!(!FATAL.contains(&kind), "seed {seed}: {kind:?} at {victim} passed\n{case:?}");
                tally.harmless += 1;
                tally.strict += u64::from(alone.is_err());
            }
            (Err(_), Some(_)) => tally.refused += 1,
            (Err(_), None) => {
                tally.refused += 1;
                tally.cautious += 1;
            }
        }
    }
    println!("{tallies:#?}");
    if setting("HARMONAIZE_RUNS", 6000) >= 6000 {
        for kind in DAMAGES {
            let tally = &tallies[&kind];
            assert!(tally.refused > 0, "{kind:?} was never refused");
        }
    }
}

/// What no participant finds in its own program alone is in none of them, nor in what they make together. One program is damaged, or some
/// are, or all in the same way, which may fit together and be wrong.
#[test]
fn programs_that_pass_alone_pass_together() {
    let first = setting("HARMONAIZE_SEED", 1);
    let (mut refused, mut passed, mut strict) = (0, 0, 0);
    for seed in first..first + setting("HARMONAIZE_RUNS", 6000) {
        let random = &mut ChaCha8Rng::seed_from_u64(seed);
        let case = random_case(random);
        let whole = case.programs();
        let mut programs = whole.clone();
        match random.random_range(0..3) {
            0 => {
                let (kind, alike) = (*DAMAGES.choose(random).unwrap(), random.random());
                for program in &mut programs {
                    damage(&case, program, kind, &mut ChaCha8Rng::seed_from_u64(alike));
                }
            }
            1 => {
                for _ in 0..3 {
                    let (kind, victim) =
                        (*DAMAGES.choose(random).unwrap(), random.random_range(0..whole.len()));
                    damage(&case, &mut programs[victim], kind, random);
                }
            }
            // Of another request, or another order: right in itself.
            _ => {
                let other = match random.random() {
                    true => reordered(&case, random),
                    false => {
                        let requests = requests(case.plan.group().ranks());
                        Case { request: *requests.choose(random).unwrap(), ..case.clone() }
                    }
                };
                let victims = if random.random() { 0..whole.len() } else { 0..1 };
                for (program, other) in programs[victims].iter_mut().zip(other.programs()) {
                    *program = other;
                }
            }
        }
        let (together, alone) = (case.check(&programs, 1), case.check_alone(&programs));
        match (&together, &alone) {
            (Ok(report), Ok(usage)) => {
                assert_eq!(&report.usage, usage);
                passed += 1;
            }
            (Err(_), Err(_)) => refused += 1,
            (Ok(_), Err(_)) => strict += 1,
            (Err(error), Ok(_)) => panic!("seed {seed}: {error}, but each passed alone\n{case:?}"),
        }
    }
    println!("{refused} refused, {passed} passed, {strict} refused alone only");
}
