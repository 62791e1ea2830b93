//! What one path takes in: heads and small payloads through a buffer, large payloads straight to where they land.

use super::frame::{HEAD, Kind, LARGE, WIRE, Wire};
use super::records::{Opened, Opener};
use super::sys::{self, Piece};
use crate::rings::Rings;
use crate::{DownReason, Event, Landing, MAX_HEADER};
use harmonaize_abi::ViewMut;
use harmonaize_shm::Span;
use std::io;
use std::os::fd::BorrowedFd;
use zerocopy::FromBytes;

/// How much is read ahead behind a large payload: the next frame's head, most likely. It is little, for what is read ahead is copied.
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
    /// Whether the last payload was [`LARGE`].
    large: bool,
    /// Verifies what comes in; none on a path without protection.
    opener: Option<Opener>,
}

#[derive(Debug)]
struct Current {
    landing: Landing,
    /// Where the payload goes instead of its slot.
    posted: Option<Span>,
    bytes: u32,
    filled: u32,
    header_bytes: usize,
}

impl Current {
    /// The next `bytes` bytes of where the payload goes.
    fn room<'a>(&'a self, rings: &'a Rings, bytes: usize) -> Result<ViewMut<'a>, DownReason> {
        let all = match &self.posted {
            Some(span) => span.view_mut(),
            None => rings.slot(self.landing, self.bytes)?,
        };
        let outgrown = || DownReason::Protocol("a payload outgrew its slot".into());
        all.range(self.filled as usize, bytes).ok_or_else(outgrown)
    }
}

/// What a read brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Input {
    /// Something, and there may be more.
    More,
    /// Something, and for now no more.
    Last,
    /// A part of a record, which nobody has verified, and for now no more.
    Partial,
    /// The stream has ended.
    End,
}

impl Inbox {
    pub(super) fn new(bytes: usize, opener: Option<Opener>) -> Self {
        let buffer = vec![0; bytes.max(2 * AHEAD)].into_boxed_slice();
        Self { buffer, start: 0, end: 0, current: None, header: [0; MAX_HEADER], large: false, opener }
    }

    /// One system call at most: to where the payload that is coming in lands, and into the buffer behind it. On a protected path only what
    /// is verified counts as filled: bytes behind that are nobody's, and are written again or the link ends. Call when [`Inbox::next`]
    /// has said that it needs more.
    pub(super) fn read(
        &mut self,
        socket: BorrowedFd<'_>,
        rings: &Rings,
    ) -> Result<io::Result<Input>, DownReason> {
        self.compact();
        let mut slot = sys::NOTHING;
        if let Some(current) = &self.current {
            let rest = (current.bytes - current.filled) as usize;
            slot = Piece { iov_base: current.room(rings, rest)?.pointer().cast(), iov_len: rest };
        }
        let ahead = if self.large { AHEAD } else { self.buffer.len() };
        let limit = self.end.saturating_add(ahead).min(self.buffer.len());
        let room = self.buffer.get_mut(self.end..limit).unwrap_or_default();
        let room = Piece { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
        let asked = slot.iov_len + room.iov_len;
        let mut pieces = [slot, room];
        let received = match &mut self.opener {
            // SAFETY: the slot or posted span lies in memory that the ring or `current` keeps alive and no reference covers; the
            // room is ours.
            Some(opener) => unsafe { opener.receive(socket, &mut pieces) }?,
            // SAFETY: as above.
            None => unsafe { sys::receive(socket, &mut pieces) }.map(|got| match got {
                0 => Opened::End,
                got => Opened::Bytes(got, got == asked),
            }),
        };
        let (got, more) = match received {
            Ok(Opened::Bytes(got, more)) => (got, more),
            Ok(Opened::Partial) => return Ok(Ok(Input::Partial)),
            Ok(Opened::End) => return Ok(Ok(Input::End)),
            Err(error) => return Ok(Err(error)),
        };
        let landed = got.min(slot.iov_len);
        if let Some(current) = &mut self.current {
            current.filled += landed as u32;
        }
        self.end += got - landed;
        Ok(Ok(if more { Input::More } else { Input::Last }))
    }

    /// Whether no payload is coming in.
    pub(super) fn is_between(&self) -> bool {
        self.current.is_none()
    }

    /// What was read and not given on.
    pub(super) fn ahead(&self) -> &[u8] {
        self.buffer.get(self.start..self.end).unwrap_or_default()
    }

    /// Goes on with what another process has read; none where there is no room for it.
    pub(super) fn resume(&mut self, ahead: &[u8]) -> Option<()> {
        self.buffer.get_mut(..ahead.len())?.copy_from_slice(ahead);
        (self.start, self.end) = (0, ahead.len());
        Some(())
    }

    /// What verifies what comes in.
    pub(super) fn opener(&self) -> Option<&Opener> {
        self.opener.as_ref()
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
        rings: &mut Rings,
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
            Kind::Bare => sink(Event::Received { header, payload: None, posted: false }),
            Kind::Payload(landing, bytes) => {
                if let Some(room) = self.header.get_mut(..header_bytes) {
                    room.copy_from_slice(header);
                }
                self.large = bytes as usize >= LARGE;
                let posted = rings.begin(landing, bytes)?;
                self.current = Some(Current { landing, posted, bytes, filled: 0, header_bytes });
                self.start += used;
                return self.finish(rings, sink);
            }
        }
        self.start += used;
        Ok(true)
    }

    /// Moves what the buffer has of the current payload to where it lands. Gives the frame on if that was the last of
    /// it.
    fn finish(&mut self, rings: &mut Rings, sink: &mut dyn FnMut(Event<'_>)) -> Result<bool, DownReason> {
        let Some(current) = &mut self.current else { return Ok(false) };
        let here = (self.end - self.start).min((current.bytes - current.filled) as usize);
        if here > 0 {
            let slot = current.room(rings, here)?;
            let from = self.buffer.get(self.start..self.start + here).unwrap_or_default();
            // SAFETY: both have that many bytes; the mapping of slot or posted span is never referenced, and the buffer
            // is ours alone.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), slot.pointer(), from.len()) };
            current.filled += here as u32;
            self.start += here;
        }
        if current.filled < current.bytes {
            return Ok(false);
        }
        let header = self.header.get(..current.header_bytes).unwrap_or_default();
        let (payload, posted) = (Some((current.landing, current.bytes)), current.posted.is_some());
        rings.landed(current.landing);
        self.current = None;
        sink(Event::Received { header, payload, posted });
        Ok(true)
    }
}
