//! Findings on the workers of trainings that were recorded, with what was done to them.

use harmonaize_analysis::Nanos;
use harmonaize_analysis::phases::Phases;
use harmonaize_analysis::straggler::{Detector, Kind, Limits, Straggler, Subject};
use harmonaize_analysis::trace::{Reader, Record, merge};
use std::net::Ipv4Addr;
use std::path::Path;
use std::time::Duration;

const MS: Duration = Duration::from_millis(1);

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
    let mut now = records.first().map_or(Nanos(0), Record::time);
    for record in &records {
        while now.after(MS) < record.time() {
            now = now.after(MS);
            phases.advance(now);
        }
        phases.take(record);
        drain(&mut phases);
    }
    for _ in 0..1500 {
        now = now.after(MS);
        phases.advance(now);
    }
    drain(&mut phases);
    println!("{run}: {iterations} iterations, {stragglers:?}");
    (stragglers, iterations)
}

#[test]
fn a_clean_training_has_no_straggler() {
    let (found, iterations) = found("gloo-clean");
    assert!(found.is_empty() && iterations >= 30, "{iterations} iterations, {found:?}");
}

/// The one straggler that was found is the one in the run's truth. It was found in its third iteration.
fn as_injected(run: &str, kind: Kind) {
    let truth = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/traces").join(run).join("truth.json");
    let truth = std::fs::read_to_string(truth).expect("the truth");
    let truth: serde_json::Value = serde_json::from_str(&truth).expect("the truth is JSON");
    let injected = &truth["injections"][0];
    let from = injected["from"].as_u64().expect("an iteration");
    let (found, _) = found(run);
    let [(one, host)] = found[..] else { panic!("{found:?}") };
    assert_eq!((one.kind, Some(u64::from(host))), (kind, injected["rank"].as_u64()));
    assert!(one.since_unit.abs_diff(from) <= 1 && one.units == 3, "{one:?}, and not from {from}");
    if let Some(by) = injected["by_ns"].as_u64().map(Duration::from_nanos) {
        assert!(one.by.abs_diff(by) * 10 <= by * 3, "{one:?}, and not by {by:?}");
    }
}

#[test]
fn slow_worker_is_found_in_third_iteration() {
    as_injected("gloo-slow-worker", Kind::Compute);
}

#[test]
fn slow_link_is_found_in_third_iteration() {
    as_injected("gloo-slow-link", Kind::Network);
}
