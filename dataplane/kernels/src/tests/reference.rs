//! The reference's results, written out.

use super::memory::Memory;
use crate::{Isa, PassOptions, copy, reduce_with, sum_scaled_with};
use half::{bf16, f16};
use harmonaize_abi::{Dtype, F8E4M3, F8E5M2, ReduceOp};

/// Reduces sources of one element each, on every instruction set, and returns what all agree on.
fn one<const N: usize>(op: ReduceOp, dtype: Dtype, sources: &[[u8; N]], divide: Option<u32>) -> [u8; N] {
    let memories: Vec<_> = sources.iter().map(|bytes| Memory::new(0, bytes)).collect();
    let views: Vec<_> = memories.iter().map(|memory| memory.view().as_view()).collect();
    let run = |isa| {
        let to = Memory::new(0, &[0; N]);
        reduce_with(PassOptions::by(isa), op, dtype, &views, &[to.view()], divide).unwrap();
        <[u8; N]>::try_from(to.bytes()).unwrap()
    };
    let result = run(Isa::Scalar);
    for isa in Isa::ALL.iter().copied().filter(|isa| isa.is_available()) {
        assert_eq!(run(isa), result, "{isa}: {op} of {dtype} {sources:?}");
    }
    result
}

macro_rules! reduces {
    ($op:ident $dtype:ident [$($source:expr),*] $(/ $ranks:literal)? => $expected:expr) => {{
        let sources = [$(($source).to_le_bytes()),*];
        #[allow(unused_mut, unused_assignments, reason = "not every case divides")]
        let mut divide = None;
        $(divide = Some($ranks);)?
        let result = one(ReduceOp::$op, Dtype::$dtype, &sources, divide);
        assert_eq!(result, ($expected).to_le_bytes(), stringify!($op $dtype [$($source),*] => $expected));
    }};
}

#[test]
fn integers_wrap() {
    reduces!(Sum I8 [100_i8, 100_i8] => -56_i8);
    reduces!(Sum U8 [200_u8, 100_u8, 1_u8] => 45_u8);
    reduces!(Product I8 [100_i8, 3_i8] => 44_i8);
    reduces!(Sum I16 [i16::MAX, 1_i16] => i16::MIN);
    reduces!(Product U16 [0x101_u16, 0x101_u16] => 0x201_u16);
    reduces!(Sum I32 [i32::MAX, 1_i32] => i32::MIN);
    reduces!(Product U32 [0x1_0001_u32, 0x1_0001_u32] => 0x2_0001_u32);
    reduces!(Product I64 [i64::MAX, -2_i64] => 2_i64);
    reduces!(Product U64 [0x1_2345_6789_u64, 0x9_8765_4321_u64] => 0x1_2345_6789_u64.wrapping_mul(0x9_8765_4321));
}

#[test]
fn integers_order_by_their_sign() {
    reduces!(Min I8 [-1_i8, 1_i8] => -1_i8);
    reduces!(Min U8 [255_u8, 1_u8] => 1_u8);
    reduces!(Min I16 [-1_i16, 1_i16] => -1_i16);
    reduces!(Max U16 [0x8000_u16, 1_u16] => 0x8000_u16);
    reduces!(Max I64 [-1_i64, i64::MIN] => -1_i64);
    reduces!(Max U64 [u64::MAX, 1_u64 << 63, 5_u64] => u64::MAX);
    reduces!(Min U64 [u64::MAX, 1_u64 << 63] => 1_u64 << 63);
    reduces!(Min I64 [3_i64, i64::MIN, 7_i64] => i64::MIN);
}

#[test]
fn integer_averages_truncate_the_wrapped_sum() {
    reduces!(Average I8 [100_i8, 100_i8] / 2 => -28_i8);
    reduces!(Average U8 [200_u8, 100_u8] / 3 => 14_u8);
    reduces!(Average I16 [-3_i16, -4_i16] / 2 => -3_i16);
    reduces!(Average U16 [u16::MAX, 9_u16] / 3 => 2_u16);
    reduces!(Average I32 [-3_i32, -4_i32] / 2 => -3_i32);
    reduces!(Average I32 [i32::MIN] / 1 => i32::MIN);
    reduces!(Average I64 [i64::MIN, 0_i64] / 1 => i64::MIN);
    reduces!(Average I64 [i64::MIN, -1_i64] / 2 => i64::MAX / 2);
    reduces!(Average U64 [u64::MAX] / 3 => u64::MAX / 3);
    reduces!(Average U32 [u32::MAX, 1_u32, 9_u32] / 3 => 3_u32);
    reduces!(Average I8 [i8::MIN] / 4294967295 => 0_i8);
    reduces!(Average I32 [-7_i32, 0_i32] => -7_i32);
}

