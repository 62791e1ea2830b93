//! What agents report of links and operations: taken within bounds, kept, and laid together over agents.

pub(super) mod check;
mod merge;

use super::communicator::Communicator;
use super::{Fact, SessionId, State};
use harmonaize_api::v1::{self, finding_change::Finding};
use harmonaize_planner::HostId;
use harmonaize_units::{Gcra, Quota};
use merge::Merging;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Most changes of verdicts that are kept for each host, and for control itself.
const MOST_CHANGES: usize = 64;

/// Reports that may come at once after a pause.
const BURST: u32 = 4;

/// Everything that was reported and is kept.
#[derive(Debug, Default)]
pub(super) struct Telemetry {
    hosts: BTreeMap<HostId, AgentReports>,
    communicators: BTreeMap<u64, Merging>,
    /// Verdicts of control's own.
    changes: VecDeque<(Duration, Finding)>,
}

/// What one host's agent said in its session.
#[derive(Debug, Default)]
struct AgentReports {
    reports: u64,
    refused: u64,
    dropped: u64,
    refusal: String,
    /// When the last was taken.
    at: Duration,
    sequence: u64,
    links: Vec<v1::Link>,
    flow_count: u64,
    losses: Option<v1::TelemetryLosses>,
    cost: Option<v1::TelemetryCost>,
    /// Verdicts that hold.
    stragglers: Vec<v1::Straggler>,
    changes: VecDeque<(Duration, Finding)>,
    allowance: Gcra,
    measuring: Measuring,
}

/// What outlives a session: which run of the agent's telemetry was heard of last, and the gaps that it and those before it had.
#[derive(Clone, Copy, Debug, Default)]
struct Measuring {
    begun_ns: u64,
    /// Of the runs before, with one for the beginning of each that followed.
    before: u64,
    /// Of this one.
    gaps: u64,
}

impl Measuring {
    fn take(&mut self, report: &v1::TelemetryReport) {
        if report.begun_ns != 0 && report.begun_ns != self.begun_ns {
            if self.begun_ns != 0 {
                self.before = self.before.saturating_add(self.gaps).saturating_add(1);
            }
            self.begun_ns = report.begun_ns;
        }
        self.gaps = report.losses.map_or(0, |losses| losses.gaps);
    }
}

fn remember(changes: &mut VecDeque<(Duration, Finding)>, now: Duration, verdict: Finding) {
    if changes.len() >= MOST_CHANGES {
        changes.pop_front();
    }
    changes.push_back((now, verdict));
}

/// Whom a verdict is about, and why.
fn about(one: &v1::Straggler) -> (u64, &str, u32, i32) {
    (one.communicator, &one.job, one.rank, one.cause)
}

impl AgentReports {
    /// Takes the verdicts that hold now, and notes those that are new or over.
    fn stragglers(&mut self, now: Duration, told: Vec<v1::Straggler>) {
        for one in &told {
            let held = self.stragglers.iter().any(|held| about(held) == about(one));
            if held == (one.ended_ns > 0) {
                remember(&mut self.changes, now, Finding::Straggler(one.clone()));
            }
        }
        self.stragglers = told.into_iter().filter(|one| one.ended_ns == 0).collect();
    }
}

impl State {
    /// An agent's report. It changes nothing unless it is right in whole, and comes no faster than it may.
    pub(super) fn telemetry(&mut self, now: Duration, from: SessionId, report: v1::TelemetryReport) {
        let Some(host) = self.sessions.get(&from).map(|session| session.host) else { return };
        let interval = self.settings.telemetry_interval;
        let heard = self.telemetry.hosts.entry(host).or_default();
        let quota = Quota { interval: interval / 2, burst: BURST };
        if interval.is_zero() || heard.allowance.take(now, quota).is_err() {
            heard.dropped += 1;
            let count = heard.dropped;
            return self.unusual(host, count, "reports come faster than was asked for");
        }
        let verdict = check::report(&report, heard.sequence);
        if let Err(why) = verdict.and_then(|()| self.belongs(from, &report)) {
            let Some(heard) = self.telemetry.hosts.get_mut(&host) else { return };
            heard.refused += 1;
            heard.refusal.clone_from(&why);
            let count = heard.refused;
            return self.unusual(host, count, &why);
        }
        self.keep(now, host, from, report);
    }

