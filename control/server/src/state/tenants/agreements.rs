//! What tenants are promised. Proposals are considered against what is promised already. Agreements are
//! stored before they are in effect and answered, kept by every plan, and watched.
//!
//! An agreement is of one communicator, and ends with it, or goes over to the one that goes on from it if it
//! can be kept there. Any process of the tenant may propose: what its agent says of whose process it is is
//! believed, as with joins.

use crate::state::ctx::Ctx;
use crate::state::effects::Effects;
use crate::state::job::communicator::{Communicator, EndCause};
use crate::state::job::decisions::Trigger;
use crate::state::job::reduction::ReductionPolicy;
use crate::state::job::stored::plan_change;
use crate::state::output::{Fact, SessionId};
use crate::state::refusal::RequestRefusal;
use crate::state::settings::Settings;
use crate::state::tenants::inherited::InheritedAgreement;
use crate::state::tenants::limits::TenantLimits;
use crate::state::timed::{Due, Timed};
use harmonaize_abi::session::{Agreement, Clause, Constraints, Negotiated, Reason, Refusal};
use harmonaize_abi::{Collective, CommunicatorId, OperationId, Pattern};
use harmonaize_api::v1::{self, FailureKind, to_agent};
use harmonaize_codec::Budget;
use harmonaize_disclose::{Call, Fact as Told, Outcome, ProviderState, Watch, negotiate, quarters};
use harmonaize_planner::{
    Bytes, Conditions, GroupCosts, Guarantee, HoseModel, HostCosts, HostId, Nanos, Rate, line_rate, max_delay,
};
use harmonaize_store::{Agreement as Stored, Change};
use prost::Message;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Of what plans give to promises at most (a part of 0.95) so much can be promised. That is 90% of a link,
/// and others are never without.
const PART: f64 = 0.95;

/// A plan gives what is promised if it lacks no more than this part of it.
const LACKS: f64 = 1e-3;

/// Most operations of a communicator of which not all agents have told.
const MOST_GATHERED: usize = 64;

/// All agreements.
#[derive(Debug, Default)]
pub(crate) struct Agreements {
    /// By communicator.
    promises: Timed<CommunicatorId, PromiseRecord>,
    /// Those that are being stored.
    pending: BTreeMap<CommunicatorId, Pending>,
    proposed: TenantLimits,
    /// From an earlier start, of communicators that have not come back yet.
    stored: BTreeMap<CommunicatorId, Stored>,
    /// One way between any two hosts, once it was looked up.
    farthest: Option<Nanos>,
    /// What the topology has for promises, once it was looked up.
    hose: Option<HoseModel>,
}

/// What others leave for promises.
#[derive(Debug)]
pub(crate) struct Room<'a> {
    /// What links have left.
    pub conditions: Conditions,
    /// What is set aside for members of communicators that ended: by communicator, along its hosts.
    pub set_aside: Vec<(CommunicatorId, &'a [HostId], Rate)>,
}

/// An agreement.
#[derive(Debug)]
struct PromiseRecord {
    number: u64,
    since: Nanos,
    constraints: Constraints,
    /// Set aside: what each host can send to the next at least.
    rate: Rate,
    watch: Watch,
    gathered: BTreeMap<OperationId, Gathered>,
}

impl Due for PromiseRecord {
    fn next_timeout(&self) -> Option<Duration> {
        self.watch.next_due()
    }
}

/// An agreement that is not in effect yet.
#[derive(Debug)]
struct Pending {
    /// Who proposed it, and which question that was; none where it goes over from another communicator.
    to: Option<(SessionId, u64)>,
    promise: PromiseRecord,
}

/// What agents have told of one operation.
#[derive(Debug, Default)]
struct Gathered {
    collective: Option<Collective>,
    bytes: Bytes,
    called: Nanos,
    ended: Nanos,
    /// Participants whose ranks have all called it and where it has not ended, as far as they have reported.
    open: BTreeSet<u32>,
    /// Participants where it has ended.
    over: BTreeSet<u32>,
}

impl Gathered {
    fn called(&mut self, told: &v1::Operation) {
        let called = told.ranks.iter().map(|rank| rank.called_ns).max();
        self.called = self.called.max(Nanos(called.unwrap_or(0)));
        self.bytes = Bytes(told.bytes);
        // Agents that cannot say are of a time when nearly all were.
        self.collective = told.collective.map_or(Some(Collective::AllReduce), harmonaize_api::collective);
    }

