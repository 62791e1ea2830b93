//! The types on real devices, two of them or one with itself: skipped, loudly, where the kernel has none.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_shm::{Memory, Span};
use harmonaize_verbs::*;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const DEPTHS: Depths = Depths { sends: 16, receives: 16, inline_bytes: 64 };

/// How long a completion may take. Emulated machines are slow.
const PATIENCE: Duration = Duration::from_secs(60);

/// The tests share devices, and one of them lowers a limit of the process.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One end: a device with a domain, a queue, and 64 KiB of registered memory.
struct End {
    domain: Arc<Domain>,
    queue: Arc<CompletionQueue>,
    memory: Arc<Memory>,
    region: Arc<Region>,
    path: Path,
}

impl End {
    fn new(device: &Arc<Device>, path: Path) -> Self {
        let domain = Domain::create(device).unwrap();
        let queue = CompletionQueue::create(device, 64).unwrap();
        let memory = Memory::private(65536).unwrap();
        let region = Region::register(&domain, &memory, Access::REMOTE).unwrap();
        Self { domain, queue, memory, region, path }
    }

    fn pair(&self) -> QueuePair<Unconnected> {
        QueuePair::create(&self.domain, &self.queue, DEPTHS, self.path).unwrap()
    }

    fn datagram(&self) -> Datagram {
        Datagram::create(&self.domain, &self.queue, DEPTHS, &self.path, 0x1717).unwrap()
    }

    fn local(&self, offset: u64, bytes: u64) -> Local {
        Local::new(&self.region, Span::new(&self.memory, offset, bytes).unwrap()).unwrap()
    }

    fn at(&self, offset: u64) -> RemoteAddress {
        RemoteAddress { address: self.region.address() + offset, rkey: self.region.rkey() }
    }

    /// The next completion; sleeps on the event channel, as the product does.
    fn completion(&self) -> Completion {
        let deadline = Instant::now() + PATIENCE;
        let mut found = Vec::new();
        loop {
            self.queue.arm().unwrap();
            if self.queue.poll(&mut found, 1).unwrap() > 0 {
                self.queue.take_events().unwrap();
                return found.remove(0);
            }
            let left = deadline.checked_duration_since(Instant::now()).expect("no completion in time");
            let left = Timespec::try_from(left).unwrap();
            let fd = self.queue.wake_fd().unwrap();
            rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&left)).unwrap();
            self.queue.take_events().unwrap();
        }
    }

    fn bytes(&self, offset: u64, bytes: usize) -> Vec<u8> {
        let mut into = vec![0; bytes];
        self.memory.read(offset, &mut into).unwrap();
        into
    }
}

/// Two ends, or none and a word about why.
fn ends(test: &str) -> Option<(End, End)> {
    let devices = harmonaize_libibverbs::host_devices();
    let names = devices.names().unwrap();
    if names.is_empty() {
        println!("SKIPPED {test}: this kernel has no RDMA device (/sys/class/infiniband is empty)");
        return None;
    }
    let mut places = Vec::new();
    for name in &names {
        let device = devices.open(name).unwrap();
        for port in device.ports().unwrap() {
            println!("{name}: {:?}, {port:?}", device.limits());
            let usable = |entry: &&GidEntry| {
                entry.kind == GidKind::RoceV2 && matches!(entry.gid.ip(), Some(std::net::IpAddr::V4(_)))
            };
            let Some(entry) = port.gids.iter().find(usable) else { continue };
            if port.state != PortState::Active {
                continue;
            }
            let found = devices.find(entry.gid.ip().unwrap()).unwrap();
            assert_eq!(found, PortRef { device: name.clone(), port: port.number, gid_index: entry.index });
            let path = Path { port: port.number, gid_index: entry.index, timeout: 18, ..Path::default() };
            places.push((Arc::clone(&device), path));
        }
    }
    let Some((first, last)) = places.first().zip(places.get(1).or(places.first())) else {
        println!("SKIPPED {test}: no active port of {names:?} has an IPv4 address with RoCE v2");
        return None;
    };
    println!("{test}: {} to {}", first.0.name(), last.0.name());
    Some((End::new(&first.0, first.1), End::new(&last.0, last.1)))
}

