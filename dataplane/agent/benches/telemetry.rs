//! What the telemetry thread takes of a core with ten thousand flows: packets that nobody sent run through the programs in the
//! kernel, and the thread's own processor time, user and system, is read.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // a benchmark alone

use harmonaize_agent::telemetry::{Setup, start};
use harmonaize_events::{Direction, Event, FlowKey, InterfaceTotals, Losses};
use harmonaize_loader::{
    Change, Collector, Cost, Counters, Endpoints, Error, Flows, Kernel, Options, Programs, Trial, Watched,
};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const FLOWS: u16 = 10_000;
/// How long each case is measured.
const LENGTH: Duration = Duration::from_secs(10);
/// The most that the thread may take: parts of a million of a core.
const BAR: u64 = 20_000;

/// The programs, shared with who feeds them packets.
struct Fed {
    programs: Arc<Mutex<Programs>>,
    kernel: Kernel,
    ring: OwnedFd,
}

impl Collector for Fed {
    fn kernel(&self) -> &Kernel {
        &self.kernel
    }
    fn missing(&self) -> &[String] {
        &[]
    }
    fn attach(&mut self, name: &str) -> Result<u32, Error> {
        self.programs.lock().unwrap().attach(name)
    }
    fn detach(&mut self, name: &str) -> Result<InterfaceTotals, Error> {
        self.programs.lock().unwrap().detach(name)
    }
    fn attached(&self) -> Vec<Watched> {
        Collector::attached(&*self.programs.lock().unwrap())
    }
    fn refresh(&mut self) -> Result<Vec<Change>, Error> {
        self.programs.lock().unwrap().refresh()
    }
    fn read_flows(&mut self, into: &mut Flows) -> Result<(), Error> {
        self.programs.lock().unwrap().read_flows(into)
    }
    fn read_flow(&self, flow: &FlowKey) -> Result<Option<Counters>, Error> {
        self.programs.lock().unwrap().read_flow(flow)
    }
    fn read_events(&mut self, limit: usize, with: &mut dyn FnMut(&Event)) -> Result<usize, Error> {
        self.programs.lock().unwrap().read_events(limit, with)
    }
    fn read_endpoints(&mut self, into: &mut Endpoints) -> Result<(), Error> {
        self.programs.lock().unwrap().read_endpoints(into)
    }
    fn totals(&self, index: u32) -> Result<InterfaceTotals, Error> {
        self.programs.lock().unwrap().totals(index)
    }
    fn losses(&self) -> Result<Losses, Error> {
        self.programs.lock().unwrap().losses()
    }
    fn forget(&mut self, flow: &FlowKey) -> Result<bool, Error> {
        self.programs.lock().unwrap().forget(flow)
    }
    fn cost(&self) -> Result<Cost, Error> {
        self.programs.lock().unwrap().cost()
    }
    fn wakes(&self) -> Option<BorrowedFd<'_>> {
        Some(self.ring.as_fd())
    }
}

/// A TCP segment from one of the ports, over IPv4, from its Ethernet header on.
fn packet(port: u16, sequence: u32) -> Vec<u8> {
    let mut packet = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0];
    packet.extend([0x45, 0, 0, 140, 0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    packet.extend(port.to_be_bytes());
    packet.extend([0, 80]);
    packet.extend(sequence.to_be_bytes());
    packet.extend([0, 0, 0, 0, 0x50, 0x10, 1, 0, 0, 0, 0, 0]);
    packet.extend([7; 100]);
    packet
}

/// The thread's share of a core while every flow has a packet in so long a time; none: while all rest. `gap` ends bursts.
fn measure(every: Option<Duration>, gap: Duration) -> (u64, f64, u64) {
    let options = Options { idle_gap: gap, ..Options::default() };
    let programs = Programs::open(&options).unwrap();
    let (kernel, ring) = (programs.kernel().clone(), programs.as_fd().try_clone_to_owned().unwrap());
    let programs = Arc::new(Mutex::new(programs));
    let fed = Fed { programs: Arc::clone(&programs), kernel, ring };
    let setup = Setup {
        host: "bench".into(),
        interfaces: vec!["lo".into()],
        rates: BTreeMap::new(),
        interval: Duration::from_millis(5),
        record: None,
        marks: None,
        decide: Box::new(|_| {}),
    };
    let (handle, thread) = start(setup, move || Ok(Box::new(fed))).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (stop, sent) = (AtomicBool::new(false), AtomicBool::new(false));
    let result = std::thread::scope(|scope| {
        let feeder = scope.spawn(|| {
            let (begun, mut packets, mut sequence) = (Instant::now(), 0_u64, 0_u32);
            let pause = every.unwrap_or(Duration::ZERO) / u32::from(FLOWS);
            while !stop.load(Ordering::Relaxed) {
                for port in 0..FLOWS {
                    let bytes = packet(1000 + port, sequence);
                    let trial =
                        Trial { direction: Direction::Egress, packet: &bytes, segments: None, repeat: 1 };
                    programs.lock().unwrap().trial(trial).unwrap();
                    packets += 1;
                    // Some at a time, for a sleep is no shorter than some 60 us.
                    while every.is_some()
                        && begun.elapsed() + Duration::from_millis(1) < pause * packets as u32
                    {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                }
                sent.store(true, Ordering::Relaxed);
                sequence = sequence.wrapping_add(100);
                while every.is_none() && !stop.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
            (packets, begun.elapsed())
        });
        while !sent.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
        std::thread::sleep(Duration::from_secs(1));
        let before = runtime.block_on(handle.read(false)).unwrap();
        std::thread::sleep(LENGTH);
        let after = runtime.block_on(handle.read(false)).unwrap();
        stop.store(true, Ordering::Relaxed);
        let (packets, length) = feeder.join().unwrap();
        let used = (after.thread - before.thread).as_nanos() as u64;
        let ppm = used * 1_000_000 / (after.time_ns - before.time_ns);
        (ppm, packets as f64 / length.as_secs_f64(), after.gaps.events)
    });
    assert!(runtime.block_on(handle.read(true)).unwrap().flows_known >= u64::from(FLOWS));
    handle.stop();
    thread.join().unwrap();
    result
}

fn main() {
    if let Err(error) = Programs::open(&Options::default()) {
        eprintln!("SKIPPED: this benchmark loads programs into the kernel: {error}");
        return;
    }
    println!(
        "the telemetry thread at {FLOWS} flows: user and system time, parts of a million of a core; bar {BAR}"
    );
    let cases = [
        ("all rest", None, Duration::from_micros(500)),
        ("a packet each in 1 s, no bursts", Some(Duration::from_secs(1)), Duration::from_secs(100)),
        ("a burst each in 10 s", Some(Duration::from_secs(10)), Duration::from_micros(500)),
        ("a burst each in 1 s", Some(Duration::from_secs(1)), Duration::from_micros(500)),
    ];
    for (name, every, gap) in cases {
        let (ppm, rate, lost) = measure(every, gap);
        let within = if ppm <= BAR { "within" } else { "BEYOND" };
        println!("{name:<34} {ppm:>7} ppm at {rate:>8.0} packets/s, {lost} events lost: {within}");
    }
}
