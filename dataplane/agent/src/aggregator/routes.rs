//! Where workers are, learned from packets that were believed; and aggregators above, as control says.
//!
//! A worker is where the latest of its packets came from: of the latest session, and in it of the greatest sequence, both of which its tag
//! covers. So who has another address goes on with its session, and what is repeated, from wherever, moves nobody's sums.

use harmonaize_abi::GrantId;
use harmonaize_aggregator::Recipient;
use harmonaize_aggregator::packet::Header;
use harmonaize_transport::datagram::Address;
use std::collections::BTreeMap;
use std::net::SocketAddr;

#[derive(Clone, Copy, Debug)]
struct Route {
    /// Session and sequence of the packet that told it.
    learned_from: (u64, u64),
    to: Address,
}

/// The ends of a communicator.
#[derive(Debug)]
struct CommunicatorRoutes {
    workers: Box<[Option<Route>]>,
    parent: Option<SocketAddr>,
}

/// The workers of each communicator, and the aggregator above.
#[derive(Debug, Default)]
pub(super) struct Routes(BTreeMap<GrantId, CommunicatorRoutes>);

impl Routes {
    /// A communicator has been granted. All that it needs is allocated here.
    pub(super) fn add(&mut self, communicator: GrantId, workers: u16, parent: Option<SocketAddr>) {
        let workers = vec![None; usize::from(workers)].into_boxed_slice();
        self.0.insert(communicator, CommunicatorRoutes { workers, parent });
    }

    /// It has been withdrawn.
    pub(super) fn remove(&mut self, communicator: GrantId) {
        self.0.remove(&communicator);
    }

    /// A worker's packet came from there, and is believed.
    pub(super) fn learn(&mut self, from: Address, packet: &Header) {
        let ends = self.0.get_mut(&packet.communicator);
        let route = ends.and_then(|ends| ends.workers.get_mut(usize::from(packet.worker)));
        let at = (packet.session, packet.sequence);
        if let Some(route) = route.filter(|route| route.is_none_or(|route| route.learned_from < at)) {
            *route = Some(Route { learned_from: at, to: from });
        }
    }

    /// Where packets for these ends go; none where that is not known.
    pub(super) fn find(&self, to: Recipient) -> Option<Address> {
        match to {
            Recipient::Worker { communicator, worker } => {
                let route = self.0.get(&communicator)?.workers.get(usize::from(worker))?;
                route.map(|route| route.to)
            }
            Recipient::Parent { communicator } => self.0.get(&communicator)?.parent.map(Address::Udp),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_aggregator::packet::Kind;

    fn packet(worker: u16, session: u64, sequence: u64) -> Header {
        Header {
            kind: Kind::Contribution,
            worker,
            count: 1,
            communicator: GrantId(7),
            session,
            incarnation: 1,
            sequence,
            chunk: 0,
            had: 0,
            window: 0,
            note: 0,
        }
    }

    fn route_to(port: u16) -> SocketAddr {
        ([10, 0, 0, 1], port).into()
    }

    fn at(port: u16) -> Address {
        Address::Udp(route_to(port))
    }

    #[test]
    fn the_latest_packet_says_where_a_worker_is() {
        let mut routes = Routes::default();
        routes.add(GrantId(7), 2, Some(route_to(9)));
        let to = |worker| Recipient::Worker { communicator: GrantId(7), worker };
        assert_eq!(routes.find(to(0)), None, "nobody is known yet");
        for (port, session, sequence, now) in [
            (1, 4, 10, 1),
            // From where it is now.
            (2, 4, 11, 2),
            // Repeated: the latest, an earlier one, and one of an earlier session.
            (3, 4, 11, 2),
            (3, 4, 10, 2),
            (3, 3, 99, 2),
            // A worker that has restarted counts from the beginning, in a later session.
            (5, 5, 1, 5),
            (2, 4, 12, 5),
        ] {
            routes.learn(at(port), &packet(0, session, sequence));
            assert_eq!(routes.find(to(0)), Some(at(now)), "{sequence} of {session} from {port}");
        }
        assert_eq!(routes.find(to(1)), None, "another worker's");
        routes.learn(at(6), &packet(2, 5, 1));
        assert_eq!(routes.find(to(2)), None, "there is none");
        assert_eq!(routes.find(Recipient::Parent { communicator: GrantId(7) }), Some(at(9)));
        routes.remove(GrantId(7));
        routes.learn(at(1), &packet(0, 9, 9));
        assert_eq!(routes.find(to(0)), None);
    }
}
