//! Rejected, liars and broken peers against a TCP endpoint: nobody else notices.

use crate::raw::{Log, PATIENCE, SECRET, Seen, config, drive, hello, introduction, turn};
use harmonaize_abi::Tag;
use harmonaize_shm::{Memory, Span};
use harmonaize_transport::tcp::{Acceptor, Config, LinkProtection, Rejected, TcpTransport};
use harmonaize_transport::{DownReason, Introduction, Landing, LinkId, LinkRefusal, Ring, Transport};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant, UNIX_EPOCH};

/// Two endpoints with a link between them that everything else must leave alone.
struct Scene {
    a: TcpTransport,
    b: TcpTransport,
    logs: [Log; 2],
    good: [LinkId; 2],
}

impl Scene {
    fn new(config: Config) -> Self {
        let mut a = TcpTransport::bind(config.clone()).unwrap();
        let mut b = TcpTransport::bind(config).unwrap();
        let good = [
            a.open(introduction(200, b.local_address(), true)).unwrap(),
            b.open(introduction(200, a.local_address(), false)).unwrap(),
        ];
        let mut scene = Self { a, b, logs: [vec![], vec![]], good };
        scene.until(|logs| logs.iter().all(|log| log.iter().any(|(_, seen)| *seen == Seen::Up)));
        scene
    }

    fn until(&mut self, holds: impl Fn(&[&Log]) -> bool) {
        let [log_a, log_b] = &mut self.logs;
        let held = drive(&mut [(&mut self.a, log_a), (&mut self.b, log_b)], &holds);
        assert!(held, "waited in vain; seen {:?}", self.logs);
    }

    fn turn(&mut self) {
        turn(&mut self.a, &mut self.logs[0]);
        turn(&mut self.b, &mut self.logs[1]);
    }

    fn turn_for(&mut self, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.turn();
        }
    }

    /// What `b` reported of `link` in the end.
    fn down(&mut self, link: LinkId) -> DownReason {
        let end = |log: &Log| {
            log.iter().find_map(|(of, seen)| match seen {
                Seen::Down(reason) if *of == link => Some(reason.clone()),
                _ => None,
            })
        };
        self.until(|logs| end(logs[1]).is_some());
        end(&self.logs[1]).unwrap()
    }

    /// A frame there and one back over the good link.
    fn still_works(&mut self) {
        let count =
            |log: &Log| log.iter().filter(|(_, seen)| *seen == Seen::Frame(b"hello".to_vec())).count();
        let before = [count(&self.logs[0]), count(&self.logs[1])];
        self.a.send(self.good[0], 0, b"hello", None).unwrap();
        self.b.send(self.good[1], 0, b"hello", None).unwrap();
        self.until(|logs| (0..2).all(|at| count(logs[at]) == before[at] + 1));
    }

    /// A link of `b` to a raw peer that is authenticated. The link has a ring 3 of two slots of 1,000 bytes.
    fn joined(&mut self, name: u8) -> (TcpStream, LinkId) {
        let link = self.b.open(introduction(name, self.a.local_address(), false)).unwrap();
        let memory = Span::new(&Memory::private(2000).unwrap(), 0, 2000).unwrap();
        self.b.attach_ring(link, 3, Ring { memory, slot_bytes: 1000, slots: 2 }).unwrap();
        let to = self.b.local_address();
        let stream = crate::raw::join(to, name, (0, 1), || self.turn()).unwrap();
        self.until(|logs| logs[1].contains(&(link, Seen::Up)));
        (stream, link)
    }
}

/// Who does not shake hands in time is cut off.
fn hasty() -> Config {
    Config { handshake_timeout: Duration::from_millis(300), ..config() }
}

struct Random(u64);

