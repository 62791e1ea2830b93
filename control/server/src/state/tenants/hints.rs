//! What tenants say that their communicators will do, until it is measured.
//!
//! Nothing of it enters a plan that others are part of: it is used for the communicator it is about, after
//! all others have been planned for. A task's priority divides anew what its tenant's communicators have
//! together; sizes say of which operation a time is predicted, and whether codes pay, and so do a period and
//! what no iteration waits for. So a lie costs who tells it. What measurements contradict is dropped.

use crate::state::ctx::Ctx;
use crate::state::effects::Effects;
use crate::state::job::decisions::Trigger;
use crate::state::output::{Fact, SessionId};
use crate::state::refusal::RequestRefusal;
use crate::state::tenants::limits::TenantLimits;
use crate::state::world::iterations::middle;
use harmonaize_abi::session::{Expected, Hints, Refusal};
use harmonaize_abi::{Collective, CommunicatorId};
use harmonaize_api::v1::{self, to_agent};
use harmonaize_planner::{
    Assignment, Bytes, Conditions, HostId, IterationPattern, Job, Nanos, Task, Topology, apply_priorities,
    isolated_time,
};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// What was said and what is measured are the same up to this part.
const ALIKE: f64 = 0.25;

/// All hints.
#[derive(Debug, Default)]
pub(crate) struct AllHints {
    hints: BTreeMap<CommunicatorId, HintedCommunicator>,
    limits: TenantLimits,
}

/// What is expected of a communicator.
#[derive(Debug)]
struct HintedCommunicator {
    hints: Hints,
    became: Became,
}

/// What has become of a period and a sequence.
#[derive(Clone, Debug, PartialEq)]
enum Became {
    /// They are believed, for want of anything better.
    Believed,
    /// What was measured is alike, and has taken their place.
    Measured,
    /// What was measured is different, in words.
    Dropped(String),
}

impl AllHints {
    /// Forgets a communicator.
    pub(crate) fn end(&mut self, id: CommunicatorId) {
        self.hints.remove(&id);
    }

    /// A tenant is gone.
    pub(crate) fn forget(&mut self, tenant: &str) {
        self.limits.forget(tenant);
    }

    fn believed(&self, id: CommunicatorId) -> Option<&Hints> {
        let said = self.hints.get(&id).filter(|said| said.became == Became::Believed)?;
        Some(&said.hints)
    }

    /// Returns the bytes of the operation that the middle one of all bytes belongs to. It is 0 where nothing
    /// was hinted, or hints are no longer accepted.
    pub(crate) fn dominant_bytes(&self, id: CommunicatorId) -> u64 {
        let Some(hints) = self.believed(id) else { return 0 };
        middle(hints.sequence.iter().map(|expected| expected.bytes).collect())
    }

    /// The priority of a task.
    fn priority(&self, id: CommunicatorId) -> u8 {
        self.hints.get(&id).map_or(0, |said| said.hints.task_priority)
    }

    /// For operators: what was said, and what became of it; nothing where nothing was.
    pub(crate) fn describe_hints(&self, id: CommunicatorId) -> String {
        let Some(HintedCommunicator { hints, became, .. }) = self.hints.get(&id) else {
            return String::new();
        };
        let mut parts = Vec::new();
        parts.extend(hints.period.map(|period| format!("a period of {period:?}")));
        if !hints.sequence.is_empty() {
            let (operations, bytes) = (hints.sequence.len(), total(&hints.sequence, |_| true));
            parts.push(format!("{operations} operations of {} together", Bytes(bytes)));
        }
        let said = parts.join(", ");
        let order = match hints.task_priority {
            0 => String::new(),
            priority => format!("a task's priority of {priority}"),
        };
        let became = match (said.is_empty(), became) {
            (true, _) => return order,
            (_, Became::Believed) => "in use until it is measured".to_owned(),
            (_, Became::Measured) => "as was measured since, which is in use".to_owned(),
            (_, Became::Dropped(why)) => format!("dropped: {why}"),
        };
        let order = if order.is_empty() { order } else { format!("; {order}") };
        format!("{said}: {became}{order}")
    }

    /// A process of a tenant says what it expects of a communicator.
    pub(crate) fn hint(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, from: SessionId, message: &v1::Hint) {
        let outcome = self.take_hints(ctx, effects, message);
        effects.send(
            from,
            to_agent::Message::Hinted(v1::Hinted::answer(message.request, outcome.map_err(Refusal::from))),
        );
    }

    fn take_hints(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        message: &v1::Hint,
    ) -> Result<(), RequestRefusal> {
        let id = ctx.named(&message.tenant, &message.communicator)?;
        self.limits.take(ctx.now, &message.tenant, id, "hints")?;
        let said = message.hints.clone().unwrap_or_default();
        let hints = said.to_abi().ok_or(RequestRefusal::HintedCollective)?;
        hints.check()?;
        let before = self.hints.get(&id);
        let order = before.map_or(0, |said| said.hints.task_priority) != hints.task_priority;
        let waited = self.overlapped(ctx, id, f64::INFINITY);
        self.hints.insert(id, HintedCommunicator { hints, became: Became::Believed });
        if order || waited != self.overlapped(ctx, id, f64::INFINITY) {
            effects.want_plan(Trigger::Hints);
        }
        if let Some(known) = ctx.communicators.get(&id) {
            let (tenant, name) = (known.tenant.clone(), known.name.clone());
            effects.fact(Fact::Hinted { communicator: id, tenant, name, hints: self.describe_hints(id) });
        }
        Ok(())
    }

