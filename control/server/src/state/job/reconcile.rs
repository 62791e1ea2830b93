//! Brings communicators to what they should run by. It finds how that differs from what they run by, and
//! makes one change for all of it.
//!
//! A communicator is changed for one [`Reason`] at a time; its proposal chooses codec, algorithm, aggregation
//! and rates anew whatever the reason is. What remains is found the next time, for an epoch that comes to use
//! makes control plan again.

pub(crate) mod proposer;

use crate::state::job::aggregation::weigh;
use crate::state::job::coding::{choose_coding, other_budget, other_codec};
use crate::state::job::communicator::Communicator;
use crate::state::job::decisions::Changed;
use crate::state::job::lifecycle::Planned;
use crate::state::job::over_tcp::other_network;
use crate::state::job::rate_limits::rate_limits;
use crate::state::job::reconcile::proposer::{Proposal, Proposer};
use crate::state::reason::{RateChange, Reason};
use crate::state::view::View;
use crate::state::world::link_state::ports::pair_of;
use harmonaize_abi::{CommunicatorId, Epoch};
use harmonaize_planner::{Assignment, Conditions, HostId, Job, LinkUse, Path, Plan, RateLimits, order};
use std::collections::BTreeMap;

/// What a communicator's epoch should be, and why that is another than it has.
struct Difference {
    reason: Reason,
    proposal: Proposal,
}

/// What differences are found by, beside what each communicator's ranks agreed on.
struct Desired {
    conditions: Conditions,
    /// Whether anything of the fabric is to carry nothing.
    closed: bool,
    /// What each communicator's connections are to be held to.
    rates: BTreeMap<CommunicatorId, RateLimits>,
}

/// Begins the first epoch of a communicator, as planned or else in the topology's order.
pub(crate) fn form(proposer: &mut Proposer<'_>, id: CommunicatorId, plan: Option<&Plan>) -> Option<Changed> {
    let part = plan.and_then(|plan| plan.assignments.iter().find(|part| part.communicator == id));
    let proposal = match part {
        Some(part) => planned(part).proposal,
        None => {
            let known = proposer.communicators.get(&id)?;
            let hosts: Vec<HostId> = known.members.iter().map(|member| member.host).collect();
            let ring = order(&proposer.settings.topology, &hosts).into_iter().map(|index| index as u32);
            Proposal { order: ring.collect(), ..Proposal::default() }
        }
    };
    begin_change(proposer, id, Difference { reason: Reason::Formed, proposal }, None)
}

/// Gives a communicator the ring order that an operator chose, which is no longer control's to choose.
/// Returns the number of the epoch.
pub(crate) fn reorder(proposer: &mut Proposer<'_>, id: CommunicatorId, order: Vec<u32>) -> Option<Epoch> {
    proposer.communicators.get_mut(&id)?.pinned = true;
    let proposal = Proposal { order, ..Proposal::default() };
    let difference = Difference { reason: Reason::Ordered, proposal };
    begin_change(proposer, id, difference, None).map(|changed| changed.epoch)
}

/// Moves communicators as planned, and gives those that stay what else they lack. Returns who changes.
pub(crate) fn reconcile(
    proposer: &mut Proposer<'_>,
    decision: u64,
    jobs: &[Job],
    assignments: &[Assignment],
) -> Vec<Changed> {
    debug_assert_eq!(jobs.len(), assignments.len(), "one assignment for each job");
    let mut changes = Vec::new();
    for (job, assignment) in jobs.iter().zip(assignments) {
        let id = assignment.communicator;
        if assignment.changed && job.movable {
            changes.extend(begin_change(proposer, id, planned(assignment), Some(decision)));
            continue;
        }
        let known = proposer.communicators.get_mut(&id).filter(|known| known.change().is_none());
        if let Some(current) = known.and_then(|known| known.lifecycle.current_mut()) {
            current.plan = Some(Planned::from(assignment));
        }
    }
    let desired = desired(&proposer.view());
    for id in proposer.communicators.keys().copied().collect::<Vec<_>>() {
        if let Some(difference) = difference(proposer, id, Some(&desired)) {
            changes.extend(begin_change(proposer, id, difference, Some(decision)));
        }
    }
    changes
}

/// Gives communicators what they are to have without a plan: what their ranks and tenants agreed on, and links
/// over TCP for a hand-over.
pub(crate) fn reconcile_agreed(proposer: &mut Proposer<'_>) {
    for id in proposer.communicators.keys().copied().collect::<Vec<_>>() {
        if let Some(difference) = difference(proposer, id, None) {
            begin_change(proposer, id, difference, None);
        }
    }
}

fn begin_change(
    proposer: &mut Proposer<'_>,
    id: CommunicatorId,
    Difference { reason, proposal }: Difference,
    decision: Option<u64>,
) -> Option<Changed> {
    let epoch = proposer.propose(id, Proposal { decision, ..proposal }, reason.clone())?;
    debug_assert!(
        proposer.communicators.get(&id).is_some_and(|known| known.pending_epoch() == epoch),
        "a change that was begun is under way"
    );
    Some(Changed::new(id, epoch, reason, proposer.now))
}

fn desired(view: &View<'_>) -> Desired {
    let withdrawn = view.ctx.operator.withdrawn();
    Desired {
        conditions: view.conditions(),
        closed: !withdrawn.switches.is_empty() || !withdrawn.links.is_empty() || view.links.failures.any(),
        rates: rate_limits(view),
    }
}

