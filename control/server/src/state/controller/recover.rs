//! Communicators that outlived a session of an agent, or control. Agents name them in Hello, and control goes
//! on with them, or learns them again.

use super::Controller;
use crate::state::breach::Breach;
use crate::state::ctx::{Ctx, ctx};
use crate::state::job::codec::{CodecState, choice_of};
use crate::state::job::communicator::{Communicator, EndCause, Member, disowned, dissolved};
use crate::state::job::decisions::Trigger;
use crate::state::job::lifecycle::{Change, EpochConfig, Lifecycle};
use crate::state::job::reduction::AggregationChoice;
use crate::state::job::refusals::Refusals;
use crate::state::job::stored::{is_stored_as, take_up_plan};
use crate::state::output::SessionId;
use harmonaize_abi::session::MAX_NAME;
use harmonaize_abi::{CommunicatorId, Epoch};
use harmonaize_api::v1::{self, FailureKind, to_agent};
use harmonaize_plan::{AlgorithmRange, AlgorithmTable};
use harmonaize_planner::{
    AlgorithmChoice, AlgorithmReason, Bytes, CongestionChoices, HostId, Racks, RateLimits, Tuning,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// Epochs that an earlier control may have handed out beyond the one in use.
const UNSEEN_EPOCHS: u32 = 1;
/// Epochs that an agent may name: others can follow each.
const EPOCHS: std::ops::RangeInclusive<u32> = 1..=u32::MAX - UNSEEN_EPOCHS - 2;

impl Controller {
    /// Takes up what an agent says is running. An error is a breach of protocol.
    pub(crate) fn recover(
        &mut self,
        now: Duration,
        from: SessionId,
        host: HostId,
        hello: &v1::Hello,
    ) -> Result<(), Breach> {
        let mut named = BTreeSet::new();
        for recipe in hello.running.iter().chain(&hello.ended) {
            check(recipe)?;
            if !named.insert(CommunicatorId(recipe.communicator)) {
                return Err(Breach::NamedTwice);
            }
        }
        for recipe in &hello.running {
            self.recover_one(now, from, host, recipe)?;
        }
        for recipe in &hello.ended {
            self.recover_ended(now, from, host, recipe)?;
        }
        let unnamed = self.communicators.iter().filter(|(id, _)| !named.contains(id));
        let unnamed = unnamed.filter_map(|(id, known)| Some((*id, known.away_on(host)?.ranks.clone())));
        for (id, ranks) in unnamed.collect::<Vec<_>>() {
            self.came_without(now, id, host, ranks);
        }
        self.regroups.past.all_back(&self.hosts);
        Ok(())
    }

    /// Takes up what an agent reports of a communicator that has ended. It names the ranks whose processes
    /// are there still, which may go on as was agreed on.
    fn recover_ended(
        &mut self,
        now: Duration,
        from: SessionId,
        host: HostId,
        recipe: &v1::Recipe,
    ) -> Result<(), Breach> {
        let (id, me) = (CommunicatorId(recipe.communicator), recipe.me as usize);
        let part = recipe.participants.get(me).ok_or(Breach::NoParticipant)?;
        let name = self.settings.host_name(host);
        if part.host != name || recipe.local_ranks.iter().any(|local| !part.ranks.contains(&local.rank)) {
            return Err(Breach::EndedOfOthers);
        }
        let here = recipe.local_ranks.iter().map(|local| local.rank);
        if let Some(known) = self.communicators.get_mut(&id) {
            // Others have not heard of it.
            let member = known.members.get_mut(me).filter(|member| member.host == host);
            let member = member.filter(|member| member.session.is_none() && member.ranks == part.ranks);
            let member = member.ok_or(Breach::EndedOfOthers)?;
            let here: BTreeSet<u32> = here.collect();
            (member.session, member.lease) = (Some(from), None);
            member.departed = part.ranks.iter().copied().filter(|rank| !here.contains(rank)).collect();
            let detail = format!("the agent on `{name}` knows that it has ended");
            let cause = EndCause { kind: FailureKind::RanksLost, ranks: Vec::new(), detail };
            self.end(now, id, cause, Some(from));
            return Ok(());
        }
        if !self.regroups.past.is_past(id) && self.operator.ran(id, &recipe.tenant, &recipe.name, &name) {
            let ranks = recipe.participants.iter().map(|part| part.ranks.len()).sum();
            if let Some(agreement) = self.agreements.take_policy(id, ranks) {
                self.regroups.recover(&ctx!(self, now), &mut self.outbox, recipe, agreement);
            }
        }
        self.regroups.past.back(id, (host, from), here);
        Ok(())
    }

    /// A host's agent has come back without a communicator that it was waited for in. Its ranks are lost,
    /// unless all others have closed it.
    fn came_without(&mut self, now: Duration, id: CommunicatorId, host: HostId, ranks: Vec<u32>) {
        let Some(known) = self.communicators.get_mut(&id) else { return };
        if known.members.iter().all(|member| member.closed || member.host == host) {
            known.members.iter_mut().for_each(|member| member.closed = true);
            return self.close_if_over(now, id);
        }
        let detail = format!("the agent on `{}` came back without it", self.settings.host_name(host));
        self.end(now, id, EndCause { kind: FailureKind::RanksLost, ranks, detail }, None);
    }

    fn recover_one(
        &mut self,
        now: Duration,
        from: SessionId,
        host: HostId,
        recipe: &v1::Recipe,
    ) -> Result<(), Breach> {
        let (id, me) = (CommunicatorId(recipe.communicator), recipe.me as usize);
        let ours = id.0 >> 32 == u64::from(self.boot);
        let adopted = !self.communicators.contains_key(&id);
        let past = ours || self.regroups.past.is_past(id);
        if adopted && let Some(cause) = self.history.cause(host, recipe, past) {
            self.outbox.send(from, dissolved(id, &cause));
            let here = recipe.local_ranks.iter().map(|local| local.rank);
            self.regroups.past.back(id, (host, from), here);
            return Ok(());
        }
        let usable = self.settings.tenants.contains(&recipe.tenant);
        let until = now.saturating_add(self.settings.lease);
        let members: Option<Vec<Member>> =
            recipe.participants.iter().map(|part| absent(&ctx!(self, now), part, until)).collect();
        let Some(members) = members.filter(|_| usable) else {
            self.outbox.send(from, disowned(id));
            return Ok(());
        };
        if members.get(me).is_none_or(|member| member.host != host) {
            return Err(Breach::OtherInHello);
        }
        if adopted {
            let ctx = &ctx!(self, now);
            let others = || self.regroups.communicators_of(ctx, &self.joins, &recipe.tenant, &recipe.name);
            if now >= self.settings.lease || !is_credible(ctx, recipe, others) {
                self.outbox.send(from, disowned(id));
                return Ok(());
            }
            self.communicators.insert(id, adopt(recipe, members));
        } else if self.communicators.get(&id).is_none_or(|known| !is_same(known, recipe, &members)) {
            // Whoever told of it first may have lied; it costs nobody a session.
            self.outbox.send(from, disowned(id));
            return Ok(());
        }
        let Some(known) = self.communicators.get_mut(&id) else { return Ok(()) };
        if ours && epoch_of(recipe) >= known.next_epoch {
            return Err(Breach::NeverGiven);
        }
        let Some(member) = known.members.get_mut(me) else {
            return Err(Breach::NoParticipant);
        };
        if member.session.is_some() {
            return Err(Breach::OtherInHello);
        }
        (member.session, member.lease) = (Some(from), None);
        member.requests = recipe.local_ranks.iter().map(|local| (local.rank, local.request)).collect();
        member.links = recipe.links.unwrap_or(member.links);
        if self.run_by(now, id, me, recipe) || adopted {
            self.take_up(now, id);
        }
        self.came_back(now, id, from, !recipe.previous_ranks.is_empty());
        Ok(())
    }

    /// Takes in by which epoch an agent that has come back runs a communicator. Whether that is one that
    /// control takes up from the agent.
    fn run_by(&mut self, now: Duration, id: CommunicatorId, me: usize, recipe: &v1::Recipe) -> bool {
        let Some(known) = self.communicators.get(&id) else { return false };
        let (epoch, pending) = (epoch_of(recipe), known.pending_epoch());
        if epoch <= known.epoch() {
            return false;
        }
        if epoch == pending {
            self.switched(now, id, me, epoch);
            return false;
        }
        if known.change().is_some_and(Change::in_use) {
            return false;
        }
        if known.change().is_some() {
            self.give_up(now, id, pending, "an agent runs by another epoch");
        }
        let Some(known) = self.communicators.get_mut(&id) else { return false };
        let Some(current) = known.lifecycle.current_mut() else { return false };
        let config = EpochConfig {
            ports: std::mem::take(&mut current.ports),
            links: std::mem::take(&mut current.links),
            plan: current.plan.take(),
            rate_limits: current.rate_limits,
            ..config(recipe)
        };
        known.coding.agree(config.codec.budget.clone());
        known.next_epoch = known.next_epoch.max(unseen_epoch(recipe));
        let before = std::mem::replace(current, config);
        self.aggregators.end(now, &before.aggregation);
        true
    }

    /// Gives a communicator back what is known of it from before: its plan, its grant, its agreement.
    fn take_up(&mut self, now: Duration, id: CommunicatorId) {
        let Some(known) = self.communicators.get_mut(&id) else { return };
        let grant = known.current().and_then(|current| current.aggregation.grant);
        if let Some(plan) = self.operator.stored_plan(id) {
            let held = take_up_plan(&self.settings.topology, now, plan, known);
            if let Some(current) = known.lifecycle.current_mut() {
                self.link_state.ports.release(&mut current.ports);
                current.ports = self.link_state.ports.retake(held);
            }
        }
        known.learn_usage(&self.settings.topology);
        let ctx = &ctx!(self, now);
        self.aggregators.recover(ctx, id, grant);
        self.agreements.take_up(ctx, &mut self.outbox, id);
    }

    /// An agent is back in a communicator: with all of them there it can change again. Agents that may have
    /// missed it learn that the epoch may be used.
    fn came_back(&mut self, now: Duration, id: CommunicatorId, from: SessionId, went_on: bool) {
        let Some(known) = self.communicators.get_mut(&id) else { return };
        let ready = v1::Ready { communicator: id.0, epoch: known.epoch().into() };
        let ready = to_agent::Message::Ready(ready);
        let all = known.lease().is_none();
        let restarted = known.restarted;
        if !restarted {
            self.outbox.send(from, ready.clone());
            if let Some(next) = known.change().filter(|change| change.in_use()) {
                let ready = v1::Ready { communicator: id.0, epoch: next.to.epoch.into() };
                self.outbox.send(from, to_agent::Message::Ready(ready));
            }
        }
        if !all {
            return;
        }
        known.restarted = false;
        if restarted {
            let (tenant, name) = (known.tenant.clone(), known.name.clone());
            // Of one that is kept for its members still, it takes the place: control went down as it did so.
            let kept = self.regroups.past.retained_predecessor(&tenant, &name, id).filter(|_| went_on);
            if let Some(before) = kept {
                if self.agreements.constraints(id).is_none() {
                    self.take_over_agreement(now, before, id);
                }
                self.regroups.past.succeeded(before, &(tenant.clone(), name.clone()));
            }
            self.regroups.past.overtaken(&tenant, &name, id);
        }
        self.link_state.active_changed();
        self.link_state.trace_communicator(&ctx!(self, now), &mut self.outbox, id);
        self.outbox.want_plan(Trigger::Settled);
        if let Some(known) = self.communicators.get(&id).filter(|_| restarted) {
            self.outbox.send_to_members(known, &ready);
        }
    }
}

/// Whether a communicator of an earlier start may be what an agent says. It is what was stored, or its tenant could
/// have it now where nothing was, beside its others. What was stored goes on where its tenant may be no longer, as
/// it does where the file changes while control runs. Names may have characters that are not seen: agents of release
/// 0.2.0 let communicators have them.
fn is_credible(ctx: &Ctx<'_>, recipe: &v1::Recipe, others: impl FnOnce() -> usize) -> bool {
    if let Some(plan) = ctx.operator.stored_plan(CommunicatorId(recipe.communicator)) {
        return is_stored_as(plan, recipe);
    }
    let ranks: usize = recipe.participants.iter().map(|part| part.ranks.len()).sum();
    let elsewhere = |part: &v1::Participant| ctx.is_elsewhere(&recipe.tenant, &part.host);
    let named = (1..=MAX_NAME).contains(&recipe.name.len()) && !recipe.name.contains(char::is_control);
    ranks <= ctx.settings.most_ranks as usize
        && !recipe.participants.iter().any(elsewhere)
        && ctx.settings.tenants.contains(&recipe.tenant)
        && named
        && others() < ctx.settings.most_communicators
}

/// Returns a participant whose agent may come back until then.
fn absent(ctx: &Ctx<'_>, participant: &v1::Participant, until: Duration) -> Option<Member> {
    let host = ctx.settings.topology.host(&participant.host)?;
    let (ranks, requests, departed) = (participant.ranks.clone(), Vec::new(), BTreeSet::new());
    let (lease, links) = (Some(until), v1::LinkUsage::default());
    Some(Member { host, session: None, lease, ranks, requests, departed, closed: false, links })
}

/// Whether what an agent says is running is what is known by this number.
fn is_same(known: &Communicator, recipe: &v1::Recipe, members: &[Member]) -> bool {
    let part = |member: &Member| (member.host, member.ranks.clone());
    known.tenant == recipe.tenant
        && known.name == recipe.name
        && known.members.iter().map(part).eq(members.iter().map(part))
}

/// How operations go, as an agent's recipe says it.
fn algorithm(recipe: &v1::Recipe) -> AlgorithmChoice {
    let ranges = recipe.tuning.iter().flat_map(|tuning| &tuning.algorithms).filter_map(|range| {
        let (collective, algorithm) = (range.collective.parse().ok()?, range.algorithm.parse().ok()?);
        Some(AlgorithmRange { collective, up_to: range.up_to_bytes, algorithm })
    });
    let table = AlgorithmTable::new(ranges).unwrap_or_default();
    let racks = Racks { sizes: recipe.racks.clone(), from: recipe.racks_from };
    AlgorithmChoice { table, racks, ..AlgorithmChoice::ring(AlgorithmReason::Recovered) }
}

/// Participants whose links go over TCP alone, as an agent's recipe says it.
fn over_tcp(recipe: &v1::Recipe) -> BTreeSet<u32> {
    let there = |participant: &u32| (*participant as usize) < recipe.participants.len();
    recipe.over_tcp.iter().copied().filter(there).collect()
}

/// What a communicator runs by, as far as an agent's recipe says it.
fn config(recipe: &v1::Recipe) -> EpochConfig {
    EpochConfig {
        epoch: epoch_of(recipe),
        order: recipe.order.clone(),
        ports: Vec::new(),
        links: BTreeMap::new(),
        over_tcp: over_tcp(recipe),
        plan: None,
        rate_limits: RateLimits::default(),
        congestion: CongestionChoices::default(),
        codec: choice_of(recipe),
        algorithm: algorithm(recipe),
        aggregation: AggregationChoice::from_recipe(recipe),
    }
}

/// Returns the epoch of a recipe; 0 where there is none such.
fn epoch_of(recipe: &v1::Recipe) -> Epoch {
    Epoch::from_wire(recipe.epoch).unwrap_or_default()
}

/// Returns the first epoch that an earlier control cannot have handed out.
fn unseen_epoch(recipe: &v1::Recipe) -> Epoch {
    Epoch(epoch_of(recipe).0.saturating_add(UNSEEN_EPOCHS + 1))
}

fn adopt(recipe: &v1::Recipe, members: Vec<Member>) -> Communicator {
    let sizes = recipe.tuning.clone().unwrap_or_default();
    let tuning = Tuning {
        channels: sizes.channels,
        chunk: Bytes(sizes.chunk_bytes),
        segment: Bytes(sizes.segment_bytes),
        copy_threshold: Bytes(sizes.copy_bytes),
        landing_slots: sizes.landing_slots,
    };
    let config = config(recipe);
    let budget = config.codec.budget.clone();
    Communicator {
        tenant: recipe.tenant.clone(),
        name: recipe.name.clone(),
        ranks: members.iter().map(|member| member.ranks.len() as u32).sum(),
        members,
        tuning,
        lifecycle: Lifecycle::Running(Box::new(config)),
        next_epoch: unseen_epoch(recipe),
        last_change: String::new(),
        pinned: false,
        changes: VecDeque::new(),
        backoff_until: None,
        failures: 0,
        coding: CodecState::new(budget),
        refused: Refusals::default(),
        before: Vec::new(),
        succeeds: None,
        restarted: true,
    }
}

/// Whether a recipe hangs together: each rank once, each host once, an order of all participants.
fn check(recipe: &v1::Recipe) -> Result<(), Breach> {
    let count = recipe.participants.len();
    let mut order = recipe.order.clone();
    order.sort_unstable();
    if !EPOCHS.contains(&epoch_of(recipe).0)
        || count == 0
        || recipe.me as usize >= count
        || !order.into_iter().eq(0..count as u32)
    {
        return Err(Breach::Senseless);
    }
    let hosts: BTreeSet<&str> = recipe.participants.iter().map(|part| part.host.as_str()).collect();
    let mut ranks: Vec<u32> =
        recipe.participants.iter().flat_map(|part| part.ranks.iter().copied()).collect();
    ranks.sort_unstable();
    let empty = recipe.participants.iter().any(|part| part.ranks.is_empty());
    if hosts.len() != count || empty || !ranks.iter().copied().eq(0..ranks.len() as u32) {
        return Err(Breach::SenselessParticipants);
    }
    Ok(())
}
