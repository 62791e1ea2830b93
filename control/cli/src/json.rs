//! Status as JSON: every field of the reply, ids as people type them.

use crate::status::{kind, phase};
use harmonaize_api::communicator_text;
use harmonaize_api::v1::{
    AgentStatus, CommunicatorReport, CommunicatorStatus, OperationReport, Participant, Report, StatusReply,
    Tuning,
};
use serde_json::{Value, json};

/// The whole reply.
pub(crate) fn status(status: &StatusReply) -> Value {
    let tenants = status.tenants.iter().map(|tenant| {
        json!({
            "name": tenant.name,
            "communicators": tenant.communicators,
            "ranks": tenant.ranks,
            "attachments": tenant.attachments,
            "errors": tenant.errors,
        })
    });
    let waiting = status.waiting.iter().map(|waiting| {
        json!({
            "tenant": waiting.tenant,
            "name": waiting.name,
            "ranks": waiting.ranks,
            "joined": waiting.joined,
            "age_ns": waiting.age_ns,
        })
    });
    let ended = status.recent_errors.iter().map(|ended| {
        json!({
            "communicator": communicator_text(ended.communicator),
            "tenant": ended.tenant,
            "name": ended.name,
            "kind": kind(ended.kind()),
            "ranks": ended.ranks,
            "detail": ended.detail,
            "age_ns": ended.age_ns,
        })
    });
    json!({
        "build": status.build,
        "uptime_ns": status.uptime_ns,
        "errors": status.errors,
        "agents": status.agents.iter().map(agent).collect::<Vec<_>>(),
        "tenants": tenants.collect::<Vec<_>>(),
        "communicators": status.communicators.iter().map(communicator).collect::<Vec<_>>(),
        "waiting": waiting.collect::<Vec<_>>(),
        "recent_errors": ended.collect::<Vec<_>>(),
    })
}

fn agent(agent: &AgentStatus) -> Value {
    json!({
        "host": agent.host,
        "connected": agent.connected,
        "listen": agent.listen,
        "build": agent.build,
        "session_ns": agent.session_ns,
        "report": agent.report.as_ref().map(report),
    })
}

fn report(report: &Report) -> Value {
    let attachments = report
        .attachments
        .iter()
        .map(|attachment| json!({"tenant": attachment.tenant, "arena_bytes": attachment.arena_bytes}));
    json!({
        "attachments": attachments.collect::<Vec<_>>(),
        "communicators": report.communicators.iter().map(part).collect::<Vec<_>>(),
        "errors": report.errors,
        "recent_errors": report.recent_errors,
        "uptime_ns": report.uptime_ns,
    })
}

fn part(part: &CommunicatorReport) -> Value {
    json!({
        "communicator": communicator_text(part.communicator),
        "epoch": part.epoch,
        "operations_completed": part.operations_completed,
        "in_flight": part.in_flight.iter().map(operation).collect::<Vec<_>>(),
        "bytes_sent": part.bytes_sent,
        "bytes_received": part.bytes_received,
        "errors": part.errors,
    })
}

fn operation(operation: &OperationReport) -> Value {
    json!({
        "operation": operation.operation,
        "what": operation.call,
        "waiting_for": operation.waiting_for,
        "age_ns": operation.age_ns,
    })
}

fn communicator(known: &CommunicatorStatus) -> Value {
    let participant = |one: &Participant| json!({"host": one.host, "ranks": one.ranks});
    json!({
        "communicator": communicator_text(known.communicator),
        "tenant": known.tenant,
        "name": known.name,
        "ranks": known.ranks,
        "phase": phase(known.phase()),
        "epoch": known.epoch,
        "next_epoch": known.next_epoch,
        "participants": known.participants.iter().map(participant).collect::<Vec<_>>(),
        "order": known.order,
        "tuning": known.tuning.as_ref().map(tuning),
        "in_flight": known.in_flight.iter().map(operation).collect::<Vec<_>>(),
        "operations_completed": known.operations_completed,
        "bytes_sent": known.bytes_sent,
        "errors": known.errors,
        "last_change": known.last_change,
        "agreement": known.agreement.as_ref().map(|told| crate::tenant::agreement_json(&told.into())),
    })
}

fn tuning(tuning: &Tuning) -> Value {
    json!({
        "channels": tuning.channels,
        "chunk_bytes": tuning.chunk_bytes,
        "segment_bytes": tuning.segment_bytes,
        "copy_bytes": tuning.copy_bytes,
        "landing_slots": tuning.landing_slots,
        "operation_timeout_ns": tuning.operation_timeout_ns,
        "one_shot_bytes": tuning.one_shot_bytes,
        "two_shot_bytes": tuning.two_shot_bytes,
    })
}
