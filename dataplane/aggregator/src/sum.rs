//! How the parts of a chunk are added: tensors by their element type, shared codes as they are.

use harmonaize_abi::{Dtype, ReduceOp, View, ViewMut};
use harmonaize_kernels::codes::{Code, add_shared};
use harmonaize_kernels::{Isa, MAX_SOURCES, copy, reduce};

/// What a communicator's payloads are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// Elements of a tensor. `F16` and `Bf16` are refused, for each addition would round; so is `Average`, which workers divide.
    Tensor {
        /// Their type.
        dtype: Dtype,
        /// What is done with them.
        op: ReduceOp,
    },
    /// [`Code::Shared`] of f32 elements: parts of `bits` bits an element, sums of 8 or 16. Whole blocks a chunk, but for the last.
    Shared {
        /// Bits of one worker's element, 1 to 4.
        bits: u8,
        /// Elements of a block.
        block: u16,
        /// Workers whose codes are added.
        ranks: u16,
    },
}

impl Form {
    /// Whether there are sums of this form.
    pub fn is_possible(self) -> bool {
        match self {
            Self::Tensor { dtype, op } => {
                !matches!(dtype, Dtype::F16 | Dtype::Bf16) && op != ReduceOp::Average
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

    /// Whether sums may be added again, as aggregators of aggregators do.
    pub const fn adds_sums(self) -> bool {
        matches!(self, Self::Tensor { .. })
    }

    /// Whether so many elements make a chunk that another follows.
    pub(crate) fn are_whole(self, elements: usize) -> bool {
        match self {
            Self::Tensor { .. } => true,
            Self::Shared { block, .. } => elements.is_multiple_of(usize::from(block)),
        }
    }

    fn coded(self, ranks: usize, elements: usize) -> Option<usize> {
        let Self::Shared { bits, block, .. } = self else { return None };
        Code::Shared { bits: bits.into(), block: block.into(), ranks }.bytes(elements)
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
        let to = ViewMut::from(sum);
        let done = match self {
            Self::Tensor { .. } if begin => copy(View::from(part), &[to]),
            Self::Tensor { dtype, op } => reduce(op, dtype, &[to.as_view(), View::from(part)], &[to], None),
            Self::Shared { bits, block, ranks } => {
                let (bits, block, ranks) = (bits.into(), block.into(), ranks.into());
                add_shared(Isa::detect(), bits, block, ranks, elements, View::from(part), begin, to)
            }
        };
        done.is_ok()
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
