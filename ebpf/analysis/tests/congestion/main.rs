//! Findings on links, over many seeded runs of simulated flows.
#![allow(clippy::expect_used, clippy::indexing_slicing, unreachable_pub)] // tests alone

mod alarms;
mod connections;
mod late;
mod link;
mod recorded;
mod signals;

use harmonaize_abi::CongestionCause;
use harmonaize_analysis::Nanos;
use harmonaize_analysis::congestion::{Congestion, Detector, Limits, Link, Path};
use harmonaize_events::Direction;
use link::{Bottleneck, Discipline, FlowOwner, INTERFACE, MS, Source, World};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::VecDeque;

/// Seeds of so many runs: odd ones, which are held to the bars. With HARMONAIZE_CHOOSE=1 even ones, on which constants may be chosen.
fn seeds(first: u64, count: u64) -> impl Iterator<Item = u64> {
    let odd = u64::from(std::env::var_os("HARMONAIZE_CHOOSE").is_none());
    (0..count).map(move |at| first + 2 * at + odd)
}

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

/// A run: own flows, and from some time cross traffic.
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
            ..Bottleneck::default()
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
        let cross_traffic = [FlowOwner::CrossTraffic, FlowOwner::CrossTraffic, FlowOwner::UnseenCrossTraffic]
            [random.random_range(0..3)];
        Self {
            seed,
            bottleneck,
            stated,
            own,
            cross_traffic: (!seed.is_multiple_of(3)).then_some(cross_traffic),
        }
    }

    /// The same on a link of another rate, of which everything takes its part. Queues hold at most what a switch's buffer does, hosts' buffers
    /// fill them, and fast links are short.
    fn at_rate(seed: u64, rate: f64) -> Self {
        const SWITCH_BYTES: f64 = 16e6;
        let case = Self::draw(seed);
        let (before, factor) = (case.bottleneck, rate / case.bottleneck.bytes_per_second);
        let limit_ns = before.limit_ns.min(SWITCH_BYTES / rate * 1e9);
        let base_ns = before.base_ns * if rate > 1e9 { 0.25 } else { 1.0 };
        let bottleneck = Bottleneck {
            bytes_per_second: rate,
            // Hosts hand over less often on fast links.
            packets: if rate > 1e9 { 44 } else { before.packets },
            limit_ns,
            base_ns,
            mark_ns: before.mark_ns.map(|mark_ns| mark_ns.min(limit_ns / 4.0)),
            most_in_flight: before.most_in_flight.max(2.0 * (limit_ns + base_ns) * rate / 1e9),
            ..before
        };
        let stated = match case.stated {
            0 => 0,
            stated if stated == before.bytes_per_second as u64 => rate as u64,
            _ => 4 * rate as u64,
        };
        let scaled = |source: Source| match source {
            Source::Greedy => source,
            Source::Paced(rate) => Source::Paced(rate * factor),
            Source::Bursts { bytes, pause_ns } => Source::Bursts { bytes: bytes * factor, pause_ns },
        };
        let own = case.own.into_iter().map(scaled).collect();
        Self { bottleneck, stated, own, ..case }
    }

    /// The same behind other queues.
    fn behind(self, discipline: Discipline) -> Self {
        Self { bottleneck: Bottleneck { discipline, ..self.bottleneck }, ..self }
    }

    /// Own flows alone.
    fn begin(&self) -> (World, Detector, ChaCha8Rng) {
        let random = ChaCha8Rng::seed_from_u64(self.seed ^ 0x5eed);
        let mut world = World::new(self.bottleneck, self.seed);
        let mut detector = Detector::new(Limits::default());
        detector.take(&world.link(self.stated));
        let begin = world.now_ns();
        for (host, source) in self.own.iter().enumerate() {
            let record = world.add(FlowOwner::Own, host as u32, *source, begin + MS * host as u64, u64::MAX);
            detector.take(&record);
        }
        (world, detector, random)
    }

    /// How often others are blamed in so many seconds of own flows alone.
    fn alarms(&self, seconds: u64) -> usize {
        let (mut world, mut detector, mut random) = self.begin();
        let (until, mut alarms) = (world.now_ns() + seconds * 1000 * MS, 0);
        advance(&mut world, &mut detector, &mut random, until, |found| {
            alarms += usize::from(found.cause == CongestionCause::CrossTraffic);
        });
        alarms
    }

    /// What is said of the uplink before cross traffic begins, and then.
    fn run(&self) -> Outcome {
        const WITHIN_NS: u64 = 200 * MS;
        let (mut world, mut detector, mut random) = self.begin();
        let begin = world.now_ns();
        let onset = begin + random.random_range(1000 * MS..1500 * MS);
        let mut before = Vec::new();
        advance(&mut world, &mut detector, &mut random, onset, |found| before.push(found));
        before.retain(|found| found.link == UPLINK || found.signals.starved);
        let Some(whose) = self.cross_traffic else { return Outcome { before, ..Outcome::default() } };
        let record = world.add(whose, 0, Source::Greedy, world.now_ns(), u64::MAX);
        if whose != FlowOwner::UnseenCrossTraffic {
            detector.take(&record);
        }
        let onset = world.now_ns();
        // The mean wait of an own piece, and pieces in a nanosecond.
        let own = |(waited, pieces): (f64, u64), ns: u64| {
            (waited / pieces.max(1) as f64, pieces as f64 / ns as f64)
        };
        let alone = own(std::mem::take(&mut world.waited), onset - begin);
        let (mut after, mut crowds) = (None, None);
        let mut sent = VecDeque::new();
        while world.now_ns() < onset + WITHIN_NS {
            sent.push_back((world.sent(FlowOwner::Own), world.sent(whose)));
            let until = world.now_ns() + MS;
            advance(&mut world, &mut detector, &mut random, until, |found| {
                if found.link == UPLINK && found.cause == CongestionCause::CrossTraffic {
                    after = after.or(Some(found.found.0 - onset));
                }
            });
            if sent.len() > 4
                && let Some((own, others)) = sent.pop_front()
            {
                let others = world.sent(whose) - others;
                let all = world.sent(FlowOwner::Own) - own + others;
                crowds = crowds.or((others * 100 >= 15 * all.max(1)).then(|| world.now_ns() - onset));
            }
        }
        let beside = own(world.waited, WITHIN_NS);
        let more_ns = 65_536.0 / self.bottleneck.bytes_per_second * 1e9;
        let delayed = beside.0 > alone.0 + more_ns || beside.1 < 0.75 * alone.1;
        Outcome { before, after, crowds, delayed }
    }
}

