//! A new plan for all communicators together, whenever something moved that may make a better one worth its change.
//!
//! What moves something only says so ([`State::want_plan`]); the message or call that brought it ends with [`State::act`], which
//! plans at once, or, within a moment of the last plan, when that is over.

use super::communicator::Communicator;
use super::decisions::{Changed, Decision, Outcome, Trigger};
use super::form::Proposal;
use super::ports::Pair;
use super::trace::pair_of;
use super::verdicts::nanos;
use super::{Fact, State};
use harmonaize_api::v1;
use harmonaize_planner::{
    Assignment, Bytes, CheckError, Conditions, Connection, Current, GIVES_WAY, Hop, HostId, Job, Nanos, Path,
    Plan, Policy, Rate, Request, Routes, Use, check, plan,
};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Least time between two plans, and what each participant adds to it: planning for very many takes longer.
const SPACING: (Duration, Duration) = (Duration::from_millis(1), Duration::from_micros(10));

/// For how long a change of plan makes the next one dearer, and how many control makes of one communicator in that time. What
/// passes nothing, or was withdrawn, is left however often that happens.
const RECENT: Duration = Duration::from_secs(30);
pub(super) const MOST_RECENT: usize = 8;

/// How long it holds which connections carry traffic, if no epoch and no path has changed.
const ACTIVE: Duration = Duration::from_millis(100);

/// How long after that it is looked at again while some link is thought to be congested: whether jobs have gone quiet.
const ACTIVE_AGAIN: Duration = Duration::from_millis(500);

/// First and last pause after a change that was given up.
const HELD_OFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// What makes control plan anew.
#[derive(Debug, Default)]
pub(super) struct Wanted {
    /// The first thing that moved since the last plan.
    trigger: Option<Trigger>,
    /// Not sooner than this.
    not_before: Duration,
    /// The least time until the next one, where a plan was made of which it is not known when it was over.
    made: Option<Duration>,
    /// When the estimates were told last which connections carry traffic; none where that has changed since.
    active_at: Option<Duration>,
}

/// Why a communicator runs by what it does.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Planned {
    /// What each host sends to the next, as planned.
    pub share: Rate,
    /// What links are held to.
    pub pace: Option<Rate>,
    /// Predicted time of a typical operation.
    pub time: Nanos,
    /// That time relative to the communicator alone on an idle fabric.
    pub slowdown: f64,
    /// In words.
    pub reason: String,
}

impl From<&Assignment> for Planned {
    fn from(assignment: &Assignment) -> Self {
        let Assignment { share, pace, time, slowdown, reason, .. } = assignment;
        Self { share: *share, pace: *pace, time: *time, slowdown: *slowdown, reason: reason.clone() }
    }
}

impl State {
    /// Something moved: a plan is made before this message or call is over, or as soon as may be.
    pub(super) fn want_plan(&mut self, trigger: Trigger) {
        self.wanted.trigger.get_or_insert(trigger);
    }

    /// Epochs or paths have changed: other connections carry traffic.
    pub(super) fn active_changed(&mut self) {
        self.wanted.active_at = None;
    }

    /// When a plan is due that had to wait.
    pub(super) fn plan_deadline(&self) -> Option<Duration> {
        let waits =
            self.wanted.trigger.as_ref().filter(|_| self.settings.replan).map(|_| self.wanted.not_before);
        let estimates = self.estimates.next_due().map(|at| Duration::from_nanos(at.0));
        let held = self.communicators.values().filter_map(|known| known.held_off);
        let active = self.wanted.active_at.map_or(Duration::ZERO, |at| at.saturating_add(ACTIVE_AGAIN));
        let active = self.estimates.links().next().map(|_| active);
        let coding = self.coding_deadline();
        waits.into_iter().chain(coding).chain(estimates).chain(held).chain(active).min()
    }

    /// Lets estimates fade, has links probed, and lets communicators be changed again.
    pub(super) fn expire_plans(&mut self, now: Duration) {
        if self.estimates.settle(&self.settings.topology, nanos(now)) {
            self.want_plan(Trigger::Faded);
        }
        self.ask_probes(now);
        self.expire_codings(now);
        let mut settled = false;
        for known in self.communicators.values_mut() {
            settled |= known.held_off.take_if(|until| *until <= now).is_some();
        }
        if settled {
            self.want_plan(Trigger::Settled);
        }
    }

