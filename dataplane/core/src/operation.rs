//! Operations in flight at one participant: which local rank has called what, and how far each is.

use crate::action::CodingReport;
use crate::counts::Counts;
use harmonaize_abi::{Nanos, OperationId, Rank, SegmentId, Signature, Token};
use harmonaize_plan::{Algorithm, Retention, Segmentation};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// One rank's call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// The operation that it calls.
    pub signature: Signature,
    /// Of an uneven one: the counts, as the rank [says](harmonaize_abi::Collective::said_counts) them.
    pub counts: Option<Arc<[u64]>>,
    /// Whether its output is its input.
    pub in_place: bool,
    /// The caller's name for the call; its completion carries the same.
    pub token: Token,
    /// How long this communicator may make no progress while the call is in flight. Then it ends.
    pub timeout: Duration,
}

/// A local rank's call in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Called {
    token: Token,
    at: Nanos,
    timeout: Duration,
}

/// An operation that at least one local rank has called.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Operation {
    pub(crate) number: OperationId,
    pub(crate) signature: Signature,
    pub(crate) in_place: bool,
    /// What local ranks have reported of its counts, if it is uneven.
    pub(crate) counts: Option<Arc<Counts>>,
    /// By local rank: its call, once it has called.
    pub(crate) calls: Vec<Option<Called>>,
    /// When the first rank called.
    pub(crate) since: Nanos,
    /// Set when the first segment begins.
    pub(crate) run: Option<Run>,
    pub(crate) wire_bytes: u64,
    /// Totals of compression, once something was compressed.
    pub(crate) coded: Option<CodingReport>,
    /// Segments given to an aggregator.
    pub(crate) aggregated_segments: u64,
    /// Segments of those that the hosts did again.
    pub(crate) fallback_segments: u64,
}

impl Operation {
    /// The token of a local rank's call, given by its index.
    pub(crate) fn token(&self, local: usize) -> Option<Token> {
        Some((*self.calls.get(local)?)?.token)
    }

    /// The shortest time-out of its calls.
    pub(crate) fn timeout(&self) -> Duration {
        self.calls.iter().flatten().map(|call| call.timeout).min().unwrap_or(Duration::MAX)
    }
}

/// How an operation that has begun runs.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Run {
    pub(crate) first_segment: SegmentId,
    pub(crate) segmentation: Segmentation,
    pub(crate) retention: Retention,
    pub(crate) algorithm: Algorithm,
    /// Segments that have begun.
    pub(crate) begun: u64,
    /// Segments of which nothing is left to do, committed steps included.
    pub(crate) finished: u64,
}

impl Run {
    /// Begins the next segment.
    pub(crate) fn begin(&mut self) {
        self.begun += 1;
        self.check();
    }

    /// Notes that nothing is left to do of a segment.
    pub(crate) fn finish(&mut self) {
        self.finished += 1;
        self.check();
    }

    /// Whether every segment has begun.
    pub(crate) fn all_begun(&self) -> bool {
        self.begun == self.segmentation.segments
    }

    fn check(&self) {
        debug_assert!(self.finished <= self.begun, "a segment finishes that has not begun");
        debug_assert!(self.begun <= self.segmentation.segments, "more segments than there are");
    }
}

/// The operations in flight, oldest first; a ring of records that are never reallocated.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Operations {
    ring: Vec<Operation>,
    first: OperationId,
    next: OperationId,
    /// By local rank: how many operations it has called.
    called: Vec<u64>,
    ranks: Vec<Rank>,
    /// Local ranks of the oldest operation whose completion was reported.
    reported_ranks: usize,
}

/// The outcome of a call.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum CallOutcome {
    /// It takes part in the operation of this number.
    Accepted(OperationId),
    /// Too many in flight.
    Full,
    /// Another local rank called something else as this operation.
    Mismatch { number: OperationId, other: (Rank, Signature) },
    /// Another local rank has reported something else of one of the counts.
    Counts { number: OperationId, count: u32, reported: Vec<(Rank, u64)> },
    /// No such local rank.
    NotLocal,
}

impl Operations {
    pub(crate) fn new(ranks: &[Rank], capacity: usize) -> Self {
        let blank = |_| Operation {
            number: OperationId(0),
            signature: Signature {
                collective: harmonaize_abi::Collective::Barrier,
                dtype: harmonaize_abi::Dtype::U8,
                reduce: harmonaize_abi::ReduceOp::Sum,
                root: Rank(0),
                count: 0,
                uneven: false,
            },
            in_place: false,
            counts: None,
            calls: vec![None; ranks.len()],
            since: Nanos(0),
            run: None,
            wire_bytes: 0,
            coded: None,
            aggregated_segments: 0,
            fallback_segments: 0,
        };
        Self {
            ring: (0..capacity.max(1)).map(blank).collect(),
            first: OperationId(0),
            next: OperationId(0),
            called: vec![0; ranks.len()],
            ranks: ranks.to_vec(),
            reported_ranks: 0,
        }
    }

    fn index(&self, number: OperationId) -> usize {
        (number.0 % self.ring.len() as u64) as usize
    }

    pub(crate) fn get(&self, number: OperationId) -> Option<&Operation> {
        if !(self.first..self.next).contains(&number) {
            return None;
        }
        self.ring.get(self.index(number))
    }

    pub(crate) fn get_mut(&mut self, number: OperationId) -> Option<&mut Operation> {
        if !(self.first..self.next).contains(&number) {
            return None;
        }
        let index = self.index(number);
        self.ring.get_mut(index)
    }

    /// The oldest in flight.
    pub(crate) fn oldest(&self) -> Option<&Operation> {
        self.get(self.first)
    }

