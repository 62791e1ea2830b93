//! The types on the fake fabric: states, what is held until when, faults.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_shm::{Memory, Span};
use harmonaize_verbs::fake::{Fabric, Fault, Recorded};
use harmonaize_verbs::*;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use std::net::Ipv4Addr;
use std::sync::Arc;

const DEPTHS: Depths = Depths { sends: 8, receives: 8, inline_bytes: 64 };
const PATH: Path = Path {
    port: 1,
    gid_index: 1,
    mtu: None,
    traffic_class: 0,
    hop_limit: 64,
    flow_label: 0,
    service_level: 0,
    timeout: 16,
    retries: 6,
    receiver_not_ready_retries: 6,
    reads: 4,
};

fn fabric() -> Fabric {
    let fabric = Fabric::new();
    fabric.add("fake0", Ipv4Addr::new(10, 0, 0, 1)).unwrap();
    fabric.add("fake1", Ipv4Addr::new(10, 0, 0, 2)).unwrap();
    fabric
}

/// One end: a device with a domain, a queue, and 64 KiB of registered memory.
struct End {
    domain: Arc<Domain>,
    queue: Arc<CompletionQueue>,
    memory: Arc<Memory>,
    region: Arc<Region>,
}

impl End {
    fn new(fabric: &Fabric, device: &str) -> Self {
        let device = fabric.devices().open(device).unwrap();
        let domain = Domain::create(&device).unwrap();
        let queue = CompletionQueue::create(&device, 64).unwrap();
        let memory = Memory::private(65536).unwrap();
        let region = Region::register(&domain, &memory, Access::REMOTE).unwrap();
        Self { domain, queue, memory, region }
    }

    fn pair(&self) -> QueuePair<Unconnected> {
        QueuePair::create(&self.domain, &self.queue, DEPTHS, PATH).unwrap()
    }

    fn local(&self, offset: u64, bytes: u64) -> Local {
        Local::new(&self.region, Span::new(&self.memory, offset, bytes).unwrap()).unwrap()
    }

    fn at(&self, offset: u64) -> RemoteAddress {
        RemoteAddress { address: self.region.address() + offset, rkey: self.region.rkey() }
    }

    fn poll(&self) -> Vec<Completion> {
        let mut found = Vec::new();
        self.queue.poll(&mut found, 64).unwrap();
        found
    }

    fn bytes(&self, offset: u64, bytes: usize) -> Vec<u8> {
        let mut into = vec![0; bytes];
        self.memory.read(offset, &mut into).unwrap();
        into
    }
}

fn ends() -> (Fabric, End, End) {
    let fabric = fabric();
    let (a, b) = (End::new(&fabric, "fake0"), End::new(&fabric, "fake1"));
    (fabric, a, b)
}

fn connected(a: &End, b: &End) -> (QueuePair<Connected>, QueuePair<Connected>) {
    let (one, mut two) = (a.pair(), b.pair());
    two.post_receives(8).unwrap();
    let (to_one, to_two) = (one.endpoint(), two.endpoint());
    (one.connect(&to_two).unwrap(), two.connect(&to_one).unwrap())
}

fn tokens(pair: &mut QueuePair<Connected>, completion: &Completion) -> Vec<u64> {
    let mut tokens = Vec::new();
    let count = pair.handle_completion(completion, |token| tokens.push(token)).unwrap();
    assert_eq!(count, tokens.len());
    tokens
}

fn readable(fd: std::os::fd::BorrowedFd<'_>) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&now)).unwrap() == 1
}

