//! What the kernel itself knows of the flows' ends, found by flow.

use harmonaize_events::{
    Direction, EndpointLosses, FlowKey, Protocol, QueuePair, QueuePairKey, Socket, SocketKey,
};
use std::collections::BTreeMap;

/// Sockets and queue pairs that the kernel knew at a reading.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Endpoints {
    /// TCP sockets by connection and network namespace.
    pub sockets: BTreeMap<SocketKey, Socket>,
    /// Queue pairs by device and number; those destroyed since the last reading among them.
    pub queue_pairs: BTreeMap<QueuePairKey, QueuePair>,
    /// What was lost since the programs were loaded.
    pub losses: EndpointLosses,
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
        let mut found = self.queue_pairs.iter().filter(|(key, pair)| {
            let number = if ingress { key.number } else { pair.peer };
            let near = pair.local == flow.local || pair.local == unknown;
            let far = pair.remote == flow.remote || (pair.remote == unknown && ingress);
            number == flow.queue_pair && near && far && pair.destroyed_ns == 0
        });
        let (key, pair) = found.next()?;
        found.next().is_none().then_some((*key, pair))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_found_by_its_flow_where_one_namespace_has_it() {
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
    fn a_queue_pair_is_found_by_what_goes_to_it_and_by_what_it_sends() {
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
}
