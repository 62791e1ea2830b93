//! How an operation is cut into segments, and which retention an operation of its size gets.

use crate::algorithm_table::AlgorithmTable;
use crate::plan::{Algorithm, Plan};
use crate::program::{Participant, Retention};
use harmonaize_abi::{Collective, Pattern, Signature};
use serde::{Deserialize, Serialize};

/// Sizes, in bytes, that all participants share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tuning {
    /// Largest message; also the size of a landing slot. At least one element is sent however small this is, so give 8 or
    /// more.
    pub chunk_bytes: u32,
    /// Size of a segment to aim at, over all blocks of all ranks of a participant.
    pub segment_bytes: u32,
    /// Smallest message of an operation of many blocks that is cut to keep to `segment_bytes`. Below it, the segment grows instead.
    pub message_bytes: u32,
    /// Operations up to this many bytes a rank copy their inputs ([`Retention::CopyInputs`]).
    pub copy_bytes: u64,
    /// How operations go, by collective and size.
    pub algorithms: AlgorithmTable,
}

/// How an operation is cut. Depends only on what all participants share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segmentation {
    /// How many segments, at least 1.
    pub segments: u64,
    /// Elements of each block in every segment but the last, which may have fewer.
    pub elements: u64,
    /// Elements of each block in all segments together.
    pub count: u64,
}

/// Parts of a segment that follow one another down a chain.
pub(crate) const CHAIN_PARTS: u32 = 4;

/// Segments start at multiples of this many bytes where that is possible.
const ALIGNMENT: u64 = 64;

/// Bytes of the largest element.
const MAX_ELEMENT: u32 = 16;

impl Default for Tuning {
    fn default() -> Self {
        Self {
            chunk_bytes: 128 << 10,
            segment_bytes: 1 << 20,
            message_bytes: 16 << 10,
            copy_bytes: 32 << 10,
            algorithms: AlgorithmTable::default(),
        }
    }
}

impl Segmentation {
    /// Elements `lo..hi` of each block that segment `index` covers; empty beyond the last.
    pub fn range(&self, index: u64) -> (u64, u64) {
        let lo = index.saturating_mul(self.elements).min(self.count);
        (lo, lo.saturating_add(self.elements).min(self.count))
    }
}

/// Cuts an operation. An operation without elements is one segment of none.
pub fn segmentation(plan: &Plan, signature: &Signature, tuning: &Tuning) -> Segmentation {
    let count = if signature.collective.has_data() { signature.count } else { 0 };
    let size = signature.dtype.size() as u64;
    let most =
        max_elements(plan, signature.collective, select_algorithm(plan, signature, tuning), size, tuning);
    let segments = count.div_ceil(most).max(1);
    let unit = ALIGNMENT / size;
    let even = count.div_ceil(segments);
    let aligned = even.div_ceil(unit).saturating_mul(unit);
    let elements = if aligned <= most { aligned.min(count) } else { even };
    Segmentation { segments: count.div_ceil(elements.max(1)).max(1), elements, count }
}

/// Most elements of a block that a segment may have, at least 1.
fn max_elements(
    plan: &Plan,
    collective: Collective,
    algorithm: Algorithm,
    size: u64,
    tuning: &Tuning,
) -> u64 {
    let participants = u64::from(plan.participants());
    let chunk = (u64::from(tuning.chunk_bytes) / size).max(1);
    let segment = (u64::from(tuning.segment_bytes) / size).max(1);
    let least = (u64::from(tuning.message_bytes) / size).max(1);
    let of_blocks = |blocks: u64| (segment / blocks.max(1)).max(least).min(chunk);
    match collective.traits().pattern {
        Pattern::ReduceDistribute | Pattern::Chain if participants == 1 => {
            // One step reads it from each rank and writes it to each.
            let touched = 2 * u64::from(plan.group().ranks());
            (segment / touched).max(least).min(segment)
        }
        Pattern::ReduceDistribute | Pattern::Chain if sends_whole(algorithm) => segment.min(chunk),
        Pattern::ReduceDistribute if algorithm == Algorithm::RecursiveHalving => {
            // The first exchange sends half of a segment, but a participant that goes by a neighbour all of it.
            let halves = if participants.is_power_of_two() { 2 } else { 1 };
            segment.min(chunk.saturating_mul(halves))
        }
        Pattern::ReduceDistribute => segment.min(chunk.saturating_mul(participants)),
        Pattern::Chain => segment.min(chunk.saturating_mul(u64::from(CHAIN_PARTS))),
        Pattern::Pairwise => {
            let group = plan.group();
            let local = (0..plan.participants()).map(|each| group.local(Participant(each)).len()).max();
            // Of all local ranks, or of the root.
            let local = local.filter(|_| !collective.is_rooted());
            let blocks = u64::from(group.ranks()).saturating_mul(local.unwrap_or(1) as u64);
            of_blocks(blocks)
        }
        Pattern::Gather => of_blocks(u64::from(plan.group().ranks())),
        Pattern::Dissemination => 1,
    }
}

