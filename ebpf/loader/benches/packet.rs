//! What a packet costs. The programs run on one in the kernel, a million times a round, beside a program that does nothing. Then
//! they run on packets of a sequence, each once.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // a benchmark alone

#[path = "../tests/support/mod.rs"]
mod support;

use aya::Ebpf;
use aya::programs::SchedClassifier;
use harmonaize_events::Direction::{self, Egress, Ingress};
use harmonaize_loader::{Flows, Options, Programs, Trial};
use std::net::IpAddr;
use std::ops::Range;
use std::os::fd::AsFd;
use std::time::Duration;
use support::packets::{ACK, Segment, Transfer, ip};

const ROUNDS: usize = 15;
const REPEAT: u32 = 1_000_000;
/// Packets of a sequence.
const SEQUENCE: u32 = 50_000;
/// Bytes that are written between packets, more than a processor's own caches hold.
const ELSE: usize = 2 << 20;
/// Opcodes of RoCE: a WRITE of one packet, and an acknowledgement, both of reliable connections.
const WRITE_ONLY: u8 = 0x0a;
const ACKNOWLEDGE: u8 = 0x11;
/// The most that both directions together may take, in nanoseconds. It is for one packet again and again, and for those of a sequence
/// that find cold caches, over TCP and over RoCE.
const BAR: u64 = 150;
const COLD_BARS: [(&str, u64); 2] = [("TCP", 250), ("RoCE", 300)];

