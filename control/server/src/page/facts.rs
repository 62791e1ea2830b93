//! What the page shows: operators' replies, entry by entry as JSON under the names that `harmonaize --json` has.

use crate::state::{LastOperation, Queries};
use harmonaize_abi::{CommunicatorId, Nanos};
use harmonaize_api::communicator_text;
use harmonaize_api::v1::{self, finding_change::Finding};
use prost::Message;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// How many decisions the page shows, the newest.
const DECISIONS: u32 = 64;

/// Changes by less than this part of a link's capacity are not shown.
const RATE_STEPS: u64 = 50;

/// Entries by section and key.
pub(super) type Sections = BTreeMap<&'static str, BTreeMap<String, Entry>>;

/// An entry as JSON, and what it was written from.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Entry {
    text: Arc<str>,
    /// A message as protobuf and its place in the list. Empty for what is no message.
    source: Vec<u8>,
}

/// Some of them.
pub(super) type Entries<'a> = BTreeMap<&'static str, BTreeMap<&'a str, &'a str>>;

/// Keys of entries that are no more.
pub(super) type Gone<'a> = BTreeMap<&'static str, BTreeSet<&'a str>>;

/// What operators are answered, all of the same moment.
#[derive(Debug)]
pub(super) struct Facts {
    topology: v1::TopologyReply,
    tenants: v1::TenantsReply,
    plans: v1::PlansReply,
    decisions: v1::ExplainReply,
    withdrawals: Vec<v1::WithdrawalRecord>,
    status: v1::StatusReply,
    fabric: v1::FabricSnapshot,
    operations: Vec<LastOperation>,
}

impl Facts {
    /// What the state answers now. Agents are not asked.
    pub(super) fn of(queries: &Queries<'_>) -> Self {
        // By the state's clock, in which a time that is made of an age stays the same.
        let decisions = queries.explain(CommunicatorId(0), DECISIONS);
        Self {
            topology: queries.topology(),
            tenants: queries.tenants(),
            plans: queries.plans(CommunicatorId(0)).unwrap_or_default(),
            fabric: queries.hosts_and_findings(Nanos(decisions.now_ns)),
            decisions,
            withdrawals: queries.withdrawals(None),
            status: queries.status_without_agents(&BTreeMap::new()),
            operations: queries.last_operations(),
        }
    }

    /// The same as entries. Those that were written before from the same message are not written again.
    pub(super) fn sections(self, before: &Sections) -> Sections {
        let Self { topology, tenants, plans, decisions, withdrawals, status, fabric, operations } = self;
        let since = |age_ns: u64| decisions.now_ns.saturating_sub(age_ns);
        let mut all = Writer { before, sections: Sections::new() };
        let control = json!({
            "build": status.build,
            "started_ns": since(status.uptime_ns),
            "errors": status.errors,
            "plans_made": plans.plans_made,
            "changes_completed": plans.changes_completed,
            "changes_abandoned": plans.changes_abandoned,
            "congestion_reports_verified": decisions.congestion_reports_verified,
            "congestion_reports_refuted": decisions.congestion_reports_refuted,
        });
        all.values("control", [("control".to_owned(), control)]);
        all.messages("hosts", topology.hosts, |host| host.name.clone(), in_order);
        all.messages("switches", topology.switches, |switch| switch.name.clone(), in_order);
        all.messages("links", topology.links, |link| format!("{}:{}", link.from, link.to), alone);
        all.messages("tenants", tenants.tenants, |tenant| tenant.name.clone(), in_order);
        let plans = plans.plans.into_iter().map(plan);
        all.messages("plans", plans, |plan| communicator_text(plan.communicator), alone);
        all.messages("decisions", decisions.decisions, |decision| decision.number.to_string(), alone);
        all.messages(
            "withdrawals",
            withdrawals,
            |one| format!("{} {}", one.target, one.kind().text()),
            alone,
        );
        let communicators = status.communicators.into_iter().map(communicator);
        all.messages("communicators", communicators, |one| communicator_text(one.communicator), alone);
        all.values("operations", operations.into_iter().map(operation));
        let ended = status.recent_errors.into_iter().map(|one| {
            let mut value = value(&v1::EndedStatus { age_ns: 0, ..one.clone() });
            insert(&mut value, "at_ns", since(one.age_ns).into());
            (communicator_text(one.communicator), value)
        });
        all.values("ended", ended);
        let waiting = status.waiting.into_iter().map(|one| {
            let mut value = value(&v1::WaitingStatus { age_ns: 0, ..one.clone() });
            insert(&mut value, "since_ns", since(one.age_ns).into());
            (format!("{}/{}", one.tenant, one.name), value)
        });
        all.values("waiting", waiting);
        let measured = fabric.hosts.into_iter().filter(|host| !host.links.is_empty());
        let measured = measured.map(|host| {
            let links = host.links.into_iter().map(rounded).collect();
            v1::HostTelemetry { host: host.host, links, ..v1::HostTelemetry::default() }
        });
        all.messages("measured", measured, |host| host.host.clone(), |host, _| value(&host.links));
        let key =
            |one: &v1::Straggler| format!("{} {} {}", communicator_text(one.communicator), one.job, one.rank);
        all.messages("stragglers", fabric.stragglers, key, alone);
        all.values("findings", fabric.changes.iter().map(finding));
        all.sections
    }
}

