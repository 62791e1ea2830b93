//! Completion queues, and what they say became of work requests.

use crate::calls::{CompletionEntry, Handle};
use crate::{Call, Device, VerbsError};
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// What became of a work request: `enum ibv_wc_status`, in the words of the `InfiniBand` specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Status {
    /// Done.
    Success,
    /// The buffer is too short, or an inline or message size is over a limit.
    LocalLength,
    /// The queue pair cannot do this.
    LocalQueuePairOperation,
    /// The local key does not cover the memory.
    LocalProtection,
    /// The queue pair is in the error state, and the request was not begun.
    WorkRequestFlushed,
    /// A memory window could not be bound.
    MemoryWindowBind,
    /// An answer that does not fit the request.
    BadResponse,
    /// The receive buffer is not registered for this access.
    LocalAccess,
    /// The responder refused the request's form.
    RemoteInvalidRequest,
    /// The remote key does not cover the memory, or not this access.
    RemoteAccess,
    /// The responder could not carry it out.
    RemoteOperation,
    /// The peer did not answer in all the retries.
    TransportRetriesExceeded,
    /// The peer had no receive request in all the retries.
    ReceiverNotReadyRetriesExceeded,
    /// The peer aborted.
    RemoteAborted,
    /// The device has failed.
    Fatal,
    /// The answer took too long.
    ResponseTimeout,
    /// Another code of the library's.
    Other(u32),
}

impl Status {
    /// The status behind a code of `enum ibv_wc_status`; `Other` for one that this version does not know.
    pub fn from_code(code: u32) -> Self {
        match code {
            0 => Self::Success,
            1 => Self::LocalLength,
            2 => Self::LocalQueuePairOperation,
            4 => Self::LocalProtection,
            5 => Self::WorkRequestFlushed,
            6 => Self::MemoryWindowBind,
            7 => Self::BadResponse,
            8 => Self::LocalAccess,
            9 => Self::RemoteInvalidRequest,
            10 => Self::RemoteAccess,
            11 => Self::RemoteOperation,
            12 => Self::TransportRetriesExceeded,
            13 => Self::ReceiverNotReadyRetriesExceeded,
            16 => Self::RemoteAborted,
            19 => Self::Fatal,
            20 => Self::ResponseTimeout,
            other => Self::Other(other),
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Success => "success",
            Self::LocalLength => "local length error",
            Self::LocalQueuePairOperation => "local QP operation error",
            Self::LocalProtection => "local protection error",
            Self::WorkRequestFlushed => "work request flushed error",
            Self::MemoryWindowBind => "memory window bind error",
            Self::BadResponse => "bad response error",
            Self::LocalAccess => "local access error",
            Self::RemoteInvalidRequest => "remote invalid request error",
            Self::RemoteAccess => "remote access error",
            Self::RemoteOperation => "remote operation error",
            Self::TransportRetriesExceeded => "transport retry counter exceeded",
            Self::ReceiverNotReadyRetriesExceeded => "RNR retry counter exceeded",
            Self::RemoteAborted => "remote abort error",
            Self::Fatal => "fatal error",
            Self::ResponseTimeout => "response timeout error",
            Self::Other(code) => return write!(f, "completion status {code}"),
        })
    }
}

/// What completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Opcode {
    /// A request of the send queue.
    Send,
    /// A datagram arrived.
    Receive,
    /// The peer's write with immediate arrived, and consumed a receive request.
    ReceiveWriteWithImmediate,
}

const RECEIVE: u64 = 1 << 63;

/// The identity of a work request: which queue pair of this process's life, which queue, which of its requests.
pub(crate) fn request_id(pair: u32, receive: bool, sequence: u32) -> u64 {
    let queue = if receive { RECEIVE } else { 0 };
    queue | u64::from(pair & 0x7fff_ffff) << 32 | u64::from(sequence)
}

/// What a device says of one work request. Made by a [`CompletionQueue`] alone.
#[derive(Debug)]
pub struct Completion(CompletionEntry);

impl From<CompletionEntry> for Completion {
    fn from(entry: CompletionEntry) -> Self {
        Self(entry)
    }
}

