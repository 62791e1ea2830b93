//! One rank of a ring of bare TCP sockets, as the bound of such a ring. It moves what a collective's ring must move, and reduces
//! nothing. With `--service` another thread than the rank's does so, and reduces: the least that any service costs whose work another
//! than the ranks does. Rank 0 prints a line of JSON a size, as the peers' programs do.
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
    /// A thread apart from the rank's goes round, and sums what comes; all_reduce alone
    #[arg(long)]
    service: bool,
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
    service: Option<Service>,
}

/// A rank that another thread serves. Each sleeps while it waits for the other.
struct Service {
    /// Says that the rank has begun an operation.
    begun: Receiver<()>,
    /// Tells the rank that it is done.
    done: Sender<()>,
    /// Microseconds of each operation, as the rank has seen it.
    times_us: Receiver<f64>,
    own: Vec<u8>,
    result: Vec<u8>,
}

impl Service {
    fn start() -> Self {
        let ((begin, begun), (done, ended), (tell, times_us)) = (channel(), channel(), channel());
        std::thread::spawn(move || {
            // It ends with the thread that serves it.
            let mut began = Instant::now();
            while begin.send(()).is_ok() && ended.recv().is_ok() {
                let took = began.elapsed().as_secs_f64() * 1e6;
                began = Instant::now();
                if tell.send(took).is_err() {
                    return;
                }
            }
        });
        Self { begun, done, times_us, own: Vec::new(), result: Vec::new() }
    }

    /// Tensors of so many bytes, all of whose pages are there.
    fn tensors(&mut self, bytes: usize) {
        (self.own, self.result) = (vec![1; bytes], vec![2; bytes]);
    }

    /// Takes in a part of the tensor that came, at this offset. It is summed with what the rank has, or is the sum of all already.
    fn take(&mut self, part: &mut [u8], at: usize, sums: bool, complete: bool) {
        let to = at.saturating_add(part.len());
        let (Some(own), Some(result)) = (self.own.get(at..to), self.result.get_mut(at..to)) else { return };
        if sums {
            for (sum, own) in part.chunks_exact_mut(4).zip(own.chunks_exact(4)) {
                let [one, other] = [&*sum, own].map(|bytes| bytes.try_into().map_or(0.0, f32::from_ne_bytes));
                sum.copy_from_slice(&(one + other).to_ne_bytes());
            }
        }
        if complete {
            result.copy_from_slice(part);
        }
    }
}

impl Ring {
    fn join(rank: usize, addresses: &[SocketAddr], service: Option<Service>) -> Result<Self> {
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
        let (ranks, buffer) = (addresses.len(), vec![0; CHUNK]);
        Ok(Self { ranks, next, previous, permits, written, open: 0, buffer, service })
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
                let came = self.buffer.get_mut(..part).context("no room")?;
                self.previous.read_exact(came)?;
                if let Some(service) = &mut self.service {
                    let at = (steps - step) % self.ranks * block + block - left;
                    service.take(came, at, step < self.ranks, step + 1 >= self.ranks);
                }
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
        if let Some(service) = &mut self.service {
            service.tensors(block * self.ranks);
        }
        self.once(block, steps)?;
        let first = self.once(block, steps)?;
        let first = self.greatest(first)?;
        let rounds = rounds.min(((budget_us / first) as usize).max(3));
        for _ in 0..rounds / 10 {
            self.once(block, steps)?;
        }
        self.greatest(0.0)?;
        if self.service.is_some() {
            // The rank began its next operation before all met: that one is not timed.
            self.once(block, steps)?;
        }
        let mut times = Vec::with_capacity(rounds);
        for _ in 0..rounds {
            times.push(self.once(block, steps)?);
        }
        self.greatest(harmonaize_bench::statistics::median(&mut times))
    }

    /// One operation; the microseconds that it took the rank.
    fn once(&mut self, block: usize, steps: usize) -> Result<f64> {
        if let Some(service) = &self.service {
            service.begun.recv()?;
        }
        let began = Instant::now();
        self.run(block, steps)?;
        let took = began.elapsed().as_secs_f64() * 1e6;
        let Some(service) = &self.service else { return Ok(took) };
        service.done.send(())?;
        Ok(service.times_us.recv()?)
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
    let sums = arguments.collective == "all_reduce";
    ensure!(sums || !arguments.service, "--service sums, and so it is for all_reduce alone");
    let mut ring = Ring::join(arguments.rank, &arguments.addresses, arguments.service.then(Service::start))?;
    for Effort { bytes, rounds } in arguments.sizes {
        let steps = rounds_of_the_ring * (ranks - 1);
        let p50_us = ring.measure(bytes.div_ceil(ranks), steps, rounds, arguments.budget_us)?;
        if arguments.rank == 0 {
            println!("{}", json!({ "bytes": bytes, "p50_us": p50_us, "wrong": 0 }));
        }
    }
    Ok(())
}
