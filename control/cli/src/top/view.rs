//! What `top` shows, as panels of rows, from an agent's snapshot or control's.

use crate::describe::{congestion_text, straggler_sentence};
use crate::text::{bytes, clean, clock, duration, moment, number_of, ranks, rate, share, visible};
use harmonaize_api::communicator_text;
use harmonaize_api::v1::{
    CommunicatorTelemetry, CommunicatorTraffic, CongestionCause, CongestionLevel, ExternalJob,
    FabricSnapshot, FindingChange, Flow, FlowDirection, FlowProtocol, HostTelemetry, Link, LinkCounters,
    Operation, Snapshot, Straggler, TelemetryCost, TelemetryLosses, finding_change,
};
use std::collections::BTreeMap;

/// Most characters of a reason why something is not measured.
const MAX_REASON: usize = 400;

/// A panel, and the place of what a reader set for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// Hosts of control's topology.
    Hosts,
    /// Interfaces.
    Links,
    /// Flows of one host.
    Flows,
    /// Own communicators.
    Communicators,
    /// External jobs and their phases.
    Phases,
    /// Findings on ranks.
    Stragglers,
    /// Findings that changed.
    Changes,
    /// What communicators run by.
    Plans,
    /// Changes of plans.
    Switches,
}

/// How a cell wants to be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tone {
    /// As it is.
    Plain,
    /// Of little interest.
    Dim,
    /// Well.
    Good,
    /// Worth a look.
    Warn,
    /// Wrong.
    Bad,
}

/// A cell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cell {
    /// What it says.
    pub text: String,
    /// What it is sorted by; among equals, the text.
    pub order: u64,
    /// How.
    pub tone: Tone,
}

/// A column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Column {
    /// Its head.
    pub name: &'static str,
    /// Whether its cells stand right: quantities.
    pub right: bool,
    /// Which go first where the width does not suffice: the highest.
    pub drop_priority: u8,
}

/// A table with a title.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Panel {
    /// Which.
    pub kind: Kind,
    /// Its title.
    pub title: String,
    /// Its columns.
    pub columns: Vec<Column>,
    /// Its rows; each as many cells as columns.
    pub rows: Vec<Vec<Cell>>,
    /// The column that it is sorted by until the reader says otherwise; none for as it comes.
    pub sorted_by: Option<usize>,
    /// What stands where there is no row.
    pub empty: &'static str,
}

/// Everything on the screen but what the reader set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct View {
    /// Whose it is, and when.
    pub title: String,
    /// Losses and costs in one line.
    pub account: String,
    /// What is not measured, and why.
    pub missing: Vec<String>,
    /// The panels, most important first.
    pub panels: Vec<Panel>,
}

const fn text(name: &'static str, spare: u8) -> Column {
    Column { name, right: false, drop_priority: spare }
}

const fn quantity(name: &'static str, spare: u8) -> Column {
    Column { name, right: true, drop_priority: spare }
}

fn plain(text: impl Into<String>) -> Cell {
    Cell { text: text.into(), order: 0, tone: Tone::Plain }
}

fn counted(order: u64, text: String) -> Cell {
    let tone = if order == 0 { Tone::Dim } else { Tone::Plain };
    Cell { text, order, tone }
}

fn number(count: u64) -> Cell {
    counted(count, count.to_string())
}

/// A count that should be 0.
fn fault(count: u64) -> Cell {
    let tone = if count == 0 { Tone::Dim } else { Tone::Warn };
    Cell { text: count.to_string(), order: count, tone }
}

/// A duration; "-" for none.
fn time(nanos: u64) -> Cell {
    counted(nanos, if nanos == 0 { "-".to_owned() } else { duration(nanos) })
}

/// Time since then; "-" where it is not known.
fn since(now: u64, then: u64) -> Cell {
    match then {
        0 => counted(0, "-".to_owned()),
        _ => counted(now.saturating_sub(then), duration(now.saturating_sub(then))),
    }
}

