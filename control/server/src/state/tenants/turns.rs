//! Turns on links that periodic communicators share. Who asks for its turn is given it once none of those
//! beside it has theirs, or goes before it.
//!
//! Who has least left of its iteration goes first, as the planner orders coflows. That is the time that its
//! operations still take alone, by what agents reported of earlier iterations. Where a communicator's turns
//! last longer than that, they count and not the reports. Who has waited half of its patience is overtaken no
//! more.
//!
//! What an operation waits is the distance that its job lacks from the others', and the next one waits less;
//! so jobs that could pass one after another soon do, and stay so. Nobody waits for long: a turn that lasts
//! beyond what its communicator usually takes is lost, who loses three in a row takes none for a while, nor
//! does who would wait less by sharing, and operations go on without where control is slow or gone. Nothing
//! of it is stored.

use crate::state::breach::Breach;
use crate::state::ctx::Ctx;
use crate::state::effects::Effects;
use crate::state::output::{Fact, SessionId};
use crate::state::reason::TurnsEnd;
use crate::state::tenants::agreements::Agreements;
use crate::state::time::nanos;
use harmonaize_abi::CommunicatorId;
use harmonaize_api::v1::{self, to_agent};
use harmonaize_planner::{
    Assignment, Conditions, Contender, Discipline, HostId, InterleaveReason, InterleaveSlot, Job, Remaining,
    plan_interleaving, service_order,
};
use harmonaize_units::{Gcra, Quota};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// Whoever is no longer found to gain by turns takes them for so long still. It takes them for at least so
/// many of its iterations, too: the period that it has now may have to be measured first.
const KEEPS: Duration = Duration::from_secs(15);
const KEEPS_ITERATIONS: u32 = 20;

/// How long a slot holds others up at most, as a multiple of what the communicator takes alone. A little is added
/// for messages.
const LASTS: u32 = 2;
const MESSAGES: Duration = Duration::from_millis(10);

/// Who has lost so many turns in a row takes none for so long.
const MOST_LOST: u32 = 3;
const MIN_EXCLUSION: Duration = Duration::from_secs(60);

/// From so many operations on their waits may end a communicator's turns for a while, too. They do where the
/// latest waited longer in the mean than it takes to share a link with those beside it.
const ENOUGH: usize = 16;

/// Of a communicator's operation that half of the bytes lie below, so small a part asks for no turn.
const SMALL: u64 = 4;

/// What an operation waited counts where it is more than such a part of its time.
const DELAYED: u64 = 8;

/// Of its patience, the part after which an operation that waits is overtaken no more.
const OVERDUE: u32 = 2;

/// What iterations take of turns is forgotten at such a part an iteration.
const FORGETS: u32 = 4;

/// Turns of a communicator that are remembered.
const LATEST: usize = 64;

/// Most messages on turns that an agent may send in a second, for all operations of a tenant. It counts those
/// that the agent leads. They are enough for a thousand operations that want theirs, and are over.
const MOST_A_SECOND: u32 = 2000;

/// What an agent was told is good enough up to this part.
const ALIKE: f64 = 0.25;

/// Least time between two looks at who may take turns.
const BETWEEN: Duration = Duration::from_secs(1);

/// Longest that an operation waits for its turn.
const LONGEST: Duration = Duration::from_secs(1);

/// All turns.
#[derive(Debug, Default)]
pub(crate) struct AllTurns {
    members: BTreeMap<CommunicatorId, Member>,
    /// Of each communicator one at most, as they asked.
    queue: Vec<SlotRequest>,
    /// When it was last looked at who may take turns.
    grouped: Duration,
    /// Until when communicators are left out.
    out: BTreeMap<CommunicatorId, Duration>,
    /// By host and tenant: what its agent may still say. Of no tenant is what names no communicator that there is.
    request_limits: BTreeMap<(HostId, Option<String>), Gcra>,
    /// By host: how much its agent said beyond that.
    dropped: BTreeMap<HostId, u64>,
    /// By what it is decided who goes first; tests hold it against others.
    pub(crate) discipline: Discipline,
}

