//! Operators' answers as JSON: every field, ids as people type them. Times are CLOCK_REALTIME nanoseconds, 0 where something has
//! not happened; rates are bits in a second; scores and confidence are parts of a million.

use harmonaize_api::communicator_text;
use harmonaize_api::v1::{self, LinkState, WithdrawalKind};
use serde_json::{Value, json};

/// A link's state in one word.
pub(crate) fn state(state: LinkState) -> &'static str {
    match state {
        LinkState::Unspecified => "unknown",
        LinkState::Ok => "ok",
        LinkState::Congested => "congested",
        LinkState::Failed => "failed",
        LinkState::Withdrawn => "drained",
    }
}

/// A way of withdrawing in one word.
pub(crate) fn kind(kind: WithdrawalKind) -> &'static str {
    match kind {
        WithdrawalKind::Unspecified => "unknown",
        WithdrawalKind::Drain => "drain",
        WithdrawalKind::Maintenance => "maintenance",
    }
}

pub(crate) fn topology(reply: &v1::TopologyReply) -> Value {
    let hosts = reply.hosts.iter().map(|host| {
        json!({
            "name": host.name,
            "rack": host.rack,
            "connected": host.connected,
            "drained": host.withdrawn,
            "communicators": host.communicators,
        })
    });
    let switches = reply.switches.iter().map(|switch| {
        json!({
            "name": switch.name,
            "kind": switch.kind,
            "addresses": switch.addresses,
            "drained": switch.withdrawn,
            "connections": switch.connections,
        })
    });
    let links = reply.links.iter().map(|link| {
        json!({
            "from": link.from,
            "to": link.to,
            "capacity_bps": link.capacity_bps,
            "cross_traffic_bps": link.cross_traffic_bps,
            "state": state(link.state()),
            "since_ns": link.since_ns,
            "confidence_ppm": link.confidence_ppm,
            "connections": link.connections,
        })
    });
    json!({
        "hosts": hosts.collect::<Vec<_>>(),
        "switches": switches.collect::<Vec<_>>(),
        "links": links.collect::<Vec<_>>(),
        "aggregators": reply.aggregators.iter().map(aggregator).collect::<Vec<_>>(),
    })
}

fn aggregator(one: &v1::FabricAggregator) -> Value {
    let tenant = |tenant: &v1::AggregatedTenant| {
        json!({
            "tenant": tenant.tenant,
            "communicators": tenant.communicators,
            "sums": tenant.sums,
            "received": tenant.received,
            "sent": tenant.sent,
            "no_slot": tenant.no_slot,
            "refused": tenant.rejected,
            "up": tenant.sent_to_parent,
            "down": tenant.received_from_parent,
        })
    };
    let report = one.report.as_ref().map(|report| {
        json!({
            "tenants": report.tenants.iter().map(tenant).collect::<Vec<_>>(),
            "used": report.used_units,
            "strange": report.unrecognized,
            "unsent": report.send_errors,
        })
    });
    json!({
        "name": one.name,
        "at": one.switch,
        "rate_bits": one.rate_bps,
        "connected": one.connected,
        "address": one.address,
        "units": one.units,
        "guaranteed": one.guaranteed_units,
        "unit_bytes": one.unit_bytes,
        "communicators": one.communicators,
        "report": report,
    })
}

pub(crate) fn tenants(reply: &v1::TenantsReply) -> Value {
    let tenants = reply.tenants.iter().map(|tenant| {
        json!({
            "name": tenant.name,
            "configured": tenant.configured,
            "added_ns": tenant.added_ns,
            "communicators": tenant.communicators,
            "ranks": tenant.ranks,
            "errors": tenant.errors,
            "agreements": tenant.agreements,
            "broken": tenant.broken,
        })
    });
    json!({"tenants": tenants.collect::<Vec<_>>()})
}