    /// Forms who regrouped, and plans, if something moved and the last plan is long enough ago.
    pub(super) fn act(&mut self, now: Duration) {
        self.close_regroups(now);
        if !self.settings.replan {
            self.wanted.trigger = None;
            self.recode_agreed(now);
            self.resum(now, None, &mut Vec::new());
        }
        if self.wanted.trigger.is_none() || now < self.wanted.not_before {
            return;
        }
        let Some(trigger) = self.wanted.trigger.take() else { return };
        let members: usize = self.communicators.values().map(|known| known.members.len()).sum();
        let members = u32::try_from(members).unwrap_or(u32::MAX);
        let spacing = SPACING.0 + SPACING.1.saturating_mul(members);
        self.wanted.not_before = now.saturating_add(spacing);
        self.wanted.made = Some(spacing);
        self.replan(now, trigger);
    }

    /// The call or message before this one is over, by the clock: what it took to plan is no pause between two plans.
    pub fn finished(&mut self, now: Duration) {
        if let Some(spacing) = self.wanted.made.take() {
            self.wanted.not_before = now.saturating_add(spacing);
        }
    }

    fn replan(&mut self, now: Duration, trigger: Trigger) {
        if self.communicators.is_empty() {
            return;
        }
        self.decisions.counts.plans += 1;
        let jobs = self.jobs(now);
        let Some(mut plan) = self.plan_in_scope(jobs.clone()) else { return };
        let conditions = self.estimates.conditions(&self.settings.topology, self.withdrawn());
        self.prefer_tasks(&conditions, &jobs, &mut plan.assignments);
        let number = self.decisions.next();
        let mut changes = Vec::new();
        for (job, assignment) in jobs.iter().zip(&plan.assignments) {
            let id = assignment.communicator;
            if !assignment.changed || !job.movable {
                if let Some(known) = self.communicators.get_mut(&id).filter(|known| known.pending.is_none()) {
                    known.plan = Some(Planned::from(assignment));
                }
                continue;
            }
            let proposal = Proposal {
                order: assignment.order.clone(),
                hops: assignment.hops.clone(),
                plan: Some(Planned::from(assignment)),
                decision: Some(number),
                same_links: false,
            };
            let epoch = self.propose(now, id, proposal);
            changes.push(changed(id, epoch, &assignment.reason, now));
        }
        self.note_rates(now);
        self.leave_forbidden(now, number, &mut changes);
        self.recode(now, number, &mut changes);
        self.resum(now, Some(number), &mut changes);
        self.aggregate(now, number, &mut changes);
        self.repace(now, number, &mut changes);
        if changes.is_empty() {
            return;
        }
        let (before, after, reason) = (plan.before, plan.after, plan.reason);
        self.decided(Decision { number, at: now, trigger, before, after, reason, changes });
    }

    /// Has communicators whose links shall be held to another rate go on by an epoch that differs in that alone.
    fn repace(&mut self, now: Duration, number: u64, changes: &mut Vec<Changed>) {
        let wanted = self.held();
        let can = |known: &Communicator| known.phase() == v1::Phase::Running && known.held_off.is_none();
        let other =
            |id: &u64, known: &Communicator| wanted.get(id).is_some_and(|wanted| known.held.is_other(wanted));
        let due = self.communicators.iter().filter(|(id, known)| can(known) && other(id, known));
        for id in due.map(|(id, _)| *id).collect::<Vec<_>>() {
            let Some(known) = self.communicators.get(&id) else { continue };
            let reason = match known.plan.as_ref().and_then(|plan| Some((plan.pace?, &plan.reason))) {
                Some((pace, why)) if why.ends_with(GIVES_WAY) => format!("held to {pace}: it {GIVES_WAY}"),
                Some((pace, _)) => format!("held to {pace}, so that others have what they are promised"),
                None => match wanted.get(&id).and_then(|held| held.others) {
                    Some(rate) => {
                        format!("exchanges held to {rate} a host, so that others have what they are promised")
                    }
                    None => "held to no rate any more".to_owned(),
                },
            };
            let epoch = self.propose_same(now, id, Some(number));
            changes.push(changed(id, epoch, &reason, now));
        }
    }

