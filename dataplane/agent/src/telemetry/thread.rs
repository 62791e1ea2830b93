//! The telemetry thread: what it is asked, when it wakes, and what it does then.

mod requests;
#[cfg(test)]
mod tests;
mod wake;

use crate::telemetry::analysis::{Analysis, TICK_NS};
use crate::telemetry::clock::{monotonic_ns, realtime_offset_ns, thread_time};
use crate::telemetry::congestion_reports::CongestionReports;
use crate::telemetry::cpu_budget::{Credit, DutyCycle, nanoseconds};
use crate::telemetry::cpu_pressure::CpuPressure;
use crate::telemetry::finding::{Finding, Findings, Found};
use crate::telemetry::flow_sampler::FlowSampler;
use crate::telemetry::handle::{Command, Handle};
use crate::telemetry::latencies::Latencies;
use crate::telemetry::links::Links;
use crate::telemetry::losses::Losses;
use crate::telemetry::names::{Names, number_of};
use crate::telemetry::own_flows::OwnFlows;
use crate::telemetry::reading::Reading;
use crate::telemetry::tap::{Recording, Tap};
use crate::telemetry::{Failed, failed};
use crossbeam::channel::{Receiver, bounded};
use harmonaize_analysis::trace::{Observer, Record};
use harmonaize_engine::MarkReader;
use harmonaize_events::{Event, EventKind, Mark};
use harmonaize_loader::Collector;
use requests::{AWAITED, FOLLOWED};
use rustix::event::{EventfdFlags, eventfd};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::{oneshot, watch};

/// Commands that may wait.
const COMMANDS: usize = 256;
/// Events, and marks, that are taken in a row.
const EVENTS: usize = 4096;
const MARKS: usize = 16384;
/// Shares of a core, as one part of so many, that the kinds of work may take: looking at flows under way that move much, at all under way,
/// reading all flows, waking for events, looking closely, and acting on late round trips. Together 1.7%: what this thread takes, operations
/// wait for, where all cores are busy. Beside it, where they are not, what marks and events cost to be taken in, which nobody can choose.
const SAMPLE_SHARE: u32 = 166;
const FULL_SAMPLE_SHARE: u32 = 1000;
const READ_ALL_SHARE: u32 = 1000;
const WAKE_SHARE: u32 = 200;
const FAST_SAMPLE_SHARE: u32 = 500;
const LATE_RTT_SHARE: u32 = 500;
/// Where processors have no time to spare, looking takes one part in so many of its share, at the few that move much the square of it, none of it
/// closely, and events gather so many times longer.
const BACKOFF_FACTOR: u32 = 2;
/// Processor time that waking for events may save up, and owe: so long events are acted on at once.
const WAKE_BURST: Duration = Duration::from_micros(500);
/// Looks are this far apart while traffic has just begun, or a verdict is in the making; the processor time for it that may
/// be saved up, and how long traffic has just begun.
const FAST_INTERVAL: Duration = Duration::from_millis(1);
const FAST_BURST: Duration = Duration::from_millis(3);
const BEGINNING_NS: u64 = 20_000_000;
/// The same for late round trips: for each the thread wakes, however long other events gather, and looks at flows if it is news
/// of one that is worth it.
const LATE_RTT_BURST: Duration = Duration::from_millis(2);
/// Longer than this events never wait, whatever it costs; [`BACKOFF_FACTOR`] times as long where processors have no time to spare.
const GATHER: Duration = Duration::from_millis(10);
/// How long looks go on after the last sign of traffic.
const QUIET_NS: u64 = 200_000_000;
/// How often interfaces, losses and clocks are looked after.
const ROUND: Duration = Duration::from_secs(1);
/// How often it is looked at, while awake, whether processors have time to spare.
const PRESSURE_INTERVAL: Duration = Duration::from_millis(200);
/// How often all flows under way are looked at, at most and at least; and all flows read.
const FULL_SAMPLE_INTERVAL: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(200));
const READ_ALL_INTERVAL: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));

/// How the thread is set up.
pub struct Setup {
    /// The host's name; empty where it has none.
    pub host: String,
    /// Interfaces to measure.
    pub interfaces: Vec<String>,
    /// What links carry, in bits a second, by interface; else as the driver says.
    pub rates: BTreeMap<String, u64>,
    /// How often flows under way are looked at, at most.
    pub interval: Duration,
    /// A file that everything is recorded in.
    pub record: Option<PathBuf>,
    /// The engine's marks.
    pub marks: Option<MarkReader>,
    /// The decision loop: hears of each finding within the thread, at once. It must not block.
    pub decide: Box<dyn FnMut(&Finding) + Send>,
}