    fn call(&self, number: OperationId) -> Call {
        Call { number, collective: self.collective, bytes: self.bytes }
    }
}

impl Agreements {
    /// Takes up what an earlier start left.
    pub(crate) fn restore(&mut self, stored: BTreeMap<CommunicatorId, Stored>) {
        self.stored = stored;
    }

    /// A tenant is gone.
    pub(crate) fn forget(&mut self, tenant: &str) {
        self.proposed.forget(tenant);
    }

    /// What was promised before a restart of control for a communicator that has not come back. None unless
    /// it was agreed on what becomes of it.
    pub(crate) fn take_policy(&mut self, id: CommunicatorId, ranks: usize) -> Option<InheritedAgreement> {
        let left = InheritedAgreement::stored(self.stored.get(&id)?, ranks);
        left.on_failure()?;
        self.stored.remove(&id);
        Some(left)
    }

    /// A communicator's share, in quarters of the usual one.
    pub(crate) fn quarters(&self, id: CommunicatorId) -> u32 {
        self.promises.get(&id).map_or(4, |kept| quarters(&kept.constraints))
    }

    /// What is set aside for a communicator, or will be once it is stored.
    pub(crate) fn promised(&self, id: CommunicatorId) -> Rate {
        let pending = self.pending.get(&id).map(|pending| pending.promise.rate);
        self.promises.get(&id).map(|kept| kept.rate).max(pending).unwrap_or_default()
    }

    /// What a communicator leaves, if it was promised anything.
    pub(crate) fn inherited(&self, id: CommunicatorId) -> Option<InheritedAgreement> {
        // What goes over to it from another is its own already.
        let coming =
            || self.pending.get(&id).filter(|pending| pending.to.is_none()).map(|pending| &pending.promise);
        let kept = self.promises.get(&id).or_else(coming);
        let PromiseRecord { number, constraints, rate, watch, .. } = kept?;
        (*constraints != Constraints::new()).then(|| InheritedAgreement {
            number: *number,
            constraints: constraints.clone(),
            rate: *rate,
            watch: watch.clone(),
        })
    }

    /// How many agreements these communicators have, and how many of them are not kept.
    pub(crate) fn count(&self, ids: impl Iterator<Item = CommunicatorId>) -> (u32, u32) {
        let kept = ids.filter_map(|id| self.promises.get(&id));
        let wanted = kept.filter(|kept| kept.constraints != Constraints::new());
        wanted.fold((0, 0), |(all, broken), kept| {
            (all + 1, broken + u32::from(!kept.watch.broken_clauses().is_empty()))
        })
    }

    /// What is promised for a communicator; none where nothing is.
    pub(crate) fn constraints(&self, id: CommunicatorId) -> Option<&Constraints> {
        self.promises.get(&id).map(|kept| &kept.constraints)
    }

    /// What was agreed on for a communicator's sums.
    pub(crate) fn reduction_policy(&self, id: CommunicatorId) -> ReductionPolicy {
        ReductionPolicy::promised(self.constraints(id))
    }

    /// What a tenant is told, and operators.
    pub(crate) fn agreement(&self, id: CommunicatorId) -> Agreement {
        self.promises.get(&id).map_or_else(Agreement::default, |kept| Agreement {
            number: kept.number,
            constraints: kept.constraints.clone(),
            since_ns: kept.since.0,
            broken: kept.watch.broken_clauses().iter().copied().collect(),
            record: kept.watch.record(),
        })
    }

    /// A process of a tenant proposes, or asks.
    pub(crate) fn negotiate(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        room: &Room<'_>,
        from: SessionId,
        request: &v1::Negotiate,
    ) {
        if let Some(outcome) = self.considered(ctx, effects, room, from, request) {
            negotiated(effects, from, request.request, outcome);
        }
    }

