//! Sums by an aggregator whose datagrams go over RDMA. It shares a host's device.

use crate::host::{Host, PATIENCE, until};
use crate::provider::{ARENA, CONTROL, HOSTS, Program, Provider, program};
use anyhow::{Result, ensure};
use harmonaize_client::{Access, Algorithm, Dtype, ReduceOp};
use harmonaize_tests::job::{Worker, options, run_with, succeeded};
use harmonaize_tests::star_with_aggregator;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// Elements of a tensor; no multiple of a chunk's.
const ELEMENTS: usize = 20_003;
/// Operations. On an emulated processor an aggregator may be late and given up, and is tried again.
const OPERATIONS: u64 = 40;

fn value(rank: u32, salt: u64, element: usize) -> f32 {
    (u64::from(rank + 3) * (salt + 1) + element as u64 % 977) as f32
}

/// Whether the aggregator did all of it.
fn sum(worker: &Worker, salt: u64) -> Result<bool> {
    let tensor = worker.client.tensor(Dtype::F32, ELEMENTS as u64)?;
    let own: Vec<f32> = (0..ELEMENTS).map(|element| value(worker.rank, salt, element)).collect();
    tensor.write(0, &own)?;
    let receipt = worker.communicator.all_reduce_in_place(&tensor, ReduceOp::Sum)?.wait(PATIENCE)?;
    let mut found = vec![0_f32; ELEMENTS];
    tensor.read(0, &mut found)?;
    for (element, found) in found.into_iter().enumerate() {
        let right: f32 = (0..worker.ranks).map(|rank| value(rank, salt, element)).sum();
        ensure!(found == right, "sum {salt}, element {element}: {found}, and not {right}");
    }
    Ok(receipt.algorithm == Algorithm::Aggregated && !receipt.fallback)
}

#[test]
fn aggregated_collectives_are_right_over_datagrams() {
    let _alone = crate::alone();
    let topology = star_with_aggregator(HOSTS, 1000, "0us");
    let provider = Provider::start_on(&topology, |_| String::new(), |_| program("harmonaize-agent"));
    let Some(provider) = provider else { return };
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
    let served = AtomicUsize::new(0);
    succeeded(run_with(
        &provider.sockets(),
        "summed",
        1,
        |_| options(Access::Mapped, ARENA),
        |worker| {
            for salt in 0..OPERATIONS {
                served.fetch_add(usize::from(sum(worker, salt)?), SeqCst);
            }
            Ok(())
        },
    ));
    let served = served.into_inner();
    println!("{served} of {} sums went by the aggregator", OPERATIONS as usize * HOSTS);
    assert!(served >= HOSTS, "the aggregator did nothing");
    for agent in &provider.agents {
        assert!(agent.output().contains("packets to the aggregator go over RDMA"), "{}", agent.output());
    }
}
