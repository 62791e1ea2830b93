//! What late round trips that are told at once are worth: how much sooner an agent finds a starved connection.
//! The agent looks at flows 14 ms apart, and each millisecond while a path may be starved. An own connection fills a link of which a
//! cross traffic takes half.

use super::link::{Bottleneck, FlowOwner, INTERFACE, MS, Source, World};
use super::seeds;
use harmonaize_abi::{CongestionCause, CongestionLevel};
use harmonaize_analysis::Nanos;
use harmonaize_analysis::congestion::{Congestion, Detector, Limits, Link, Path};
use harmonaize_analysis::trace::Record;
use harmonaize_events::{Direction, Event, EventKind, FlowKey, Protocol};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const STATED: f64 = 25e6;
const POLL_INTERVAL_NS: u64 = 14 * MS;
const STEP_NS: u64 = MS / 10;
const LATE_NS: u64 = 2_500_000;

/// An agent in virtual time. Events reach it within a tenth of a millisecond, and it polls when that is due.
struct Agent {
    world: World,
    detector: Detector,
    polled_ns: u64,
    /// How often it looked, and how often that was for a round trip that was late.
    polls: u64,
    urgent_polls: u64,
}

impl Agent {
    fn new(seed: u64, late_ns: u64, own: Source) -> Self {
        let bottleneck = Bottleneck { bytes_per_second: STATED, base_ns: 400e3, ..Bottleneck::default() };
        let mut world = World::new(bottleneck, seed);
        world.late_ns = late_ns;
        let mut detector = Detector::new(Limits::default());
        detector.take(&world.link(STATED as u64));
        detector.take(&world.add(FlowOwner::Own, 0, own, world.now_ns(), u64::MAX));
        Self { world, detector, polled_ns: 0, polls: 0, urgent_polls: 0 }
    }

    /// Lets time pass until then, or until the connection is said to be starved: when.
    fn starved(&mut self, until_ns: u64) -> Option<u64> {
        while self.world.now_ns() < until_ns {
            let now_ns = self.world.now_ns() + STEP_NS;
            let (detector, mut late) = (&mut self.detector, false);
            self.world.run(now_ns, |record| {
                late |= matches!(record, Record::Event(event) if event.kind == EventKind::LateRtt as u32);
                detector.take(record);
            });
            let since_ns = now_ns - self.polled_ns;
            if since_ns >= POLL_INTERVAL_NS || since_ns >= MS && (late || detector.has_pending_report()) {
                self.world.poll(now_ns, |record| detector.take(record));
                detector.advance(Nanos(now_ns));
                (self.polled_ns, self.polls) = (now_ns, self.polls + 1);
                self.urgent_polls += u64::from(late);
            }
            let path = Path::Connection { address: FlowKey::mapped(100), local: 10_000, remote: 5000 };
            let link = Link { interface: INTERFACE, direction: Direction::Egress, path };
            let found = self.detector.link(&link).filter(|found| found.signals.starved);
            if let Some(found) = found {
                assert_eq!(
                    (found.cause, found.level == CongestionLevel::None),
                    (CongestionCause::CrossTraffic, false)
                );
                return Some(now_ns);
            }
        }
        None
    }
}

/// After how many milliseconds agents report it, without and with the event, the least first. Then samples in a second before, and those of
/// them that were hurried.
fn delays(late_ns: u64) -> (Vec<f64>, f64, f64) {
    let (mut delays, mut looks, mut hurried, mut wrong) = (Vec::new(), 0, 0, 0);
    for seed in seeds(0, 60) {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut agent = Agent::new(seed, late_ns, Source::Paced(STATED * random.random_range(0.86..0.93)));
        let onset_ns = agent.world.now_ns() + random.random_range(500 * MS..600 * MS);
        if agent.starved(onset_ns).is_some() {
            // Pieces at distances that vary make queues of their own; trains tell.
            println!("seed {seed}: starved, though alone");
            (wrong, looks, hurried) = (wrong + 1, looks + agent.polls, hurried + agent.urgent_polls);
            continue;
        }
        (looks, hurried) = (looks + agent.polls, hurried + agent.urgent_polls);
        let begun_ns = agent.world.now_ns();
        agent.world.add(FlowOwner::UnseenCrossTraffic, 9, Source::Paced(STATED / 2.0), begun_ns, u64::MAX);
        let found = agent.starved(begun_ns + 200 * MS);
        delays.push(found.map_or(f64::INFINITY, |at| (at - begun_ns) as f64 / 1e6));
    }
    assert!(wrong <= 3, "{wrong} of 60 wrong");
    delays.sort_by(f64::total_cmp);
    let seconds = 60.0 * 0.55;
    (delays, looks as f64 / seconds, hurried as f64 / seconds)
}

#[test]
fn late_rtt_events_speed_up_detection() {
    let [(without, ..), (with, looks, hurried)] = [0, LATE_NS].map(delays);
    let of = |delays: &[f64], part: f64| delays[((delays.len() - 1) as f64 * part) as usize];
    for (name, delays) in [("without", &without), ("with", &with)] {
        let [least, median, most] = [0.0, 0.5, 1.0].map(|part| of(delays, part));
        println!("{name}: {median:.1} ms at the median ({least:.1} to {most:.1})");
    }
    println!("before: {looks:.0} looks in a second, {hurried:.1} of them for late round trips");
    assert!(of(&with, 0.5) + 3.0 < of(&without, 0.5) && of(&with, 1.0) < 50.0);
}

