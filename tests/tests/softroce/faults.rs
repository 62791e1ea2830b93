//! Faults of real devices under agents with running collectives: a typed error for whom it concerns, nothing for others.

use crate::flaps::{End, Ends, Job};
use crate::host::{Host, PATIENCE, may_break};
use crate::provider::{HOSTS, Program, Provider, configuration, program};
use crate::{alone, ranks};
use anyhow::{Result, bail};
use harmonaize_client::{Error, Status};
use harmonaize_tests::job::{Worker, succeeded};
use rustix::thread::CapabilitySet;
use std::time::Instant;

/// Sums until one fails with the loss of a rank; another failure, or none in time, is an error.
fn until_a_rank_is_lost(worker: &Worker) -> Result<()> {
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        let Err(error) = worker.sum(2, 20_000, false, PATIENCE) else { continue };
        let Some(Error::Operation { status: Status::RankLost, .. }) = error.downcast_ref() else {
            bail!("not the loss of a rank but {error:#}");
        };
        return Ok(());
    }
    bail!("no error in {} s", PATIENCE.as_secs())
}

/// The kernel takes the device of an agent away under a running collective. Every rank of that communicator gets a typed
/// error, the communicator on the other hosts goes on, the agents let go of the device, and use it again once it is back.
#[test]
fn a_removed_device_ends_its_communicators_only() {
    let _alone = alone();
    if !may_break(HOSTS) {
        return;
    }
    let provider = Provider::start_with(|_| String::new(), |_| program("harmonaize-agent"));
    let Some(provider) = provider else { return };
    let sockets = provider.sockets();
    let (ready, started) = std::sync::mpsc::channel::<()>();
    let spared_job = Job::default();
    let mut broken = std::thread::scope(|scope| {
        let lost = scope.spawn(|| {
            ranks(&sockets, "all", |worker| {
                worker.sum(1, 1000, false, PATIENCE)?;
                ready.send(())?;
                until_a_rank_is_lost(worker)
            })
        });
        let spared = scope.spawn(|| {
            // As often as it takes, and then some.
            ranks(&sockets[..2], "some", |worker| spared_job.work(worker))
        });
        let ends = Ends(&spared_job);
        // All of them: one rank may be done before another has heard of it.
        (0..HOSTS).for_each(|_| started.recv_timeout(PATIENCE).unwrap());
        let broken = Host(3).remove_device();
        let lost = lost.join().unwrap();
        drop(ends);
        assert_eq!(succeeded(spared.join().unwrap()), [End::Right; 2]);
        succeeded(lost);
        broken
    });
    broken.wait_until_removed();
    broken.mend();
    succeeded(ranks(&sockets, "again", |worker| worker.sum(3, 10_000, true, PATIENCE)));
}

/// An agent lacks the privilege to pin what it likes, and has a low limit. Joining fails on all ranks, the agent's log
/// says which limit and how to raise it, and the other hosts' communicators form.
#[test]
fn a_low_memlock_limit_names_the_setting() {
    let _alone = alone();
    if !may_break(HOSTS) {
        return;
    }
    // The privileges to pin more and to raise the limit leave this thread's bounding set, and with it the children's: a thread of its
    // own, therefore.
    let start = || {
        for privilege in [CapabilitySet::IPC_LOCK, CapabilitySet::SYS_RESOURCE] {
            rustix::thread::remove_capability_from_bounding_set(privilege).unwrap();
        }
        let lines = |_| String::new();
        Provider::start_with(lines, |host| {
            let agent = program("harmonaize-agent");
            if host != 3 {
                return agent;
            }
            let mut limited = std::process::Command::new("/usr/bin/busybox");
            let agent = agent.get_program();
            limited.args(["sh", "-c", "ulimit -l 64 && exec \"$0\" \"$@\""]).arg(agent).env("NO_COLOR", "1");
            limited
        })
    };
    let provider = std::thread::scope(|scope| scope.spawn(start).join().unwrap());
    let Some(provider) = provider else { return };
    let sockets = provider.sockets();
    for (rank, result) in ranks(&sockets, "all", |_| Ok(())).into_iter().enumerate() {
        let Err(error) = result else { panic!("rank {rank} has joined") };
        println!("  rank {rank}: {error:#}");
        assert!(matches!(error.downcast_ref(), Some(Error::Join { .. })), "rank {rank}: {error:#}");
    }
    let words = provider.agents[3].output();
    assert!(words.contains("pinned memory is limited to 65536 bytes (RLIMIT_MEMLOCK)"), "{words}");
    assert!(words.contains("LimitMEMLOCK=infinity"), "{words}");
    succeeded(ranks(&sockets[..3], "some", |worker| worker.sum(3, 10_000, true, PATIENCE)));
}

/// An agent that gets the wrong GID index or MTU ends at once. It reports which it was and which there are.
#[test]
fn a_wrong_gid_or_mtu_is_reported() {
    let _alone = alone();
    if !may_break(HOSTS) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let narrow = Host(0).link_mtu(1500);
    for (verbs, expected) in [
        ("gid_index = 200\n", "GID index 200 of rxe0 port 1 is empty; used are: [0, 1]"),
        ("mtu = 4096\n", "an MTU of 4096 is over the 1024 of rxe0 port 1"),
        ("mtu = 1500\n", "256, 512, 1024, 2048 or 4096"),
        ("devices = [\"mlx5_0\"]\n", "no RDMA device mlx5_0; there are: rxe0, rxe1, rxe2, rxe3"),
    ] {
        let text = configuration(Host(0), verbs, &folder.path().join("socket"));
        let config = folder.path().join("agent.toml");
        let mut agent = Program::start(&mut program("harmonaize-agent"), &config, &text);
        assert!(!agent.ended().success());
        assert!(agent.output().contains(expected), "{}", agent.output());
    }
    narrow.mend();
}
