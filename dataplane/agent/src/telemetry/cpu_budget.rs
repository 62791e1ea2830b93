//! The processor time that the telemetry thread may take, by kind of work: together a small share of a core.

use crate::telemetry::clock::thread_time;
use crate::telemetry::cpu_pressure::CpuPressure;
use harmonaize_abi::Nanos;
use std::time::Duration;

/// Shares of a core, as one part in so many. Samples of flows that move much, samples of all active flows, reads of all
/// flows, reads of RDMA ports, wake-ups for events, fast samples, and late round trips. Together 1.8%, but where the longest
/// intervals are reached, as with many RDMA ports: they are read each second whatever it costs. What this thread takes,
/// operations wait for, where all cores are busy. Beside it comes what taking in marks and events costs, which nobody can choose.
const SAMPLE_SHARE: u32 = 166;
const FULL_SAMPLE_SHARE: u32 = 1000;
const READ_ALL_SHARE: u32 = 1000;
const READ_PORTS_SHARE: u32 = 1000;
const WAKE_SHARE: u32 = 200;
const FAST_SAMPLE_SHARE: u32 = 500;
const LATE_RTT_SHARE: u32 = 500;
/// By how much shares fall under CPU pressure, and events gather longer. Samples of flows that move much fall by its square;
/// there are no fast samples at all.
const BACKOFF_FACTOR: u32 = 2;
/// Processor time that each kind of work may save up, and owe: so long it is done at once.
const WAKE_BURST: Duration = Duration::from_micros(500);
const FAST_BURST: Duration = Duration::from_millis(3);
const LATE_RTT_BURST: Duration = Duration::from_millis(2);
/// The longest interval between two samples, unless the configured one is longer.
const MAX_SAMPLE_INTERVAL: Duration = Duration::from_millis(200);
/// The shortest and the longest interval between two samples of all active flows. The next two are those between two reads of
/// all flows, and of RDMA ports. Devices renew their counters every 10 ms at most, and analysis compares no readings that are
/// 2 s apart.
const FULL_SAMPLE_INTERVAL: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(200)];
const READ_ALL_INTERVAL: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(10)];
const READ_PORTS_INTERVAL: [Duration; 2] = [Duration::from_millis(20), Duration::from_secs(1)];
/// The longest time that events wait; [`BACKOFF_FACTOR`] times as long under CPU pressure.
const GATHER: Duration = Duration::from_millis(10);
/// The interval between two checks of CPU pressure.
const PRESSURE_INTERVAL: Duration = Duration::from_millis(200);

/// The shares of all kinds of work, and the processor time that none of them has been charged for yet.
#[derive(Debug)]
pub(crate) struct CpuBudget {
    /// Samples of active flows that move much.
    pub(crate) sample: DutyCycle,
    /// Samples of all active flows.
    pub(crate) full_sample: DutyCycle,
    /// Reads of all flows.
    pub(crate) read_all: DutyCycle,
    /// Reads of RDMA ports.
    pub(crate) read_ports: DutyCycle,
    /// Wake-ups for events.
    pub(crate) wake: Credit,
    /// Samples between those that are due.
    pub(crate) fast_sample: Credit,
    /// Wake-ups and samples for late round trips.
    pub(crate) late_rtt: Credit,
    /// Whether the machine's processors had no time to spare at the last check.
    pub(crate) throttled: bool,
    pub(crate) pressure_due: Nanos,
    pressure: CpuPressure,
    /// The thread's processor time that has been charged.
    charged: Duration,
}

impl CpuBudget {
    /// A budget of the calling thread, which samples flows once per `interval` at most.
    pub(crate) fn new(interval: Duration) -> Self {
        Self {
            sample: DutyCycle::new(SAMPLE_SHARE, [interval, interval.max(MAX_SAMPLE_INTERVAL)]),
            full_sample: DutyCycle::new(FULL_SAMPLE_SHARE, FULL_SAMPLE_INTERVAL),
            read_all: DutyCycle::new(READ_ALL_SHARE, READ_ALL_INTERVAL),
            read_ports: DutyCycle::new(READ_PORTS_SHARE, READ_PORTS_INTERVAL),
            wake: Credit::new(WAKE_SHARE, WAKE_BURST),
            fast_sample: Credit::new(FAST_SAMPLE_SHARE, FAST_BURST),
            late_rtt: Credit::new(LATE_RTT_SHARE, LATE_RTT_BURST),
            throttled: false,
            pressure_due: Nanos(0),
            pressure: CpuPressure::new(),
            charged: thread_time(),
        }
    }

    /// Returns the thread's processor time since the last call.
    pub(crate) fn spent(&mut self) -> Duration {
        let now = thread_time();
        now.saturating_sub(std::mem::replace(&mut self.charged, now))
    }

    /// Whether flows may be sampled without delay.
    pub(crate) fn allows_fast_sample(&self, now: Nanos) -> bool {
        !self.throttled && self.fast_sample.delay(now).is_zero()
    }

    /// Whether a late round trip may wake the thread, and have flows sampled without delay.
    pub(crate) fn allows_late_rtt(&self, now: Nanos) -> bool {
        !self.throttled && self.late_rtt.delay(now).is_zero()
    }

    /// Returns how long events gather before they wake the thread.
    pub(crate) fn gather_delay(&self, now: Nanos) -> Duration {
        self.wake.delay(now).min(GATHER * self.backoff())
    }

