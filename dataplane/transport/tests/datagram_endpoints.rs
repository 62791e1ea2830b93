//! What datagram endpoints promise, whichever network they are on: over UDP, and over RDMA on devices inside the process.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_transport::datagram::{
    Address, DatagramConfig, Datagrams, Endpoint, RdmaAddress, RdmaDatagrams, RdmaPort,
};
use harmonaize_verbs::PortOptions;
use harmonaize_verbs::fake::{Fabric, Fault};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(20);
const KEY: u32 = 0x1234;

/// Where endpoints are made.
#[derive(Clone, Debug)]
enum Net {
    Udp,
    Rdma(Fabric),
}

fn both() -> [Net; 2] {
    [Net::Udp, Net::Rdma(fabric())]
}

fn address(host: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, 0, host)
}

fn fabric() -> Fabric {
    let fabric = Fabric::new();
    for host in 0..3 {
        fabric.add(&format!("fake{host}"), address(host)).unwrap();
    }
    fabric.stop_recording();
    fabric
}

fn rdma(fabric: &Fabric, host: u8, key: u32, config: DatagramConfig) -> RdmaDatagrams {
    let address = address(host).into();
    let port = RdmaPort { devices: fabric.devices(), options: PortOptions::default(), address };
    RdmaDatagrams::open(&port, key, config).unwrap()
}

impl Net {
    fn endpoint(&self, host: u8, config: DatagramConfig) -> Endpoint {
        match self {
            Self::Udp => {
                Endpoint::Udp(Box::new(Datagrams::bind(([127, 0, 0, 1], 0).into(), config).unwrap()))
            }
            Self::Rdma(fabric) => Endpoint::Rdma(Box::new(rdma(fabric, host, KEY, config))),
        }
    }
}

fn send(from: &mut Endpoint, to: Address, bytes: &[u8]) -> bool {
    from.push(|room| {
        room.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some((to, bytes.len()))
    })
}

fn sleep(at: &Endpoint) {
    let wait = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
    let fd = at.wake_fd().unwrap();
    assert!(poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&wait)).unwrap() > 0);
}

/// Sleeps until something has come; not if something has.
fn wait(at: &mut Endpoint) {
    if at.prepare_sleep() {
        sleep(at);
    }
}

/// Datagram `number` of a stream: its number, then bytes that depend on it.
fn datagram(number: u32, bytes: usize) -> Vec<u8> {
    let fill = (0..bytes).map(|at| (at as u32).wrapping_mul(number | 1) as u8);
    number.to_le_bytes().into_iter().chain(fill).collect()
}

#[test]
fn datagrams_are_whole_and_of_their_sender() {
    for net in both() {
        let config = DatagramConfig { bytes: 2048, batch: 24, ..DatagramConfig::default() };
        let [mut a, mut b, mut c] = [0, 1, 2].map(|host| net.endpoint(host, config));
        let to = [b.local_address(), c.local_address()];
        let length = |number: u32| (number as usize * 37) % 2000;
        let (mut next, mut got, deadline) = (0, BTreeSet::new(), Instant::now() + PATIENCE);
        while got.len() < 1000 && Instant::now() < deadline {
            while next < 1000 && send(&mut a, to[next as usize % 2], &datagram(next, length(next))) {
                next += 1;
            }
            a.flush();
            for (at, end) in [&mut b, &mut c].into_iter().enumerate() {
                while end.receive(&mut |from, bytes| {
                    let number = u32::from_le_bytes(bytes[..4].try_into().unwrap());
                    assert_eq!((from, number as usize % 2), (a.local_address(), at), "{net:?}");
                    assert_eq!(bytes, datagram(number, length(number)), "datagram {number}");
                    assert!(got.insert(number), "datagram {number} came twice");
                }) > 0
                {}
            }
        }
        assert_eq!(got.len(), 1000, "{net:?}");
        assert_eq!((a.counters().sent, a.counters().unsent, a.waiting()), (1000, 0, 0));
        assert_eq!(b.counters().received + c.counters().received, 1000);
    }
}

#[test]
fn what_comes_wakes_who_sleeps() {
    for net in both() {
        let config = DatagramConfig::default();
        let [mut a, mut b] = [0, 1].map(|host| net.endpoint(host, config));
        for round in 0..50 {
            // What is there before one sleeps, and what comes after.
            let early = round % 2 == 0;
            let fly = |a: &mut Endpoint, b: &Endpoint| {
                assert!(send(a, b.local_address(), &datagram(round, 100)));
                assert!(a.flush());
            };
            if early {
                fly(&mut a, &b);
            } else {
                assert!(b.prepare_sleep(), "{net:?}: nothing is there");
                fly(&mut a, &b);
                sleep(&b);
            }
            let deadline = Instant::now() + PATIENCE;
            let mut got = 0;
            while got == 0 && Instant::now() < deadline {
                wait(&mut b);
                got += b.receive(&mut |_, bytes| assert_eq!(bytes, datagram(round, 100)));
            }
            assert_eq!(got, 1, "{net:?}");
        }
    }
}

#[test]
fn what_finds_no_buffer_is_lost_and_what_follows_is_not() {
    for net in both() {
        let small = DatagramConfig { socket_buffer: 4096, gso_segments: 1, ..DatagramConfig::default() };
        let (mut a, mut b) = (net.endpoint(0, DatagramConfig::default()), net.endpoint(1, small));
        let to = b.local_address();
        let mut sent = 0;
        while sent < 2000 {
            sent += u32::from(send(&mut a, to, &datagram(sent, 1000)));
        }
        assert!(a.flush());
        let mut got = 0;
        while b.receive(&mut |_, _| got += 1) > 0 {}
        assert!((1..2000).contains(&got), "{net:?}: {got}");
        assert!(send(&mut a, to, b"more") && a.flush());
        let (mut found, deadline) = (false, Instant::now() + PATIENCE);
        while !found && Instant::now() < deadline {
            wait(&mut b);
            b.receive(&mut |_, bytes| found |= bytes == b"more");
        }
        assert!(found, "{net:?}");
    }
}

