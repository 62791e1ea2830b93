//! What every transport must do, as cases that run against any pair of endpoints.
//!
//! A case takes a function that makes two fresh endpoints which can reach each other, drives them from one thread, and
//! says what went wrong. [`conformance!`](crate::conformance) makes a test of each. Endpoints should give a link no more than
//! about 2 s to come up: some cases wait for that time to pass.

mod delivery;
mod ending;
mod middle;
mod posting;
mod stress;

pub use middle::{Change, Middle};

use crate::{DownReason, Event, Introduction, Landing, LinkId, Ring, SendError, Transport};
use harmonaize_abi::Tag;
use harmonaize_shm::{Memory, Span};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a case found: nothing, or what was wrong.
pub type Outcome = Result<(), String>;

/// Makes two endpoints that can reach each other.
pub type Maker<'m> = &'m mut dyn FnMut() -> Result<[Box<dyn Transport>; 2], String>;

/// How long anything may take that should happen soon.
const PATIENCE: Duration = Duration::from_secs(20);

/// One property of a transport.
pub type Case = fn(Maker<'_>) -> Outcome;

/// Every case by name.
pub const CASES: &[(&str, Case)] = &[
    ("comes_up", delivery::comes_up),
    ("every_size", delivery::every_size),
    ("order_per_path", delivery::order_per_path),
    ("ring_wraps", delivery::ring_wraps),
    ("full_then_progress", delivery::full_then_progress),
    ("links_and_rings_apart", delivery::links_and_rings_apart),
    ("wakes_the_sleeper", delivery::wakes_the_sleeper),
    ("sent_exactly_once", delivery::sent_exactly_once),
    ("refuses_invalid_frames", delivery::refuses_invalid_frames),
    ("late_peer", ending::late_peer),
    ("absent_peer", ending::absent_peer),
    ("wrong_secret", ending::wrong_secret),
    ("path_counts_differ", ending::path_counts_differ),
    ("same_name_twice", ending::same_name_twice),
    ("unknown_ring", ending::unknown_ring),
    ("oversize_payload", ending::oversize_payload),
    ("peer_closes", ending::peer_closes),
    ("last_word", ending::queued_headers_arrive_after_close),
    ("close_releases_payloads", ending::close_releases_payloads),
    ("dropped_endpoint", ending::dropped_endpoint),
    ("name_again_after_close", ending::name_again_after_close),
    ("posted_receives", posting::posted_receives),
    ("posted_too_late", posting::posted_too_late),
    ("posted_wrongly", posting::posted_wrongly),
    ("posted_at_any_time", posting::posted_at_any_time),
    ("end_releases_posts", posting::end_releases_posts),
    ("stress", stress::stress),
];

/// Runs the case of that name.
pub fn run(name: &str, make: Maker<'_>) -> Outcome {
    match CASES.iter().find(|(known, _)| *known == name) {
        Some((_, case)) => case(make).map_err(|wrong| format!("{name}: {wrong}")),
        None => Err(format!("no case {name}")),
    }
}

/// Whether the transport takes posts at all; the cases say how, if it does.
pub fn supports_posts(make: Maker<'_>) -> Result<bool, String> {
    posting::supports_posts(make)
}

/// Makes a test of each case, in the module where it is used, from a function that makes a pair.
#[macro_export]
macro_rules! conformance {
    ($make:expr) => {
        $crate::conformance!($make; comes_up every_size order_per_path ring_wraps full_then_progress
            links_and_rings_apart wakes_the_sleeper sent_exactly_once refuses_invalid_frames late_peer absent_peer
            wrong_secret path_counts_differ same_name_twice unknown_ring oversize_payload peer_closes last_word
            close_releases_payloads dropped_endpoint name_again_after_close posted_receives posted_too_late
            posted_wrongly posted_at_any_time end_releases_posts stress);
        #[test]
        fn no_case_left_out() {
            assert_eq!($crate::conformance::CASES.len(), 27);
        }
    };
    ($make:expr; $($case:ident)*) => {
        $(
            #[test]
            fn $case() {
                $crate::conformance::run(stringify!($case), &mut $make).unwrap();
            }
        )*
    };
}

macro_rules! ensure {
    ($holds:expr, $($why:tt)+) => {
        if !$holds {
            return Err(format!($($why)+));
        }
    };
}
use ensure;

/// An event, kept.
#[derive(Clone, Debug, PartialEq, Eq)]
enum OwnedEvent {
    Up,
    Received {
        header: Vec<u8>,
        payload: Option<(Landing, u32)>,
    },
    /// Received where it was posted.
    Posted {
        header: Vec<u8>,
        payload: Option<(Landing, u32)>,
    },
    Sent(Tag),
    Down(DownReason),
}

/// One endpoint and what it reported that no case has looked at yet.
struct Side {
    transport: Box<dyn Transport>,
    seen: VecDeque<(LinkId, OwnedEvent)>,
}

impl Side {
    fn progress(&mut self, budget: usize) -> usize {
        let seen = &mut self.seen;
        self.transport.progress(budget, &mut |link, event| {
            let event = match event {
                Event::Up => OwnedEvent::Up,
                Event::Received { header, payload, posted: false } => {
                    OwnedEvent::Received { header: header.to_vec(), payload }
                }
                Event::Received { header, payload, posted: true } => {
                    OwnedEvent::Posted { header: header.to_vec(), payload }
                }
                Event::Sent { tag } => OwnedEvent::Sent(tag),
                Event::Completed { .. } => return,
                Event::Down { reason } => OwnedEvent::Down(reason),
            };
            seen.push_back((link, event));
        })
    }

    /// Takes the next event of `link`, wherever it stands among other links' events.
    fn take(&mut self, link: LinkId) -> Option<OwnedEvent> {
        let at = self.seen.iter().position(|(of, _)| *of == link)?;
        self.seen.remove(at).map(|(_, event)| event)
    }
}

/// Both endpoints: `a` initiates.
struct Pair {
    a: Side,
    b: Side,
}

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    A,
    B,
}

