//! The two ends of an attachment, whatever way tensors are reached.

use crate::{Breach, InheritedEnd, Memory, MemoryError, Regions, RingError, Span, check_range};
use harmonaize_abi::session::{Offer, Succession};
use harmonaize_abi::{Completion, Submission, Tag};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Why an end cannot go on, or did not take something.
#[derive(Debug, thiserror::Error)]
pub enum EndError {
    /// A queue of this end is full; try again after progress.
    #[error("queue full")]
    Full,
    /// The other side is gone.
    #[error("the other side of the attachment is gone")]
    Closed,
    /// A ring is full that cannot be, or corrupt. The attachment has ended.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// The other side broke the protocol. The attachment has ended.
    #[error("protocol error of the other side: {0}")]
    Protocol(Breach),
    /// A range outside the attachment's memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Fetch or store on a mapped attachment.
    #[error("{0}: not on a mapped attachment")]
    Mapped(&'static str),
    /// A region for an attachment that is not mapped.
    #[error("only a mapped attachment has more memory than its arena")]
    NotMapped,
    /// The RDMA device, or the path to the other side. The attachment has ended.
    #[error("RDMA: {0}")]
    Rdma(String),
    /// The kernel refused. The attachment has ended.
    #[error("{call}: {source}")]
    System {
        /// Which call.
        call: &'static str,
        /// What it said.
        source: rustix::io::Errno,
    },
}

impl EndError {
    /// Whether the attachment goes on (only the call was not taken).
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Full | Self::Memory(_) | Self::Mapped(_) | Self::NotMapped)
    }
}

/// The agent's end, driven by a poll loop. No call blocks or allocates. After an error that is not
/// [transient](EndError::is_transient) the end is of no more use.
pub trait AgentEnd: Send + std::fmt::Debug {
    /// The next descriptor, copied once. Remote: call [`Self::progress`] to receive.
    fn submission(&mut self) -> Result<Option<Submission>, EndError>;

    /// Reports the end of an operation. At most [`Self::entries`] operations are in flight, from the descriptor's arrival
    /// until the tenant has taken the completion, so a full ring is the tenant's breach.
    fn complete(&mut self, completion: &Completion) -> Result<(), EndError>;

    /// The tensors, if mapped.
    fn memory(&self) -> Option<&Regions>;

    /// Bytes of tensor memory, over all regions.
    fn arena_bytes(&self) -> u64;

    /// Whether a tensor may lie there.
    fn holds(&self, offset: u64, bytes: u64) -> bool {
        match self.memory() {
            Some(regions) => regions.locate(offset, bytes).is_ok(),
            None => check_range(offset, bytes, self.arena_bytes()).is_ok(),
        }
    }

    /// Mapped: descriptors may name this memory from now on, at `base`. Allocates.
    fn add_region(&mut self, base: u64, memory: Arc<Memory>) -> Result<(), EndError> {
        let _ = (base, memory);
        Err(EndError::NotMapped)
    }

    /// Mapped: no descriptor may name the region that was added at `base` any more.
    fn remove_region(&mut self, base: u64) -> Option<Arc<Memory>> {
        let _ = base;
        None
    }

    /// Entries of each ring.
    fn entries(&self) -> u32;

    /// What another process needs to go on with this end, which is not used meanwhile. Before that it [rests](Self::rests).
    fn hand_over(&self) -> Result<InheritedEnd, EndError>;

    /// Mapped: the agent is about to end. The tenant may still read results from pages that would be freed with this end.
    fn leave(&self) {}

    /// Inherited: the process that had this end before is gone.
    fn own(&self) {}

    /// Whether no fetch and no store is under way.
    fn rests(&self) -> bool {
        true
    }

    /// Inherited, over RDMA: whether the tenant's process has not come to this one yet. No fetch and no store begins before.
    fn is_away(&self) -> bool {
        false
    }

    /// Remote: copies tensor bytes from `offset` into `into`, later. The span `into` is written until `tag` comes back
    /// from [`Self::progress`], or this end is dropped. Fetches end in the order in which they were asked for.
    fn fetch(&mut self, tag: Tag, offset: u64, into: Span) -> Result<(), EndError>;

    /// Remote: copies `from` to the tensor bytes at `offset`, later; `from` must not change before `tag` comes back from
    /// [`Self::progress`]. Stores end in the order in which they were asked for.
    fn store(&mut self, tag: Tag, from: Span, offset: u64) -> Result<(), EndError>;

    /// Remote: sends and receives what it can within a small budget of system calls. It reports the fetches and stores
    /// that ended, and returns how much was done (0: nothing to do). Mapped: nothing to do.
    fn progress(&mut self, done: &mut dyn FnMut(Tag)) -> Result<usize, EndError>;

    /// Wakes the tenant if it sleeps: once per batch of completions.
    fn flush(&mut self) -> Result<(), EndError>;

    /// Announces that the poll loop will sleep on [`Self::wake_fd`]. `false`: there is work, do not sleep.
    fn prepare_sleep(&mut self) -> bool;

    /// Takes the announcement back, after sleeping or instead of it. `woken`: [`Self::wake_fd`] may be readable; else it is
    /// not looked at, which saves a system call, and what it has ends the next sleep.
    fn cancel_sleep(&mut self, woken: bool);

    /// Readable (level) when there is work, once [`Self::prepare_sleep`] said `true`.
    fn wake_fd(&self) -> BorrowedFd<'_>;
}

/// Makes an end that is not mapped go on where that of another process stands.
pub type InheritEnd = Box<dyn FnOnce(InheritedEnd) -> Result<Box<dyn AgentEnd>, EndError> + Send>;

/// The tenant's end. No call blocks.
pub trait TenantEnd: Send + std::fmt::Debug {
    /// The tensors: the arena (mapped), or this process's own memory (remote).
    fn memory(&self) -> &Arc<Memory>;

    /// Entries of each ring: most operations in flight, counted from submission until the completion is taken.
    fn entries(&self) -> u32;

    /// Submits a descriptor and wakes the agent if it sleeps.
    fn submit(&mut self, submission: &Submission) -> Result<(), EndError>;

    /// The next completion. Remote: call [`Self::progress`] to receive.
    fn completion(&mut self) -> Result<Option<Completion>, EndError>;

    /// Remote: serves the agent's fetches and stores within a small budget; says how much was done. Mapped: nothing to do.
    fn progress(&mut self) -> Result<usize, EndError>;

    /// Over RDMA: the agent has a successor, or is about to. Once its queue pair is known, returns where this end's new one is, and how
    /// many completions have arrived.
    fn succeed(&mut self, step: &Succession) -> Result<Option<(Offer, u64)>, EndError> {
        let _ = step;
        Err(EndError::Protocol(Breach::NoSuccessor))
    }

    /// Whether errors of this end mean nothing: the agent is about to have a successor.
    fn is_paused(&self) -> bool {
        false
    }

    /// Announces sleep on [`Self::wake_fd`]. `false`: there is work, do not sleep.
    fn prepare_sleep(&mut self) -> bool;

    /// Takes the announcement back, after sleeping or instead of it.
    fn cancel_sleep(&mut self);

    /// Readable (level) when there is work, once [`Self::prepare_sleep`] said `true`.
    fn wake_fd(&self) -> BorrowedFd<'_>;
}
