//! Tests of codes that add. What hosts say that they lose bounds what their sum lost, whether their elements are
//! alike or not.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_codec::{Code, Squares, Store, shared_spread};
use harmonaize_kernels::Isa;
use harmonaize_kernels::codes::{add_shared, decode, encode_shared, ranges};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const ELEMENTS: usize = 10 * 1024;
const BLOCK: usize = 1024;
const BITS: usize = 4;

/// Normal numbers, by the sum of twelve uniform ones; with heavy tails where `heavy`.
fn elements(random: &mut ChaCha8Rng, heavy: bool) -> Vec<f32> {
    let one = |_| {
        let normal = (0..12).map(|_| random.random::<f32>()).sum::<f32>() - 6.0;
        if heavy { normal / (random.random::<f32>() + 2e-3).sqrt() } else { normal }
    };
    (0..ELEMENTS).map(one).collect()
}

/// What hosts lose by themselves, added up, and what their sum lost; both over the squares of all.
fn lost(inputs: &[Vec<f32>], seed: u64) -> (f64, f64) {
    let isa = Isa::detect();
    let mut greatest = vec![0_f32; ELEMENTS.div_ceil(BLOCK)];
    for input in inputs {
        let mut own = vec![0_f32; greatest.len()];
        ranges(isa, BLOCK, input.as_slice().into(), own.as_mut_slice().into()).unwrap();
        greatest.iter_mut().zip(&own).for_each(|(most, own)| *most = most.max(*own));
    }
    let [one, all] = [1, inputs.len()].map(|ranks| Code::Shared { bits: BITS, block: BLOCK, ranks });
    let mut total = vec![0_u8; all.bytes(ELEMENTS).unwrap()];
    let mut told = Squares::default();
    for (host, input) in inputs.iter().enumerate() {
        let mut own = vec![0_u8; one.bytes(ELEMENTS).unwrap()];
        let (of_all, noise) = (greatest.as_slice().into(), seed ^ (host as u64 + 1) << 32);
        let to = own.as_mut_slice().into();
        told = told
            .and(encode_shared(isa, BITS, BLOCK, seed, noise, of_all, input.as_slice().into(), to).unwrap());
        let (from, to) = (own.as_slice().into(), total.as_mut_slice().into());
        add_shared(isa, BITS, BLOCK, inputs.len(), ELEMENTS, from, host == 0, to).unwrap();
    }
    let mut sum = vec![0_f32; ELEMENTS];
    decode(isa, all, seed, total.as_slice().into(), Store::Set, sum.as_mut_slice().into()).unwrap();
    let right = |at: usize| inputs.iter().map(|input| f64::from(input[at])).sum::<f64>();
    let error: f64 = sum.iter().enumerate().map(|(at, value)| (f64::from(*value) - right(at)).powi(2)).sum();
    (told.relative(), error / told.signal)
}

/// Hosts whose blocks differ in their norms, as the benchmark of aggregation has them. The greatest norm is the range of all.
#[test]
fn four_hosts_with_heavy_tails_keep_the_bar() {
    const SEEDS: u64 = 24;
    let mut sums = [0.0; 2];
    for seed in 0..SEEDS {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut one = |_| (random.random::<f32>() - 0.5) / (random.random::<f32>() + 2e-3).sqrt();
        let inputs: Vec<Vec<f32>> = (0..4).map(|_| (0..ELEMENTS).map(&mut one).collect()).collect();
        let (told, lost) = lost(&inputs, seed);
        sums = [sums[0] + told, sums[1] + lost];
    }
    let [told, lost] = sums.map(|sum| sum / SEEDS as f64);
    println!("{lost:.5} lost in the mean of {SEEDS} seeds, {told:.5} told");
    assert!(lost <= 0.0208 && told <= 0.0208, "seeds 0 to {SEEDS}: lost {lost}, told {told}");
}

#[test]
fn hosts_know_what_their_sum_lost() {
    let mut random = ChaCha8Rng::seed_from_u64(5);
    for (hosts, heavy) in [(2, false), (4, false), (4, true), (16, false), (64, true)] {
        let apart: Vec<Vec<f32>> = (0..hosts).map(|_| elements(&mut random, heavy)).collect();
        let alike = vec![apart[0].clone(); hosts];
        for (inputs, independent) in [(apart, true), (alike, false)] {
            let (told, lost) = lost(&inputs, u64::from(heavy) + 7);
            println!("{hosts} hosts, heavy {heavy}, alike {}: {lost:.5} lost, {told:.5} told", !independent);
            let bound = told * shared_spread(BITS as u8, hosts as u32);
            assert!(lost <= bound, "{hosts} hosts lost {lost}, and {bound} was reckoned with");
            // The range is that of the host with the greatest norm, which others pay for.
            assert!(told <= if heavy { 0.05 } else { 0.0225 }, "{hosts} hosts: {told}");
            assert!(!independent || heavy || hosts != 4 || lost <= 0.0205, "{hosts} hosts lost {lost}");
        }
    }
}
