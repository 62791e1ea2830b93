//! Operators' answers as text.

use crate::table::{row, table};
use crate::text::{age, bytes, clean, date, duration, moment, number_of, rate, share};
use harmonaize_api::communicator_text;
use harmonaize_api::v1::{self, LinkState, WithdrawalKind};

/// Most links that are listed while all is well with them.
const MAX_LINKS: usize = 64;

/// A page of sections.
fn section(page: &mut String, title: &str, head: Vec<String>, rows: Vec<Vec<String>>) {
    if !rows.is_empty() {
        let rows: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
        *page += &format!("\n{title}\n{}", table(&rows));
    }
}

/// A name in full; long ones too, for they are to be typed again.
fn name(tenant: &str, name: &str) -> String {
    format!("{}/{}", clean(tenant), clean(name))
}

/// How much longer than on an idle fabric: "1.25".
fn slowdown(ppm: u64) -> String {
    if ppm == 0 { "-".to_owned() } else { format!("{:.2}", ppm as f64 / 1e6) }
}

pub(crate) fn topology(reply: &v1::TopologyReply) -> String {
    let count = |wanted: LinkState| reply.links.iter().filter(|link| link.state() == wanted).count();
    let connected = reply.hosts.iter().filter(|host| host.connected).count();
    let mut page = format!(
        "{} ({connected} connected), {}, {}, each one way: {} congested, {} failed, {} drained\n",
        number_of(reply.hosts.len(), "host", "hosts"),
        number_of(reply.switches.len(), "switch", "switches"),
        number_of(reply.links.len(), "link", "links"),
        count(LinkState::Congested),
        count(LinkState::Failed),
        count(LinkState::Withdrawn),
    );
    let yes = |yes: bool, text: &str| if yes { text.to_owned() } else { "-".to_owned() };
    let hosts = reply.hosts.iter().map(|host| {
        let rack = if host.rack.is_empty() { "-" } else { &host.rack };
        let (agent, drained) =
            (if host.connected { "connected" } else { "away" }, yes(host.withdrawn, "drained"));
        let kind = if host.kind.is_empty() { "-" } else { &host.kind };
        row([&host.name, rack, kind, agent, &host.communicators.to_string(), &drained])
    });
    let head = row(["host", "rack", "kind", "agent", "communicators", "use"]);
    section(&mut page, "HOSTS", head, hosts.collect());
    let switches = reply.switches.iter().map(|switch| {
        let (connections, drained) = (switch.connections.to_string(), yes(switch.withdrawn, "drained"));
        row([&switch.name, &switch.kind, &connections, &drained])
    });
    section(&mut page, "SWITCHES", row(["switch", "kind", "connections", "use"]), switches.collect());
    let aggregators = reply.aggregators.iter().map(|one| {
        let agent = if one.connected { "connected" } else { "away" };
        let sums: u64 = one.report.iter().flat_map(|report| &report.tenants).map(|tenant| tenant.sums).sum();
        let units = match one.units {
            0 => "-".to_owned(),
            units => format!("{} of {units}", one.guaranteed_units),
        };
        row([
            &one.name,
            &one.switch,
            &rate(one.rate_bps),
            agent,
            &one.communicators.to_string(),
            &units,
            &sums.to_string(),
        ])
    });
    let head = row(["aggregator", "at", "carries, bit/s", "agent", "communicators", "guaranteed", "sums"]);
    section(&mut page, "AGGREGATORS", head, aggregators.collect());
    let all = reply.links.len() <= MAX_LINKS;
    let shown = reply.links.iter().filter(|link| all || link.state() != LinkState::Ok);
    let (carries, others) = ("carries, bit/s", "others, bit/s");
    let head = row(["from", "to", carries, others, "state", "sure", "since", "connections"]);
    section(&mut page, "LINKS", head, shown.map(|one| link(reply.now_ns, one)).collect());
    if !all {
        page += "  (those that are not named are ok)\n";
    }
    page
}

