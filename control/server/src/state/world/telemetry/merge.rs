//! One communicator's operations as several agents tell of them, laid together: which rank holds the others
//! up.

use crate::state::job::communicator::Member;
use crate::state::output::SessionId;
use harmonaize_abi::{Bytes, CommunicatorId, Nanos};
use harmonaize_analysis::straggler::{self, EdgeTimes, Observed, RankTimes};
use harmonaize_api::v1::{self, StragglerCause};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Most operations of one participant that wait for the others' word; the oldest is given up beyond.
const MOST_OPEN: usize = 64;

/// Operations that the median is taken over.
const MOST_RECENT: usize = 64;

/// How long an operation is kept for who looks at it, before a later one takes its place.
const RETAINED: Duration = Duration::from_secs(5);

/// An operation that every participant has reported whole, by the first one's clock.
#[derive(Debug)]
pub(crate) struct WholeOperation {
    /// When it was kept.
    at: Duration,
    pub number: u64,
    /// Bytes of a rank's tensor.
    pub bytes: u64,
    /// In ascending order of ranks.
    pub ranks: Vec<RankTimes>,
}

/// What is known of a communicator's operations.
#[derive(Debug)]
pub(crate) struct Merging {
    communicator: CommunicatorId,
    /// By participant: operations that not all have told of.
    open: BTreeMap<usize, BTreeMap<u64, v1::Operation>>,
    /// The last operation that all have told of.
    last: Option<u64>,
    operations: u64,
    recent: VecDeque<u64>,
    detector: straggler::Detector,
    retained: Option<WholeOperation>,
    /// By participant: how far its clock is ahead of the first one's, judged by when operations end.
    ahead: BTreeMap<usize, i64>,
    /// Those that hold.
    found: Vec<v1::Straggler>,
}

impl Merging {
    pub(crate) fn new(communicator: CommunicatorId) -> Self {
        Self {
            communicator,
            open: BTreeMap::new(),
            last: None,
            operations: 0,
            recent: VecDeque::new(),
            detector: straggler::Detector::default(),
            retained: None,
            ahead: BTreeMap::new(),
            found: Vec::new(),
        }
    }

    /// Operations that every participant has told of.
    pub(crate) fn operations(&self) -> u64 {
        self.operations
    }

    /// Whether operations of several agents came together: only then is a finding on ranks control's.
    pub(crate) fn judges(&self) -> bool {
        self.operations > 0
    }

    pub(crate) fn last_ns(&self) -> u64 {
        self.recent.back().copied().unwrap_or(0)
    }

    pub(crate) fn median_ns(&self) -> u64 {
        let mut recent: Vec<u64> = self.recent.iter().copied().collect();
        recent.sort_unstable();
        recent.get(recent.len().saturating_sub(1) / 2).copied().unwrap_or(0)
    }

    pub(crate) fn stragglers(&self) -> impl Iterator<Item = &v1::Straggler> {
        self.found.iter()
    }

    /// The one that costs most.
    pub(crate) fn worst(&self) -> Option<&v1::Straggler> {
        self.found.iter().max_by_key(|found| found.delay_ns)
    }

    /// The last operation that was reported whole, or one that came at most 5 s before it.
    pub(crate) fn retained(&self) -> Option<&WholeOperation> {
        self.retained.as_ref()
    }

    /// Takes in one agent's report of an operation, which was checked. Returns findings that are new or
    /// over. Of an operation that all have reported, it also returns the bytes and the nanoseconds from the
    /// last rank's call.
    pub(crate) fn take(
        &mut self,
        now: Duration,
        operation: v1::Operation,
        from: SessionId,
        members: &[Member],
    ) -> (Vec<v1::Straggler>, Option<(Bytes, Duration)>) {
        let (number, bytes) = (operation.operation, operation.bytes);
        let nothing = (Vec::new(), None);
        let Some(me) = members.iter().position(|member| member.session == Some(from)) else { return nothing };
        if self.last.is_some_and(|last| number <= last) {
            return nothing;
        }
        let own = self.open.entry(me).or_default();
        own.insert(number, operation);
        if own.len() > MOST_OPEN {
            own.pop_first();
        }
        let parts: Vec<&v1::Operation> =
            (0..members.len()).filter_map(|index| self.open.get(&index)?.get(&number)).collect();
        if parts.len() < members.len() {
            return nothing;
        }
        let each = parts.iter().flat_map(|part| &part.ranks).filter(|rank| rank.called_ns > 0);
        let each = each.map(|rank| (rank.ended_ns.saturating_sub(rank.called_ns), rank.failed));
        let each: Vec<(u64, bool)> = each.collect();
        let lasted = each.iter().map(|(time, _)| *time).max().unwrap_or(0);
        // Who called last waited least.
        let took =
            each.iter().map(|(time, _)| *time).min().filter(|_| each.iter().all(|(_, failed)| !failed));
        let whole = parts.iter().all(|part| part.complete);
        let observed = whole.then(|| {
            align(&mut self.ahead, &parts);
            observe(number, &parts, members, &self.ahead)
        });
        for own in self.open.values_mut() {
            *own = own.split_off(&number.saturating_add(1));
        }
        self.last = Some(number);
        self.operations += 1;
        if self.recent.len() >= MOST_RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(lasted);
        let judged = observed.as_ref().map_or_else(Vec::new, |observed| self.judge(observed));
        let due = self.retained.as_ref().is_none_or(|kept| now.saturating_sub(kept.at) >= RETAINED);
        if let Some(Observed { ranks, .. }) = observed.filter(|_| due) {
            self.retained = Some(WholeOperation { at: now, number, bytes, ranks });
        }
        (judged, took.map(|took| (Bytes(bytes), Duration::from_nanos(took))))
    }

