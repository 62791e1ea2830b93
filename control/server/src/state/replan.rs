//! A new plan for all communicators together, whenever something moved that may make a better one worth its change.
//!
//! What moves something only says so ([`State::want_plan`]); the message or call that brought it ends with [`State::act`], which
//! plans at once, or, within a moment of the last plan, when that is over.

use super::communicator::{Communicator, MOST_RECENT};
use super::decisions::{Decision, Trigger};
use super::link_state::LinkState;
use super::{Fact, State};
use harmonaize_api::v1;
use harmonaize_planner::{
    Bytes, CheckError, Conditions, Current, HostId, Job, Plan, Policy, Request, Routes, check, plan,
};
use std::collections::BTreeSet;
use std::time::Duration;

/// Least time between two plans, and what each participant adds to it: planning for very many takes longer.
const SPACING: (Duration, Duration) = (Duration::from_millis(1), Duration::from_micros(10));

/// For how long a change of plan makes the next one dearer, and how many control makes of one communicator in that time. What
/// passes nothing, or was withdrawn, is left however often that happens.
const RECENT: Duration = Duration::from_secs(30);

/// First and last pause after a change that was given up.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// What makes control plan anew.
#[derive(Debug, Default)]
pub(super) struct PlanRequest {
    /// The first thing that moved since the last plan.
    trigger: Option<Trigger>,
    /// Not sooner than this.
    not_before: Duration,
    /// The least time until the next one, where a plan was made of which it is not known when it was over.
    made: Option<Duration>,
}

impl PlanRequest {
    /// Something moved.
    pub(super) fn want(&mut self, trigger: Trigger) {
        self.trigger.get_or_insert(trigger);
    }

    /// What has moved makes no plan.
    pub(super) fn forget(&mut self) {
        self.trigger = None;
    }

    /// Returns what moved, if a plan of so many participants is due now; the next is after a while.
    pub(super) fn take(&mut self, now: Duration, participants: usize) -> Option<Trigger> {
        if now < self.not_before {
            return None;
        }
        let trigger = self.trigger.take()?;
        let participants = u32::try_from(participants).unwrap_or(u32::MAX);
        let spacing = SPACING.0 + SPACING.1.saturating_mul(participants);
        self.not_before = now.saturating_add(spacing);
        self.made = Some(spacing);
        Some(trigger)
    }

    /// The plan that was taken last was made by now.
    pub(super) fn made(&mut self, now: Duration) {
        if let Some(spacing) = self.made.take() {
            self.not_before = now.saturating_add(spacing);
        }
    }
}

impl State {
    /// When a plan is due that had to wait.
    pub(super) fn plan_deadline(&self) -> Option<Duration> {
        let waits = self
            .plan_request
            .trigger
            .as_ref()
            .filter(|_| self.settings.replan)
            .map(|_| self.plan_request.not_before);
        let held = self.communicators.values().filter_map(|known| known.backoff_until);
        let coding = self.coding_deadline();
        waits.into_iter().chain(coding).chain(held).min()
    }

    /// Lets estimates fade, has links probed, and lets communicators be changed again.
    pub(super) fn expire_plans(&mut self, now: Duration) {
        self.with_links(now, LinkState::fade);
        self.expire_codings(now);
        let mut settled = false;
        for known in self.communicators.values_mut() {
            settled |= known.backoff_until.take_if(|until| *until <= now).is_some();
        }
        if settled {
            self.want_plan(Trigger::Settled);
        }
    }

    /// Plans for all communicators together and begins what changes; none where nothing can be planned.
    pub(super) fn replan(&mut self, now: Duration, trigger: Trigger) -> Option<Decision> {
        if self.communicators.is_empty() {
            return None;
        }
        self.decisions.counts.plans += 1;
        let jobs = self.jobs(now);
        let mut plan = self.plan_in_scope(jobs.clone())?;
        let conditions = self.conditions();
        self.prefer_tasks(&conditions, &jobs, &mut plan.assignments);
        let number = self.decisions.next();
        let changes = self.reconcile(now, number, &jobs, &plan.assignments);
        let (before, after, reason) = (plan.before, plan.after, plan.reason);
        Some(Decision { number, at: now, trigger, before, after, reason, changes })
    }

    /// A plan in which no agent's lone word on a link moves a communicator that it has no part in: those are planned first, as if
    /// it had said nothing.
    fn plan_in_scope(&mut self, mut jobs: Vec<Job>) -> Option<Plan> {
        let alone = self.link_state.uncorroborated();
        let hosts: BTreeSet<HostId> = alone.values().copied().collect();
        let outside: Vec<bool> =
            jobs.iter().map(|job| !job.hosts.iter().any(|host| hosts.contains(host))).collect();
        let movable: Vec<bool> = jobs.iter().map(|job| job.movable).collect();
        let full = self.conditions();
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

    /// A plan that passed the check; none, and the operator is told, where it did not.
    pub(super) fn fit_plan(&mut self, jobs: &[Job], conditions: &Conditions) -> Option<Plan> {
        self.link_state.ports.refresh(self.settings.paths as usize);
        match self.checked(jobs, conditions) {
            Ok(plan) => Some(plan),
            Err(error) => {
                self.decisions.counts.unfit += 1;
                self.fact(Fact::PlanUnfit { count: self.decisions.counts.unfit, why: error.to_string() });
                None
            }
        }
    }

    /// A plan, without any effect.
    pub(super) fn checked(&self, jobs: &[Job], conditions: &Conditions) -> Result<Plan, CheckError> {
        let request = Request {
            topology: &self.settings.topology,
            conditions,
            jobs,
            routes: Routes::Listed(self.link_state.ports.paths()),
            policy: Policy::default(),
        };
        let plan = plan(&request);
        check(&request, &plan).map(|()| plan)
    }

    /// All communicators as the planner sees them.
    pub(super) fn jobs(&self, now: Duration) -> Vec<Job> {
        self.communicators.iter().map(|(id, known)| self.job(now, *id, known)).collect()
    }

    fn job(&self, now: Duration, id: u64, known: &Communicator) -> Job {
        let recent = known.changes.iter().filter(|at| **at + RECENT > now).count();
        let latest = known.latest();
        let current = Current {
            order: latest.map_or_else(Vec::new, |latest| latest.order.clone()),
            edges: latest.map_or_else(Vec::new, |latest| self.link_state.hops(known, latest)),
            recent_changes: recent as u32,
        };
        let running = known.phase() == v1::Phase::Running;
        let (operation, rhythm) =
            self.rhythms.get(&id).map_or((0, None), |known| (known.bytes(), known.pattern()));
        Job {
            communicator: id,
            hosts: known.members.iter().map(|member| member.host).collect(),
            connections: self.settings.paths,
            weight: self.agreements.quarters(id),
            guaranteed: self.agreements.promised(id),
            rate_limit: None,
            operation: Bytes(if operation == 0 { self.hints.dominant_bytes(id) } else { operation }),
            iteration_pattern: rhythm,
            current: Some(current),
            movable: running && !known.pinned && known.backoff_until.is_none() && recent < MOST_RECENT,
        }
    }

    /// A change was given up: the communicator is left alone for a while.
    pub(super) fn back_off(&mut self, now: Duration, id: u64) {
        if let Some(known) = self.communicators.get_mut(&id) {
            known.failures = known.failures.saturating_add(1);
            let pause = BACKOFF.0.saturating_mul(1 << (known.failures - 1).min(16)).min(BACKOFF.1);
            known.backoff_until = Some(now.saturating_add(pause));
        }
    }
}
