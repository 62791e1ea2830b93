//! Who changes what crosses a protected link ends it, and both ends must ask for the same protection.

use crate::raw::{Log, PATIENCE, SECRET, Seen, config, drive, hello, introduction, turn};
use harmonaize_abi::Tag;
use harmonaize_shm::{Memory, Span};
use harmonaize_transport::conformance::{Change, Middle};
use harmonaize_transport::tcp::LinkProtection::{self, Authenticated, Encrypted, None as Unprotected};
use harmonaize_transport::tcp::{Acceptor, Config, TcpTransport};
use harmonaize_transport::{DownReason, Event, Landing, LinkRefusal, Ring, SendError, Transport};
use hmac::{Hmac, KeyInit, Mac};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::time::{Duration, Instant};

const FRAMES: u32 = 40;
const PAYLOAD: u32 = 3000;
/// Bytes of a handshake that the initiator sends, and the acceptor.
const HANDSHAKE: [u64; 2] = [64 + 40, 80 + 8];

/// What came of frames from one end to another with somebody between them.
#[derive(Debug, Default)]
struct Outcome {
    /// Frames whose header and payload were those that were sent, in order.
    right: u32,
    /// All others.
    wrong: u32,
    answers: u32,
    down: [Option<DownReason>; 2],
    forged: u64,
    changed: u64,
}

fn content(sequence: u32) -> Vec<u8> {
    (0..PAYLOAD).map(|at| (sequence * 31 + at * 7 + at / 256) as u8).collect()
}

/// Sends frames through somebody who makes this change; each is answered with its header.
fn through(protection: LinkProtection, change: Option<Change>) -> Outcome {
    between([protection, protection], change)
}

/// The same between ends that may ask for different protections.
fn between([ours, theirs]: [LinkProtection; 2], change: Option<Change>) -> Outcome {
    let config = Config {
        protection: theirs,
        connect_timeout: Duration::from_millis(300),
        peer_timeout: Duration::from_millis(500),
        ..config()
    };
    let acceptor = Acceptor::bind(&config).unwrap();
    let mut a = TcpTransport::bind(Config { protection: ours, ..config.clone() }).unwrap();
    let mut b = TcpTransport::accepting(&acceptor, config).unwrap();
    let middle = Middle::new(b.local_address(), change).unwrap();
    let at_b = b.open(introduction(1, a.local_address(), false)).unwrap();
    let at_a = a.open(introduction(1, middle.address(), true)).unwrap();
    let bytes = u64::from(FRAMES * PAYLOAD);
    let [source, target] = [(); 2].map(|()| {
        let memory = Memory::private(bytes as usize).unwrap();
        Span::new(&memory, 0, bytes).unwrap()
    });
    for sequence in 0..FRAMES {
        source.memory().write(u64::from(sequence * PAYLOAD), &content(sequence)).unwrap();
    }
    b.attach_ring(at_b, 0, Ring { memory: target.clone(), slot_bytes: PAYLOAD, slots: FRAMES }).unwrap();
    let mut outcome = Outcome::default();
    let (mut next, mut owed, mut up) = (0, Vec::new(), false);
    let deadline = Instant::now() + PATIENCE;
    let over = |outcome: &Outcome| {
        outcome.answers == FRAMES || outcome.down.iter().all(Option::is_some) || outcome.wrong > 0
    };
    while !over(&outcome) {
        assert!(Instant::now() < deadline, "neither done nor down: {ours}, {change:?}, {outcome:?}");
        while up && next < FRAMES {
            let from = source.range(u64::from(next * PAYLOAD), PAYLOAD.into()).unwrap();
            let landing = Landing { ring: 0, sequence: next };
            match a.send(at_a, 0, &next.to_le_bytes(), Some((landing, from, Tag(0)))) {
                Ok(()) => next += 1,
                Err(SendError::Full | SendError::Down) => break,
                Err(error) => panic!("{error}"),
            }
        }
        a.progress(64, &mut |_, event| match event {
            Event::Up => up = true,
            Event::Received { header, .. } if header == outcome.answers.to_le_bytes() => outcome.answers += 1,
            Event::Received { .. } => outcome.wrong += 1,
            Event::Sent { .. } | Event::Completed { .. } => {}
            Event::Down { reason } => outcome.down[0] = Some(reason),
        });
        b.progress(64, &mut |_, event| match event {
            Event::Up | Event::Sent { .. } | Event::Completed { .. } => {}
            Event::Received { header, payload, .. } => {
                let mut came = vec![0; PAYLOAD as usize];
                let sequence = outcome.right + outcome.wrong;
                target.memory().read(u64::from(sequence * PAYLOAD), &mut came).unwrap();
                let landing = Landing { ring: 0, sequence };
                let right = header == sequence.to_le_bytes()
                    && payload == Some((landing, PAYLOAD))
                    && came == content(sequence);
                owed.push(header.to_vec());
                *(if right { &mut outcome.right } else { &mut outcome.wrong }) += 1;
            }
            Event::Down { reason } => outcome.down[1] = Some(reason),
        });
        while let Some(answer) = owed.first() {
            if b.send(at_b, 0, answer, None).is_err() {
                break;
            }
            owed.remove(0);
        }
    }
    outcome.forged = acceptor.forged();
    outcome.changed = middle.changed();
    outcome
}

