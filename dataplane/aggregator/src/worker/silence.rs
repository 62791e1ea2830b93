//! For how long the aggregator has left questions unanswered, and after how long it is given up.

use crate::rtt::RttEstimator;
use std::time::Duration;

/// What divides a worker's patience where the network says that nobody is at the aggregator's address. The worker
/// waits for one such part.
const REFUSED_TIMEOUT_DIVISOR: u32 = 5;
/// How often it asks in that time.
const REFUSED_PROBES: u32 = 4;

/// Since when the aggregator is silent.
pub(super) struct Silence {
    /// For how long questions may go unanswered.
    timeout: Duration,
    unanswered_since: Option<Duration>,
    /// Since when the network says that nobody is there.
    refused_since: Option<Duration>,
}

impl Silence {
    pub(super) fn new(timeout: Duration) -> Self {
        Self { timeout, unanswered_since: None, refused_since: None }
    }

    pub(super) fn note_request(&mut self, now: Duration) {
        self.unanswered_since.get_or_insert(now);
    }

    /// The aggregator has answered: it is there.
    pub(super) fn note_answer(&mut self) {
        (self.unanswered_since, self.refused_since) = (None, None);
    }

    /// The network says that nobody is there.
    pub(super) fn note_refusal(&mut self, now: Duration) {
        self.refused_since.get_or_insert(now);
    }

    pub(super) fn is_refused(&self) -> bool {
        self.refused_since.is_some()
    }

    /// When the session ends if nothing is answered until then; none where nothing is asked.
    pub(super) fn silence_timeout(&self) -> Option<Duration> {
        self.unanswered_since.map(|since| since + self.timeout)
    }

    /// The same where the network says that nobody is there.
    pub(super) fn refused_timeout(&self) -> Option<Duration> {
        self.refused_since.map(|since| since + self.timeout / REFUSED_TIMEOUT_DIVISOR)
    }

    /// After how long what was sent `attempts` times before is asked for. Sums take long also where they wait for others, and answers do
    /// not.
    pub(super) fn retry(&self, of: RttEstimator, attempts: u32) -> Duration {
        let usual = of.retry(attempts);
        let most = self.timeout / (REFUSED_TIMEOUT_DIVISOR * REFUSED_PROBES);
        if self.is_refused() { usual.min(most) } else { usual }
    }
}
