//! What agents measure, laid together for operators.

use super::Queries;
use crate::state::world::telemetry::merge::Merging;
use crate::state::world::telemetry::{MOST_CHANGES, host_of};
use harmonaize_abi::{CommunicatorId, Nanos};
use harmonaize_api::v1::{self, finding_change::Finding};
use harmonaize_planner::HostId;
use std::time::Duration;

impl Queries<'_> {
    pub(crate) fn host_telemetry(&self, host: HostId) -> v1::HostTelemetry {
        let mut told = v1::HostTelemetry {
            host: self.ctx.host_name(host),
            connected: self.ctx.hosts.contains_key(&host),
            ..v1::HostTelemetry::default()
        };
        if let Some(heard) = self.telemetry.hosts.get(&host) {
            (told.reports, told.refused, told.dropped) = (heard.reports, heard.refused, heard.dropped);
            told.refusal.clone_from(&heard.refusal);
            if heard.reports > 0 {
                let age = self.ctx.now.saturating_sub(heard.at).as_nanos();
                told.age_ns = u64::try_from(age).unwrap_or(u64::MAX).max(1);
            }
            told.links.clone_from(&heard.links);
            told.flow_count = heard.flow_count;
            (told.losses, told.cost) = (heard.losses, heard.cost);
            if let Some(losses) = &mut told.losses {
                losses.gaps = losses.gaps.saturating_add(heard.measuring.before);
            }
        }
        self.links.reports.add_report_counts(host, &mut told);
        told.slot_requests_dropped = self.turns.dropped(host);
        told
    }

    pub(crate) fn communicator_telemetry(&self, id: CommunicatorId) -> Option<v1::CommunicatorTelemetry> {
        let (merging, known) = (self.telemetry.communicators.get(&id)?, self.ctx.communicators.get(&id)?);
        let mut straggler = merging.worst().cloned();
        if let Some(found) = &mut straggler {
            found.host = host_of(known, found.rank, self.ctx.settings);
        }
        Some(v1::CommunicatorTelemetry {
            communicator: id.0,
            tenant: known.tenant.clone(),
            name: known.name.clone(),
            ranks: known.ranks,
            operations: merging.operations(),
            last_operation_ns: merging.last_ns(),
            median_operation_ns: merging.median_ns(),
            straggler,
        })
    }

    /// How things stand on all hosts. `realtime` is CLOCK_REALTIME now.
    pub fn fabric(&self, realtime: Nanos) -> v1::FabricSnapshot {
        let hosts = self.ctx.settings.topology.hosts_there();
        let communicators: Vec<v1::CommunicatorTelemetry> =
            self.ctx.communicators.keys().filter_map(|id| self.communicator_telemetry(*id)).collect();
        v1::FabricSnapshot {
            time_ns: realtime.0,
            hosts: hosts.map(|(host, _)| self.host_telemetry(host)).collect(),
            stragglers: self.fabric_stragglers(),
            communicators,
            changes: self.fabric_changes(realtime),
        }
    }

    /// Control's own findings, and those of agents on whom control has none.
    pub(super) fn fabric_stragglers(&self) -> Vec<v1::Straggler> {
        let mut all: Vec<v1::Straggler> = Vec::new();
        for (id, merging) in &self.telemetry.communicators {
            let Some(known) = self.ctx.communicators.get(id) else { continue };
            all.extend(merging.stragglers().map(|found| v1::Straggler {
                host: host_of(known, found.rank, self.ctx.settings),
                ..found.clone()
            }));
        }
        let live = self.telemetry.hosts.iter().filter(|(host, _)| self.ctx.hosts.contains_key(host));
        for (host, one) in live.flat_map(|(host, heard)| heard.stragglers.iter().map(move |one| (host, one)))
        {
            let merged = self.telemetry.communicators.get(&CommunicatorId(one.communicator));
            if one.job.is_empty() && merged.is_some_and(Merging::judges) {
                continue;
            }
            let host = if one.host.is_empty() { self.ctx.host_name(*host) } else { one.host.clone() };
            all.push(v1::Straggler { host, ..one.clone() });
        }
        all
    }

    fn fabric_changes(&self, realtime: Nanos) -> Vec<v1::FindingChange> {
        let own = self.telemetry.changes.iter().map(|change| (None, change));
        let told = self.telemetry.hosts.iter();
        let told =
            told.flat_map(|(host, heard)| heard.changes.iter().map(move |change| (Some(*host), change)));
        let mut all: Vec<_> = own.chain(told).collect();
        all.sort_by_key(|(_, (at, _))| *at);
        let newest = all.len().saturating_sub(MOST_CHANGES);
        let change = |(host, (at, finding)): (Option<HostId>, &(Duration, Finding))| v1::FindingChange {
            time_ns: realtime.before(self.ctx.now.saturating_sub(*at)).0,
            host: host.map_or_else(String::new, |host| self.ctx.host_name(host)),
            finding: Some(finding.clone()),
        };
        all.into_iter().skip(newest).map(change).collect()
    }
}
