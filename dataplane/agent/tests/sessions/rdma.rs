//! Attachments over RDMA: what devices are chosen, and what hostile offers, losses and broken devices cost whom.

use crate::hostile::{good, works};
use crate::network::message;
use crate::stub::{LIMIT, Stub, over_tcp, until};
use harmonaize_abi::session::{
    Access, Hello, Offer, PairEnd, RefusalKind, Refused, Registered, Welcome, decode, decode_first, encode,
    encode_first,
};
use harmonaize_abi::{ABI_VERSION, Rank, Region, Submission};
use harmonaize_client::{AttachOptions, Client, Error, RdmaOptions, VerbsError};
use harmonaize_shm::TenantEnd;
use harmonaize_verbs::attachment::{RdmaTenant, TenantOffer};
use harmonaize_verbs::fake::Fault;
use harmonaize_verbs::{Call, Function, Gid, PortOptions};
use rustix::io::Errno;
use std::io::Write;
use std::net::Ipv4Addr;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::time::Duration;

const ARENA: u64 = 1 << 16;

/// A handshake by hand as far as the agent's end.
fn welcomed(stub: &Stub) -> (UnixStream, PairEnd) {
    let mut stream = UnixStream::connect(&stub.path).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let hello = Hello { access: Access::Rdma, arena_bytes: ARENA, entries: 4 };
    stream.write_all(&encode_first(&hello).unwrap()).unwrap();
    let welcome = decode_first::<Result<Welcome, Refused>>(&message(&stream).unwrap()).unwrap().unwrap();
    assert_eq!(welcome.arena_bytes, ARENA);
    let end = decode(&message(&stream).unwrap()).unwrap();
    (stream, end)
}

fn function(stub: &Stub) -> Function {
    let wanted = PortOptions { device: Some("tenant".into()), ..PortOptions::default() };
    Function::open(&stub.fabric.devices(), &wanted, None).unwrap()
}

/// The agent's answer to an offer that was changed.
fn offered(
    stub: &Stub,
    change: impl FnOnce(Offer) -> Offer,
) -> (UnixStream, PairEnd, TenantOffer, Result<(), Refused>) {
    let (mut stream, end) = welcomed(stub);
    let ours = TenantOffer::new(&function(stub), ARENA, 4).unwrap();
    stream.write_all(&encode(&change(ours.offer())).unwrap()).unwrap();
    let answer = decode::<Result<(), Refused>>(&message(&stream).unwrap()).unwrap();
    (stream, end, ours, answer)
}

fn submit(end: &mut RdmaTenant, bytes: u64) {
    let region = Region { offset: 0, bytes };
    let submission = Submission {
        version: ABI_VERSION,
        count: bytes,
        input: region,
        output: region,
        ..Default::default()
    };
    end.submit(&submission).unwrap();
}

/// Attachments come back to a tenant that may have one.
fn room_again(stub: &Stub) -> Client {
    until(|| Client::attach(&stub.path, stub.options(Access::Rdma)))
}

#[test]
fn offers_that_are_nonsense_are_refused() {
    let stub = Stub::start();
    let client = good(&stub);
    type Change = fn(Offer) -> Offer;
    let cases: [(&str, Change); 7] = [
        ("queue pair", |o| Offer { end: PairEnd { queue_pair: 1 << 24, ..o.end }, ..o }),
        ("packet number", |o| Offer { end: PairEnd { psn: u32::MAX, ..o.end }, ..o }),
        ("MTU", |o| Offer { end: PairEnd { mtu: 1000, ..o.end }, ..o }),
        ("MTU", |o| Offer { end: PairEnd { mtu: 0, ..o.end }, ..o }),
        ("arena", |o| Offer { arena: Registered { address: u64::MAX - 5, ..o.arena }, ..o }),
        ("arena", |o| Offer { arena: Registered { address: 1u64.wrapping_sub(ARENA), ..o.arena }, ..o }),
        ("packet number", |o| Offer { end: PairEnd { psn: 1 << 24, ..o.end }, ..o }),
    ];
    for (what, change) in cases {
        let (stream, _, _, answer) = offered(&stub, change);
        let refused = answer.unwrap_err();
        assert_eq!(refused.kind, RefusalKind::Malformed, "{}", refused.text);
        assert!(refused.text.contains(what), "{}", refused.text);
        assert_eq!(message(&stream), None);
    }
    for bytes in [vec![5, 0, 0, 0, 1, 2, 3, 4, 5], vec![0, 0, 0, 0], vec![1, 1, 0, 0]] {
        let (mut stream, _) = welcomed(&stub);
        stream.write_all(&bytes).unwrap();
        let refused = decode::<Result<(), Refused>>(&message(&stream).unwrap()).unwrap().unwrap_err();
        assert_eq!(refused.kind, RefusalKind::Malformed, "{}", refused.text);
    }
    works(&client);
}

