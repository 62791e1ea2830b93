//! What agents report of links and operations: taken within bounds, kept, and laid together over agents.

pub(crate) mod check;
pub(crate) mod merge;

use crate::state::ctx::Ctx;
use crate::state::effects::Effects;
use crate::state::job::communicator::Communicator;
use crate::state::output::SessionId;
use crate::state::settings::Settings;
use check::ReportFault;
use harmonaize_abi::{Bytes, CommunicatorId, Nanos, Rank, StragglerCause};
use harmonaize_api::v1::{self, finding_change::Finding};
use harmonaize_disclose::Fact;
use harmonaize_planner::HostId;
use harmonaize_units::{Gcra, Quota};
use merge::Merging;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// Most changes of findings that are kept for each host, and for control itself.
pub(crate) const MOST_CHANGES: usize = 64;

/// Reports that may come at once after a pause.
const BURST: u32 = 4;

/// Everything that was reported and is kept.
#[derive(Debug, Default)]
pub(crate) struct Telemetry {
    pub hosts: BTreeMap<HostId, AgentReports>,
    pub communicators: BTreeMap<CommunicatorId, Merging>,
    /// Findings of control's own.
    pub changes: VecDeque<(Duration, Finding)>,
    /// How often agents found congestion, by its cause.
    pub congestion: BTreeMap<v1::CongestionCause, u64>,
}

/// What one host's agent said in its session.
#[derive(Debug, Default)]
pub(crate) struct AgentReports {
    pub reports: u64,
    pub refused: u64,
    pub dropped: u64,
    pub refusal: String,
    /// When the last was taken.
    pub at: Duration,
    pub sequence: u64,
    pub links: Vec<v1::Link>,
    pub flow_count: u64,
    pub losses: Option<v1::TelemetryLosses>,
    pub cost: Option<v1::TelemetryCost>,
    /// Findings that hold.
    pub stragglers: Vec<v1::Straggler>,
    pub changes: VecDeque<(Duration, Finding)>,
    pub allowance: Gcra,
    pub measuring: Measuring,
}

/// What outlives a session. It is the run of the agent's telemetry that came last, and the gaps that it and those before it
/// had.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Measuring {
    begun: Option<Nanos>,
    /// Of the runs before, with one for the beginning of each that followed.
    pub before: u64,
    /// Of this one.
    gaps: u64,
}

impl Measuring {
    fn take(&mut self, report: &v1::TelemetryReport) {
        let begun = (report.begun_ns != 0).then_some(Nanos(report.begun_ns));
        if begun.is_some() && begun != self.begun {
            if self.begun.is_some() {
                self.before = self.before.saturating_add(self.gaps).saturating_add(1);
            }
            self.begun = begun;
        }
        self.gaps = report.losses.map_or(0, |losses| losses.gaps);
    }
}

fn remember(changes: &mut VecDeque<(Duration, Finding)>, now: Duration, finding: Finding) {
    if changes.len() >= MOST_CHANGES {
        changes.pop_front();
    }
    changes.push_back((now, finding));
}

/// Whom a finding is about, and why.
fn about(one: &v1::Straggler) -> (u64, &str, u32, i32) {
    (one.communicator, &one.job, one.rank, one.cause)
}

impl AgentReports {
    /// Takes the findings that hold now, and notes those that are new or over. Returns the communicators of which some are, or
    /// are missing.
    fn stragglers(&mut self, now: Duration, told: Vec<v1::Straggler>) -> BTreeSet<CommunicatorId> {
        let subjects = |all: &[v1::Straggler]| -> BTreeSet<_> {
            all.iter()
                .filter(|one| one.ended_ns == 0)
                .map(|one| (one.communicator, one.rank, one.cause))
                .collect()
        };
        let (before, after) = (subjects(&self.stragglers), subjects(&told));
        for one in &told {
            let held = self.stragglers.iter().any(|held| about(held) == about(one));
            if held == (one.ended_ns > 0) {
                remember(&mut self.changes, now, Finding::Straggler(one.clone()));
            }
        }
        self.stragglers = told.into_iter().filter(|one| one.ended_ns == 0).collect();
        before.symmetric_difference(&after).map(|(id, ..)| CommunicatorId(*id)).collect()
    }
}

/// What an agent's report tells of operations.
#[derive(Debug)]
pub(crate) struct OperationReports {
    /// When it was made, by the agent's clock.
    pub at: Nanos,
    /// Those that have ended.
    pub ended: Vec<v1::Operation>,
    /// Those that have not.
    pub open: Vec<v1::Operation>,
}