    /// Checks CPU pressure when that is due, and adapts the shares.
    pub(crate) fn poll_pressure(&mut self, now: Nanos) {
        if now < self.pressure_due {
            return;
        }
        self.throttled = self.pressure.is_throttled();
        let backoff = self.backoff();
        self.sample.set_backoff(backoff * backoff);
        self.full_sample.set_backoff(backoff);
        self.read_all.set_backoff(backoff);
        self.read_ports.set_backoff(backoff);
        self.pressure_due = now.after(PRESSURE_INTERVAL);
    }

    fn backoff(&self) -> u32 {
        if self.throttled { BACKOFF_FACTOR } else { 1 }
    }
}

/// Work that is repeated: after `cost` of processor time it rests until that was no more than its share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DutyCycle {
    /// The inverse of the share of a core.
    parts: u32,
    /// By how much the share falls.
    backoff: u32,
    /// The shortest interval between two times.
    min_interval: Duration,
    /// The longest interval between two times, whatever they cost.
    max_interval: Duration,
    due: Nanos,
}

impl DutyCycle {
    pub(crate) fn new(parts: u32, [min_interval, max_interval]: [Duration; 2]) -> Self {
        Self { parts, backoff: 1, min_interval, max_interval, due: Nanos(0) }
    }

    /// Divides the share from now on.
    pub(crate) fn set_backoff(&mut self, backoff: u32) {
        self.backoff = backoff;
    }

    pub(crate) fn due(&self) -> Nanos {
        self.due
    }

    /// Returns the shortest interval between two times.
    pub(crate) fn min_interval(&self) -> Duration {
        self.min_interval
    }

    pub(crate) fn is_due(&self, now: Nanos) -> bool {
        now >= self.due
    }

    /// Charges one time that the work was done.
    pub(crate) fn done(&mut self, now: Nanos, cost: Duration) {
        let parts = self.parts.saturating_mul(self.backoff);
        let rest = cost.saturating_mul(parts).clamp(self.min_interval, self.max_interval);
        self.due = now.after(rest);
    }
}

/// Work that comes by itself. It is done at once as long as its share of the time has not been used up, then in
/// batches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Credit {
    parts: u32,
    /// The processor time that may be saved up, and owed.
    limit: i64,
    credit: i64,
    since: Nanos,
}

impl Credit {
    pub(crate) fn new(parts: u32, limit: Duration) -> Self {
        let limit = i64::try_from(limit.as_nanos()).unwrap_or(i64::MAX);
        Self { parts: parts.max(1), limit, credit: limit, since: Nanos(0) }
    }

    /// Takes off what was used, after adding what came meanwhile.
    pub(crate) fn used(&mut self, now: Nanos, cost: Duration) {
        let cost = i64::try_from(cost.as_nanos()).unwrap_or(i64::MAX);
        self.credit = self.earned(now).saturating_sub(cost).max(-self.limit);
        self.since = now;
    }

    /// Returns how long work gathers from now on before the next batch.
    pub(crate) fn delay(&self, now: Nanos) -> Duration {
        let owed = u64::try_from(-self.earned(now)).unwrap_or(0);
        Duration::from_nanos(owed.saturating_mul(self.parts.into()))
    }

    /// What there is with what came since it was last used.
    fn earned(&self, now: Nanos) -> i64 {
        let passed = nanoseconds(now.since(self.since)) / u64::from(self.parts);
        self.credit.saturating_add(i64::try_from(passed).unwrap_or(i64::MAX)).min(self.limit)
    }
}

pub(crate) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn costly_work_rests_longer_within_bounds() {
        let mut pace = DutyCycle::new(100, [Duration::from_millis(5), Duration::from_secs(1)]);
        assert!(pace.is_due(Nanos(0)));
        for (cost, rest) in [(1, 5), (50, 5), (100, 10), (4_000, 400), (40_000, 1_000)] {
            pace.done(Nanos(7), Duration::from_micros(cost));
            assert_eq!(pace.due(), Nanos(7 + rest * MS), "{cost}");
        }
        pace.set_backoff(3);
        pace.done(Nanos(7), Duration::from_micros(50));
        assert_eq!(pace.due(), Nanos(7 + 15 * MS), "a third of its share");
    }

    #[test]
    fn a_burst_is_done_at_once_then_gathered() {
        let mut credit = Credit::new(100, Duration::from_millis(1));
        credit.used(Nanos(0), Duration::from_micros(900));
        assert_eq!(credit.delay(Nanos(0)), Duration::ZERO);
        credit.used(Nanos(0), Duration::from_micros(200));
        assert_eq!(credit.delay(Nanos(0)), Duration::from_millis(10));
        // 10 ms earn 100 us, whether it is used meanwhile or not.
        assert_eq!(credit.delay(Nanos(4 * MS)), Duration::from_millis(6));
        assert_eq!(credit.delay(Nanos(10 * MS)), Duration::ZERO);
        // Whatever happens, no longer than the limit.
        credit.used(Nanos(10 * MS), Duration::from_secs(9));
        assert_eq!(credit.delay(Nanos(10 * MS)), Duration::from_millis(100));
        assert_eq!(credit.delay(Nanos(u64::MAX)), Duration::ZERO);
        credit.used(Nanos(u64::MAX), Duration::from_millis(1));
        assert_eq!(credit.delay(Nanos(u64::MAX)), Duration::ZERO);
    }
}
