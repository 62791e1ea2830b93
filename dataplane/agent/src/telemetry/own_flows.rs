//! Own communicators: which flows carry them, and what their marks add up to.

use crate::telemetry::active_flows::entry;
use crate::telemetry::series::{Durations, Named, Series};
use harmonaize_abi::{Collective, CommunicatorId, Epoch, Nanos};
use harmonaize_analysis::congestion::Path;
use harmonaize_analysis::marks::Operation;
use harmonaize_analysis::trace::{Label, Owner, Record};
use harmonaize_events::{Direction, FlowKey, Mark, MarkKind, Protocol};
use harmonaize_transport::Flow;
use harmonaize_verbs::source_port_on_wire;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

/// Operations that the median is taken over.
const RECENT_OPERATIONS: usize = 64;

/// The links of an own communicator's epoch are up.
#[derive(Clone, Debug)]
pub struct EpochLinks {
    /// The communicator.
    pub communicator: CommunicatorId,
    /// Whose it is.
    pub tenant: String,
    /// The tenant's name for it.
    pub name: String,
    /// This agent's ranks.
    pub ranks: Vec<u32>,
    /// How many ranks it has in all.
    pub size: u32,
    /// The epoch.
    pub epoch: Epoch,
    /// Which participant this agent is.
    pub participant: u32,
    /// What paths to other participants look like on the wire.
    pub flows: Vec<(u32, Flow)>,
}

/// What is known of an own communicator. Bytes are those of tensors.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Traffic {
    /// Whose it is.
    pub tenant: String,
    /// The tenant's name for it.
    pub name: String,
    /// This agent's ranks.
    pub ranks: Vec<u32>,
    /// How many ranks it has in all.
    pub size: u32,
    /// The newest epoch.
    pub epoch: Epoch,
    /// Operations that ended here for all ranks.
    pub operations: u64,
    /// Of those, the ones that failed.
    pub failed: u64,
    /// Handed to the transport.
    pub sent_bytes: u64,
    /// Arrived.
    pub received_bytes: u64,
    /// Operations that travelled in fewer bits.
    pub coded: u64,
    /// Of those, the ones of which chunks went exact, for the budget.
    pub refused: u64,
    /// What they sent less than exact ones would have.
    pub saved_bytes: u64,
    /// Operations that an aggregator was to sum.
    pub aggregated: u64,
    /// Of those, the ones of which hosts did some.
    pub fallback: u64,
    /// Sessions with an aggregator that this agent gave up.
    pub abandoned_sessions: u64,
    /// What the last compressed operation lost: vNMSE.
    pub error: f64,
    /// How long each of the last operations took.
    pub recent: VecDeque<Duration>,
    /// How long all took that ended well.
    pub(crate) durations: Durations,
    /// Which series of metrics are its own.
    pub(crate) named: Named,
}

impl Traffic {
    /// The median of [`Traffic::recent`]; 0 without any.
    pub fn median(&self) -> Duration {
        let mut sorted: Vec<Duration> = self.recent.iter().copied().collect();
        sorted.sort_unstable();
        sorted.get(sorted.len() / 2).copied().unwrap_or_default()
    }
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct OwnFlows {
    communicators: BTreeMap<CommunicatorId, Traffic>,
    /// By the flow's key with interface 0: it is the same on each.
    owners: HashMap<FlowKey, Owner>,
    /// Of what leaves by queue pairs: the ports that they were opened with, by the same keys. None where a device chose one.
    source_ports: HashMap<FlowKey, u16>,
    /// What metrics tell of communicators that are over, too.
    series: Arc<Series>,
}

impl OwnFlows {
    pub(crate) fn communicators(&self) -> &BTreeMap<CommunicatorId, Traffic> {
        &self.communicators
    }

    pub(crate) fn owners(&self) -> &HashMap<FlowKey, Owner> {
        &self.owners
    }

    pub(crate) fn series(&self) -> Arc<Series> {
        Arc::clone(&self.series)
    }

    /// Whose connection or queue pair takes a path, and by which source port. None where it is nobody's any more. `listen`: of a
    /// connection's two ports this is not the one.
    pub(crate) fn owner_of(&self, path: Path, listen: u16) -> Option<(Owner, u16)> {
        // This host has few connections, and reports on them are rare.
        match path {
            Path::Connection { address, local, remote } => {
                let wanted = (Protocol::Tcp as u8, address, local, remote);
                let takes =
                    |key: &FlowKey| (key.protocol, key.remote, key.local_port, key.remote_port) == wanted;
                let (_, owner) = self.owners.iter().find(|(key, _)| takes(key))?;
                Some((*owner, if local == listen { remote } else { local }))
            }
            Path::Remote { address, port } if port != 0 => {
                let takes = |(key, opened): &(&FlowKey, &u16)| {
                    key.remote == address && source_port_on_wire(**opened) == port
                };
                let (key, opened) = self.source_ports.iter().find(takes)?;
                Some((*self.owners.get(key)?, *opened))
            }
            _ => None,
        }
    }

