//! How the parts of a chunk are added: tensors by their element type, shared codes as they are.

use harmonaize_abi::{Dtype, ReduceOp, View, ViewMut};
use harmonaize_kernels::codes::{Code, add_shared};
use harmonaize_kernels::{Isa, MAX_SOURCES, copy, reduce};
use serde::{Deserialize, Serialize};

/// What a communicator's payloads are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PayloadFormat {
    /// Elements of a tensor. Floats of 8 and 16 bits are refused, for each addition would round; so are `Average`, which workers divide, and
    /// `PremulSum`, whose inputs are multiplied.
    Tensor {
        /// Their type.
        dtype: Dtype,
        /// What is done with them.
        op: ReduceOp,
    },
    /// [`Code::Shared`] of f32 elements: parts of `bits` bits an element, sums of 6, 8 or 16. After them come, as f32, the squares of
    /// what was lost and of the elements. Whole blocks a chunk, but for the last. Before them go their ranges
    /// ([`PayloadFormat::RANGES`]).
    Shared {
        /// Bits of one worker's element, 1 to 4.
        bits: u8,
        /// Elements of a block.
        block: u16,
        /// Workers whose codes are added.
        ranks: u16,
    },
}

/// Bytes of the two squares after codes.
pub(crate) const SQUARES: usize = 8;

impl PayloadFormat {
    /// What ranges of shared codes are: a norm a block, of which the greatest counts.
    pub const RANGES: Self = Self::Tensor { dtype: Dtype::F32, op: ReduceOp::Max };

    /// Whether there are sums of this form.
    pub fn is_supported(self) -> bool {
        match self {
            Self::Tensor { dtype, op } => {
                let adds = !matches!(op, ReduceOp::Average | ReduceOp::PremulSum);
                adds && op.takes(dtype) && !dtype.is_narrow()
            }
            Self::Shared { .. } => self.coded(1, 0).is_some(),
        }
    }

    /// Bytes of a part of `elements` elements.
    pub fn part_bytes(self, elements: usize) -> Option<usize> {
        match self {
            Self::Tensor { dtype, .. } => elements.checked_mul(dtype.size()),
            Self::Shared { .. } => self.coded(1, elements),
        }
    }

    /// Bytes of the sum of `elements` elements.
    pub fn sum_bytes(self, elements: usize) -> Option<usize> {
        match self {
            Self::Tensor { .. } => self.part_bytes(elements),
            Self::Shared { ranks, .. } => self.coded(usize::from(ranks), elements),
        }
    }

    /// Elements whose ranges go before codes in chunks of their own. They are as many as fit the sum of a chunk of `elements`
    /// elements; 0 where there are none.
    pub fn ranged(self, elements: usize) -> usize {
        let Self::Shared { block, .. } = self else { return 0 };
        self.sum_bytes(elements).map_or(0, |bytes| bytes / size_of::<f32>() * usize::from(block))
    }

    /// How many elements of `dtype` a chunk has. They are as many as fit the sum of a chunk of `elements` elements of
    /// this form.
    pub fn elements_of_other(self, elements: usize, dtype: Dtype) -> usize {
        self.sum_bytes(elements).map_or(0, |bytes| bytes / dtype.size())
    }

    /// Bytes of the ranges of `elements` elements.
    pub fn ranges_bytes(self, elements: usize) -> usize {
        let Self::Shared { block, .. } = self else { return 0 };
        elements.div_ceil(usize::from(block).max(1)) * size_of::<f32>()
    }

    /// Bytes that a worker sends of so many elements, about: chunks are taken for one.
    pub fn sent(self, elements: u64) -> u64 {
        let bytes = |elements| Some(self.part_bytes(elements)? + self.ranges_bytes(elements));
        usize::try_from(elements).ok().and_then(bytes).map_or(u64::MAX, |bytes| bytes as u64)
    }