    /// A plan in which no agent's lone word on a link moves a communicator that it has no part in: those are planned first, as if
    /// it had said nothing.
    fn plan_in_scope(&mut self, mut jobs: Vec<Job>) -> Option<Plan> {
        let alone = self.uncorroborated();
        let hosts: BTreeSet<HostId> = alone.values().copied().collect();
        let outside: Vec<bool> =
            jobs.iter().map(|job| !job.hosts.iter().any(|host| hosts.contains(host))).collect();
        let movable: Vec<bool> = jobs.iter().map(|job| job.movable).collect();
        let full = self.estimates.conditions(&self.settings.topology, self.withdrawn());
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
                    current.hops.clone_from(&assignment.hops);
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
        self.ports.refresh(self.settings.paths as usize);
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
            routes: Routes::Known(self.ports.known()),
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
        let (order, links) = match &known.pending {
            Some(pending) => (&pending.order, &pending.links),
            None => (&known.order, &known.links),
        };
        let current = Current {
            order: order.clone(),
            hops: self.hops(known, order, links),
            recent_changes: recent as u32,
        };
        let running = known.phase() == v1::Phase::Running;
        let (operation, rhythm) =
            self.rhythms.get(&id).map_or((0, None), |known| (known.bytes(), known.rhythm()));
        Job {
            communicator: id,
            hosts: known.members.iter().map(|member| member.host).collect(),
            connections: self.settings.paths,
            weight: self.agreements.quarters(id),
            promised: self.agreements.promised(id),
            limit: None,
            operation: Bytes(if operation == 0 { self.hints.bulk(id) } else { operation }),
            rhythm,
            current: Some(current),
            movable: running && !known.pinned && known.held_off.is_none() && recent < MOST_RECENT,
        }
    }

    /// The hops of an order by the links that are there.
    pub(super) fn hops(
        &self,
        known: &Communicator,
        order: &[u32],
        links: &BTreeMap<(u32, u32), Vec<u16>>,
    ) -> Vec<Hop> {
        if order.len() < 2 {
            return Vec::new();
        }
        let host = |index: u32| known.members.get(index as usize).map(|member| member.host);
        let hop = |(from, to): (&u32, &u32)| {
            let ports = links.get(&(*from.min(to), *from.max(to))).map_or(&[][..], Vec::as_slice);
            let ends = host(*from).zip(host(*to));
            let path = |port: &u16| ends.and_then(|(from, to)| self.path_of(from, to, *port)).cloned();
            let paths: Option<Vec<Path>> = ports.iter().map(path).collect();
            Hop { paths: paths.unwrap_or_default() }
        };
        order.iter().zip(order.iter().cycle().skip(1)).map(hop).collect()
    }

    /// Which way a connection's packets go from one host to another, by the port of the end that connected; none where that
    /// is not known.
    pub(super) fn path_of(&self, from: HostId, to: HostId, port: u16) -> Option<&Path> {
        let pair: Pair = pair_of(from, to);
        self.ports.traced(pair, port)?.leg(from != pair.0)
    }

    /// Tells the estimates which connections carry traffic now: those of rings that run, and whose agents would tell if they
    /// were held up.
    pub(super) fn measure_active(&mut self, now: Duration) {
        if self.wanted.active_at.is_some_and(|at| at + ACTIVE > now) {
            return;
        }
        self.wanted.active_at = Some(now);
        let mut active = Vec::new();
        for (id, known) in &self.communicators {
            if !matches!(known.phase(), v1::Phase::Running | v1::Phase::Changing)
                || !self.seems_busy(now, *id)
            {
                continue;
            }
            let hops =
                known.order.iter().zip(known.order.iter().cycle().skip(1)).filter(|_| known.order.len() > 1);
            for (from, to) in hops {
                let member = |index: u32| known.members.get(index as usize);
                let Some((sender, receiver)) = member(*from).zip(member(*to)) else { continue };
                let session = sender.session.and_then(|session| self.sessions.get(&session));
                if !session.is_some_and(|session| session.abilities.verdicts) {
                    continue;
                }
                for port in known.links.get(&(*from.min(to), *from.max(to))).into_iter().flatten() {
                    let Some(path) = self.path_of(sender.host, receiver.host, *port) else { continue };
                    let (from, to, port) = (sender.host, receiver.host, *port);
                    let connection = Connection { communicator: *id, from, to, port };
                    active.push((connection, path.clone(), Rate(0)));
                }
            }
        }
        // Whether it moved something is told by whatever made it be looked at.
        self.estimates.active(&self.settings.topology, nanos(now), active);
    }

