//! Recorded traces analysed as the agents do it, over one host or several. What is found has one form for all.

use harmonaize_abi::{CommunicatorId, Nanos};
use harmonaize_analysis::congestion::{self, Congestion, Path};
use harmonaize_analysis::marks::{Marks, Operation};
use harmonaize_analysis::phases::{self, HostPhase, Phases};
use harmonaize_analysis::straggler::{Detector, EdgeTimes, Kind, Observed, RankTimes, Straggler, Subject};
use harmonaize_analysis::trace::{self, Record};
use harmonaize_events::{Direction, FlowKey};
use harmonaize_testkit::found::{self, Found};
use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

/// All records of a trace between two times, and those before that say what stands.
///
/// # Errors
/// The bytes are no trace.
pub fn records(bytes: &[u8], from_ns: u64, to_ns: u64) -> Result<Vec<Record>, trace::Error> {
    let mut records = Vec::new();
    trace::replay(bytes, |record| {
        let stands = matches!(record, Record::Observer(_) | Record::Link(_) | Record::Owner(_));
        if record.time().0 <= to_ns && (stands || record.time().0 >= from_ns) {
            records.push(*record);
        }
    })?;
    Ok(records)
}

/// Everything that is found in records of one host, or of several that were merged.
#[derive(Debug)]
pub struct Replay {
    hosts: usize,
    phases: Phases,
    marks: Marks,
    congestion: congestion::Detector,
    stragglers: Detector,
    /// By job: its hosts, as its last phase names them.
    jobs: HashMap<u64, Vec<HostPhase>>,
    /// By communicator and operation: what each host says of it.
    operations: BTreeMap<(CommunicatorId, u64), Vec<Operation>>,
    found: Vec<Found>,
}

impl Replay {
    /// Of so many hosts, whose operations are laid together.
    pub fn of(hosts: usize) -> Self {
        Self {
            hosts,
            phases: Phases::default(),
            marks: Marks::default(),
            congestion: congestion::Detector::new(congestion::Limits::default()),
            stragglers: Detector::default(),
            jobs: HashMap::new(),
            operations: BTreeMap::new(),
            found: Vec::new(),
        }
    }

    /// Analyses all records, in the order of their times, and returns what was found.
    pub fn run(mut self, records: &[Record]) -> Vec<Found> {
        let mut now = Nanos(0);
        for record in records {
            // As agents do: all of a millisecond, and then what it means.
            if record.time().0 / 1_000_000 > now.0 / 1_000_000 {
                self.advance(now);
            }
            now = record.time().max(now);
            self.phases.take(record);
            self.marks.take(record);
            self.congestion.take(record);
        }
        self.advance(now);
        // What is open now has ended for want of more.
        self.advance(now.after(Duration::from_secs(1)));
        self.found
    }

    fn advance(&mut self, now: Nanos) {
        self.phases.advance(now);
        self.marks.advance(now);
        self.congestion.advance(now);
        while let Some(phase) = self.phases.poll() {
            self.found.push(Found::Phase {
                job: phase.job,
                iteration: phase.iteration,
                began_ns: phase.began.0,
                ended_ns: phase.ended.0,
            });
            if !phase.lossy {
                self.stragglers.take(Subject::Job(phase.job), &phase.observed());
            }
            self.jobs.insert(phase.job, phase.hosts);
        }
        while let Some(operation) = self.marks.poll() {
            self.lay(operation);
        }
        while let Some(found) = self.congestion.poll() {
            self.found.push(congested(&found));
        }
        while let Some(found) = self.stragglers.poll() {
            self.found.push(self.straggler(&found));
        }
    }

    /// Lays a host's operation to those of the other hosts; all of them together are a unit.
    fn lay(&mut self, operation: Operation) {
        let name = (operation.communicator, operation.operation.0);
        let parts = self.operations.entry(name).or_default();
        parts.push(operation);
        if parts.len() < self.hosts {
            return;
        }
        let parts = self.operations.remove(&name).unwrap_or_default();
        let observed = observed(name.1, &parts);
        let ranks = observed.ranks.iter().filter_map(|rank| Some((rank.rank, rank.start?.0, rank.end?.0)));
        self.found.push(Found::Operation {
            communicator: name.0.0,
            operation: name.1,
            ranks: ranks.collect(),
        });
        self.stragglers.take(Subject::Communicator(name.0), &observed);
    }

    fn straggler(&self, found: &Straggler) -> Found {
        let foreign = matches!(found.subject, Subject::Job(_));
        let host_of = |rank: u32| match found.subject {
            Subject::Communicator(_) => None,
            Subject::Job(job) => self.jobs.get(&job)?.get(rank as usize).map(|place| address(place.host)),
        };
        let host = host_of(found.rank);
        let end = |rank: u32| host_of(rank).map_or_else(|| rank.to_string(), |host| host.to_string());
        let edge = found.edge.map(|(from, to)| (end(from), end(to)));
        let kind = match found.kind {
            Kind::Compute => found::Kind::Compute,
            Kind::Network => found::Kind::Network,
        };
        let (found_ns, delay_ns, over) = (found.found.0, Nanos::from(found.by).0, found.ended.is_some());
        Found::Straggler { foreign, host, rank: found.rank as usize, kind, edge, found_ns, delay_ns, over }
    }
}

/// Between participants, the lowest rank of each stands for it.
fn observed(unit: u64, parts: &[Operation]) -> Observed {
    let known = |time: Nanos| (time != Nanos(0)).then_some(time);
    let rank_of: BTreeMap<u32, u32> = parts
        .iter()
        .filter_map(|part| Some((part.participant, part.ranks.iter().map(|rank| rank.rank).min()?)))
        .collect();
    let calls = parts.iter().flat_map(|part| &part.ranks);
    let mut ranks: Vec<RankTimes> = calls
        .map(|call| RankTimes {
            rank: call.rank,
            start: call.called,
            end: call.ended,
            waited: Duration::ZERO,
        })
        .collect();
    ranks.sort_unstable_by_key(|rank| rank.rank);
    let mut edges: BTreeMap<(u32, u32), EdgeTimes> = BTreeMap::new();
    for part in parts {
        for edge in &part.edges {
            let Some((me, peer)) = rank_of.get(&part.participant).zip(rank_of.get(&edge.peer)) else {
                continue;
            };
            if edge.sent.bytes > 0 {
                let out = edges.entry((*me, *peer)).or_default();
                (out.first, out.last) = (known(edge.sent.first), known(edge.sent.last));
                out.bytes = edge.sent.bytes;
            }
            if edge.received.bytes > 0 {
                let into = edges.entry((*peer, *me)).or_default();
                into.arrived = known(edge.received.last);
                into.bytes = into.bytes.max(edge.received.bytes);
            }
        }
    }
    let edges = edges.into_iter().map(|((from, to), edge)| EdgeTimes { from, to, ..edge }).collect();
    Observed { unit, ranks, edges }
}

fn congested(found: &Congestion) -> Found {
    Found::Congestion {
        interface: found.link.interface,
        leaving: found.link.direction == Direction::Egress,
        whole: found.link.path == Path::Whole,
        state: found.level.as_str().to_owned(),
        cause: found.cause.as_str().to_owned(),
        found_ns: found.found.0,
    }
}

fn address(words: phases::Address) -> IpAddr {
    Ipv6Addr::from(FlowKey::octets(words)).to_canonical()
}
