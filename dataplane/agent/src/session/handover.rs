//! Sessions that are handed over to another process of the agent's. They stand still at the end of a request, and
//! report what they are.

use super::AttachmentId;
use serde::{Deserialize, Serialize};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::{mpsc, watch};

/// Whether sessions and listeners stand still, and where sessions then say what they are.
#[derive(Debug)]
pub struct Freeze {
    frozen: watch::Sender<bool>,
    sessions: mpsc::UnboundedSender<FrozenSession>,
    bound: Arc<AtomicUsize>,
    awaited: Arc<AtomicUsize>,
}

/// One of the attachments that are counted, for as long as this is there.
#[derive(Debug)]
pub(super) struct OneOf(Arc<AtomicUsize>);

impl OneOf {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for OneOf {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A session that stands still: what it is, and its descriptors. These are the connection's, and those that came and
/// belong to no request yet.
#[derive(Debug)]
pub struct FrozenSession {
    /// What it is.
    pub image: SessionImage,
    /// Its descriptors.
    pub descriptors: Vec<OwnedFd>,
}

/// A session as it is handed over.
#[derive(Debug, Serialize, Deserialize)]
pub struct SessionImage {
    /// Which attachment.
    pub attachment: AttachmentId,
    /// Whose.
    pub tenant: String,
    /// Bytes of the arena, and entries of each ring.
    pub size: (u64, u32),
    /// The first offset that nothing has had yet; 0 of an attachment over RDMA, 1 of one through a socket.
    pub(super) next: u64,
    pub(super) regions: Vec<RegionImage>,
    /// Handles that the process has joined and not left.
    pub(super) joined: Vec<u32>,
    /// Requests that are to be asked again, and bytes that came after.
    pub(super) received: Vec<u8>,
    /// Descriptors that came with them.
    pub(super) descriptors: usize,
}

/// A region beside the arena.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct RegionImage {
    pub(super) base: u64,
    pub(super) bytes: u64,
    /// Of the process's own file: device, inode, and the range.
    pub(super) file: Option<(u64, u64, u64, u64)>,
}

impl SessionImage {
    /// How many descriptors come with it.
    pub(crate) fn descriptors(&self) -> usize {
        1 + self.descriptors
    }
}

impl Freeze {
    /// Sessions stand still from the start if `frozen`; with it comes what they are, once they do.
    pub fn new(frozen: bool) -> (Self, mpsc::UnboundedReceiver<FrozenSession>) {
        let (sessions, standing) = mpsc::unbounded_channel();
        let (bound, awaited) = Default::default();
        (Self { frozen: watch::Sender::new(frozen), sessions, bound, awaited }, standing)
    }

    /// One more attachment that ends with this process.
    pub(super) fn bind(&self) -> OneOf {
        OneOf::new(&self.bound)
    }

    /// How many attachments end with this process.
    pub(super) fn bound(&self) -> usize {
        self.bound.load(Ordering::Relaxed)
    }

    /// One more attachment whose process has not come to this agent, a successor.
    pub(super) fn awaits(&self) -> OneOf {
        OneOf::new(&self.awaited)
    }

    /// How many attachments' processes have not come.
    pub(super) fn awaited(&self) -> usize {
        self.awaited.load(Ordering::Relaxed)
    }

    /// From now on sessions and listeners stand still, or go on.
    pub fn set(&self, frozen: bool) {
        self.frozen.send_replace(frozen);
    }

    pub(super) fn watch(&self) -> watch::Receiver<bool> {
        self.frozen.subscribe()
    }

    pub(super) fn stands(&self, session: FrozenSession) {
        // Nobody listens any more where the agent ends.
        let _ = self.sessions.send(session);
    }
}
