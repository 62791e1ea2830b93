//! Many connections from one host to another, each of which speaks now and then. Telemetry has to keep up with them.
#![forbid(unsafe_code)]

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// How long either end waits for the other.
const PATIENCE: Duration = Duration::from_secs(20);
/// Bytes of a message.
const MESSAGE: usize = 64;

/// Holds many connections.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    end: End,
}

#[derive(Subcommand)]
enum End {
    /// Listens on an address (port 0: any), prints it, and takes so many connections; ends with the first of them
    Receive {
        /// Where
        address: SocketAddr,
        /// How many
        #[arg(long, default_value_t = 10_000)]
        flows: usize,
    },
    /// Connects so often, prints that it has, and says something on one connection after the other
    Send {
        /// Where to
        address: SocketAddr,
        /// How many
        #[arg(long, default_value_t = 10_000)]
        flows: usize,
        /// Messages a second, over all
        #[arg(long, default_value_t = 1000)]
        per_second: u32,
        /// For how long, in seconds
        #[arg(long, default_value_t = 10)]
        seconds: u64,
    },
}

fn main() -> Result<()> {
    match Arguments::parse().end {
        End::Receive { address, flows } => {
            allow(flows)?;
            receive(address, flows)
        }
        End::Send { address, flows, per_second, seconds } => {
            allow(flows)?;
            send(address, flows, per_second, Duration::from_secs(seconds))
        }
    }
}

/// Lets this process have so many sockets.
fn allow(flows: usize) -> Result<()> {
    let wanted = flows as u64 + 64;
    let limit = getrlimit(Resource::Nofile);
    let maximum = limit.maximum.map(|maximum| maximum.max(wanted));
    if limit.current.is_some_and(|current| current < wanted) {
        setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum })
            .with_context(|| format!("{wanted} files cannot be had"))?;
    }
    Ok(())
}

fn receive(address: SocketAddr, flows: usize) -> Result<()> {
    let listener = TcpListener::bind(address).with_context(|| format!("cannot listen on {address}"))?;
    println!("{}", listener.local_addr()?);
    // What is said stays in the sockets' buffers, but for the first connection.
    let streams = (0..flows).map(|_| listener.accept().map(|(stream, _)| stream));
    let streams: Vec<TcpStream> = streams.collect::<Result<_, _>>()?;
    let first = streams.first().context("no connection is asked for")?;
    std::io::copy(&mut first.take(u64::MAX), &mut std::io::sink())?;
    Ok(())
}

fn send(address: SocketAddr, flows: usize, per_second: u32, length: Duration) -> Result<()> {
    ensure!(flows > 0 && per_second > 0, "at least one connection and one message a second");
    let mut streams = Vec::with_capacity(flows);
    for _ in 0..flows {
        streams.push(TcpStream::connect_timeout(&address, PATIENCE)?);
    }
    println!("connected");
    let began = Instant::now();
    for (number, place) in (0u32..).zip((0..flows).cycle()) {
        let due = Duration::from_secs(1).saturating_mul(number) / per_second;
        if due >= length {
            break;
        }
        std::thread::sleep(due.saturating_sub(began.elapsed()));
        streams.get_mut(place).context("no such connection")?.write_all(&[0; MESSAGE])?;
    }
    Ok(())
}