    /// What comes of a proposal at once; none if it is to be stored first.
    fn considered(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        room: &Room<'_>,
        from: SessionId,
        request: &v1::Negotiate,
    ) -> Option<Result<Negotiated, RequestRefusal>> {
        let id = match ctx.named(&request.tenant, &request.communicator) {
            Ok(id) => id,
            Err(refused) => return Some(Err(refused)),
        };
        let Some(propose) = &request.propose else {
            return Some(Ok(Negotiated::Agreed(self.agreement(id))));
        };
        if self.pending.contains_key(&id) {
            return Some(Err(RequestRefusal::ProposalPending));
        }
        if let Err(refused) = self.proposed.take(ctx.now, &request.tenant, id, "proposals") {
            return Some(Err(refused.into()));
        }
        if propose.continue_on_loss {
            return Some(Err(RequestRefusal::ContinueOnLoss));
        }
        if let Some(code) = propose.unknown() {
            return Some(Err(RequestRefusal::UnknownCollective(code)));
        }
        let mut wanted = Constraints::from(propose);
        let budget = wanted.budget.as_ref().and_then(|said| Budget::try_from(said).err());
        if budget.is_some() {
            // What could be had is the rest.
            wanted.budget = None;
        }
        let budget = budget.map(|error| Reason { clause: Clause::Budget, text: error.to_string() });
        match (self.consider_proposal(ctx, room, id, &wanted), budget) {
            (Outcome::Refuse { mut reasons, counter }, budget) => {
                reasons.extend(budget);
                let counter = counter.map(|counter| *counter);
                Some(Ok(Negotiated::Refused { reasons, counter }))
            }
            (Outcome::Promise { .. }, Some(reason)) => {
                let (reasons, counter) = (vec![reason], Some(wanted));
                Some(Ok(Negotiated::Refused { reasons, counter }))
            }
            (Outcome::Promise { rate }, None) => {
                let before = self.promises.get(&id).map(|kept| (kept.number, kept.watch.clone()));
                let to = Some((from, request.request));
                let rate = Rate(rate.ceil() as u64);
                self.store_agreement(ctx, effects, to, id, wanted, rate, before);
                None
            }
        }
    }

    /// Whether a proposal can be promised beside all that is.
    fn consider_proposal(
        &mut self,
        ctx: &Ctx<'_>,
        room: &Room<'_>,
        id: CommunicatorId,
        wanted: &Constraints,
    ) -> Outcome {
        let topology = &ctx.settings.topology;
        // Not the delays between its own hosts: what is promised of times would tell which of them stand
        // together.
        let delay = *self.farthest.get_or_insert_with(|| max_delay(topology));
        let free = self.most(ctx, room, id);
        let Some(known) = ctx.communicators.get(&id) else {
            return Outcome::Refuse { reasons: Vec::new(), counter: None };
        };
        let hosts: Vec<HostId> = known.members.iter().map(|member| member.host).collect();
        let chunk = known.tuning.chunk;
        let on_one = known.members.iter().map(|member| member.ranks.len() as u64).max().unwrap_or(1);
        let time = |collective: Collective, bytes: u64, rate: f64| {
            let rate = Rate(rate as u64);
            let reach = GroupCosts {
                hosts: hosts.len() as u32,
                delay,
                hop_delay: delay,
                direct_rate: rate,
                ring_rate: rate,
                chunk,
                straight: known.indirect().is_none(),
                host: HostCosts::default(),
                racks: None,
            };
            match collective.traits().pattern {
                Pattern::ReduceDistribute if wanted.ordered => reach.two_shot(Bytes(bytes)),
                Pattern::ReduceDistribute => reach.fastest(Bytes(bytes)),
                Pattern::Gather => reach.gather(Bytes(bytes)),
                Pattern::Pairwise if collective.is_rooted() => reach.exchange(Bytes(bytes)),
                Pattern::Pairwise => reach.exchange(Bytes(bytes.saturating_mul(on_one))),
                Pattern::Chain => reach.chain(Bytes(bytes)),
                Pattern::Dissemination => reach.barrier(),
            }
        };
        let house = ProviderState {
            ranks: known.ranks,
            hosts: hosts.len() as u32,
            max_weight: if ctx.settings.replan { ctx.settings.most_weight } else { 1 },
            max_regroup: ctx.settings.longest_regroup,
            line_rate: line_rate(topology, &hosts).0 as f64 * PART * PART,
            available_rate: free,
            unordered: known.unordered(ctx.settings),
            time: &time,
        };
        negotiate(wanted, &house)
    }

