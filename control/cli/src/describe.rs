//! Verdicts in words.

use crate::text::{clean, duration};
use harmonaize_api::communicator_text;
use harmonaize_api::v1::{
    Congestion, CongestionCause, CongestionLevel, FlowProtocol, Straggler, StragglerKind,
};

/// A level in one word.
pub(crate) fn level_text(level: CongestionLevel) -> &'static str {
    match level {
        CongestionLevel::Unspecified => "-",
        CongestionLevel::None => "none",
        CongestionLevel::Mild => "mild",
        CongestionLevel::Severe => "severe",
    }
}

/// A cause in one word.
pub(crate) fn cause_text(cause: CongestionCause) -> &'static str {
    match cause {
        CongestionCause::Unspecified => "-",
        CongestionCause::Own => "own",
        CongestionCause::CrossTraffic => "foreign",
    }
}

/// A protocol in one word.
pub(crate) fn protocol_text(protocol: FlowProtocol) -> &'static str {
    match protocol {
        FlowProtocol::Unspecified => "-",
        FlowProtocol::Tcp => "tcp",
        FlowProtocol::Roce => "roce",
    }
}

/// A kind of straggler in one word.
pub(crate) fn straggler_text(kind: StragglerKind) -> &'static str {
    match kind {
        StragglerKind::Unspecified => "-",
        StragglerKind::Compute => "compute",
        StragglerKind::Network => "network",
    }
}

/// A verdict on a link as a sentence.
pub(crate) fn congestion_text(found: &Congestion) -> String {
    let (way, word) = if found.ingress { ("in", "from") } else { ("out", "to") };
    let path = if found.path.is_empty() { String::new() } else { format!(" {word} {}", clean(&found.path)) };
    let cause = match found.cause() {
        CongestionCause::Unspecified => "",
        CongestionCause::Own => ", by own traffic",
        CongestionCause::CrossTraffic => ", by foreign traffic",
    };
    format!("{} {way}{path}: congestion {}{cause}", clean(&found.interface), level_text(found.level()))
}

/// A verdict on a rank as a sentence.
pub(crate) fn straggler_sentence(found: &Straggler) -> String {
    let whose = match found.job.as_str() {
        "" => communicator_text(found.communicator),
        job => format!("job {}", clean(job)),
    };
    let host = if found.host.is_empty() { String::new() } else { format!(" on {}", clean(&found.host)) };
    let (kind, by) = (straggler_text(found.kind()), duration(found.delay_ns));
    match found.ended_ns {
        0 => format!("{whose}: rank {}{host} is late by {by} ({kind})", found.rank),
        _ => format!("{whose}: rank {}{host} is late no longer ({kind})", found.rank),
    }
}