/// Sections as they are written, beside those of before.
struct Writer<'a> {
    before: &'a Sections,
    sections: Sections,
}

impl Writer<'_> {
    /// Messages, each under its key. `write` is given their places in the list.
    fn messages<T: Message>(
        &mut self,
        name: &'static str,
        messages: impl IntoIterator<Item = T>,
        key: impl Fn(&T) -> String,
        write: impl Fn(&T, usize) -> Value,
    ) {
        let before = self.before.get(name);
        let entry = |(place, message): (usize, T)| {
            let key = key(&message);
            let mut source = message.encode_to_vec();
            source.extend(place.to_le_bytes());
            let text = match before.and_then(|before| before.get(&key)) {
                Some(known) if known.source == source => Arc::clone(&known.text),
                _ => pruned(write(&message, place)),
            };
            (key, Entry { text, source })
        };
        self.sections.insert(name, messages.into_iter().enumerate().map(entry).collect());
    }

    /// What is no message.
    fn values(&mut self, name: &'static str, values: impl IntoIterator<Item = (String, Value)>) {
        let entry = |(key, value)| (key, Entry { text: pruned(value), source: Vec::new() });
        self.sections.insert(name, values.into_iter().map(entry).collect());
    }
}

/// Without predictions, of which there are many.
fn plan(mut status: v1::PlanStatus) -> v1::PlanStatus {
    status.algorithms.iter_mut().for_each(|algorithm| algorithm.predicted.clear());
    status
}

/// Without what plans say already.
fn communicator(status: v1::CommunicatorStatus) -> v1::CommunicatorStatus {
    v1::CommunicatorStatus { participants: Vec::new(), order: Vec::new(), tuning: None, ..status }
}

/// A communicator's last operation, by ranks.
fn operation(one: LastOperation) -> (String, Value) {
    let ranks = one.ranks.into_iter().map(|rank| {
        json!({
            "rank": rank.rank,
            "host": rank.host,
            "called_ns": rank.called_ns,
            "ended_ns": rank.ended_ns,
        })
    });
    let ranks: Vec<Value> = ranks.collect();
    let value = json!({ "number": one.number, "bytes": one.bytes, "ranks": ranks, "others": one.others });
    (communicator_text(one.communicator.0), value)
}

/// Without counters, which always change, and with rates in steps.
fn rounded(link: v1::Link) -> v1::Link {
    let step = (link.capacity_bps / RATE_STEPS).max(1);
    let round = |bps: u64| bps / step * step;
    v1::Link {
        egress_bps: round(link.egress_bps),
        ingress_bps: round(link.ingress_bps),
        own_egress_bps: round(link.own_egress_bps),
        counters: None,
        ..link
    }
}

