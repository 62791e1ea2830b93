//! Findings as sentences.

use crate::text::{clean, duration};
use harmonaize_api::v1::{Congestion, CongestionCause, Straggler};

/// A finding on a link as a sentence.
pub(crate) fn congestion_text(found: &Congestion) -> String {
    let (direction, word) = if found.ingress { ("in", "from") } else { ("out", "to") };
    let path = if found.path.is_empty() { String::new() } else { format!(" {word} {}", clean(&found.path)) };
    let cause = match found.cause() {
        CongestionCause::Unspecified => "",
        CongestionCause::Own => ", by own traffic",
        CongestionCause::CrossTraffic => ", by cross traffic",
    };
    format!("{} {direction}{path}: congestion {}{cause}", clean(&found.interface), found.level().text())
}

/// A finding on a rank as a sentence; `communicator` is what its communicator is called, where it is of one.
pub(crate) fn straggler_sentence(found: &Straggler, communicator: &str) -> String {
    let whose = match found.job.as_str() {
        "" => communicator.to_owned(),
        job => format!("job {}", clean(job)),
    };
    let host = if found.host.is_empty() { String::new() } else { format!(" on {}", clean(&found.host)) };
    let (kind, by) = (found.cause().text(), duration(found.delay_ns));
    match found.ended_ns {
        0 => format!("{whose}: rank {}{host} is late by {by} ({kind})", found.rank),
        _ => format!("{whose}: rank {}{host} is late no longer ({kind})", found.rank),
    }
}
