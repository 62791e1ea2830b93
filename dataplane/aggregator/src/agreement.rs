//! What the workers agree on when a session ends: from which segment on it is done again, and by whom. Messages go over the
//! hosts' own links, which neither lose nor reorder them while both ends live.
//!
//! Every worker names the lowest segment that it has not whole, and below which it knows that all have all. The leader takes
//! `max(all that is known to be whole everywhere, the least of what is whole at each)`, and from there on everybody
//! begins anew. A worker that restarted knows nothing, and says 0 and 0.

use harmonaize_abi::SegmentId;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Most times the first hold that pass between two knocks: hosts are not held up by them.
const MAX_PROBE_BACKOFF: u32 = 20;

/// Who sums from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Summation {
    /// The aggregator, in the session of the same number.
    Aggregator,
    /// The hosts by themselves.
    Hosts,
}

/// Messages between the leader and the workers, of which it is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Agreement {
    /// To the leader: this worker cannot go on in session `session` (0: it has just started).
    Ask {
        /// The session that ended for it.
        session: u64,
    },
    /// To all: stop, and say what you have; `session` is the next one's number.
    Stop {
        /// Greater than all before.
        session: u64,
    },
    /// To the leader: stopped.
    Stopped {
        /// As it was asked.
        session: u64,
        /// All segments below this one are whole here.
        done: SegmentId,
        /// All segments below this one are whole everywhere.
        done_everywhere: SegmentId,
    },
    /// To all: go on with segment `from`.
    Resume {
        /// As it was asked.
        session: u64,
        /// The first segment that is done in it, also where its sums are there already.
        from: SegmentId,
        /// By whom.
        summation: Summation,
    },
    /// To the leader, in a session: all segments below this one are whole here.
    Done {
        /// In which session.
        session: u64,
        /// The segment.
        below: SegmentId,
    },
    /// To all: all segments below this one are whole everywhere, and their inputs need not be kept.
    DoneEverywhere {
        /// The segment.
        below: SegmentId,
    },
    /// Goes to all before a Resume that undoes segments. Of those that may be done at once, these need not be summed
    /// again.
    HaveSums {
        /// As it was asked.
        session: u64,
        /// Somebody has all sums of segments below this one.
        below: SegmentId,
        /// Who.
        worker: u16,
    },
}

/// Where the leader sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Audience {
    /// To all workers, the leader's own among them.
    All,
    /// To one.
    One(u16),
}

#[derive(Clone, Copy, Default, Serialize, Deserialize)]
struct FollowerState {
    stopped: bool,
    done: SegmentId,
    done_everywhere: SegmentId,
}

/// The leader, at one of the workers.
#[derive(Debug, Serialize, Deserialize)]
pub struct Leader {
    followers: Vec<FollowerState>,
    session: u64,
    /// The latest that the leader's worker asked for. Who could not open it may go on refusing it.
    requested: u64,
    /// Whether all are asked to stop, and not all have.
    gathering: bool,
    summation: Summation,
    done_everywhere: SegmentId,
    /// At the last Resume: who had most segments whole, and below which.
    most_done: (SegmentId, u16),
    initial_backoff: Duration,
    max_backoff: Duration,
    backoff: Duration,
    /// When aggregation is tried again.
    retry: Option<Duration>,
    /// Whether the aggregator is being asked if it is there.
    probing: bool,
    /// When the current session began.
    since: Duration,
}

impl std::fmt::Debug for FollowerState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}{}", self.done, self.done_everywhere, if self.stopped { "" } else { "?" })
    }
}

impl Leader {
    /// Makes a leader of `workers` workers, which has started for the `incarnation`th time, from 1. Sessions of later
    /// incarnations have greater numbers. After a session with the aggregator failed, hosts sum for `hold`; twice as long each
    /// time, up to `most`. It stops all at once, for they may be in a session of an earlier incarnation: send what
    /// [`Leader::restart`] returns.
    pub fn new(workers: u16, incarnation: u32, backoff: Duration, most: Duration) -> Self {
        Self {
            followers: vec![FollowerState::default(); usize::from(workers)],
            session: u64::from(incarnation) << 32,
            requested: 0,
            gathering: false,
            summation: Summation::Aggregator,
            done_everywhere: SegmentId(0),
            most_done: (SegmentId(0), 0),
            initial_backoff: backoff,
            max_backoff: most,
            backoff,
            retry: None,
            probing: false,
            since: Duration::ZERO,
        }
    }

    /// Begins another session.
    pub fn restart(&mut self) -> (Audience, Agreement) {
        self.session = self.requested.max(self.session + 1);
        self.gathering = true;
        self.followers.iter_mut().for_each(|voice| voice.stopped = false);
        (Audience::All, Agreement::Stop { session: self.session })
    }

