//! Processes that break the rules of the agent's socket, beside one that keeps them.

use crate::stub::{LIMIT, Stub};
use harmonaize_abi::session::{
    Access, Answer, Budget, Hello, MAGIC, MessageError, RefusalKind, Refused, Request, Welcome, decode,
    decode_first, encode, encode_first,
};
use harmonaize_abi::{ABI_VERSION, Rank};
use harmonaize_agent::counters::{Counted, Counters};
use harmonaize_agent::session::{BindError, SessionServer, TenantRules};
use harmonaize_client::{
    AttachOptions, Client, Constraints, Dtype, Error, EventCursor, Hints, Knobs, ReduceOp,
};
use harmonaize_shm::{Memory, receive_with_descriptors};
use rustix::net::RecvFlags;
use std::cell::Cell;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

fn connect(stub: &Stub) -> UnixStream {
    let stream = UnixStream::connect(&stub.path).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
}

/// What the agent says to a new connection that said `bytes`; `None`: it closed the connection without a word.
fn answer(mut stream: &UnixStream) -> Option<Result<Result<Welcome, Refused>, MessageError>> {
    let mut said = Vec::new();
    let _ = stream.read_to_end(&mut said);
    (!said.is_empty()).then(|| decode_first(&said[4..]))
}

/// What the agent answers to a request.
pub(crate) fn next_answer(mut stream: &UnixStream) -> Answer {
    let mut prefix = [0; 4];
    stream.read_exact(&mut prefix).unwrap();
    let mut message = vec![0; u32::from_le_bytes(prefix) as usize];
    stream.read_exact(&mut message).unwrap();
    decode(&message).unwrap()
}

/// The agent still serves this one.
pub(crate) fn works(client: &Client) {
    let comm = client.join("good", Rank(0), 1, LIMIT).unwrap();
    let tensor = client.tensor(Dtype::U64, 100).unwrap();
    comm.all_reduce_in_place(&tensor, ReduceOp::Sum).unwrap().wait(LIMIT).unwrap();
}

pub(crate) fn good(stub: &Stub) -> Client {
    Client::attach(&stub.path, AttachOptions { arena_bytes: 1 << 20, ..Default::default() }).unwrap()
}

/// A handshake by hand.
pub(crate) fn attach(stub: &Stub, access: Access) -> (UnixStream, Vec<OwnedFd>) {
    let mut stream = connect(stub);
    stream.write_all(&encode_first(&Hello { access, arena_bytes: 1 << 16, entries: 4 }).unwrap()).unwrap();
    let mut bytes = [0; 256];
    let (received, descriptors) =
        receive_with_descriptors(stream.as_fd(), &mut bytes, RecvFlags::empty()).unwrap();
    decode_first::<Result<Welcome, Refused>>(&bytes[4..received]).unwrap().unwrap();
    assert_eq!(descriptors.len(), access.descriptors());
    (stream, descriptors)
}

#[test]
fn bad_first_messages_are_refused() {
    let stub = Stub::start();
    let client = good(&stub);
    let hello = encode_first(&Hello { access: Access::Mapped, arena_bytes: 4096, entries: 4 }).unwrap();
    let framed = |body: &[u8]| [&(body.len() as u32).to_le_bytes(), body].concat();
    let newer = framed(&[MAGIC.as_slice(), &(ABI_VERSION + 1).to_le_bytes(), b"whatever"].concat());
    let cases = [
        (newer, RefusalKind::Version),
        (framed(b"GET / HTTP/1.1\r\n"), RefusalKind::Malformed),
        (framed(&hello[4..hello.len() - 1]), RefusalKind::Malformed),
        (framed(&[0; 1025]), RefusalKind::Malformed),
        (u32::MAX.to_le_bytes().to_vec(), RefusalKind::Malformed),
        (vec![0; 4], RefusalKind::Malformed),
    ];
    for (bytes, kind) in cases {
        let mut stream = connect(&stub);
        stream.write_all(&bytes).unwrap();
        let said = answer(&stream).unwrap().unwrap().unwrap_err();
        assert_eq!(said.kind, kind, "{}", said.text);
    }
    let mut cut = connect(&stub);
    cut.write_all(&hello[..7]).unwrap();
    drop(cut);
    works(&client);
}

