//! What control takes, in real time, for what happens on a fabric of thousands of hosts. It is printed by kind of
//! event.

use super::fabric::{CrossTraffic, Fabric, MS};
use super::topology::leaf_spine;
use super::world::{SECOND, settings_of};
use harmonaize_server::state::testing::Testing as _;
use std::time::Duration;

const LEAVES: usize = 50;
const SPINES: usize = 8;
const HOSTS: usize = 40;
const COMMUNICATORS: usize = 200;
const RANKS: usize = LEAVES * HOSTS / COMMUNICATORS;

/// Leaves of 40 hosts at 1 Gbit/s under 8 spines.
fn topology() -> String {
    let racks: Vec<usize> = (0..LEAVES * HOSTS).map(|host| host / HOSTS).collect();
    leaf_spine(&racks, SPINES, || "50us".to_owned())
}

/// Hosts of a communicator: each in another rack.
fn hosts(communicator: usize) -> Vec<usize> {
    (0..RANKS).map(|rank| (rank * COMMUNICATORS + communicator * 7) % (LEAVES * HOSTS)).collect()
}

fn phase(fabric: &mut Fabric, what: &str) {
    println!("{what}:\n{}", std::mem::take(&mut fabric.spent));
}

#[test]
#[ignore = "prints times"]
fn times_at_two_thousand_hosts() {
    let mut settings = settings_of(&topology());
    settings.most_communicators = 2 * COMMUNICATORS;
    let mut fabric = Fabric::of(settings, 1, 1, 0);
    phase(&mut fabric, "agents connect");
    let hosts: Vec<Vec<usize>> = (0..COMMUNICATORS).map(hosts).collect();
    let ids: Vec<u64> = (0..)
        .zip(&hosts)
        .map(|(name, hosts): (usize, _)| fabric.form("a", &format!("c{name}"), hosts))
        .collect();
    phase(&mut fabric, "communicators join");
    fabric.run(SECOND * 5);
    phase(&mut fabric, "5 s in which they form and are traced");
    for leaf in 0..10 {
        let link = fabric.link(&format!("leaf{leaf}"), &format!("spine{}", leaf % SPINES));
        fabric.cross_traffic.insert(leaf as u32, CrossTraffic { link, bits: 900_000_000 });
    }
    fabric.sample_all();
    fabric.run(SECOND * 3);
    phase(&mut fabric, "3 s with strangers on 10 links");
    println!("{} links are thought congested", fabric.state.congested_links().len());
    fabric.calm();
    fabric.run(SECOND * 5);
    phase(&mut fabric, "5 s without");
    println!("{} links are thought congested", fabric.state.congested_links().len());
    hosts.iter().for_each(|hosts| fabric.kill(hosts[0]));
    fabric.run(MS * 100);
    phase(&mut fabric, "200 hosts die, one of each communicator");
    for rank in 1..RANKS {
        for ((name, hosts), id) in (0..).zip(&hosts).zip(&ids) {
            fabric.regroup_within(hosts[rank], "a", &format!("c{name}"), (*id, rank as u32), SECOND * 50);
        }
    }
    phase(&mut fabric, "their communicators regroup");
    fabric.run(Duration::from_secs(5));
    phase(&mut fabric, "5 s in which they form");
}
