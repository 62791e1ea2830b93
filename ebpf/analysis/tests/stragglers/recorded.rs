//! Verdicts on the workers of trainings that were recorded, with what was done to them.

use harmonaize_analysis::phases::Phases;
use harmonaize_analysis::straggler::{Detector, Kind, Limits, Straggler, Subject};
use harmonaize_analysis::trace::{Reader, Record, merge};
use std::net::Ipv4Addr;
use std::path::Path;

const MS: u64 = 1_000_000;

/// What was found in a recorded run, with the host of each, and how many iterations there were.
fn found(run: &str) -> (Vec<(Straggler, u8)>, u64) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/traces").join(run);
    let traces: Vec<Vec<Record>> = (0..4)
        .map(|host| {
            let bytes = std::fs::read(folder.join(format!("h{host}.trace"))).expect("a recorded trace");
            Reader::new(&bytes).expect("a trace").map(|record| record.expect("a record")).collect()
        })
        .collect();
    let records = merge(&traces.iter().map(Vec::as_slice).collect::<Vec<_>>());
    let mut phases = Phases::default();
    let mut detector = Detector::new(Limits::default());
    let (mut stragglers, mut iterations) = (Vec::new(), 0);
    let mut drain = |phases: &mut Phases| {
        while let Some(phase) = phases.poll() {
            iterations += 1;
            let observed = phase.observed();
            if std::env::var("SHOW").is_ok() {
                println!("{observed:?}");
            }
            detector.take(Subject::Job(phase.job), &observed);
            while let Some(straggler) = detector.poll() {
                let host = phase.hosts[straggler.rank as usize].host;
                let address = Ipv4Addr::from(u32::from_be_bytes(host[3].to_ne_bytes()));
                stragglers.push((straggler, address.octets()[3] - 1));
            }
        }
    };
    let mut now = records.first().map_or(0, Record::time_ns);
    for record in &records {
        while now + MS < record.time_ns() {
            now += MS;
            phases.advance(now);
        }
        phases.take(record);
        drain(&mut phases);
    }
    for _ in 0..1500 {
        now += MS;
        phases.advance(now);
    }
    drain(&mut phases);
    println!("{run}: {iterations} iterations, {stragglers:?}");
    (stragglers, iterations)
}

#[test]
fn a_clean_training_has_no_straggler() {
    assert_eq!(found("gloo-clean"), (vec![], 40));
}

/// The one straggler that was found: why, on which host, since which iteration, and in how many it was found.
fn only(run: &str) -> (Kind, u8, u64, u64) {
    let (found, _) = found(run);
    assert_eq!(found.len(), 1, "{found:?}");
    let (one, host) = found[0];
    (one.kind, host, one.since_unit, one.units)
}

#[test]
fn a_slow_worker_is_found_in_its_third_iteration() {
    assert_eq!(only("gloo-slow-worker"), (Kind::Compute, 2, 15, 3));
}

#[test]
fn a_slow_link_is_found_in_its_third_iteration() {
    assert_eq!(only("gloo-slow-link"), (Kind::Network, 1, 21, 3));
}
