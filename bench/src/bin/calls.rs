//! A rank that times what frameworks call beside collectives. These are groups that form by split, an abort, a rank
//! that comes late, protected state, and recorded traffic.

#![forbid(unsafe_code)]

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};
use harmonaize_bench::tenant::Seat;
use harmonaize_client::{
    Client, Communicator, Dtype, Error, Operation, ProtectOptions, Rank, ReduceOp, Tensor,
};
use harmonaize_testkit::clock::monotonic_ns;
use serde_json::json;
use std::time::{Duration, Instant};

/// How long a call may take beside what is waited for on purpose.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long ranks wait in an operation before it is aborted.
const UNDISTURBED: Duration = Duration::from_millis(200);

/// Times calls of a job; rank 0 prints the figures.
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    seat: Seat,
    #[command(subcommand)]
    call: Call,
}

#[derive(Subcommand)]
enum Call {
    /// Groups of so many ranks form by split, one split after another, and stay
    Groups {
        /// Groups in all
        #[arg(long)]
        groups: u32,
        /// Ranks of each
        #[arg(long)]
        size: u32,
    },
    /// Rank 0 aborts a group in which all others wait
    Abort,
    /// The last rank calls so much later than the others
    Late {
        /// How much
        #[arg(long)]
        seconds: u64,
    },
    /// Steps of a training whose state is protected, in turn with steps where it is not; then a rank's state is restored
    Protected {
        /// Bytes that a step reduces
        #[arg(long)]
        bytes: u64,
        /// Bytes of each rank's state
        #[arg(long)]
        state: u64,
        /// Microseconds of computing in a step
        #[arg(long)]
        compute_us: u64,
        /// Steps in a row
        #[arg(long)]
        steps: u64,
    },
    /// AllReduces of f32 in place, each at its microsecond of an iteration, as a training has them
    Recorded {
        /// BYTES:MICROSECOND of each, in the order of their beginning
        #[arg(required = true, value_parser = operation)]
        operations: Vec<(u64, u64)>,
    },
    /// AllReduces of f32 in place, each after so many microseconds of computing, and waited for
    InTurn {
        /// BYTES:MICROSECONDS of each, in their order
        #[arg(required = true, value_parser = operation)]
        operations: Vec<(u64, u64)>,
    },
}

/// How often steps without protection and with it take turns.
const TURNS: u64 = 4;

/// Iterations of recorded traffic that are timed, after one that is not.
const ITERATIONS: u32 = 3;

/// Reads BYTES:MICROSECOND.
fn operation(text: &str) -> Result<(u64, u64), String> {
    let read = || {
        let (bytes, at) = text.split_once(':')?;
        Some((bytes.parse().ok().filter(|bytes: &u64| bytes.is_multiple_of(4))?, at.parse().ok()?))
    };
    read().ok_or_else(|| format!("{text:?} is no BYTES:MICROSECOND of a tensor of f32"))
}

/// A rank of the job.
struct Member {
    client: Client,
    job: Communicator,
}

/// Seconds between two readings of CLOCK_MONOTONIC, which all processes of a machine share.
fn seconds(from: u64, to: u64) -> f64 {
    to.saturating_sub(from) as f64 / 1e9
}

impl Member {
    /// An AllReduce of one number, to wait for.
    fn begin(
        &self,
        group: &Communicator,
        value: u64,
        reduce: ReduceOp,
    ) -> Result<impl FnOnce() -> Result<u64>> {
        let tensor = self.client.tensor(Dtype::U64, 1)?;
        tensor.write(0, &[value])?;
        let mut operation: Operation = group.all_reduce_in_place(&tensor, reduce)?;
        Ok(move || {
            operation.wait(2 * PATIENCE)?;
            let mut reduced = [0];
            tensor.read(0, &mut reduced)?;
            Ok(reduced[0])
        })
    }

    fn reduced(&self, group: &Communicator, value: u64, reduce: ReduceOp) -> Result<u64> {
        self.begin(group, value, reduce)?()
    }

    fn meet(&self) -> Result<()> {
        self.job.barrier()?.wait(PATIENCE)?;
        Ok(())
    }

    /// Seconds until all groups of all ranks have formed, every sum of which is right then.
    fn groups(&self, groups: u32, size: u32) -> Result<f64> {
        let (rank, ranks) = (self.job.rank().0, self.job.ranks());
        ensure!(size > 0 && ranks.is_multiple_of(size), "{ranks} ranks are no groups of {size}");
        let colors = ranks / size;
        ensure!(groups.is_multiple_of(colors), "{groups} groups are not splits into {colors}");
        self.meet()?;
        let begun = Instant::now();
        // Others belong together each time: neighbors, then every second one, and so on.
        let split = |round: u32| -> Result<Communicator> {
            let color = if round.is_multiple_of(2) { rank / size } else { rank % colors };
            self.job.split(Some(color), rank, PATIENCE)?.context("no group")
        };
        let formed = (0..groups / colors).map(split).collect::<Result<Vec<_>>>()?;
        self.meet()?;
        let took = begun.elapsed().as_secs_f64();
        for group in &formed {
            let sum = self.reduced(group, u64::from(group.rank().0) + 1, ReduceOp::Sum)?;
            let expected = u64::from(size) * u64::from(size + 1) / 2;
            ensure!(sum == expected, "{}: {sum} in place of {expected}", group.name());
        }
        self.meet()?;
        Ok(took)
    }

