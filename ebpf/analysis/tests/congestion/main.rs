//! Verdicts on links, over many seeded runs of simulated flows.
#![allow(clippy::expect_used, clippy::indexing_slicing, unreachable_pub)] // tests alone

mod connections;
mod late;
mod link;
mod recorded;
mod signals;

use harmonaize_abi::CongestionCause;
use harmonaize_analysis::Nanos;
use harmonaize_analysis::congestion::{Congestion, Detector, Limits, Link, Path};
use harmonaize_events::Direction;
use link::{Bottleneck, FlowOwner, INTERFACE, MS, Source, World};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const UPLINK: Link = Link { interface: INTERFACE, direction: Direction::Egress, path: Path::Whole };

/// Lets time pass with a reading each millisecond, a little irregularly; hands out what is found.
fn advance(
    world: &mut World,
    detector: &mut Detector,
    random: &mut ChaCha8Rng,
    until_ns: u64,
    mut found: impl FnMut(Congestion),
) {
    while world.now_ns() < until_ns {
        let next_ns = world.now_ns() + random.random_range(900_000..1_150_000);
        world.poll(next_ns, |record| detector.take(record));
        detector.advance(Nanos(next_ns));
        while let Some(congestion) = detector.poll() {
            found(congestion);
        }
    }
}

/// A run: own flows, and from some time a foreign one.
#[derive(Debug, Clone)]
struct Case {
    seed: u64,
    bottleneck: Bottleneck,
    stated: u64,
    own: Vec<Source>,
    cross_traffic: Option<FlowOwner>,
}

impl Case {
    fn draw(seed: u64) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let bottleneck = Bottleneck {
            bytes_per_second: [25e6, 125e6, 125e6, 312e6][random.random_range(0..4)],
            limit_ns: random.random_range(8e6..50e6),
            base_ns: random.random_range(60e3..400e3),
            mark_ns: random.random_bool(0.3).then_some(1e6),
            noise_ns: random.random_range(20e3..100e3),
        };
        let capacity = bottleneck.bytes_per_second;
        // The truth, or the speed of a port behind which something narrower lies, or nothing.
        let stated = [capacity as u64, 1_250_000_000, 0][random.random_range(0..3)];
        let own = match random.random_range(0..4) {
            0 => vec![Source::Greedy; random.random_range(1..4)],
            1 => vec![Source::Paced(capacity * random.random_range(0.1..0.6))],
            2 => {
                let bytes = capacity * random.random_range(0.002..0.02);
                vec![Source::Bursts { bytes, pause_ns: random.random_range(MS..20 * MS) }]
            }
            _ => vec![Source::Paced(capacity * random.random_range(0.05..0.3)); 2],
        };
        let foreign = [FlowOwner::CrossTraffic, FlowOwner::CrossTraffic, FlowOwner::UnseenCrossTraffic]
            [random.random_range(0..3)];
        Self { seed, bottleneck, stated, own, cross_traffic: (!seed.is_multiple_of(3)).then_some(foreign) }
    }

    /// What is said of the uplink before a foreign flow begins, and then: by how much later others are its cause.
    fn run(&self) -> (Vec<Congestion>, Option<u64>) {
        let mut random = ChaCha8Rng::seed_from_u64(self.seed ^ 0x5eed);
        let mut world = World::new(self.bottleneck, self.seed);
        let mut detector = Detector::new(Limits::default());
        detector.take(&world.link(self.stated));
        let begin = world.now_ns();
        for (host, source) in self.own.iter().enumerate() {
            let record = world.add(FlowOwner::Own, host as u32, *source, begin + MS * host as u64, u64::MAX);
            detector.take(&record);
        }
        let onset = begin + random.random_range(1000 * MS..1500 * MS);
        let mut before = Vec::new();
        advance(&mut world, &mut detector, &mut random, onset, |found| before.push(found));
        before.retain(|found| found.link == UPLINK || found.signals.starved);
        let Some(whose) = self.cross_traffic else { return (before, None) };
        let record = world.add(whose, 0, Source::Greedy, world.now_ns(), u64::MAX);
        if whose != FlowOwner::UnseenCrossTraffic {
            detector.take(&record);
        }
        let onset = world.now_ns();
        let mut after = None;
        advance(&mut world, &mut detector, &mut random, onset + 200 * MS, |found| {
            if found.link == UPLINK && found.cause == CongestionCause::CrossTraffic {
                after = after.or(Some(found.found.0 - onset));
            }
        });
        (before, after)
    }
}

/// Delays in milliseconds, in their order; what was not found is infinite.
fn summary(name: &str, mut delays: Vec<f64>) -> (f64, f64) {
    delays.sort_by(f64::total_cmp);
    let of = |part: f64| delays[((delays.len() - 1) as f64 * part) as usize];
    println!(
        "{name}: {} runs, median {:.1} ms, 90% {:.1}, worst {:.1}",
        delays.len(),
        of(0.5),
        of(0.9),
        of(1.0)
    );
    (of(0.5), of(0.9))
}

#[test]
fn congestion_cause_is_reported_within_milliseconds() {
    let (mut wrong, mut starved) = (0, 0);
    // Seen and not seen, on a link that our own traffic leaves room on, and on one that it fills.
    let mut delays: [Vec<f64>; 4] = Default::default();
    for seed in 0..300 {
        let case = Case::draw(seed);
        let (before, after) = case.run();
        // Where what is stated is true: else something narrower may hold the traffic up.
        let known = case.stated == case.bottleneck.bytes_per_second as u64;
        if known && before.iter().any(|found| found.signals.starved) {
            println!("seed {seed}: starved, though alone: {case:?}");
        }
        starved += usize::from(known && before.iter().any(|found| found.signals.starved));
        if before.iter().any(|found| found.link == UPLINK && found.cause == CongestionCause::CrossTraffic) {
            wrong += 1;
            println!("seed {seed}: others, though alone: {case:?}");
            continue;
        }
        if let Some(whose) = case.cross_traffic {
            let filled = case.own.contains(&Source::Greedy);
            let after = after.map_or(f64::INFINITY, |after| after as f64 / 1e6);
            if after > 20.0 {
                println!("seed {seed}: after {after:.1} ms: {case:?}");
            }
            delays[usize::from(whose == FlowOwner::UnseenCrossTraffic) + 2 * usize::from(filled)].push(after);
        }
    }
    let names = ["seen", "not seen", "seen, on a full link", "not seen, on a full link"];
    let summaries: Vec<(f64, f64)> =
        delays.into_iter().zip(names).map(|(delays, name)| summary(name, delays)).collect();
    println!("{wrong} of 300 wrong, {starved} starved though alone");
    // A burst that losses cut short may look like it; trains tell.
    assert!(starved <= 4);
    assert!(wrong <= 3 && summaries[0].1 < 10.0);
}
