//! Questions to agents about the ways of ports: what is asked, and when what is asked next.

use super::ports::Pair;
use crate::state::output::SessionId;
use crate::state::timed::{Due, Timed};
use harmonaize_planner::{DirectedLink, HostId};
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

/// Ports that a question asks about, and ports that a pool begins with and grows by. Agents take up to 64.
pub(crate) const BATCH: usize = 24;

/// First and last pause after a question without an answer. They also apply before a port is asked about again
/// of which no path was reported.
pub(crate) const RETRY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(60));

/// Questions that an agent has at a time.
const MOST_OPEN: usize = 2;

/// Most pairs that are traced.
pub(crate) const MOST_PAIRS: usize = 16384;

/// One direction of a pair: whether it is the way back.
pub(crate) type Direction = (Pair, bool);

/// Who asks about a direction.
pub(crate) fn asker((pair, back): Direction) -> HostId {
    if back { pair.1 } else { pair.0 }
}

/// What is asked, and when what is asked next.
#[derive(Debug, Default)]
pub(crate) struct Traces {
    next_trace: u64,
    pub open: Timed<u64, PendingTrace>,
    pub legs: BTreeMap<Direction, Leg>,
    pub queues: BTreeMap<HostId, Queue>,
    /// When each host's agent that has room for a question is next to be asked something.
    due: BTreeSet<(Duration, HostId)>,
    /// The open questions of each host's session.
    busy: BTreeMap<HostId, BTreeSet<u64>>,
    /// The open questions of sessions that have ended.
    orphaned: BTreeSet<u64>,
    /// Addresses that answered, are no switch's in the topology, and were told of.
    pub strange: BTreeSet<IpAddr>,
    /// Pairs that no communicator linked when that was looked at last, and when.
    pub unlinked: BTreeSet<Pair>,
    pub looked: Duration,
}

/// What a host's agent is to be asked.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    pub urgent: BTreeSet<Direction>,
    pub due: BTreeSet<(Duration, Direction)>,
    /// Nothing but what is urgent is asked before.
    pub paced: Duration,
    /// As it stands in [`Traces::due`].
    pub at: Option<Duration>,
}

impl Queue {
    pub(crate) fn next(&self) -> Option<Duration> {
        let first = self.due.first().map(|(at, _)| (*at).max(self.paced));
        self.urgent.first().map(|_| Duration::ZERO).or(first)
    }
}

/// A question that waits for its answer.
#[derive(Debug)]
pub(crate) struct PendingTrace {
    pub direction: Direction,
    pub of: SessionId,
    pub ports: Vec<u16>,
    /// Whether it is about queue pairs, which send from these ports at both ends.
    pub queue_pairs: bool,
    pub deadline: Duration,
}

impl Due for PendingTrace {
    fn next_timeout(&self) -> Option<Duration> {
        Some(self.deadline)
    }
}

/// When a direction is asked about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum When {
    /// A question is open.
    Open,
    /// Before all that is not urgent.
    Urgent,
    At(Duration),
}

/// One direction of a pair.
#[derive(Debug)]
pub(crate) struct Leg {
    pub when: When,
    /// Until nothing more is to be asked, all comes before what is not.
    pub urgent: bool,
    pub failures: u32,
    /// All that was learned before then is to be traced again.
    pub anew: Option<Duration>,
    /// When that was last said.
    pub reported_at: Option<Duration>,
}

/// What an answer says of the fabric.
#[derive(Debug, Default)]
pub(crate) struct Learned {
    /// Whether a port leads another way than was known.
    pub moved: bool,
    /// Whether the way of a port was not known before.
    pub first: bool,
    /// Links that packets died at or are led around.
    pub dead: BTreeSet<DirectedLink>,
    /// Links that packets crossed.
    pub alive: BTreeSet<DirectedLink>,
}

