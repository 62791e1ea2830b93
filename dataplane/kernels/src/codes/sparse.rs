//! Sparse codes: the elements that matter with their places, or the blocks that are not zero.

use super::memory::{Source, Target};
use super::noise::Stream;
use super::rows::Place;
use super::totals::Totals;
use super::{INFINITE, NAN, ROW, Squares, Store};
use crate::KernelError;
use crate::simd::{LANES, Simd};

/// A form whose bytes depend on what the elements are. All numbers are little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sparse {
    /// The elements of greatest magnitude, about one of `2^power` (0 to 12): those above a threshold, which is estimated from a
    /// sample of rows, and at most twice as many, and 16. For each 1024 elements: 64 bits that tell which of their rows of 16 have
    /// such elements, for each of these rows 16 bits that tell which, then all their values, in f32 or bfloat16. A group with a
    /// NaN or an infinity is NaN everywhere: its 64 bits are 1 and its only row's 16 are 0. Once the room is used up, the rest is
    /// left out.
    Largest {
        /// The power of two.
        power: u32,
        /// Whether values are bfloat16.
        halves: bool,
    },
    /// The blocks of 256 elements that have any bit: for each 64 blocks 64 bits that tell which they are, then these as they are.
    /// Nothing is lost (the blocks of OmniReduce, SIGCOMM 2021).
    Blocks,
}

/// Rows of a group, and blocks of one: bits of a number.
const GROUP: usize = 64;
/// Rows of a block.
const BLOCK: usize = 16;
/// Bytes of a group's bits.
const BITS: usize = 8;
/// Bytes of a row's.
const MASK: usize = 2;
/// Rows that the threshold is estimated from, at most.
const SAMPLE: usize = 2048;
/// A bin of magnitudes has those whose bits above these are the same.
const BIN: u32 = 20;
/// A group's squares are good in f32 while their sum lies in between.
const GOOD: std::ops::RangeInclusive<f32> = 1e-24..=1e34;

impl Sparse {
    /// The most bytes that `elements` elements take; `None` if there is no such power, or the product overflows.
    pub fn most_bytes(self, elements: usize) -> Option<usize> {
        match self {
            Self::Largest { power, halves } => {
                let rooms = (power <= 12).then(|| room(elements, power))?;
                let values = rooms.checked_mul(MASK + if halves { 2 } else { 4 })?;
                elements.div_ceil(GROUP * ROW).checked_mul(BITS + MASK)?.checked_add(values)
            }
            Self::Blocks => self.least_bytes(elements)?.checked_add(elements.checked_mul(4)?),
        }
    }

    /// The fewest: those of zeros.
    pub fn least_bytes(self, elements: usize) -> Option<usize> {
        let group = if self == Self::Blocks { BLOCK * GROUP * ROW } else { GROUP * ROW };
        elements.div_ceil(group).checked_mul(BITS)
    }
}

/// The most elements that are kept.
const fn room(elements: usize, power: u32) -> usize {
    2 * (elements >> power) + ROW
}

/// Of `samples` blocks of [`Sparse::Blocks`] that are drawn at random, so many are zeros; 0 of no whole block. Cost: 1 KiB is read of a block
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

/// What encodes.
pub(super) struct Pass<'a> {
    pub(super) seed: u64,
    pub(super) source: Source<'a>,
    pub(super) to: Target<'a>,
    pub(super) elements: usize,
}

