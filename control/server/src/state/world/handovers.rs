//! Hosts whose agents have a successor soon, to which links over RDMA cannot be handed.

use harmonaize_planner::HostId;
use std::collections::BTreeMap;
use std::time::Duration;

/// Longest that an agent has its links go over TCP by one word: it may die before it takes that back.
const LONGEST: Duration = Duration::from_secs(300);

/// How soon an agent that took another's place says whether its links are to stay so, once it has a session. An epoch over RDMA that began
/// before could not be taken back.
const SUCCESSOR_TIMEOUT: Duration = Duration::from_secs(10);

/// Hosts all of whose links are to go over TCP alone, and until when. Not for long after the session of the agent that asked:
/// its successor, which has another, says anew what it wants.
#[derive(Debug, Default)]
pub(crate) struct HandOvers(BTreeMap<HostId, Duration>);

impl HandOvers {
    /// A host's agent wants this for so long from now on; no time: no longer. Whether that changes anything.
    pub(crate) fn requested(&mut self, now: Duration, host: HostId, time: Duration) -> bool {
        if time.is_zero() {
            return self.0.remove(&host).is_some();
        }
        self.0.insert(host, now.saturating_add(time.min(LONGEST))).is_none()
    }

    /// A host's agent has another session.
    pub(crate) fn connected(&mut self, now: Duration, host: HostId) {
        if let Some(until) = self.0.get_mut(&host) {
            *until = now.saturating_add(SUCCESSOR_TIMEOUT).min(*until);
        }
    }

    /// Whether a host's links are to go over TCP alone.
    pub(crate) fn has(&self, host: HostId) -> bool {
        self.0.contains_key(&host)
    }

    /// Whether no host's are.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// When the first of them is over.
    pub(crate) fn next_timeout(&self) -> Option<Duration> {
        self.0.values().min().copied()
    }

    /// Forgets those that are over by now. Whether there were any.
    pub(crate) fn expire(&mut self, now: Duration) -> bool {
        let before = self.0.len();
        self.0.retain(|_, until| *until > now);
        self.0.len() < before
    }
}
