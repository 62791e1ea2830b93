//! Communicators in virtual time: participants with real memory, a network with every delay that a seed can think of, and
//! what can go wrong, each with what must be told of it. `HARMONAIZE_SEED=x` or `HARMONAIZE_SEEDS=a..b` chooses seeds.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

#[path = "simulation/execute.rs"]
mod execute;
#[path = "simulation/hostile.rs"]
mod hostile;
#[path = "simulation/memory.rs"]
mod memory;
#[path = "simulation/network.rs"]
mod network;
#[path = "simulation/scenario.rs"]
mod scenario;
#[path = "simulation/world.rs"]
mod world;

use scenario::Scenario;
use std::ops::Range;
use world::{Statistics, World};

/// Says which seed failed.
struct Seed(&'static str, u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "run again: HARMONAIZE_SEED={} cargo test -p harmonaize-core --test simulation {}",
                self.1, self.0
            );
        }
    }
}

fn seeds(usual: u64) -> Range<u64> {
    let number = |text: &str| text.trim().parse::<u64>().expect("a number");
    if let Ok(seed) = std::env::var("HARMONAIZE_SEED") {
        return number(&seed)..number(&seed) + 1;
    }
    match std::env::var("HARMONAIZE_SEEDS") {
        Ok(seeds) => {
            let (from, to) = seeds.split_once("..").expect("a range like 0..1000");
            number(from)..number(to)
        }
        Err(_) => 0..usual,
    }
}

/// Runs a family: builds each seed's scenario, runs it, judges it, and prints what it came to.
fn family(
    name: &'static str,
    usual: u64,
    faulty: bool,
    build: impl Fn(u64) -> Scenario,
    judge: impl Fn(&World),
) {
    let mut sum = Statistics::default();
    let mut count = 0;
    for seed in seeds(usual) {
        let _seed = Seed(name, seed);
        let mut world = World::new(build(seed), faulty);
        world.run();
        judge(&world);
        sum.add(&world.statistics);
        count += 1;
    }
    println!("{name}: {count} seeds, {sum}");
}

/// Everything ended well, and everybody has closed.
fn well(world: &World) {
    for (index, node) in world.nodes.iter().enumerate() {
        assert!(node.closed, "participant {index} never finished\n{}", world.describe());
    }
    for (rank, state) in world.ranks.iter().enumerate() {
        let acts = world.scenario.scripts[rank].acts.len();
        assert!(state.outcomes.len() == acts, "rank {rank} lacks completions");
    }
}

#[test]
fn clean() {
    family("clean", 150, false, |seed| Scenario::new(seed, 1), well);
}

#[test]
fn rough() {
    family("rough", 250, false, |seed| Scenario::new(seed, 1).rough(), well);
}