impl Pass<'_> {
    /// The bytes that were written, and what was lost.
    #[inline(always)]
    pub(super) fn encode<S: Simd>(&self, simd: S, form: Sparse) -> (usize, Squares) {
        match form {
            Sparse::Largest { power, halves: false } => self.largest::<S, false>(simd, power),
            Sparse::Largest { power, halves: true } => self.largest::<S, true>(simd, power),
            Sparse::Blocks => (self.blocks(simd), Squares::default()),
        }
    }

    /// Cost: reads 4 bytes an element once, and a sample before; some 15 instructions a row.
    #[inline(always)]
    fn largest<S: Simd, const HALVES: bool>(&self, simd: S, power: u32) -> (usize, Squares) {
        let threshold = self.threshold(simd, power);
        let above = simd.splat_word(threshold);
        let mut all = Totals::new(simd);
        let (mut at, mut room) = (0, room(self.elements, power));
        // What may lie behind a row's last value is written over by the next row's.
        let mut values = [0.0_f32; GROUP * ROW + ROW];
        let mut masks = [0_u16; GROUP + 1];
        for first in (0..self.elements).step_by(GROUP * ROW) {
            let rows = GROUP.min((self.elements - first).div_ceil(ROW));
            let (mut bits, mut kept, mut filled) = (0_u64, 0, 0);
            let (mut error, mut signal) = (simd.splat(0.0), simd.splat(0.0));
            let mut greatest = simd.splat_word(0);
            for index in 0..rows {
                let row = self.source.row(simd, first + ROW * index);
                let magnitude = simd.and(simd.bits(row), simd.splat_word(0x7fff_ffff));
                greatest = simd.max(greatest, magnitude);
                let mask = simd.exceeding(magnitude, above);
                let rest = if HALVES { simd.sub(row, rounded(simd, row)) } else { simd.splat(0.0) };
                let lost = simd.where_exceeds(magnitude, above, simd.bits(rest), simd.bits(row));
                let lost = simd.of_bits(lost);
                error = simd.fused(lost, lost, error);
                signal = simd.fused(row, row, signal);
                if let Some(place) = values.get_mut(kept..kept + LANES) {
                    place.copy_from_slice(&simd.lanes(simd.compress(row, mask)));
                }
                if let Some(place) = masks.get_mut(filled) {
                    *place = mask;
                }
                kept += mask.count_ones() as usize;
                filled += usize::from(mask != 0);
                bits |= u64::from(mask != 0) << index;
            }
            let finite = simd.greatest(greatest) < INFINITE;
            if !finite {
                (bits, kept, filled) = (1, 0, 1);
                masks = [0; GROUP + 1];
            }
            if simd.greatest(greatest) == 0 {
                // Zeros lose nothing.
            } else if kept > room {
                let squares;
                (bits, kept, squares) = self.trimmed::<S, HALVES>(
                    simd,
                    (first, rows),
                    (threshold, room),
                    &mut masks,
                    &mut values,
                );
                filled = bits.count_ones() as usize;
                all.add_apart(squares);
            } else if finite && GOOD.contains(&simd.sum(signal)) {
                all.add(simd, error, signal, 1.0);
            } else {
                all.add_apart(self.careful::<S, HALVES>(simd, first, rows, threshold));
            }
            room -= kept;
            self.to.put(at, bits.to_le_bytes());
            at += BITS;
            for mask in masks.iter().take(filled) {
                self.to.put(at, mask.to_le_bytes());
                at += MASK;
            }
            at = self.values::<S, HALVES>(simd, at, values.get(..kept).unwrap_or_default());
        }
        (at, all.squares(simd))
    }

    /// Writes values, and tells where they end.
    #[inline(always)]
    fn values<S: Simd, const HALVES: bool>(&self, simd: S, mut at: usize, values: &[f32]) -> usize {
        for chunk in values.chunks(LANES) {
            let mut row = [0.0; LANES];
            row.iter_mut().zip(chunk).for_each(|(to, from)| *to = *from);
            let bits = simd.bits(rounded(simd, simd.floats(row)));
            let halves = simd.narrow_halves(simd.shr(bits, 16));
            if HALVES {
                at += self.to.put_some(at, halves, 2 * chunk.len());
            } else {
                at += self.to.put_some(at, row.map(f32::to_le_bytes), 4 * chunk.len());
            }
        }
        at
    }

    /// A group of which more is above the threshold than there is room for: the first of that. The group's bits, how many are kept, and
    /// what was lost.
    #[cold]
    #[inline(never)]
    fn trimmed<S: Simd, const HALVES: bool>(
        &self,
        simd: S,
        (first, rows): (usize, usize),
        (threshold, room): (u32, usize),
        masks: &mut [u16],
        values: &mut [f32],
    ) -> (u64, usize, Squares) {
        let (mut bits, mut kept, mut filled) = (0_u64, 0, 0);
        let mut all = Squares::default();
        for index in 0..rows {
            let row = self.source.row(simd, first + ROW * index);
            let lanes = simd.lanes(row).into_iter().zip(simd.lanes(rounded(simd, row)));
            let mut mask = 0_u16;
            for (lane, (value, half)) in lanes.enumerate() {
                let mut back = 0.0;
                if value.abs().to_bits() > threshold && kept < room {
                    if let Some(place) = values.get_mut(kept) {
                        *place = value;
                    }
                    back = f64::from(if HALVES { half } else { value });
                    mask |= 1 << lane;
                    kept += 1;
                }
                let (value, lost) = (f64::from(value), f64::from(value) - back);
                all = all.and(Squares { error: lost * lost, signal: value * value });
            }
            if let Some(place) = masks.get_mut(filled).filter(|_| mask != 0) {
                *place = mask;
                filled += 1;
                bits |= 1 << index;
            }
        }
        (bits, kept, all.told())
    }

    /// A group's squares where f32 does not hold them.
    #[cold]
    #[inline(never)]
    fn careful<S: Simd, const HALVES: bool>(
        &self,
        simd: S,
        first: usize,
        rows: usize,
        threshold: u32,
    ) -> Squares {
        let mut all = Squares::default();
        for index in 0..rows {
            let row = self.source.row(simd, first + ROW * index);
            for (value, back) in simd.lanes(row).into_iter().zip(simd.lanes(rounded(simd, row))) {
                let back = match value.abs().to_bits() > threshold {
                    true if HALVES => f64::from(back),
                    true => f64::from(value),
                    false => 0.0,
                };
                let (value, lost) = (f64::from(value), f64::from(value) - back);
                all = all.and(Squares { error: lost * lost, signal: value * value });
            }
        }
        all.told()
    }

    /// The magnitude, as bits, that about one of `2^power` elements is above: from a histogram of rows that are drawn at random. Some
    /// element of these rows is above it, unless they are all zeros.
    fn threshold<S: Simd>(&self, simd: S, power: u32) -> u32 {
        let mut bins = [0_u32; 1 << (32 - BIN - 1)];
        let rows = self.elements.div_ceil(ROW);
        let step = rows.div_ceil(SAMPLE).max(1);
        let mut stream = Stream::new(self.seed, rows);
        let (mut drawn, mut greatest) = (0, 0);
        for first in (0..rows).step_by(step) {
            let row = first + if step == 1 { 0 } else { (stream.next() % step as u64) as usize };
            for value in simd.lanes(self.source.row(simd, ROW * row.min(rows - 1))) {
                let magnitude = value.abs().to_bits();
                if let Some(bin) = bins.get_mut((magnitude >> BIN) as usize) {
                    *bin += 1;
                }
                greatest = if magnitude < INFINITE { magnitude.max(greatest) } else { greatest };
            }
            drawn += ROW;
        }
        let wanted = (drawn >> power).max(1) as u32;
        let mut above = 0;
        for (bin, count) in bins.iter().enumerate().take((INFINITE >> BIN) as usize).rev() {
            if above + count >= wanted {
                // As if they were spread evenly within the bin.
                let part = (u64::from(wanted - above) << BIN) / u64::from(*count).max(1);
                let end = (bin as u64 + 1) << BIN;
                let spread = (end - part).saturating_sub(1) as u32;
                return spread.min(greatest.saturating_sub(1));
            }
            above += count;
        }
        0
    }

    /// Cost: reads 4 bytes an element, and writes those of blocks that are not zero.
    #[inline(always)]
    fn blocks<S: Simd>(&self, simd: S) -> usize {
        let mut at = 0;
        for group in (0..self.elements).step_by(GROUP * BLOCK * ROW) {
            let (head, mut bits) = (at, 0_u64);
            at += BITS;
            for (index, first) in (group..self.elements).step_by(BLOCK * ROW).take(GROUP).enumerate() {
                let mut any = simd.splat_word(0);
                for row in 0..BLOCK {
                    any = simd.or(any, simd.bits(self.source.row(simd, first + ROW * row)));
                }
                if simd.greatest(any) != 0 {
                    bits |= 1 << index;
                    let end = (first + BLOCK * ROW).min(self.elements);
                    self.to.copy(at, self.source, 4 * first, 4 * (end - first));
                    at += 4 * (end - first);
                }
            }
            self.to.put(head, bits.to_le_bytes());
        }
        at
    }
}

