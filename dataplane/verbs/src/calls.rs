//! The raw calls under the types, so that libibverbs and the fake stand side by side.

use crate::{
    Access, AsyncEvent, Call, Completion, Depths, Endpoint, Gid, GidEntry, Limits, Path, Port, Status,
};
use harmonaize_shm::Pin;
use rustix::io::Errno;
use std::any::Any;
use std::fmt::Debug;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// An object of the implementation that made it. It destroys itself when dropped, after those made from it, and another
/// implementation answers `EINVAL` to it.
pub type Handle = Arc<dyn Any + Send + Sync>;

/// Most pieces of memory that one work request gathers.
pub const GATHER: usize = 2;

/// A piece of registered memory: `address`, `bytes`, local key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// Where it begins, in the address space of whoever registered it.
    pub address: u64,
    /// How long it is.
    pub bytes: u32,
    /// Key of its region.
    pub key: u32,
}

/// What a work request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// RDMA write.
    Write,
    /// RDMA write that consumes a receive request of the peer.
    WriteWithImmediate,
    /// RDMA read.
    Read,
    /// A datagram.
    Send,
}

/// A work request of the send queue in raw terms.
#[derive(Clone, Debug)]
pub struct SendEntry {
    /// Comes back with its completion.
    pub id: u64,
    /// What it does.
    pub verb: Verb,
    /// The memory that it reads, or reads into.
    pub pieces: [Piece; GATHER],
    /// How many of `pieces` count.
    pub count: usize,
    /// The peer's address, of writes and reads.
    pub remote: u64,
    /// The key of the peer's region, of writes and reads.
    pub remote_key: u32,
    /// Immediate data, in the host's byte order.
    pub immediate: u32,
    /// Whether the call copies the bytes.
    pub inline: bool,
    /// Whether success completes too; failure always does.
    pub signalled: bool,
    /// Of datagrams: address handle, number of the peer's queue pair, its key.
    pub destination: Option<(Handle, u32, u32)>,
}

/// A work request of the receive queue; no bytes: for writes with immediate.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReceiveEntry {
    /// Comes back with its completion.
    pub id: u64,
    /// Where the bytes go.
    pub piece: Piece,
}

/// What a device says of one work request, in raw terms.
#[derive(Debug)]
pub struct CompletionEntry {
    /// The request's.
    pub id: u64,
    /// What became of it.
    pub status: Status,
    /// The library's own code, for the log.
    pub vendor: u32,
    /// Whether `immediate` counts.
    pub with_immediate: bool,
    /// Immediate data, in the host's byte order.
    pub immediate: u32,
    /// Bytes that arrived.
    pub bytes: u32,
    /// Number of its queue pair.
    pub number: u32,
    /// Number of the queue pair that sent a datagram.
    pub source: u32,
}

/// Kind of queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Reliable connection (RC).
    Reliable,
    /// Unreliable datagram (UD).
    Datagram,
}

/// A step of a queue pair's life.
#[derive(Clone, Debug)]
pub enum Transition<'a> {
    /// To INIT.
    Init {
        /// Port of the device, from 1.
        port: u8,
        /// What peers may do, of a reliable one.
        access: Access,
        /// Its key, of a datagram one.
        queue_key: u32,
    },
    /// To RTR, of a reliable one.
    ReadyToReceive {
        /// The peer's end.
        remote: &'a Endpoint,
        /// How packets go there.
        path: &'a Path,
        /// The greatest payload of a packet.
        mtu: crate::Mtu,
    },
    /// To RTS, of a reliable one.
    ReadyToSend {
        /// The first packet's number.
        psn: u32,
        /// How packets go there.
        path: &'a Path,
    },
    /// To RTR, of a datagram one.
    DatagramReadyToReceive,
    /// To RTS, of a datagram one.
    DatagramReadyToSend {
        /// The first packet's number.
        psn: u32,
    },
    /// To ERR, from any state.
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
pub struct Registered {
    /// Deregisters when dropped.
    pub handle: Handle,
    /// For this host's own work requests.
    pub local_key: u32,
    /// For those of peers.
    pub remote_key: u32,
}