    /// The topology is another: what it has for promises is looked up anew.
    pub(crate) fn topology_changed(&mut self) {
        (self.farthest, self.hose) = (None, None);
    }

    /// The most that a communicator can be promised, bits a second. It is what is promised already, or what
    /// hoses leave whoever asks, wherever anybody's hosts stand. Whether this very plan could keep more, or
    /// less, is not asked: the answer would tell who shares links.
    fn most(&mut self, ctx: &Ctx<'_>, room: &Room<'_>, id: CommunicatorId) -> f64 {
        if !ctx.settings.replan {
            return 0.0;
        }
        let hose = self.hose.get_or_insert_with(|| HoseModel::new(&ctx.settings.topology));
        let capacity = hose.capacity(&room.conditions, PART * PART);
        let mut promised: BTreeMap<CommunicatorId, (Vec<HostId>, f64)> = BTreeMap::new();
        for (other, known) in ctx.communicators {
            let rate = self.promised(*other);
            if *other == id || rate.0 > 0 {
                let hosts = known.members.iter().map(|member| member.host).collect();
                promised.insert(*other, (hosts, rate.0 as f64));
            }
        }
        for (ended, hosts, rate) in room.set_aside.iter().filter(|(.., rate)| rate.0 > 0) {
            promised.insert(*ended, (hosts.to_vec(), rate.0 as f64));
        }
        let Some((hosts, already)) = promised.remove(&id) else { return 0.0 };
        let others: Vec<Guarantee<'_>> =
            promised.values().map(|(hosts, rate)| Guarantee { hosts, rate: *rate }).collect();
        capacity.max_guarantee(&hosts, &others).max(already)
    }

    #[expect(clippy::too_many_arguments, reason = "what is agreed on, with whom, and what was before")]
    fn store_agreement(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        to: Option<(SessionId, u64)>,
        id: CommunicatorId,
        constraints: Constraints,
        rate: Rate,
        before: Option<(u64, Watch)>,
    ) {
        let Some(known) = ctx.communicators.get(&id) else { return };
        let mut watch = Watch::new(constraints.clone(), known.ranks);
        if let Some((_, before)) = &before {
            watch = watch.continued_from(before);
        }
        let number = before.map_or(0, |(number, _)| number) + 1;
        let since = ctx.operator.realtime(ctx.now);
        let record = Stored {
            communicator: id.0,
            number,
            since_ns: since.0,
            constraints: v1::Constraints::from(&constraints).encode_to_vec(),
            rate_bits: rate.0,
        };
        let kept = PromiseRecord { number, since, constraints, rate, watch, gathered: BTreeMap::new() };
        self.pending.insert(id, Pending { to, promise: kept });
        effects.store(Change::Agreement(record));
        // With it: after a restart, agents are believed that one of theirs had a promise and failed where its
        // plan is known.
        effects.store(plan_change(ctx.settings, ctx.communicators, id));
    }

    /// An agreement is stored: it is in effect, and its tenant told.
    pub(crate) fn agreed(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, record: &Stored) {
        let id = CommunicatorId(record.communicator);
        let Some(Pending { to, promise: kept }) = self.pending.remove(&id) else { return };
        let Some(known) = ctx.communicators.get(&id) else { return };
        let (tenant, name, number) = (known.tenant.clone(), known.name.clone(), kept.number);
        let promise =
            format!("{} of a share, {} set aside", f64::from(quarters(&kept.constraints)) / 4.0, kept.rate);
        let budget = kept.constraints.budget.as_ref().and_then(|said| Budget::try_from(said).ok());
        self.promises.insert(id, kept);
        effects.fact(Fact::Agreed { communicator: id, tenant, name, number, promise });
        effects
            .budgets
            .extend(budget.filter(|budget| known.coding.agreed != *budget).map(|budget| (id, budget)));
        effects.want_plan(Trigger::Agreement);
        self.judge(ctx, effects, id);
        let told = self.agreement(id);
        if let Some((to, request)) = to {
            negotiated(effects, to, request, Ok(Negotiated::Agreed(told)));
        }
    }