impl View {
    /// An agent's.
    pub(crate) fn agent(snapshot: &Snapshot) -> Self {
        let now = snapshot.time_ns;
        let host = if snapshot.host.is_empty() { "this host".to_owned() } else { clean(&snapshot.host) };
        let links = snapshot.links.iter().map(|link| link_row(now, None, link)).collect();
        let flows = snapshot.flows.iter().map(flow_row).collect();
        let communicators = snapshot.communicators.iter().map(|one| traffic_row(snapshot, one)).collect();
        let jobs = snapshot.external_jobs.iter().map(|job| job_row(now, job)).collect();
        let known = snapshot.communicators.iter();
        let names = Names::of(known.map(|one| (one.communicator, one.tenant.as_str(), one.name.as_str())));
        Self {
            title: format!("{host}  {}  up {}", clock(now), duration(snapshot.uptime_ns)),
            account: account(snapshot.losses.as_ref(), snapshot.cost.as_ref()),
            missing: snapshot.missing.iter().map(|text| reason(text)).collect(),
            panels: vec![
                links_panel(links, false),
                flows_panel(flows, snapshot.flow_count),
                communicators_panel(communicators),
                phases_panel(jobs),
                stragglers_panel(now, &snapshot.stragglers, &names),
            ],
        }
    }

    /// Control's.
    pub(crate) fn fabric(snapshot: &FabricSnapshot) -> Self {
        let now = snapshot.time_ns;
        let telling = snapshot.hosts.iter().filter(|host| host.connected && host.reports > 0).count();
        let links = snapshot
            .hosts
            .iter()
            .flat_map(|host| host.links.iter().map(move |link| link_row(now, Some(&host.host), link)));
        let links = links.collect();
        let hosts = number_of(snapshot.hosts.len(), "host reports", "hosts report");
        let known = snapshot.communicators.iter();
        let names = Names::of(known.map(|one| (one.communicator, one.tenant.as_str(), one.name.as_str())));
        Self {
            title: format!("fabric  {}  {telling} of {hosts}", clock(now)),
            account: String::new(),
            missing: Vec::new(),
            panels: vec![
                hosts_panel(&snapshot.hosts),
                links_panel(links, true),
                fabric_communicators_panel(&snapshot.communicators),
                stragglers_panel(now, &snapshot.stragglers, &names),
                changes_panel(now, &snapshot.changes, &names),
            ],
        }
    }
}

/// What is not measured, and why: longer than a name, and for a terminal too.
fn reason(text: &str) -> String {
    text.chars().take(MAX_REASON).map(visible).collect()
}

fn account(losses: Option<&TelemetryLosses>, cost: Option<&TelemetryCost>) -> String {
    let mut words = Vec::new();
    if let Some(cost) = cost {
        words.push(format!("cost {} of a core", share(cost.thread_ppm.into())));
        if let Some(each) = cost.run_ns.checked_div(cost.runs).filter(|_| cost.timed) {
            words.push(format!("{each}ns a packet"));
        }
    }
    if let Some(lost) = losses {
        let named = [
            ("events", lost.events),
            ("flows evicted", lost.evicted),
            ("packets unplaced", lost.untracked),
            ("marks", lost.marks),
            ("records", lost.records),
            ("gaps", lost.gaps),
            ("packets unregistered", lost.unregistered),
            ("ends unplaced", lost.endpoints),
        ];
        let lost: Vec<String> = named
            .iter()
            .filter(|(_, count)| *count > 0)
            .map(|(name, count)| format!("{count} {name}"))
            .collect();
        words.push(if lost.is_empty() {
            "nothing lost".to_owned()
        } else {
            format!("lost: {}", lost.join(", "))
        });
    }
    words.join(", ")
}

fn links_panel(rows: Vec<Vec<Cell>>, hosts: bool) -> Panel {
    let mut columns = vec![
        text("link", 0),
        quantity("capacity", 6),
        quantity("out", 1),
        quantity("own", 5),
        quantity("in", 1),
        quantity("used", 3),
        text("state", 0),
        text("cause", 2),
        quantity("since", 4),
        quantity("marks", 7),
        quantity("resent", 5),
    ];
    if hosts {
        columns.insert(0, text("host", 0));
    }
    let used = columns.iter().position(|column| column.name == "used");
    Panel {
        kind: Kind::Links,
        title: "LINKS  rates in bit/s".to_owned(),
        columns,
        rows,
        sorted_by: used.filter(|_| hosts),
        empty: "no interface is listened at",
    }
}

