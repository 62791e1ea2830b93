//! What datagram endpoints promise: whole datagrams from who sent them, bounds, and no error that is the socket's end.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_transport::datagram::{DatagramConfig, Datagrams};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(20);

fn bound(address: &str, config: DatagramConfig) -> Datagrams {
    Datagrams::bind(address.parse().unwrap(), config).unwrap()
}

fn send(from: &mut Datagrams, to: SocketAddr, bytes: &[u8]) -> bool {
    from.push(|room| {
        room.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some((to, bytes.len()))
    })
}

/// Waits on the descriptor; whether something came.
fn readable(at: &Datagrams) -> bool {
    let wait = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
    poll(&mut [PollFd::from_borrowed_fd(at.wake_fd(), PollFlags::IN)], Some(&wait)).unwrap() > 0
}

/// Datagram `number` of a stream: its number, then bytes that depend on it.
fn datagram(number: u32, bytes: usize) -> Vec<u8> {
    let fill = (0..bytes).map(|at| (at as u32).wrapping_mul(number | 1) as u8);
    number.to_le_bytes().into_iter().chain(fill).collect()
}

fn whole_datagrams_of_all_sizes_come_from_who_sent_them(address: &str, together: usize) {
    let config =
        DatagramConfig { bytes: 2048, batch: 24, gso_segments: together, ..DatagramConfig::default() };
    let (mut a, mut b, mut c) = (bound(address, config), bound(address, config), bound(address, config));
    let (at_b, at_c) = (b.local_address(), c.local_address());
    // Runs of one length, a shorter one at their ends, empty ones, and two addresses in turns.
    let length = |number: u32| match number {
        0..100 => number as usize * 19,
        100..300 if number.is_multiple_of(7) => 11,
        100..300 => 1400,
        _ => 900,
    };
    let to = |number: u32| if number >= 300 && number % 2 == 1 { at_c } else { at_b };
    let (mut next, mut got) = (0, BTreeMap::new());
    let deadline = Instant::now() + PATIENCE;
    while got.len() < 400 && Instant::now() < deadline {
        while next < 400 && send(&mut a, to(next), &datagram(next, length(next))) {
            next += 1;
        }
        a.flush();
        for (end, at) in [(&mut b, at_b), (&mut c, at_c)] {
            end.receive(&mut |from, bytes| {
                let number = u32::from_le_bytes(bytes[..4].try_into().unwrap());
                assert_eq!(from, a.local_address());
                assert_eq!(to(number), at, "datagram {number} went to another");
                assert_eq!(bytes, datagram(number, length(number)), "datagram {number}");
                assert!(got.insert(number, ()).is_none(), "datagram {number} came twice");
            });
        }
    }
    assert_eq!(got.len(), 400);
    assert_eq!((a.counters().sent, a.counters().unsent, a.waiting()), (400, 0, 0));
    assert_eq!(b.counters().received + c.counters().received, 400);
}

#[test]
fn datagrams_are_whole_and_of_their_sender() {
    for together in [1, 2, 16, 64] {
        whole_datagrams_of_all_sizes_come_from_who_sent_them("127.0.0.1:0", together);
    }
    if UdpSocket::bind("[::1]:0").is_ok() {
        whole_datagrams_of_all_sizes_come_from_who_sent_them("[::1]:0", 16);
    }
}

#[test]
fn what_goes_to_several_in_turns_leaves_as_a_message_each() {
    let config = DatagramConfig { batch: 64, gso_segments: 16, ..DatagramConfig::default() };
    let mut from = bound("127.0.0.1:0", config);
    let mut to: Vec<Datagrams> = (0..4).map(|_| bound("127.0.0.1:0", config)).collect();
    for number in 0..64 {
        assert!(send(&mut from, to[number as usize % 4].local_address(), &datagram(number, 1000)));
    }
    assert!(from.flush());
    let messages = if from.has_gso() { 4 } else { 64 };
    assert_eq!((from.counters().sent, from.counters().messages), (64, messages));
    for (at, end) in to.iter_mut().enumerate() {
        let (mut next, deadline) = (at as u32, Instant::now() + PATIENCE);
        while next < 64 && Instant::now() < deadline && readable(end) {
            end.receive(&mut |_, bytes| {
                assert_eq!(bytes, datagram(next, 1000), "each in order, to whom it was for");
                next += 4;
            });
        }
        assert_eq!(next, 64 + at as u32);
    }
}

#[test]
fn datagrams_are_marked_by_code_point() {
    let four = bound("127.0.0.1:0", DatagramConfig::default());
    let six = bound("[::1]:0", DatagramConfig::default());
    for dscp in [46, 8, 0] {
        four.set_dscp(dscp).unwrap();
        six.set_dscp(dscp).unwrap();
        assert_eq!(rustix::net::sockopt::ip_tos(four.wake_fd()).unwrap(), dscp << 2);
        assert_eq!(rustix::net::sockopt::ipv6_tclass(six.wake_fd()).unwrap(), u32::from(dscp) << 2);
    }
}

