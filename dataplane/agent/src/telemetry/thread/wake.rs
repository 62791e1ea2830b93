//! When the telemetry thread wakes: for events, for who asks, and for what is due.

use super::{BACKOFF_FACTOR, BEGINNING_NS, FAST_INTERVAL, GATHER, QUIET_NS, Thread};
use crate::telemetry::clock::monotonic_ns;
use crate::telemetry::cpu_budget::nanoseconds;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::AsFd;
use std::time::Duration;

impl Thread {
    /// Sleeps until events come, somebody asks, or something is due.
    pub(super) fn wait(&mut self) {
        let now_ns = monotonic_ns();
        let mut until_ns = self.round_ns;
        if self.is_busy(now_ns) {
            until_ns = until_ns.min(self.next_sample_ns(now_ns)).min(self.read_all.due_ns());
        }
        until_ns = self.waiting.iter().map(|(due_ns, _)| *due_ns).fold(until_ns, u64::min);
        let mut left = Duration::from_nanos(until_ns.saturating_sub(now_ns));
        // While events gather, they do not wake it; late round trips do.
        let gather = if self.throttled { GATHER * BACKOFF_FACTOR } else { GATHER };
        let rest = self.wake_credit.delay(now_ns).min(gather);
        let ring = self.source.event_fd().filter(|_| rest.is_zero());
        let late = self.source.late_rtt_fd().filter(|_| self.may_sample_late(now_ns));
        if ring.is_none() {
            let most = if rest.is_zero() { self.sample_cycle.min_interval() } else { rest };
            left = left.min(most);
        }
        let bell = self.bell.as_fd();
        // What does not wake it leaves its place to the bell.
        let fds = [bell, ring.unwrap_or(bell), late.unwrap_or(bell)];
        let mut fds = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        let left = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        // An interrupted sleep is a short one.
        let _ = poll(&mut fds, Some(&left));
        if fds.first().is_some_and(|bell| !bell.revents().is_empty()) {
            let mut count = [0; 8];
            let _ = rustix::io::read(&*self.bell, &mut count);
        }
    }

    /// Whether there is processor time for a late round trip.
    fn may_sample_late(&self, now_ns: u64) -> bool {
        !self.throttled && self.late_rtt_credit.delay(now_ns).is_zero()
    }

    /// Whether flows are looked at for a late round trip.
    pub(super) fn acts_on_late(&self, now_ns: u64) -> bool {
        self.urgent && self.may_sample_late(now_ns)
    }

    /// When flows under way are looked at next.
    pub(super) fn next_sample_ns(&self, now_ns: u64) -> u64 {
        let begins = now_ns.saturating_sub(self.woken_ns) < BEGINNING_NS;
        let wanted = !self.throttled && (begins || self.analysis.is_pending());
        let close = wanted && self.fast_credit.delay(now_ns).is_zero() || self.acts_on_late(now_ns);
        let close_ns = self.sampled_ns.saturating_add(nanoseconds(FAST_INTERVAL));
        if close { close_ns.min(self.sample_cycle.due_ns()) } else { self.sample_cycle.due_ns() }
    }

    pub(super) fn is_busy(&self, now_ns: u64) -> bool {
        self.own_flows.any() || self.sampler.any_active() || now_ns.saturating_sub(self.busy_ns) < QUIET_NS
    }
}
