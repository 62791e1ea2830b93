//! Phases of cross traffic are found as they were, in simulations from seeds and in recorded traces. None are found in other
//! traffic.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, unreachable_pub)] // tests alone

mod hostile;
mod library;
mod recorded;
mod shapes;
mod training;
mod world;

use harmonaize_analysis::Nanos;
use harmonaize_analysis::phases::{Job, Phase, Phases};
use harmonaize_analysis::trace::Record;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;
use std::time::Duration;
use training::{Iteration, Training, chatter, requests, transfer};
use world::{Packet, Watch, address, records};

const MS: u64 = 1_000_000;
/// How often time is told.
const TICK: Duration = Duration::from_millis(1);

/// What is found of records, with time told each millisecond, and every job as it was last.
fn found(records: &[Record]) -> (Vec<Phase>, Vec<Job>) {
    let mut phases = Phases::default();
    let mut jobs = BTreeMap::new();
    let mut now = records.first().map_or(Nanos(0), Record::time);
    for record in records {
        while now.after(TICK) < record.time() {
            now = now.after(TICK);
            phases.advance(now);
            jobs.extend(phases.jobs().map(|job| (job.job, job)));
        }
        phases.take(record);
    }
    for _ in 0..1500 {
        now = now.after(TICK);
        phases.advance(now);
    }
    jobs.extend(phases.jobs().map(|job| (job.job, job)));
    (std::iter::from_fn(|| phases.poll()).collect(), jobs.into_values().collect())
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

fn apart(one: Nanos, other: u64) -> f64 {
    one.0 as f64 - other as f64
}

/// The phase of each iteration, where one overlaps it; panics over phases of no iteration.
fn matched<'a>(log: &[Iteration], phases: &[&'a Phase]) -> Vec<Option<&'a Phase>> {
    let mut of = vec![None; log.len()];
    for phase in phases {
        let overlaps = |one: &Iteration| phase.began.0 < one.ended_ns() && one.began_ns() < phase.ended.0;
        let at = log.iter().position(overlaps).unwrap_or_else(|| panic!("of no iteration: {phase:?}"));
        assert!(of[at].is_none(), "two phases of iteration {at}: {phase:?} {:?}", of[at]);
        of[at] = Some(*phase);
    }
    of
}

fn simulated(training: &Training, seed: u64, watch: &Watch) -> (Vec<Iteration>, Vec<Phase>, Vec<Job>) {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut packets = Vec::new();
    let log = training.run(&mut random, &mut packets);
    let end = log.last().unwrap().ended_ns();
    chatter(&mut random, training.ring.len() as u32, 0, end, &mut packets);
    let (phases, jobs) = found(&records(packets, watch, seed));
    (log, phases, jobs)
}

#[test]
fn a_ring_is_found_as_it_was() {
    let (mut steps, mut wrong, mut rings) = (0, 0, 0);
    for seed in 0..40 {
        println!("seed {seed}");
        let training = Training::any(&mut ChaCha8Rng::seed_from_u64(seed));
        println!("{training:?}");
        let hosts = training.ring.len();
        let (log, phases, jobs) = simulated(&training, seed, &Watch::all(0..hosts as u32));
        let of: Vec<&Phase> =
            matched(&log, &phases.iter().collect::<Vec<_>>()).into_iter().flatten().collect();
        assert_eq!(of.len(), log.len(), "every iteration");
        assert_eq!(jobs.len(), 1);
        let first = of[0].iteration;
        for (at, (iteration, phase)) in log.iter().zip(&of).enumerate() {
            assert_eq!(phase.iteration, first + at as u64);
            let (began, ended) =
                (apart(phase.began, iteration.began_ns()), apart(phase.ended, iteration.ended_ns()));
            // What came before the first heavy burst of a connection may be forgotten.
            let late = if at == 0 { 20e6 } else { 0.2e6 };
            assert!((0.0..late).contains(&began), "iteration {at} begins {began} ns off");
            assert!(ended.abs() < 0.2e6, "iteration {at} ends {ended} ns off");
            assert!(!phase.lossy);
            let ring = phase.ring.unwrap();
            assert_eq!(ring.hosts, hosts as u32);
            // Several steps may leave in one burst, so that they are not told apart.
            let turns = u64::from(ring.steps) / (2 * (hosts as u64 - 1));
            assert_eq!(u64::from(ring.steps), turns * 2 * (hosts as u64 - 1));
            steps += usize::from(turns == training.buckets.len() as u64);
            wrong += usize::from(![0, training.buckets.len() as u64].contains(&turns));
            rings += 1;
        }
        let logged = apart(Nanos(log[39].began_ns()), log[0].began_ns()) / 39.0;
        let period = jobs[0].period.unwrap().as_nanos() as f64;
        assert!((period / logged - 1.0).abs() < 0.003, "{period} {logged}");
        assert_eq!((jobs[0].ring, jobs[0].iterations), (true, 40));
        let mut order: Vec<_> = (0..hosts as u32).map(address).collect();
        let at = jobs[0].hosts.iter().position(|host| *host == order[0]).unwrap();
        order.rotate_right(at);
        assert_eq!(jobs[0].hosts, order);
    }
    println!("steps of {steps} phases of {rings}, wrong {wrong}");
    assert!(steps * 6 > rings && wrong * 10 < rings, "steps of {steps} phases of {rings}, wrong {wrong}");
}