#[test]
fn an_address_is_found_on_its_device() {
    let devices = fabric().devices();
    assert_eq!(devices.names().unwrap(), ["fake0", "fake1"]);
    let address = Ipv4Addr::new(10, 0, 0, 2).into();
    let place = devices.find(address).unwrap();
    assert_eq!(place, PortRef { device: "fake1".to_owned(), port: 1, gid_index: 1 });
    let stranger = Ipv4Addr::new(10, 0, 0, 3).into();
    assert_eq!(devices.find(stranger), Err(VerbsError::NoSuchAddress { address: stranger }));
    let port = &devices.open("fake1").unwrap().ports().unwrap()[0];
    assert_eq!((port.state, port.active_mtu), (PortState::Active, Mtu::Bytes4096));
    assert_eq!(port.gids[1].gid.ip(), Some(address));
    let error = devices.open("mlx5_0").unwrap_err().to_string();
    assert_eq!(error, "no RDMA device mlx5_0; there are: fake0, fake1");
}

#[test]
fn bytes_are_written_and_read_and_the_peer_is_told() {
    let (fabric, a, b) = ends();
    let (mut one, mut two) = connected(&a, &b);
    a.memory.write(100, b"payload, header").unwrap();
    let mut work = vec![
        Work::write(a.local(100, 9), b.at(5000)).token(1),
        Work::write_with_immediate(a.local(109, 6), b.at(0), 0xfeed_beef)
            .and(a.local(100, 3))
            .inline()
            .token(2),
        Work::read(a.local(200, 4), b.at(5003)).signalled().token(3),
    ];
    one.post(&mut work).unwrap();
    assert!(work.is_empty());
    assert_eq!(b.bytes(5000, 9), b"payload, ");
    assert_eq!(b.bytes(0, 9), b"headerpay");
    assert_eq!(a.bytes(200, 4), b"load");
    let arrived = &b.poll()[..];
    let [arrived] = arrived else { panic!("{arrived:?}") };
    assert_eq!(arrived.opcode(), Opcode::ReceiveWriteWithImmediate);
    assert_eq!((arrived.immediate(), arrived.bytes()), (Some(0xfeed_beef), 9));
    assert_eq!((arrived.queue_pair(), two.receives()), (two.number(), 8));
    assert_eq!(two.handle_completion(arrived, |_| panic!()).unwrap(), 0);
    assert_eq!(two.receives(), 7);
    let done = a.poll();
    assert_eq!(done.len(), 1);
    assert_eq!(tokens(&mut one, &done[0]), [1, 2, 3]);
    let posts = |call| move |recorded: &&Recorded| recorded.call == call;
    let calls = fabric.take_calls("fake0");
    let sent: Vec<u64> = calls.iter().filter(posts(Call::PostSend)).map(|call| call.count).collect();
    assert_eq!(sent, [3], "one post for all");
}

#[test]
fn memory_stays_referenced_until_completion() {
    let (fabric, a, b) = ends();
    let (mut one, _two) = connected(&a, &b);
    let (memory, region) = (Arc::strong_count(&a.memory), Arc::strong_count(&a.region));
    fabric.hold("fake0");
    let mut work: Vec<Work> = (0..3).map(|at| Work::write(a.local(at, 1), b.at(at)).token(at)).collect();
    work[1] = work[1].clone().signalled();
    one.post(&mut work).unwrap();
    assert_eq!((one.outstanding(), one.room()), (3, 5));
    let held = |a: &End| (Arc::strong_count(&a.memory) - memory, Arc::strong_count(&a.region) - region);
    // The fabric is slow: everything is held.
    assert!(a.poll().is_empty());
    assert_eq!(held(&a), (3, 3));
    fabric.release("fake0");
    let done = a.poll();
    assert_eq!(held(&a), (3, 3), "done, not settled");
    assert_eq!(tokens(&mut one, &done[0]), [0, 1]);
    assert_eq!(held(&a), (1, 1), "the third was not signalled, and came later");
    assert_eq!(tokens(&mut one, &done[0]), Vec::<u64>::new(), "settled before");
    // An inline one holds nothing.
    one.post(&mut vec![Work::write(a.local(0, 64), b.at(0)).inline().signalled().token(9)]).unwrap();
    assert_eq!(held(&a), (1, 1));
    let done = a.poll();
    assert_eq!(tokens(&mut one, &done[0]), [2, 9]);
    assert_eq!(held(&a), (0, 0));
}

