//! Sums by an aggregator whose datagrams go over RDMA. It shares a host's device.

use crate::host::{Host, PATIENCE, until};
use crate::provider::{CONTROL, HOSTS, Program, Provider, program};
use harmonaize_tests::aggregated::sum_within;
use harmonaize_tests::job::succeeded;
use harmonaize_tests::star_with_aggregator;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// Elements of a tensor; no multiple of a chunk's.
const ELEMENTS: usize = 20_003;
/// Operations. On an emulated processor an aggregator may be late and given up, and is tried again.
const OPERATIONS: u64 = 40;

#[test]
fn aggregated_collectives_are_right_over_datagrams() {
    let _alone = crate::alone();
    let topology = star_with_aggregator(HOSTS, 1000, "0us");
    let provider = Provider::start_on(&topology, "", |_| String::new(), |_| program("harmonaize-agent"));
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
    succeeded(crate::ranks(&provider.sockets(), "summed", |worker| {
        for salt in 0..OPERATIONS {
            let (given, all) = sum_within(worker, salt, ELEMENTS, PATIENCE)?;
            served.fetch_add(usize::from(given && all), SeqCst);
        }
        Ok(())
    }));
    let served = served.into_inner();
    println!("{served} of {} sums went by the aggregator", OPERATIONS as usize * HOSTS);
    assert!(served >= HOSTS, "the aggregator did nothing");
    for agent in &provider.agents {
        assert!(agent.output().contains("packets to the aggregator go over RDMA"), "{}", agent.output());
    }
}