#[test]
fn a_silent_connection_is_ended() {
    let stub = Stub::with(|rules| rules.handshake = Duration::from_millis(20));
    let said = answer(&connect(&stub)).unwrap().unwrap().unwrap_err();
    assert_eq!(said.kind, RefusalKind::Slow);
}

#[test]
fn connections_are_bounded() {
    let stub = Stub::with(|rules| rules.quota.attachments = 1);
    let open: Vec<_> = (0..17).map(|_| connect(&stub)).collect();
    let said = answer(&connect(&stub)).unwrap().unwrap().unwrap_err();
    assert_eq!(said.kind, RefusalKind::Attachments);
    drop(open);
}

#[test]
fn nonsense_after_the_handshake_ends_the_attachment_alone() {
    let stub = Stub::start();
    let client = good(&stub);
    for nonsense in [vec![0xff; 64], [&5u32.to_le_bytes()[..], &[0xee; 5]].concat()] {
        let (mut stream, _descriptors) = attach(&stub, Access::Mapped);
        stream.write_all(&nonsense).unwrap();
        assert!(answer(&stream).is_none());
    }
    stub.knobs.expect("detached 2");
    stub.knobs.expect("detached 3");
    works(&client);
}

#[test]
fn requests_about_strangers_communicators_go_nowhere() {
    let stub = Stub::start();
    let (mut stream, _descriptors) = attach(&stub, Access::Mapped);
    let communicator = 2;
    for request in [
        Request::Leave { id: 1, communicator },
        Request::Detail { id: 2, communicator },
        Request::Abort { id: 3, communicator },
    ] {
        stream.write_all(&encode(&request).unwrap()).unwrap();
        next_answer(&stream);
    }
    drop(stream);
    stub.knobs.expect("detached");
    let log = stub.knobs.log.lock().unwrap();
    assert!(!log.iter().any(|line| line.contains("left") || line.contains("aborted")), "{log:?}");
}

/// A process aborts a communicator and exits at once. The agent cannot answer what it asked before, and aborts all the
/// same.
#[test]
fn what_was_asked_before_the_end_is_done() {
    let stub = Stub::start();
    let (mut stream, _descriptors) = attach(&stub, Access::Mapped);
    let join = Request::Join {
        id: 1,
        job: String::new(),
        name: "job".into(),
        rank: Rank(0),
        ranks: 1,
        timeout_ns: u64::MAX,
        budget: Budget::Exact,
    };
    stream.write_all(&encode(&join).unwrap()).unwrap();
    let Answer::Joined { communicator, .. } = next_answer(&stream) else { panic!("not joined") };
    stream.shutdown(Shutdown::Read).unwrap();
    // More than the agent keeps unsent.
    let mut requests = encode(&Request::Leave { id: 2, communicator: u32::MAX }).unwrap().repeat(200);
    requests.extend(encode(&Request::Abort { id: 3, communicator }).unwrap());
    stream.write_all(&requests).unwrap();
    stub.knobs.expect("aborted");
    stub.knobs.expect("detached");
}

/// Answers that nobody reads hold up the connection that they are for, and nobody else.
#[test]
fn who_asks_and_never_reads_is_held_up_alone() {
    let stub = Stub::start();
    let client = good(&stub);
    let (mut stream, _descriptors) = attach(&stub, Access::Mapped);
    stream.set_nonblocking(true).unwrap();
    let requests = encode(&Request::Detail { id: 1, communicator: 2 }).unwrap().repeat(1000);
    let (mut written, mut held_up) = (0, 0);
    while held_up < 20 {
        match stream.write(&requests[written % requests.len()..]) {
            Ok(bytes) => (written, held_up) = (written + bytes, 0),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                held_up += 1;
                works(&client);
            }
            Err(error) => panic!("after {written} bytes: {error}"),
        }
        assert!(written < 64 << 20, "the agent takes requests whose answers nobody reads");
    }
    drop(stream);
    stub.knobs.expect("detached 2");
    works(&client);
}

