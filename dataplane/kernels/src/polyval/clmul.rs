//! POLYVAL with VPCLMULQDQ on vectors of 64 bytes. It takes four blocks by four powers of the key at once, and one
//! reduction a group.
//!
//! The reduction is Gueron's for AES-GCM-SIV (RFC 8452): a sum of products is reduced in each of the four lanes, then the lanes are added.

use crate::polyval::{BLOCK, GROUP, Powers};
use std::arch::x86_64::*;

/// Bytes of a vector.
const WIDE: usize = 64;
/// Vectors of a group.
const VECTORS: usize = GROUP * BLOCK / WIDE;

/// Whether this CPU has the instructions.
pub(crate) fn is_available() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("vpclmulqdq")
        && is_x86_feature_detected!("pclmulqdq")
}

/// The hash of two parts, each filled up with zeros to whole blocks.
///
/// # Safety
/// The CPU must have the instructions ([`is_available`]).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,vpclmulqdq,pclmulqdq")]
pub(crate) unsafe fn hash(powers: &Powers, parts: [&[u8]; 2]) -> [u8; BLOCK] {
    let mut state = _mm_setzero_si128();
    for part in parts {
        state = add(powers, state, part);
    }
    bytes_of(state)
}

/// The hash of a part and of `bytes` bytes from `from`, which go to `to` on the way. Each is loaded once, and is stored and hashed out
/// of the same register.
///
/// # Safety
/// The CPU must have the instructions ([`is_available`]). `from` must be readable and `to` writable for `bytes` bytes.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,vpclmulqdq,pclmulqdq")]
pub(crate) unsafe fn hash_copying(
    powers: &Powers,
    part: &[u8],
    from: *const u8,
    to: *mut u8,
    bytes: usize,
) -> [u8; BLOCK] {
    let whole = |at: usize| {
        let (from, to) = (from.wrapping_add(at), to.wrapping_add(at));
        // SAFETY: the caller vouches for both, and a vector's bytes lie within by `add_vectors`.
        unsafe {
            let vector = _mm512_loadu_si512(from.cast());
            _mm512_storeu_si512(to.cast(), vector);
            vector
        }
    };
    let first = |at: usize, mask: u64| {
        let (from, to) = (from.wrapping_add(at), to.wrapping_add(at));
        // SAFETY: as above; the mask has no byte that lies behind.
        unsafe {
            let vector = _mm512_maskz_loadu_epi8(mask, from.cast());
            _mm512_mask_storeu_epi8(to.cast(), mask, vector);
            vector
        }
    };
    bytes_of(add_vectors(powers, add(powers, _mm_setzero_si128(), part), bytes, whole, first))
}

fn bytes_of(state: __m128i) -> [u8; BLOCK] {
    let mut bytes = [0; BLOCK];
    // SAFETY: there is room for a vector of 16 bytes, and every CPU of this architecture stores one.
    unsafe { _mm_storeu_si128(bytes.as_mut_ptr().cast(), state) };
    bytes
}

/// Sums of products of 64 bits that are not reduced: lower by lower, the two crossed, upper by upper.
#[derive(Clone, Copy)]
struct Products {
    low: __m512i,
    middle: __m512i,
    high: __m512i,
}

