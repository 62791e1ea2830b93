//! Random numbers from a seed and a place. They are the same on every CPU, and for any part of a tensor
//! alone.

use crate::simd::{LANES, Simd};

/// What a block's random choices come from. The mixing is SplitMix64's (Steele, Lea and Flood, "Fast splittable pseudorandom
/// number generators", OOPSLA 2014).
#[derive(Clone, Copy)]
pub(super) struct Stream(u64);

impl Stream {
    /// The stream of block `block`.
    #[inline(always)]
    pub(super) fn new(seed: u64, block: usize) -> Self {
        Self(mixed(seed ^ mixed(block as u64)))
    }

    /// 64 random bits.
    #[inline(always)]
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed(self.0)
    }

    /// A generator for each lane.
    #[inline(always)]
    pub(super) fn uniform<S: Simd>(&mut self, simd: S) -> Uniform<S> {
        let mut lanes = [0; LANES];
        for pair in lanes.chunks_exact_mut(2) {
            let bits = self.next();
            for (lane, half) in pair.iter_mut().zip([bits as u32, (bits >> 32) as u32]) {
                // Xorshift stays at 0.
                *lane = half | 1;
            }
        }
        Uniform(simd.ints(lanes))
    }
}

#[inline(always)]
fn mixed(bits: u64) -> u64 {
    let bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// A xorshift generator a lane (Marsaglia, "Xorshift RNGs", 2003), for the few numbers of a block.
pub(super) struct Uniform<S: Simd>(S::Ints);

impl<S: Simd> Uniform<S> {
    /// Numbers from -0.5 on to less than 0.5, in steps of 2^-23.
    #[inline(always)]
    pub(super) fn next(&mut self, simd: S) -> S::Floats {
        let mut bits = self.0;
        bits = simd.xor(bits, simd.shl(bits, 13));
        bits = simd.xor(bits, simd.shr(bits, 17));
        bits = simd.xor(bits, simd.shl(bits, 5));
        self.0 = bits;
        let one_and = simd.or(simd.shr(bits, 9), simd.splat_int(1.0_f32.to_bits()));
        simd.sub(simd.of_bits(one_and), simd.splat(1.5))
    }
}
