//! The RDMA transport conforms, on devices of this process, and ends its links when those break.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_abi::Tag;
use harmonaize_shm::{Memory, Span};
use harmonaize_transport::tcp::{self, Acceptor, TcpTransport};
use harmonaize_transport::verbs::{Config, SetupError, VerbsTransport};
use harmonaize_transport::{
    DownReason, Event, Flow, Introduction, Landing, LinkHandOverError, LinkId, LinkRefusal, Ring, SendError,
    Transport,
};
use harmonaize_verbs::fake::{Fabric, Fault};
use harmonaize_verbs::{Call, PortOptions, Status, VerbsError};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

const ADDRESSES: [Ipv4Addr; 4] = [
    Ipv4Addr::new(10, 0, 0, 1),
    Ipv4Addr::new(10, 0, 0, 2),
    Ipv4Addr::new(10, 0, 1, 1),
    Ipv4Addr::new(10, 0, 1, 2),
];

fn tcp() -> tcp::Config {
    tcp::Config {
        connect_timeout: Duration::from_secs(1),
        handshake_timeout: Duration::from_millis(300),
        ..tcp::Config::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
    }
}

fn config(devices: &[&str]) -> Config {
    Config { devices: devices.iter().map(|name| (*name).to_owned()).collect(), ..Config::new(tcp()) }
}

/// A fabric with two devices for each of two agents.
fn fabric() -> Fabric {
    let fabric = Fabric::new();
    for (name, address) in ["a0", "b0", "a1", "b1"].into_iter().zip(ADDRESSES) {
        fabric.add(name, address).unwrap();
    }
    fabric
}

fn end(fabric: &Fabric, config: Config) -> VerbsTransport {
    VerbsTransport::bind(config, &fabric.devices()).unwrap()
}

/// An end at each of two devices.
fn ends() -> (Fabric, VerbsTransport, VerbsTransport) {
    let fabric = fabric();
    let (a, b) = (end(&fabric, config(&["a0"])), end(&fabric, config(&["b0"])));
    (fabric, a, b)
}

fn pair() -> Result<[Box<dyn Transport>; 2], String> {
    let fabric = fabric();
    Ok([Box::new(end(&fabric, config(&["a0"]))), Box::new(end(&fabric, config(&["b0:1"])))])
}

harmonaize_transport::conformance!(pair);

/// The suite again with two devices at one end and one at the other, whichever of them connects.
mod uneven {
    use super::*;

    fn pair() -> Result<[Box<dyn Transport>; 2], String> {
        let fabric = fabric();
        Ok([Box::new(end(&fabric, config(&["a0", "a1"]))), Box::new(end(&fabric, config(&["b0"])))])
    }

    harmonaize_transport::conformance!(pair);

    mod turned {
        use super::*;

        fn pair() -> Result<[Box<dyn Transport>; 2], String> {
            super::pair().map(|[a, b]| [b, a])
        }

        harmonaize_transport::conformance!(pair);
    }
}

/// The suite again with two devices at each end, and mailboxes of different sizes, small ones.
mod spread {
    use super::*;

    fn pair() -> Result<[Box<dyn Transport>; 2], String> {
        let fabric = fabric();
        let a = Config { mailbox_slots: 8, inline_payload: 0, ..config(&["a0", "a1"]) };
        let b = Config {
            mailbox_slots: 16,
            options: PortOptions { mtu: Some(1024), ..PortOptions::default() },
            ..config(&["b0", "b1"])
        };
        Ok([Box::new(end(&fabric, a)), Box::new(end(&fabric, b))])
    }

    harmonaize_transport::conformance!(pair);
}

/// The suite again for links over TCP alone.
mod over_tcp {
    use super::*;

    struct OverTcp(VerbsTransport);

    impl Transport for OverTcp {
        fn local_address(&self) -> SocketAddr {
            self.0.local_address()
        }

        fn open(&mut self, introduction: Introduction) -> Result<LinkId, DownReason> {
            self.0.open(Introduction { over_tcp: true, ..introduction })
        }

