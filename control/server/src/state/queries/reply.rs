//! What operators are told of the fabric, tenants, plans, decisions and what is withdrawn.

use super::Queries;
use crate::state::job::communicator::Communicator;
use crate::state::job::decisions::{Changed, Decision, Outcome, Trigger};
use crate::state::job::lifecycle::{EpochConfig, Planned};
use crate::state::job::stored::ppm;
use crate::state::world::withdrawals::{Target, find};
use harmonaize_abi::CommunicatorId;
use harmonaize_api::v1;
use harmonaize_codec::{Budget, Codec};
use harmonaize_planner::{
    AlgorithmStatus, CongestionChoice, DirectedLink, HostId, LinkId, Nanos, Node, Path, RouteClass, SwitchId,
    SwitchKind,
};
use harmonaize_store::{Withdrawal, WithdrawalKind};
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

/// How many connections of ours cross what.
#[derive(Debug, Default)]
struct Crossings {
    links: BTreeMap<DirectedLink, u32>,
    /// Whichever way.
    either: BTreeMap<LinkId, u32>,
    switches: BTreeMap<SwitchId, u32>,
    /// Connections of which a way is not known.
    unknown: u32,
}

impl Queries<'_> {
    /// The fabric, and what control takes it to be.
    pub fn topology(&self) -> v1::TopologyReply {
        let (topology, withdrawn) = (&self.ctx.settings.topology, self.ctx.operator.withdrawn());
        let crossings = self.crossings();
        let taking_part = self.taking_part();
        let hosts = topology.hosts_there().map(|(id, host)| v1::FabricHost {
            name: host.name.clone(),
            rack: host.rack.clone().unwrap_or_default(),
            connected: self.ctx.hosts.contains_key(&id),
            withdrawn: withdrawn.hosts.contains(&id),
            communicators: taking_part.get(&id).copied().unwrap_or(0),
            kind: topology.kind(id).to_owned(),
        });
        let switches = topology.switches_there().map(|(id, switch)| {
            let kind = match switch.kind {
                SwitchKind::Leaf => "leaf",
                SwitchKind::Spine => "spine",
                SwitchKind::Core => "core",
            };
            v1::FabricSwitch {
                name: switch.name.clone(),
                kind: kind.to_owned(),
                addresses: switch.addresses.iter().map(ToString::to_string).collect(),
                withdrawn: withdrawn.switches.contains(&id),
                connections: crossings.switches.get(&id).copied().unwrap_or(0),
            }
        });
        v1::TopologyReply {
            hosts: hosts.collect(),
            switches: switches.collect(),
            links: self.link_states(&crossings),
            aggregators: self.aggregators.reply(topology),
            now_ns: self.ctx.operator.realtime(self.ctx.now).0,
        }
    }

    /// The routes that agents traced last, with the addresses that answered.
    pub fn traced_paths(&self) -> v1::TracedPathsReply {
        let text = |hop: &Option<IpAddr>| hop.map_or_else(String::new, |hop| hop.to_string());
        let paths = self.links.routes.iter().map(|(from, to, route)| v1::TracedPathRecord {
            from: self.ctx.host_name(from),
            to: self.ctx.host_name(to),
            port: u32::from(route.port),
            hops: route.hops.iter().map(text).collect(),
            traced_ns: self.ctx.operator.realtime(route.at).0,
        });
        v1::TracedPathsReply { paths: paths.collect() }
    }

    fn link_states(&self, crossings: &Crossings) -> Vec<v1::DirectedLinkStatus> {
        let topology = &self.ctx.settings.topology;
        let withdrawn: BTreeSet<LinkId> = self.ctx.operator.withdrawn().all_links(topology);
        let estimates: BTreeMap<DirectedLink, _> = self.links.estimates().collect();
        let mut states = Vec::with_capacity(topology.links().len() * 2);
        for (link_id, link) in topology.links_there() {
            for forward in [true, false] {
                let id = DirectedLink { link: link_id, forward };
                let estimate = estimates.get(&id);
                let cross_traffic = estimate.map_or(0, |estimate| estimate.cross_traffic.0);
                let state = if estimate.is_some_and(|estimate| estimate.failed) {
                    v1::LinkState::Failed
                } else if withdrawn.contains(&id.link) {
                    v1::LinkState::Withdrawn
                } else if cross_traffic > 0 {
                    v1::LinkState::Congested
                } else {
                    v1::LinkState::Ok
                };
                let (from, to) = if forward { (link.from, link.to) } else { (link.to, link.from) };
                states.push(v1::DirectedLinkStatus {
                    from: topology.node_name(from).to_owned(),
                    to: topology.node_name(to).to_owned(),
                    capacity_bps: link.rate.0,
                    cross_traffic_bps: cross_traffic,
                    state: state.into(),
                    since_ns: estimate.map_or(0, |estimate| self.clock(estimate.since)),
                    confidence_ppm: estimate.map_or(0, |estimate| estimate.confidence_ppm),
                    connections: crossings.links.get(&id).copied().unwrap_or(0),
                });
            }
        }
        states
    }

    /// A time of the planner's, by the clock; none of it lies ahead.
    fn clock(&self, at: Nanos) -> u64 {
        self.ctx.operator.realtime(Duration::from_nanos(at.0).min(self.ctx.now)).0
    }

    /// How many communicators each host takes part in; hosts of none are left out.
    fn taking_part(&self) -> BTreeMap<HostId, u32> {
        let mut counts = BTreeMap::new();
        for known in self.ctx.communicators.values() {
            let open = known.members.iter().filter(|member| !member.closed);
            let hosts: BTreeSet<HostId> = open.map(|member| member.host).collect();
            hosts.into_iter().for_each(|host| *counts.entry(host).or_default() += 1);
        }
        counts
    }

    /// Connections of all communicators whose path is known, those under way included.
    fn crossings(&self) -> Crossings {
        let mut found = Crossings::default();
        for known in self.ctx.communicators.values() {
            let host = |index: u32| known.members.get(index as usize).map(|member| member.host);
            for ((low, high), ports) in known.lifecycle.configs().flat_map(|config| &config.links) {
                let Some((low, high)) = host(*low).zip(host(*high)) else { continue };
                for port in ports {
                    let ways = [self.links.path_of(low, high, *port), self.links.path_of(high, low, *port)];
                    self.count(&mut found, &ways);
                }
            }
        }
        found
    }

    /// One connection, there and back.
    fn count(&self, found: &mut Crossings, ways: &[Option<&Path>]) {
        let (mut links, mut switches) = (BTreeSet::new(), BTreeSet::new());
        found.unknown += u32::from(ways.iter().any(Option::is_none));
        for way in ways.iter().copied().flatten() {
            for link in way.links() {
                *found.links.entry(*link).or_default() += 1;
                links.insert(link.link);
            }
            switches.extend(self.ctx.settings.topology.switches_of(way));
        }
        for link in links {
            *found.either.entry(link).or_default() += 1;
        }
        for switch in switches {
            *found.switches.entry(switch).or_default() += 1;
        }
    }

    /// Tenants: the configuration's, then those that operators added.
    pub fn tenants(&self) -> v1::TenantsReply {
        let record = |name: &String| {
            let own = self.ctx.communicators.values().filter(|known| known.tenant == *name);
            let added = self.ctx.operator.added_tenant(name);
            let ids =
                self.ctx.communicators.iter().filter(|(_, known)| known.tenant == *name).map(|(id, _)| *id);
            let (agreements, broken) = self.agreements.count(ids);
            let sessions =
                self.ctx.hosts.iter().filter_map(|(host, id)| Some((host, self.ctx.sessions.get(id)?)));
            let at = sessions.filter_map(|(host, session)| {
                let (socket, refused) = session.tenants.get(name)?.clone();
                Some(v1::TenantAtHost { host: self.ctx.host_name(*host), socket, refused })
            });
            let in_sum = self.regroups.in_sum(&self.ctx, self.joins, name, None);
            v1::TenantRecord {
                name: name.clone(),
                configured: added.is_none(),
                added_ns: added.map_or(0, |tenant| tenant.added_ns),
                communicators: own.clone().count() as u32,
                ranks: own.map(|known| known.ranks).sum(),
                errors: self.history.errors_of(name),
                agreements,
                broken,
                uids: added.map(|tenant| tenant.uids.clone()).unwrap_or_default(),
                hosts: added.map(|tenant| tenant.hosts.clone()).unwrap_or_default(),
                at: at.collect(),
                limits: in_sum.limits(&self.ctx.settings.terms(name)),
            }
        };
        v1::TenantsReply { tenants: self.ctx.settings.tenants.iter().map(record).collect() }
    }

    /// What communicators run by; none where `id`, if not 0, is no communicator's.
    pub fn plans(&self, id: CommunicatorId) -> Option<v1::PlansReply> {
        let counts = self.decisions.counts;
        let plans = match id {
            CommunicatorId(0) => {
                self.ctx.communicators.iter().map(|(id, known)| self.plan_status(*id, known)).collect()
            }
            id => vec![self.plan_status(id, self.ctx.communicators.get(&id)?)],
        };
        let (switches, given_up, planned) = (counts.switches, counts.given_up, counts.plans);
        Some(v1::PlansReply {
            plans,
            changes_completed: switches,
            changes_abandoned: given_up,
            plans_made: planned,
        })
    }

    pub(crate) fn plan_status(&self, id: CommunicatorId, known: &Communicator) -> v1::PlanStatus {
        let hosts: Vec<HostId> = known.members.iter().map(|member| member.host).collect();
        let current = known.current();
        let ring = ring(current.map_or(&[], |current| &current.order), &hosts);
        let pace = current.and_then(|current| current.plan.as_ref()?.pace).map_or(0, |pace| pace.0);
        let hops = ring.iter().map(|((from, sender), (to, receiver))| {
            let ports = current.and_then(|current| current.links.get(&(*from.min(to), *from.max(to))));
            let path = |port: &u16| v1::PlannedPath {
                source_port: u32::from(*port),
                switches: self
                    .links
                    .path_of(*sender, *receiver, *port)
                    .map_or_else(Vec::new, |path| self.via(path)),
            };
            v1::PlannedRingEdge {
                from: self.ctx.host_name(*sender),
                to: self.ctx.host_name(*receiver),
                paths: ports.into_iter().flatten().map(path).collect(),
                rate_bps: pace,
            }
        });
        let since = known.changes.back().map_or(0, |at| self.ctx.operator.realtime(*at).0);
        let status = v1::PlanStatus {
            communicator: id.0,
            tenant: known.tenant.clone(),
            name: known.name.clone(),
            epoch: known.epoch().into(),
            next_epoch: known.pending_epoch().into(),
            order: ring.iter().map(|((_, host), _)| self.ctx.host_name(*host)).collect(),
            ring_edges: hops.collect(),
            pinned: known.pinned,
            since_ns: since,
            hints: self.hints.describe_hints(id),
            interleaving: self.turns.describe(&self.ctx, id),
            interleaving_reason_code: self.turns.reason(id).map_or("", |reason| reason.code()).to_owned(),
            ..v1::PlanStatus::default()
        };
        let Some(EpochConfig { plan, congestion, codec, algorithm, aggregation, .. }) = current else {
            return v1::PlanStatus {
                budget: Budget::Exact.to_string(),
                codec: Codec::EXACT.name().to_owned(),
                ..status
            };
        };
        let status = v1::PlanStatus {
            budget: codec.budget.to_string(),
            codec: codec.codec.name().to_owned(),
            codec_reason: codec.reason.to_string(),
            algorithms: algorithm.status().iter().map(algorithm_status).collect(),
            algorithm_reason: algorithm.reason.to_string(),
            congestion_controls: congestion.iter().map(congestion_status).collect(),
            aggregator: self.aggregators.names_of(&self.ctx.settings.topology, aggregation),
            aggregation_reason: aggregation.reason.to_string(),
            ..status
        };
        match plan {
            Some(planned) => with_plan(status, planned),
            None => status,
        }
    }

    fn via(&self, path: &Path) -> Vec<String> {
        let topology = &self.ctx.settings.topology;
        let switches = topology.switches_of(path).into_iter();
        switches.map(|switch| topology.node_name(Node::Switch(switch)).to_owned()).collect()
    }

    /// What was decided lately: about one communicator, or all (0); the last few, or all (0).
    pub fn explain(&self, communicator: CommunicatorId, last: u32) -> v1::ExplainReply {
        let about = |decision: &&Decision| {
            communicator == CommunicatorId(0)
                || decision.changes.iter().any(|changed| changed.communicator == communicator)
        };
        let decisions: Vec<&Decision> = self.decisions.recent().filter(about).collect();
        let passed = if last > 0 { decisions.len().saturating_sub(last as usize) } else { 0 };
        let decisions = decisions.into_iter().skip(passed).map(|decision| self.decision(decision)).collect();
        let (suspicions_proven, suspicions_refuted) = self.links.reports.suspicions();
        let now_ns = self.ctx.operator.realtime(self.ctx.now).0;
        v1::ExplainReply {
            decisions,
            now_ns,
            congestion_reports_verified: suspicions_proven,
            congestion_reports_refuted: suspicions_refuted,
        }
    }

    fn decision(&self, decision: &Decision) -> v1::DecisionRecord {
        let report = match &decision.trigger {
            Trigger::CongestionReport(noticed) => Some(v1::CongestionReportRecord {
                host: noticed.host.clone(),
                path: noticed.path.clone(),
                finding: noticed.what.clone(),
                since_ns: noticed.since.0,
                found_ns: noticed.found.0,
                received_ns: self.ctx.operator.realtime(noticed.received).0,
            }),
            _ => None,
        };
        v1::DecisionRecord {
            number: decision.number,
            at_ns: self.ctx.operator.realtime(decision.at).0,
            cause: decision.trigger.to_string(),
            reason: decision.reason.to_string(),
            reason_code: decision.reason.code().to_owned(),
            score_before_ppm: ppm(decision.before.slowdown),
            score_after_ppm: ppm(decision.after.slowdown),
            congestion_report: report,
            changes: decision.changes.iter().map(|changed| self.change(changed)).collect(),
            stuck_before: decision.before.unreachable_jobs,
            stuck_after: decision.after.unreachable_jobs,
        }
    }

    fn change(&self, changed: &Changed) -> v1::ChangeRecord {
        let known = self.ctx.communicators.get(&changed.communicator);
        let at = |at: Option<Duration>| at.map_or(0, |at| self.ctx.operator.realtime(at).0);
        v1::ChangeRecord {
            communicator: changed.communicator.0,
            tenant: known.map_or_else(String::new, |known| known.tenant.clone()),
            name: known.map_or_else(String::new, |known| known.name.clone()),
            epoch: changed.epoch.into(),
            reason: changed.reason.to_string(),
            reason_code: changed.reason.code().to_owned(),
            sent_ns: at(Some(changed.sent)),
            prepared_ns: at(changed.prepared),
            first_switched_ns: at(changed.first_switched),
            switched_ns: at(changed.switched),
            outcome: changed.outcome.to_string(),
            outcome_code: match &changed.outcome {
                Outcome::UnderWay => v1::ChangeOutcome::UnderWay,
                Outcome::InUse => v1::ChangeOutcome::InUse,
                Outcome::GivenUp(_) => v1::ChangeOutcome::GivenUp,
                Outcome::Ended => v1::ChangeOutcome::Ended,
            }
            .into(),
        }
    }

    /// What is or will be withdrawn: all, or these targets in this way.
    pub fn withdrawals(&self, only: Option<(&[String], WithdrawalKind)>) -> Vec<v1::WithdrawalRecord> {
        let topology = &self.ctx.settings.topology;
        let named: Option<BTreeSet<(String, WithdrawalKind)>> = only.map(|(targets, kind)| {
            targets.iter().filter_map(|name| Some((find(topology, name)?.1, kind))).collect()
        });
        let (crossings, taking_part) = (self.crossings(), self.taking_part());
        let wanted = |(key, _): &(&(String, WithdrawalKind), &Withdrawal)| {
            named.as_ref().is_none_or(|named| named.contains(*key))
        };
        let records = self.ctx.operator.withdrawals().iter().filter(wanted);
        records.map(|(_, record)| self.withdrawal_record(record, &crossings, &taking_part)).collect()
    }

    fn withdrawal_record(
        &self,
        record: &Withdrawal,
        crossings: &Crossings,
        taking_part: &BTreeMap<HostId, u32>,
    ) -> v1::WithdrawalRecord {
        let clock = self.ctx.operator.realtime(self.ctx.now).0;
        let target = find(&self.ctx.settings.topology, &record.target).map(|(target, _)| target);
        let (what, left) = match target {
            None => ("unknown", None),
            Some(Target::Node(Node::Host(host))) => ("host", taking_part.get(&host).copied()),
            Some(Target::Node(Node::Switch(switch))) => ("switch", crossings.switches.get(&switch).copied()),
            Some(Target::Link(link)) => ("link", crossings.either.get(&link).copied()),
        };
        let may_cross = matches!(target, Some(Target::Node(Node::Switch(_)) | Target::Link(_)));
        let begun = record.kind() == WithdrawalKind::Drain || record.from_ns <= clock;
        let kind = match record.kind() {
            WithdrawalKind::Drain => v1::WithdrawalKind::Drain,
            WithdrawalKind::Maintenance => v1::WithdrawalKind::Maintenance,
        };
        v1::WithdrawalRecord {
            target: record.target.clone(),
            target_kind: what.to_owned(),
            kind: kind.into(),
            from_ns: record.from_ns,
            until_ns: record.until_ns,
            reason: record.reason.clone(),
            in_effect: begun && target.is_some() && (record.until_ns == 0 || record.until_ns > clock),
            remaining: left.unwrap_or(0),
            unknown_paths: if may_cross { crossings.unknown } else { 0 },
        }
    }
}