#[test]
fn frames_cross_somebody_who_changes_nothing() {
    for protection in [Unprotected, Authenticated, Encrypted] {
        let outcome = through(protection, None);
        assert_eq!((outcome.answers, outcome.wrong, outcome.forged), (FRAMES, 0, 0), "{outcome:?}");
    }
}

/// The attack that protection is against; and that the test sees it.
#[test]
fn without_protection_a_changed_byte_arrives() {
    let at = HANDSHAKE[0] + 16 + 4 + 1000;
    let outcome = through(Unprotected, Some(Change { to_listener: true, at, bit: 3 }));
    assert_eq!((outcome.wrong, outcome.forged, &outcome.down), (1, 0, &[None, None]), "{outcome:?}");
}

#[test]
fn with_protection_no_changed_byte_arrives() {
    for protection in [Authenticated, Encrypted] {
        for to_listener in [true, false] {
            let handshake = HANDSHAKE[usize::from(!to_listener)];
            // Answers are 16 + 4 bytes each, in records of their own or together.
            let last = handshake + if to_listener { u64::from(FRAMES * PAYLOAD) } else { 700 };
            let step = (last - handshake) / 8;
            for at in (handshake..last).step_by(step as usize) {
                let change = Change { to_listener, at, bit: (at % 8) as u8 };
                let outcome = through(protection, Some(change));
                assert_eq!((outcome.wrong, outcome.changed), (0, 1), "{protection}, {change:?}: {outcome:?}");
                let found = &outcome.down[usize::from(to_listener)];
                // A length that has grown waits for bytes which the peer does not send, and then for signs of life.
                let right = matches!(found, Some(DownReason::Forged(_) | DownReason::Network(_)));
                assert!(right, "{protection}, {change:?}: {outcome:?}");
                let forged = u64::from(matches!(found, Some(DownReason::Forged(_))) && to_listener);
                assert_eq!(outcome.forged, forged, "{outcome:?}");
            }
        }
    }
}

/// Who changes a message of the handshake keeps the link from coming up, or changes nothing that matters.
#[test]
fn a_changed_handshake_weakens_nothing() {
    for to_listener in [true, false] {
        for at in (0..HANDSHAKE[usize::from(!to_listener)]).step_by(11) {
            let change = Change { to_listener, at, bit: 0 };
            let outcome = through(Encrypted, Some(change));
            assert_eq!(outcome.wrong, 0, "{change:?}: {outcome:?}");
            assert!(outcome.answers == FRAMES || outcome.down.iter().all(Option::is_some), "{outcome:?}");
        }
    }
}

