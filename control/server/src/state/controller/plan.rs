//! A new plan for all communicators together, whenever something moved that may make a better one worth its
//! change.
//!
//! What moves something only says so ([`Effects::want_plan`](crate::state::effects::Effects::want_plan)); the
//! message or call that brought it plans at once, or, within a moment of the last plan, when that is over.

use super::Controller;
use crate::state::ctx::ctx;
use crate::state::job::decisions::{Decision, Trigger};
use crate::state::job::planning::{jobs, undisturbed};
use crate::state::job::reconcile::proposer::proposer;
use crate::state::job::reconcile::{reconcile, reconcile_agreed};
use crate::state::output::Fact;
use crate::state::queries::DryRun;
use crate::state::view::view;
use crate::state::world::iterations::align;
use crate::state::world::withdrawals::InstructionError;
use harmonaize_planner::{HostId, Job, Plan};
use std::collections::BTreeSet;
use std::time::Duration;

impl Controller {
    /// Returns what a plan would be made from if these were withdrawn too.
    ///
    /// # Errors
    /// Where the topology has no such thing.
    pub fn dry_run(&mut self, now: Duration, targets: &[String]) -> Result<DryRun, InstructionError> {
        self.link_state.ports.refresh(self.settings.paths as usize);
        self.queries(now).dry_run(targets)
    }

    /// Plans if something moved and the last plan is long enough ago.
    pub(crate) fn plan(&mut self, now: Duration) {
        if !self.settings.replan {
            self.plan_request.forget();
            reconcile_agreed(&mut proposer!(self, now));
        }
        let members = self.communicators.values().map(|known| known.members.len()).sum();
        let Some(trigger) = self.plan_request.take(now, members) else { return };
        let Some(decision) = self.replan(now, trigger) else {
            // No plan fits. What was agreed on, and hand-overs, need none.
            return reconcile_agreed(&mut proposer!(self, now));
        };
        let alone = undisturbed(&view!(self, now));
        let ctx = &ctx!(self, now);
        for id in self.events.note_rates(ctx, &mut self.outbox, &self.agreements, &alone) {
            self.agreements.watch_plan(ctx, &mut self.outbox, id);
        }
        if !decision.changes.is_empty() {
            self.outbox.fact(Fact::Decided {
                decision: decision.number,
                trigger: decision.trigger.to_string(),
                reason: decision.reason.clone(),
                changes: decision
                    .changes
                    .iter()
                    .map(|changed| (changed.communicator, changed.epoch))
                    .collect(),
            });
            self.decisions.add(decision);
        }
    }

    /// Plans for all communicators together and begins what changes; none where nothing can be planned.
    fn replan(&mut self, now: Duration, trigger: Trigger) -> Option<Decision> {
        if self.communicators.is_empty() {
            return None;
        }
        self.decisions.counts.plans += 1;
        let jobs = jobs(&view!(self, now));
        let mut plan = self.plan_in_scope(now, jobs.clone())?;
        let conditions = view!(self, now).conditions();
        self.hints.prefer_tasks(&ctx!(self, now), &conditions, &jobs, &mut plan.assignments);
        let number = self.decisions.next();
        let changes = reconcile(&mut proposer!(self, now), number, &jobs, &plan.assignments);
        let (before, after, reason) = (plan.before, plan.after, plan.reason);
        Some(Decision { number, at: now, trigger, before, after, reason, changes })
    }

    /// A plan in which no agent's lone report on a link moves a communicator of others. Those that it has no
    /// part in are planned first, as if it had reported nothing.
    fn plan_in_scope(&mut self, now: Duration, mut jobs: Vec<Job>) -> Option<Plan> {
        let alone = self.link_state.uncorroborated();
        let hosts: BTreeSet<HostId> = alone.values().copied().collect();
        let outside: Vec<bool> =
            jobs.iter().map(|job| !job.hosts.iter().any(|host| hosts.contains(host))).collect();
        let movable: Vec<bool> = jobs.iter().map(|job| job.movable).collect();
        let full = view!(self, now).conditions();
        let mut first = None;
        if !alone.is_empty() && outside.iter().zip(&movable).any(|(outside, movable)| *outside && *movable) {
            let mut conditions = full.clone();
            for link in alone.keys() {
                let rate = self.settings.topology.links().get(link.link.0).map(|link| link.rate);
                conditions.set_available(*link, rate.unwrap_or_default());
            }
            for (job, outside) in jobs.iter_mut().zip(&outside) {
                job.movable &= *outside;
            }
            let plan = self.fit_plan(&jobs, &conditions)?;
            for ((job, assignment), movable) in jobs.iter_mut().zip(&plan.assignments).zip(&movable) {
                let moves = job.movable && assignment.changed;
                if let Some(current) = job.current.as_mut().filter(|_| moves) {
                    current.order.clone_from(&assignment.order);
                    current.edges.clone_from(&assignment.edges);
                }
                job.movable = *movable && !job.movable;
            }
            first = Some(plan);
        }
        let mut last = self.fit_plan(&jobs, &full)?;
        if let Some(first) = first {
            let parts = last.assignments.iter_mut().zip(first.assignments).zip(&outside);
            for ((part, earlier), _) in parts.filter(|(_, outside)| **outside) {
                *part = earlier;
            }
            last.before = first.before;
        }
        Some(last)
    }

    /// Has communicators take turns that share a link and gain by it.
    pub(crate) fn take_turns(&mut self, now: Duration) {
        let wanted = self.settings.replan && self.settings.turns;
        if !wanted || !self.turns.is_due(now) {
            return;
        }
        let mut jobs = jobs(&view!(self, now));
        let periodic = jobs.iter().filter(|job| job.iteration_pattern.is_some()).count();
        if periodic < 2 && self.turns.is_empty() {
            return;
        }
        align(&self.iterations, &mut jobs);
        let conditions = view!(self, now).conditions();
        let Some(plan) = self.fit_plan(&jobs, &conditions) else { return };
        let ctx = &ctx!(self, now);
        self.turns.group(ctx, &mut self.outbox, &self.agreements, jobs, &plan.assignments);
    }
}
