//! Ranks of a tenant on a host whose agent runs on its offload unit. They attach over RDMA and check a collective bit for bit. Then
//! they check an AllGather whose blocks differ in size.

#![forbid(unsafe_code)]

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, ValueEnum};
use harmonaize_client::{Access, AgentAddress, Client, Dtype, ReduceOp};
use harmonaize_tests::aggregated::sum_within;
use harmonaize_tests::job::{Worker, options};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Ranks that attach over RDMA to the agent of an offload unit, and check a collective.
#[derive(Parser)]
#[command(after_help = "Example:
  offloaded all-reduce --agent 10.0.1.2:7300 --tenant a --secret /etc/harmonaize/secret --here 2 --ranks 2 --seed 1")]
struct Arguments {
    /// What to run
    collective: Collective,
    /// Where the agent listens for tenants
    #[arg(long)]
    agent: SocketAddr,
    /// Whose ranks these are
    #[arg(long)]
    tenant: String,
    /// The file with what tenant and agent know
    #[arg(long)]
    secret: PathBuf,
    /// The first rank of this process
    #[arg(long, default_value_t = 0)]
    first: u32,
    /// How many ranks are in this process
    #[arg(long, default_value_t = 1)]
    here: u32,
    /// How many ranks there are in all
    #[arg(long)]
    ranks: u32,
    /// From which all ranks make their data
    #[arg(long)]
    seed: u32,
    /// How long all of it may take, in seconds
    #[arg(long, default_value_t = 60)]
    within: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Collective {
    AllReduce,
    AllToAll,
    AllGather,
    ReduceScatter,
    /// AllReduces until some have gone by an aggregator
    Aggregated,
}

/// MiB for tensors of a rank: registered memory is all there from the start.
const ARENA: u64 = 16;
/// Sums between two looks at how many went by an aggregator, and their elements: no multiple of a chunk's.
const ROUND: u64 = 5;
const SUMMED: usize = 50_003;
/// Elements of 8 bytes: one, less than a packet, less than a segment, several segments.
const COUNTS: &[usize] = &[1, 100, 20_000, 300_000];

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let deadline = Instant::now() + Duration::from_secs(arguments.within);
    let agent = AgentAddress::tcp(arguments.agent, &arguments.tenant, &arguments.secret)?;
    let last = arguments.first.checked_add(arguments.here).filter(|last| *last <= arguments.ranks);
    let last = last.context("there are fewer ranks than this process should have")?;
    std::thread::scope(|scope| {
        let (arguments, agent) = (&arguments, &agent);
        let ranks = arguments.first..last;
        let threads: Vec<_> =
            ranks.map(|rank| (rank, scope.spawn(move || run(arguments, agent, rank, deadline)))).collect();
        let mut failed = 0;
        for (rank, thread) in threads {
            let done = thread.join().unwrap_or_else(|_| bail!("its thread panicked"));
            if let Err(error) = done {
                eprintln!("rank {rank}: {error:#}");
                failed += 1;
            }
        }
        ensure!(failed == 0, "{failed} ranks failed");
        println!("{} ranks of {}: right, bit for bit", arguments.here, arguments.ranks);
        Ok(())
    })
}

fn run(arguments: &Arguments, agent: &AgentAddress, rank: u32, deadline: Instant) -> Result<()> {
    let left = || deadline.saturating_duration_since(Instant::now());
    let client = loop {
        // The agent may not have started yet.
        match Client::attach(agent.clone(), options(Access::Rdma, ARENA)) {
            Ok(client) => break client,
            Err(error) if left() < Duration::from_secs(1) => return Err(error).context("cannot attach"),
            Err(_) => std::thread::sleep(Duration::from_millis(200)),
        }
    };
    let name = format!("job-{}-{}", arguments.collective as u32, arguments.seed);
    let worker = Worker::of(client, &name, rank, arguments.ranks, left())?;
    if arguments.collective == Collective::Aggregated {
        return aggregated(&worker, u64::from(arguments.seed), deadline);
    }
    for (salt, &count) in (u64::from(arguments.seed)..).zip(COUNTS) {
        match arguments.collective {
            Collective::AllReduce => {
                worker.sum(salt, count, false, left())?;
                worker.sum(salt, count, true, left())?;
            }
            Collective::AllToAll => worker.exchange(salt, count / arguments.ranks as usize, left())?,
            Collective::AllGather => worker.gather(salt, count / arguments.ranks as usize, false, left())?,
            Collective::ReduceScatter => {
                worker.scatter(salt, count / arguments.ranks as usize, false, left())?
            }
            Collective::Aggregated => {}
        }
    }
    uneven(&worker, u64::from(arguments.seed), 20_000, left())?;
    worker.communicator.barrier()?.wait(left())?;
    Ok(())
}

/// Sums in place, which are checked, until as many as there are ranks have gone by an aggregator whole at some rank or other. All ranks end
/// with the same round.
fn aggregated(worker: &Worker, seed: u64, deadline: Instant) -> Result<()> {
    let left = || deadline.saturating_duration_since(Instant::now());
    let mut served = 0.0_f32;
    for round in 0.. {
        for salt in 0..ROUND {
            let salt = seed + round * ROUND + salt;
            let (given, all) = sum_within(worker, salt, SUMMED, left())?;
            served += f32::from(u8::from(given && all));
        }
        let told = worker.client.tensor(Dtype::F32, 1)?;
        told.write(0, &[served])?;
        worker.communicator.all_reduce_in_place(&told, ReduceOp::Sum)?.wait(left())?;
        let mut by_all = [0.0_f32];
        told.read(0, &mut by_all)?;
        let [by_all] = by_all;
        println!("rank {}: {by_all} sums went by an aggregator after round {round}", worker.rank);
        if by_all >= worker.ranks as f32 {
            break;
        }
        ensure!(left() > Duration::from_secs(1), "no sum goes by an aggregator");
        std::thread::sleep(Duration::from_millis(200));
    }
    Ok(())
}

/// An AllGather to which rank 0 gives all, rank 1 a half, and so on.
fn uneven(worker: &Worker, salt: u64, count: u64, left: Duration) -> Result<()> {
    let counts: Vec<u64> = (0..worker.ranks).map(|rank| count.checked_shr(rank).unwrap_or(0)).collect();
    let of = |(rank, count): (u32, &u64)| Worker::input(rank, salt, *count as usize);
    let expected: Vec<u64> = (0..worker.ranks).zip(&counts).flat_map(of).collect();
    let own = counts.get(worker.rank as usize).context("a rank without a count")?;
    let (input, output) = (worker.tensor(&of((worker.rank, own)))?, worker.tensor(&vec![0; expected.len()])?);
    worker.communicator.all_gather_v(&input, &output, &counts)?.wait(left)?;
    ensure!(worker.contents(&output)? == expected, "wrong uneven AllGather of {count}");
    Ok(())
}