impl Products {
    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    fn of(blocks: __m512i, powers: __m512i) -> Self {
        Self {
            low: _mm512_clmulepi64_epi128::<0x00>(blocks, powers),
            middle: _mm512_xor_si512(
                _mm512_clmulepi64_epi128::<0x01>(blocks, powers),
                _mm512_clmulepi64_epi128::<0x10>(blocks, powers),
            ),
            high: _mm512_clmulepi64_epi128::<0x11>(blocks, powers),
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn and(self, other: Self) -> Self {
        Self {
            low: _mm512_xor_si512(self.low, other.low),
            middle: _mm512_xor_si512(self.middle, other.middle),
            high: _mm512_xor_si512(self.high, other.high),
        }
    }

    /// Reduced, and the lanes added.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,vpclmulqdq")]
    fn reduced(self) -> __m128i {
        let zeros = _mm512_setzero_si512();
        let low = _mm512_xor_si512(self.low, _mm512_unpacklo_epi64(zeros, self.middle));
        let high = _mm512_xor_si512(self.high, _mm512_unpackhi_epi64(self.middle, zeros));
        // x^63 + x^62 + x^57, what x^-64 is without its lowest terms.
        let polynomial = _mm512_set1_epi64(0xc2_u64.cast_signed() << 56);
        let fold = |low| {
            let product = _mm512_clmulepi64_epi128::<0x00>(low, polynomial);
            _mm512_xor_si512(product, _mm512_shuffle_epi32::<0b01_00_11_10>(low))
        };
        let lanes = _mm512_xor_si512(high, fold(fold(low)));
        let halves = _mm256_xor_si256(_mm512_castsi512_si256(lanes), _mm512_extracti64x4_epi64::<1>(lanes));
        _mm_xor_si128(_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves))
    }
}

/// The vector of powers that begins with that of `blocks` blocks; zeros from the first power on.
#[inline]
#[target_feature(enable = "avx512f")]
fn powers_from(powers: &Powers, blocks: usize) -> __m512i {
    let from = powers.0.get(GROUP.wrapping_sub(blocks)..).and_then(|powers| powers.first_chunk::<4>());
    match from {
        // SAFETY: four blocks are 64 bytes.
        Some(four) => unsafe { _mm512_loadu_si512(four.as_ptr().cast()) },
        None => _mm512_setzero_si512(),
    }
}

/// The state after a part.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,vpclmulqdq,pclmulqdq")]
fn add(powers: &Powers, state: __m128i, part: &[u8]) -> __m128i {
    let from = part.as_ptr();
    // SAFETY: a vector's bytes lie within the part by `add_vectors`.
    let whole = |at: usize| unsafe { _mm512_loadu_si512(from.wrapping_add(at).cast()) };
    // SAFETY: so do those of the mask.
    let first = |at: usize, mask| unsafe { _mm512_maskz_loadu_epi8(mask, from.wrapping_add(at).cast()) };
    add_vectors(powers, state, part.len(), whole, first)
}

/// The state after so many bytes. `whole` gives the vector at a byte, `first` one that has the bytes of a mask alone, and zeros. Each is
/// called once for each vector.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,vpclmulqdq,pclmulqdq")]
fn add_vectors(
    powers: &Powers,
    mut state: __m128i,
    bytes: usize,
    whole: impl Fn(usize) -> __m512i,
    first: impl Fn(usize, u64) -> __m512i,
) -> __m128i {
    let groups = bytes / (GROUP * BLOCK);
    for group in 0..groups {
        let at = group * GROUP * BLOCK;
        state = add_group(powers, state, |vector| whole(at + vector * WIDE));
    }
    let at = groups * GROUP * BLOCK;
    if at < bytes {
        state = add_remainder(powers, state, bytes - at, |vector, mask| first(at + vector * WIDE, mask));
    }
    state
}

/// The state goes into the first block alone: all other products are there before it is.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,vpclmulqdq,pclmulqdq")]
fn add_group(powers: &Powers, state: __m128i, blocks: impl Fn(usize) -> __m512i) -> __m128i {
    let product = |at: usize| Products::of(blocks(at), powers_from(powers, GROUP - 4 * at));
    let others = (2..VECTORS).fold(product(1), |sum, at| sum.and(product(at)));
    let first = _mm512_xor_si512(blocks(0), _mm512_zextsi128_si512(state));
    others.and(Products::of(first, powers_from(powers, GROUP))).reduced()
}

/// Less than a group and no less than a byte, the last block filled up with zeros.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,vpclmulqdq,pclmulqdq")]
fn add_remainder(
    powers: &Powers,
    state: __m128i,
    bytes: usize,
    first: impl Fn(usize, u64) -> __m512i,
) -> __m128i {
    let blocks = bytes.div_ceil(BLOCK);
    let mut sum: Option<Products> = None;
    for at in (0..bytes.div_ceil(WIDE)).rev() {
        let mask = u64::MAX >> WIDE.saturating_sub(bytes - at * WIDE).min(63);
        let vector = first(at, mask);
        let own = if at == 0 { _mm512_xor_si512(vector, _mm512_zextsi128_si512(state)) } else { vector };
        let product = Products::of(own, powers_from(powers, blocks - 4 * at));
        sum = Some(sum.map_or(product, |sum| sum.and(product)));
    }
    sum.map_or(state, |sum| sum.reduced())
}