#[test]
fn one_host_sees_its_own_edges() {
    for seed in 100..130 {
        println!("seed {seed}");
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let training = Training::any(&mut random);
        println!("{training:?}");
        let hosts = training.ring.len();
        let host = random.random_range(0..hosts);
        let watch = Watch { sweep_ns: random.random_range(1..20) * MS, ..Watch::all([host as u32]) };
        let (log, phases, jobs) = simulated(&training, seed, &watch);
        let of: Vec<&Phase> =
            matched(&log, &phases.iter().collect::<Vec<_>>()).into_iter().flatten().collect();
        assert_eq!((of.len(), jobs.len()), (log.len(), 1), "every iteration");
        // Its own first words are seen, and the last bytes that come to it.
        let own = |phase: &Phase| *phase.hosts.iter().find(|one| one.host == address(host as u32)).unwrap();
        let starts =
            log.iter().zip(&of).skip(1).map(|(one, phase)| apart(own(phase).first_sent, one.called_ns[host]));
        let ends = log
            .iter()
            .zip(&of)
            .skip(1)
            .map(|(one, phase)| apart(own(phase).last_received, one.done_ns[host]));
        let (start, end) = (median(starts.map(f64::abs).collect()), median(ends.map(f64::abs).collect()));
        assert!(start < 0.2e6 && end < 1e6, "{start} {end}");
        let logged = apart(Nanos(log[39].began_ns()), log[0].began_ns()) / 39.0;
        let period = jobs[0].period.unwrap().as_nanos() as f64;
        assert!((period / logged - 1.0).abs() < 0.003, "{period} {logged}");
    }
}

#[test]
fn slow_rank_is_reported_in_its_iterations() {
    let (mut named, mut wrong, mut slow, mut clean) = (0, 0, 0, 0);
    for seed in 200..230 {
        println!("seed {seed}");
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let training = Training::any(&mut random);
        let hosts = training.ring.len();
        let rank = random.random_range(0..hosts);
        let by = (training.compute_ns as f64 * (0.2 + 5.0 * training.noise)) as u64 + 5 * MS;
        let training = Training { slow: Some((rank, 20, by)), ..training };
        let (log, phases, _) = simulated(&training, seed, &Watch::all(0..hosts as u32));
        let of = matched(&log, &phases.iter().collect::<Vec<_>>());
        assert!(of.iter().flatten().count() >= 38, "{}", of.iter().flatten().count());
        for (at, phase) in of.iter().enumerate().skip(1) {
            let Some(phase) = phase else { continue };
            let host = phase.late.map(|late| late.host);
            if at < 20 {
                clean += 1;
                wrong += usize::from(host.is_some());
            } else {
                slow += 1;
                named += usize::from(host == Some(address(rank as u32)));
                wrong += usize::from(host.is_some_and(|host| host != address(rank as u32)));
            }
        }
    }
    println!("named {named} of {slow}, wrong {wrong} of {clean}");
    assert!(
        named * 100 >= slow * 98 && wrong * 100 <= clean,
        "named {named} of {slow}, wrong {wrong} of {clean}"
    );
}