    /// Whether sums may be added again, as aggregators of aggregators do.
    pub const fn adds_sums(self) -> bool {
        matches!(self, Self::Tensor { .. })
    }

    /// Whether so many elements make a chunk that another follows.
    pub fn are_whole(self, elements: usize) -> bool {
        match self {
            Self::Tensor { .. } => true,
            Self::Shared { block, .. } => elements.is_multiple_of(usize::from(block)),
        }
    }

    fn coded(self, ranks: usize, elements: usize) -> Option<usize> {
        let Self::Shared { bits, block, .. } = self else { return None };
        Code::Shared { bits: bits.into(), block: block.into(), ranks }.bytes(elements)?.checked_add(SQUARES)
    }

    /// Elements of a part of so many bytes, of which a chunk's part has `most`; `None` if no number has.
    pub(crate) fn elements(self, bytes: usize, most: usize) -> Option<usize> {
        match self {
            Self::Tensor { dtype, .. } => bytes.is_multiple_of(dtype.size()).then(|| bytes / dtype.size()),
            Self::Shared { .. } => {
                // Parts grow with their elements, in rows; the greatest number that fits is a multiple of a row.
                let (mut low, mut high) = (0, most + 1);
                while high - low > 1 {
                    let middle = low.midpoint(high);
                    if self.part_bytes(middle).is_some_and(|taken| taken <= bytes) {
                        low = middle;
                    } else {
                        high = middle;
                    }
                }
                (self.part_bytes(low) == Some(bytes)).then_some(low)
            }
        }
    }

    /// Adds a part to `sum`, or begins it. Both have the bytes of `elements` elements. Returns whether they had.
    ///
    /// Cost: of a tensor, two reads and one write of the part, all in cache.
    pub(crate) fn add(self, elements: usize, begin: bool, part: &[u8], sum: &mut [u8]) -> bool {
        match self {
            Self::Tensor { dtype, op } => add_elements(dtype, op, begin, part, sum),
            Self::Shared { bits, block, ranks } => {
                let (part, sum) = (split(part), sum.split_at_mut_checked(sum.len().saturating_sub(SQUARES)));
                let (Some((codes, squares)), Some((sum, all))) = (part, sum) else { return false };
                let (bits, block, ranks) = (bits.into(), block.into(), ranks.into());
                let (codes, to) = (View::from(codes), ViewMut::from(sum));
                add_shared(Isa::detect(), bits, block, ranks, elements, codes, begin, to).is_ok()
                    && add_elements(Dtype::F32, ReduceOp::Sum, begin, squares, all)
            }
        }
    }

    /// Adds `parts` in their order to what is in `sum`, several in one pass. Of tensors only.
    pub(crate) fn add_all<'a>(self, mut parts: impl Iterator<Item = &'a [u8]>, sum: &mut [u8]) -> bool {
        let Self::Tensor { dtype, op } = self else { return false };
        let to = ViewMut::from(sum);
        loop {
            let mut sources = [to.as_view(); MAX_SOURCES];
            let mut taken = 1;
            for (source, part) in sources.iter_mut().skip(1).zip(&mut parts) {
                *source = View::from(part);
                taken += 1;
            }
            let Some(sources) = sources.get(..taken).filter(|sources| sources.len() > 1) else { return true };
            if reduce(op, dtype, sources, &[to], None).is_err() {
                return false;
            }
        }
    }
}

fn add_elements(dtype: Dtype, op: ReduceOp, begin: bool, part: &[u8], sum: &mut [u8]) -> bool {
    let (part, to) = (View::from(part), ViewMut::from(sum));
    let done = if begin { copy(part, &[to]) } else { reduce(op, dtype, &[to.as_view(), part], &[to], None) };
    done.is_ok()
}

/// Codes and the squares after them.
pub(crate) fn split(payload: &[u8]) -> Option<(&[u8], &[u8])> {
    payload.split_at_checked(payload.len().checked_sub(SQUARES)?)
}
