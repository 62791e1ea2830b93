//! Everything that analysis finds in the records, live and replayed alike.

use crate::telemetry::finding::{Found, LocatedStraggler};
use harmonaize_abi::{CommunicatorId, Nanos};
use harmonaize_analysis::marks::{Marks, Operation};
use harmonaize_analysis::phases::{Job, Phase, Phases};
use harmonaize_analysis::straggler::{Observed, RankTimes, Straggler, Subject};
use harmonaize_analysis::trace::Record;
use harmonaize_analysis::{congestion, straggler};
use harmonaize_events::FlowKey;
use std::collections::BTreeMap;
use std::time::Duration;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Analysis {
    marks: Marks,
    phases: Phases,
    congestion: congestion::Detector,
    stragglers: straggler::Detector,
    /// By the job's number.
    jobs: BTreeMap<u64, JobActivity>,
    found: Vec<Found>,
    /// The latest time of a record.
    taken: Nanos,
}

/// What a job did lately.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct JobActivity {
    /// Its last phase.
    pub last_phase: Option<Phase>,
    /// Bytes of all its phases.
    pub bytes: u64,
}

/// How often analysis hears of the time: where records come later, whatever they are taken in with.
pub(crate) const TICK: Duration = Duration::from_nanos(TICK_NS);
const TICK_NS: u64 = 1_000_000;

/// Later than what a trace may say: what waits for more is told as it stands.
const NEVER: Nanos = Nanos(u64::MAX / 2);

/// The number of the tick of a time.
const fn tick(time: Nanos) -> u64 {
    time.0 / TICK_NS
}

impl Default for Analysis {
    fn default() -> Self {
        Self {
            marks: Marks::default(),
            phases: Phases::default(),
            congestion: congestion::Detector::new(congestion::Limits::default()),
            stragglers: straggler::Detector::new(straggler::Limits::default()),
            jobs: BTreeMap::new(),
            found: Vec::new(),
            taken: Nanos(0),
        }
    }
}

impl Analysis {
    /// Takes in a record, after what follows from those before it where it is of a later millisecond. Whoever takes many in at once finds what
    /// it would have found as they came.
    pub(crate) fn take(&mut self, record: &Record) {
        let time = record.time();
        if tick(time) > tick(self.taken) {
            self.advance(self.taken);
        }
        self.taken = self.taken.max(time);
        self.marks.take(record);
        self.phases.take(record);
        self.congestion.take(record);
    }

    /// So late is it now.
    pub(crate) fn advance(&mut self, now: Nanos) {
        self.marks.advance(now);
        self.phases.advance(now);
        self.congestion.advance(now);
        self.gather();
    }

    /// Whether a finding on congestion is in the making.
    pub(crate) fn is_pending(&self) -> bool {
        self.congestion.has_pending_report()
    }

    /// Nothing more comes: operations and phases that are over are told, though more might have come.
    pub(crate) fn finish(&mut self) {
        self.marks.advance(NEVER);
        self.phases.advance(NEVER);
        self.gather();
    }

    /// An own communicator is over: nobody is late in it any more.
    pub(crate) fn ended(&mut self, communicator: CommunicatorId) {
        self.stragglers.forget(Subject::Communicator(communicator));
    }

    /// What was found since the last time.
    pub(crate) fn found(&mut self) -> Vec<Found> {
        std::mem::take(&mut self.found)
    }

    /// The next path that is starved again, by which no state changed.
    pub(crate) fn poll_starved_again(&mut self) -> Option<congestion::Congestion> {
        self.congestion.poll_starved_again()
    }

    /// Own operations that have begun and not ended.
    pub(crate) fn open(&self) -> impl Iterator<Item = &Operation> {
        self.marks.open()
    }

    /// How every link stands that something crossed lately.
    pub(crate) fn links(&self) -> impl Iterator<Item = congestion::Congestion> {
        self.congestion.links()
    }

    /// How a link stands; none where nothing crossed it lately.
    pub(crate) fn link(&self, link: &congestion::Link) -> Option<congestion::Congestion> {
        self.congestion.link(link)
    }

    /// External jobs that are there now.
    pub(crate) fn jobs(&self) -> impl Iterator<Item = (Job, JobActivity)> {
        self.phases.jobs().map(|job| {
            let lately = self.jobs.get(&job.job).cloned().unwrap_or_default();
            (job, lately)
        })
    }

    /// The external job that a flow belongs to.
    pub(crate) fn job_of(&self, flow: &FlowKey) -> Option<u64> {
        if self.jobs.is_empty() { None } else { self.phases.job_of(flow) }
    }

    /// Stragglers now.
    pub(crate) fn stragglers(&self) -> impl Iterator<Item = LocatedStraggler> {
        self.stragglers.current().map(|straggler| self.late(straggler))
    }

