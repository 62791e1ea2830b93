//! The tenant's end of a remote attachment.

use super::REMOTE_DEPTH;
use super::channel::{Channel, Frame, Landing, Receiver};
use super::frame::{Header, kind};
use crate::{Breach, EndError, Memory, MemoryError, RingError, Span, TenantEnd};
use harmonaize_abi::{Completion, Submission};
use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use zerocopy::{FromBytes, IntoBytes};

/// The tenant's end.
#[derive(Debug)]
pub struct RemoteTenant {
    channel: Channel,
    state: TenantState,
}

#[derive(Debug)]
struct TenantState {
    memory: Arc<Memory>,
    entries: usize,
    inbox: VecDeque<Completion>,
}

impl RemoteTenant {
    /// The tenant's end from the socket that came with the agent's welcome, with fresh tensor memory.
    pub fn open(socket: OwnedFd, arena_bytes: u64, entries: u32) -> Result<Self, EndError> {
        let bytes = usize::try_from(arena_bytes).map_err(|_| MemoryError::BadSize(arena_bytes))?;
        let (memory, entries) = (Memory::private(bytes)?, entries as usize);
        let channel = Channel::new(socket, entries + 2 * REMOTE_DEPTH)?;
        Ok(Self { channel, state: TenantState { memory, entries, inbox: VecDeque::with_capacity(entries) } })
    }
}

impl Receiver for TenantState {
    fn ready(&self) -> bool {
        self.inbox.len() < self.entries
    }

    fn landing(&mut self, header: &Header) -> Result<Landing, EndError> {
        match header.kind {
            kind::COMPLETION => Ok(Landing::Body(size_of::<Completion>())),
            kind::FETCH => Ok(Landing::Body(0)),
            kind::STORE => Ok(Landing::Tensor(Span::new(&self.memory, header.offset, header.bytes)?)),
            _ => Err(EndError::Protocol(Breach::UnknownKind)),
        }
    }

    fn arrived(&mut self, header: &Header, body: &[u8]) -> Result<Option<Frame>, EndError> {
        let answer = |kind| Header { kind, ..*header };
        match header.kind {
            kind::COMPLETION => {
                let completion =
                    Completion::read_from_bytes(body).map_err(|_| EndError::Protocol(Breach::Completion))?;
                self.inbox.push_back(completion);
                Ok(None)
            }
            kind::FETCH => {
                let span = Span::new(&self.memory, header.offset, header.bytes)?;
                Ok(Some(Frame::with_tensor(&answer(kind::FETCH_DATA), span)))
            }
            _ => Ok(Some(Frame::new(&answer(kind::STORE_DONE), &[]))),
        }
    }
}

impl TenantEnd for RemoteTenant {
    fn memory(&self) -> &Arc<Memory> {
        &self.state.memory
    }

    fn entries(&self) -> u32 {
        self.state.entries as u32
    }

    fn submit(&mut self, submission: &Submission) -> Result<(), EndError> {
        let header = Header { kind: kind::SUBMISSION, ..Default::default() };
        self.channel
            .push(Frame::new(&header, submission.as_bytes()))
            .map_err(|_| RingError::Full(self.state.entries as u64))?;
        self.channel.send()?;
        // Another thread may be asleep on the wake descriptor.
        self.channel.arm()
    }

    fn completion(&mut self) -> Result<Option<Completion>, EndError> {
        Ok(self.state.inbox.pop_front())
    }

    fn progress(&mut self) -> Result<usize, EndError> {
        let received = self.channel.receive(&mut self.state)?;
        Ok(received + self.channel.send()?)
    }

    fn prepare_sleep(&mut self) -> bool {
        !self.channel.closed() && self.state.inbox.is_empty() && self.channel.arm().is_ok()
    }

    fn cancel_sleep(&mut self) {}

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.channel.wake_fd()
    }
}
