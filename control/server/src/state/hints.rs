//! What tenants say that their communicators will do, until it is measured.
//!
//! Nothing of it enters a plan that others are part of: it is used for the communicator it is about, after all others have been planned for.
//! A task's priority divides anew what its tenant's communicators have together; a period lets control hold the communicator itself
//! back, once, so that it takes turns with others sooner; sizes say of which operation a time is predicted, and whether codes pay, and
//! so does what no iteration waits for.
//! So a lie costs who tells it. What measurements contradict is dropped.

use super::decisions::Trigger;
use super::lately::Lately;
use super::rhythms::{LONGEST, middle};
use super::{Fact, SessionId, State};
use harmonaize_abi::Collective;
use harmonaize_abi::session::{Expected, Hints};
use harmonaize_api::v1::{self, to_agent};
use harmonaize_planner::{
    Assignment, Bytes, Conditions, HostId, Job, Nanos, Rhythm, Task, alone, prefer, stagger,
};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// What was said and what is measured are the same up to this part.
const ALIKE: f64 = 0.25;

/// All hints.
#[derive(Debug, Default)]
pub(super) struct AllHints {
    said: BTreeMap<u64, Said>,
    lately: Lately,
}

/// What is expected of a communicator.
#[derive(Debug)]
struct Said {
    hints: Hints,
    became: Became,
    /// Whether the communicator was held on the word of hints that no measurement has confirmed yet: it is not again.
    held: bool,
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
    pub(super) fn end(&mut self, id: u64) {
        self.said.remove(&id);
    }

    /// A tenant is gone.
    pub(super) fn forget(&mut self, tenant: &str) {
        self.lately.forget(tenant);
    }

    fn believed(&self, id: u64) -> Option<&Hints> {
        let said = self.said.get(&id).filter(|said| said.became == Became::Believed)?;
        Some(&said.hints)
    }

    /// Bytes of the operation that the middle one of all bytes belongs to; 0 where nothing is said, or no longer believed.
    pub(super) fn bulk(&self, id: u64) -> u64 {
        let Some(hints) = self.believed(id) else { return 0 };
        middle(hints.sequence.iter().map(|expected| expected.bytes).collect())
    }

    /// The priority of a task.
    fn priority(&self, id: u64) -> u8 {
        self.said.get(&id).map_or(0, |said| said.hints.task_priority)
    }

