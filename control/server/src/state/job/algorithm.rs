//! Which algorithm a communicator's operations take, by collective and size; chosen anew for every epoch.

use crate::state::job::coding::takers;
use crate::state::job::lifecycle::Planned;
use crate::state::view::View;
use harmonaize_abi::CommunicatorId;
use harmonaize_abi::session::MAX_TARGET_BYTES;
use harmonaize_plan::{Algorithm, AlgorithmTable};
use harmonaize_planner::{
    AlgorithmChoice, AlgorithmReason, Bytes, GroupCosts, HostCosts, HostId, RackCosts, Racks, Rate, delays,
    exchange_rate, hop_delay, line_rate, max_delay, racks,
};

/// For the next epoch of a communicator, by this plan and with hosts in this order.
pub(crate) fn choose_algorithm(
    view: &View<'_>,
    id: CommunicatorId,
    order: &[u32],
    planned: Option<&Planned>,
) -> AlgorithmChoice {
    let ctx = &view.ctx;
    let Some(known) = ctx.communicators.get(&id) else { return AlgorithmChoice::default() };
    let hosts = known.members.len();
    if hosts < 2 {
        return AlgorithmChoice::ring(AlgorithmReason::OneHost);
    }
    let sessions = known.members.iter().map(|member| ctx.sessions.get(&member.session?));
    let abilities: Vec<_> = sessions.map(|session| session.map(|session| &session.abilities)).collect();
    let by_racks = abilities.iter().all(|abilities| abilities.is_some_and(|abilities| abilities.racks));
    let mut overrides = ctx.settings.algorithms_of(&known.tenant);
    overrides.retain(|one| by_racks || one.algorithm != Algorithm::Hierarchical);
    let straight = known.indirect().is_none();
    let members: Vec<HostId> = known.members.iter().map(|member| member.host).collect();
    let ring: Vec<HostId> = order.iter().filter_map(|at| members.get(*at as usize)).copied().collect();
    let conditions = view.conditions();
    let topology = &ctx.settings.topology;
    let line = line_rate(topology, &members).0 as f64;
    let along = planned.map(|planned| line / planned.slowdown.max(1.0));
    // Between so many hosts that it is not known what they load together, about what the ring carries; and no pair of them is looked at.
    let (direct, (delay, hop)) = match straight {
        true => {
            let rate = exchange_rate(&known.coding.usage, &conditions, &takers(view, id));
            (rate, delays(topology, &ring))
        }
        false => (Rate(along.unwrap_or(line) as u64), (max_delay(topology), hop_delay(topology, &ring))),
    };
    let along = along.unwrap_or(direct.0 as f64);
    let costs = abilities.iter().flatten().filter_map(|abilities| abilities.costs);
    let racks = if by_racks { racks(topology, &ring) } else { Racks::default() };
    let reach = GroupCosts {
        hosts: hosts as u32,
        delay,
        hop_delay: hop,
        direct_rate: direct,
        ring_rate: Rate(along as u64),
        chunk: known.tuning.chunk,
        straight,
        host: costs.reduce(HostCosts::max).unwrap_or_default(),
        racks: match racks.sizes.is_empty() {
            true => None,
            false => RackCosts::new(topology, &conditions, &ring, &racks, &takers(view, id)),
        },
    };
    let before = known.current().map_or(AlgorithmTable::RING, |current| current.algorithm.table);
    let ordered = view.agreements.reduction_policy(id).ordered.then_some(Bytes(MAX_TARGET_BYTES));
    AlgorithmChoice::new(reach, &before, &overrides, ordered).with_racks(racks)
}
