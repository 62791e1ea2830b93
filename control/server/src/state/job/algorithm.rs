//! Up to which sizes a communicator's operations go straight between all its hosts; chosen anew for every
//! epoch.

use crate::state::job::coding::takers;
use crate::state::job::lifecycle::Planned;
use crate::state::view::View;
use harmonaize_abi::CommunicatorId;
use harmonaize_abi::session::MAX_TARGET_BYTES;
use harmonaize_planner::{
    AlgorithmChoice, Bytes, DirectThresholds, GroupCosts, HostId, Rate, delays, exchange_rate, line_rate,
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
        return AlgorithmChoice::ring("nothing crosses a wire");
    }
    if let Some(why) = known.indirect() {
        return AlgorithmChoice::ring(why);
    }
    let policy = ctx.settings.direct.get(&known.tenant).copied().unwrap_or_default();
    if let Some(forced) = AlgorithmChoice::forced(policy) {
        return forced;
    }
    let members: Vec<HostId> = known.members.iter().map(|member| member.host).collect();
    let ring: Vec<HostId> = order.iter().filter_map(|at| members.get(*at as usize)).copied().collect();
    let conditions = view.conditions();
    let direct = exchange_rate(&known.coding.usage, &conditions, &takers(view, id));
    let line = line_rate(&ctx.settings.topology, &members).0 as f64;
    let along = planned.map_or(direct.0 as f64, |planned| line / planned.slowdown.max(1.0));
    let (delay, hop) = delays(&ctx.settings.topology, &ring);
    let reach = GroupCosts {
        hosts: hosts as u32,
        delay,
        hop_delay: hop,
        direct_rate: direct,
        ring_rate: Rate(along as u64),
        chunk: known.tuning.chunk,
    };
    let before = known.current().map_or_else(DirectThresholds::default, |current| current.algorithm.sizes);
    let ordered = view.agreements.reduction_policy(id).ordered.then_some(Bytes(MAX_TARGET_BYTES));
    AlgorithmChoice::fastest(&reach, before, ordered)
}
