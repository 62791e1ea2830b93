//! The telemetry thread: samples flows, hands records on, and answers commands.

mod read;
mod schedule;
#[cfg(test)]
mod tests;

use crate::telemetry::clock::{monotonic_ns, realtime_offset_ns};
use crate::telemetry::finding::{Finding, Findings};
use crate::telemetry::handle::{Command, Handle};
use crate::telemetry::links::Links;
use crate::telemetry::losses::Losses;
use crate::telemetry::names::{Names, number_of};
use crate::telemetry::own_flows::OwnFlows;
use crate::telemetry::pipeline::Pipeline;
use crate::telemetry::sampler::Sampler;
use crate::telemetry::tap::Tap;
use crate::telemetry::{Failed, failed};
use crossbeam::channel::{Receiver, bounded};
use harmonaize_analysis::trace::{Observer, Record};
use harmonaize_engine::MarkReader;
use harmonaize_loader::Collector;
use rustix::event::{EventfdFlags, eventfd};
use schedule::Schedule;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::watch;

/// Commands that may wait.
const COMMANDS: usize = 256;

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
    schedule: Schedule,
    begun_ns: u64,
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
        let (begun_ns, host) = (monotonic_ns(), number_of(&host));
        let observer = Observer { time_ns: begun_ns, host, realtime_offset_ns: realtime_offset_ns() };
        let mut thread = Self {
            source,
            marks,
            commands,
            bell,
            links: Links::new(interfaces, rates),
            sampler: Sampler::new(interval),
            pipeline: Pipeline::new(observer, record, decide, sinks)?,
            own_flows: OwnFlows::default(),
            schedule: Schedule::default(),
            begun_ns,
        };
        tracing::info!("telemetry: {}", thread.source.kernel());
        thread.schedule.take_housekeeping(begun_ns);
        thread.housekeeping(begun_ns);
        thread.hand_on(begun_ns);
        Ok(thread)
    }

    fn run(mut self) {
        loop {
            let now_ns = monotonic_ns();
            let next_sample_ns = self.next_sample_ns(now_ns);
            self.schedule
                .next_wake(now_ns, self.source.as_ref(), &self.sampler, next_sample_ns)
                .sleep(&self.bell);
            while let Ok(command) = self.commands.try_recv() {
                if matches!(command, Command::Stop) {
                    return self.end();
                }
                self.apply(command);
            }
            self.run_once();
        }
    }

    /// Takes in what has come and hands it on, then does what is due.
    fn run_once(&mut self) {
        let now_ns = monotonic_ns();
        let mut woke = self.sampler.budget.spent();
        let late_rtt = self.gather();
        self.pipeline.take_in();
        // What has come costs as much to take in however often that is done: it makes no sample dearer, but where all cores
        // are busy.
        let took = self.sampler.budget.spent();
        if self.next_sample_ns(now_ns).is_some_and(|due_ns| now_ns >= due_ns) {
            // A wake-up is at the sample's expense: nothing else would bound how often that is.
            woke += if self.sampler.budget.throttled { took } else { Duration::ZERO };
            self.sample_flows(now_ns, woke);
        } else {
            self.pipeline.conclude(now_ns, &mut self.own_flows);
            let budget = &mut self.sampler.budget;
            let spent = woke + took + budget.spent();
            let credit = if late_rtt { &mut budget.late_rtt } else { &mut budget.wake };
            credit.used(now_ns, spent);
        }
        if self.is_busy(now_ns) {
            self.read_if_due(now_ns);
        }
        for reply in self.schedule.due_replies(now_ns) {
            let _ = reply.send(Arc::new(self.reading(now_ns, true)));
        }
        self.sampler.budget.poll_pressure(now_ns);
        if self.schedule.take_housekeeping(now_ns) {
            self.housekeeping(now_ns);
            // Flows that neither pause nor began lately are found by this alone.
            self.read_if_due(now_ns);
            self.hand_on(now_ns);
            // Charged to nothing.
            self.sampler.budget.spent();
        }
    }

    /// Takes events and marks out of their queues. Returns whether a round trip was late.
    fn gather(&mut self) -> bool {
        let Self { source, sampler, pipeline, own_flows, .. } = self;
        let late_rtt = sampler.read_events(source.as_mut(), own_flows, &mut pipeline.events);
        pipeline.read_marks(&self.marks, own_flows);
        pipeline.merge();
        late_rtt
    }

    /// Whether anything own, or any flow, may be active.
    fn is_busy(&self, now_ns: u64) -> bool {
        self.own_flows.any() || self.sampler.is_busy(now_ns)
    }

    /// Returns when flows are sampled next; none without traffic.
    fn next_sample_ns(&self, now_ns: u64) -> Option<u64> {
        let pending = self.pipeline.analysis.is_pending();
        self.is_busy(now_ns).then(|| self.sampler.next_sample_ns(now_ns, pending))
    }

    /// Samples flows, for which it `woke`. What analysis takes for them is charged, too.
    fn sample_flows(&mut self, now_ns: u64, woke: Duration) {
        let records = &mut self.pipeline.records;
        let kind = self.sampler.sample(self.source.as_ref(), now_ns, records);
        self.links.read_totals(self.source.as_ref(), now_ns, records);
        self.hand_on(now_ns);
        self.sampler.charge_sample(now_ns, kind, woke);
    }

    fn read_if_due(&mut self, now_ns: u64) {
        if self.sampler.budget.read_all.is_due(now_ns) {
            self.sampler.read_all(self.source.as_mut(), now_ns, &mut self.pipeline.records);
            self.hand_on(now_ns);
            let spent = self.sampler.budget.spent();
            self.sampler.budget.read_all.done(now_ns, spent);
        }
    }

    fn hand_on(&mut self, now_ns: u64) {
        self.pipeline.hand_on(now_ns, &mut self.own_flows);
    }

    /// Looks after interfaces, losses and clocks.
    fn housekeeping(&mut self, now_ns: u64) {
        let Self { links, source, pipeline, .. } = self;
        match links.refresh(source.as_mut(), now_ns, &mut pipeline.losses, &mut pipeline.records) {
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
                pipeline.losses.note(now_ns, lost, &mut pipeline.records);
            }
            Err(error) => failed("reading losses", &error),
        }
        pipeline.check_clocks(now_ns);
        if !self.schedule.follows(now_ns)
            && let Err(error) = source.watch_endpoints(false)
        {
            failed("leaving the flows' ends alone", &error);
        }
        if self.pipeline.is_recording_full() {
            let known = self.known(now_ns);
            self.pipeline.renew_recording(now_ns, &known);
        }
    }

    fn apply(&mut self, command: Command) {
        let now_ns = monotonic_ns();
        let interfaces = self.links.indexes();
        match command {
            Command::Formed(formed) => {
                self.own_flows.formed(&formed, now_ns, &interfaces, &mut self.pipeline.records);
            }
            Command::Ended(communicator) => {
                // What its marks still say is of before.
                self.gather();
                self.hand_on(now_ns);
                let Self { pipeline, own_flows, .. } = self;
                pipeline.analysis.ended(communicator);
                own_flows.ended(communicator, now_ns, &interfaces, &mut pipeline.records);
            }
            Command::Read { flows: true, reply } if self.follow(now_ns) => self.schedule.defer(now_ns, reply),
            Command::Read { flows, reply } => {
                // Nobody waits for it any more: as well.
                let _ = reply.send(Arc::new(self.reading(now_ns, flows)));
            }
            Command::Trace(to) => {
                let known = self.known(now_ns);
                self.pipeline.add_tap(now_ns, Tap::new(to), &known);
            }
            Command::ReportCongestion(sink) => self.pipeline.report_congestion(now_ns, sink),
            Command::Stop => {}
        }
    }

    /// What a trace begins with: links and own flows.
    fn known(&mut self, now_ns: u64) -> Vec<Record> {
        let mut known: Vec<Record> =
            self.links.measured().iter().map(|link| link.record(now_ns, true)).collect();
        self.own_flows.announce_all(&self.links.indexes(), &mut known);
        known
    }

    /// Takes in the last of it, and lets go of everything.
    fn end(mut self) {
        let now_ns = monotonic_ns();
        self.run_once();
        let Self { links, source, sampler, pipeline, .. } = &mut self;
        links.read_totals(source.as_ref(), now_ns, &mut pipeline.records);
        sampler.read_all(source.as_mut(), now_ns, &mut pipeline.records);
        self.housekeeping(now_ns);
        self.hand_on(now_ns);
        drop(self.source);
        self.pipeline.end();
    }
}
