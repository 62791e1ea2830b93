//! Speed against memcpy, error and ratio of every codec, on synthetic tensors and on float32 files of NumPy.

mod npy;
mod shared;
mod tensors;

use anyhow::{Context, Result};
use clap::Parser;
use harmonaize_abi::{View, ViewMut};
use harmonaize_codec::{Codec, Store, decode, encode};
use serde::Serialize;
use std::hint::black_box;
use std::path::PathBuf;
use std::time::Instant;

/// Measures every codec on one core, and prints an object of JSON a line; `cargo xtask bench codec` makes a table of them.
#[derive(Parser)]
struct Args {
    /// Elements of the synthetic tensors
    #[arg(long, default_value_t = 25 << 18)]
    elements: usize,
    /// Timed passes of each, interleaved with memcpy; the fastest counts
    #[arg(long, default_value_t = 15)]
    passes: usize,
    /// Float32 files of NumPy, C order
    files: Vec<PathBuf>,
}

/// One codec on one tensor. Speeds in GB/s of f32.
#[derive(Serialize)]
struct Measured {
    tensor: String,
    codec: String,
    elements: usize,
    /// Bytes of f32 over bytes of the chunk.
    ratio: f64,
    /// The squared error over the squared tensor, as the encoder told; of shared codes, that of a sum.
    vnmse: f64,
    memcpy: f64,
    encode: f64,
    decode: f64,
    /// Of shared codes, adding them without decoding.
    decode_add: f64,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let mut tensors = tensors::synthetic(args.elements);
    for file in &args.files {
        let bytes = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
        let tensor = npy::floats(&bytes).with_context(|| file.display().to_string())?;
        let name = file.file_stem().context("a file without a name")?.to_string_lossy().into_owned();
        tensors.push((name, tensor));
    }
    for (name, tensor) in &tensors {
        for (codec_name, codec) in Codec::NAMED {
            let row = measure(name, codec_name, *codec, tensor, args.passes)?;
            println!("{}", serde_json::to_string(&row)?);
        }
        println!("{}", serde_json::to_string(&shared::measure(name, tensor, args.passes)?)?);
    }
    Ok(())
}

fn measure(name: &str, codec_name: &str, codec: Codec, tensor: &[f32], passes: usize) -> Result<Measured> {
    let most = codec.max_bytes(tensor.len()).context("too many elements")?;
    // At multiples of 64, as arenas and staging are.
    let mut chunk = vec![1_u8; most + 64];
    let mut to = vec![1.0_f32; tensor.len() + 16];
    let (skipped, first) = (chunk.as_ptr().align_offset(64), to.as_ptr().align_offset(64));
    let chunk = chunk.get_mut(skipped..).context("no room")?;
    let to = to.get_mut(first..first + tensor.len()).context("no room")?;
    let mut fastest = [f64::MAX; 4];
    let mut encoded = None;
    for _ in 0..passes.max(1) {
        let begun = Instant::now();
        black_box(&mut to[..]).copy_from_slice(black_box(tensor));
        let copied = begun.elapsed();
        encoded = Some(encode(codec, 1, View::from(tensor), ViewMut::from(&mut chunk[..]))?);
        let coded = begun.elapsed();
        decode(View::from(&chunk[..]), Store::Set, ViewMut::from(&mut to[..]))?;
        let decoded = begun.elapsed();
        decode(View::from(&chunk[..]), Store::Add, ViewMut::from(&mut to[..]))?;
        let added = begun.elapsed();
        let times = [copied, coded - copied, decoded - coded, added - decoded];
        for (fastest, time) in fastest.iter_mut().zip(times) {
            *fastest = fastest.min(time.as_secs_f64());
        }
    }
    let encoded = encoded.context("no pass")?;
    let bytes = 4.0 * tensor.len() as f64;
    let [memcpy, encode, decode, decode_add] = fastest.map(|seconds| bytes / seconds / 1e9);
    Ok(Measured {
        tensor: name.to_owned(),
        codec: codec_name.to_owned(),
        elements: tensor.len(),
        ratio: bytes / encoded.bytes as f64,
        vnmse: encoded.squares.relative(),
        memcpy,
        encode,
        decode,
        decode_add,
    })
}