fn link_row(now: u64, host: Option<&str>, link: &Link) -> Vec<Cell> {
    let (level, cause, since_ns) = link
        .congestion
        .as_ref()
        .map_or((CongestionLevel::Unspecified, CongestionCause::Unspecified, 0), |found| {
            (found.level(), found.cause(), found.since_ns)
        });
    let busiest = link.egress_bps.max(link.ingress_bps);
    let used = u128::from(busiest) * 1_000_000;
    let used = used.checked_div(link.capacity_bps.into()).map(|ppm| u64::try_from(ppm).unwrap_or(u64::MAX));
    let counted_of = |of: fn(&LinkCounters) -> u64, cell: fn(u64) -> Cell| match &link.counters {
        Some(counters) => cell(of(counters)),
        None => counted(0, "-".to_owned()),
    };
    let mut cells = vec![
        plain(clean(&link.interface)),
        counted(
            link.capacity_bps,
            if link.capacity_bps == 0 { "-".to_owned() } else { rate(link.capacity_bps) },
        ),
        counted(link.egress_bps, rate(link.egress_bps)),
        counted(link.own_egress_bps, rate(link.own_egress_bps)),
        counted(link.ingress_bps, rate(link.ingress_bps)),
        counted(used.unwrap_or(busiest), used.map_or_else(|| "-".to_owned(), share)),
        Cell { text: level.text(), order: level as u64, tone: level_tone(level) },
        plain(cause.text().replace('_', " ")),
        since(now, since_ns),
        counted_of(|counters| counters.ecn_ce, number),
        counted_of(|counters| counters.retransmits, fault),
    ];
    if let Some(host) = host {
        cells.insert(0, plain(clean(host)));
    }
    cells
}

fn level_tone(level: CongestionLevel) -> Tone {
    match level {
        CongestionLevel::Unspecified => Tone::Dim,
        CongestionLevel::None => Tone::Good,
        CongestionLevel::Mild => Tone::Warn,
        CongestionLevel::Severe => Tone::Bad,
    }
}

fn flows_panel(rows: Vec<Vec<Cell>>, known: u64) -> Panel {
    let title = format!("FLOWS  the fastest {} of {known}; rates in bit/s", rows.len());
    let columns = vec![
        text("proto", 4),
        text("local", 0),
        text("remote", 0),
        text("whose", 1),
        quantity("out", 0),
        quantity("in", 0),
        quantity("rtt", 1),
        quantity("least", 5),
        quantity("resent", 2),
        quantity("marks", 3),
        quantity("bytes", 6),
    ];
    Panel { kind: Kind::Flows, title, columns, rows, sorted_by: None, empty: "no flow has been seen" }
}

fn flow_row(flow: &Flow) -> Vec<Cell> {
    let none = FlowDirection::default();
    let (out, into) = (flow.egress.as_ref().unwrap_or(&none), flow.ingress.as_ref().unwrap_or(&none));
    let end = |address: &str, port: u32| match flow.protocol() {
        FlowProtocol::Roce => clean(address),
        _ if address.contains(':') => format!("[{}]:{port}", clean(address)),
        _ => format!("{}:{port}", clean(address)),
    };
    let whose = match (&flow.owner, flow.job.as_str()) {
        (Some(owner), _) => {
            let id = communicator_text(owner.communicator);
            let short = id.get(id.len().saturating_sub(6)..).unwrap_or_default().to_owned();
            format!("{}/{short}", clean(&owner.tenant))
        }
        (None, "") => "-".to_owned(),
        (None, job) => format!("job {}", clean(job)),
    };
    let mut remote = end(&flow.remote, flow.remote_port);
    if flow.protocol() == FlowProtocol::Roce {
        remote += &format!(" qp {}", flow.queue_pair);
    }
    let sum = |of: fn(&FlowDirection) -> u64| of(out).saturating_add(of(into));
    let bytes_seen = sum(|way| way.bytes);
    let least = out.min_rtt_ns;
    vec![
        plain(flow.protocol().text()),
        plain(end(&flow.local, flow.local_port)),
        plain(remote),
        plain(whose),
        counted(out.rate_bps, rate(out.rate_bps)),
        counted(into.rate_bps, rate(into.rate_bps)),
        time(if out.rtt_samples == 0 { 0 } else { out.last_rtt_ns }),
        time(if out.rtt_samples == 0 { 0 } else { least }),
        fault(sum(|way| way.retransmits.saturating_add(way.gaps))),
        number(sum(|way| way.ecn_ce.saturating_add(way.cnps))),
        counted(bytes_seen, bytes(bytes_seen)),
    ]
}

