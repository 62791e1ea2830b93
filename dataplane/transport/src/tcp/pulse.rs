//! The sending half of a path, and its signs of life, which another thread than the endpoint's gives.
//!
//! Only the acceptor's thread gives them, so that a peer counts a host as gone when it is, and not because its poll loop is late.

use super::outbox::Outbox;
use socket2::Socket;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError, Weak};

/// A connection with the frames that are not yet with the kernel.
#[derive(Debug)]
pub(super) struct Pulse {
    pub(super) socket: Socket,
    outbox: Mutex<Outbox>,
    /// Since the last beat.
    wrote: AtomicBool,
}

impl Pulse {
    pub(super) fn new(socket: Socket, outbox: Outbox) -> Self {
        Self { socket, outbox: Mutex::new(outbox), wrote: AtomicBool::new(false) }
    }

    /// The frames. Cost: a lock that nobody else wants, but for a few bytes of a silent path's heartbeat.
    pub(super) fn outbox(&self) -> MutexGuard<'_, Outbox> {
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something was written: the next beat has nothing to say.
    pub(super) fn note_write(&self) {
        self.wrote.store(true, Ordering::Relaxed);
    }

    /// Gives a sign of life, if nothing was written since the last beat.
    fn beat(&self) {
        if self.wrote.swap(false, Ordering::Relaxed) {
            return;
        }
        let mut outbox = match self.outbox.try_lock() {
            Ok(outbox) => outbox,
            Err(TryLockError::Poisoned(outbox)) => outbox.into_inner(),
            // The endpoint writes just now.
            Err(TryLockError::WouldBlock) => return,
        };
        // What is wrong with the connection is the endpoint's to find.
        let _ = outbox.sign_of_life(self.socket.as_fd());
    }
}

/// The paths of links that are up, of all endpoints of an acceptor.
#[derive(Debug, Default)]
pub(super) struct Pulses(Mutex<Vec<Weak<Pulse>>>);

impl Pulses {
    fn lock(&self) -> MutexGuard<'_, Vec<Weak<Pulse>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on the path gives signs of life. True: it is the only one.
    pub(super) fn enter(&self, pulse: Weak<Pulse>) -> bool {
        let mut pulses = self.lock();
        pulses.push(pulse);
        pulses.len() == 1
    }

    /// Has every path give a sign of life; false if there is none any more.
    pub(super) fn beat(&self) -> bool {
        // Endpoints enter paths meanwhile, and do not wait for system calls.
        let mut beating = std::mem::take(&mut *self.lock());
        beating.retain(|pulse| match pulse.upgrade() {
            Some(pulse) => {
                pulse.beat();
                true
            }
            None => false,
        });
        let mut pulses = self.lock();
        beating.append(&mut pulses);
        *pulses = beating;
        !pulses.is_empty()
    }

    pub(super) fn any(&self) -> bool {
        !self.lock().is_empty()
    }
}