/// Starts the thread on a source that `open` makes within it. Returns once that has worked or failed.
///
/// # Errors
/// Why there is no telemetry, for the operator.
pub fn start<O>(setup: Setup, open: O) -> anyhow::Result<(Handle, JoinHandle<()>)>
where
    O: FnOnce() -> Result<Box<dyn Collector>, Failed> + Send + 'static,
{
    let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    let (sender, commands) = bounded(COMMANDS);
    let findings = Findings::default();
    let names = Arc::new(Mutex::new(Names::default()));
    let handle = Handle {
        commands: sender,
        bell: Arc::clone(&bell),
        findings: findings.clone(),
        names: Arc::clone(&names),
        report_interval: watch::Sender::new(None),
    };
    let (opened, opening) = bounded(1);
    let thread = std::thread::Builder::new().name("telemetry".into()).spawn(move || {
        let thread = open().map_err(anyhow::Error::from);
        let thread = thread.and_then(|source| Thread::new(setup, source, commands, bell, (findings, names)));
        match thread {
            Ok(thread) => {
                let _ = opened.send(Ok(()));
                thread.run();
            }
            Err(error) => drop(opened.send(Err(error))),
        }
    })?;
    opening.recv().unwrap_or_else(|_| Err(anyhow::anyhow!("the telemetry thread has panicked")))?;
    Ok((handle, thread))
}

struct Thread {
    source: Box<dyn Collector>,
    commands: Receiver<Command>,
    bell: Arc<OwnedFd>,
    marks: Option<MarkReader>,
    findings: Findings,
    names: Arc<Mutex<Names>>,
    decide: Box<dyn FnMut(&Finding) + Send>,
    analysis: Analysis,
    congestion_reports: CongestionReports,
    taps: Vec<Tap>,
    recording: Option<Recording>,
    observer: Observer,
    links: Links,
    sampler: FlowSampler,
    own_flows: OwnFlows,
    losses: Losses,
    latencies: Latencies,
    sample_cycle: DutyCycle,
    full_sample_cycle: DutyCycle,
    read_all: DutyCycle,
    round_ns: u64,
    wake_credit: Credit,
    fast_credit: Credit,
    late_rtt_credit: Credit,
    cpu_pressure: CpuPressure,
    /// Processors had no time to spare when this was last looked at, and when it is next.
    throttled: bool,
    pressure_due_ns: u64,
    sampled_ns: u64,
    /// When a flow that had rested was last seen again.
    woken_ns: u64,
    /// Of what was taken in last, a round trip was late.
    saw_late_rtt: bool,
    /// One was since the last look that is worth a look at once.
    urgent: bool,
    begun_ns: u64,
    /// When somebody last asked for flows, and who waits for an answer until when.
    requested_ns: u64,
    waiting: Vec<(u64, oneshot::Sender<Arc<Reading>>)>,
    /// When analysis was last told the time.
    concluded_ns: u64,
    /// When there was last a sign of traffic.
    busy_ns: u64,
    /// Processor time that was counted to some work already.
    accounted: Duration,
    /// Kept for their memory.
    events: Vec<Event>,
    marked: Vec<Mark>,
    records: Vec<Record>,
}