    /// Seconds until the last rank has its error.
    fn abort(&self) -> Result<f64> {
        let group = self.job.split(Some(0), self.job.rank().0, PATIENCE)?.context("no group")?;
        let aborts = group.rank() == Rank(0);
        let waiting = if aborts { None } else { Some(self.begin(&group, 1, ReduceOp::Sum)?) };
        self.meet()?;
        if aborts {
            std::thread::sleep(UNDISTURBED);
        }
        let begun = monotonic_ns()?;
        match waiting {
            None => group.abort(),
            Some(wait) => {
                let ended = wait().err().context("an operation without rank 0 succeeded")?;
                let error = ended.downcast_ref::<Error>();
                ensure!(matches!(error, Some(Error::Aborted { .. })), "{ended:#}");
            }
        }
        let freed = self.reduced(&self.job, monotonic_ns()?, ReduceOp::Max)?;
        let aborted = self.reduced(&self.job, if aborts { begun } else { 0 }, ReduceOp::Max)?;
        Ok(seconds(aborted, freed))
    }

    /// Times a sum to which the last rank comes late, in seconds. The first figure is from when all were there to
    /// rank 0's sum, the second from the last rank's call to its own sum.
    fn late(&self, delay: Duration) -> Result<(f64, f64)> {
        let (rank, ranks) = (self.job.rank().0, self.job.ranks());
        let late = rank + 1 == ranks;
        let begun = self.reduced(&self.job, monotonic_ns()?, ReduceOp::Max)?;
        if late {
            std::thread::sleep(delay);
        }
        let called = monotonic_ns()?;
        let sum = self.reduced(&self.job, u64::from(rank) + 1, ReduceOp::Sum)?;
        let done = monotonic_ns()?;
        let expected = u64::from(ranks) * u64::from(ranks + 1) / 2;
        ensure!(sum == expected, "{sum} in place of {expected}");
        let last = self.reduced(&self.job, done, ReduceOp::Max)?;
        let called = self.reduced(&self.job, if late { called } else { 0 }, ReduceOp::Max)?;
        Ok((seconds(begun, done), seconds(called, last)))
    }
}

impl Member {
    /// Microseconds of an iteration: the greatest of the ranks' medians. An operation's own count from the iteration's beginning, and in turn
    /// from the end of the one before.
    fn recorded(&self, operations: &[(u64, u64)], in_turn: bool) -> Result<f64> {
        let own = f32::from(u8::try_from(self.job.rank().0 + 1)?);
        let room = |(bytes, _): &(u64, u64)| -> Result<Tensor> {
            let tensor = self.client.tensor(Dtype::F32, bytes / 4)?;
            tensor.write(0, &vec![own; usize::try_from(bytes / 4)?])?;
            Ok(tensor)
        };
        let tensors = operations.iter().map(room).collect::<Result<Vec<_>>>()?;
        let mut times = Vec::new();
        for _ in 0..=ITERATIONS {
            self.meet()?;
            let begun = Instant::now();
            let mut since = begun;
            let mut under_way = Vec::new();
            for (tensor, (_, at)) in tensors.iter().zip(operations) {
                std::thread::sleep(Duration::from_micros(*at).saturating_sub(since.elapsed()));
                let mut operation = self.job.all_reduce_in_place(tensor, ReduceOp::Sum)?;
                if in_turn {
                    operation.wait(PATIENCE)?;
                    since = Instant::now();
                } else {
                    under_way.push(operation);
                }
            }
            for mut operation in under_way {
                operation.wait(PATIENCE)?;
            }
            times.push(begun.elapsed().as_nanos() as u64);
        }
        // Sums of sums: each iteration but the first has as many times the one before's as there are ranks.
        let ranks = self.job.ranks();
        let expected = (ranks * (ranks + 1) / 2 * ranks.pow(ITERATIONS)) as f32;
        for tensor in &tensors {
            let mut found = vec![0.0_f32; usize::try_from(tensor.elements())?];
            tensor.read(0, &mut found)?;
            let wrong = found.iter().filter(|value| **value != expected).count();
            ensure!(wrong == 0, "{wrong} elements of {} are not {expected}", found.len());
        }
        let timed = times.get_mut(1..).context("nothing was timed")?;
        timed.sort_unstable();
        let median = *timed.get(timed.len() / 2).context("nothing was timed")?;
        Ok(self.reduced(&self.job, median, ReduceOp::Max)? as f64 / 1e3)
    }
}

