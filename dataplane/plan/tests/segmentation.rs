//! However an operation is cut, its segments cover every element once and no message is larger than a chunk.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use common::{Case, Grouping, Reach};
use harmonaize_abi::{Collective, Dtype, Rank, ReduceOp, Signature};
use harmonaize_plan::{
    Algorithm, AlgorithmTable, Buffer, CODED_ROOM, Operand, Request, Retention, Segmentation, Tuning,
    max_segment_bytes, retention, segmentation, select_algorithm,
};
use proptest::prelude::*;

fn signature(collective: Collective, dtype: Dtype, count: u64) -> Signature {
    Signature { collective, dtype, reduce: ReduceOp::Sum, root: Rank(0), count, uneven: false }
}

fn groupings() -> impl Strategy<Value = Grouping> {
    prop_oneof![
        (1_u32..9).prop_map(Grouping::PerHost),
        Just(Grouping::PerHost(64)),
        Just(Grouping::Uneven),
        (0_u64..99).prop_map(Grouping::Shuffled)
    ]
}

/// The most elements that any message of a segment `lo..hi` has.
fn largest_message(case: &Case, lo: u64, hi: u64) -> u64 {
    let programs = case.programs();
    let steps = programs.iter().flat_map(|program| &program.steps);
    let sent = steps.flat_map(|step| &step.destinations);
    let sent = sent.filter(|operand: &&Operand| matches!(operand.buffer, Buffer::Peer(_)));
    sent.map(|operand| operand.part.elements(lo, hi).1).max().unwrap_or(0)
}

