//! How long messages take over own queue pairs, as the engine times them. Metrics show all of them. Those of queue pairs whose packets the
//! programs in the kernel do not see are evidence of congestion.

use crate::telemetry::links::MeasuredInterface;
use crate::telemetry::own_flows::{EpochLinks, sent_key};
use crate::telemetry::rdma_ports::RdmaPorts;
use harmonaize_abi::{CommunicatorId, Nanos};
use harmonaize_analysis::trace::{Completion, Record};
use harmonaize_events::{FlowKey, Mark, MarkKind};
use harmonaize_metrics::Buckets;
use harmonaize_transport::Flow;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

/// Pairs of an interface and another end with series of their own, for good.
const PEERS: usize = 64;
/// The labels of all others.
const OTHER: &str = "other";

/// Upper bounds, in seconds.
static SECONDS: [f64; 15] =
    [5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5];

/// How long messages took to another end.
#[derive(Clone, Debug, PartialEq)]
pub struct CompletionDelays {
    /// The interface that they left by.
    pub interface: String,
    /// The other end's address.
    pub peer: String,
    /// From handing a message to the device until its completion was seen.
    pub seconds: Buckets<15>,
}

/// A queue pair of an own communicator.
#[derive(Debug)]
struct QueuePair {
    interface: String,
    /// The other end's address.
    peer: String,
    /// What leaves by it, with interface 0.
    flow: FlowKey,
    /// Its place among the series, from its first message on.
    series: Option<usize>,
    /// When the first message of it was seen.
    first: Option<Nanos>,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Completions {
    /// By communicator, epoch, the other participant, and the path to it. The epoch is the one that the link was opened in.
    pairs: HashMap<(u64, u32, u32, u32), QueuePair>,
    series: Arc<Vec<CompletionDelays>>,
}

impl Completions {
    /// What metrics tell.
    pub(crate) fn series(&self) -> Arc<Vec<CompletionDelays>> {
        Arc::clone(&self.series)
    }

    /// Takes in a communicator's new epoch. `interface_of` tells which interface has an address.
    pub(crate) fn formed(&mut self, formed: &EpochLinks, interface_of: impl Fn(IpAddr) -> Option<String>) {
        let communicator = formed.communicator.0;
        self.forget(formed);
        let (mut paths, mut interfaces) = (BTreeMap::new(), BTreeMap::new());
        for (peer, flow) in &formed.flows {
            let Flow::Roce { local, remote, .. } = flow else { continue };
            let Some(flow) = sent_key(flow) else { continue };
            let path: &mut u32 = paths.entry(*peer).or_default();
            let interface =
                interfaces.entry(*local).or_insert_with(|| interface_of(*local).unwrap_or_default());
            let pair = QueuePair {
                interface: interface.clone(),
                peer: remote.to_canonical().to_string(),
                flow,
                series: None,
                first: None,
            };
            self.pairs.insert((communicator, formed.epoch.0, *peer, *path), pair);
            *path += 1;
        }
    }

    /// Forgets what the epoch before the last ran on, and is closed by now. A link that goes on has marks of the epoch that it was opened
    /// in: its oldest one. One that has had a mark stays too, as a device may give a closed one's number again.
    fn forget(&mut self, formed: &EpochLinks) {
        let (communicator, outlived) = (formed.communicator.0, formed.epoch.0.saturating_sub(1));
        let flows: HashSet<FlowKey> = formed.flows.iter().filter_map(|(_, flow)| sent_key(flow)).collect();
        let mut oldest: HashMap<FlowKey, u32> = HashMap::new();
        for ((of, epoch, ..), pair) in &self.pairs {
            if *of == communicator && flows.contains(&pair.flow) {
                oldest.entry(pair.flow).and_modify(|known| *known = (*known).min(*epoch)).or_insert(*epoch);
            }
        }
        self.pairs.retain(|(of, epoch, ..), pair| {
            let opened = oldest.get(&pair.flow);
            let goes_on = opened.is_some_and(|opened| opened == epoch || pair.first.is_some());
            *of != communicator || *epoch >= outlived || goes_on
        });
    }

    /// A communicator is over.
    pub(crate) fn ended(&mut self, communicator: CommunicatorId) {
        self.pairs.retain(|(of, ..), _| *of != communicator.0);
    }

