//! Communicators that outlived a restart of control: agents name them in Hello, and control learns them again.

use super::aggregator_refusals::Refusals;
use super::codec::CodecChoice;
use super::codec::CodecState;
use super::communicator::{Communicator, EndCause, Member, dissolved};
use super::lifecycle::{EpochConfig, Lifecycle};
use super::reduction::AggregationChoice;
use super::{SessionId, State};
use harmonaize_api::v1::{self, FailureKind, to_agent};
use harmonaize_planner::{AlgorithmChoice, Bytes, DirectThresholds, HostId, RateLimits, Tuning};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// Epochs that an earlier control may have handed out beyond the one in use.
const UNSEEN_EPOCHS: u64 = 1;

impl State {
    /// Takes up what an agent says is running. An error is a breach of protocol.
    pub(super) fn recover(
        &mut self,
        now: Duration,
        from: SessionId,
        host: HostId,
        hello: &v1::Hello,
    ) -> Result<(), &'static str> {
        let mut named = BTreeSet::new();
        for recipe in hello.running.iter().chain(&hello.ended) {
            check(recipe)?;
            if !named.insert(recipe.communicator) {
                return Err("a communicator that is named twice in Hello");
            }
        }
        for recipe in &hello.running {
            self.recover_one(now, from, host, recipe)?;
        }
        for recipe in &hello.ended {
            self.recover_ended(now, from, host, recipe)?;
        }
        let lost: Vec<(u64, Vec<u32>)> = self
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
            let detail = format!("the agent on `{}` came back without it", self.host_name(host));
            self.end(now, id, EndCause { kind: FailureKind::RanksLost, ranks, detail }, None);
        }
        self.regroups.all_back(&self.hosts);
        Ok(())
    }

    /// Takes up what an agent says of a communicator that has ended: whose processes are there still, which may go on as was agreed on.
    fn recover_ended(
        &mut self,
        now: Duration,
        from: SessionId,
        host: HostId,
        recipe: &v1::Recipe,
    ) -> Result<(), &'static str> {
        let (id, me) = (recipe.communicator, recipe.me as usize);
        let part = recipe.participants.get(me).ok_or("a participant that is not there")?;
        let name = self.host_name(host);
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
        if !self.regroups.is_past(id) && self.operator.ran(id, &recipe.tenant, &recipe.name, &name) {
            self.recover_past(now, recipe);
        }
        self.regroups.back(id, (host, from), here);
        Ok(())
    }

    fn recover_one(
        &mut self,
        now: Duration,
        from: SessionId,
        host: HostId,
        recipe: &v1::Recipe,
    ) -> Result<(), &'static str> {
        let (id, me) = (recipe.communicator, recipe.me as usize);
        let ours = id >> 32 == u64::from(self.boot);
        let ended = self.ended.iter().any(|ended| ended.id == id);
        let usable = self.settings.tenants.contains(&recipe.tenant);
        if !ours && self.regroups.is_past(id) {
            // It has ended, and control went down before the agent heard that.
            let (kind, ranks) = (FailureKind::RanksLost, Vec::new());
            let detail = "it ended before control started".to_owned();
            self.send(from, dissolved(id, &EndCause { kind, ranks, detail }));
            self.regroups.back(id, (host, from), recipe.local_ranks.iter().map(|local| local.rank));
            return Ok(());
        }
        let members: Option<Vec<Member>> = recipe.participants.iter().map(|part| self.absent(part)).collect();
        let Some(members) = members.filter(|_| usable && !ended) else {
            self.disown(from, id);
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
                self.send(from, dissolved(id, &EndCause { kind: FailureKind::RanksLost, ranks, detail }));
                return Ok(());
            }
            if now >= self.settings.recovery_timeout || !self.is_credible(recipe) {
                self.disown(from, id);
                return Ok(());
            }
            let until = now.saturating_add(self.settings.recovery_timeout);
            self.communicators.insert(id, adopt(recipe, members, until));
        } else if self.communicators.get(&id).is_none_or(|known| !is_same(known, recipe, &members)) {
            // Whoever told of it first may have lied; it costs nobody a session.
            self.disown(from, id);
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
        let newer = recipe.epoch > communicator.epoch();
        if newer && let Some(current) = communicator.lifecycle.current_mut() {
            let config = EpochConfig {
                ports: std::mem::take(&mut current.ports),
                links: std::mem::take(&mut current.links),
                plan: current.plan.take(),
                rate_limits: current.rate_limits,
                ..config(recipe)
            };
            communicator.coding.agree(config.codec.budget.clone());
            communicator.next_epoch = recipe.epoch.saturating_add(UNSEEN_EPOCHS + 1);
            let before = std::mem::replace(current, config);
            self.end_aggregation(now, &before.aggregation);
        }
        let known = self.communicators.get(&id).and_then(Communicator::current);
        if let Some(told) = known.map(|current| current.aggregation.clone()) {
            self.recover_aggregation(now, id, &told);
        }
        if adopted || newer {
            self.take_up_plan(now, id);
        }
        self.take_up_agreement(id);
        self.learn_usage(id);
        let Some(communicator) = self.communicators.get_mut(&id) else { return Ok(()) };
        if all_back {
            communicator.lifecycle.recovered();
            // Whoever missed it when control went down learns that the epoch may be used.
            let epoch = communicator.epoch();
            self.overtake(now, id, !recipe.previous_ranks.is_empty());
            self.link_state.active_changed();
            self.with_links(now, |links, ctx, effects| links.trace_communicator(ctx, effects, id));
            self.send_to_members(id, &to_agent::Message::Ready(v1::Ready { communicator: id, epoch }));
        }
        Ok(())
    }

    /// Tells an agent to let go of what it says is running.
    fn disown(&mut self, agent: SessionId, id: u64) {
        let detail = "control does not know it any more".to_owned();
        let cause = EndCause { kind: FailureKind::Operator, ranks: Vec::new(), detail };
        self.send(agent, dissolved(id, &cause));
    }

    /// Whether a communicator of an earlier start may be what an agent says: it is what was stored, or its tenant could have it now where
    /// nothing was.
    fn is_credible(&self, recipe: &v1::Recipe) -> bool {
        if let Some(stored) = self.is_stored_as(recipe) {
            return stored;
        }
        let ranks: usize = recipe.participants.iter().map(|part| part.ranks.len()).sum();
        ranks <= self.settings.most_ranks as usize
            && self.check_names(&recipe.tenant, &recipe.name).is_ok()
            && self.communicators_of(&recipe.tenant, &recipe.name) < self.settings.most_communicators
    }

    /// A communicator is whole again that came after one that is kept for its members still: control went down as it took that one's place.
    fn overtake(&mut self, now: Duration, id: u64, went_on: bool) {
        let Some(known) = self.communicators.get(&id) else { return };
        let (tenant, name) = (known.tenant.clone(), known.name.clone());
        if let Some(before) = self.regroups.retained_predecessor(&tenant, &name, id).filter(|_| went_on) {
            if self.agreements.constraints(id).is_none() {
                self.take_over_agreement(now, before, id);
            }
            self.regroups.succeeded(before, &(tenant.clone(), name.clone()));
        }
        self.regroups.overtaken(&tenant, &name, id);
    }

    fn absent(&self, participant: &v1::Participant) -> Option<Member> {
        let host = self.settings.topology.host(&participant.host)?;
        let (ranks, requests, left) = (participant.ranks.clone(), Vec::new(), BTreeSet::new());
        Some(Member { host, session: None, ranks, requests, departed: left, closed: false })
    }
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
        epoch: recipe.epoch,
        order: recipe.order.clone(),
        ports: Vec::new(),
        links: BTreeMap::new(),
        plan: None,
        rate_limits: RateLimits::default(),
        codec: CodecChoice::from_recipe(recipe),
        algorithm: algorithm(recipe),
        aggregation: AggregationChoice::from_recipe(recipe),
    }
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
        next_epoch: recipe.epoch.saturating_add(UNSEEN_EPOCHS + 1),
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
    if recipe.epoch == 0
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