/// Returns the most bytes of a block that a segment may have, whatever the type of its elements.
pub fn max_segment_bytes(
    plan: &Plan,
    collective: Collective,
    algorithm: Algorithm,
    retention: Retention,
    tuning: &Tuning,
) -> u64 {
    if !collective.has_data() {
        return 0;
    }
    // An element is in one piece, however small the sizes are.
    let whole = |bytes: u32| bytes.max(MAX_ELEMENT);
    let sizes = Tuning {
        chunk_bytes: whole(tuning.chunk_bytes),
        segment_bytes: whole(tuning.segment_bytes),
        message_bytes: whole(tuning.message_bytes),
        ..*tuning
    };
    let most = max_elements(plan, collective, algorithm, 1, &sizes).max(MAX_ELEMENT.into());
    match retention {
        Retention::KeepInputs | Retention::HoldOutputs => most,
        Retention::CopyInputs => {
            let blocks = collective.max_blocks(plan.group().ranks());
            most.min((tuning.copy_bytes / u64::from(blocks.max(1))).max(MAX_ELEMENT.into()))
        }
    }
}

/// Whether an algorithm may send a segment in one message.
fn sends_whole(algorithm: Algorithm) -> bool {
    matches!(
        algorithm,
        Algorithm::OneShot
            | Algorithm::RecursiveDoubling
            | Algorithm::BinomialTree
            // A part of it; but a later epoch may know of fewer parts, and a message of its must fit a landing slot too.
            | Algorithm::Hierarchical
    )
}

/// How an operation goes between participants. Depends only on what all participants share.
pub fn select_algorithm(plan: &Plan, signature: &Signature, tuning: &Tuning) -> Algorithm {
    let collective = signature.collective;
    match (plan.participants(), collective.has_data()) {
        (1, _) => Algorithm::Ring,
        (_, false) => tuning.algorithms.choose(collective, 0),
        (_, true) => tuning.algorithms.choose(collective, tensor_bytes(plan, signature)),
    }
}

/// Bytes of the larger of a rank's tensors.
fn tensor_bytes(plan: &Plan, signature: &Signature) -> u64 {
    let blocks = signature.collective.max_blocks(plan.group().ranks());
    signature.count.saturating_mul(blocks.into()).saturating_mul(signature.dtype.size() as u64)
}

/// The retention for an operation of which at least one local rank is in place, or none. One participant needs none, and
/// says so by [`Retention::KeepInputs`].
pub fn retention(plan: &Plan, signature: &Signature, in_place: bool, tuning: &Tuning) -> Retention {
    let bytes = tensor_bytes(plan, signature);
    if plan.participants() == 1 {
        Retention::KeepInputs
    } else if !signature.collective.has_data() {
        // There is nothing to copy, and nobody need wait for the acknowledgement.
        Retention::CopyInputs
    } else if bytes <= tuning.copy_bytes {
        Retention::CopyInputs
    } else if in_place {
        Retention::HoldOutputs
    } else {
        Retention::KeepInputs
    }
}
