//! The blocks that are not zeros, with bits that tell which they are. All numbers are little-endian.
//!
//! For each 64 blocks of 256 elements 64 bits tell which have any bit set, then these stand as they are. Nothing is lost (the blocks of
//! OmniReduce, SIGCOMM 2021).

use super::ROW;
use super::Store;
use super::memory::{Source, Target};
use super::noise::Stream;
use super::rows::RowTarget;
use crate::KernelError;
use crate::simd::Simd;
use std::ops::RangeInclusive;

/// Blocks of a group: bits of a number.
const GROUP: usize = 64;
/// Rows of a block.
const BLOCK: usize = 16;
/// Bytes of a group's bits.
const BITS: usize = 8;

/// The fewest bytes that `elements` elements take, those of zeros, and the most; `None` where they fit no number.
pub fn nonzero_bytes(elements: usize) -> Option<RangeInclusive<usize>> {
    let least = elements.div_ceil(BLOCK * GROUP * ROW).checked_mul(BITS)?;
    Some(least..=least.checked_add(elements.checked_mul(4)?)?)
}

/// Of `samples` blocks of 256 elements that are drawn at random, so many are zeros; 0 of no whole block. Cost: 1 KiB is read of a block
/// that is zeros, of another 8 bytes as a rule.
pub(super) fn zeros(source: Source<'_>, elements: usize, seed: u64, samples: u32) -> u32 {
    let blocks = elements / (BLOCK * ROW);
    let mut stream = Stream::new(seed, blocks);
    let zero = |block: usize| {
        let first = 4 * block * BLOCK * ROW;
        (0..BLOCK * ROW / 2).all(|pair| u64::from_le_bytes(source.get(first + 8 * pair)) == 0)
    };
    let drawn = (0..if blocks == 0 { 0 } else { samples }).map(|_| (stream.next() % blocks as u64) as usize);
    drawn.filter(|block| zero(*block)).count() as u32
}

/// Cost: reads 4 bytes an element, and writes those of blocks that are not zero.
#[inline(always)]
pub(super) fn encode<S: Simd>(simd: S, source: Source<'_>, to: Target<'_>, elements: usize) -> usize {
    let mut at = 0;
    for group in (0..elements).step_by(GROUP * BLOCK * ROW) {
        let (head, mut bits) = (at, 0_u64);
        at += BITS;
        for (index, first) in (group..elements).step_by(BLOCK * ROW).take(GROUP).enumerate() {
            let mut any = simd.splat_int(0);
            for row in 0..BLOCK {
                any = simd.or(any, simd.bits(source.row(simd, first + ROW * row)));
            }
            if simd.greatest(any) != 0 {
                bits |= 1 << index;
                let end = (first + BLOCK * ROW).min(elements);
                to.copy(at, source, 4 * first, 4 * (end - first));
                at += 4 * (end - first);
            }
        }
        to.put(head, bits.to_le_bytes());
    }
    at
}

/// Refuses bytes that no encoder wrote. Their bits state other bytes than there are, or elements that are not
/// there.
pub(super) fn check(from: Source<'_>, bytes: usize, elements: usize) -> Result<(), KernelError> {
    let mut at = 0;
    for group in (0..elements).step_by(GROUP * BLOCK * ROW) {
        let bits = u64::from_le_bytes(from.get(at));
        let blocks = (elements - group).div_ceil(BLOCK * ROW);
        if at + BITS > bytes || (blocks < GROUP && bits >> blocks != 0) {
            return Err(KernelError::Content);
        }
        // All are whole but the tensor's last.
        let whole = bits.count_ones() as usize * 4 * BLOCK * ROW;
        let last = blocks <= GROUP && bits >> (blocks - 1) == 1;
        let missing = if last { 4 * (blocks * BLOCK * ROW - (elements - group)) } else { 0 };
        at += BITS + whole - missing;
    }
    if at == bytes { Ok(()) } else { Err(KernelError::Content) }
}

/// Cost: writes 4 bytes an element where it sets, and touches those that are there where it adds. Bytes that [`check`] did not see
/// give some values, whatever they are. Returns the bytes that the elements have.
#[inline(always)]
pub(super) fn decode<S: Simd>(simd: S, from: Source<'_>, place: RowTarget<'_>) -> usize {
    let sign = simd.splat(place.sign());
    let mut at = 0;
    for group in (0..place.elements).step_by(GROUP * BLOCK * ROW) {
        let bits = u64::from_le_bytes(from.get(at));
        at += BITS;
        for (index, first) in (group..place.elements).step_by(BLOCK * ROW).take(GROUP).enumerate() {
            let end = (first + BLOCK * ROW).min(place.elements);
            if bits >> index & 1 == 1 {
                for element in (first..end).step_by(ROW) {
                    let row = from.row(simd, at / 4 + element - first);
                    let row = if place.store == Store::Set { row } else { simd.mul(row, sign) };
                    place.put(simd, element, row);
                }
                at += 4 * (end - first);
            } else if place.store != Store::Subtract {
                // Added, too: a sum of -0 and 0 is 0.
                for element in (first..end).step_by(ROW) {
                    place.put(simd, element, simd.splat(0.0));
                }
            }
        }
    }
    at
}