/// To bfloat16 and back; NaN aside.
#[inline(always)]
fn rounded<S: Simd>(simd: S, row: S::Floats) -> S::Floats {
    let bits = simd.bits(row);
    let odd = simd.and(simd.shr(bits, 16), simd.splat_word(1));
    let sum = simd.plus(simd.plus(bits, odd), simd.splat_word(0x7fff));
    simd.of_bits(simd.and(sum, simd.splat_word(0xffff_0000)))
}

/// Refuses bytes that no encoder wrote: whose bits tell of other bytes than there are, or of elements that are not.
pub(super) fn check(
    form: Sparse,
    from: Source<'_>,
    bytes: usize,
    elements: usize,
) -> Result<(), KernelError> {
    let fine = |bits: u64, parts: usize| parts >= GROUP || bits >> parts == 0;
    let mut at = 0;
    match form {
        Sparse::Blocks => {
            for group in (0..elements).step_by(GROUP * BLOCK * ROW) {
                let bits = u64::from_le_bytes(from.get(at));
                let blocks = (elements - group).div_ceil(BLOCK * ROW);
                if at + BITS > bytes || !fine(bits, blocks) {
                    return Err(KernelError::Content);
                }
                // All are whole but the tensor's last.
                let whole = bits.count_ones() as usize * 4 * BLOCK * ROW;
                let last = blocks <= GROUP && bits >> (blocks - 1) == 1;
                let missing = if last { 4 * (blocks * BLOCK * ROW - (elements - group)) } else { 0 };
                at += BITS + whole - missing;
            }
        }
        Sparse::Largest { halves, .. } => {
            for first in (0..elements).step_by(GROUP * ROW) {
                let bits = u64::from_le_bytes(from.get(at));
                if at + BITS > bytes || !fine(bits, (elements - first).div_ceil(ROW)) {
                    return Err(KernelError::Content);
                }
                let masks = at + BITS;
                let rows = bits.count_ones() as usize;
                let kept = (0..rows).map(|row| u16::from_le_bytes(from.get(masks + MASK * row)).count_ones());
                at = masks + MASK * rows + kept.sum::<u32>() as usize * if halves { 2 } else { 4 };
            }
        }
    }
    if at == bytes { Ok(()) } else { Err(KernelError::Content) }
}

