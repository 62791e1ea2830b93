//! Stragglers: which rank holds the others up, because it computes or because its bytes move late.
//!
//! A [`Detector`] takes in one [`Observed`] for each operation of an own communicator, or each iteration of an external job (a
//! *unit*), and yields a [`Straggler`] when one is found, and again when it is over.
//!
//! **Compute.** A rank's time from its end of the unit before to its start of this one lies on one clock, its own, so
//! clocks of hosts need not agree; and a rank that got its last bytes late, for the network's sake, is not blamed for starting
//! late; what others held it up for between (`waited`: a broadcast that it waited in) is taken off. Its lateness is this time less the (lower) median over the ranks. Where ends are not known, or units overlap, it is the
//! start itself, less the median over the ranks, less what that is usually for this rank (clocks apart by a constant).
//! Of several operations in an iteration only those count that begin after a long time (at least a third of the 15th of 16).
//! Of units that overlap, until one begins on every rank after the first one's end there, the first alone counts: a single pause makes
//! all that are under way late. An edge is as late in it as in the one of them in which it is latest.
//!
//! **Network.** In a ring a slow edge makes everybody end late, so it matters how long edges are *busy*. The lateness of
//! an edge is the largest of
//! - the time that it was busy beyond what its bytes take at the median edge's pace (`active`, `bytes`),
//! - the time from its last byte leaving to the last arriving, beyond what is usual for this edge, beyond the median of that,
//! - how much longer than usual the unit took once all ranks had started (the shortest of the ranks' `end - start`,
//!   which needs no common clock), where this edge's round trips or retransmissions stand out from the other edges' and its
//!   own usual ones.
//!
//! The end that is named is the one whose edges are later in sum; the sender where only one edge is late.
//!
//! **Deciding.** A lateness is divided by a threshold: the largest of [`Limits::least`], [`Limits::part`] of the unit's
//! length, [`Limits::deviations`] times the robust standard deviation (1.4826 times the median absolute deviation over
//! the last 64 quiet units; the rank's own or the median rank's, whichever is larger), and [`Limits::tails`] times what one in
//! ten latenesses of all ranks reached then (pauses of workers make long tails, which deviations do not show). Three units in a row of at least
//! 0.6 with a mean of 1, each counted as 1.2 at most, make a finding; three below 0.5 end it. So a single pause, however long, is no finding, a steady
//! one is found in its third unit, and what is late never counts as usual.

mod finding;
mod ring;
mod subject;
mod track;

pub use finding::{EdgeTimes, Kind, Observed, RankTimes, Straggler, Subject};

use harmonaize_abi::Nanos;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;
use subject::SubjectState;

/// What decides.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// Lateness below this never counts.
    pub least: Duration,
    /// Nor does a rank's lateness below this part of what the median rank computes.
    pub part: f64,
    /// Nor an edge's below this part of what a unit usually is on the network.
    pub network_part: f64,
    /// Nor does lateness below this many robust standard deviations.
    pub deviations: f64,
    /// Nor does lateness below so many times what one in ten cases reaches.
    pub tails: f64,
    /// By how much longer than at other edges, and than usual, an edge's round trips take where it stands out. The time of its
    /// last bytes counts likewise.
    pub min_rtt_excess: Duration,
    /// An edge that stands out does so by so many robust standard deviations, too.
    pub stands_out: f64,
    /// A straggler of which nothing was heard for so many units is over.
    pub forget: u32,
    /// At most so many ranks, and edges, of a subject; units with more are left out, and counted.
    pub max_items: usize,
    /// At most so many subjects; the one that was silent for longest makes place.
    pub max_subjects: usize,
    /// At most so many findings wait to be fetched; beyond, the oldest is dropped and counted.
    pub max_findings: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            least: Duration::from_micros(500),
            part: 0.1,
            network_part: 0.25,
            deviations: 5.0,
            tails: 3.0,
            min_rtt_excess: Duration::from_micros(150),
            stands_out: 3.0,
            forget: 16,
            max_items: 4096,
            max_subjects: 256,
            max_findings: 256,
        }
    }
}

/// A unit's number and times.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Unit {
    number: u64,
    began: Nanos,
    ended: Nanos,
}

/// Finds stragglers of any number of subjects.
#[derive(Debug, Default)]
pub struct Detector {
    limits: Limits,
    max_subjects: BTreeMap<Subject, (u64, SubjectState)>,
    found: VecDeque<Straggler>,
    taken: u64,
    lost: u64,
    refused: u64,
}

impl Detector {
    /// One that decides by `limits`.
    pub fn new(limits: Limits) -> Self {
        Self { limits, ..Self::default() }
    }

    /// Takes in a unit. Units come in the order of their numbers; one that comes late is left out, one that is missing is no harm.
    pub fn take(&mut self, subject: Subject, observed: &Observed) {
        self.taken += 1;
        if observed.ranks.len() > self.limits.max_items || observed.edges.len() > self.limits.max_items {
            self.refused += 1;
            return;
        }
        let ordered = observed.ranks.is_sorted_by_key(|rank| rank.rank)
            && observed.edges.is_sorted_by_key(|edge| (edge.from, edge.to));
        if !ordered {
            let mut observed = observed.clone();
            observed.ranks.sort_by_key(|rank| rank.rank);
            observed.edges.sort_by_key(|edge| (edge.from, edge.to));
            return self.take(subject, &observed);
        }
        if !self.max_subjects.contains_key(&subject)
            && self.max_subjects.len() >= self.limits.max_subjects.max(1)
        {
            let oldest =
                self.max_subjects.iter().min_by_key(|(_, (heard, _))| *heard).map(|(oldest, _)| *oldest);
            oldest.map(|oldest| self.max_subjects.remove(&oldest));
        }
        let (heard, judge) = self.max_subjects.entry(subject).or_default();
        *heard = self.taken;
        let (found, lost, most) = (&mut self.found, &mut self.lost, self.limits.max_findings.max(1));
        judge.take(subject, observed, &self.limits, &mut |straggler| {
            if found.len() >= most {
                found.pop_front();
                *lost += 1;
            }
            found.push_back(straggler);
        });
    }

    /// A subject is no more: what holds of it is forgotten.
    pub fn forget(&mut self, subject: Subject) {
        self.max_subjects.remove(&subject);
    }

    /// The next finding, oldest first.
    pub fn poll(&mut self) -> Option<Straggler> {
        self.found.pop_front()
    }

    /// All stragglers now, with what is known of them now.
    pub fn current(&self) -> impl Iterator<Item = Straggler> {
        self.max_subjects.iter().flat_map(|(subject, (_, judge))| judge.current(*subject))
    }

    /// Findings that were dropped because nobody fetched them.
    pub const fn lost(&self) -> u64 {
        self.lost
    }

    /// Units that were left out because they have too many ranks or edges.
    pub const fn refused(&self) -> u64 {
        self.refused
    }
}
