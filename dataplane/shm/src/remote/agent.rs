//! The agent's end of a remote attachment.

use super::REMOTE_DEPTH;
use super::channel::{Channel, Frame, Landing, Receiver};
use super::frame::{Header, kind};
use crate::{AgentEnd, EndError, MAX_ENTRIES, MemoryError, Regions, RingError, Span, check_range};
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
        if !entries.is_power_of_two() || entries > MAX_ENTRIES {
            return Err(MemoryError::BadSize(entries.into()).into());
        }
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                .map_err(|source| EndError::System { call: "socketpair", source })?;
        let entries = entries as usize;
        let channel = Channel::new(ours, entries + 2 * REMOTE_DEPTH)?;
        let book = PendingTransfers {
            entries,
            inbox: VecDeque::with_capacity(entries),
            fetches: VecDeque::with_capacity(REMOTE_DEPTH),
            stores: VecDeque::with_capacity(REMOTE_DEPTH),
            unsent_stores: 0,
            done: VecDeque::with_capacity(2 * REMOTE_DEPTH),
        };
        Ok((Self { channel, arena_bytes, pending: book }, theirs))
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
                _ => Err(EndError::Protocol("bytes of a fetch that is not the oldest")),
            },
            kind::STORE_DONE if self.stores.front() != Some(&Tag(header.tag)) => {
                Err(EndError::Protocol("end of a store that is not the oldest"))
            }
            kind::STORE_DONE if self.stores.len() <= self.unsent_stores => {
                Err(EndError::Protocol("end of a store whose bytes have not all been sent"))
            }
            kind::STORE_DONE => Ok(Landing::Body(0)),
            _ => Err(EndError::Protocol("frame of unknown kind")),
        }
    }

    fn arrived(&mut self, header: &Header, body: &[u8]) -> Result<Option<Frame>, EndError> {
        match header.kind {
            kind::SUBMISSION => {
                let submission = Submission::read_from_bytes(body)
                    .map_err(|_| EndError::Protocol("descriptor that cannot be read"))?;
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
