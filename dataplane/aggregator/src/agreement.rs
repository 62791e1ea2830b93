//! What the workers agree on when a session ends: from which segment on it is done again, and by whom. Messages go over the
//! hosts' own links, which neither lose nor reorder them while both ends live.
//!
//! Every worker names the lowest segment that it has not whole, and below which it knows that all have all. The leader takes
//! `max(all that is known to be whole everywhere, the least of what is whole at each)`, and from there on everybody
//! begins anew. A worker that restarted knows nothing, and says 0 and 0.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Most times the first hold that pass between two knocks: hosts are not held up by them.
const KNOCKS: u32 = 20;

/// Who sums from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Way {
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
        whole: u64,
        /// All segments below this one are whole everywhere.
        settled: u64,
    },
    /// To all: go on with segment `from`.
    Resume {
        /// As it was asked.
        session: u64,
        /// The first segment that is done in it, also where its sums are there already.
        from: u64,
        /// By whom.
        way: Way,
    },
    /// To the leader, in a session: all segments below this one are whole here.
    Whole {
        /// In which session.
        session: u64,
        /// The segment.
        below: u64,
    },
    /// To all: all segments below this one are whole everywhere, and their inputs need not be kept.
    Settled {
        /// The segment.
        below: u64,
    },
    /// To all, before a Resume that undoes segments: of those that may be done at once, these need not be summed again.
    Held {
        /// As it was asked.
        session: u64,
        /// Somebody has all sums of segments below this one.
        below: u64,
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

#[derive(Clone, Copy, Default)]
struct Voice {
    stopped: bool,
    whole: u64,
    settled: u64,
}

/// The leader, at one of the workers.
#[derive(Debug)]
pub struct Leader {
    voices: Vec<Voice>,
    session: u64,
    /// The latest that the leader's worker asked for. Who could not open it may go on refusing it.
    asked: u64,
    /// Whether all are asked to stop, and not all have.
    gathering: bool,
    way: Way,
    settled: u64,
    /// At the last Resume: who had most segments whole, and below which.
    held: (u64, u16),
    first_hold: Duration,
    most_hold: Duration,
    hold: Duration,
    /// When aggregation is tried again.
    retry: Option<Duration>,
    /// Whether the aggregator is being asked if it is there.
    knocks: bool,
    /// When the current session began.
    since: Duration,
}

impl std::fmt::Debug for Voice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}{}", self.whole, self.settled, if self.stopped { "" } else { "?" })
    }
}

impl Leader {
    /// A leader of `workers` workers, which has started for the `incarnation`th time, from 1: sessions of later incarnations have
    /// greater numbers. After a session with the aggregator failed, hosts sum for `hold`; twice as long each time, up to `most`.
    /// It stops all at once, for they may be in a session of an earlier incarnation: send what [`Leader::restart`] returns.
    pub fn new(workers: u16, incarnation: u32, hold: Duration, most: Duration) -> Self {
        Self {
            voices: vec![Voice::default(); usize::from(workers)],
            session: u64::from(incarnation) << 32,
            asked: 0,
            gathering: false,
            way: Way::Aggregator,
            settled: 0,
            held: (0, 0),
            first_hold: hold,
            most_hold: most,
            hold,
            retry: None,
            knocks: false,
            since: Duration::ZERO,
        }
    }

    /// Begins another session.
    pub fn restart(&mut self) -> (Audience, Agreement) {
        self.session = self.asked.max(self.session + 1);
        self.gathering = true;
        self.voices.iter_mut().for_each(|voice| voice.stopped = false);
        (Audience::All, Agreement::Stop { session: self.session })
    }

