//! Compiles the protocol buffers with a pure-Rust compiler, so that a build needs no `protoc`.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write;
use std::path::Path;
use tonic_prost_build::FileDescriptorSet;

/// Messages that operators' tools print as JSON: under the names of their fields.
const JSON_MESSAGES: &[&str] = &[
    "AgentStatus",
    "AggregatedTenant",
    "AggregatorReport",
    "Agreement",
    "AlgorithmRange",
    "AlgorithmStatus",
    "Attachment",
    "Budget",
    "Budget.kind",
    "ChangeRecord",
    "CodecNames",
    "CommunicatorReport",
    "CommunicatorStatus",
    "CommunicatorTelemetry",
    "CommunicatorTraffic",
    "CompressedOperation",
    "Congestion",
    "CongestionControlStatus",
    "CongestionReportRecord",
    "Constraints",
    "DecisionRecord",
    "DirectedLinkStatus",
    "DryRunReply",
    "Edge",
    "EndedStatus",
    "ExplainReply",
    "ExternalJob",
    "FabricAggregator",
    "FabricHost",
    "FabricSwitch",
    "Finding",
    "Finding.finding",
    "Flow",
    "FlowDirection",
    "FlowEndpoint",
    "FlowOwner",
    "FlowsReply",
    "HostTelemetry",
    "JobBid",
    "JobForecast",
    "JobStatus",
    "JobsReply",
    "KindOfHosts",
    "Link",
    "LinkCounters",
    "LostFindings",
    "MessageReport",
    "OnFailure",
    "Operation",
    "OperationReport",
    "Participant",
    "PlanStatus",
    "PlannedPath",
    "PlannedRingEdge",
    "PlansReply",
    "PredictedTime",
    "RankTiming",
    "Record",
    "Report",
    "Snapshot",
    "StatusReply",
    "Straggler",
    "Target",
    "TcpInfo",
    "TelemetryCost",
    "TelemetryLosses",
    "TenantAtHost",
    "TenantLimit",
    "TenantRecord",
    "TenantStatus",
    "TenantsReply",
    "TopologyReply",
    "TrafficPhase",
    "Tuning",
    "WaitingStatus",
    "WhatIfReply",
    "WithdrawalRecord",
    "WithdrawalsReply",
];

/// Their fields that JSON has in words, and the function of `json.rs` that writes each.
const JSON_FIELDS: &[(&str, &str)] = &[
    ("Agreement.broken", "clauses"),
    ("ChangeRecord.communicator", "communicator"),
    ("ChangeRecord.outcome_code", "change_outcome"),
    ("CommunicatorReport.communicator", "communicator"),
    ("CommunicatorStatus.communicator", "communicator"),
    ("CommunicatorStatus.phase", "phase"),
    ("CommunicatorTelemetry.communicator", "communicator"),
    ("CommunicatorTraffic.communicator", "communicator"),
    ("Congestion.cause", "congestion_cause"),
    ("Congestion.level", "congestion_level"),
    ("Congestion.source", "telemetry_source"),
    ("Constraints.priority", "priority"),
    ("DirectedLinkStatus.state", "link_state"),
    ("DryRunReply.changed", "communicators"),
    ("EndedStatus.communicator", "communicator"),
    ("EndedStatus.kind", "failure_kind"),
    ("Flow.protocol", "flow_protocol"),
    ("FlowOwner.communicator", "communicator"),
    ("JobForecast.change", "job_change"),
    ("JobForecast.reason", "allocation_reason"),
    ("JobStatus.phase", "job_phase"),
    ("JobStatus.reason", "allocation_reason"),
    ("Operation.communicator", "communicator"),
    ("PlanStatus.communicator", "communicator"),
    ("Straggler.communicator", "communicator"),
    ("Straggler.cause", "straggler_cause"),
    ("Straggler.source", "telemetry_source"),
    ("WithdrawalRecord.kind", "withdrawal_kind"),
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(
        [
            "aggregation.proto",
            "agreements.proto",
            "coding.proto",
            "events.proto",
            "jobs.proto",
            "operator.proto",
            "paths.proto",
            "provider.proto",
            "rows.proto",
            "telemetry.proto",
        ]
        .map(|file| format!("harmonaize/provider/v1/{file}")),
        ["proto"],
    )?;
    let shapes_at = Path::new(&std::env::var("OUT_DIR")?).join("shapes.rs");
    std::fs::write(shapes_at, shapes(&descriptors)?)?;
    let path = |name: &str| format!("harmonaize.provider.v1.{name}");
    // These hold secrets; they show themselves in src/lib.rs.
    let secret = ["Peer", "Aggregation", "GrantAggregation", "Capabilities", "ProbePath"].map(path);
    let mut builder = tonic_prost_build::configure().codec_path("crate::bounded::Bounded").skip_debug(secret);
    for name in JSON_MESSAGES {
        builder = builder.type_attribute(path(name), "#[derive(serde::Serialize)]");
    }
    for (name, function) in JSON_FIELDS {
        let attribute = format!("#[serde(serialize_with = \"crate::json::{function}\")]");
        builder = builder.field_attribute(path(name), attribute);
    }
    builder
        .type_attribute(path("Budget.kind"), "#[serde(rename_all = \"snake_case\")]")
        .field_attribute(path("Budget.kind"), "#[serde(flatten)]")
        // A finding's fields stand beside its time, and `kind` names it.
        .type_attribute(path("Finding.finding"), "#[serde(tag = \"kind\", rename_all = \"snake_case\")]")
        .field_attribute(path("Finding.finding"), "#[serde(flatten)]")
        .compile_fds(descriptors)?;
    Ok(())
}

/// What `bounded.rs` counts by, as code: of each message its size in memory, and which of its fields are messages.
fn shapes(descriptors: &FileDescriptorSet) -> Result<String, Box<dyn Error>> {
    let messages = || {
        descriptors.file.iter().flat_map(|file| {
            let path = move |name: &str| format!(".{}.{name}", file.package());
            file.message_type.iter().map(move |message| (path(message.name()), message))
        })
    };
    let places: BTreeMap<String, usize> =
        messages().enumerate().map(|(place, (path, _))| (path, place)).collect();
    let (mut shapes, mut implementations) = (String::new(), String::new());
    for (place, (path, message)) in messages().enumerate() {
        if !message.nested_type.is_empty() {
            return Err(format!("{path} has messages of its own, whose fields nobody counts").into());
        }
        let within = message.field.iter();
        let within: Vec<(i32, usize)> =
            within.filter_map(|field| Some((field.number(), *places.get(field.type_name())?))).collect();
        let rust = format!("crate::v1::{}", message.name());
        writeln!(shapes, "    Shape {{ bytes: size_of::<{rust}>(), messages: &{within:?} }},")?;
        writeln!(implementations, "impl Shaped for {rust} {{ const SHAPE: usize = {place}; }}")?;
    }
    Ok(format!("static SHAPES: &[Shape] = &[\n{shapes}];\n{implementations}"))
}
