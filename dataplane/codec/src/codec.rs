//! The codecs, by the numbers that stand in headers.

use harmonaize_kernels::codes::{Code, Grid, Rounding, nonzero_bytes};

/// How a chunk holds its elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codec {
    /// In a form whose bytes depend on the number of elements alone.
    Fixed(Code),
    /// The blocks of 256 elements that are not zeros, as they are: nothing is lost.
    NonzeroBlocks,
}

/// A codec's number and parameters as they stand in a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fields {
    pub(crate) id: u8,
    pub(crate) bits: u8,
    /// The power of two of the block.
    pub(crate) block: u8,
    /// Bit 0: stochastic rounding.
    pub(crate) flags: u8,
}

const STOCHASTIC: u8 = 1;

impl Codec {
    /// As they are, in f32: any bits.
    pub const EXACT: Self = Self::Fixed(Code::F32);
    /// bfloat16.
    pub const BF16: Self = Self::Fixed(Code::Bf16);
    /// Blocks of 256 elements with 8-bit integers.
    pub const INT8: Self = Self::blocks(Grid::Int8, Rounding::Nearest);
    /// Blocks of 256 elements with 4-bit integers.
    pub const INT4: Self = Self::blocks(Grid::Int4, Rounding::Nearest);

    /// Every codec in the size that suits it, by the name that people read.
    pub const NAMED: &[(&str, Self)] = &[
        ("exact", Self::EXACT),
        ("bf16", Self::BF16),
        ("fp16", Self::Fixed(Code::F16)),
        ("int8", Self::INT8),
        ("int4", Self::INT4),
        ("int8 stochastic", Self::blocks(Grid::Int8, Rounding::Stochastic)),
        ("rotated 4", Self::rotated(4)),
        ("rotated 3", Self::rotated(3)),
        ("rotated 2", Self::rotated(2)),
        ("rotated 1", Self::rotated(1)),
        ("nonzero blocks", Self::NonzeroBlocks),
    ];

    /// Codes of 4 bits that aggregators add undecoded: no chunk has them, but budgets name them.
    pub const SHARED4: Self = Self::Fixed(Code::Shared { bits: 4, block: 1024, ranks: 1 });

    /// Every name: of chunks' codecs, then of those that are for aggregators alone.
    pub(crate) fn all() -> impl Iterator<Item = (&'static str, Self)> {
        Self::NAMED.iter().copied().chain([("shared 4", Self::SHARED4)])
    }

    /// The codec of that name.
    pub fn named(name: &str) -> Option<Self> {
        Self::all().find(|(known, _)| *known == name).map(|(_, codec)| codec)
    }