        fn attach_ring(&mut self, link: LinkId, ring: u16, memory: Ring) -> Result<(), DownReason> {
            self.0.attach_ring(link, ring, memory)
        }

        fn post(&mut self, link: LinkId, landing: Landing, span: Span) -> bool {
            self.0.post(link, landing, span)
        }

        fn send(
            &mut self,
            link: LinkId,
            path: u16,
            header: &[u8],
            payload: Option<(Landing, Span, Tag)>,
        ) -> Result<(), SendError> {
            self.0.send(link, path, header, payload)
        }

        fn flow(&self, link: LinkId, path: u16) -> Option<Flow> {
            Transport::flow(&self.0, link, path)
        }

        fn pace(&mut self, link: LinkId, bits_per_second: Option<u64>) -> bool {
            self.0.pace(link, bits_per_second)
        }

        fn progress(&mut self, budget: usize, sink: &mut dyn FnMut(LinkId, Event<'_>)) -> usize {
            self.0.progress(budget, sink)
        }

        fn close(&mut self, link: LinkId) {
            self.0.close(link);
        }

        fn prepare_sleep(&mut self) -> bool {
            self.0.prepare_sleep()
        }

        fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
            self.0.wake_fd()
        }
    }

    fn pair() -> Result<[Box<dyn Transport>; 2], String> {
        let fabric = fabric();
        let end = |device: &str| Box::new(OverTcp(end(&fabric, config(&[device])))) as Box<dyn Transport>;
        Ok([end("a0"), end("b0")])
    }

    harmonaize_transport::conformance!(pair);
}

/// What happened at one end, without payloads.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Seen {
    Up,
    Received(Vec<u8>, Option<u32>),
    Sent(Tag),
    Completed(u16, Duration, u64),
    Down(DownReason),
}

fn turn(end: &mut dyn Transport, seen: &mut Vec<Seen>) {
    end.progress(64, &mut |_, event| {
        seen.push(match event {
            Event::Up => Seen::Up,
            Event::Received { header, payload, .. } => {
                Seen::Received(header.to_vec(), payload.map(|(_, bytes)| bytes))
            }
            Event::Sent { tag } => Seen::Sent(tag),
            Event::Completed { path, took, bytes } => Seen::Completed(path, took, bytes),
            Event::Down { reason } => Seen::Down(reason),
        });
    });
}

/// Drives both ends until `enough` of what they saw.
fn until(ends: [&mut dyn Transport; 2], seen: &mut [Vec<Seen>; 2], enough: impl Fn(&[Vec<Seen>; 2]) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    let [a, b] = ends;
    let [at_a, at_b] = seen;
    loop {
        turn(a, at_a);
        turn(b, at_b);
        let now = [at_a.clone(), at_b.clone()];
        if enough(&now) {
            return;
        }
        assert!(Instant::now() < deadline, "{now:?}");
    }
}

fn introduction(peer: SocketAddr, initiate: bool, paths: usize) -> Introduction {
    let (name, secret, source_ports) = ([1; 16], [2; 32], vec![0; paths]);
    Introduction { name, secret, peer, initiate, source_ports, over_tcp: false }
}

fn open(a: &mut dyn Transport, b: &mut dyn Transport, paths: usize) -> [LinkId; 2] {
    let (to_b, to_a) =
        (introduction(b.local_address(), true, paths), introduction(a.local_address(), false, paths));
    [a.open(to_b).unwrap(), b.open(to_a).unwrap()]
}

fn up(a: &mut dyn Transport, b: &mut dyn Transport, paths: usize) -> [LinkId; 2] {
    let links = open(a, b, paths);
    let mut seen = [vec![], vec![]];
    until([a, b], &mut seen, |seen| seen.iter().all(|seen| !seen.is_empty()));
    assert_eq!(seen, [vec![Seen::Up], vec![Seen::Up]]);
    links
}

fn span(bytes: usize) -> Span {
    Span::new(&Memory::private(bytes).unwrap(), 0, bytes as u64).unwrap()
}

