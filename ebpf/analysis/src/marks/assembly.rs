//! Marks put together to operations.

use super::{Coded, Edge, Moved, Operation, RankCall};
use crate::trace::{Lost, LostKind, Record};
use harmonaize_abi::{CommunicatorId, Epoch, Nanos, OperationId};
use harmonaize_events::{Mark, MarkKind, SAMPLED_BLOCKS};
use std::collections::{HashMap, VecDeque};
use std::time::Duration;

/// What an assembly may remember at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Communicators; the one that was silent longest goes.
    pub communicators: usize,
    /// Operations of a communicator that are open at once; the oldest is given up.
    pub operations: usize,
    /// Local ranks of an operation, and its peers; more are left out, and the operation is not whole.
    pub ends: usize,
    /// Operations that wait to be polled; the oldest goes.
    pub findings: usize,
    /// An operation is reported so long after its last mark, once all its ranks have ended. A rank may end before this host has sent
    /// all.
    pub linger: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            communicators: 1024,
            operations: 64,
            ends: 1024,
            findings: 4096,
            linger: Duration::from_millis(2),
        }
    }
}

/// What was noticed on the way.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Marks taken in.
    pub marks: u64,
    /// Marks of operations that had been told already: those operations lack them.
    pub late: u64,
    /// Marks of a kind that this version does not know.
    pub unknown: u64,
    /// Operations told.
    pub operations: u64,
    /// Operations told that are not whole.
    pub partial: u64,
    /// Operations that nobody polled in time.
    pub dropped: u64,
}

/// How far behind the latest operation told a communicator's operations may still come, and are not taken for late ones.
const WINDOW: u64 = 128;
/// A communicator that appears so soon after a loss may have lost its first marks.
const NEW_AFTER_LOSS: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(super) struct Communicator {
    open: Vec<Open>,
    /// The operation after the latest that was told, and which of the `WINDOW` before it were.
    next: u64,
    reported: u128,
    last: Nanos,
    /// The most local ranks that an operation has had.
    ranks: usize,
    /// Something was lost, and no operation has since begun and ended.
    may_be_incomplete: bool,
}

#[derive(Debug)]
struct Open {
    operation: Operation,
    /// Began after the last loss.
    fresh: bool,
}

/// Puts marks together to operations. For each mark: a look-up, a search among open operations, and one among ranks or peers.
#[derive(Debug, Default)]
pub struct Marks {
    limits: Limits,
    host: u64,
    pub(super) communicators: HashMap<(u64, CommunicatorId), Communicator>,
    pub(super) found: VecDeque<Operation>,
    counts: Counts,
    last_loss: Option<Nanos>,
}

impl Marks {
    /// Nothing seen yet.
    pub fn new(limits: Limits) -> Self {
        Self { limits, ..Self::default() }
    }

    /// Takes a record in; those without a bearing on own operations are passed over. A loss is to be taken before time
    /// is [advanced](Marks::advance) beyond it.
    pub fn take(&mut self, record: &Record) {
        match record {
            Record::Observer(observer) => self.host = observer.host,
            Record::Mark(mark) => self.mark(mark),
            Record::Lost(lost) => self.lost(lost),
            _ => {}
        }
    }

    /// Tells what has settled by `now`.
    pub fn advance(&mut self, now: Nanos) {
        for communicator in self.communicators.values_mut() {
            while let Some(at) = communicator.ready(now, self.limits.linger) {
                communicator.report(at, &mut self.found, &mut self.counts);
            }
        }
        self.bound_findings();
    }

    /// The next operation that ended or was given up.
    pub fn poll(&mut self) -> Option<Operation> {
        self.found.pop_front()
    }

    /// Operations that have begun and were not told yet, as far as they are known.
    pub fn open(&self) -> impl Iterator<Item = &Operation> {
        self.communicators.values().flat_map(|communicator| &communicator.open).map(|open| &open.operation)
    }

    /// What was noticed so far.
    pub const fn counts(&self) -> Counts {
        self.counts
    }

    fn mark(&mut self, mark: &Mark) {
        self.counts.marks += 1;
        let Some(kind) = MarkKind::from_number(mark.kind) else {
            self.counts.unknown += 1;
            return;
        };
        if matches!(kind, MarkKind::Aggregated | MarkKind::GivenUp | MarkKind::Completed) {
            return;
        }
        let name = (self.host, CommunicatorId(mark.communicator));
        if let Some(communicator) = self.communicators.get_mut(&name) {
            communicator.mark(kind, mark, &self.limits, &mut self.found, &mut self.counts);
        } else {
            self.make_room();
            let soon = |loss: Nanos| Nanos(mark.time_ns).since(loss) < NEW_AFTER_LOSS;
            let doubtful = self.last_loss.is_some_and(soon);
            let mut communicator = Communicator { may_be_incomplete: doubtful, ..Communicator::default() };
            communicator.mark(kind, mark, &self.limits, &mut self.found, &mut self.counts);
            self.communicators.insert(name, communicator);
        }
        self.bound_findings();
    }