#[test]
fn half_a_queue_is_never_without_a_signal() {
    let (_fabric, a, b) = ends();
    let (mut one, _two) = connected(&a, &b);
    for round in 0..1000_u64 {
        one.post(&mut vec![Work::write(a.local(0, 8), b.at(0)).token(round)]).unwrap();
        for done in a.poll() {
            assert_eq!(tokens(&mut one, &done).len(), 4);
        }
    }
    assert_eq!(one.outstanding(), 0);
}

#[test]
fn a_dropped_queue_pair_goes_before_its_memory() {
    let (fabric, a, b) = ends();
    let (mut one, _two) = connected(&a, &b);
    fabric.hold("fake0");
    one.post(&mut vec![Work::write(a.local(0, 8), b.at(0)), Work::read(a.local(8, 8), b.at(0))]).unwrap();
    let (number, memory) = (one.number(), Arc::downgrade(&a.memory));
    fabric.take_calls("fake0");
    drop(a);
    assert!(memory.upgrade().is_some(), "held by the requests");
    assert_eq!(fabric.take_calls("fake0"), [], "held by the queue pair");
    drop(one);
    let calls: Vec<Call> = fabric.take_calls("fake0").iter().map(|recorded| recorded.call).collect();
    let expected = [
        Call::DestroyQueuePair,
        Call::Deregister,
        Call::DestroyCompletionQueue,
        Call::FreeDomain,
        Call::CloseDevice,
    ];
    assert_eq!(calls, expected, "queue pair {number:#x}");
    assert!(memory.upgrade().is_none());
}

#[test]
fn keys_bounds_and_access_are_checked() {
    let (_fabric, a, b) = ends();
    let only_written = Memory::private(4096).unwrap();
    let only_written = Region::register(&b.domain, &only_written, Access::REMOTE_WRITE).unwrap();
    let closed = Region::register(&b.domain, &Memory::private(4096).unwrap(), Access::LOCAL).unwrap();
    let foreign = Domain::create(b.domain.device()).unwrap();
    let foreign = Region::register(&foreign, &Memory::private(4096).unwrap(), Access::REMOTE).unwrap();
    let at = |region: &Region| RemoteAddress { address: region.address(), rkey: region.rkey() };
    let end = b.at(65536 - 7);
    let low = RemoteAddress { address: b.region.address() - 1, rkey: b.region.rkey() };
    let wrong_key = RemoteAddress { rkey: 0xdead, ..b.at(0) };
    let wraps = RemoteAddress { address: u64::MAX - 3, ..b.at(0) };
    let refused = [
        Work::write(a.local(0, 8), end),
        Work::write(a.local(0, 8), low),
        Work::write(a.local(0, 8), wrong_key),
        Work::write(a.local(0, 8), wraps),
        Work::read(a.local(0, 8), at(&only_written)),
        Work::write(a.local(0, 8), at(&closed)),
        Work::write_with_immediate(a.local(0, 8), at(&foreign), 1),
    ];
    for work in refused {
        let (mut one, two) = connected(&a, &b);
        one.post(&mut vec![work.clone().token(5), Work::write(a.local(0, 8), b.at(0)).token(6)]).unwrap();
        let done = a.poll();
        let statuses: Vec<Status> = done.iter().map(Completion::status).collect();
        assert_eq!(statuses, [Status::RemoteAccess, Status::WorkRequestFlushed], "{work:?}");
        assert_eq!(tokens(&mut one, &done[0]), [5]);
        assert_eq!(tokens(&mut one, &done[1]), [6]);
        assert_eq!(done[0].status().to_string(), "remote access error");
        let flushed = b.poll();
        assert_eq!(flushed.len(), 8);
        assert!(flushed.iter().all(|one| one.status() == Status::WorkRequestFlushed && one.is_receive()));
        assert_eq!(flushed[0].queue_pair(), two.number());
    }
    let (mut one, _two) = connected(&a, &b);
    one.post(&mut vec![Work::write(a.local(0, 8), at(&only_written)).signalled()]).unwrap();
    assert_eq!(a.poll()[0].status(), Status::Success);
}

