//! A tenant that adopts nothing: plain TCP of its own between two hosts without agents, some bytes every now and then.

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

/// Its traffic, until it is stopped or dropped.
#[derive(Debug)]
pub(super) struct Bystander {
    stop: Arc<AtomicBool>,
    ends: Option<[JoinHandle<Result<Vec<f64>>>; 2]>,
}

impl Bystander {
    /// Begins to send from one host to another.
    pub(super) fn start(fabric: &Fabric, from: &str, to: &str) -> Result<Self> {
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

    /// Ends it; the milliseconds that each transfer took.
    pub(super) fn stop(mut self) -> Result<Vec<f64>> {
        self.end()
    }

    fn end(&mut self) -> Result<Vec<f64>> {
        self.stop.store(true, Ordering::Relaxed);
        let mut times = Vec::new();
        for end in self.ends.take().into_iter().flatten() {
            let found = end.join().map_err(|_| anyhow::anyhow!("a bystander's thread has panicked"))?;
            times.extend(found.context("the bystander's traffic")?);
        }
        Ok(times)
    }
}

impl Drop for Bystander {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            eprintln!("warning: {error:#}");
        }
    }
}

fn send(mut stream: TcpStream, stop: &AtomicBool) -> Result<Vec<f64>> {
    let (bytes, mut answer, mut times) = (vec![0x5a; BYTES], [0], Vec::new());
    while !stop.load(Ordering::Relaxed) {
        let began = Instant::now();
        stream.write_all(&bytes)?;
        stream.read_exact(&mut answer)?;
        times.push(began.elapsed().as_secs_f64() * 1e3);
        std::thread::sleep(EVERY.saturating_sub(began.elapsed()));
    }
    Ok(times)
}

/// A byte for each transfer, until the other end has closed.
fn answer(mut stream: TcpStream) -> Result<Vec<f64>> {
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
