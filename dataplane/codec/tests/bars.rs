//! How much each codec loses, against what it must reach, on tensors from printed seeds.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use harmonaize_abi::{View, ViewMut};
use harmonaize_codec::{Code, Codec, Grid, Level, Rounding, Store, decode, encode};
use harmonaize_kernels::Isa;
use harmonaize_kernels::codes;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const SEEDS: std::ops::Range<u64> = 0..5;
const ELEMENTS: usize = 1 << 17;

/// A normal number (Box and Muller).
fn normal(random: &mut ChaCha8Rng) -> f64 {
    let radius = (-2.0 * (1.0 - random.random::<f64>()).ln()).sqrt();
    radius * (std::f64::consts::TAU * random.random::<f64>()).cos()
}

fn gaussian(seed: u64) -> Vec<f32> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    (0..ELEMENTS).map(|_| (normal(&mut random) * 1e-3) as f32).collect()
}

/// Student's t with 3 degrees of freedom: heavy tails, finite variance.
fn heavy(seed: u64) -> Vec<f32> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut one = || {
        let chi: f64 = (0..3).map(|_| normal(&mut random).powi(2)).sum();
        normal(&mut random) / (chi / 3.0).sqrt()
    };
    (0..ELEMENTS).map(|_| (one() * 1e-3) as f32).collect()
}

/// The error of what comes back over the tensor, both by hand, having checked what the encoder says of it.
fn vnmse(codec: Codec, seed: u64, tensor: &[f32]) -> f64 {
    let mut chunk = vec![0; codec.max_bytes(tensor.len()).unwrap()];
    let told = encode(codec, seed, View::from(tensor), ViewMut::from(&mut chunk[..])).unwrap();
    let mut back = vec![0_f32; tensor.len()];
    decode(View::from(&chunk[..told.bytes]), Store::Set, ViewMut::from(&mut back[..])).unwrap();
    let square = |value: f64| value * value;
    let error: f64 = tensor.iter().zip(&back).map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
    let signal: f64 = tensor.iter().map(|a| square(f64::from(*a))).sum();
    let near = |told: f64, found: f64| (told - found).abs() <= 1e-4 * found;
    assert!(near(told.squares.signal, signal), "{codec:?}, seed {seed}: {:?}, and {signal}", told.squares);
    assert!(near(told.squares.error, error), "{codec:?}, seed {seed}: {:?}, and {error}", told.squares);
    error / signal
}

/// What control takes codecs to lose before anything is measured: no more than a half off on heavy tails.
#[test]
fn typical_losses_are_typical() {
    let mut off = Vec::new();
    let fixed = |(_, codec): &&(&str, Codec)| matches!(codec, Codec::Fixed(_));
    for (name, codec) in Codec::NAMED.iter().skip(1).filter(fixed) {
        let lost = SEEDS.map(|seed| vnmse(*codec, seed, &heavy(seed))).sum::<f64>() / SEEDS.count() as f64;
        let told = Level::typical(*codec).loss;
        println!("{name}: {lost:.3e}, and {told:.3e} is told");
        if lost > told * 1.5 || lost < told / 1.5 {
            off.push(*name);
        }
    }
    assert!(off.is_empty(), "{off:?}");
}

#[test]
fn rotated_codes_keep_their_bars_on_any_tensor() {
    for (bits, bar) in [(1, 0.58), (2, 0.14), (3, 0.037), (4, 0.0105)] {
        for block in [256, 1024, 4096] {
            for seed in SEEDS {
                for (name, tensor) in [("gaussian", gaussian(seed)), ("heavy", heavy(seed))] {
                    let lost = vnmse(Codec::Fixed(Code::Rotated { bits, block }), seed, &tensor);
                    assert!(lost <= bar, "{bits} bits in {block} of {name}, seed {seed}: {lost}, not {bar}");
                }
            }
        }
    }
}

#[test]
fn int8_in_blocks_of_256_keeps_its_bar_on_heavy_tails() {
    for seed in SEEDS {
        let lost = vnmse(Codec::INT8, seed, &heavy(seed));
        assert!(lost <= 1e-3, "seed {seed}: {lost}");
    }
}