fn ring(slot_bytes: u32, slots: u32) -> Ring {
    Ring { memory: span(slot_bytes as usize * slots as usize), slot_bytes, slots }
}

fn down(seen: &[Seen]) -> Option<&DownReason> {
    seen.iter().find_map(|seen| if let Seen::Down(reason) = seen { Some(reason) } else { None })
}

fn both_down(seen: &[Vec<Seen>; 2]) -> bool {
    seen.iter().all(|seen| down(seen).is_some())
}

/// Drives both ends until both links are down; what they saw.
fn both_ended(a: &mut dyn Transport, b: &mut dyn Transport) -> [Vec<Seen>; 2] {
    let mut seen = [vec![], vec![]];
    until([a, b], &mut seen, both_down);
    seen
}

/// The traffic classes that queue pairs of a link were connected with, where links over TCP are marked so.
fn traffic_classes(marked: Option<tcp::Dscp>, own: u8) -> Vec<u64> {
    let fabric = fabric();
    let set_up = |device: &str| {
        let options = PortOptions { traffic_class: own, ..PortOptions::default() };
        let tcp = tcp::Config { dscp: marked, ..tcp() };
        Config { devices: vec![device.to_owned()], options, ..Config::new(tcp) }
    };
    let (mut a, mut b) = (end(&fabric, set_up("a0")), end(&fabric, set_up("b0")));
    up(&mut a, &mut b, 2);
    let calls = fabric.take_calls("a0");
    let connected = calls.iter().filter(|recorded| recorded.call == Call::ToReadyToReceive);
    connected.map(|recorded| recorded.count).collect()
}

#[test]
fn queue_pairs_carry_the_code_point_of_normal_operations() {
    let marks = Some(tcp::Dscp([46, 18, 8]));
    assert_eq!(traffic_classes(None, 0), [0, 0]);
    assert_eq!(traffic_classes(marks, 0), [18 << 2; 2]);
    // ECN's bits stay as they are, and a code point of their own goes before.
    assert_eq!(traffic_classes(marks, 2), [18 << 2 | 2; 2]);
    assert_eq!(traffic_classes(marks, 26 << 2 | 2), [26 << 2 | 2; 2]);
}

/// Where a port makes no flow label, the device chooses: nobody knows which port packets have.
#[test]
fn the_port_of_a_queue_pair_without_a_flow_label_is_not_told() {
    let (_fabric, mut a, mut b) = ends();
    let by_ports = |peer, initiate| Introduction {
        source_ports: vec![0, 50_000, 49_152, 32_768],
        ..introduction(peer, initiate, 4)
    };
    let link = a.open(by_ports(b.local_address(), true)).unwrap();
    b.open(by_ports(a.local_address(), false)).unwrap();
    let mut seen = [vec![], vec![]];
    until([&mut a, &mut b], &mut seen, |seen| seen.iter().all(|seen| !seen.is_empty()));
    let source_port = |path| match Transport::flow(&a, link, path) {
        Some(Flow::Roce { source_port, .. }) => source_port,
        other => panic!("{other:?}"),
    };
    assert_eq!([0, 1, 2, 3].map(source_port), [0, 50_000, 0, 0]);
}