impl Traces {
    /// Returns when the next question or the end of one is due, as far as agents may be asked. An answer makes
    /// room.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        let due = self.due.first().map(|(at, _)| *at);
        due.into_iter().chain(self.open.next_timeout()).min()
    }

    /// Whether a host's agent has room for a question.
    pub(crate) fn is_free(&self, host: HostId) -> bool {
        self.busy.get(&host).map_or(0, BTreeSet::len) < MOST_OPEN
    }

    /// Hosts whose agents are to be asked something by then, and have room for a question.
    pub(crate) fn due(&self, now: Duration) -> BTreeSet<HostId> {
        self.due.range(..=(now, HostId(usize::MAX))).map(|(_, host)| *host).collect()
    }

    /// What a host's agent is to be asked has changed, or whether it has room for a question.
    fn queue_changed(&mut self, host: HostId) {
        let free = self.is_free(host);
        let Some(queue) = self.queues.get_mut(&host) else { return };
        let next = queue.next().filter(|_| free);
        if let Some(at) = queue.at.take_if(|at| next != Some(*at)) {
            self.due.remove(&(at, host));
        }
        if queue.at.is_none() {
            queue.at = next;
            self.due.extend(next.map(|at| (at, host)));
        }
    }

    /// Nothing more is asked of a host's agent for a while but what is urgent.
    pub(crate) fn pace(&mut self, host: HostId, until: Duration) {
        if let Some(queue) = self.queues.get_mut(&host) {
            queue.paced = until;
            self.queue_changed(host);
        }
    }

    /// Says when a direction is asked about, whatever it was to be before.
    pub(crate) fn put(&mut self, direction: Direction, when: When) {
        let Some(leg) = self.legs.get_mut(&direction) else { return };
        let queue = self.queues.entry(asker(direction)).or_default();
        match std::mem::replace(&mut leg.when, when) {
            When::Urgent => drop(queue.urgent.remove(&direction)),
            When::At(at) => drop(queue.due.remove(&(at, direction))),
            When::Open => {}
        }
        match when {
            When::Urgent => drop(queue.urgent.insert(direction)),
            When::At(at) => drop(queue.due.insert((at, direction))),
            When::Open => {}
        }
        self.queue_changed(asker(direction));
    }

    /// A direction is asked about at that time, or sooner if it was to be sooner.
    pub(crate) fn hasten(&mut self, direction: Direction, at: Duration) {
        if let Some(When::At(before)) = self.legs.get(&direction).map(|leg| leg.when)
            && at < before
        {
            self.put(direction, When::At(at));
        }
    }

    /// A direction is asked about before all that is not urgent.
    pub(crate) fn urge(&mut self, direction: Direction) {
        let Some(leg) = self.legs.get_mut(&direction) else { return };
        leg.urgent = true;
        if leg.when != When::Open {
            self.put(direction, When::Urgent);
        }
    }

    pub(crate) fn add(&mut self, pair: Pair, at: Duration) {
        for direction in [(pair, false), (pair, true)] {
            if self.legs.len() < MOST_PAIRS * 2 && !self.legs.contains_key(&direction) {
                let leg = Leg { when: When::Open, urgent: false, failures: 0, anew: None, reported_at: None };
                self.legs.insert(direction, leg);
                self.put(direction, When::At(at));
            }
        }
    }

    pub(crate) fn forget(&mut self, pair: Pair) {
        for direction in [(pair, false), (pair, true)] {
            // Out of the queues.
            self.put(direction, When::Open);
            self.legs.remove(&direction);
        }
    }

    /// What a host is asked next, if anything is due.
    pub(crate) fn next(&self, now: Duration, host: HostId) -> Option<(Direction, bool)> {
        let queue = self.queues.get(&host)?;
        if let Some(direction) = queue.urgent.first() {
            return Some((*direction, true));
        }
        let due = queue.due.first().filter(|(at, _)| *at <= now && queue.paced <= now);
        due.map(|(_, direction)| (*direction, false))
    }

    /// A question goes to its host's agent. Returns its number.
    pub(crate) fn ask(&mut self, pending: PendingTrace) -> u64 {
        self.next_trace += 1;
        let (question, direction) = (self.next_trace, pending.direction);
        let host = asker(direction);
        self.put(direction, When::Open);
        self.open.insert(question, pending);
        self.busy.entry(host).or_default().insert(question);
        self.queue_changed(host);
        question
    }

    pub(crate) fn close(&mut self, question: u64) -> Option<PendingTrace> {
        let closed = self.open.remove(&question)?;
        let host = asker(closed.direction);
        if let Some(busy) = self.busy.get_mut(&host) {
            busy.remove(&question);
        }
        self.queue_changed(host);
        Some(closed)
    }

    /// A host's agent has no session any more: nobody answers its questions.
    pub(crate) fn session_ended(&mut self, host: HostId) {
        self.orphaned.extend(self.busy.remove(&host).unwrap_or_default());
        self.queue_changed(host);
    }

    /// Closes the questions that nobody answers any more, or not in time, in the order in which they were asked.
    pub(crate) fn take_late(&mut self, now: Duration) -> Vec<PendingTrace> {
        let mut late = std::mem::take(&mut self.orphaned);
        late.extend(self.open.due(now));
        late.into_iter().filter_map(|question| self.close(question)).collect()
    }
}

pub(crate) fn retry(failures: u32) -> Duration {
    RETRY.0.saturating_mul(1 << failures.min(16)).min(RETRY.1)
}

#[cfg(test)]
mod tests {
    use super::super::ports::pair_of;
    use super::*;

    #[test]
    fn a_pair_that_is_forgotten_is_not_asked_about() {
        let pair = pair_of(HostId(0), HostId(1));
        let mut traces = Traces::default();
        traces.add(pair, Duration::ZERO);
        traces.urge((pair, true));
        assert!([0, 1].iter().all(|host| traces.next(Duration::ZERO, HostId(*host)).is_some()));
        traces.forget(pair);
        assert!(traces.legs.is_empty());
        assert!([0, 1].iter().all(|host| traces.next(Duration::ZERO, HostId(*host)).is_none()));
    }

    #[test]
    fn an_agent_is_due_when_it_has_room() {
        let at = Duration::from_secs;
        let pair = |other| pair_of(HostId(0), HostId(other));
        let ask = |traces: &mut Traces, other, deadline| {
            let (direction, deadline) = ((pair(other), false), at(deadline));
            let (of, ports, queue_pairs) = (SessionId(1), Vec::new(), false);
            traces.ask(PendingTrace { direction, of, ports, queue_pairs, deadline })
        };
        let mut traces = Traces::default();
        for other in 1..=3 {
            traces.add(pair(other), at(0));
            traces.put((pair(other), true), When::At(at(60)));
        }
        ask(&mut traces, 1, 4);
        assert_eq!((traces.deadline(), traces.due(at(9)).len()), (Some(at(0)), 1));
        ask(&mut traces, 2, 5);
        assert_eq!((traces.deadline(), traces.due(at(9)).len()), (Some(at(4)), 0));
        assert_eq!(traces.take_late(at(4)).len(), 1);
        assert_eq!((traces.deadline(), traces.due(at(9)).len()), (Some(at(0)), 1));
        ask(&mut traces, 3, 6);
        traces.put((pair(1), false), When::At(at(1)));
        assert_eq!(traces.deadline(), Some(at(5)));
        traces.session_ended(HostId(0));
        assert_eq!((traces.deadline(), traces.due(at(9)).len()), (Some(at(1)), 1));
        assert_eq!([2, 9].map(|now| traces.take_late(at(now)).len()), [2, 0]);
    }
}
