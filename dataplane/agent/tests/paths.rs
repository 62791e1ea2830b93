//! Tracing and probing on an emulated fabric of two racks and two spines. The tests compare what is reported with what
//! the packets do.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_probe::{
    Answerer, ProbeError, ProbeResult, Prober, Protocol, Question, TracedRoute, Tracer, TrainConfig, TrainKey,
};
use harmonaize_testkit::fabric::Fabric;
use harmonaize_testkit::strict::can_make_namespaces;
use harmonaize_testkit::topology::{Topology, racks};
use socket2::{Domain, Socket, Type};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, UdpSocket};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(5);
const LISTEN: u16 = 7100;
const KEY: TrainKey = TrainKey([3; 32]);
const RATE: u64 = 200_000_000;

/// Hosts h0 and h1, each on a leaf of its own; none, loudly, without the privilege.
fn fabric() -> Option<Fabric> {
    if !can_make_namespaces() {
        return None;
    }
    Some(Fabric::build(&Topology::parse(&racks(2, 1, 2, "200Mbit/s")).unwrap()).unwrap())
}

fn address(fabric: &Fabric, host: &str) -> Ipv4Addr {
    fabric.host(host).unwrap().addresses[0]
}

fn switch(fabric: &Fabric, name: &str) -> Vec<Ipv4Addr> {
    let topology = fabric.topology();
    let node = topology.switches().find(|node| topology.nodes[*node].name == name).unwrap();
    fabric.layout().addresses(node)
}

/// The switches that a way names, by their names; "?" for silence.
fn names(fabric: &Fabric, way: &TracedRoute) -> Vec<&'static str> {
    let all = ["leaf0", "leaf1", "spine0", "spine1"].map(|name| (name, switch(fabric, name)));
    let name = |hop: &Option<Ipv4Addr>| {
        let Some(hop) = hop else { return "?" };
        all.iter().find(|(_, addresses)| addresses.contains(hop)).map_or("another", |(name, _)| name)
    };
    way.hops.iter().map(name).collect()
}

fn traced(fabric: &Fabric, from: &str, to: &str, pairs: Vec<(u16, u16)>, hops: u8) -> Vec<TracedRoute> {
    let (source, destination) = (address(fabric, from), address(fabric, to));
    let question = Question { protocol: Protocol::Tcp, source, destination, pairs, hops };
    let host = fabric.host(from).unwrap();
    host.namespace.enter(|| Tracer::open(source).unwrap().trace(question, PATIENCE)).unwrap().unwrap()
}

