//! The emulated fabric itself: nodes reach one another, paths are spread, tenants are confined, nothing is left behind.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use harmonaize_tests::{echo, fabric, racks, star};
use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::process::Command;
use std::time::Instant;
use xtask::counters::Counters;
use xtask::fabric::{Fabric, standing};
use xtask::process::Process;
use xtask::tenant::TenantSpace;

fn up(topology: &str) -> Option<Fabric> {
    fabric(topology).map(|built| built.unwrap())
}

#[test]
fn a_star_carries_traffic_and_leaves_nothing_behind() {
    let Some(fabric) = up(&star(2, "1Gbit/s")) else { return };
    let (name, folder) = (fabric.name().to_owned(), fabric.folder().to_path_buf());
    let [first, second] = fabric.hosts() else { panic!("two hosts") };
    let heard = echo(&first.namespace, &second.namespace, second.addresses[0], "over the fabric").unwrap();
    assert_eq!(heard, "over the fabric");
    let heard = echo(&second.namespace, &fabric.control(), fabric.control_address(), "to control").unwrap();
    assert_eq!(heard, "to control");
    assert!(standing().unwrap().contains(&name));
    drop(fabric);
    assert!(!standing().unwrap().contains(&name));
    assert!(!folder.exists());
}

#[test]
fn both_ends_of_each_link_are_shaped() {
    let Some(fabric) = up(&star(2, "100Mbit/s")) else { return };
    for (node, device) in [("h0", "eth0"), ("h1", "eth0"), ("s0", "port0"), ("s0", "port1")] {
        let shown = said(&fabric, node, &["tc", "qdisc", "show", "dev", device]);
        assert!(shown.contains("tbf") && shown.contains("rate 100Mbit"), "{node} {device}: {shown}");
    }
}

#[test]
fn flows_between_racks_spread_over_the_spines_steadily() {
    let Some(fabric) = up(&racks(2, 2, 2, "1Gbit/s")) else { return };
    let hosts = fabric.hosts();
    for (from, to) in [(0, 1), (0, 2), (3, 0), (2, 1)] {
        let (from, to) = (&hosts[from], &hosts[to]);
        assert_eq!(echo(&from.namespace, &to.namespace, to.addresses[0], "hello").unwrap(), "hello");
    }
    let (from, to) = (hosts[0].addresses[0], hosts[2].addresses[0]);
    let next_hop = |port: u16| route(&fabric, from, to, port);
    let chosen: Vec<String> = (40_000..40_032).map(next_hop).collect();
    assert_eq!(
        chosen.iter().collect::<BTreeSet<_>>().len(),
        2,
        "32 source ports use both spines: {chosen:?}"
    );
    assert_eq!(chosen, (40_000..40_032).map(next_hop).collect::<Vec<_>>(), "a flow keeps its spine");
}

#[test]
fn a_host_whose_links_are_down_is_gone_and_comes_back() {
    let Some(fabric) = up(&racks(2, 1, 2, "1Gbit/s")) else { return };
    let [a, b] = fabric.hosts() else { panic!("two hosts") };
    fabric.set_links(&b.name, false).unwrap();
    let to_host = ["ip", "route", "show", "dev", "port0"];
    assert_eq!(said(&fabric, "leaf1", &to_host), "", "its leaf has no way to it");
    assert_ne!(said(&fabric, "leaf0", &to_host), "");
    fabric.set_links(&b.name, true).unwrap();
    assert_eq!(echo(&a.namespace, &b.namespace, b.addresses[0], "back").unwrap(), "back");
}

#[test]
fn a_spine_that_is_cut_dead_is_gone_around_and_comes_back() {
    let Some(fabric) = up(&racks(2, 1, 2, "1Gbit/s")) else { return };
    let [a, b] = fabric.hosts() else { panic!("two hosts") };
    let chosen = || -> BTreeSet<String> {
        (40_000..40_032).map(|port| route(&fabric, a.addresses[0], b.addresses[0], port)).collect()
    };
    let both = chosen();
    assert_eq!(both.len(), 2);
    fabric.set_switch("spine0", false).unwrap();
    // The kernel sees to carriers in its own time.
    let deadline = Instant::now() + harmonaize_tests::STEP;
    while chosen().len() > 1 {
        assert!(Instant::now() < deadline, "a next hop without carrier is still in use");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    for _ in 0..8 {
        assert_eq!(echo(&a.namespace, &b.namespace, b.addresses[0], "round").unwrap(), "round");
    }
    let carried = |port: &str| counters(&fabric, "spine1", port);
    assert!(carried("port0") > 0);
    fabric.set_switch("spine0", true).unwrap();
    while chosen() != both {
        assert!(Instant::now() < deadline, "the spine is not back in use");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    for _ in 0..8 {
        assert_eq!(echo(&b.namespace, &a.namespace, a.addresses[0], "back").unwrap(), "back");
    }
}

fn counters(fabric: &Fabric, node: &str, device: &str) -> u64 {
    Counters::of(&fabric.namespace(node)).unwrap().read().unwrap()[device].sent
}

#[test]
fn a_tenant_has_its_user_loopback_and_its_folder_alone() {
    let Some(fabric) = up(&star(1, "1Gbit/s")) else { return };
    let folder = fabric.hosts()[0].folder.join("a");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("agent.sock"), "").unwrap();
    std::fs::write(fabric.folder().join("secret"), "").unwrap();
    let space = TenantSpace::make(&fabric, "a", 3001, &folder).unwrap();
    let run = fabric.folder().display();
    let script = format!(
        "id -u; id -g; id -G; ip -br link | wc -l; ls {}; ls {run}/secret 2>&1; grep CapEff /proc/self/status; \
         touch {}/x 2>&1 || true",
        folder.display(),
        folder.display()
    );
    let mut command = space.command("/bin/sh".as_ref());
    command.args(["-c", &script]);
    let log = fabric.folder().join("log");
    let mut process = Process::start("tenant", &mut command, &space.namespace, &log).unwrap();
    process.succeed_by(Instant::now() + harmonaize_tests::STEP).unwrap();
    let said = process.said(4096);
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines[..5], ["3001", "3001", "3001", "1", "agent.sock"], "{said}");
    assert!(lines[5].contains("No such file"), "{said}");
    assert_eq!(lines[6], "CapEff:\t0000000000000000", "{said}");
    assert!(lines[7].contains("Permission denied"), "{said}");
}

#[test]
fn dropping_a_fabric_ends_what_runs_inside() {
    let Some(fabric) = up(&star(1, "1Gbit/s")) else { return };
    let mut sleeper = fabric.hosts()[0].namespace.spawn(Command::new("sleep").arg("1000")).unwrap();
    drop(fabric);
    let status = sleeper.wait().unwrap();
    assert!(!status.success(), "{status}");
}

fn said(fabric: &Fabric, node: &str, command: &[&str]) -> String {
    let output = fabric.namespace(node).enter(|| Command::new(command[0]).args(&command[1..]).output());
    let output = output.unwrap().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The device by which the first leaf sends a flow.
fn route(fabric: &Fabric, from: Ipv4Addr, to: Ipv4Addr, port: u16) -> String {
    let (from, to, port) = (from.to_string(), to.to_string(), port.to_string());
    let flow = ["ipproto", "tcp", "sport", &port, "dport", "7200"];
    let question = [&["ip", "route", "get", &to, "from", &from, "iif", "port0"], flow.as_slice()].concat();
    let answer = said(fabric, "leaf0", &question);
    let mut words = answer.split_whitespace().skip_while(|word| *word != "dev");
    words.nth(1).unwrap().to_owned()
}