impl Pair {
    fn new(make: Maker<'_>) -> Result<Self, String> {
        let [a, b] = make()?;
        Ok(Self {
            a: Side { transport: a, seen: VecDeque::new() },
            b: Side { transport: b, seen: VecDeque::new() },
        })
    }

    fn side(&mut self, at: At) -> &mut Side {
        match at {
            At::A => &mut self.a,
            At::B => &mut self.b,
        }
    }

    fn introduction(&mut self, at: At, name: u8, paths: usize) -> Introduction {
        let peer = match at {
            At::A => self.b.transport.local_address(),
            At::B => self.a.transport.local_address(),
        };
        let secret = std::array::from_fn(|i| name.wrapping_mul(31).wrapping_add(i as u8));
        let (name, initiate, source_ports) = ([name; 16], at == At::A, vec![0; paths]);
        Introduction { name, secret, peer, initiate, source_ports, over_tcp: false }
    }

    fn open(&mut self, at: At, introduction: Introduction) -> Result<LinkId, String> {
        self.side(at).transport.open(introduction).map_err(|error| format!("open: {error}"))
    }

    /// Opens a link at both ends and waits until it is up at both.
    fn up(&mut self, name: u8, paths: usize) -> Result<[LinkId; 2], String> {
        let (to_b, to_a) = (self.introduction(At::A, name, paths), self.introduction(At::B, name, paths));
        let links = [self.open(At::A, to_b)?, self.open(At::B, to_a)?];
        for (at, link) in [(At::A, links[0]), (At::B, links[1])] {
            let event = self.wait(at, link)?;
            ensure!(event == OwnedEvent::Up, "expected Up at {at:?}, got {event:?}");
        }
        Ok(links)
    }

    /// Lets both sides work once; sleeps a moment on their descriptors if neither had anything to do.
    fn run_once(&mut self) {
        if self.a.progress(64) + self.b.progress(64) == 0 {
            self.sleep(Duration::from_millis(20));
        }
    }

