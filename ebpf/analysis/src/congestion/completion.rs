//! Congestion of what an own queue pair sends, by how long its device takes to carry it out. Where packets bypass the kernel, nothing else
//! shows round trips.

use super::hysteresis::{HysteresisState, MILD};
use super::monitor::{JITTERS, MAX_RTT, SEVERE_UNITS, Spread, per_second, pressure};
use super::windowed::WindowedMinMax;
use super::{Congestion, Limits, Link, Signals};
use crate::nanos;
use crate::trace::Completion;
use harmonaize_abi::{CongestionLevel, Nanos};
use std::time::Duration;

/// Messages of which the least wait counts: the engine may poll late for one of them.
const MESSAGES: usize = 4;
/// They are no further apart than this. After as long without a message no queue is known.
const SPAN: Duration = Duration::from_millis(50);

/// A message that the engine timed.
#[derive(Debug, Clone, Copy, Default)]
struct TimedMessage {
    seen: Nanos,
    /// How long it waited.
    waited: Duration,
    /// What it and what went beside it take at the best rate.
    sending: Duration,
}

/// A queue pair's last messages, its least delay, and its state.
#[derive(Debug, Clone)]
pub(super) struct CompletionMonitor {
    last: Nanos,
    /// The newest last.
    recent: [TimedMessage; MESSAGES],
    count: usize,
    /// The most bytes a second.
    max_rate: WindowedMinMax<u64>,
    /// The least wait.
    base: WindowedMinMax<Duration>,
    /// By how much waits in a row differed at least, and those of now.
    jitter: WindowedMinMax<Duration>,
    spread: Spread,
    hysteresis: HysteresisState,
    /// Messages that spoke for congestion so far.
    evidence: u64,
    finding: Congestion,
}

impl CompletionMonitor {
    /// One without messages.
    pub(super) fn new(link: Link, limits: &Limits) -> Self {
        Self {
            last: Nanos(0),
            recent: [TimedMessage::default(); MESSAGES],
            count: 0,
            max_rate: WindowedMinMax::default(),
            base: WindowedMinMax::default(),
            jitter: WindowedMinMax::default(),
            spread: Spread::default(),
            hysteresis: HysteresisState::new(limits),
            evidence: 0,
            finding: Congestion::none(link, Nanos(0)),
        }
    }

    /// Takes a message; returns the change of the level. The interface carries `stated` bytes a second, more than 0.
    pub(super) fn take(&mut self, message: &Completion, stated: u64, limits: &Limits) -> Option<Congestion> {
        let now = Nanos(message.time_ns);
        if now <= self.last {
            return None;
        }
        self.last = now;
        let took = Duration::from_nanos(message.took_ns).min(MAX_RTT);
        let shown = per_second(message.bytes, took).min(stated);
        let age = match self.hysteresis.level {
            CongestionLevel::None => limits.min_rtt_window,
            _ => 10 * limits.min_rtt_window,
        };
        // Of fewer bytes the way there and back takes the most time.
        if message.bytes >= limits.queue_bytes {
            self.max_rate.update(now, age, shown, u64::max);
        }
        let rate = self.max_rate.max().unwrap_or(stated).max(1);
        let sending = u128::from(message.bytes) * 1_000_000_000 / u128::from(rate);
        let sending = Duration::from_nanos(u64::try_from(sending).unwrap_or(u64::MAX));
        let waited = took.saturating_sub(sending);
        self.base.update(now, age, waited, Duration::min);
        if let Some(spread) = self.spread.add(waited) {
            self.jitter.update(now, age, spread, Duration::min);
        }
        self.recent.rotate_left(1);
        if let Some(newest) = self.recent.last_mut() {
            *newest = TimedMessage { seen: now, waited, sending };
        }
        self.count = (self.count + 1).min(MESSAGES);
        let base = self.base.min().unwrap_or(waited);
        let least = self.least_wait(now).unwrap_or(TimedMessage { seen: now, waited: base, sending });
        let delay = self.pressure(least, base, limits);
        self.evidence += u64::from(delay >= MILD);
        let changed = self.hysteresis.step(now, delay, self.evidence, limits);
        self.finding = Congestion {
            level: self.hysteresis.level,
            since: self.hysteresis.since,
            signals: Signals { delay: delay >= MILD, ..Signals::default() },
            own_rate: shown,
            capacity: stated,
            rtt: least.waited,
            min_rtt: base,
            // Whose the queue is is not known, nor any mark or loss.
            ..Congestion::none(self.finding.link, now)
        };
        changed.then_some(self.finding)
    }

    /// The one of the last messages that waited least; none of too few, or too old ones.
    fn least_wait(&self, now: Nanos) -> Option<TimedMessage> {
        let enough = self.count == MESSAGES && now.since(self.recent.first()?.seen) <= SPAN;
        self.recent.iter().min_by_key(|message| message.waited).filter(|_| enough).copied()
    }

    /// A queue's pressure, by the rule of round trips. The engine sees completions when it looks, so that no shorter queue is news on
    /// fast links either. Nor is one that is over before the message would be sent: a device slower than its best is none.
    fn pressure(&self, least: TimedMessage, base: Duration, limits: &Limits) -> f64 {
        let queue = least.waited.saturating_sub(base);
        let jitter = self.jitter.min().unwrap_or_default();
        let unit = limits.delay.max(JITTERS * jitter).max(least.sending);
        let severe = (SEVERE_UNITS * unit).max(2 * base);
        pressure(nanos(queue) as f64, nanos(unit.max(base / 2)) as f64, nanos(severe) as f64)
    }

    /// Without messages a state ends as it does without a queue; returns that.
    pub(super) fn advance(&mut self, now: Nanos, limits: &Limits) -> Option<Congestion> {
        if self.hysteresis.is_idle() || now.since(self.last) <= SPAN {
            return None;
        }
        let changed = self.hysteresis.step(now, 0.0, self.evidence, limits);
        let (level, since) = (self.hysteresis.level, self.hysteresis.since);
        self.finding = Congestion { level, since, ..Congestion::none(self.finding.link, now) };
        changed.then_some(self.finding)
    }

    /// Whether it was silent for so long that its least delay says nothing any more.
    pub(super) fn is_old(&self, now: Nanos, limits: &Limits) -> bool {
        self.hysteresis.level == CongestionLevel::None && now.since(self.last) > 2 * limits.min_rtt_window
    }

    /// How it stands.
    pub(super) fn finding(&self) -> Congestion {
        self.finding
    }
}