#[test]
fn a_write_with_immediate_needs_a_receive_request() {
    let (_fabric, a, b) = ends();
    let (mut one, _two) = connected(&a, &b);
    for _ in 0..8 {
        one.post(&mut vec![Work::immediate(7).signalled()]).unwrap();
        let done = a.poll();
        assert_eq!((done[0].status(), tokens(&mut one, &done[0]).len()), (Status::Success, 1));
    }
    one.post(&mut vec![Work::immediate(7)]).unwrap();
    assert_eq!(a.poll()[0].status(), Status::ReceiverNotReadyRetriesExceeded);
    assert_eq!(b.poll().iter().filter(|one| one.immediate() == Some(7)).count(), 8);
}

#[test]
fn what_the_queue_has_no_room_for_stays_with_the_caller() {
    let (fabric, a, b) = ends();
    let (mut one, mut two) = connected(&a, &b);
    let mut nine: Vec<Work> = (0..9).map(|_| Work::write(a.local(0, 1), b.at(0))).collect();
    assert_eq!(one.post(&mut nine), Err(VerbsError::Full { requested: 9, room: 8 }));
    assert_eq!(nine.len(), 9);
    assert_eq!(two.post_receives(1), Err(VerbsError::Full { requested: 1, room: 0 }));
    let long = Work::write(a.local(0, 65), b.at(0)).inline();
    let error = VerbsError::OutOfRange { what: "inline data", value: 65, most: 64 };
    assert_eq!(one.post(&mut vec![long]), Err(error));
    let theirs = Work::write(b.local(0, 8), b.at(0));
    assert_eq!(one.post(&mut vec![theirs]), Err(VerbsError::NotRegistered));
    fabric.inject("fake0", Fault::Fail(Call::PostSend, Errno::NOMEM));
    nine.truncate(2);
    let error = one.post(&mut nine).unwrap_err().to_string();
    assert!(error.starts_with("ibv_post_send on queue pair"), "{error}");
    assert_eq!((nine.len(), one.outstanding()), (2, 0));
    let other = Memory::private(64).unwrap();
    let span = Span::new(&other, 0, 1).unwrap();
    assert_eq!(Local::new(&a.region, span).unwrap_err(), VerbsError::NotRegistered);
}

#[test]
fn a_completion_of_another_queue_pair_is_refused() {
    let (fabric, a, b) = ends();
    let (mut one, _two) = connected(&a, &b);
    let (mut other, _peer) = connected(&a, &b);
    fabric.hold("fake0");
    other.post(&mut vec![Work::write(a.local(0, 1), b.at(0))]).unwrap();
    fabric.release("fake0");
    one.post(&mut vec![Work::write(a.local(0, 1), b.at(0)).signalled()]).unwrap();
    let done = a.poll();
    let error = VerbsError::ForeignCompletion { found: one.number(), expected: other.number() };
    assert_eq!(other.handle_completion(&done[0], |_| panic!()), Err(error));
    assert_eq!((one.outstanding(), other.outstanding()), (1, 1));
}

#[test]
fn an_armed_queue_wakes_once() {
    let (_fabric, a, b) = ends();
    let (mut one, _two) = connected(&a, &b);
    let send = |one: &mut QueuePair<Connected>| one.post(&mut vec![Work::immediate(1)]).unwrap();
    send(&mut one);
    assert!(!readable(b.queue.wake_fd().unwrap()), "not armed");
    b.queue.arm().unwrap();
    assert!(!readable(b.queue.wake_fd().unwrap()), "what came before gives no event");
    send(&mut one);
    send(&mut one);
    assert!(readable(b.queue.wake_fd().unwrap()));
    assert_eq!(b.queue.take_events().unwrap(), 1);
    assert!(!readable(b.queue.wake_fd().unwrap()));
    assert_eq!((b.queue.take_events().unwrap(), b.poll().len()), (0, 3));
}

