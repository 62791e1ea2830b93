//! Tenants that read events, a process of each on one host. It measures how long after the moment at which an event is made
//! it is there.
#![forbid(unsafe_code)]

use anyhow::{Context, Result};
use clap::Parser;
use harmonaize_bench::statistics::percentile;
use harmonaize_client::{AttachOptions, Client, EventKind, Rank};
use rustix::time::{ClockId, clock_gettime};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Provider's events are made at whole seconds of CLOCK_REALTIME.
const TICK_NS: u64 = 1_000_000_000;
/// How long a reader waits at once.
const WAIT: Duration = Duration::from_secs(1);
/// How long a process may wait for its communicator.
const PATIENCE: Duration = Duration::from_secs(60);

/// Subscribes for many tenants.
#[derive(Parser)]
struct Arguments {
    /// A file with the socket of a tenant on each line
    #[arg(long)]
    sockets: PathBuf,
    /// How long to read, from when all have joined
    #[arg(long)]
    seconds: u64,
}

fn realtime() -> u64 {
    let now = clock_gettime(ClockId::Realtime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn main() -> Result<()> {
    let Arguments { sockets, seconds } = Arguments::parse();
    let list = std::fs::read_to_string(&sockets).with_context(|| format!("{}", sockets.display()))?;
    let sockets: Vec<&Path> = list.lines().map(Path::new).collect();
    let (ready, stop) = (Barrier::new(sockets.len() + 1), AtomicBool::new(false));
    let mut late: Vec<f64> = std::thread::scope(|scope| -> Result<Vec<f64>> {
        let one = |socket| {
            let (ready, stop) = (&ready, &stop);
            let small = std::thread::Builder::new().stack_size(256 << 10);
            small.spawn_scoped(scope, move || {
                let read = subscribe(socket);
                ready.wait();
                let (_client, _job, mut events) = read?;
                listen(&mut events, stop)
            })
        };
        let threads = sockets.iter().map(|socket| one(*socket)).collect::<Result<Vec<_>, _>>()?;
        ready.wait();
        println!("ready");
        std::thread::sleep(Duration::from_secs(seconds));
        stop.store(true, Ordering::Relaxed);
        let mut all = Vec::new();
        for thread in threads {
            all.extend(thread.join().map_err(|_| anyhow::anyhow!("a reader panicked"))??);
        }
        Ok(all)
    })?;
    let mut of = |part| percentile(&mut late, part);
    let (p50, p99, most) = (of(0.5), of(0.99), of(1.0));
    let events = late.len();
    println!("{}", json!({ "events": events, "p50_ms": p50, "p99_ms": p99, "most_ms": most }));
    Ok(())
}

type Subscribed = (Client, harmonaize_client::Communicator, harmonaize_client::Events);

fn subscribe(socket: &Path) -> Result<Subscribed> {
    let options = AttachOptions { arena_bytes: 4096, entries: 2, ..AttachOptions::default() };
    let client = Client::attach(socket, options)?;
    let job = client.join("job", Rank(0), 1, PATIENCE)?;
    let mut events = client.events(None);
    events.read(Duration::ZERO)?;
    Ok((client, job, events))
}

/// Collects how late each event of maintenance comes, in milliseconds. The time counts from the whole second after the event's moment;
/// it comes up in that second.
fn listen(events: &mut harmonaize_client::Events, stop: &AtomicBool) -> Result<Vec<f64>> {
    let mut late = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let batch = events.read(WAIT)?;
        let now = realtime();
        let told = batch.events.iter().filter(|event| matches!(event.kind, EventKind::Maintenance { .. }));
        late.extend(told.map(|event| (now as f64 - (event.since_ns + TICK_NS) as f64) / 1e6));
    }
    Ok(late)
}