    /// For the log: the first of a kind, and then ever more rarely.
    pub(super) fn unusual(&mut self, host: HostId, count: u64, why: &str) {
        if count.is_power_of_two() {
            let host = self.host_name(host);
            self.fact(Fact::TelemetryRefused { host, count, why: why.to_owned() });
        }
    }

    /// Whether it tells of the agent's own part alone. What control knows nothing of (any more) is no fault.
    fn belongs(&self, from: SessionId, report: &v1::TelemetryReport) -> Result<(), String> {
        for operation in report.operations.iter().chain(&report.open) {
            let Some(known) = self.communicators.get(&operation.communicator) else { continue };
            check::part(operation, from, &known.members)?;
        }
        for one in report.stragglers.iter().filter(|one| one.job.is_empty()) {
            let Some(known) = self.communicators.get(&one.communicator) else { continue };
            let own = known.member_of(from).is_some_and(|member| member.ranks.contains(&one.rank));
            if !own {
                return Err(format!("a verdict on rank {}, which is not the agent's", one.rank));
            }
        }
        Ok(())
    }

    fn keep(&mut self, now: Duration, host: HostId, from: SessionId, report: v1::TelemetryReport) {
        let Some(heard) = self.telemetry.hosts.get_mut(&host) else { return };
        heard.reports += 1;
        heard.measuring.take(&report);
        (heard.at, heard.sequence) = (now, report.sequence);
        (heard.links, heard.flow_count) = (report.links, report.flow_count);
        (heard.losses, heard.cost) = (report.losses, report.cost);
        for change in report.changes {
            remember(&mut heard.changes, now, Finding::Congestion(change));
        }
        heard.stragglers(now, report.stragglers);
        let known = &self.communicators;
        self.telemetry.communicators.retain(|id, _| known.contains_key(id));
        for mut operation in report.operations {
            self.record_operation(now, from, &operation);
            operation.complete &= !self.turns.delayed(&operation);
            let Some(communicator) = self.communicators.get(&operation.communicator) else { continue };
            let (id, number) = (operation.communicator, operation.operation);
            let merging = self.telemetry.communicators.entry(id).or_insert_with(|| Merging::new(id));
            let (judged, took) = merging.take(operation, from, &communicator.members);
            for mut found in judged {
                found.host = host_of(communicator, found.rank, &self.settings);
                remember(&mut self.telemetry.changes, now, Finding::Straggler(found));
            }
            if let Some((bytes, took)) = took {
                // What it waited for its turn is nobody's slowness.
                let waited = super::link_state::nanos(self.turns.waited(id, number)).0;
                self.operation_took(now, id, bytes, took.saturating_sub(waited));
            }
        }
        for operation in &report.open {
            self.watch_open(now, report.time_ns, operation);
        }
        self.take_turns(now);
    }

    /// A new session of a host begins anew; that measuring did, too, is known by its first report.
    pub(super) fn forget_telemetry(&mut self, host: HostId) {
        if let Some(heard) = self.telemetry.hosts.get_mut(&host) {
            *heard = AgentReports { measuring: heard.measuring, ..AgentReports::default() };
        }
    }

    pub(super) fn host_telemetry(&self, now: Duration, host: HostId) -> v1::HostTelemetry {
        let mut told = v1::HostTelemetry {
            host: self.host_name(host),
            connected: self.hosts.contains_key(&host),
            ..v1::HostTelemetry::default()
        };
        if let Some(heard) = self.telemetry.hosts.get(&host) {
            (told.reports, told.refused, told.dropped) = (heard.reports, heard.refused, heard.dropped);
            told.refusal.clone_from(&heard.refusal);
            if heard.reports > 0 {
                let age = now.saturating_sub(heard.at).as_nanos();
                told.age_ns = u64::try_from(age).unwrap_or(u64::MAX).max(1);
            }
            told.links.clone_from(&heard.links);
            told.flow_count = heard.flow_count;
            (told.losses, told.cost) = (heard.losses, heard.cost);
            if let Some(losses) = &mut told.losses {
                losses.gaps = losses.gaps.saturating_add(heard.measuring.before);
            }
        }
        self.link_state.reports.add_report_counts(host, &mut told);
        told.slot_requests_dropped = self.turns.dropped(host);
        told
    }

