//! Processes that come over TCP: those that prove whose they are, and all others.

use crate::hostile::{good, works};
use crate::stub::{LIMIT, Stub, over_tcp, rules, secret};
use harmonaize_abi::ABI_VERSION;
use harmonaize_abi::session::{
    Access, AuthConfirmation, AuthRequest, Challenge, Hello, MAGIC, MessageError, RefusalKind, Refused,
    Response, Welcome, decode, decode_first, encode, encode_first,
};
use harmonaize_client::{AgentAddress, Client, Error, ProtocolError};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

/// An address of this machine that is not the tenant's.
const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

pub(crate) fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
}

fn connect_from(source: Ipv4Addr, address: SocketAddr) -> TcpStream {
    let socket =
        rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .unwrap();
    rustix::net::bind(&socket, &SocketAddr::from((source, 0))).unwrap();
    rustix::net::connect(&socket, &address).unwrap();
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
}

/// A message without its length; `None`: the connection ended.
pub(crate) fn message(mut stream: impl Read) -> Option<Vec<u8>> {
    let mut prefix = [0; 4];
    stream.read_exact(&mut prefix).ok()?;
    let mut message = vec![0; u32::from_le_bytes(prefix) as usize];
    stream.read_exact(&mut message).ok()?;
    Some(message)
}

fn authenticate(mut stream: &TcpStream, tenant: &str) -> (AuthRequest, Challenge) {
    let knock = AuthRequest { tenant: tenant.into(), nonce: [7; 32] };
    stream.write_all(&encode_first(&knock).unwrap()).unwrap();
    let challenge = decode_first(&message(stream).unwrap()).unwrap();
    (knock, challenge)
}

fn respond(mut stream: &TcpStream, response: &Response) -> Result<AuthConfirmation, Refused> {
    stream.write_all(&encode(response).unwrap()).unwrap();
    decode(&message(stream).unwrap()).unwrap()
}

/// What one hears who comes from an address, as a tenant, with a secret.
fn introduced(stream: &TcpStream, tenant: &str, byte: u8) -> Result<(), Refused> {
    let (knock, challenge) = authenticate(stream, tenant);
    let proven = respond(stream, &secret(byte).response(&knock, &challenge))?;
    assert!(secret(byte).verify_agent(&knock, &challenge, &proven));
    Ok(())
}

#[test]
fn a_process_that_proves_itself_attaches_and_works() {
    let stub = Stub::start();
    let client = Client::attach(over_tcp(stub.network), stub.options(Access::Rdma)).unwrap();
    works(&client);
    drop(client);
    stub.knobs.expect("detached 1");
}

#[test]
fn whoever_is_not_let_in_hears_the_same() {
    let stub = Stub::setup(|setup| {
        let other = setup.tenants[0].socket.as_ref().unwrap().path.with_extension("other");
        let mut local = rules(other.clone());
        (local.tenant, local.secret) = ("local".into(), None);
        let mut distant = rules(other.with_extension("distant"));
        distant.tenant = "distant".into();
        distant.addresses = vec![IpAddr::V4(ELSEWHERE)];
        distant.secret = Some(secret(b'd'));
        setup.tenants.extend([local, distant]);
    });
    let here = || connect(stub.network);
    introduced(&here(), "acme", b'a').unwrap();
    introduced(&connect_from(ELSEWHERE, stub.network), "distant", b'd').unwrap();
    let refused: Vec<Refused> = [
        (here(), "nobody", b'a'),
        (here(), "", b'a'),
        (here(), "acme", b'b'),
        (here(), "local", b'a'),
        (here(), "distant", b'd'),
        (connect_from(ELSEWHERE, stub.network), "acme", b'a'),
        (connect_from(Ipv4Addr::new(127, 0, 0, 3), stub.network), "acme", b'a'),
    ]
    .into_iter()
    .map(|(mut stream, tenant, byte)| {
        let refused = introduced(&stream, tenant, byte).unwrap_err();
        let mut more = Vec::new();
        stream.read_to_end(&mut more).unwrap();
        assert_eq!(more, [0_u8; 0]);
        refused
    })
    .collect();
    assert_eq!(refused[0].kind, RefusalKind::User);
    assert!(refused.iter().all(|other| *other == refused[0]), "{refused:?}");
}

