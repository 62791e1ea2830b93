//! Agents whose links go over RDMA have successors while operations are in flight, and none fails.

use crate::flaps::{End, job};
use crate::host::{Host, PATIENCE, until};
use crate::provider::{HOSTS, Provider, program};
use crate::{alone, ranks};
use harmonaize_tests::job::succeeded;

/// Packets that a device sends for some operations, and for nothing else.
const SOME: u64 = 200;

/// The agents of all hosts in turn. Before the next, links go over RDMA again.
#[test]
fn agents_with_links_over_rdma_are_upgraded_in_turn_under_load() {
    let _alone = alone();
    let Some(provider) = Provider::start_with(|_| String::new(), |_| program("harmonaize-agent")) else {
        return;
    };
    let mut successors = Vec::new();
    let ends = job(&provider, "upgraded", |job| {
        for host in 0..HOSTS {
            successors.push(provider.upgrade(host));
            job.wait_for_progress();
            let device = Host(host as u32);
            let before = device.counter("sent_pkts");
            until("its links do not go over RDMA again", || device.counter("sent_pkts") > before + SOME);
            job.wait_for_progress();
        }
    });
    assert_eq!(ends, [End::Right; HOSTS]);
    succeeded(ranks(&provider.sockets(), "after", |worker| worker.sum(3, 20_000, true, PATIENCE)));
}
