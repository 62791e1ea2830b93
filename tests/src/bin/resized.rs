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
use std::time::Duration;

/// Longer than anything may take.
const HANG: Duration = Duration::from_secs(60);

/// How long it does nothing between two sums.
const PAUSE: Duration = Duration::from_millis(10);

/// A worker of an elastic job that runs until it has added up with enough others.
#[derive(Parser)]
struct Arguments {
    /// Where it notes its places, and finds a file of its job's name once it may end
    folder: PathBuf,
    /// How many are enough
    ranks: u32,
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
    let Arguments { folder, ranks } = Arguments::parse();
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
    let tensor = client.tensor(Dtype::U64, 1)?;
    loop {
        ensure!((communicator.rank(), communicator.ranks()) == (Rank(place.1), place.2), "another place");
        let all = u64::from(place.2);
        let sum = reduced(&communicator, &tensor, u64::from(place.1), ReduceOp::Sum)?;
        ensure!(sum == all * (all - 1) / 2, "a wrong sum");
        let mut notes = std::fs::File::options().append(true).create(true).open(folder.join("notes"))?;
        let Place(generation, rank, workers) = place;
        let note = format!("{job} {generation} {rank} {workers} {}\n", std::process::id());
        notes.write_all(note.as_bytes())?;
        if workers >= ranks {
            break;
        }
        // All regroup after the same operation, and for the same generation.
        let next = loop {
            let next = *latest.lock().unwrap_or_else(PoisonError::into_inner);
            let least = reduced(&communicator, &tensor, next.0, ReduceOp::Min)?;
            let largest = reduced(&communicator, &tensor, next.0, ReduceOp::Max)?;
            if is_agreed(place.0, least, largest) {
                break next;
            }
            std::thread::sleep(PAUSE);
        };
        communicator = communicator.regroup(&next.options())?;
        place = next;
    }
    while !folder.join(&job).exists() {
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

/// Whether all ranks have read a place of one generation, later than `now`. That is so where the `least` that one has read is
/// the `largest`.
fn is_agreed(now: u64, least: u64, largest: u64) -> bool {
    least == largest && least > now
}

/// What all ranks have, as one.
fn reduced(communicator: &Communicator, tensor: &Tensor, own: u64, by: ReduceOp) -> Result<u64> {
    tensor.write(0, &[own])?;
    communicator.all_reduce(tensor, tensor, by)?.wait(HANG)?;
    let mut all = [0];
    tensor.read(0, &mut all)?;
    Ok(all[0])
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