#[test]
fn rotation_buys_much_over_blocks_at_4_bits_on_heavy_tails() {
    for seed in SEEDS {
        let tensor = heavy(seed);
        let (plain, rotated) = (
            vnmse(Codec::INT4, seed, &tensor),
            vnmse(Codec::Fixed(Code::Rotated { bits: 4, block: 1024 }), seed, &tensor),
        );
        assert!(rotated * 3.0 < plain, "seed {seed}: {plain} and {rotated}");
    }
}

/// The mean over seeds of what comes back comes as near as an unbiased one of that variance does. Its squared distance from the
/// tensor is the mean error over the number of seeds, within 10%. A bias of a hundredth of the tensor would show.
#[test]
fn unbiased_codes_are() {
    const SAMPLES: u64 = 400;
    let tensor = &heavy(99)[..4096];
    let stochastic = |grid| Codec::Fixed(Code::Blocks { grid, block: 256, rounding: Rounding::Stochastic });
    let rotated = |bits| Codec::Fixed(Code::Rotated { bits, block: 1024 });
    for codec in
        [stochastic(Grid::Int8), stochastic(Grid::Int4), rotated(1), rotated(2), rotated(3), rotated(4)]
    {
        let mut chunk = vec![0; codec.max_bytes(tensor.len()).unwrap()];
        let mut sum = vec![0_f32; tensor.len()];
        let mut error = 0.0;
        for seed in 0..SAMPLES {
            let told = encode(codec, seed, View::from(tensor), ViewMut::from(&mut chunk[..])).unwrap();
            error += told.squares.relative() / SAMPLES as f64;
            decode(View::from(&chunk[..]), Store::Add, ViewMut::from(&mut sum[..])).unwrap();
        }
        let square = |value: f64| value * value;
        let off =
            tensor.iter().zip(&sum).map(|(x, s)| square(f64::from(*x) - f64::from(*s) / SAMPLES as f64));
        let off = off.sum::<f64>() / tensor.iter().map(|x| square(f64::from(*x))).sum::<f64>();
        let expected = error / SAMPLES as f64;
        assert!(off < 1.1 * expected, "{codec:?}, seeds 0 to {SAMPLES}: {off}, where {expected} is chance");
    }
}

/// Ten ranks' tensors, added as codes.
#[test]
fn shared4_keeps_its_bar_and_adds_undecoded() {
    const RANKS: usize = 10;
    let (bits, block, isa) = (4, 1024, Isa::detect());
    for seed in SEEDS {
        let tensors: Vec<Vec<f32>> = (0..RANKS).map(|rank| gaussian(seed * 100 + rank as u64)).collect();
        let mut greatest = vec![0_f32; ELEMENTS / block];
        for tensor in &tensors {
            let mut own = greatest.clone();
            codes::ranges(isa, block, View::from(&tensor[..]), ViewMut::from(&mut own[..])).unwrap();
            greatest.iter_mut().zip(own).for_each(|(most, own)| *most = most.max(own));
        }
        let bytes = |ranks| Code::Shared { bits, block, ranks }.bytes(ELEMENTS).unwrap();
        let (mut one, mut all) = (vec![0; bytes(1)], vec![0; bytes(RANKS)]);
        for (rank, tensor) in tensors.iter().enumerate() {
            let (ranges, tensor) = (View::from(&greatest[..]), View::from(&tensor[..]));
            let noise = seed * 1000 + rank as u64;
            let to = ViewMut::from(&mut one[..]);
            codes::encode_shared(isa, bits, block, seed, noise, ranges, tensor, to).unwrap();
            let (from, to) = (View::from(&one[..]), ViewMut::from(&mut all[..]));
            codes::add_shared(isa, bits, block, RANKS, ELEMENTS, from, rank == 0, to).unwrap();
        }
        let mut sum = vec![0_f32; ELEMENTS];
        let code = Code::Shared { bits, block, ranks: RANKS };
        let to = ViewMut::from(&mut sum[..]);
        codes::decode(isa, code, seed, View::from(&all[..]), Store::Set, to).unwrap();
        let square = |value: f64| value * value;
        let exact = |i: usize| tensors.iter().map(|tensor| f64::from(tensor[i])).sum::<f64>();
        let error: f64 = (0..ELEMENTS).map(|i| square(exact(i) - f64::from(sum[i]))).sum();
        let signal: f64 = tensors.iter().flatten().map(|value| square(f64::from(*value))).sum();
        assert!(error / signal <= 0.0205, "seed {seed}: {}", error / signal);
    }
}
