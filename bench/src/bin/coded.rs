//! One rank of a benchmark of coded AllReduces: a communicator for each budget, in turn, on tensors with heavy tails. Rank 0 prints a
//! line of JSON for each budget: times, what the receipts say, and the error against the exact result, which no timed round may have above
//! the budget's bound.
#![forbid(unsafe_code)]

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use harmonaize_bench::measure::Repetitions;
use harmonaize_bench::seeded::SplitMix64;
use harmonaize_bench::tenant::{Participant, Seat, algorithm_name, budget};
use harmonaize_client::{Receipt, ReduceOp, Tensor};
use serde::Serialize;

/// AllReduces of the same tensors within several budgets, interleaved.
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    seat: Seat,
    #[command(flatten)]
    repetitions: Repetitions,
    /// Bytes of a rank's tensor, or tensors
    #[arg(long, default_value_t = 64 << 20)]
    bytes: usize,
    /// What may be lost: exact, as-bf16, a bound on vNMSE such as 0.001, or a codec's name; several with commas
    #[arg(long, value_delimiter = ',', default_value = "exact,bf16,int8,rotated 4")]
    budgets: Vec<String>,
    /// Eight tensors a step, of so many bytes together, which lose unequally, in place of one
    #[arg(long)]
    layers: bool,
}

/// What a budget brought.
#[derive(Debug, Serialize)]
struct Figures {
    /// As asked.
    budget: String,
    /// Bytes of a rank's tensors.
    bytes: u64,
    /// Each timed step, in microseconds: all its operations.
    times_us: Vec<f64>,
    /// What ran, from the receipt of the round that lost most, as all that follows.
    algorithm: &'static str,
    /// Each tensor's codec.
    codecs: Vec<&'static str>,
    /// Whether part of it went exact against the plan.
    fallback: bool,
    /// Tensor bytes that this rank's host sent for a step.
    wire_bytes: u64,
    /// Bits on the wire for each element.
    bits_per_element: f64,
    /// Of the tensor that lost most: the most that the error is by the receipt, vNMSE.
    claimed: f64,
    /// Of the tensor that lost most: the error that encoders measured, vNMSE.
    encoders: f64,
    /// The error against the exact result, vNMSE, found in every timed round: the most.
    measured: f64,
}

/// Makes a tensor.
type Shape = fn(&mut SplitMix64, usize) -> Vec<f32>;

/// The kinds of a step's tensors. Most have like elements. In some, each block has a large one; one has heavy
/// tails.
const LAYERS: &[Shape] = &[even, spiked, even, heavy, even, spiked, even, spiked];

fn uniform(stream: &mut SplitMix64) -> f32 {
    (stream.next_u64() >> 40) as f32 / (1u64 << 24) as f32
}

/// Values with heavy tails: a uniform number over another. So one in a thousand is some hundred times the usual.
fn heavy(stream: &mut SplitMix64, elements: usize) -> Vec<f32> {
    let mut one = || 1e-3 * (uniform(stream) - 0.5) / (uniform(stream) + 2e-3).sqrt();
    (0..elements).map(|_| one()).collect()
}

/// Nearly normal values: sums of four.
fn even(stream: &mut SplitMix64, elements: usize) -> Vec<f32> {
    let mut one = || 1e-3 * ((0..4).map(|_| uniform(stream)).sum::<f32>() - 2.0);
    (0..elements).map(|_| one()).collect()
}