/// Links over TCP alone are beside others, and are handed over once there are no others.
#[test]
fn links_over_tcp_alone_are_handed_over() {
    let (fabric, mut a, mut b) = ends();
    let over_rdma = up(&mut a, &mut b, 2);
    let alone =
        |peer, initiate| Introduction { name: [2; 16], over_tcp: true, ..introduction(peer, initiate, 2) };
    let over_tcp =
        [a.open(alone(b.local_address(), true)).unwrap(), b.open(alone(a.local_address(), false)).unwrap()];
    let mut seen = [vec![], vec![]];
    until([&mut a, &mut b], &mut seen, |seen| seen.iter().all(|seen| !seen.is_empty()));
    assert_eq!(seen, [vec![Seen::Up], vec![Seen::Up]]);
    let flows = [over_rdma[0], over_tcp[0]].map(|link| Transport::flow(&a, link, 1).unwrap());
    assert!(matches!(flows, [Flow::Roce { .. }, Flow::Tcp { .. }]), "{flows:?}");
    // Frames of both come, each on its link.
    let landing = Landing { ring: 1, sequence: 0 };
    for (links, header) in [(over_rdma, b"over RDMA"), (over_tcp, b"over TCP.")] {
        let mut seen = [vec![], vec![]];
        b.attach_ring(links[1], 1, ring(4096, 4)).unwrap();
        a.send(links[0], 1, header, Some((landing, span(4096), Tag(7)))).unwrap();
        until([&mut a, &mut b], &mut seen, |seen| seen.iter().all(|seen| !seen.is_empty()));
        assert_eq!(seen, [vec![Seen::Sent(Tag(7))], vec![Seen::Received(header.to_vec(), Some(4096))]]);
    }
    a.freeze(true);
    let why = a.is_frozen().unwrap_err();
    assert!(matches!(why, LinkHandOverError::QueuePairs(1)), "{why}");
    a.freeze(false);
    a.close(over_rdma[0]);
    let mut seen = [vec![], vec![]];
    until([&mut a, &mut b], &mut seen, |seen| down(&seen[1]).is_some());
    a.freeze(true);
    let deadline = Instant::now() + Duration::from_secs(20);
    while !a.is_frozen().unwrap() {
        assert!(Instant::now() < deadline, "the link comes to no rest");
        turn(&mut a, &mut seen[0]);
        turn(&mut b, &mut seen[1]);
    }
    let (links, descriptors) = a.hand_over().unwrap();
    assert_eq!(descriptors.len(), 2, "one for each path");
    let mut successor = end(&fabric, config(&["a0"]));
    successor.take_over(&links, descriptors).unwrap();
    successor.attach_ring(over_tcp[0], 1, ring(4096, 4)).unwrap();
    successor.freeze(false);
    let mut seen = [vec![], vec![]];
    successor.send(over_tcp[0], 1, b"from here", None).unwrap();
    b.send(over_tcp[1], 1, b"from there", Some((landing, span(100), Tag(9)))).unwrap();
    until([&mut successor, &mut b], &mut seen, |seen| !seen[0].is_empty() && seen[1].len() > 1);
    assert_eq!(seen[0], [Seen::Received(b"from there".to_vec(), Some(100))]);
    assert!(seen[1].contains(&Seen::Received(b"from here".to_vec(), None)), "{seen:?}");
    // It has links over RDMA of its own, too.
    up(&mut successor, &mut b, 2);
}

#[test]
fn a_failed_completion_ends_the_link_and_says_what_it_was() {
    let (fabric, mut a, mut b) = ends();
    let [to_b, at_b] = up(&mut a, &mut b, 2);
    b.attach_ring(at_b, 0, ring(1 << 16, 2)).unwrap();
    fabric.inject("a0", Fault::Complete(Status::TransportRetriesExceeded));
    let landing = Landing { ring: 0, sequence: 0 };
    a.send(to_b, 1, b"lost", Some((landing, span(1 << 16), Tag(7)))).unwrap();
    let seen = both_ended(&mut a, &mut b);
    let Some(DownReason::Network(reason)) = down(&seen[0]) else { panic!("{seen:?}") };
    assert!(reason.contains("path 1") && reason.contains("retry counter exceeded"), "{reason}");
    assert_eq!(seen[0].len(), 1, "{seen:?}");
    assert!(matches!(down(&seen[1]), Some(DownReason::Closed | DownReason::Network(_))), "{seen:?}");
    // The devices are whole: the next link works.
    up(&mut a, &mut b, 2);
}