impl Thread {
    fn new(
        setup: Setup,
        source: Box<dyn Collector>,
        commands: Receiver<Command>,
        bell: Arc<OwnedFd>,
        (findings, names): (Findings, Arc<Mutex<Names>>),
    ) -> anyhow::Result<Self> {
        let mut taps = Vec::new();
        let mut recording = None;
        if let Some(path) = &setup.record {
            let (file, tap) = Recording::begin(path)?;
            recording = Some(file);
            taps.push(tap);
        }
        let now_ns = monotonic_ns();
        let observer = Observer {
            time_ns: now_ns,
            host: number_of(&setup.host),
            realtime_offset_ns: realtime_offset_ns(),
        };
        let longest = setup.interval.max(Duration::from_millis(200));
        let mut thread = Self {
            source,
            commands,
            bell,
            marks: setup.marks,
            findings,
            names,
            decide: setup.decide,
            analysis: Analysis::default(),
            congestion_reports: CongestionReports::default(),
            taps,
            recording,
            observer,
            links: Links::new(setup.interfaces, setup.rates),
            sampler: FlowSampler::default(),
            own_flows: OwnFlows::default(),
            losses: Losses::default(),
            latencies: Latencies::default(),
            sample_cycle: DutyCycle::new(SAMPLE_SHARE, setup.interval, longest),
            full_sample_cycle: DutyCycle::new(
                FULL_SAMPLE_SHARE,
                FULL_SAMPLE_INTERVAL.0,
                FULL_SAMPLE_INTERVAL.1,
            ),
            read_all: DutyCycle::new(READ_ALL_SHARE, READ_ALL_INTERVAL.0, READ_ALL_INTERVAL.1),
            round_ns: 0,
            wake_credit: Credit::new(WAKE_SHARE, WAKE_BURST),
            fast_credit: Credit::new(FAST_SAMPLE_SHARE, FAST_BURST),
            late_rtt_credit: Credit::new(LATE_RTT_SHARE, LATE_RTT_BURST),
            cpu_pressure: CpuPressure::new(),
            throttled: false,
            pressure_due_ns: 0,
            sampled_ns: 0,
            woken_ns: 0,
            saw_late_rtt: false,
            urgent: false,
            begun_ns: now_ns,
            requested_ns: 0,
            waiting: Vec::new(),
            concluded_ns: 0,
            busy_ns: 0,
            accounted: thread_time(),
            events: Vec::new(),
            marked: Vec::new(),
            records: Vec::new(),
        };
        tracing::info!("telemetry: {}", thread.source.kernel());
        thread.records.push(Record::Observer(observer));
        thread.housekeeping(now_ns);
        thread.hand_on(now_ns);
        Ok(thread)
    }

    fn run(mut self) {
        loop {
            self.wait();
            while let Ok(command) = self.commands.try_recv() {
                if matches!(command, Command::Stop) {
                    return self.end();
                }
                self.apply(command);
            }
            self.run_once();
        }
    }

    /// Takes in what has come and hands it on, then looks at what is due.
    fn run_once(&mut self) {
        let now_ns = monotonic_ns();
        let mut woke = self.spent();
        self.gather();
        self.merge();
        self.take_in();
        // What has come costs as much to take in however often that is done: it makes no look dearer, but where all cores are busy.
        let took = self.spent();
        let looks = self.is_busy(now_ns) && now_ns >= self.next_sample_ns(now_ns);
        if looks {
            // To have woken is at the look's expense: nothing else would bound how often that is.
            woke += if self.throttled { took } else { Duration::ZERO };
            self.sample_flows(now_ns, woke);
        } else {
            self.conclude(now_ns);
            let spent = woke + took + self.spent();
            let credit = if self.saw_late_rtt { &mut self.late_rtt_credit } else { &mut self.wake_credit };
            credit.used(now_ns, spent);
        }
        if self.is_busy(now_ns) {
            self.read_if_due(now_ns);
        }
        self.answer(now_ns);
        if now_ns >= self.pressure_due_ns {
            self.update_backoff(now_ns);
        }
        if now_ns >= self.round_ns {
            self.housekeeping(now_ns);
            // Flows that neither pause nor began lately are found by this alone.
            self.read_if_due(now_ns);
            self.hand_on(now_ns);
            // Counted to nothing.
            self.spent();
        }
    }

    /// Processor time since this was last asked.
    fn spent(&mut self) -> Duration {
        let now = thread_time();
        now.saturating_sub(std::mem::replace(&mut self.accounted, now))
    }

    /// Takes events and marks out of their queues.
    fn gather(&mut self) {
        self.events.clear();
        let (mut woken, mut told_late) = (false, false);
        let Self { source, events, sampler: looks, own_flows: own, urgent: hurries, .. } = self;
        let read = source.read_events(EVENTS, &mut |event| {
            if EventKind::from_number(event.kind) == Some(EventKind::LateRtt) {
                told_late = true;
                let flow = &event.flow;
                *hurries |= is_news(event) && if own.any() { own.has(flow) } else { looks.is_heavy(flow) };
            } else {
                woken |= looks.activate(&event.flow);
            }
            events.push(*event);
        });
        self.saw_late_rtt = told_late;
        if told_late {
            // They were told apart from the others.
            self.events.sort_by_key(|event| event.time_ns);
        }
        if let Err(error) = read {
            failed("reading events", &error);
        }
        self.marked.clear();
        while self.marked.len() < MARKS
            && let Some(mark) = self.marks.as_ref().and_then(MarkReader::read)
        {
            self.own_flows.mark(&mark);
            self.marked.push(mark);
        }
        if let Some(latest) = self.events.last().map(|event| event.time_ns) {
            self.busy_ns = self.busy_ns.max(latest);
            self.woken_ns = if woken { latest } else { self.woken_ns };
        }
    }

