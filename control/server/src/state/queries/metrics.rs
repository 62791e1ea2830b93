//! The state as metrics, for the operator's Prometheus.

use super::Queries;
use crate::state::job::decisions::Counts;
use harmonaize_api::v1;
use harmonaize_metrics::{Labels, Page, label};
use harmonaize_planner::HostId;
use std::collections::BTreeMap;

fn one(name: &'static str, value: &str) -> Labels {
    vec![(name, label(value))]
}

/// The last part of an enum's name, in small letters.
fn short(name: &str, prefix: &str) -> String {
    name.strip_prefix(prefix).unwrap_or(name).to_lowercase()
}

impl Queries<'_> {
    /// Adds what control knows to a page.
    pub(crate) fn metrics(&self, page: &mut Page) {
        page.gauge("control_uptime", "seconds", "Time since control started")
            .real(Vec::new(), self.ctx.now.as_secs_f64());
        self.agent_metrics(page);
        self.communicator_metrics(page);
        self.agreement_metrics(page);
        self.link_metrics(page);
        self.straggler_metrics(page);
        let Counts { plans, decisions, switches, given_up, unfit } = self.decisions.counts;
        for (name, help, count) in [
            ("control_plans", "Times that a plan was made", plans),
            ("control_decisions", "Of those, the ones that changed something", decisions),
            ("control_switches", "Changes of communicators that came to use", switches),
            ("control_switches_given_up", "Changes that were given up", given_up),
            ("control_plans_unfit", "Plans that did not pass the check", unfit),
        ] {
            page.counter(name, "", help).count(Vec::new(), count);
        }
    }

    fn agent_metrics(&self, page: &mut Page) {
        let hosts = self.ctx.settings.topology.hosts_there();
        let family = page.gauge("control_agent_connected", "", "Whether a host's agent has a session");
        for (id, host) in hosts {
            let connected = self.ctx.hosts.contains_key(&id);
            family.count(one("host", &host.name), connected.into());
        }
        let mut leased: BTreeMap<HostId, u64> = BTreeMap::new();
        for member in self.ctx.communicators.values().flat_map(|known| &known.members) {
            *leased.entry(member.host).or_default() += u64::from(member.session.is_none() && !member.closed);
        }
        let help = "Communicators that wait for a host's agent to come back within its lease";
        let family = page.gauge("control_leased_communicators", "", help);
        for (host, count) in leased {
            family.count(one("host", &self.ctx.host_name(host)), count);
        }
    }

    fn communicator_metrics(&self, page: &mut Page) {
        let mut states: BTreeMap<(&str, String), u64> = BTreeMap::new();
        for known in self.ctx.communicators.values() {
            let state = short(known.phase().as_str_name(), "PHASE_");
            *states.entry((known.tenant.as_str(), state)).or_default() += 1;
        }
        let family = page.gauge("control_communicators", "", "Communicators, by tenant and state");
        for ((tenant, state), count) in states {
            family.count(vec![("tenant", label(tenant)), ("state", state)], count);
        }
        let mut waiting: BTreeMap<&str, u64> = BTreeMap::new();
        for (tenant, _) in self.joins.waiting().keys() {
            *waiting.entry(tenant).or_default() += 1;
        }
        let family = page.gauge("control_joins_waiting", "", "Names of which not all ranks have joined");
        for (tenant, count) in waiting {
            family.count(one("tenant", tenant), count);
        }
        let told: Vec<(Labels, v1::CommunicatorTelemetry)> = (self.ctx.communicators.keys())
            .filter_map(|id| self.communicator_telemetry(*id))
            .map(|told| (vec![("tenant", label(&told.tenant)), ("communicator", label(&told.name))], told))
            .collect();
        // The newest of a name stands for it: no series is there twice.
        let told: BTreeMap<Labels, v1::CommunicatorTelemetry> = told.into_iter().collect();
        let family =
            page.counter("control_operations", "", "Operations that all of its agents have reported");
        for (labels, told) in &told {
            family.count(labels.clone(), told.operations);
        }
        let help = "Median duration of the last 64 operations that all agents have reported";
        let family = page.gauge("control_operation_median", "seconds", help);
        for (labels, told) in &told {
            family.real(labels.clone(), told.median_operation_ns as f64 / 1e9);
        }
    }

    fn agreement_metrics(&self, page: &mut Page) {
        let mut by_tenant: BTreeMap<&str, Vec<_>> = BTreeMap::new();
        for (id, known) in self.ctx.communicators {
            by_tenant.entry(&known.tenant).or_default().push(*id);
        }
        let family = page.gauge(
            "control_agreements",
            "",
            "Agreements of living communicators, by whether they are kept",
        );
        for (tenant, ids) in by_tenant {
            let (all, broken) = self.agreements.count(ids.into_iter());
            for (state, count) in [("kept", all - broken), ("broken", broken)] {
                family.count(vec![("tenant", label(tenant)), ("state", state.to_owned())], count.into());
            }
        }
    }

    fn link_metrics(&self, page: &mut Page) {
        let topology = self.topology();
        let ends = |link: &v1::DirectedLinkStatus| vec![("from", label(&link.from)), ("to", label(&link.to))];
        let family =
            page.gauge("control_link_capacity", "bytes_per_second", "What a link carries in this direction");
        for link in &topology.links {
            family.real(ends(link), link.capacity_bps as f64 / 8.0);
        }
        let help = "Of that, what cross traffic takes, as far as is known";
        let family = page.gauge("control_link_cross_traffic", "bytes_per_second", help);
        for link in topology.links.iter().filter(|link| link.cross_traffic_bps > 0) {
            family.real(ends(link), link.cross_traffic_bps as f64 / 8.0);
        }
        let states = [v1::LinkState::Congested, v1::LinkState::Failed, v1::LinkState::Withdrawn];
        let state = |state: v1::LinkState| short(state.as_str_name(), "LINK_STATE_");
        let family = page.gauge("control_links", "", "Links, each direction by itself, by state");
        for of in [v1::LinkState::Ok].into_iter().chain(states) {
            let count = topology.links.iter().filter(|link| link.state() == of).count();
            family.count(vec![("state", state(of))], count as u64);
        }
        let family =
            page.gauge("control_link_impaired", "", "Links that are not as they should be; always 1");
        for link in topology.links.iter().filter(|link| states.contains(&link.state())) {
            let mut labels = ends(link);
            labels.push(("state", state(link.state())));
            family.count(labels, 1);
        }
        let help = "Times that agents found an interface or a path congested";
        let family = page.counter("control_congestion_events", "", help);
        for (cause, count) in &self.telemetry.congestion {
            let cause = short(cause.as_str_name(), "CONGESTION_CAUSE_");
            family.count(vec![("cause", cause)], *count);
        }
    }

    fn straggler_metrics(&self, page: &mut Page) {
        let mut stragglers: BTreeMap<(String, String), u64> = BTreeMap::new();
        for found in self.fabric_stragglers() {
            let cause = short(found.cause().as_str_name(), "STRAGGLER_CAUSE_");
            *stragglers.entry((label(&found.host), cause)).or_default() += 1;
        }
        let family = page.gauge("control_stragglers", "", "Ranks that hold others up now, by host and cause");
        for ((host, cause), count) in stragglers {
            family.count(vec![("host", host), ("cause", cause)], count);
        }
    }
}
