//! Aggregators of two levels, end to end. Racks have one each, one is at the spine, and uplinks are no wider than a host's link. What they
//! do is right while they serve, on a bad network, and when the one above or a rack's is killed in the middle of operations and comes back.
//! With three racks the one at the spine is above all others; with two racks one of those is above the other, and its own rack sends to it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_testkit::fabric::Faults;
use harmonaize_tests::aggregated::{rounds_until, sum, through_everything};
use harmonaize_tests::job::{deploy, sockets};
use harmonaize_tests::racks_with_aggregators;

const RACKS: usize = 3;
/// Of a rack; and of hosts' links and of uplinks, Mbit/s.
const HOSTS: usize = 2;
const RATE: u64 = 1000;
/// Elements of a rank's tensor; no multiple of a chunk's.
const ELEMENTS: usize = (1 << 16) + 3;
/// The one above in the topology file.
const ABOVE: usize = RACKS;
const CONFIGURATION: &str = "pool = \"1MiB\"\n";

fn topology(racks: usize) -> String {
    racks_with_aggregators(racks, HOSTS, RATE, RATE)
}

fn killed(position: usize) {
    let told = through_everything(&topology(RACKS), CONFIGURATION, position, |worker, salt| {
        let (given, all) = sum(worker, salt, ELEMENTS)?;
        sum(worker, !salt, 2000)?;
        Ok(given && all)
    });
    if let Some(told) = told {
        assert!(told.contains("agg3 above agg0, agg1, agg2"), "{told}");
    }
}

#[test]
fn sums_survive_a_root_aggregator_restart() {
    killed(ABOVE);
}

#[test]
fn sums_survive_a_rack_aggregator_restart() {
    killed(0);
}

/// Frames are lost, come twice, and are overtaken, at hosts and at all aggregators.
#[test]
fn sums_are_right_on_a_bad_network() {
    let (above, below) = (0, 1);
    let Some(mut deployment) = deploy(&topology(2), |setup| setup.aggregator = CONFIGURATION.to_owned())
    else {
        return;
    };
    deployment.fabric().set_faults(Faults { lost: 20_000, twice: 10_000, late: 20_000 }).unwrap();
    let sockets = sockets(&deployment, "a");
    let served = rounds_until(
        &sockets,
        |served| served >= 2 * HOSTS,
        |worker, salt| {
            let (given, all) = sum(worker, salt, ELEMENTS)?;
            Ok(usize::from(given && all))
        },
    );
    assert!(served >= 2 * HOSTS, "the aggregators did nothing");
    let counts = deployment.wait_until("an aggregator tells nothing", |this| {
        let told = this.ask(&["topology"])?;
        let of = |at: usize, what: &str| {
            told["aggregators"][at]["report"]["tenants"][0][what].as_u64().unwrap_or(0)
        };
        let all = of(below, "sent_to_parent") > 0
            && of(below, "received_from_parent") > 0
            && of(above, "sums") > 0
            && of(above, "sent_to_parent") == 0;
        let counts = [above, below].map(|at| {
            ["received", "sums", "sent_to_parent", "received_from_parent"].map(|what| of(at, what))
        });
        Ok(all.then_some(counts))
    });
    println!("received, sums, up, down: {:?}", counts.unwrap());
    deployment.end().unwrap();
}
