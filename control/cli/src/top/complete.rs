//! What a picture shows, for programs: every field of a snapshot, under its name.

use harmonaize_api::v1::finding_change::Finding;
use harmonaize_api::v1::{ExplainReply, FabricSnapshot, FindingChange, PlansReply, Snapshot};
use serde_json::{Value, json};

/// An agent's snapshot.
pub(super) fn snapshot(one: &Snapshot) -> Value {
    json!(one)
}

/// Control's snapshot, with plans and the last decisions.
pub(super) fn fabric(one: &FabricSnapshot, plans: &PlansReply, decisions: &ExplainReply) -> Value {
    json!({
        "time_ns": one.time_ns,
        "hosts": one.hosts,
        "communicators": one.communicators,
        "stragglers": one.stragglers,
        "changes": one.changes.iter().map(change).collect::<Vec<_>>(),
        "plans": plans.plans,
        "changes_completed": plans.changes_completed,
        "changes_abandoned": plans.changes_abandoned,
        "decisions": decisions.decisions,
    })
}

fn change(one: &FindingChange) -> Value {
    let (congestion, straggler) = match &one.finding {
        Some(Finding::Congestion(found)) => (Some(found), None),
        Some(Finding::Straggler(found)) => (None, Some(found)),
        None => (None, None),
    };
    json!({"time_ns": one.time_ns, "host": one.host, "congestion": congestion, "straggler": straggler})
}
