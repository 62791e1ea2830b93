//! One TCP stream, as fast as it goes: the goodput that a link gives to bare sockets.
#![forbid(unsafe_code)]

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Bytes of one write and read.
const BUFFER: usize = 256 << 10;
/// How long either end waits for the other.
const PATIENCE: Duration = Duration::from_secs(20);

/// Measures the goodput of one TCP stream.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    end: End,
}

#[derive(Subcommand)]
enum End {
    /// Listens on an address (port 0: any), prints it, takes one stream, and prints bytes a second after the warm-up as JSON
    Receive {
        /// Where
        address: SocketAddr,
        /// Bytes at the beginning that are not timed
        #[arg(long, default_value_t = 4 << 20)]
        warmup: u64,
    },
    /// Sends
    Send {
        /// Where to
        address: SocketAddr,
        /// How many bytes
        #[arg(long, default_value_t = 64 << 20)]
        bytes: u64,
    },
}

fn main() -> Result<()> {
    match Arguments::parse().end {
        End::Receive { address, warmup } => receive(address, warmup),
        End::Send { address, bytes } => send(address, bytes),
    }
}

fn receive(address: SocketAddr, warmup: u64) -> Result<()> {
    let listener = TcpListener::bind(address).with_context(|| format!("cannot listen on {address}"))?;
    println!("{}", listener.local_addr()?);
    let (mut stream, _) = listener.accept()?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let (mut buffer, mut total, mut began) = (vec![0; BUFFER], 0u64, None);
    loop {
        let got = stream.read(&mut buffer)? as u64;
        if got == 0 {
            break;
        }
        total += got;
        if total >= warmup && began.is_none() {
            began = Some((Instant::now(), total));
        }
    }
    let (began, before) = began.context("the stream ended within its warm-up")?;
    let seconds = began.elapsed().as_secs_f64();
    ensure!(total > before && seconds > 0.0, "the stream ended within its warm-up");
    println!("{{\"bytes_per_second\":{}}}", (total - before) as f64 / seconds);
    Ok(())
}

fn send(address: SocketAddr, bytes: u64) -> Result<()> {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)
        .with_context(|| format!("cannot connect to {address}"))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let buffer = vec![0x5a; BUFFER];
    let mut left = bytes;
    while left > 0 {
        let part = usize::try_from(left.min(BUFFER as u64))?;
        stream.write_all(buffer.get(..part).context("buffer")?)?;
        left -= part as u64;
    }
    Ok(())
}