    /// Lays what is measured of a communicator beside what was said of it.
    pub(crate) fn compare(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, id: CommunicatorId) {
        let (Some(hints), Some(measured)) = (self.believed(id), ctx.iterations.get(&id)) else { return };
        let nothing = hints.period.is_none() && hints.sequence.is_empty();
        // A few of the operations of an iteration may look like iterations of their own.
        if nothing || !measured.has_enough(hints.sequence.len()) {
            return;
        }
        let Some(known) = ctx.communicators.get(&id) else { return };
        let hosts: Vec<HostId> = known.members.iter().map(|member| member.host).collect();
        let became = match measured.pattern() {
            Some(pattern) => match contradiction(&ctx.settings.topology, hints, &pattern, &hosts) {
                None => Became::Measured,
                Some(why) => Became::Dropped(why),
            },
            None if measured.is_full() => Became::Dropped("its operations have no rhythm".to_owned()),
            None => return,
        };
        let (tenant, name) = (known.tenant.clone(), known.name.clone());
        let dropped = matches!(became, Became::Dropped(_));
        if let Some(said) = self.hints.get_mut(&id) {
            said.became = became;
        }
        if dropped {
            effects.fact(Fact::HintsDropped {
                communicator: id,
                tenant,
                name,
                hints: self.describe_hints(id),
            });
        }
    }

    /// Returns for how long an AllReduce of so many bytes goes on before its tenant waits for it. It follows
    /// from hints that nothing contradicts.
    pub(crate) fn overlapped(&self, ctx: &Ctx<'_>, id: CommunicatorId, bytes: f64) -> Duration {
        let (Some(said), Some(known)) = (self.hints.get(&id), ctx.communicators.get(&id)) else {
            return Duration::ZERO;
        };
        if matches!(said.became, Became::Dropped(_)) {
            return Duration::ZERO;
        }
        let hosts: Vec<HostId> = known.members.iter().map(|member| member.host).collect();
        overlapped_time(&said.hints, bytes, |critical| {
            isolated_time(&ctx.settings.topology, &hosts, critical)
        })
    }

    /// Puts tenants' tasks in the order that each wants, within what it has.
    pub(crate) fn prefer_tasks(
        &self,
        ctx: &Ctx<'_>,
        conditions: &Conditions,
        jobs: &[Job],
        assignments: &mut [Assignment],
    ) {
        if self.hints.values().all(|said| said.hints.task_priority == 0) {
            return;
        }
        let tenants: BTreeSet<&str> = ctx.communicators.values().map(|known| known.tenant.as_str()).collect();
        let task = |job: &Job| {
            let tenant = ctx.communicators.get(&job.communicator).map_or("", |known| known.tenant.as_str());
            let tenant = tenants.iter().position(|known| *known == tenant).unwrap_or(usize::MAX);
            Task { tenant, priority: self.priority(job.communicator) }
        };
        let tasks: Vec<Task> = jobs.iter().map(task).collect();
        apply_priorities(&ctx.settings.topology, conditions, jobs, &tasks, assignments);
    }
}

/// Bytes of those of a sequence that count.
fn total(sequence: &[Expected], counts: impl Fn(&Expected) -> bool) -> u64 {
    sequence
        .iter()
        .filter(|expected| counts(expected))
        .fold(0, |sum: u64, expected| sum.saturating_add(expected.bytes))
}

/// What an iteration waits for, as bytes of an AllReduce: what takes a ring half of the time counts half.
fn as_all_reduce(sequence: &[Expected]) -> u64 {
    let reduced = |expected: &Expected| expected.critical && expected.collective == Collective::AllReduce;
    let others = |expected: &Expected| expected.critical && expected.collective != Collective::AllReduce;
    total(sequence, reduced).saturating_add(total(sequence, others) / 2)
}

/// For how long an AllReduce of so many bytes is hidden behind computing. Where the iteration waits for none,
/// all share what the rest of the iteration leaves of its period, by their bytes. `alone`: how long so many
/// bytes take alone.
fn overlapped_time(hints: &Hints, bytes: f64, alone: impl Fn(Bytes) -> Nanos) -> Duration {
    let reduces = || hints.sequence.iter().filter(|expected| expected.collective == Collective::AllReduce);
    let reduced = total(&hints.sequence, |expected| expected.collective == Collective::AllReduce);
    let (Some(period), true) = (hints.period, reduced > 0) else { return Duration::ZERO };
    if reduces().any(|expected| expected.critical) {
        return Duration::ZERO;
    }
    let left = period.saturating_sub(alone(Bytes(as_all_reduce(&hints.sequence))).into());
    left.mul_f64((bytes / reduced as f64).clamp(0.0, 1.0))
}

fn alike(one: u64, other: u64) -> bool {
    one.abs_diff(other) as f64 <= ALIKE * one.max(other) as f64
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// How what was measured is other than what was said, if it is. A period is that of the job alone: between
/// what it computes and as long as its bytes take alone, and what it takes beside others.
fn contradiction(
    topology: &Topology,
    hints: &Hints,
    measured: &IterationPattern,
    hosts: &[HostId],
) -> Option<String> {
    let sum = total(&hints.sequence, |_| true);
    if !hints.sequence.is_empty() && measured.bytes.0 > 0 && !alike(sum, measured.bytes.0) {
        return Some(format!("iterations have {}, not {}", measured.bytes, Bytes(sum)));
    }
    let said = nanos(hints.period?);
    let busy = isolated_time(topology, hosts, measured.bytes).min(measured.busy);
    let quiet = measured.period.0.saturating_sub(measured.busy.0);
    let least = quiet.saturating_add(busy.0);
    let fits =
        (least..=measured.period.0).contains(&said) || alike(said, least) || alike(said, measured.period.0);
    (!fits).then(|| format!("iterations take {}, not {}", measured.period, Nanos(said)))
}
