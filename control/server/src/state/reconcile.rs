//! Brings communicators to what they should run by: how that differs from what they run by, and one change for all of it.
//!
//! A communicator is changed for one [`Reason`] at a time; its proposal chooses codec, algorithm, aggregation and rates anew whatever the
//! reason is. What remains is found the next time, for an epoch that comes to use makes control plan again.

use super::State;
use super::communicator::Communicator;
use super::decisions::Changed;
use super::lifecycle::Planned;
use super::link_state::pair_of;
use super::reason::{RateChange, Reason};
use super::recipe::Proposal;
use harmonaize_planner::{Assignment, Conditions, Job, LinkUse, Path, RateLimits};
use std::collections::BTreeMap;
use std::time::Duration;

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
    rates: BTreeMap<u64, RateLimits>,
}

impl State {
    /// Moves communicators as planned, and gives those that stay what else they lack. Returns who changes.
    pub(super) fn reconcile(
        &mut self,
        now: Duration,
        decision: u64,
        jobs: &[Job],
        assignments: &[Assignment],
    ) -> Vec<Changed> {
        debug_assert_eq!(jobs.len(), assignments.len(), "one assignment for each job");
        let mut changes = Vec::new();
        for (job, assignment) in jobs.iter().zip(assignments) {
            let id = assignment.communicator;
            if assignment.changed && job.movable {
                changes.extend(self.begin_change(now, id, planned(assignment), Some(decision)));
                continue;
            }
            let known = self.communicators.get_mut(&id).filter(|known| known.change().is_none());
            if let Some(current) = known.and_then(|known| known.lifecycle.current_mut()) {
                current.plan = Some(Planned::from(assignment));
            }
        }
        let desired = self.desired();
        for id in self.communicators.keys().copied().collect::<Vec<_>>() {
            if let Some(difference) = self.difference(now, id, Some(&desired)) {
                changes.extend(self.begin_change(now, id, difference, Some(decision)));
            }
        }
        changes
    }

    /// Gives communicators what their ranks and tenants agreed on, where control does not plan.
    pub(super) fn reconcile_agreed(&mut self, now: Duration) {
        for id in self.communicators.keys().copied().collect::<Vec<_>>() {
            if let Some(difference) = self.difference(now, id, None) {
                self.begin_change(now, id, difference, None);
            }
        }
    }

    fn begin_change(
        &mut self,
        now: Duration,
        id: u64,
        Difference { reason, proposal }: Difference,
        decision: Option<u64>,
    ) -> Option<Changed> {
        let epoch = self.propose(now, id, Proposal { decision, ..proposal })?;
        debug_assert!(
            self.communicators.get(&id).is_some_and(|known| known.pending_epoch() == epoch),
            "a change that was begun is under way"
        );
        Some(Changed::new(id, epoch, reason, now))
    }

    fn desired(&self) -> Desired {
        let withdrawn = self.withdrawn();
        Desired {
            conditions: self.conditions(),
            closed: !withdrawn.switches.is_empty()
                || !withdrawn.links.is_empty()
                || self.link_state.failures.any(),
            rates: self.rate_limits(),
        }
    }

    /// What is to change of a communicator that can change; without `desired`, of what was agreed on alone.
    fn difference(&mut self, now: Duration, id: u64, desired: Option<&Desired>) -> Option<Difference> {
        if !self.communicators.get(&id)?.can_change() {
            return None;
        }
        if let Some(proposal) = desired.and_then(|desired| self.off_closed_paths(id, desired)) {
            return Some(Difference { reason: Reason::ClosedPaths, proposal });
        }
        let reason = match desired {
            Some(desired) => self
                .other_codec(now, id)
                .or_else(|| self.other_reduction(id))
                .or_else(|| self.other_aggregation(id))
                .or_else(|| self.other_rates(id, desired)),
            None => self.other_budget(now, id).or_else(|| self.other_reduction(id)),
        };
        Some(Difference { reason: reason?, proposal: self.same_links(id)? })
    }

    /// Returns a proposal that keeps order and links.
    fn same_links(&self, id: u64) -> Option<Proposal> {
        let known = self.communicators.get(&id)?;
        let current = known.current()?;
        let hops = self.link_state.hops(known, current);
        let (order, plan) = (current.order.clone(), current.plan.clone());
        Some(Proposal { order, hops, plan, decision: None, same_links: true })
    }

    /// Returns a proposal that avoids what passes nothing or was withdrawn, for a communicator that planning left where it is: an operator
    /// chose its order, or it changed too often.
    fn off_closed_paths(&self, id: u64, desired: &Desired) -> Option<Proposal> {
        let known = self.communicators.get(&id).filter(|_| desired.closed)?;
        let (current, conditions) = (known.current()?, &desired.conditions);
        current.links.iter().find(|(ends, ports)| {
            self.is_closed(conditions, known, **ends, ports) && self.has_open(conditions, known, **ends)
        })?;
        let mut hops = self.link_state.hops(known, current);
        for hop in &mut hops {
            hop.paths.retain(|path| conditions.path(path) == LinkUse::Open);
        }
        Some(Proposal { order: current.order.clone(), hops, ..Proposal::default() })
    }

    /// Whether a connection of a link crosses what is not open, either way.
    fn is_closed(
        &self,
        conditions: &Conditions,
        communicator: &Communicator,
        ends: (u32, u32),
        ports: &[u16],
    ) -> bool {
        let Some((low, high)) = communicator.hosts_of(ends) else { return false };
        let closed = |path: Option<&Path>| path.is_some_and(|path| conditions.path(path) != LinkUse::Open);
        ports.iter().any(|port| {
            closed(self.link_state.path_of(low, high, *port))
                || closed(self.link_state.path_of(high, low, *port))
        })
    }

    /// Whether a pair of participants has enough free ports that lead over open links alone.
    fn has_open(&self, conditions: &Conditions, known: &Communicator, ends: (u32, u32)) -> bool {
        let Some((low, high)) = known.hosts_of(ends) else { return false };
        let open =
            |path: &Option<Path>| path.as_ref().is_some_and(|path| conditions.path(path) == LinkUse::Open);
        let pair = pair_of(low, high);
        let pool = self
            .link_state
            .ports
            .pool_of(pair)
            .filter(|(number, _)| !self.link_state.ports.in_use(pair, *number));
        pool.filter(|(_, port)| open(&port.there) && open(&port.back)).count() >= self.settings.paths as usize
    }

    /// Whether another reduction was agreed on than the epoch in use has.
    fn other_reduction(&self, id: u64) -> Option<Reason> {
        let current = self.communicators.get(&id)?.current()?;
        current.aggregation.is_other(self.reduction_policy(id)).then_some(Reason::Reduction)
    }

    /// Whether an aggregator is there that gains something, or the grant in use is void.
    fn other_aggregation(&self, id: u64) -> Option<Reason> {
        let known = self.communicators.get(&id)?;
        let current = known.current()?;
        let granted = current.aggregation.grant;
        if self.settings.topology.aggregators().is_empty()
            || granted.is_some_and(|grant| self.is_granted(grant))
        {
            return None;
        }
        let weighed = self.weigh_aggregation(known, id, &current.codec, current.plan.as_ref());
        (weighed.best.is_some() || granted.is_some()).then_some(Reason::Aggregation(weighed.reason))
    }

    /// Whether connections are to be held to other rates than they are.
    fn other_rates(&self, id: u64, desired: &Desired) -> Option<Reason> {
        let (current, wanted) = (self.communicators.get(&id)?.current()?, desired.rates.get(&id)?);
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
