//! Memory for tests: at a chosen misalignment, between guards, filled with ordinary and special values.

use half::{bf16, f16};
use harmonaize_abi::{Dtype, F8E4M3, F8E5M2, ViewMut};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::alloc::{Layout, alloc, dealloc};

const GUARD: usize = 128;
const GUARD_BYTE: u8 = 0x5c;

/// Bytes that views point to, with a guard on both sides; never behind a reference.
pub(super) struct Memory {
    base: *mut u8,
    layout: Layout,
    offset: usize,
    bytes: usize,
}

impl Memory {
    /// Holds `content`, `offset` bytes past a multiple of 64.
    pub(super) fn new(offset: usize, content: &[u8]) -> Self {
        let layout = Layout::from_size_align(2 * GUARD + offset + content.len(), 64).unwrap();
        // SAFETY: the layout is not empty, and holds guard, offset, content and guard.
        unsafe {
            let base = alloc(layout);
            assert!(!base.is_null());
            base.write_bytes(GUARD_BYTE, layout.size());
            base.add(GUARD + offset).copy_from_nonoverlapping(content.as_ptr(), content.len());
            Self { base, layout, offset: GUARD + offset, bytes: content.len() }
        }
    }

    pub(super) fn view(&self) -> ViewMut<'_> {
        // SAFETY: allocated while `self` lives, and no reference to it exists.
        unsafe { ViewMut::new(self.base.add(self.offset), self.bytes) }
    }

    fn copied(&self, from: usize, bytes: usize) -> Vec<u8> {
        let mut copied = vec![0; bytes];
        // SAFETY: callers stay within the allocation.
        unsafe { self.base.add(from).copy_to_nonoverlapping(copied.as_mut_ptr(), bytes) };
        copied
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        self.copied(self.offset, self.bytes)
    }

    pub(super) fn is_intact_around(&self) -> bool {
        let end = self.offset + self.bytes;
        let around = [self.copied(0, self.offset), self.copied(end, self.layout.size() - end)];
        around.iter().flatten().all(|byte| *byte == GUARD_BYTE)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.base, self.layout) }
    }
}

/// Little-endian elements: a third special values, a third any bits, a third near 1 (so that sums stay ordinary).
pub(super) fn elements(dtype: Dtype, count: usize, seed: u64) -> Vec<u8> {
    // Of complex numbers, their parts.
    let (dtype, count) = match dtype {
        Dtype::Complex64 => (Dtype::F32, 2 * count),
        Dtype::Complex128 => (Dtype::F64, 2 * count),
        dtype => (dtype, count),
    };
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut bytes = Vec::with_capacity(count * dtype.size());
    let special = special(dtype);
    for _ in 0..count {
        let bits = match random.random_range(0..3) {
            0 => special[random.random_range(0..special.len())],
            1 => random.random::<u64>(),
            _ => ordinary(dtype, random.random_range(-4.0..4.0)),
        };
        bytes.extend_from_slice(&bits.to_le_bytes()[..dtype.size()]);
    }
    bytes
}

fn ordinary(dtype: Dtype, value: f64) -> u64 {
    match dtype {
        Dtype::F16 => f16::from_f64(value).to_bits().into(),
        Dtype::Bf16 => bf16::from_f64(value).to_bits().into(),
        Dtype::F32 => (value as f32).to_bits().into(),
        Dtype::F64 => value.to_bits(),
        Dtype::F8E4M3 => F8E4M3::from_f32(value as f32).to_bits().into(),
        Dtype::F8E5M2 => F8E5M2::from_f32(value as f32).to_bits().into(),
        _ => (value * 16.0) as i64 as u64,
    }
}

/// Bits of numbers with which kernels may go wrong. Of floats: zeros, ones, infinities, quiet and signalling NaN of
/// either sign with payloads, subnormals, the least normal, the greatest finite, and what lies next to ties in rounding.
/// Of integers: the limits.
fn special(dtype: Dtype) -> Vec<u64> {
    let (width, mantissa) = match dtype {
        Dtype::F16 => (16, 10),
        Dtype::Bf16 => (16, 7),
        Dtype::F32 => (32, 23),
        Dtype::F64 => (64, 52),
        Dtype::F8E4M3 | Dtype::F8E5M2 => return (0..=255).collect(),
        _ => {
            let top = 1_u64 << (dtype.size() * 8 - 1);
            return vec![0, 1, 2, top - 1, top, top + 1, u64::MAX, u64::MAX - 1, 3, 10];
        }
    };
    let one = 1_u64 << mantissa;
    let infinity = ((1_u64 << (width - 1)) - 1) / one * one;
    let unit = infinity / one / 2 * one;
    let positive = [
        0,
        1,
        one - 1,
        one / 2,
        one,
        one + 1,
        unit,
        unit + 1,
        unit - 1,
        infinity - 1,
        infinity,
        infinity + 1,
        infinity + one / 2,
        infinity + one / 2 + 5,
        infinity + one - 1,
        unit + one * 3 / 2,
    ];
    positive.iter().flat_map(|bits| [*bits, bits | 1 << (width - 1)]).collect()
}
