//! Links that go on from one epoch to the next: those with whose ways the new plan has no quarrel.

use crate::state::ctx::Ctx;
use crate::state::job::over_tcp::is_over_tcp;
use crate::state::view::View;
use crate::state::world::link_state::ports::{Port, pair_of};
use harmonaize_abi::CommunicatorId;
use harmonaize_planner::{Conditions, HostId, LinkUse, Path, RingEdge};
use std::collections::{BTreeMap, BTreeSet};

/// Takes pairs of participants out of `requested` whose link the next epoch has from the current one. Returns
/// by which ports they are connected; `reserved` then has these ports too. `all`: whatever their ways are.
/// None while the first epoch forms. A link that goes over TCP and is to go over RDMA, or the other way
/// round, does not go on.
pub(crate) fn carried(
    view: &View<'_>,
    id: CommunicatorId,
    (order, hops, over_tcp, all): (&[u32], &[RingEdge], &BTreeSet<u32>, bool),
    requested: &mut BTreeMap<(u32, u32), Vec<Path>>,
    reserved: &mut Vec<(HostId, u16)>,
) -> BTreeMap<(u32, u32), Vec<u16>> {
    let mut carried = BTreeMap::new();
    let ctx = &view.ctx;
    let Some(known) = ctx.communicators.get(&id) else { return carried };
    let Some(current) = known.current() else { return carried };
    let host = |at: u32| {
        let member = known.members.get(at as usize)?;
        ctx.sessions.contains_key(&member.session?).then_some(member.host)
    };
    let conditions = view.conditions();
    let steps = order.iter().zip(order.iter().cycle().skip(1)).zip(hops);
    let planned = steps.filter(|(_, hop)| !hop.paths.is_empty());
    let planned: BTreeSet<(u32, u32)> =
        planned.map(|((from, to), _)| (*from.min(to), *from.max(to))).collect();
    let ours: BTreeSet<(HostId, u16)> = current.ports.iter().copied().collect();
    requested.retain(|ends, paths| {
        if is_over_tcp(&current.over_tcp, *ends) != is_over_tcp(over_tcp, *ends) {
            return true;
        }
        let hosts = host(ends.0).zip(host(ends.1));
        let ports = current.links.get(ends).filter(|ports| ports.len() == ctx.settings.paths as usize);
        let (Some((low, high)), Some(ports)) = (hosts, ports) else { return true };
        let pair = pair_of(low, high);
        let mut ways: Vec<Path> =
            paths.iter().map(|path| if pair.0 == low { path.clone() } else { path.reversed() }).collect();
        let exact = planned.contains(ends);
        if exact {
            ways = ways.iter().cycle().take(ports.len()).cloned().collect();
        }
        let open = || all_open(ctx, &conditions, pair);
        let fits = all
            || ports.iter().all(|port| {
                let port = view.links.ports.traced(pair, *port);
                fits(port, &mut ways, exact, &conditions).unwrap_or_else(|| !exact && open())
            });
        if fits {
            reserved.extend(ports.iter().map(|port| (pair.0, *port)).filter(|port| ours.contains(port)));
            carried.insert(*ends, ports.clone());
        }
        !fits
    });
    carried
}

/// Whether no way between two hosts is to be avoided, so that it does not matter which a connection takes.
fn all_open(ctx: &Ctx<'_>, conditions: &Conditions, pair: (HostId, HostId)) -> bool {
    let paths = ctx.settings.topology.equal_cost_paths(pair.0, pair.1);
    paths.iter().all(|path| conditions.path(path) == LinkUse::Open)
}

/// Whether a connection's path is one of those that are wanted; any open one where none is. `exact`: each
/// once, and back the same path. None where the path is not known.
fn fits(port: Option<&Port>, ways: &mut Vec<Path>, exact: bool, conditions: &Conditions) -> Option<bool> {
    let port = port?;
    let there = port.there.as_ref()?;
    let legs = [Some(there), port.back.as_ref()];
    let open = legs.into_iter().flatten().all(|leg| conditions.path(leg) == LinkUse::Open);
    if ways.is_empty() {
        return Some(open);
    }
    let Some(at) = ways.iter().position(|way| way == there) else { return Some(false) };
    if exact {
        ways.swap_remove(at);
        return Some(port.is_symmetric());
    }
    Some(open)
}

/// Takes those ports out of `over` that `current` has: connections that go on have them.
pub(crate) fn keep(over: &mut Vec<(HostId, u16)>, current: &[(HostId, u16)]) {
    let current: BTreeSet<(HostId, u16)> = current.iter().copied().collect();
    over.retain(|port| !current.contains(port));
}
