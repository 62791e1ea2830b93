//! Own connections to one host, each by a path of its own. The congested path is reported, and who congests it.

use super::link::{Bottleneck, FlowOwner, INTERFACE, MS, Source, World};
use super::seeds;
use harmonaize_abi::{CongestionCause, CongestionLevel};
use harmonaize_analysis::Nanos;
use harmonaize_analysis::congestion::{Congestion, Detector, Limits, Link, Path};
use harmonaize_analysis::trace::Record;
use harmonaize_events::{Direction, FlowKey};

/// Two ways to one host, and what the flows on them are said to meet.
struct TwoPaths {
    worlds: [World; 2],
    detector: Detector,
    found: Vec<Congestion>,
}

impl TwoPaths {
    /// Own connections on each way, with what each sends.
    fn new(seed: u64, own: [&[Source]; 2]) -> Self {
        let world = |way: u16| {
            let mut world = World::new(Bottleneck::default(), seed + u64::from(way));
            world.first_port = 10_000 + 100 * way;
            world
        };
        let mut ways = Self {
            worlds: [world(0), world(1)],
            detector: Detector::new(Limits::default()),
            found: Vec::new(),
        };
        ways.detector.take(&ways.worlds[0].link(250_000_000));
        for (world, sources) in ways.worlds.iter_mut().zip(own) {
            for (flow, source) in sources.iter().enumerate() {
                let from_ns = world.now_ns() + MS * flow as u64;
                ways.detector.take(&world.add(FlowOwner::Own, 0, *source, from_ns, u64::MAX));
            }
        }
        ways
    }

    fn advance(&mut self, milliseconds: u64) {
        for _ in 0..milliseconds {
            let next_ns = self.worlds[0].now_ns() + MS;
            for world in &mut self.worlds {
                world.poll(next_ns, |record| self.detector.take(record));
            }
            self.detector.advance(Nanos(next_ns));
            self.found.extend(std::iter::from_fn(|| self.detector.poll()));
        }
    }

    /// What was found since the last time of what leaves by a connection.
    fn of(&mut self, port: u16) -> Vec<(CongestionLevel, CongestionCause, u64)> {
        let link = connection(port);
        let all = std::mem::take(&mut self.found);
        let (of, others): (Vec<_>, Vec<_>) = all.into_iter().partition(|one| one.link == link);
        self.found = others;
        of.into_iter().map(|one| (one.level, one.cause, one.found.0)).collect()
    }
}

fn connection(port: u16) -> Link {
    let path = Path::Connection { address: FlowKey::mapped(100), local: port, remote: 5000 };
    Link { interface: INTERFACE, direction: Direction::Egress, path }
}

#[test]
fn only_the_congested_connection_is_reported() {
    let mut late = 0;
    for seed in seeds(0, 30) {
        let paced: &[Source] = &[Source::Paced(90e6)];
        let mut ways = TwoPaths::new(seed, [paced, paced]);
        ways.advance(600);
        assert_eq!((ways.of(10_000), ways.of(10_100)), (vec![], vec![]), "seed {seed}: too early");
        let onset_ns = ways.worlds[1].now_ns();
        ways.worlds[1].add(FlowOwner::UnseenCrossTraffic, 9, Source::Greedy, onset_ns, u64::MAX);
        ways.advance(100);
        assert_eq!(ways.of(10_000), [], "seed {seed}: the other way is clear");
        let found = ways.of(10_100);
        let others = found.iter().find(|(_, cause, _)| *cause == CongestionCause::CrossTraffic);
        let after_ns = others.map(|(.., found_ns)| found_ns - onset_ns).expect("nobody is blamed");
        println!("seed {seed}: after {} us", after_ns / 1000);
        late += usize::from(after_ns > 30 * MS);
    }
    assert!(late <= 3, "{late} of 30 late");
}

#[test]
fn own_traffic_filling_a_path_is_own() {
    for seed in seeds(100, 20) {
        let burst = Source::Bursts { bytes: 6e6, pause_ns: 60 * MS };
        let mut ways = TwoPaths::new(seed, [&[Source::Paced(30e6)], &[burst]]);
        ways.advance(1000);
        let world = &mut ways.worlds[1];
        let beside = world.add(FlowOwner::Own, 0, Source::Paced(80e6), world.now_ns(), u64::MAX);
        ways.detector.take(&beside);
        ways.advance(2000);
        assert_eq!(ways.of(10_000), [], "seed {seed}: the other way is clear");
        for port in [10_100, 10_101] {
            let found = ways.of(port);
            assert!(!found.is_empty(), "seed {seed}, port {port}: no queue was found");
            let wrong = found.iter().filter(|one| one.1 == CongestionCause::CrossTraffic).count();
            assert_eq!(wrong, 0, "seed {seed}, port {port}: {found:?}");
        }
    }
}

#[test]
fn released_connections_join_the_remote_path() {
    let mut ways = TwoPaths::new(7, [&[Source::Paced(20e6)], &[]]);
    ways.advance(50);
    assert!(ways.detector.link(&connection(10_000)).is_some_and(|link| link.own_rate > 10_000_000));
    let own = ways.worlds[0].add(FlowOwner::Own, 0, Source::Paced(1e6), u64::MAX, u64::MAX);
    let Record::Owner(mut owner) = own else { panic!("{own:?}") };
    owner.flow.local_port = 10_000;
    owner.owned = false;
    ways.detector.take(&Record::Owner(owner));
    ways.advance(50);
    assert!(ways.detector.link(&connection(10_000)).is_some_and(|link| link.own_rate == 0));
    let path = Path::Remote { address: FlowKey::mapped(100), port: 0 };
    let rest = Link { path, ..connection(10_000) };
    assert!(ways.detector.link(&rest).is_some_and(|link| link.cross_traffic_rate > 10_000_000));
}
