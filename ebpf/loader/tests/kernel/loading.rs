//! Loading the programs: within their budget, and with an error that says what is missing.

use crate::support::packets::{Segment, ip};
use crate::support::{budget, collector, object};
use harmonaize_events::Direction;
use harmonaize_loader::{Capability, EndpointOptions, Endpoints, Error, Kernel, Options, Programs, Trial};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use std::time::Duration;

fn open(object: Vec<u8>) -> Result<Programs, Error> {
    Programs::open(&Options { object: Some(object.into()), ..Options::default() })
}

/// The usual programs and those for diagnosis stay within the budget. Sockets are followed by types that the verifier knows and
/// by those of a file.
#[test]
fn the_verifier_stays_within_the_budget() {
    let own_types = std::path::PathBuf::from("/sys/kernel/btf/vmlinux");
    for (diagnosis, types) in [(false, None), (false, Some(own_types)), (true, None)] {
        let endpoints = Some(EndpointOptions { types, ..EndpointOptions::default() });
        let late = Duration::from_micros(2500);
        let options = Options { xdp: true, late_rtt: late, endpoints, diagnosis, ..Options::default() };
        let Some(collector) = collector(options) else { return };
        budget::check_budget(&collector, diagnosis);
    }
}

#[test]
fn runs_are_timed_if_asked_for() {
    let Some(mut collector) = collector(Options { run_time: true, ..Options::default() }) else { return };
    let segment = Segment {
        source: 1,
        destination: 2,
        sequence: 0,
        acknowledgement: 0,
        flags: crate::support::packets::ACK,
        window: 1,
        payload: 0,
    };
    let packet = ip([10, 0, 0, 1].into(), [10, 0, 0, 2].into(), 6, 0, &segment.bytes());
    let trial = Trial { direction: Direction::Egress, packet: &packet, segments: None, repeat: 1000 };
    assert!(!collector.trial(trial).unwrap().is_zero());
    let cost = collector.cost().unwrap();
    assert!(cost.timed);
    let [ingress, egress] = &cost.programs[..] else { panic!("two programs: {cost:?}") };
    assert_eq!((&*ingress.name, &*egress.name), ("count_ingress", "count_egress"));
    assert_eq!((ingress.runs, ingress.time.is_zero()), (0, true));
    assert_eq!(egress.runs % 1000, 0, "runs of trials are timed by some kernels: {cost:?}");
}

#[test]
fn a_refusal_says_which_program_and_why() {
    if collector(Options::default()).is_none() {
        return;
    }
    let mut bytes = std::fs::read(object("telemetry.o")).unwrap();
    // The programs' section begins with the first instruction of one of them: it now reads beyond the context.
    let word = |at: usize, length: usize| {
        let mut word = [0; 8];
        word[..length].copy_from_slice(&bytes[at..at + length]);
        u64::from_le_bytes(word) as usize
    };
    let (sections, names) = (word(0x28, 8), word(0x3e, 2));
    let offset = |section: usize| word(sections + section * 64 + 0x18, 8);
    let name = |section: usize| offset(names) + word(sections + section * 64, 4);
    let programs = (0..word(0x3c, 2)).find(|section| bytes[name(*section)..].starts_with(b"classifier\0"));
    let at = offset(programs.unwrap());
    bytes[at..at + 8].copy_from_slice(&[0x79, 0x10, 0xff, 0x7f, 0, 0, 0, 0]);
    match open(bytes).unwrap_err() {
        Error::Refused { program, log, .. } => {
            assert!(program.starts_with("count_"), "{program}");
            assert!(log.contains("invalid bpf_context access"), "{log}");
        }
        other => panic!("{other}"),
    }
}

#[test]
fn an_object_that_is_none_is_refused() {
    if collector(Options::default()).is_none() {
        return;
    }
    let whole = std::fs::read(object("telemetry.o")).unwrap();
    let other = std::fs::read(object("loss.o")).unwrap();
    for bytes in [Vec::new(), b"not an object".to_vec(), whole[..whole.len() / 2].to_vec(), other] {
        let error = open(bytes).unwrap_err();
        assert!(matches!(error, Error::Object { .. }), "{error}");
    }
}