fn algorithms() -> impl Strategy<Value = AlgorithmTable> {
    let size = || prop_oneof![Just(0), 0_u64..20_000_000];
    prop_oneof![
        (size(), size()).prop_map(|(one, two)| AlgorithmTable::direct(one, two)),
        prop::sample::select(&Algorithm::ALL[..]).prop_map(AlgorithmTable::all_by),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn segments_cover_every_element_once_and_messages_fit(
        collective in prop::sample::select(Collective::ALL),
        dtype in prop::sample::select(Dtype::ALL),
        ranks in 1_u32..40,
        grouping in groupings(),
        count in prop_oneof![0_u64..300, 0_u64..3_000_000],
        chunk_bytes in 8_u32..300_000,
        segment_bytes in 0_u32..3_000_000,
        message_bytes in 0_u32..100_000,
        algorithms in algorithms(),
    ) {
        let plan = grouping.plan(ranks);
        let tuning = Tuning {
            chunk_bytes,
            segment_bytes,
            message_bytes,
            copy_bytes: 0,
            algorithms,
        };
        let signature = signature(collective, dtype, count);
        let cut = segmentation(&plan, &signature, &tuning);
        let expected = if collective.has_data() { count } else { 0 };
        prop_assert_eq!(cut.count, expected);
        prop_assert!(cut.segments >= 1);
        prop_assert_eq!(cut.range(0).0, 0);
        prop_assert_eq!(cut.range(cut.segments - 1).1, expected);
        prop_assert_eq!(cut.range(cut.segments), (expected, expected));
        prop_assert_eq!(cut.range(u64::MAX), (expected, expected));
        for index in [0, 1, 2, cut.segments / 2, cut.segments.saturating_sub(2)] {
            if index + 1 < cut.segments {
                let (lo, hi) = cut.range(index);
                prop_assert_eq!(hi - lo, cut.elements);
                prop_assert!(hi > lo);
                prop_assert_eq!(cut.range(index + 1).0, hi);
            }
        }
        let (lo, hi) = cut.range(cut.segments - 1);
        prop_assert!(expected == 0 || hi > lo, "an empty last segment");
        let request = Request { algorithm: select_algorithm(&plan, &signature, &tuning), ..common::plain(collective, Rank(ranks / 2)) };
        let case = Case { plan, request, retention: Some(Retention::KeepInputs), reach: Reach::Mapped, scaled: false };
        for index in [0, cut.segments - 1] {
            let (lo, hi) = cut.range(index);
            let bytes = largest_message(&case, lo, hi) * dtype.size() as u64;
            prop_assert!(bytes <= u64::from(chunk_bytes), "{} > {}", bytes, chunk_bytes);
        }
    }

    #[test]
    fn staging_keeps_within_its_bound(
        collective in prop::sample::select(Collective::ALL),
        dtype in prop::sample::select(Dtype::ALL),
        ranks in 1_u32..40,
        grouping in groupings(),
        reach in prop::sample::select(&Reach::ALL[..]),
        count in prop_oneof![0_u64..300, 0_u64..3_000_000],
        sizes in (8_u32..300_000, 0_u32..3_000_000, 0_u32..100_000, 0_u64..100_000),
        algorithms in algorithms(),
        in_place in any::<bool>(),
    ) {
        let plan = grouping.plan(ranks);
        let (chunk_bytes, segment_bytes, message_bytes, copy_bytes) = sizes;
        let tuning = Tuning { chunk_bytes, segment_bytes, message_bytes, copy_bytes, algorithms };
        let signature = signature(collective, dtype, count);
        let elements = segmentation(&plan, &signature, &tuning).elements;
        let algorithm = select_algorithm(&plan, &signature, &tuning);
        let kept = retention(&plan, &signature, in_place, &tuning);
        let bound = max_segment_bytes(&plan, collective, algorithm, kept, &tuning);
        let request = Request { algorithm, ..common::plain(collective, Rank(ranks / 2)) };
        for program in (Case { plan, request, retention: Some(kept), reach, scaled: false }).programs() {
            let part = |of: &u32| elements.div_ceil(u64::from(*of)) * dtype.size() as u64;
            let slots = program.slots.iter().map(|of| (part(of) + u64::from(CODED_ROOM)).next_multiple_of(64));
            let (used, most) = (slots.sum::<u64>(), program.staging_size().bytes(bound));
            prop_assert!(used <= most, "{} > {}", used, most);
        }
    }

    #[test]
    fn no_count_or_size_overflows(
        collective in prop::sample::select(Collective::ALL),
        dtype in prop::sample::select(Dtype::ALL),
        count in any::<u64>(),
        sizes in any::<(u32, u32, u32, u64)>(),
        algorithms in algorithms(),
        in_place in any::<bool>(),
    ) {
        let plan = Grouping::PerHost(3).plan(10);
        let (chunk_bytes, segment_bytes, message_bytes, copy_bytes) = sizes;
        let tuning = Tuning {
            chunk_bytes,
            segment_bytes,
            message_bytes,
            copy_bytes,
            algorithms,
        };
        let signature = signature(collective, dtype, count);
        let cut = segmentation(&plan, &signature, &tuning);
        prop_assert_eq!(cut.range(cut.segments - 1).1, cut.count);
        retention(&plan, &signature, in_place, &tuning);
    }
}

#[test]
fn sixty_four_mebibytes_over_four_hosts() {
    let plan = Grouping::PerHost(2).plan(8);
    let tuning = Tuning::default();
    let cut = |collective, count| segmentation(&plan, &signature(collective, Dtype::F32, count), &tuning);
    let elements = 16 << 20;
    // 4 chunks of 128 KiB.
    let expected = Segmentation { segments: 128, elements: 1 << 17, count: elements };
    assert_eq!(cut(Collective::AllReduce, elements), expected);
    // 4 parts of 128 KiB.
    assert_eq!(cut(Collective::Broadcast, elements), expected);
    // 8 blocks of 2 ranks in 1 MiB: 64 KiB a message.
    let expected = Segmentation { segments: 128, elements: 1 << 14, count: 1 << 21 };
    assert_eq!(cut(Collective::AllToAll, 1 << 21), expected);
    // 8 blocks in 1 MiB: 128 KiB a message.
    let expected = Segmentation { segments: 64, elements: 1 << 15, count: 1 << 21 };
    assert_eq!(cut(Collective::AllGather, 1 << 21), expected);
    assert_eq!(cut(Collective::ReduceScatter, 1 << 21), expected);
    assert_eq!(cut(Collective::AllReduce, 0), Segmentation { segments: 1, elements: 0, count: 0 });
    // Nearly equal segments that begin at a multiple of 64 bytes.
    let expected = Segmentation { segments: 2, elements: 65_568, count: 131_105 };
    assert_eq!(cut(Collective::AllReduce, (1 << 17) + 33), expected);
}

#[test]
fn small_operations_copy_and_those_in_place_hold() {
    let tuning = Tuning { copy_bytes: 1024, ..Tuning::default() };
    let several = Grouping::PerHost(2).plan(8);
    let chosen = |plan: &_, collective, count, in_place| {
        retention(plan, &signature(collective, Dtype::F32, count), in_place, &tuning)
    };
    assert_eq!(chosen(&several, Collective::AllReduce, 256, true), Retention::CopyInputs);
    assert_eq!(chosen(&several, Collective::AllReduce, 257, true), Retention::HoldOutputs);
    assert_eq!(chosen(&several, Collective::AllReduce, 257, false), Retention::KeepInputs);
    assert_eq!(chosen(&several, Collective::AllToAll, 33, false), Retention::KeepInputs);
    assert_eq!(chosen(&several, Collective::AllToAll, 32, false), Retention::CopyInputs);
    for collective in [Collective::AllGather, Collective::ReduceScatter] {
        assert_eq!(chosen(&several, collective, 33, false), Retention::KeepInputs);
        assert_eq!(chosen(&several, collective, 33, true), Retention::HoldOutputs);
        assert_eq!(chosen(&several, collective, 32, true), Retention::CopyInputs);
    }
    assert_eq!(chosen(&Grouping::PerHost(8).plan(8), Collective::AllReduce, 1, true), Retention::KeepInputs);
}

#[test]
fn the_size_says_in_how_many_shots() {
    let algorithms = AlgorithmTable::direct(8192, 65536);
    let tuning = Tuning { chunk_bytes: 4096, algorithms, ..Tuning::default() };
    let several = Grouping::PerHost(2).plan(8);
    let chosen =
        |collective, count| select_algorithm(&several, &signature(collective, Dtype::F32, count), &tuning);
    let allreduce = [0, 2048, 2049, 16384, 16385].map(|count| chosen(Collective::AllReduce, count));
    assert_eq!(
        allreduce,
        [Algorithm::OneShot, Algorithm::OneShot, Algorithm::TwoShot, Algorithm::TwoShot, Algorithm::Ring]
    );
    let broadcast = [0, 2048, 2049].map(|count| chosen(Collective::Broadcast, count));
    assert_eq!(broadcast, [Algorithm::OneShot, Algorithm::OneShot, Algorithm::Ring]);
    // Each is half of an AllReduce in two shots, of the whole tensor.
    for collective in [Collective::AllGather, Collective::ReduceScatter] {
        let halves = [0, 256, 257, 2048, 2049].map(|count| chosen(collective, count));
        assert_eq!(
            halves,
            [Algorithm::OneShot, Algorithm::OneShot, Algorithm::OneShot, Algorithm::OneShot, Algorithm::Ring]
        );
    }
    assert_eq!(chosen(Collective::Barrier, 0), Algorithm::OneShot);
    assert_eq!(chosen(Collective::AllToAll, 1), Algorithm::Ring);
    let none =
        |collective| select_algorithm(&several, &signature(collective, Dtype::F32, 0), &Tuning::default());
    assert!(Collective::ALL.iter().all(|collective| none(*collective) == Algorithm::Ring));
    let alone = Grouping::PerHost(8).plan(8);
    assert_eq!(
        select_algorithm(&alone, &signature(Collective::AllReduce, Dtype::F32, 1), &tuning),
        Algorithm::Ring
    );
    // A message is the whole segment, so there are as many as chunks.
    let cut = segmentation(&several, &signature(Collective::AllReduce, Dtype::F32, 2048), &tuning);
    assert_eq!(cut, Segmentation { segments: 2, elements: 1024, count: 2048 });
}

#[test]
fn powers_of_two_are_cut_to_fit_messages() {
    let cut = |grouping: Grouping, collective, algorithm| {
        let tuning = Tuning { algorithms: AlgorithmTable::all_by(algorithm), ..Tuning::default() };
        segmentation(&grouping.plan(12), &signature(collective, Dtype::U8, 1 << 20), &tuning).elements >> 10
    };
    // Half of a segment to the first partner of four, but all of it to a neighbour of three.
    let halving = |grouping| cut(grouping, Collective::AllReduce, Algorithm::RecursiveHalving);
    assert_eq!([halving(Grouping::PerHost(3)), halving(Grouping::PerHost(4))], [256, 128]);
    assert_eq!(cut(Grouping::PerHost(3), Collective::AllReduce, Algorithm::RecursiveDoubling), 128);
    assert_eq!(cut(Grouping::PerHost(3), Collective::Reduce, Algorithm::BinomialTree), 128);
}
