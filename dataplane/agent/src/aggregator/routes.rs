//! Where workers are, learned from packets that were believed; and aggregators above, as control says.
//!
//! A worker's address is that from which it began the session, as long as the session lasts: an answer [`Kind::Granted`], or a Begin
//! that goes on to the aggregator above, proves that its Begin was believed. What is repeated later, from wherever, moves nobody's sums.

use harmonaize_aggregator::To;
use harmonaize_aggregator::packet::{Kind, Sealed};
use harmonaize_transport::datagram::Address;
use std::collections::BTreeMap;
use std::net::SocketAddr;

#[derive(Clone, Copy, Debug)]
struct Route {
    session: u64,
    to: Address,
}

/// The ends of a communicator.
#[derive(Debug)]
struct Ends {
    workers: Box<[Option<Route>]>,
    parent: Option<SocketAddr>,
    /// Where what is for all workers at once goes.
    group: Option<SocketAddr>,
}

/// The workers of each communicator, and the aggregator above.
#[derive(Debug, Default)]
pub(super) struct Routes(BTreeMap<u64, Ends>);

/// The packet that is being answered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asker {
    pub from: Address,
    communicator: u64,
    worker: u16,
}

impl Asker {
    /// What a packet claims of the worker that sent it; nothing of it is believed yet. None for what is no worker's packet: an aggregator above
    /// names its own worker, which is none of those here.
    pub(super) fn of(from: Address, packet: &[u8]) -> Option<Self> {
        let sealed = Sealed::read(packet).ok().filter(|sealed| sealed.kind().of_workers())?;
        Some(Self { from, communicator: sealed.communicator(), worker: sealed.worker() })
    }
}

impl Routes {
    /// A communicator has been granted. All that it needs is allocated here.
    pub(super) fn add(
        &mut self,
        communicator: u64,
        workers: u16,
        parent: Option<SocketAddr>,
        group: Option<SocketAddr>,
    ) {
        let workers = vec![None; usize::from(workers)].into_boxed_slice();
        self.0.insert(communicator, Ends { workers, parent, group });
    }

    /// It has been withdrawn.
    pub(super) fn remove(&mut self, communicator: u64) {
        self.0.remove(&communicator);
    }

    /// Where `packet`, which was made while `asker` was looked at, goes; none where that is not known.
    pub(super) fn find(&mut self, asker: Option<Asker>, to: To, packet: &[u8]) -> Option<Address> {
        let (communicator, worker) = match to {
            To::Worker { communicator, worker } => (communicator, worker),
            To::Group { communicator } => return self.0.get(&communicator)?.group.map(Address::Udp),
            To::Parent { communicator } => return self.above(asker, communicator, packet).map(Address::Udp),
        };
        let route = self.0.get_mut(&communicator)?.workers.get_mut(usize::from(worker))?;
        let asker = asker.filter(|asker| (asker.communicator, asker.worker) == (communicator, worker));
        if let Some(asker) = asker
            && let Ok(sealed) = Sealed::read(packet)
        {
            let session = sealed.session();
            if sealed.kind() == Kind::Granted {
                begins(route, session, asker.from);
            }
            // Of a session that never began here: a word to who asked.
            if route.is_none_or(|route| route.session != session) {
                return Some(asker.from);
            }
        }
        route.map(|route| route.to)
    }

    /// A packet goes up; whose Begin it passes on gets its answer when one has come from there.
    fn above(&mut self, asker: Option<Asker>, communicator: u64, packet: &[u8]) -> Option<SocketAddr> {
        let Ends { workers, parent, .. } = self.0.get_mut(&communicator)?;
        let sealed = Sealed::read(packet).ok().filter(|sealed| sealed.kind() == Kind::Begin);
        let asker = asker.filter(|asker| asker.communicator == communicator);
        if let Some((sealed, asker)) = sealed.zip(asker)
            && let Some(route) = workers.get_mut(usize::from(asker.worker))
        {
            begins(route, sealed.session(), asker.from);
        }
        *parent
    }
}

