//! Communicators of a timeline: operations, each rank's call, segments, and what passed to and from each peer.

use super::{HostKey, Shift};
use crate::perfetto::track::{Fact, Slice, Track};
use harmonaize_analysis::CommunicatorId;
use harmonaize_api::communicator_text;
use harmonaize_events::{Mark, MarkKind};
use harmonaize_planner::Nanos;
use std::collections::{BTreeMap, BTreeSet};

/// Every communicator of which marks were seen.
#[derive(Debug, Default)]
pub(super) struct Communicators(BTreeMap<CommunicatorId, BTreeMap<(u32, HostKey), Part>>);

/// One participant's marks.
#[derive(Debug, Default)]
struct Part {
    /// Calls by rank and operation.
    calls: BTreeMap<u32, BTreeMap<u64, Call>>,
    segments: BTreeMap<u64, Segment>,
    /// By operation and peer; sent first.
    moved: BTreeMap<(u32, u64), [Moved; 2]>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Call {
    called: Nanos,
    ended: Nanos,
    bytes: u64,
    failed: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Segment {
    operation: u64,
    epoch: u32,
    channel: u32,
    began: Nanos,
    /// When something last happened to it.
    last: Nanos,
    bytes: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Moved {
    first: Nanos,
    last: Nanos,
    bytes: u64,
    messages: u64,
}

impl Moved {
    fn add(&mut self, time: Nanos, bytes: u64) {
        if self.messages == 0 {
            self.first = time;
        }
        (self.first, self.last) = (self.first.min(time), self.last.max(time));
        self.bytes = self.bytes.saturating_add(bytes);
        self.messages += 1;
    }
}

/// When a host's operations ran, so that bursts find theirs.
#[derive(Debug, Default)]
pub(super) struct Spans(BTreeMap<CommunicatorId, Vec<Span>>);

/// CLOCK_REALTIME; with the operation, and the number that joins slices.
#[derive(Clone, Copy, Debug)]
struct Span {
    begin: Nanos,
    end: Nanos,
    operation: u64,
    number: u64,
}

impl Spans {
    /// The latest operation that was under way at some time between the two, and the number that joins.
    pub(super) fn at(&self, communicator: CommunicatorId, begin: Nanos, end: Nanos) -> Option<(u64, u64)> {
        const MAX_LOOKBACK: usize = 64;
        let spans = self.0.get(&communicator)?;
        let after = spans.partition_point(|span| span.begin <= end);
        let mut near = spans.get(after.saturating_sub(MAX_LOOKBACK)..after)?.iter().rev();
        let found = near.find(|span| span.end >= begin)?;
        Some((found.operation, found.number))
    }
}

impl Communicators {
    pub(super) fn mark(&mut self, place: HostKey, mark: &Mark) {
        let Some(kind) = MarkKind::from_number(mark.kind) else { return };
        let parts = self.0.entry(CommunicatorId(mark.communicator)).or_default();
        let part = parts.entry((mark.participant, place)).or_default();
        match kind {
            MarkKind::Called => {
                let call = part.call(mark);
                (call.called, call.bytes) = (Nanos(mark.time_ns), mark.bytes);
            }
            MarkKind::Ended | MarkKind::Failed => {
                let call = part.call(mark);
                (call.ended, call.failed) = (Nanos(mark.time_ns), kind == MarkKind::Failed);
            }
            MarkKind::SegmentBegan => {
                let segment = part.segments.entry(mark.segment).or_default();
                let Mark { operation, epoch, channel, bytes, .. } = *mark;
                let time = Nanos(mark.time_ns);
                *segment = Segment { operation, epoch, channel, began: time, last: time, bytes };
            }
            MarkKind::Sent | MarkKind::Received => {
                if let Some(segment) = part.segments.get_mut(&mark.segment) {
                    segment.last = segment.last.max(Nanos(mark.time_ns));
                }
                let [sent, received] = part.moved.entry((mark.peer, mark.operation)).or_default();
                let moved = if kind == MarkKind::Sent { sent } else { received };
                moved.add(Nanos(mark.time_ns), mark.bytes);
            }
            MarkKind::Coded | MarkKind::Aggregated | MarkKind::GivenUp => {}
        }
    }

    /// How far hosts' times are to be moved, in nanoseconds. Operations then end there when they do on the first host: a
    /// collective ends everywhere at about the same time. Nothing where no message arrives before it was sent, for then clocks
    /// may be closer to each other than ends are.
    pub(super) fn corrections(&self, shifts: &BTreeMap<HostKey, Shift>) -> BTreeMap<HostKey, i64> {
        let real = |place: &HostKey, time| shifts.get(place).copied().unwrap_or_default().real(time);
        let mut delays: BTreeMap<[HostKey; 2], Vec<i64>> = BTreeMap::new();
        let mut ends: BTreeMap<HostKey, Vec<i64>> = BTreeMap::new();
        let places = self.0.values().flat_map(|parts| parts.keys().map(|(_, place)| *place));
        let Some(reference) = places.min() else { return BTreeMap::new() };
        for parts in self.0.values() {
            for ((sender, from), part) in parts {
                for ((receiver, operation), [sent, _]) in &part.moved {
                    let all = parts.range((*receiver, (0, 0))..=(*receiver, (usize::MAX, u64::MAX)));
                    for ((_, to), other) in all.filter(|((_, to), _)| to != from) {
                        let arrived = other.moved.get(&(*sender, *operation)).map(|[_, received]| received);
                        let Some(arrived) = arrived.filter(|moved| moved.messages.min(sent.messages) > 0)
                        else {
                            continue;
                        };
                        let delay = difference(real(to, arrived.first), real(from, sent.first));
                        delays.entry([*from, *to]).or_default().push(delay);
                    }
                }
            }
            let ends_of = |part: &Part| -> BTreeMap<u64, Nanos> {
                part.operations(part.last()).into_iter().map(|(operation, _, end)| (operation, end)).collect()
            };
            let Some((_, first)) = parts.iter().find(|((_, place), _)| *place == reference) else { continue };
            let first = ends_of(first);
            for ((_, place), part) in parts.iter().filter(|((_, place), _)| *place != reference) {
                let common = ends_of(part).into_iter().filter_map(|(of, end)| Some((*first.get(&of)?, end)));
                let apart = common.map(|(then, end)| difference(real(&reference, then), real(place, end)));
                ends.entry(*place).or_default().extend(apart);
            }
        }
        if delays.into_values().all(|delays| median(delays) >= 0) {
            return BTreeMap::new();
        }
        ends.into_iter().map(|(place, apart)| (place, median(apart))).collect()
    }

    /// A track for each communicator, and where bursts find their operations.
    pub(super) fn finish(
        self,
        shifts: &BTreeMap<HostKey, Shift>,
        tenants: &BTreeMap<CommunicatorId, String>,
        names: &BTreeMap<HostKey, String>,
    ) -> (Vec<Track>, BTreeMap<HostKey, Spans>) {
        let (mut tracks, mut spans) = (Vec::new(), BTreeMap::<HostKey, Spans>::new());
        let mut number = 0;
        for (id, parts) in self.0 {
            let tenant = tenants.get(&id).map_or_else(String::new, |tenant| format!(" of {tenant}"));
            let mut track = Track::named(format!("communicator {}{tenant}", communicator_text(id.0)));
            let alone = parts.len() == 1;
            for ((participant, place), part) in parts {
                let shift = shifts.get(&place).copied().unwrap_or_default();
                let seen = spans.entry(place).or_default().0.entry(id).or_default();
                let beneath = part.finish(shift, &mut number, seen);
                if alone {
                    track.tracks = beneath;
                    continue;
                }
                let host = names.get(&place).map_or_else(String::new, |name| format!(", {name}"));
                let mut own = Track::named(format!("participant {participant}{host}"));
                own.tracks = beneath;
                track.add(own);
            }
            tracks.push(track);
        }
        (tracks, spans)
    }
}

/// One time less another, in nanoseconds.
fn difference(one: Nanos, other: Nanos) -> i64 {
    one.0.cast_signed().wrapping_sub(other.0.cast_signed())
}

/// The upper of two; 0 of none.
fn median(mut values: Vec<i64>) -> i64 {
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0)
}

impl Part {
    fn call(&mut self, mark: &Mark) -> &mut Call {
        self.calls.entry(mark.rank).or_default().entry(mark.operation).or_default()
    }

    fn finish(self, shift: Shift, number: &mut u64, spans: &mut Vec<Span>) -> Vec<Track> {
        // The last thing that is known of an operation; what goes on at the end of the trace ends with it.
        let last = self.last();
        let mut top = Track::named("operations");
        for (operation, begin, end) in self.operations(last) {
            *number += 1;
            let (begin, end) = (shift.real(begin), shift.real(end));
            spans.push(Span { begin, end, operation, number: *number });
            let facts = vec![("operation", Fact::Number(operation))];
            let (name, joined) = (format!("operation {operation}"), Some(*number));
            top.slices.push(Slice { begin, end, name, facts, joined });
        }
        spans.sort_by_key(|span| (span.begin, span.operation));
        let mut tracks = Vec::new();
        let mut put = |track: Track| {
            if !track.slices.is_empty() {
                tracks.push(track);
            }
        };
        put(top);
        for (rank, calls) in &self.calls {
            let mut track = Track::named(format!("rank {rank}"));
            let slices = calls.iter().filter_map(|(operation, call)| call.slice(*operation, shift, last));
            track.slices = slices.collect();
            put(track);
        }
        let channels: BTreeSet<u32> = self.segments.values().map(|segment| segment.channel).collect();
        for channel in channels {
            let mut track = Track::named(format!("channel {channel}"));
            let own = self.segments.iter().filter(|(_, segment)| segment.channel == channel);
            track.slices = own.map(|(number, segment)| segment.slice(*number, shift)).collect();
            put(track);
        }
        let peers: BTreeSet<u32> = self.moved.keys().map(|(peer, _)| *peer).collect();
        for peer in peers {
            for (way, index) in [("to", 0), ("from", 1)] {
                let mut track = Track::named(format!("{way} participant {peer}"));
                let own = self.moved.range((peer, 0)..=(peer, u64::MAX));
                let own =
                    own.filter_map(|((_, operation), moved)| moved.get(index)?.slice(*operation, shift));
                track.slices = own.collect();
                put(track);
            }
        }
        tracks
    }

    fn last(&self) -> Nanos {
        let calls = self.calls.values().flat_map(BTreeMap::values).map(|call| call.called.max(call.ended));
        let segments = self.segments.values().map(|segment| segment.last);
        let moved = self.moved.values().flatten().map(|moved| moved.last);
        calls.chain(segments).chain(moved).max().unwrap_or_default()
    }

    /// Each operation, from its first call here to its last end here.
    fn operations(&self, last: Nanos) -> Vec<(u64, Nanos, Nanos)> {
        let mut operations: BTreeMap<u64, (Nanos, Nanos)> = BTreeMap::new();
        for (operation, call) in self.calls.values().flatten() {
            let Some((begin, end)) = call.times(last) else { continue };
            let known = operations.entry(*operation).or_insert((begin, end));
            *known = (known.0.min(begin), known.1.max(end));
        }
        operations.into_iter().map(|(operation, (begin, end))| (operation, begin, end)).collect()
    }
}

impl Call {
    /// The times from a call to its end. An end without a call is a moment, and a call without an end goes on to the trace's.
    fn times(&self, last: Nanos) -> Option<(Nanos, Nanos)> {
        match (self.called, self.ended) {
            (Nanos(0), Nanos(0)) => None,
            (Nanos(0), ended) => Some((ended, ended)),
            (called, Nanos(0)) => Some((called, last.max(called))),
            (called, ended) => Some((called, ended.max(called))),
        }
    }

    fn slice(&self, operation: u64, shift: Shift, last: Nanos) -> Option<Slice> {
        let (begin, end) = self.times(last)?;
        let state = match (self.called, self.ended, self.failed) {
            (Nanos(0), ..) => Some("its call was not recorded"),
            (_, Nanos(0), _) => Some("it had not ended"),
            (_, _, true) => Some("failed"),
            _ => None,
        };
        let mut facts = vec![("operation", Fact::Number(operation)), ("bytes", Fact::Number(self.bytes))];
        facts.extend(state.map(|state| ("state", Fact::Text(state.to_owned()))));
        let (begin, end) = (shift.real(begin), shift.real(end));
        Some(Slice { begin, end, name: format!("operation {operation}"), facts, joined: None })
    }
}

impl Segment {
    fn slice(&self, number: u64, shift: Shift) -> Slice {
        let facts = vec![
            ("operation", Fact::Number(self.operation)),
            ("segment", Fact::Number(number)),
            ("epoch", Fact::Number(self.epoch.into())),
            ("bytes", Fact::Number(self.bytes)),
        ];
        let (begin, end) = (shift.real(self.began), shift.real(self.last));
        Slice { begin, end, name: format!("segment {number}"), facts, joined: None }
    }
}

impl Moved {
    fn slice(&self, operation: u64, shift: Shift) -> Option<Slice> {
        let facts = vec![
            ("operation", Fact::Number(operation)),
            ("bytes", Fact::Number(self.bytes)),
            ("messages", Fact::Number(self.messages)),
        ];
        let (begin, end) = (shift.real(self.first), shift.real(self.last));
        let name = crate::text::bytes(self.bytes);
        (self.messages > 0).then_some(Slice { begin, end, name, facts, joined: None })
    }
}
