//! Every instruction set gives the reference's bits.

use super::memory::{Memory, elements};
use super::{Case, vector_isas};
use crate::pass::Pass;
use crate::{Isa, MAX_SOURCES, PassOptions, copy};
use harmonaize_abi::{Dtype, ReduceOp, View};
use proptest::prelude::*;

const LENGTHS: &[usize] = &[0, 1, 3, 7, 8, 31, 63, 64, 65, 255, 257, 1000, 1031, 2100];

fn check(case: &Case) {
    let contents = case.contents();
    let expected = case.results(Isa::Scalar, &contents);
    assert!(expected.windows(2).all(|pair| pair[0] == pair[1]), "destinations differ: {case:?}");
    let expected_in_place = case.results_in_place(Isa::Scalar, &contents);
    assert!(expected_in_place.iter().all(|bytes| *bytes == expected[0]), "in place differs: {case:?}");
    for isa in vector_isas() {
        for (results, expected) in [
            (case.results(isa, &contents), &expected),
            (case.results_in_place(isa, &contents), &expected_in_place),
        ] {
            if results != *expected {
                let first = (0..case.elements).find(|index| {
                    let range = index * case.dtype.size()..(index + 1) * case.dtype.size();
                    results.iter().zip(expected).any(|(a, b)| a[range.clone()] != b[range.clone()])
                });
                panic!("{isa} differs from the reference first at element {first:?} of {case:?}");
            }
        }
    }
}

/// Factors for a `PremulSum` of so many sources, if it is one and the seed says so.
fn factors(op: ReduceOp, sources: usize, seed: u64) -> Option<Vec<f64>> {
    const FACTORS: [f64; 9] = [1.0, -1.0, 0.1, 3.0, -0.0, 1e300, 1e-40, f64::NAN, f64::NEG_INFINITY];
    let at = |index: usize| FACTORS[(seed as usize / 16 + index * 5) % FACTORS.len()];
    (op == ReduceOp::PremulSum && !seed.is_multiple_of(8)).then(|| (0..sources).map(at).collect())
}

/// What a result is divided by, if it can be.
fn divisor(op: ReduceOp, dtype: Dtype, divide: Option<u32>) -> Option<u32> {
    divide.filter(|_| ReduceOp::Average.takes(dtype) && matches!(op, ReduceOp::Sum | ReduceOp::Average))
}

fn check_dtype(dtype: Dtype) {
    let mut seed = u64::from(dtype.code()) << 32;
    for op in ReduceOp::ALL.iter().copied().filter(|op| op.takes(dtype)) {
        for sources in 1..=MAX_SOURCES {
            for destinations in 1..=3 {
                for elements in LENGTHS.iter().copied() {
                    seed += MAX_SOURCES as u64;
                    let mix = seed as usize / MAX_SOURCES;
                    // Aligned alike, misaligned by elements, and misaligned within elements, in turn.
                    let step = [0, dtype.size(), 1][mix % 3];
                    let offset = |index: usize| (mix / 3 + index * 5) * step % 64;
                    check(&Case {
                        op,
                        dtype,
                        elements,
                        source_offsets: (0..sources).map(offset).collect(),
                        destination_offsets: (3..3 + destinations).map(offset).collect(),
                        divide: divisor(op, dtype, [None, Some(sources as u32), Some(3), None][mix % 4]),
                        factors: factors(op, sources, mix as u64),
                        stream_from: [usize::MAX, 0][mix / 4 % 2],
                        seed,
                    });
                }
            }
        }
    }
}

macro_rules! dtypes {
    ($($name:ident $dtype:ident;)*) => {$(
        #[test]
        fn $name() {
            check_dtype(Dtype::$dtype);
        }
    )*};
}

dtypes! {
    i8_agrees I8;
    u8_agrees U8;
    i16_agrees I16;
    u16_agrees U16;
    i32_agrees I32;
    u32_agrees U32;
    i64_agrees I64;
    u64_agrees U64;
    f16_agrees F16;
    bf16_agrees Bf16;
    f32_agrees F32;
    f64_agrees F64;
    bool_agrees Bool;
    complex64_agrees Complex64;
    complex128_agrees Complex128;
    f8e4m3_agrees F8E4M3;
    f8e5m2_agrees F8E5M2;
}

