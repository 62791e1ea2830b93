//! The sending half of a path: its signs of life, and what the sender writes of it ([`super::sender`]). Another thread than the
//! endpoint's gives the signs.
//!
//! Only the acceptor's thread gives them, so that a peer counts a host as gone when it is, and not because its poll loop is late.

use super::outbox::Outbox;
use super::sender::Loan;
use socket2::Socket;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError, Weak};

/// Beats without anything else to write after which a path is at rest. They take 10 s by the usual time-out of a peer.
const IDLE_AFTER: u32 = 20;
/// Paths at rest give a sign of life at one beat of so many, all at the same, so that who reads them is woken once for many. A peer is
/// gone after a silence of eight beats or more. So a sign may be three beats late, in which TCP sends a lost one again three times.
const IDLE_BEATS: u32 = 5;
/// Signs of life between two of the longest beats that mark a quick peer. From so many on it may have a shorter
/// time-out than this end. It gives signs of life oftener the less long it waits for ours, so no path to it is at rest.
/// One that is never so quick within [`IDLE_AFTER`] beats waits for 3.8 s or longer.
const QUICK: u32 = 2;

/// A connection with the frames that are not yet with the kernel.
#[derive(Debug)]
pub(super) struct Pulse {
    pub(super) socket: Socket,
    outbox: Mutex<Outbox>,
    loan: Mutex<Loan>,
    /// Since the last beat.
    wrote: AtomicBool,
    /// Reads since the last beat that were signs of life.
    reads: AtomicU32,
    /// Beats since anything was written.
    silent: AtomicU32,
    /// Whether the sign of a beat for paths at rest is still to be given.
    late: AtomicBool,
    /// Bytes that the kernel has taken.
    written: AtomicU64,
}

impl Pulse {
    pub(super) fn new(socket: Socket, outbox: Outbox, loan: Loan) -> Self {
        let (outbox, loan) = (Mutex::new(outbox), Mutex::new(loan));
        let [wrote, late] = [false, false].map(AtomicBool::new);
        let [reads, silent] = [0, 0].map(AtomicU32::new);
        Self { socket, outbox, loan, wrote, reads, silent, late, written: AtomicU64::new(0) }
    }

    /// The frames. Cost: a lock that nobody else wants, but for a few bytes of a silent path's heartbeat.
    pub(super) fn outbox(&self) -> MutexGuard<'_, Outbox> {
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What passes between the endpoint and the sender. Cost: a lock that is held for moments.
    pub(super) fn loan(&self) -> MutexGuard<'_, Loan> {
        self.loan.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something was written: the next beat has nothing to say.
    pub(super) fn note_write(&self, bytes: usize) {
        self.wrote.store(true, Ordering::Relaxed);
        self.written.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// A sign of the peer's life was read.
    pub(super) fn note_read(&self) {
        self.reads.fetch_add(1, Ordering::Relaxed);
    }

    /// Bytes that the kernel has taken.
    pub(super) fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// Has nothing read payloads any more, once it returns. What is to be written still: see [`Outbox::take_pending`].
    pub(super) fn take_pending(&self) -> Vec<u8> {
        let behind = self.loan().close();
        self.outbox().take_pending(&behind)
    }

    /// Has nothing read payloads any more, once it returns.
    pub(super) fn close(&self) {
        self.loan().close();
        self.outbox().close();
    }

    /// Gives a sign of life, if nothing was written since the last beat. Where nothing waits to be written, at rest, it does so
    /// only where it is the `turn` of paths at rest. `may_rest`: beats are the longest, so that the peer can tell this end from one with a
    /// shorter time-out.
    fn beat(&self, may_rest: bool, turn: bool) {
        let wrote = self.wrote.swap(false, Ordering::Relaxed);
        let quick = self.reads.swap(0, Ordering::Relaxed) >= QUICK;
        if wrote || quick || !may_rest {
            self.silent.store(0, Ordering::Relaxed);
        }
        if wrote {
            return;
        }
        let turn = self.late.swap(false, Ordering::Relaxed) || turn;
        let mut outbox = match self.outbox.try_lock() {
            Ok(outbox) => outbox,
            Err(TryLockError::Poisoned(outbox)) => outbox.into_inner(),
            // The endpoint writes just now. If it does not, the next beat is as this one.
            Err(TryLockError::WouldBlock) => return self.late.store(turn, Ordering::Relaxed),
        };
        let silent = self.silent.fetch_add(1, Ordering::Relaxed);
        if silent >= IDLE_AFTER && !turn && outbox.is_empty() {
            return;
        }
        // What is wrong with the connection is the endpoint's to find.
        let _ = outbox.sign_of_life(self.socket.as_fd());
    }
}

/// The paths of links that are up, of all endpoints of an acceptor.
#[derive(Debug, Default)]
pub(super) struct Pulses {
    beating: Mutex<Vec<Weak<Pulse>>>,
    /// How many beats there were.
    beats: AtomicU32,
}

impl Pulses {
    fn lock(&self) -> MutexGuard<'_, Vec<Weak<Pulse>>> {
        self.beating.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on the path gives signs of life. True: it is the only one.
    pub(super) fn enter(&self, pulse: Weak<Pulse>) -> bool {
        let mut pulses = self.lock();
        pulses.push(pulse);
        pulses.len() == 1
    }