#[test]
fn a_new_secret_ends_nothing_and_takes_the_old_ones_place() {
    let stub = Stub::start();
    let client = Client::attach(over_tcp(stub.network), stub.options(Access::Rdma)).unwrap();
    works(&client);
    let mut renewed = rules(stub.path.clone());
    renewed.secret = Some(secret(b'b'));
    stub.apply(vec![renewed]).unwrap();
    works(&client);
    introduced(&connect(stub.network), "acme", b'a').unwrap_err();
    introduced(&connect(stub.network), "acme", b'b').unwrap();
    works(&client);
}

#[test]
fn a_response_is_good_once() {
    let stub = Stub::start();
    let stream = connect(stub.network);
    let (first, challenge) = authenticate(&stream, "acme");
    let response = secret(b'a').response(&first, &challenge);
    respond(&stream, &response).unwrap();
    let again = connect(stub.network);
    let (_, other) = authenticate(&again, "acme");
    assert_ne!(challenge, other);
    assert_eq!(respond(&again, &response).unwrap_err().kind, RefusalKind::User);
}

#[test]
fn nonsense_and_other_versions_are_refused() {
    let stub = Stub::start();
    let framed = |body: &[u8]| [&(body.len() as u32).to_le_bytes(), body].concat();
    let newer = framed(&[MAGIC.as_slice(), &(ABI_VERSION + 1).to_le_bytes(), b"whatever"].concat());
    let hello = encode_first(&Hello { access: Access::Rdma, arena_bytes: 4096, entries: 4 }).unwrap();
    let huge = AuthRequest { tenant: "x".repeat(2000), nonce: [0; 32] };
    let cases = [
        (newer, RefusalKind::Version),
        (framed(b"GET / HTTP/1.1\r\n"), RefusalKind::Malformed),
        (hello, RefusalKind::Malformed),
        (encode_first(&huge).unwrap(), RefusalKind::Malformed),
        (vec![0; 4], RefusalKind::Malformed),
        ([vec![0xff; 4], vec![0; 1 << 20]].concat(), RefusalKind::Malformed),
    ];
    for (bytes, kind) in cases {
        let mut stream = connect(stub.network);
        // The agent may have had enough before all is sent.
        let _ = stream.write_all(&bytes);
        decode_first::<Challenge>(&message(&stream).unwrap()).unwrap();
        let said =
            decode::<Result<AuthConfirmation, Refused>>(&message(&stream).unwrap()).unwrap().unwrap_err();
        assert_eq!(said.kind, kind, "{}", said.text);
        assert_eq!(message(&stream), None);
    }
    let mut stream = connect(stub.network);
    authenticate(&stream, "acme");
    stream.write_all(&framed(&[1; 31])).unwrap();
    let said = decode::<Result<AuthConfirmation, Refused>>(&message(&stream).unwrap()).unwrap().unwrap_err();
    assert_eq!(said.kind, RefusalKind::Malformed);
    let mut cut = connect(stub.network);
    cut.write_all(&[40, 0]).unwrap();
    drop(cut);
    works(&Client::attach(over_tcp(stub.network), stub.options(Access::Rdma)).unwrap());
}

#[test]
fn the_slow_are_ended_wherever_they_are() {
    let stub = Stub::setup(|setup| {
        setup.rdma.handshake = Duration::from_millis(30);
        setup.tenants[0].handshake = Duration::from_millis(30);
    });
    let kind =
        |message: Vec<u8>| decode::<Result<AuthConfirmation, Refused>>(&message).unwrap().unwrap_err().kind;
    let silent = connect(stub.network);
    decode_first::<Challenge>(&message(&silent).unwrap()).unwrap();
    assert_eq!(kind(message(&silent).unwrap()), RefusalKind::Slow);
    let knocking = connect(stub.network);
    authenticate(&knocking, "acme");
    assert_eq!(kind(message(&knocking).unwrap()), RefusalKind::Slow);
    // Proved, and no hello.
    let proved = connect(stub.network);
    introduced(&proved, "acme", b'a').unwrap();
    let said = decode_first::<Result<Welcome, Refused>>(&message(&proved).unwrap()).unwrap().unwrap_err();
    assert_eq!(said.kind, RefusalKind::Slow);
}