/// A queue pair in raw terms; the inline bytes may be more than asked for. The depths are those asked for even where the
/// device has more, for completion queues are sized by them.
pub struct Created {
    /// Destroys it when dropped.
    pub handle: Handle,
    /// Its number on the device.
    pub number: u32,
    /// Room of its queues, in requests, and the bytes that go inline.
    pub depths: Depths,
}

/// Work requests before this one were taken, this one was refused.
#[derive(Clone, Copy, Debug)]
pub struct Refused {
    /// How many were taken.
    pub taken: usize,
    /// Why the next was not.
    pub errno: Errno,
}

/// The verbs calls under the types. A call either succeeds or leaves nothing behind.
pub trait Calls: Send + Sync + Debug {
    /// Names of the devices, as in `/sys/class/infiniband`, in any order.
    fn names(&self) -> Result<Vec<String>, Errno>;
    /// The context of a device: `ENODEV` if there is none of that name.
    fn open(&self, name: &str) -> Result<Handle, Errno>;
    /// What the device allows.
    fn limits(&self, context: &Handle) -> Result<Limits, Errno>;
    /// A port of the device, without its GIDs.
    fn port(&self, context: &Handle, port: u8) -> Result<Port, Errno>;
    /// Entries of the port's GID table that are in use.
    fn gids(&self, context: &Handle, port: u8) -> Result<Vec<GidEntry>, Errno>;
    /// Readable when the device has an event; non-blocking.
    fn async_fd<'a>(&self, context: &'a Handle) -> Result<BorrowedFd<'a>, Errno>;
    /// The next event of the device, or `None` if there is none now.
    fn async_event(&self, context: &Handle) -> Result<Option<AsyncEvent>, Errno>;
    /// Whether the host still has the device. Not every driver tells of its going, nor fails calls on it.
    fn present(&self, context: &Handle) -> bool;

    /// A protection domain.
    fn domain(&self, context: &Handle) -> Result<Handle, Errno>;
    /// Registers memory, which the region keeps mapped.
    fn register(&self, domain: &Handle, memory: &Pin, access: Access) -> Result<Registered, Errno>;

    /// A completion queue with a channel of its own, and the entries that it really has.
    fn completion_queue(&self, context: &Handle, entries: u32) -> Result<(Handle, u32), (Call, Errno)>;
    /// Readable when the armed queue has a completion; non-blocking.
    fn channel_fd<'a>(&self, queue: &'a Handle) -> Result<BorrowedFd<'a>, Errno>;
    /// Asks for an event at the next completion.
    fn arm(&self, queue: &Handle) -> Result<(), Errno>;
    /// Takes and acknowledges the channel's events; how many.
    fn take_events(&self, queue: &Handle) -> Result<u32, Errno>;
    /// Appends completions, `most` of them at the most; how many.
    fn poll(&self, queue: &Handle, into: &mut Vec<Completion>, most: usize) -> Result<usize, Errno>;

    /// A queue pair in the state RESET, whose completions all come up on `queue`.
    fn queue_pair(
        &self,
        domain: &Handle,
        queue: &Handle,
        kind: Kind,
        depths: &Depths,
    ) -> Result<Created, Errno>;
    /// Takes a queue pair to another state.
    fn modify(&self, pair: &Handle, transition: &Transition<'_>) -> Result<(), Errno>;
    /// Posts the entries in order.
    fn post_send(&self, pair: &Handle, entries: &[SendEntry]) -> Result<(), Refused>;
    /// Posts the entries in order.
    fn post_receive(&self, pair: &Handle, entries: &[ReceiveEntry]) -> Result<(), Refused>;

    /// Where a datagram goes.
    fn address_handle(&self, domain: &Handle, gid: Gid, path: &Path) -> Result<Handle, Errno>;
}

/// Names a queue pair for this process's life, unlike the device's numbers, which come again.
pub(crate) fn request_identity() -> u32 {
    static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(1);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed) & 0x7fff_ffff
}