    pub(super) fn communicator_telemetry(&self, id: u64) -> Option<v1::CommunicatorTelemetry> {
        let (merging, known) = (self.telemetry.communicators.get(&id)?, self.communicators.get(&id)?);
        let mut straggler = merging.worst().cloned();
        if let Some(found) = &mut straggler {
            found.host = host_of(known, found.rank, &self.settings);
        }
        Some(v1::CommunicatorTelemetry {
            communicator: id,
            tenant: known.tenant.clone(),
            name: known.name.clone(),
            ranks: known.ranks,
            operations: merging.operations(),
            last_operation_ns: merging.last_ns(),
            median_operation_ns: merging.median_ns(),
            straggler,
        })
    }

    /// How things stand on all hosts. `realtime_ns` is CLOCK_REALTIME now.
    pub fn fabric(&self, now: Duration, realtime_ns: u64) -> v1::FabricSnapshot {
        let hosts = (0..self.settings.topology.hosts().len()).map(HostId);
        let communicators: Vec<v1::CommunicatorTelemetry> =
            self.communicators.keys().filter_map(|id| self.communicator_telemetry(*id)).collect();
        v1::FabricSnapshot {
            time_ns: realtime_ns,
            hosts: hosts.map(|host| self.host_telemetry(now, host)).collect(),
            stragglers: self.fabric_stragglers(),
            communicators,
            changes: self.fabric_changes(now, realtime_ns),
        }
    }

    /// Control's own verdicts, and those of agents on whom control has none.
    fn fabric_stragglers(&self) -> Vec<v1::Straggler> {
        let mut all: Vec<v1::Straggler> = Vec::new();
        for (id, merging) in &self.telemetry.communicators {
            let Some(known) = self.communicators.get(id) else { continue };
            all.extend(merging.stragglers().map(|found| v1::Straggler {
                host: host_of(known, found.rank, &self.settings),
                ..found.clone()
            }));
        }
        let live = self.telemetry.hosts.iter().filter(|(host, _)| self.hosts.contains_key(host));
        for (host, one) in live.flat_map(|(host, heard)| heard.stragglers.iter().map(move |one| (host, one)))
        {
            let merged = self.telemetry.communicators.get(&one.communicator);
            if one.job.is_empty() && merged.is_some_and(Merging::judges) {
                continue;
            }
            let host = if one.host.is_empty() { self.host_name(*host) } else { one.host.clone() };
            all.push(v1::Straggler { host, ..one.clone() });
        }
        all
    }

    fn fabric_changes(&self, now: Duration, realtime_ns: u64) -> Vec<v1::FindingChange> {
        let own = self.telemetry.changes.iter().map(|change| (None, change));
        let told = self.telemetry.hosts.iter();
        let told =
            told.flat_map(|(host, heard)| heard.changes.iter().map(move |change| (Some(*host), change)));
        let mut all: Vec<_> = own.chain(told).collect();
        all.sort_by_key(|(_, (at, _))| *at);
        let newest = all.len().saturating_sub(MOST_CHANGES);
        let change = |(host, (at, verdict)): (Option<HostId>, &(Duration, Finding))| {
            let age = u64::try_from(now.saturating_sub(*at).as_nanos()).unwrap_or(u64::MAX);
            v1::FindingChange {
                time_ns: realtime_ns.saturating_sub(age),
                host: host.map_or_else(String::new, |host| self.host_name(host)),
                finding: Some(verdict.clone()),
            }
        };
        all.into_iter().skip(newest).map(change).collect()
    }
}

/// Name of the host that has a rank; empty for none.
fn host_of(known: &Communicator, rank: u32, settings: &super::Settings) -> String {
    let member = known.members.iter().find(|member| member.ranks.contains(&rank));
    let host = member.and_then(|member| settings.topology.hosts().get(member.host.0));
    host.map_or_else(String::new, |host| host.name.clone())
}