/// A link's row, at this time of control's clock.
fn link(now: u64, link: &v1::DirectedLinkStatus) -> Vec<String> {
    let known = link.confidence_ppm > 0;
    let sure = if known { share(u64::from(link.confidence_ppm)) } else { "-".to_owned() };
    let others = if link.cross_traffic_bps == 0 { "-".to_owned() } else { rate(link.cross_traffic_bps) };
    row([
        &link.from,
        &link.to,
        &rate(link.capacity_bps),
        &others,
        &link.state().text(),
        &sure,
        &age(now, link.since_ns),
        &link.connections.to_string(),
    ])
}

pub(crate) fn tenants(reply: &v1::TenantsReply) -> String {
    let head =
        row(["tenant", "from", "agents", "communicators", "ranks", "errors", "agreements", "not kept"]);
    let rows = reply.tenants.iter().map(|tenant| {
        let from = match tenant.configured {
            true => "configuration".to_owned(),
            false => format!("added {}", date(tenant.added_ns)),
        };
        let counts = [tenant.communicators, tenant.ranks, tenant.agreements, tenant.broken];
        let [communicators, ranks, agreements, broken] = counts.map(|count| count.to_string());
        let errors = tenant.errors.to_string();
        let agents = tenant.at.iter().filter(|at| at.refused.is_empty()).count().to_string();
        row([&clean(&tenant.name), &from, &agents, &communicators, &ranks, &errors, &agreements, &broken])
    });
    let rows: Vec<Vec<String>> = rows.collect();
    if rows.is_empty() {
        return "no tenants; `harmonaize tenants add NAME` adds one\n".to_owned();
    }
    let mut page = table(&std::iter::once(head).chain(rows).collect::<Vec<_>>());
    let limits =
        reply.tenants.iter().flat_map(|tenant| tenant.limits.iter().map(move |limit| (tenant, limit)));
    let rows = limits.map(|(tenant, limit)| {
        let amount = match limit.key.as_str() {
            "arena" | "landing" => bytes,
            _ => |count: u64| count.to_string(),
        };
        row([&clean(&tenant.name), &clean(&limit.key), &amount(limit.used), &amount(limit.max)])
    });
    section(&mut page, "LIMITS, ALL HOSTS", row(["tenant", "key", "used", "most"]), rows.collect());
    // Where those attach that no configuration of an agent names.
    let added = reply.tenants.iter().filter(|tenant| !tenant.configured);
    let places = added.flat_map(|tenant| tenant.at.iter().map(move |at| (tenant, at)));
    let rows = places.map(|(tenant, at)| {
        let socket = if at.socket.is_empty() { "-" } else { &at.socket };
        let why = if at.refused.is_empty() { "served".to_owned() } else { sanitize(&at.refused) };
        row([&clean(&tenant.name), &clean(&at.host), &sanitize(socket), &why])
    });
    section(&mut page, "ADDED, AT AGENTS", row(["tenant", "host", "socket", "state"]), rows.collect());
    page
}

pub(crate) fn plans(reply: &v1::PlansReply) -> String {
    let mut page = format!(
        "{}; {} done, {} given up\n",
        number_of(reply.plans.len(), "communicator", "communicators"),
        number_of(reply.changes_completed, "change of plan", "changes of plan"),
        reply.changes_abandoned
    );
    page += &plan_sections(&reply.plans);
    page
}

