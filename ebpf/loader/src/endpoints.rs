//! What the kernel itself knows of the flows' ends, found by flow.

use harmonaize_events::{
    Direction, EndpointLosses, FlowKey, Protocol, QueuePair, QueuePairKey, Socket, SocketKey,
};
use std::collections::{BTreeMap, HashMap};

/// Sockets and queue pairs that the kernel knew at a reading.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Endpoints {
    /// TCP sockets by connection and network namespace.
    pub sockets: BTreeMap<SocketKey, Socket>,
    /// Queue pairs by device and number; those destroyed since the last reading among them.
    pub queue_pairs: QueuePairs,
    /// What was lost since the programs were loaded.
    pub losses: EndpointLosses,
}

/// Queue pairs by device and number, which are found by the number that a packet has, too.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QueuePairs {
    all: BTreeMap<QueuePairKey, QueuePair>,
    /// Those that live, by their own number, and by their peers'.
    by_number: HashMap<u32, Vec<QueuePairKey>>,
    by_peer: HashMap<u32, Vec<QueuePairKey>>,
}

impl QueuePairs {
    /// Adds one, or takes it in place of one that has its device and number.
    pub fn insert(&mut self, key: QueuePairKey, pair: QueuePair) {
        let Self { all, by_number: numbered, by_peer: facing } = self;
        if let Some(before) = all.insert(key, pair) {
            for (index, number) in [(&mut *numbered, key.number), (&mut *facing, before.peer)] {
                index.entry(number).or_default().retain(|other| *other != key);
            }
        }
        if pair.destroyed_ns == 0 {
            numbered.entry(key.number).or_default().push(key);
            facing.entry(pair.peer).or_default().push(key);
        }
    }

    /// All of them, in the order of devices and numbers.
    pub fn iter(&self) -> impl Iterator<Item = (&QueuePairKey, &QueuePair)> {
        self.all.iter()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// The queue pairs that live and have this number of their own (`ingress`), or whose peers have it. A packet names where it
    /// goes.
    fn named(&self, number: u32, ingress: bool) -> impl Iterator<Item = (&QueuePairKey, &QueuePair)> {
        let index = if ingress { &self.by_number } else { &self.by_peer };
        index.get(&number).into_iter().flatten().filter_map(|key| self.all.get_key_value(key))
    }
}

impl Endpoints {
    /// Forgets all.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// The socket on this side of a flow. None where none is known, or where several namespaces have one: a flow does not
    /// say in which namespace its end is.
    pub fn socket(&self, flow: &FlowKey) -> Option<&Socket> {
        if flow.protocol != Protocol::Tcp as u8 {
            return None;
        }
        let FlowKey { local, remote, local_port, remote_port, .. } = *flow;
        let key = |namespace: u32| SocketKey { local, remote, local_port, remote_port, namespace };
        let mut found = self.sockets.range(key(0)..=key(u32::MAX));
        let (_, socket) = found.next()?;
        found.next().is_none().then_some(socket)
    }

    /// This side's queue pair of a flow: the one that it goes to, or that it comes from. None where none is known, or where
    /// what is known does not tell two of them apart.
    pub fn queue_pair(&self, flow: &FlowKey) -> Option<(QueuePairKey, &QueuePair)> {
        if flow.protocol != Protocol::Roce as u8 {
            return None;
        }
        let ingress = flow.direction == Direction::Ingress as u8;
        let unknown = [0; 4];
        let mut found = self.queue_pairs.named(flow.queue_pair, ingress).filter(|(_, pair)| {
            let near = pair.local == flow.local || pair.local == unknown;
            let far = pair.remote == flow.remote || (pair.remote == unknown && ingress);
            near && far
        });
        let (key, pair) = found.next()?;
        found.next().is_none().then_some((*key, pair))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_is_found_in_a_single_namespace() {
        let flow = FlowKey {
            local: [1; 4],
            remote: [2; 4],
            local_port: 3,
            remote_port: 4,
            interface: 9,
            protocol: Protocol::Tcp as u8,
            ..FlowKey::default()
        };
        let key = |namespace, local_port| SocketKey {
            local: [1; 4],
            remote: [2; 4],
            local_port,
            remote_port: 4,
            namespace,
        };
        let mut endpoints = Endpoints::default();
        let socket = Socket { segments: 7, ..Socket::default() };
        endpoints.sockets.insert(key(5, 3), socket);
        endpoints.sockets.insert(key(5, 2), Socket::default());
        endpoints.sockets.insert(key(5, 4), Socket::default());
        assert_eq!(endpoints.socket(&flow), Some(&socket));
        assert_eq!(endpoints.socket(&FlowKey { local_port: 5, ..flow }), None);
        assert_eq!(endpoints.socket(&FlowKey { protocol: Protocol::Roce as u8, ..flow }), None);
        endpoints.sockets.insert(key(6, 3), socket);
        assert_eq!(endpoints.socket(&flow), None, "two namespaces have it");
    }

    #[test]
    fn queue_pair_is_found_in_both_directions() {
        let pair = |local, remote, peer| QueuePair { local, remote, peer, ..QueuePair::default() };
        let (here, there, elsewhere) = ([1; 4], [2; 4], [3; 4]);
        let key = |device| QueuePairKey { device, number: 17 };
        let mut endpoints = Endpoints::default();
        endpoints.queue_pairs.insert(key(0), pair(here, there, 18));
        endpoints.queue_pairs.insert(key(1), pair(there, here, 18));
        let flow = |direction: Direction, queue_pair| FlowKey {
            local: here,
            remote: there,
            queue_pair,
            protocol: Protocol::Roce as u8,
            direction: direction as u8,
            ..FlowKey::default()
        };
        let found = |flow: FlowKey| endpoints.queue_pair(&flow).map(|(key, _)| key);
        assert_eq!(found(flow(Direction::Ingress, 17)), Some(key(0)));
        assert_eq!(found(flow(Direction::Egress, 18)), Some(key(0)));
        assert_eq!(found(flow(Direction::Egress, 17)), None);
        assert_eq!(found(FlowKey { remote: elsewhere, ..flow(Direction::Ingress, 17) }), None);
        let mut two = endpoints.clone();
        two.queue_pairs.insert(key(2), pair(here, there, 18));
        assert_eq!(two.queue_pair(&flow(Direction::Egress, 18)), None, "two that cannot be told apart");
    }

    #[test]
    fn changed_queue_pair_is_found_by_current_state() {
        let key = QueuePairKey { device: 0, number: 17 };
        let flow = |direction: Direction, queue_pair| FlowKey {
            queue_pair,
            protocol: Protocol::Roce as u8,
            direction: direction as u8,
            ..FlowKey::default()
        };
        let mut endpoints = Endpoints::default();
        let mut found = |pair: QueuePair| {
            endpoints.queue_pairs.insert(key, pair);
            let by = [(Direction::Ingress, 17), (Direction::Egress, 18), (Direction::Egress, 19)];
            by.map(|(direction, number)| endpoints.queue_pair(&flow(direction, number)).is_some())
        };
        assert_eq!(found(QueuePair { peer: 18, ..QueuePair::default() }), [true, true, false]);
        assert_eq!(found(QueuePair { peer: 19, ..QueuePair::default() }), [true, false, true]);
        let destroyed = QueuePair { peer: 19, destroyed_ns: 1, ..QueuePair::default() };
        assert_eq!(found(destroyed), [false; 3]);
        assert_eq!((endpoints.queue_pairs.len(), endpoints.queue_pairs.is_empty()), (1, false));
    }
}