fn connected(a: &End, b: &End) -> (QueuePair<Connected>, QueuePair<Connected>) {
    let (mut one, mut two) = (a.pair(), b.pair());
    one.post_receives(16).unwrap();
    two.post_receives(16).unwrap();
    let (to_one, to_two) = (one.endpoint(), two.endpoint());
    (one.connect(&to_two).unwrap(), two.connect(&to_one).unwrap())
}

fn succeed(pair: &mut QueuePair<Connected>, completion: &Completion) -> Vec<u64> {
    assert_eq!(completion.status(), Status::Success, "vendor code {:#x}", completion.vendor_code());
    let mut tokens = Vec::new();
    pair.handle_completion(completion, |token| tokens.push(token)).unwrap();
    tokens
}

#[test]
fn writes_with_immediate_go_both_ways() {
    let _alone = alone();
    let Some((a, b)) = ends("writes_with_immediate_go_both_ways") else { return };
    let (mut one, mut two) = connected(&a, &b);
    let payload: Vec<u8> = (0..40_000_u32).map(|at| (at % 251) as u8).collect();
    a.memory.write(0, &payload).unwrap();
    let mut work = vec![
        Work::write(a.local(0, 40_000), b.at(1000)).token(1),
        Work::write_with_immediate(a.local(3, 30), b.at(0), 0xfeed_beef)
            .and(a.local(60, 4))
            .inline()
            .token(2),
        Work::immediate(7).signalled().token(3),
    ];
    one.post(&mut work).unwrap();
    let first = b.completion();
    assert_eq!((first.opcode(), first.immediate()), (Opcode::ReceiveWriteWithImmediate, Some(0xfeed_beef)));
    assert_eq!((first.bytes(), first.queue_pair()), (34, two.number()));
    assert_eq!(succeed(&mut two, &first), Vec::<u64>::new());
    assert_eq!(b.bytes(1000, 40_000), payload);
    assert_eq!(b.bytes(0, 34), [&payload[3..33], &payload[60..64]].concat());
    let second = b.completion();
    assert_eq!((second.immediate(), second.bytes()), (Some(7), 0));
    assert_eq!(succeed(&mut two, &second), Vec::<u64>::new());
    assert_eq!(succeed(&mut one, &a.completion()), [1, 2, 3]);

    two.post(&mut vec![Work::write_with_immediate(b.local(1000, 5), a.at(50_000), 9).signalled().token(4)])
        .unwrap();
    let back = a.completion();
    assert_eq!((back.immediate(), back.bytes()), (Some(9), 5));
    assert_eq!(succeed(&mut one, &back), Vec::<u64>::new());
    assert_eq!(a.bytes(50_000, 5), payload[..5]);
    assert_eq!(succeed(&mut two, &b.completion()), [4]);
    assert_eq!((one.receives(), two.receives()), (15, 14));
    two.post_receives(2).unwrap();
}

#[test]
fn unsignalled_requests_of_many_rounds_are_released() {
    let _alone = alone();
    let Some((a, b)) = ends("unsignalled_requests_of_many_rounds_are_released") else { return };
    let (mut one, _two) = connected(&a, &b);
    let (mut posted, mut released) = (0_u64, 0_u64);
    while posted < 200 {
        let batch = one.room().min(3);
        if batch == 0 {
            for token in succeed(&mut one, &a.completion()) {
                assert_eq!(token, released);
                released += 1;
            }
            continue;
        }
        let mut work = Vec::new();
        for _ in 0..batch {
            work.push(Work::write(a.local(0, 100), b.at(0)).token(posted));
            posted += 1;
        }
        one.post(&mut work).unwrap();
    }
    assert_eq!(released + one.outstanding() as u64, posted);
}

#[test]
fn a_read_brings_the_peers_bytes() {
    let _alone = alone();
    let Some((a, b)) = ends("a_read_brings_the_peers_bytes") else { return };
    let (mut one, _two) = connected(&a, &b);
    let payload: Vec<u8> = (0..20_000_u32).map(|at| (at % 241) as u8).collect();
    b.memory.write(500, &payload).unwrap();
    one.post(&mut vec![Work::read(a.local(7, 20_000), b.at(500)).signalled().token(11)]).unwrap();
    assert_eq!(succeed(&mut one, &a.completion()), [11]);
    assert_eq!(a.bytes(7, 20_000), payload);
}