impl Random {
    fn seeded() -> Self {
        let given = std::env::var("HARMONAIZE_SEED").ok().and_then(|seed| seed.parse().ok());
        let clock = || UNIX_EPOCH.elapsed().map_or(1, |since| since.as_nanos() as u64);
        let seed = given.unwrap_or_else(clock) | 1;
        println!("HARMONAIZE_SEED={seed}");
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn bytes(&mut self, most: u64) -> Vec<u8> {
        (0..self.next() % most).map(|_| (self.next() >> 24) as u8).collect()
    }
}

#[test]
fn random_bytes_from_unauthenticated_peers() {
    let mut random = Random::seeded();
    let mut scene = Scene::new(Config { max_incoming: 8, ..config() });
    let mut streams = Vec::new();
    for round in 0..200 {
        let mut stream = TcpStream::connect(scene.b.local_address()).unwrap();
        let mut bytes = random.bytes(300);
        if round % 3 == 0 {
            // A beginning that is right, and then nonsense.
            let mut good = hello(1, (random.next() % 4) as u8 + 198, 0, 1).to_vec();
            good.truncate(random.next() as usize % 65);
            bytes.splice(0..0, good);
        }
        // The endpoint may have cut it off already.
        let _ = stream.write_all(&bytes);
        if random.next().is_multiple_of(2) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        streams.push(stream);
        scene.turn();
        if round % 20 == 0 {
            scene.still_works();
        }
    }
    scene.still_works();
    assert!(scene.logs.iter().flatten().all(|(link, _)| scene.good.contains(link)));
}

#[test]
fn random_bytes_from_an_authenticated_peer() {
    let mut random = Random::seeded();
    let mut scene = Scene::new(config());
    for name in 0..60 {
        let (mut stream, link) = scene.joined(name);
        let mut bytes = Vec::new();
        for _ in 0..random.next() % 4 {
            bytes.extend_from_slice(&frame(1, 4, 0, 0, 0));
            bytes.extend_from_slice(b"good");
        }
        if random.next().is_multiple_of(2) {
            bytes.extend_from_slice(&frame(2, 2, 3, random.next() as u32, 900));
            bytes.extend_from_slice(&random.bytes(950));
        }
        bytes.extend_from_slice(&random.bytes(2000));
        stream.write_all(&bytes).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let reason = scene.down(link);
        assert!(matches!(reason, DownReason::Protocol(_) | DownReason::Closed), "{reason:?}");
        scene.still_works();
    }
}

fn frame(kind: u8, header: u16, ring: u16, sequence: u32, payload: u32) -> [u8; 16] {
    let mut frame = [0; 16];
    frame[..2].copy_from_slice(&0x7A48_u16.to_le_bytes());
    frame[2] = kind;
    frame[4..6].copy_from_slice(&header.to_le_bytes());
    frame[6..8].copy_from_slice(&ring.to_le_bytes());
    frame[8..12].copy_from_slice(&sequence.to_le_bytes());
    frame[12..].copy_from_slice(&payload.to_le_bytes());
    frame
}

#[test]
fn breaches_of_the_frame_format() {
    let mut scene = Scene::new(config());
    let bad = [
        ("magic", [0; 16]),
        ("kind", frame(9, 0, 0, 0, 0)),
        ("header too long", frame(1, 513, 0, 0, 0)),
        ("payload of a bare frame", frame(1, 0, 0, 0, 1)),
        ("heartbeat with a header", frame(3, 1, 0, 0, 0)),
        ("unknown ring", frame(2, 0, 4, 0, 1)),
        ("one byte too many", frame(2, 0, 3, 0, 1001)),
        ("all too many", frame(2, 512, 3, u32::MAX, u32::MAX)),
    ];
    for (name, (what, bytes)) in (0..).zip(bad) {
        let (mut stream, link) = scene.joined(name);
        stream.write_all(&bytes).unwrap();
        let reason = scene.down(link);
        assert!(matches!(reason, DownReason::Protocol(_)), "{what}: {reason:?}");
        scene.still_works();
    }
}

#[test]
fn a_peer_of_another_version_is_told() {
    let mut scene = Scene::new(config());
    let to = scene.b.local_address();
    let (_, reply) = crate::raw::ask(to, &hello(2, 1, 0, 1), || scene.turn()).unwrap();
    assert_eq!(reply[..8], *b"HZlinkA\n");
    assert_eq!(reply[8..12], [1, 0, 1, 0], "our version, and that theirs is refused");
}

#[test]
fn an_acceptor_of_another_version_is_reported() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut a = TcpTransport::bind(config()).unwrap();
    let link = a.open(introduction(1, listener.local_addr().unwrap(), true)).unwrap();
    let mut log = Log::new();
    turn(&mut a, &mut log);
    let answer = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut hello = [0; 64];
        stream.read_exact(&mut hello).unwrap();
        let mut reply = [0; 80];
        reply[..8].copy_from_slice(b"HZlinkA\n");
        (reply[8], reply[10]) = (7, 1);
        stream.write_all(&reply).unwrap();
        stream
    });
    assert!(drive(&mut [(&mut a, &mut log)], &|logs| !logs[0].is_empty()));
    let refused = LinkRefusal::Version { theirs: 7, ours: 1 };
    assert_eq!(log, [(link, Seen::Down(DownReason::Refused(refused)))]);
    answer.join().unwrap();
}

