//! Codes: every instruction set gives the reference's bytes, values and squares; rounding is what it says it is.

use super::memory::{Memory, elements};
use super::vector_isas;
use crate::Isa;
use crate::codes::{
    Code, Grid, PartOf, Rounding, Squares, Store, add_shared, check_nonzero, decode, decode_nonzero,
    decode_nonzero_part, decode_part, encode, encode_nonzero, encode_part, encode_shared, nonzero_bytes,
    ranges, signal,
};
use half::{bf16, f16};
use harmonaize_abi::{Dtype, View};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const LENGTHS: &[usize] = &[0, 1, 15, 16, 17, 31, 100, 255, 256, 257, 1000, 1031, 4096, 5000];

fn codes() -> Vec<Code> {
    let mut codes = vec![Code::F32, Code::Bf16, Code::F16];
    for grid in [Grid::Int8, Grid::Int4] {
        for block in [32, 64, 256] {
            for rounding in [Rounding::Nearest, Rounding::Stochastic] {
                codes.push(Code::Blocks { grid, block, rounding });
            }
        }
    }
    for bits in 1..=4 {
        codes.extend([64, 128, 1024, 4096].map(|block| Code::Rotated { bits, block }));
    }
    codes
}

fn ordinary(count: usize, seed: u64) -> Vec<u8> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    (0..count)
        .flat_map(|_| (random.random_range(-1.0..1.0_f32) * random.random::<f32>()).to_le_bytes())
        .collect()
}

#[test]
fn every_instruction_set_gives_the_references_signal() {
    for count in LENGTHS.iter().copied() {
        let content = ordinary(count, 3);
        let source = Memory::new(count % 7, &content);
        let values = content.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
        let expected: f64 = values.map(|value| f64::from(value).powi(2)).sum();
        let scalar = signal(Isa::Scalar, source.view().as_view()).unwrap();
        assert!((scalar - expected).abs() <= 1e-6 * expected, "{count}: {scalar}, not {expected}");
        for isa in vector_isas() {
            let vector = signal(isa, source.view().as_view()).unwrap();
            assert_eq!(vector.to_bits(), scalar.to_bits(), "{isa} {count}");
        }
    }
    let of = |values: &[f32]| signal(Isa::Scalar, View::from(values)).unwrap();
    assert_eq!(of(&[1e-30, 3e-30]), f64::from(1e-30_f32).powi(2) + f64::from(3e-30_f32).powi(2));
    assert_eq!(of(&[1e20]), f64::from(1e20_f32).powi(2));
    assert!(of(&[f32::NAN; 20]).is_nan() && of(&[1.0, f32::INFINITY]).is_nan());
}

fn same(left: Squares, right: Squares) -> bool {
    left.error.to_bits() == right.error.to_bits() && left.signal.to_bits() == right.signal.to_bits()
}

#[test]
fn every_instruction_set_gives_the_references_bytes_and_values() {
    for code in codes() {
        for (index, count) in LENGTHS.iter().copied().enumerate() {
            for (content, offset) in
                [(elements(Dtype::F32, count, 7), index * 4), (ordinary(count, 8), index)]
            {
                let source = Memory::new(offset, &content);
                let run = |isa| {
                    let coded = Memory::new(index * 3, &vec![0; code.bytes(count).unwrap()]);
                    let squares = encode(isa, code, 5, source.view().as_view(), coded.view()).unwrap();
                    let stores = [Store::Set, Store::Add, Store::Subtract].map(|store| {
                        let to = Memory::new(offset, &ordinary(count, 9));
                        decode(isa, code, 5, coded.view().as_view(), store, to.view()).unwrap();
                        assert!(to.is_intact_around(), "{isa} {code:?} {count}");
                        to.bytes()
                    });
                    assert!(coded.is_intact_around(), "{isa} {code:?} {count}");
                    (coded.bytes(), squares, stores)
                };
                let expected = run(Isa::Scalar);
                for isa in vector_isas() {
                    let result = run(isa);
                    assert!(result.0 == expected.0, "{isa}: bytes of {code:?}, {count} elements");
                    assert!(result.2 == expected.2, "{isa}: values of {code:?}, {count} elements");
                    let squares = same(result.1, expected.1);
                    assert!(squares, "{isa}: {:?} for {:?} of {code:?}, {count}", result.1, expected.1);
                }
            }
        }
    }
}