    /// Takes over what was promised for a communicator that this one goes on from. If it cannot be promised
    /// for this one, its tenant hears that it is not.
    pub(crate) fn take_over(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        room: &Room<'_>,
        left: InheritedAgreement,
        id: CommunicatorId,
    ) {
        let InheritedAgreement { number, constraints, watch, .. } = left;
        match self.consider_proposal(ctx, room, id, &constraints) {
            Outcome::Promise { rate } => {
                let rate = Rate(rate.ceil() as u64);
                self.store_agreement(ctx, effects, None, id, constraints, rate, Some((number, watch)));
            }
            Outcome::Refuse { reasons, .. } => {
                lose(ctx, effects, id, reasons.into_iter().map(|reason| reason.clause).collect());
            }
        }
    }

    /// What was to be stored could not be: it is not in effect.
    pub(crate) fn store_failed(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, id: CommunicatorId) {
        match self.pending.remove(&id).map(|pending| pending.to) {
            Some(Some((to, request))) => negotiated(effects, to, request, Err(RequestRefusal::NotStored)),
            Some(None) => lose(ctx, effects, id, BTreeSet::new()),
            None => {}
        }
    }

    /// A communicator is over, and what was promised for it.
    pub(crate) fn end(&mut self, effects: &mut Effects, id: CommunicatorId) {
        let pending = self.pending.remove(&id);
        if let Some(Pending { to: Some((to, request)), .. }) = &pending {
            negotiated(effects, *to, *request, Err(RequestRefusal::CommunicatorEnded));
        }
        let kept = self.promises.remove(&id);
        if kept.is_some() || pending.is_some() {
            effects.store(Change::NoAgreement(id));
        }
    }

    /// A communicator that outlived a restart of control gets back what it was promised.
    pub(crate) fn take_up(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, id: CommunicatorId) {
        let Some(stored) = self.stored.remove(&id) else { return };
        let Some(known) = ctx.communicators.get(&id) else { return };
        let Stored { number, since_ns, rate_bits, .. } = stored;
        let said = v1::Constraints::decode(stored.constraints.as_slice()).unwrap_or_default();
        let constraints = Constraints::from(&said);
        let watch = Watch::new(constraints.clone(), known.ranks);
        let (rate, gathered) = (Rate(rate_bits), BTreeMap::new());
        let kept = PromiseRecord { number, since: Nanos(since_ns), constraints, rate, watch, gathered };
        self.promises.insert(id, kept);
        effects.want_plan(Trigger::Agreement);
    }

    /// An agent told of an operation: once all have, it is known what it took from its last rank's call.
    pub(crate) fn watch_operation(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, told: &v1::Operation) {
        let (id, number) = (CommunicatorId(told.communicator), OperationId(told.operation));
        let Some(agents) = ctx.communicators.get(&id).map(|known| known.members.len()) else { return };
        let Some(kept) = self.promises.get_mut(&id) else { return };
        let ended = told.ranks.iter().map(|rank| rank.ended_ns).max();
        // One that failed is counted as its communicator ends, by why that is.
        if told.ranks.iter().any(|rank| rank.failed || rank.called_ns == 0 || rank.ended_ns == 0) {
            return;
        }
        let gathered = kept.gathered.entry(number).or_default();
        gathered.called(told);
        gathered.over.insert(told.participant);
        gathered.ended = gathered.ended.max(Nanos(ended.unwrap_or(0)));
        if gathered.over.len() >= agents {
            let call = gathered.call(number);
            let took = gathered.ended.since(gathered.called);
            kept.gathered.remove(&number);
            kept.watch.operation(ctx.now, call, took);
            self.judge(ctx, effects, id);
        } else if kept.gathered.len() > MOST_GATHERED {
            kept.gathered.pop_first();
        }
    }

