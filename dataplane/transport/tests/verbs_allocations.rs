//! Once an RDMA link is up and each kind of frame has flowed, neither end allocates: not per frame, not per byte, not when
//! it goes to sleep.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

mod counting;

use counting::Counting;
use harmonaize_shm::{Memory, Span};
use harmonaize_transport::tcp;
use harmonaize_transport::verbs::{Config, VerbsTransport};
use harmonaize_transport::{Event, Introduction, Landing, LinkId, Ring, SendError, Transport};
use harmonaize_verbs::fake::Fabric;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

#[global_allocator]
static ALLOCATOR: Counting = Counting(counting::here);

const FRAMES: u32 = 10_000;
const SLOTS: u32 = 64;
const SLOT: u32 = 40_000;
const PATHS: u16 = 3;

struct Pair {
    ends: [VerbsTransport; 2],
    links: [LinkId; 2],
    source: Span,
}

impl Pair {
    /// Two devices at one end and one at the other, a link of three paths, small mailboxes: messages of credit alone are
    /// needed too.
    fn new() -> Self {
        let fabric = Fabric::new();
        for (name, address) in [("a0", 1), ("a1", 2), ("b0", 3)] {
            fabric.add(name, Ipv4Addr::new(10, 0, 0, address)).unwrap();
        }
        fabric.stop_recording();
        let end = |devices: &[&str]| {
            let tcp = tcp::Config {
                // Signs of life and ticks are part of what is counted.
                peer_timeout: Duration::from_millis(400),
                ..tcp::Config::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
            };
            let devices = devices.iter().map(|name| (*name).to_owned()).collect();
            let config = Config { devices, mailbox_slots: 16, ..Config::new(tcp) };
            VerbsTransport::bind(config, &fabric.devices()).unwrap()
        };
        let [mut a, mut b] = [end(&["a0", "a1"]), end(&["b0"])];
        let introduction = |peer, initiate| Introduction {
            name: [1; 16],
            secret: [2; 32],
            peer,
            initiate,
            source_ports: vec![0; PATHS.into()],
        };
        let links = [
            a.open(introduction(b.local_address(), true)).unwrap(),
            b.open(introduction(a.local_address(), false)).unwrap(),
        ];
        let span = |bytes: u32| {
            let memory = Memory::private(bytes as usize).unwrap();
            Span::new(&memory, 0, bytes.into()).unwrap()
        };
        b.attach_ring(links[1], 1, Ring { memory: span(SLOT * SLOTS), slot_bytes: SLOT, slots: SLOTS })
            .unwrap();
        let mut pair = Self { ends: [a, b], links, source: span(SLOT) };
        let (mut up, deadline) = (0, Instant::now() + Duration::from_secs(20));
        while up < 2 && Instant::now() < deadline {
            for end in &mut pair.ends {
                end.progress(8, &mut |_, event| up += usize::from(matches!(event, Event::Up)));
            }
        }
        assert_eq!(up, 2);
        pair
    }

    /// Sends frames of all sizes, inline, in the message and in slots, with a small answer to each; says how many arrived,
    /// and how often something happened that should not. Between frames both ends get ready to sleep.
    fn traffic(&mut self) -> (u32, u32) {
        let (mut next, mut arrived, mut answered, mut sent, mut owed, mut wrong) = (0_u32, 0, 0, 0, 0, 0);
        let deadline = Instant::now() + Duration::from_secs(60);
        let ([a, b], [at_a, at_b]) = (&mut self.ends, self.links);
        while (answered < FRAMES || sent < FRAMES) && Instant::now() < deadline {
            if next < FRAMES && next - answered < SLOTS {
                let bytes = match next % 4 {
                    0 => next.wrapping_mul(7919) % SLOT,
                    1 => next % 64,
                    _ => next % 400,
                };
                let landing = Landing { ring: 1, sequence: next };
                let payload = (landing, self.source.range(0, bytes.into()).unwrap(), 9);
                match a.send(at_a, (next % u32::from(PATHS)) as u16, &next.to_le_bytes(), Some(payload)) {
                    Ok(()) => next += 1,
                    Err(SendError::Full) => {}
                    Err(_) => wrong += 1,
                }
            }
            let mut idle = true;
            idle &= 0
                == a.progress(32, &mut |_, event| match event {
                    Event::Sent { .. } => sent += 1,
                    Event::Received { .. } => answered += 1,
                    _ => wrong += 1,
                });
            idle &= 0
                == b.progress(32, &mut |_, event| match event {
                    Event::Received { .. } => (arrived, owed) = (arrived + 1, owed + 1),
                    _ => wrong += 1,
                });
            while owed > 0 && b.send(at_b, 1, b"got it", None).is_ok() {
                owed -= 1;
            }
            if idle || next % 64 == 0 {
                a.prepare_sleep();
                b.prepare_sleep();
            }
        }
        (arrived, wrong)
    }

    /// For some ticks: signs of life allocate nothing either.
    fn idle(&mut self) {
        let until = Instant::now() + Duration::from_millis(1300);
        while Instant::now() < until {
            for end in &mut self.ends {
                end.progress(8, &mut |_, event| panic!("{event:?}"));
                end.prepare_sleep();
            }
        }
    }
}

#[test]
fn ten_thousand_frames_allocate_nothing() {
    let mut pair = Pair::new();
    // The first frames from a mapping register it, and each queue grows to what it needs.
    assert_eq!(pair.traffic(), (FRAMES, 0), "(frames, wrong events)");
    let before = counting::so_far();
    assert!(before > 0, "the counter counts");
    let arrived = pair.traffic();
    pair.idle();
    let allocations = counting::so_far() - before;
    assert_eq!((arrived, allocations), ((FRAMES, 0), 0), "((frames, wrong events), allocations)");
}