#[test]
fn a_process_that_stops_in_the_middle_costs_nothing() {
    let stub = Stub::with(|rules| {
        rules.quota.attachments = 1;
        rules.handshake = Duration::from_millis(100);
    });
    drop(welcomed(&stub));
    drop(room_again(&stub));
    let (stream, _) = until(|| {
        let mut probe = UnixStream::connect(&stub.path).unwrap();
        let hello = Hello { access: Access::Rdma, arena_bytes: ARENA, entries: 4 };
        probe.write_all(&encode_first(&hello).unwrap()).unwrap();
        let answer = decode_first::<Result<Welcome, Refused>>(&message(&probe).unwrap()).unwrap();
        answer.map(|welcome| (probe, welcome))
    });
    decode::<PairEnd>(&message(&stream).unwrap()).unwrap();
    let refused = decode::<Result<(), Refused>>(&message(&stream).unwrap()).unwrap().unwrap_err();
    assert_eq!((refused.kind, refused.text.as_str()), (RefusalKind::Slow, "no offer within 100ms"));
    works(&room_again(&stub));
}

#[test]
fn forged_keys_and_addresses_end_their_own_attachment() {
    let stub = Stub::start();
    let client = Client::attach(&stub.path, stub.options(Access::Rdma)).unwrap();
    works(&client);
    let cases: [fn(Offer) -> Offer; 4] = [
        |o| Offer { arena: Registered { rkey: o.arena.rkey ^ 0x5555, ..o.arena }, ..o },
        |o| Offer { arena: Registered { address: 4096, ..o.arena }, ..o },
        // Its own mailbox's key for the arena.
        |o| Offer { arena: Registered { rkey: o.end.mailbox.rkey, ..o.arena }, ..o },
        // A hole where the mailbox should be: the completion cannot be written.
        |o| Offer { end: PairEnd { mailbox: Registered { address: 64, rkey: 0 }, ..o.end }, ..o },
    ];
    for (index, change) in cases.into_iter().enumerate() {
        let (stream, end, ours, answer) = offered(&stub, change);
        answer.unwrap();
        let mut forged = ours.connect(&end).unwrap();
        submit(&mut forged, 4096);
        stub.knobs.expect(&format!("broken {}", index + 2));
        // The session ends with it.
        assert_eq!(message(&stream), None);
        works(&client);
    }
}

#[test]
fn queue_pairs_that_are_others_cannot_be_taken_over() {
    let stub = Stub::start();
    let client = Client::attach(&stub.path, stub.options(Access::Rdma)).unwrap();
    let victim = {
        let (_stream, _, ours, answer) = offered(&stub, |offer| offer);
        answer.unwrap();
        ours.offer().end
    };
    // A number that is nobody's, and one that was somebody's.
    for number in [0xff_ffff, victim.queue_pair] {
        let (stream, end, ours, answer) =
            offered(&stub, |offer| Offer { end: PairEnd { queue_pair: number, ..offer.end }, ..offer });
        if answer.is_ok() {
            let mut stranger = ours.connect(&end).unwrap();
            let region = Region { offset: 0, bytes: 64 };
            let submission = Submission { input: region, output: region, ..Default::default() };
            let _ = stranger.submit(&submission);
        }
        drop(stream);
        works(&client);
    }
}

