//! What a daemon reports to systemd (sd_notify(3)); where it was not started by systemd, nothing.

use sd_notify::NotifyState::{self, MainPid, Ready, Stopping};
use std::time::{Duration, Instant};

/// Reports that the daemon serves.
pub fn ready() {
    report(Ready);
}

/// Reports that another process is the daemon from now on, which is of the same unit.
pub fn succeeded_by(pid: u32) {
    report(MainPid(pid));
}

/// Reports that the daemon goes down.
pub fn stopping() {
    report(Stopping);
}

/// A report that does not arrive leaves the daemon to systemd's time limits, which are there for that.
fn report(state: NotifyState<'_>) {
    let _ = sd_notify::notify(&[state]);
}

/// systemd's watchdog, which ends a daemon whose event loop stands still.
#[derive(Debug)]
pub struct Watchdog {
    interval: Option<Duration>,
    next: Instant,
}

impl Watchdog {
    /// The watchdog that systemd has for this process, if any (`WatchdogSec` of its unit).
    pub fn new(now: Instant) -> Self {
        // Twice in the time that systemd waits, as sd_watchdog_enabled(3) advises.
        Self { interval: sd_notify::watchdog_enabled().map(|limit| limit / 2), next: now }
    }

    /// How often [`Watchdog::alive`] is to be called at least; none where nobody waits for it.
    pub fn interval(&self) -> Option<Duration> {
        self.interval
    }

    /// Reports, if it is time, that the event loop goes round. To be called in each round of it.
    pub fn alive(&mut self, now: Instant) {
        if self.is_due(now) {
            report(NotifyState::Watchdog);
        }
    }

    fn is_due(&mut self, now: Instant) -> bool {
        let Some(interval) = self.interval.filter(|_| now >= self.next) else { return false };
        self.next = now + interval;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn life_is_reported_once_an_interval() {
        let now = Instant::now();
        let mut watchdog = Watchdog { interval: Some(Duration::from_secs(10)), next: now };
        let due = [0, 1, 9, 10, 11, 19, 20].map(|after| watchdog.is_due(now + Duration::from_secs(after)));
        assert_eq!(due, [true, false, false, true, false, false, true]);
        let mut none = Watchdog { interval: None, next: now };
        assert!(!none.is_due(now));
    }
}
