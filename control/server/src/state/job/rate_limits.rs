//! What communicators' connections are held to, as plans and promises have it. Of communicators with more
//! hosts than those whose exchanges are looked at for codecs the rings alone are held.

use crate::state::ctx::Ctx;
use crate::state::job::communicator::{Communicator, Member};
use crate::state::job::lifecycle::Planned;
use crate::state::view::View;
use harmonaize_abi::CommunicatorId;
use harmonaize_planner::{Rate, RateLimits, Reservations, Sharer};
use std::collections::{BTreeMap, BTreeSet};

/// Returns what communicators are to be held to. It follows from the last plan, and from what is promised to
/// others on the links between their hosts.
pub(crate) fn rate_limits(view: &View<'_>) -> BTreeMap<CommunicatorId, RateLimits> {
    let reservations = reservations(view);
    let all = view.ctx.communicators.iter().map(|(id, known)| {
        let plan = known.current().and_then(|current| current.plan.as_ref());
        (*id, limits_of(view, *id, known, plan, &reservations))
    });
    all.collect()
}

/// Returns the same for one that is to run by this plan.
pub(crate) fn rate_limits_by(view: &View<'_>, id: CommunicatorId, plan: Option<&Planned>) -> RateLimits {
    let ring = RateLimits { ring: plan.and_then(|plan| plan.pace), exchange: None };
    let known = view.ctx.communicators.get(&id);
    known.map_or(ring, |known| limits_of(view, id, known, plan, &reservations(view)))
}

fn limits_of(
    view: &View<'_>,
    id: CommunicatorId,
    communicator: &Communicator,
    plan: Option<&Planned>,
    reservations: &Reservations,
) -> RateLimits {
    let exchange = reservations.exchange_limit(&view.ctx.settings.topology, id, communicator.exchange());
    RateLimits { ring: plan.and_then(|plan| plan.pace), exchange }
}

fn reservations(view: &View<'_>) -> Reservations {
    let sharers = view.ctx.communicators.iter().map(|(id, known)| {
        let promised = view.agreements.promised(*id);
        let latest = known.latest().filter(|_| promised > Rate(0));
        let hops = latest.map_or_else(Vec::new, |latest| view.links.hops(known, latest));
        Sharer { communicator: *id, promised, hops, exchange: known.exchange() }
    });
    Reservations::new(&sharers.collect::<Vec<_>>())
}

/// Returns, by sender and receiver, what is held where the sender can.
pub(crate) fn connection_limits(
    ctx: &Ctx<'_>,
    id: CommunicatorId,
    order: &[u32],
    limits: RateLimits,
) -> BTreeMap<(u32, u32), u64> {
    let Some(known) = ctx.communicators.get(&id).filter(|_| limits != RateLimits::default()) else {
        return BTreeMap::new();
    };
    let can = |member: &Member| {
        let session = member.session.and_then(|session| ctx.sessions.get(&session));
        session.is_some_and(|session| session.abilities.pace)
    };
    let able = (0_u32..).zip(&known.members).filter(|(_, member)| can(member));
    let able: BTreeSet<u32> = able.map(|(at, _)| at).collect();
    limits.by_connection(order, &able)
}
