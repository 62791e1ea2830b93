//! One rank of a benchmark of coded AllReduces: a communicator for each budget, in turn, on tensors with heavy tails. Rank 0 prints a
//! line of JSON for each budget: times, what the receipts say, and the error measured against the exact result.
#![forbid(unsafe_code)]

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use harmonaize_bench::measure::Effort;
use harmonaize_bench::seeded::SplitMix64;
use harmonaize_bench::tenant::{Member, Seat, budget, word};
use harmonaize_client::{Receipt, ReduceOp, Tensor};
use serde::Serialize;

/// AllReduces of the same tensors within several budgets, interleaved.
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    seat: Seat,
    #[command(flatten)]
    effort: Effort,
    /// Bytes of a rank's tensor
    #[arg(long, default_value_t = 64 << 20)]
    bytes: usize,
    /// What may be lost: exact, as-bf16, a bound on vNMSE such as 0.001, or a codec's name; several with commas
    #[arg(long, value_delimiter = ',', default_value = "exact,bf16,int8,rotated 4")]
    budgets: Vec<String>,
}

/// What a budget brought.
#[derive(Debug, Serialize)]
struct Figures {
    /// As asked.
    budget: String,
    /// Bytes of a rank's tensor.
    bytes: u64,
    /// Each timed operation, in microseconds.
    times_us: Vec<f64>,
    /// What ran, from the last receipt.
    algorithm: &'static str,
    /// Whether part of it went exact against the plan.
    fallback: bool,
    /// Tensor bytes that this rank's host sent for it.
    wire_bytes: u64,
    /// Bits on the wire for each element.
    bits_per_element: f64,
    /// The most that the error is by the receipt, vNMSE,
    claimed: f64,
    /// and what encoders measured of it.
    encoders: f64,
    /// The error against the exact result, vNMSE.
    measured: f64,
}

/// Values with heavy tails: a uniform number over another, so that one in a thousand is some hundred times the usual.
fn heavy(rank: usize, elements: usize) -> Vec<f32> {
    let mut stream = SplitMix64::named(7, &[rank as u64]);
    let mut uniform = || (stream.next_u64() >> 40) as f32 / (1u64 << 24) as f32;
    (0..elements).map(|_| 1e-3 * (uniform() - 0.5) / (uniform() + 2e-3).sqrt()).collect()
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let elements = arguments.bytes / 4;
    let rank = arguments.seat.rank;
    let members = arguments.budgets.iter().map(|text| {
        let seat = Seat {
            name: format!("{}-{}", arguments.seat.name, text.replace(' ', "-")),
            ..arguments.seat.clone()
        };
        let member = Member::join_within(&seat, 2 * arguments.bytes as u64 + 8192, budget(text)?)?;
        let (input, output) = (member.tensor::<f32>(elements)?, member.tensor::<f32>(elements)?);
        input.write(0, &heavy(rank, elements))?;
        Ok((text.clone(), member, input, output))
    });
    let members = members.collect::<Result<Vec<_>>>()?;
    let mut times = vec![Vec::new(); members.len()];
    let mut receipts: Vec<Option<Receipt>> = vec![None; members.len()];
    for round in 0..arguments.effort.warmup + arguments.effort.iterations {
        for (((_, member, input, output), times), receipt) in
            members.iter().zip(&mut times).zip(&mut receipts)
        {
            member.barrier()?;
            let (found, took) = member.all_reduce_into(input, output, ReduceOp::Sum)?;
            *receipt = Some(found);
            if round >= arguments.effort.warmup {
                times.push(took.as_secs_f64() * 1e6);
            }
        }
    }
    let Some((_, exact, input, output)) = members.iter().find(|(text, ..)| text == "exact") else {
        bail!("the budget `exact` is missing: errors are measured against it")
    };
    let right = read(output, elements)?;
    let signal = summed(exact, &read(input, elements)?)?;
    for (((text, _, _, output), times_us), receipt) in members.iter().zip(times).zip(receipts) {
        let receipt = receipt.context("nothing ran")?;
        let found = read(output, elements)?;
        let lost = found.iter().zip(&right).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2));
        let figures = Figures {
            budget: text.clone(),
            bytes: arguments.bytes as u64,
            times_us,
            algorithm: word(receipt.algorithm),
            fallback: receipt.fallback,
            wire_bytes: receipt.wire_bytes,
            bits_per_element: receipt.bits_per_element,
            claimed: f64::from(receipt.error),
            encoders: f64::from(receipt.measured_error),
            measured: lost.sum::<f64>() / signal,
        };
        let bound = text.parse::<f64>().unwrap_or(f64::INFINITY);
        ensure!(figures.measured <= bound, "the budget {text} was passed: {figures:?}");
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
fn summed(member: &Member, values: &[f32]) -> Result<f64> {
    let squares: f64 = values.iter().map(|value| f64::from(*value).powi(2)).sum();
    let tensor = member.tensor::<f64>(1)?;
    tensor.write(0, &[squares])?;
    member.all_reduce(&tensor, ReduceOp::Sum)?;
    let mut sum = [0f64];
    tensor.read(0, &mut sum)?;
    Ok(sum.into_iter().sum())
}
