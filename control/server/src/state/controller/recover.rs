//! Communicators that outlived a restart of control: agents name them in Hello, and control learns them
//! again.

use super::Controller;
use crate::state::ctx::{Ctx, ctx};
use crate::state::job::codec::{CodecState, choice_of};
use crate::state::job::communicator::{Communicator, EndCause, Member, disowned, dissolved};
use crate::state::job::lifecycle::{EpochConfig, Lifecycle};
use crate::state::job::reduction::AggregationChoice;
use crate::state::job::refusals::Refusals;
use crate::state::job::stored::{is_stored_as, take_up_plan};
use crate::state::output::SessionId;
use harmonaize_abi::{CommunicatorId, Epoch};
use harmonaize_api::v1::{self, FailureKind, to_agent};
use harmonaize_planner::{AlgorithmChoice, Bytes, DirectThresholds, HostId, RateLimits, Tuning};
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
    ) -> Result<(), &'static str> {
        let mut named = BTreeSet::new();
        for recipe in hello.running.iter().chain(&hello.ended) {
            check(recipe)?;
            if !named.insert(CommunicatorId(recipe.communicator)) {
                return Err("a communicator that is named twice in Hello");
            }
        }
        for recipe in &hello.running {
            self.recover_one(now, from, host, recipe)?;
        }
        for recipe in &hello.ended {
            self.recover_ended(now, from, host, recipe)?;
        }
        let lost: Vec<(CommunicatorId, Vec<u32>)> = self
            .communicators
            .iter()
            .filter(|(id, known)| known.lifecycle.recovering_until().is_some() && !named.contains(id))
            .filter_map(|(id, known)| {
                let member =
                    known.members.iter().find(|member| member.host == host && member.session.is_none())?;
                Some((*id, member.ranks.clone()))
            })
            .collect();
        for (id, ranks) in lost {
            let detail = format!("the agent on `{}` came back without it", self.settings.host_name(host));
            self.end(now, id, EndCause { kind: FailureKind::RanksLost, ranks, detail }, None);
        }
        self.regroups.past.all_back(&self.hosts);
        Ok(())
    }

    /// Takes up what an agent says of a communicator that has ended: whose processes are there still, which
    /// may go on as was agreed on.
    fn recover_ended(
        &mut self,
        now: Duration,
        from: SessionId,
        host: HostId,
        recipe: &v1::Recipe,
    ) -> Result<(), &'static str> {
        let (id, me) = (CommunicatorId(recipe.communicator), recipe.me as usize);
        let part = recipe.participants.get(me).ok_or("a participant that is not there")?;
        let name = self.settings.host_name(host);
        if part.host != name || recipe.local_ranks.iter().any(|local| !part.ranks.contains(&local.rank)) {
            return Err("an ended communicator of others in Hello");
        }
        let here = recipe.local_ranks.iter().map(|local| local.rank);
        if let Some(known) = self.communicators.get_mut(&id) {
            // Others have not heard of it.
            let member = known.members.get_mut(me).filter(|member| member.host == host);
            let member = member.filter(|member| member.session.is_none() && member.ranks == part.ranks);
            let member = member.ok_or("an ended communicator of others in Hello")?;
            let here: BTreeSet<u32> = here.collect();
            member.session = Some(from);
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

    fn recover_one(
        &mut self,
        now: Duration,
        from: SessionId,
        host: HostId,
        recipe: &v1::Recipe,
    ) -> Result<(), &'static str> {
        let (id, me) = (CommunicatorId(recipe.communicator), recipe.me as usize);
        let ours = id.0 >> 32 == u64::from(self.boot);
        let ended = self.history.contains(id);
        let usable = self.settings.tenants.contains(&recipe.tenant);
        if !ours && self.regroups.past.is_past(id) {
            // It has ended, and control went down before the agent heard that.
            let (kind, ranks) = (FailureKind::RanksLost, Vec::new());
            let detail = "it ended before control started".to_owned();
            self.outbox.send(from, dissolved(id, &EndCause { kind, ranks, detail }));
            self.regroups.past.back(id, (host, from), recipe.local_ranks.iter().map(|local| local.rank));
            return Ok(());
        }
        let members: Option<Vec<Member>> =
            recipe.participants.iter().map(|part| absent(&ctx!(self, now), part)).collect();
        let Some(members) = members.filter(|_| usable && !ended) else {
            self.outbox.send(from, disowned(id));
            return Ok(());
        };
        let Some(own) = members.get(me).filter(|member| member.host == host) else {
            return Err("a communicator of others in Hello");
        };
        let adopted = !self.communicators.contains_key(&id);
        if adopted {
            if ours {
                let ranks = own.ranks.clone();
                let detail = "it ended while the agent had no session".to_owned();
                self.outbox
                    .send(from, dissolved(id, &EndCause { kind: FailureKind::RanksLost, ranks, detail }));
                return Ok(());
            }
            if now >= self.settings.recovery_timeout || !self.is_credible(now, recipe) {
                self.outbox.send(from, disowned(id));
                return Ok(());
            }
            let until = now.saturating_add(self.settings.recovery_timeout);
            self.communicators.insert(id, adopt(recipe, members, until));
        } else if self.communicators.get(&id).is_none_or(|known| !is_same(known, recipe, &members)) {
            // Whoever told of it first may have lied; it costs nobody a session.
            self.outbox.send(from, disowned(id));
            return Ok(());
        }
        let Some(communicator) = self.communicators.get_mut(&id) else { return Ok(()) };
        let all_back = {
            let Some(member) = communicator.members.get_mut(me) else {
                return Err("a participant that is not there");
            };
            if member.session.is_some() {
                return Err("a communicator of others in Hello");
            }
            member.session = Some(from);
            member.requests = recipe.local_ranks.iter().map(|local| (local.rank, local.request)).collect();
            communicator.members.iter().all(|member| member.session.is_some())
        };
        let newer = epoch_of(recipe) > communicator.epoch();
        if newer && let Some(current) = communicator.lifecycle.current_mut() {
            let config = EpochConfig {
                ports: std::mem::take(&mut current.ports),
                links: std::mem::take(&mut current.links),
                plan: current.plan.take(),
                rate_limits: current.rate_limits,
                ..config(recipe)
            };
            communicator.coding.agree(config.codec.budget.clone());
            communicator.next_epoch = unseen_epoch(recipe);
            let before = std::mem::replace(current, config);
            self.aggregators.end(now, &before.aggregation);
        }
        let went_on = !recipe.previous_ranks.is_empty();
        self.take_up(now, id, adopted || newer, all_back.then_some(went_on));
        Ok(())
    }

    /// Gives a communicator back what is known of it from before; its plan where that is `new`. With all
    /// agents `back` it runs.
    fn take_up(&mut self, now: Duration, id: CommunicatorId, new: bool, back: Option<bool>) {
        let Some(known) = self.communicators.get_mut(&id) else { return };
        let grant = known.current().and_then(|current| current.aggregation.grant);
        if let Some(plan) = self.operator.stored_plan(id).filter(|_| new) {
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
        let Some(went_on) = back else { return };
        let Some(known) = self.communicators.get_mut(&id) else { return };
        known.lifecycle.recovered();
        let epoch = known.epoch();
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
        self.link_state.active_changed();
        self.link_state.trace_communicator(&ctx!(self, now), &mut self.outbox, id);
        // Whoever missed it when control went down learns that the epoch may be used.
        if let Some(known) = self.communicators.get(&id) {
            let ready = v1::Ready { communicator: id.0, epoch: epoch.into() };
            self.outbox.send_to_members(known, &to_agent::Message::Ready(ready));
        }
    }

    /// Whether a communicator of an earlier start may be what an agent says: it is what was stored, or its
    /// tenant could have it now where nothing was.
    fn is_credible(&self, now: Duration, recipe: &v1::Recipe) -> bool {
        if let Some(plan) = self.operator.stored_plan(CommunicatorId(recipe.communicator)) {
            return is_stored_as(plan, recipe);
        }
        let ctx = ctx!(self, now);
        let ranks: usize = recipe.participants.iter().map(|part| part.ranks.len()).sum();
        ranks <= self.settings.most_ranks as usize
            && ctx.check_names(&recipe.tenant, &recipe.name).is_ok()
            && self.regroups.communicators_of(&ctx, &self.joins, &recipe.tenant, &recipe.name)
                < self.settings.most_communicators
    }
}

