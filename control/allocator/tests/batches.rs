//! What it is worth to choose the batch anew all the time, in virtual time. It is rank-seconds to an end that is reached by samples'
//! worth.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_allocator::{BatchRange, LocalBatch, Noise, StepModel, best, candidates};

const RANKS: u32 = 16;
const RANGE: BatchRange =
    BatchRange { initial: 64, least: 64, most: 16_384, local_least: 4, local_most: 1024 };
/// Samples of the initial batch that the end takes.
const SAMPLES: f64 = 2e6;
/// How many times as long an exchange takes, for two minutes each.
const SLOWED: [f64; 4] = [1.0, 3.0, 1.0, 1.5];

fn goodput(model: &StepModel, noise: Noise, local: LocalBatch) -> f64 {
    let scale = f64::from(RANKS) * local.total() / f64::from(RANGE.initial);
    model.throughput(RANKS, RANKS, local) * noise.gain(scale) / scale
}

/// Rank-seconds to the end. The noise scale begins at 200 samples, and has grown so many times by then.
fn rank_seconds(growth: f64, choose: impl Fn(&StepModel, Noise) -> LocalBatch) -> f64 {
    let (mut seconds, mut progress) = (0_u32, 0.0);
    while progress < 1.0 {
        let model = StepModel {
            compute_base: 0.01,
            compute_sample: 0.001,
            hosts_base: 0.1 * SLOWED[seconds as usize / 120 % SLOWED.len()],
            hosts_worker: 0.0,
            local_base: 0.0,
            local_worker: 0.0,
            overlap: 1.0,
        };
        let noise = Noise { square: 1.0, variance: 200.0 / 64.0 * growth.powf(progress) };
        progress += goodput(&model, noise, choose(&model, noise)) / SAMPLES;
        seconds += 1;
    }
    f64::from(RANKS * seconds)
}

/// By how much the rank-seconds are below those of the best of all fixed batches.
fn saved(growth: f64) -> f64 {
    let chosen = rank_seconds(growth, |model, noise| best(model, noise, RANKS, RANKS, RANGE).unwrap().local);
    let fixed = candidates(RANKS, RANGE).map(|local| rank_seconds(growth, |_, _| local));
    1.0 - chosen / fixed.fold(f64::INFINITY, f64::min)
}

#[test]
fn batches_that_follow_noise_and_congestion_beat_every_fixed_one() {
    let saved = [1.0, 9.0, 100.0, 1000.0].map(saved);
    println!("{saved:?}");
    assert!(saved.is_sorted() && saved[0] > 0.0, "{saved:?}");
}
