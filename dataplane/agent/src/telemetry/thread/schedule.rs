//! When the telemetry thread wakes: for events, for commands, and for what is due.

use crate::telemetry::reading::Reading;
use crate::telemetry::sampler::Sampler;
use harmonaize_abi::Nanos;
use harmonaize_loader::Collector;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

/// The interval between two looks at interfaces, losses and clocks.
const HOUSEKEEPING_INTERVAL: Duration = Duration::from_secs(1);
/// How long segments are awaited before flows' ends are told to the first who asks.
const SEGMENTS_TIMEOUT: Duration = Duration::from_millis(20);
/// How long flows' ends are followed for the next who asks.
const FOLLOWED: Duration = Duration::from_secs(10);

/// Who waits for a reading.
pub(super) type Reply = oneshot::Sender<Arc<Reading>>;

/// What is due besides samples.
#[derive(Debug, Default)]
pub(super) struct Schedule {
    next_housekeeping: Nanos,
    /// Until when flows' ends are followed.
    followed_until: Nanos,
    /// Who waits for segments, and until when.
    replies: Vec<(Nanos, Reply)>,
}

/// When to wake, and what besides the bell wakes.
pub(super) struct Wake<'a> {
    pub(super) timeout: Duration,
    events: Option<BorrowedFd<'a>>,
    late_rtts: Option<BorrowedFd<'a>>,
}

impl Schedule {
    /// Returns when to wake next. `next_sample` is none without traffic, `next_marks` without marks that wait, `next_ports`
    /// where RDMA ports show nothing that the programs do not see.
    pub(super) fn next_wake<'a>(
        &self,
        now: Nanos,
        source: &'a dyn Collector,
        sampler: &Sampler,
        [next_sample, next_marks, next_ports]: [Option<Nanos>; 3],
    ) -> Wake<'a> {
        let budget = &sampler.budget;
        let flows = next_sample.map(|due| due.min(budget.read_all.due()));
        let replies = self.replies.iter().map(|(due, _)| *due);
        let due = replies.chain(flows).chain(next_marks).chain(next_ports);
        let due = due.fold(self.next_housekeeping, Nanos::min);
        let mut timeout = due.since(now);
        // Events that gather do not wake; late round trips do. Where none come, nothing gathers, whatever is owed.
        let gather = if sampler.gathers { budget.gather_delay(now) } else { Duration::ZERO };
        let events = source.event_fd().filter(|_| gather.is_zero());
        if events.is_none() {
            timeout = timeout.min(if gather.is_zero() { budget.sample.min_interval() } else { gather });
        }
        Wake { timeout, events, late_rtts: source.late_rtt_fd().filter(|_| budget.allows_late_rtt(now)) }
    }

    /// Whether housekeeping is due; the next is due an interval later.
    pub(super) fn take_housekeeping(&mut self, now: Nanos) -> bool {
        let due = now >= self.next_housekeeping;
        if due {
            self.next_housekeeping = now.after(HOUSEKEEPING_INTERVAL);
        }
        due
    }

    /// Has flows' ends followed for a while.
    pub(super) fn follow(&mut self, now: Nanos) {
        self.followed_until = now.after(FOLLOWED);
    }

    /// Whether flows' ends are followed.
    pub(super) fn follows(&self, now: Nanos) -> bool {
        now <= self.followed_until
    }

    /// Has a reading wait for segments.
    pub(super) fn defer(&mut self, now: Nanos, reply: Reply) {
        self.replies.push((now.after(SEGMENTS_TIMEOUT), reply));
    }

    /// Returns those who have waited for segments.
    pub(super) fn due_replies(&mut self, now: Nanos) -> Vec<Reply> {
        self.replies.extract_if(.., |(due, _)| *due <= now).map(|(_, reply)| reply).collect()
    }
}

impl Wake<'_> {
    /// Sleeps until then, or until somebody rings the bell, and silences it.
    pub(super) fn sleep(&self, bell: &OwnedFd) {
        // What does not wake leaves its place to the bell.
        let fds = [Some(bell.as_fd()), self.events, self.late_rtts];
        let mut fds = fds.map(|fd| PollFd::from_borrowed_fd(fd.unwrap_or(bell.as_fd()), PollFlags::IN));
        let timeout = Timespec {
            tv_sec: i64::try_from(self.timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: self.timeout.subsec_nanos().into(),
        };
        // An interrupted sleep is a short one.
        let _ = poll(&mut fds, Some(&timeout));
        if fds.first().is_some_and(|bell| !bell.revents().is_empty()) {
            let _ = rustix::io::read(bell, &mut [0; 8]);
        }
    }
}