    fn gather(&mut self) {
        while let Some(operation) = self.marks.poll() {
            self.judge(&operation);
            self.found.push(Found::Operation(operation));
        }
        while let Some(phase) = self.phases.poll() {
            self.judge_phase(&phase);
            self.found.push(Found::Phase(phase));
        }
        while let Some(congestion) = self.congestion.poll() {
            self.found.push(Found::Congestion(congestion));
        }
        while let Some(straggler) = self.stragglers.poll() {
            let late = self.late(straggler);
            self.found.push(Found::Straggler(late));
        }
        if !self.jobs.is_empty() {
            self.forget_jobs();
        }
    }

    /// A job is over: nobody is late in it any more.
    fn forget_jobs(&mut self) {
        let Self { phases, jobs, stragglers, .. } = self;
        jobs.retain(|number, _| {
            let there = phases.jobs().any(|job| job.job == *number);
            if !there {
                stragglers.forget(Subject::Job(*number));
            }
            there
        });
    }

    /// Ranks of this host are held against one another; control holds those of several hosts together.
    fn judge(&mut self, operation: &Operation) {
        if operation.ranks.len() < 2 || !operation.whole {
            return;
        }
        let ranks = operation.ranks.iter().map(|rank| RankTimes {
            rank: rank.rank,
            start: rank.called,
            end: rank.ended,
            waited: Duration::ZERO,
        });
        let observed = Observed { unit: operation.operation.0, ranks: ranks.collect(), edges: Vec::new() };
        self.stragglers.take(Subject::Communicator(operation.communicator), &observed);
    }

    fn judge_phase(&mut self, phase: &Phase) {
        if !phase.lossy {
            self.stragglers.take(Subject::Job(phase.job), &phase.observed());
        }
        let lately = self.jobs.entry(phase.job).or_default();
        lately.bytes = lately.bytes.saturating_add(phase.bytes);
        lately.last_phase = Some(phase.clone());
    }

    /// A straggler with its host's address, where that is known.
    fn late(&self, straggler: Straggler) -> LocatedStraggler {
        let host = match straggler.subject {
            Subject::Communicator(_) => None,
            Subject::Job(number) => {
                let last = self.jobs.get(&number).and_then(|lately| lately.last_phase.as_ref());
                last.and_then(|phase| phase.hosts.get(straggler.rank as usize)).map(|part| part.host)
            }
        };
        LocatedStraggler { straggler, host }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_abi::{CongestionCause, CongestionLevel};
    use harmonaize_analysis::trace::{Label, Link};
    use harmonaize_events::{Event, EventKind, Protocol, TcpFlow};

    const MS: u64 = 1_000_000;

    /// A connection that a snapshot tells of, after which packets of it are sent again for 30 ms.
    fn losses() -> Vec<Record> {
        let key =
            FlowKey { interface: 7, local_port: 5, protocol: Protocol::Tcp as u8, ..FlowKey::default() };
        let (begun_ns, name) = (1000 * MS, Label::new("wire"));
        let link =
            Link { time_ns: begun_ns, interface: 7, name, bytes_per_second: 125_000_000, watched: true };
        let mut flow = TcpFlow::default();
        flow.egress.traffic.packets = 100;
        flow.egress.traffic.bytes = 100_000;
        (flow.egress.traffic.first_ns, flow.egress.traffic.last_ns) = (begun_ns - MS, begun_ns);
        let mut records = vec![Record::Link(link), Record::Tcp { time_ns: begun_ns, key, flow }];
        let (kind, leaves) = (EventKind::Retransmission as u32, FlowKey { direction: 2, ..key });
        records.extend((1..120).map(|total| {
            let time_ns = begun_ns + total * MS / 4;
            Record::Event(Event { time_ns, flow: leaves, kind, total, ..Event::default() })
        }));
        records
    }

    /// What is said of links where so many records are taken in at once.
    fn congestion_changes(
        records: &[Record],
        at_once: usize,
    ) -> Vec<(congestion::Link, CongestionLevel, CongestionCause)> {
        let mut analysis = Analysis::default();
        for batch in records.chunks(at_once) {
            batch.iter().for_each(|record| analysis.take(record));
            analysis.advance(batch.last().map_or(Nanos(0), Record::time));
        }
        let congestion = |found| match found {
            Found::Congestion(one) => Some((one.link, one.level, one.cause)),
            _ => None,
        };
        analysis.found().into_iter().filter_map(congestion).collect()
    }

    #[test]
    fn late_records_give_the_same_findings() {
        let records = losses();
        let as_it_came = congestion_changes(&records, 1);
        assert!(as_it_came.iter().any(|(_, state, _)| *state != CongestionLevel::None), "{as_it_came:?}");
        for at_once in [10, 40, records.len()] {
            assert_eq!(congestion_changes(&records, at_once), as_it_came, "{at_once}");
        }
    }
}