fn finding(change: &v1::FindingChange) -> (String, Value) {
    let (kind, what) = match &change.finding {
        Some(Finding::Congestion(found)) => ("congestion", value(found)),
        Some(Finding::Straggler(found)) => ("straggler", value(found)),
        None => ("unknown", Value::Null),
    };
    let about = what.get("found_ns").and_then(Value::as_u64).unwrap_or(0);
    let place =
        ["interface", "path", "rank"].map(|field| what.get(field).map(Value::to_string).unwrap_or_default());
    (
        format!("{about} {} {kind} {}", change.host, place.join(" ")),
        json!({ "at_ns": change.time_ns, "reported_by": change.host, "kind": kind, kind: what }),
    )
}

/// A message, wherever in the list it is.
fn alone(message: &impl Serialize, _place: usize) -> Value {
    value(message)
}

/// The same with its place in the list.
fn in_order(message: &impl Serialize, place: usize) -> Value {
    let mut value = value(message);
    insert(&mut value, "place", place.into());
    value
}

/// As it is sent.
fn pruned(mut value: Value) -> Arc<str> {
    prune(&mut value);
    text(&value).into()
}

fn value(entry: &impl Serialize) -> Value {
    serde_json::to_value(entry).unwrap_or_default()
}

fn insert(value: &mut Value, name: &str, entry: Value) {
    if let Value::Object(fields) = value {
        fields.insert(name.to_owned(), entry);
    }
}

/// Leaves out fields that have the value that they have by default, as the wire does.
fn prune(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.values_mut().for_each(prune);
            fields.retain(|_, field| !is_default(field));
        }
        Value::Array(entries) => entries.iter_mut().for_each(prune),
        _ => {}
    }
}

fn is_default(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_u64() == Some(0),
        Value::String(text) => text.is_empty(),
        Value::Array(entries) => entries.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(true) => false,
    }
}

/// JSON on one line, in which nothing can be taken for HTML by who takes it for that.
pub(super) fn text(value: &Value) -> String {
    value.to_string().replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026")
}

/// All entries.
pub(super) fn every(sections: &Sections) -> Entries<'_> {
    sections
        .iter()
        .map(|(name, entries)| {
            (*name, entries.iter().map(|(key, entry)| (key.as_str(), &*entry.text)).collect())
        })
        .collect()
}

/// Entries that are new or other than before, and those that are no more.
pub(super) fn difference<'a>(before: &'a Sections, now: &'a Sections) -> (Entries<'a>, Gone<'a>) {
    let (mut changed, mut gone) = (Entries::new(), Gone::new());
    for (name, entries) in now {
        let known = before.get(name);
        let other = |(key, entry): &(&String, &Entry)| {
            known.and_then(|known| known.get(*key)).is_none_or(|known| known.text != entry.text)
        };
        let others: BTreeMap<&str, &str> =
            entries.iter().filter(other).map(|(key, entry)| (key.as_str(), &*entry.text)).collect();
        if !others.is_empty() {
            changed.insert(name, others);
        }
        let over = known.into_iter().flat_map(BTreeMap::keys).filter(|key| !entries.contains_key(*key));
        let over: BTreeSet<&str> = over.map(String::as_str).collect();
        if !over.is_empty() {
            gone.insert(name, over);
        }
    }
    (changed, gone)
}