impl Telemetry {
    /// Takes a report in unless something of it is wrong, or it comes faster than it may. Returns what it
    /// tells of operations.
    pub(crate) fn report(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        from: SessionId,
        report: v1::TelemetryReport,
    ) -> Option<OperationReports> {
        let now = ctx.now;
        let host = ctx.sessions.get(&from).map(|session| session.host)?;
        let interval = ctx.settings.telemetry_interval;
        let heard = self.hosts.entry(host).or_default();
        let quota = Quota { interval: interval / 2, burst: BURST };
        if interval.is_zero() || heard.allowance.take(now, quota).is_err() {
            heard.dropped += 1;
            let count = heard.dropped;
            effects.unusual(ctx, host, count, "reports come faster than was asked for");
            return None;
        }
        let checked = check::report(&report, heard.sequence);
        if let Err(fault) = checked.and_then(|()| belongs(ctx, from, &report)) {
            let why = fault.to_string();
            let heard = self.hosts.get_mut(&host)?;
            heard.refused += 1;
            heard.refusal.clone_from(&why);
            let count = heard.refused;
            effects.unusual(ctx, host, count, &why);
            return None;
        }
        let heard = self.hosts.get_mut(&host)?;
        heard.reports += 1;
        heard.measuring.take(&report);
        (heard.at, heard.sequence) = (now, report.sequence);
        (heard.links, heard.flow_count) = (report.links, report.flow_count);
        (heard.losses, heard.cost) = (report.losses, report.cost);
        for change in report.changes {
            if change.level() > v1::CongestionLevel::None {
                *self.congestion.entry(change.cause()).or_default() += 1;
            }
            remember(&mut heard.changes, now, Finding::Congestion(change));
        }
        self.take_stragglers(ctx, effects, host, report.stragglers);
        self.communicators.retain(|id, _| ctx.communicators.contains_key(id));
        Some(OperationReports { at: Nanos(report.time_ns), ended: report.operations, open: report.open })
    }

    /// Takes what an agent finds of ranks alone, which was checked.
    pub(crate) fn take_stragglers(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        host: HostId,
        found: Vec<v1::Straggler>,
    ) {
        for id in self.hosts.entry(host).or_default().stragglers(ctx.now, found) {
            self.note_stragglers(ctx, effects, id);
        }
    }

    /// Lays what an agent tells of an operation beside what others do. Returns, once all have told, its bytes
    /// and the time from the last rank's call.
    pub(crate) fn operation(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        from: SessionId,
        operation: v1::Operation,
    ) -> Option<(Bytes, Duration)> {
        let id = CommunicatorId(operation.communicator);
        let communicator = ctx.communicators.get(&id)?;
        let merging = self.communicators.entry(id).or_insert_with(|| Merging::new(id));
        let judged_before = merging.judges();
        let (judged, took) = merging.take(ctx.now, operation, from, &communicator.members);
        let changed = !judged.is_empty() || judged_before != merging.judges();
        for mut found in judged {
            found.host = host_of(communicator, found.rank, ctx.settings);
            remember(&mut self.changes, ctx.now, Finding::Straggler(found));
        }
        if changed {
            self.note_stragglers(ctx, effects, id);
        }
        took
    }

    /// Notes for its tenant who holds a communicator up. That is by control's own findings, or where it has none by those of
    /// agents.
    fn note_stragglers(&self, ctx: &Ctx<'_>, effects: &mut Effects, id: CommunicatorId) {
        let Some(communicator) = ctx.communicators.get(&id) else { return };
        let own = self.communicators.get(&id).filter(|merging| merging.judges());
        let live = self.hosts.iter().filter(|(host, _)| own.is_none() && ctx.hosts.contains_key(host));
        let of_agents = live.flat_map(|(_, heard)| &heard.stragglers);
        let of_agents = of_agents.filter(|one| one.job.is_empty() && one.communicator == id.0);
        let findings = own.into_iter().flat_map(Merging::stragglers).chain(of_agents);
        let mut late: BTreeMap<StragglerCause, BTreeMap<Rank, Duration>> =
            [StragglerCause::Compute, StragglerCause::Network].map(|cause| (cause, BTreeMap::new())).into();
        for one in findings.filter(|one| one.rank < communicator.ranks) {
            let Some(cause) = one.cause().specified() else { continue };
            late.entry(cause).or_default().insert(Rank(one.rank), Duration::from_nanos(one.delay_ns));
        }
        for (cause, ranks) in late {
            effects.note(ctx, id, Fact::Stragglers { cause, ranks, hosts: communicator.members.len() });
        }
    }

    /// A new session of a host begins anew; that measuring did, too, is known by its first report.
    pub(crate) fn forget(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, host: HostId) {
        if let Some(heard) = self.hosts.get_mut(&host) {
            let anew = AgentReports { measuring: heard.measuring, ..AgentReports::default() };
            let before = std::mem::replace(heard, anew);
            for id in
                before.stragglers.iter().map(|one| CommunicatorId(one.communicator)).collect::<BTreeSet<_>>()
            {
                self.note_stragglers(ctx, effects, id);
            }
        }
    }
}

/// Whether it tells of the agent's own part alone. What control knows nothing of (any more) is no fault.
fn belongs(ctx: &Ctx<'_>, from: SessionId, report: &v1::TelemetryReport) -> Result<(), ReportFault> {
    for operation in report.operations.iter().chain(&report.open) {
        let Some(known) = ctx.communicators.get(&CommunicatorId(operation.communicator)) else { continue };
        check::part(operation, from, &known.members)?;
    }
    for one in report.stragglers.iter().filter(|one| one.job.is_empty()) {
        let Some(known) = ctx.communicators.get(&CommunicatorId(one.communicator)) else { continue };
        let own = known.member_of(from).is_some_and(|member| member.ranks.contains(&one.rank));
        if !own {
            return Err(ReportFault::FindingRank(one.rank));
        }
    }
    Ok(())
}

/// Name of the host that has a rank; empty for none.
pub(crate) fn host_of(known: &Communicator, rank: u32, settings: &Settings) -> String {
    let member = known.members.iter().find(|member| member.ranks.contains(&rank));
    let host = member.and_then(|member| settings.topology.hosts().get(member.host.0));
    host.map_or_else(String::new, |host| host.name.clone())
}
