//! What is told of operations: that they have ended, and how far they are.

use crate::Nanos;
use crate::communicator::{Action, CodingReport, Communicator, Receipt};
use crate::epoch::peers;
use harmonaize_abi::{Rank, Signature};
use harmonaize_plan::Retention;

/// An operation in flight, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InFlight {
    /// Its number.
    pub operation: u64,
    /// What it is.
    pub signature: Signature,
    /// Since when.
    pub since: Nanos,
    /// Local ranks that have not called it.
    pub missing: Vec<Rank>,
    /// Ranks of the participants whose messages or acknowledgements it waits for.
    pub awaits: Vec<Rank>,
    /// Segments done here, of how many.
    pub segments: (u64, u64),
}

impl Communicator {
    /// What a coded step came to, to be told after each.
    pub fn handle_coded(&mut self, operation: u64, step: &CodingReport) {
        let Some(operation) = self.operations.get_mut(operation) else { return };
        operation.wire_bytes += step.wire_bytes;
        let all = operation.coded.get_or_insert_default();
        all.codec = match (all.codec, step.codec) {
            (known, CodingReport::EXACT) => known,
            (known, codec) if known == codec || known == CodingReport::EXACT => codec,
            _ => CodingReport::MIXED,
        };
        all.wire_bytes += step.wire_bytes;
        all.error += step.error;
        all.measured += step.measured;
        all.squares += step.squares;
        all.uncompressed_chunks |= step.uncompressed_chunks;
    }

    /// Operations in flight, for people.
    pub fn in_flight(&self) -> Vec<InFlight> {
        let awaited = self.awaited();
        let describe = |operation: &crate::operation::Operation| InFlight {
            operation: operation.number,
            signature: operation.signature,
            since: operation.since,
            missing: self.operations.missing(operation.number),
            awaits: awaited.clone(),
            segments: operation.run.map_or((0, 0), |run| {
                (
                    self.done.saturating_sub(run.first_segment).min(run.segmentation.segments),
                    run.segmentation.segments,
                )
            }),
        };
        self.operations.iter().map(describe).collect()
    }

    /// Whether a local rank that has called `called` operations has not been told of the end of each.
    pub(crate) fn awaits_completion(&self, rank: Rank, called: u64) -> bool {
        let (first, _) = self.operations.bounds();
        let local = self.operations.ranks().iter().position(|local| *local == rank);
        let told = u64::from(local.is_some_and(|local| local < self.reported_ranks));
        called > first + told
    }

    fn awaited(&self) -> Vec<Rank> {
        let segments = self.channels.iter().filter_map(|channel| channel.ready(true));
        let waiting = segments.flat_map(|(_, _, step)| peers(&step.sources).chain(peers(&step.destinations)));
        let mut ranks: Vec<Rank> =
            waiting.flat_map(|(peer, _)| self.group.local(peer).iter().copied()).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    pub(crate) fn poll_completed(&mut self) -> Option<Action> {
        loop {
            let operation = self.operations.oldest()?;
            let run = operation.run?;
            let end = run.first_segment + run.segmentation.segments;
            let complete = run.begun == run.segmentation.segments
                && match run.retention {
                    Retention::KeepInputs => self.acknowledgements.acked_by_all() >= end,
                    Retention::CopyInputs => self.done >= end,
                    Retention::HoldOutputs => run.finished == run.segmentation.segments,
                };
            if !complete {
                return None;
            }
            let rank = self.operations.ranks().get(self.reported_ranks).copied();
            let token = operation.calls.get(self.reported_ranks).copied().flatten();
            if let (Some(rank), Some(token)) = (rank, token) {
                self.reported_ranks += 1;
                let receipt = Receipt {
                    operation: operation.number,
                    signature: operation.signature,
                    wire_bytes: operation.wire_bytes,
                    algorithm: run.algorithm,
                    coded: operation.coded,
                    aggregation: self.aggregation_report(operation),
                };
                return Some(Action::Complete { rank, token, receipt });
            }
            self.reported_ranks = 0;
            self.operations.retire();
        }
    }

    pub(crate) fn poll_failed(&mut self) -> Option<Action> {
        loop {
            let operation = self.operations.oldest()?;
            let (number, calls) = (operation.number, &operation.calls);
            let open = calls
                .iter()
                .enumerate()
                .skip(self.reported_ranks)
                .find_map(|(local, t)| Some((local, (*t)?)));
            if let Some((local, token)) = open {
                self.reported_ranks = local + 1;
                let rank = self.operations.ranks().get(local).copied()?;
                return Some(Action::Fail { rank, token, operation: number });
            }
            self.reported_ranks = 0;
            self.operations.retire();
        }
    }
}