/// As a queue pair does that lost the timer of its retries.
#[test]
fn a_device_that_settles_nothing_ends_its_links() {
    let fabric = fabric();
    // 268 ms, with what a try may take beyond its time-out.
    let options = PortOptions { retries: 0, timeout: 14, ..PortOptions::default() };
    let mut a = end(&fabric, Config { options, ..config(&["a0"]) });
    let mut b = end(&fabric, config(&["b0"]));
    let [link, _] = up(&mut a, &mut b, 1);
    let mut seen = [Vec::new(), Vec::new()];
    // What is sent and was not asked for does not count, however long ago that was.
    a.send(link, 0, b"small", None).unwrap();
    let begun = Instant::now();
    until([&mut a, &mut b], &mut seen, |_| begun.elapsed() > Duration::from_secs(4));
    assert!(down(&seen[0]).is_none() && down(&seen[1]).is_none(), "{seen:?}");
    fabric.hold("a0");
    a.send(link, 0, b"lost", None).unwrap();
    until([&mut a, &mut b], &mut seen, both_down);
    let Some(DownReason::Network(why)) = down(&seen[0]) else { panic!("{seen:?}") };
    assert!(why.contains("neither sent message") && why.contains("within 268"), "{why}");
    // A payload may take as long again.
    fabric.release("a0");
    let [link, theirs] = up(&mut a, &mut b, 1);
    let mut seen = [Vec::new(), Vec::new()];
    b.attach_ring(theirs, 1, ring(4096, 4)).unwrap();
    fabric.hold("a0");
    let landing = Landing { ring: 1, sequence: 0 };
    a.send(link, 0, b"payload", Some((landing, span(4096), Tag(7)))).unwrap();
    until([&mut a, &mut b], &mut seen, both_down);
    let Some(DownReason::Network(why)) = down(&seen[0]) else { panic!("{seen:?}") };
    assert!(why.contains("neither sent message") && why.contains("within 536"), "{why}");
}

#[test]
fn a_payload_is_timed_until_its_device_has_carried_it_out() {
    let (fabric, mut a, mut b) = ends();
    let [link, theirs] = up(&mut a, &mut b, 2);
    b.attach_ring(theirs, 1, ring(4096, 4)).unwrap();
    let mut seen = [Vec::new(), Vec::new()];
    let send = |a: &mut VerbsTransport, sequence, tag| {
        a.send(link, 1, b"payload", Some((Landing { ring: 1, sequence }, span(3000), tag))).unwrap();
    };
    let sent = |tag| move |seen: &[Vec<Seen>; 2]| seen[0].contains(&Seen::Sent(tag));
    send(&mut a, 0, Tag(7));
    until([&mut a, &mut b], &mut seen, sent(Tag(7)));
    assert_eq!(seen[0], [Seen::Sent(Tag(7))], "nobody asked");
    a.time_completions();
    fabric.hold("a0");
    send(&mut a, 1, Tag(8));
    until([&mut a, &mut b], &mut seen, |_| true);
    let begun = Instant::now();
    until([&mut a, &mut b], &mut seen, |_| begun.elapsed() > Duration::from_millis(20));
    assert_eq!(seen[0], [Seen::Sent(Tag(7))], "it is under way");
    fabric.release("a0");
    let told = |seen: &[Vec<Seen>; 2]| seen[0].iter().any(|seen| matches!(seen, Seen::Completed(..)));
    until([&mut a, &mut b], &mut seen, told);
    let Some(Seen::Completed(path, took, bytes)) = seen[0].last() else { panic!("{seen:?}") };
    assert_eq!((*path, *bytes), (1, 3000));
    assert!(*took > Duration::from_millis(20), "{took:?}");
    assert_eq!(seen[1].iter().filter(|seen| matches!(seen, Seen::Completed(..))).count(), 0);
}

#[test]
fn a_lost_device_ends_its_links_and_lets_no_more_come() {
    let (fabric, mut a, mut b) = ends();
    up(&mut a, &mut b, 1);
    fabric.inject("a0", Fault::DeviceLost);
    let seen = both_ended(&mut a, &mut b);
    assert_eq!(down(&seen[0]), Some(&DownReason::DeviceGone("a0".to_owned())));
    let again = a.open(introduction(b.local_address(), true, 1));
    assert!(matches!(&again, Err(DownReason::Connect(_))), "{again:?}");
}

