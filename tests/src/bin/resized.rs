//! A worker of an elastic job. It adds up with the others, and regroups with them once each has read that it has another place.

#![forbid(unsafe_code)]

use anyhow::{Context, Result, ensure};
use clap::Parser;
use harmonaize_client::{
    AttachOptions, Client, Communicator, Dtype, Rank, ReduceOp, RegroupOptions, Tensor, job_from_env,
};
use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Longer than anything may take.
const HANG: Duration = Duration::from_secs(60);

/// How long it does nothing between two sums.
const PAUSE: Duration = Duration::from_millis(10);

/// A worker of an elastic job that runs until all may end.
#[derive(Parser)]
struct Arguments {
    /// Where it notes its places, and finds a file of its job's name once it may end
    folder: PathBuf,
}

/// Its place: the generation, the rank, and how many there are.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Place(u64, u32, u32);

impl Place {
    fn of(words: [Option<&str>; 3]) -> Option<Self> {
        let [generation, rank, ranks] = words;
        Some(Self(generation?.parse().ok()?, rank?.parse().ok()?, ranks?.parse().ok()?))
    }

    /// That of its environment.
    fn from_env() -> Option<Self> {
        let names = ["HARMONAIZE_GENERATION", "RANK", "WORLD_SIZE"];
        let [generation, rank, ranks] = names.map(|name| std::env::var(name).ok());
        Self::of([generation.as_deref(), rank.as_deref(), ranks.as_deref()])
    }

    /// That of a line of its standard input.
    fn from_line(line: &str) -> Option<Self> {
        let mut words = line.strip_prefix("RESIZED ")?.split(' ');
        Self::of([words.next(), words.next(), words.next()])
    }

    /// All of its generation come, and keep their ranks.
    fn options(self) -> RegroupOptions {
        let Self(_, rank, ranks) = self;
        RegroupOptions { timeout: HANG, min_ranks: ranks, key: Some(rank), ..RegroupOptions::default() }
    }
}

fn main() -> Result<()> {
    let Arguments { folder } = Arguments::parse();
    let (job, mut place) = (job_from_env(), Place::from_env().context("no place in the environment")?);
    let client = Client::from_env(AttachOptions { arena_bytes: 2 << 20, ..AttachOptions::default() })?;
    let mut communicator = match std::env::var_os("HARMONAIZE_ENTER") {
        Some(_) => client.enter(&job, &place.options())?,
        None => client.join(&job, Rank(place.1), place.2, HANG)?,
    };
    let latest = Arc::new(Mutex::new(place));
    let reader = Arc::clone(&latest);
    std::thread::spawn(move || {
        for next in std::io::stdin().lines().map_while(Result::ok).filter_map(|line| Place::from_line(&line))
        {
            *reader.lock().unwrap_or_else(PoisonError::into_inner) = next;
        }
    });
    let worker = Worker { job, folder, tensor: client.tensor(Dtype::U64, 1)?, latest };
    loop {
        ensure!((communicator.rank(), communicator.ranks()) == (Rank(place.1), place.2), "another place");
        let next = match worker.run(&communicator, place) {
            Ok(Some(next)) => next,
            Ok(None) => return Ok(()),
            Err(_) if worker.may_end() => return Ok(()),
            // Another worker is lost.
            Err(error) => worker.next_after(place).ok_or(error)?,
        };
        communicator = communicator.regroup(&next.options())?;
        place = next;
    }
}

struct Worker {
    job: String,
    folder: PathBuf,
    tensor: Tensor,
    /// The place that it read last.
    latest: Arc<Mutex<Place>>,
}

impl Worker {
    fn latest(&self) -> Place {
        *self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn may_end(&self) -> bool {
        self.folder.join(&self.job).exists()
    }

    /// Adds up with the others, and notes it. Then waits until all have read the same next place; none: all may end.
    fn run(&self, communicator: &Communicator, place: Place) -> Result<Option<Place>> {
        let Place(generation, rank, workers) = place;
        let all = u64::from(workers);
        let sum = self.reduced(communicator, u64::from(rank), ReduceOp::Sum)?;
        ensure!(sum == all * (all - 1) / 2, "a wrong sum");
        let path = self.folder.join("notes");
        let mut notes = std::fs::File::options().append(true).create(true).open(path)?;
        let note = format!("{} {generation} {rank} {workers} {}\n", self.job, std::process::id());
        notes.write_all(note.as_bytes())?;
        loop {
            // All regroup after the same operation, and for the same generation.
            let next = self.latest();
            let least = self.reduced(communicator, next.0, ReduceOp::Min)?;
            let largest = self.reduced(communicator, next.0, ReduceOp::Max)?;
            if is_agreed(generation, least, largest) {
                return Ok(Some(next));
            }
            if self.reduced(communicator, u64::from(self.may_end()), ReduceOp::Max)? > 0 {
                return Ok(None);
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Waits until it has read of a place after this one.
    fn next_after(&self, place: Place) -> Option<Place> {
        let deadline = Instant::now() + HANG;
        while Instant::now() < deadline {
            let next = self.latest();
            if next.0 > place.0 {
                return Some(next);
            }
            std::thread::sleep(PAUSE);
        }
        None
    }

    /// What all ranks have, as one.
    fn reduced(&self, communicator: &Communicator, own: u64, by: ReduceOp) -> Result<u64> {
        self.tensor.write(0, &[own])?;
        communicator.all_reduce(&self.tensor, &self.tensor, by)?.wait(HANG)?;
        let mut all = [0];
        self.tensor.read(0, &mut all)?;
        Ok(all[0])
    }
}

/// Whether all ranks have read a place of one generation, later than `now`. That is so where the `least` that one has read is
/// the `largest`.
fn is_agreed(now: u64, least: u64, largest: u64) -> bool {
    least == largest && least > now
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_regroup_for_one_generation_alone() {
        let agreed = |read: [u64; 3]| {
            let (least, largest) = (read.into_iter().min().unwrap(), read.into_iter().max().unwrap());
            is_agreed(1, least, largest)
        };
        assert!(!agreed([1, 1, 1]), "nobody has read a line");
        assert!(!agreed([1, 2, 2]), "one has read none");
        // The job was resized twice, and one has read of the first time alone.
        assert!(!agreed([2, 3, 3]));
        assert!(agreed([3, 3, 3]));
    }
}
