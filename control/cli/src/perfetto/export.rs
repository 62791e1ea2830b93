//! A timeline as the bytes of a Perfetto trace.

use super::schema::{
    BOOTTIME, COUNTER, Clock, ClockSnapshot, CounterDescriptor, DebugAnnotation, EXPLICIT, INSTANT, REALTIME,
    SLICE_BEGIN, SLICE_END, Trace, TracePacket, TrackDescriptor, TrackEvent,
};
use super::track::{Fact, Slice, Track, lanes};
use harmonaize_planner::Nanos;
use prost::Message;

/// All packets have one writer.
const SEQUENCE: u32 = 1;

/// The bytes of a trace with these tracks at its top.
pub(crate) fn encode(tracks: &[Track]) -> Vec<u8> {
    let mut writer = Writer::default();
    let first = tracks.iter().filter_map(earliest).min().unwrap_or_default().0;
    // Times are wall time already; said once, so that a viewer shows them as such.
    let clock = |clock_id| Clock { clock_id: Some(clock_id), timestamp: Some(first) };
    let clocks = vec![clock(BOOTTIME), clock(REALTIME)];
    let snapshot = ClockSnapshot { clocks, primary_trace_clock: Some(BOOTTIME) };
    writer.packet(TracePacket { clock_snapshot: Some(snapshot), ..TracePacket::default() });
    for (rank, track) in tracks.iter().enumerate() {
        writer.track(track, None, rank);
    }
    writer.bytes
}

/// When the first thing happens on a track or beneath it.
fn earliest(track: &Track) -> Option<Nanos> {
    let slices = track.slices.iter().map(|slice| slice.begin);
    let moments = track.moments.iter().map(|moment| moment.time);
    let values = track.counter.iter().flat_map(|counter| &counter.values).map(|(time, _)| *time);
    let beneath = track.tracks.iter().filter_map(earliest);
    slices.chain(moments).chain(values).chain(beneath).min()
}

#[derive(Default)]
struct Writer {
    bytes: Vec<u8>,
    tracks: u64,
}

impl Writer {
    fn packet(&mut self, packet: TracePacket) {
        let packet = TracePacket { trusted_packet_sequence_id: Some(SEQUENCE), ..packet };
        // A trace is its packets, one field each; so they may be written one at a time.
        let written = Trace { packet: vec![packet] }.encode(&mut self.bytes);
        debug_assert!(written.is_ok(), "a vector grows");
    }

    fn event(&mut self, time: Nanos, event: TrackEvent) {
        let (timestamp, track_event) = (Some(time.0), Some(event));
        self.packet(TracePacket { timestamp, track_event, ..TracePacket::default() });
    }

    fn describe(&mut self, track: &Track, parent_uuid: Option<u64>, rank: usize) -> u64 {
        self.tracks += 1;
        let counter = track.counter.as_ref();
        let descriptor = TrackDescriptor {
            uuid: Some(self.tracks),
            name: Some(track.name.clone()),
            parent_uuid,
            counter: counter.map(|counter| CounterDescriptor { unit_name: Some(counter.unit.to_owned()) }),
            child_ordering: Some(EXPLICIT),
            sibling_order_rank: i32::try_from(rank).ok(),
        };
        self.packet(TracePacket { track_descriptor: Some(descriptor), ..TracePacket::default() });
        self.tracks
    }

    fn track(&mut self, track: &Track, parent: Option<u64>, rank: usize) {
        let uuid = self.describe(track, parent, rank);
        for (lane, slices) in lanes(&track.slices).into_iter().enumerate() {
            // Tracks of one name and parent are drawn as one with several rows.
            let uuid = if lane == 0 { uuid } else { self.describe(track, parent, rank) };
            for slice in slices {
                self.slice(slice, uuid);
            }
        }
        for moment in &track.moments {
            let event = TrackEvent {
                r#type: Some(INSTANT),
                track_uuid: Some(uuid),
                name: Some(moment.name.to_owned()),
                debug_annotations: annotations(&moment.facts),
                ..TrackEvent::default()
            };
            self.event(moment.time, event);
        }
        for (time, value) in track.counter.iter().flat_map(|counter| &counter.values) {
            let event = TrackEvent {
                r#type: Some(COUNTER),
                track_uuid: Some(uuid),
                counter_value: Some(i64::try_from(*value).unwrap_or(i64::MAX)),
                ..TrackEvent::default()
            };
            self.event(*time, event);
        }
        for (rank, beneath) in track.tracks.iter().enumerate() {
            self.track(beneath, Some(uuid), rank);
        }
    }

    fn slice(&mut self, slice: &Slice, uuid: u64) {
        let event = TrackEvent {
            r#type: Some(SLICE_BEGIN),
            track_uuid: Some(uuid),
            name: Some(slice.name.clone()),
            debug_annotations: annotations(&slice.facts),
            flow_ids: slice.joined.into_iter().collect(),
            ..TrackEvent::default()
        };
        self.event(slice.begin, event);
        let end = TrackEvent { r#type: Some(SLICE_END), track_uuid: Some(uuid), ..TrackEvent::default() };
        self.event(slice.end.max(slice.begin), end);
    }
}

fn annotations(facts: &[(&'static str, Fact)]) -> Vec<DebugAnnotation> {
    let annotation = |(name, fact): &(&'static str, Fact)| {
        let mut annotation = DebugAnnotation { name: Some((*name).to_owned()), ..DebugAnnotation::default() };
        match fact {
            Fact::Number(number) => annotation.uint_value = Some(*number),
            Fact::Text(text) => annotation.string_value = Some(text.clone()),
        }
        annotation
    };
    facts.iter().map(annotation).collect()
}