#[test]
fn own_bursts_do_not_report_starvation() {
    let mut told = 0;
    for (seed, run) in seeds(0, 40).zip(0..) {
        let bytes = [64e3, 128e3, 256e3, 1e6][run as usize % 4];
        let burst = Source::Bursts { bytes, pause_ns: MS * (1 + run) };
        let mut agent = Agent::new(seed, LATE_NS, burst);
        let until_ns = agent.world.now_ns() + 2000 * MS;
        assert_eq!(agent.starved(until_ns), None, "seed {seed}");
        told += agent.urgent_polls;
    }
    assert!(told >= 10, "{told} looks for late round trips");
}

/// What is reported of a round trip. How long it took, what was sent since the one before, which had ended so long before, and of that what
/// it measures.
#[derive(Clone, Copy)]
struct LateRttEvent {
    took_ns: u64,
    bytes: u64,
    paused_ns: u32,
    size: u32,
}

/// A late round trip that ended at a time, and all that is reported of it.
fn late_event(ended_ns: u64, told: LateRttEvent) -> Record {
    let LateRttEvent { took_ns, bytes, paused_ns, size } = told;
    let flow = FlowKey {
        local: FlowKey::mapped(1),
        remote: FlowKey::mapped(100),
        local_port: 10_000,
        remote_port: 5000,
        interface: INTERFACE,
        protocol: Protocol::Tcp as u8,
        direction: Direction::Egress as u8,
        ..FlowKey::default()
    };
    let sent_ns = ended_ns - took_ns;
    Record::Event(Event {
        time_ns: ended_ns,
        flow,
        kind: EventKind::LateRtt as u32,
        count: u32::MAX,
        total: u64::MAX,
        burst_began_ns: sent_ns - MS,
        burst_ended_ns: sent_ns,
        burst_bytes: bytes,
        paused_ns,
        size,
    })
}

/// Whether a connection that has sent for half a second is found starved by an event alone. It has sent 90% of its link. The event was
/// so long ago; beside it another connection sends such a part of the link.
fn reports_starved(told: LateRttEvent, ago_ns: u64, beside: f64) -> bool {
    let mut agent = Agent::new(7, 0, Source::Paced(STATED * (0.9 - beside)));
    let from_ns = agent.world.now_ns();
    if beside > 0.0 {
        agent.detector.take(&agent.world.add(
            FlowOwner::Own,
            1,
            Source::Paced(STATED * beside),
            from_ns,
            u64::MAX,
        ));
    }
    assert_eq!(agent.starved(from_ns + 500 * MS), None);
    let now_ns = agent.world.now_ns();
    agent.detector.take(&late_event(now_ns - ago_ns, told));
    agent.detector.advance(Nanos(now_ns));
    let found = std::iter::from_fn(|| agent.detector.poll()).last();
    let starved =
        found.is_some_and(|found| found.signals.starved && found.cause == CongestionCause::CrossTraffic);
    assert!(found.is_none_or(|found| !starved || found.level != CongestionLevel::None));
    starved
}

#[test]
fn unexplained_queue_jump_is_reported_at_once() {
    // The link takes 4 ms for 100,000 bytes, and the path at rest 0.9.
    let told = LateRttEvent { took_ns: 4_600_000, bytes: 24_000, paused_ns: 0, size: 6_000 };
    assert!(reports_starved(told, 0, 0.0), "others came, and no look at flows was needed");
    assert!(!reports_starved(LateRttEvent { took_ns: 3_200_000, ..told }, 0, 0.0), "own bursts do as much");
    let much = LateRttEvent { bytes: 100_000, ..told };
    assert!(!reports_starved(much, 0, 0.0), "what it sent explains it");
    assert!(
        reports_starved(LateRttEvent { paused_ns: 3_000_000, ..much }, 0, 0.0),
        "but not what had left the queue by then"
    );
    let whole = LateRttEvent { paused_ns: 3_000_000, size: 90_000, ..much };
    assert!(!reports_starved(whole, 0, 0.0), "what was handed over all at once waited for itself");
    assert!(
        !reports_starved(LateRttEvent { bytes: 1_000, ..told }, 0, 0.0),
        "an acknowledgement of little may have been delayed"
    );
    assert!(!reports_starved(LateRttEvent { took_ns: 9_600_000, ..told }, 0, 0.0), "a host stood still");
    assert!(!reports_starved(told, 20 * MS, 0.0), "that was long ago");
    assert!(!reports_starved(told, 0, 0.4), "what the other sent is not known yet");
}

#[test]
fn starvation_that_comes_again_is_no_finding() {
    let mut agent = Agent::new(7, 0, Source::Paced(STATED * 0.9));
    let mut until_ns = agent.world.now_ns() + 500 * MS;
    assert_eq!(agent.starved(until_ns), None);
    let (mut found, mut again) = (0, 0);
    for _ in 0..20 {
        // A leap that nothing sent explains, each 60 ms.
        let told = LateRttEvent { took_ns: 4_600_000, bytes: 24_000, paused_ns: 0, size: 6_000 };
        agent.detector.take(&late_event(agent.world.now_ns(), told));
        until_ns += 60 * MS;
        while agent.world.now_ns() < until_ns {
            let now_ns = agent.world.now_ns() + MS;
            agent.detector.advance(Nanos(now_ns));
            agent.world.poll(now_ns, |record| agent.detector.take(record));
            let starved = |found: &Congestion| found.signals.starved;
            found += std::iter::from_fn(|| agent.detector.poll()).filter(starved).count();
            again += std::iter::from_fn(|| agent.detector.poll_starved_again()).filter(starved).count();
        }
    }
    println!("{found} findings, and {again} times again");
    assert!((1..=6).contains(&found), "{found} findings");
    assert!(again >= 12, "{again} times again");
}
