//! The emulated fabric itself: nodes reach one another, paths are spread, tenants are confined, nothing is left behind.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use harmonaize_testkit::counters::{Carried, Counters};
use harmonaize_testkit::cross_traffic::CrossTraffic;
use harmonaize_testkit::fabric::{Fabric, standing};
use harmonaize_testkit::load::Watch;
use harmonaize_testkit::process::Process;
use harmonaize_testkit::route::{Flow, Protocol, switches};
use harmonaize_testkit::tenant::TenantSpace;
use harmonaize_testkit::topology::Topology;
use harmonaize_tests::{echo, fabric, racks, racks_with_unmanaged_hosts, star, star_with_aggregator};
use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
use std::collections::BTreeSet;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

fn build_fabric(topology: &str) -> Option<Fabric> {
    fabric(topology).map(|built| built.unwrap())
}

#[test]
fn a_star_carries_traffic_and_leaves_nothing_behind() {
    let Some(fabric) = build_fabric(&star(2, "1Gbit/s")) else { return };
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
    let Some(fabric) = build_fabric(&star(2, "100Mbit/s")) else { return };
    for (node, device) in [("h0", "eth0"), ("h1", "eth0"), ("s0", "port0"), ("s0", "port1")] {
        let shown = stdout_of(&fabric, node, &["tc", "qdisc", "show", "dev", device]);
        assert!(shown.contains("tbf") && shown.contains("rate 100Mbit"), "{node} {device}: {shown}");
    }
}

#[test]
fn flows_between_racks_spread_over_the_spines_steadily() {
    let Some(fabric) = build_fabric(&racks(2, 2, 2, "1Gbit/s")) else { return };
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

/// A connection's packets go where `ip route get` says. They go where a traced path says, too.
#[test]
fn connections_cross_the_spines_that_their_ports_choose() {
    let Some(fabric) = build_fabric(&racks(2, 1, 2, "1Gbit/s")) else { return };
    let [a, b] = fabric.hosts() else { panic!("two hosts") };
    let listener = b.namespace.enter(|| TcpListener::bind((b.addresses[0], 0)).unwrap()).unwrap();
    let target = listener.local_addr().unwrap();
    for source_port in 30_000..30_008 {
        let before = ["spine0", "spine1"].map(|spine| counters(&fabric, spine, "port1").sent);
        // A port of one's own choice: bound by name, as agents do.
        let socket = a.namespace.enter(|| {
            let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
            bind(&socket, &SocketAddrV4::new(a.addresses[0], source_port)).unwrap();
            connect(&socket, &target).unwrap();
            TcpStream::from(socket)
        });
        let mut stream = socket.unwrap();
        let (mut accepted, _) = listener.accept().unwrap();
        stream.write_all(&[7; 50_000]).unwrap();
        drop(stream);
        std::io::copy(&mut accepted, &mut std::io::sink()).unwrap();
        let after = ["spine0", "spine1"].map(|spine| counters(&fabric, spine, "port1").sent);
        let carried = [after[0] - before[0], after[1] - before[1]];
        let flow = Flow {
            protocol: Protocol::Tcp,
            from: a.name.clone(),
            to: b.name.clone(),
            source_port,
            destination_port: target.port(),
        };
        let switches = switches(&fabric, &flow).unwrap();
        let [leaf0, spine, leaf1] = switches.as_slice() else { panic!("{switches:?}") };
        assert_eq!((leaf0.as_str(), leaf1.as_str()), ("leaf0", "leaf1"));
        let chosen = usize::from(spine == "spine1");
        assert!(
            carried[chosen] >= 50_000 && carried[1 - chosen] < 5_000,
            "{source_port}: {spine}, {carried:?}"
        );
    }
}

#[test]
fn cross_traffic_takes_the_chosen_spine() {
    let Some(fabric) = build_fabric(&racks_with_unmanaged_hosts(2, 1, 2, "100Mbit/s")) else { return };
    for (spine, other) in [("spine0", "spine1"), ("spine1", "spine0")] {
        let watch = Watch::start(&fabric, &["spine0", "spine1"], Duration::from_millis(1)).unwrap();
        let flow = CrossTraffic::start(&fabric, "f0", "f1", spine, 20_000_000).unwrap();
        let deadline = Instant::now() + harmonaize_tests::STEP;
        while flow.sent() < 100 {
            assert!(Instant::now() < deadline, "{} packets were sent", flow.sent());
            std::thread::sleep(Duration::from_millis(1));
        }
        let ended = flow.stop().unwrap();
        let arrived = || counters(&fabric, "f1", "eth0");
        while arrived().received < 100 * 1500 {
            assert!(Instant::now() < deadline, "{:?} arrived", arrived());
            std::thread::sleep(Duration::from_millis(1));
        }
        let loads = watch.finish().unwrap();
        let over = |switch: &str| {
            let loads = loads.iter().filter(|load| load.from == switch || load.to == switch);
            loads.map(|load| load.samples.last().unwrap().1 - load.samples[0].1).sum::<u64>()
        };
        assert!(over(spine) >= 2 * 90 * 1500, "{spine} carried {} bytes until {ended}", over(spine));
        // What neighbours ask each other is no flow.
        assert!(over(other) < 1500, "{other} carried {} bytes", over(other));
    }
}

#[test]
fn a_host_recovers_from_links_down() {
    let Some(fabric) = build_fabric(&racks(2, 1, 2, "1Gbit/s")) else { return };
    let [a, b] = fabric.hosts() else { panic!("two hosts") };
    fabric.set_links(&b.name, false).unwrap();
    let to_host = ["ip", "route", "show", "dev", "port0"];
    assert_eq!(stdout_of(&fabric, "leaf1", &to_host), "", "its leaf has no way to it");
    assert_ne!(stdout_of(&fabric, "leaf0", &to_host), "");
    fabric.set_links(&b.name, true).unwrap();
    assert_eq!(echo(&a.namespace, &b.namespace, b.addresses[0], "back").unwrap(), "back");
}

#[test]
fn a_dead_spine_is_routed_around() {
    let Some(fabric) = build_fabric(&racks(2, 1, 2, "1Gbit/s")) else { return };
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
        std::thread::sleep(Duration::from_millis(5));
    }
    for _ in 0..8 {
        assert_eq!(echo(&a.namespace, &b.namespace, b.addresses[0], "round").unwrap(), "round");
    }
    let carried = |port: &str| counters(&fabric, "spine1", port);
    assert!(carried("port0").sent > 0);
    fabric.set_switch("spine0", true).unwrap();
    while chosen() != both {
        assert!(Instant::now() < deadline, "the spine is not back in use");
        std::thread::sleep(Duration::from_millis(5));
    }
    for _ in 0..8 {
        assert_eq!(echo(&b.namespace, &a.namespace, a.addresses[0], "back").unwrap(), "back");
    }
}

