//! A worker of an elastic job. It adds up with the others, and regroups with them once each has read that it has another place.

#![forbid(unsafe_code)]

use anyhow::{Context, Result, ensure};
use clap::Parser;
use harmonaize_client::{AttachOptions, Client, Communicator, Dtype, Rank, ReduceOp, Tensor, job_from_env};
use harmonaize_tests::place::{Latest, Place, is_agreed, reduced};
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

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

fn main() -> Result<()> {
    let Arguments { folder } = Arguments::parse();
    let (job, mut place) = (job_from_env(), Place::from_env().context("no place in the environment")?);
    let client = Client::from_env(AttachOptions { arena_bytes: 2 << 20, ..AttachOptions::default() })?;
    let mut communicator = match std::env::var_os("HARMONAIZE_ENTER") {
        Some(_) => client.enter(&job, &place.options(HANG))?,
        None => client.join(&job, Rank(place.rank), place.workers, HANG)?,
    };
    let worker = Worker { job, folder, tensor: client.tensor(Dtype::U64, 1)?, latest: Latest::follow(place) };
    loop {
        let seat = (communicator.rank(), communicator.ranks());
        ensure!(seat == (Rank(place.rank), place.workers), "another place");
        let next = match worker.run(&communicator, place) {
            Ok(Some(next)) => next,
            Ok(None) => return Ok(()),
            Err(_) if worker.may_end() => return Ok(()),
            // Another worker is lost.
            Err(error) => worker.latest.after(place, HANG).ok_or(error)?,
        };
        communicator = communicator.regroup(&next.options(HANG))?;
        place = next;
    }
}

struct Worker {
    job: String,
    folder: PathBuf,
    tensor: Tensor,
    /// The place that it read last.
    latest: Latest,
}

impl Worker {
    fn may_end(&self) -> bool {
        self.folder.join(&self.job).exists()
    }

    /// Adds up with the others, and notes it. Then waits until all have read the same next place; none: all may end.
    fn run(&self, communicator: &Communicator, place: Place) -> Result<Option<Place>> {
        let Place { generation, rank, workers } = place;
        let all = u64::from(workers);
        let sum = self.reduced(communicator, u64::from(rank), ReduceOp::Sum)?;
        ensure!(sum == all * (all - 1) / 2, "a wrong sum");
        let path = self.folder.join("notes");
        let mut notes = std::fs::File::options().append(true).create(true).open(path)?;
        let note = format!("{} {generation} {rank} {workers} {}\n", self.job, std::process::id());
        notes.write_all(note.as_bytes())?;
        loop {
            // All regroup after the same operation, and for the same generation.
            let next = self.latest.get();
            let least = self.reduced(communicator, next.generation, ReduceOp::Min)?;
            let largest = self.reduced(communicator, next.generation, ReduceOp::Max)?;
            if is_agreed(generation, least, largest) {
                return Ok(Some(next));
            }
            if self.reduced(communicator, u64::from(self.may_end()), ReduceOp::Max)? > 0 {
                return Ok(None);
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// What all ranks have, as one.
    fn reduced(&self, communicator: &Communicator, own: u64, by: ReduceOp) -> Result<u64> {
        Ok(reduced(communicator, &self.tensor, own, by, HANG)?)
    }
}