#[test]
fn missing_capabilities_are_named() {
    if collector(Options::default()).is_none() {
        return;
    }
    let without = |lost: CapabilitySet| {
        // Capabilities are a thread's own.
        let asked = std::thread::spawn(move || {
            let mut own = capabilities(None).unwrap();
            own.effective.remove(lost);
            set_capabilities(None, own).unwrap();
            (Kernel::probe(), Programs::open(&Options::default()).err())
        });
        asked.join().unwrap()
    };
    let (kernel, error) = without(CapabilitySet::BPF | CapabilitySet::SYS_ADMIN);
    assert_eq!(kernel.missing, [Capability::Bpf]);
    assert_eq!(error.unwrap().to_string(), "telemetry needs CAP_BPF, which this process does not have");
    let (kernel, error) = without(CapabilitySet::NET_ADMIN);
    assert_eq!(kernel.missing, [Capability::NetAdmin]);
    assert!(matches!(error, Some(Error::Privilege { .. })), "{error:?}");
}

/// With the capabilities that are asked for and no other everything is had but the time of runs. That is said to be missing; with
/// less it is said what else it takes.
#[test]
fn the_capabilities_that_are_asked_for_are_enough() {
    let Some(root) = collector(options()) else { return };
    let with = |kept: CapabilitySet| {
        let asked = std::thread::spawn(move || {
            let mut own = capabilities(None).unwrap();
            own.effective = kept;
            set_capabilities(None, own).unwrap();
            Programs::open(&options())
        });
        asked.join().unwrap()
    };
    let counts = CapabilitySet::BPF | CapabilitySet::NET_ADMIN;
    let collector = with(counts | CapabilitySet::PERFMON).unwrap_or_else(|error| panic!("{error}"));
    let missing: Vec<&String> =
        collector.missing().iter().filter(|missing| !root.missing().contains(missing)).collect();
    let [missing] = missing[..] else { panic!("{missing:?}") };
    assert!(missing.contains("runs, which needs CAP_SYS_ADMIN"), "{missing}");
    assert!(root.cost().unwrap().timed && !collector.cost().unwrap().timed);
    let error = with(counts).unwrap_err();
    assert_eq!(error.to_string(), "telemetry needs CAP_PERFMON, which this process does not have");
}

fn options() -> Options {
    let endpoints = Some(EndpointOptions::default());
    Options { run_time: true, xdp: true, endpoints, ..Options::default() }
}

#[test]
fn interfaces_that_are_not_there_are_named() {
    let Some(mut collector) = collector(Options::default()) else { return };
    let error = collector.attach("no-such-device").unwrap_err();
    assert_eq!(error.to_string(), "there is no interface named no-such-device in this network namespace");
    assert!(matches!(collector.detach("lo"), Err(Error::NotAttached { .. })));
    assert!(matches!(collector.totals(1), Err(Error::Map { .. })));
}

/// What cannot be had of the kernel's own structures is said, and the rest goes on.
#[test]
fn programs_go_on_without_type_information() {
    let endpoints = EndpointOptions { types: Some("/no/such/file".into()), ..EndpointOptions::default() };
    let Some(mut collector) = collector(Options { endpoints: Some(endpoints), ..Options::default() }) else {
        return;
    };
    let [missing] = collector.missing() else { panic!("{:?}", collector.missing()) };
    assert!(missing.contains("no type information of this kernel at /no/such/file"), "{missing}");
    assert!(collector.tracing().is_none());
    let mut endpoints = Endpoints::default();
    collector.read_endpoints(&mut endpoints).unwrap();
    assert_eq!(endpoints, Endpoints::default());
    assert_eq!(collector.cost().unwrap().programs.len(), 2);
}
