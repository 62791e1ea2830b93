//! Damaged chunks: whatever bytes come, they decode or are refused with an error, nothing outside the tensor is written, and nothing
//! in it where they are refused. Every run of the tests goes on for [`FUZZED`] with seeds of its own; `HARMONAIZE_SEED` and
//! `HARMONAIZE_RUNS` choose seeds instead, and `cargo xtask soak --suite codec` goes on for as long as asked.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // tests alone

use harmonaize_abi::{View, ViewMut};
use harmonaize_codec::{Code, Codec, Grid, HEADER_BYTES, Rounding, Sparse, Store, decode, encode};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How long new seeds are tried.
const FUZZED: Duration = Duration::from_secs(3);

/// Elements around a tensor that nobody may write.
const GUARD: usize = 64;
const GUARDED: u32 = 0x5c5c_5c5c;

fn codec(random: &mut ChaCha8Rng) -> Codec {
    let grids = [Grid::Int8, Grid::Int4, Grid::E4m3, Grid::E5m2];
    match random.random_range(0..6) {
        0 => Codec::NAMED[random.random_range(0..Codec::NAMED.len())].1,
        1 => Codec::Fixed(Code::Blocks {
            grid: grids[random.random_range(0..4)],
            block: 1 << random.random_range(5..=8),
            rounding: if random.random() { Rounding::Nearest } else { Rounding::Stochastic },
        }),
        2 => Codec::Fixed(Code::Rotated {
            bits: random.random_range(1..=4),
            block: 1 << random.random_range(6..=12),
        }),
        3 => Codec::Sparse(Sparse::Blocks),
        _ => Codec::Sparse(Sparse::Largest { power: random.random_range(0..=12), halves: random.random() }),
    }
}

fn tensor(random: &mut ChaCha8Rng) -> Vec<f32> {
    let count = 1 << random.random_range(0..16);
    let count = random.random_range(0..=count);
    let kind = random.random_range(0..4);
    let mut one = || match kind {
        0 => random.random_range(-1.0..1.0),
        1 => f32::from_bits(random.random()),
        2 => [0.0, 0.0, 0.0, 1.0][random.random_range(0..4)],
        _ => random.random_range(-1.0..1.0_f32).powi(9),
    };
    let mut tensor: Vec<f32> = (0..count).map(|_| one()).collect();
    if random.random() {
        for block in tensor.chunks_mut(256) {
            if random.random() {
                block.fill(0.0);
            }
        }
    }
    tensor
}

/// Changes some bytes, or the length; often the header's, whose check is then made right.
fn damage(random: &mut ChaCha8Rng, chunk: &mut Vec<u8>) {
    for _ in 0..random.random_range(0..8) {
        let head = if random.random() { HEADER_BYTES } else { HEADER_BYTES + 16 };
        let most = if random.random() { chunk.len() } else { chunk.len().min(head) };
        let at = random.random_range(0..most);
        chunk[at] = match random.random_range(0..3) {
            0 => random.random(),
            1 => chunk[at] ^ 1 << random.random_range(0..8),
            _ => [0, 1, 0x7f, 0x80, 0xff][random.random_range(0..5)],
        };
    }
    if random.random_range(0..4) == 0 {
        let length = random.random_range(0..chunk.len() + 40);
        chunk.resize(length, random.random());
    }
    // The payload's length as the header tells it, and the check.
    if chunk.len() >= HEADER_BYTES {
        if random.random() {
            let length = (chunk.len() - HEADER_BYTES) as u32;
            chunk[12..16].copy_from_slice(&length.to_le_bytes());
        }
        let fold = |hash: u32, byte: &u8| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193);
        let check = chunk[..HEADER_BYTES - 4].iter().fold(0x811c_9dc5, fold);
        chunk[HEADER_BYTES - 4..HEADER_BYTES].copy_from_slice(&check.to_le_bytes());
    }
}

/// Whether the chunk was decoded.
fn run(seed: u64) -> bool {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let (codec, tensor) = (codec(&mut random), tensor(&mut random));
    let mut chunk = vec![0; codec.most_bytes(tensor.len()).unwrap()];
    let told = encode(codec, seed, View::from(&tensor[..]), ViewMut::from(&mut chunk[..])).unwrap();
    chunk.truncate(told.bytes);
    damage(&mut random, &mut chunk);
    let store = [Store::Set, Store::Add, Store::Subtract][random.random_range(0..3)];
    let mut room = vec![f32::from_bits(GUARDED); tensor.len() + 2 * GUARD];
    let to = ViewMut::from(&mut room[GUARD..GUARD + tensor.len()]);
    let decoded = decode(View::from(&chunk[..]), store, to).is_ok();
    let unwritten = |part: &[f32]| part.iter().all(|value| value.to_bits() == GUARDED);
    assert!(unwritten(&room[..GUARD]) && unwritten(&room[GUARD + tensor.len()..]), "seed {seed}: {codec:?}");
    assert!(decoded || unwritten(&room), "seed {seed}: {codec:?} was refused, and wrote");
    decoded
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|given| given.parse().ok())
}

fn again(first: u64) {
    println!("run again: HARMONAIZE_SEED={first} cargo test -p harmonaize-codec --test damage");
}

#[test]
fn damaged_chunks_decode_or_are_refused() {
    let first = number("HARMONAIZE_SEED").unwrap_or(1);
    let runs = number("HARMONAIZE_RUNS").unwrap_or(3000);
    again(first);
    let decoded = (first..first.saturating_add(runs)).filter(|seed| run(*seed)).count();
    // Both happen, or this tests nothing.
    assert!(runs < 100 || (decoded > 0 && (decoded as u64) < runs), "{decoded} of {runs} decoded");
}

/// Seeds that no run of the tests had before; those of a failing one are printed.
#[test]
fn chunks_that_nobody_has_seen_decode_or_are_refused() {
    if number("HARMONAIZE_SEED").is_some() {
        return;
    }
    let first = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    again(first);
    let begun = Instant::now();
    let seeds = (first..).take_while(|_| begun.elapsed() < FUZZED);
    let (runs, decoded) =
        seeds.fold((0_u64, 0), |(runs, decoded), seed| (runs + 1, decoded + u64::from(run(seed))));
    println!("{decoded} of {runs} decoded");
}