    /// Puts events and marks in the order of their times.
    fn merge(&mut self) {
        let Self { events, marked, records, .. } = self;
        let (mut events, mut marks) = (events.iter().peekable(), marked.iter().peekable());
        loop {
            let mark_first = match (events.peek(), marks.peek()) {
                (None, None) => return,
                (Some(event), Some(mark)) => mark.time_ns < event.time_ns,
                (event, _) => event.is_none(),
            };
            if mark_first {
                records.extend(marks.next().map(|mark| Record::Mark(*mark)));
            } else {
                records.extend(events.next().map(|event| Record::Event(*event)));
            }
        }
    }

    /// Looks at flows under way, for which it `woke`. What analysis takes for them counts, too.
    fn sample_flows(&mut self, now_ns: u64, woke: Duration) {
        let (close, whole) = (!self.sample_cycle.is_due(now_ns), self.full_sample_cycle.is_due(now_ns));
        let late = self.acts_on_late(now_ns);
        self.urgent = false;
        if let Err(error) = self.sampler.sample(self.source.as_ref(), now_ns, whole, &mut self.records) {
            failed("looking at flows", &error);
        }
        self.read_totals(now_ns);
        self.hand_on(now_ns);
        let mut spent = woke + self.spent();
        self.sampled_ns = now_ns;
        if whole {
            // Else a look at all would put off those at the few that move much.
            self.full_sample_cycle.done(now_ns, std::mem::take(&mut spent));
        }
        if close {
            let credit = if late { &mut self.late_rtt_credit } else { &mut self.fast_credit };
            credit.used(now_ns, spent);
        } else {
            self.sample_cycle.done(now_ns, spent);
        }
    }

    fn read_totals(&mut self, now_ns: u64) {
        for link in self.links.measured() {
            if let Ok(totals) = self.source.totals(link.index) {
                self.records.push(Record::Totals { time_ns: now_ns, totals });
            }
        }
    }

    fn read_if_due(&mut self, now_ns: u64) {
        if self.read_all.is_due(now_ns) {
            self.read_flows(now_ns);
            self.hand_on(now_ns);
            let spent = self.spent();
            self.read_all.done(now_ns, spent);
        }
    }

    fn read_flows(&mut self, now_ns: u64) {
        if let Err(error) = self.sampler.read_all(self.source.as_mut(), now_ns, &mut self.records) {
            failed("reading flows", &error);
        }
    }

    /// Takes less from when processors have no time to spare until they have again.
    fn update_backoff(&mut self, now_ns: u64) {
        self.throttled = self.cpu_pressure.is_throttled();
        let thrift = if self.throttled { BACKOFF_FACTOR } else { 1 };
        self.sample_cycle.set_backoff(thrift * thrift);
        self.full_sample_cycle.set_backoff(thrift);
        self.read_all.set_backoff(thrift);
        self.pressure_due_ns = now_ns.saturating_add(nanoseconds(PRESSURE_INTERVAL));
    }

    /// What is done once in a while: interfaces, losses, clocks.
    fn housekeeping(&mut self, now_ns: u64) {
        let Self { links, source, losses: gaps, records, .. } = self;
        match links.refresh(source.as_mut(), now_ns, gaps, records) {
            Ok(false) => {}
            Ok(true) => self.own_flows.announce_all(&self.interfaces(), &mut self.records),
            Err(error) => failed("looking after interfaces", &error),
        }
        match self.source.losses() {
            Ok(losses) => {
                let lost = Losses {
                    events: losses.events,
                    flows: self.sampler.flows().evicted,
                    ambiguous: losses.ambiguous,
                    unregistered: losses.unregistered,
                    marks: self.marks.as_ref().map_or(0, MarkReader::lost),
                    ..Losses::default()
                };
                self.losses.note(now_ns, lost, &mut self.records);
            }
            Err(error) => failed("reading losses", &error),
        }
        let offset_ns = realtime_offset_ns();
        if offset_ns.abs_diff(self.observer.realtime_offset_ns) > 1_000 {
            self.observer = Observer { time_ns: now_ns, realtime_offset_ns: offset_ns, ..self.observer };
            self.records.push(Record::Observer(self.observer));
        }
        if now_ns.saturating_sub(self.requested_ns) > nanoseconds(FOLLOWED)
            && let Err(error) = self.source.watch_endpoints(false)
        {
            failed("leaving the flows' ends alone", &error);
        }
        self.round_ns = now_ns.saturating_add(ROUND.as_nanos() as u64);
    }