#[test]
fn parts_have_the_bytes_and_values_of_the_whole() {
    const PART: usize = 16 << 10;
    let count = 2 * PART + 1031;
    let parts = || (0..count).step_by(PART).map(|first| (first, PART.min(count - first)));
    let isa = Isa::detect();
    let content = ordinary(count, 8);
    let source = Memory::new(3, &content);
    for code in codes() {
        let bytes = code.bytes(count).unwrap();
        let [whole, cut] = [0; 2].map(|_| Memory::new(5, &vec![0; bytes]));
        encode(isa, code, 5, source.view().as_view(), whole.view()).unwrap();
        for (first, count) in parts() {
            let to = cut.view().range(code.bytes(first).unwrap(), code.bytes(count).unwrap()).unwrap();
            let from = source.view().as_view().range(4 * first, 4 * count).unwrap();
            encode_part(isa, code, 5, from, to, PartOf { first, whole: bytes }).unwrap();
        }
        assert!(whole.bytes() == cut.bytes(), "{code:?}");
        for store in [Store::Set, Store::Add, Store::Subtract] {
            let [expected, found] = [0; 2].map(|_| Memory::new(7, &ordinary(count, 9)));
            decode(isa, code, 5, whole.view().as_view(), store, expected.view()).unwrap();
            for (first, count) in parts() {
                let from = cut.view().as_view();
                let from = from.range(code.bytes(first).unwrap(), code.bytes(count).unwrap()).unwrap();
                let to = found.view().range(4 * first, 4 * count).unwrap();
                decode_part(isa, code, 5, from, store, to, PartOf { first, whole: content.len() }).unwrap();
            }
            assert!(expected.bytes() == found.bytes(), "{code:?}, {store:?}");
        }
    }
    // Of blocks that are not zeros, where a part begins is known only from those before.
    let mut content = content;
    content.chunks_mut(1024).step_by(3).for_each(|block| block.fill(0));
    let (source, most) = (Memory::new(3, &content), *nonzero_bytes(count).unwrap().end());
    let [whole, cut] = [0; 2].map(|_| Memory::new(5, &vec![0; most]));
    let bytes = encode_nonzero(isa, source.view().as_view(), whole.view()).unwrap();
    let mut at = 0;
    for (first, count) in parts() {
        let to = cut.view().range(at, *nonzero_bytes(count).unwrap().end()).unwrap();
        at += encode_nonzero(isa, source.view().as_view().range(4 * first, 4 * count).unwrap(), to).unwrap();
    }
    assert!(at == bytes && whole.bytes()[..at] == cut.bytes()[..at]);
    let coded = cut.view().as_view().range(0, bytes).unwrap();
    check_nonzero(coded, count).unwrap();
    let found = Memory::new(7, &vec![1; content.len()]);
    let mut at = 0;
    for (first, count) in parts() {
        let (from, to) = (coded.range(at, bytes - at).unwrap(), found.view().range(4 * first, 4 * count));
        at += decode_nonzero_part(isa, from, Store::Set, to.unwrap(), content.len()).unwrap();
    }
    assert!(at == bytes && found.bytes() == content);
}

#[test]
fn sixteen_bit_floats_are_rounded_as_half_rounds_them() {
    let mut content = elements(Dtype::F32, 20_000, 3);
    content.extend(ordinary(20_000, 4));
    let values: Vec<f32> =
        content.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    for isa in vector_isas().chain([Isa::Scalar]) {
        for code in [Code::Bf16, Code::F16] {
            let source = Memory::new(0, &content);
            let coded = Memory::new(0, &vec![0; code.bytes(values.len()).unwrap()]);
            encode(isa, code, 0, source.view().as_view(), coded.view()).unwrap();
            for (value, half) in values.iter().zip(coded.bytes().chunks_exact(2)) {
                let expected = match (code, value.is_nan()) {
                    (Code::Bf16, true) => 0x7fc0,
                    (Code::Bf16, false) => bf16::from_f32(*value).to_bits(),
                    (_, true) => 0x7e00,
                    (_, false) => f16::from_f32(*value).to_bits(),
                };
                assert_eq!(half, expected.to_le_bytes(), "{isa}: {code:?} of {value:e}");
            }
        }
    }
}