fn plan_sections(plans: &[v1::PlanStatus]) -> String {
    let mut page = String::new();
    let rows = plans.iter().map(|plan| {
        let epoch = match plan.next_epoch {
            0 => plan.epoch.to_string(),
            next => format!("{} -> {next}", plan.epoch),
        };
        let predicted = if plan.predicted_ns == 0 { "-".to_owned() } else { duration(plan.predicted_ns) };
        let share = if plan.share_bps == 0 { "-".to_owned() } else { rate(plan.share_bps) };
        let chosen = if plan.pinned { "an operator" } else { "control" };
        row([
            &communicator_text(plan.communicator),
            &name(&plan.tenant, &plan.name),
            &epoch,
            &plan.order.join(" "),
            &predicted,
            &slowdown(plan.slowdown_ppm),
            &share,
            chosen,
        ])
    });
    let head = row(["id", "name", "epoch", "ring", "operation", "slowdown", "share, bit/s", "order by"]);
    section(&mut page, "PLANS", head, rows.collect());
    let hops = plans.iter().flat_map(|plan| plan.ring_edges.iter().map(move |hop| (plan, hop)));
    let rows = hops.map(|(plan, hop)| {
        let limit = if hop.rate_bps == 0 { "-".to_owned() } else { rate(hop.rate_bps) };
        let ends = format!("{} -> {}", hop.from, hop.to);
        row([&name(&plan.tenant, &plan.name), &ends, &paths(hop), &limit])
    });
    section(
        &mut page,
        "LINKS OF RINGS",
        row(["name", "link", "paths (source port)", "held to, bit/s"]),
        rows.collect(),
    );
    let why = plans.iter().filter(|plan| !plan.reason.is_empty());
    for plan in why {
        page += &format!("\n{}: {}\n", name(&plan.tenant, &plan.name), sanitize(&plan.reason));
    }
    let coded = plans.iter().filter(|plan| !plan.codec_reason.is_empty());
    for plan in coded {
        let (name, codec, budget) = (name(&plan.tenant, &plan.name), clean(&plan.codec), clean(&plan.budget));
        let why = sanitize(&plan.codec_reason);
        page += &format!("\n{name}: tensors travel as {codec} (budget: {budget}): {why}\n");
    }
    for plan in plans {
        let ranges = plan.algorithms.iter().filter(|range| range.algorithm != RING);
        let ranges: Vec<String> = ranges
            .map(|range| {
                let to = range.to_bytes.map_or_else(String::new, |to| format!(" up to {}", bytes(to)));
                format!("{} {}{to}", clean(&range.collective), clean(&range.algorithm))
            })
            .collect();
        if !ranges.is_empty() {
            let (name, why) = (name(&plan.tenant, &plan.name), sanitize(&plan.algorithm_reason));
            page += &format!("\n{name}: {}: {why}\n", ranges.join(", "));
        }
    }
    for plan in plans.iter().filter(|plan| !plan.aggregation_reason.is_empty()) {
        let by = match plan.aggregator.as_str() {
            "" => "no aggregator sums on the way".to_owned(),
            by => format!("{} sums large operations on the way", clean(by)),
        };
        let name = name(&plan.tenant, &plan.name);
        page += &format!("\n{name}: {by}: {}\n", sanitize(&plan.aggregation_reason));
    }
    for plan in plans.iter().filter(|plan| !plan.interleaving.is_empty()) {
        page += &format!("\n{}: {}\n", name(&plan.tenant, &plan.name), sanitize(&plan.interleaving));
    }
    for plan in plans.iter().filter(|plan| !plan.hints.is_empty()) {
        page +=
            &format!("\n{}: its tenant expects {}\n", name(&plan.tenant, &plan.name), sanitize(&plan.hints));
    }
    page
}

/// The algorithm of those sizes for which there is no better.
const RING: &str = "ring";