fn main() {
    // As agents have them.
    let options = Options { late_rtt: Duration::from_micros(2500), ..Options::default() };
    let Some(mut ours) = support::collector(options) else { return };
    let mut loaded = Ebpf::load(&std::fs::read(support::object("loss.o")).unwrap()).unwrap();
    let nothing: &mut SchedClassifier = loaded.program_mut("pass").unwrap().try_into().unwrap();
    nothing.load().unwrap();
    let four: [IpAddr; 2] = ["10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap()];
    let six: [IpAddr; 2] = ["fd00::1".parse().unwrap(), "fd00::2".parse().unwrap()];
    let segment = Segment {
        source: 1,
        destination: 2,
        sequence: 0,
        acknowledgement: 0,
        flags: ACK,
        window: 1,
        payload: 0,
    };
    // A datagram: any other packet that comes again and again is a repetition, but for an acknowledgement, which is looked up.
    let datagram =
        Transfer { opcode: 0x64, queue_pair: 1, sequence: 0, asks: false, extended: 0, payload: 1024 };
    let acknowledgement = Transfer { opcode: ACKNOWLEDGE, payload: 0, ..datagram };
    let packets = [
        ("TCP, IPv4", ip(four[0], four[1], 6, 2, &segment.bytes())),
        ("TCP, IPv6", ip(six[0], six[1], 6, 2, &segment.bytes())),
        ("RoCE UD SEND", ip(four[0], four[1], 17, 2, &datagram.bytes(50_000))),
        ("RoCE RC ACK", ip(four[0], four[1], 17, 2, &acknowledgement.bytes(50_000))),
        ("other", ip(four[0], four[1], 1, 0, &[0; 64])),
    ];
    println!("ns a packet, medians of {ROUNDS} interleaved rounds; what a run costs by itself is taken off");
    println!(
        "{:<26} {:>7} {:>7} {:>7} {:>8} {:>5}",
        "packet", "ingress", "egress", "both", "by itself", "bar"
    );
    for (name, packet) in &packets {
        let mut times = Times::default();
        for _ in 0..ROUNDS {
            for (direction, times) in [Ingress, Egress].into_iter().zip(&mut times) {
                let trial = Trial { direction, packet, segments: None, repeat: REPEAT };
                times.push(ours.trial(trial).unwrap().as_nanos() as u64);
            }
            let trial = Trial { direction: Egress, packet, segments: None, repeat: REPEAT };
            times[2].push(trial.run(nothing.fd().unwrap().as_fd()).unwrap().as_nanos() as u64);
        }
        report(name, times, BAR);
    }
    println!(
        "packets of a sequence, each run once, between calls of the kernel that leave less in the caches: medians"
    );
    for (name, times) in in_sequence(&mut ours, nothing, four, 0..SEQUENCE, &mut []) {
        report(name, times, 0);
    }
    println!("the same, each after {} KiB of something else were written: medians", ELSE >> 10);
    let (after, mut other) = (SEQUENCE..SEQUENCE + SEQUENCE / 20, vec![0; ELSE]);
    for (name, times) in in_sequence(&mut ours, nothing, four, after, &mut other) {
        let bar = COLD_BARS.iter().find(|(protocol, _)| name.starts_with(protocol));
        report(&format!("cold caches, {name}"), times, bar.map_or(0, |(_, bar)| *bar));
    }
}

/// Nanoseconds of runs: of the programs on ingress and on egress, and of one that does nothing.
type Times = [Vec<u64>; 3];

/// Prints a line; a bar of 0 is none.
fn report(name: &str, times: Times, bar: u64) {
    let [ingress, egress, itself] = times.map(|mut times| {
        times.sort_unstable();
        times[times.len() / 2]
    });
    let [ingress, egress] = [ingress, egress].map(|time| time.saturating_sub(itself));
    let both = ingress + egress;
    let within = match bar {
        0 => "stated",
        bar if both <= bar => "within",
        _ => "BEYOND",
    };
    println!("{name:<26} {ingress:>7} {egress:>7} {both:>7} {itself:>9} {bar:>5} {within}");
}

/// A packet of a sequence, at the host that asks or at the one that is asked.
struct Step {
    direction: Direction,
    /// Or else answers.
    asks: bool,
    packet: Vec<u8>,
}

/// Writes that ask for an acknowledgement, and the acknowledgements, of which each finds its request.
fn roce(sequence: u32, [near, far]: [IpAddr; 2]) -> [Step; 4] {
    let [out, back] = [(near, far), (far, near)];
    let step = |direction, (from, to), opcode, queue_pair| {
        let asks = opcode == WRITE_ONLY;
        let payload = if asks { 1024 } else { 0 };
        let transfer = Transfer { opcode, queue_pair, sequence, asks, extended: 0, payload };
        Step { direction, asks, packet: ip(from, to, 17, 2, &transfer.bytes(50_000)) }
    };
    [
        step(Egress, out, WRITE_ONLY, 11),
        step(Ingress, back, ACKNOWLEDGE, 12),
        step(Ingress, back, WRITE_ONLY, 13),
        step(Egress, out, ACKNOWLEDGE, 14),
    ]
}

/// Segments of two connections, and their acknowledgements.
fn tcp(turn: u32, [near, far]: [IpAddr; 2]) -> [Step; 4] {
    let [out, back] = [(near, far), (far, near)];
    let step = |direction, (from, to), [source, destination]: [u16; 2], asks| {
        let [sequence, acknowledgement] = if asks { [turn * 1024, 1] } else { [1, (turn + 1) * 1024] };
        let payload = if asks { 1024 } else { 0 };
        let segment =
            Segment { source, destination, sequence, acknowledgement, flags: ACK, window: 1, payload };
        Step { direction, asks, packet: ip(from, to, 6, 2, &segment.bytes()) }
    };
    [
        step(Egress, out, [11, 12], true),
        step(Ingress, back, [12, 11], false),
        step(Ingress, back, [13, 14], true),
        step(Egress, out, [14, 13], false),
    ]
}

/// Times of packets that ask, and of those that answer; before each, all of `other` is written.
fn in_sequence(
    ours: &mut Programs,
    nothing: &SchedClassifier,
    hosts: [IpAddr; 2],
    turns: Range<u32>,
    other: &mut [u8],
) -> [(&'static str, Times); 4] {
    let mut counted = |steps: fn(u32, [IpAddr; 2]) -> [Step; 4]| {
        let (mut asked, mut answers) = (Times::default(), Times::default());
        let before = rtt_count(ours);
        for Step { direction, asks, packet } in turns.clone().flat_map(|turn| steps(turn, hosts)) {
            let trial = Trial { direction, packet: &packet, segments: None, repeat: 1 };
            write(other);
            let time = ours.trial(trial).unwrap().as_nanos() as u64;
            write(other);
            let itself = trial.run(nothing.fd().unwrap().as_fd()).unwrap().as_nanos() as u64;
            let times = if asks { &mut asked } else { &mut answers };
            times[if direction == Ingress { 0 } else { 1 }].push(time);
            times[2].push(itself);
        }
        assert_eq!(
            rtt_count(ours) - before,
            2 * turns.len() as u64,
            "each acknowledgement finds what it is for"
        );
        (asked, answers)
    };
    let (segments, of_segments) = counted(tcp);
    let (writes, of_writes) = counted(roce);
    [
        ("TCP, data", segments),
        ("TCP, ACK", of_segments),
        ("RoCE RC WRITE", writes),
        ("RoCE RC ACK", of_writes),
    ]
}

/// Writes each line of it.
fn write(memory: &mut [u8]) {
    for line in memory.chunks_mut(64) {
        line[0] = line[0].wrapping_add(1);
    }
    std::hint::black_box(memory);
}

/// How many round trips were taken so far.
fn rtt_count(ours: &mut Programs) -> u64 {
    let mut flows = Flows::default();
    ours.read_flows(&mut flows).unwrap();
    let tcp = flows.tcp.iter().map(|(_, flow)| flow.ingress.rtt.count + flow.egress.rtt.count);
    let roce = flows.roce.iter().map(|(_, flow)| flow.rtt.count);
    tcp.chain(roce).sum()
}
