//! The way of a record: into analysis and traces, and as a finding to control, the decision loop and listeners.

use crate::telemetry::analysis::{Analysis, TICK};
use crate::telemetry::clock::{monotonic, realtime_offset_ns};
use crate::telemetry::congestion_reports::{CongestionReports, ReportSink};
use crate::telemetry::finding::{Finding, Findings, Found};
use crate::telemetry::latencies::Latencies;
use crate::telemetry::losses::Losses;
use crate::telemetry::names::Names;
use crate::telemetry::own_flows::OwnFlows;
use crate::telemetry::signals::Signals;
use crate::telemetry::tap::{Recording, Tap};
use harmonaize_abi::{CongestionCause, CongestionLevel, Nanos};
use harmonaize_analysis::trace::{Observer, Record};
use harmonaize_engine::MarkReader;
use harmonaize_events::{Event, Mark};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// The most marks that are taken in a row.
const MARKS: usize = 16384;
/// The clocks' offset may drift so far before records say so.
const DRIFT_NS: u64 = 1_000;

/// What was found since telemetry began, how often.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// Links and paths that became congested, or more so: by cause and level.
    pub congestion: BTreeMap<(&'static str, &'static str), u64>,
    /// Ranks that became stragglers.
    pub stragglers: u64,
}

impl Events {
    fn take(&mut self, found: &Found) {
        match found {
            Found::Congestion(found) if found.level > CongestionLevel::None => {
                *self.congestion.entry((cause(found.cause), level(found.level))).or_default() += 1;
            }
            Found::Straggler(late) if late.straggler.ended.is_none() => self.stragglers += 1,
            _ => {}
        }
    }
}

/// The label of a cause.
pub(crate) fn cause(cause: CongestionCause) -> &'static str {
    match cause {
        CongestionCause::Unknown => "unknown",
        CongestionCause::Own => "own",
        CongestionCause::CrossTraffic => "cross_traffic",
    }
}

fn level(level: CongestionLevel) -> &'static str {
    match level {
        CongestionLevel::None => "none",
        CongestionLevel::Mild => "mild",
        CongestionLevel::Severe => "severe",
    }
}

/// See the module's documentation.
pub(crate) struct Pipeline {
    /// Records that are not handed on yet.
    pub(crate) records: Vec<Record>,
    /// Events whose latency is not known yet.
    pub(crate) events: Vec<Event>,
    pub(crate) analysis: Analysis,
    pub(crate) observer: Observer,
    pub(crate) losses: Losses,
    pub(crate) latencies: Latencies,
    pub(crate) signals: Signals,
    /// What was found, how often.
    pub(crate) found: Events,
    marks: Vec<Mark>,
    /// When analysis was last told the time.
    concluded: Nanos,
    congestion_reports: CongestionReports,
    findings: Findings,
    names: Arc<Mutex<Names>>,
    decide: Box<dyn FnMut(&Finding) + Send>,
    taps: Vec<Tap>,
    recording: Option<Recording>,
}

impl Pipeline {
    /// A pipeline into a recording, if one is wanted, the decision loop and the other sinks.
    pub(crate) fn new(
        observer: Observer,
        record: Option<(PathBuf, u64)>,
        decide: Box<dyn FnMut(&Finding) + Send>,
        (findings, names): (Findings, Arc<Mutex<Names>>),
    ) -> anyhow::Result<Self> {
        let recording = record.map(|(path, bytes)| Recording::begin(&path, bytes)).transpose()?;
        Ok(Self {
            records: vec![Record::Observer(observer)],
            events: Vec::new(),
            analysis: Analysis::default(),
            observer,
            losses: Losses::default(),
            latencies: Latencies::default(),
            signals: Signals::default(),
            found: Events::default(),
            marks: Vec::new(),
            concluded: Nanos(0),
            congestion_reports: CongestionReports::default(),
            findings,
            names,
            decide,
            taps: Vec::new(),
            recording,
        })
    }

    /// Takes marks out of the queues of the engine's threads, in the order of their times. It takes a bounded number of
    /// each. Returns whether there were any.
    pub(crate) fn read_marks(&mut self, sources: &[MarkReader], own_flows: &mut OwnFlows) -> bool {
        self.marks.clear();
        for source in sources {
            let marks = std::iter::from_fn(|| source.read()).take(MARKS / sources.len().max(1));
            self.marks.extend(marks.inspect(|mark| own_flows.mark(mark)));
        }
        if sources.len() > 1 {
            self.marks.sort_by_key(|mark| mark.time_ns);
        }
        !self.marks.is_empty()
    }

