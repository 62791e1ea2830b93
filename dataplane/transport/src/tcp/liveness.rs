//! How long peers have been silent: by the clock, from what was last read, however late one gets to look.

use super::Config;
use std::time::{Duration, Instant};

/// When an endpoint looks for signs of life, and when it last did.
#[derive(Clone, Copy, Debug)]
pub(super) struct LivenessTimer {
    last: Instant,
    pub(super) next: Instant,
    /// No peer is gone before, unless this end is away.
    first_gone: Instant,
}

impl LivenessTimer {
    /// The first look is a tick from now.
    pub(super) fn begin(now: Instant, config: &Config) -> Self {
        Self { last: now, next: now + config.tick(), first_gone: now }
    }

    /// A look; says how long this end was away before it. What it was late beyond a quarter of the peer's time it was
    /// away, stopped or out of processor time, and may well have been so together with its peers: that is not their silence.
    pub(super) fn check(&mut self, now: Instant, config: &Config) -> Duration {
        let since = now.saturating_duration_since(self.last);
        self.last = now;
        since.saturating_sub(config.peer_timeout / 4)
    }

    /// Whether all peers are to be looked at: one may be gone, or this end was away.
    pub(super) fn is_due(&self, now: Instant, away: Duration) -> bool {
        !away.is_zero() || now >= self.first_gone
    }

    /// All peers were looked at in the last check. The first may be gone after `rest`.
    pub(super) fn note(&mut self, rest: Duration) {
        self.first_gone = self.last + rest;
    }

    /// Schedules the next check. It is a tick after this one was due, or when the first peer may be gone.
    pub(super) fn schedule(&mut self, config: &Config) {
        let tick = config.tick();
        // One that is late makes none of the next late; after a long pause, what came meanwhile is read first.
        let regular = (self.next + tick).max(self.last + tick / 2);
        self.next = regular.min(self.first_gone);
    }
}

/// The silence of one peer on one connection.
#[derive(Debug)]
pub(super) struct Silence(Instant);

impl Silence {
    pub(super) fn begin(now: Instant) -> Self {
        Self(now)
    }

    /// Something came.
    pub(super) fn broken(&mut self, now: Instant) {
        self.0 = now;
    }

    /// How long it has lasted, without the time for which this end was away.
    pub(super) fn lasted(&mut self, now: Instant, away: Duration) -> Duration {
        self.0 = (self.0 + away).min(now);
        now.saturating_duration_since(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::net::SocketAddr;

    fn config(milliseconds: u64) -> Config {
        let peer_timeout = Duration::from_millis(milliseconds);
        Config { peer_timeout, ..Config::new(SocketAddr::from(([127, 0, 0, 1], 0))) }
    }

    /// How long after a peer's last word it counts as gone. The peer last spoke `spoke` into the first wait; each sample is
    /// as late as `late` says in ticks.
    fn gone_after(config: &Config, spoke: f64, mut late: impl FnMut() -> f64) -> Duration {
        let begin = Instant::now();
        let spoke = begin + config.tick().mul_f64(spoke);
        let mut looks = LivenessTimer::begin(begin, config);
        let mut silence = Silence::begin(spoke);
        loop {
            let now = looks.next + config.tick().mul_f64(late());
            let away = looks.check(now, config);
            if looks.is_due(now, away) {
                let lasted = silence.lasted(now, away);
                if lasted >= config.silence_limit() {
                    return now - spoke;
                }
                looks.note(config.silence_limit() - lasted);
            }
            looks.schedule(config);
        }
    }

    /// A peer that is at rest speaks in good time before it would be gone.
    #[test]
    fn peers_are_not_looked_at_before_the_first_may_be_gone() {
        let config = config(5_000);
        let begin = Instant::now();
        let mut looks = LivenessTimer::begin(begin, &config);
        let mut silence = Silence::begin(begin);
        let mut looked = 0;
        for tick in 0..119 {
            if tick % 5 == 0 {
                silence.broken(begin + config.tick() * tick);
            }
            let now = looks.next;
            let away = looks.check(now, &config);
            if looks.is_due(now, away) {
                looked += 1;
                looks.note(config.silence_limit() - silence.lasted(now, away));
            }
            looks.schedule(&config);
        }
        assert!(looked <= 120 / 4, "{looked} looks");
        let late = looks.next + config.peer_timeout / 5;
        assert!(late < looks.first_gone);
        let away = looks.check(late, &config);
        assert!(looks.is_due(late, away), "what this end was away is no peer's silence");
    }

    proptest! {
        #[test]
        fn a_silent_peer_is_gone_at_its_time(
            milliseconds in 100..60_000_u64,
            spoke in 0.0..1.0_f64,
            late in proptest::collection::vec(0.0..1.4_f64, 200),
        ) {
            let config = config(milliseconds);
            let mut late = late.iter().cycle();
            let gone = gone_after(&config, spoke, || *late.next().unwrap());
            prop_assert!(gone <= config.peer_timeout, "gone after {gone:?}");
            prop_assert!(gone >= config.peer_timeout * 3 / 4, "gone after {gone:?}");
        }

        #[test]
        fn an_end_that_was_away_gives_its_peers_time_to_speak(
            milliseconds in 100..60_000_u64,
            silent in 0.0..1.0_f64,
            away in 1.0..1_000.0_f64,
        ) {
            let config = config(milliseconds);
            let begin = Instant::now();
            let mut looks = LivenessTimer::begin(begin, &config);
            let mut silence = Silence::begin(begin - config.tick().mul_f64(silent));
            // Everybody stands still, then this end is the first to go on.
            let now = begin + config.peer_timeout.mul_f64(away);
            let away = looks.check(now, &config);
            let lasted = silence.lasted(now, away);
            prop_assert!(lasted + 3 * config.tick() <= config.silence_limit(), "{lasted:?}");
        }
    }
}