/// A communicator that takes turns.
#[derive(Debug)]
struct Member {
    /// Whose agent asks.
    leader: SessionId,
    message: v1::Interleaving,
    /// With whom it does not communicate at once.
    beside: BTreeSet<CommunicatorId>,
    /// How long its operations take alone.
    busy: Duration,
    usage: TurnUsage,
    /// When it was last found to gain, and for how long that counts.
    found: Duration,
    keeps: Duration,
    /// Turns in a row that it lost.
    lost: u32,
    /// Turns that it was given.
    given: u64,
    /// Operations that waited for theirs, whether they were given one or not, and how long all of them.
    noted: u64,
    waited: Duration,
    latest: VecDeque<Waited>,
    reason: InterleaveReason,
}

/// How long a communicator's turns last, iteration by iteration.
#[derive(Debug, Default)]
struct TurnUsage {
    /// The first operation of the iteration that is under way, which is at least one turn.
    first: u64,
    /// The first operation of its newest turn.
    newest: u64,
    /// How long its turns lasted so far.
    attained: Duration,
    /// How long those of an iteration lasted lately; none where no turn is over.
    typical: Option<Duration>,
}

impl TurnUsage {
    /// A turn begins with that operation, of an iteration of so many. An operation that is no newer than the last
    /// turn's begins another iteration.
    fn begin(&mut self, operation: u64, operations: u64) {
        let goes_on = operation > self.newest && operation < self.first.saturating_add(operations);
        self.newest = operation;
        if goes_on {
            return;
        }
        self.first = operation;
        let attained = std::mem::take(&mut self.attained);
        if !attained.is_zero() {
            let before = self.typical.unwrap_or(attained);
            self.typical = Some(before - before / FORGETS + attained / FORGETS);
        }
    }

    /// A turn of the iteration lasted so long.
    fn add(&mut self, lasted: Duration) {
        self.attained = self.attained.saturating_add(lasted);
    }

    /// What is left of an iteration of so many operations that together take so long, before that operation.
    fn remaining(&self, operation: u64, operations: u64, busy: Duration) -> Remaining {
        let done = operation.saturating_sub(self.first).min(operations.saturating_sub(1));
        let reported = busy.mul_f64(1.0 - done as f64 / operations.max(1) as f64);
        let typical = self.typical.unwrap_or_default();
        let measured = typical.saturating_sub(self.attained);
        if measured > reported.mul_f64(1.0 + ALIKE).saturating_add(MESSAGES) {
            return Remaining::Unknown(nanos(typical));
        }
        Remaining::Known(nanos(reported))
    }
}

/// An operation that waited for its turn.
#[derive(Debug)]
struct Waited {
    turn: u64,
    waited: Duration,
    /// What it would have lost at most by sharing with those beside it at that time.
    shared: Duration,
}

impl Member {
    /// Takes note of what the operation of a turn waited since it asked, patience permitting.
    fn note(&mut self, turn: u64, since_asked: Duration) {
        let waited = since_asked.min(Duration::from_nanos(self.message.max_wait_ns));
        (self.noted, self.waited) = (self.noted + 1, self.waited.saturating_add(waited));
        if self.latest.len() == LATEST {
            self.latest.pop_front();
        }
        let others = u32::try_from(self.beside.len()).unwrap_or(u32::MAX);
        self.latest.push_back(Waited { turn, waited, shared: self.busy.saturating_mul(others) });
    }

    /// How it stands among those that wait.
    fn contender(&self, request: &SlotRequest, now: Duration) -> Contender {
        let patience = Duration::from_nanos(self.message.max_wait_ns);
        let operations = u64::from(self.message.max_operations.max(1));
        Contender {
            arrival: nanos(request.since),
            remaining: self.usage.remaining(request.turn, operations, self.busy),
            overdue: now.saturating_sub(request.since) >= patience / OVERDUE,
        }
    }

    /// Whether its operations would wait less if they shared links with all that are beside it.
    fn would_rather_share(&self) -> bool {
        let all = |of: fn(&Waited) -> Duration| self.latest.iter().map(of).sum::<Duration>();
        self.latest.len() >= ENOUGH && all(|it| it.waited) > all(|it| it.shared)
    }
}

/// How long a turn may last.
fn lasts(busy: Duration) -> Duration {
    busy.saturating_mul(LASTS).saturating_add(MESSAGES)
}

#[derive(Debug)]
struct SlotRequest {
    communicator: CommunicatorId,
    turn: u64,
    since: Duration,
    given: Option<Duration>,
}

impl AllTurns {
    pub(crate) fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// What a host's agent has said beyond what it may.
    pub(crate) fn dropped(&self, host: HostId) -> u64 {
        self.dropped.get(&host).copied().unwrap_or(0)
    }

