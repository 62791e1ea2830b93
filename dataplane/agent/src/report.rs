//! The same facts in the words of control, of the engine, and of tenants.

use harmonaize_abi::session::{FailureDetail, JoinRefusal};
use harmonaize_abi::{CommunicatorId, Rank};
use harmonaize_api::v1;
use harmonaize_core::{Failure, Nanos};
use harmonaize_disclose as disclose;
use harmonaize_engine::Status;
use std::collections::HashMap;
use std::time::Duration;

/// Control's reason for a refused join, in the tenant's words.
pub(crate) fn refusal(kind: v1::JoinRefusedKind) -> JoinRefusal {
    match kind {
        v1::JoinRefusedKind::Invalid => JoinRefusal::Rank,
        v1::JoinRefusedKind::DuplicateRank => JoinRefusal::Taken,
        v1::JoinRefusedKind::SizeMismatch => JoinRefusal::Size,
        v1::JoinRefusedKind::Timeout => JoinRefusal::Timeout,
        v1::JoinRefusedKind::Limit => JoinRefusal::Quota,
        v1::JoinRefusedKind::Budget => JoinRefusal::Budget,
        v1::JoinRefusedKind::Over => JoinRefusal::Over,
        v1::JoinRefusedKind::RankLost => JoinRefusal::RankLost,
        v1::JoinRefusedKind::LeftOut => JoinRefusal::LeftOut,
        v1::JoinRefusedKind::UnknownTenant
        | v1::JoinRefusedKind::Unavailable
        | v1::JoinRefusedKind::Unspecified => JoinRefusal::Unavailable,
    }
}

fn ranks(numbers: &[u32]) -> Vec<Rank> {
    numbers.iter().map(|&rank| Rank(rank)).collect()
}

fn numbers(ranks: &[Rank]) -> Vec<u32> {
    ranks.iter().map(|rank| rank.0).collect()
}

/// Why control ends a communicator, for the engine.
pub(crate) fn failure_from(dissolved: &v1::Dissolved) -> Failure {
    match dissolved.kind() {
        v1::FailureKind::RanksLost => Failure::RanksLost { ranks: ranks(&dissolved.ranks) },
        v1::FailureKind::Internal => Failure::Internal { ranks: ranks(&dissolved.ranks) },
        v1::FailureKind::Aborted => match dissolved.ranks.first() {
            Some(rank) => Failure::Aborted { rank: Rank(*rank) },
            None => Failure::Dissolved,
        },
        _ => Failure::Dissolved,
    }
}

/// Why a communicator ended here, for control.
pub(crate) fn failed(communicator: CommunicatorId, failure: &Failure, detail: &str) -> v1::Failed {
    let (kind, ranks) = match failure {
        Failure::Timeout { missing, .. } => (v1::FailureKind::Timeout, numbers(missing)),
        Failure::P2pTimeout { missing, .. } => (v1::FailureKind::Timeout, numbers(missing)),
        Failure::P2pMismatch { from, to, .. } => (v1::FailureKind::Mismatch, numbers(&[*from, *to])),
        Failure::Mismatch { calls, .. } => {
            (v1::FailureKind::Mismatch, calls.iter().map(|(rank, _)| rank.0).collect())
        }
        Failure::Counts { reported, .. } => {
            (v1::FailureKind::Mismatch, reported.iter().map(|(rank, _)| rank.0).collect())
        }
        Failure::RanksLost { ranks } => (v1::FailureKind::RanksLost, numbers(ranks)),
        Failure::Dissolved => (v1::FailureKind::Operator, Vec::new()),
        Failure::Aborted { rank } => (v1::FailureKind::Aborted, vec![rank.0]),
        Failure::Internal { ranks } => (v1::FailureKind::Internal, numbers(ranks)),
    };
    let detail = if detail.is_empty() { failure.to_string() } else { format!("{failure}; {detail}") };
    v1::Failed { communicator: communicator.0, kind: kind.into(), ranks, detail }
}

/// Why a communicator ended, for its tenant: what disclosure lets through.
pub(crate) fn detail(failure: &Failure, detail: &str) -> FailureDetail {
    let detail = detail.to_owned();
    let (known, signature) = match failure.clone() {
        Failure::Timeout { operation, signature: Some(signature), missing } => {
            (disclose::Failure::Timeout { operation, signature, missing }, Some(signature))
        }
        Failure::Timeout { missing: ranks, .. } | Failure::RanksLost { ranks } => {
            (disclose::Failure::RanksLost { ranks, detail }, None)
        }
        Failure::Mismatch { operation, calls } => (disclose::Failure::Mismatch { operation, calls }, None),
        Failure::Counts { operation, from, to, reported } => {
            (disclose::Failure::Counts { operation, from, to, reported }, None)
        }
        Failure::P2pTimeout { rank, call, missing } => {
            (disclose::Failure::P2pTimeout { rank, call, missing }, None)
        }
        Failure::P2pMismatch { number, from, to, sent, received } => {
            (disclose::Failure::P2pMismatch { number, from, to, sent, received }, None)
        }
        Failure::Dissolved => (disclose::Failure::Dissolved { detail }, None),
        Failure::Aborted { rank } => (disclose::Failure::Aborted { rank }, None),
        Failure::Internal { .. } => (disclose::Failure::Internal { detail }, None),
    };
    let told = disclose::disclose(&known);
    FailureDetail {
        status: told.status,
        operation: told.operation.map_or(0, u64::from),
        signature,
        ranks: told.ranks,
        calls: told.calls,
        text: told.text,
    }
}

/// How things stand, for control.
pub(crate) fn report(
    id: u64,
    status: &Status,
    tenants: &HashMap<u64, String>,
    uptime: Duration,
) -> v1::Report {
    let attachments = status.attachments.iter().filter_map(|attachment| {
        let tenant = tenants.get(&attachment.attachment.0)?.clone();
        Some(v1::Attachment { tenant, arena_bytes: attachment.arena_bytes })
    });
    let communicators = status.communicators.iter().map(|communicator| v1::CommunicatorReport {
        communicator: communicator.communicator.0,
        epoch: communicator.epoch.into(),
        operations_completed: communicator.completed,
        in_flight: communicator.in_flight.iter().map(|flight| operation(flight, communicator.now)).collect(),
        messages: communicator.messages.iter().map(|flight| message(flight, communicator.now)).collect(),
        bytes_sent: communicator.bytes_sent,
        bytes_received: communicator.bytes_received,
        errors: communicator.failed,
    });
    v1::Report {
        id,
        attachments: attachments.collect(),
        communicators: communicators.collect(),
        uptime_ns: u64::try_from(uptime.as_nanos()).unwrap_or(u64::MAX),
        ..v1::Report::default()
    }
}

fn message(flight: &harmonaize_core::MessageInFlight, now: Nanos) -> v1::MessageReport {
    v1::MessageReport {
        rank: flight.rank.0,
        call: flight.call.to_string(),
        waiting_for: numbers(&flight.awaits),
        age_ns: now.0.saturating_sub(flight.since.0),
    }
}

fn operation(flight: &harmonaize_core::InFlight, now: Nanos) -> v1::OperationReport {
    let waiting_for = if flight.missing.is_empty() { &flight.awaits } else { &flight.missing };
    v1::OperationReport {
        operation: flight.operation.0,
        call: flight.signature.to_string(),
        waiting_for: numbers(waiting_for),
        age_ns: now.0.saturating_sub(flight.since.0),
    }
}