    pub(crate) fn ranks(&self) -> &[Rank] {
        &self.ranks
    }

    /// The index of a local rank.
    pub(crate) fn local(&self, rank: Rank) -> Option<usize> {
        self.ranks.iter().position(|r| *r == rank)
    }

    /// How many operations a local rank has called.
    pub(crate) fn called(&self, rank: Rank) -> Option<u64> {
        self.called.get(self.local(rank)?).copied()
    }

    /// Local ranks that have not called operation `number`.
    pub(crate) fn missing(&self, number: OperationId) -> Vec<Rank> {
        let pairs = self.ranks.iter().zip(&self.called);
        pairs.filter(|(_, called)| **called <= number.0).map(|(rank, _)| *rank).collect()
    }

    /// One local rank that has called operation `number`, and what. Remembered for some time after the operation has ended.
    pub(crate) fn caller(&self, number: OperationId) -> Option<(Rank, Signature)> {
        let known = number < self.next && self.next.0 - number.0 <= self.ring.len() as u64;
        let operation = self.ring.get(self.index(number)).filter(|_| known)?;
        let local = operation.calls.iter().position(Option::is_some)?;
        Some((*self.ranks.get(local)?, operation.signature))
    }

    /// The first operation of which [`Operations::caller`] knows.
    pub(crate) fn oldest_remembered(&self) -> OperationId {
        OperationId(self.next.0.saturating_sub(self.ring.len() as u64))
    }

    /// Whether every local rank has called operation `number`.
    pub(crate) fn complete(&self, number: OperationId) -> bool {
        self.called.iter().all(|called| *called > number.0)
    }

    /// What a local rank has reported of one of the counts of operation `number`. Remembered as [`Self::caller`].
    pub(crate) fn reported(&self, number: OperationId, count: u32) -> Option<(Rank, u64)> {
        self.caller(number)?;
        self.ring.get(self.index(number))?.counts.as_ref()?.get(count)
    }

    /// Takes a call in, among so many `ranks` in all.
    pub(crate) fn call(&mut self, now: Nanos, rank: Rank, ranks: u32, call: Call) -> CallOutcome {
        let Some(local) = self.local(rank) else { return CallOutcome::NotLocal };
        let Some(number) = self.called.get(local).copied().map(OperationId) else {
            return CallOutcome::NotLocal;
        };
        if number.0 >= self.first.0 + self.ring.len() as u64 {
            return CallOutcome::Full;
        }
        if number < self.next
            && let Some(other) = self.caller(number).filter(|(_, signature)| *signature != call.signature)
        {
            return CallOutcome::Mismatch { number, other };
        }
        let counts = match call.counts {
            None => None,
            Some(reported) => {
                let known = self.get(number).and_then(|operation| operation.counts.as_deref().cloned());
                let mut counts = known.unwrap_or_else(|| Counts::new(call.signature.collective, ranks));
                if let Err((count, reported)) = counts.record(rank, reported) {
                    return CallOutcome::Counts { number, count, reported };
                }
                Some(Arc::new(counts))
            }
        };
        if number >= self.next {
            let index = self.index(number);
            if let Some(fresh) = self.ring.get_mut(index) {
                fresh.number = number;
                fresh.signature = call.signature;
                fresh.in_place = false;
                fresh.calls.fill(None);
                fresh.since = now;
                fresh.run = None;
                fresh.wire_bytes = 0;
                fresh.coded = None;
                (fresh.aggregated_segments, fresh.fallback_segments) = (0, 0);
            }
            self.next = number.next();
        }
        if let Some(operation) = self.get_mut(number) {
            operation.in_place |= call.in_place;
            operation.counts = counts;
            if let Some(called) = operation.calls.get_mut(local) {
                *called = Some(Called { token: call.token, at: now, timeout: call.timeout });
            }
        }
        if let Some(called) = self.called.get_mut(local) {
            *called += 1;
        }
        CallOutcome::Accepted(number)
    }

    /// The next local rank of the oldest operation whose call is not reported yet, with its token. Returns it once.
    ///
    /// Forgets the operation, and returns `None`, once every rank that called it is reported.
    pub(crate) fn report_next(&mut self) -> Option<(Rank, Token)> {
        let operation = self.get(self.first)?;
        let calls = operation.calls.iter().zip(&self.ranks).enumerate().skip(self.reported_ranks);
        let open = calls.into_iter().find_map(|(local, (call, rank))| Some((local, *rank, (*call)?.token)));
        match open {
            Some((local, rank, token)) => {
                self.reported_ranks = local + 1;
                Some((rank, token))
            }
            None => {
                self.reported_ranks = 0;
                self.first = self.first.next();
                debug_assert!(self.first <= self.next, "an operation is forgotten that nobody called");
                None
            }
        }
    }

    /// Whether a local rank that has called `called` operations has not been told of the end of each.
    pub(crate) fn awaits_completion(&self, rank: Rank, called: u64) -> bool {
        let reported = self.local(rank).is_some_and(|local| local < self.reported_ranks);
        called > self.first.0 + u64::from(reported)
    }

    /// When the first call in flight has waited for its time-out without progress, and that time-out. Time counts from the call, or from
    /// the last progress if that is later.
    pub(crate) fn expiry(&self, last_progress: Nanos) -> Option<(Nanos, Duration)> {
        let calls = self.iter().flat_map(|operation| operation.calls.iter().flatten());
        calls.map(|call| (call.at.max(last_progress).after(call.timeout), call.timeout)).min()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Operation> {
        (self.first.0..self.next.0).filter_map(|number| self.get(OperationId(number)))
    }

    /// First and one past the last in flight.
    pub(crate) fn bounds(&self) -> (OperationId, OperationId) {
        (self.first, self.next)
    }
}