/// What was said in a run.
#[derive(Debug, Default)]
struct Outcome {
    /// Before cross traffic began.
    before: Vec<Congestion>,
    /// By how many nanoseconds later others are the cause.
    after: Option<u64>,
    /// When they had sent 15% of some milliseconds' bytes.
    crowds: Option<u64>,
    /// Own flows were held up.
    delayed: bool,
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

/// What was said of many runs.
#[derive(Debug, Default)]
struct Judged {
    runs: usize,
    /// In which others were blamed, though own flows were alone; and in which a path was starved so.
    wrong: usize,
    starved: usize,
    /// Milliseconds until others were found. Seen and not seen, on a link that our own traffic leaves room on, and on one that it fills.
    delays: [Vec<f64>; 4],
    /// Milliseconds until cross traffic had sent 15% of some milliseconds' bytes. They are of runs in which it is seen, on a link
    /// that our own traffic fills.
    crowds: Vec<f64>,
    /// Runs in which nobody was blamed and own flows were not held up: there was nothing to find.
    untouched: usize,
}

fn judge(cases: impl Iterator<Item = Case>) -> Judged {
    let mut judged = Judged::default();
    for case in cases {
        let seed = case.seed;
        judged.runs += 1;
        let Outcome { before, after, crowds, delayed } = case.run();
        // Where what is stated is true: else something narrower may hold the traffic up.
        let known = case.stated == case.bottleneck.bytes_per_second as u64;
        if known && before.iter().any(|found| found.signals.starved) {
            println!("seed {seed}: starved, though alone: {case:?}");
            judged.starved += 1;
        }
        if before.iter().any(|found| found.link == UPLINK && found.cause == CongestionCause::CrossTraffic) {
            judged.wrong += 1;
            println!("seed {seed}: others, though alone: {case:?}");
            continue;
        }
        if let Some(whose) = case.cross_traffic {
            if after.is_none() && !delayed {
                judged.untouched += 1;
                continue;
            }
            let filled = case.own.contains(&Source::Greedy);
            let after = after.map_or(f64::INFINITY, |after| after as f64 / 1e6);
            if after > 20.0 {
                println!("seed {seed}: after {after:.1} ms: {case:?}");
            }
            let place = usize::from(whose == FlowOwner::UnseenCrossTraffic) + 2 * usize::from(filled);
            judged.delays[place].push(after);
            if place == 2 {
                judged.crowds.push(crowds.map_or(f64::INFINITY, |crowds| crowds as f64 / 1e6));
            }
        }
    }
    judged
}

#[test]
fn congestion_cause_is_reported_within_milliseconds() {
    let Judged { runs, wrong, starved, delays, .. } = judge(seeds(0, 300).map(Case::draw));
    let names = ["seen", "not seen", "seen, on a full link", "not seen, on a full link"];
    let summaries: Vec<(f64, f64)> =
        delays.into_iter().zip(names).map(|(delays, name)| summary(name, delays)).collect();
    println!("{wrong} of {runs} wrong, {starved} starved though alone");
    // A burst that losses cut short may look like it; trains tell.
    assert!(starved <= 4);
    assert!(wrong <= 3 && summaries[0].1 < 10.0);
}

#[test]
fn a_rate_scales_its_case() {
    for seed in seeds(0, 30) {
        let (before, case) = (Case::draw(seed), Case::at_rate(seed, 12.5e9));
        let room = |case: &Case| case.bottleneck.limit_ns * case.bottleneck.bytes_per_second / 1e9;
        assert!(room(&case) <= 16e6 * 1.001 && case.bottleneck.most_in_flight > 2.0 * room(&case));
        assert_eq!(before.stated == 0, case.stated == 0);
        if let (Source::Paced(slow), Source::Paced(fast)) = (before.own[0], case.own[0]) {
            let part = |case: &Case, rate: f64| rate / case.bottleneck.bytes_per_second;
            assert!((part(&before, slow) - part(&case, fast)).abs() < 1e-9);
        }
    }
}

#[test]
fn bursts_beyond_a_fast_buffer_blame_nobody() {
    // They lose, and are late by more than what a short queue makes.
    let case = Case::at_rate(20_012, 1.25e9);
    assert!(matches!(case.own[..], [Source::Bursts { bytes, .. }] if bytes > 16e6));
    let alarms = case.alarms(10);
    assert!(alarms <= 1, "{alarms} false alarms in 10 s");
}

/// Prints the rows of the table in docs/performance/README.md. Nothing is held.
#[test]
#[ignore = "takes minutes"]
fn delays_by_rate_and_queue_are_printed() {
    println!(
        "| link, queue | blamed, alone | starved, alone | false alarms an hour | seen | not seen | seen, full | not seen, full | not held up | seen, full: 15% |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for (name, rate) in [("0.1", 12.5e6), ("1", 125e6), ("10", 1.25e9), ("100", 12.5e9)] {
        for discipline in [Discipline::DropTail, Discipline::FqCodel, Discipline::Htb, Discipline::Red] {
            let case = |seed| Case::at_rate(seed, rate).behind(discipline);
            let judged = judge(seeds(10_000, 60).map(case));
            let cells: Vec<String> = judged.delays.iter().map(|delays| cell(delays)).collect();
            let crowds = cell(&judged.crowds);
            let Judged { runs, wrong, starved, untouched, .. } = judged;
            let alarms: usize = seeds(20_000, 12).map(|seed| case(seed).alarms(30)).sum();
            let hourly = alarms * 10;
            let cells = cells.join(" | ");
            println!(
                "| {name} Gbit/s, {discipline:?} | {wrong} of {runs} | {starved} | {hourly} | {cells} | {untouched} | {crowds} |"
            );
        }
    }
}

/// Median and 90th percentile of delays in milliseconds, and how many of the runs were found within 200 ms.
fn cell(delays: &[f64]) -> String {
    let mut sorted = delays.to_vec();
    sorted.sort_by(f64::total_cmp);
    let found = sorted.iter().filter(|delay| delay.is_finite()).count();
    let at = |part: f64| match sorted.get((sorted.len().saturating_sub(1) as f64 * part) as usize) {
        Some(delay) if delay.is_finite() => format!("{delay:.1}"),
        _ => "-".to_owned(),
    };
    format!("{}; {} ms, {found} of {}", at(0.5), at(0.9), sorted.len())
}