    /// An agent reported at `at` an operation that has not ended there. Once all ranks are known to have
    /// called it, it is known how long it has run so far.
    pub(crate) fn watch_open(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        at: Nanos,
        told: &v1::Operation,
    ) {
        let (id, number) = (CommunicatorId(told.communicator), OperationId(told.operation));
        let Some(known) = ctx.communicators.get(&id) else { return };
        let Some(kept) = self.promises.get_mut(&id) else { return };
        let has_called = |rank: &u32| told.ranks.iter().any(|one| one.rank == *rank && one.called_ns > 0);
        let member = known.members.get(told.participant as usize);
        if !member.is_some_and(|member| member.ranks.iter().all(has_called)) {
            return;
        }
        let gathered = kept.gathered.entry(number).or_default();
        gathered.called(told);
        gathered.open.insert(told.participant);
        if gathered.open.union(&gathered.over).count() >= known.members.len() {
            let call = gathered.call(number);
            let so_far = at.since(gathered.called);
            kept.watch.operation_open(ctx.now, call, so_far);
            self.judge(ctx, effects, id);
        } else if kept.gathered.len() > MOST_GATHERED {
            kept.gathered.pop_first();
        }
    }

    /// A communicator is about to end with an error.
    pub(crate) fn watch_end(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        id: CommunicatorId,
        cause: &EndCause,
    ) {
        let providers = match cause.kind {
            // Those that never called; without any the data did not move.
            FailureKind::Timeout => cause.ranks.is_empty(),
            FailureKind::Prepare | FailureKind::Internal | FailureKind::Unspecified => true,
            FailureKind::Mismatch | FailureKind::RanksLost | FailureKind::Operator | FailureKind::Aborted => {
                false
            }
        };
        if let Some(kept) = self.promises.get_mut(&id).filter(|_| providers) {
            kept.watch.failed();
            self.judge(ctx, effects, id);
        }
    }

    /// A plan may give a communicator more or less than it was promised.
    pub(crate) fn watch_plan(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, id: CommunicatorId) {
        let current = ctx.communicators.get(&id).and_then(Communicator::current);
        let Some(plan) = current.and_then(|current| current.plan.as_ref()) else { return };
        let Some(kept) = self.promises.get_mut(&id) else { return };
        kept.watch.set_rate_short((plan.share.0 as f64) < kept.rate.0 as f64 * (1.0 - LACKS));
        self.judge(ctx, effects, id);
    }

    fn judge(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, id: CommunicatorId) {
        let Some(kept) = self.promises.get_mut(&id) else { return };
        let number = kept.number;
        let (broken, changed) = kept.watch.evaluate(ctx.now);
        if !changed {
            return;
        }
        let broken = broken.clone();
        if let Some(known) = ctx.communicators.get(&id) {
            let (tenant, name) = (known.tenant.clone(), known.name.clone());
            let broken = broken.iter().map(|clause| format!("{clause:?}").to_lowercase()).collect();
            effects.fact(Fact::AgreementBroken { communicator: id, tenant, name, number, broken });
        }
        effects.note(ctx, id, Told::Agreement { broken });
    }

    /// Returns when [`Agreements::expire`] has something to do.
    pub(crate) fn next_timeout(&self, settings: &Settings) -> Option<Duration> {
        let stored = (!self.stored.is_empty()).then_some(settings.lease);
        self.promises.next_timeout().into_iter().chain(stored).min()
    }

    /// Judges what has become old, and forgets what was promised to those that did not come back.
    pub(crate) fn expire(&mut self, ctx: &Ctx<'_>, effects: &mut Effects) {
        for id in self.promises.due(ctx.now) {
            self.judge(ctx, effects, id);
        }
        if ctx.now >= ctx.settings.lease && !self.stored.is_empty() {
            let lost = std::mem::take(&mut self.stored);
            lost.into_keys().for_each(|id| effects.store(Change::NoAgreement(id)));
        }
    }
}

fn negotiated(
    effects: &mut Effects,
    to: SessionId,
    request: u64,
    outcome: Result<Negotiated, RequestRefusal>,
) {
    let outcome = outcome.map_err(Refusal::from);
    effects.send(to, to_agent::Message::Negotiated(v1::Negotiated::answer(request, &outcome)));
}

fn lose(ctx: &Ctx<'_>, effects: &mut Effects, id: CommunicatorId, clauses: BTreeSet<Clause>) {
    let Some(known) = ctx.communicators.get(&id) else { return };
    let (tenant, name) = (known.tenant.clone(), known.name.clone());
    let lost = clauses.iter().map(|clause| format!("{clause:?}").to_lowercase()).collect();
    effects.fact(Fact::AgreementLost { communicator: id, tenant, name, lost });
    effects.note(ctx, id, Told::AgreementEnded { clauses });
}