    /// Sleeps until a side has something to do; says whether one has.
    fn sleep(&mut self, at_most: Duration) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec};
        let timeout =
            Timespec { tv_sec: at_most.as_secs() as i64, tv_nsec: i64::from(at_most.subsec_nanos()) };
        if !self.a.transport.prepare_sleep() || !self.b.transport.prepare_sleep() {
            return true;
        }
        let fds = [self.a.transport.wake_fd(), self.b.transport.wake_fd()];
        let mut fds: Vec<PollFd<'_>> =
            fds.iter().flatten().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        rustix::event::poll(&mut fds, Some(&timeout)).is_ok_and(|ready| ready > 0)
    }

    /// The next event of `link`.
    fn wait(&mut self, at: At, link: LinkId) -> Result<OwnedEvent, String> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(event) = self.side(at).take(link) {
                return Ok(event);
            }
            ensure!(Instant::now() < deadline, "nothing happened on {link:?} at {at:?} in {PATIENCE:?}");
            self.run_once();
        }
    }

    /// Waits for the end of `link`, past anything else that it reports.
    fn wait_down(&mut self, at: At, link: LinkId) -> Result<DownReason, String> {
        loop {
            if let OwnedEvent::Down(reason) = self.wait(at, link)? {
                return Ok(reason);
            }
        }
    }

    /// Sends as soon as the queue takes it.
    fn send(
        &mut self,
        at: At,
        link: LinkId,
        path: u16,
        header: &[u8],
        payload: Option<(Landing, Span, Tag)>,
    ) -> Outcome {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.side(at).transport.send(link, path, header, payload.clone()) {
                Ok(()) => return Ok(()),
                Err(SendError::Full) if Instant::now() < deadline => self.run_once(),
                Err(error) => return Err(format!("send at {at:?}: {error}")),
            }
        }
    }

    /// Lets both work until neither has had anything to do for some turns: to show that nothing more happens.
    fn run_until_idle(&mut self) {
        let mut idle = 0;
        while idle < 5 {
            if self.a.progress(64) + self.b.progress(64) > 0 {
                idle = 0;
            } else {
                idle += 1;
                self.sleep(Duration::from_millis(5));
            }
        }
    }
}

/// Memory with bytes that only `seed` gives.
fn filled(seed: u64, bytes: usize) -> Result<Span, String> {
    let span = blank(bytes)?;
    write(&span, &pattern(seed, bytes));
    Ok(span)
}

/// Zeroed memory. A span of no bytes lies in memory of one.
fn blank(bytes: usize) -> Result<Span, String> {
    let memory: Arc<Memory> = Memory::private(bytes.max(1)).map_err(|error| error.to_string())?;
    Span::new(&memory, 0, bytes as u64).map_err(|error| error.to_string())
}

fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    let mut random = Random(seed);
    let mut out = Vec::with_capacity(bytes + 8);
    while out.len() < bytes {
        out.extend_from_slice(&random.next().to_le_bytes());
    }
    out.truncate(bytes);
    out
}

fn write(span: &Span, bytes: &[u8]) {
    let count = bytes.len().min(span.bytes());
    // SAFETY: `count` bytes lie in both; the mapping is never referenced, and `bytes` is not part of it.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), span.view_mut().pointer(), count) };
}

fn read(span: &Span) -> Vec<u8> {
    let mut out = vec![0; span.bytes()];
    // SAFETY: `out` has as many bytes as the span, and is not part of its mapping.
    unsafe { std::ptr::copy_nonoverlapping(span.view().pointer(), out.as_mut_ptr(), span.bytes()) };
    out
}

/// A ring in memory of its own.
fn ring(slot_bytes: u32, slots: u32) -> Result<Ring, String> {
    Ok(Ring { memory: blank(slot_bytes as usize * slots as usize)?, slot_bytes, slots })
}

/// What lies in the slot of `sequence`.
fn slot(ring: &Ring, sequence: u32, bytes: u32) -> Result<Vec<u8>, String> {
    let offset = u64::from(sequence % ring.slots) * u64::from(ring.slot_bytes);
    ring.memory.range(offset, u64::from(bytes)).map(|span| read(&span)).map_err(|error| error.to_string())
}

/// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Below `bound`, which is not 0.
    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}