/// As rxe does it: no event, and whoever has the device open is served until he closes it.
#[test]
fn a_device_back_from_silence_is_opened_anew() {
    let (fabric, mut a, mut b) = ends();
    up(&mut a, &mut b, 2);
    fabric.take_calls("a0");
    fabric.inject("a0", Fault::DeviceRemoved);
    let seen = both_ended(&mut a, &mut b);
    assert_eq!(down(&seen[0]), Some(&DownReason::DeviceGone("a0".to_owned())));
    let closed = fabric.take_calls("a0");
    assert!(closed.iter().any(|recorded| recorded.call == Call::CloseDevice), "{closed:?}");
    let refused = a.open(introduction(b.local_address(), true, 1));
    let Err(DownReason::Connect(reason)) = &refused else { panic!("{refused:?}") };
    assert_eq!(reason, "no RDMA device a0; there are: a1, b0, b1");
    fabric.add("a0", ADDRESSES[0]).unwrap();
    up(&mut a, &mut b, 2);
}

/// One of several threads of an agent may have no links, and holds the device up for all.
#[test]
fn a_device_taken_away_is_let_go_without_links_too() {
    let fabric = fabric();
    let mut idle = end(&fabric, config(&["a0"]));
    fabric.take_calls("a0");
    fabric.inject("a0", Fault::DeviceRemoved);
    let deadline = Instant::now() + Duration::from_secs(20);
    while !fabric.take_calls("a0").iter().any(|recorded| recorded.call == Call::CloseDevice) {
        assert!(Instant::now() < deadline, "the device is held");
        idle.progress(64, &mut |_, event| panic!("{event:?}"));
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn an_end_whose_port_is_down_says_so() {
    let (fabric, mut a, mut b) = ends();
    let [to_b, _] = up(&mut a, &mut b, 1);
    fabric.inject("a0", Fault::PortDown);
    a.send(to_b, 0, b"lost", None).unwrap();
    let seen = both_ended(&mut a, &mut b);
    let reason = down(&seen[0]).unwrap().to_string();
    assert!(reason.ends_with("; port 1 of a0 is DOWN, not ACTIVE"), "{reason}");
    open(&mut a, &mut b, 1);
    let seen = both_ended(&mut a, &mut b);
    let reason = down(&seen[0]).unwrap().to_string();
    assert!(reason.contains("port 1 of a0 is DOWN, not ACTIVE"), "{reason}");
    fabric.inject("a0", Fault::PortUp);
    up(&mut a, &mut b, 1);
}

/// Destroying a queue pair on a port that is down takes rxe most of a second. Other links cannot wait for that.
#[test]
fn queue_pairs_are_destroyed_by_a_thread_of_their_own() {
    let (fabric, mut a, mut b) = ends();
    let [to_b, at_b] = up(&mut a, &mut b, 2);
    b.attach_ring(at_b, 0, ring(1 << 16, 2)).unwrap();
    fabric.take_calls("a0");
    fabric.inject("a0", Fault::PortDown);
    a.send(to_b, 0, b"lost", Some((Landing { ring: 0, sequence: 0 }, span(1 << 16), Tag(7)))).unwrap();
    both_ended(&mut a, &mut b);
    fabric.inject("a0", Fault::PortUp);
    let [to_b, _] = up(&mut a, &mut b, 1);
    a.close(to_b);
    drop(a);
    let calls = fabric.take_calls("a0");
    let destroyed: Vec<_> = calls.iter().filter(|call| call.call == Call::DestroyQueuePair).collect();
    assert_eq!(destroyed.len(), 3, "dropped, it waits until all are destroyed: {calls:?}");
    let here = std::thread::current().id();
    assert!(destroyed.iter().all(|call| call.thread != here), "{calls:?}");
    let stopped = |pair| calls.iter().any(|call| call.call == Call::ToError && call.queue_pair == pair);
    assert!(destroyed.iter().all(|call| stopped(call.queue_pair)), "{calls:?}");
}

#[test]
fn gids_of_different_networks_are_told_apart_before_anything_is_lost() {
    let fabric = fabric();
    let (mut a, mut b) = (
        end(
            &fabric,
            Config {
                options: PortOptions { gid_index: Some(0), ..PortOptions::default() },
                ..config(&["a0"])
            },
        ),
        end(&fabric, config(&["b0"])),
    );
    open(&mut a, &mut b, 1);
    let seen = both_ended(&mut a, &mut b);
    for seen in &seen {
        let reason = down(seen).unwrap().to_string();
        assert!(reason.contains("gid_index") && reason.contains("::ffff:10.0.0.2"), "{reason}");
    }
}

#[test]
fn a_link_without_queue_pairs_says_why() {
    let (fabric, mut a, mut b) = ends();
    fabric.inject("a0", Fault::NoQueuePairsLeft);
    open(&mut a, &mut b, 1);
    let seen = both_ended(&mut a, &mut b);
    let Some(DownReason::Connect(here)) = down(&seen[0]) else { panic!("{seen:?}") };
    assert!(here.contains("no queue pair left on a0"), "{here}");
    let Some(DownReason::Refused(LinkRefusal::ByPeer(there))) = down(&seen[1]) else { panic!("{seen:?}") };
    assert!(there.contains("no queue pair left on a0"), "{there}");
}

#[test]
fn memory_that_cannot_be_registered_is_a_typed_error() {
    let (fabric, mut a, mut b) = ends();
    let [to_b, at_b] = up(&mut a, &mut b, 1);
    let refused = Fault::Fail(Call::Register, rustix::io::Errno::NOMEM);
    fabric.inject("b0", refused);
    let attached = b.attach_ring(at_b, 0, ring(1 << 16, 2));
    assert!(
        matches!(&attached, Err(DownReason::Connect(why)) if why.contains("RLIMIT_MEMLOCK")),
        "{attached:?}"
    );
    b.attach_ring(at_b, 0, ring(1 << 16, 2)).unwrap();
    fabric.inject("a0", refused);
    a.send(to_b, 0, b"", Some((Landing { ring: 0, sequence: 0 }, span(1 << 16), Tag(7)))).unwrap();
    let seen = both_ended(&mut a, &mut b);
    assert!(
        matches!(down(&seen[0]), Some(DownReason::Network(why)) if why.contains("RLIMIT_MEMLOCK")),
        "{seen:?}"
    );
}

/// A last word that waits behind payloads goes by the TCP link, whole and once. It does so though its queue pair is
/// gone.
#[test]
fn last_words_overtake_payloads_that_will_not_go() {
    let (_fabric, mut a, mut b) = ends();
    let [to_b, at_b] = up(&mut a, &mut b, 1);
    b.attach_ring(at_b, 0, ring(1 << 16, 2)).unwrap();
    a.send(to_b, 0, &[1; 3], None).unwrap();
    for sequence in 0..8 {
        let payload = (Landing { ring: 0, sequence }, span(1 << 16), Tag(sequence.into()));
        a.send(to_b, 0, b"payload", Some(payload)).unwrap();
    }
    let word: Vec<u8> = (0..512).map(|i| (i % 251) as u8).collect();
    a.send(to_b, 0, &word, None).unwrap();
    a.send(to_b, 0, b"", None).unwrap();
    a.close(to_b);
    let mut seen = [vec![], vec![]];
    until([&mut a, &mut b], &mut seen, |seen| down(&seen[1]).is_some());
    let expected = [
        Seen::Received(vec![1; 3], None),
        Seen::Received(word, None),
        Seen::Received(vec![], None),
        Seen::Down(DownReason::Closed),
    ];
    assert_eq!(seen, [vec![], expected.to_vec()]);
}

#[test]
fn endpoints_of_one_address_exchange_queue_pairs() {
    let fabric = fabric();
    let acceptor = Acceptor::bind(&tcp()).unwrap();
    let end = |device| VerbsTransport::accepting(&acceptor, config(&[device]), &fabric.devices()).unwrap();
    let (mut a, mut b) = (end("a0"), end("b0"));
    assert_eq!(a.local_address(), b.local_address());
    let [to_b, _] = up(&mut a, &mut b, 2);
    a.send(to_b, 1, b"word", None).unwrap();
    let mut seen = [vec![], vec![]];
    until([&mut a, &mut b], &mut seen, |seen| !seen[1].is_empty());
    assert_eq!(seen[1], [Seen::Received(b"word".to_vec(), None)]);
}

/// A peer without RDMA is told apart, and so is one that says nothing.
#[test]
fn plain_tcp_is_refused() {
    let fabric = fabric();
    for speaks in [true, false] {
        let mut a = end(&fabric, config(&["a0"]));
        let mut b = TcpTransport::bind(tcp()).unwrap();
        let [_, at_b] = open(&mut a, &mut b, 1);
        let mut seen = [vec![], vec![]];
        until([&mut a, &mut b], &mut seen, |seen| seen[1].contains(&Seen::Up));
        if speaks {
            b.send(at_b, 0, b"hello from plain TCP", None).unwrap();
        }
        until([&mut a, &mut b], &mut seen, both_down);
        // Who says nothing is waited for in vain.
        let right = match down(&seen[0]) {
            Some(DownReason::Refused(LinkRefusal::NoRdma)) => speaks,
            Some(DownReason::Connect(_)) => !speaks,
            _ => false,
        };
        assert!(right, "{seen:?}");
    }
}

#[test]
fn memory_is_let_go_when_nobody_else_has_it() {
    let (_fabric, mut a, mut b) = ends();
    let [to_b, at_b] = up(&mut a, &mut b, 1);
    b.attach_ring(at_b, 0, ring(1 << 16, 2)).unwrap();
    let memory = Memory::private(1 << 16).unwrap();
    let weak = std::sync::Arc::downgrade(&memory);
    let payload = Span::new(&memory, 0, 1 << 16).unwrap();
    drop(memory);
    a.send(to_b, 0, b"", Some((Landing { ring: 0, sequence: 0 }, payload, Tag(7)))).unwrap();
    let mut seen = [vec![], vec![]];
    until([&mut a, &mut b], &mut seen, |seen| seen[0].contains(&Seen::Sent(Tag(7))) && seen[1].len() == 1);
    until([&mut a, &mut b], &mut seen, |_| weak.upgrade().is_none());
    assert_eq!(seen, [vec![Seen::Sent(Tag(7))], vec![Seen::Received(vec![], Some(1 << 16))]]);
}

#[test]
fn what_cannot_be_set_up_is_named() {
    let devices = fabric().devices();
    let bind = |config: Config| VerbsTransport::bind(config, &devices).unwrap_err();
    let error = bind(config(&["mlx5_7"]));
    assert!(
        matches!(&error, SetupError::Verbs(VerbsError::NoSuchDevice { name, .. }) if name == "mlx5_7"),
        "{error}"
    );
    let error = bind(config(&["a0:x"]));
    assert!(matches!(error, SetupError::Verbs(VerbsError::BadDevice { .. })), "{error}");
    let error = bind(Config {
        options: PortOptions { mtu: Some(1500), ..PortOptions::default() },
        ..config(&["a0"])
    });
    assert!(matches!(error, SetupError::Verbs(VerbsError::BadMtu { bytes: 1500 })), "{error}");
    let error = bind(Config {
        options: PortOptions { gid_index: Some(77), ..PortOptions::default() },
        ..config(&["a0"])
    });
    assert!(matches!(error, SetupError::Verbs(VerbsError::NoSuchGid { index: 77, .. })), "{error}");
    let error = bind(config(&[]));
    assert!(matches!(error, SetupError::Verbs(VerbsError::NoSuchAddress { .. })), "{error}");
}