/// The byte of a Hello that says which protection follows: from `encrypted` to `none`.
#[test]
fn a_hello_that_asks_for_less_on_the_way_is_refused() {
    for theirs in [Encrypted, Unprotected] {
        let outcome = between([Encrypted, theirs], Some(Change { to_listener: true, at: 14, bit: 1 }));
        assert_eq!((outcome.right, outcome.wrong, outcome.answers), (0, 0, 0));
        let both = outcome.down.iter().all(|down| matches!(down, Some(DownReason::Refused(_))));
        assert!(both && outcome.changed > 0, "{theirs}: {outcome:?}");
    }
}

fn of(protection: LinkProtection) -> Config {
    Config { protection, connect_timeout: Duration::from_millis(300), ..config() }
}

#[test]
fn ends_that_ask_for_different_protections_name_both() {
    for ours in [Unprotected, Authenticated, Encrypted] {
        for theirs in [Unprotected, Authenticated, Encrypted] {
            let (mut a, mut b) =
                (TcpTransport::bind(of(ours)).unwrap(), TcpTransport::bind(of(theirs)).unwrap());
            a.open(introduction(1, b.local_address(), true)).unwrap();
            b.open(introduction(1, a.local_address(), false)).unwrap();
            let (mut at_a, mut at_b) = (Log::new(), Log::new());
            let one = |logs: &[&Log]| logs.iter().all(|log| log.len() == 1);
            assert!(drive(&mut [(&mut a, &mut at_a), (&mut b, &mut at_b)], &one), "{at_a:?} {at_b:?}");
            for (log, ours, theirs) in [(&at_a, ours, theirs), (&at_b, theirs, ours)] {
                let expected = if ours == theirs {
                    Seen::Up
                } else {
                    let theirs = theirs as u16;
                    Seen::Down(DownReason::Refused(LinkRefusal::Protection { ours, theirs }))
                };
                assert_eq!(log[0].1, expected);
            }
        }
    }
}

#[test]
fn an_initiator_that_knows_no_protection_is_refused() {
    let mut b = TcpTransport::bind(of(Authenticated)).unwrap();
    let any = (Ipv4Addr::LOCALHOST, 0).into();
    b.open(introduction(1, any, false)).unwrap();
    let mut log = Log::new();
    let to = b.local_address();
    let (_, reply) = crate::raw::ask(to, &hello(1, 1, 0, 1), || _ = turn(&mut b, &mut log)).unwrap();
    assert_eq!(reply[8..12], [1, 0, 7, 0], "our version, and that links are authenticated here");
}

/// It proves that it knows the secret, and accepts whatever a Hello asks for.
#[test]
fn an_acceptor_that_knows_no_protection_is_refused() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let mut a = TcpTransport::bind(of(Encrypted)).unwrap();
    a.open(introduction(1, listener.local_addr().unwrap(), true)).unwrap();
    let mut log = Log::new();
    turn(&mut a, &mut log);
    let answer = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut hello = [0; 64];
        stream.read_exact(&mut hello).unwrap();
        let mut mac = Hmac::<sha2::Sha256>::new_from_slice(&SECRET).unwrap();
        mac.update(b"acceptor ");
        mac.update(&hello);
        mac.update(&[6; 32]);
        let mut reply = [0; 80];
        reply[..8].copy_from_slice(b"HZlinkA\n");
        reply[8] = 1;
        reply[16..48].fill(6);
        reply[48..].copy_from_slice(&mac.finalize().into_bytes());
        stream.write_all(&reply).unwrap();
        stream
    });
    assert!(drive(&mut [(&mut a, &mut log)], &|logs| !logs[0].is_empty()));
    let why = LinkRefusal::Protection { ours: Encrypted, theirs: Unprotected as u16 };
    assert_eq!(log[0].1, Seen::Down(DownReason::Refused(why.clone())));
    let told = "this end's links are `encrypted`, the peer's `none`: set `protection` under [links] alike";
    assert_eq!(why.to_string(), told);
    answer.join().unwrap();
}
