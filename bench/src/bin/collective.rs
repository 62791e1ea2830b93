//! One rank of a benchmark of collectives on f32 through the agent; rank 0 prints nccl-tests' columns.
#![forbid(unsafe_code)]

use anyhow::{Result, ensure};
use clap::Parser;
use harmonaize_bench::measure::{Kind, Measured, Repetitions, busy};
use harmonaize_bench::tenant::{Participant, Seat};
use harmonaize_client::{Receipt, ReduceOp, Tensor};
use std::time::{Duration, Instant};

/// Times collectives back to back and checks the first of each size.
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    seat: Seat,
    #[command(flatten)]
    repetitions: Repetitions,
    /// Which collective
    #[arg(long, value_enum, default_value_t = Kind::Allreduce)]
    collective: Kind,
    /// Bytes of a rank's larger tensor; several sizes with commas
    #[arg(long, value_delimiter = ',', default_value = "67108864")]
    bytes: Vec<usize>,
    /// In place; not of AllToAll
    #[arg(long)]
    in_place: bool,
    /// Print a line of JSON per size instead of columns
    #[arg(long)]
    json: bool,
    /// Run the first size again and again until it fails, and print when it has begun and why it failed
    #[arg(long)]
    until_lost: bool,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let most = arguments.bytes.iter().copied().max().unwrap_or(0) as u64;
    let member = Participant::join(&arguments.seat, 2 * most + 4096)?;
    if arguments.until_lost {
        return until_lost(&arguments, &member);
    }
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

/// One operation after the other, until the provider says that it cannot be done.
fn until_lost(arguments: &Arguments, member: &Participant) -> Result<()> {
    let elements = arguments.bytes.first().copied().unwrap_or(0) / 4;
    let (input, output) = (member.tensor::<f32>(elements)?, member.tensor::<f32>(elements)?);
    input.write(0, &vec![1f32; elements])?;
    member.all_reduce_into(&input, &output, ReduceOp::Sum)?;
    println!("{}", serde_json::json!({"begun": true}));
    loop {
        if let Err(error) = member.all_reduce_into(&input, &output, ReduceOp::Sum) {
            println!("{}", serde_json::json!({"lost": format!("{error:#}")}));
            return Ok(());
        }
    }
}

fn measure(arguments: &Arguments, member: &Participant, bytes: usize) -> Result<Measured> {
    let (elements, ranks) = (bytes / 4, member.ranks());
    ensure!(
        bytes.is_multiple_of(4 * ranks),
        "{bytes} bytes are no whole f32 elements for each of {ranks} ranks"
    );
    // In place, the larger tensor stands for both.
    let [of_input, of_output] = match arguments.collective {
        Kind::Allgather if !arguments.in_place => [elements / ranks, elements],
        Kind::Reducescatter if !arguments.in_place => [elements, elements / ranks],
        _ => [elements; 2],
    };
    let input = member.tensor::<f32>(of_input)?;
    let apart = if arguments.in_place { None } else { Some(member.tensor::<f32>(of_output)?) };
    let output = apart.as_ref().unwrap_or(&input);
    let run = || -> Result<(Receipt, Duration)> {
        match arguments.collective {
            Kind::Allreduce => member.all_reduce_into(&input, output, ReduceOp::Sum),
            Kind::Alltoall => member.all_to_all(&input, output),
            Kind::Allgather => member.all_gather(&input, output),
            Kind::Reducescatter => member.reduce_scatter(&input, output, ReduceOp::Sum),
        }
    };
    let pattern = Pattern {
        kind: arguments.collective,
        rank: member.rank(),
        ranks,
        elements,
        in_place: arguments.in_place,
    };
    input.write(0, &pattern.input(of_input))?;
    run()?;
    let mut wrong = pattern.wrong(output)?;
    let zeros = vec![0f32; of_output];
    output.write(0, &zeros)?;
    for _ in 0..arguments.repetitions.warmup {
        run()?;
    }
    member.barrier()?;
    let (mut times_us, mut wire_bytes) = (Vec::with_capacity(arguments.repetitions.iterations), 0);
    let (begun, spent) = (Instant::now(), busy());
    for _ in 0..arguments.repetitions.iterations {
        let (receipt, took) = run()?;
        times_us.push(took.as_secs_f64() * 1e6);
        wire_bytes = receipt.wire_bytes;
    }
    let busy = (busy() - spent) / begun.elapsed().as_secs_f64().max(f64::MIN_POSITIVE);
    member.barrier()?;
    // In place, the output was zeros and zeros stay zeros, however often they are added; else it must be there again.
    if !arguments.in_place {
        wrong += pattern.wrong(output)?;
    }
    Ok(Measured { bytes: bytes as u64, times_us, wrong, wire_bytes, busy })
}

/// Values that tell sources and places apart, exact in f32, and what must become of them.
struct Pattern {
    kind: Kind,
    rank: usize,
    ranks: usize,
    elements: usize,
    in_place: bool,
}

impl Pattern {
    fn of(rank: usize, element: usize) -> f32 {
        ((rank + 1) * 7 + element % 1021) as f32
    }

    /// A rank's input; of an AllGather in place the whole tensor, of which its block is the input.
    fn input(&self, elements: usize) -> Vec<f32> {
        (0..elements).map(|element| Self::of(self.rank, element)).collect()
    }

    /// Elements of the output that are not what they must be.
    fn wrong(&self, output: &Tensor) -> Result<u64> {
        let block = (self.elements / self.ranks).max(1);
        let (mut found, own) = (vec![0f32; output.elements() as usize], self.rank * block);
        output.read(0, &mut found)?;
        let sum = |element: usize| (0..self.ranks).map(|rank| Self::of(rank, element)).sum::<f32>();
        let expected = |element: usize| match self.kind {
            Kind::Allreduce => sum(element),
            Kind::Alltoall => Self::of(element / block, own + element % block),
            // In place a block's elements stand where the block does.
            Kind::Allgather if self.in_place => Self::of(element / block, element),
            Kind::Allgather => Self::of(element / block, element % block),
            Kind::Reducescatter if !self.in_place => sum(own + element),
            Kind::Reducescatter if (own..own + block).contains(&element) => sum(element),
            Kind::Reducescatter => Self::of(self.rank, element),
        };
        let differs = |(element, found): &(usize, &f32)| **found != expected(*element);
        Ok(found.iter().enumerate().filter(differs).count() as u64)
    }
}
