//! How things stand: what agents answer, laid beside what control knows.

use super::Queries;
use crate::state::job::communicator::Communicator;
use crate::state::job::reconcile::proposer::tuning_message;
use crate::state::output::SessionId;
use harmonaize_abi::CommunicatorId;
use harmonaize_api::v1;
use harmonaize_plan::AlgorithmTable;
use std::collections::BTreeMap;
use std::time::Duration;

impl Queries<'_> {
    pub(crate) fn status(&self, reports: &BTreeMap<SessionId, v1::Report>) -> v1::StatusReply {
        v1::StatusReply {
            agents: self.agents(reports),
            tenants: self.tenant_status(reports),
            ..self.status_without_agents(reports)
        }
    }

    /// The same without agents and tenants.
    pub(crate) fn status_without_agents(&self, reports: &BTreeMap<SessionId, v1::Report>) -> v1::StatusReply {
        let since =
            |at: Duration| u64::try_from(self.ctx.now.saturating_sub(at).as_nanos()).unwrap_or(u64::MAX);
        let known: Vec<(CommunicatorId, &Communicator)> =
            self.ctx.communicators.iter().map(|(id, known)| (*id, known)).collect();
        v1::StatusReply {
            build: harmonaize_program::version().to_owned(),
            uptime_ns: since(Duration::ZERO),
            communicators: known
                .into_iter()
                .map(|(id, known)| self.communicator(id, known, reports))
                .collect(),
            waiting: self
                .joins
                .waiting()
                .iter()
                .map(|((tenant, name), waiting)| v1::WaitingStatus {
                    tenant: tenant.clone(),
                    name: name.clone(),
                    ranks: waiting.ranks,
                    joined: waiting.joined.keys().copied().collect(),
                    age_ns: since(waiting.since),
                })
                .collect(),
            errors: self.history.errors(),
            recent_errors: self
                .history
                .latest()
                .map(|ended| v1::EndedStatus {
                    communicator: ended.id.0,
                    tenant: ended.tenant.clone(),
                    name: ended.name.clone(),
                    kind: ended.cause.kind.into(),
                    ranks: ended.cause.ranks.clone(),
                    detail: ended.cause.detail.clone(),
                    age_ns: since(ended.at),
                })
                .collect(),
            ..v1::StatusReply::default()
        }
    }

    fn agents(&self, reports: &BTreeMap<SessionId, v1::Report>) -> Vec<v1::AgentStatus> {
        let since =
            |at: Duration| u64::try_from(self.ctx.now.saturating_sub(at).as_nanos()).unwrap_or(u64::MAX);
        let hosts = self.ctx.settings.topology.hosts_there();
        hosts
            .map(|(index, host)| {
                let id = self.ctx.hosts.get(&index);
                let session = id.and_then(|id| self.ctx.sessions.get(id));
                let telemetry = self.host_telemetry(index);
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

    fn tenant_status(&self, reports: &BTreeMap<SessionId, v1::Report>) -> Vec<v1::TenantStatus> {
        let mut own: BTreeMap<&str, v1::TenantStatus> = BTreeMap::new();
        for known in self.ctx.communicators.values() {
            let tenant = own.entry(&known.tenant).or_default();
            tenant.communicators += 1;
            tenant.ranks = tenant.ranks.saturating_add(known.ranks);
        }
        for attachment in reports.values().flat_map(|report| &report.attachments) {
            own.entry(&attachment.tenant).or_default().attachments += 1;
        }
        let tenant = |name: &String| v1::TenantStatus {
            name: name.clone(),
            errors: self.history.errors_of(name),
            ..own.remove(name.as_str()).unwrap_or_default()
        };
        self.ctx.settings.tenants.iter().map(tenant).collect()
    }

    fn communicator(
        &self,
        id: CommunicatorId,
        communicator: &Communicator,
        reports: &BTreeMap<SessionId, v1::Report>,
    ) -> v1::CommunicatorStatus {
        let answered: Vec<(&[u32], &v1::CommunicatorReport)> = communicator
            .members
            .iter()
            .filter_map(|member| {
                let report = reports.get(&member.session?)?;
                let own = report.communicators.iter().find(|own| own.communicator == id.0)?;
                Some((member.ranks.as_slice(), own))
            })
            .collect();
        let current = communicator.current();
        let algorithms = current.map_or(AlgorithmTable::RING, |current| current.algorithm.table);
        v1::CommunicatorStatus {
            communicator: id.0,
            tenant: communicator.tenant.clone(),
            name: communicator.name.clone(),
            ranks: communicator.ranks,
            phase: communicator.phase().into(),
            epoch: communicator.epoch().into(),
            next_epoch: communicator.pending_epoch().into(),
            participants: communicator
                .members
                .iter()
                .map(|member| v1::Participant {
                    ranks: member.ranks.clone(),
                    host: self.ctx.host_name(member.host),
                })
                .collect(),
            order: current.map_or_else(Vec::new, |current| current.order.clone()),
            tuning: Some(tuning_message(communicator.tuning, &algorithms)),
            in_flight: merge(&answered),
            messages: answered.iter().flat_map(|(_, own)| own.messages.clone()).collect(),
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

/// Operations in flight anywhere. An agent that has neither begun nor completed one is waited for with all
/// its ranks; one that has knows best which of its ranks are missing, if others wait for it.
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