fn communicators_panel(rows: Vec<Vec<Cell>>) -> Panel {
    let columns = vec![
        text("communicator", 0),
        text("ranks", 4),
        quantity("epoch", 7),
        quantity("operations", 1),
        quantity("failed", 5),
        quantity("last", 2),
        quantity("median", 3),
        quantity("out", 1),
        quantity("in", 6),
        text("in flight", 2),
    ];
    let (kind, title) = (Kind::Communicators, "COMMUNICATORS  rates in bit/s".to_owned());
    Panel { kind, title, columns, rows, sorted_by: None, empty: "no own communicator" }
}

fn named(tenant: &str, name: &str, id: u64) -> String {
    match (tenant, name) {
        (_, "") => communicator_text(id),
        (tenant, name) => format!("{}/{}", clean(tenant), clean(name)),
    }
}

/// What communicators of a snapshot are called.
struct Names(BTreeMap<u64, String>);

impl Names {
    /// Of ids, tenants and names.
    fn of<'a>(known: impl Iterator<Item = (u64, &'a str, &'a str)>) -> Self {
        Self(known.map(|(id, tenant, name)| (id, named(tenant, name, id))).collect())
    }

    /// Its tenant and name; its id where the snapshot has none of that id.
    fn get(&self, id: u64) -> String {
        self.0.get(&id).cloned().unwrap_or_else(|| communicator_text(id))
    }
}

fn traffic_row(snapshot: &Snapshot, one: &CommunicatorTraffic) -> Vec<Cell> {
    let flight = snapshot.operations.iter().find(|operation| operation.communicator == one.communicator);
    let flight = flight.map_or_else(
        || counted(0, "-".to_owned()),
        |operation| {
            let age = snapshot.time_ns.saturating_sub(began(operation));
            counted(age, format!("#{}, {}", operation.operation, duration(age)))
        },
    );
    vec![
        plain(named(&one.tenant, &one.name, one.communicator)),
        plain(ranks(&one.ranks)),
        number(one.epoch),
        number(one.operations),
        fault(one.failed),
        time(one.last_operation_ns),
        time(one.median_operation_ns),
        counted(one.egress_bps, rate(one.egress_bps)),
        counted(one.ingress_bps, rate(one.ingress_bps)),
        flight,
    ]
}

/// When an operation was first called here; the end of time where that is not known.
fn began(operation: &Operation) -> u64 {
    operation.ranks.iter().map(|rank| rank.called_ns).filter(|called| *called > 0).min().unwrap_or(u64::MAX)
}

fn phases_panel(rows: Vec<Vec<Cell>>) -> Panel {
    let columns = vec![
        text("job", 0),
        text("hosts", 2),
        quantity("flows", 4),
        quantity("iterations", 1),
        quantity("period", 0),
        quantity("rate", 1),
        quantity("phase", 0),
        quantity("bytes", 2),
        quantity("before", 3),
        text("ring", 5),
        text("late", 3),
    ];
    let (kind, title) = (Kind::Phases, "PHASES  of external jobs; rates in bit/s".to_owned());
    Panel { kind, title, columns, rows, sorted_by: None, empty: "no external job was found" }
}

fn job_row(now: u64, job: &ExternalJob) -> Vec<Cell> {
    let last = job.last.clone().unwrap_or_default();
    let ring = if job.ring { number_of(job.hosts.len(), "host", "hosts") } else { "-".to_owned() };
    let late = match last.delayed_host.as_str() {
        "" => counted(0, "-".to_owned()),
        host => {
            let text = format!("{} by {}", clean(host), duration(last.delay_ns));
            Cell { text, order: last.delay_ns, tone: Tone::Warn }
        }
    };
    let hosts = match job.hosts.as_slice() {
        [] => "-".to_owned(),
        [one] => clean(one),
        [first, rest @ ..] => format!("{} and {}", clean(first), rest.len()),
    };
    vec![
        plain(clean(&job.job)),
        plain(hosts),
        number(job.flows),
        number(job.iterations),
        time(job.period_ns),
        counted(job.rate_bps, rate(job.rate_bps)),
        time(last.end_ns.saturating_sub(last.start_ns)),
        counted(last.bytes, bytes(last.bytes)),
        since(now, last.end_ns),
        plain(ring),
        late,
    ]
}