/// Bytes that a device has taken in.
fn received(fabric: &Fabric, node: &str, device: &str) -> u64 {
    let text = fabric
        .namespace(node)
        .enter(|| std::fs::read_to_string("/proc/thread-self/net/dev"))
        .unwrap()
        .unwrap();
    let line = text.lines().find_map(|line| line.trim().strip_prefix(device)?.strip_prefix(':')).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

/// What a connection's bytes add to what each spine takes in from h0's leaf.
fn bytes_by_spine(fabric: &Fabric, port: u16) -> [u64; 2] {
    let count = || ["spine0", "spine1"].map(|spine| received(fabric, spine, "port0"));
    let to = SocketAddr::from((address(fabric, "h1"), LISTEN));
    let listener = fabric.host("h1").unwrap().namespace.enter(|| TcpListener::bind(to)).unwrap().unwrap();
    let local = SocketAddr::from((address(fabric, "h0"), port));
    let socket = fabric.host("h0").unwrap().namespace.enter(|| {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.set_reuse_address(true).unwrap();
        socket.bind(&local.into()).unwrap();
        socket.connect(&to.into()).unwrap();
        socket
    });
    let (mut socket, (mut stream, from)) = (socket.unwrap(), listener.accept().unwrap());
    assert_eq!(from, local);
    let before = count();
    let reader = std::thread::spawn(move || stream.read_to_end(&mut Vec::new()).unwrap());
    socket.write_all(&vec![7; 200_000]).unwrap();
    drop(socket);
    assert_eq!(reader.join().unwrap(), 200_000);
    let after = count();
    [after[0] - before[0], after[1] - before[1]]
}

#[test]
fn a_connections_way_is_told_before_it_is_made() {
    let Some(fabric) = fabric() else { return };
    let ports: Vec<u16> = (40_000..40_064).collect();
    let ways = traced(&fabric, "h0", "h1", ports.iter().map(|port| (*port, LISTEN)).collect(), 3);
    let spine = |way: &TracedRoute| names(&fabric, way)[1];
    for (way, port) in ways.iter().zip(&ports) {
        assert_eq!(way.ports, (*port, LISTEN));
        let names = names(&fabric, way);
        assert!(names[0] == "leaf0" && names[1].starts_with("spine") && names[2] == "leaf1", "{names:?}");
    }
    let over_first = ways.iter().filter(|way| spine(way) == "spine0").count();
    assert!((10..54).contains(&over_first), "{over_first} of 64 over one of two spines");
    // As many of each as it takes to show that it is no luck.
    for name in ["spine0", "spine1"] {
        for way in ways.iter().filter(|way| spine(way) == name).take(4) {
            let [first, second] = bytes_by_spine(&fabric, way.ports.0);
            let (on, off) = if name == "spine0" { (first, second) } else { (second, first) };
            assert!(
                on > 200_000 && off < 20_000,
                "port {}: {first} and {second} bytes, not {name}",
                way.ports.0
            );
        }
    }
    // The other direction is a hash of its own.
    let back = traced(&fabric, "h1", "h0", ports.iter().map(|port| (LISTEN, *port)).collect(), 3);
    assert!(back.iter().all(|way| names(&fabric, way)[0] == "leaf1" && names(&fabric, way)[2] == "leaf0"));
    fabric.set_switch("spine0", false).unwrap();
    let ways = traced(&fabric, "h0", "h1", ports.iter().map(|port| (*port, LISTEN)).collect(), 3);
    assert!(ways.iter().all(|way| spine(way) != "spine0"), "a spine that is cut off answers no more");
}

#[test]
fn packets_that_arrive_by_mistake_do_nothing() {
    let Some(fabric) = fabric() else { return };
    let to = SocketAddr::from((address(&fabric, "h1"), LISTEN));
    let far = &fabric.host("h1").unwrap().namespace;
    let listener = far.enter(|| TcpListener::bind(to)).unwrap().unwrap();
    let near = &fabric.host("h0").unwrap().namespace;
    let (mut socket, port) = near
        .enter(|| {
            let socket = std::net::TcpStream::connect(to).unwrap();
            let port = socket.local_addr().unwrap().port();
            (socket, port)
        })
        .unwrap();
    let (mut stream, _) = listener.accept().unwrap();
    let counter = |name: &str| {
        let text = far.enter(|| std::fs::read_to_string("/proc/thread-self/net/snmp")).unwrap().unwrap();
        let mut lines = text.lines().filter(|line| line.starts_with("Tcp:"));
        let (heads, values) = (lines.next().unwrap(), lines.next().unwrap());
        let at = heads.split_whitespace().position(|head| head == name).unwrap();
        values.split_whitespace().nth(at).unwrap().parse::<u64>().unwrap()
    };
    let (wrong, out) = (counter("InCsumErrors"), counter("OutRsts"));
    // The ports of a connection that is there, and of one that is not, with more hops than there are switches.
    let ways = traced(&fabric, "h0", "h1", vec![(port, LISTEN), (50_000, LISTEN), (50_000, 9)], 5);
    for way in &ways {
        assert_eq!(names(&fabric, way)[3..], ["?", "?"], "{way:?}");
    }
    assert!(counter("InCsumErrors") >= wrong + 3 * 2 * 3, "they never arrived: this shows nothing");
    assert_eq!(counter("OutRsts"), out, "a reset was sent");
    listener.set_nonblocking(true).unwrap();
    assert_eq!(listener.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    socket.write_all(b"still there").unwrap();
    let mut said = [0; 11];
    stream.read_exact(&mut said).unwrap();
    assert_eq!(&said, b"still there");
}

#[test]
fn a_train_takes_the_way_that_is_asked_for() {
    let Some(fabric) = fabric() else { return };
    let far = &fabric.host("h1").unwrap().namespace;
    let listen = SocketAddrV4::new(address(&fabric, "h1"), LISTEN);
    let answerer = far.enter(|| Answerer::bind(listen, true, |_| KEY)).unwrap().unwrap();
    let source = address(&fabric, "h0");
    let mut prober = Prober::new(source);
    let mut over = |switches: &[&str]| -> Result<ProbeResult, ProbeError> {
        let via: Vec<_> = switches.iter().map(|name| switch(&fabric, name)).collect();
        let near = &fabric.host("h0").unwrap().namespace;
        near.enter(|| {
            let trains = TrainConfig { bytes: 384 << 10, ..TrainConfig::default() };
            prober.probe(answerer.address(), &via, &KEY, trains)
        })
        .unwrap()
    };
    for (spine, other) in [("spine0", "spine1"), ("spine1", "spine0")] {
        over(&["leaf0", spine, "leaf1"]).unwrap();
        let (before, beside) = (received(&fabric, spine, "port0"), received(&fabric, other, "port0"));
        let probed = over(&["leaf0", spine, "leaf1"]).unwrap();
        println!("{spine}: {probed:?}");
        let bytes = received(&fabric, spine, "port0") - before;
        // Datagrams that leave together are counted with one header.
        assert!(bytes >= u64::from(probed.received) * 1472, "{bytes} bytes over {spine}");
        // The way is known by now: nothing looks for it over the other.
        assert_eq!(received(&fabric, other, "port0"), beside);
        // A machine that is busy is slower; none is faster than the link.
        assert!(probed.sent == 268 && probed.received > 200, "{probed:?}");
        assert!(probed.received_bps > 0 && probed.received_bps < RATE * 12 / 10, "{probed:?}");
    }
    let error = over(&["leaf0", "leaf1", "spine0"]).unwrap_err();
    assert!(matches!(error, ProbeError::Unreachable { tried: 64 }), "{error}");
    fabric.set_switch("spine1", false).unwrap();
    assert!(matches!(over(&["leaf0", "spine1", "leaf1"]), Err(ProbeError::Unreachable { .. })));
    assert!(over(&["leaf0", "spine0", "leaf1"]).is_ok());
}

/// The agent computes one hash of each datagram that it takes in, with a key that it asks for then. However much comes, it takes
/// 5,000 in a tenth of a second.
#[test]
fn a_flood_of_trains_is_taken_in_part() {
    const MOST: usize = 5_000;
    const SENT: usize = 100_000;
    let hashed = Arc::new(Mutex::new(Vec::new()));
    let keys = {
        let hashed = Arc::clone(&hashed);
        move |_| {
            hashed.lock().unwrap().push(Instant::now());
            KEY
        }
    };
    let answerer = Answerer::bind(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0), false, keys).unwrap();
    let flood = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    // The head of a train's datagram, with a tag by nobody's key.
    let mut datagram = [0; 56];
    datagram[..8].copy_from_slice(b"HZtr\x01\0\x01\0");
    for _ in 0..SENT {
        let _ = flood.send_to(&datagram, answerer.address());
    }
    drop(answerer);
    let hashed = hashed.lock().unwrap();
    assert!((1..=SENT).contains(&hashed.len()), "{} hashes", hashed.len());
    // Among more than twice as many hashes lies a whole tenth of a second, at any speed of the machine.
    for some in hashed.windows(2 * MOST + 1) {
        assert!(some[2 * MOST] - some[0] >= Duration::from_millis(100));
    }
}
