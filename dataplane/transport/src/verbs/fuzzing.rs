//! What fuzzers call: readers of the exchange and of mailboxes, and the end of a link, which are private otherwise.

use super::Config;
use super::exchange::Control;
use super::link::{Link, Stage};
use super::mailbox::{Credits, HEAD, Message, SLOT};
use super::rail::Rail;
use crate::{DownReason, Event, LinkId, MAX_HEADER, Ring};
use harmonaize_shm::{Memory, Span};
use harmonaize_verbs::fake::Fabric;
use std::net::{Ipv4Addr, SocketAddr};
use zerocopy::IntoBytes;

/// Reads a frame of the exchange, and the messages of a mailbox.
///
/// # Panics
/// Where what was read is not written as it was, or a message is longer than its slot.
pub fn exchange(bytes: &[u8]) {
    let frame = bytes.get(..bytes.len().min(MAX_HEADER)).unwrap_or_default();
    if let Ok(control) = Control::decode(frame) {
        let mut again = Vec::new();
        control.encode(&mut again);
        assert_eq!(Control::decode(&again).as_ref(), Ok(&control));
    }
    let mut credits = Credits::new(8, 8);
    for (slot, number) in bytes.chunks(SLOT).zip(0..) {
        let Ok(message) = Message::read(slot, number) else { return };
        assert!(message.bytes() <= SLOT, "{message:?}");
        let head = message.head();
        assert_eq!(Message::read(head.as_bytes(), number), Ok(message), "of {HEAD} bytes");
        if credits.read(message.credits).is_err() {
            return;
        }
        while credits.frame() {
            credits.spend();
        }
    }
}

/// Brings a link up between two ends on fake devices, while bytes decide what one of them accepts. Frames are changed, left out,
/// repeated, or others come before them.
///
/// # Panics
/// Where a frame of the peer's makes the end keep more than a link has, or be up with another number of paths.
pub fn accept(bytes: &[u8]) {
    let mut edits = bytes.iter().copied();
    let paths = 1 + usize::from(edits.next().unwrap_or(0) % 3);
    let Some(mut ours) = End::new("ours", Ipv4Addr::new(10, 0, 0, 1), paths) else { return };
    let Some(mut theirs) = End::new("theirs", Ipv4Addr::new(10, 0, 0, 2), paths) else { return };
    loop {
        for frame in std::mem::take(&mut ours.link.outgoing) {
            if theirs.take(&frame).is_err() {
                return;
            }
        }
        let Some(what) = edits.next() else { return };
        let mut frame = match theirs.link.outgoing.pop_front().filter(|_| what & 1 == 0) {
            Some(frame) => frame,
            None => made(what >> 1, &mut edits),
        };
        match what >> 1 & 7 {
            0 if what & 1 == 0 => continue,
            1 => {
                let (at, change) = (edits.next().unwrap_or(0), edits.next().unwrap_or(0));
                if let Some(byte) = frame.get_mut(usize::from(at)) {
                    *byte ^= change;
                }
            }
            2 if ours.take(&frame).is_err() => return,
            _ => {}
        }
        if ours.take(&frame).is_err() {
            return;
        }
    }
}

/// A frame of the exchange whose kind and bytes come from the input.
fn made(kind: u8, edits: &mut impl Iterator<Item = u8>) -> Vec<u8> {
    let mut frame = Vec::new();
    Control::Ready.encode(&mut frame);
    if let Some(place) = frame.get_mut(6) {
        *place = 1 + kind % 8;
    }
    let bytes = usize::from(edits.next().unwrap_or(0)) * 2;
    frame.extend(edits.take(bytes));
    frame.truncate(MAX_HEADER);
    frame
}

/// One end of a link.
struct End {
    rails: Vec<Rail>,
    link: Link,
    paths: usize,
}

impl End {
    /// An end with a ring, whose link beneath is up.
    fn new(device: &str, address: Ipv4Addr, paths: usize) -> Option<Self> {
        let fabric = Fabric::new();
        fabric.add(device, address).ok()?;
        fabric.stop_recording();
        let config = Config {
            devices: vec![device.to_owned()],
            ..Config::new(crate::tcp::Config::new(SocketAddr::from((address, 1))))
        };
        let rails = Rail::open_all(&config, &fabric.devices()).ok()?;
        let mut link = Link::new(LinkId(1), vec![0; paths], rails.len(), 8, 16);
        let memory = Span::new(&Memory::private(4096).ok()?, 0, 4096).ok()?;
        link.rings.attach(3, Ring { memory, slot_bytes: 1024, slots: 4 }).ok()?;
        link.stage = Stage::Exchanging;
        Some(Self { rails, link, paths })
    }

    fn take(&mut self, frame: &[u8]) -> Result<(), DownReason> {
        let mut sink = |event: Event<'_>| {
            if let Event::Received { header, .. } = event {
                assert!(header.len() <= MAX_HEADER, "a header of {} bytes", header.len());
            }
        };
        self.link.handle_control(frame, &mut self.rails, &mut sink)?;
        assert!(self.link.outgoing.len() <= 2 * self.paths + 3, "{} answers", self.link.outgoing.len());
        let sorted = self.link.peer_rings.is_sorted_by(|a, b| a.number < b.number);
        assert!(sorted, "rings twice, or in disorder");
        if self.link.stage == Stage::Up {
            assert_eq!(self.link.paths.len(), self.paths);
            let worked = self.link.work(&mut self.rails, 16, (64, true), &mut sink);
            return worked.map(drop).map_err(|_| DownReason::Closed);
        }
        Ok(())
    }
}