/// A message to browsers: `{"number": n, "sections": {name: {key: entry}}, "gone": {name: [key]}}`.
pub(super) fn message(number: u64, entries: &Entries<'_>, gone: &Gone<'_>) -> String {
    let string = |written: &str| text(&Value::from(written));
    let object = |fields: Vec<String>| format!("{{{}}}", fields.join(","));
    let sections = entries.iter().map(|(name, entries)| {
        let fields = entries.iter().map(|(key, entry)| format!("{}:{entry}", string(key)));
        format!("{}:{}", string(name), object(fields.collect()))
    });
    let gone: Map<String, Value> = gone
        .iter()
        .map(|(name, keys)| ((*name).to_owned(), keys.iter().copied().collect::<Value>()))
        .collect();
    let (sections, gone) = (object(sections.collect()), text(&gone.into()));
    format!("{{\"number\":{number},\"sections\":{sections},\"gone\":{gone}}}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::RankTime;

    /// The most bytes of everything at 1,000 hosts and 500 communicators.
    const MOST_BYTES: usize = 4 << 20;

    fn empty() -> Facts {
        Facts {
            topology: v1::TopologyReply::default(),
            tenants: v1::TenantsReply::default(),
            plans: v1::PlansReply::default(),
            decisions: v1::ExplainReply::default(),
            withdrawals: Vec::new(),
            status: v1::StatusReply::default(),
            fabric: v1::FabricSnapshot::default(),
            operations: Vec::new(),
        }
    }

    fn tenant(name: &str, ranks: u32) -> v1::TenantRecord {
        v1::TenantRecord { name: name.to_owned(), ranks, ..v1::TenantRecord::default() }
    }

    fn tenants(tenants: &[(&str, u32)]) -> Sections {
        let tenants = tenants.iter().map(|(name, ranks)| tenant(name, *ranks)).collect();
        Facts { tenants: v1::TenantsReply { tenants }, ..empty() }.sections(&Sections::new())
    }

    #[test]
    fn a_change_has_what_differs_and_nothing_else() {
        let (before, now) =
            (tenants(&[("a", 1), ("b", 2), ("c", 3)]), tenants(&[("a", 1), ("b", 5), ("</d>", 3)]));
        let (changed, gone) = difference(&before, &now);
        let written = message(7, &changed, &gone);
        assert!(!written.contains(['<', '>', '&', '\n']), "{written}");
        let read: Value = serde_json::from_str(&written).unwrap();
        let expected = json!({
            "number": 7,
            "sections": { "tenants": {
                "b": { "name": "b", "ranks": 5, "place": 1 },
                "</d>": { "name": "</d>", "ranks": 3, "place": 2 },
            } },
            "gone": { "tenants": ["c"] },
        });
        assert_eq!(read, expected);
        assert_eq!(difference(&now, &now), Default::default());
    }

    #[test]
    fn what_is_as_before_is_not_written_again() {
        let before = tenants(&[("a", 1), ("b", 2), ("c", 3)]);
        let records = [("a", 1), ("b", 5), ("c", 3)].map(|(name, ranks)| tenant(name, ranks));
        let now =
            Facts { tenants: v1::TenantsReply { tenants: records.to_vec() }, ..empty() }.sections(&before);
        let same = |name: &str| Arc::ptr_eq(&before["tenants"][name].text, &now["tenants"][name].text);
        assert_eq!(["a", "b", "c"].map(same), [true, false, true]);
        // In another place of the list it reads otherwise.
        let records = [tenant("c", 3), tenant("a", 1)];
        let now =
            Facts { tenants: v1::TenantsReply { tenants: records.to_vec() }, ..empty() }.sections(&before);
        assert_ne!(before["tenants"]["c"].text, now["tenants"]["c"].text);
    }

    #[test]
    fn what_always_changes_is_left_out() {
        let sections = |egress_bps, seen: u64| {
            let counters = Some(v1::LinkCounters { egress_bytes: seen, ..v1::LinkCounters::default() });
            let link = v1::Link { capacity_bps: 1_000_000, egress_bps, counters, ..v1::Link::default() };
            let host = v1::HostTelemetry { age_ns: seen, links: vec![link], ..v1::HostTelemetry::default() };
            let status = v1::StatusReply { uptime_ns: seen, ..v1::StatusReply::default() };
            let fabric = v1::FabricSnapshot { hosts: vec![host], ..v1::FabricSnapshot::default() };
            let decisions =
                v1::ExplainReply { now_ns: 1_700_000_000_000_000_000 + seen, ..v1::ExplainReply::default() };
            Facts { fabric, status, decisions, ..empty() }.sections(&Sections::new())
        };
        assert_eq!(sections(20_001, 5), sections(39_999, 900_000_000));
        assert_ne!(sections(20_001, 5), sections(40_000, 5));
    }

    #[test]
    fn everything_of_a_large_fabric_is_a_few_megabytes() {
        let host = |host: usize| format!("host-{host:04}");
        let switch = |kind: &str, switch: usize| format!("{kind}-{switch:02}");
        let (racks, spines) = (63, 16);
        let names = [("leaf", racks), ("spine", spines)];
        let switches = names.into_iter().flat_map(|(kind, count)| {
            (0..count).map(move |number| v1::FabricSwitch {
                name: switch(kind, number),
                kind: kind.to_owned(),
                addresses: vec!["10.128.200.200".to_owned()],
                connections: 100,
                ..v1::FabricSwitch::default()
            })
        });
        let both = |a: String, b: String| {
            let link = |from: &String, to: &String| v1::DirectedLinkStatus {
                from: from.clone(),
                to: to.clone(),
                capacity_bps: 400_000_000_000,
                cross_traffic_bps: 123_456_789_000,
                state: v1::LinkState::Congested.into(),
                since_ns: 1_700_000_000_000_000_000,
                confidence_ppm: 999_999,
                connections: 100,
            };
            [link(&a, &b), link(&b, &a)]
        };
        let down = (0..1000).flat_map(|number| both(host(number), switch("leaf", number / 16)));
        let up = (0..racks).flat_map(|leaf| {
            (0..spines).flat_map(move |spine| both(switch("leaf", leaf), switch("spine", spine)))
        });
        let hosts = (0..1000).map(|number| v1::FabricHost {
            name: host(number),
            rack: format!("rack-{}", number / 16),
            connected: true,
            communicators: 4,
            ..v1::FabricHost::default()
        });
        let topology = v1::TopologyReply {
            hosts: hosts.collect(),
            switches: switches.collect(),
            links: down.chain(up).collect(),
            aggregators: Vec::new(),
            now_ns: 0,
        };
        let ring_edge = |rank: usize| v1::PlannedRingEdge {
            from: host(rank),
            to: host(rank + 1),
            paths: vec![v1::PlannedPath {
                source_port: 20_000,
                switches: vec![switch("leaf", 1), switch("spine", 2), switch("leaf", 3)],
            }],
            rate_bps: 100_000_000_000,
        };
        let algorithm = |step: u64| v1::AlgorithmStatus {
            collective: "allreduce".to_owned(),
            from_bytes: step << 20,
            to_bytes: Some((step + 1) << 20),
            algorithm: "recursive-halving".to_owned(),
            at_bytes: step << 20,
            predicted: vec![v1::PredictedTime { algorithm: "ring".to_owned(), time_ns: 123_456_789 }; 3],
            overridden: false,
        };
        let plan = |communicator| v1::PlanStatus {
            communicator,
            tenant: "a-tenant".to_owned(),
            name: format!("communicator-{communicator}"),
            epoch: 3,
            order: (0..16).map(host).collect(),
            ring_edges: (0..16).map(ring_edge).collect(),
            predicted_ns: 12_345_678,
            slowdown_ppm: 1_100_000,
            share_bps: 100_000_000_000,
            reason: "the ring's racks lie next to each other".to_owned(),
            algorithms: (0..12).map(algorithm).collect(),
            ..v1::PlanStatus::default()
        };
        let plans = v1::PlansReply { plans: (0..500).map(plan).collect(), ..v1::PlansReply::default() };
        let rank_time = |rank: u32| RankTime {
            rank,
            host: host(rank as usize),
            called_ns: 12_345_678,
            ended_ns: Some(123_456_789),
        };
        let operation = |communicator| LastOperation {
            communicator: CommunicatorId(communicator),
            number: 123_456,
            bytes: 1 << 28,
            ranks: (0..16).map(rank_time).collect(),
            others: 0,
        };
        let operations = (0..500).map(operation).collect();
        let sections = Facts { topology, plans, operations, ..empty() }.sections(&Sections::new());
        let all = message(1, &every(&sections), &Gone::new());
        println!("{} bytes at 1,000 hosts and 500 communicators of 16 ranks", all.len());
        assert!(all.len() < MOST_BYTES, "{} bytes", all.len());
    }
}