    /// The place of another end's series, or of that of all others.
    fn series_of(all: &mut Arc<Vec<CompletionDelays>>, interface: &str, peer: &str) -> usize {
        let find = |series: &[CompletionDelays], interface: &str, peer: &str| {
            series.iter().position(|one| one.interface == interface && one.peer == peer)
        };
        if let Some(known) = find(all, interface, peer) {
            return known;
        }
        let (interface, peer) = if all.len() < PEERS { (interface, peer) } else { (OTHER, OTHER) };
        find(all, interface, peer).unwrap_or_else(|| {
            let (interface, peer) = (interface.to_owned(), peer.to_owned());
            let seconds = Buckets::new(&SECONDS);
            Arc::make_mut(all).push(CompletionDelays { interface, peer, seconds });
            all.len() - 1
        })
    }

    /// Returns the record of a mark. Of a message that was timed there is one only where no program sees the queue pair's packets.
    pub(crate) fn record(
        &mut self,
        mark: &Mark,
        ports: &RdmaPorts,
        measured: &[MeasuredInterface],
    ) -> Option<Record> {
        if mark.kind != MarkKind::Completed as u32 {
            return Some(Record::Mark(*mark));
        }
        let Self { pairs, series } = self;
        let pair = pairs.get_mut(&(mark.communicator, mark.epoch, mark.peer, mark.channel))?;
        let place = *pair.series.get_or_insert_with(|| Self::series_of(series, &pair.interface, &pair.peer));
        if let Some(series) = Arc::make_mut(series).get_mut(place) {
            series.seconds.observe(mark.segment as f64 / 1e9);
        }
        let first = *pair.first.get_or_insert(Nanos(mark.time_ns));
        let link = measured.iter().find(|link| link.name == pair.interface)?;
        ports.bypasses(&pair.interface, first).then(|| {
            let flow = FlowKey { interface: link.index, ..pair.flow };
            Record::Completion(Completion {
                time_ns: mark.time_ns,
                flow,
                took_ns: mark.segment,
                bytes: mark.bytes,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_abi::Epoch;
    use harmonaize_events::{Direction, InterfaceTotals, Totals};
    use harmonaize_loader::fake::Fake;
    use harmonaize_loader::{PortCounter, RdmaPort};

    fn formed(communicator: u64, epoch: u32, host: u8) -> EpochLinks {
        let flow = |remote_pair| Flow::Roce {
            local: "10.0.0.1".parse().unwrap(),
            remote: IpAddr::from([10, 0, 1, host]),
            local_pair: 17,
            remote_pair,
            source_port: 0,
        };
        EpochLinks {
            communicator: CommunicatorId(communicator),
            tenant: "a".into(),
            name: "world".into(),
            ranks: vec![0],
            size: 2,
            epoch: Epoch(epoch),
            participant: 0,
            flows: vec![(3, flow(18)), (3, flow(19))],
        }
    }

    fn mark(epoch: u32, path: u32, time_ns: u64) -> Mark {
        let (kind, segment) = (MarkKind::Completed as u32, 30_000);
        Mark {
            communicator: 7,
            epoch,
            peer: 3,
            channel: path,
            kind,
            segment,
            time_ns,
            bytes: 9,
            ..Mark::default()
        }
    }

    /// Ports that were read at a time, when the programs had seen so many packets of the thousand that the device counts.
    fn read(ports: &mut RdmaPorts, seen: u64, time_ns: u64) {
        let mut fake = Fake::default();
        let egress = Totals { roce: seen, ..Totals::default() };
        fake.scene().totals.insert(5, InterfaceTotals { egress, ..InterfaceTotals::default() });
        let counters = [(PortCounter::SentPackets, time_ns * 1000)].into_iter().collect();
        let port = RdmaPort { device: "mlx5_0".into(), number: 1, interface: "eth0".into(), counters };
        fake.scene().ports = vec![port];
        ports.read(&mut fake, &measured(), Nanos(time_ns), &mut Vec::new());
    }

    fn measured() -> [MeasuredInterface; 1] {
        [MeasuredInterface { name: "eth0".into(), index: 5, bits: None }]
    }

    fn eth0(_: IpAddr) -> Option<String> {
        Some("eth0".into())
    }

    #[test]
    fn messages_are_evidence_where_the_programs_see_no_packet() {
        let (mut completions, mut ports) = (Completions::default(), RdmaPorts::default());
        completions.formed(&formed(7, 1, 2), eth0);
        read(&mut ports, 0, 1);
        let mut told = |ports: &RdmaPorts, mark: &Mark| completions.record(mark, ports, &measured());
        // Whether its packets are seen is not known yet.
        assert_eq!(told(&ports, &mark(1, 1, 10)), None);
        read(&mut ports, 0, 20);
        let Some(Record::Completion(found)) = told(&ports, &mark(1, 1, 30)) else { panic!() };
        assert_eq!((found.time_ns, found.took_ns, found.bytes), (30, 30_000, 9));
        assert_eq!((found.flow.interface, found.flow.queue_pair), (5, 19));
        assert_eq!(
            (found.flow.direction, found.flow.remote_address().to_string()),
            (Direction::Egress as u8, "10.0.1.2".to_owned())
        );
        // The programs see them after all, as over SoftRoCE.
        read(&mut ports, 20_000, 40);
        assert_eq!(told(&ports, &mark(1, 1, 50)), None);
        let other = Mark { kind: MarkKind::Sent as u32, ..mark(1, 1, 60) };
        assert_eq!(told(&ports, &other), Some(Record::Mark(other)));
        assert_eq!(told(&ports, &mark(1, 2, 70)), None, "no such path");
        assert_eq!(completions.series()[0].seconds.count(), 3);
    }

    /// The evidence of a mark, where the programs see no packet.
    fn is_evidence(completions: &mut Completions, ports: &RdmaPorts, mark: &Mark) -> bool {
        matches!(completions.record(mark, ports, &measured()), Some(Record::Completion(_)))
    }

    #[test]
    fn a_kept_link_goes_by_its_opening_epoch() {
        let (mut completions, mut ports) = (Completions::default(), RdmaPorts::default());
        read(&mut ports, 0, 1000);
        for epoch in 1..=9 {
            completions.formed(&formed(7, epoch, 2), eth0);
            assert!(is_evidence(&mut completions, &ports, &mark(1, 0, 10)), "in epoch {epoch}");
        }
        assert_eq!(completions.series()[0].seconds.count(), 9);
        assert_eq!(completions.pairs.len(), 6, "the first epoch, and the last two");
        // Of an epoch whose links went elsewhere, nothing stays but for one change.
        (10..=11).for_each(|epoch| completions.formed(&formed(7, epoch, 3), eth0));
        assert!(!is_evidence(&mut completions, &ports, &mark(1, 0, 10)));
        assert_eq!(completions.pairs.len(), 4);
    }

    #[test]
    fn a_number_that_a_device_gives_again_is_told_apart() {
        let (mut completions, mut ports) = (Completions::default(), RdmaPorts::default());
        read(&mut ports, 0, 1000);
        completions.formed(&formed(7, 1, 2), eth0);
        assert!(is_evidence(&mut completions, &ports, &mark(1, 0, 10)));
        completions.formed(&formed(7, 2, 3), eth0);
        for epoch in 3..=9 {
            completions.formed(&formed(7, epoch, 2), eth0);
            assert!(is_evidence(&mut completions, &ports, &mark(3, 0, 10)), "in epoch {epoch}");
        }
    }

    #[test]
    fn queue_pairs_go_with_their_communicator_and_series_stay() {
        let (mut completions, ports) = (Completions::default(), RdmaPorts::default());
        (1..=3).for_each(|epoch| completions.formed(&formed(7, epoch, 2), eth0));
        completions.formed(&formed(8, 1, 2), |_| None);
        assert_eq!(completions.pairs.len(), 8);
        for epoch in 1..=3 {
            completions.record(&mark(epoch, 0, 1), &ports, &measured());
        }
        completions.ended(CommunicatorId(7));
        completions.record(&mark(3, 0, 1), &ports, &measured());
        assert_eq!(completions.pairs.len(), 2);
        let series = completions.series();
        let counts =
            series.iter().map(|one| (one.interface.as_str(), one.peer.as_str(), one.seconds.count()));
        assert_eq!(counts.collect::<Vec<_>>(), [("eth0", "10.0.1.2", 3)], "without a message there is none");
    }

    #[test]
    fn other_ends_beyond_the_room_are_summed_up() {
        let (mut completions, ports) = (Completions::default(), RdmaPorts::default());
        // Those without a message take no room.
        (100..=255).for_each(|host| completions.formed(&formed(7, 1, host), eth0));
        for host in 0..100 {
            completions.formed(&formed(7, 1, host), eth0);
            completions.record(&mark(1, 0, 1), &ports, &measured());
        }
        let series = completions.series();
        assert_eq!(series.len(), PEERS + 1);
        let last = series.last().unwrap();
        assert_eq!((last.peer.as_str(), last.seconds.count()), ("other", 100 - PEERS as u64));
    }
}