#[test]
fn grids_give_the_nearest_of_their_values() {
    let grids = [
        (Grid::Int8, (0..=127).map(|i| i as f32).collect::<Vec<_>>()),
        (Grid::Int4, (0..=7).map(|i| i as f32).collect()),
    ];
    let mut random = ChaCha8Rng::seed_from_u64(11);
    for (grid, values) in grids {
        let top = *values.last().unwrap();
        let code = Code::Blocks { grid, block: 256, rounding: Rounding::Nearest };
        // The greatest is the grid's own, so that the scale is 1; the others have all magnitudes, and both signs.
        let mut block: Vec<f32> = (0..256)
            .map(|_| random.random_range(-1.0..1.0_f32) * top * 2_f32.powi(-random.random_range(0..20)))
            .collect();
        block[0] = -top;
        let content: Vec<u8> = block.iter().flat_map(|value| value.to_le_bytes()).collect();
        let (source, to) = (Memory::new(0, &content), Memory::new(0, &content));
        let coded = Memory::new(0, &vec![0; code.bytes(256).unwrap()]);
        encode(Isa::detect(), code, 0, source.view().as_view(), coded.view()).unwrap();
        decode(Isa::detect(), code, 0, coded.view().as_view(), Store::Set, to.view()).unwrap();
        for (value, back) in block.iter().zip(to.bytes().chunks_exact(4)) {
            let back = f32::from_le_bytes(back.try_into().unwrap());
            let nearest = values.iter().map(|v| (v - value.abs()).abs()).fold(f32::MAX, f32::min);
            assert_eq!((back - value).abs(), nearest, "{grid:?}: {value} became {back}");
            assert!(values.contains(&back.abs()), "{grid:?}: {value} became {back}");
        }
    }
}

#[test]
fn shared_codes_add_alike_everywhere() {
    for (bits, block, ranks, count) in
        [(4, 64, 4, 1000), (4, 1024, 17, 2500), (4, 1024, 20, 2500), (1, 256, 255, 300), (3, 64, 2, 17)]
    {
        let inputs: Vec<_> = (0..ranks).map(|rank| Memory::new(0, &ordinary(count, rank as u64))).collect();
        let run = |isa| {
            let blocks = count.div_ceil(block);
            let mut greatest = vec![0_f32; blocks];
            for input in &inputs {
                let own = Memory::new(0, &vec![0; 4 * blocks]);
                ranges(isa, block, input.view().as_view(), own.view()).unwrap();
                let own = own.bytes();
                let own = own.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
                greatest.iter_mut().zip(own).for_each(|(most, own)| *most = most.max(own));
            }
            let bytes: Vec<u8> = greatest.iter().flat_map(|range| range.to_le_bytes()).collect();
            let shared = Memory::new(0, &bytes);
            let [one, all] = [1, ranks].map(|ranks| Code::Shared { bits, block, ranks });
            let total = Memory::new(0, &vec![0; all.bytes(count).unwrap()]);
            for (rank, input) in inputs.iter().enumerate() {
                let own = Memory::new(0, &vec![0; one.bytes(count).unwrap()]);
                let (range, input) = (shared.view().as_view(), input.view().as_view());
                encode_shared(isa, bits, block, 1, rank as u64, range, input, own.view()).unwrap();
                let own = own.view().as_view();
                add_shared(isa, bits, block, ranks, count, own, rank == 0, total.view()).unwrap();
            }
            let to = Memory::new(0, &vec![0; 4 * count]);
            decode(isa, all, 1, total.view().as_view(), Store::Set, to.view()).unwrap();
            assert!(total.is_intact_around() && to.is_intact_around());
            (total.bytes(), to.bytes())
        };
        let expected = run(Isa::Scalar);
        for isa in vector_isas() {
            assert!(
                run(isa) == expected,
                "{isa}: {bits} bits, blocks of {block}, {ranks} ranks, {count} elements"
            );
        }
    }
}

