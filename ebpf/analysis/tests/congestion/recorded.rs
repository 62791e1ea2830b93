//! A ring of eight hosts whose hop between racks lost half of a spine to cross traffic, thrice.
//! Two of its hosts saw it: the one that sends over the spine, and one that only had less to do meanwhile.

use super::link::MS;
use harmonaize_analysis::Nanos;
use harmonaize_analysis::congestion::{Detector, Limits, Path};
use harmonaize_analysis::trace::Reader;
use harmonaize_events::Direction;

/// When the flows began, as messages between the hosts were late from then on. Control's trains crossed the hosts' links until `CALM` later.
const ONSETS: [u64; 3] = [76_376_571_519_970, 76_384_658_332_632, 76_392_760_595_024];
const CALM: u64 = 5200 * MS;

/// When a path of the host's own connections came to be starved.
fn starved(host: u8) -> Vec<u64> {
    let path = format!("{}/tests/congestion/traces/h{host}.trace", env!("CARGO_MANIFEST_DIR"));
    let bytes = std::fs::read(path).expect("a recorded trace");
    let mut detector = Detector::new(Limits::default());
    let (mut found, mut last, mut now) = (Vec::new(), None, 0);
    for record in Reader::new(&bytes).expect("a trace") {
        let record = record.expect("a record");
        // As agents do: all that a look brought, and then what it means.
        if record.time().0 > now {
            detector.advance(Nanos(now));
            let own = |path: &Path| matches!(path, Path::Connection { .. });
            let mut sends = detector.links().filter(|one| one.link.direction == Direction::Egress);
            if sends.any(|one| own(&one.link.path) && one.signals.starved) {
                if last.is_none_or(|last| now - last > 50 * MS) {
                    found.push(now);
                }
                last = Some(now);
            }
            now = record.time().0;
        }
        detector.take(&record);
    }
    found
}

#[test]
fn only_senders_on_the_congested_link_report() {
    let sends = starved(3);
    let after = ONSETS.map(|onset| sends.iter().find(|at| **at > onset).map(|at| (at - onset) / MS));
    println!("after ms {after:?}");
    // These hosts looked 30 to 50 ms apart, and recorded everything.
    assert!(after.iter().all(|after| after.is_some_and(|ms| ms < 80)), "{after:?}");
    for (host, found) in [(3, sends), (5, starved(5))] {
        let meanwhile = |at: &u64| ONSETS.iter().any(|onset| (*onset..onset + CALM).contains(at));
        let wrong: Vec<&u64> = found.iter().filter(|at| !meanwhile(at)).collect();
        assert!(wrong.is_empty(), "host {host}: {wrong:?}");
    }
    assert!(starved(5).len() <= 1, "whoever sends elsewhere is hardly suspected: {:?}", starved(5));
}