#[test]
fn limit_errors_name_the_remedy() {
    let fabric = fabric();
    let a = End::new(&fabric, "fake0");
    let domain = Arc::clone(&a.domain);
    let memory = Memory::private(8192).unwrap();
    for errno in [Errno::NOMEM, Errno::PERM] {
        fabric.inject("fake0", Fault::Fail(Call::Register, errno));
        let error = Region::register(&domain, &memory, Access::SEND).unwrap_err();
        assert!(matches!(error, VerbsError::Memlock { bytes: 8192, .. }), "{error:?}");
        let error = error.to_string();
        assert!(error.contains("RLIMIT_MEMLOCK") && error.contains("LimitMEMLOCK=infinity"), "{error}");
    }
    let create = |depths, path| QueuePair::create(&domain, &a.queue, depths, path).map(|_| ()).unwrap_err();
    let error = create(DEPTHS, Path { gid_index: 9, ..PATH });
    assert_eq!(error.to_string(), "GID index 9 of fake0 port 1 is empty; used are: [0, 1]");
    let error = create(DEPTHS, Path { retries: 7, ..PATH });
    assert_eq!(error, VerbsError::OutOfRange { what: "retries", value: 7, most: 6 });
    let error = create(Depths { sends: 5000, ..DEPTHS }, PATH);
    assert_eq!(error, VerbsError::OutOfRange { what: "send queue depth", value: 5000, most: 4096 });
    fabric.inject("fake0", Fault::PortDown);
    assert_eq!(create(DEPTHS, PATH).to_string(), "port 1 of fake0 is DOWN, not ACTIVE");
    fabric.inject("fake0", Fault::PortUp);
    fabric.inject("fake0", Fault::NoQueuePairsLeft);
    let error = create(DEPTHS, PATH);
    assert!(matches!(error, VerbsError::QueuePairsExhausted { most: 1024, .. }), "{error:?}");
    assert_eq!(a.domain.device().take_event(), Ok(Some(AsyncEvent::PortDown(1))));
    assert_eq!(a.domain.device().take_event(), Ok(Some(AsyncEvent::PortActive(1))));
    assert_eq!(a.domain.device().take_event(), Ok(None));
}

#[test]
fn an_injected_status_ends_the_queue_pair() {
    let (fabric, a, b) = ends();
    let (mut one, two) = connected(&a, &b);
    fabric.inject("fake0", Fault::Complete(Status::LocalProtection));
    let write = |token| Work::write(a.local(0, 1), b.at(0)).token(token);
    one.post(&mut vec![write(1), write(2)]).unwrap();
    let statuses: Vec<Status> = a.poll().iter().map(Completion::status).collect();
    assert_eq!(statuses, [Status::LocalProtection, Status::WorkRequestFlushed]);
    let (mut three, mut four) = connected(&a, &b);
    drop(two);
    four.abort().unwrap();
    three.post(&mut vec![Work::immediate(1)]).unwrap();
    assert_eq!(a.poll()[0].status(), Status::TransportRetriesExceeded);
}

#[test]
fn pollers_and_sleepers_see_a_lost_device() {
    let (fabric, a, b) = ends();
    let (mut one, mut two) = connected(&a, &b);
    b.queue.arm().unwrap();
    let device = Arc::clone(b.domain.device());
    assert!(!readable(device.event_fd().unwrap()) && !device.lost());
    fabric.inject("fake1", Fault::DeviceLost);
    assert!(readable(device.event_fd().unwrap()) && readable(b.queue.wake_fd().unwrap()));
    assert_eq!(device.take_event(), Ok(Some(AsyncEvent::DeviceFatal)));
    assert!(device.lost());
    let lost = VerbsError::DeviceLost { device: "fake1".to_owned() };
    assert_eq!(b.queue.poll(&mut Vec::new(), 1), Err(lost.clone()));
    assert_eq!(two.post_receives(0), Err(lost.clone()));
    assert_eq!(two.abort(), Err(lost));
    one.post(&mut vec![Work::immediate(1)]).unwrap();
    assert_eq!(a.poll()[0].status(), Status::TransportRetriesExceeded);
}

