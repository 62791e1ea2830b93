//! A tenant that adopts nothing. It has plain TCP of its own between two hosts without agents, some bytes every now
//! and then.

use crate::clock::realtime_ns;
use crate::fabric::Fabric;
use anyhow::{Context, Result};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes of a transfer, more than shaped links let pass at once, and how often there is one.
const BYTES: usize = 512 << 10;
const EVERY: Duration = Duration::from_millis(200);
/// How long one may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// One transfer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Transfer {
    /// When it began, by CLOCK_REALTIME.
    pub at_ns: u64,
    /// How long it took, in milliseconds.
    pub ms: f64,
}

/// Its traffic, until it is stopped or dropped.
#[derive(Debug)]
pub struct Bystander {
    stop: Arc<AtomicBool>,
    ends: Option<[JoinHandle<Result<Vec<Transfer>>>; 2]>,
}

impl Bystander {
    /// Begins to send from one host to another.
    pub fn start(fabric: &Fabric, from: &str, to: &str) -> Result<Self> {
        let (sender, receiver) = (fabric.host(from)?, fabric.host(to)?);
        let address = *receiver.addresses.first().with_context(|| format!("{to} has no address"))?;
        let listener = receiver.namespace.enter(|| TcpListener::bind((address, 0)))??;
        let target = listener.local_addr()?;
        let stream = sender.namespace.enter(|| TcpStream::connect_timeout(&target, PATIENCE))??;
        let (other, _) = listener.accept()?;
        for end in [&stream, &other] {
            end.set_read_timeout(Some(PATIENCE))?;
            end.set_nodelay(true)?;
        }
        let stop = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stop);
        let ends = [std::thread::spawn(move || send(stream, &told)), std::thread::spawn(|| answer(other))];
        Ok(Self { stop, ends: Some(ends) })
    }

    /// Ends it; all its transfers.
    pub fn stop(mut self) -> Result<Vec<Transfer>> {
        self.end()
    }

    fn end(&mut self) -> Result<Vec<Transfer>> {
        self.stop.store(true, Ordering::Relaxed);
        let mut transfers = Vec::new();
        for end in self.ends.take().into_iter().flatten() {
            let found = end.join().map_err(|_| anyhow::anyhow!("a bystander's thread has panicked"))?;
            transfers.extend(found.context("the bystander's traffic")?);
        }
        Ok(transfers)
    }
}

impl Drop for Bystander {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            eprintln!("warning: {error:#}");
        }
    }
}

fn send(mut stream: TcpStream, stop: &AtomicBool) -> Result<Vec<Transfer>> {
    let (bytes, mut answer, mut transfers) = (vec![0x5a; BYTES], [0], Vec::new());
    while !stop.load(Ordering::Relaxed) {
        let (at_ns, began) = (realtime_ns()?, Instant::now());
        stream.write_all(&bytes)?;
        stream.read_exact(&mut answer)?;
        transfers.push(Transfer { at_ns, ms: began.elapsed().as_secs_f64() * 1e3 });
        std::thread::sleep(EVERY.saturating_sub(began.elapsed()));
    }
    Ok(transfers)
}

/// A byte for each transfer, until the other end has closed.
fn answer(mut stream: TcpStream) -> Result<Vec<Transfer>> {
    let mut buffer = vec![0; BYTES];
    let mut got = 0;
    loop {
        match stream.read(&mut buffer)? {
            0 => return Ok(Vec::new()),
            more => got += more,
        }
        while got >= BYTES {
            got -= BYTES;
            stream.write_all(&[1])?;
        }
    }
}
