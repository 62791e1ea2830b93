//! What JSON has in words: ids as people type them, and values of enumerations.

use crate::{communicator_text, v1};
use serde::Serializer;

/// Writes a communicator's id as sixteen hexadecimal digits.
pub(crate) fn communicator<S: Serializer>(id: &u64, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&communicator_text(*id))
}

/// Writes communicators' ids likewise.
pub(crate) fn communicators<S: Serializer>(ids: &[u64], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(ids.iter().copied().map(communicator_text))
}

/// Writes clauses as words.
pub(crate) fn clauses<S: Serializer>(numbers: &[i32], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(numbers.iter().map(|number| v1::Clause::try_from(*number).unwrap_or_default().text()))
}

/// Defines for an enumeration, under the prefix of its values, `text` and the function that JSON calls.
macro_rules! enumerations {
    ($($function:ident: $enumeration:ident, $prefix:literal;)*) => {$(
        impl v1::$enumeration {
            /// Returns the value in lower case, as JSON has it: "unknown" where it is unspecified.
            pub fn text(self) -> String {
                text(self.as_str_name(), $prefix)
            }
        }

        enumerations!(@function $function $enumeration);
    )*};
    (@function none $enumeration:ident) => {};
    (@function $function:ident $enumeration:ident) => {
        pub(crate) fn $function<S: Serializer>(number: &i32, to: S) -> Result<S::Ok, S::Error> {
            to.serialize_str(&v1::$enumeration::try_from(*number).unwrap_or_default().text())
        }
    };
}

fn text(name: &str, prefix: &str) -> String {
    match name.strip_prefix(prefix).unwrap_or(name) {
        "UNSPECIFIED" => "unknown".to_owned(),
        name => name.to_ascii_lowercase(),
    }
}

enumerations! {
    allocation_reason: AllocationReason, "ALLOCATION_REASON_";
    change_outcome: ChangeOutcome, "CHANGE_OUTCOME_";
    none: Clause, "CLAUSE_";
    congestion_cause: CongestionCause, "CONGESTION_CAUSE_";
    congestion_level: CongestionLevel, "CONGESTION_LEVEL_";
    failure_kind: FailureKind, "FAILURE_KIND_";
    flow_protocol: FlowProtocol, "FLOW_PROTOCOL_";
    job_change: JobChange, "JOB_CHANGE_";
    job_phase: JobPhase, "JOB_PHASE_";
    link_state: LinkState, "LINK_STATE_";
    phase: Phase, "PHASE_";
    priority: Priority, "PRIORITY_";
    straggler_cause: StragglerCause, "STRAGGLER_CAUSE_";
    telemetry_source: TelemetrySource, "TELEMETRY_SOURCE_";
    withdrawal_kind: WithdrawalKind, "WITHDRAWAL_KIND_";
}