/// Which algorithm operations take by their size, and what each was predicted to take.
fn algorithms(plans: &[v1::PlanStatus]) -> String {
    let mut page = String::new();
    let ranges = plans.iter().flat_map(|plan| plan.algorithms.iter().map(move |range| (plan, range)));
    let rows = ranges.map(|(plan, range)| {
        let to = range.to_bytes.map_or_else(|| "-".to_owned(), bytes);
        let predicted =
            |one: &v1::PredictedTime| format!("{} {}", clean(&one.algorithm), duration(one.time_ns));
        let own = range.predicted.iter().find(|one| one.algorithm == range.algorithm);
        let others = range.predicted.iter().filter(|one| one.algorithm != range.algorithm);
        let others: Vec<String> = others.map(predicted).collect();
        let why = match (range.overridden, own) {
            (true, _) => "an operator chose",
            (false, Some(_)) => "predicted",
            (false, None) => "-",
        };
        row([
            &name(&plan.tenant, &plan.name),
            &clean(&range.collective),
            &bytes(range.from_bytes),
            &to,
            &clean(&range.algorithm),
            &own.map_or_else(|| "-".to_owned(), |one| duration(one.time_ns)),
            &if own.is_some() { bytes(range.at_bytes) } else { "-".to_owned() },
            why,
            &if others.is_empty() { "-".to_owned() } else { others.join(", ") },
        ])
    });
    let head = ["name", "collective", "from", "to", "algorithm", "takes", "at", "why", "others"];
    section(&mut page, "ALGORITHMS", row(head), rows.collect());
    page
}

/// By which TCP congestion control links of each kind of route go, and why.
fn congestion_controls(plans: &[v1::PlanStatus]) -> String {
    let mut page = String::new();
    let routes =
        plans.iter().flat_map(|plan| plan.congestion_controls.iter().map(move |route| (plan, route)));
    let rows = routes.map(|(plan, route)| {
        let links = match route.route.as_str() {
            "rack" => "within a rack".to_owned(),
            "racks" => "between racks".to_owned(),
            other => clean(other),
        };
        let control = if route.name.is_empty() { "the host's own".to_owned() } else { clean(&route.name) };
        row([&name(&plan.tenant, &plan.name), &links, &control, &sanitize(&route.reason)])
    });
    section(&mut page, "CONGESTION CONTROL", row(["name", "links", "control", "why"]), rows.collect());
    page
}

/// "spine0 (20001, 20002); ? (20003)".
fn paths(hop: &v1::PlannedRingEdge) -> String {
    let mut by_way: Vec<(String, Vec<String>)> = Vec::new();
    for path in &hop.paths {
        let way = if path.switches.is_empty() { "?".to_owned() } else { path.switches.join(" ") };
        let port = path.source_port;
        let port = if port == 0 { "any".to_owned() } else { port.to_string() };
        match by_way.iter_mut().find(|(known, _)| *known == way) {
            Some((_, ports)) => ports.push(port),
            None => by_way.push((way, vec![port])),
        }
    }
    if by_way.is_empty() {
        return "?".to_owned();
    }
    by_way.iter().map(|(way, ports)| format!("{way} ({})", ports.join(", "))).collect::<Vec<_>>().join("; ")
}

/// Words of control's that may have names of others in them.
fn sanitize(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(600).collect()
}

pub(crate) fn explain(reply: &v1::ExplainReply, plans: Option<&v1::PlansReply>) -> String {
    let of = |plans: &v1::PlansReply| {
        plan_sections(&plans.plans) + &algorithms(&plans.plans) + &congestion_controls(&plans.plans)
    };
    let mut page = plans.map_or_else(String::new, |plans| of(plans).trim_start().to_owned());
    if reply.decisions.is_empty() {
        return page + "nothing was decided since control started\n" + &pending_reports(reply);
    }
    for one in &reply.decisions {
        if !page.is_empty() {
            page.push('\n');
        }
        page += &decision(reply.now_ns, one);
    }
    page + &pending_reports(reply)
}

/// What became of agents' suspicions; nothing where there were none.
fn pending_reports(reply: &v1::ExplainReply) -> String {
    let (verified, refuted) = (reply.congestion_reports_verified, reply.congestion_reports_refuted);
    if verified + refuted == 0 {
        return String::new();
    }
    format!(
        "since control began packet trains verified {} of cross traffic, and refuted {refuted}\n",
        number_of(verified, "report", "reports")
    )
}

