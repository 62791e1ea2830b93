//! What a packet costs: the programs run on one in the kernel, a million times a round, beside a program that does nothing.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // a benchmark alone

#[path = "../tests/support/mod.rs"]
mod support;

use aya::Ebpf;
use aya::programs::SchedClassifier;
use harmonaize_events::Direction::{Egress, Ingress};
use harmonaize_loader::{Options, Trial};
use std::net::IpAddr;
use std::os::fd::AsFd;
use support::packets::{ACK, Segment, Transfer, ip};

const ROUNDS: usize = 15;
const REPEAT: u32 = 1_000_000;
/// The most that both directions together may take, in nanoseconds.
const BAR: u64 = 150;

fn main() {
    let Some(mut ours) = support::collector(Options::default()) else { return };
    let mut loaded = Ebpf::load(&std::fs::read(support::object("loss.o")).unwrap()).unwrap();
    let nothing: &mut SchedClassifier = loaded.program_mut("nothing").unwrap().try_into().unwrap();
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
    let acknowledgement = Transfer { opcode: 0x11, payload: 0, ..datagram };
    let packets = [
        ("TCP, IPv4", ip(four[0], four[1], 6, 2, &segment.bytes())),
        ("TCP, IPv6", ip(six[0], six[1], 6, 2, &segment.bytes())),
        ("RoCE UD SEND", ip(four[0], four[1], 17, 2, &datagram.bytes(50_000))),
        ("RoCE RC ACK", ip(four[0], four[1], 17, 2, &acknowledgement.bytes(50_000))),
        ("other", ip(four[0], four[1], 1, 0, &[0; 64])),
    ];
    println!("ns a packet, medians of {ROUNDS} interleaved rounds; what a run costs by itself is taken off");
    println!(
        "{:<14} {:>7} {:>7} {:>7} {:>8} {:>5}",
        "packet", "ingress", "egress", "both", "by itself", "bar"
    );
    for (name, packet) in &packets {
        let mut times = [const { Vec::new() }; 3];
        for _ in 0..ROUNDS {
            for (direction, times) in [Ingress, Egress].into_iter().zip(&mut times) {
                let trial = Trial { direction, packet, segments: None, repeat: REPEAT };
                times.push(ours.trial(trial).unwrap().as_nanos() as u64);
            }
            let trial = Trial { direction: Egress, packet, segments: None, repeat: REPEAT };
            times[2].push(trial.run(nothing.fd().unwrap().as_fd()).unwrap().as_nanos() as u64);
        }
        let [ingress, egress, itself] = times.map(|mut times| {
            times.sort_unstable();
            times[ROUNDS / 2]
        });
        let [ingress, egress] = [ingress, egress].map(|time| time.saturating_sub(itself));
        let both = ingress + egress;
        let within = if both <= BAR { "within" } else { "BEYOND" };
        println!("{name:<14} {ingress:>7} {egress:>7} {both:>7} {itself:>9} {BAR:>5} {within}");
    }
}
