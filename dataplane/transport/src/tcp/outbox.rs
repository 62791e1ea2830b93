//! The frames of one path that are not yet with the kernel: a bounded queue whose room is made once.
//!
//! On a protected path bytes go from the queue into records, and those to the kernel: a payload that is in records is not read again,
//! and counts as written. Payloads are copied into records, and hashed on the way. They lie in memory that tenants write: a tag over bytes
//! in place could be wrong by the time that they leave, and the peer would take its link for tampered with.

use super::frame::{HEAD, Kind, LARGE, WIRE, Wire};
use super::records::Sealer;
use super::sys::{self, NOTHING, Piece};
use crate::{Landing, MAX_HEADER, SendError};
use harmonaize_abi::Tag;
use harmonaize_shm::Span;
use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use zerocopy::IntoBytes;

/// Pieces per system call: up to 128 frames, or 64 with payloads.
const PIECES: usize = 128;

/// Most bytes offered in one system call. So a path with a large socket buffer does not hold up the other paths.
const MAX_WRITE_BYTES: usize = 256 << 10;

/// Frames in order; the first may be partly written.
#[derive(Debug)]
pub(super) struct Outbox {
    queue: VecDeque<Queued>,
    /// One head of [`HEAD`] bytes for each queued frame, used round and round.
    heads: Box<[u8]>,
    /// Which head is the first frame's.
    first: usize,
    /// Frames that may be queued, beside a heartbeat.
    frames: usize,
    /// Bytes of the first frame that are written.
    written: usize,
    /// Bytes of all payloads.
    payload_bytes: usize,
    /// Makes records of what is written; none on a path without protection.
    sealer: Option<Sealer>,
    /// Nothing goes out any more.
    closed: bool,
    /// Whether no sign of life is given, since another process may go on with the connection.
    frozen: bool,
}

#[derive(Debug)]
struct Queued {
    head_bytes: usize,
    payload: Option<(Span, Tag)>,
}

impl Queued {
    fn payload_bytes(&self) -> usize {
        self.payload.as_ref().map_or(0, |(span, _)| span.bytes())
    }
}

