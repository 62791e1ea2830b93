//! Segments that an aggregator on the way sums, and the hosts' own algorithm in its place when it does not.
//!
//! The agreement of the workers at a session's end is `harmonaize_aggregator`'s; `communicator::session` has the messages that carry
//! it. A segment that is aggregated keeps its channel until everybody has acknowledged it: until then it can be begun again from its
//! input, and its output, where that is the input, stays in staging.
//!
//! From the aggregator to the hosts: all stop, report which segments are done, and run those that are not done everywhere by their
//! program (`docs/protocol.md` proves that nothing is lost or counted twice). Done segments can be undone by that, so
//! acknowledgements have a generation, which the leader counts. From the hosts to the aggregator nothing is undone: each reports how
//! far it has begun and begins nothing more, and the aggregator has the segments that follow. An epoch begins like this.
//!
//! Small operations are done at once where the rules allow it: the sum goes from staging to the outputs as soon as it is done here,
//! and stays in staging until everybody has it. When hosts begin such a segment again, its input is the sum of one participant that
//! has it, and nothing of the others. So all end with the same bits, and whoever has the sum touches no tensor any more.

use harmonaize_abi::{AggregatorTask, Dtype, ReduceOp, SegmentId, SegmentIndex, Signature};
use harmonaize_aggregator::{Leader, PayloadFormat, Summation};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Which operations an epoch's aggregator sums. All participants are its workers, each by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Aggregation {
    /// The elements and the reduction of its sums, or f32 in shared codes.
    pub format: PayloadFormat,
    /// The fewest bytes of an AllReduce that it sums.
    pub min_bytes: u64,
    /// Whether small operations, whose inputs are copied, are done as soon as their sum is here: sums, broadcasts and barriers.
    pub eager: bool,
    /// The fewest and the most bytes of a broadcast that it forwards; small ones only where `eager`.
    pub broadcast_bytes: Option<[u64; 2]>,
    /// Whether it does barriers, where `eager`.
    pub barriers: bool,
    /// How long hosts sum after a session with the aggregator failed; it doubles each time.
    pub backoff: Duration,
    /// The longest that hosts sum after a session failed.
    pub max_backoff: Duration,
}

impl Aggregation {
    /// What an AllReduce like this is to the aggregator. It is elements of their own type and reduction, or, in an epoch of
    /// codes, sums of f32 alone. An average is a sum that is divided here.
    pub fn format_of(&self, signature: &Signature) -> Option<PayloadFormat> {
        let Signature { dtype, reduce, .. } = *signature;
        let op = if reduce == ReduceOp::Average { ReduceOp::Sum } else { reduce };
        match self.format {
            PayloadFormat::Tensor { .. } => {
                Some(PayloadFormat::Tensor { dtype, op }).filter(|form| form.is_supported())
            }
            PayloadFormat::Shared { .. } => {
                Some(self.format).filter(|_| (dtype, op) == (Dtype::F32, ReduceOp::Sum))
            }
        }
    }
}

/// Totals of aggregation over an operation's segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AggregationReport {
    /// Segments that the aggregator summed and that were not undone.
    pub segments: u64,
    /// Segments that it was to sum and the hosts did.
    pub fallback_segments: u64,
}

/// By whom a segment is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Executor {
    Hosts,
    /// The aggregator, as the segment of this index in its session.
    Aggregator(SegmentIndex),
    /// Nobody yet: it is being agreed on.
    Unknown {
        /// Whether a first session is to be requested.
        request: bool,
    },
}

/// Aggregation in an epoch at this participant.
#[derive(Debug, Serialize, Deserialize)]
pub struct AggregationState {
    pub(crate) config: Aggregation,
    /// At the leading participant, once it has begun.
    pub(crate) leader: Option<Leader>,
    /// Whether somebody asked for a session.
    pub(crate) leader_needed: bool,
    /// The newest session that is known here.
    pub(crate) session: u64,
    /// Whether the next session is being agreed on.
    pub(crate) stopped: bool,
    pub(crate) summation: Summation,
    /// The first segment that the session's executor runs.
    pub(crate) from_segment: SegmentId,
    /// Segments of the session so far.
    pub(crate) next_index: SegmentIndex,
    /// A session, a segment, and the worker that has the sums of segments below it.
    pub(crate) sum_holder: Option<(u64, SegmentId, u16)>,
}

impl AggregationState {
    pub(crate) fn new(config: Aggregation) -> Self {
        let summation = Summation::Hosts;
        Self {
            config,
            leader: None,
            leader_needed: false,
            session: 0,
            stopped: true,
            summation,
            from_segment: SegmentId(0),
            next_index: SegmentIndex(0),
            sum_holder: None,
        }
    }

    /// Whether operations like this are aggregated. Depends only on what all participants share.
    pub(crate) fn supports(&self, signature: &Signature) -> bool {
        let Aggregation { min_bytes: least_bytes, broadcast_bytes: broadcasts, barriers, .. } = self.config;
        let bytes = signature.count.saturating_mul(signature.dtype.size() as u64);
        match signature.collective.traits().aggregator {
            Some(AggregatorTask::Sum) => {
                bytes >= least_bytes.max(1) && self.config.format_of(signature).is_some()
            }
            Some(AggregatorTask::Broadcast) => {
                broadcasts.is_some_and(|[least, most]| (least.max(1)..=most).contains(&bytes))
            }
            Some(AggregatorTask::Barrier) => barriers && self.config.eager,
            None => false,
        }
    }

    /// Whether an operation like this, if it is small, is done as soon as its sum is here.
    pub(crate) fn is_eager(&self, signature: &Signature) -> bool {
        let sums =
            matches!(self.config.format_of(signature), Some(PayloadFormat::Tensor { op: ReduceOp::Sum, .. }));
        self.config.eager && (sums || signature.collective.traits().aggregator != Some(AggregatorTask::Sum))
    }

    /// Bytes that a participant sends of so many elements; `root`: of a broadcast, whether it is its own.
    pub(crate) fn bytes(&self, signature: &Signature, elements: u64, root: bool) -> u64 {
        match signature.collective.traits().aggregator {
            Some(AggregatorTask::Broadcast) if root => elements.saturating_mul(signature.dtype.size() as u64),
            Some(AggregatorTask::Sum) => {
                self.config.format_of(signature).map_or(0, |form| form.sent(elements))
            }
            _ => 0,
        }
    }

    /// Whether the segments that are done must not grow in number, because the leader counts with them.
    pub(crate) fn is_frozen(&self) -> bool {
        self.stopped && self.summation == Summation::Aggregator
    }

    /// By whom the next segment is run, one of an operation that may be aggregated. A segment for the aggregator counts as begun.
    pub(crate) fn assign_executor(&mut self, segment: SegmentId) -> Executor {
        match self.summation {
            _ if self.stopped => {
                let request = self.session == 0 && !std::mem::replace(&mut self.leader_needed, true);
                Executor::Unknown { request }
            }
            Summation::Aggregator if segment >= self.from_segment => {
                let next = self.next_index.next();
                Executor::Aggregator(std::mem::replace(&mut self.next_index, next))
            }
            _ => Executor::Hosts,
        }
    }
}
