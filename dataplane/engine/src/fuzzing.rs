//! What fuzzers call: the checks of descriptors, which are private otherwise.

use crate::validate::{check, check_p2p, region_of_counts};
use harmonaize_abi::{ABI_VERSION, Direction, Rank, Submission};
use harmonaize_shm::{AgentEnd, MappedEnd, Memory};
use std::sync::Arc;
use zerocopy::FromBytes;

/// Checks a descriptor of 128 bytes, with the counts that follow it, against an arena and a region. What passes lies in them.
///
/// # Panics
/// Where a checked tensor lies elsewhere.
pub fn descriptor(bytes: &[u8]) {
    const ARENA: u64 = 8192;
    let Ok((mut submission, rest)) = Submission::read_from_prefix(bytes) else { return };
    // The first byte of the version is the number of ranks; nothing else is in it that matters.
    let ranks = u32::from(submission.version as u8 % 8) + 1;
    let rank = Rank(u32::from(submission.version >> 8) % ranks);
    submission.version = ABI_VERSION;
    let Ok((mut end, _bell)) = MappedEnd::create(ARENA, 4, Box::new(())) else { return };
    let region = Memory::private(4096).ok().and_then(|memory| end.add_region(2 * ARENA, memory).ok());
    assert!(region.is_some(), "no region");
    let end: &dyn AgentEnd = &end;
    let inside = |offset, bytes| {
        assert!(bytes == 0 || end.holds(offset, bytes), "{bytes} bytes from {offset} on: {submission:?}");
    };
    for direction in [Direction::Send, Direction::Receive] {
        if let Ok(call) = check_p2p(&submission, direction, end, ranks) {
            [call.input, call.output].iter().for_each(|region| inside(region.offset, region.bytes));
        }
    }
    let Ok(counts) = region_of_counts(&submission, ranks) else { return };
    let counts: Option<Arc<[u64]>> = counts.map(|region| {
        let (words, _) = rest.as_chunks::<8>();
        let said = (0..region.bytes as usize / 8)
            .map(|at| words.get(at).map_or(0, |word| u64::from_le_bytes(*word)));
        said.collect()
    });
    if let Ok(call) = check(&submission, end, (rank, ranks), counts.as_deref()) {
        let fed = call.feedback.iter().flatten();
        [call.input, call.output].iter().chain(fed).for_each(|region| inside(region.offset, region.bytes));
    }
}
