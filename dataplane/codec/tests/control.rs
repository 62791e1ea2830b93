//! The controller over bandwidth traces, budgets, and error feedback over steps.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use harmonaize_abi::{View, ViewMut};
use harmonaize_codec::{Budget, Codec, Controller, Feedback, Level, Outlook, Squares, Store, decode};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// What levels took on one core of a server, and what they lose of normal tensors.
fn levels() -> Vec<Level> {
    [
        (Codec::BF16, 0.5, 15e9, 17e9, 3e-6),
        (Codec::INT8, 0.254, 10e9, 19e9, 1e-4),
        (Codec::rotated(4), 0.126, 4e9, 8e9, 0.0096),
        (Codec::rotated(2), 0.063, 5e9, 8e9, 0.134),
    ]
    .map(|(codec, ratio, encode, decode, loss)| Level { codec, ratio, encode, decode, loss })
    .to_vec()
}

const OPERATION: f64 = 64e6;

fn outlook(goodput: f64) -> Outlook {
    Outlook {
        wire: 1.5 * OPERATION,
        encoded: 2.0 * OPERATION,
        decoded: 2.0 * OPERATION,
        rate: goodput,
        coded_rate: goodput,
        hidden: 0.0,
        chunks: 64.0,
    }
}

/// Bytes a second of each of 300 operations: steady, in steps, in teeth, wandering, and with others' bursts.
fn trace(seed: u64) -> Vec<f64> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let most = 1.25e8 * 4_f64.powi(random.random_range(0..5));
    let period = random.random_range(15..80_usize);
    let mut walk = 0.5_f64;
    (0..300)
        .map(|step| {
            let share = match seed % 5 {
                0 => 1.0,
                1 => [1.0, 0.1, 0.5][step / period % 3],
                2 => 0.05 + 0.95 * (step % period) as f64 / period as f64,
                3 => {
                    walk = (walk * random.random_range(0.85..1.17)).clamp(0.02, 1.0);
                    walk
                }
                _ => {
                    if step % period < period / 4 {
                        0.08
                    } else {
                        0.9
                    }
                }
            };
            most * share * random.random_range(0.95..1.05)
        })
        .collect()
}

#[test]
fn over_many_traces_it_is_as_good_as_the_best_fixed_level_in_hindsight() {
    let levels = levels();
    for seed in 0..40 {
        for most in [1e-3, 0.02] {
            let trace = trace(seed);
            let allowed = |level: &&Level| level.loss <= most;
            let total = |level: Option<&Level>| trace.iter().map(|g| outlook(*g).time(level)).sum::<f64>();
            let best =
                levels.iter().filter(allowed).map(|level| total(Some(level))).fold(total(None), f64::min);
            let mut controller = Controller::new(Budget::Vnmse(most), &levels);
            let (mut sum, mut before) = (0.0, trace[0]);
            for goodput in &trace {
                // The choice knows what went before alone.
                let codec = controller.choose(&outlook(before));
                let level = levels.iter().find(|level| level.codec == codec);
                assert!(level.is_none_or(|level| level.loss <= most), "seed {seed}: {codec:?}");
                sum += outlook(*goodput).time(level);
                before = *goodput;
            }
            assert!(sum <= 1.05 * best, "seed {seed}, budget {most}: {sum} s, the best fixed level {best} s");
        }
    }
}

#[test]
fn a_fast_network_stays_exact_and_a_slow_one_does_not() {
    let mut controller = Controller::new(Budget::Vnmse(0.2), &levels());
    for _ in 0..10 {
        assert_eq!(controller.choose(&outlook(50e9)), Codec::EXACT);
    }
    let mut controller = Controller::new(Budget::Vnmse(0.2), &levels());
    assert_eq!(controller.choose(&outlook(1e8)), Codec::rotated(2));
    // What the tenant does not wait for is not worth any loss.
    let mut controller = Controller::new(Budget::Vnmse(0.2), &levels());
    assert_eq!(controller.choose(&Outlook { hidden: 10.0, ..outlook(1e8) }), Codec::EXACT);
}