#[test]
fn a_liar_does_not_keep_the_right_peer_out() {
    let mut scene = Scene::new(config());
    let link = scene.b.open(introduction(1, scene.a.local_address(), false)).unwrap();
    let (to, words) = (scene.b.local_address(), hello(1, 1, 0, 1));
    let (mut liar, reply) = crate::raw::ask(to, &words, || scene.turn()).unwrap();
    let mut wrong = SECRET;
    wrong[0] ^= 1;
    liar.write_all(&crate::raw::proof(&wrong, &words, &reply)).unwrap();
    let mut welcome = [0; 8];
    crate::raw::read_exactly(&mut liar, &mut welcome, &mut || scene.turn()).unwrap();
    assert_eq!(welcome, [3, 0, 0, 0, 0, 0, 0, 0], "refused: wrong secret");
    // What an eavesdropper saw does not help either: the nonce is another.
    let proof = crate::raw::proof(&SECRET, &words, &reply);
    let (mut replayer, _) = crate::raw::ask(to, &words, || scene.turn()).unwrap();
    replayer.write_all(&proof).unwrap();
    crate::raw::read_exactly(&mut replayer, &mut welcome, &mut || scene.turn()).unwrap();
    assert_eq!(welcome[0], 3);
    let at_a = scene.a.open(introduction(1, to, true)).unwrap();
    scene.until(|logs| logs[0].contains(&(at_a, Seen::Up)) && logs[1].contains(&(link, Seen::Up)));
}

#[test]
fn silent_strangers_are_cut_off_and_keep_nobody_out() {
    let mut scene = Scene::new(Config { max_incoming: 4, ..hasty() });
    let to = scene.b.local_address();
    let strangers: Vec<TcpStream> = (0..30).map(|_| TcpStream::connect(to).unwrap()).collect();
    let at_a = scene.a.open(introduction(1, to, true)).unwrap();
    let at_b = scene.b.open(introduction(1, scene.a.local_address(), false)).unwrap();
    scene.until(|logs| logs[0].contains(&(at_a, Seen::Up)) && logs[1].contains(&(at_b, Seen::Up)));
    for mut stranger in strangers {
        let ended = crate::raw::read_exactly(&mut stranger, &mut [0], &mut || scene.turn());
        assert_ne!(ended.unwrap_err().kind(), std::io::ErrorKind::TimedOut, "still connected");
    }
}

/// The data loop has no turn while strangers come, and none before the right peer has its reply. Did it take them in, they would wait
/// for its turns, and operations for them; and so many would put the right peer out.
#[test]
fn a_flood_from_an_address_not_introduced_puts_nobody_out() {
    const FLOOD: u64 = 200;
    let config = Config { max_incoming: 4, ..config() };
    let acceptor = Acceptor::bind(&config).unwrap();
    let to = acceptor.local_address();
    let mut a = TcpTransport::bind(config.clone()).unwrap();
    let mut b = TcpTransport::accepting(&acceptor, config).unwrap();
    let at_b = b.open(introduction(1, a.local_address(), false)).unwrap();
    let mut logs = [Log::new(), Log::new()];
    // The right peer is half way through its first word when the flood comes.
    let words = hello(1, 1, 0, 1);
    let mut early = TcpStream::connect(to).unwrap();
    early.write_all(&words[..30]).unwrap();
    for _ in 0..FLOOD {
        let mut stranger = crate::raw::connect_from([127, 0, 0, 2], to);
        let ended = crate::raw::read_exactly(&mut stranger, &mut [0], &mut || {});
        assert_ne!(ended.unwrap_err().kind(), std::io::ErrorKind::TimedOut, "still connected");
    }
    early.write_all(&words[30..]).unwrap();
    let mut reply = [0; 80];
    crate::raw::read_exactly(&mut early, &mut reply, &mut || {}).unwrap();
    assert_eq!(reply[8..12], [1, 0, 0, 0], "our version, and accepted");
    let last = Some(Ipv4Addr::new(127, 0, 0, 2).into());
    assert_eq!(acceptor.rejected(), Rejected { count: FLOOD, last });
    let at_a = a.open(introduction(1, to, true)).unwrap();
    let [log_a, log_b] = &mut logs;
    let up = |logs: &[&Log]| logs[0].contains(&(at_a, Seen::Up)) && logs[1].contains(&(at_b, Seen::Up));
    assert!(drive(&mut [(&mut a, log_a), (&mut b, log_b)], &up), "{logs:?}");
}

/// Who has not been introduced is reset, and the network may lose that one packet: nobody sends it again.
#[test]
fn who_does_not_hear_that_it_was_reset_dials_again() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    listener.set_nonblocking(true).unwrap();
    let (mut end, mut log) = (TcpTransport::bind(config()).unwrap(), Log::new());
    end.open(introduction(1, listener.local_addr().unwrap(), true)).unwrap();
    let mut dialled = |end: &mut TcpTransport| {
        let deadline = Instant::now() + PATIENCE;
        let mut stream = loop {
            turn(end, &mut log);
            match listener.accept() {
                Ok((stream, _)) => break stream,
                Err(_) => assert!(Instant::now() < deadline, "nobody comes: {log:?}"),
            }
        };
        crate::raw::read_exactly(&mut stream, &mut [0; 64], &mut || _ = turn(end, &mut log)).unwrap();
        stream
    };
    let stream = dialled(&mut end);
    let (on, size) = (1_i32, size_of::<i32>() as libc::socklen_t);
    // SAFETY: the descriptor is open, and the value is as long as said.
    let silenced = unsafe {
        let value = (&raw const on).cast();
        libc::setsockopt(stream.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_REPAIR, value, size)
    };
    if silenced != 0 {
        harmonaize_testkit::strict::skip_test(
            "only who may administer the network ends a connection silently",
        );
        return;
    }
    drop(stream);
    dialled(&mut end);
}

