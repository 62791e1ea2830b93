//! The agent's end of a remote attachment.

use super::REMOTE_DEPTH;
use super::channel::{Channel, Frame, Landing, Receiver};
use super::frame::{Header, kind};
use crate::{
    AgentEnd, Breach, EndError, InheritedEnd, MAX_ENTRIES, Memory, MemoryError, Regions, RingError, Span,
    check_range,
};
use harmonaize_abi::{Completion, Submission, Tag};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, OwnedFd};
use zerocopy::{FromBytes, IntoBytes};

/// The agent's end.
#[derive(Debug)]
pub struct RemoteEnd {
    channel: Channel,
    arena_bytes: u64,
    pending: PendingTransfers,
}

/// What the tenant owes, and what it sent.
#[derive(Debug)]
struct PendingTransfers {
    entries: usize,
    inbox: VecDeque<Submission>,
    fetches: VecDeque<(Tag, Span)>,
    stores: VecDeque<Tag>,
    /// Stores that have not left whole: the last ones of `stores`.
    unsent_stores: usize,
    done: VecDeque<Tag>,
}

impl RemoteEnd {
    /// A new attachment to `arena_bytes` of the tenant's memory, and the socket for the tenant's end. At most
    /// `entries` (a power of two up to [`MAX_ENTRIES`]) operations are in flight.
    pub fn create(arena_bytes: u64, entries: u32) -> Result<(Self, OwnedFd), EndError> {
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                .map_err(|source| EndError::System { call: "socketpair", source })?;
        Ok((Self::of(ours, arena_bytes, entries)?, theirs))
    }

    fn of(socket: OwnedFd, arena_bytes: u64, entries: u32) -> Result<Self, EndError> {
        if !entries.is_power_of_two() || entries > MAX_ENTRIES {
            return Err(MemoryError::BadSize(entries.into()).into());
        }
        let entries = entries as usize;
        let channel = Channel::new(socket, entries + 2 * REMOTE_DEPTH)?;
        let book = PendingTransfers {
            entries,
            inbox: VecDeque::with_capacity(entries),
            fetches: VecDeque::with_capacity(REMOTE_DEPTH),
            stores: VecDeque::with_capacity(REMOTE_DEPTH),
            unsent_stores: 0,
            done: VecDeque::with_capacity(2 * REMOTE_DEPTH),
        };
        Ok(Self { channel, arena_bytes, pending: book })
    }

    /// Goes on where the end of another process stands, which [`AgentEnd::hand_over`] describes.
    ///
    /// # Errors
    /// If that is no such end, or the kernel refuses.
    pub fn inherit(from: InheritedEnd, arena_bytes: u64) -> Result<Self, EndError> {
        let InheritedEnd { entries, taken: [came, _], put: [unsent, ..], regions, descriptors } = from;
        let other = || EndError::Protocol(Breach::InheritedSocket);
        let mut descriptors = descriptors.into_iter();
        let (frames, socket) = (descriptors.next().ok_or_else(other)?, descriptors.next().ok_or_else(other)?);
        let bytes = came.checked_add(unsent).filter(|_| regions.is_empty()).ok_or_else(other)?;
        let frames = Memory::map(frames, bytes.max(1))?;
        let mut all = vec![0; frames.bytes()];
        frames.read(0, &mut all)?;
        let split = all.split_at_checked(came as usize).ok_or_else(other)?;
        let (came, unsent) = (split.0, split.1.get(..unsent as usize).ok_or_else(other)?);
        let mut end = Self::of(socket, arena_bytes, entries)?;
        end.channel.resume(came, unsent, &mut end.pending)?;
        Ok(end)
    }

    fn check(&self, offset: u64, bytes: usize) -> Result<u64, EndError> {
        check_range(offset, bytes as u64, self.arena_bytes)?;
        Ok(bytes as u64)
    }
}

impl Receiver for PendingTransfers {
    fn ready(&self) -> bool {
        self.inbox.len() < self.entries
    }

    fn landing(&mut self, header: &Header) -> Result<Landing, EndError> {
        match header.kind {
            kind::SUBMISSION => Ok(Landing::Body(size_of::<Submission>())),
            kind::FETCH_DATA => match self.fetches.front() {
                Some((tag, span)) if tag.0 == header.tag && span.bytes() as u64 == header.bytes => {
                    Ok(Landing::Tensor(span.clone()))
                }
                _ => Err(EndError::Protocol(Breach::FetchOrder)),
            },
            kind::STORE_DONE if self.stores.front() != Some(&Tag(header.tag)) => {
                Err(EndError::Protocol(Breach::StoreOrder))
            }
            kind::STORE_DONE if self.stores.len() <= self.unsent_stores => {
                Err(EndError::Protocol(Breach::StoreUnsent))
            }
            kind::STORE_DONE => Ok(Landing::Body(0)),
            _ => Err(EndError::Protocol(Breach::UnknownKind)),
        }
    }

