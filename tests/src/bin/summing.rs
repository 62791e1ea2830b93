//! A rank of a job that adds up until an operation fails. It prints a line for each, with the milliseconds that it took, and
//! then why.

#![forbid(unsafe_code)]

use anyhow::{Result, ensure};
use clap::Parser;
use harmonaize_client::{
    AttachOptions, Client, Communicator, Dtype, Error, OperationOptions, Rank, ReduceOp, Tensor,
};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Elements of the sum: 1 MiB.
const ELEMENTS: usize = 128 << 10;
/// Longer than any operation may take.
const HANG: Duration = Duration::from_secs(30);

/// A rank of a job that adds up until an operation fails.
#[derive(Parser)]
struct Arguments {
    /// The agent's socket
    #[arg(long)]
    socket: PathBuf,
    /// Of the job
    #[arg(long)]
    name: String,
    /// Which rank
    #[arg(long)]
    rank: u32,
    /// Of how many
    #[arg(long)]
    ranks: u32,
    /// The time-out of its operations, in milliseconds
    #[arg(long)]
    timeout: u64,
}

fn main() -> Result<()> {
    let Arguments { socket, name, rank, ranks, timeout } = Arguments::parse();
    let client = Client::attach(&socket, AttachOptions { arena_bytes: 2 << 20, ..AttachOptions::default() })?;
    let joined = client.join(&name, Rank(rank), ranks, HANG)?;
    let timeout = Some(Duration::from_millis(timeout));
    let communicator = joined.with(OperationOptions { timeout, ..OperationOptions::default() })?;
    let tensor = client.tensor(Dtype::U64, ELEMENTS as u64)?;
    for round in 1_u64.. {
        let input = vec![round; ELEMENTS];
        tensor.write(0, &input)?;
        let begun = Instant::now();
        let ended = sum(&communicator, &tensor);
        println!("{}", begun.elapsed().as_millis());
        if let Err(error) = ended {
            println!("ended: {error}");
            return Ok(());
        }
        let mut found = input;
        tensor.read(0, &mut found)?;
        ensure!(found.iter().all(|sum| *sum == round * u64::from(ranks)), "sum {round} is wrong");
    }
    Ok(())
}

fn sum(communicator: &Communicator, tensor: &Tensor) -> Result<(), Error> {
    communicator.all_reduce_in_place(tensor, ReduceOp::Sum)?.wait(HANG)?;
    Ok(())
}