/// The hops of a ring: participants with their hosts; none for a ring of one.
pub(crate) fn ring(order: &[u32], hosts: &[HostId]) -> Vec<((u32, HostId), (u32, HostId))> {
    let part = |index: &u32| hosts.get(*index as usize).map(|host| (*index, *host));
    let parts: Vec<(u32, HostId)> = order.iter().filter_map(part).collect();
    parts.iter().copied().zip(parts.iter().copied().cycle().skip(1)).collect()
}

fn algorithm_status(range: &AlgorithmStatus) -> v1::AlgorithmStatus {
    let (at, times) = range.predicted.clone().unwrap_or_default();
    let predicted = times
        .into_iter()
        .map(|(algorithm, time)| v1::PredictedTime { algorithm: algorithm.to_string(), time_ns: time.0 });
    v1::AlgorithmStatus {
        collective: range.collective.to_string(),
        from_bytes: range.from.0,
        to_bytes: range.to.map(|to| to.0),
        algorithm: range.algorithm.to_string(),
        at_bytes: at.0,
        predicted: predicted.collect(),
        overridden: range.overridden,
    }
}

fn congestion_status((route, choice): (RouteClass, &CongestionChoice)) -> v1::CongestionControlStatus {
    v1::CongestionControlStatus {
        route: route.as_str().to_owned(),
        name: choice.control.map_or_else(String::new, |control| control.to_string()),
        reason: choice.reason.to_string(),
        reason_code: choice.reason.code().to_owned(),
    }
}

/// What was predicted of a plan, and why it is.
pub(crate) fn with_plan(status: v1::PlanStatus, planned: &Planned) -> v1::PlanStatus {
    v1::PlanStatus {
        predicted_ns: planned.time.0,
        slowdown_ppm: ppm(planned.slowdown),
        share_bps: planned.share.0,
        reason: planned.reason.to_string(),
        reason_code: planned.reason.code().to_owned(),
        ..status
    }
}
