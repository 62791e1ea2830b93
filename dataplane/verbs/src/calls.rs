//! The raw calls under the types, so that libibverbs and the fake stand side by side.

use crate::{Access, AsyncEvent, Call, Completion, Depths, Endpoint, Gid, GidEntry, Limits, Path, Port};
use harmonaize_shm::Pin;
use rustix::io::Errno;
use std::any::Any;
use std::fmt::Debug;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// An object of the implementation that made it: it destroys itself when dropped, after those made from it, and another
/// implementation answers `EINVAL` to it.
pub(crate) type Handle = Arc<dyn Any + Send + Sync>;

/// Most pieces of memory that one work request gathers.
pub(crate) const GATHER: usize = 2;

/// A piece of registered memory: `address`, `bytes`, local key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) address: u64,
    pub(crate) bytes: u32,
    pub(crate) key: u32,
}

/// What a work request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Write,
    WriteWithImmediate,
    Read,
    Send,
}

/// A work request of the send queue in raw terms.
#[derive(Clone, Debug)]
pub(crate) struct SendEntry {
    pub(crate) id: u64,
    pub(crate) verb: Verb,
    pub(crate) pieces: [Piece; GATHER],
    pub(crate) count: usize,
    pub(crate) remote: u64,
    pub(crate) remote_key: u32,
    pub(crate) immediate: u32,
    pub(crate) inline: bool,
    pub(crate) signalled: bool,
    /// Of datagrams: where to.
    pub(crate) destination: Option<(Handle, u32, u32)>,
}

/// A work request of the receive queue; no bytes: for writes with immediate.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ReceiveEntry {
    pub(crate) id: u64,
    pub(crate) piece: Piece,
}

/// Kind of queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Reliable,
    Datagram,
}

/// A step of a queue pair's life.
#[derive(Clone, Debug)]
pub(crate) enum Transition<'a> {
    Init {
        port: u8,
        access: Access,
        queue_key: u32,
    },
    ReadyToReceive {
        remote: &'a Endpoint,
        path: &'a Path,
        mtu: crate::Mtu,
    },
    ReadyToSend {
        psn: u32,
        path: &'a Path,
    },
    /// A datagram's: no peer.
    DatagramReadyToReceive,
    DatagramReadyToSend {
        psn: u32,
    },
    Error,
}

impl Transition<'_> {
    pub(crate) fn call(&self) -> Call {
        match self {
            Self::Init { .. } => Call::ToInit,
            Self::ReadyToReceive { .. } | Self::DatagramReadyToReceive => Call::ToReadyToReceive,
            Self::ReadyToSend { .. } | Self::DatagramReadyToSend { .. } => Call::ToReadyToSend,
            Self::Error => Call::ToError,
        }
    }
}

/// A registered region in raw terms.
pub(crate) struct Registered {
    pub(crate) handle: Handle,
    pub(crate) local_key: u32,
    pub(crate) remote_key: u32,
}

/// A queue pair in raw terms; the inline bytes may be more than asked for. The depths are those asked for even where the
/// device has more, for completion queues are sized by them.
pub(crate) struct Created {
    pub(crate) handle: Handle,
    pub(crate) number: u32,
    pub(crate) depths: Depths,
}

/// Work requests before this one were taken, this one was refused.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Refused {
    pub(crate) taken: usize,
    pub(crate) errno: Errno,
}

/// The verbs calls that this crate uses. A call either succeeds or leaves nothing behind.
pub(crate) trait Calls: Send + Sync + Debug {
    fn names(&self) -> Result<Vec<String>, Errno>;
    fn open(&self, name: &str) -> Result<Handle, Errno>;
    fn limits(&self, context: &Handle) -> Result<Limits, Errno>;
    /// Without its GIDs.
    fn port(&self, context: &Handle, port: u8) -> Result<Port, Errno>;
    /// Entries in use.
    fn gids(&self, context: &Handle, port: u8) -> Result<Vec<GidEntry>, Errno>;
    /// Non-blocking.
    fn async_fd<'a>(&self, context: &'a Handle) -> Result<BorrowedFd<'a>, Errno>;
    fn async_event(&self, context: &Handle) -> Result<Option<AsyncEvent>, Errno>;
    /// Whether the host still has the device. Not every driver tells of its going, nor fails calls on it.
    fn present(&self, context: &Handle) -> bool;

    fn domain(&self, context: &Handle) -> Result<Handle, Errno>;
    fn register(&self, domain: &Handle, memory: &Pin, access: Access) -> Result<Registered, Errno>;

    /// A completion queue with a channel of its own, and the entries that it really has.
    fn completion_queue(&self, context: &Handle, entries: u32) -> Result<(Handle, u32), (Call, Errno)>;
    /// Non-blocking.
    fn channel_fd<'a>(&self, queue: &'a Handle) -> Result<BorrowedFd<'a>, Errno>;
    fn arm(&self, queue: &Handle) -> Result<(), Errno>;
    /// Takes and acknowledges the channel's events; how many.
    fn take_events(&self, queue: &Handle) -> Result<u32, Errno>;
    fn poll(&self, queue: &Handle, into: &mut Vec<Completion>, most: usize) -> Result<usize, Errno>;

    fn queue_pair(
        &self,
        domain: &Handle,
        queue: &Handle,
        kind: Kind,
        depths: &Depths,
    ) -> Result<Created, Errno>;
    fn modify(&self, pair: &Handle, transition: &Transition<'_>) -> Result<(), Errno>;
    fn post_send(&self, pair: &Handle, entries: &[SendEntry]) -> Result<(), Refused>;
    fn post_receive(&self, pair: &Handle, entries: &[ReceiveEntry]) -> Result<(), Refused>;

    fn address_handle(&self, domain: &Handle, gid: Gid, path: &Path) -> Result<Handle, Errno>;
}

/// Names a queue pair for this process's life, unlike the device's numbers, which come again.
pub(crate) fn request_identity() -> u32 {
    static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(1);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed) & 0x7fff_ffff
}