#[test]
fn what_cannot_go_is_refused_and_nothing_waits() {
    let [udp, rdma] =
        both().map(|net| net.endpoint(0, DatagramConfig { bytes: 100, ..DatagramConfig::default() }));
    let [at_udp, at_rdma] = [udp.local_address(), rdma.local_address()];
    for (mut end, own, other) in [(udp, at_udp, at_rdma), (rdma, at_rdma, at_udp)] {
        assert!(!end.push(|_| Some((other, 10))), "an address of another network");
        assert!(!end.push(|room| Some((own, room.len() + 1))), "too long");
        assert!(!end.push(|_| None));
        assert_eq!((end.waiting(), end.counters().sent), (0, 0));
        assert!(send(&mut end, own, &[7; 100]) && end.flush(), "to itself");
    }
}

#[test]
fn an_absent_peer_is_no_error() {
    for net in both() {
        let [mut a, mut b] = [0, 1].map(|host| net.endpoint(host, DatagramConfig::default()));
        let gone = net.endpoint(2, DatagramConfig::default()).local_address();
        for round in 0..100 {
            assert!(send(&mut a, gone, &datagram(round, 500)));
            assert!(send(&mut a, b.local_address(), &datagram(round, 500)));
            assert!(a.flush());
            a.receive(&mut |_, _| panic!("nobody sends to this one"));
        }
        let (mut got, deadline) = (0, Instant::now() + PATIENCE);
        while got < 100 && Instant::now() < deadline {
            wait(&mut b);
            got += b.receive(&mut |_, _| {});
        }
        assert_eq!(got, 100, "{net:?}");
    }
}

#[test]
fn over_rdma_another_key_is_not_heard() {
    let fabric = fabric();
    let config = DatagramConfig::default();
    let (mut a, mut b) = (rdma(&fabric, 0, KEY, config), rdma(&fabric, 1, KEY + 1, config));
    let to = b.local_address();
    let push = |a: &mut RdmaDatagrams, to: RdmaAddress| a.push(|_| Some((to, 10)));
    assert!(push(&mut a, to));
    assert_eq!(b.receive(&mut |_, _| panic!("a stranger")), 0);
    assert!(a.max_bytes() <= 1472 && !a.failed());
}

#[test]
fn a_lost_rdma_device_ends_its_endpoint_alone() {
    let fabric = fabric();
    let [mut a, mut b] = [0, 1].map(|host| rdma(&fabric, host, KEY, DatagramConfig::default()));
    let to = b.local_address();
    assert!(a.push(|_| Some((to, 10))));
    fabric.inject("fake1", Fault::DeviceLost);
    b.receive(&mut |_, _| ());
    assert!(b.failed() && b.prepare_sleep());
    let nobody = RdmaAddress { number: 1, ..to };
    assert!(b.push(|_| Some((nobody, 10))), "what is sent is lost, and its sender's time goes on");
    assert_eq!((b.counters().sent, b.counters().unsent), (0, 1));
    assert!(a.push(|_| Some((to, 10))), "others go on");
    a.receive(&mut |_, _| panic!("nobody sends to this one"));
    assert!(!a.failed());
}

/// Sends at once.
fn now(from: &mut Endpoint, to: Address, bytes: &[u8]) -> bool {
    send(from, to, bytes) && from.flush()
}

/// Where a process was and is no more, hosts say so. Datagrams that are under way are not held up, and once somebody is there again all is
/// well.
#[test]
fn a_peer_that_is_gone_is_told_of() {
    let config = DatagramConfig::default();
    let mut peer = Net::Udp.endpoint(0, config);
    let (there, Address::Udp(at)) = (peer.local_address(), peer.local_address()) else { panic!("UDP") };
    let mut endpoint = Endpoint::towards(at, config).unwrap();
    assert!(now(&mut endpoint, there, b"one"));
    let deadline = Instant::now() + PATIENCE;
    while peer.receive(&mut |_, bytes| assert_eq!(bytes, b"one")) == 0 {
        assert!(Instant::now() < deadline, "nothing comes");
    }
    assert!(!endpoint.take_refusal());
    drop(peer);
    while !endpoint.take_refusal() {
        now(&mut endpoint, there, b"two");
        endpoint.receive(&mut |_, _| panic!("from nobody"));
        assert!(Instant::now() < deadline, "nobody says so");
    }
    let mut peer = Datagrams::bind(at, config).unwrap();
    let unsent = endpoint.counters().unsent;
    // One more word of that may be under way.
    while peer.receive(&mut |_, bytes| assert!([b"two", b"new"].contains(&bytes.try_into().unwrap()))) == 0 {
        now(&mut endpoint, there, b"new");
        endpoint.take_refusal();
        assert!(Instant::now() < deadline, "nothing comes");
    }
    assert_eq!(endpoint.counters().unsent, unsent, "no datagram is taken for the one that was refused");
    // Strangers are not heard.
    let mut stranger = Net::Udp.endpoint(1, config);
    assert!(now(&mut stranger, endpoint.local_address(), b"lie"));
    let to = endpoint.local_address();
    peer.push(|room| {
        room[..3].copy_from_slice(b"yes");
        let Address::Udp(to) = to else { panic!("UDP") };
        Some((to, 3))
    });
    peer.flush();
    while endpoint.receive(&mut |from, bytes| assert_eq!((from, bytes), (there, &b"yes"[..]))) == 0 {
        assert!(Instant::now() < deadline, "nothing comes");
    }
}
