//! Blocks that are not zeros come back bit for bit, and damaged ones are refused.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // tests alone

use harmonaize_abi::{View, ViewMut};
use harmonaize_codec::{Codec, CodecError, Encoded, HEADER_BYTES, Squares, Store, decode, encode};
use harmonaize_kernels::codes::zero_blocks;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Magnitudes of many sizes, all different in practice.
fn heavy(seed: u64, count: usize) -> Vec<f32> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut one = || 1e-3 * random.random_range(-1.0..1.0_f32) / (random.random_range(0.01..1.0_f32)).powi(2);
    (0..count).map(|_| one()).collect()
}

fn coded(codec: Codec, seed: u64, tensor: &[f32]) -> (Encoded, Vec<u8>) {
    let mut chunk = vec![0; codec.max_bytes(tensor.len()).unwrap()];
    let told = encode(codec, seed, View::from(tensor), ViewMut::from(&mut chunk[..])).unwrap();
    chunk.truncate(told.bytes);
    (told, chunk)
}

fn values(chunk: &[u8], count: usize) -> Vec<f32> {
    let mut back = vec![7.0_f32; count];
    decode(View::from(chunk), Store::Set, ViewMut::from(&mut back[..])).unwrap();
    back
}

#[test]
fn blocks_that_are_not_zero_come_back_bit_for_bit() {
    let mut tensor = vec![0.0_f32; 100_100];
    for block in [0, 3, 64, 65, 390, 391] {
        tensor[256 * block] = -0.0;
        tensor[256 * block + 3] = f32::from_bits(0x7f80_1234);
    }
    let (told, chunk) = coded(Codec::NonzeroBlocks, 0, &tensor);
    assert_eq!(told.squares, Squares::default());
    // Six blocks, the last of which has four elements, and 64 bits for each of seven groups.
    assert_eq!(told.bytes, HEADER_BYTES + 5 * 1024 + 4 * (100_100 - 391 * 256) + 7 * 8);
    let back = values(&chunk, tensor.len());
    assert!(tensor.iter().zip(&back).all(|(a, b)| a.to_bits() == b.to_bits()));
    let (dense, _) = coded(Codec::NonzeroBlocks, 0, &vec![1.0; 100_100]);
    assert_eq!(dense.bytes, HEADER_BYTES + 400_400 + 56);
}

/// Any bits, of any size: of the tensor, and of a sum that it is added to.
#[test]
fn nonzero_blocks_lose_no_bit() {
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    for seed in 0..60 {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let count = random.random_range(1..40_000);
        let power = [-45, -38, -30, -20, 0, 15, 38][random.random_range(0..7)];
        let one = |zeros: f64, random: &mut ChaCha8Rng| -> Vec<f32> {
            let mut tensor = vec![0.0_f32; count];
            for block in tensor.chunks_mut(256) {
                if !random.random_bool(zeros) {
                    block.fill_with(|| {
                        let value = random.random_range(-1.0..1.0_f64) * 10_f64.powi(power);
                        if random.random_bool(0.1) { -0.0 } else { value as f32 }
                    });
                }
            }
            tensor
        };
        let (tensor, other) = (one(0.7, &mut random), one(0.3, &mut random));
        let (told, chunk) = coded(Codec::NonzeroBlocks, seed, &tensor);
        assert_eq!(told.squares, Squares::default());
        assert_eq!(bits(&values(&chunk, count)), bits(&tensor), "seed {seed}");
        let exact: Vec<f32> = other.iter().zip(&tensor).map(|(a, b)| a + b).collect();
        let mut sum = other.clone();
        decode(View::from(&chunk[..]), Store::Add, ViewMut::from(&mut sum[..])).unwrap();
        assert_eq!(bits(&sum), bits(&exact), "seed {seed}, added");
        let mut rest = other.clone();
        decode(View::from(&chunk[..]), Store::Subtract, ViewMut::from(&mut rest[..])).unwrap();
        let exact: Vec<f32> = other.iter().zip(&tensor).map(|(a, b)| a - b).collect();
        assert_eq!(bits(&rest), bits(&exact), "seed {seed}, subtracted");
        // What a sample tells of its zeros is near what there are.
        let whole = tensor.chunks_exact(256);
        let zeros = whole.clone().filter(|block| block.iter().all(|value| value.to_bits() == 0)).count();
        let looked = zero_blocks(View::from(&tensor[..]), seed, 1000).unwrap();
        let part = zeros as f64 / whole.len().max(1) as f64;
        assert!((f64::from(looked) / 1000.0 - part).abs() < 0.1, "seed {seed}: {looked} of 1000, {part}");
    }
}

#[test]
fn wrong_masks_are_refused_and_write_nothing() {
    let (_, chunk) = coded(Codec::NonzeroBlocks, 0, &heavy(1, 5000));
    for bit in 0..64 {
        let mut chunk = chunk.clone();
        chunk[HEADER_BYTES + bit / 8] ^= 1 << (bit % 8);
        let mut back = vec![7.0_f32; 5000];
        let result = decode(View::from(&chunk[..]), Store::Set, ViewMut::from(&mut back[..]));
        assert_eq!(result, Err(CodecError::Payload), "bit {bit}");
        assert!(back.iter().all(|value| *value == 7.0));
    }
}
