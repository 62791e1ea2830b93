//! What lands, and what is told of it, is the same however the peer cuts its bytes into records, and however these come.

use super::frame::{Kind, LARGE, WIRE, Wire};
use super::handshake::Hello;
use super::inbox::{Inbox, Input};
use super::outbox::Outbox;
use super::records::LinkProtection::{self, Authenticated, Encrypted};
use super::records::{Opener, Records};
use crate::rings::Rings;
use crate::{DownReason, Event, Landing, MAX_HEADER, Ring};
use harmonaize_abi::Tag;
use harmonaize_shm::{Memory, Span};
use harmonaize_testkit::draw::{Draw, seed};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use zerocopy::IntoBytes;

const PROTECTIONS: [LinkProtection; 2] = [Authenticated, Encrypted];
const SLOT: usize = 6 * LARGE;
const SLOTS: usize = 16;
/// Of a record, before and behind its data.
const LENGTH: usize = 2;
const TAG: usize = 16;

struct Frame {
    header: Vec<u8>,
    payload: Option<Vec<u8>>,
    /// Whether a span is posted for it.
    post: bool,
}

impl Frame {
    fn new(number: usize, header_bytes: usize, payload_bytes: Option<usize>, post: bool) -> Self {
        let pattern = |bytes: usize| (0..bytes).map(|at| (number * 89 + at * 131 + at / 255) as u8).collect();
        Self { header: pattern(header_bytes), payload: payload_bytes.map(pattern), post }
    }

    fn bytes(&self) -> usize {
        WIRE + self.header.len() + self.payload.as_ref().map_or(0, Vec::len)
    }
}

fn landing(number: usize) -> Landing {
    Landing { ring: 3, sequence: number as u32 }
}

/// An event: its header, its payload, whether that was posted, and what lay there then.
type Received = (Vec<u8>, Option<(Landing, u32)>, bool, Vec<u8>);

fn expected(frames: &[Frame]) -> Vec<Received> {
    let received = |(number, frame): (usize, &Frame)| {
        let payload = frame.payload.as_ref().map(|payload| (landing(number), payload.len() as u32));
        let content = frame.payload.clone().unwrap_or_default();
        (frame.header.clone(), payload, frame.post && !content.is_empty(), content)
    };
    frames.iter().enumerate().map(received).collect()
}

/// How many frames are whole with so many bytes of the stream.
fn whole(frames: &[Frame], bytes: usize) -> usize {
    let mut end = 0;
    let within = |frame: &&Frame| {
        end += frame.bytes();
        end <= bytes
    };
    frames.iter().take_while(within).count()
}

/// The ends of a path: who initiated it, and the other.
fn ends(protection: LinkProtection) -> [Records; 2] {
    let hello = Hello::new([1; 16], 0, 1, protection, [2; 32]);
    [true, false].map(|end| Records::derive(protection, end, &[3; 32], &hello, &[4; 32]).unwrap().unwrap())
}

fn plain(frames: &[Frame]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (number, frame) in frames.iter().enumerate() {
        let kind = frame.payload.as_ref().map(|payload| Kind::Payload(landing(number), payload.len() as u32));
        let wire = Wire::new(kind.unwrap_or(Kind::Bare), frame.header.len() as u16);
        bytes.extend_from_slice(wire.as_bytes());
        bytes.extend_from_slice(&frame.header);
        bytes.extend_from_slice(frame.payload.as_deref().unwrap_or_default());
    }
    bytes
}

/// The records that an outbox makes of frames.
fn sent(protection: LinkProtection, frames: &[Frame]) -> Vec<u8> {
    let [records, _] = ends(protection);
    let mut outbox = Outbox::new(frames.len(), Some(records.sealer));
    let memory = Memory::private(SLOT * SLOTS).unwrap();
    for (number, frame) in frames.iter().enumerate() {
        let payload = frame.payload.as_ref().map(|payload| {
            let at = (number * SLOT) as u64;
            memory.write(at, payload).unwrap();
            let span = Span::new(&memory, at, payload.len() as u64).unwrap();
            (landing(number), span, Tag(number as u64))
        });
        outbox.push(&frame.header, payload).unwrap();
    }
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut wire = Vec::new();
    while !outbox.is_empty() {
        let (taken, _) = outbox.write(ours.as_fd(), &mut |_| {}).unwrap();
        let at = wire.len();
        wire.resize(at + taken, 0);
        theirs.read_exact(&mut wire[at..]).unwrap();
    }
    wire
}

