//! Records that no program would tell are taken in without harm.

use super::training::Training;
use super::world::{Watch, records};
use harmonaize_analysis::Nanos;
use harmonaize_analysis::phases::{Limits, Phases};
use harmonaize_analysis::trace::{Lost, LostKind, Observer, Record, Writer, replay};
use harmonaize_events::{Event, FlowKey, RoceCounters, TcpFlow, Traffic};
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

fn wild(random: &mut ChaCha8Rng) -> u64 {
    match random.random_range(0..5) {
        0 => 0,
        1 => u64::MAX - random.random_range(0..3),
        2 => random.next_u64(),
        _ => random.random_range(0..100_000_000_000),
    }
}

fn key(random: &mut ChaCha8Rng) -> FlowKey {
    FlowKey {
        local: FlowKey::mapped(random.random_range(0..5)),
        remote: FlowKey::mapped(random.random_range(0..5)),
        local_port: random.random_range(0..20),
        remote_port: random.random_range(0..3),
        queue_pair: random.random_range(0..3),
        protocol: if random.random() { 6 } else { 17 },
        direction: random.random_range(0..4),
        ..FlowKey::default()
    }
}

fn traffic(random: &mut ChaCha8Rng) -> Traffic {
    Traffic {
        packets: wild(random),
        bytes: wild(random),
        first_ns: wild(random),
        last_ns: wild(random),
        burst_began_ns: wild(random),
        burst_after: wild(random),
        ..Traffic::default()
    }
}

fn any(random: &mut ChaCha8Rng) -> Record {
    let time_ns = wild(random);
    match random.random_range(0..12) {
        0 => Record::Observer(Observer { time_ns, host: random.random_range(0..3), realtime_offset_ns: 0 }),
        1 | 2 => {
            let mut flow = TcpFlow::default();
            (flow.ingress.traffic, flow.egress.traffic) = (traffic(random), traffic(random));
            Record::Tcp { time_ns, key: key(random), flow }
        }
        3 => {
            let counters = RoceCounters { traffic: traffic(random), ..RoceCounters::default() };
            Record::Roce { time_ns, key: key(random), counters }
        }
        4 => Record::Lost(Lost { time_ns, kind: LostKind::Gap, count: wild(random) }),
        _ => Record::Event(Event {
            time_ns,
            flow: key(random),
            kind: random.random_range(0..8),
            burst_began_ns: wild(random),
            burst_ended_ns: wild(random),
            burst_bytes: wild(random),
            ..Event::default()
        }),
    }
}

#[test]
fn wild_records_do_no_harm() {
    for seed in 0..20 {
        println!("seed {seed}");
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let limits = Limits { max_flows: 50, max_watched: 8, jobs: 2, findings: 4, ..Limits::default() };
        let mut phases = Phases::new(limits);
        for _ in 0..5_000 {
            phases.take(&any(&mut random));
            if random.random_range(0..20) == 0 {
                phases.advance(Nanos(wild(&mut random)));
            }
        }
        assert!(phases.jobs().count() <= 2);
        assert!(std::iter::from_fn(|| phases.poll()).count() <= 4);
    }
}

#[test]
fn a_training_among_wild_records_and_damaged_ones() {
    for seed in 0..10 {
        println!("seed {seed}");
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let training = Training { ring: (0..4).collect(), ..Training::any(&mut random) };
        let mut packets = Vec::new();
        training.run(&mut random, &mut packets);
        let mut writer = Writer::new();
        for record in records(packets, &Watch::all(0..4), seed) {
            writer.write(&record);
        }
        let mut bytes = writer.into_bytes();
        let from = bytes.len() / 2;
        for _ in 0..random.random_range(1..5) {
            let at = random.random_range(from..bytes.len());
            bytes[at] = random.random();
        }
        let mut phases = Phases::default();
        let mut count = 0;
        let _ = replay(&bytes, |record| {
            phases.take(record);
            count += 1;
            if random.random_range(0..50) == 0 {
                phases.advance(record.time());
            }
            if random.random_range(0..500) == 0 {
                phases.take(&any(&mut random));
            }
        });
        assert!(count > 100);
    }
}