#[test]
fn a_part_of_a_large_tensor_streams() {
    let (dtype, count) = (Dtype::F32, 64 << 10);
    let contents: Vec<Vec<u8>> = (1..3).map(|seed| elements(dtype, count, seed)).collect();
    let given: Vec<Memory> = contents.iter().map(|bytes| Memory::new(0, bytes)).collect();
    let sources: Vec<View<'_>> = given.iter().map(|memory| memory.view().as_view()).collect();
    let sums = [0, crate::STREAM_FROM].map(|whole| {
        let to = Memory::new(0, &vec![0; count * dtype.size()]);
        let destinations = [to.view()];
        let pass = Pass::new(dtype, &sources, &destinations, None, (whole, crate::STREAM_FROM)).unwrap();
        assert_eq!(pass.streams != 0, whole > 0, "256 KiB of {whole} bytes");
        crate::reduce_with(PassOptions::part_of(whole), ReduceOp::Sum, dtype, &sources, &destinations, None)
            .unwrap();
        to.bytes()
    });
    assert_eq!(sums[0], sums[1]);
}

#[test]
fn what_streams_agrees_at_every_alignment() {
    for dtype in [Dtype::U8, Dtype::Bf16, Dtype::F32, Dtype::F64, Dtype::F8E4M3, Dtype::Complex128] {
        for offset in 0..64 {
            for second in [offset, offset + dtype.size(), 0] {
                check(&Case {
                    op: ReduceOp::Sum,
                    dtype,
                    elements: 8192 / dtype.size() + 5,
                    source_offsets: vec![0, 7, 64],
                    destination_offsets: vec![1, offset, second, offset],
                    divide: None,
                    factors: None,
                    stream_from: 0,
                    seed: offset as u64,
                });
            }
        }
    }
}

/// Sums into the first of two sources, as an aggregator adds parts. They have every length up to some blocks, at
/// any address.
#[test]
fn short_sums_into_a_source_agree() {
    for dtype in [Dtype::U8, Dtype::F32, Dtype::Bf16] {
        for elements in 0..1100 {
            let offsets = [elements * 4 % 64, elements * 20 % 64];
            let case = Case {
                op: ReduceOp::Sum,
                dtype,
                elements,
                source_offsets: offsets.to_vec(),
                destination_offsets: vec![],
                divide: None,
                factors: None,
                stream_from: usize::MAX,
                seed: 2 * elements as u64,
            };
            let contents = case.contents();
            let results = |isa| {
                let memories = case.sources(&contents);
                let views: Vec<_> = memories.iter().map(|memory| memory.view().as_view()).collect();
                case.run(isa, &views, &[memories[0].view()]);
                assert!(memories.iter().all(Memory::is_intact_around), "{isa} wrote outside: {case:?}");
                assert!(memories[1].bytes() == contents[1], "{isa} wrote a source: {case:?}");
                memories[0].bytes()
            };
            let expected = results(Isa::Scalar);
            for isa in vector_isas() {
                assert!(results(isa) == expected, "{isa} differs from the reference: {case:?}");
            }
        }
    }
}

#[test]
fn more_destinations_than_can_stream_agree() {
    check(&Case {
        op: ReduceOp::Max,
        dtype: Dtype::F32,
        elements: 2048,
        source_offsets: vec![0, 0],
        destination_offsets: vec![0; 70],
        divide: None,
        factors: None,
        stream_from: 0,
        seed: 9,
    });
}