    /// When a turn is lost, if it is not over by then.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        self.queue.iter().filter_map(|asked| self.until(asked)).min()
    }

    fn until(&self, asked: &SlotRequest) -> Option<Duration> {
        let busy = self.members.get(&asked.communicator).map_or(Duration::ZERO, |member| member.busy);
        Some(asked.given?.saturating_add(lasts(busy)))
    }

    /// What an operation waited for its turn.
    pub(crate) fn waited(&self, id: CommunicatorId, operation: u64) -> Duration {
        let latest = self.members.get(&id).map(|member| &member.latest);
        let of_it = latest.into_iter().flatten().find(|it| it.turn == operation);
        of_it.map_or(Duration::ZERO, |it| it.waited)
    }

    /// Whether an operation waited for its turn for too large a part of its time. Then its edges' times say
    /// nothing of links and ranks.
    pub(crate) fn delayed(&self, told: &v1::Operation) -> bool {
        let called = told.ranks.iter().map(|rank| rank.called_ns).filter(|at| *at > 0).min();
        let ended = told.ranks.iter().map(|rank| rank.ended_ns).max();
        let lasted = ended.unwrap_or(0).saturating_sub(called.unwrap_or(0));
        let waited = self.waited(CommunicatorId(told.communicator), told.operation);
        !waited.is_zero() && waited > Duration::from_nanos(lasted / DELAYED)
    }

    /// Gives turns that nothing stands in the way of: which.
    fn give(&mut self, now: Duration) -> Vec<(SessionId, v1::GrantSlot)> {
        let (having, mut waiting): (Vec<_>, Vec<_>) =
            self.queue.iter_mut().partition(|request| request.given.is_some());
        waiting.retain(|request| self.members.contains_key(&request.communicator));
        let contender = |request: &&mut SlotRequest| {
            Some(self.members.get(&request.communicator)?.contender(request, now))
        };
        let contenders: Vec<Contender> = waiting.iter().filter_map(contender).collect();
        // Those that have their turn, and those that go before.
        let mut before: Vec<CommunicatorId> = having.iter().map(|request| request.communicator).collect();
        let mut given = Vec::new();
        for index in service_order(self.discipline, &contenders) {
            let Some(request) = waiting.get_mut(index) else { continue };
            let Some(member) = self.members.get_mut(&request.communicator) else { continue };
            let blocked = before.iter().any(|other| member.beside.contains(other));
            before.push(request.communicator);
            if blocked {
                continue;
            }
            request.given = Some(now);
            member.given += 1;
            member.note(request.turn, now.saturating_sub(request.since));
            let SlotRequest { communicator, turn, .. } = **request;
            given.push((member.leader, v1::GrantSlot { communicator: communicator.0, slot: turn }));
        }
        given
    }

    /// Whether it is time to look at who may take turns.
    pub(crate) fn is_due(&mut self, now: Duration) -> bool {
        let due = now >= self.grouped + BETWEEN;
        if due {
            self.grouped = now;
            // Tenants come and go.
            self.request_limits.retain(|_, limit| !limit.is_idle(now));
        }
        due
    }

    /// Has communicators take turns, or no longer, by what is known of them now.
    pub(crate) fn group(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        agreements: &Agreements,
        mut jobs: Vec<Job>,
        assignments: &[Assignment],
    ) {
        let now = ctx.now;
        self.out.retain(|_, until| *until > now);
        for job in &mut jobs {
            if !self.may_take_turns(ctx, agreements, job.communicator) {
                job.iteration_pattern = None;
            }
        }
        let taking = self.members.keys().copied().collect();
        // Jobs that share a link find each other's queues there, which are easily taken for strangers'. What
        // links carry settles it.
        let conditions = Conditions::clear(&ctx.settings.topology);
        let found = plan_interleaving(&ctx.settings.topology, &conditions, &jobs, assignments, &taking);
        let each: BTreeMap<CommunicatorId, Duration> =
            found.iter().map(|turn| (turn.communicator, lasts(turn.busy.into()))).collect();
        for turn in found {
            let job = jobs.iter().find(|job| job.communicator == turn.communicator);
            if let Some(pattern) = job.and_then(|job| job.iteration_pattern) {
                // Who waits longer than it takes itself would lose more than by sharing.
                let own = each.get(&turn.communicator);
                let others = turn.contenders.iter().filter_map(|id| each.get(id).min(own));
                let patience = others.sum::<Duration>().min(LONGEST);
                let bulk = ctx.iterations.get(&turn.communicator).map_or(0, |known| known.dominant_bytes());
                let told = v1::Interleaving {
                    communicator: turn.communicator.0,
                    max_wait_ns: nanos(patience).0,
                    min_bytes: (bulk / SMALL).max(1),
                    max_operations: pattern.operations,
                    max_idle_ns: (pattern.longest_gap.0 / 4).saturating_mul(5).saturating_add(1_000_000),
                };
                let keeps = KEEPS.max(Duration::from(pattern.period).saturating_mul(KEEPS_ITERATIONS));
                self.take_turn(ctx, effects, turn, told, keeps);
            }
        }
        let over = self.members.iter().filter(|(_, member)| member.found + member.keeps <= now);
        for id in over.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.leave(ctx, effects, id, TurnsEnd::NoGain);
        }
    }

    /// Whether a communicator's leader is there, and nothing else was promised for it.
    fn may_take_turns(&self, ctx: &Ctx<'_>, agreements: &Agreements, id: CommunicatorId) -> bool {
        let leads = ctx.leader(id).is_some_and(|leader| ctx.sessions.contains_key(&leader));
        leads && agreements.inherited(id).is_none() && !self.out.contains_key(&id)
    }

    fn take_turn(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        turn: InterleaveSlot,
        told: v1::Interleaving,
        keeps: Duration,
    ) {
        let now = ctx.now;
        let id = turn.communicator;
        let Some(leader) = ctx.leader(id) else { return };
        let InterleaveSlot { contenders: beside, reason, busy, .. } = turn;
        let busy = Duration::from(busy);
        if let Some(member) = self.members.get_mut(&id) {
            (member.found, member.keeps, member.busy) = (now, keeps, busy);
            (member.beside, member.reason) = (beside, reason);
            let stays = member.leader == leader && alike(&member.message, &told);
            if !stays {
                (member.leader, member.message) = (leader, told);
                effects.send(leader, to_agent::Message::Interleaving(told));
            }
            return;
        }
        let with = beside.iter().copied().collect();
        if let Some((tenant, name)) = ctx.owner(id) {
            effects.fact(Fact::TakesTurns { communicator: id, tenant, name, with, reason: reason.clone() });
        }
        let member = Member {
            leader,
            message: told,
            beside,
            busy,
            usage: TurnUsage::default(),
            found: now,
            keeps,
            lost: 0,
            given: 0,
            noted: 0,
            waited: Duration::ZERO,
            latest: VecDeque::with_capacity(LATEST),
            reason,
        };
        self.members.insert(id, member);
        effects.send(leader, to_agent::Message::Interleaving(told));
    }

    /// A communicator takes no turns any more; its agent is told.
    fn leave(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, id: CommunicatorId, why: TurnsEnd) {
        let Some(member) = self.members.remove(&id) else { return };
        let none = v1::Interleaving { communicator: id.0, ..v1::Interleaving::default() };
        effects.send(member.leader, to_agent::Message::Interleaving(none));
        if let Some((tenant, name)) = ctx.owner(id) {
            effects.fact(Fact::TurnsOver { communicator: id, tenant, name, why });
        }
        self.forget(ctx, effects, id);
    }

    /// An agent's session has ended: operations that it leads begin without a turn.
    pub(crate) fn session_ended(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, session: SessionId) {
        let members = &self.members;
        let leads = |id: CommunicatorId| members.get(&id).is_some_and(|member| member.leader == session);
        self.queue.retain(|asked| !leads(asked.communicator));
        self.give_turns(ctx, effects);
    }

    /// A communicator has ended, or takes no turns any more.
    pub(crate) fn forget(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, id: CommunicatorId) {
        self.members.remove(&id);
        self.queue.retain(|asked| asked.communicator != id);
        self.give_turns(ctx, effects);
    }

    /// The leader's agent asks for the turn.
    pub(crate) fn slot_requested(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        from: SessionId,
        request: v1::RequestSlot,
    ) -> Result<(), Breach> {
        let v1::RequestSlot { communicator, slot: turn } = request;
        let communicator = CommunicatorId(communicator);
        if !self.admit_request(ctx, effects, from, communicator) {
            return Ok(());
        }
        if ctx.part(from, communicator)?.is_none() {
            return Ok(());
        }
        if self.members.get(&communicator).is_none_or(|member| member.leader != from) {
            // It was told so, but may not have heard it.
            effects.send(
                from,
                to_agent::Message::GrantSlot(v1::GrantSlot { communicator: communicator.0, slot: turn }),
            );
            return Ok(());
        }
        // Who was given one and never said that it is over has lost it.
        if self.queue.iter().any(|asked| asked.communicator == communicator && asked.given.is_some()) {
            self.lose_turn(ctx, effects, communicator);
        }
        self.queue.retain(|asked| asked.communicator != communicator);
        if let Some(member) = self.members.get_mut(&communicator) {
            member.usage.begin(turn, member.message.max_operations.max(1).into());
            self.queue.push(SlotRequest { communicator, turn, since: ctx.now, given: None });
        }
        self.give_turns(ctx, effects);
        Ok(())
    }

    /// A turn is over.
    pub(crate) fn turn_done(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        from: SessionId,
        done: v1::ReleaseSlot,
    ) -> Result<(), Breach> {
        let communicator = CommunicatorId(done.communicator);
        if !self.admit_request(ctx, effects, from, communicator) {
            return Ok(());
        }
        if ctx.part(from, communicator)?.is_none() {
            return Ok(());
        }
        let this = |asked: &SlotRequest| (asked.communicator, asked.turn) == (communicator, done.slot);
        let leads = self.members.get_mut(&communicator).filter(|member| member.leader == from);
        if let (Some(member), Some(asked)) = (leads, self.queue.iter().find(|asked| this(asked))) {
            member.lost = 0;
            match asked.given {
                None => member.note(asked.turn, ctx.now.saturating_sub(asked.since)),
                Some(given) => member.usage.add(ctx.now.saturating_sub(given)),
            }
            let leaves = member.would_rather_share();
            self.queue.retain(|asked| !this(asked));
            if leaves {
                self.leave_out(ctx, effects, communicator, TurnsEnd::WaitsLess);
            }
            self.give_turns(ctx, effects);
        }
        Ok(())
    }

    /// Whether an agent may say something of turns once more for this communicator's tenant. If not, what it
    /// leads of it takes none for a while: what is not heard would hold up others, and its own operations.
    fn admit_request(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        from: SessionId,
        id: CommunicatorId,
    ) -> bool {
        let Some(host) = ctx.sessions.get(&from).map(|session| session.host) else { return false };
        let tenant = ctx.communicators.get(&id).map(|known| known.tenant.clone());
        let limit = self.request_limits.entry((host, tenant)).or_default();
        if limit.take(ctx.now, Quota::per_second(MOST_A_SECOND)).is_ok() {
            return true;
        }
        let dropped = self.dropped.entry(host).or_default();
        *dropped += 1;
        let count = *dropped;
        effects.unusual(ctx, host, count, "turns are asked for faster than they may be");
        if self.members.get(&id).is_some_and(|member| member.leader == from) {
            self.leave_out(ctx, effects, id, TurnsEnd::TooFast);
        }
        false
    }

    fn give_turns(&mut self, ctx: &Ctx<'_>, effects: &mut Effects) {
        for (leader, given) in self.give(ctx.now) {
            effects.send(leader, to_agent::Message::GrantSlot(given));
        }
    }

    /// Takes turns away that last too long.
    pub(crate) fn expire(&mut self, ctx: &Ctx<'_>, effects: &mut Effects) {
        let late = self.queue.iter().filter(|asked| self.until(asked).is_some_and(|at| at <= ctx.now));
        for id in late.map(|asked| asked.communicator).collect::<Vec<_>>() {
            self.queue.retain(|asked| asked.communicator != id);
            self.lose_turn(ctx, effects, id);
        }
        self.give_turns(ctx, effects);
    }

    fn lose_turn(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, id: CommunicatorId) {
        let Some(member) = self.members.get_mut(&id) else { return };
        // Nobody knows how long it goes on.
        member.usage.add(lasts(member.busy).saturating_mul(2));
        member.lost += 1;
        if member.lost >= MOST_LOST {
            self.leave_out(ctx, effects, id, TurnsEnd::MuchLonger);
        }
    }

    /// A communicator takes no turns for a while.
    fn leave_out(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, id: CommunicatorId, why: TurnsEnd) {
        self.out.insert(id, ctx.now.saturating_add(MIN_EXCLUSION));
        self.leave(ctx, effects, id, why);
    }

    /// Why a communicator takes turns; none where it takes none.
    pub(crate) fn reason(&self, id: CommunicatorId) -> Option<&InterleaveReason> {
        self.members.get(&id).map(|member| &member.reason)
    }

    /// For operators: with whom a communicator takes turns and what it waited; nothing where it takes none.
    pub(crate) fn describe(&self, ctx: &Ctx<'_>, id: CommunicatorId) -> String {
        let Some(member) = self.members.get(&id) else { return String::new() };
        let name = |id: &CommunicatorId| {
            let known = ctx.communicators.get(id)?;
            Some(format!("{}/{}", known.tenant, known.name))
        };
        let others: Vec<String> = member.beside.iter().filter_map(name).collect();
        let mean = member.waited.as_secs_f64() * 1e3 / member.noted.max(1) as f64;
        format!(
            "takes turns with {}, {} so far that waited {mean:.1} ms in the mean: {}",
            others.join(", "),
            member.given,
            member.reason,
        )
    }
}

