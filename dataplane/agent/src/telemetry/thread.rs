//! The telemetry thread: samples flows, hands records on, and answers commands.

mod read;
mod schedule;
#[cfg(test)]
mod tests;

use crate::telemetry::clock::{monotonic, realtime_offset_ns};
use crate::telemetry::completions::Completions;
use crate::telemetry::cpu_budget::DutyCycle;
use crate::telemetry::finding::{Finding, Findings};
use crate::telemetry::handle::{Command, Handle};
use crate::telemetry::links::Links;
use crate::telemetry::losses::Losses;
use crate::telemetry::names::{Names, number_of};
use crate::telemetry::own_flows::OwnFlows;
use crate::telemetry::pipeline::Pipeline;
use crate::telemetry::rdma_ports::RdmaPorts;
use crate::telemetry::sampler::{QUIET, Sampler};
use crate::telemetry::tap::Tap;
use crate::telemetry::{Failed, failed};
use crossbeam::channel::{Receiver, bounded};
use harmonaize_abi::Nanos;
use harmonaize_analysis::trace::{Observer, Record};
use harmonaize_engine::MarkReader;
use harmonaize_loader::{Collector, Dcqcn, QueuePairCounters, interface_with};
use rustix::event::{EventfdFlags, eventfd};
use schedule::{Schedule, Wake};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::watch;

/// Commands that may wait.
const COMMANDS: usize = 256;
/// The shortest interval between two readings of counters by queue pair and of parameters, for each of which a driver asks its device.
/// The thread waits for that: of the time it is to be no more than one part in so many.
const DEVICE_INTERVAL: Duration = Duration::from_secs(10);
const DEVICE_SHARE: u32 = 1000;

/// How the thread is set up.
pub struct Setup {
    /// The host's name; empty where it has none.
    pub host: String,
    /// Interfaces to measure.
    pub interfaces: Vec<String>,
    /// The links' capacities in bits a second, by interface; else as the driver says.
    pub rates: BTreeMap<String, u64>,
    /// The shortest interval between two samples by the clock.
    pub interval: Duration,
    /// A file that everything is recorded in, and what it and the one before it may take together.
    pub record: Option<(PathBuf, u64)>,
    /// The marks of each of the engine's threads.
    pub marks: Vec<MarkReader>,
    /// The decision loop: receives each finding within the thread, at once. It must not block.
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

/// See the module's documentation.
struct Thread {
    source: Box<dyn Collector>,
    /// The marks of each of the engine's threads.
    marks: Vec<MarkReader>,
    commands: Receiver<Command>,
    bell: Arc<OwnedFd>,
    links: Links,
    sampler: Sampler,
    pipeline: Pipeline,
    own_flows: OwnFlows,
    ports: RdmaPorts,
    completions: Completions,
    /// What RDMA devices count by queue pair, their parameters, and when both are read next.
    queue_pair_counters: Vec<QueuePairCounters>,
    dcqcn: Vec<Dcqcn>,
    devices: DutyCycle,
    schedule: Schedule,
    begun: Nanos,
    /// When marks last came.
    marked: Nanos,
}

impl Thread {
    fn new(
        setup: Setup,
        source: Box<dyn Collector>,
        commands: Receiver<Command>,
        bell: Arc<OwnedFd>,
        sinks: (Findings, Arc<Mutex<Names>>),
    ) -> anyhow::Result<Self> {
        let Setup { host, interfaces, rates, interval, record, marks, decide } = setup;
        let (begun, host) = (monotonic(), number_of(&host));
        let observer = Observer { time_ns: begun.0, host, realtime_offset_ns: realtime_offset_ns() };
        let mut thread = Self {
            source,
            marks,
            commands,
            bell,
            links: Links::new(interfaces, rates),
            sampler: Sampler::new(interval),
            pipeline: Pipeline::new(observer, record, decide, sinks)?,
            own_flows: OwnFlows::default(),
            ports: RdmaPorts::default(),
            completions: Completions::default(),
            queue_pair_counters: Vec::new(),
            dcqcn: Vec::new(),
            devices: DutyCycle::new(DEVICE_SHARE, [DEVICE_INTERVAL, Duration::MAX]),
            schedule: Schedule::default(),
            begun,
            marked: Nanos(0),
        };
        tracing::info!("telemetry: {}", thread.source.kernel());
        thread.schedule.take_housekeeping(begun);
        thread.housekeeping(begun);
        thread.read_devices_if_due(monotonic);
        thread.hand_on(begun);
        Ok(thread)
    }