#[test]
fn a_wrong_key_is_a_remote_access_error() {
    let _alone = alone();
    let Some((a, b)) = ends("a_wrong_key_is_a_remote_access_error") else { return };
    for wrong in [RemoteAddress { rkey: b.region.rkey() ^ 0x55, ..b.at(0) }, b.at(65_536 - 3)] {
        let (mut one, _two) = connected(&a, &b);
        one.post(&mut vec![Work::write(a.local(0, 8), wrong).signalled().token(1)]).unwrap();
        // Its own receive requests are flushed into the same queue.
        let done = std::iter::repeat_with(|| a.completion()).find(|done| !done.is_receive()).unwrap();
        assert_eq!((done.status(), done.queue_pair()), (Status::RemoteAccess, one.number()));
        let mut tokens = Vec::new();
        one.handle_completion(&done, |token| tokens.push(token)).unwrap();
        assert_eq!(tokens, [1]);
    }
}

#[test]
fn an_aborted_queue_pair_flushes() {
    let _alone = alone();
    let Some((a, b)) = ends("an_aborted_queue_pair_flushes") else { return };
    let (mut one, _two) = connected(&a, &b);
    one.abort().unwrap();
    one.post(&mut vec![Work::immediate(1).token(5)]).unwrap();
    let (mut tokens, mut receives) = (Vec::new(), 0);
    while tokens.is_empty() || receives < 16 {
        let done = a.completion();
        assert_eq!(done.status(), Status::WorkRequestFlushed);
        receives += usize::from(done.is_receive());
        one.handle_completion(&done, |token| tokens.push(token)).unwrap();
    }
    assert_eq!((tokens, one.receives()), (vec![5], 0));
}

#[test]
fn a_datagram_arrives_behind_its_header() {
    let _alone = alone();
    let Some((a, b)) = ends("a_datagram_arrives_behind_its_header") else { return };
    let (mut one, mut two) = (a.datagram(), b.datagram());
    let most = one.max_payload().min(two.max_payload());
    two.post_receives(&mut vec![b.local(0, (most + GRH_BYTES) as u64), b.local(8192, 1000)]).unwrap();
    let payload: Vec<u8> = (0..most).map(|at| (at % 239) as u8).collect();
    a.memory.write(0, &payload).unwrap();
    let to = AddressHandle::create(&a.domain, two.gid(), &a.path).unwrap();
    one.send(a.local(0, most as u64), &to, two.number(), two.queue_key(), false, 1).unwrap();
    one.send(a.local(1, 20), &to, two.number(), two.queue_key(), true, 2).unwrap();
    for token in [1, 2] {
        let sent = one.handle_completion(&a.completion()).unwrap();
        assert!(matches!(sent, Some(Delivered::Sent(of)) if of == token), "{sent:?}");
    }
    for expected in [&payload[..], &payload[1..21]] {
        let arrived = two.handle_completion(&b.completion()).unwrap();
        let Some(Delivered::Received(received)) = arrived else { panic!("{arrived:?}") };
        assert_eq!((received.bytes as usize, received.source), (expected.len(), one.number()));
        let offset = (received.buffer.span().offset() + GRH_BYTES) as u64;
        assert_eq!(b.bytes(offset, expected.len()), expected);
    }
}

#[test]
fn too_much_pinned_memory_is_said_with_the_limit() {
    let _alone = alone();
    let Some((a, _)) = ends("too_much_pinned_memory_is_said_with_the_limit") else { return };
    let memory = Memory::private(1 << 20).unwrap();
    let before = getrlimit(Resource::Memlock);
    setrlimit(Resource::Memlock, Rlimit { current: Some(128 << 10), maximum: before.maximum }).unwrap();
    // In a thread of its own, for the privilege that lifts the limit is a thread's.
    let refused = std::thread::scope(|scope| {
        let register = || {
            let mut sets = rustix::thread::capabilities(None).unwrap();
            sets.effective.remove(rustix::thread::CapabilitySet::IPC_LOCK);
            rustix::thread::set_capabilities(None, sets).unwrap();
            Region::register(&a.domain, &memory, Access::LOCAL).map(|_| ())
        };
        scope.spawn(register).join().unwrap()
    });
    setrlimit(Resource::Memlock, before).unwrap();
    let error = refused.unwrap_err();
    assert!(matches!(error, VerbsError::Memlock { bytes: 1_048_576, .. }), "{error:?}");
    let error = error.to_string();
    assert!(error.contains("131072 bytes (RLIMIT_MEMLOCK)"), "{error}");
    Region::register(&a.domain, &memory, Access::LOCAL).unwrap();
}