    fn judge(&mut self, observed: &Observed) -> Vec<v1::Straggler> {
        self.detector.take(straggler::Subject::Communicator(self.communicator), observed);
        let turned = std::iter::from_fn(|| self.detector.poll());
        let turned = turned.map(|found| message(self.communicator, &found)).collect();
        let held = self.detector.current();
        self.found = held.map(|found| message(self.communicator, &found)).collect();
        turned
    }
}

/// Learns how far clocks are apart. A collective ends everywhere at about the same time; what one operation
/// says counts for a 64th, so that an end that is late for a reason stays late.
fn align(ahead: &mut BTreeMap<usize, i64>, parts: &[&v1::Operation]) {
    let end = |part: &v1::Operation| part.ranks.iter().map(|rank| rank.ended_ns).max();
    let Some(first) = parts.first().and_then(|part| end(part)) else { return };
    for (index, part) in parts.iter().enumerate() {
        let Some(end) = end(part) else { continue };
        let apart = end.wrapping_sub(first).cast_signed();
        let known = ahead.entry(index).or_insert(apart);
        *known = known.saturating_add(apart.saturating_sub(*known) / 64);
    }
}

/// An operation's times over all participants, by the first one's clock. Between participants, the lowest
/// rank of each stands for it.
fn observe(
    number: u64,
    parts: &[&v1::Operation],
    members: &[Member],
    ahead: &BTreeMap<usize, i64>,
) -> Observed {
    let shift = |index: usize| ahead.get(&index).copied().unwrap_or(0);
    let known = |nanos: u64, index| (nanos > 0).then(|| Nanos(nanos.saturating_sub_signed(shift(index))));
    let ranks =
        parts.iter().enumerate().flat_map(|(index, part)| part.ranks.iter().map(move |one| (index, one)));
    let mut ranks: Vec<RankTimes> = ranks
        .map(|(index, one)| RankTimes {
            rank: one.rank,
            start: known(one.called_ns, index),
            end: known(one.ended_ns, index).filter(|_| !one.failed),
            waited: Duration::ZERO,
        })
        .collect();
    ranks.sort_unstable_by_key(|one| one.rank);
    let rank_of = |index: usize| members.get(index).and_then(|member| member.ranks.first().copied());
    let mut edges: BTreeMap<(u32, u32), EdgeTimes> = BTreeMap::new();
    for (index, part) in parts.iter().enumerate() {
        for edge in &part.edges {
            let Some((me, peer)) = rank_of(index).zip(rank_of(edge.peer as usize)) else { continue };
            if edge.sent_bytes > 0 {
                let out = edges.entry((me, peer)).or_default();
                (out.first, out.last) = (known(edge.first_sent_ns, index), known(edge.last_sent_ns, index));
                out.bytes = edge.sent_bytes;
            }
            if edge.received_bytes > 0 {
                let into = edges.entry((peer, me)).or_default();
                into.arrived = known(edge.last_received_ns, index);
                into.bytes = into.bytes.max(edge.received_bytes);
            }
        }
    }
    let edges = edges.into_iter().map(|((from, to), edge)| EdgeTimes { from, to, ..edge }).collect();
    Observed { unit: number, ranks, edges }
}

fn message(communicator: CommunicatorId, found: &straggler::Straggler) -> v1::Straggler {
    let kind = match found.kind {
        straggler::Kind::Compute => StragglerCause::Compute,
        straggler::Kind::Network => StragglerCause::Network,
    };
    v1::Straggler {
        communicator: communicator.0,
        rank: found.rank,
        cause: kind.into(),
        since_ns: found.since.0,
        delay_ns: Nanos::from(found.by).0,
        iterations: found.units,
        ended_ns: found.ended.unwrap_or_default().0,
        edge_from: found.edge.map(|(from, _)| from),
        edge_to: found.edge.map(|(_, to)| to),
        found_ns: found.found.0,
        since_unit: found.since_unit,
        source: v1::TelemetrySource::Engine.into(),
        ..v1::Straggler::default()
    }
}
