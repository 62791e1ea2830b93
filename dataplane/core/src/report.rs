//! Reports of operations: that they have ended, and how far they are.

use crate::action::{Action, Receipt};
use crate::aggregation::AggregationReport;
use crate::operation::Operation;
use crate::shared::Shared;
use harmonaize_abi::{Nanos, OperationId, P2pSignature, Rank, SegmentId, Signature};
use harmonaize_plan::Retention;

/// An operation in flight, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InFlight {
    /// Its number.
    pub operation: OperationId,
    /// What was called.
    pub signature: Signature,
    /// When the first local rank called it.
    pub since: Nanos,
    /// Local ranks that have not called it.
    pub missing: Vec<Rank>,
    /// Ranks of the participants whose messages or acknowledgements it waits for.
    pub awaits: Vec<Rank>,
    /// Segments done here, of how many.
    pub segments: (u64, u64),
}

/// A send or a receive in flight, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessageInFlight {
    /// Who called it.
    pub rank: Rank,
    /// What was called.
    pub call: P2pSignature,
    /// When.
    pub since: Nanos,
    /// Who has not called the other end: one rank, or any that could. Empty once that is called.
    pub awaits: Vec<Rank>,
}

/// Operations in flight where segments below `done` are done and messages of the ranks in `awaits` are missing.
pub(crate) fn in_flight(shared: &Shared, done: SegmentId, awaits: &[Rank]) -> Vec<InFlight> {
    let describe = |operation: &Operation| InFlight {
        operation: operation.number,
        signature: operation.signature,
        since: operation.since,
        missing: shared.operations.missing(operation.number),
        awaits: awaits.to_vec(),
        segments: operation.run.map_or((0, 0), |run| {
            let segments = run.segmentation.segments;
            (done.0.saturating_sub(run.first_segment.0).min(segments), segments)
        }),
    };
    shared.operations.iter().map(describe).collect()
}

/// The totals of aggregation of an operation so far.
///
/// Sums that may still be undone count as long as they are not: so all participants report the same of one that is complete.
fn aggregation_report(operation: &Operation) -> Option<AggregationReport> {
    let Operation { aggregated_segments: given, fallback_segments: again, .. } = *operation;
    debug_assert!(again <= given, "hosts do a segment again that no aggregator had");
    (given > 0)
        .then_some(AggregationReport { segments: given.saturating_sub(again), fallback_segments: again })
}

/// The next completion, where segments below `done` are done here and results lie where they belong.
pub(crate) fn poll_completed(shared: &mut Shared, done: SegmentId) -> Option<Action> {
    loop {
        let operation = shared.operations.oldest()?;
        let run = operation.run?;
        let end = SegmentId(run.first_segment.0 + run.segmentation.segments);
        let complete = run.all_begun()
            && match run.retention {
                Retention::KeepInputs => shared.acknowledgements.acked_by_all() >= end,
                Retention::CopyInputs => done >= end,
                Retention::HoldOutputs => run.finished == run.segmentation.segments,
            };
        if !complete {
            return None;
        }
        let receipt = Receipt {
            operation: operation.number,
            signature: operation.signature,
            wire_bytes: operation.wire_bytes,
            algorithm: run.algorithm,
            coded: operation.coded,
            aggregation: aggregation_report(operation),
        };
        if let Some((rank, token)) = shared.operations.report_next() {
            return Some(Action::Complete { rank, token, receipt });
        }
    }
}

/// The next call that has failed with the communicator.
pub(crate) fn poll_failed(shared: &mut Shared) -> Option<Action> {
    loop {
        let operation = shared.operations.oldest()?.number;
        if let Some((rank, token)) = shared.operations.report_next() {
            return Some(Action::Fail { rank, token, operation });
        }
    }
}
