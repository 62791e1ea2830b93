//! How things stand: agents are asked, and what they answer is laid beside what control knows.

use super::communicator::Communicator;
use super::{Output, SessionId, State};
use harmonaize_api::v1::{self, to_agent};
use harmonaize_planner::DirectThresholds;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Most status requests at a time; one more is answered with what control knows.
const MOST_QUESTIONS: usize = 64;

/// Most that is taken of what an agent reports: processes, communicators, operations in flight of each, errors, and characters of a text.
const MOST_ATTACHMENTS: usize = 4096;
const MOST_COMMUNICATORS: usize = 4096;
const MOST_IN_FLIGHT: usize = 256;
const MOST_ERRORS: usize = 64;
const MOST_CHARS: usize = 256;

/// A status request that waits for agents.
#[derive(Debug)]
pub(super) struct Question {
    pub deadline: Duration,
    awaited: BTreeSet<SessionId>,
    reports: BTreeMap<SessionId, v1::Report>,
}

impl State {
    /// Asks all agents; [`Output::Status`] follows with the returned number, after `patience` at the latest.
    pub fn ask_status(&mut self, now: Duration, patience: Duration) -> u64 {
        self.next_question += 1;
        let id = self.next_question;
        let awaited: BTreeSet<SessionId> = match self.questions.len() < MOST_QUESTIONS {
            true => self.sessions.keys().copied().collect(),
            false => BTreeSet::new(),
        };
        for session in &awaited {
            self.outputs
                .push(Output::Send(*session, to_agent::Message::ReportRequest(v1::ReportRequest { id })));
        }
        let deadline = now.saturating_add(patience);
        self.questions.insert(id, Question { deadline, awaited, reports: BTreeMap::new() });
        self.answer(now, id, false);
        id
    }

    pub(super) fn report(&mut self, now: Duration, from: SessionId, mut report: v1::Report) {
        let id = report.id;
        let most_ranks = self.settings.most_ranks as usize;
        if let Some(question) = self.questions.get_mut(&id)
            && question.awaited.remove(&from)
        {
            bound(&mut report, most_ranks);
            question.reports.insert(from, report);
            self.answer(now, id, false);
        }
    }

    pub(super) fn answer_lost(&mut self, now: Duration, session: SessionId) {
        for id in self.questions.keys().copied().collect::<Vec<_>>() {
            if self.questions.get_mut(&id).is_some_and(|question| question.awaited.remove(&session)) {
                self.answer(now, id, false);
            }
        }
    }

