//! One rank of a benchmark of collectives on f32 through the agent; rank 0 prints nccl-tests' columns.
#![forbid(unsafe_code)]

use anyhow::{Result, ensure};
use clap::Parser;
use harmonaize_bench::measure::{Effort, Kind, Measured};
use harmonaize_bench::tenant::{Member, Seat};
use harmonaize_client::{Receipt, ReduceOp, Tensor};
use std::time::Duration;

/// Times collectives back to back and checks the first of each size.
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    seat: Seat,
    #[command(flatten)]
    effort: Effort,
    /// Which collective
    #[arg(long, value_enum, default_value_t = Kind::Allreduce)]
    collective: Kind,
    /// Bytes of a rank's tensor; several sizes with commas
    #[arg(long, value_delimiter = ',', default_value = "67108864")]
    bytes: Vec<usize>,
    /// AllReduce in place
    #[arg(long)]
    in_place: bool,
    /// Print a line of JSON per size instead of columns
    #[arg(long)]
    json: bool,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let most = arguments.bytes.iter().copied().max().unwrap_or(0) as u64;
    let member = Member::join(&arguments.seat, 2 * most + 4096)?;
    if member.rank() == 0 && !arguments.json {
        println!("{}", Measured::HEADING);
    }
    for bytes in &arguments.bytes {
        let measured = measure(&arguments, &member, *bytes)?;
        if member.rank() == 0 {
            measured.print(arguments.json, arguments.collective, member.ranks())?;
        }
        ensure!(measured.wrong == 0, "{} elements of rank {} are wrong", measured.wrong, member.rank());
    }
    Ok(())
}

fn measure(arguments: &Arguments, member: &Member, bytes: usize) -> Result<Measured> {
    let (elements, ranks) = (bytes / 4, member.ranks());
    ensure!(
        bytes.is_multiple_of(4 * ranks),
        "{bytes} bytes are no whole f32 elements for each of {ranks} ranks"
    );
    let input = member.tensor::<f32>(elements)?;
    let apart = if arguments.in_place { None } else { Some(member.tensor::<f32>(elements)?) };
    let output = apart.as_ref().unwrap_or(&input);
    let run = || -> Result<(Receipt, Duration)> {
        match arguments.collective {
            Kind::Allreduce => member.all_reduce_into(&input, output, ReduceOp::Sum),
            Kind::Alltoall => member.all_to_all(&input, output),
        }
    };
    let wrong = check(arguments.collective, member, &input, output, &run)?;
    // Zeros stay zeros, however often they are added.
    let zeros = vec![0f32; elements];
    input.write(0, &zeros)?;
    output.write(0, &zeros)?;
    for _ in 0..arguments.effort.warmup {
        run()?;
    }
    member.barrier()?;
    let (mut times_us, mut wire_bytes) = (Vec::with_capacity(arguments.effort.iterations), 0);
    for _ in 0..arguments.effort.iterations {
        let (receipt, took) = run()?;
        times_us.push(took.as_secs_f64() * 1e6);
        wire_bytes = receipt.wire_bytes;
    }
    member.barrier()?;
    Ok(Measured { bytes: bytes as u64, times_us, wrong, wire_bytes })
}

/// Runs it once on values that tell sources and places apart, exact in f32, and counts wrong elements.
fn check(
    kind: Kind,
    member: &Member,
    input: &Tensor,
    output: &Tensor,
    run: &dyn Fn() -> Result<(Receipt, Duration)>,
) -> Result<u64> {
    let (rank, ranks, elements) = (member.rank(), member.ranks(), input.elements() as usize);
    let own = |rank: usize, element: usize| ((rank + 1) * 7 + element % 1021) as f32;
    let values: Vec<f32> = (0..elements).map(|element| own(rank, element)).collect();
    input.write(0, &values)?;
    run()?;
    let mut found = vec![0f32; elements];
    output.read(0, &mut found)?;
    let block = (elements / ranks).max(1);
    let expected = |element: usize| match kind {
        Kind::Allreduce => (0..ranks).map(|rank| own(rank, element)).sum::<f32>(),
        Kind::Alltoall => own(element / block, rank * block + element % block),
    };
    Ok(found.iter().enumerate().filter(|(element, found)| **found != expected(*element)).count() as u64)
}