/// Requests without end use up the processor time of the tenant's sessions, which then rest. Other tenants are served.
#[test]
fn a_session_that_spins_costs_its_own_tenant_turns() {
    let stub = Stub::start();
    let mut spins = crate::stub::rules(stub.path.clone());
    spins.quota.session_percent = 1;
    let place = stub.path.with_file_name("other.sock");
    let mut other = crate::stub::rules(place.clone());
    (other.tenant, other.secret) = ("other".into(), None);
    stub.apply(vec![spins, other]).unwrap();
    let client = Client::attach(&place, stub.options(Access::Mapped)).unwrap();
    let (mut stream, _descriptors) = attach(&stub, Access::Mapped);
    let request = encode(&Request::Detail { id: 1, communicator: 2 }).unwrap();
    while stub.counters.get(Counted::SessionPaused) == 0 {
        stream.write_all(&request).unwrap();
        next_answer(&stream);
    }
    works(&client);
    // A request of the one that rests is answered in its time.
    stream.write_all(&request).unwrap();
    next_answer(&stream);
}

#[test]
fn a_corrupt_ring_ends_its_attachment_alone() {
    let stub = Stub::start();
    let client = good(&stub);
    let (_stream, descriptors) = attach(&stub, Access::Mapped);
    let [_arena, rings, doorbell] = <[OwnedFd; 3]>::try_from(descriptors).unwrap();
    let bytes = rustix::fs::fstat(&rings).unwrap().st_size as u64;
    let rings = Memory::map(rings, bytes).unwrap();
    // The submissions' tail, which the process publishes.
    rings.write(128, &77u64.to_le_bytes()).unwrap();
    rustix::net::send(&doorbell, &[1; 100], rustix::net::SendFlags::NOSIGNAL).unwrap();
    stub.knobs.expect("broken 2: ring of 4 entries is corrupt: own index 0, the other side's 77");
    works(&client);
}

/// Descriptors of the wildest kind are answered or end the attachment, and a doorbell that nobody answers blocks nobody.
#[test]
fn noise_in_shared_memory_hurts_nobody() {
    let stub = Stub::start();
    let client = good(&stub);
    for seed in 0u64..20 {
        let (_stream, descriptors) = attach(&stub, Access::Mapped);
        let [_arena, rings, doorbell] = <[OwnedFd; 3]>::try_from(descriptors).unwrap();
        let bytes = rustix::fs::fstat(&rings).unwrap().st_size as u64;
        let rings = Memory::map(rings, bytes).unwrap();
        rustix::fs::fcntl_setfl(&doorbell, rustix::fs::OFlags::empty()).unwrap();
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        for _ in 0..200 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let place = (state >> 8) % (bytes / 8) * 8;
            let value = if state & 1 == 0 { state } else { state % 5 };
            rings.write(place, &value.to_le_bytes()).unwrap();
        }
        let _ = rustix::net::send(&doorbell, &[1; 4096], rustix::net::SendFlags::DONTWAIT);
        works(&client);
    }
}

#[test]
fn a_remote_process_that_speaks_nonsense_or_dies_is_dropped_alone() {
    let stub = Stub::start();
    let client = good(&stub);
    let (_stream, descriptors) = attach(&stub, Access::Remote);
    let [socket] = <[OwnedFd; 1]>::try_from(descriptors).unwrap();
    rustix::net::send(&socket, &[0xff; 4096], rustix::net::SendFlags::NOSIGNAL).unwrap();
    stub.knobs.expect("broken 2: protocol error");
    let (stream, descriptors) = attach(&stub, Access::Remote);
    drop((stream, descriptors));
    stub.knobs.expect("detached 3");
    works(&client);
}

fn bind(tenant: TenantRules) -> Result<SessionServer, BindError> {
    let mut server = SessionServer::bind(None, tokio::sync::mpsc::channel(1).0, Counters::default())?;
    server.apply(&[tenant])?;
    Ok(server)
}

