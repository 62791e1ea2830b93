//! One rank of a benchmark of collectives on f32 through the agent; rank 0 prints nccl-tests' columns.
#![forbid(unsafe_code)]

use anyhow::{Result, ensure};
use clap::Parser;
use harmonaize_bench::measure::{Measured, Repetitions, busy, collective};
use harmonaize_bench::tenant::{Participant, Seat};
use harmonaize_client::{BlockContent, Collective, Communicator, Operation, Rank, ReduceOp, Tensor};
use std::time::Instant;

/// The root, where there is one: the rank that prints.
const ROOT: Rank = Rank(0);

/// Times collectives back to back and checks the first of each size.
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    seat: Seat,
    #[command(flatten)]
    repetitions: Repetitions,
    /// Which collective
    #[arg(long, value_parser = collective, default_value_t = Collective::AllReduce)]
    collective: Collective,
    /// Bytes of the largest tensor of a rank; several sizes with commas
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
    let (elements, ranks, collective) = (bytes / 4, member.ranks(), arguments.collective);
    ensure!(
        bytes.is_multiple_of(4 * ranks),
        "{bytes} bytes are no whole f32 elements for each of {ranks} ranks"
    );
    let (rank, ranks) = (Rank(u32::try_from(member.rank())?), u32::try_from(ranks)?);
    let block = elements / collective.max_blocks(ranks).max(1) as usize;
    let pattern = Pattern { collective, rank, ranks, block, in_place: arguments.in_place };
    let [inputs, outputs] = pattern.elements();
    // In place, the larger tensor stands for both.
    let input = member.tensor::<f32>(if arguments.in_place { inputs.max(outputs) } else { inputs })?;
    let apart = if arguments.in_place { None } else { Some(member.tensor::<f32>(outputs)?) };
    let output = apart.as_ref().unwrap_or(&input);
    let run = || member.run(|all| start(all, &pattern, &input, output));
    let [from, to] = pattern.starts();
    input.write(from, &pattern.input())?;
    run()?;
    let mut wrong = pattern.wrong(output)?;
    let zeros = vec![0f32; outputs];
    output.write(to, &zeros)?;
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

/// Submits the operation; in place, both tensors are the same.
fn start(
    all: &Communicator,
    pattern: &Pattern,
    input: &Tensor,
    output: &Tensor,
) -> Result<Operation, harmonaize_client::Error> {
    let sum = ReduceOp::Sum;
    match (pattern.collective, pattern.in_place) {
        (Collective::AllReduce, _) => all.all_reduce(input, output, sum),
        (Collective::AllToAll, _) => all.all_to_all(input, output),
        (Collective::AllGather, false) => all.all_gather(input, output),
        (Collective::AllGather, true) => all.all_gather_in_place(output),
        (Collective::ReduceScatter, false) => all.reduce_scatter(input, output, sum),
        (Collective::ReduceScatter, true) => all.reduce_scatter_in_place(input, sum),
        (Collective::Broadcast, _) => all.broadcast_into(Some(input), output, ROOT),
        (Collective::Reduce, _) => all.reduce(input, Some(output), sum, ROOT),
        (Collective::Gather, false) => all.gather(input, Some(output), ROOT),
        (Collective::Gather, true) => all.gather_in_place(output, ROOT),
        (Collective::Scatter, false) => all.scatter(Some(input), output, ROOT),
        (Collective::Scatter, true) => all.scatter_in_place(input, ROOT),
        (Collective::Barrier, _) => all.barrier(),
    }
}

/// Values that tell sources and places apart, exact in f32, and what must become of them.
struct Pattern {
    collective: Collective,
    rank: Rank,
    ranks: u32,
    /// Elements of a block.
    block: usize,
    in_place: bool,
}

impl Pattern {
    fn of(rank: Rank, element: usize) -> f32 {
        ((rank.0 as usize + 1) * 7 + element % 1021) as f32
    }

    /// Elements of this rank's input and output.
    fn elements(&self) -> [usize; 2] {
        self.collective.blocks(self.ranks, self.rank, ROOT).map(|blocks| blocks as usize * self.block)
    }

    /// The elements at which input and output begin.
    fn starts(&self) -> [u64; 2] {
        let shared = self.collective.shared_block(self.rank, ROOT).filter(|_| self.in_place);
        let [of_input, of_output] = shared.unwrap_or_default();
        [of_output, of_input].map(|at| u64::from(at) * self.block as u64)
    }

    /// This rank's input.
    fn input(&self) -> Vec<f32> {
        let [elements, _] = self.elements();
        (0..elements).map(|element| Self::of(self.rank, element)).collect()
    }

    /// Elements of the output that are not what they must be.
    fn wrong(&self, output: &Tensor) -> Result<u64> {
        let ([_, elements], [_, start]) = (self.elements(), self.starts());
        let mut found = vec![0f32; elements];
        output.read(start, &mut found)?;
        let expected = |element: usize| {
            let (block, at) = ((element / self.block) as u32, element % self.block);
            let of = |rank, block: u32| Self::of(rank, block as usize * self.block + at);
            match self.collective.content(self.rank, block, ROOT) {
                BlockContent::Unwritten => 0.0,
                BlockContent::Input(from, block) => of(from, block),
                BlockContent::Reduction(block) => (0..self.ranks).map(|rank| of(Rank(rank), block)).sum(),
            }
        };
        let differs = |(element, found): &(usize, &f32)| **found != expected(*element);
        Ok(found.iter().enumerate().filter(differs).count() as u64)
    }
}