/// The records of a release that fills each up.
fn filled(protection: LinkProtection, frames: &[Frame]) -> Vec<u8> {
    let [mut records, _] = ends(protection);
    records.sealer.finish(&plain(frames)).unwrap()
}

/// Records of any lengths.
fn cut(protection: LinkProtection, frames: &[Frame], draw: &mut Draw) -> Vec<u8> {
    let [mut records, _] = ends(protection);
    let bytes = plain(frames);
    let (mut rest, mut wire) = (&bytes[..], Vec::new());
    while !rest.is_empty() {
        let most = [40, 600, 5000, LARGE as u64][draw.below(4) as usize];
        let length = (1 + draw.below(most) as usize).min(rest.len());
        wire.extend(records.sealer.finish(&rest[..length]).unwrap());
        rest = &rest[length..];
    }
    wire
}

/// Where each record begins: in the stream of records, and in that of frames.
fn begins(wire: &[u8]) -> Vec<(usize, usize)> {
    let (mut at, mut plain, mut all) = (0, 0, Vec::new());
    while at < wire.len() {
        all.push((at, plain));
        let data = usize::from(u16::from_le_bytes([wire[at], wire[at + 1]]));
        (at, plain) = (at + LENGTH + data + TAG, plain + data);
    }
    all
}

/// What takes frames in.
struct End {
    socket: UnixStream,
    peer: UnixStream,
    inbox: Inbox,
    rings: Rings,
    slots: Arc<Memory>,
    posts: Arc<Memory>,
    received: Vec<Received>,
}

impl End {
    fn new(opener: Opener, frames: &[Frame]) -> Self {
        let (socket, peer) = UnixStream::pair().unwrap();
        let [slots, posts] = [(); 2].map(|()| Memory::private(SLOT * SLOTS).unwrap());
        let mut rings = Rings::default();
        let memory = Span::new(&slots, 0, (SLOT * SLOTS) as u64).unwrap();
        rings.attach(3, Ring { memory, slot_bytes: SLOT as u32, slots: SLOTS as u32 }).unwrap();
        for (number, frame) in frames.iter().enumerate() {
            if let (true, Some(payload)) = (frame.post, &frame.payload) {
                let span = Span::new(&posts, (number * SLOT) as u64, payload.len() as u64).unwrap();
                assert_eq!(rings.post(landing(number), span), !payload.is_empty());
            }
        }
        Self {
            socket,
            peer,
            inbox: Inbox::new(2048, Some(opener)),
            rings,
            slots,
            posts,
            received: Vec::new(),
        }
    }

    /// Takes bytes in, so many at a time.
    fn take(&mut self, mut bytes: &[u8], mut piece: impl FnMut() -> usize) -> Result<(), DownReason> {
        while !bytes.is_empty() {
            let (now, rest) = bytes.split_at(piece().clamp(1, bytes.len()));
            self.peer.write_all(now).unwrap();
            self.read()?;
            bytes = rest;
        }
        Ok(())
    }

    /// Reads until nothing waits, or the stream has ended.
    fn read(&mut self) -> Result<(), DownReason> {
        let Self { socket, peer: _, inbox, rings, slots, posts, received } = self;
        let mut sink = |event: Event<'_>| {
            let Event::Received { header, payload, posted } = event else { panic!("{event:?}") };
            let (at, bytes) = payload.map_or((0, 0), |(landing, bytes)| (landing.sequence, bytes));
            let mut content = vec![0; bytes as usize];
            (if posted { &*posts } else { &*slots }).read(u64::from(at) * SLOT as u64, &mut content).unwrap();
            received.push((header.to_vec(), payload, posted, content));
        };
        loop {
            while inbox.next(rings, &mut sink)? {}
            match inbox.read(socket.as_fd(), rings)? {
                Ok(Input::End) => return Ok(()),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => panic!("{error}"),
            }
        }
    }
}