    /// Takes a worker's message; returns what is to be sent.
    pub fn receive(&mut self, now: Duration, from: u16, message: Agreement) -> Option<(Audience, Agreement)> {
        let voice = self.followers.get_mut(usize::from(from))?;
        match message {
            Agreement::Ask { session } => {
                // Of a session that is over already, all know; of one that failed, hosts take over.
                if session != 0 && (session != self.session || self.gathering) {
                    return None;
                }
                if session != 0 && self.summation == Summation::Aggregator {
                    self.fail(now);
                }
                Some(self.restart())
            }
            Agreement::Stopped { session, done: whole, done_everywhere: settled } => {
                if session != self.session || !self.gathering {
                    return None;
                }
                *voice = FollowerState { stopped: true, done: whole, done_everywhere: settled };
                self.followers.iter().all(|voice| voice.stopped).then(|| self.resume(now))
            }
            Agreement::Done { session, below } => {
                if session != self.session || self.gathering {
                    return None;
                }
                voice.done = voice.done.max(below);
                let all = self.followers.iter().map(|voice| voice.done).min().unwrap_or_default();
                (all > self.done_everywhere).then(|| {
                    self.done_everywhere = all;
                    (Audience::All, Agreement::DoneEverywhere { below: all })
                })
            }
            Agreement::Stop { .. }
            | Agreement::HaveSums { .. }
            | Agreement::Resume { .. }
            | Agreement::DoneEverywhere { .. } => None,
        }
    }

    fn fail(&mut self, now: Duration) {
        // A session that lasted shows that the aggregator works.
        if now.saturating_sub(self.since) > self.backoff.saturating_mul(4) {
            self.backoff = self.initial_backoff;
        }
        self.summation = Summation::Hosts;
        self.back_off(now);
    }

    fn back_off(&mut self, now: Duration) {
        self.retry = Some(now + self.backoff);
        self.backoff = (self.backoff * 2).min(self.max_backoff);
    }

    fn resume(&mut self, now: Duration) -> (Audience, Agreement) {
        self.gathering = false;
        self.since = now;
        // Whoever stopped for this may have stopped asking, too.
        if std::mem::take(&mut self.probing) {
            self.back_off(now);
        }
        let whole = self.followers.iter().map(|voice| voice.done).min().unwrap_or_default();
        let settled = self
            .followers
            .iter()
            .map(|voice| voice.done_everywhere)
            .max()
            .unwrap_or_default()
            .max(self.done_everywhere);
        let from = whole.max(settled);
        self.most_done =
            (0..).zip(&self.followers).map(|(worker, voice)| (voice.done, worker)).max().unwrap_or_default();
        self.done_everywhere = settled;
        self.followers.iter_mut().for_each(|voice| voice.done = from);
        (Audience::All, Agreement::Resume { session: self.session, from, summation: self.summation })
    }

    /// What to send before the last Resume, if anybody has more than is whole everywhere.
    pub fn sum_holder(&self, session: u64, from: SegmentId) -> Option<Agreement> {
        let (below, worker) = self.most_done;
        (below > from).then_some(Agreement::HaveSums { session, below, worker })
    }

    /// When [`Leader::poll`] is to be called, if it is.
    pub fn poll_timeout(&self) -> Option<Duration> {
        self.retry.filter(|_| !self.gathering)
    }

    /// Once the hosts' time is over, the number of the session that probes the aggregator. In it the leader's worker asks whether
    /// the aggregator is there, by its Begin alone. Hosts go on meanwhile; say what came of it to [`Leader::handle_probe_outcome`].
    pub fn poll(&mut self, now: Duration) -> Option<u64> {
        let due = self.poll_timeout().is_some_and(|retry| now >= retry);
        due.then(|| {
            (self.retry, self.probing) = (None, true);
            self.requested = self.requested.max(self.session) + 1;
            self.requested
        })
    }

    /// The aggregator is there, and all go back to it; or it is not, and hosts have more time.
    pub fn handle_probe_outcome(&mut self, now: Duration, there: bool) -> Option<(Audience, Agreement)> {
        if !std::mem::take(&mut self.probing) {
            return None;
        }
        if !there {
            let most = (self.initial_backoff * MAX_PROBE_BACKOFF).min(self.max_backoff);
            self.retry = Some(now + self.backoff.min(most));
            self.backoff = self.backoff.max((self.backoff * 2).min(most));
            return None;
        }
        self.summation = Summation::Aggregator;
        // A session that is being agreed on is by the aggregator, then.
        (!self.gathering).then(|| self.restart())
    }
}
