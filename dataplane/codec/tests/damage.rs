//! Damaged chunks, and damaged codes that add, decode or are refused with an error, whatever bytes come.
//! Nothing outside the tensor is written, and nothing in it where they are refused. A coded AllReduce takes them or does not, and all
//! instruction sets make the same of them. `HARMONAIZE_SEED` and `HARMONAIZE_RUNS` choose seeds, and `cargo xtask soak --suite codec` goes on for as long as asked.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // tests alone

use harmonaize_abi::{View, ViewMut};
use harmonaize_codec::{
    Code, Codec, Grid, HEADER_BYTES, Header, Rounding, Store, Terms, decode, encode, header, whole,
};
use harmonaize_kernels::{Isa, codes};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Elements around a tensor that nobody may write.
const GUARD: usize = 64;
const GUARDED: u32 = 0x5c5c_5c5c;

fn codec(random: &mut ChaCha8Rng) -> Codec {
    let grids = [Grid::Int8, Grid::Int4];
    match random.random_range(0..4) {
        0 => Codec::NAMED[random.random_range(0..Codec::NAMED.len())].1,
        1 => Codec::Fixed(Code::Blocks {
            grid: grids[random.random_range(0..2)],
            block: 1 << random.random_range(5..=8),
            rounding: if random.random() { Rounding::Nearest } else { Rounding::Stochastic },
        }),
        2 => Codec::Fixed(Code::Rotated {
            bits: random.random_range(1..=4),
            block: 1 << random.random_range(6..=12),
        }),
        _ => Codec::NonzeroBlocks,
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

/// A tensor between guards.
struct Room {
    values: Vec<f32>,
    elements: usize,
}

impl Room {
    fn new(elements: usize) -> Self {
        Self { values: vec![f32::from_bits(GUARDED); elements + 2 * GUARD], elements }
    }

    fn view(&mut self) -> ViewMut<'_> {
        ViewMut::from(&mut self.values[GUARD..GUARD + self.elements])
    }

    /// Checks the guards, and all of the tensor where nothing was to be written.
    fn check(&self, written: bool, what: &str) {
        let unwritten = |part: &[f32]| part.iter().all(|value| value.to_bits() == GUARDED);
        let (before, rest) = self.values.split_at(GUARD);
        assert!(unwritten(before) && unwritten(&rest[self.elements..]), "{what}: outside was written");
        assert!(written || unwritten(rest), "{what} was refused, and wrote");
    }

    /// The same, but that any NaN is as good as another.
    fn bits(&self) -> Vec<u32> {
        let bits = |value: &f32| if value.is_nan() { u32::MAX } else { value.to_bits() };
        self.values.iter().map(bits).collect()
    }
}

fn sets() -> impl Iterator<Item = Isa> {
    Isa::ALL.iter().copied().filter(|isa| isa.is_available())
}

/// A payload on every instruction set, by itself: the same comes of it.
fn on_all_sets(chunk: &[u8], elements: usize, store: Store, what: &str) {
    let Ok(Header { codec, payload, seed, .. }) = header(View::from(chunk)) else { return };
    let Some(payload) = chunk[HEADER_BYTES..].get(..payload as usize) else { return };
    let mut found = None;
    for isa in sets() {
        let mut room = Room::new(elements);
        let (from, to) = (View::from(payload), room.view());
        let decoded = match codec {
            Codec::Fixed(code) => codes::decode(isa, code, seed, from, store, to),
            Codec::NonzeroBlocks => codes::decode_nonzero(isa, from, store, to),
        };
        room.check(decoded.is_ok(), &format!("{what} by {isa}"));
        let this = (decoded, room.bits());
        let first = found.get_or_insert_with(|| this.clone());
        assert!(*first == this, "{what}: another result by {isa}");
    }
}

/// An AllReduce that was agreed on some codec, and gets the chunk as a contribution and as the sum.
fn reduced(random: &mut ChaCha8Rng, agreed: Codec, chunk: &[u8], elements: usize, what: &str) {
    let most = [None, Some(0.0), Some(0.1)][random.random_range(0..3)];
    let codec = if random.random() { agreed } else { Codec::INT8 };
    let finer = random.random_bool(0.5).then_some(Codec::INT8);
    let terms = Terms { codec, finer, max_error: most, participants: random.random_range(0..9) };
    let mut room = Room::new(elements);
    let taken = whole(|passes| terms.take(passes, View::from(chunk), room.view()));
    room.check(taken.is_ok(), &format!("{what}, taken"));
    let mut room = Room::new(elements);
    let ranks = random.random_range(0..3);
    let mut sums = whole(|passes| terms.begin(passes, ranks, room.view().as_view())).unwrap();
    let before = sums;
    let added = whole(|passes| terms.add(passes, &mut sums, View::from(chunk), room.view()));
    room.check(added.is_ok(), &format!("{what}, added"));
    assert!(added.is_ok() || sums == before, "{what} was refused, and counts");
    assert_eq!(added.is_ok(), taken.is_ok(), "{what}");
    // Whatever it said of itself, the sum can be told, and is told within the budget or exactly.
    let average = [None, Some(4)][random.random_range(0..2)];
    let mut result = vec![0; 4 * elements + HEADER_BYTES + 128];
    let to = ViewMut::from(&mut result[..]);
    let sum = room.view().as_view();
    let coded = whole(|passes| terms.conclude(passes, &sums, average, 7, sum, to)).unwrap();
    let within = most.is_none_or(|most| coded.squares.error <= most * coded.squares.signal);
    assert!(coded.refused || within || codec.is_lossless(), "{what}: {coded:?}");
}

/// Codes of some ranks, in part damaged, that are added and decoded on every instruction set.
fn shared(random: &mut ChaCha8Rng) {
    let (bits, block) = (random.random_range(1..=4), 1 << random.random_range(6..=12));
    let ranks = [1, 2, 5, 17, 300][random.random_range(0..5)];
    let elements = random.random_range(0..5000);
    let what = format!("{elements} elements of {bits} bits in blocks of {block}, {ranks} ranks");
    let bytes = |ranks| Code::Shared { bits, block, ranks }.bytes(elements).unwrap();
    let mut any = |count: usize| -> Vec<u8> {
        let same: Option<u8> = random.random_bool(0.3).then(|| random.random());
        (0..count).map(|_| same.unwrap_or_else(|| random.random())).collect()
    };
    let (mut one, total) = (any(bytes(1)), any(bytes(ranks)));
    let begin = random.random();
    if random.random() {
        // The block's ranges are the same in both, as they should be.
        let length = one.len().min(total.len()).min(4);
        one[..length].copy_from_slice(&total[..length]);
    }
    // Of a wrong length nothing is added.
    let short = random.random_bool(0.2) && !one.is_empty();
    one.truncate(one.len() - usize::from(short));
    let mut found = None;
    for isa in sets() {
        let mut sum = total.clone();
        let (from, to) = (View::from(&one[..]), ViewMut::from(&mut sum[..]));
        let added = codes::add_shared(isa, bits, block, ranks, elements, from, begin, to);
        assert!(added.is_ok() != short && (!short || sum == total), "{what} by {isa}: {added:?}");
        let mut room = Room::new(elements);
        let code = Code::Shared { bits, block, ranks };
        codes::decode(isa, code, 3, View::from(&sum[..]), Store::Set, room.view()).unwrap();
        room.check(true, &what);
        let this = (sum, room.bits());
        let first = found.get_or_insert_with(|| this.clone());
        assert!(*first == this, "{what}: another result by {isa}");
    }
}

/// Whether the chunk was decoded.
fn run(seed: u64) -> bool {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let (codec, tensor) = (codec(&mut random), tensor(&mut random));
    let mut chunk = vec![0; codec.max_bytes(tensor.len()).unwrap()];
    let told = encode(codec, seed, View::from(&tensor[..]), ViewMut::from(&mut chunk[..])).unwrap();
    chunk.truncate(told.bytes);
    damage(&mut random, &mut chunk);
    let store = [Store::Set, Store::Add, Store::Subtract][random.random_range(0..3)];
    let what = format!("seed {seed}: {codec:?}");
    let mut room = Room::new(tensor.len());
    let decoded = decode(View::from(&chunk[..]), store, room.view()).is_ok();
    room.check(decoded, &what);
    match seed % 4 {
        0 => on_all_sets(&chunk, tensor.len(), store, &what),
        1 => reduced(&mut random, codec, &chunk, tensor.len(), &what),
        2 => shared(&mut random),
        _ => {}
    }
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
