//! An agent's successor takes its place while operations are in flight, and none fails. Programs of the next release do the
//! same.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

mod releases;

use harmonaize_client::Access;
use harmonaize_shm::{receive_with_descriptors, send_with_descriptors};
use harmonaize_testkit::deployment::{Deployment, Setup};
use harmonaize_tests::job::{Worker, deploy, options, run, sockets, succeeded};
use harmonaize_tests::{STEP, aggregated, load, star, star_with_aggregator};
use rustix::net::{RecvFlags, SendFlags};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

fn with_place(setup: &mut Setup) {
    setup.agent += "handover = \"{folder}/handover.sock\"\n";
}

/// Adds up, a large tensor or a small one, in place or not.
fn sum(worker: &Worker, round: u64) -> anyhow::Result<()> {
    let count = if round.is_multiple_of(3) { 300_000 } else { 2_000 };
    worker.sum(round, count, round.is_multiple_of(2), STEP)
}

/// Runs sums on all hosts, by two ranks each, while `scenario` does something to their agents: what each rank had.
fn under_load(deployment: &mut Deployment, scenario: impl FnOnce(&mut Deployment)) -> Vec<Vec<Duration>> {
    under(deployment, 2, sum, scenario)
}

/// The same for another operation of so many ranks a host.
fn under(
    deployment: &mut Deployment,
    ranks_each: u32,
    operation: impl Fn(&Worker, u64) -> anyhow::Result<()> + Sync,
    scenario: impl FnOnce(&mut Deployment),
) -> Vec<Vec<Duration>> {
    let sockets = sockets(deployment, "a");
    load::under(&sockets, ranks_each, operation, |load| {
        load.goes_on();
        scenario(deployment);
        load.goes_on();
    })
}

/// Prints, as rows, how long all ranks' operations took, none of which failed. Those that an upgrade held up are the longest.
fn print_pauses(what: &str, ranks: &[Vec<Duration>]) {
    let mut took = ranks.concat();
    took.sort_unstable();
    println!("{what} under load: {} operations, 0 failed", took.len());
    for (name, percent) in [("median", 50), ("p99", 99), ("longest", 100)] {
        let of = took[(took.len() * percent / 100).min(took.len() - 1)];
        println!("| {name} operation, ms | {:.1} |", of.as_secs_f64() * 1e3);
    }
}

/// Who comes anew finds the agents, and is given the right sums.
fn sums_go_on(deployment: &Deployment, ranks_each: u32) {
    succeeded(run(&sockets(deployment, "a"), "after", ranks_each, |worker| worker.sum(1, 1000, true, STEP)));
}

#[test]
fn a_host_s_operations_go_on_with_its_next_agent() {
    let Some(mut deployment) = deploy(&star(1, "10Gbit/s"), with_place) else { return };
    let ranks = under_load(&mut deployment, |deployment| {
        for _ in 0..3 {
            deployment.upgrade_agent(0).unwrap();
        }
    });
    print_pauses("one host's agent upgraded three times", &ranks);
    // Who comes anew finds the agent, and control has it.
    deployment.wait_until_ready().unwrap();
    sums_go_on(&deployment, 2);
}

#[test]
fn four_hosts_are_upgraded_in_turn_under_load() {
    let Some(mut deployment) = deploy(&star(4, "10Gbit/s"), with_place) else { return };
    let ranks = under_load(&mut deployment, |deployment| {
        for position in 0..4 {
            deployment.upgrade_agent(position).unwrap();
        }
    });
    print_pauses("four hosts' agents upgraded in turn", &ranks);
    deployment.wait_until_ready().unwrap();
    sums_go_on(&deployment, 1);
}

/// Of each host's two ranks one has its tensors mapped, and those of the other are reached through a socket.
#[test]
fn hosts_whose_ranks_map_nothing_are_upgraded_in_turn_under_load() {
    let Some(mut deployment) = deploy(&star(2, "10Gbit/s"), with_place) else { return };
    let sockets = sockets(&deployment, "a");
    let access = |rank: u32| if rank.is_multiple_of(2) { Access::Mapped } else { Access::Remote };
    let ranks = load::under_with(
        &sockets,
        2,
        |rank| options(access(rank), 192),
        sum,
        |load| {
            load.goes_on();
            for position in [0, 1, 0] {
                let deadline = Instant::now() + STEP;
                // On a busy machine the process may not have its turn while the engine stands still.
                while let Err(error) = deployment.upgrade_agent(position) {
                    let why = format!("{error:#}");
                    assert!(why.contains("transfers under way") && Instant::now() < deadline, "{why}");
                }
                load.goes_on();
            }
        },
    );
    print_pauses("two hosts' agents upgraded in turn, of ranks that map nothing,", &ranks);
    deployment.wait_until_ready().unwrap();
    sums_go_on(&deployment, 2);
}

