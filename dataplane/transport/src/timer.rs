//! A timer descriptor: readable from the moment it was set for until it is set again.

use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// Set from any thread.
#[derive(Debug)]
pub(crate) struct Timer(OwnedFd);

impl Timer {
    pub(crate) fn new() -> std::io::Result<Self> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        Ok(Self(rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)?))
    }

    /// Readable after `delay` (at once for zero), or never for `None`; not readable until then.
    pub(crate) fn set(&self, delay: Option<Duration>) {
        const NONE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
        let it_value = delay.map_or(NONE, |delay| {
            let delay = delay.clamp(Duration::from_nanos(1), Duration::from_secs(1 << 30));
            Timespec { tv_sec: delay.as_secs() as i64, tv_nsec: i64::from(delay.subsec_nanos()) }
        });
        let value = Itimerspec { it_interval: NONE, it_value };
        if let Err(error) = rustix::time::timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &value) {
            debug_assert!(false, "timerfd_settime: {error}");
        }
    }
}

impl AsFd for Timer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