/// Returns a participant whose agent is not back.
fn absent(ctx: &Ctx<'_>, participant: &v1::Participant) -> Option<Member> {
    let host = ctx.settings.topology.host(&participant.host)?;
    let (ranks, requests, left) = (participant.ranks.clone(), Vec::new(), BTreeSet::new());
    Some(Member { host, session: None, ranks, requests, departed: left, closed: false })
}

/// Whether what an agent says is running is what is known by this number.
fn is_same(known: &Communicator, recipe: &v1::Recipe, members: &[Member]) -> bool {
    let part = |member: &Member| (member.host, member.ranks.clone());
    known.tenant == recipe.tenant
        && known.name == recipe.name
        && known.members.iter().map(part).eq(members.iter().map(part))
}

/// How small operations go, as an agent's recipe says it.
fn algorithm(recipe: &v1::Recipe) -> AlgorithmChoice {
    let sizes = recipe.tuning.unwrap_or_default();
    let sizes =
        DirectThresholds { one_shot: Bytes(sizes.one_shot_bytes), two_shot: Bytes(sizes.two_shot_bytes) };
    AlgorithmChoice { sizes, reason: "as before control restarted".to_owned() }
}

/// What a communicator runs by, as far as an agent's recipe says it.
fn config(recipe: &v1::Recipe) -> EpochConfig {
    EpochConfig {
        epoch: epoch_of(recipe),
        order: recipe.order.clone(),
        ports: Vec::new(),
        links: BTreeMap::new(),
        plan: None,
        rate_limits: RateLimits::default(),
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

fn adopt(recipe: &v1::Recipe, members: Vec<Member>, until: Duration) -> Communicator {
    let sizes = recipe.tuning.unwrap_or_default();
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
        lifecycle: Lifecycle::Recovering { current: Box::new(config), until },
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
    }
}

/// Whether a recipe hangs together: each rank once, each host once, an order of all participants.
fn check(recipe: &v1::Recipe) -> Result<(), &'static str> {
    let count = recipe.participants.len();
    let mut order = recipe.order.clone();
    order.sort_unstable();
    if !EPOCHS.contains(&epoch_of(recipe).0)
        || count == 0
        || recipe.me as usize >= count
        || !order.into_iter().eq(0..count as u32)
    {
        return Err("a running communicator without sense in Hello");
    }
    let hosts: BTreeSet<&str> = recipe.participants.iter().map(|part| part.host.as_str()).collect();
    let mut ranks: Vec<u32> =
        recipe.participants.iter().flat_map(|part| part.ranks.iter().copied()).collect();
    ranks.sort_unstable();
    let empty = recipe.participants.iter().any(|part| part.ranks.is_empty());
    if hosts.len() != count || empty || !ranks.iter().copied().eq(0..ranks.len() as u32) {
        return Err("a running communicator with senseless participants in Hello");
    }
    Ok(())
}
