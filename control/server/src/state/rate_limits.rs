//! What communicators' connections are held to, as plans and promises have it. Of communicators with more hosts than those whose exchanges
//! are looked at for codecs the rings alone are held.

use super::State;
use super::communicator::{Communicator, Member};
use super::lifecycle::Planned;
use harmonaize_planner::{DirectedLink, Rate, RateLimits, Reservations, Sharer};
use std::collections::{BTreeMap, BTreeSet};

impl Communicator {
    /// Returns the part of what a host sends that crosses each link where all send to all; nothing where all are neighbours in the ring.
    fn exchange(&self) -> &[(DirectedLink, f64)] {
        if self.members.len() > 2 { &self.coding.usage } else { &[] }
    }
}

impl State {
    /// Returns what communicators are to be held to by the last plan, and by what is promised to others on the links between their hosts.
    pub(super) fn rate_limits(&self) -> BTreeMap<u64, RateLimits> {
        let reservations = self.reservations();
        let all = self.communicators.iter().map(|(id, known)| {
            let plan = known.current().and_then(|current| current.plan.as_ref());
            (*id, self.limits_of(*id, known, plan, &reservations))
        });
        all.collect()
    }

    /// Returns the same for one that is to run by this plan.
    pub(super) fn rate_limits_by(&self, id: u64, plan: Option<&Planned>) -> RateLimits {
        let ring = RateLimits { ring: plan.and_then(|plan| plan.pace), exchange: None };
        let known = self.communicators.get(&id);
        known.map_or(ring, |known| self.limits_of(id, known, plan, &self.reservations()))
    }

    fn limits_of(
        &self,
        id: u64,
        communicator: &Communicator,
        plan: Option<&Planned>,
        reservations: &Reservations,
    ) -> RateLimits {
        let exchange = reservations.exchange_limit(&self.settings.topology, id, communicator.exchange());
        RateLimits { ring: plan.and_then(|plan| plan.pace), exchange }
    }

    fn reservations(&self) -> Reservations {
        let sharers = self.communicators.iter().map(|(id, known)| {
            let promised = self.agreements.promised(*id);
            let latest = known.latest().filter(|_| promised > Rate(0));
            let hops = latest.map_or_else(Vec::new, |latest| self.link_state.hops(known, latest));
            Sharer { communicator: *id, promised, hops, exchange: known.exchange() }
        });
        Reservations::new(&sharers.collect::<Vec<_>>())
    }

    /// Returns, by sender and receiver, what is held where the sender can.
    pub(super) fn connection_limits(
        &self,
        id: u64,
        order: &[u32],
        limits: RateLimits,
    ) -> BTreeMap<(u32, u32), u64> {
        let Some(known) = self.communicators.get(&id).filter(|_| limits != RateLimits::default()) else {
            return BTreeMap::new();
        };
        let can = |member: &Member| {
            let session = member.session.and_then(|session| self.sessions.get(&session));
            session.is_some_and(|session| session.abilities.pace)
        };
        let able = (0_u32..).zip(&known.members).filter(|(_, member)| can(member));
        let able: BTreeSet<u32> = able.map(|(at, _)| at).collect();
        limits.by_connection(order, &able)
    }
}