impl Outbox {
    pub(super) fn new(frames: usize, sealer: Option<Sealer>) -> Self {
        let frames = frames.max(1);
        let heads = vec![0; (frames + 1) * HEAD].into_boxed_slice();
        Self {
            queue: VecDeque::with_capacity(frames + 1),
            heads,
            first: 0,
            frames,
            written: 0,
            payload_bytes: 0,
            sealer,
            closed: false,
            frozen: false,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.sealer.as_ref().is_none_or(Sealer::is_empty)
    }

    /// From now on no sign of life is given, or they are again.
    pub(super) fn freeze(&mut self, frozen: bool) {
        self.frozen = frozen;
    }

    /// What makes records of what is written.
    pub(super) fn sealer(&self) -> Option<&Sealer> {
        self.sealer.as_ref()
    }

    /// Whether another frame may be queued.
    pub(super) fn has_room(&self) -> bool {
        self.queue.len() < self.frames
    }

    /// Bytes of the payloads of all frames that are queued.
    pub(super) fn payload_bytes(&self) -> usize {
        self.payload_bytes
    }

    /// Appends a frame without payload as it is sent.
    pub(super) fn encode(header: &[u8], to: &mut Vec<u8>) {
        to.extend_from_slice(Wire::new(Kind::Bare, header.len() as u16).as_bytes());
        to.extend_from_slice(header);
    }

    /// Queues a frame: copies at most 528 bytes.
    pub(super) fn push(
        &mut self,
        header: &[u8],
        payload: Option<(Landing, Span, Tag)>,
    ) -> Result<(), SendError> {
        if header.len() > MAX_HEADER {
            return Err(SendError::Invalid);
        }
        let kind = match &payload {
            None => Kind::Bare,
            Some((landing, span, _)) => {
                Kind::Payload(*landing, u32::try_from(span.bytes()).map_err(|_| SendError::Invalid)?)
            }
        };
        if !self.has_room() {
            return Err(SendError::Full);
        }
        self.append(kind, header, payload.map(|(_, span, tag)| (span, tag)));
        Ok(())
    }

    /// Writes a sign of life: a heartbeat, or one byte of what waits, or records that wait. No frame with a payload ends with that byte,
    /// so that nothing is to be reported.
    pub(super) fn sign_of_life(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        if self.closed || self.frozen {
            return Ok(());
        }
        if let Some(sealer) = self.sealer.as_mut().filter(|sealer| !sealer.is_empty()) {
            return sealer.write(socket).map(drop);
        }
        let bytes = match self.queue.front() {
            None => {
                self.append(Kind::Heartbeat, &[], None);
                WIRE
            }
            Some(frame) if self.written + 1 < frame.head_bytes + frame.payload_bytes() => 1,
            Some(_) => return Ok(()),
        };
        self.write_at_most(bytes, socket, &mut |_| {}).map(drop)
    }

    fn append(&mut self, kind: Kind, header: &[u8], payload: Option<(Span, Tag)>) {
        let wire = Wire::new(kind, header.len() as u16);
        let at = (self.first + self.queue.len()) % (self.frames + 1) * HEAD;
        let head_bytes = WIRE + header.len();
        let Some((start, rest)) =
            self.heads.get_mut(at..at + head_bytes).and_then(|head| head.split_at_mut_checked(WIRE))
        else {
            debug_assert!(false, "no head for frame {} of {}", self.queue.len(), self.frames);
            return;
        };
        start.copy_from_slice(wire.as_bytes());
        rest.copy_from_slice(header);
        let frame = Queued { head_bytes, payload };
        self.payload_bytes += frame.payload_bytes();
        self.queue.push_back(frame);
    }

    /// The head of the frame at `index` in the queue.
    fn head(&self, index: usize, bytes: usize) -> &[u8] {
        let at = (self.first + index) % (self.frames + 1) * HEAD;
        self.heads.get(at..at + bytes).unwrap_or_default()
    }

    /// Offers as many frames as one system call takes: true if all that was offered was taken.
    pub(super) fn write(
        &mut self,
        socket: BorrowedFd<'_>,
        sent: &mut dyn FnMut(Tag),
    ) -> io::Result<(usize, bool)> {
        self.write_at_most(MAX_WRITE_BYTES, socket, sent)
    }

    fn write_at_most(
        &mut self,
        most: usize,
        socket: BorrowedFd<'_>,
        sent: &mut dyn FnMut(Tag),
    ) -> io::Result<(usize, bool)> {
        if let Some(mut sealer) = self.sealer.take() {
            let written = self.write_records(&mut sealer, most, socket, sent);
            self.sealer = Some(sealer);
            return written;
        }
        let mut pieces = [NOTHING; PIECES];
        let (count, offered) = self.gather(most, false, &mut pieces);
        // SAFETY: heads are ours; payloads lie in mappings that the queued spans keep alive.
        let taken = unsafe { sys::send(socket, pieces.get(..count).unwrap_or_default()) }?;
        self.advance(taken, sent);
        Ok((taken, taken == offered))
    }

    /// Fills up the records if they are with the kernel, and offers them to it.
    fn write_records(
        &mut self,
        sealer: &mut Sealer,
        most: usize,
        socket: BorrowedFd<'_>,
        sent: &mut dyn FnMut(Tag),
    ) -> io::Result<(usize, bool)> {
        let mut left = if sealer.is_empty() { most } else { 0 };
        while left > 0 && !self.queue.is_empty() {
            let most = sealer.room().min(left);
            if most == 0 {
                break;
            }
            let mut pieces = [NOTHING; PIECES];
            let (count, bytes) = self.gather(most, true, &mut pieces);
            // SAFETY: heads are ours, payloads lie in mappings that the queued spans keep alive and no reference covers.
            unsafe { sealer.seal(pieces.get(..count).unwrap_or_default()) }?;
            self.advance(bytes, sent);
            left -= bytes;
        }
        sealer.write(socket)
    }

    /// What is to be written next, at most so many bytes: how many pieces and bytes that is. `apart`: a piece of a large payload is alone.
    /// So either end handles it in one pass, and a record of it lands whole.
    fn gather(&self, most: usize, apart: bool, pieces: &mut [Piece; PIECES]) -> (usize, usize) {
        let mut room = pieces.iter_mut();
        let mut offered = 0;
        let mut skip = self.written;
        'frames: for (index, frame) in self.queue.iter().enumerate() {
            if offered >= most || room.len() < 2 {
                break;
            }
            let head = self.head(index, frame.head_bytes);
            let payload = frame.payload.as_ref().map(|(span, _)| span.view());
            let payload = payload.map_or((std::ptr::null(), 0), |view| (view.pointer(), view.bytes()));
            for (pointer, bytes) in [(head.as_ptr(), head.len()), payload] {
                // No head is as long.
                let alone = apart && bytes >= LARGE;
                if alone && offered > 0 {
                    break 'frames;
                }
                let passed = skip.min(bytes);
                skip -= passed;
                let bytes = (bytes - passed).min(most - offered.min(most));
                if bytes > 0
                    && let Some(piece) = room.next()
                {
                    let base = pointer.wrapping_add(passed).cast_mut().cast();
                    *piece = Piece { iov_base: base, iov_len: bytes };
                    offered += bytes;
                }
                if alone {
                    break 'frames;
                }
            }
        }
        (PIECES - room.len(), offered)
    }

