//! What an AllReduce of 64 MiB between two engines over TCP takes, and of which threads' processor time. Each engine has a
//! thread of its own, as in an agent. Cases: without and with a sender beside each engine's thread. Runs of the cases take turns; a
//! run is the median of its operations. `LARGE_RUNS` sets how many runs, `LARGE_ONLY` names one protection.
#![allow(missing_docs, dead_code, clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)] // no part of the product

#[path = "../tests/engine/common.rs"]
mod common;

use common::{Tenant, World, call};
use harmonaize_abi::{Collective, Region, Submission};
use harmonaize_engine::{Command, Handle, start};
use harmonaize_plan::Tuning;
use harmonaize_transport::Transport;
use harmonaize_transport::tcp::LinkProtection::{self, Authenticated, Encrypted};
use harmonaize_transport::tcp::{Config, TcpTransport};
use std::collections::BTreeMap;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const OUTPUT: u64 = 64 * MIB;
/// As an agent has it.
const SENDER: usize = 256 << 10;
/// Bytes of a tensor, and operations of a run.
const CASES: [(u64, usize); 3] = [(1 << 10, 500), (MIB, 50), (64 * MIB, 8)];

/// Two hosts' engines, which run, and their tenants.
struct Running {
    tenants: Vec<Tenant>,
    engines: Vec<(Handle, JoinHandle<()>)>,
}

fn main() {
    let runs = std::env::var("LARGE_RUNS").ok().and_then(|runs| runs.parse().ok()).unwrap_or(7);
    let only = std::env::var("LARGE_ONLY").ok();
    let chosen =
        |protection: &LinkProtection| only.as_ref().is_none_or(|only| *only == protection.to_string());
    let protections = [LinkProtection::None, Authenticated, Encrypted].into_iter().filter(chosen);
    let cases: Vec<_> =
        protections.flat_map(|protection| [None, Some(SENDER)].map(|sender| (protection, sender))).collect();
    println!("{runs} runs of each, interleaved; medians, with smallest and largest");
    for (bytes, operations) in CASES {
        let mut times = vec![Vec::new(); cases.len()];
        let mut shares = vec![BTreeMap::<String, f64>::new(); cases.len()];
        for run in 0..=runs {
            for (at, case) in cases.iter().enumerate() {
                let mut world = begin(*case);
                once(&mut world, bytes);
                let before = processor_times();
                let mut each: Vec<_> = (0..operations).map(|_| once(&mut world, bytes)).collect();
                if run > 0 {
                    times[at].push(middle(&mut each)[1]);
                    for (thread, time) in processor_times() {
                        let used = time - before.get(&thread).copied().unwrap_or(0.0);
                        *shares[at].entry(thread).or_default() += used / operations as f64 / runs as f64;
                    }
                }
                end(world);
            }
        }
        for (((protection, sender), times), shares) in cases.iter().zip(&mut times).zip(&shares) {
            let [first, median, last] = middle(times).map(|time| time.as_secs_f64() * 1e6);
            let sender = if sender.is_some() { "with a sender" } else { "one thread" };
            println!("{bytes} bytes, {protection}, {sender}: {median:.1} us ({first:.1} to {last:.1})");
            for (thread, time) in shares.iter().filter(|(_, time)| **time > 1.0) {
                println!("    thread {thread}: {time:.1} us of processor time an operation");
            }
        }
    }
}

fn begin((protection, sender_bytes): (LinkProtection, Option<usize>)) -> Running {
    let tuning = Tuning { chunk_bytes: 256 << 10, ..Tuning::default() };
    let config = || Config { protection, sender_bytes, ..Config::new("127.0.0.1:0".parse().unwrap()) };
    let bind = |_| Box::new(TcpTransport::bind(config()).unwrap()) as Box<dyn Transport + Send>;
    let transports = (0..2).map(bind).collect();
    let mut world = World::with_sizes(transports, &[vec![0], vec![1]], tuning, 2 * OUTPUT, 4);
    let spin = Duration::from_micros(50);
    let engines = std::mem::take(&mut world.engines).into_iter().enumerate();
    let engines = engines.map(|(number, engine)| start(engine, number, spin).unwrap()).collect();
    Running { tenants: std::mem::take(&mut world.tenants), engines }
}

fn end(world: Running) {
    for (handle, thread) in world.engines {
        handle.command(Command::Stop).unwrap();
        thread.join().unwrap();
    }
}

fn once(world: &mut Running, bytes: u64) -> Duration {
    let [input, output] = [0, OUTPUT].map(|offset| Region { offset, bytes });
    let start = Instant::now();
    for tenant in &mut world.tenants {
        let communicator = tenant.communicator;
        let call = call(Collective::AllReduce, bytes / 8, 1, 0, 0, 0);
        tenant.end.submit(&Submission { communicator, input, output, ..call }).unwrap();
    }
    for tenant in &mut world.tenants {
        loop {
            tenant.end.progress().unwrap();
            if let Some(completion) = tenant.end.completion().unwrap() {
                assert_eq!(completion.status, 0);
                break;
            }
            // The tenants are not what is measured.
            std::thread::sleep(Duration::from_micros(20));
        }
        assert!(start.elapsed() < Duration::from_secs(20));
    }
    start.elapsed()
}

/// Microseconds of processor time of each thread of this process, by name.
fn processor_times() -> BTreeMap<String, f64> {
    let mut times = BTreeMap::new();
    for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
        let read = |what: &str| std::fs::read_to_string(task.path().join(what)).unwrap_or_default();
        let used: f64 = read("schedstat").split(' ').next().and_then(|used| used.parse().ok()).unwrap_or(0.0);
        *times.entry(read("comm").trim().to_owned()).or_default() += used / 1e3;
    }
    times
}

/// The smallest, the median and the largest.
fn middle(times: &mut [Duration]) -> [Duration; 3] {
    times.sort_unstable();
    [0, times.len() / 2, times.len() - 1].map(|at| times[at])
}