/// A process that waits for the file and connects at once is let in, never refused. The folder then has nothing but the
/// sockets.
#[test]
fn a_socket_that_is_there_takes_connections() {
    const SOCKETS: usize = 300;
    let folder = tempfile::tempdir().unwrap();
    let path = |number: usize| folder.path().join(format!("{number}.sock"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _context = runtime.enter();
    std::thread::scope(|scope| {
        let tenant = scope.spawn(|| {
            let deadline = std::time::Instant::now() + LIMIT;
            for number in 0..SOCKETS {
                while let Err(error) = UnixStream::connect(path(number)) {
                    assert_eq!(error.kind(), std::io::ErrorKind::NotFound, "socket {number}");
                    assert!(std::time::Instant::now() < deadline, "no socket {number}");
                }
            }
        });
        let bound = (0..SOCKETS).map(|number| bind(crate::stub::rules(path(number))).unwrap());
        let servers: Vec<SessionServer> = bound.collect();
        let connected = tenant.join();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), SOCKETS);
        drop(servers);
        assert!(connected.is_ok());
    });
}

#[test]
fn a_tenants_socket_is_replaced_only_if_stale() {
    let stub = Stub::start();
    let file = std::fs::metadata(&stub.path).unwrap();
    assert_eq!(file.permissions().mode() & 0o777, 0o600);
    assert_eq!(file.uid(), rustix::process::getuid().as_raw());

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _context = runtime.enter();
    let error = bind(crate::stub::rules(stub.path.clone())).unwrap_err();
    assert!(matches!(error, BindError::Live { .. }), "{error}");

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("stale.sock");
    drop(UnixListener::bind(&path).unwrap());
    let server = bind(crate::stub::rules(path.clone())).unwrap();
    drop(server);
    assert!(!path.exists());

    std::fs::write(&path, "mine").unwrap();
    let error = bind(crate::stub::rules(path.clone())).unwrap_err();
    assert!(matches!(error, BindError::NotASocket { .. }), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), b"mine");

    let error = bind(crate::stub::rules(folder.path().join("x".repeat(200)))).unwrap_err();
    assert!(matches!(error, BindError::System { .. }), "{error}");
    let mut nobody = crate::stub::rules(path);
    nobody.socket.as_mut().unwrap().uids.clear();
    assert!(matches!(bind(nobody), Err(BindError::NoUser { .. })));
}

/// One process asks the provider as fast as it can. It gets an error that says so, its next questions reach nobody, whether it attaches
/// anew or not, and no other tenant is held up.
#[test]
fn floods_of_questions_stop_at_the_agent() {
    let stub = Stub::setup(|setup| {
        let mut other = setup.tenants[0].clone();
        (other.tenant, other.secret) = ("other".to_owned(), None);
        other.socket.as_mut().unwrap().path.set_file_name("other.sock");
        setup.tenants.push(other);
    });
    let flooder = good(&stub);
    let options = AttachOptions { arena_bytes: 1 << 20, ..Default::default() };
    let client = Client::attach(stub.path.with_file_name("other.sock"), options).unwrap();
    let knobs = Knobs { accumulate: (1, 2), checkpoint: None };
    let others = Cell::new(1);
    let floods: [&dyn Fn() -> Result<(), Error>; 4] = [
        // Of others each time: the client asks once in a while for those that it has asked for.
        &|| {
            let most = others.replace(others.get() % 60_000 + 1);
            flooder.iteration("job", &Knobs { accumulate: (1, most), checkpoint: None }).map(drop)
        },
        &|| flooder.events(Some(EventCursor { feed: 9, next: 4 })).read(Duration::ZERO).map(drop),
        &|| flooder.propose("job", &Constraints::new().weight(2)).map(drop),
        &|| flooder.hint("job", &Hints::new().period(Duration::from_secs(1))),
    ];
    let mut asked = 0;
    for flood in floods {
        let again = loop {
            match flood() {
                Ok(()) => asked += 1,
                Err(Error::TooOften { retry_after: again }) => break again,
                Err(error) => panic!("{error}"),
            }
            assert!(asked < 100_000, "nothing stops it");
        };
        assert!(again > Duration::ZERO && again <= Duration::from_millis(10), "{again:?}");
        client.iteration("job", &knobs).unwrap();
        works(&client);
        std::thread::sleep(again);
        flood().unwrap();
    }
    assert!(asked >= 600, "a whole feed of events can be read at once: {asked}");
    drop(flooder);
    let anew = good(&stub);
    let read = || anew.events(Some(EventCursor { feed: 9, next: 4 })).read(Duration::ZERO);
    let taken = (0..600).take_while(|_| read().is_ok()).count();
    assert!(taken < 300, "attaching anew gains {taken}");
}