/// A worker's Begin of this session was believed, from there.
fn begins(route: &mut Option<Route>, session: u64, from: Address) {
    if route.is_none_or(|route| route.session < session) {
        *route = Some(Route { session, to: from });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_aggregator::Key;
    use harmonaize_aggregator::packet::{HEADER_BYTES, Header, seal};

    fn packet(kind: Kind, worker: u16, session: u64) -> Vec<u8> {
        let payload = if matches!(kind, Kind::Result | Kind::Contribution) { 4 } else { 0 };
        let mut packet = vec![0; HEADER_BYTES + payload];
        let header = Header {
            kind,
            worker,
            count: 1,
            communicator: 7,
            session,
            incarnation: 1,
            sequence: 1,
            chunk: 0,
            had: 0,
            window: 4,
            note: 1,
        };
        seal(&header, &Key::new(&[0; 32]), &mut packet);
        packet
    }

    fn told(port: u16) -> SocketAddr {
        ([10, 0, 0, 1], port).into()
    }

    fn at(port: u16) -> Address {
        Address::Udp(told(port))
    }

    #[test]
    fn a_session_s_first_begin_says_where_a_worker_is_and_nothing_later_moves_it() {
        let mut routes = Routes::default();
        routes.add(7, 2, None, Some(told(8)));
        let to = |worker| To::Worker { communicator: 7, worker };
        let begin = |from, session| Asker::of(from, &packet(Kind::Begin, 0, session));
        let granted = |session| packet(Kind::Granted, 0, session);
        let sum = |session| packet(Kind::Result, 0, session);
        assert_eq!(routes.find(None, to(0), &sum(1)), None, "nobody is known yet");
        let lost = packet(Kind::Lost, 0, 1);
        assert_eq!(routes.find(begin(at(9), 1), to(0), &lost), Some(at(9)), "who asks is answered");
        assert_eq!(routes.find(None, to(0), &sum(1)), None, "and no sum goes there for it");
        assert_eq!(routes.find(begin(at(1), 1), to(0), &granted(1)), Some(at(1)));
        assert_eq!(routes.find(None, to(0), &sum(1)), Some(at(1)));
        assert_eq!(routes.find(begin(at(2), 1), to(0), &granted(1)), Some(at(1)), "a replay");
        assert_eq!(routes.find(begin(at(3), 2), to(0), &granted(2)), Some(at(3)), "a later session");
        assert_eq!(routes.find(begin(at(3), 2), to(1), &sum(2)), None, "another worker's");
        assert_eq!(routes.find(begin(at(3), 2), to(2), &sum(2)), None, "there is none");
        assert_eq!(routes.find(None, To::Parent { communicator: 7 }, &sum(2)), None);
        assert_eq!(routes.find(None, To::Group { communicator: 7 }, &sum(2)), Some(at(8)));
        routes.remove(7);
        assert_eq!(routes.find(None, to(0), &sum(2)), None);
    }

    #[test]
    fn below_an_aggregator_a_begin_that_goes_up_says_where_a_worker_is_and_nothing_of_above_does() {
        let mut routes = Routes::default();
        routes.add(7, 2, Some(told(9)), None);
        let (up, to) = (To::Parent { communicator: 7 }, |worker| To::Worker { communicator: 7, worker });
        let asks = |kind, worker| Asker::of(at(1), &packet(kind, worker, 1));
        let sum = packet(Kind::Result, 1, 1);
        assert_eq!(
            routes.find(asks(Kind::Contribution, 1), up, &packet(Kind::Contribution, 0, 1)),
            Some(at(9))
        );
        assert_eq!(routes.find(None, to(1), &sum), None, "a part that goes up proves nothing of a begin");
        assert_eq!(routes.find(asks(Kind::Begin, 1), up, &packet(Kind::Begin, 0, 1)), Some(at(9)));
        assert_eq!(routes.find(None, to(1), &sum), Some(at(1)));
        // Above, this aggregator has the number of a worker here.
        let granted = packet(Kind::Granted, 0, 1);
        let above = Asker::of(at(9), &granted);
        assert!(above.is_none());
        assert_eq!(routes.find(above, to(0), &granted), None, "where worker 0 is nobody knows");
    }
}
