//! Work requests: what a queue pair is asked to do.

use crate::Local;
use crate::calls::{GATHER, Piece, SendEntry, Verb};

/// Memory of the peer's: an address as it named it, and the key of its region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteAddress {
    /// First byte.
    pub address: u64,
    /// The region's remote key.
    pub rkey: u32,
}

/// A work request for a connected queue pair. It is not signalled unless [`Self::signalled`] says so: its memory is then
/// released with the next signalled one after it.
#[derive(Clone, Debug)]
pub struct Work {
    pub(crate) verb: Verb,
    pub(crate) local: [Option<Local>; GATHER],
    remote: RemoteAddress,
    immediate: u32,
    inline: bool,
    signalled: bool,
    pub(crate) token: u64,
}

impl Work {
    fn new(verb: Verb, local: Option<Local>, remote: RemoteAddress) -> Self {
        Self { verb, local: [local, None], remote, immediate: 0, inline: false, signalled: false, token: 0 }
    }

    /// RDMA WRITE of the local bytes to the peer's memory. The peer is not told.
    pub fn write(from: Local, to: RemoteAddress) -> Self {
        Self::new(Verb::Write, Some(from), to)
    }

    /// RDMA WRITE WITH IMMEDIATE: consumes a receive request of the peer's, whose completion carries `immediate`.
    pub fn write_with_immediate(from: Local, to: RemoteAddress, immediate: u32) -> Self {
        Self { immediate, ..Self::new(Verb::WriteWithImmediate, Some(from), to) }
    }

    /// RDMA WRITE WITH IMMEDIATE of no bytes.
    pub fn immediate(immediate: u32) -> Self {
        let nowhere = RemoteAddress { address: 0, rkey: 0 };
        Self { immediate, ..Self::new(Verb::WriteWithImmediate, None, nowhere) }
    }

    /// RDMA READ of the peer's memory into the local bytes.
    pub fn read(into: Local, from: RemoteAddress) -> Self {
        Self::new(Verb::Read, Some(into), from)
    }

    /// A second piece of memory, after the first. There is no third.
    #[must_use]
    pub fn and(mut self, more: Local) -> Self {
        let free = self.local.iter_mut().find(|local| local.is_none());
        debug_assert!(free.is_some(), "a work request gathers two pieces");
        if let Some(free) = free {
            *free = Some(more);
        }
        self
    }

    /// The bytes are copied into the request when it is posted, at most as many as the queue pair's
    /// [`inline_bytes`](crate::Depths::inline_bytes). The memory is free at once, and the token comes all the same. Reads
    /// cannot be inline.
    #[must_use]
    pub fn inline(mut self) -> Self {
        self.inline = true;
        self
    }

    /// Gives a completion of its own.
    #[must_use]
    pub fn signalled(mut self) -> Self {
        self.signalled = true;
        self
    }

    /// What [`settle`](crate::QueuePair::handle_completion) says when it is done.
    #[must_use]
    pub fn token(mut self, token: u64) -> Self {
        self.token = token;
        self
    }

    /// Bytes that it moves.
    pub fn bytes(&self) -> u64 {
        self.local.iter().flatten().map(|local| local.span().bytes() as u64).sum()
    }

    pub(crate) fn is_inline(&self) -> bool {
        self.inline
    }

    pub(crate) fn entry(&self, id: u64) -> SendEntry {
        let mut pieces = [Piece::default(); GATHER];
        let mut count = 0;
        for (piece, local) in pieces.iter_mut().zip(self.local.iter().flatten()) {
            *piece = local.piece();
            count += 1;
        }
        SendEntry {
            id,
            verb: self.verb,
            pieces,
            count,
            remote: self.remote.address,
            remote_key: self.remote.rkey,
            immediate: self.immediate,
            inline: self.inline,
            signalled: self.signalled,
            destination: None,
        }
    }
}