/// All pairs of an 8-bit float type, and of bytes as bools.
#[test]
fn every_pair_of_bytes_agrees() {
    let first: Vec<u8> = (0..=u16::MAX).map(|pair| pair as u8).collect();
    let second: Vec<u8> = (0..=u16::MAX).map(|pair| (pair >> 8) as u8).collect();
    let (first, second) = (Memory::new(0, &first), Memory::new(0, &second));
    let sources = [first.view().as_view(), second.view().as_view()];
    for dtype in [Dtype::F8E4M3, Dtype::F8E5M2, Dtype::Bool] {
        for op in ReduceOp::ALL.iter().copied().filter(|op| op.takes(dtype)) {
            let run = |isa| {
                let to = Memory::new(0, &vec![0; 1 << 16]);
                match op {
                    ReduceOp::PremulSum => {
                        let factors = [0.3, -1.7];
                        crate::sum_scaled_with(PassOptions::by(isa), dtype, &sources, &factors, &[to.view()])
                            .unwrap();
                    }
                    op => {
                        let by = (op == ReduceOp::Average).then_some(2);
                        crate::reduce_with(PassOptions::by(isa), op, dtype, &sources, &[to.view()], by)
                            .unwrap();
                    }
                }
                to.bytes()
            };
            let expected = run(Isa::Scalar);
            for isa in vector_isas() {
                assert!(run(isa) == expected, "{isa}: {op} of every two {dtype}");
            }
        }
    }
}

/// All 65,536 elements of a 16-bit float type, to reduce with a few others.
#[test]
fn every_16_bit_float_agrees() {
    let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    for dtype in [Dtype::F16, Dtype::Bf16] {
        for op in [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max] {
            for seed in 0..16 {
                let from = Memory::new(0, &all);
                let with = Memory::new(0, &elements(dtype, 1 << 16, seed));
                let sources = [from.view().as_view(), with.view().as_view()];
                let sources = if seed == 0 { &sources[..1] } else { &sources[..] };
                let run = |isa| {
                    let to = Memory::new(0, &all);
                    crate::reduce_with(PassOptions::by(isa), op, dtype, sources, &[to.view()], None).unwrap();
                    to.bytes()
                };
                let expected = run(Isa::Scalar);
                for isa in vector_isas() {
                    assert!(run(isa) == expected, "{isa}: {op} of every {dtype}, seed {seed}");
                }
            }
        }
    }
}

fn case() -> impl Strategy<Value = Case> {
    let offsets = |most| proptest::collection::vec(0..64_usize, 1..=most);
    (
        (proptest::sample::select(ReduceOp::ALL), proptest::sample::select(Dtype::ALL)),
        0..6000_usize,
        (offsets(MAX_SOURCES), offsets(4)),
        proptest::option::of(1..=u32::MAX),
        proptest::sample::select(&[0, 10_000, usize::MAX][..]),
        any::<u64>(),
    )
        .prop_filter("a reduction that the type has", |((op, dtype), ..)| op.takes(*dtype))
        .prop_map(|((op, dtype), elements, offsets, divide, stream_from, seed)| Case {
            op,
            dtype,
            elements,
            divide: divisor(op, dtype, divide.map(|ranks| (ranks >> (seed % 32)).max(1))),
            factors: factors(op, offsets.0.len(), seed),
            source_offsets: offsets.0,
            destination_offsets: offsets.1,
            stream_from,
            seed: seed >> 1,
        })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    #[test]
    fn any_pass_agrees(case in case()) {
        check(&case);
    }

    #[test]
    fn any_copy_is_the_source(
        bytes in 0..50_000_usize, from in 0..64_usize, offsets in proptest::collection::vec(0..64_usize, 1..4), seed: u64,
    ) {
        let content = elements(Dtype::U8, bytes, seed);
        let source = Memory::new(from, &content);
        let stale = vec![0; bytes];
        let destinations: Vec<_> = offsets.iter().map(|offset| Memory::new(*offset, &stale)).collect();
        let mut to: Vec<_> = destinations.iter().map(Memory::view).collect();
        to.insert(seed as usize % to.len(), source.view());
        copy(source.view().as_view(), &to).unwrap();
        for memory in destinations.iter().chain([&source]) {
            prop_assert!(memory.bytes() == content);
            prop_assert!(memory.is_intact_around());
        }
    }
}