    /// Communicators that planning leaves where they are, because an operator chose their order or because they changed too often,
    /// keep their order and get connections that avoid what passes nothing or was withdrawn.
    fn leave_forbidden(&mut self, now: Duration, number: u64, changes: &mut Vec<Changed>) {
        let withdrawn = self.withdrawn();
        if withdrawn.switches.is_empty() && withdrawn.links.is_empty() && !self.any_failed() {
            return;
        }
        let conditions = self.estimates.conditions(&self.settings.topology, self.withdrawn());
        let least = self.settings.paths as usize;
        let mut leaving = Vec::new();
        for (id, known) in &self.communicators {
            if known.phase() != v1::Phase::Running || known.held_off.is_some() {
                continue;
            }
            let crosses = known.links.iter().find(|(ends, ports)| {
                self.is_forbidden(&conditions, known, **ends, ports)
                    && self.has_open(&conditions, known, **ends, least)
            });
            if crosses.is_some() {
                let mut hops = self.hops(known, &known.order, &known.links);
                for hop in &mut hops {
                    hop.paths.retain(|path| conditions.path(path) == Use::Open);
                }
                leaving.push((
                    *id,
                    Proposal {
                        order: known.order.clone(),
                        hops,
                        decision: Some(number),
                        ..Proposal::default()
                    },
                ));
            }
        }
        for (id, proposal) in leaving {
            let reason = "its connections leave what passes nothing or is withdrawn; its order stays";
            let epoch = self.propose(now, id, proposal);
            changes.push(changed(id, epoch, reason, now));
        }
    }

    /// Whether a connection of a link crosses what is not open, either way.
    fn is_forbidden(
        &self,
        conditions: &Conditions,
        known: &Communicator,
        (low, high): (u32, u32),
        ports: &[u16],
    ) -> bool {
        let host = |index: u32| known.members.get(index as usize).map(|member| member.host);
        let Some((low, high)) = host(low).zip(host(high)) else { return false };
        let closed = |path: Option<&Path>| path.is_some_and(|path| conditions.path(path) != Use::Open);
        ports
            .iter()
            .any(|port| closed(self.path_of(low, high, *port)) || closed(self.path_of(high, low, *port)))
    }

    /// Whether a pair of participants has enough ports that lead over open links alone.
    fn has_open(
        &self,
        conditions: &Conditions,
        known: &Communicator,
        (low, high): (u32, u32),
        least: usize,
    ) -> bool {
        let host = |index: u32| known.members.get(index as usize).map(|member| member.host);
        let Some((low, high)) = host(low).zip(host(high)) else { return false };
        let open = |path: &Option<Path>| path.as_ref().is_some_and(|path| conditions.path(path) == Use::Open);
        let pair = pair_of(low, high);
        let pool = self.ports.pool_of(pair).filter(|(number, _)| !self.ports.in_use(pair, *number));
        pool.filter(|(_, port)| open(&port.there) && open(&port.back)).count() >= least
    }

    /// A change was given up: the communicator is left alone for a while.
    pub(super) fn hold_off(&mut self, now: Duration, id: u64) {
        if let Some(known) = self.communicators.get_mut(&id) {
            known.failures = known.failures.saturating_add(1);
            let pause = HELD_OFF.0.saturating_mul(1 << (known.failures - 1).min(16)).min(HELD_OFF.1);
            known.held_off = Some(now.saturating_add(pause));
        }
    }
}

pub(super) fn changed(communicator: u64, epoch: u64, reason: &str, now: Duration) -> Changed {
    Changed {
        communicator,
        epoch,
        reason: reason.to_owned(),
        sent: now,
        prepared: None,
        first_switched: None,
        switched: None,
        outcome: Outcome::UnderWay,
    }
}