#[test]
fn more_operations_than_entries_end_the_attachment() {
    let stub = Stub::start();
    let client = good(&stub);
    let (stream, end, ours, answer) = offered(&stub, |offer| offer);
    answer.unwrap();
    let mut greedy = ours.connect(&end).unwrap();
    stub.knobs.hold.store(true, Ordering::Relaxed);
    for number in 0..5 {
        stub.knobs.until_taken(number);
        submit(&mut greedy, 64);
        greedy.progress().unwrap();
    }
    stub.knobs.expect("broken 2: protocol error of the other side: more operations");
    stub.knobs.hold.store(false, Ordering::Relaxed);
    assert_eq!(message(&stream), None);
    works(&client);
}

#[test]
fn the_device_is_the_one_named_or_found() {
    let stub = Stub::start();
    stub.fabric.add("loopback", Ipv4Addr::LOCALHOST).unwrap();
    let options = |device: Option<&str>| {
        let device = device.map(str::to_owned);
        let rdma = RdmaOptions { device, devices: stub.fabric.devices(), ..RdmaOptions::default() };
        AttachOptions { rdma, ..stub.options(Access::Rdma) }
    };
    let used = |device: &str| {
        let calls = stub.fabric.take_calls(device);
        calls.iter().filter(|call| call.call == Call::CreateQueuePair).count()
    };
    let all = || ["agent", "tenant", "loopback"].map(used);
    assert_eq!(all(), [0, 0, 0]);
    works(&Client::attach(&stub.path, options(Some("tenant:1"))).unwrap());
    assert_eq!(all(), [1, 1, 0]);
    // Through a socket: the agent's own, which is here.
    works(&Client::attach(&stub.path, options(None)).unwrap());
    assert_eq!(all(), [2, 0, 0]);
    // Over TCP: the one with this end's address.
    works(&Client::attach(over_tcp(stub.network), options(None)).unwrap());
    assert_eq!(all(), [1, 0, 1]);
    let error = Client::attach(&stub.path, options(Some("mlx5_9"))).unwrap_err();
    assert!(matches!(error, Error::Rdma(VerbsError::NoSuchDevice { .. })), "{error}");
}

#[test]
fn over_tcp_queue_pairs_use_tenants_addresses() {
    let stub = Stub::start();
    stub.fabric.add("elsewhere", Ipv4Addr::new(10, 9, 0, 9)).unwrap();
    let device = Some("elsewhere".to_owned());
    let rdma = RdmaOptions { device, devices: stub.fabric.devices(), ..RdmaOptions::default() };
    let options = AttachOptions { rdma, ..stub.options(Access::Rdma) };
    let error = Client::attach(over_tcp(stub.network), options.clone()).unwrap_err();
    assert!(matches!(error, Error::Refused { kind: RefusalKind::User, .. }), "{error}");
    works(&Client::attach(&stub.path, options).unwrap());
}

/// The agent's device sends to no queue pair that another host has. The exception is one that the provider registered
/// as the tenant's.
#[test]
fn socket_queue_pairs_are_local_or_registered() {
    const OTHER_HOST: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 77);
    let stub = Stub::start();
    let client = Client::attach(&stub.path, stub.options(Access::Rdma)).unwrap();
    let at = |stub: &Stub, gid: [u8; 16]| {
        let (stream, _, _, answer) = offered(stub, |o| Offer { end: PairEnd { gid, ..o.end }, ..o });
        assert!(answer.is_ok() || message(&stream).is_none(), "a refused session goes on");
        answer
    };
    for gid in [Gid::from(OTHER_HOST).0, [3; 16], [0; 16]] {
        let refused = at(&stub, gid).unwrap_err();
        assert_eq!(refused.kind, RefusalKind::User, "{}", refused.text);
        assert!(refused.text.contains("have the provider register the address"), "{}", refused.text);
    }
    // That of another device here is a process's, too.
    at(&stub, Gid::from(crate::stub::AGENT_DEVICE).0).unwrap();
    works(&client);
    let stub = Stub::with(|rules| rules.addresses = vec![OTHER_HOST.into()]);
    // Nothing is there, which the agent's device finds or does not.
    if let Err(refused) = at(&stub, Gid::from(OTHER_HOST).0) {
        assert_eq!(refused.kind, RefusalKind::Agent, "{}", refused.text);
        assert!(!refused.text.contains("agent port"), "the provider's device is named: {}", refused.text);
    }
}