    fn lost(&mut self, lost: &Lost) {
        if !matches!(lost.kind, LostKind::Marks | LostKind::Records | LostKind::Gap) {
            return;
        }
        self.last_loss = Some(Nanos(lost.time_ns));
        for ((host, _), communicator) in &mut self.communicators {
            if *host != self.host {
                continue;
            }
            communicator.may_be_incomplete = true;
            for open in &mut communicator.open {
                open.operation.whole = false;
                open.fresh = false;
            }
            if lost.kind == LostKind::Gap {
                // Who marks may have begun anew, and count operations from 0.
                while !communicator.open.is_empty() {
                    communicator.report(0, &mut self.found, &mut self.counts);
                }
                (communicator.next, communicator.reported) = (0, 0);
            }
        }
        self.bound_findings();
    }

    fn make_room(&mut self) {
        if self.communicators.len() < self.limits.communicators.max(1) {
            return;
        }
        let silent = self.communicators.iter().min_by_key(|(name, one)| (one.last, **name));
        if let Some(name) = silent.map(|(name, _)| *name)
            && let Some(mut communicator) = self.communicators.remove(&name)
        {
            while !communicator.open.is_empty() {
                communicator.give_up(0, &mut self.found, &mut self.counts);
            }
        }
    }

    fn bound_findings(&mut self) {
        while self.found.len() > self.limits.findings {
            self.found.pop_front();
            self.counts.dropped += 1;
        }
    }
}

impl Communicator {
    /// Adds a mark to its operation.
    fn mark(
        &mut self,
        kind: MarkKind,
        mark: &Mark,
        limits: &Limits,
        found: &mut VecDeque<Operation>,
        counts: &mut Counts,
    ) {
        self.last = self.last.max(Nanos(mark.time_ns));
        let known = self.open.iter().rposition(|open| open.operation.operation.0 == mark.operation);
        let at = match known {
            Some(at) => at,
            None if self.is_reported(OperationId(mark.operation)) => {
                counts.late += 1;
                return;
            }
            None => self.begin(mark, limits.operations, found, counts),
        };
        let ranks = self.open.get_mut(at).map(|open| open.operation.take(kind, mark, limits.ends));
        self.ranks = self.ranks.max(ranks.unwrap_or_default());
    }

    /// Opens an operation, and says where it is.
    fn begin(
        &mut self,
        mark: &Mark,
        most: usize,
        found: &mut VecDeque<Operation>,
        counts: &mut Counts,
    ) -> usize {
        if self.open.len() >= most.max(1) {
            self.give_up(0, found, counts);
        }
        let operation = Operation {
            communicator: CommunicatorId(mark.communicator),
            operation: OperationId(mark.operation),
            participant: mark.participant,
            collective: None,
            epochs: (Epoch(0), Epoch(0)),
            began: Nanos(mark.time_ns),
            ended: Nanos(mark.time_ns),
            ranks: Vec::with_capacity(self.ranks.max(1)),
            edges: Vec::with_capacity(2),
            segments: 0,
            first_segment: None,
            coded: None,
            whole: !self.may_be_incomplete,
        };
        self.open.push(Open { operation, fresh: true });
        self.open.len() - 1
    }

    /// An operation whose ranks have all ended, and that has been silent since.
    fn ready(&self, now: Nanos, settle: Duration) -> Option<usize> {
        self.open.iter().position(|open| {
            let operation = &open.operation;
            let ended =
                !operation.ranks.is_empty() && operation.ranks.iter().all(|rank| rank.ended.is_some());
            ended && operation.ended.after(settle) <= now
        })
    }

    fn is_reported(&self, operation: OperationId) -> bool {
        match self.next.checked_sub(operation.0) {
            None | Some(0) => false,
            Some(behind) => behind > WINDOW || self.reported >> (behind - 1) & 1 == 1,
        }
    }

    fn give_up(&mut self, at: usize, found: &mut VecDeque<Operation>, counts: &mut Counts) {
        if let Some(open) = self.open.get_mut(at) {
            open.operation.whole = false;
        }
        self.report(at, found, counts);
    }