#[test]
fn floats_reduce_in_the_order_of_the_sources() {
    reduces!(Sum F32 [1e8_f32, -1e8_f32, 1_f32] => 1_f32);
    reduces!(Sum F32 [1e8_f32, 1_f32, -1e8_f32] => 0_f32);
    reduces!(Product F64 [1e300_f64, 1e10_f64, 0_f64] => f64::from_bits(0x7ff8 << 48));
    reduces!(Sum F32 [f32::from_bits(1), f32::from_bits(2)] => f32::from_bits(3));
    reduces!(Product F64 [f64::MIN_POSITIVE, 0.5_f64] => f64::from_bits(1 << 51));
    reduces!(Average F32 [1_f32, 0_f32] / 3 => 1_f32 / 3.0);
    reduces!(Sum F64 [-0_f64, -0_f64] => -0_f64);
}

#[test]
fn a_nan_is_always_the_same_nan() {
    const F32: f32 = f32::from_bits(0x7fc0_0000);
    const F64: f64 = f64::from_bits(0x7ff8 << 48);
    for payload in [0xff80_0001, 0x7f80_0001, 0xffff_ffff, 0x7fc1_2345_u32] {
        let nan = f32::from_bits(payload);
        reduces!(Sum F32 [nan] => F32);
        reduces!(Sum F32 [1_f32, nan] => F32);
        reduces!(Min F32 [nan, 1_f32] => F32);
        reduces!(Min F32 [-1_f32, nan, f32::NEG_INFINITY] => F32);
        reduces!(Max F32 [nan, 1_f32, f32::INFINITY] => F32);
        reduces!(Max F32 [f32::INFINITY, nan] => F32);
        let nan = f64::from_bits(u64::from(payload | 0x7ff0_0001) << 32);
        reduces!(Sum F64 [nan] => F64);
        reduces!(Min F64 [nan, -1_f64] => F64);
        reduces!(Max F64 [1_f64, nan, 2_f64] => F64);
        reduces!(Max Bf16 [((payload >> 16) as u16) | 1, 0x3f80_u16] => 0x7fc0_u16);
        reduces!(Min F16 [((payload >> 16) as u16) | 0x7c01, 0x3c00_u16] => 0x7e00_u16);
    }
    reduces!(Sum F32 [f32::INFINITY, f32::NEG_INFINITY] => F32);
    reduces!(Product F64 [f64::INFINITY, 0_f64] => F64);
}

#[test]
fn the_negative_zero_is_the_lesser() {
    reduces!(Min F32 [0_f32, -0_f32] => -0_f32);
    reduces!(Min F32 [-0_f32, 0_f32] => -0_f32);
    reduces!(Max F32 [0_f32, -0_f32] => 0_f32);
    reduces!(Max F32 [-0_f32, 0_f32] => 0_f32);
    reduces!(Max F64 [-0_f64, 0_f64, -0_f64] => 0_f64);
    reduces!(Min F64 [0_f64, -0_f64, 0_f64] => -0_f64);
    reduces!(Min F16 [0_u16, 0x8000_u16] => 0x8000_u16);
    reduces!(Max Bf16 [0x8000_u16, 0_u16] => 0_u16);
}

fn half_bits(value: f32) -> u16 {
    f16::from_f32(value).to_bits()
}

fn brain_bits(value: f32) -> u16 {
    bf16::from_f32(value).to_bits()
}

#[test]
fn sixteen_bit_floats_round_once_at_the_end() {
    // After each step 2048 + 1 would be 2048 again in binary16, 256 + 1 be 256 in bfloat16.
    reduces!(Sum F16 [half_bits(2048.0), half_bits(1.0), half_bits(1.0)] => half_bits(2050.0));
    reduces!(Sum Bf16 [brain_bits(256.0), brain_bits(1.0), brain_bits(1.0)] => brain_bits(258.0));
    reduces!(Average F16 [half_bits(60000.0), half_bits(60000.0)] / 2 => half_bits(60000.0));
    // Ties go to even: 0x3f80 is 1.
    reduces!(Sum Bf16 [0x3f80_u16, 0x3b80_u16] => 0x3f80_u16);
    reduces!(Sum Bf16 [0x3f81_u16, 0x3b80_u16] => 0x3f82_u16);
    reduces!(Sum F16 [0x3c00_u16, 0x1000_u16] => 0x3c00_u16);
    reduces!(Sum F16 [0x3c01_u16, 0x1000_u16] => 0x3c02_u16);
    // Beyond the greatest finite value.
    reduces!(Sum F16 [0x7bff_u16, 0x7bff_u16] => 0x7c00_u16);
    reduces!(Sum Bf16 [0xff7f_u16, 0xff7f_u16] => 0xff80_u16);
    // Subnormals stay.
    reduces!(Sum F16 [1_u16, 2_u16] => 3_u16);
    reduces!(Sum Bf16 [1_u16, 2_u16] => 3_u16);
}