#[test]
fn what_the_tenants_device_lacks_is_told_to_the_tenant() {
    let stub = Stub::start();
    let attach = || Client::attach(&stub.path, stub.options(Access::Rdma));
    let client = attach().unwrap();
    stub.fabric.inject("tenant", Fault::Fail(Call::Register, Errno::NOMEM));
    let error = attach().unwrap_err();
    assert!(matches!(error, Error::Rdma(VerbsError::Memlock { .. })), "{error}");
    stub.fabric.inject("tenant", Fault::Fail(Call::ToReadyToReceive, Errno::INVAL));
    let error = attach().unwrap_err();
    assert!(matches!(error, Error::Rdma(VerbsError::Failed { .. })), "{error}");
    works(&client);
    works(&attach().unwrap());
}

#[test]
fn what_the_agents_device_lacks_is_refused_without_saying_what() {
    let stub = Stub::start();
    let attach = || Client::attach(&stub.path, stub.options(Access::Rdma));
    let client = attach().unwrap();
    for fault in [
        Fault::Fail(Call::Register, Errno::NOMEM),
        Fault::Fail(Call::CreateCompletionQueue, Errno::NOMEM),
        Fault::Fail(Call::ToReadyToReceive, Errno::INVAL),
        Fault::NoQueuePairsLeft,
    ] {
        stub.fabric.inject("agent", fault);
        match attach().unwrap_err() {
            Error::Refused { kind: RefusalKind::Agent, text } => {
                assert!(!text.contains("ibv") && !text.contains("agent port"), "{text}");
            }
            other => panic!("{fault:?}: {other}"),
        }
    }
    works(&client);
}

#[test]
fn a_lost_device_costs_its_attachments_and_no_other() {
    let stub = Stub::start();
    let mapped = good(&stub);
    let client = Client::attach(&stub.path, stub.options(Access::Rdma)).unwrap();
    let comm = client.join("job", Rank(0), 1, LIMIT).unwrap();
    stub.knobs.hold.store(true, Ordering::Relaxed);
    let mut operation = comm.barrier().unwrap();
    stub.fabric.inject("agent", Fault::DeviceLost);
    stub.knobs.hold.store(false, Ordering::Relaxed);
    let error = operation.wait(LIMIT).unwrap_err();
    assert!(matches!(error, Error::AgentLost { .. }), "{error}");
    let error = Client::attach(&stub.path, stub.options(Access::Rdma)).unwrap_err();
    assert!(matches!(error, Error::Refused { kind: RefusalKind::Agent, .. }), "{error}");
    stub.knobs.expect("detached 2");
    works(&mapped);
    // It comes back, under the same address.
    stub.fabric.add("agent", crate::stub::AGENT_DEVICE).unwrap();
    works(&Client::attach(&stub.path, stub.options(Access::Rdma)).unwrap());
}

#[test]
fn a_process_that_dies_is_gone_for_the_agent_too() {
    let stub = Stub::start();
    let client = good(&stub);
    let (stream, end, ours, answer) = offered(&stub, |offer| offer);
    answer.unwrap();
    let mut dying = ours.connect(&end).unwrap();
    submit(&mut dying, 4096);
    drop((dying, stream));
    let gone = |line: &String| line.contains("detached 2") || line.contains("broken 2");
    until(|| stub.knobs.log.lock().unwrap().iter().any(gone).then_some(()).ok_or("not gone"));
    works(&client);
}

#[test]
fn rdma_is_offered_to_those_who_may() {
    let stub = Stub::with(|rules| rules.rdma = false);
    let error = Client::attach(&stub.path, stub.options(Access::Rdma)).unwrap_err();
    assert!(matches!(error, Error::Refused { kind: RefusalKind::Access, .. }), "{error}");
}
