//! How the agent's end comes to the tenant's again after a successor has taken it over. The session knows when the tenant's queue pair is
//! there, and the thread that has the end goes on with it.

use super::channel::connected;
use crate::{Connected, QueuePair, Unconnected, VerbsError};
use harmonaize_abi::session::{Offer, PairEnd};
use harmonaize_shm::EndError;
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The tenant's queue pair, joined to one of the agent's.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) pair: QueuePair<Connected>,
    /// Where it is, and the arena.
    pub(super) tenant: Offer,
    /// How many messages the tenant has.
    pub(super) arrived: u64,
}

/// What an end that was taken over shares with its session.
#[derive(Debug)]
pub(super) struct Rejoining {
    /// How many descriptors had been taken, once that is known.
    taken: OnceLock<u64>,
    arrival: Mutex<Option<Arrival>>,
    has_come: AtomicBool,
    /// Readable once it has come.
    bell: OwnedFd,
    /// Readable with that, or with the end's completion queue.
    wake: OwnedFd,
}

fn system(call: &'static str) -> impl Fn(Errno) -> EndError {
    move |source| EndError::System { call, source }
}

impl Rejoining {
    /// For an end whose completion queue has this descriptor.
    pub(super) fn new(queue: BorrowedFd<'_>) -> Result<Self, EndError> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let bell = eventfd(0, flags).map_err(system("eventfd"))?;
        let wake = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system("epoll_create"))?;
        for fd in [queue, bell.as_fd()] {
            epoll::add(&wake, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
                .map_err(system("epoll_ctl"))?;
        }
        let (taken, arrival, has_come) = (OnceLock::new(), Mutex::default(), AtomicBool::new(false));
        Ok(Self { taken, arrival, has_come, bell, wake })
    }

    /// The end is there, and has taken so many descriptors.
    pub(super) fn begin(&self, taken: u64) {
        // It begins once.
        let _ = self.taken.set(taken);
    }

    /// Whether the queue pair waits to be taken.
    pub(super) fn has_come(&self) -> bool {
        self.has_come.load(Ordering::Acquire)
    }

    /// The queue pair, once.
    pub(super) fn take(&self) -> Option<Arrival> {
        if !self.has_come() {
            return None;
        }
        self.has_come.store(false, Ordering::Relaxed);
        // Empty where it has been read.
        let _ = rustix::io::read(&self.bell, &mut [0_u8; 8]);
        self.arrival.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// What to sleep on.
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

/// Joins an end that was taken over to the tenant's, once.
#[derive(Debug)]
pub struct Rejoin {
    pair: QueuePair<Unconnected>,
    end: PairEnd,
    rejoining: Arc<Rejoining>,
}

impl Rejoin {
    pub(super) fn new(pair: QueuePair<Unconnected>, end: PairEnd, rejoining: Arc<Rejoining>) -> Self {
        Self { pair, end, rejoining }
    }

    /// What the tenant must know.
    pub fn end(&self) -> PairEnd {
        self.end
    }

    /// How many descriptors the end had taken, once it is there.
    pub fn taken(&self) -> Option<u64> {
        self.rejoining.taken.get().copied()
    }

    /// Joins the queue pair to the tenant's, which has so many completions. The end goes on with it.
    ///
    /// # Errors
    /// As of the device.
    pub fn join(self, tenant: &Offer, arrived: u64) -> Result<(), VerbsError> {
        let Self { pair, rejoining, .. } = self;
        let arrival = Arrival { pair: connected(pair, &tenant.end)?, tenant: *tenant, arrived };
        *rejoining.arrival.lock().unwrap_or_else(PoisonError::into_inner) = Some(arrival);
        // The bell first: whoever sees that it has come empties it, and after a later one nobody could sleep. An eventfd fails at its
        // maximum alone, and this one is written once.
        let _ = rustix::io::write(&rejoining.bell, &1_u64.to_ne_bytes());
        rejoining.has_come.store(true, Ordering::Release);
        Ok(())
    }
}