#[test]
fn budgets_bound_the_choice() {
    let choice = |budget| Controller::new(budget, &levels()).choose(&outlook(1e8));
    assert_eq!(choice(Budget::Exact), Codec::EXACT);
    assert_eq!(choice(Budget::MatchBf16), Codec::BF16);
    assert_eq!(choice(Budget::Vnmse(1e-3)), Codec::INT8);
    assert_eq!(choice(Budget::Codecs(vec![Codec::INT8])), Codec::INT8);
}

#[test]
fn what_broke_the_budget_rests_and_small_changes_change_nothing() {
    let mut controller = Controller::new(Budget::Vnmse(0.02), &levels());
    assert_eq!(controller.choose(&outlook(1e8)), Codec::rotated(4));
    controller.lost(Codec::rotated(4), Squares { error: 0.03, signal: 1.0 });
    assert_eq!(controller.choose(&outlook(1e8)), Codec::INT8);
    controller.lost(Codec::INT8, Squares { error: f64::NAN, signal: f64::NAN });
    assert_eq!(controller.choose(&outlook(1e8)), Codec::BF16);
    // Around the rate at which two levels take the same time, the choice made stays.
    let mut controller = Controller::new(Budget::Vnmse(1e-3), &levels());
    let choices: Vec<Codec> =
        (0..50).map(|step| controller.choose(&outlook(if step % 2 == 0 { 3.9e9 } else { 4.1e9 }))).collect();
    assert!(choices.windows(2).filter(|pair| pair[0] != pair[1]).count() <= 1, "{choices:?}");
}

#[test]
fn a_segment_that_would_break_the_budget_goes_exact() {
    let tensor: Vec<f32> = (0..1000).map(|i| (i as f32).sin()).collect();
    let mut chunk = vec![0; Codec::EXACT.most_bytes(1000).unwrap()];
    let mut encode = |budget: Budget, tensor: &[f32]| {
        budget.encode(Codec::INT4, 1, View::from(tensor), ViewMut::from(&mut chunk[..])).unwrap()
    };
    assert_eq!(encode(Budget::Vnmse(0.1), &tensor).0, Codec::INT4);
    let (codec, encoded, refused) = encode(Budget::Vnmse(1e-4), &tensor);
    assert_eq!((codec, encoded.squares), (Codec::EXACT, Squares::default()));
    assert!(refused.unwrap().relative() > 1e-4);
    assert_eq!(encode(Budget::Vnmse(0.5), &[1.0, f32::NAN]).0, Codec::EXACT);
    assert_eq!(encode(Budget::Exact, &tensor).2, None);
}

#[test]
fn feedback_sends_over_all_steps_what_was_given_but_for_one_steps_error() {
    const STEPS: u64 = 30;
    let mut random = ChaCha8Rng::seed_from_u64(5);
    let mut feedback = Feedback::default();
    let mut chunk = vec![0; Codec::EXACT.most_bytes(2000).unwrap()];
    let (mut given, mut sent) = (vec![0_f64; 2000], vec![0_f32; 2000]);
    for step in 0..STEPS {
        let tensor: Vec<f32> = (0..2000).map(|_| random.random_range(-1.0..1.0)).collect();
        let (from, to) = (View::from(&tensor[..]), ViewMut::from(&mut chunk[..]));
        feedback.encode(7, Codec::rotated(2), step, from, to).unwrap();
        decode(View::from(&chunk[..]), Store::Add, ViewMut::from(&mut sent[..])).unwrap();
        given.iter_mut().zip(&tensor).for_each(|(sum, value)| *sum += f64::from(*value));
    }
    for ((given, sent), left) in given.iter().zip(&sent).zip(feedback.left_out()) {
        assert!((given - f64::from(*sent) - f64::from(*left)).abs() < 1e-4, "seed 5: {given} {sent} {left}");
    }
    // Another epoch, and another shape, begin anew; a NaN is not carried on.
    let tensor = [0.25_f32; 16];
    let mut exact = |epoch, tensor: &[f32]| {
        let (from, to) = (View::from(tensor), ViewMut::from(&mut chunk[..]));
        feedback.encode(epoch, Codec::INT8, 0, from, to).unwrap();
        feedback.left_out().to_vec()
    };
    assert_eq!(exact(8, &tensor), [0.0; 16]);
    assert_eq!(exact(8, &[f32::NAN; 16]), [0.0; 16]);
    assert_eq!(exact(9, &[1.0; 5]), [0.0; 5]);
}
