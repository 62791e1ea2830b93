//! Sums by an aggregator whose datagrams go over RDMA. It shares a host's device.

use crate::host::{Host, PATIENCE, until};
use crate::provider::{ARENA, CONTROL, HOSTS, Program, Provider, program, rdma};
use anyhow::Result;
use harmonaize_client::{Access, AttachOptions};
use harmonaize_tests::aggregated::sum_within;
use harmonaize_tests::job::{Worker, options, run_with, succeeded};
use harmonaize_tests::star_with_aggregator;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// Elements of a tensor; no multiple of a chunk's.
const ELEMENTS: usize = 20_003;
/// Operations. On an emulated processor an aggregator may be late and given up, and is tried again.
const OPERATIONS: u64 = 40;

/// Control, agents with more lines, and an aggregator that has a session. None, loudly, without devices.
fn aggregating(lines: impl Fn(usize) -> String) -> Option<(Provider, Program)> {
    let topology = star_with_aggregator(HOSTS, 1000, "0us");
    let provider = Provider::start_on(&topology, "", lines, |_| program("harmonaize-agent"))?;
    let host = Host(0);
    let text = format!(
        "name = \"agg0\"\ncontrol = \"{CONTROL}\"\ninsecure_loopback = true\nlisten = \"{}:7400\"\nmtu = 4200\npool = \"1MiB\"\n\
         packets_per_second = 10_000_000\n[verbs]\ndevices = [{:?}]\n",
        host.address(),
        host.device(),
    );
    let mut role = program("harmonaize-agent");
    role.args(["--role", "aggregator"]);
    let aggregator = Program::start(&mut role, &provider.folder().join("aggregator.toml"), &text);
    until("the aggregator has no session", || aggregator.output().contains("session with control is open"));
    Some((provider, aggregator))
}

/// Sums at ranks that attach so, one on each host; some go by the aggregator, over RDMA.
fn sums_go_by_the_aggregator(provider: &Provider, job: &str, attach: impl Fn(u32) -> AttachOptions + Sync) {
    let served = AtomicUsize::new(0);
    let sums = |worker: &Worker| -> Result<()> {
        for salt in 0..OPERATIONS {
            let (given, all) = sum_within(worker, salt, ELEMENTS, PATIENCE)?;
            served.fetch_add(usize::from(given && all), SeqCst);
        }
        Ok(())
    };
    succeeded(run_with(&provider.sockets(), job, 1, attach, sums));
    let served = served.into_inner();
    println!("{served} of {} sums went by the aggregator", OPERATIONS as usize * HOSTS);
    assert!(served >= HOSTS, "the aggregator did nothing");
    for agent in &provider.agents {
        assert!(agent.output().contains("packets to the aggregator go over RDMA"), "{}", agent.output());
    }
}

#[test]
fn aggregated_collectives_are_right_over_datagrams() {
    let _alone = crate::alone();
    let Some((provider, _aggregator)) = aggregating(|_| String::new()) else { return };
    sums_go_by_the_aggregator(&provider, "summed", |_| options(Access::Mapped, ARENA));
}

/// As on offload units: tensors are fetched and stored by RDMA, by agents of two threads. Ranks on some hosts are mapped.
#[test]
fn sums_of_ranks_attached_over_rdma_go_by_the_aggregator() {
    let _alone = crate::alone();
    let threads = |host| rdma(host) + "[engine]\nthreads = 2\n";
    let Some((provider, _aggregator)) = aggregating(threads) else { return };
    let attached = |access| AttachOptions { timeout: PATIENCE, ..options(access, ARENA) };
    sums_go_by_the_aggregator(&provider, "offloaded", |_| attached(Access::Rdma));
    let mixed = |rank| attached(if rank % 2 == 0 { Access::Rdma } else { Access::Mapped });
    sums_go_by_the_aggregator(&provider, "mixed", mixed);
}
