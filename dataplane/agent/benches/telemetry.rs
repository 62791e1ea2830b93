//! What the telemetry thread takes of a core with ten thousand flows: packets that nobody sent run through the programs in the
//! kernel, and the thread's own processor time, user and system, is read.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // a benchmark alone

use harmonaize_agent::telemetry::{Setup, start};
use harmonaize_events::{Direction, Event, FlowKey, InterfaceTotals, Losses};
use harmonaize_loader::{
    AttachedInterface, Change, Collector, Cost, Counters, Endpoints, Error, Flows, Kernel, Options, Programs,
    Trial,
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
    late: OwnedFd,
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
    fn attached(&self) -> Vec<AttachedInterface> {
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
    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.ring.as_fd())
    }
    fn late_rtt_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.late.as_fd())
    }
}

/// A TCP segment from one of the ports, or to it, over IPv4, from its Ethernet header on.
fn packet(port: u16, direction: Direction, sequence: u32, payload: u16) -> Vec<u8> {
    let mut packet = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0, 0x45, 0];
    packet.extend((40 + payload).to_be_bytes());
    packet.extend([0, 0, 0, 0, 64, 6, 0, 0]);
    let near = ([10, 0, 0, 1], port.to_be_bytes());
    let far = ([10, 0, 0, 2], [0, 80]);
    let (from, to) = if direction == Direction::Egress { (near, far) } else { (far, near) };
    packet.extend([from.0, to.0].concat());
    packet.extend([from.1, to.1].concat());
    packet.extend(sequence.to_be_bytes());
    // What comes in acknowledges what has left.
    packet.extend(sequence.to_be_bytes());
    packet.extend([0x50, 0x10, 1, 0, 0, 0, 0, 0]);
    packet.extend(vec![7; payload.into()]);
    packet
}

/// The packets of a flow when its turn comes: one; or, if round trips are `late`, the ACK that the last one waits for, another with its ACK,
/// and one that waits.
fn packets(port: u16, sequence: u32, late: bool) -> Vec<(Direction, Vec<u8>)> {
    let sent = |sequence| (Direction::Egress, packet(port, Direction::Egress, sequence, 50));
    let acknowledged = |end| (Direction::Ingress, packet(port, Direction::Ingress, end, 0));
    if late {
        vec![acknowledged(sequence), sent(sequence), acknowledged(sequence + 50), sent(sequence + 50)]
    } else {
        vec![(Direction::Egress, packet(port, Direction::Egress, sequence, 100))]
    }
}

/// The thread's share of a core while every flow has a packet in so long a time; none: while all rest. `gap` ends bursts; round trips that
/// `late` asks for are told.
fn measure(every: Option<Duration>, gap: Duration, late: Duration) -> (u64, f64, u64) {
    let options = Options { idle_gap: gap, late_rtt: late, ..Options::default() };
    let programs = Programs::open(&options).unwrap();
    let (kernel, ring) = (programs.kernel().clone(), programs.as_fd().try_clone_to_owned().unwrap());
    let told_late = programs.late_rtt_fd().try_clone_to_owned().unwrap();
    let programs = Arc::new(Mutex::new(programs));
    let fed = Fed { programs: Arc::clone(&programs), kernel, ring, late: told_late };
    let setup = Setup {
        host: "bench".into(),
        interfaces: vec!["lo".into()],
        rates: BTreeMap::new(),
        interval: Duration::from_millis(5),
        record: None,
        marks: Vec::new(),
        decide: Box::new(|_| {}),
    };
    let (handle, thread) = start(setup, move || Ok(Box::new(fed))).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    // What waits for longer than 30 ms is told by nobody.
    let flows = if late.is_zero() { FLOWS } else { 100 };
    let (stop, sent) = (AtomicBool::new(false), AtomicBool::new(false));
    let result = std::thread::scope(|scope| {
        let feeder = scope.spawn(|| {
            let (begun, mut sent_packets, mut sequence) = (Instant::now(), 0_u64, 0_u32);
            let pause = every.unwrap_or(Duration::ZERO) / u32::from(flows);
            while !stop.load(Ordering::Relaxed) {
                for port in 0..flows {
                    for (direction, packet) in packets(1000 + port, sequence, !late.is_zero()) {
                        let trial = Trial { direction, packet: &packet, segments: None, repeat: 1 };
                        programs.lock().unwrap().trial(trial).unwrap();
                    }
                    sent_packets += 1;
                    // Some at a time, for a sleep is no shorter than some 60 us.
                    while every.is_some()
                        && begun.elapsed() + Duration::from_millis(1) < pause * sent_packets as u32
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
            (sent_packets, begun.elapsed())
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
        let passed = after.time.since(before.time).as_nanos() as u64;
        let ppm = used * 1_000_000 / passed;
        (ppm, packets as f64 / length.as_secs_f64(), after.losses.events)
    });
    assert!(runtime.block_on(handle.read(true)).unwrap().flow_count >= u64::from(flows));
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
        ("all rest", None, Duration::from_micros(500), Duration::ZERO),
        (
            "a packet each in 1 s, no bursts",
            Some(Duration::from_secs(1)),
            Duration::from_secs(100),
            Duration::ZERO,
        ),
        ("a burst each in 10 s", Some(Duration::from_secs(10)), Duration::from_micros(500), Duration::ZERO),
        ("a burst each in 1 s", Some(Duration::from_secs(1)), Duration::from_micros(500), Duration::ZERO),
        // Of these 4000 in a second the programs tell one in a millisecond.
        (
            "100 flows, 1000 late round trips told in 1 s",
            Some(Duration::from_millis(25)),
            Duration::from_secs(100),
            Duration::from_millis(1),
        ),
    ];
    for (name, every, gap, late) in cases {
        let (ppm, rate, lost) = measure(every, gap, late);
        let within = if ppm <= BAR { "within" } else { "BEYOND" };
        println!("{name:<46} {ppm:>7} ppm at {rate:>8.0} packets/s, {lost} events lost: {within}");
    }
}