#[test]
fn what_is_too_long_is_dropped_and_counted() {
    let mut end = bound("127.0.0.1:0", DatagramConfig { bytes: 100, ..DatagramConfig::default() });
    let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
    for bytes in [101, 65_000, 100, 0] {
        stranger.send_to(&vec![7; bytes], end.local_address()).unwrap();
    }
    let (mut got, deadline) = (Vec::new(), Instant::now() + PATIENCE);
    while got.len() < 2 && Instant::now() < deadline && readable(&end) {
        end.receive(&mut |_, bytes| got.push(bytes.len()));
    }
    assert_eq!(got, [100, 0]);
    assert_eq!((end.counters().unrecognized, end.counters().received), (2, 4));
    assert!(!end.push(|room| Some((SocketAddr::from(([127, 0, 0, 1], 9)), room.len() + 1))));
    assert!(!end.push(|_| None));
    assert_eq!((end.waiting(), end.counters().unsent), (0, 1));
}

#[test]
fn a_receiver_that_takes_nothing_in_loses_datagrams_and_is_told() {
    let small = DatagramConfig { socket_buffer: 4096, gso_segments: 1, ..DatagramConfig::default() };
    let (mut from, mut to) = (bound("127.0.0.1:0", DatagramConfig::default()), bound("127.0.0.1:0", small));
    let address = to.local_address();
    let mut handed = 0;
    while handed < 2000 {
        handed += u32::from(send(&mut from, address, &datagram(handed, 1000)));
    }
    assert!(from.flush());
    let take = |to: &mut Datagrams| while to.receive(&mut |_, _| {}) > 0 {};
    take(&mut to);
    // The next message tells what was dropped before it.
    let deadline = Instant::now() + PATIENCE;
    while to.counters().overrun == 0 && Instant::now() < deadline {
        send(&mut from, address, b"more");
        from.flush();
        take(&mut to);
    }
    assert!(to.counters().received > 0 && to.counters().overrun > 0, "{:?}", to.counters());
}

#[test]
fn an_absent_peer_is_no_error() {
    let gone = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let unreachable = SocketAddr::from(([255, 255, 255, 255], 9));
    let (mut a, mut b) =
        (bound("127.0.0.1:0", DatagramConfig::default()), bound("127.0.0.1:0", DatagramConfig::default()));
    for round in 0..100_u32 {
        for to in [gone, gone, unreachable] {
            assert!(send(&mut a, to, &datagram(round, 500)));
        }
        assert!(send(&mut a, b.local_address(), &datagram(round, 500)));
        assert!(a.flush());
        a.receive(&mut |_, _| panic!("nobody sends to this one"));
    }
    // To broadcast takes an option that this socket has not.
    assert_eq!((a.counters().unsent, a.counters().sent), (100, 300));
    let (mut got, deadline) = (0, Instant::now() + PATIENCE);
    while got < 100 && Instant::now() < deadline && readable(&b) {
        got += b.receive(&mut |_, _| {});
    }
    assert_eq!(got, 100);
}

/// As after a change of the host's address, which takes privileges: end to end in `tests/tests/aggregation.rs`.
#[test]
fn who_keeps_to_a_peer_anew_hears_it_and_nobody_else() {
    let config = DatagramConfig::default();
    let (mut peer, mut stranger) = (bound("127.0.0.1:0", config), bound("127.0.0.1:0", config));
    let mut end = bound("0.0.0.0:0", config);
    assert!(!end.has_no_route());
    let mut before = None;
    for round in 0..3 {
        end.restrict_to(peer.local_address());
        let address = end.local_address();
        assert!(!end.has_no_route() && address.ip() == Ipv4Addr::LOCALHOST, "{address}");
        assert!(send(&mut end, peer.local_address(), &datagram(round, 100)) && end.flush());
        let (mut from, deadline) = (None, Instant::now() + PATIENCE);
        while from.is_none() && Instant::now() < deadline && readable(&peer) {
            peer.receive(&mut |sender, bytes| from = (bytes == datagram(round, 100)).then_some(sender));
        }
        assert_eq!(from, Some(address));
        for (to, by) in before
            .iter()
            .filter(|old| **old != address)
            .flat_map(|old| [(*old, true), (address, false)])
            .chain([(address, true)])
        {
            let by = if by { &mut peer } else { &mut stranger };
            assert!(send(by, to, &datagram(round, 7)) && by.flush());
        }
        let (mut got, deadline) = (0, Instant::now() + PATIENCE);
        while got == 0 && Instant::now() < deadline && readable(&end) {
            got += end.receive(&mut |from, bytes| {
                assert_eq!((from, bytes), (peer.local_address(), datagram(round, 7).as_slice()));
            });
        }
        assert_eq!((got, end.receive(&mut |_, _| ())), (1, 0), "one of the peer's, at the new address");
        before = Some(address);
    }
}

#[test]
fn a_way_is_found_once_there_is_one() {
    let config = DatagramConfig::default();
    let peer = bound("127.0.0.1:0", config);
    // Broadcast takes an option that this socket has not: as where there is no route.
    let mut end = bound("0.0.0.0:0", config);
    end.restrict_to(SocketAddr::from(([255, 255, 255, 255], 9)));
    assert!(end.has_no_route());
    end.restrict_to(peer.local_address());
    assert!(!end.has_no_route());
}