#[test]
fn the_unproven_are_bounded_and_keep_nobody_out() {
    let stub = Stub::start();
    let many = |source: Ipv4Addr| -> Vec<TcpStream> {
        let mut open: Vec<_> = (0..17).map(|_| connect_from(source, stub.network)).collect();
        // Those that follow are let in as they come.
        open[1..].iter().for_each(|stream| drop(authenticate(stream, "acme")));
        let mut said = Vec::new();
        let _ = open[0].read_to_end(&mut said);
        assert_eq!(said, [0_u8; 0], "the oldest was to be closed without a word");
        open
    };
    let strangers = many(ELSEWHERE);
    let client = Client::attach(over_tcp(stub.network), stub.options(Access::Rdma)).unwrap();
    works(&client);
    // Processes of another tenant on the same address as this one's.
    let others = many(Ipv4Addr::LOCALHOST);
    let second = Client::attach(over_tcp(stub.network), stub.options(Access::Rdma)).unwrap();
    works(&second);
    drop((strangers, others));
    works(&client);
}

#[test]
fn over_tcp_nothing_is_mapped() {
    let stub = Stub::start();
    for access in [Access::Mapped, Access::Remote] {
        let error = Client::attach(over_tcp(stub.network), stub.options(access)).unwrap_err();
        assert!(matches!(error, Error::Refused { kind: RefusalKind::Access, .. }), "{error}");
    }
}

#[test]
fn a_tenants_quota_counts_socket_and_tcp_together() {
    let stub = Stub::with(|rules| {
        rules.quota.attachments = 2;
        rules.quota.arena_bytes = 3 << 20;
    });
    let refusal = |at: AgentAddress, arena_bytes| {
        let options = harmonaize_client::AttachOptions { arena_bytes, ..stub.options(Access::Rdma) };
        match Client::attach(at, options).unwrap_err() {
            Error::Refused { kind, .. } => kind,
            other => panic!("{other}"),
        }
    };
    let local = good(&stub);
    assert_eq!(refusal(over_tcp(stub.network), 3 << 20), RefusalKind::Arena);
    let distant = Client::attach(over_tcp(stub.network), stub.options(Access::Rdma)).unwrap();
    assert_eq!(refusal(over_tcp(stub.network), 1 << 20), RefusalKind::Attachments);
    assert_eq!(refusal((&stub.path).into(), 1 << 20), RefusalKind::Attachments);
    works(&local);
    works(&distant);
}

/// Someone in the agent's place.
fn impostor(answer: impl FnOnce(TcpStream) + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || answer(listener.accept().unwrap().0));
    address
}

#[test]
fn the_client_goes_on_with_nobody_but_the_providers_agent() {
    let stub = Stub::start();
    let attach = |address| Client::attach(over_tcp(address), stub.options(Access::Rdma)).unwrap_err();
    let guessing = impostor(|mut stream| {
        message(&stream).unwrap();
        stream.write_all(&encode_first(&Challenge { nonce: [1; 32] }).unwrap()).unwrap();
        message(&stream).unwrap();
        stream.write_all(&encode(&Ok::<_, Refused>(AuthConfirmation { proof: [2; 32] })).unwrap()).unwrap();
        assert_eq!(message(&stream), None);
    });
    assert!(matches!(attach(guessing), Error::Unauthenticated { .. }));
    let newer = impostor(|mut stream| {
        message(&stream).unwrap();
        let mut challenge = encode_first(&Challenge { nonce: [1; 32] }).unwrap();
        challenge[12] += 1;
        stream.write_all(&challenge).unwrap();
    });
    let error = attach(newer);
    let Error::Protocol(ProtocolError::Message(version @ MessageError::Version(_))) = error else {
        panic!("{error}")
    };
    let remedy = "; install the client library that belongs to this agent";
    assert_eq!(error.to_string(), format!("cannot talk to the agent: {version}{remedy}"));
    let silent = impostor(|stream| assert_eq!(message(&stream).map(|_| message(&stream)), Some(None)));
    let options =
        harmonaize_client::AttachOptions { timeout: Duration::from_millis(30), ..stub.options(Access::Rdma) };
    let error = Client::attach(over_tcp(silent), options).unwrap_err();
    assert!(matches!(&error, Error::Protocol(ProtocolError::Silent)), "{error}");
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    assert!(matches!(attach(closed), Error::Connect { .. }));
}