#[test]
fn threads_share_the_fabric() {
    let (_fabric, a, b) = ends();
    let (mut one, mut two) = connected(&a, &b);
    let to = b.at(0);
    let sender = std::thread::spawn(move || {
        for round in 0..1000_u32 {
            a.memory.write(0, &round.to_ne_bytes()).unwrap();
            // As many as there are receive requests, for want of credits.
            one.post(&mut vec![Work::write(a.local(0, 4), to).signalled()]).unwrap();
            while one.outstanding() > 0 {
                for done in a.poll() {
                    assert_eq!(done.status(), Status::Success);
                    one.handle_completion(&done, |_| ()).unwrap();
                }
            }
        }
        one.post(&mut vec![Work::immediate(77)]).unwrap();
        (a, one)
    });
    let mut arrived = Vec::new();
    while arrived.is_empty() {
        arrived = b.poll();
        std::thread::yield_now();
    }
    assert_eq!(arrived[0].immediate(), Some(77));
    two.handle_completion(&arrived[0], |_| ()).unwrap();
    assert_eq!(b.bytes(0, 4), 999_u32.to_ne_bytes());
    sender.join().unwrap();
}

fn datagram(end: &End, key: u32) -> Datagram {
    Datagram::create(&end.domain, &end.queue, DEPTHS, &PATH, key).unwrap()
}

#[test]
fn datagrams_arrive_behind_their_header() {
    let (_fabric, a, b) = ends();
    let (mut one, mut two) = (datagram(&a, 17), datagram(&b, 17));
    assert_eq!(one.max_payload(), 4096);
    two.post_receives(&mut vec![b.local(0, 4136), b.local(8192, 50)]).unwrap();
    a.memory.write(0, &[9; 4096]).unwrap();
    let to = AddressHandle::create(&a.domain, two.gid(), &PATH).unwrap();
    one.send(a.local(0, 4096), &to, two.number(), 17, false, 3).unwrap();
    one.send(a.local(0, 5), &to, two.number(), 18, true, 4).unwrap();
    let error = VerbsError::OutOfRange { what: "a datagram's length", value: 4097, most: 4096 };
    assert_eq!(one.send(a.local(0, 4097), &to, two.number(), 17, false, 5), Err(error));
    for (done, token) in a.poll().iter().zip([3, 4]) {
        assert!(matches!(one.handle_completion(done), Ok(Some(Delivered::Sent(of))) if of == token));
        assert!(matches!(one.handle_completion(done), Ok(None)));
    }
    let arrived = b.poll();
    assert_eq!(arrived.len(), 1, "the wrong key is lost");
    let Some(Delivered::Received(received)) = two.handle_completion(&arrived[0]).unwrap() else { panic!() };
    assert_eq!((received.bytes, received.source), (4096, one.number()));
    assert_eq!(received.buffer.span().offset(), 0);
    let Some(std::net::IpAddr::V4(sender)) = one.gid().ip() else { panic!("an address") };
    assert_eq!(b.bytes(20, 1), [0x45], "the header of IPv4 is the last of it");
    assert_eq!(b.bytes(32, 4), sender.octets());
    assert_eq!(b.bytes(39, 3), [0, 9, 9]);
    // A datagram that is longer than the buffer takes the queue pair down.
    one.send(a.local(0, 11), &to, two.number(), 17, false, 6).unwrap();
    let arrived = b.poll();
    assert_eq!(arrived[0].status(), Status::LocalLength);
    assert!(matches!(two.handle_completion(&arrived[0]), Ok(Some(Delivered::Unused(_)))));
}
