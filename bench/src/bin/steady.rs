//! One rank of a tenant that reduces until a moment: so many operations at once, or one each so often.
#![forbid(unsafe_code)]

use anyhow::{Result, ensure};
use clap::Parser;
use harmonaize_bench::tenant::{Participant, Seat};
use harmonaize_client::{Algorithm, Error, Operation, Receipt, ReduceOp, Tensor};
use harmonaize_testkit::clock::monotonic_ns;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How long an operation may take.
const OPERATION: Duration = Duration::from_secs(60);

/// Runs AllReduces of f32 in place, and checks two elements of each. Rank 0 prints a line of JSON: the bytes of a tensor, and of each
/// operation when it was done, in nanoseconds of CLOCK_MONOTONIC, how long it took, in microseconds, and whether an aggregator did all of it.
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    seat: Seat,
    /// Bytes of a rank's tensor
    #[arg(long, default_value_t = 1 << 20)]
    bytes: usize,
    /// Operations at once, at most
    #[arg(long, default_value_t = 4)]
    in_flight: usize,
    /// One begins each so many microseconds; 0: as soon as there may be another
    #[arg(long, default_value_t = 0)]
    every_us: u64,
    /// When the first begins, by CLOCK_MONOTONIC in nanoseconds; 0: at once
    #[arg(long, default_value_t = 0)]
    from_ns: u64,
    /// When no more are begun, by CLOCK_MONOTONIC in nanoseconds
    #[arg(long)]
    until_ns: u64,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let (elements, depth) = (arguments.bytes / 4, arguments.in_flight.max(1));
    ensure!(elements >= 2, "a tensor has at least two elements of 4 bytes");
    let member = Participant::join(&arguments.seat, depth as u64 * (arguments.bytes as u64 + 4096))?;
    let tensors: Vec<Tensor> = (0..depth).map(|_| member.tensor::<f32>(elements)).collect::<Result<_>>()?;
    member.barrier()?;
    let mut load = Load { arguments: &arguments, participant: &member, tensors, elements, done: Vec::new() };
    load.run()?;
    if member.rank() == 0 {
        let done = &load.done;
        let line = serde_json::json!({
            "bytes": elements * 4,
            "done_ns": done.iter().map(|one| one.at_ns).collect::<Vec<_>>(),
            "took_us": done.iter().map(|one| one.took.as_secs_f64() * 1e6).collect::<Vec<_>>(),
            "aggregated": done.iter().map(|one| one.aggregated).collect::<Vec<_>>(),
        });
        println!("{line}");
    }
    member.barrier()
}

struct Done {
    at_ns: u64,
    took: Duration,
    aggregated: bool,
}

struct Load<'a> {
    arguments: &'a Arguments,
    participant: &'a Participant,
    /// One for each operation at once.
    tensors: Vec<Tensor>,
    elements: usize,
    done: Vec<Done>,
}

impl Load<'_> {
    /// All ranks begin the same operations: the first after which some rank wants to end says how many.
    fn run(&mut self) -> Result<()> {
        std::thread::sleep(Duration::from_nanos(self.arguments.from_ns.saturating_sub(monotonic_ns()?)));
        let begun = Instant::now();
        let every = Duration::from_micros(self.arguments.every_us);
        let depth = self.tensors.len() as u64;
        let (mut next, mut end) = (0_u64, u64::MAX);
        let mut under_way: VecDeque<(Operation, Instant)> = VecDeque::new();
        while next < end || !under_way.is_empty() {
            let due = (begun + every.saturating_mul(u32::try_from(next)?))
                .saturating_duration_since(Instant::now());
            let room = next < end && (under_way.len() as u64) < depth;
            if room && (due.is_zero() || end != u64::MAX) {
                under_way.push_back((self.begin(next)?, Instant::now()));
                next += 1;
                continue;
            }
            let Some((operation, since)) = under_way.front_mut() else {
                std::thread::sleep(due);
                continue;
            };
            let receipt = match operation.wait(if room { due } else { OPERATION }) {
                Err(Error::WaitTimeout { .. }) if room => continue,
                outcome => outcome?,
            };
            let took = since.elapsed();
            under_way.pop_front();
            let number = next - 1 - under_way.len() as u64;
            if self.finish(number, &receipt, took)? {
                end = end.min(number + depth);
            }
        }
        Ok(())
    }

    fn tensor(&self, number: u64) -> Result<&Tensor> {
        let at = (number % self.tensors.len() as u64) as usize;
        self.tensors.get(at).ok_or_else(|| anyhow::anyhow!("no tensor {at}"))
    }

    fn begin(&self, number: u64) -> Result<Operation> {
        let tensor = self.tensor(number)?;
        let wish = monotonic_ns()? >= self.arguments.until_ns;
        let own = [value(self.participant.rank(), number), f32::from(u8::from(wish))];
        tensor.write(self.elements as u64 - 2, &own)?;
        self.participant.start_all_reduce(tensor, ReduceOp::Sum)
    }

    /// Whether some rank wants to end.
    fn finish(&mut self, number: u64, receipt: &Receipt, took: Duration) -> Result<bool> {
        let mut found = [0f32; 2];
        self.tensor(number)?.read(self.elements as u64 - 2, &mut found)?;
        let [sum, wishes] = found;
        let expected: f32 = (0..self.participant.ranks()).map(|rank| value(rank, number)).sum();
        ensure!(sum == expected, "operation {number}: an element is {sum}, and not {expected}");
        let aggregated = receipt.algorithm == Algorithm::Aggregated && !receipt.fallback;
        self.done.push(Done { at_ns: monotonic_ns()?, took, aggregated });
        Ok(wishes > 0.0)
    }
}

/// Whole numbers, whose sums are exact.
fn value(rank: usize, number: u64) -> f32 {
    (rank as u64 * 7 + number % 1021) as f32
}
