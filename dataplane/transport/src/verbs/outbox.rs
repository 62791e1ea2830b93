//! Frames of a path that wait until they may go.

use super::exchange::ring;
use super::mailbox::{HEAD, Kind, SLOT};
use super::path::Outlet;
use crate::{Landing, MAX_HEADER, SendError};
use harmonaize_abi::Tag;
use harmonaize_shm::Span;
use std::collections::VecDeque;

/// A frame that waits; its header lies in the queue.
pub(super) struct Frame {
    at: usize,
    header_bytes: u16,
    pub(super) payload: Option<(Landing, Span, Tag)>,
}

/// The queue: headers are copied once, into places that come around.
#[derive(Default)]
pub(super) struct Outbox {
    frames: VecDeque<Frame>,
    headers: Box<[u8]>,
    next: usize,
    most: usize,
}

impl Outbox {
    /// Room for `most` frames.
    pub(super) fn new(most: usize) -> Self {
        let headers = vec![0; most * MAX_HEADER].into_boxed_slice();
        Self { frames: VecDeque::with_capacity(most), headers, next: 0, most }
    }

    /// Lets go of all frames.
    pub(super) fn clear(&mut self) {
        self.frames.clear();
    }

    /// Queues a frame.
    pub(super) fn push(
        &mut self,
        header: &[u8],
        payload: Option<(Landing, Span, Tag)>,
    ) -> Result<(), SendError> {
        let header_bytes = u16::try_from(header.len()).map_err(|_| SendError::Invalid)?;
        if header.len() > MAX_HEADER
            || payload.as_ref().is_some_and(|(_, span, _)| u32::try_from(span.bytes()).is_err())
        {
            return Err(SendError::Invalid);
        }
        if self.frames.len() >= self.most {
            return Err(SendError::Full);
        }
        let at = self.next * MAX_HEADER;
        let room = self.headers.get_mut(at..at + header.len()).ok_or(SendError::Full)?;
        room.copy_from_slice(header);
        self.next = (self.next + 1) % self.most;
        self.frames.push_back(Frame { at, header_bytes, payload });
        Ok(())
    }

    pub(super) fn front(&self) -> Option<&Frame> {
        self.frames.front()
    }

    /// The oldest frame; its header stays in place until the next one is queued.
    pub(super) fn pop(&mut self) -> Option<Frame> {
        self.frames.pop_front()
    }

    pub(super) fn header(&self, frame: &Frame) -> &[u8] {
        self.headers.get(frame.at..frame.at + usize::from(frame.header_bytes)).unwrap_or(&[])
    }

    /// Headers of frames without payload, oldest first.
    pub(super) fn bare_headers(&self) -> impl Iterator<Item = &[u8]> {
        self.frames.iter().filter(|frame| frame.payload.is_none()).map(|frame| self.header(frame))
    }
}

/// Whether a payload travels in the message with its header.
pub(super) fn carried(header_bytes: usize, span: &Span, inline_payload: usize) -> bool {
    span.bytes() <= inline_payload && HEAD + header_bytes + span.bytes() <= SLOT
}

impl Frame {
    /// How it is to travel; none: it must wait for its ring.
    pub(super) fn kind(&self, outlet: &mut Outlet<'_>, asked: &mut bool) -> Option<Kind> {
        let Some((landing, span, _)) = &self.payload else { return Some(Kind::Bare) };
        let bytes = span.bytes() as u32;
        if carried(self.header_bytes.into(), span, outlet.inline_payload) {
            return Some(Kind::Carried(*landing, bytes));
        }
        let ring = ring(outlet.rings, landing.ring);
        if ring.is_some_and(|ring| bytes <= ring.slot_bytes) {
            return Some(Kind::Landed(*landing, bytes));
        }
        if !*asked {
            *outlet.want = Some((*landing, bytes));
            *asked = true;
        }
        None
    }
}