    /// Appends events and what `told` makes of marks to the records, in the order of their times.
    pub(crate) fn merge(&mut self, mut told: impl FnMut(&Mark) -> Option<Record>) {
        let (mut events, mut marks) = (self.events.iter().peekable(), self.marks.iter().peekable());
        let records = std::iter::from_fn(|| {
            let mark_first = match (events.peek(), marks.peek()) {
                (Some(event), Some(mark)) => mark.time_ns < event.time_ns,
                (event, _) => event.is_none(),
            };
            if mark_first {
                marks.next().map(&mut told)
            } else {
                events.next().map(|event| Some(Record::Event(*event)))
            }
        });
        self.records.extend(records.flatten());
    }

    /// Hands records to analysis and traces, and findings to their sinks.
    pub(crate) fn hand_on(&mut self, now: Nanos, own_flows: &mut OwnFlows) {
        self.take_in();
        self.concluded = Nanos(0);
        self.conclude(now, own_flows);
    }

    /// Hands records to analysis and traces.
    pub(crate) fn take_in(&mut self) {
        if self.records.is_empty() {
            return;
        }
        // There is something to conclude.
        self.concluded = Nanos(0);
        for record in &self.records {
            if let Record::Link(_) = record {
                self.names.lock().unwrap_or_else(PoisonError::into_inner).take(record);
            }
            self.signals.take(record);
            self.analysis.take(record);
            let recording = self.recording.as_mut().map(|recording| &mut recording.tap);
            for tap in recording.into_iter().chain(&mut self.taps) {
                self.losses.records += tap.write(record);
            }
        }
        self.records.clear();
    }

    /// Tells analysis the time, and hands findings to their sinks.
    pub(crate) fn conclude(&mut self, now: Nanos, own_flows: &mut OwnFlows) {
        if now.since(self.concluded) < TICK {
            return;
        }
        self.concluded = now;
        if let Some(recording) = &mut self.recording {
            recording.tap.flush();
        }
        self.taps.retain_mut(Tap::flush);
        self.analysis.advance(now);
        let (offset_ns, found) = (self.observer.realtime_offset_ns, self.analysis.found());
        // Control first: it hears of a path at once.
        // Control has it proven, so it hears of that too; to others nothing has changed.
        while let Some(again) = self.analysis.poll_starved_again() {
            self.congestion_reports.take(now, &Found::Congestion(again));
        }
        found.iter().for_each(|found| self.congestion_reports.take(now, found));
        self.congestion_reports.poll_reports(now, offset_ns, (own_flows, &self.analysis), &self.names);
        for found in found {
            if let Found::Operation(operation) = &found {
                own_flows.operation(operation);
            }
            self.found.take(&found);
            let finding = Finding { time: monotonic(), offset_ns, found };
            (self.decide)(&finding);
            self.findings.publish(finding);
        }
        if !self.events.is_empty() {
            let decided = monotonic();
            let Self { events, latencies, .. } = self;
            events.drain(..).for_each(|event| latencies.note(decided.since(Nanos(event.time_ns))));
        }
    }

    /// Has control receive congestion reports from now on, or none.
    pub(crate) fn report_congestion(&mut self, now: Nanos, sink: ReportSink) {
        self.congestion_reports.set_sink(now, sink, &self.analysis);
    }

    /// Adds a trace, which begins with what is `known` already.
    pub(crate) fn add_tap(&mut self, now: Nanos, mut tap: Tap, known: &[Record]) {
        self.begin_trace(now, &mut tap, known);
        self.taps.push(tap);
    }

    fn begin_trace(&mut self, now: Nanos, tap: &mut Tap, known: &[Record]) {
        self.losses.records += tap.write(&Record::Observer(Observer { time_ns: now.0, ..self.observer }));
        self.losses.records += known.iter().map(|record| tap.write(record)).sum::<u64>();
    }

    /// Whether the recording goes on in a new file.
    pub(crate) fn is_recording_full(&mut self) -> bool {
        self.recording.as_mut().is_some_and(Recording::is_full)
    }

    /// Has the recording go on in a new file, which begins with what is `known` already.
    pub(crate) fn renew_recording(&mut self, now: Nanos, known: &[Record]) {
        match self.recording.take().map(Recording::renew) {
            Some(Ok(mut recording)) => {
                self.begin_trace(now, &mut recording.tap, known);
                self.recording = Some(recording);
            }
            Some(Err(error)) => tracing::error!("nothing is recorded any more: {error:#}"),
            None => {}
        }
    }

    /// Records the clocks' offset where it has drifted.
    pub(crate) fn check_clocks(&mut self, now: Nanos) {
        let offset_ns = realtime_offset_ns();
        if offset_ns.abs_diff(self.observer.realtime_offset_ns) > DRIFT_NS {
            self.observer = Observer { time_ns: now.0, realtime_offset_ns: offset_ns, ..self.observer };
            self.records.push(Record::Observer(self.observer));
        }
    }

    /// Waits until the recording is whole, if there is one.
    pub(crate) fn end(self) {
        if let Some(recording) = self.recording {
            recording.end();
        }
    }
}