    fn run(mut self) {
        self.marks.iter().for_each(|marks| marks.set_bell(&self.bell));
        loop {
            self.next_wake(monotonic()).sleep(&self.bell);
            while let Ok(command) = self.commands.try_recv() {
                if matches!(command, Command::Stop) {
                    return self.end();
                }
                self.apply(command);
            }
            self.run_once();
            self.read_devices_if_due(monotonic);
        }
    }

    /// Returns when to wake next. Sampling begins with the mark of an operation: while none is under way, the first mark wakes.
    fn next_wake(&self, now: Nanos) -> Wake<'_> {
        let next_sample = self.next_sample(now);
        let mut marked = false;
        if next_sample.is_none() && self.own_flows.any() {
            // All of them are to ring, whether one has a mark or not.
            for marks in &self.marks {
                marked |= !marks.await_mark();
            }
        }
        let due = [next_sample, marked.then_some(now), self.next_ports()];
        self.schedule.next_wake(now, self.source.as_ref(), &self.sampler, due)
    }

    /// Takes in what has come and hands it on, then does what is due.
    fn run_once(&mut self) {
        let now = monotonic();
        let mut woke = self.sampler.budget.spent();
        let late_rtt = self.gather();
        self.pipeline.take_in();
        // What has come costs as much to take in however often that is done: it makes no sample dearer, but where all cores
        // are busy.
        let took = self.sampler.budget.spent();
        if self.next_sample(now).is_some_and(|due| now >= due) {
            // A wake-up is at the sample's expense: nothing else would bound how often that is.
            woke += if self.sampler.budget.throttled { took } else { Duration::ZERO };
            self.sample_flows(now, woke);
        } else {
            self.pipeline.conclude(now, &mut self.own_flows);
            let budget = &mut self.sampler.budget;
            let spent = woke + took + budget.spent();
            let credit = if late_rtt { &mut budget.late_rtt } else { &mut budget.wake };
            credit.used(now, spent);
        }
        if self.is_busy(now) {
            self.read_if_due(now);
        }
        if self.next_ports().is_some_and(|due| now >= due) {
            self.read_ports(now);
            self.hand_on(now);
            let spent = self.sampler.budget.spent();
            self.sampler.budget.read_ports.done(now, spent);
        }
        for reply in self.schedule.due_replies(now) {
            let _ = reply.send(Arc::new(self.reading(now, true)));
        }
        self.sampler.budget.poll_pressure(now);
        if self.schedule.take_housekeeping(now) {
            self.housekeeping(now);
            // Flows that neither pause nor began lately are found by this alone.
            self.read_if_due(now);
            self.hand_on(now);
            // Charged to nothing.
            self.sampler.budget.spent();
        }
    }

    /// Takes events and marks out of their queues. Returns whether a round trip was late.
    fn gather(&mut self) -> bool {
        let Self { source, sampler, pipeline, own_flows, completions, ports, links, .. } = self;
        let late_rtt = sampler.read_events(source.as_mut(), own_flows, &mut pipeline.events);
        if pipeline.read_marks(&self.marks, own_flows) {
            self.marked = monotonic();
        }
        pipeline.merge(|mark| completions.record(mark, ports, links.measured()));
        late_rtt
    }

    /// Whether an own operation, or any flow, may be active. Communicators without operations are none of it.
    fn is_busy(&self, now: Nanos) -> bool {
        let own = || now.since(self.marked) < QUIET || self.pipeline.analysis.open().next().is_some();
        self.sampler.is_busy(now) || self.own_flows.any() && own()
    }

    /// Returns when flows are sampled next; none without traffic.
    fn next_sample(&self, now: Nanos) -> Option<Nanos> {
        let pending = self.pipeline.analysis.is_pending();
        self.is_busy(now).then(|| self.sampler.next_sample(now, pending))
    }

    /// Samples flows, for which it `woke`. What analysis takes for them is charged, too.
    fn sample_flows(&mut self, now: Nanos, woke: Duration) {
        let records = &mut self.pipeline.records;
        let kind = self.sampler.sample(self.source.as_ref(), now, records);
        self.links.read_totals(self.source.as_ref(), now, records);
        self.hand_on(now);
        self.sampler.charge_sample(now, kind, woke);
    }

    fn read_if_due(&mut self, now: Nanos) {
        if self.sampler.budget.read_all.is_due(now) {
            self.sampler.read_all(self.source.as_mut(), now, &mut self.pipeline.records);
            self.hand_on(now);
            let spent = self.sampler.budget.spent();
            self.sampler.budget.read_all.done(now, spent);
        }
    }

