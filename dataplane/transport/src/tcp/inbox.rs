//! What one path takes in: heads and small payloads through a buffer, large payloads straight into their slots.

use super::frame::{HEAD, Kind, WIRE, Wire};
use super::sys::{self, Piece};
use crate::rings::Rings;
use crate::{DownReason, Event, Landing, MAX_HEADER};
use std::io;
use std::os::fd::BorrowedFd;
use zerocopy::FromBytes;

/// From here on payloads count as large, and little is read ahead of the next, for what is read ahead is copied.
const LARGE: u32 = 16 << 10;

/// How much is read ahead behind a large payload: the next frame's head, most likely.
const AHEAD: usize = 2 * HEAD;

/// Bytes taken from the connection and not yet given on.
#[derive(Debug)]
pub(super) struct Inbox {
    buffer: Box<[u8]>,
    /// What of `buffer` is filled and not used.
    start: usize,
    end: usize,
    /// The frame whose payload is coming in, and its header.
    current: Option<Current>,
    header: [u8; MAX_HEADER],
    /// Whether the last payload was large.
    large: bool,
}

#[derive(Clone, Copy, Debug)]
struct Current {
    landing: Landing,
    bytes: u32,
    filled: u32,
    header_bytes: usize,
}

/// What a read brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Input {
    /// Something, and there may be more.
    More,
    /// Something, and for now no more.
    Last,
    /// The stream has ended.
    End,
}

impl Inbox {
    pub(super) fn new(bytes: usize) -> Self {
        let buffer = vec![0; bytes.max(2 * AHEAD)].into_boxed_slice();
        Self { buffer, start: 0, end: 0, current: None, header: [0; MAX_HEADER], large: false }
    }

    /// One system call: into the slot of the payload that is coming in, and into the buffer behind it.
    /// Call when [`Inbox::next`] has said that it needs more.
    pub(super) fn read(
        &mut self,
        socket: BorrowedFd<'_>,
        rings: &Rings,
    ) -> Result<io::Result<Input>, DownReason> {
        self.compact();
        let mut slot = sys::NOTHING;
        if let Some(current) = &self.current {
            let rest = (current.bytes - current.filled) as usize;
            let view = rings.slot(current.landing, current.bytes)?.range(current.filled as usize, rest);
            let Some(view) = view else {
                return Err(DownReason::Protocol("a payload outgrew its slot".into()));
            };
            slot = Piece { iov_base: view.pointer().cast(), iov_len: rest };
        }
        let ahead = if self.large { AHEAD } else { self.buffer.len() };
        let limit = self.end.saturating_add(ahead).min(self.buffer.len());
        let room = self.buffer.get_mut(self.end..limit).unwrap_or_default();
        let room = Piece { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
        let asked = slot.iov_len + room.iov_len;
        // SAFETY: the slot lies in memory that the ring keeps alive and no reference covers; the room is ours.
        let got = match unsafe { sys::receive(socket, &mut [slot, room]) } {
            Ok(0) => return Ok(Ok(Input::End)),
            Ok(got) => got,
            Err(error) => return Ok(Err(error)),
        };
        let landed = got.min(slot.iov_len);
        if let Some(current) = &mut self.current {
            current.filled += landed as u32;
        }
        self.end += got - landed;
        Ok(Ok(if got < asked { Input::Last } else { Input::More }))
    }

    /// Makes room for a whole head behind what is there.
    fn compact(&mut self) {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.buffer.len() - self.start < HEAD || self.end == self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
    }

    /// Gives on the next frame that is whole; false if more must be read first. Copies what of a payload came through
    /// the buffer.
    pub(super) fn next(
        &mut self,
        rings: &Rings,
        sink: &mut dyn FnMut(Event<'_>),
    ) -> Result<bool, DownReason> {
        if self.current.is_some() {
            return self.finish(rings, sink);
        }
        let input = self.buffer.get(self.start..self.end).unwrap_or_default();
        let Ok((wire, rest)) = Wire::ref_from_prefix(input) else { return Ok(false) };
        let (kind, header_bytes) = wire.decode()?;
        if let Kind::Payload(landing, bytes) = kind {
            rings.slot(landing, bytes)?;
        }
        let Some(header) = rest.get(..header_bytes) else { return Ok(false) };
        let used = WIRE + header_bytes;
        match kind {
            Kind::Heartbeat => {}
            Kind::Bare => sink(Event::Received { header, payload: None }),
            Kind::Payload(landing, bytes) => {
                if let Some(room) = self.header.get_mut(..header_bytes) {
                    room.copy_from_slice(header);
                }
                self.large = bytes >= LARGE;
                self.current = Some(Current { landing, bytes, filled: 0, header_bytes });
                self.start += used;
                return self.finish(rings, sink);
            }
        }
        self.start += used;
        Ok(true)
    }

    /// Moves what the buffer has of the current payload to its slot, and gives the frame on if that was the rest.
    fn finish(&mut self, rings: &Rings, sink: &mut dyn FnMut(Event<'_>)) -> Result<bool, DownReason> {
        let Some(current) = &mut self.current else { return Ok(false) };
        let here = (self.end - self.start).min((current.bytes - current.filled) as usize);
        if here > 0 {
            let slot = rings.slot(current.landing, current.bytes)?.range(current.filled as usize, here);
            let from = self.buffer.get(self.start..self.start + here);
            let (Some(slot), Some(from)) = (slot, from) else {
                return Err(DownReason::Protocol("a payload outgrew its slot".into()));
            };
            // SAFETY: both have `here` bytes; the slot's mapping is never referenced, and the buffer is ours alone.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), slot.pointer(), here) };
            current.filled += here as u32;
            self.start += here;
        }
        if current.filled < current.bytes {
            return Ok(false);
        }
        let header = self.header.get(..current.header_bytes).unwrap_or_default();
        sink(Event::Received { header, payload: Some((current.landing, current.bytes)) });
        self.current = None;
        Ok(true)
    }
}
