//! Frames of all sizes over a link, with small answers: what must allocate nothing.

use harmonaize_abi::Tag;
use harmonaize_shm::{Memory, Span};
use harmonaize_transport::{Event, Introduction, Landing, LinkId, Ring, SendError, Transport};
use std::time::{Duration, Instant};

pub(crate) const FRAMES: u32 = 10_000;
const SLOTS: u32 = 64;
const SLOT: u32 = 40_000;

/// Two ends with a link that is up.
pub(crate) struct Pair<T> {
    ends: [T; 2],
    links: [LinkId; 2],
    source: Span,
    paths: u16,
    /// Whether both ends get ready to sleep now and then.
    sleeps: bool,
}

fn span(bytes: u32) -> Span {
    let memory = Memory::private(bytes as usize).unwrap();
    Span::new(&memory, 0, bytes.into()).unwrap()
}

impl<T: Transport> Pair<T> {
    pub(crate) fn new([mut a, mut b]: [T; 2], paths: u16, sleeps: bool) -> Self {
        let introduction = |peer, initiate| Introduction {
            name: [1; 16],
            secret: [2; 32],
            peer,
            initiate,
            source_ports: vec![0; paths.into()],
            over_tcp: false,
        };
        let links = [
            a.open(introduction(b.local_address(), true)).unwrap(),
            b.open(introduction(a.local_address(), false)).unwrap(),
        ];
        b.attach_ring(links[1], 1, Ring { memory: span(SLOT * SLOTS), slot_bytes: SLOT, slots: SLOTS })
            .unwrap();
        let mut pair = Self { ends: [a, b], links, source: span(SLOT), paths, sleeps };
        let (mut up, deadline) = (0, Instant::now() + Duration::from_secs(20));
        while up < 2 && Instant::now() < deadline {
            for end in &mut pair.ends {
                end.progress(8, &mut |_, event| up += usize::from(matches!(event, Event::Up)));
            }
        }
        assert_eq!(up, 2);
        pair
    }

    /// Sends frames of all sizes over all paths, with a small answer to each. They go inline, in the message and in slots. Returns how many
    /// arrived, and how often something happened that should not.
    pub(crate) fn traffic(&mut self) -> (u32, u32) {
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
                let payload = (landing, self.source.range(0, bytes.into()).unwrap(), Tag(9));
                let path = (next % u32::from(self.paths)) as u16;
                match a.send(at_a, path, &next.to_le_bytes(), Some(payload)) {
                    Ok(()) => next += 1,
                    Err(SendError::Full) => {}
                    Err(_) => wrong += 1,
                }
            }
            let mut done = a.progress(32, &mut |_, event| match event {
                Event::Sent { .. } => sent += 1,
                Event::Received { .. } => answered += 1,
                _ => wrong += 1,
            });
            done += b.progress(32, &mut |_, event| match event {
                Event::Received { .. } => (arrived, owed) = (arrived + 1, owed + 1),
                _ => wrong += 1,
            });
            while owed > 0 && b.send(at_b, 1, b"got it", None).is_ok() {
                owed -= 1;
            }
            if self.sleeps && (done == 0 || next % 64 == 0) {
                a.prepare_sleep();
                b.prepare_sleep();
            }
        }
        (arrived, wrong)
    }

    /// For some ticks: signs of life allocate nothing either.
    pub(crate) fn idle(&mut self, time: Duration) {
        let until = Instant::now() + time;
        while Instant::now() < until {
            for end in &mut self.ends {
                end.progress(8, &mut |_, event| panic!("{event:?}"));
                if self.sleeps {
                    end.prepare_sleep();
                }
            }
        }
    }
}