    /// Hands records to analysis and traces, and findings to those who wait for them.
    fn hand_on(&mut self, now_ns: u64) {
        self.take_in();
        self.concluded_ns = 0;
        self.conclude(now_ns);
    }

    /// Hands records to analysis and traces.
    fn take_in(&mut self) {
        if self.records.is_empty() {
            return;
        }
        // There is something to conclude.
        self.concluded_ns = 0;
        for record in &self.records {
            if let Record::Link(_) = record {
                self.names.lock().unwrap_or_else(PoisonError::into_inner).take(record);
            }
            self.analysis.take(record);
            for tap in &mut self.taps {
                self.losses.records += tap.write(record);
            }
        }
        self.records.clear();
    }

    /// Has analysis find what there is by now, and hands findings to those who wait for them.
    fn conclude(&mut self, now_ns: u64) {
        if now_ns.saturating_sub(self.concluded_ns) < TICK_NS {
            return;
        }
        self.concluded_ns = now_ns;
        self.taps.retain_mut(Tap::flush);
        self.analysis.advance(now_ns);
        let (offset_ns, found) = (self.observer.realtime_offset_ns, self.analysis.found());
        // Control first: it hears of a path at once.
        found.iter().for_each(|found| self.congestion_reports.take(now_ns, found));
        self.congestion_reports.poll_reports(
            now_ns,
            offset_ns,
            (&self.own_flows, &self.analysis),
            &self.names,
        );
        for found in found {
            if let Found::Operation(operation) = &found {
                self.own_flows.operation(operation);
            }
            let finding = Finding { time_ns: monotonic_ns(), offset_ns, found };
            (self.decide)(&finding);
            self.findings.publish(finding);
        }
        if !self.events.is_empty() {
            let decided_ns = monotonic_ns();
            let Self { events, latencies: lags, .. } = self;
            events.drain(..).for_each(|event| lags.note(decided_ns.saturating_sub(event.time_ns)));
        }
    }

    fn interfaces(&self) -> Vec<u32> {
        self.links.measured().iter().map(|link| link.index).collect()
    }

    fn apply(&mut self, command: Command) {
        let now_ns = monotonic_ns();
        let interfaces = self.interfaces();
        match command {
            Command::Formed(formed) => self.own_flows.formed(&formed, now_ns, &interfaces, &mut self.records),
            Command::Ended(communicator) => {
                // What its marks still say is of before.
                self.gather();
                self.merge();
                self.hand_on(now_ns);
                self.analysis.ended(communicator);
                self.own_flows.ended(communicator, now_ns, &interfaces, &mut self.records);
            }
            Command::Read { flows, reply } => {
                if flows && self.follow(now_ns) {
                    return self.waiting.push((now_ns.saturating_add(nanoseconds(AWAITED)), reply));
                }
                // Nobody waits for it any more: as well.
                let _ = reply.send(Arc::new(self.reading(now_ns, flows)));
            }
            Command::Trace(to) => self.tap(now_ns, Tap::new(to)),
            Command::ReportCongestion(wanted) => {
                self.congestion_reports.set_sink(now_ns, wanted, &self.analysis)
            }
            Command::Stop => {}
        }
    }

    /// Begins another trace with what is known already.
    fn tap(&mut self, now_ns: u64, mut tap: Tap) {
        let mut known = vec![Record::Observer(Observer { time_ns: now_ns, ..self.observer })];
        known.extend(self.links.measured().iter().map(|link| link.record(now_ns, true)));
        self.own_flows.announce_all(&self.interfaces(), &mut known);
        known.iter().for_each(|record| self.losses.records += tap.write(record));
        self.taps.push(tap);
    }

    /// Takes in the last of it, and lets go of everything.
    fn end(mut self) {
        let now_ns = monotonic_ns();
        self.run_once();
        self.read_totals(now_ns);
        self.read_flows(now_ns);
        self.housekeeping(now_ns);
        self.hand_on(now_ns);
        let Self { taps, recording, source, .. } = self;
        drop(taps);
        drop(source);
        if let Some(recording) = recording {
            recording.end();
        }
    }
}

/// Whether a round trip took much longer than the one before: the queue has just grown.
fn is_news(late: &Event) -> bool {
    let took_ns = late.time_ns.saturating_sub(late.burst_ended_ns);
    let before_ns = late.burst_ended_ns.saturating_sub(late.burst_began_ns);
    late.burst_began_ns == 0 || took_ns / 2 >= before_ns
}