#[test]
fn blocks_that_are_not_zeros_agree_everywhere() {
    let zeroed = |count, seed| -> Vec<u8> {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut content = ordinary(count, seed);
        for block in content.chunks_mut(1024).filter(|_| random.random::<f32>() < 0.7) {
            block.fill(0);
        }
        content
    };
    for (index, count) in [0, 1, 16, 17, 1000, 1024, 1025, 5000, 16_400, 40_000].into_iter().enumerate() {
        for content in [elements(Dtype::F32, count, 7), ordinary(count, 8), zeroed(count, 9)] {
            let source = Memory::new(4 * index, &content);
            let run = |isa| {
                let coded = Memory::new(index, &vec![0; *nonzero_bytes(count).unwrap().end()]);
                let bytes = encode_nonzero(isa, source.view().as_view(), coded.view()).unwrap();
                let written = coded.view().range(0, bytes).unwrap();
                let stores = [Store::Set, Store::Add, Store::Subtract].map(|store| {
                    let to = Memory::new(index, &ordinary(count, 9));
                    decode_nonzero(isa, written.as_view(), store, to.view()).unwrap();
                    assert!(to.is_intact_around(), "{isa} {count}");
                    to.bytes()
                });
                assert!(stores[0] == content, "{isa}: blocks of {count} elements");
                assert!(coded.is_intact_around(), "{isa} {count}");
                (coded.bytes()[..bytes].to_vec(), stores)
            };
            let expected = run(Isa::Scalar);
            for isa in vector_isas() {
                let result = run(isa);
                assert!(result.0 == expected.0, "{isa}: bytes of {count} elements");
                assert!(result.1 == expected.1, "{isa}: values of {count} elements");
            }
        }
    }
}

/// More than [`crate::STREAM_FROM`] of codes, and of values.
#[test]
fn what_is_streamed_is_what_is_not() {
    let count = crate::STREAM_FROM / 2 + 19;
    let content = ordinary(count, 3);
    let source = Memory::new(0, &content);
    for (code, offsets) in [(Code::Bf16, [0, 16, 4]), (Code::Rotated { bits: 4, block: 1024 }, [0, 32, 4])] {
        let run = |offset| {
            let coded = Memory::new(offset, &vec![0; code.bytes(count).unwrap()]);
            let to = Memory::new(offset, &vec![0; 4 * count]);
            encode(Isa::detect(), code, 5, source.view().as_view(), coded.view()).unwrap();
            decode(Isa::detect(), code, 5, coded.view().as_view(), Store::Set, to.view()).unwrap();
            assert!(coded.is_intact_around() && to.is_intact_around());
            (coded.bytes(), to.bytes())
        };
        let [streamed, partly, not] = offsets.map(run);
        assert!(streamed == not && partly == not, "{code:?}");
    }
}

#[test]
fn a_code_without_such_blocks_is_refused() {
    let blocks = |block| Code::Blocks { grid: Grid::Int8, block, rounding: Rounding::Nearest };
    for code in [
        blocks(16),
        blocks(96),
        blocks(512),
        blocks(0),
        Code::Rotated { bits: 0, block: 256 },
        Code::Rotated { bits: 5, block: 256 },
        Code::Rotated { bits: 4, block: 8192 },
        Code::Shared { bits: 4, block: 256, ranks: 0 },
        Code::Shared { bits: 4, block: 256, ranks: 4097 },
    ] {
        assert_eq!(code.bytes(100), None, "{code:?}");
    }
    assert_eq!(Code::Bf16.bytes(usize::MAX), None);
    assert_eq!(blocks(256).bytes(257), Some(4 + 256 + 4 + 16));
    assert_eq!(Code::Rotated { bits: 3, block: 64 }.bytes(64 + 17), Some(4 + 24 + 4 + 12));
    for (ranks, row) in [(1, 8), (4, 12), (5, 16), (17, 16), (18, 32)] {
        assert_eq!(Code::Shared { bits: 4, block: 64, ranks }.bytes(64), Some(4 + 4 * row), "{ranks} ranks");
    }
}