    /// The name that people read; "unnamed" for other sizes than the named ones.
    pub fn name(self) -> &'static str {
        Self::all().find(|(_, codec)| *codec == self).map_or("unnamed", |(name, _)| name)
    }

    /// What it is thought to lose of a tensor with heavy tails, as [`crate::Squares::relative`], until it is measured.
    pub(crate) fn typical_loss(self) -> f64 {
        match self {
            Self::Fixed(Code::F32) => 0.0,
            Self::Fixed(Code::Bf16) => 2.7e-6,
            Self::Fixed(Code::F16) => 4.2e-8,
            Self::Fixed(Code::Blocks { grid, rounding, .. }) => {
                let nearest = if grid == Grid::Int8 { 3.1e-4 } else { 7.6e-2 };
                if rounding == Rounding::Stochastic { 2.0 * nearest } else { nearest }
            }
            Self::Fixed(Code::Rotated { bits: 1, .. }) => 0.57,
            Self::Fixed(Code::Rotated { bits: 2, .. }) => 0.135,
            Self::Fixed(Code::Rotated { bits: 3, .. }) => 0.036,
            Self::Fixed(Code::Rotated { .. }) => 0.0093,
            Self::Fixed(Code::Shared { .. }) => 1.0,
            Self::NonzeroBlocks => 0.0,
        }
    }

    /// How many times as long as a copy of as many bytes a pass takes, at most. Encoders of rotated codes had 0.56 to 0.69 of memcpy's speed,
    /// those of int8 and bf16 more than it (`cargo xtask bench codec`, on Zen 4 and Zen 5).
    pub(crate) fn weight(self) -> usize {
        if matches!(self, Self::Fixed(Code::Rotated { .. })) { 2 } else { 1 }
    }

    /// The least part of [`Codec::typical_loss`] that tensors in use may lose. Blocks with a scale lose by their greatest element, of
    /// which normal tensors have a third of the square that heavy tails have; the others' loss hardly depends on the tensor.
    pub(crate) fn least_of_typical(self) -> f64 {
        if self.has_even_steps() { 0.25 } else { 1.0 }
    }

    /// Whether tensors of which one loses much lose much by the other, in the same measure.
    pub(crate) fn loses_as(self, other: Self) -> bool {
        self.has_even_steps() && other.has_even_steps()
    }

    fn has_even_steps(self) -> bool {
        matches!(self, Self::Fixed(Code::Blocks { .. }))
    }

    const fn blocks(grid: Grid, rounding: Rounding) -> Self {
        Self::Fixed(Code::Blocks { grid, block: 256, rounding })
    }

    /// Rotated blocks of 1024 elements with `bits` bits each, 1 to 4.
    pub const fn rotated(bits: usize) -> Self {
        Self::Fixed(Code::Rotated { bits, block: 1024 })
    }

    /// Whether the mean over seeds of what comes back is the elements themselves, and errors under different seeds are
    /// independent.
    pub fn is_unbiased(self) -> bool {
        match self {
            Self::Fixed(Code::Blocks { rounding, .. }) => rounding == Rounding::Stochastic,
            Self::Fixed(code) => matches!(code, Code::F32 | Code::Rotated { .. }),
            Self::NonzeroBlocks => true,
        }
    }

    /// Whether every element comes back with the bits that it had.
    pub fn is_lossless(self) -> bool {
        [Self::EXACT, Self::NonzeroBlocks].contains(&self)
    }

    /// The most bytes that a payload of `elements` elements takes. `None` if the codec has no such blocks, or the bytes do not
    /// fit a number.
    pub fn max_payload(self, elements: usize) -> Option<usize> {
        match self {
            Self::Fixed(code) => code.bytes(elements),
            Self::NonzeroBlocks => Some(*nonzero_bytes(elements)?.end()),
        }
    }

    /// Whether a payload of `elements` elements can have so many bytes.
    pub(crate) fn can_have(self, elements: usize, bytes: usize) -> bool {
        match self {
            Self::Fixed(code) => code.bytes(elements) == Some(bytes),
            Self::NonzeroBlocks => nonzero_bytes(elements).is_some_and(|allowed| allowed.contains(&bytes)),
        }
    }

    /// The most bytes that a chunk of `elements` elements takes, with its header.
    pub fn max_bytes(self, elements: usize) -> Option<usize> {
        self.max_payload(elements)?.checked_add(crate::HEADER_BYTES)
    }

    pub(crate) fn fields(self) -> Fields {
        let plain = |id, bits| Fields { id, bits, block: 0, flags: 0 };
        match self {
            Self::Fixed(Code::F32) => plain(0, 32),
            Self::Fixed(Code::Bf16) => plain(1, 16),
            Self::Fixed(Code::F16) => plain(2, 16),
            // Shared codes are no chunks: their ranges come from all ranks.
            Self::Fixed(Code::Shared { .. }) => plain(u8::MAX, 0),
            Self::NonzeroBlocks => Fields { id: 5, bits: 32, block: 8, flags: 0 },
            Self::Fixed(Code::Rotated { bits, block }) => {
                Fields { id: 4, bits: bits as u8, block: power(block), flags: 0 }
            }
            Self::Fixed(Code::Blocks { grid, block, rounding }) => {
                let flags = if rounding == Rounding::Stochastic { STOCHASTIC } else { 0 };
                Fields { id: 3, bits: grid.bits() as u8, block: power(block), flags }
            }
        }
    }

    pub(crate) fn from_fields(fields: Fields) -> Option<Self> {
        let rounding = if fields.flags & STOCHASTIC == 0 { Rounding::Nearest } else { Rounding::Stochastic };
        let size = 1 << u32::from(fields.block % 32);
        let blocks = |grid| Some(Self::Fixed(Code::Blocks { grid, block: size, rounding }));
        let codec = match (fields.id, fields.bits) {
            (0, 32) => Some(Self::EXACT),
            (1, 16) => Some(Self::Fixed(Code::Bf16)),
            (2, 16) => Some(Self::Fixed(Code::F16)),
            (3, 8) => blocks(Grid::Int8),
            (3, 4) => blocks(Grid::Int4),
            (4, bits) => Some(Self::Fixed(Code::Rotated { bits: bits.into(), block: size })),
            (5, _) => Some(Self::NonzeroBlocks),
            _ => None,
        };
        // What is left over in the fields, or a block that the code has not.
        codec.filter(|codec| codec.fields() == fields && codec.max_payload(0).is_some())
    }
}

fn power(block: usize) -> u8 {
    block.trailing_zeros() as u8
}
