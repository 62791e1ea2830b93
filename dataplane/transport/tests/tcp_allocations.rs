//! Once a link is up, neither end allocates: not per frame, not per byte.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

mod counting;

use counting::Counting;
use harmonaize_shm::{Memory, Span};
use harmonaize_transport::tcp::{Config, LinkProtection, TcpTransport};
use harmonaize_transport::{Event, Introduction, Landing, LinkId, Ring, SendError, Transport};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

#[global_allocator]
static ALLOCATOR: Counting = Counting(counting::here);

const FRAMES: u32 = 10_000;
const SLOTS: u32 = 64;
const SLOT: u32 = 40_000;

/// Sends frames of all sizes from `a` to `b`, with a small answer to each, over two paths; says how many arrived, and
/// how often something happened that should not.
fn traffic(
    a: &mut TcpTransport,
    b: &mut TcpTransport,
    [at_a, at_b]: [LinkId; 2],
    source: &Span,
) -> (u32, u32) {
    let (mut next, mut arrived, mut answered, mut sent, mut owed, mut wrong) = (0_u32, 0, 0, 0, 0, 0);
    let deadline = Instant::now() + Duration::from_secs(60);
    while (answered < FRAMES || sent < FRAMES) && Instant::now() < deadline {
        if next < FRAMES && next - answered < SLOTS {
            let bytes = u64::from(next.wrapping_mul(7919) % if next % 3 == 0 { SLOT } else { 200 });
            let Ok(span) = source.range(0, bytes) else { break };
            let landing = Landing { ring: 1, sequence: next };
            match a.send(at_a, (next % 2) as u16, &next.to_le_bytes(), Some((landing, span, 9))) {
                Ok(()) => next += 1,
                Err(SendError::Full) => {}
                Err(_) => wrong += 1,
            }
        }
        a.progress(32, &mut |_, event| match event {
            Event::Sent { .. } => sent += 1,
            Event::Received { .. } => answered += 1,
            _ => wrong += 1,
        });
        b.progress(32, &mut |_, event| match event {
            Event::Received { .. } => (arrived, owed) = (arrived + 1, owed + 1),
            _ => wrong += 1,
        });
        while owed > 0 && b.send(at_b, 1, b"got it", None).is_ok() {
            owed -= 1;
        }
    }
    (arrived, wrong)
}

#[test]
fn ten_thousand_frames_allocate_nothing() {
    for protection in [LinkProtection::None, LinkProtection::Authenticated, LinkProtection::Encrypted] {
        frames_allocate_nothing(protection, None);
        frames_allocate_nothing(protection, Some(30_000));
    }
}

fn frames_allocate_nothing(protection: LinkProtection, sender_bytes: Option<usize>) {
    let config = Config {
        protection,
        sender_bytes,
        // Signs of life and ticks are part of what is counted.
        peer_timeout: Duration::from_millis(400),
        ..Config::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
    };
    let mut a = TcpTransport::bind(config.clone()).unwrap();
    let mut b = TcpTransport::bind(config).unwrap();
    let introduction = |peer, initiate| Introduction {
        name: [1; 16],
        secret: [2; 32],
        peer,
        initiate,
        source_ports: vec![0; 2],
    };
    let links = [
        a.open(introduction(b.local_address(), true)).unwrap(),
        b.open(introduction(a.local_address(), false)).unwrap(),
    ];
    let memory = Memory::private((SLOT * SLOTS) as usize).unwrap();
    let memory = Span::new(&memory, 0, u64::from(SLOT * SLOTS)).unwrap();
    b.attach_ring(links[1], 1, Ring { memory, slot_bytes: SLOT, slots: SLOTS }).unwrap();
    let source = Memory::private(SLOT as usize).unwrap();
    let source = Span::new(&source, 0, u64::from(SLOT)).unwrap();
    let (mut up, deadline) = (0, Instant::now() + Duration::from_secs(20));
    while up < 2 && Instant::now() < deadline {
        a.progress(8, &mut |_, event| up += usize::from(matches!(event, Event::Up)));
        b.progress(8, &mut |_, event| up += usize::from(matches!(event, Event::Up)));
    }
    assert_eq!(up, 2);
    let before = counting::so_far();
    assert!(before > 0, "the counter counts");
    let arrived = traffic(&mut a, &mut b, links, &source);
    // Idle for some ticks: signs of life allocate nothing either.
    let idle = Instant::now() + Duration::from_millis(300);
    while Instant::now() < idle {
        for end in [&mut a, &mut b] {
            end.progress(8, &mut |_, event| panic!("{event:?}"));
        }
    }
    let allocations = counting::so_far() - before;
    assert_eq!((arrived, allocations), ((FRAMES, 0), 0), "((frames, wrong events), allocations)");
}
