//! Links that own flows fill alone: nobody else is blamed, whatever queues they have.

use super::link::{Bottleneck, Discipline, Source};
use super::{Case, seeds};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// For how long each run is watched, in seconds.
const SECONDS: u64 = 10;

/// One to three own flows that send as much as they can, on a link whose rate is stated.
fn filled(seed: u64, rate: f64, discipline: Discipline) -> Case {
    let flows = ChaCha8Rng::seed_from_u64(seed ^ 0xf111).random_range(1..4);
    let case = Case::at_rate(seed, rate).behind(discipline);
    Case {
        stated: rate as u64,
        own: vec![Source::Greedy; flows],
        bottleneck: Bottleneck { mark_ns: None, ..case.bottleneck },
        ..case
    }
}

/// False alarms in all runs at a rate, and how many seconds those are.
fn alarms_at(rate: f64, discipline: Discipline) -> (usize, u64) {
    let (mut alarms, mut seconds) = (0, 0);
    for seed in seeds(30_000, 12) {
        let case = filled(seed, rate, discipline);
        let of_run = case.alarms(SECONDS);
        if of_run > 0 {
            println!("seed {seed}, {discipline:?}: {of_run} false alarms of {:?}", case.own);
        }
        (alarms, seconds) = (alarms + of_run, seconds + SECONDS);
    }
    (alarms, seconds)
}

#[test]
fn own_flows_that_fill_a_link_blame_nobody() {
    for (name, rate) in [("0.1", 12.5e6), ("1", 125e6)] {
        for discipline in [Discipline::DropTail, Discipline::FqCodel, Discipline::Htb, Discipline::Red] {
            let (alarms, seconds) = alarms_at(rate, discipline);
            println!("{name} Gbit/s, {discipline:?}: {alarms} false alarms in {seconds} s");
            // Where queues lie apart, one of three flows may wait for the two others while these hold back.
            let most = if (name, discipline) == ("0.1", Discipline::FqCodel) { 12 } else { 1 };
            assert!(alarms <= most, "{name} Gbit/s, {discipline:?}: {alarms} false alarms in {seconds} s");
        }
    }
}

#[test]
fn own_pieces_on_a_slow_link_blame_nobody() {
    // A link of 100 Mbit/s takes as long for a piece as bytes are told apart by. Some alarms are left where queues lie
    // apart, or drop early.
    let most =
        [(Discipline::DropTail, 1), (Discipline::FqCodel, 14), (Discipline::Htb, 1), (Discipline::Red, 3)];
    for (discipline, most) in most {
        let of_seed = |seed| (seed, Case::at_rate(seed, 12.5e6).behind(discipline).alarms(30));
        let wrong: Vec<_> = seeds(20_000, 12).map(of_seed).filter(|(_, alarms)| *alarms > 0).collect();
        println!("{discipline:?}: seeds and their false alarms in 30 s: {wrong:?}");
        // Six minutes in all: one is 10 an hour.
        let alarms: usize = wrong.iter().map(|(_, alarms)| alarms).sum();
        assert!(alarms <= most, "{discipline:?}: {wrong:?}");
    }
}