    fn arrived(&mut self, header: &Header, body: &[u8]) -> Result<Option<Frame>, EndError> {
        match header.kind {
            kind::SUBMISSION => {
                let submission =
                    Submission::read_from_bytes(body).map_err(|_| EndError::Protocol(Breach::Descriptor))?;
                self.inbox.push_back(submission);
            }
            kind::FETCH_DATA => {
                self.fetches.pop_front();
                self.done.push_back(Tag(header.tag));
            }
            _ => {
                self.stores.pop_front();
                self.done.push_back(Tag(header.tag));
            }
        }
        Ok(None)
    }
}

impl AgentEnd for RemoteEnd {
    fn submission(&mut self) -> Result<Option<Submission>, EndError> {
        Ok(self.pending.inbox.pop_front())
    }

    fn complete(&mut self, completion: &Completion) -> Result<(), EndError> {
        let header = Header { kind: kind::COMPLETION, ..Default::default() };
        // The tenant does not read: it has as many completions ahead of it as it may have operations.
        self.channel
            .push(Frame::new(&header, completion.as_bytes()))
            .map_err(|_| RingError::Full(self.pending.entries as u64).into())
    }

    fn memory(&self) -> Option<&Regions> {
        None
    }

    fn arena_bytes(&self) -> u64 {
        self.arena_bytes
    }

    fn entries(&self) -> u32 {
        self.pending.entries as u32
    }

    fn hand_over(&self) -> Result<InheritedEnd, EndError> {
        let rest = self.channel.partial_frames().filter(|_| self.rests());
        let (rest, unsent) = rest.ok_or(EndError::Protocol(Breach::UnderWay))?;
        let header = Header { kind: kind::SUBMISSION, ..Default::default() };
        let inbox = self.pending.inbox.iter();
        let mut came: Vec<u8> =
            inbox.flat_map(|submission| [header.as_bytes(), submission.as_bytes()].concat()).collect();
        came.extend(rest);
        let bytes = came.len() + unsent.len();
        let (frames, frames_fd) = Memory::granted(bytes.max(1) as u64, "harmonaize-frames")?;
        frames.write(0, &came)?;
        frames.write(came.len() as u64, &unsent)?;
        Ok(InheritedEnd {
            entries: self.entries(),
            taken: [came.len() as u64, 0],
            put: [unsent.len() as u64, 0, 0],
            regions: Vec::new(),
            descriptors: vec![frames_fd, self.channel.socket()?],
        })
    }

    fn rests(&self) -> bool {
        let PendingTransfers { fetches, stores, done, .. } = &self.pending;
        fetches.is_empty() && stores.is_empty() && done.is_empty()
    }

    fn fetch(&mut self, tag: Tag, offset: u64, into: Span) -> Result<(), EndError> {
        let bytes = self.check(offset, into.bytes())?;
        if self.pending.fetches.len() >= REMOTE_DEPTH {
            return Err(EndError::Full);
        }
        self.channel
            .push(Frame::new(&Header { kind: kind::FETCH, reserved: 0, tag: tag.0, offset, bytes }, &[]))?;
        self.pending.fetches.push_back((tag, into));
        Ok(())
    }

    fn store(&mut self, tag: Tag, from: Span, offset: u64) -> Result<(), EndError> {
        let bytes = self.check(offset, from.bytes())?;
        if self.pending.stores.len() >= REMOTE_DEPTH {
            return Err(EndError::Full);
        }
        let header = Header { kind: kind::STORE, reserved: 0, tag: tag.0, offset, bytes };
        self.channel.push(Frame::with_tensor(&header, from))?;
        self.pending.stores.push_back(tag);
        Ok(())
    }

    fn progress(&mut self, done: &mut dyn FnMut(Tag)) -> Result<usize, EndError> {
        let mut work = self.channel.send()?;
        self.pending.unsent_stores = self.channel.unsent_tensors();
        let received = self.channel.receive(&mut self.pending);
        while let Some(tag) = self.pending.done.pop_front() {
            done(tag);
            work += 1;
        }
        Ok(work + received?)
    }

    fn flush(&mut self) -> Result<(), EndError> {
        self.channel.send().map(|_| ())
    }

    fn prepare_sleep(&mut self) -> bool {
        !self.channel.closed() && self.pending.inbox.is_empty() && self.channel.arm().is_ok()
    }

    fn cancel_sleep(&mut self, _: bool) {}

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.channel.wake_fd()
    }
}