/// Microseconds of the one in the middle.
fn middle_us(times: &mut [Duration]) -> Result<f64> {
    times.sort_unstable();
    Ok(times.get(times.len() / 2).context("nothing was timed")?.as_secs_f64() * 1e6)
}

impl Member {
    fn filled(&self, bytes: u64, value: f32) -> Result<Tensor> {
        let tensor = self.client.tensor(Dtype::F32, bytes / 4)?;
        tensor.write(0, &vec![value; usize::try_from(bytes / 4)?])?;
        Ok(tensor)
    }

    /// What protected state costs the AllReduces of a training, and what a restore takes. A step sleeps for as long as it would compute, and
    /// reduces. The weights are written once, before the restore.
    fn protected(&self, bytes: u64, state: u64, compute: Duration, steps: u64) -> Result<serde_json::Value> {
        let (rank, ranks) = (self.job.rank().0, self.job.ranks());
        let (gradients, weights) = (self.filled(bytes, 1.0)?, self.filled(state, rank as f32)?);
        let options =
            ProtectOptions { domain: Some(rank.into()), timeout: PATIENCE, ..ProtectOptions::default() };
        let mut protection = self.job.protect(&[("weights", &weights)], &options)?;
        let (mut plain, mut beside, mut sealed) = (Vec::new(), Vec::new(), Vec::new());
        for turn in 0..2 * TURNS {
            let protects = turn % 2 == 1;
            for step in 0..steps {
                // Sealing has them meet; so they do without, too.
                self.meet()?;
                let begun = Instant::now();
                let is_sealed = protects && protection.begin_seal(1 + turn * steps + step)?;
                let mut holds = begun.elapsed();
                std::thread::sleep(compute);
                let begun = Instant::now();
                self.job.all_reduce_in_place(&gradients, ReduceOp::Average)?.wait(PATIENCE)?;
                let took = begun.elapsed();
                let times = if protects { &mut beside } else { &mut plain };
                times.push(took);
                if protects {
                    let begun = Instant::now();
                    protection.end_seal(PATIENCE)?;
                    holds += begun.elapsed();
                    // A step that is not sealed copies nothing.
                    sealed.extend(is_sealed.then_some(holds));
                }
            }
            protection.wait(PATIENCE)?;
        }
        weights.write(state / 4 - 1, &[-1.0_f32])?;
        self.meet()?;
        let begun = Instant::now();
        // The last rank comes as one that was started anew.
        if rank + 1 == ranks {
            let restored = self.job.restore_newcomer(&[Rank(rank)])?;
            restored.states.first().context("no state came")?.read("weights", &weights)?;
        } else {
            protection.restore(&self.job, &[])?;
        }
        let took = u64::try_from(begun.elapsed().as_nanos())?;
        let mut last = [0.0_f32];
        weights.read(state / 4 - 1, &mut last)?;
        ensure!(last == [rank as f32], "rank {rank} has restored {last:?}");
        let longest = self.reduced(&self.job, took, ReduceOp::Max)?;
        Ok(json!({
            "plain_us": middle_us(&mut plain)?,
            "beside_us": middle_us(&mut beside)?,
            "seal_us": middle_us(&mut sealed)?,
            "sealed": sealed.len() as f64 / (TURNS * steps) as f64,
            "restored_seconds": longest as f64 / 1e9,
        }))
    }
}

fn main() -> Result<()> {
    let Arguments { seat, call } = Arguments::parse();
    let bytes = match &call {
        Call::Recorded { operations } | Call::InTurn { operations } => {
            operations.iter().map(|(bytes, _)| bytes).sum()
        }
        _ => 0,
    };
    let client = seat.attach(bytes + (1 << 20))?;
    let (rank, ranks) = (u32::try_from(seat.rank)?, u32::try_from(seat.ranks)?);
    let job = client.join(&seat.name, Rank(rank), ranks, PATIENCE)?;
    let member = Member { client, job };
    let figures = match call {
        Call::Groups { groups, size } => json!({ "seconds": member.groups(groups, size)? }),
        Call::Abort => json!({ "seconds": member.abort()? }),
        Call::Late { seconds } => {
            let (waited, after) = member.late(Duration::from_secs(seconds))?;
            json!({ "seconds": waited, "after": after })
        }
        Call::Protected { bytes, state, compute_us, steps } => {
            ensure!(bytes >= 4 && state >= 4 && steps > 0, "nothing to reduce, to protect, or no step");
            member.protected(bytes, state, Duration::from_micros(compute_us), steps)?
        }
        Call::Recorded { operations } => {
            json!({ "bytes": bytes, "p50_us": member.recorded(&operations, false)?, "wrong": 0 })
        }
        Call::InTurn { operations } => {
            json!({ "bytes": bytes, "p50_us": member.recorded(&operations, true)?, "wrong": 0 })
        }
    };
    if rank == 0 {
        println!("{figures}");
    }
    Ok(())
}
