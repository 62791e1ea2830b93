//! One rank of a ring of bare TCP sockets, as the bound of such a ring. It moves what a collective's ring must move, and reduces
//! nothing. Rank 0 prints a line of JSON a size, as the peers' programs do.
#![forbid(unsafe_code)]

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use harmonaize_bench::measure::Effort;
use serde_json::json;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// What is read at once, and forwarded from there.
const CHUNK: usize = 256 << 10;
/// Up to this size a message fits into a socket's buffer, and is written without the help of a thread.
const SHORT: usize = 32 << 10;
/// How long a rank waits for its neighbours.
const PATIENCE: Duration = Duration::from_secs(60);

/// Times rounds of a ring.
#[derive(Parser)]
struct Arguments {
    /// This rank, from 0
    #[arg(long)]
    rank: usize,
    /// Where each rank listens, in order
    #[arg(long, value_delimiter = ',', required = true)]
    addresses: Vec<SocketAddr>,
    /// all_reduce, which goes round twice, all_gather or reduce_scatter
    collective: String,
    /// Microseconds that a size may take; at least three rounds are timed
    budget_us: f64,
    /// BYTES:ROUNDS, bytes of the larger tensor
    sizes: Vec<Effort>,
}

/// The two connections of a rank.
struct Ring {
    ranks: usize,
    next: TcpStream,
    previous: TcpStream,
    /// Tells the thread that writes how many bytes may go.
    permits: Sender<usize>,
    /// Says of each permit that its bytes are with the kernel.
    written: Receiver<()>,
    open: usize,
    buffer: Vec<u8>,
}

impl Ring {
    fn join(rank: usize, addresses: &[SocketAddr]) -> Result<Self> {
        let own = addresses.get(rank).context("no such rank")?;
        let neighbour = addresses.get((rank + 1) % addresses.len()).context("no next rank")?;
        let listener = TcpListener::bind(own).with_context(|| format!("cannot listen on {own}"))?;
        let deadline = Instant::now() + PATIENCE;
        let next = loop {
            match TcpStream::connect_timeout(neighbour, PATIENCE) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > deadline => bail!("cannot reach {neighbour}: {error}"),
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        let (previous, _) = listener.accept()?;
        for stream in [&next, &previous] {
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.set_write_timeout(Some(PATIENCE))?;
        }
        let (permits, permitted) = channel::<usize>();
        let (tell, written) = channel();
        let mut writes = next.try_clone()?;
        std::thread::spawn(move || {
            let data = vec![0x5a; CHUNK];
            for mut left in permitted {
                while left > 0 {
                    let part = data.get(..left.min(CHUNK)).unwrap_or(&data);
                    // A neighbour that is gone shows as the end of what is read.
                    if writes.write_all(part).is_err() {
                        return;
                    }
                    left -= part.len();
                }
                if tell.send(()).is_err() {
                    return;
                }
            }
        });
        Ok(Self { ranks: addresses.len(), next, previous, permits, written, open: 0, buffer: vec![0; CHUNK] })
    }

    fn send(&mut self, bytes: usize, short: bool) -> Result<()> {
        if short {
            self.next.write_all(self.buffer.get(..bytes).context("too long")?)?;
        } else {
            self.permits.send(bytes)?;
            self.open += 1;
        }
        Ok(())
    }

    /// Moves `steps` blocks on: each rank sends one, and forwards what it receives but for the last.
    fn run(&mut self, block: usize, steps: usize) -> Result<()> {
        let short = block <= SHORT;
        self.send(block, short)?;
        for step in 1..=steps {
            let mut left = block;
            while left > 0 {
                let part = left.min(CHUNK);
                self.previous.read_exact(self.buffer.get_mut(..part).context("no room")?)?;
                if step < steps {
                    self.send(part, short)?;
                }
                left -= part;
            }
        }
        for _ in 0..std::mem::take(&mut self.open) {
            self.written.recv()?;
        }
        Ok(())
    }

    /// The greatest of what all ranks say.
    fn greatest(&mut self, mut own: f64) -> Result<f64> {
        for _ in 1..self.ranks {
            self.next.write_all(&own.to_le_bytes())?;
            let mut bytes = [0; 8];
            self.previous.read_exact(&mut bytes)?;
            own = own.max(f64::from_le_bytes(bytes));
        }
        Ok(own)
    }

    /// The greatest of the ranks' medians, in microseconds.
    fn measure(&mut self, block: usize, steps: usize, rounds: usize, budget_us: f64) -> Result<f64> {
        let time = |this: &mut Self| -> Result<f64> {
            let began = Instant::now();
            this.run(block, steps)?;
            Ok(began.elapsed().as_secs_f64() * 1e6)
        };
        time(self)?;
        let first = time(self)?;
        let first = self.greatest(first)?;
        let rounds = rounds.min(((budget_us / first) as usize).max(3));
        for _ in 0..rounds / 10 {
            time(self)?;
        }
        self.greatest(0.0)?;
        let mut times = Vec::with_capacity(rounds);
        for _ in 0..rounds {
            times.push(time(self)?);
        }
        self.greatest(harmonaize_bench::statistics::median(&mut times))
    }
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let ranks = arguments.addresses.len();
    ensure!(ranks >= 2, "a ring has two ranks at least");
    let rounds_of_the_ring = match arguments.collective.as_str() {
        "all_reduce" => 2,
        "all_gather" | "reduce_scatter" => 1,
        other => bail!("{other} is not done by a ring"),
    };
    let mut ring = Ring::join(arguments.rank, &arguments.addresses)?;
    for Effort { bytes, rounds } in arguments.sizes {
        let steps = rounds_of_the_ring * (ranks - 1);
        let p50_us = ring.measure(bytes.div_ceil(ranks), steps, rounds, arguments.budget_us)?;
        if arguments.rank == 0 {
            println!("{}", json!({ "bytes": bytes, "p50_us": p50_us, "wrong": 0 }));
        }
    }
    Ok(())
}