    /// Passes over `taken` more bytes, and reports and releases the payloads that are written whole.
    fn advance(&mut self, taken: usize, sent: &mut dyn FnMut(Tag)) {
        self.written += taken;
        while let Some(frame) = self.queue.front() {
            let bytes = frame.head_bytes + frame.payload_bytes();
            if self.written < bytes {
                break;
            }
            self.written -= bytes;
            self.payload_bytes -= frame.payload_bytes();
            self.first = (self.first + 1) % (self.frames + 1);
            if let Some((_, tag)) = self.queue.pop_front().and_then(|frame| frame.payload) {
                sent(tag);
            }
        }
    }

    /// What is to be written still when the link closes. It is what is left of a frame that the peer has a part of, the
    /// frames without payload, then what is `behind` them. On a protected path they are records. Allocates; no payload
    /// is held on to.
    pub(super) fn take_pending(&mut self, behind: &[u8]) -> Vec<u8> {
        if self.closed {
            return Vec::new();
        }
        let mut bytes = Vec::new();
        for (index, frame) in self.queue.iter().enumerate() {
            let skip = if index == 0 { self.written } else { 0 };
            if frame.payload.is_some() && skip == 0 {
                continue;
            }
            let head = self.head(index, frame.head_bytes);
            bytes.extend_from_slice(head.get(skip..).unwrap_or_default());
            if let Some((span, _)) = &frame.payload {
                let from = skip.saturating_sub(frame.head_bytes);
                let rest = span.view().range(from, span.bytes().saturating_sub(from));
                let Some(rest) = rest else { continue };
                let at = bytes.len();
                bytes.resize(at + rest.bytes(), 0);
                let to = bytes.as_mut_ptr().wrapping_add(at);
                // SAFETY: `rest` is a live view; `bytes` was grown by as much behind `at`, and is not part of it.
                unsafe { std::ptr::copy_nonoverlapping(rest.pointer(), to, rest.bytes()) };
            }
        }
        bytes.extend_from_slice(behind);
        self.close();
        match &mut self.sealer {
            // Without its last words the peer sees the connection end.
            Some(sealer) => sealer.finish(&bytes).unwrap_or_default(),
            None => bytes,
        }
    }

    /// Lets go of all frames; nothing goes out any more.
    pub(super) fn close(&mut self) {
        self.queue.clear();
        self.payload_bytes = 0;
        self.closed = true;
    }
}