#[test]
fn jobs_on_the_same_hosts_are_separated() {
    let mut told = 0;
    for seed in 300..320 {
        println!("seed {seed}");
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut packets = Vec::new();
        let first = Training { ring: (0..4).collect(), noise: 0.02, ..Training::any(&mut random) };
        let factor = random.random_range(1.2..2.5);
        let second = Training {
            ring: vec![2, 0, 3, 1],
            port: 22_000,
            compute_ns: (first.compute_ns as f64 * factor) as u64,
            buckets: vec![random.random_range(100_000..1_000_000)],
            ..first.clone()
        };
        let logs = [&first, &second].map(|training| training.run(&mut random, &mut packets));
        let period = |log: &[Iteration]| apart(Nanos(log[39].began_ns()), log[0].began_ns());
        let ratio = period(&logs[1]) / period(&logs[0]);
        if (ratio - ratio.round()).abs() < 0.1 {
            // In step, and begun together: these are not told apart.
            continue;
        }
        told += 1;
        let (phases, jobs) = found(&records(packets, &Watch::all(0..4), seed));
        assert_eq!(jobs.len(), 2, "{first:?} {second:?}");
        for (log, ring) in logs.iter().zip([vec![0, 1, 2, 3], vec![0, 3, 1, 2]]) {
            let ring: Vec<_> = ring.into_iter().map(address).collect();
            let job = jobs.iter().find(|job| job.hosts == ring).unwrap().job;
            let own: Vec<&Phase> = phases.iter().filter(|phase| phase.job == job).collect();
            let of: Vec<&Phase> = matched(log, &own).into_iter().flatten().collect();
            assert!(of.len() >= log.len() - 1);
            let starts: Vec<f64> = log
                .iter()
                .rev()
                .zip(of.iter().rev())
                .map(|(log, one)| apart(one.began, log.began_ns()))
                .collect();
            assert!(median(starts.clone()).abs() < 0.2e6, "{starts:?}");
        }
    }
    assert!(told >= 10, "{told}");
}

#[test]
fn lost_events_are_flagged() {
    for seed in 400..420 {
        println!("seed {seed}");
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let training = Training::any(&mut random);
        let hosts = training.ring.len() as u32;
        let watch = Watch { loss: random.random_range(0.005..0.05), ..Watch::all(0..hosts) };
        println!("{training:?} {watch:?}");
        let (log, phases, _) = simulated(&training, seed, &watch);
        let of = matched(&log, &phases.iter().collect::<Vec<_>>());
        let found = of.iter().flatten().count();
        assert!(found * 100 >= log.len() * 90, "{found}");
        assert!(of.iter().flatten().any(|phase| phase.lossy));
        let starts =
            log.iter().zip(&of).filter_map(|(log, phase)| Some(apart(phase.as_ref()?.began, log.began_ns())));
        let ends =
            log.iter().zip(&of).filter_map(|(log, phase)| Some(apart(phase.as_ref()?.ended, log.ended_ns())));
        let (start, end) = (median(starts.map(f64::abs).collect()), median(ends.map(f64::abs).collect()));
        assert!(start < 1e6 && end < 2e6, "{start} {end}");
    }
}

#[test]
fn other_traffic_has_no_phases() {
    const UNTIL: u64 = 30_000 * MS;
    for seed in 500..530 {
        println!("seed {seed}");
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut packets: Vec<Packet> = Vec::new();
        chatter(&mut random, 4, 0, UNTIL, &mut packets);
        for _ in 0..random.random_range(1..6) {
            let mean = 1 << random.random_range(21..30);
            let alike = random.random::<bool>().then(|| random.random_range(5_000..100_000));
            requests(&mut random, 4, (0, UNTIL), mean, alike, &mut packets);
        }
        if random.random() {
            transfer(&mut random, 4, (UNTIL / 4, UNTIL / 2), &mut packets);
        }
        let (phases, jobs) = found(&records(packets, &Watch::all(0..4), seed));
        assert_eq!((phases, jobs), (vec![], vec![]));
    }
    assert_eq!(found(&[]).0, []);
}

#[test]
fn equal_buckets_are_merged_eventually() {
    for seed in 600..610 {
        println!("seed {seed}");
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let count = random.random_range(8..20);
        let training = Training {
            ring: (0..4).collect(),
            buckets: vec![200_000; count],
            bucket_gap_ns: 7 * MS,
            compute_ns: random.random_range(25..60) * MS,
            noise: 0.01,
            bytes_per_second: 1_200_000_000,
            ..Training::any(&mut random)
        };
        let (log, phases, jobs) = simulated(&training, seed, &Watch::all(0..4));
        assert_eq!(jobs.len(), 1);
        // The last ten are whole.
        for iteration in &log[30..] {
            let of: Vec<_> = phases
                .iter()
                .filter(|one| one.began.0 < iteration.ended_ns() && iteration.began_ns() < one.ended.0)
                .collect();
            assert_eq!(of.len(), 1, "{training:?}");
            assert!(apart(of[0].began, iteration.began_ns()).abs() < 0.2e6);
            assert!(apart(of[0].ended, iteration.ended_ns()).abs() < 0.2e6);
        }
    }
}
