//! One world in virtual time. Tenants' rings, engines, agents' tasks and sessions, and control are the real ones. What carries bytes
//! between hosts, and to control and its disk, is the world's. `HARMONAIZE_SEED=x` or `HARMONAIZE_SEEDS=a..b` chooses seeds.
//!
//! A seed has a process of its own, so that nothing of the process's is left over from another.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

#[path = "simulation/control.rs"]
mod control;
#[path = "simulation/faults.rs"]
mod faults;
#[path = "simulation/host.rs"]
mod host;
#[path = "simulation/links.rs"]
mod links;
#[path = "../../core/tests/simulation/seeds.rs"]
mod seeds;
mod settings;
#[path = "simulation/tenant.rs"]
mod tenant;
#[path = "simulation/virtual_time.rs"]
mod virtual_time;
#[path = "simulation/wires.rs"]
mod wires;
#[path = "simulation/world.rs"]
mod world;

use faults::Fault;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use seeds::{Seed, seeds};
use std::process::Command;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tenant::Script;
use tokio::task::LocalSet;
use world::{Sum, World};

/// Says to a process of this test which family's seed it runs.
const CHILD: &str = "HARMONAIZE_SIMULATED";

static PANICS: AtomicU64 = AtomicU64::new(0);

/// What a family's seeds are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    /// Nothing that may end a communicator.
    Gentle,
    /// One thing that may, among others that may not.
    Hard,
}

impl Family {
    const ALL: [(&'static str, Self); 2] = [("gentle", Self::Gentle), ("hard", Self::Hard)];
}

/// Runs a family's seeds, each in a process.
fn family(name: &'static str, usual: u64) {
    for seed in seeds(usual) {
        let _seed = Seed(name, seed);
        let test = std::env::current_exe().unwrap();
        let child = Command::new(test)
            .args(["--exact", "one_seed", "--ignored", "--nocapture"])
            .env(CHILD, format!("{name} {seed}"))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stdout);
        assert!(
            child.status.success(),
            "{name}, seed {seed}: {}\n{said}{}",
            child.status,
            String::from_utf8_lossy(&child.stderr)
        );
        said.lines().filter(|line| line.starts_with(name)).for_each(|line| println!("{line}"));
    }
}

#[test]
fn gentle() {
    family("gentle", 16);
}

#[test]
fn hard() {
    family("hard", 16);
}

#[test]
#[ignore = "the others run it in a process of its own"]
fn one_seed() {
    let Ok(which) = std::env::var(CHILD) else { return };
    let (name, seed) = which.split_once(' ').unwrap();
    let (_, family) = *Family::ALL.iter().find(|(known, _)| *known == name).unwrap();
    let seed: u64 = seed.parse().unwrap();
    // A panic that the agent or control contains is a failure, too.
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        PANICS.fetch_add(1, Relaxed);
        usual(info);
    }));
    let run = move || {
        virtual_time::begin(seed);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(LocalSet::new().run_until(simulate(family, seed)))
    };
    let sum = std::thread::spawn(run).join().expect("the seed passes");
    assert_eq!(PANICS.load(Relaxed), 0, "something panicked");
    let time = Duration::from_nanos(virtual_time::now());
    println!("{name} {seed}: {:.1} s, {sum:?}", time.as_secs_f64());
}

async fn simulate(family: Family, seed: u64) -> Sum {
    let mut random = ChaCha8Rng::seed_from_u64(seed ^ 0x5eed);
    let hosts = random.random_range(2..5);
    let world = World::new(seed, hosts);
    let each = random.random_range(1..3);
    let ranks = hosts as u32 * each;
    let (operations, window) = (random.random_range(5..30), random.random_range(1..4));
    let (elements, pause) = (1 << random.random_range(0..15), random.random_range(0..1500));
    let script = |rank: u32| Script {
        name: "job",
        host: (rank / each) as usize,
        rank,
        ranks,
        operations,
        window,
        elements,
        pause,
    };
    let mut faults: Vec<(Duration, Fault)> = (0..random.random_range(0..6))
        .map(|_| (Duration::from_millis(random.random_range(0..25_000)), Fault::gentle(&mut random, hosts)))
        .collect();
    if family == Family::Hard {
        let after = Duration::from_millis(random.random_range(500..15_000));
        faults.push((after, Fault::hard(&mut random, hosts)));
    }
    faults.sort_by_key(|(after, _)| *after);
    let judged = {
        let world = Rc::clone(&world);
        async move {
            world.run((0..ranks).map(script).collect(), faults).await;
            // Whatever has happened: who comes now finds all well.
            let last = |host| Script {
                name: "last",
                host,
                rank: host as u32,
                ranks: hosts as u32,
                operations: 3,
                window: 1,
                elements: 1000,
                pause: 0,
            };
            let sum = world.run((0..hosts).map(last).collect(), Vec::new()).await;
            world.is_empty().await;
            sum
        }
    };
    let _shown = Shown(Rc::clone(&world));
    judged.await
}

/// Shows what happened should the seed fail.
struct Shown(Rc<World>);

impl Drop for Shown {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.show();
        }
    }
}