fn plan(plan: &v1::PlanStatus) -> Value {
    let hops = plan.ring_edges.iter().map(|hop| {
        let path =
            |path: &v1::PlannedPath| json!({"source_port": path.source_port, "switches": path.switches});
        json!({
            "from": hop.from,
            "to": hop.to,
            "paths": hop.paths.iter().map(path).collect::<Vec<_>>(),
            "rate_bits": hop.rate_bps,
        })
    });
    json!({
        "communicator": communicator_text(plan.communicator),
        "tenant": plan.tenant,
        "name": plan.name,
        "epoch": plan.epoch,
        "next_epoch": plan.next_epoch,
        "order": plan.order,
        "ring_edges": hops.collect::<Vec<_>>(),
        "predicted_ns": plan.predicted_ns,
        "slowdown_ppm": plan.slowdown_ppm,
        "share_bits": plan.share_bps,
        "reason": plan.reason,
        "pinned": plan.pinned,
        "since_ns": plan.since_ns,
        "budget": plan.budget,
        "codec": plan.codec,
        "codec_reason": plan.codec_reason,
        "one_shot_bytes": plan.one_shot_bytes,
        "two_shot_bytes": plan.two_shot_bytes,
        "direct_reason": plan.algorithm_reason,
        "aggregator": plan.aggregator,
        "aggregation_reason": plan.aggregation_reason,
        "hints": plan.hints,
        "turns": plan.interleaving,
    })
}

pub(crate) fn plans(reply: &v1::PlansReply) -> Value {
    json!({
        "plans": reply.plans.iter().map(plan).collect::<Vec<_>>(),
        "planned": reply.plans_made,
        "switches": reply.changes_completed,
        "given_up": reply.changes_abandoned,
    })
}

pub(crate) fn explain(reply: &v1::ExplainReply) -> Value {
    json!({
        "now_ns": reply.now_ns,
        "decisions": reply.decisions.iter().map(decision).collect::<Vec<_>>(),
        "suspicions_proven": reply.congestion_reports_verified,
        "suspicions_refuted": reply.congestion_reports_refuted,
    })
}

fn decision(decision: &v1::DecisionRecord) -> Value {
    let changes = decision.changes.iter().map(|change| {
        json!({
            "communicator": communicator_text(change.communicator),
            "tenant": change.tenant,
            "name": change.name,
            "epoch": change.epoch,
            "reason": change.reason,
            "reason_code": change.reason_code,
            "sent_ns": change.sent_ns,
            "prepared_ns": change.prepared_ns,
            "first_switched_ns": change.first_switched_ns,
            "switched_ns": change.switched_ns,
            "outcome": change.outcome,
        })
    });
    let verdict = decision.congestion_report.as_ref().map(|verdict| {
        json!({
            "host": verdict.host,
            "path": verdict.path,
            "finding": verdict.finding,
            "since_ns": verdict.since_ns,
            "found_ns": verdict.found_ns,
            "received_ns": verdict.received_ns,
        })
    });
    json!({
        "number": decision.number,
        "at_ns": decision.at_ns,
        "cause": decision.cause,
        "reason": decision.reason,
        "score_before_ppm": decision.score_before_ppm,
        "score_after_ppm": decision.score_after_ppm,
        "stuck_before": decision.stuck_before,
        "stuck_after": decision.stuck_after,
        "congestion_report": verdict,
        "changes": changes.collect::<Vec<_>>(),
    })
}

pub(crate) fn dry_run(reply: &v1::DryRunReply) -> Value {
    json!({
        "score_before_ppm": reply.score_before_ppm,
        "score_after_ppm": reply.score_after_ppm,
        "stuck_before": reply.stuck_before,
        "stuck_after": reply.stuck_after,
        "reason": reply.reason,
        "changed": reply.changed.iter().copied().map(communicator_text).collect::<Vec<_>>(),
        "plans": reply.plans.iter().map(plan).collect::<Vec<_>>(),
    })
}

pub(crate) fn withdrawals(records: &[v1::WithdrawalRecord]) -> Value {
    let records = records.iter().map(|record| {
        json!({
            "target": record.target,
            "what": record.target_kind,
            "kind": kind(record.kind()),
            "from_ns": record.from_ns,
            "until_ns": record.until_ns,
            "reason": record.reason,
            "in_effect": record.in_effect,
            "left": record.remaining,
            "unknown": record.unknown_paths,
        })
    });
    json!({"withdrawals": records.collect::<Vec<_>>()})
}

pub(crate) fn restored(of: WithdrawalKind, targets: &[String]) -> Value {
    let restored = |target: &String| json!({"target": target, "kind": kind(of), "outcome": "restored"});
    json!({"restored": targets.iter().map(restored).collect::<Vec<_>>()})
}
