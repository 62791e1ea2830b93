//! Codes that add: four ranks' tensors are encoded on ranges that they share, added as codes, and decoded once.

use crate::Measured;
use anyhow::{Context, Result};
use harmonaize_abi::{View, ViewMut};
use harmonaize_codec::{Code, Store};
use harmonaize_kernels::Isa;
use harmonaize_kernels::codes::{add_shared, decode, encode_shared, ranges};
use std::time::Instant;

const RANKS: usize = 4;
const BITS: usize = 4;
const BLOCK: usize = 1024;

/// Measures them on a tensor and on the same begun a quarter, a half and three quarters later. What is lost is the error of the sum, against the
/// exact one, over the squares of all. Speeds are of one rank's tensor: its encoding, the sum's decoding, and adding its codes.
pub(crate) fn measure(name: &str, tensor: &[f32], passes: usize) -> Result<Measured> {
    let (isa, elements) = (Isa::detect(), tensor.len());
    let tensors: Vec<Vec<f32>> = (0..RANKS)
        .map(|rank| {
            let mut turned = tensor.to_vec();
            turned.rotate_left(rank * elements / RANKS);
            turned
        })
        .collect();
    let mut greatest = vec![0_f32; elements.div_ceil(BLOCK)];
    for tensor in &tensors {
        let mut own = greatest.clone();
        ranges(isa, BLOCK, View::from(&tensor[..]), ViewMut::from(&mut own[..]))?;
        greatest.iter_mut().zip(own).for_each(|(most, own)| *most = most.max(own));
    }
    let code = |ranks| Code::Shared { bits: BITS, block: BLOCK, ranks };
    let bytes = |ranks| code(ranks).bytes(elements).context("too many elements");
    let (mut one, mut all) = (vec![0_u8; bytes(1)?], vec![0_u8; bytes(RANKS)?]);
    let mut sum = vec![0_f32; elements];
    let mut fastest = [f64::MAX; 4];
    for _ in 0..passes.max(1) {
        for (rank, tensor) in tensors.iter().enumerate() {
            let begun = Instant::now();
            sum.copy_from_slice(tensor);
            let copied = begun.elapsed();
            let (of_all, source) = (View::from(&greatest[..]), View::from(&tensor[..]));
            let noise = 1 + rank as u64;
            encode_shared(isa, BITS, BLOCK, 1, noise, of_all, source, ViewMut::from(&mut one[..]))?;
            let coded = begun.elapsed();
            let (from, to) = (View::from(&one[..]), ViewMut::from(&mut all[..]));
            add_shared(isa, BITS, BLOCK, RANKS, elements, from, rank == 0, to)?;
            let added = begun.elapsed();
            for (fastest, time) in fastest.iter_mut().zip([copied, coded - copied, added - coded]) {
                *fastest = fastest.min(time.as_secs_f64());
            }
        }
        let begun = Instant::now();
        decode(isa, code(RANKS), 1, View::from(&all[..]), Store::Set, ViewMut::from(&mut sum[..]))?;
        let [.., decoded] = &mut fastest;
        *decoded = decoded.min(begun.elapsed().as_secs_f64());
    }
    let (mut error, mut signal) = (0.0, 0.0);
    for (index, found) in sum.iter().enumerate() {
        let values = || tensors.iter().filter_map(|tensor| tensor.get(index)).map(|value| f64::from(*value));
        error += (values().sum::<f64>() - f64::from(*found)).powi(2);
        signal += values().map(|value| value * value).sum::<f64>();
    }
    let size = 4.0 * elements as f64;
    let [memcpy, encode, decode_add, decode] = fastest.map(|seconds| size / seconds / 1e9);
    Ok(Measured {
        tensor: name.to_owned(),
        codec: "shared 4".to_owned(),
        elements,
        ratio: size / one.len() as f64,
        vnmse: error / signal,
        memcpy,
        encode,
        decode,
        decode_add,
    })
}