fn end(protection: LinkProtection, frames: &[Frame]) -> End {
    let [_, records] = ends(protection);
    End::new(records.opener, frames)
}

/// Frames of every kind and length, so many that each has a slot.
fn drawn(draw: &mut Draw) -> Vec<Frame> {
    let frame = |number| {
        let most = [0, 1, 100, 5000, 0, LARGE, 0, SLOT - 1][draw.below(8) as usize];
        let exact = [0, 1, LARGE - 1, LARGE, LARGE + 1, 3 * LARGE, SLOT][draw.below(7) as usize];
        let bytes = match draw.below(8) {
            0..3 => None,
            3..5 => Some(exact),
            _ => Some(1 + draw.below(most as u64 + 1) as usize),
        };
        Frame::new(number, draw.below(MAX_HEADER as u64 + 1) as usize, bytes, draw.below(2) == 0)
    };
    (0..SLOTS).map(frame).collect()
}

/// A head with a small payload, two large ones of which one is posted, and what is behind them.
fn few() -> Vec<Frame> {
    let frame = |(number, (payload, post))| Frame::new(number, 40, payload, post);
    let payloads = [(Some(100), false), (Some(LARGE + 300), true), (Some(LARGE), false), (None, false)];
    payloads.into_iter().enumerate().map(frame).collect()
}

/// Each byte around a record's begin and end, and some within its data.
fn places(wire: &[u8]) -> Vec<usize> {
    let begins = begins(wire);
    let near = begins.iter().flat_map(|(at, _)| at.saturating_sub(TAG + 3)..*at + LENGTH + 3);
    let mut places: Vec<usize> = near.chain((0..wire.len()).step_by(1499)).collect();
    places.extend(wire.len() - TAG..wire.len());
    places.retain(|at| *at < wire.len());
    places.sort_unstable();
    places.dedup();
    places
}

#[test]
fn whatever_the_records_the_same_lands() {
    let first = seed();
    for seed in (0..12).map(|more| first.wrapping_add(more)) {
        println!("HARMONAIZE_SEED={seed}");
        let mut draw = Draw::new(seed);
        let frames = drawn(&mut draw);
        for protection in PROTECTIONS {
            let cut = cut(protection, &frames, &mut draw);
            let layouts = [sent(protection, &frames), filled(protection, &frames), cut];
            for (layout, wire) in layouts.iter().enumerate() {
                let mut end = end(protection, &frames);
                let most = [30, 3000, 50_000][draw.below(3) as usize];
                let piece = || 1 + draw.below(most) as usize;
                assert_eq!(end.take(wire, piece), Ok(()), "seed {seed}, {protection}, layout {layout}");
                let right = end.received == expected(&frames);
                assert!(right, "seed {seed}, {protection}, layout {layout}: {} events", end.received.len());
            }
        }
    }
}

#[test]
fn a_byte_at_a_time_lands_as_well() {
    let frames = few();
    for protection in PROTECTIONS {
        for wire in [sent(protection, &frames), filled(protection, &frames)] {
            let mut end = end(protection, &frames);
            assert_eq!(end.take(&wire, || 1), Ok(()), "{protection}");
            assert!(end.received == expected(&frames), "{protection}: {} events", end.received.len());
        }
    }
}

#[test]
fn a_stream_that_pauses_anywhere_tells_of_whole_records_alone() {
    let frames = few();
    for protection in PROTECTIONS {
        for wire in [sent(protection, &frames), filled(protection, &frames)] {
            let records = begins(&wire);
            for at in places(&wire) {
                let mut end = end(protection, &frames);
                assert_eq!(end.take(&wire[..at], || LARGE), Ok(()), "{protection}, {at}");
                let next = records.iter().rev().find(|(begin, _)| *begin <= at).unwrap();
                let frames_whole = whole(&frames, next.1);
                assert!(end.received == expected(&frames)[..frames_whole], "{protection}, {at}");
                assert_eq!(end.take(&wire[at..], || LARGE), Ok(()), "{protection}, {at}");
                assert!(end.received == expected(&frames), "{protection}, {at}");
            }
        }
    }
}