/// Whether an agent need not be told anew.
fn alike(one: &v1::Interleaving, other: &v1::Interleaving) -> bool {
    let near = |one: u64, other: u64| one.abs_diff(other) as f64 <= ALIKE * one.max(other) as f64;
    one.max_operations == other.max_operations
        && near(one.max_wait_ns, other.max_wait_ns)
        && near(one.min_bytes, other.min_bytes)
        && near(one.max_idle_ns, other.max_idle_ns)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn reported(ms: u64) -> Remaining {
        Remaining::Known(nanos(MS * ms as u32))
    }

    /// Turns of the iteration from that operation on, of four that take 80 ms.
    fn iteration(usage: &mut TurnUsage, first: u64, lasts: &[u64]) {
        for (turn, ms) in (0..).zip(lasts) {
            usage.begin(first + turn, 4);
            usage.add(MS * *ms as u32);
        }
    }

    #[test]
    fn operations_that_are_over_are_not_left() {
        let mut usage = TurnUsage::default();
        usage.begin(8, 4);
        assert_eq!(usage.remaining(8, 4, MS * 80), reported(80));
        usage.add(MS * 20);
        usage.begin(9, 4);
        assert_eq!(usage.remaining(9, 4, MS * 80), reported(60));
        assert_eq!(usage.remaining(11, 4, MS * 80), reported(20));
        // The next iteration.
        usage.begin(12, 4);
        assert_eq!(usage.remaining(12, 4, MS * 80), reported(80));
    }

    #[test]
    fn the_same_operation_again_is_a_whole_iteration() {
        let mut usage = TurnUsage::default();
        for _ in 0..3 {
            usage.begin(8, 4);
            usage.begin(11, 4);
            assert_eq!(usage.remaining(11, 4, MS * 80), reported(20));
            usage.begin(11, 4);
            assert_eq!(usage.remaining(11, 4, MS * 80), reported(80));
        }
    }

    #[test]
    fn longer_turns_count_and_not_reports() {
        let mut usage = TurnUsage::default();
        iteration(&mut usage, 8, &[109]);
        usage.begin(12, 4);
        assert_eq!(usage.remaining(12, 4, MS * 80), reported(80), "a little is no contradiction");
        let mut usage = TurnUsage::default();
        iteration(&mut usage, 8, &[120]);
        usage.begin(12, 4);
        assert_eq!(usage.remaining(12, 4, MS * 80), Remaining::Unknown(nanos(MS * 120)));
        // Nobody gains by small operations before the large one.
        let mut usage = TurnUsage::default();
        iteration(&mut usage, 8, &[2, 1, 1, 150]);
        iteration(&mut usage, 12, &[2, 1]);
        usage.begin(15, 4);
        assert_eq!(usage.remaining(15, 4, MS * 80), Remaining::Unknown(nanos(MS * 154)));
    }

    #[test]
    fn what_turns_took_is_forgotten() {
        let mut usage = TurnUsage::default();
        iteration(&mut usage, 8, &[400]);
        for index in 0..8 {
            iteration(&mut usage, 12 + 4 * index, &[80]);
        }
        usage.begin(44, 4);
        assert!(matches!(usage.remaining(44, 4, MS * 80), Remaining::Unknown(_)));
        for index in 0..8 {
            iteration(&mut usage, 48 + 4 * index, &[80]);
        }
        usage.begin(80, 4);
        assert_eq!(usage.remaining(80, 4, MS * 80), reported(80));
    }
}
