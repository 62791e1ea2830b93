//! The table of collectives.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_abi::{BlockContent, Collective, Dtype, Rank, ReduceOp, Signature};

const RANKS: u32 = 4;
const ROOT: Rank = Rank(2);

/// nccl-tests, doc/PERFORMANCE.md.
#[test]
fn bus_factors_are_those_of_nccl_tests() {
    for (collective, factor) in [
        (Collective::AllReduce, 1.5),
        (Collective::ReduceScatter, 0.75),
        (Collective::AllGather, 0.75),
        (Collective::AllToAll, 0.75),
        (Collective::Broadcast, 1.0),
        (Collective::Reduce, 1.0),
        (Collective::Gather, 0.75),
        (Collective::Scatter, 0.75),
        (Collective::Barrier, 0.0),
    ] {
        assert_eq!(collective.bus_factor(RANKS), factor, "{collective}");
    }
}

#[test]
fn ranks_without_tensors_have_no_blocks() {
    let at = |collective: Collective, rank| {
        (collective.blocks(RANKS, rank, ROOT), collective.shared_block(rank, ROOT))
    };
    for (collective, root, other) in [
        (Collective::Broadcast, ([1, 1], Some([0, 0])), ([0, 1], None)),
        (Collective::Reduce, ([1, 1], Some([0, 0])), ([1, 0], None)),
        (Collective::Gather, ([1, 4], Some([0, 2])), ([1, 0], None)),
        (Collective::Scatter, ([4, 1], Some([2, 0])), ([0, 1], None)),
    ] {
        assert_eq!((at(collective, ROOT), at(collective, Rank(1))), (root, other), "{collective}");
    }
    assert_eq!(at(Collective::AllGather, Rank(1)), ([1, 4], Some([0, 1])));
    assert_eq!(at(Collective::ReduceScatter, Rank(1)), ([4, 1], Some([1, 0])));
    assert_eq!(at(Collective::AllToAll, Rank(1)), ([4, 4], None));
}

/// Every block of every output is written, and in place the shared block of what is not reduced becomes itself.
#[test]
fn every_block_of_an_output_has_a_content() {
    for collective in Collective::ALL.iter().copied().filter(|one| one.has_data()) {
        for rank in (0..RANKS).map(Rank) {
            let [_, outputs] = collective.blocks(RANKS, rank, ROOT);
            for block in 0..outputs {
                let content = collective.content(rank, block, ROOT);
                let reduces = matches!(content, BlockContent::Reduction(_));
                assert!(
                    content != BlockContent::Unwritten && reduces == collective.reduces(),
                    "{collective}"
                );
            }
            if let Some([input, output]) =
                collective.shared_block(rank, ROOT).filter(|_| !collective.reduces())
            {
                assert_eq!(collective.content(rank, output, ROOT), BlockContent::Input(rank, input));
            }
        }
    }
}

#[test]
fn a_signature_says_root_and_blocks() {
    let text = |collective: Collective| {
        let signature = Signature {
            collective,
            dtype: Dtype::F32,
            reduce: ReduceOp::Sum,
            root: ROOT,
            count: 5,
            uneven: false,
        };
        signature.to_string()
    };
    assert_eq!(text(Collective::Reduce), "reduce(5 x f32, sum, root 2)");
    assert_eq!(text(Collective::Gather), "gather(5 x f32 a rank, root 2)");
    assert_eq!(text(Collective::Scatter), "scatter(5 x f32 a rank, root 2)");
    assert_eq!(text(Collective::AllReduce), "allreduce(5 x f32, sum)");
}