    /// Returns when RDMA ports are read next for what the programs do not see. None where there is no such port.
    fn next_ports(&self) -> Option<Nanos> {
        self.ports.next_reading(self.sampler.budget.read_ports.due())
    }

    fn read_ports(&mut self, now: Nanos) {
        let Self { ports, source, links, pipeline, .. } = self;
        ports.read(source.as_mut(), links.measured(), now, &mut pipeline.records);
    }

    /// Reads what RDMA devices count by queue pair, and their parameters. Says why there are no such counters where that is news.
    fn read_devices_if_due(&mut self, clock: impl Fn() -> Nanos) {
        let began = clock();
        if !self.devices.is_due(began) {
            return;
        }
        self.source.read_dcqcn(&mut self.dcqcn);
        let before = std::mem::take(&mut self.queue_pair_counters);
        self.source.read_queue_pair_counters(&mut self.queue_pair_counters);
        for one in self.queue_pair_counters.iter().filter(|one| !before.contains(one)) {
            if let Err(reason) = &one.counters {
                tracing::info!("telemetry: {reason}");
            }
        }
        let ended = clock();
        self.devices.done(ended, ended.since(began));
        // Charged to nothing.
        self.sampler.budget.spent();
    }

    fn hand_on(&mut self, now: Nanos) {
        self.pipeline.hand_on(now, &mut self.own_flows);
    }

    /// Looks after interfaces, losses and clocks.
    fn housekeeping(&mut self, now: Nanos) {
        let Self { links, source, pipeline, .. } = self;
        match links.refresh(source.as_mut(), now, &mut pipeline.losses, &mut pipeline.records) {
            Ok(false) => {}
            Ok(true) => self.own_flows.announce_all(&links.indexes(), &mut pipeline.records),
            Err(error) => failed("looking after interfaces", &error),
        }
        match source.losses() {
            Ok(losses) => {
                let lost = Losses {
                    events: losses.events,
                    flows: self.sampler.flows.flows().evicted,
                    ambiguous: losses.ambiguous,
                    unregistered: losses.unregistered,
                    marks: self.marks.iter().map(MarkReader::lost).sum(),
                    ..Losses::default()
                };
                pipeline.losses.note(now, lost, &mut pipeline.records);
            }
            Err(error) => failed("reading losses", &error),
        }
        pipeline.check_clocks(now);
        if !self.schedule.follows(now)
            && let Err(error) = source.watch_endpoints(false)
        {
            failed("leaving the flows' ends alone", &error);
        }
        if self.next_ports().is_none() {
            self.read_ports(now);
        }
        if self.pipeline.is_recording_full() {
            let known = self.known(now);
            self.pipeline.renew_recording(now, &known);
        }
    }

    fn apply(&mut self, command: Command) {
        let now = monotonic();
        let interfaces = self.links.indexes();
        match command {
            Command::Formed(formed) => {
                self.own_flows.formed(&formed, now, &interfaces, &mut self.pipeline.records);
                self.completions.formed(&formed, |address| interface_with(address).ok().flatten());
            }
            Command::Ended(communicator) => {
                // What its marks still say is of before.
                self.gather();
                self.hand_on(now);
                let Self { pipeline, own_flows, completions, .. } = self;
                pipeline.analysis.ended(communicator);
                completions.ended(communicator);
                own_flows.ended(communicator, now, &interfaces, &mut pipeline.records);
            }
            Command::Read { flows: true, reply } if self.follow(now) => self.schedule.defer(now, reply),
            Command::Read { flows, reply } => {
                // Nobody waits for it any more: as well.
                let _ = reply.send(Arc::new(self.reading(now, flows)));
            }
            Command::Trace(to) => {
                let known = self.known(now);
                self.pipeline.add_tap(now, Tap::new(to), &known);
            }
            Command::ReportCongestion(sink) => self.pipeline.report_congestion(now, sink),
            Command::Stop => {}
        }
    }

    /// What a trace begins with: links and own flows.
    fn known(&mut self, now: Nanos) -> Vec<Record> {
        let mut known: Vec<Record> =
            self.links.measured().iter().map(|link| link.record(now, true)).collect();
        self.own_flows.announce_all(&self.links.indexes(), &mut known);
        known
    }

    /// Takes in the last of it, and lets go of everything.
    fn end(mut self) {
        let now = monotonic();
        self.run_once();
        let Self { links, source, sampler, pipeline, .. } = &mut self;
        links.read_totals(source.as_ref(), now, &mut pipeline.records);
        sampler.read_all(source.as_mut(), now, &mut pipeline.records);
        self.housekeeping(now);
        self.hand_on(now);
        drop(self.source);
        self.pipeline.end();
    }
}