    /// Whether a flow is an own communicator's; its key as events have it.
    pub(crate) fn has(&self, flow: &FlowKey) -> bool {
        self.owners.contains_key(&FlowKey { interface: 0, ..entry(flow) })
    }

    /// Whether there is any own communicator.
    pub(crate) fn any(&self) -> bool {
        !self.communicators.is_empty()
    }

    /// Takes in a communicator's new epoch, for each of the interfaces.
    pub(crate) fn formed(
        &mut self,
        formed: &EpochLinks,
        now: Nanos,
        interfaces: &[u32],
        into: &mut Vec<Record>,
    ) {
        let Self { communicators, series, .. } = self;
        let traffic = communicators.entry(formed.communicator).or_insert_with(|| {
            let named = Arc::make_mut(series).begun(&formed.tenant, &formed.name);
            Traffic { named, ..Traffic::default() }
        });
        traffic.tenant.clone_from(&formed.tenant);
        traffic.name.clone_from(&formed.name);
        traffic.ranks.clone_from(&formed.ranks);
        traffic.size = formed.size;
        traffic.epoch = traffic.epoch.max(formed.epoch);
        // What the epoch before the last ran on is closed by now.
        let outlived = Epoch(formed.epoch.0.saturating_sub(1));
        self.drop_where(now, interfaces, into, |owner| {
            owner.communicator == formed.communicator && owner.epoch < outlived
        });
        for (peer, flow) in &formed.flows {
            for key in keys(flow) {
                let owner = Owner {
                    time_ns: now.0,
                    flow: key,
                    tenant: Label::new(&formed.tenant),
                    communicator: formed.communicator,
                    epoch: formed.epoch,
                    from: formed.participant,
                    to: *peer,
                    owned: true,
                };
                announce(&owner, interfaces, into);
                self.owners.insert(key, owner);
                match *flow {
                    Flow::Roce { source_port, .. }
                        if source_port != 0 && key.direction == Direction::Egress as u8 =>
                    {
                        self.source_ports.insert(key, source_port);
                    }
                    // A device may give a closed queue pair's number again.
                    _ => {
                        self.source_ports.remove(&key);
                    }
                }
            }
        }
    }

    /// A communicator is over.
    pub(crate) fn ended(
        &mut self,
        communicator: CommunicatorId,
        now: Nanos,
        interfaces: &[u32],
        into: &mut Vec<Record>,
    ) {
        if let Some(traffic) = self.communicators.remove(&communicator) {
            Arc::make_mut(&mut self.series).ended(&traffic);
        }
        self.drop_where(now, interfaces, into, |owner| owner.communicator == communicator);
    }

    /// Everything that holds, as for somebody who begins to listen, or for new interfaces.
    pub(crate) fn announce_all(&self, interfaces: &[u32], into: &mut Vec<Record>) {
        self.owners.values().for_each(|owner| announce(owner, interfaces, into));
    }

    pub(crate) fn mark(&mut self, mark: &Mark) {
        let Some(traffic) = self.communicators.get_mut(&CommunicatorId(mark.communicator)) else { return };
        match MarkKind::from_number(mark.kind) {
            Some(MarkKind::Sent) => traffic.sent_bytes += mark.bytes,
            Some(MarkKind::Received) => traffic.received_bytes += mark.bytes,
            Some(MarkKind::Coded) => {
                traffic.coded += 1;
                traffic.refused += u64::from(mark.channel != 0);
                traffic.saved_bytes += mark.bytes;
                traffic.error = f64::from_bits(mark.segment);
            }
            Some(MarkKind::Aggregated) => {
                traffic.aggregated += 1;
                traffic.fallback += u64::from(mark.segment != 0);
            }
            Some(MarkKind::GivenUp) => traffic.abandoned_sessions += 1,
            _ => {}
        }
    }