    /// For operators: what was said, and what became of it; nothing where nothing was.
    pub(super) fn words(&self, id: u64) -> String {
        let Some(Said { hints, became, .. }) = self.said.get(&id) else { return String::new() };
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

/// For how long an AllReduce of so many bytes is hidden behind computing: where the iteration waits for none, all share what the rest of the
/// iteration leaves of its period, by their bytes. `alone`: how long so many bytes take alone.
fn hidden(hints: &Hints, bytes: f64, alone: impl Fn(Bytes) -> Nanos) -> Duration {
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

impl State {
    /// A process of a tenant says what it expects of a communicator.
    pub(super) fn hint(&mut self, now: Duration, from: SessionId, asked: &v1::Hint) {
        let refused = self.take_hints(now, asked).err().unwrap_or_default();
        self.send(from, to_agent::Message::Hinted(v1::Hinted { request: asked.request, refused }));
    }

    fn take_hints(&mut self, now: Duration, asked: &v1::Hint) -> Result<(), String> {
        let id = self.named(&asked.tenant, &asked.communicator)?;
        self.hints.lately.asks(now, &asked.tenant, id, "hints")?;
        let said = asked.hints.clone().unwrap_or_default();
        let hints = said.said().ok_or("hints of a collective that the provider does not know")?;
        hints.check().map_err(|error| error.to_string())?;
        let before = self.hints.said.get(&id);
        let held = before.is_some_and(|said| said.held);
        let order = before.map_or(0, |said| said.hints.task_priority) != hints.task_priority;
        let waited = self.hidden(id, f64::INFINITY);
        self.hints.said.insert(id, Said { hints, became: Became::Believed, held });
        if order || waited != self.hidden(id, f64::INFINITY) {
            self.want_plan(Trigger::Hints);
        }
        if let Some(known) = self.communicators.get(&id) {
            let (tenant, name) = (known.tenant.clone(), known.name.clone());
            self.fact(Fact::Hinted { communicator: id, tenant, name, hints: self.hints.words(id) });
        }
        Ok(())
    }

    /// Lays what is measured of a communicator beside what was said of it.
    pub(super) fn compare_hints(&mut self, id: u64) {
        let (Some(hints), Some(measured)) = (self.hints.believed(id), self.rhythms.get(&id)) else { return };
        let nothing = hints.period.is_none() && hints.sequence.is_empty();
        // A few of the operations of an iteration may look like iterations of their own.
        if nothing || !measured.says_something_of(hints.sequence.len()) {
            return;
        }
        let Some(known) = self.communicators.get(&id) else { return };
        let hosts: Vec<HostId> = known.members.iter().map(|member| member.host).collect();
        let became = match measured.rhythm() {
            Some(rhythm) => match self.contradiction(hints, &rhythm, &hosts) {
                None => Became::Measured,
                Some(why) => Became::Dropped(why),
            },
            None if measured.is_full() => Became::Dropped("its operations have no rhythm".to_owned()),
            None => return,
        };
        let (tenant, name) = (known.tenant.clone(), known.name.clone());
        let dropped = matches!(became, Became::Dropped(_));
        if let Some(said) = self.hints.said.get_mut(&id) {
            said.held &= dropped;
            said.became = became;
        }
        if dropped {
            self.fact(Fact::HintsDropped { communicator: id, tenant, name, hints: self.hints.words(id) });
        }
    }

    /// How what was measured is other than what was said, if it is. A period is that of the job alone: between what it computes and as
    /// long as its bytes take alone, and what it takes beside others.
    fn contradiction(&self, hints: &Hints, measured: &Rhythm, hosts: &[HostId]) -> Option<String> {
        let sum = total(&hints.sequence, |_| true);
        if !hints.sequence.is_empty() && measured.bytes.0 > 0 && !alike(sum, measured.bytes.0) {
            return Some(format!("iterations have {}, not {}", measured.bytes, Bytes(sum)));
        }
        let said = nanos(hints.period?);
        let busy = alone(&self.settings.topology, hosts, measured.bytes).min(measured.busy);
        let quiet = measured.period.0.saturating_sub(measured.busy.0);
        let least = quiet.saturating_add(busy.0);
        let fits = (least..=measured.period.0).contains(&said)
            || alike(said, least)
            || alike(said, measured.period.0);
        (!fits).then(|| format!("iterations take {}, not {}", measured.period, Nanos(said)))
    }

    /// For how long an AllReduce of so many bytes goes on before its tenant waits for it, by hints that nothing contradicts.
    pub(super) fn hidden(&self, id: u64, bytes: f64) -> Duration {
        let (Some(said), Some(known)) = (self.hints.said.get(&id), self.communicators.get(&id)) else {
            return Duration::ZERO;
        };
        if matches!(said.became, Became::Dropped(_)) {
            return Duration::ZERO;
        }
        let hosts: Vec<HostId> = known.members.iter().map(|member| member.host).collect();
        hidden(&said.hints, bytes, |critical| alone(&self.settings.topology, &hosts, critical))
    }

    /// Puts tenants' tasks in the order that each wants, within what it has.
    pub(super) fn prefer_tasks(&self, conditions: &Conditions, jobs: &[Job], assignments: &mut [Assignment]) {
        if self.hints.said.values().all(|said| said.hints.task_priority == 0) {
            return;
        }
        let tenants: BTreeSet<&str> =
            self.communicators.values().map(|known| known.tenant.as_str()).collect();
        let task = |job: &Job| {
            let tenant = self.communicators.get(&job.communicator).map_or("", |known| known.tenant.as_str());
            let tenant = tenants.iter().position(|known| *known == tenant).unwrap_or(usize::MAX);
            Task { tenant, priority: self.hints.priority(job.communicator) }
        };
        let tasks: Vec<Task> = jobs.iter().map(task).collect();
        prefer(&self.settings.topology, conditions, jobs, &tasks, assignments);
    }

    /// When a communicator communicates, by what was said and its first operations; none where that was measured, is not believed, or was
    /// used already. `at`: what was later is left out.
    fn said_rhythm(&self, id: u64, at: Nanos) -> Option<Rhythm> {
        let (hints, said) = (self.hints.believed(id)?, self.hints.said.get(&id)?);
        let bytes = Bytes(as_all_reduce(&hints.sequence));
        let period = Nanos(nanos(hints.period?));
        let known = self.rhythms.get(&id)?;
        let usable = !said.held && bytes.0 > 0 && known.rhythm().is_none();
        let began = known.iteration_began(hints.sequence.len(), at).filter(|_| usable)?;
        Some(Rhythm { period, bytes, began, ..Rhythm::default() })
    }

    /// Whether any communicator's turns can begin before its rhythm is measured.
    pub(super) fn any_said(&self) -> bool {
        self.hints.said.keys().any(|id| self.said_rhythm(*id, Nanos(u64::MAX)).is_some())
    }

    /// Holds communicators back whose rhythm is only said to be so: each tenant's own alone, beside what is measured of all others.
    /// `at`: where all are laid together.
    pub(super) fn take_said_turns(
        &mut self,
        now: Duration,
        at: Nanos,
        conditions: &Conditions,
        jobs: &[Job],
        assignments: &[Assignment],
    ) {
        let mut by_tenant: BTreeMap<&str, BTreeMap<u64, Rhythm>> = BTreeMap::new();
        for id in self.hints.said.keys() {
            if let Some((known, rhythm)) = self.communicators.get(id).zip(self.said_rhythm(*id, at)) {
                by_tenant.entry(&known.tenant).or_default().insert(*id, rhythm);
            }
        }
        let mut holds = Vec::new();
        for own in by_tenant.into_values() {
            let mut jobs = jobs.to_vec();
            for job in &mut jobs {
                job.rhythm = own.get(&job.communicator).copied().or(job.rhythm);
            }
            let only: BTreeSet<u64> = own.into_keys().collect();
            holds.extend(stagger(&self.settings.topology, conditions, &jobs, assignments, &only));
        }
        for asked in holds {
            let (id, hold) = (asked.communicator, Duration::from(asked.hold).min(LONGEST));
            if !self.send_hold(id, hold, format!("as its tenant says: {}", asked.reason)) {
                continue;
            }
            // Its own records alone are of before; others' say what they said.
            let stale = now + self.settings.telemetry_interval + hold;
            if let Some(known) = self.rhythms.get_mut(&id) {
                known.forget(stale);
            }
            if let Some(said) = self.hints.said.get_mut(&id) {
                said.held = true;
            }
        }
    }
}
