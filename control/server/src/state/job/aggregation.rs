//! Whether a communicator's large operations are better summed by an aggregator, and by which.

use crate::state::ctx::Ctx;
use crate::state::job::coding::levels_of;
use crate::state::job::communicator::Communicator;
use crate::state::job::datagrams::packets;
use crate::state::job::lifecycle::Planned;
use crate::state::view::View;
use crate::state::world::iterations::Operations;
use harmonaize_abi::CommunicatorId;
use harmonaize_aggregator::packet::MAX_WORKERS;
use harmonaize_codec::Codec;
use harmonaize_planner::{
    AggregationReason, AggregatorOffer, Bytes, CodeShape, CodecChoice, HostId, Rate, codes_rate,
    decide_aggregation, line_rate,
};

/// Bytes of an element: f32.
const ELEMENT: u32 = 4;

/// How the next epoch of a communicator has large operations summed, by this plan. Nothing is granted yet.
pub(crate) fn weigh(
    view: &View<'_>,
    communicator: &Communicator,
    id: CommunicatorId,
    coding: &CodecChoice,
    planned: Option<&Planned>,
) -> Weighed {
    let ctx = &view.ctx;
    let by_hosts = |reason: AggregationReason| Weighed { best: None, reason };
    let topology = &ctx.settings.topology;
    if topology.aggregators().is_empty() {
        return by_hosts(AggregationReason::Undecided);
    }
    let members = communicator.members.len();
    if !ctx.settings.terms(&communicator.tenant).allowed {
        return by_hosts(AggregationReason::NotAllowed);
    }
    let sums = view.agreements.reduction_policy(id);
    if !sums.aggregated {
        return by_hosts(AggregationReason::NotWanted);
    }
    if !all_aggregate(ctx, communicator) {
        return by_hosts(AggregationReason::NotAllAgents);
    }
    if members > usize::from(MAX_WORKERS) {
        return by_hosts(AggregationReason::TooManyHosts);
    }
    // Sums of codes are not added in order.
    let (exact, plain) = (coding.codec == Codec::EXACT, !sums.ordered);
    let coder = (plain && ctx.settings.compression)
        .then(|| codes_rate(&coding.budget, members, &levels_of(ctx, communicator)))
        .flatten();
    if !exact && coder.is_none() {
        return by_hosts(AggregationReason::Compressed);
    }
    let hosts: Vec<HostId> = communicator.members.iter().map(|member| member.host).collect();
    let offers = offers(view, id, communicator, (exact, coder));
    let conditions = view.conditions();
    let share = planned.map(|planned| planned.share).filter(|share| share.0 > 0);
    let ring = share.unwrap_or_else(|| line_rate(topology, &hosts));
    let told = ctx.iterations.get(&id).map_or(0, Operations::bytes);
    let decided =
        decide_aggregation(topology, &conditions, &hosts, (ring, Rate(coding.speed)), Bytes(told), &offers);
    let refused = communicator.refused.reason().filter(|_| decided.plan.is_none());
    let refused = refused.map(AggregationReason::Refused);
    Weighed { best: decided.plan, reason: refused.unwrap_or(decided.reason) }
}

/// Returns what aggregators can do for a communicator. They sum tensors as they are where that is `exact`,
/// and codes where a `coder` is allowed.
fn offers(
    view: &View<'_>,
    id: CommunicatorId,
    communicator: &Communicator,
    (exact, coder): (bool, Option<Rate>),
) -> Vec<AggregatorOffer> {
    let (ctx, members) = (&view.ctx, communicator.members.len());
    let sums = view.agreements.reduction_policy(id);
    let plain = !sums.ordered;
    let least = 2 * sums.grain(members);
    let there = view.aggregators.present().iter().filter(|(at, _)| !communicator.refused.holds(**at));
    there
        .filter(|(at, there)| view.aggregators.free_units(**at, there) >= least)
        .flat_map(|(at, there)| {
            let (unit, _) = packets(ctx, communicator, there.unit_bytes, there.datagrams.as_ref());
            let payload = Bytes(u64::from(unit));
            let offer = AggregatorOffer {
                aggregator: *at,
                payload,
                tensor_bytes: payload,
                codec_rate: Rate(0),
                packets_per_second: there.packets_per_second,
                other_communicators: view.aggregators.served_beside(*at, id),
                // Aggregators above each other add in another order, and know no hosts.
                supports_parents: plain,
            };
            let shape = coder.zip(CodeShape::of_codes(unit, members));
            let coded = shape.map(|(coder, CodeShape { elements, bytes, .. })| AggregatorOffer {
                payload: Bytes(u64::from(bytes)),
                tensor_bytes: Bytes(u64::from(elements) * u64::from(ELEMENT)),
                codec_rate: coder,
                ..offer.clone()
            });
            exact.then_some(offer).into_iter().chain(coded)
        })
        .collect()
}

/// Whether the agents of all of a communicator's hosts are there and can send to aggregators.
fn all_aggregate(ctx: &Ctx<'_>, known: &Communicator) -> bool {
    known.members.iter().all(|member| {
        let session = member.session.and_then(|session| ctx.sessions.get(&session));
        session.is_some_and(|session| session.abilities.aggregation)
    })
}

/// What the planner says for a communicator.
pub(crate) struct Weighed {
    pub best: Option<harmonaize_planner::AggregationPlan>,
    pub reason: AggregationReason,
}