    pub(crate) fn operation(&mut self, operation: &Operation) {
        let Some(traffic) = self.communicators.get_mut(&operation.communicator) else { return };
        traffic.operations += 1;
        let took = duration(operation);
        if operation.ranks.iter().any(|rank| rank.failed) {
            traffic.failed += 1;
        } else {
            let bytes = operation.ranks.iter().map(|rank| rank.bytes).max().unwrap_or(0);
            traffic.durations.observe(bytes, took);
            let code = operation.collective.and_then(|code| u8::try_from(code).ok());
            if let Some(collective) = code.and_then(Collective::from_code) {
                let series = Arc::make_mut(&mut self.series);
                series.operation(collective, traffic.size, bytes, took);
            }
        }
        if traffic.recent.len() == RECENT_OPERATIONS {
            traffic.recent.pop_front();
        }
        traffic.recent.push_back(took);
    }

    fn drop_where(
        &mut self,
        now: Nanos,
        interfaces: &[u32],
        into: &mut Vec<Record>,
        which: impl Fn(&Owner) -> bool,
    ) {
        let Self { owners, source_ports, .. } = self;
        owners.retain(|key, owner| {
            let goes = which(owner);
            if goes {
                source_ports.remove(key);
                announce(&Owner { time_ns: now.0, owned: false, ..*owner }, interfaces, into);
            }
            !goes
        });
    }
}

/// From the first local call to the last local end, or what is known of it.
pub(crate) fn duration(operation: &Operation) -> Duration {
    let called = operation.ranks.iter().filter_map(|rank| rank.called).min();
    let ended = operation.ranks.iter().filter_map(|rank| rank.ended).max();
    let (began, ended) = (called.unwrap_or(operation.began), ended.unwrap_or(operation.ended));
    ended.since(began)
}

fn announce(owner: &Owner, interfaces: &[u32], into: &mut Vec<Record>) {
    for &interface in interfaces {
        let flow = FlowKey { interface, ..owner.flow };
        into.push(Record::Owner(Owner { flow, ..*owner }));
    }
}

/// The entries that a path has in the programs' tables, but for the interface.
fn keys(flow: &Flow) -> Vec<FlowKey> {
    match *flow {
        Flow::Tcp { local, remote } => vec![FlowKey {
            local: address_lanes(local.ip()),
            remote: address_lanes(remote.ip()),
            local_port: local.port(),
            remote_port: remote.port(),
            protocol: Protocol::Tcp as u8,
            ..FlowKey::default()
        }],
        Flow::Roce { local, remote, local_pair, remote_pair, .. } => {
            let way = |queue_pair, direction: Direction| FlowKey {
                local: address_lanes(local),
                remote: address_lanes(remote),
                queue_pair,
                protocol: Protocol::Roce as u8,
                direction: direction as u8,
                ..FlowKey::default()
            };
            vec![way(local_pair, Direction::Ingress), way(remote_pair, Direction::Egress)]
        }
    }
}

/// What leaves by a queue pair, without an interface; none of a TCP connection.
pub(crate) fn sent_key(flow: &Flow) -> Option<FlowKey> {
    keys(flow).into_iter().find(|key| key.direction == Direction::Egress as u8)
}

fn address_lanes(address: IpAddr) -> [u32; 4] {
    let octets = match address.to_canonical() {
        IpAddr::V4(four) => four.to_ipv6_mapped().octets(),
        IpAddr::V6(six) => six.octets(),
    };
    FlowKey::words(octets)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn formed(epoch: u32, port: u16) -> EpochLinks {
        let flow = Flow::Tcp {
            local: format!("10.0.0.1:{port}").parse().unwrap(),
            remote: "10.0.0.2:7100".parse().unwrap(),
        };
        EpochLinks {
            communicator: CommunicatorId(7),
            tenant: "a".into(),
            name: "world".into(),
            ranks: vec![0, 1],
            size: 2,
            epoch: Epoch(epoch),
            participant: 1,
            flows: vec![(0, flow)],
        }
    }

    fn announced(records: &mut Vec<Record>) -> Vec<(u16, u32, u32, bool)> {
        let one = |record: Record| match record {
            Record::Owner(owner) => (owner.flow.local_port, owner.flow.interface, owner.epoch.0, owner.owned),
            other => panic!("{other:?}"),
        };
        records.drain(..).map(one).collect()
    }

    #[test]
    fn flows_have_owners_until_epoch_or_communicator_ends() {
        let (mut own, mut records) = (OwnFlows::default(), Vec::new());
        own.formed(&formed(1, 1001), Nanos(5), &[3, 4], &mut records);
        assert_eq!(announced(&mut records), [(1001, 3, 1, true), (1001, 4, 1, true)]);
        own.formed(&formed(2, 1002), Nanos(6), &[3], &mut records);
        assert_eq!(announced(&mut records), [(1002, 3, 2, true)]);
        own.formed(&formed(3, 1003), Nanos(7), &[3], &mut records);
        assert_eq!(announced(&mut records), [(1001, 3, 1, false), (1003, 3, 3, true)]);
        own.announce_all(&[9], &mut records);
        let mut all = announced(&mut records);
        all.sort_unstable();
        assert_eq!(all, [(1002, 9, 2, true), (1003, 9, 3, true)]);
        own.ended(CommunicatorId(7), Nanos(8), &[3], &mut records);
        assert_eq!(announced(&mut records).iter().filter(|one| !one.3).count(), 2);
        assert!(!own.any() && own.owners().is_empty());
    }

    #[test]
    fn a_queue_pair_is_owned_in_both_directions() {
        let flow = Flow::Roce {
            local: "10.0.0.1".parse().unwrap(),
            remote: "::ffff:10.0.0.2".parse().unwrap(),
            local_pair: 17,
            remote_pair: 18,
            source_port: 20_000,
        };
        let (mut own, mut records) = (OwnFlows::default(), Vec::new());
        own.formed(&EpochLinks { flows: vec![(0, flow)], ..formed(1, 1) }, Nanos(5), &[3], &mut records);
        let keys: Vec<_> = own.owners().keys().collect();
        assert_eq!(keys.len(), 2);
        for key in keys {
            let number = if key.direction == Direction::Ingress as u8 { 17 } else { 18 };
            assert_eq!(key.queue_pair, number);
            assert_eq!(key.remote_address().to_string(), "10.0.0.2");
        }
        // Its path goes by the port on the wire; what it was opened with is what control knows.
        let address = address_lanes("10.0.0.2".parse().unwrap());
        let path = |port| Path::Remote { address, port };
        let found = own.owner_of(path(52_768), 7100).map(|(owner, port)| (owner.to, port));
        assert_eq!(found, Some((0, 20_000)));
        assert!([20_000, 0].iter().all(|port| own.owner_of(path(*port), 7100).is_none()));
        // Later the device chooses the port of a queue pair with the same number.
        let chosen = match flow {
            Flow::Roce { local, remote, local_pair, remote_pair, .. } => {
                Flow::Roce { local, remote, local_pair, remote_pair, source_port: 0 }
            }
            other => other,
        };
        own.formed(&EpochLinks { flows: vec![(0, chosen)], ..formed(2, 1) }, Nanos(6), &[3], &mut records);
        assert!(own.owner_of(path(52_768), 7100).is_none());
        own.formed(&EpochLinks { flows: vec![(0, flow)], ..formed(3, 1) }, Nanos(7), &[3], &mut records);
        assert!(own.owner_of(path(52_768), 7100).is_some());
        own.ended(CommunicatorId(7), Nanos(8), &[3], &mut records);
        assert!(own.source_ports.is_empty());
    }

    #[test]
    fn marks_add_up() {
        let (mut own, mut records) = (OwnFlows::default(), Vec::new());
        own.formed(&formed(1, 1), Nanos(5), &[], &mut records);
        for (kind, bytes) in [(MarkKind::Sent, 5), (MarkKind::Received, 7), (MarkKind::Called, 100)] {
            own.mark(&Mark { communicator: 7, kind: kind as u32, bytes, ..Mark::default() });
            own.mark(&Mark { communicator: 8, kind: kind as u32, bytes, ..Mark::default() });
        }
        let traffic = &own.communicators()[&CommunicatorId(7)];
        assert_eq!((traffic.sent_bytes, traffic.received_bytes, traffic.median()), (5, 7, Duration::ZERO));
        for channel in [0, 1, 0] {
            let kind = MarkKind::Coded as u32;
            own.mark(&Mark { communicator: 7, kind, bytes: 11, channel, ..Mark::default() });
        }
        let traffic = &own.communicators()[&CommunicatorId(7)];
        assert_eq!((traffic.coded, traffic.refused, traffic.saved_bytes), (3, 1, 33));
        for (kind, segment) in [(8, 0), (8, 5), (8, 0), (9, 0)] {
            own.mark(&Mark { communicator: 7, kind, segment, ..Mark::default() });
        }
        let traffic = &own.communicators()[&CommunicatorId(7)];
        assert_eq!((traffic.aggregated, traffic.fallback, traffic.abandoned_sessions), (3, 1, 1));
        assert_eq!(own.communicators().len(), 1);
    }
}