impl Completion {
    /// Number of the queue pair that it belongs to.
    pub fn queue_pair(&self) -> u32 {
        self.0.number
    }

    /// What became of the request. After anything but success the queue pair is in the error state.
    pub fn status(&self) -> Status {
        self.0.status
    }

    /// The device's own code beside the status; 0 if it has none.
    pub fn vendor_code(&self) -> u32 {
        self.0.vendor
    }

    /// What completed.
    pub fn opcode(&self) -> Opcode {
        match (self.is_receive(), self.0.with_immediate) {
            (false, _) => Opcode::Send,
            (true, true) => Opcode::ReceiveWriteWithImmediate,
            (true, false) => Opcode::Receive,
        }
    }

    /// Whether it is one of the receive queue; known for errors too.
    pub fn is_receive(&self) -> bool {
        self.0.id & RECEIVE != 0
    }

    /// The peer's immediate data, of a write with immediate that arrived.
    pub fn immediate(&self) -> Option<u32> {
        (self.0.status == Status::Success && self.is_receive() && self.0.with_immediate)
            .then_some(self.0.immediate)
    }

    /// Bytes that arrived, by the peer's write with immediate or as a datagram. A datagram counts with its 40 bytes of
    /// GRH. It is 0 for errors and requests of the send queue.
    pub fn bytes(&self) -> u32 {
        if self.0.status == Status::Success && self.is_receive() { self.0.bytes } else { 0 }
    }

    pub(crate) fn source(&self) -> u32 {
        self.0.source
    }

    pub(crate) fn pair(&self) -> u32 {
        (self.0.id >> 32) as u32 & 0x7fff_ffff
    }

    pub(crate) fn sequence(&self) -> u32 {
        self.0.id as u32
    }
}

/// Where completions of any number of queue pairs come up, with a descriptor to sleep on.
#[derive(Debug)]
pub struct CompletionQueue {
    pub(crate) handle: Opaque,
    pub(crate) device: Arc<Device>,
    entries: u32,
}

/// A handle that says nothing in logs.
#[derive(Clone)]
pub(crate) struct Opaque(pub(crate) Handle);

impl fmt::Debug for Opaque {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("..")
    }
}

impl CompletionQueue {
    /// With room for `entries` completions: the sum of the depths of all queues on it, or it overruns.
    pub fn create(device: &Arc<Device>, entries: u32) -> Result<Arc<Self>, VerbsError> {
        let (handle, entries) =
            device.calls.completion_queue(&device.handle.0, entries).map_err(|(call, errno)| {
                VerbsError::failed(call, format!("{} ({entries} entries)", device.name()))(errno)
            })?;
        Ok(Arc::new(Self { handle: Opaque(handle), device: Arc::clone(device), entries }))
    }

    /// Room for how many completions; at least what was asked for.
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// The device that it is of.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Appends at most `most` completions, says how many. Costs no system call, and no allocation where `into` has room.
    pub fn poll(&self, into: &mut Vec<Completion>, most: usize) -> Result<usize, VerbsError> {
        self.device
            .calls
            .poll(&self.handle.0, into, most)
            .map_err(|errno| self.device.failed(Call::Poll, "completion queue", errno))
    }

    /// Asks for an event on [`Self::wake_fd`] with the next completion. Those that came before it give none: poll once more
    /// after arming, before sleeping.
    pub fn arm(&self) -> Result<(), VerbsError> {
        self.device
            .calls
            .arm(&self.handle.0)
            .map_err(|errno| self.device.failed(Call::Arm, "completion queue", errno))
    }

    /// Readable when an event is there; it stays so until [`Self::take_events`].
    pub fn wake_fd(&self) -> Result<BorrowedFd<'_>, VerbsError> {
        self.device
            .calls
            .channel_fd(&self.handle.0)
            .map_err(|errno| self.device.failed(Call::TakeEvent, "completion queue", errno))
    }

    /// Takes and acknowledges the events that are there, without waiting; says how many. The queue is then no longer armed.
    pub fn take_events(&self) -> Result<u32, VerbsError> {
        self.device
            .calls
            .take_events(&self.handle.0)
            .map_err(|errno| self.device.failed(Call::TakeEvent, "completion queue", errno))
    }
}