fn decision(now: u64, decision: &v1::DecisionRecord) -> String {
    let (number, at) = (decision.number, moment(now, decision.at_ns));
    let mut page = format!("decision {number} at {at}: {}\n", sanitize(&decision.cause));
    page += &format!("  {}\n", sanitize(&decision.reason));
    let (before, after) = (slowdown(decision.score_before_ppm), slowdown(decision.score_after_ppm));
    page += &format!("  slowdown {before} before, {after} after");
    if decision.stuck_before + decision.stuck_after > 0 {
        page += &format!("; without a way: {} before, {} after", decision.stuck_before, decision.stuck_after);
    }
    page.push('\n');
    let begun = decision.congestion_report.as_ref().map_or(decision.at_ns, |report| report.received_ns);
    let since = |at: u64| if at == 0 { "-".to_owned() } else { duration(at.saturating_sub(begun)) };
    if let Some(report) = &decision.congestion_report {
        let (host, path, what) = (clean(&report.host), sanitize(&report.path), sanitize(&report.finding));
        page += &format!("  report of {host}: {what} on {path}; planned {} later\n", since(decision.at_ns));
    }
    let rows = decision.changes.iter().map(|change| {
        let whose = match change.tenant.is_empty() {
            true => communicator_text(change.communicator),
            false => name(&change.tenant, &change.name),
        };
        row([
            &whose,
            &change.epoch.to_string(),
            &since(change.sent_ns),
            &since(change.prepared_ns),
            &since(change.first_switched_ns),
            &since(change.switched_ns),
            &sanitize(&change.outcome),
            &sanitize(&change.reason),
        ])
    });
    let head = row(["name", "epoch", "sent", "prepared", "first uses it", "all use it", "now", "why"]);
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
    page + &table(&rows)
}

pub(crate) fn dry_run(reply: &v1::DryRunReply) -> String {
    let (before, after) = (slowdown(reply.score_before_ppm), slowdown(reply.score_after_ppm));
    let mut page = format!(
        "{} of {} would change; slowdown {before} as it is, {after} by the plan\n",
        reply.changed.len(),
        number_of(reply.plans.len(), "communicator", "communicators")
    );
    if reply.stuck_before + reply.stuck_after > 0 {
        page +=
            &format!("without a way: {} as it is, {} by the plan\n", reply.stuck_before, reply.stuck_after);
    }
    if !reply.reason.is_empty() {
        page += &format!("{}\n", sanitize(&reply.reason));
    }
    let changed = |plan: &&v1::PlanStatus| reply.changed.contains(&plan.communicator);
    let plans: Vec<v1::PlanStatus> = reply.plans.iter().filter(changed).cloned().collect();
    page += &plan_sections(&plans);
    page
}

pub(crate) fn withdrawals(kind: WithdrawalKind, records: &[v1::WithdrawalRecord]) -> String {
    if records.is_empty() {
        let none =
            if kind == WithdrawalKind::Drain { "nothing is drained" } else { "no maintenance is planned" };
        return format!("{none}\n");
    }
    let rows = records.iter().map(|record| {
        let state = match (record.in_effect, record.target_kind.as_str()) {
            (_, "unknown") => "not in the topology".to_owned(),
            (false, _) => "not yet".to_owned(),
            (true, "host") => number_of(record.remaining, "communicator goes on", "communicators go on"),
            (true, _) if record.remaining > 0 => {
                number_of(record.remaining, "connection still crosses it", "connections still cross it")
            }
            (true, _) if record.unknown_paths > 0 => {
                number_of(record.unknown_paths, "connection may cross it", "connections may cross it")
            }
            (true, _) => "free of ours".to_owned(),
        };
        let reason = if record.reason.is_empty() { "-".to_owned() } else { sanitize(&record.reason) };
        let (from, until) = (date(record.from_ns), date(record.until_ns));
        row([&clean(&record.target), &record.target_kind, &from, &until, &state, &reason])
    });
    let head = row(["target", "what", "from", "until", "state", "reason"]);
    table(&std::iter::once(head).chain(rows).collect::<Vec<_>>())
}