fn counters(fabric: &Fabric, node: &str, device: &str) -> Carried {
    Counters::of(&fabric.namespace(node)).unwrap().read().unwrap()[device]
}

#[test]
fn a_tenant_is_confined_to_its_namespace() {
    let Some(fabric) = build_fabric(&star(1, "1Gbit/s")) else { return };
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
    let said = process.log_tail(4096);
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines[..5], ["3001", "3001", "3001", "1", "agent.sock"], "{said}");
    assert!(lines[5].contains("No such file"), "{said}");
    assert_eq!(lines[6], "CapEff:\t0000000000000000", "{said}");
    assert!(lines[7].contains("Permission denied"), "{said}");
}

#[test]
fn dropping_a_fabric_ends_what_runs_inside() {
    let Some(fabric) = build_fabric(&star(1, "1Gbit/s")) else { return };
    let mut sleeper = fabric.hosts()[0].namespace.spawn(Command::new("sleep").arg("1000")).unwrap();
    drop(fabric);
    let status = sleeper.wait().unwrap();
    assert!(!status.success(), "{status}");
}

fn stdout_of(fabric: &Fabric, node: &str, command: &[&str]) -> String {
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
    let answer = stdout_of(fabric, "leaf0", &question);
    let mut words = answer.split_whitespace().skip_while(|word| *word != "dev");
    words.nth(1).unwrap().to_owned()
}

/// By the kernel, or where it cannot by a thread of this process.
#[test]
fn delays_of_links_are_kept_both_ways() {
    if !harmonaize_testkit::strict::can_make_namespaces() {
        return;
    }
    let topology = Topology::parse(&star_with_aggregator(2, 1000, "3ms")).unwrap();
    let fabric = Fabric::build(&Topology { forwards: true, ..topology }).unwrap();
    assert!(fabric.delays());
    let [first, second] = fabric.hosts() else { panic!("two hosts") };
    // Twice over two links, and over one.
    for (other, least) in [(second, 12), (&fabric.aggregators()[0], 6)] {
        let listener = other.namespace.enter(|| TcpListener::bind((other.addresses[0], 0))).unwrap().unwrap();
        let address = listener.local_addr().unwrap();
        let connect = || {
            let begun = Instant::now();
            TcpStream::connect_timeout(&address, Duration::from_secs(5)).map(|_| begun.elapsed())
        };
        let measure = || (0..20).map(|_| connect()).collect::<Result<Vec<_>, _>>();
        let mut times = first.namespace.enter(measure).unwrap().unwrap();
        times.sort();
        println!("{:?} to {:?}, and {least} ms were asked for", times[0], times[10]);
        assert!(times[0] >= Duration::from_millis(least), "{times:?}");
    }
    let text = "what is long goes in large buffers ".repeat(100_000);
    assert!(echo(&first.namespace, &second.namespace, second.addresses[0], &text).unwrap() == text);
}