/// What was right before it is told, and nothing else.
#[test]
fn a_changed_bit_anywhere_ends_the_path_and_tells_nothing_of_its_frame() {
    let frames = few();
    for protection in PROTECTIONS {
        for wire in [sent(protection, &frames), filled(protection, &frames)] {
            let records = begins(&wire);
            for at in places(&wire) {
                let mut changed = wire.clone();
                changed[at] ^= 1 << (at % 8);
                let mut end = end(protection, &frames);
                let mut outcome = end.take(&changed, || LARGE);
                if outcome.is_ok() {
                    end.peer.shutdown(std::net::Shutdown::Write).unwrap();
                    outcome = end.read();
                }
                let (begin, plain) = records.iter().rev().find(|(begin, _)| *begin <= at).unwrap();
                // A length that has grown waits for more than comes.
                let of_length = at - begin < LENGTH;
                let right = match &outcome {
                    Err(DownReason::Forged(_)) => true,
                    Err(DownReason::Network(_)) => of_length,
                    _ => false,
                };
                assert!(right, "{protection}, {at}: {outcome:?}");
                let received = &expected(&frames)[..whole(&frames, *plain)];
                assert!(end.received == received, "{protection}, {at}: {} events", end.received.len());
            }
        }
    }
}

/// So it is verified and copied in one pass, and no record of it has to wait in the buffer for the rest of a head.
#[test]
fn a_large_payload_has_records_of_its_own() {
    let sizes = [None, Some(10), Some(2 * LARGE + 5), Some(20), Some(LARGE), Some(LARGE)];
    let frame = |(number, payload)| Frame::new(number, 40, payload, false);
    let frames: Vec<Frame> = sizes.into_iter().enumerate().map(frame).collect();
    let head = WIRE + 40;
    for protection in PROTECTIONS {
        let wire = sent(protection, &frames);
        let mut plain: Vec<usize> = begins(&wire).iter().map(|(_, plain)| *plain).collect();
        plain.push(frames.iter().map(Frame::bytes).sum());
        let lengths: Vec<usize> = plain.windows(2).map(|two| two[1] - two[0]).collect();
        let between = [3 * head + 10, 2 * head + 20, head];
        let expected = [between[0], LARGE, LARGE, 5, between[1], LARGE, between[2], LARGE];
        assert_eq!(lengths, expected, "{protection}");
    }
}

/// Else a tenant could have its peers' hosts take their links for tampered with.
#[test]
fn a_tenant_that_writes_to_what_is_sent_breaks_no_tag() {
    let shared = Memory::shared(SLOT as u64, "sent").unwrap();
    // As the tenant has it.
    let theirs = Memory::map(shared.fd().unwrap().try_clone_to_owned().unwrap(), SLOT as u64).unwrap();
    let frame = |number| Frame::new(number, 40, Some(SLOT), number % 2 == 0);
    let frames: Vec<Frame> = (0..SLOTS).map(frame).collect();
    for protection in PROTECTIONS {
        let [ours, _] = ends(protection);
        let mut outbox = Outbox::new(frames.len(), Some(ours.sealer));
        for (number, frame) in frames.iter().enumerate() {
            let span = Span::new(&shared, 0, SLOT as u64).unwrap();
            outbox.push(&frame.header, Some((landing(number), span, Tag(0)))).unwrap();
        }
        let mut end = end(protection, &frames);
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut byte = 0_u8;
                while !over.load(Ordering::Relaxed) {
                    byte = byte.wrapping_add(1);
                    theirs.write(0, &[byte; SLOT]).unwrap();
                }
            });
            let mut outcome: Result<(), DownReason> = Ok(());
            while !outbox.is_empty() && outcome.is_ok() {
                let written = outbox.write(end.peer.as_fd(), &mut |_| {});
                let written = written.map_err(|error| DownReason::Network(error.to_string()));
                outcome = written.and_then(|_| end.read());
            }
            over.store(true, Ordering::Relaxed);
            assert_eq!(outcome, Ok(()), "{protection}");
        });
        assert_eq!(end.received.len(), frames.len(), "{protection}");
    }
}