fn stragglers_panel(now: u64, stragglers: &[Straggler], names: &Names) -> Panel {
    let columns = vec![
        text("of", 0),
        quantity("rank", 0),
        text("host", 1),
        text("why", 0),
        quantity("late by", 0),
        quantity("since", 2),
        quantity("times", 3),
    ];
    let rows = stragglers.iter().map(|one| {
        let whose = match one.job.as_str() {
            "" => names.get(one.communicator),
            job => format!("job {}", clean(job)),
        };
        vec![
            plain(whose),
            Cell { tone: Tone::Bad, ..number(one.rank.into()) },
            plain(if one.host.is_empty() { "-".to_owned() } else { clean(&one.host) }),
            Cell { tone: Tone::Warn, ..plain(one.cause().text()) },
            time(one.delay_ns),
            since(now, one.since_ns),
            number(one.iterations),
        ]
    });
    let (kind, title, rows) = (Kind::Stragglers, "STRAGGLERS".to_owned(), rows.collect());
    Panel { kind, title, columns, rows, sorted_by: Some(4), empty: "no rank is late" }
}

fn hosts_panel(hosts: &[HostTelemetry]) -> Panel {
    let columns = vec![
        text("host", 0),
        text("state", 0),
        quantity("reports", 1),
        quantity("flows", 1),
        quantity("cost", 3),
        quantity("lost", 1),
        quantity("refused", 2),
        quantity("dropped", 2),
    ];
    let rows = hosts.iter().map(|host| {
        let (state, tone) = match (host.connected, host.reports) {
            (false, _) => ("away", Tone::Bad),
            (true, 0) => ("silent", Tone::Dim),
            (true, _) => ("reports", Tone::Good),
        };
        let lost = host.losses.unwrap_or_default();
        let (kernel, agent) = (lost.unregistered.saturating_add(lost.endpoints), lost.gaps);
        let lost = [lost.events, lost.evicted, lost.untracked, lost.marks, lost.records, kernel, agent];
        let cost = u64::from(host.cost.unwrap_or_default().thread_ppm);
        vec![
            plain(clean(&host.host)),
            Cell { text: state.to_owned(), order: 0, tone },
            time(host.age_ns),
            number(host.flow_count),
            counted(cost, share(cost)),
            fault(lost.into_iter().fold(0, u64::saturating_add)),
            fault(host.refused),
            fault(host.dropped),
        ]
    });
    let (kind, title, rows) = (Kind::Hosts, "HOSTS".to_owned(), rows.collect());
    Panel { kind, title, columns, rows, sorted_by: None, empty: "the topology has no host" }
}

fn fabric_communicators_panel(communicators: &[CommunicatorTelemetry]) -> Panel {
    let columns = vec![
        text("communicator", 0),
        text("id", 4),
        quantity("ranks", 2),
        quantity("operations", 1),
        quantity("last", 1),
        quantity("median", 2),
        text("straggler", 0),
    ];
    let rows = communicators.iter().map(|one| {
        let straggler = one.straggler.as_ref().map_or_else(
            || Cell { text: "none".to_owned(), order: 0, tone: Tone::Good },
            |found| {
                let why = found.cause().text();
                let text = format!("rank {}, {why}, {}", found.rank, duration(found.delay_ns));
                Cell { text, order: found.delay_ns, tone: Tone::Bad }
            },
        );
        vec![
            plain(named(&one.tenant, &one.name, one.communicator)),
            plain(communicator_text(one.communicator)),
            number(one.ranks.into()),
            number(one.operations),
            time(one.last_operation_ns),
            time(one.median_operation_ns),
            straggler,
        ]
    });
    let (kind, title, rows) = (Kind::Communicators, "COMMUNICATORS".to_owned(), rows.collect());
    Panel { kind, title, columns, rows, sorted_by: None, empty: "no agent has reported operations" }
}

fn changes_panel(now: u64, changes: &[FindingChange], names: &Names) -> Panel {
    let rows = changes.iter().rev().map(|change| {
        let (what, tone) = match &change.finding {
            Some(finding_change::Finding::Congestion(found)) => {
                (congestion_text(found), level_tone(found.level()))
            }
            Some(finding_change::Finding::Straggler(found)) => {
                (straggler_sentence(found, &names.get(found.communicator)), Tone::Warn)
            }
            None => ("-".to_owned(), Tone::Dim),
        };
        let host = if change.host.is_empty() { "control".to_owned() } else { clean(&change.host) };
        vec![
            Cell { order: change.time_ns, ..plain(moment(now, change.time_ns)) },
            plain(host),
            Cell { text: what, order: 0, tone },
        ]
    });
    Panel {
        kind: Kind::Changes,
        title: "CHANGES  newest first".to_owned(),
        columns: vec![text("time", 0), text("from", 0), text("finding", 0)],
        rows: rows.collect(),
        sorted_by: None,
        empty: "no finding has changed",
    }
}