/// What is to change of a communicator that can change; without `desired`, of what was agreed on alone.
fn difference(
    proposer: &mut Proposer<'_>,
    id: CommunicatorId,
    desired: Option<&Desired>,
) -> Option<Difference> {
    let known = proposer.communicators.get(&id).filter(|known| known.can_change())?;
    let view = proposer.view();
    if let Some(proposal) = desired.and_then(|desired| off_closed_paths(&view, known, desired)) {
        return Some(Difference { reason: Reason::ClosedPaths, proposal });
    }
    let reason = match (other_network(&view.ctx, known), desired) {
        (Some(reason), _) => Some(reason),
        (None, Some(desired)) => {
            let chosen = known.is_coded().then(|| {
                let plan = known.current().and_then(|current| current.plan.as_ref());
                choose_coding(&view, id, plan)
            });
            let now = proposer.now;
            let known = proposer.communicators.get_mut(&id)?;
            let codec = chosen.and_then(|chosen| other_codec(now, known, chosen));
            let view = proposer.view();
            codec
                .or_else(|| other_reduction(&view, id))
                .or_else(|| other_aggregation(&view, id))
                .or_else(|| other_rates(&view, id, desired))
        }
        (None, None) => other_budget(&view, id).or_else(|| other_reduction(&view, id)),
    };
    Some(Difference { reason: reason?, proposal: same_links(&proposer.view(), id)? })
}

/// Returns a proposal that keeps order and links.
fn same_links(view: &View<'_>, id: CommunicatorId) -> Option<Proposal> {
    let known = view.ctx.communicators.get(&id)?;
    let current = known.current()?;
    let hops = view.links.hops(known, current);
    let (order, plan) = (current.order.clone(), current.plan.clone());
    Some(Proposal { order, hops, plan, decision: None, same_links: true })
}

/// Returns a proposal that avoids what passes nothing or was withdrawn. It is for a communicator that
/// planning left where it is: an operator chose its order, or it changed too often.
fn off_closed_paths(view: &View<'_>, known: &Communicator, desired: &Desired) -> Option<Proposal> {
    if !desired.closed {
        return None;
    }
    let (current, conditions) = (known.current()?, &desired.conditions);
    current.links.iter().find(|(ends, ports)| {
        is_closed(view, conditions, known, **ends, ports) && has_open(view, conditions, known, **ends)
    })?;
    let mut hops = view.links.hops(known, current);
    for hop in &mut hops {
        hop.paths.retain(|path| conditions.path(path) == LinkUse::Open);
    }
    Some(Proposal { order: current.order.clone(), hops, ..Proposal::default() })
}

/// Whether a connection of a link crosses what is not open, either way.
fn is_closed(
    view: &View<'_>,
    conditions: &Conditions,
    communicator: &Communicator,
    ends: (u32, u32),
    ports: &[u16],
) -> bool {
    let Some((low, high)) = communicator.hosts_of(ends) else { return false };
    let closed = |path: Option<&Path>| path.is_some_and(|path| conditions.path(path) != LinkUse::Open);
    ports.iter().any(|port| {
        closed(view.links.path_of(low, high, *port)) || closed(view.links.path_of(high, low, *port))
    })
}

/// Whether a pair of participants has enough free ports that lead over open links alone.
fn has_open(view: &View<'_>, conditions: &Conditions, known: &Communicator, ends: (u32, u32)) -> bool {
    let Some((low, high)) = known.hosts_of(ends) else { return false };
    let open = |path: &Option<Path>| path.as_ref().is_some_and(|path| conditions.path(path) == LinkUse::Open);
    let pair = pair_of(low, high);
    let pool = view.links.ports.pool_of(pair).filter(|(number, _)| !view.links.ports.in_use(pair, *number));
    pool.filter(|(_, port)| open(&port.there) && open(&port.back)).count() >= view.ctx.settings.paths as usize
}

/// Whether another reduction was agreed on than the epoch in use has.
fn other_reduction(view: &View<'_>, id: CommunicatorId) -> Option<Reason> {
    let current = view.ctx.communicators.get(&id)?.current()?;
    current.aggregation.is_other(view.agreements.reduction_policy(id)).then_some(Reason::Reduction)
}

/// Whether an aggregator is there that gains something, or the grant in use is void.
fn other_aggregation(view: &View<'_>, id: CommunicatorId) -> Option<Reason> {
    let known = view.ctx.communicators.get(&id)?;
    let current = known.current()?;
    let granted = current.aggregation.grant;
    if view.ctx.settings.topology.aggregators().is_empty()
        || granted.is_some_and(|grant| view.aggregators.is_granted(grant))
    {
        return None;
    }
    let weighed = weigh(view, known, id, &current.codec, current.plan.as_ref());
    (weighed.best.is_some() || granted.is_some()).then_some(Reason::Aggregation(weighed.reason))
}

/// Whether connections are to be held to other rates than they are.
fn other_rates(view: &View<'_>, id: CommunicatorId, desired: &Desired) -> Option<Reason> {
    let (current, wanted) = (view.ctx.communicators.get(&id)?.current()?, desired.rates.get(&id)?);
    if !current.rate_limits.is_other(wanted) {
        return None;
    }
    let plan = current.plan.as_ref().and_then(|plan| Some((plan.pace?, plan.gives_way)));
    Some(Reason::Rates(match (plan, wanted.exchange) {
        (Some((rate, true)), _) => RateChange::GivesWay(rate),
        (Some((rate, false)), _) => RateChange::Promised(rate),
        (None, Some(rate)) => RateChange::PromisedExchange(rate),
        (None, None) => RateChange::Unlimited,
    }))
}

/// What the planner moves.
fn planned(assignment: &Assignment) -> Difference {
    let Assignment { order, edges: hops, reason, .. } = assignment;
    Difference {
        reason: Reason::Planned(reason.clone()),
        proposal: Proposal {
            order: order.clone(),
            hops: hops.clone(),
            plan: Some(Planned::from(assignment)),
            ..Proposal::default()
        },
    }
}