    pub(super) fn expire_questions(&mut self, now: Duration) {
        let late = self.questions.iter().filter(|(_, question)| question.deadline <= now);
        for id in late.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.answer(now, id, true);
        }
    }

    /// Answers a question once nobody is awaited, or at once.
    fn answer(&mut self, now: Duration, id: u64, at_once: bool) {
        if !at_once && self.questions.get(&id).is_none_or(|question| !question.awaited.is_empty()) {
            return;
        }
        if let Some(question) = self.questions.remove(&id) {
            let reply = self.status(now, &question.reports);
            self.outputs.push(Output::Status(id, Box::new(reply)));
        }
    }

    fn status(&self, now: Duration, reports: &BTreeMap<SessionId, v1::Report>) -> v1::StatusReply {
        let since = |at: Duration| u64::try_from(now.saturating_sub(at).as_nanos()).unwrap_or(u64::MAX);
        let known: Vec<(u64, &Communicator)> =
            self.communicators.iter().map(|(id, known)| (*id, known)).collect();
        v1::StatusReply {
            build: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_ns: since(Duration::ZERO),
            agents: self.agents(now, reports),
            tenants: self.tenants(reports),
            communicators: known
                .into_iter()
                .map(|(id, known)| self.communicator(id, known, reports))
                .collect(),
            waiting: self
                .waiting
                .iter()
                .map(|((tenant, name), waiting)| v1::WaitingStatus {
                    tenant: tenant.clone(),
                    name: name.clone(),
                    ranks: waiting.ranks,
                    joined: waiting.joined.keys().copied().collect(),
                    age_ns: since(waiting.since),
                })
                .collect(),
            errors: self.errors,
            recent_errors: self
                .ended
                .iter()
                .map(|ended| v1::EndedStatus {
                    communicator: ended.id,
                    tenant: ended.tenant.clone(),
                    name: ended.name.clone(),
                    kind: ended.cause.kind.into(),
                    ranks: ended.cause.ranks.clone(),
                    detail: ended.cause.detail.clone(),
                    age_ns: since(ended.at),
                })
                .collect(),
        }
    }

    fn agents(&self, now: Duration, reports: &BTreeMap<SessionId, v1::Report>) -> Vec<v1::AgentStatus> {
        let since = |at: Duration| u64::try_from(now.saturating_sub(at).as_nanos()).unwrap_or(u64::MAX);
        let hosts = self.settings.topology.hosts().iter().enumerate();
        hosts
            .map(|(index, host)| {
                let index = harmonaize_planner::HostId(index);
                let id = self.hosts.get(&index);
                let session = id.and_then(|id| self.sessions.get(id));
                let telemetry = self.host_telemetry(now, index);
                let silent = v1::HostTelemetry {
                    host: telemetry.host.clone(),
                    connected: telemetry.connected,
                    ..v1::HostTelemetry::default()
                };
                let told = telemetry != silent;
                v1::AgentStatus {
                    host: host.name.clone(),
                    connected: session.is_some(),
                    listen: session.map_or_else(String::new, |session| session.listen.to_string()),
                    build: session.map_or_else(String::new, |session| session.build.clone()),
                    session_ns: session.map_or(0, |session| since(session.since)),
                    report: id.and_then(|id| reports.get(id)).cloned(),
                    telemetry: told.then_some(telemetry),
                }
            })
            .collect()
    }

    fn tenants(&self, reports: &BTreeMap<SessionId, v1::Report>) -> Vec<v1::TenantStatus> {
        let mut own: BTreeMap<&str, v1::TenantStatus> = BTreeMap::new();
        for known in self.communicators.values() {
            let tenant = own.entry(&known.tenant).or_default();
            tenant.communicators += 1;
            tenant.ranks = tenant.ranks.saturating_add(known.ranks);
        }
        for attachment in reports.values().flat_map(|report| &report.attachments) {
            own.entry(&attachment.tenant).or_default().attachments += 1;
        }
        let tenant = |name: &String| v1::TenantStatus {
            name: name.clone(),
            errors: self.tenant_errors.get(name).copied().unwrap_or(0),
            ..own.remove(name.as_str()).unwrap_or_default()
        };
        self.settings.tenants.iter().map(tenant).collect()
    }

    fn communicator(
        &self,
        id: u64,
        communicator: &Communicator,
        reports: &BTreeMap<SessionId, v1::Report>,
    ) -> v1::CommunicatorStatus {
        let answered: Vec<(&[u32], &v1::CommunicatorReport)> = communicator
            .members
            .iter()
            .filter_map(|member| {
                let report = reports.get(&member.session?)?;
                let own = report.communicators.iter().find(|own| own.communicator == id)?;
                Some((member.ranks.as_slice(), own))
            })
            .collect();
        let current = communicator.current();
        let sizes = current.map_or_else(DirectThresholds::default, |current| current.algorithm.sizes);
        v1::CommunicatorStatus {
            communicator: id,
            tenant: communicator.tenant.clone(),
            name: communicator.name.clone(),
            ranks: communicator.ranks,
            phase: communicator.phase().into(),
            epoch: communicator.epoch(),
            next_epoch: communicator.pending_epoch(),
            participants: communicator
                .members
                .iter()
                .map(|member| v1::Participant {
                    ranks: member.ranks.clone(),
                    host: self.host_name(member.host),
                })
                .collect(),
            order: current.map_or_else(Vec::new, |current| current.order.clone()),
            tuning: Some(self.tuning_message(communicator.tuning, sizes)),
            in_flight: merge(&answered),
            operations_completed: answered.iter().map(|(_, own)| own.operations_completed).min().unwrap_or(0),
            bytes_sent: answered.iter().fold(0, |sum, (_, own)| sum.saturating_add(own.bytes_sent)),
            errors: answered.iter().fold(0, |sum, (_, own)| sum.saturating_add(own.errors)),
            last_change: communicator.last_change.clone(),
            telemetry: self.communicator_telemetry(id),
            agreement: Some(self.agreements.agreement(id))
                .filter(|told| told.number > 0)
                .map(|told| (&told).into()),
        }
    }
}

/// Cuts what an agent reports to what one can have to say: it is kept until all have answered, and goes to operators' terminals.
fn bound(report: &mut v1::Report, most_ranks: usize) {
    report.attachments.truncate(MOST_ATTACHMENTS);
    report.communicators.truncate(MOST_COMMUNICATORS);
    report.recent_errors.truncate(MOST_ERRORS);
    report.attachments.iter_mut().for_each(|attachment| cut(&mut attachment.tenant));
    report.recent_errors.iter_mut().for_each(cut);
    for communicator in &mut report.communicators {
        communicator.in_flight.truncate(MOST_IN_FLIGHT);
        for operation in &mut communicator.in_flight {
            operation.waiting_for.truncate(most_ranks);
            cut(&mut operation.call);
        }
    }
}

fn cut(text: &mut String) {
    if text.len() > MOST_CHARS || text.chars().any(char::is_control) {
        *text = text.chars().filter(|c| !c.is_control()).take(MOST_CHARS).collect();
    }
}

/// Operations in flight anywhere. An agent that has neither begun nor completed one is waited for with all its ranks; one
/// that has knows best which of its ranks are missing, if others wait for it.
fn merge(answered: &[(&[u32], &v1::CommunicatorReport)]) -> Vec<v1::OperationReport> {
    let mut merged: BTreeMap<u64, v1::OperationReport> = BTreeMap::new();
    for operation in answered.iter().flat_map(|(_, own)| &own.in_flight) {
        let entry = merged.entry(operation.operation).or_insert_with(|| v1::OperationReport {
            operation: operation.operation,
            call: operation.call.clone(),
            waiting_for: Vec::new(),
            age_ns: 0,
        });
        entry.age_ns = entry.age_ns.max(operation.age_ns);
        entry.waiting_for.extend(&operation.waiting_for);
    }
    for (number, operation) in &mut merged {
        for (ranks, own) in answered {
            let begun = own.in_flight.iter().find(|own| own.operation == *number);
            let missing = |rank: &u32| begun.is_some_and(|own| own.waiting_for.contains(rank));
            if begun.is_none() && own.operations_completed <= *number {
                operation.waiting_for.extend(*ranks);
            } else if ranks.iter().any(missing) {
                operation.waiting_for.retain(|rank| !ranks.contains(rank) || missing(rank));
            }
        }
        operation.waiting_for.sort_unstable();
        operation.waiting_for.dedup();
    }
    merged.into_values().collect()
}