/// The same, of which every 128th is thirty times as large.
fn spiked(stream: &mut SplitMix64, elements: usize) -> Vec<f32> {
    let mut values = even(stream, elements);
    values.iter_mut().step_by(128).for_each(|value| *value *= 30.0);
    values
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let elements = arguments.bytes / 4;
    let rank = arguments.seat.rank;
    let shapes: &[Shape] = if arguments.layers { LAYERS } else { &[heavy] };
    let elements = elements / shapes.len();
    let room = 2 * arguments.bytes as u64 + 8192 * shapes.len() as u64;
    let members = arguments.budgets.iter().map(|text| {
        let seat = Seat {
            name: format!("{}-{}", arguments.seat.name, text.replace(' ', "-")),
            ..arguments.seat.clone()
        };
        let member = Participant::join_within(&seat, room, budget(text)?)?;
        let tensors = shapes.iter().zip(7..).map(|(shape, seed)| {
            let (input, output) = (member.tensor::<f32>(elements)?, member.tensor::<f32>(elements)?);
            input.write(0, &shape(&mut SplitMix64::named(seed, &[rank as u64]), elements))?;
            Ok((input, output))
        });
        let tensors = tensors.collect::<Result<Vec<_>>>()?;
        Ok((text.clone(), member, tensors))
    });
    let members = members.collect::<Result<Vec<_>>>()?;
    let Some((_, exact, tensors)) = members.iter().find(|(text, ..)| text == "exact") else {
        bail!("the budget `exact` is missing: errors are measured against it")
    };
    // Of each tensor the exact sum, and what an error of it is a part of.
    let right = tensors.iter().map(|(input, output)| {
        exact.all_reduce_into(input, output, ReduceOp::Sum)?;
        Ok((read(output, elements)?, summed(exact, &read(input, elements)?)?))
    });
    let right = right.collect::<Result<Vec<_>>>()?;
    let mut times = vec![Vec::new(); members.len()];
    let mut worst: Vec<Option<(f64, Vec<Receipt>)>> = vec![None; members.len()];
    for round in 0..arguments.repetitions.warmup + arguments.repetitions.iterations {
        for (((text, member, tensors), times), worst) in members.iter().zip(&mut times).zip(&mut worst) {
            member.barrier()?;
            let (mut receipts, mut step) = (Vec::new(), 0.0);
            for (input, output) in tensors {
                let (receipt, took) = member.all_reduce_into(input, output, ReduceOp::Sum)?;
                receipts.push(receipt);
                step += took.as_secs_f64() * 1e6;
            }
            if round < arguments.repetitions.warmup {
                continue;
            }
            times.push(step);
            let mut most = 0_f64;
            for ((_, output), (right, signal)) in tensors.iter().zip(&right) {
                let found = read(output, elements)?;
                let lost = found.iter().zip(right).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2));
                most = most.max(lost.sum::<f64>() / signal);
            }
            let bound = text.parse::<f64>().unwrap_or(f64::INFINITY);
            ensure!(most <= bound, "the budget {text} was passed: {most} in round {round}: {receipts:?}");
            if worst.as_ref().is_none_or(|(before, _)| most >= *before) {
                *worst = Some((most, receipts));
            }
        }
    }
    for (((text, ..), times_us), worst) in members.iter().zip(times).zip(worst) {
        let (measured, receipts) = worst.context("nothing ran")?;
        let most = |of: fn(&Receipt) -> f32| receipts.iter().map(of).fold(0.0, f32::max);
        let bits: f64 = receipts.iter().map(|receipt| receipt.bits_per_element).sum();
        let figures = Figures {
            budget: text.clone(),
            bytes: arguments.bytes as u64,
            times_us,
            algorithm: algorithm_name(receipts.last().context("nothing ran")?.algorithm),
            codecs: receipts.iter().map(|receipt| receipt.codec).collect(),
            fallback: receipts.iter().any(|receipt| receipt.fallback),
            wire_bytes: receipts.iter().map(|receipt| receipt.wire_bytes).sum(),
            bits_per_element: bits / receipts.len() as f64,
            claimed: most(|receipt| receipt.error).into(),
            encoders: most(|receipt| receipt.measured_error).into(),
            measured,
        };
        if rank == 0 {
            println!("{}", serde_json::to_string(&figures)?);
        }
    }
    exact.barrier()
}

fn read(tensor: &Tensor, elements: usize) -> Result<Vec<f32>> {
    let mut found = vec![0f32; elements];
    tensor.read(0, &mut found)?;
    Ok(found)
}

/// The squares of all ranks' values together.
fn summed(member: &Participant, values: &[f32]) -> Result<f64> {
    let squares: f64 = values.iter().map(|value| f64::from(*value).powi(2)).sum();
    let tensor = member.tensor::<f64>(1)?;
    tensor.write(0, &[squares])?;
    member.all_reduce(&tensor, ReduceOp::Sum)?;
    let mut sum = [0f64];
    tensor.read(0, &mut sum)?;
    Ok(sum.into_iter().sum())
}