    /// Has every path give a sign of life, fewer where it is at rest and may be. Returns false if there is no path any
    /// more.
    pub(super) fn beat(&self, may_rest: bool) -> bool {
        let turn = self.beats.fetch_add(1, Ordering::Relaxed).is_multiple_of(IDLE_BEATS);
        // Endpoints enter paths meanwhile, and do not wait for system calls.
        let mut beating = std::mem::take(&mut *self.lock());
        beating.retain(|pulse| match pulse.upgrade() {
            Some(pulse) => {
                pulse.beat(may_rest, turn);
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    fn pulse() -> (Pulse, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let socket = std::os::fd::OwnedFd::from(ours).into();
        (Pulse::new(socket, Outbox::new(1, None), Loan::new(None)), theirs)
    }

    /// Bytes that the other end has of so many beats, the first of which has this number.
    fn bytes_of(pulse: &Pulse, theirs: &UnixStream, beats: std::ops::Range<u32>) -> u64 {
        let before = rustix::io::ioctl_fionread(theirs).unwrap();
        beats.for_each(|beat| pulse.beat(true, beat.is_multiple_of(IDLE_BEATS)));
        rustix::io::ioctl_fionread(theirs).unwrap() - before
    }

    #[test]
    fn a_path_at_rest_gives_fewer_signs() {
        let (pulse, theirs) = pulse();
        let mut at = 0;
        let mut bytes_of = |beats: u32| {
            at += beats;
            bytes_of(&pulse, &theirs, at - beats..at)
        };
        let sign = bytes_of(1);
        assert!(sign > 0);
        assert_eq!(bytes_of(IDLE_AFTER - 1), u64::from(IDLE_AFTER - 1) * sign);
        assert_eq!(bytes_of(5 * IDLE_BEATS), 5 * sign, "at rest");
        assert_eq!(bytes_of(1), sign);
        assert_eq!(bytes_of(IDLE_BEATS - 1), 0, "the next is to give a sign");
        let outbox = pulse.outbox();
        assert_eq!(bytes_of(1), 0, "the endpoint has the lock");
        drop(outbox);
        assert_eq!(bytes_of(1), sign, "at the beat behind it, whose turn it is not");
        assert_eq!(bytes_of(1), 0, "it is late no more");
        pulse.note_write(1);
        assert_eq!(bytes_of(1), 0, "what was written is a sign");
        assert_eq!(bytes_of(IDLE_AFTER), u64::from(IDLE_AFTER) * sign, "no longer");
        pulse.outbox().push(b"waits", None).unwrap();
        assert_eq!(bytes_of(2), 2, "a byte of what waits each time");
    }

    /// Whenever paths were last written to, their signs are read together. None is silent for longer than a peer waits.
    #[test]
    fn paths_at_rest_give_their_signs_at_the_same_beat() {
        let pulses = Pulses::default();
        let paths: Vec<_> = (0..IDLE_BEATS).map(|_| pulse()).map(|(own, end)| (Arc::new(own), end)).collect();
        paths.iter().for_each(|(path, _)| _ = pulses.enter(Arc::downgrade(path)));
        let heard = |end: &UnixStream| rustix::io::ioctl_fionread(end).unwrap();
        // Each is written to at another beat, after which it goes to rest.
        for (path, _) in &paths {
            path.note_write(1);
            pulses.beat(true);
        }
        let mut silences = vec![0; paths.len()];
        let mut together = 0;
        for beat in 0..10 * IDLE_BEATS + IDLE_AFTER {
            let before: Vec<_> = paths.iter().map(|(_, end)| heard(end)).collect();
            pulses.beat(true);
            let gave: Vec<_> = paths.iter().zip(before).map(|((_, end), had)| heard(end) > had).collect();
            for (silence, gave) in silences.iter_mut().zip(&gave) {
                *silence = if *gave { 0 } else { *silence + 1 };
                assert!(*silence < IDLE_BEATS, "silent for {silence} beats");
            }
            if beat > IDLE_AFTER + IDLE_BEATS {
                assert!(gave.iter().all(|one| *one == gave[0]), "at beat {beat}: {gave:?}");
                together += usize::from(gave[0]);
            }
        }
        assert!(together >= 8, "{together} times");
    }

    /// An end that has 1 s for its peers is to get their signs twice a second. That holds whatever they have for it.
    #[test]
    fn ends_with_different_time_outs_give_every_sign() {
        let beats = 3 * IDLE_AFTER;
        for (may_rest, reads, every) in [(true, QUICK, true), (true, QUICK - 1, false), (false, 0, true)] {
            let (pulse, theirs) = pulse();
            pulse.beat(may_rest, true);
            let sign = rustix::io::ioctl_fionread(&theirs).unwrap();
            for beat in 1..beats {
                (0..reads).for_each(|_| pulse.note_read());
                pulse.beat(may_rest, beat.is_multiple_of(IDLE_BEATS));
            }
            let signs = rustix::io::ioctl_fionread(&theirs).unwrap() / sign;
            assert_eq!(signs == u64::from(beats), every, "{signs} of {beats}, {reads} reads");
        }
    }
}
