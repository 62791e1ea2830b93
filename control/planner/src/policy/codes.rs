//! Codes that add, for aggregators: whether a communicator may have them, and in which shape.

use harmonaize_aggregator::PayloadFormat;
use harmonaize_codec::{Budget, Codec, Level, shared_spread};
use harmonaize_units::Rate;

/// Bits of one host's element.
const BITS: u8 = 4;
/// What codes of so many bits lose of a host's part, as vNMSE. They are rotated, so it hardly depends on the
/// tensor. The more hosts' blocks differ in their norms, the more it is.
const LOSS: f64 = 0.0225;
/// Elements of a block, the most first. The fewer, the better a chunk is filled, the more ranges there are,
/// and the more they differ between hosts, which costs accuracy.
const BLOCKS: [u16; 4] = [2048, 1024, 512, 256];
/// Of the most elements that a chunk can have, the part for which larger blocks are worth it.
const FILLED: f64 = 0.95;

/// What an aggregator's chunks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeShape {
    /// The form of parts and sums.
    pub form: PayloadFormat,
    /// Elements of a chunk.
    pub elements: u32,
    /// Bytes of its sum, which is no shorter than its parts.
    pub bytes: u32,
}

impl CodeShape {
    /// Returns the shape of codes of the largest blocks that fit a unit well. About as many of their elements fit a unit of so
    /// many bytes as of any other blocks.
    pub fn of_codes(unit: u32, workers: usize) -> Option<Self> {
        let mut shapes = BLOCKS.into_iter().filter_map(|block| {
            let form = PayloadFormat::Shared { bits: BITS, block, ranks: u16::try_from(workers).ok()? };
            let bytes = |blocks: usize| form.sum_bytes(blocks * usize::from(block));
            let (none, one) = (bytes(0)?, bytes(1)?);
            let blocks = (usize::try_from(unit).ok()?.checked_sub(none)? / (one - none)).max(1);
            let elements = u32::try_from(blocks * usize::from(block)).ok()?;
            let bytes = u32::try_from(bytes(blocks)?).ok().filter(|bytes| *bytes <= unit)?;
            Some(Self { form, elements, bytes })
        });
        let most = shapes.clone().map(|shape| shape.elements).max()?;
        let filled = |shape: &Self| f64::from(shape.elements) >= FILLED * f64::from(most);
        shapes.find(filled)
    }
}

/// Returns how much of a tensor a host's codes allow in a second, where the budget allows sums of them. `levels`: what all agents take.
pub fn codes_rate(budget: &Budget, workers: usize, levels: &[Level]) -> Option<Rate> {
    let loses = LOSS * shared_spread(BITS, workers as u32);
    let within = match budget {
        Budget::Vnmse(most) => loses <= *most,
        Budget::Codecs(_) => budget.allows(Codec::SHARED4),
        Budget::Exact | Budget::MatchBf16 => false,
    };
    if !within {
        return None;
    }
    // Ranges are found by a pass before that over the codes, and sums decoded.
    let codec = Codec::rotated(usize::from(BITS));
    let level = levels.iter().find(|level| level.codec == codec).copied();
    let Level { encode, decode, .. } = level.unwrap_or_else(|| Level::typical(codec));
    let seconds = 1.0 / encode.max(1.0) + 2.0 / decode.max(1.0);
    Some(Rate((8.0 / seconds) as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_is_filled_with_whole_blocks() {
        for (unit, workers, elements) in [(8192, 4, 5 * 2048), (8192, 5, 15 * 512), (1392, 4, 7 * 256)] {
            let shape = CodeShape::of_codes(unit, workers).unwrap();
            assert_eq!(shape.elements, elements, "{unit} bytes, {workers} workers: {shape:?}");
            assert_eq!(shape.form.sum_bytes(elements as usize), Some(shape.bytes as usize));
            assert!(shape.bytes <= unit && shape.form.part_bytes(elements as usize) <= Some(unit as usize));
        }
        assert_eq!(CodeShape::of_codes(100, 4), None, "no block fits");
    }
    #[test]
    fn codes_need_a_budget() {
        let levels = [Level::typical(Codec::rotated(4))];
        assert!(codes_rate(&Budget::Vnmse(0.5), 4, &levels) == codes_rate(&Budget::Vnmse(0.5), 4, &[]));
        for budget in [Budget::Exact, Budget::MatchBf16, Budget::Vnmse(0.001)] {
            assert_eq!(codes_rate(&budget, 4, &levels), None, "{budget}");
        }
    }
}