#[test]
fn bits_are_reduced_in_integers_of_every_width() {
    reduces!(BitAnd U8 [0b1100_u8, 0b1010_u8] => 0b1000_u8);
    reduces!(BitOr I16 [i16::MIN, 1_i16] => i16::MIN | 1);
    reduces!(BitXor U32 [0xffff_0000_u32, 0xff00_ff00_u32, 1_u32] => 0x00ff_ff01_u32);
    reduces!(BitAnd I64 [-1_i64, i64::MAX] => i64::MAX);
    reduces!(BitXor U64 [u64::MAX, u64::MAX] => 0_u64);
}

#[test]
fn bools_become_0_or_1() {
    reduces!(Sum Bool [0_u8, 7_u8] => 1_u8);
    reduces!(Sum Bool [0x80_u8] => 1_u8);
    reduces!(Max Bool [0_u8, 0_u8] => 0_u8);
    reduces!(Product Bool [2_u8, 1_u8] => 1_u8);
    reduces!(Product Bool [2_u8, 0_u8] => 0_u8);
    reduces!(Min Bool [255_u8, 3_u8, 4_u8] => 1_u8);
    // 2 and 1 have no bit in common.
    reduces!(BitAnd Bool [2_u8, 1_u8] => 1_u8);
    reduces!(BitOr Bool [2_u8, 0_u8] => 1_u8);
    reduces!(BitXor Bool [2_u8, 1_u8] => 0_u8);
    reduces!(BitXor Bool [2_u8, 1_u8, 9_u8] => 1_u8);
}

#[test]
fn eight_bit_floats_round_once_at_the_end_and_saturate() {
    let e4m3 = |value| F8E4M3::from_f32(value).to_bits();
    let e5m2 = |value| F8E5M2::from_f32(value).to_bits();
    // After each step 16 + 1 would be 16 again in E4M3, 8 + 1 be 8 in E5M2.
    reduces!(Sum F8E4M3 [e4m3(16.0), e4m3(1.0), e4m3(1.0)] => e4m3(18.0));
    reduces!(Sum F8E5M2 [e5m2(8.0), e5m2(1.0), e5m2(1.0)] => e5m2(10.0));
    // Beyond the greatest number.
    reduces!(Sum F8E4M3 [0x7e_u8, 0x7e_u8] => 0x7e_u8);
    reduces!(Product F8E4M3 [0xfe_u8, 0x7e_u8] => 0xfe_u8);
    reduces!(Sum F8E5M2 [0x7b_u8, 0x7b_u8] => 0x7b_u8);
    reduces!(Average F8E4M3 [0x7e_u8, 0x7e_u8] / 2 => 0x7e_u8);
    // Infinities, of which E4M3 has none.
    reduces!(Sum F8E5M2 [0x7c_u8, 0x7b_u8] => 0x7c_u8);
    reduces!(Max F8E5M2 [0xfc_u8, 0xfb_u8] => 0xfb_u8);
    reduces!(Sum F8E5M2 [0x7c_u8, 0xfc_u8] => 0x7e_u8);
    // The one NaN, subnormals, zeros.
    reduces!(Sum F8E4M3 [0xff_u8] => 0x7f_u8);
    reduces!(Min F8E4M3 [0x7f_u8, 0x01_u8] => 0x7f_u8);
    reduces!(Max F8E5M2 [0xfd_u8, 0x01_u8] => 0x7e_u8);
    reduces!(Sum F8E4M3 [1_u8, 2_u8] => 3_u8);
    reduces!(Sum F8E5M2 [0x81_u8, 0x81_u8] => 0x82_u8);
    reduces!(Max F8E4M3 [0x80_u8, 0_u8] => 0_u8);
    // Ties go to even: half of the least subnormal is none.
    reduces!(Average F8E4M3 [1_u8] / 2 => 0_u8);
    reduces!(Average F8E4M3 [3_u8] / 2 => 2_u8);
}

fn complex64(re: f32, im: f32) -> u64 {
    u64::from(re.to_bits()) | u64::from(im.to_bits()) << 32
}

fn complex128(re: f64, im: f64) -> u128 {
    u128::from(re.to_bits()) | u128::from(im.to_bits()) << 64
}