    fn report(&mut self, at: usize, found: &mut VecDeque<Operation>, counts: &mut Counts) {
        if at >= self.open.len() {
            return;
        }
        let Open { mut operation, fresh } = self.open.remove(at);
        operation.whole &= operation.ranks.len() >= self.ranks
            && operation.ranks.iter().all(|rank| rank.called.is_some() && rank.ended.is_some());
        let number = operation.operation.0;
        match (number + u64::from(number != u64::MAX)).checked_sub(self.next) {
            Some(ahead) => {
                self.reported =
                    u32::try_from(ahead).ok().and_then(|by| self.reported.checked_shl(by)).unwrap_or(0);
                self.reported |= 1;
                self.next += ahead;
            }
            None => {
                let behind = self.next - number - 1;
                self.reported |=
                    u32::try_from(behind).ok().and_then(|by| 1_u128.checked_shl(by)).unwrap_or(0);
            }
        }
        if fresh {
            self.may_be_incomplete = false;
        }
        counts.operations += 1;
        counts.partial += u64::from(!operation.whole);
        found.push_back(operation);
        // What has fallen out of the window will not end any more.
        let next = self.next;
        while let Some(at) =
            self.open.iter().position(|open| open.operation.operation.0.saturating_add(WINDOW) < next)
        {
            self.give_up(at, found, counts);
        }
    }
}

impl Operation {
    /// Adds a mark; says how many local ranks are known.
    fn take(&mut self, kind: MarkKind, mark: &Mark, most: usize) -> usize {
        let time = Nanos(mark.time_ns);
        self.began = self.began.min(time);
        self.ended = self.ended.max(time);
        match kind {
            MarkKind::Called => {
                self.collective = mark.channel.checked_sub(1).or(self.collective);
                if let Some(rank) = self.rank(mark.rank, most) {
                    rank.called = Some(rank.called.map_or(time, |at| at.min(time)));
                    rank.bytes = mark.bytes;
                    rank.zero_input = zeros(mark);
                }
            }
            MarkKind::Ended | MarkKind::Failed => {
                if let Some(rank) = self.rank(mark.rank, most) {
                    rank.ended = Some(rank.ended.map_or(time, |at| at.max(time)));
                    rank.failed |= kind == MarkKind::Failed;
                    rank.zero_output = zeros(mark);
                }
            }
            MarkKind::SegmentBegan => {
                self.ran(Epoch(mark.epoch));
                self.segments += 1;
                self.first_segment = Some(self.first_segment.map_or(time, |at| at.min(time)));
            }
            MarkKind::Sent => {
                self.ran(Epoch(mark.epoch));
                if let Some(edge) = self.edge(mark.peer, most) {
                    edge.sent.add(mark);
                }
            }
            MarkKind::Received => {
                self.ran(Epoch(mark.epoch));
                if let Some(edge) = self.edge(mark.peer, most) {
                    edge.received.add(mark);
                }
            }
            MarkKind::Coded => {
                let error = f64::from_bits(mark.segment);
                self.coded = Some(Coded { error, saved_bytes: mark.bytes, refused: mark.channel != 0 });
            }
            MarkKind::Aggregated | MarkKind::GivenUp | MarkKind::Completed => {}
        }
        self.ranks.len()
    }

    fn ran(&mut self, epoch: Epoch) {
        let (low, high) = self.epochs;
        let first = self.segments == 0 && self.edges.is_empty();
        self.epochs = if first { (epoch, epoch) } else { (low.min(epoch), high.max(epoch)) };
    }

    fn rank(&mut self, rank: u32, most: usize) -> Option<&mut RankCall> {
        let fresh = RankCall {
            rank,
            called: None,
            ended: None,
            failed: false,
            bytes: 0,
            zero_input: None,
            zero_output: None,
        };
        let found = find_or_insert(&mut self.ranks, rank, |one| one.rank, fresh, most);
        self.whole &= found.is_some();
        found.and_then(|at| self.ranks.get_mut(at))
    }

    fn edge(&mut self, peer: u32, most: usize) -> Option<&mut Edge> {
        let fresh = Edge { peer, sent: Moved::default(), received: Moved::default() };
        let found = find_or_insert(&mut self.edges, peer, |one| one.peer, fresh, most);
        self.whole &= found.is_some();
        found.and_then(|at| self.edges.get_mut(at))
    }
}

/// What a mark tells of zeros, no more than there can be.
fn zeros(mark: &Mark) -> Option<u32> {
    mark.segment.checked_sub(1).map(|zeros| zeros.min(SAMPLED_BLOCKS.into()) as u32)
}

/// Where a number is in a sorted list, or is put now, unless there is no room.
fn find_or_insert<T>(
    list: &mut Vec<T>,
    number: u32,
    of: impl Fn(&T) -> u32,
    fresh: T,
    most: usize,
) -> Option<usize> {
    match list.binary_search_by_key(&number, of) {
        Ok(at) => Some(at),
        Err(_) if list.len() >= most => None,
        Err(at) => {
            list.insert(at, fresh);
            Some(at)
        }
    }
}

impl Moved {
    fn add(&mut self, mark: &Mark) {
        let time = Nanos(mark.time_ns);
        if self.count == 0 || time < self.first {
            self.first = time;
        }
        self.count += 1;
        self.bytes = self.bytes.saturating_add(mark.bytes);
        self.last = self.last.max(time);
    }
}
