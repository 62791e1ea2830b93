//! Plans as operators see them.

use crate::state::job::lifecycle::Planned;
use crate::state::job::stored::ppm;
use harmonaize_api::v1;
use harmonaize_planner::HostId;

/// The hops of a ring: participants with their hosts; none for a ring of one.
pub(crate) fn ring(order: &[u32], hosts: &[HostId]) -> Vec<((u32, HostId), (u32, HostId))> {
    let part = |index: &u32| hosts.get(*index as usize).map(|host| (*index, *host));
    let parts: Vec<(u32, HostId)> = order.iter().filter_map(part).collect();
    parts.iter().copied().zip(parts.iter().copied().cycle().skip(1)).collect()
}

/// What was predicted of a plan, and why it is.
pub(crate) fn with_plan(status: v1::PlanStatus, planned: &Planned) -> v1::PlanStatus {
    v1::PlanStatus {
        predicted_ns: planned.time.0,
        slowdown_ppm: ppm(planned.slowdown),
        share_bps: planned.share.0,
        reason: planned.reason.clone(),
        ..status
    }
}