/// Cost: writes 4 bytes an element where it sets, and touches those that are there where it adds. Bytes that [`check`] did not see
/// give some values, whatever they are.
#[inline(always)]
pub(super) fn decode<S: Simd>(simd: S, form: Sparse, from: Source<'_>, place: Place<'_>) {
    match form {
        Sparse::Largest { halves: false, .. } => largest::<S, false>(simd, from, place),
        Sparse::Largest { halves: true, .. } => largest::<S, true>(simd, from, place),
        Sparse::Blocks => blocks(simd, from, place),
    }
}

#[inline(always)]
fn largest<S: Simd, const HALVES: bool>(simd: S, from: Source<'_>, place: Place<'_>) {
    let mut at = 0;
    for first in (0..place.elements).step_by(GROUP * ROW) {
        let bits = u64::from_le_bytes(from.get(at));
        let mut mask_at = at + BITS;
        at = mask_at + MASK * bits.count_ones() as usize;
        if bits == 1 && from.get(mask_at) == [0; MASK] {
            place.nan(first, GROUP * ROW);
            continue;
        }
        for (index, element) in (first..place.elements).step_by(ROW).take(GROUP).enumerate() {
            let mut row = [0.0; LANES];
            if bits >> index & 1 == 1 {
                let mut mask = u16::from_le_bytes(from.get(mask_at));
                mask_at += MASK;
                while mask != 0 {
                    let value = if HALVES {
                        let [low, high] = from.get(at);
                        f32::from_le_bytes([0, 0, low, high])
                    } else {
                        f32::from_le_bytes(from.get(at))
                    };
                    at += if HALVES { 2 } else { 4 };
                    if let Some(lane) = row.get_mut(mask.trailing_zeros() as usize) {
                        *lane = place.sign() * if value.is_nan() { f32::from_bits(NAN) } else { value };
                    }
                    mask &= mask - 1;
                }
            } else if place.store != Store::Set {
                continue;
            }
            place.put(simd, element, simd.floats(row));
        }
    }
}

#[inline(always)]
fn blocks<S: Simd>(simd: S, from: Source<'_>, place: Place<'_>) {
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
}
