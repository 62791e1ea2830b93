//! Aggregators that a communicator does without for a while. They refused to serve it, or an epoch with them
//! could not be had.

use harmonaize_planner::AggregatorId;
use std::collections::BTreeMap;
use std::time::Duration;

/// First and longest pause; each is twice as long as the one before.
const PAUSES: [Duration; 2] = [Duration::from_secs(10), Duration::from_secs(640)];

/// Those of a communicator.
#[derive(Debug, Default)]
pub(crate) struct Refusals(BTreeMap<AggregatorId, Refusal>);

#[derive(Debug)]
struct Refusal {
    /// Not before this; none: it may be asked again.
    until: Option<Duration>,
    pause: Duration,
    reason: String,
}

impl Refusals {
    /// One is not to be asked for a while; `reason` is for operators.
    pub(crate) fn refuse(&mut self, now: Duration, at: AggregatorId, reason: &str) {
        let [first, longest] = PAUSES;
        let before = self.0.get(&at).map(|refusal| refusal.pause.saturating_mul(2).min(longest));
        let pause = before.unwrap_or(first);
        let until = Some(now.saturating_add(pause));
        self.0.insert(at, Refusal { until, pause, reason: reason.to_owned() });
    }

    /// Whether one is not to be asked now.
    pub(crate) fn holds(&self, at: AggregatorId) -> bool {
        self.0.get(&at).is_some_and(|refusal| refusal.until.is_some())
    }

    /// Why those are not asked that are not, in words; none where all may be.
    pub(crate) fn reason(&self) -> Option<String> {
        let held = self.0.values().filter(|refusal| refusal.until.is_some());
        let reasons: Vec<&str> = held.map(|refusal| refusal.reason.as_str()).collect();
        (!reasons.is_empty()).then(|| reasons.join("; "))
    }

    /// When the next may be asked again.
    pub(crate) fn due(&self) -> Option<Duration> {
        self.0.values().filter_map(|refusal| refusal.until).min()
    }

    /// Lets those be asked again whose pause is over; whether there are any.
    pub(crate) fn expire(&mut self, now: Duration) -> bool {
        let over = |refusal: &mut Refusal| refusal.until.take_if(|until| *until <= now).is_some();
        let mut some = false;
        self.0.values_mut().for_each(|refusal| some |= over(refusal));
        some
    }

    /// One has come anew: what it said before is void.
    pub(crate) fn forget(&mut self, at: AggregatorId) {
        self.0.remove(&at);
    }
}