#[test]
fn complex_numbers_add_by_parts_and_multiply_as_such() {
    reduces!(Sum Complex64 [complex64(1.0, 2.0), complex64(3.0, -5.0)] => complex64(4.0, -3.0));
    reduces!(Average Complex64 [complex64(1.0, 2.0), complex64(3.0, 4.0)] / 2 => complex64(2.0, 3.0));
    reduces!(Product Complex64 [complex64(1.0, 2.0), complex64(3.0, -5.0)] => complex64(13.0, 1.0));
    let i = complex64(0.0, 1.0);
    reduces!(Product Complex64 [i, i, i] => complex64(-0.0, -1.0));
    reduces!(Sum Complex128 [complex128(1.0, 2.0), complex128(0.5, 1e300)] => complex128(1.5, 1e300));
    reduces!(Product Complex128 [complex128(1.0, 2.0), complex128(3.0, -5.0)] => complex128(13.0, 1.0));
    reduces!(Product Complex128 [complex128(f64::INFINITY, 0.0), complex128(1.0, 0.0)]
        => complex128(f64::INFINITY, f64::from_bits(0x7ff8 << 48)));
}

#[test]
fn factors_come_before_the_sum() {
    fn scaled<const N: usize>(dtype: Dtype, sources: &[[u8; N]], factors: &[f64]) -> [u8; N] {
        let memories: Vec<_> = sources.iter().map(|bytes| Memory::new(0, bytes)).collect();
        let views: Vec<_> = memories.iter().map(|memory| memory.view().as_view()).collect();
        let to = Memory::new(0, &[0; N]);
        sum_scaled_with(PassOptions::by(Isa::Scalar), dtype, &views, factors, &[to.view()]).unwrap();
        to.bytes().try_into().unwrap()
    }
    let f32s = [10_f32, 7_f32].map(f32::to_le_bytes);
    assert_eq!(scaled(Dtype::F32, &f32s, &[0.5, 2.0]), 19_f32.to_le_bytes());
    assert_eq!(scaled(Dtype::F64, &[3_f64.to_le_bytes()], &[1.0 / 3.0]), 1_f64.to_le_bytes());
    let halves = [f16::from_f32(60000.0), f16::from_f32(60000.0)].map(f16::to_le_bytes);
    assert_eq!(scaled(Dtype::F16, &halves, &[0.25, 0.5]), f16::from_f32(45000.0).to_le_bytes());
    let small = [[F8E4M3::from_f32(448.0).to_bits()]; 2];
    assert_eq!(scaled(Dtype::F8E4M3, &small, &[0.25, 0.25]), [F8E4M3::from_f32(224.0).to_bits()]);
    let pairs = [complex64(1.0, -2.0), complex64(4.0, 4.0)].map(u64::to_le_bytes);
    assert_eq!(scaled(Dtype::Complex64, &pairs, &[3.0, 0.25]), complex64(4.0, -5.0).to_le_bytes());
    let integers = [-5_i16, 300].map(i16::to_le_bytes);
    assert_eq!(scaled(Dtype::I16, &integers, &[3.9, -2.0]), (-615_i16).to_le_bytes());
}

/// binary16 products are exact in f32, so the result is the exact product rounded once.
#[test]
fn binary16_products_are_the_exact_product_rounded() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    let bytes: Vec<u8> = all.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    for factor in [0x3c01_u16, 0x0001, 0x03ff, 0x3555, 0xb800, 0x7bff, 0x8400] {
        let from = Memory::new(0, &bytes);
        let with = Memory::new(0, &factor.to_le_bytes().repeat(all.len()));
        let to = Memory::new(0, &bytes);
        let sources = [from.view().as_view(), with.view().as_view()];
        reduce_with(
            PassOptions::by(Isa::Scalar),
            ReduceOp::Product,
            Dtype::F16,
            &sources,
            &[to.view()],
            None,
        )
        .unwrap();
        for (bits, result) in all.iter().zip(to.bytes().chunks_exact(2)) {
            let exact = f16::from_bits(*bits).to_f64() * f16::from_bits(factor).to_f64();
            let expected = if exact.is_nan() { f16::NAN } else { f16::from_f64(exact) };
            assert_eq!(result, expected.to_le_bytes(), "{bits:#06x} * {factor:#06x}");
        }
    }
}

#[test]
fn copy_keeps_every_bit_and_leaves_the_source_itself_alone() {
    let content: Vec<u8> = (0..100_000_u32).map(|index| (index * 7 % 251) as u8).collect();
    let source = Memory::new(3, &content);
    let others = [Memory::new(0, &vec![0; content.len()]), Memory::new(9, &vec![0; content.len()])];
    copy(source.view().as_view(), &[others[0].view(), source.view(), others[1].view()]).unwrap();
    for memory in others.iter().chain([&source]) {
        assert!(memory.bytes() == content && memory.is_intact_around());
    }
}
