//! The budget is kept by every operation. The controller chooses a codec by rates that come and go and by what encoders measured. A
//! compressed AllReduce runs on tensors that change by the minute, and what it lost is found against the exact sum.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // tests alone

mod common;

use common::{Part, normal, outlook};
use harmonaize_codec::{Budget, Codec, Controller, Level, Squares, Terms};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;
use std::time::Duration;

const PARTICIPANTS: usize = 4;
const ELEMENTS: usize = 4096;
/// Seconds from one operation that is looked at to the next: minutes pass.
const STEP: f64 = 4.0;
const OPERATIONS: usize = 60;
const TRACES: u64 = 8;

/// What control thinks that agents' codecs lose, each element coded twice.
fn levels() -> Vec<Level> {
    let level = |(_, codec): &(&str, Codec)| {
        let level = Level::typical(*codec);
        let times = if codec.is_unbiased() { 2.0 } else { PARTICIPANTS as f64 + 1.0 };
        Level { loss: level.loss * times, ..level }
    };
    Codec::NAMED.iter().skip(1).map(level).collect()
}

/// Bytes a second at a time: each trace has a link, which is steady, in steps or wanders.
fn rate(random: &mut ChaCha8Rng, trace: u64, time: f64, walk: &mut f64) -> f64 {
    let link = [1.25e7, 1.25e8, 1.25e9, 1.25e10][trace as usize % 4];
    *walk = (*walk * random.random_range(0.6..1.6)).clamp(0.01, 1.0);
    link * match trace % 3 {
        0 => 1.0,
        1 => [1.0, 0.02, 0.3][(time / 30.0) as usize % 3],
        _ => *walk,
    }
}

/// A rank's tensor in the minute of that number. It has tails, outliers, zeros, tensors alike at all ranks, and a part that is far larger
/// than the others.
fn tensor(seed: u64, minute: u64, rank: usize) -> Vec<f32> {
    let mut random = ChaCha8Rng::seed_from_u64(seed << 4 | if minute % 7 == 4 { 0 } else { 1 + rank as u64 });
    let mut one = || match minute % 7 {
        1 => normal(&mut random) / random.random_range(0.002..1.0_f32),
        2 => normal(&mut random).powi(9),
        3 if random.random_bool(0.999) => 1e-4 * normal(&mut random),
        _ => normal(&mut random),
    };
    let mut values: Vec<f32> = (0..ELEMENTS).map(|_| one()).collect();
    match minute % 7 {
        5 => values.chunks_mut(256).skip(rank % 2).step_by(2).for_each(|block| block.fill(0.0)),
        6 => values[..256].iter_mut().for_each(|value| *value *= 1e5),
        _ => {}
    }
    values
}

#[test]
fn the_controller_never_passes_the_budget() {
    let levels = levels();
    let (mut ran, mut refused, mut would, mut changes) = (BTreeMap::<&str, usize>::new(), 0, 0, 0);
    for trace in 0..TRACES {
        for most in [1e-6, 1e-4, 1e-3, 0.02, 0.3] {
            let budget = Budget::Vnmse(most);
            let mut random = ChaCha8Rng::seed_from_u64(trace);
            let (mut controller, mut current, mut walk) = (Controller::default(), Codec::EXACT, 0.5);
            for operation in 0..OPERATIONS {
                let time = STEP * operation as f64;
                let (now, rate) = (Duration::from_secs_f64(time), rate(&mut random, trace, time, &mut walk));
                let outlook = outlook(rate);
                controller.handle_outlook(now, &outlook);
                let codec = controller.choose(now, &budget, current, &levels, &outlook).codec;
                if codec != current {
                    (current, changes) = (codec, changes + 1);
                    controller.handle_change(now);
                }
                *ran.entry(codec.name()).or_default() += 1;
                let terms = Terms {
                    codec,
                    finer: controller.finer(&budget, codec, &levels, &outlook),
                    max_error: budget.max_error_of(codec),
                    participants: PARTICIPANTS as u32,
                };
                let seed = trace << 32 | operation as u64;
                let minute = (time / 20.0) as u64 + trace;
                let input = &mut |rank| tensor(seed, minute, rank);
                let part = Part::new(terms, &[1; PARTICIPANTS], ELEMENTS, input);
                let outcome = part.run(seed, operation % 2 == 0);
                let lost = |outcome| {
                    let lost = part.error(outcome, operation % 2 == 0) / part.signal;
                    // Beside what is coded, sums in f32 round.
                    (lost.sqrt() - 2e-6).max(0.0).powi(2)
                };
                let what = format!("trace {trace}, within {most}, operation {operation} by {}", codec.name());
                assert!(lost(&outcome) <= most, "{what} lost {}", lost(&outcome));
                let measured = Squares { error: outcome.measured, ..outcome.stated }.relative();
                assert!(measured <= most, "{what} was said to lose {measured}");
                if outcome.refused > 0 && !codec.is_lossless() {
                    refused += 1;
                    // What the refusals were for.
                    let part = Part { terms: Terms { max_error: None, ..terms }, ..part.clone() };
                    would += usize::from(lost(&part.run(seed, operation % 2 == 0)) > most);
                }
                // As an agent's receipt has it.
                if let Some(level) = levels.iter().find(|level| level.codec == codec) {
                    let ratio = outcome.bytes as f64 / (4 * ELEMENTS * PARTICIPANTS) as f64;
                    controller.handle_outcome(now, level, measured, ratio);
                }
            }
        }
    }
    println!("operations by codec: {ran:?}; {changes} changes, {refused} with parts that went exact, ");
    println!("of which {would} would have passed the budget");
    // Else nothing was tried.
    assert!(ran.len() >= 5 && changes > 20 && refused > 20 && would > 0, "{ran:?}");
}
