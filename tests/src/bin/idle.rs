//! A rank of many jobs of many tenants that does nothing. It attaches for each, joins, meets the others once, and stays.

#![forbid(unsafe_code)]

use anyhow::Result;
use clap::Parser;
use harmonaize_client::{AttachOptions, Client, Rank};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::path::PathBuf;
use std::time::Duration;

/// How long others may take to join, and to meet.
const PATIENCE: Duration = Duration::from_secs(60);

/// A rank of many jobs of many tenants that does nothing.
#[derive(Parser)]
struct Arguments {
    /// Which rank
    #[arg(long)]
    rank: u32,
    /// Of how many
    #[arg(long)]
    ranks: u32,
    /// Communicators of each tenant
    #[arg(long)]
    communicators: u32,
    /// The socket of each tenant
    #[arg(required = true)]
    sockets: Vec<PathBuf>,
}

fn main() -> Result<()> {
    let Arguments { rank, ranks, communicators, sockets } = Arguments::parse();
    // Attachments have a few descriptors each.
    let most = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most })?;
    let (mut clients, mut jobs) = (Vec::new(), Vec::new());
    for socket in &sockets {
        let options = AttachOptions { arena_bytes: 64 << 10, ..AttachOptions::default() };
        let client = Client::attach(socket, options)?;
        for number in 0..communicators {
            let communicator = client.join(&format!("idle{number}"), Rank(rank), ranks, PATIENCE)?;
            communicator.barrier()?.wait(PATIENCE)?;
            jobs.push(communicator);
        }
        clients.push(client);
    }
    println!("{} communicators", jobs.len());
    // Until it is ended.
    loop {
        std::thread::park();
    }
}