#[test]
fn an_unknown_name_waits_and_is_then_refused() {
    let mut scene = Scene::new(hasty());
    let to = scene.b.local_address();
    let (_, reply) = crate::raw::ask(to, &hello(1, 77, 0, 1), || scene.turn()).unwrap();
    assert_eq!(reply[8..12], [1, 0, 2, 0], "our version, unknown name");
}

#[test]
fn a_silent_peer_is_noticed_and_an_idle_one_is_not() {
    let timeout = Duration::from_secs(1);
    let mut scene = Scene::new(Config { peer_timeout: timeout, ..config() });
    // Its kernel answers, it does not.
    let (_stream, link) = scene.joined(1);
    let reason = scene.down(link);
    assert!(matches!(reason, DownReason::Network(_)), "{reason:?}");
    assert!(4 * timeout < PATIENCE);
    scene.turn_for(4 * timeout);
    scene.still_works();
}

#[test]
fn own_absence_is_not_the_peers_silence() {
    let timeout = Duration::from_millis(100);
    let mut scene = Scene::new(Config { peer_timeout: timeout, ..config() });
    let end = Instant::now() + 4 * timeout;
    while Instant::now() < end {
        std::hint::spin_loop();
    }
    scene.still_works();
    assert!(!scene.logs.iter().flatten().any(|(_, seen)| matches!(seen, Seen::Down(_))), "{:?}", scene.logs);
}

/// The peer's thread is held up, with nothing to say and in the middle of a frame.
#[test]
fn a_peer_whose_loop_is_held_up_is_not_gone() {
    let timeout = Duration::from_millis(500);
    for protection in [LinkProtection::None, LinkProtection::Authenticated, LinkProtection::Encrypted] {
        stall(Scene::new(Config { peer_timeout: timeout, protection, ..config() }), timeout);
    }
}

fn stall(mut scene: Scene, timeout: Duration) {
    for in_a_frame in [false, true] {
        if in_a_frame {
            let bytes = 64 << 20;
            let [ours, theirs] = [(); 2].map(|()| Memory::private(bytes).unwrap());
            let whole = |memory| Span::new(memory, 0, bytes as u64).unwrap();
            let ring = Ring { memory: whole(&theirs), slot_bytes: bytes as u32, slots: 1 };
            scene.b.attach_ring(scene.good[1], 0, ring).unwrap();
            let payload = Some((Landing { ring: 0, sequence: 0 }, whole(&ours), Tag(1)));
            scene.a.send(scene.good[0], 0, b"large", payload).unwrap();
            turn(&mut scene.a, &mut scene.logs[0]);
        }
        let end = Instant::now() + 4 * timeout;
        while Instant::now() < end {
            if turn(&mut scene.b, &mut scene.logs[1]) == 0 {
                std::thread::yield_now();
            }
        }
        let down = scene.logs[1].iter().any(|(_, seen)| matches!(seen, Seen::Down(_)));
        assert!(!down, "in a frame: {in_a_frame}; {:?}", scene.logs[1]);
    }
    let link = scene.good[1];
    scene.until(|logs| logs[1].contains(&(link, Seen::Frame(b"large".to_vec()))));
    scene.still_works();
}

#[test]
fn a_path_that_waited_for_another_was_not_silent() {
    let timeout = Duration::from_millis(600);
    let mut scene = Scene::new(Config { peer_timeout: timeout, ..config() });
    let (to, from) = (scene.b.local_address(), scene.a.local_address());
    let both = Introduction { source_ports: vec![0, 0], ..introduction(1, from, false) };
    let link = scene.b.open(both).unwrap();
    let _first = crate::raw::join(to, 1, (0, 2), || scene.turn()).unwrap();
    scene.turn_for(2 * timeout);
    let _second = crate::raw::join(to, 1, (1, 2), || scene.turn()).unwrap();
    let up = Instant::now();
    scene.until(|logs| logs[1].contains(&(link, Seen::Up)));
    scene.turn_for(timeout / 3);
    let late = up.elapsed() > timeout / 2;
    let down = scene.logs[1].iter().any(|(of, seen)| *of == link && matches!(seen, Seen::Down(_)));
    assert!(late || !down, "{:?}", scene.logs[1]);
}
