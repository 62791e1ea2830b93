//! A flow that is silent and then sends as fast as it goes, again and again: what congests a link at a known moment.
#![forbid(unsafe_code)]

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use harmonaize_testkit::clock::monotonic_ns;
use serde_json::json;
use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

/// How long either end waits for the other.
const PATIENCE: Duration = Duration::from_secs(20);
/// Bytes of one write.
const BUFFER: usize = 256 << 10;

/// Sends in bursts.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    end: End,
}

#[derive(Subcommand)]
enum End {
    /// Listens on an address (port 0: any), prints it, and takes one stream to its end
    Receive {
        /// Where
        address: SocketAddr,
    },
    /// Sends; each burst is a line of JSON with its beginning and end in nanoseconds of CLOCK_MONOTONIC
    Send {
        /// Where to
        address: SocketAddr,
        /// How many bursts
        #[arg(long, default_value_t = 50)]
        bursts: u32,
        /// Bytes of each
        #[arg(long, default_value_t = 12 << 20)]
        bytes: usize,
        /// Silence before each, in milliseconds
        #[arg(long, default_value_t = 500)]
        pause_ms: u64,
    },
}

fn main() -> Result<()> {
    match Arguments::parse().end {
        End::Receive { address } => receive(address),
        End::Send { address, bursts, bytes, pause_ms } => {
            send(address, bursts, bytes, Duration::from_millis(pause_ms))
        }
    }
}

fn receive(address: SocketAddr) -> Result<()> {
    let listener = TcpListener::bind(address).with_context(|| format!("cannot listen on {address}"))?;
    println!("{}", listener.local_addr()?);
    let (mut stream, _) = listener.accept()?;
    stream.set_read_timeout(Some(PATIENCE))?;
    std::io::copy(&mut stream, &mut std::io::sink())?;
    Ok(())
}

fn send(address: SocketAddr, bursts: u32, bytes: usize, pause: Duration) -> Result<()> {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)
        .with_context(|| format!("cannot connect to {address}"))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let buffer = vec![0x5a; BUFFER];
    for burst in 0..bursts {
        std::thread::sleep(pause);
        let began_ns = monotonic_ns()?;
        let mut left = bytes;
        while left > 0 {
            let part = left.min(BUFFER);
            stream.write_all(buffer.get(..part).context("buffer")?)?;
            left -= part;
        }
        let mut out = std::io::stdout().lock();
        writeln!(
            out,
            "{}",
            json!({"burst": burst, "began_ns": began_ns, "handed_over_ns": monotonic_ns()?})
        )?;
        out.flush()?;
    }
    Ok(())
}
