//! How much of control anybody may take: handshakes by address, connections and sessions by identity, and open files.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::task::AbortHandle;

/// Handshakes under way at once: from one address, and from all.
const HANDSHAKES: (usize, usize) = (64, 1024);
/// A handshake that has taken so long gives its place to a newcomer where there is no other.
const IDLE: Duration = Duration::from_secs(1);
/// How often it is logged at most that handshakes have found no place.
const LOG_INTERVAL: Duration = Duration::from_secs(1);

/// Places by who has them, such as an identity's connections.
#[derive(Clone, Debug, Default)]
pub struct Places(Arc<Mutex<HashMap<String, usize>>>);

/// A place, given back when dropped.
#[derive(Debug)]
pub struct Place {
    of: Places,
    who: String,
    /// How many its holder had with it when it was taken.
    pub number: usize,
}

impl Places {
    /// A place for `who`, who has fewer than `most` of them.
    pub fn take(&self, who: &str, most: usize) -> Option<Place> {
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let number = taken.get(who).copied().unwrap_or(0) + 1;
        if number > most {
            return None;
        }
        taken.insert(who.to_owned(), number);
        Some(Place { of: self.clone(), who: who.to_owned(), number })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.of.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = taken.get_mut(&self.who) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.who);
            }
        }
    }
}

/// Handshakes under way, the oldest first.
#[derive(Debug, Default)]
pub(crate) struct Handshakes {
    pending: VecDeque<(IpAddr, Instant, AbortHandle)>,
    refused: u64,
    logged: Option<Instant>,
}

impl Handshakes {
    /// Whether there is a place for one more from an address at `now`. Where there was none, an idle one is ended for it.
    pub(crate) fn room(&mut self, from: IpAddr, now: Instant) -> bool {
        self.pending.retain(|(.., task)| !task.is_finished());
        let own = self.pending.iter().filter(|(address, ..)| *address == from).count();
        let oldest = if own >= HANDSHAKES.0 {
            self.pending.iter().position(|(address, ..)| *address == from)
        } else if self.pending.len() >= HANDSHAKES.1 {
            Some(0)
        } else {
            return true;
        };
        self.refused += 1;
        if self.logged.is_none_or(|at| now.saturating_duration_since(at) >= LOG_INTERVAL) {
            self.logged = Some(now);
            let refused = self.refused;
            tracing::warn!(target: "audit", %from, refused, "too many connections without a handshake: one is closed");
        }
        let idle = |at: &usize| {
            let since = self.pending.get(*at).map(|(_, since, _)| *since);
            since.is_some_and(|since| now.saturating_duration_since(since) >= IDLE)
        };
        let Some((.., task)) = oldest.filter(idle).and_then(|at| self.pending.remove(at)) else {
            return false;
        };
        task.abort();
        true
    }

    /// One from an address has begun at `now`.
    pub(crate) fn begun(&mut self, from: IpAddr, now: Instant, task: AbortHandle) {
        self.pending.push_back((from, now, task));
    }
}

/// Raises the soft limit of open files to the hard one: every connection takes one.
pub fn raise_open_files() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current == maximum {
        return;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        Ok(()) => tracing::info!(from = ?current, to = ?maximum, "raised the limit of open files"),
        Err(error) => tracing::warn!(%error, ?current, ?maximum, "cannot raise the limit of open files"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::pending;

    #[test]
    fn places_are_given_back() {
        let places = Places::default();
        let held = [places.take("a", 2), places.take("a", 2)].map(Option::unwrap);
        assert_eq!(held.each_ref().map(|place| place.number), [1, 2]);
        assert!(places.take("a", 2).is_none() && places.take("b", 1).is_some());
        drop(held);
        assert!(places.take("a", 1).is_some() && places.0.lock().unwrap().is_empty());
    }

    #[tokio::test]
    async fn idle_handshakes_give_way_and_busy_ones_do_not() {
        let (stranger, other) = ([IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2])]).into();
        let (mut handshakes, begin) = (Handshakes::default(), Instant::now());
        let start = |handshakes: &mut Handshakes, from, at| {
            let room = handshakes.room(from, at);
            if room {
                handshakes.begun(from, at, tokio::spawn(pending::<()>()).abort_handle());
            }
            room
        };
        assert_eq!((0..100).filter(|_| start(&mut handshakes, stranger, begin)).count(), HANDSHAKES.0);
        assert!(start(&mut handshakes, other, begin), "another address has its own");
        assert!(!start(&mut handshakes, stranger, begin + IDLE / 2));
        assert!(start(&mut handshakes, stranger, begin + IDLE));
        tokio::task::yield_now().await;
        handshakes.pending.retain(|(.., task)| !task.is_finished());
        assert_eq!(handshakes.pending.len(), HANDSHAKES.0 + 1);
    }
}
