//! What agents measure, laid together for operators.

use super::Queries;
use crate::state::world::telemetry::merge::{Merging, WholeOperation};
use crate::state::world::telemetry::{MOST_CHANGES, host_of};
use harmonaize_abi::{CommunicatorId, Nanos};
use harmonaize_analysis::straggler::RankTimes;
use harmonaize_api::v1::{self, finding_change::Finding};
use harmonaize_planner::HostId;
use std::cmp::Reverse;
use std::time::Duration;

/// Most ranks that are shown of an operation.
const MOST_RANKS: usize = 32;

/// The last operation of a communicator that all its agents have reported whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastOperation {
    /// The communicator.
    pub communicator: CommunicatorId,
    /// The operation's number on it, from 0.
    pub number: u64,
    /// Bytes of a rank's tensor.
    pub bytes: u64,
    /// In ascending order: of more than 32 ranks those that called last.
    pub ranks: Vec<RankTime>,
    /// How many ranks were left out, of which some may lack the time of their call.
    pub others: usize,
}

/// A rank's part of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankTime {
    /// The rank.
    pub rank: u32,
    /// The name of its host; empty for none.
    pub host: String,
    /// When it called, in nanoseconds since the first rank's call.
    pub called_ns: u64,
    /// When it had the result, in nanoseconds since the first rank's call; none where it failed.
    pub ended_ns: Option<u64>,
}

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

    /// The last operation of each communicator by ranks. Agents' clocks are laid together by when operations end.
    pub fn last_operations(&self) -> Vec<LastOperation> {
        let all = self.telemetry.communicators.iter();
        all.filter_map(|(id, merging)| self.last_operation(*id, merging.retained()?)).collect()
    }

    fn last_operation(&self, id: CommunicatorId, whole: &WholeOperation) -> Option<LastOperation> {
        let known = self.ctx.communicators.get(&id)?;
        let first = whole.ranks.iter().filter_map(|one| one.start).min()?;
        let since = |at: Nanos| at.0.saturating_sub(first.0);
        let shown = last_callers(&whole.ranks).into_iter().map(|(start, one)| RankTime {
            rank: one.rank,
            host: host_of(known, one.rank, self.ctx.settings),
            called_ns: since(start),
            ended_ns: one.end.map(since),
        });
        let ranks: Vec<RankTime> = shown.collect();
        let others = whole.ranks.len().saturating_sub(ranks.len());
        Some(LastOperation { communicator: id, number: whole.number, bytes: whole.bytes, ranks, others })
    }

    /// How things stand on all hosts. `realtime` is CLOCK_REALTIME now.
    pub fn fabric(&self, realtime: Nanos) -> v1::FabricSnapshot {
        let communicators: Vec<v1::CommunicatorTelemetry> =
            self.ctx.communicators.keys().filter_map(|id| self.communicator_telemetry(*id)).collect();
        v1::FabricSnapshot { communicators, ..self.hosts_and_findings(realtime) }
    }

    /// The same without communicators.
    pub(crate) fn hosts_and_findings(&self, realtime: Nanos) -> v1::FabricSnapshot {
        let hosts = self.ctx.settings.topology.hosts_there();
        v1::FabricSnapshot {
            time_ns: realtime.0,
            hosts: hosts.map(|(host, _)| self.host_telemetry(host)).collect(),
            stragglers: self.fabric_stragglers(),
            changes: self.fabric_changes(realtime),
            ..v1::FabricSnapshot::default()
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

/// The ranks that called last, in ascending order, each with when it called.
fn last_callers(ranks: &[RankTimes]) -> Vec<(Nanos, &RankTimes)> {
    let mut called: Vec<(Nanos, &RankTimes)> =
        ranks.iter().filter_map(|one| Some((one.start?, one))).collect();
    called.sort_by_key(|(start, _)| Reverse(*start));
    called.truncate(MOST_RANKS);
    called.sort_by_key(|(_, one)| one.rank);
    called
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_ranks_the_last_callers_stay() {
        let one = |rank: u32| RankTimes {
            rank,
            // The later half calls first; the call of rank 7 was lost.
            start: (rank != 7).then_some(Nanos(if rank < 40 { 1000 } else { 10 } + u64::from(rank))),
            ..RankTimes::default()
        };
        let all: Vec<RankTimes> = (0..80).map(one).collect();
        let ranks: Vec<u32> = last_callers(&all).into_iter().map(|(_, one)| one.rank).collect();
        assert_eq!(ranks, (8..40).collect::<Vec<u32>>());
        let few: Vec<u32> = last_callers(&all[5..9]).into_iter().map(|(_, one)| one.rank).collect();
        assert_eq!(few, [5, 6, 8]);
    }
}