/// No operation fails, and with each of the successors the aggregator is used again.
#[test]
fn four_aggregating_hosts_are_upgraded_under_load() {
    const HOSTS: usize = 4;
    let adjust = |setup: &mut Setup| {
        with_place(setup);
        setup.aggregator = "pool = \"1MiB\"\n".into();
    };
    let Some(mut deployment) = deploy(&star_with_aggregator(HOSTS, 1000, "0us"), adjust) else { return };
    // What went wholly by the aggregator.
    let served = AtomicU64::new(0);
    let aggregate = |worker: &Worker, round: u64| -> anyhow::Result<()> {
        let elements = if round.is_multiple_of(2) { 131_075 } else { 6_000 };
        let (given, all) = aggregated::sum(worker, round, elements)?;
        served.fetch_add(u64::from(worker.rank == 0 && given && all), Ordering::SeqCst);
        Ok(())
    };
    let ranks = under(&mut deployment, 1, aggregate, |deployment| {
        for position in (0..HOSTS).map(Some).chain([None]) {
            let (before, deadline) = (served.load(Ordering::SeqCst), Instant::now() + 2 * STEP);
            while served.load(Ordering::SeqCst) < before + 5 {
                assert!(Instant::now() < deadline, "the aggregator is not used before {position:?}");
                std::thread::sleep(Duration::from_millis(1));
            }
            if let Some(position) = position {
                deployment.upgrade_agent(position).unwrap();
            }
        }
    });
    print_pauses("four hosts' agents upgraded in turn beside an aggregator", &ranks);
    deployment.wait_until_ready().unwrap();
    sums_go_on(&deployment, 1);
}

/// A successor by a changed configuration is refused with these words, and the agent goes on.
fn refused(change: impl Fn(&str) -> String, words: &[&str]) {
    let Some(mut deployment) = deploy(&star(2, "10Gbit/s"), with_place) else { return };
    let host = deployment.hosts()[0].clone();
    let config = std::fs::read_to_string(host.folder.join("agent.toml")).unwrap();
    let other = host.folder.join("other.toml");
    std::fs::write(&other, change(&config)).unwrap();
    under_load(&mut deployment, |deployment| {
        let mut command = Command::new(deployment.binaries().path("harmonaize-agent").unwrap());
        command.arg("--config").arg(&other).arg("--take-over").env("NO_COLOR", "1");
        let error = deployment.succeed_agent(0, &mut command).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{words:?} in {error}");
    });
    deployment.upgrade_agent(0).unwrap();
}

#[test]
fn a_successor_of_another_host_is_refused() {
    let words = ["refused: the successor is of host h7, this agent of h0"];
    refused(|config| config.replace("host = \"h0\"", "host = \"h7\""), &words);
}

#[test]
fn a_successor_that_lacks_a_tenant_leaves_the_agent_in_place() {
    let words = ["the other agent goes on", "tenant a is not served by this configuration"];
    refused(|config| config.replace("name = \"a\"", "name = \"c\""), &words);
}

/// Sends what a successor sends: bytes in a file of their own.
fn send(stream: &UnixStream, bytes: &[u8]) {
    let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::io::write(&file, bytes).unwrap();
    send_with_descriptors(stream.as_fd(), &[0; 8], &[file.as_fd()], SendFlags::empty()).unwrap();
}

/// Takes a message of the agent's, and drops what it says and brings.
fn receive(stream: &UnixStream) {
    let mut count = [0; 8];
    assert_eq!(receive_with_descriptors(stream.as_fd(), &mut count, RecvFlags::empty()).unwrap().0, 8);
    let (mut taken, all) = (0, u64::from_le_bytes(count) as usize);
    while taken < all {
        let (_, some) = receive_with_descriptors(stream.as_fd(), &mut [0], RecvFlags::empty()).unwrap();
        taken += some.len();
    }
}

#[test]
fn an_agent_goes_on_whose_successor_dies_in_between() {
    let Some(mut deployment) = deploy(&star(2, "10Gbit/s"), with_place) else { return };
    let host = deployment.hosts()[0].clone();
    let links = format!("authenticated over TCP at {}:7200", host.addresses[0]);
    let text = |text: &str| [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    // Version 1, a build, the host, the threads that it has by default, the links.
    let threads = match std::thread::available_parallelism().map_or(1, usize::from) {
        1 => 1,
        2..16 => 2,
        _ => 4,
    };
    let greeting = [&[0, 1][..], &text("test"), &text("h0"), &[threads], &text(&links)].concat();
    under_load(&mut deployment, |deployment| {
        // It dies at each point where it may.
        for said in 0..4 {
            let stream = UnixStream::connect(host.folder.join("handover.sock")).unwrap();
            if said > 0 {
                send(&stream, &greeting);
                receive(&stream);
            }
            if said > 1 {
                send(&stream, &[0, 0]);
            }
            if said > 2 {
                receive(&stream);
            }
            drop(stream);
        }
        deployment.check().unwrap();
        let log = std::fs::read_to_string(host.folder.join("log")).unwrap();
        assert!(log.contains("the hand-over is called off"), "{log}");
    });
    deployment.upgrade_agent(0).unwrap();
}