    /// Takes a worker's message; returns what is to be sent.
    pub fn receive(&mut self, now: Duration, from: u16, message: Agreement) -> Option<(Audience, Agreement)> {
        let voice = self.voices.get_mut(usize::from(from))?;
        match message {
            Agreement::Ask { session } => {
                // Of a session that is over already, all know; of one that failed, hosts take over.
                if session != 0 && (session != self.session || self.gathering) {
                    return None;
                }
                if session != 0 && self.way == Way::Aggregator {
                    self.fail(now);
                }
                Some(self.restart())
            }
            Agreement::Stopped { session, whole, settled } => {
                if session != self.session || !self.gathering {
                    return None;
                }
                *voice = Voice { stopped: true, whole, settled };
                self.voices.iter().all(|voice| voice.stopped).then(|| self.resume(now))
            }
            Agreement::Whole { session, below } => {
                if session != self.session || self.gathering {
                    return None;
                }
                voice.whole = voice.whole.max(below);
                let all = self.voices.iter().map(|voice| voice.whole).min().unwrap_or(0);
                (all > self.settled).then(|| {
                    self.settled = all;
                    (Audience::All, Agreement::Settled { below: all })
                })
            }
            Agreement::Stop { .. }
            | Agreement::Held { .. }
            | Agreement::Resume { .. }
            | Agreement::Settled { .. } => None,
        }
    }

    fn fail(&mut self, now: Duration) {
        // A session that lasted shows that the aggregator works.
        if now.saturating_sub(self.since) > self.hold.saturating_mul(4) {
            self.hold = self.first_hold;
        }
        self.way = Way::Hosts;
        self.wait(now);
    }

    fn wait(&mut self, now: Duration) {
        self.retry = Some(now + self.hold);
        self.hold = (self.hold * 2).min(self.most_hold);
    }

    fn resume(&mut self, now: Duration) -> (Audience, Agreement) {
        self.gathering = false;
        self.since = now;
        // Whoever stopped for this may have stopped asking, too.
        if std::mem::take(&mut self.knocks) {
            self.wait(now);
        }
        let whole = self.voices.iter().map(|voice| voice.whole).min().unwrap_or(0);
        let settled = self.voices.iter().map(|voice| voice.settled).max().unwrap_or(0).max(self.settled);
        let from = whole.max(settled);
        self.held =
            (0..).zip(&self.voices).map(|(worker, voice)| (voice.whole, worker)).max().unwrap_or_default();
        self.settled = settled;
        self.voices.iter_mut().for_each(|voice| voice.whole = from);
        (Audience::All, Agreement::Resume { session: self.session, from, way: self.way })
    }

    /// What to send before the last Resume, if anybody has more than is whole everywhere.
    pub fn held(&self, session: u64, from: u64) -> Option<Agreement> {
        let (below, worker) = self.held;
        (below > from).then_some(Agreement::Held { session, below, worker })
    }

    /// When [`Leader::poll`] is to be called, if it is.
    pub fn poll_timeout(&self) -> Option<Duration> {
        self.retry.filter(|_| !self.gathering)
    }

    /// Once the hosts' time is over: the number of the session in which the leader's worker asks whether the aggregator is there, by
    /// its Begin alone. Hosts go on meanwhile; say what came of it to [`Leader::knocked`].
    pub fn poll(&mut self, now: Duration) -> Option<u64> {
        let due = self.poll_timeout().is_some_and(|retry| now >= retry);
        due.then(|| {
            (self.retry, self.knocks) = (None, true);
            self.asked = self.asked.max(self.session) + 1;
            self.asked
        })
    }

    /// The aggregator is there, and all go back to it; or it is not, and hosts have more time.
    pub fn knocked(&mut self, now: Duration, there: bool) -> Option<(Audience, Agreement)> {
        if !std::mem::take(&mut self.knocks) {
            return None;
        }
        if !there {
            let most = (self.first_hold * KNOCKS).min(self.most_hold);
            self.retry = Some(now + self.hold.min(most));
            self.hold = self.hold.max((self.hold * 2).min(most));
            return None;
        }
        self.way = Way::Aggregator;
        // A session that is being agreed on is by the aggregator, then.
        (!self.gathering).then(|| self.restart())
    }
}
