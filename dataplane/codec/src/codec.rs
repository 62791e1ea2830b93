//! The codecs, by the numbers that stand in headers.

use harmonaize_kernels::codes::{Code, Grid, Rounding, Sparse};

/// How a chunk holds its elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codec {
    /// In a form whose bytes depend on the number of elements alone.
    Fixed(Code),
    /// In one whose bytes depend on what the elements are.
    Sparse(Sparse),
}

/// A codec's number and parameters as they stand in a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fields {
    pub(crate) id: u8,
    pub(crate) bits: u8,
    /// The power of two of the block, or of the part that is kept.
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
        ("e4m3", Self::blocks(Grid::E4m3, Rounding::Nearest)),
        ("e5m2", Self::blocks(Grid::E5m2, Rounding::Nearest)),
        ("int4", Self::INT4),
        ("int8 stochastic", Self::blocks(Grid::Int8, Rounding::Stochastic)),
        ("int4 stochastic", Self::blocks(Grid::Int4, Rounding::Stochastic)),
        ("rotated 4", Self::rotated(4)),
        ("rotated 3", Self::rotated(3)),
        ("rotated 2", Self::rotated(2)),
        ("rotated 1", Self::rotated(1)),
        ("nonzero blocks", Self::NONZERO),
        ("top 1/16", Self::largest(4, false)),
        ("top 1/64", Self::largest(6, false)),
        ("top 1/64, bf16", Self::largest(6, true)),
    ];

    /// The blocks of 256 elements that are not zeros, as they are: nothing is lost.
    pub const NONZERO: Self = Self::Sparse(Sparse::Blocks);
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
            Self::Fixed(Code::Blocks { grid: Grid::E4m3, .. }) => 5.4e-4,
            Self::Fixed(Code::Blocks { grid: Grid::E5m2, .. }) => 2.1e-3,
            Self::Fixed(Code::Blocks { grid, rounding, .. }) => {
                let nearest = if grid == Grid::Int8 { 3.1e-4 } else { 7.6e-2 };
                if rounding == Rounding::Stochastic { 2.0 * nearest } else { nearest }
            }
            Self::Fixed(Code::Rotated { bits: 1, .. }) => 0.57,
            Self::Fixed(Code::Rotated { bits: 2, .. }) => 0.135,
            Self::Fixed(Code::Rotated { bits: 3, .. }) => 0.036,
            Self::Fixed(Code::Rotated { .. }) => 0.0093,
            Self::Fixed(Code::Shared { .. }) => 1.0,
            Self::Sparse(Sparse::Blocks) => 0.0,
            // All hangs on the tensor: no bound lets it be chosen unmeasured.
            Self::Sparse(_) => 1.0,
        }
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
        matches!(self, Self::Fixed(Code::Blocks { grid: Grid::Int8 | Grid::Int4, .. }))
    }

    const fn blocks(grid: Grid, rounding: Rounding) -> Self {
        Self::Fixed(Code::Blocks { grid, block: 256, rounding })
    }

    /// Rotated blocks of 1024 elements with `bits` bits each, 1 to 4.
    pub const fn rotated(bits: usize) -> Self {
        Self::Fixed(Code::Rotated { bits, block: 1024 })
    }

    const fn largest(power: u32, halves: bool) -> Self {
        Self::Sparse(Sparse::Largest { power, halves })
    }

    /// Whether the mean over seeds of what comes back is the elements themselves, and errors under different seeds are
    /// independent.
    pub fn is_unbiased(self) -> bool {
        match self {
            Self::Fixed(Code::Blocks { grid: Grid::Int8 | Grid::Int4, rounding, .. }) => {
                rounding == Rounding::Stochastic
            }
            Self::Fixed(code) => matches!(code, Code::F32 | Code::Rotated { .. }),
            Self::Sparse(form) => form == Sparse::Blocks,
        }
    }

    /// Whether every element comes back with the bits that it had.
    pub fn is_lossless(self) -> bool {
        [Self::EXACT, Self::NONZERO].contains(&self)
    }

    /// The most bytes that a payload of `elements` elements takes; `None` if the codec has no such blocks, or the bytes do not
    /// fit a number.
    pub fn most_payload(self, elements: usize) -> Option<usize> {
        match self {
            Self::Fixed(code) => code.bytes(elements),
            Self::Sparse(form) => form.most_bytes(elements),
        }
    }

    /// Whether a payload of `elements` elements can have so many bytes.
    pub(crate) fn can_have(self, elements: usize, bytes: usize) -> bool {
        let least = match self {
            Self::Fixed(code) => code.bytes(elements),
            Self::Sparse(form) => form.least_bytes(elements),
        };
        let most = self.most_payload(elements);
        least.zip(most).is_some_and(|(least, most)| (least..=most).contains(&bytes))
    }

    /// The most bytes that a chunk of `elements` elements takes, with its header.
    pub fn most_bytes(self, elements: usize) -> Option<usize> {
        self.most_payload(elements)?.checked_add(crate::HEADER_BYTES)
    }

    pub(crate) fn fields(self) -> Fields {
        let plain = |id, bits| Fields { id, bits, block: 0, flags: 0 };
        match self {
            Self::Fixed(Code::F32) => plain(0, 32),
            Self::Fixed(Code::Bf16) => plain(1, 16),
            Self::Fixed(Code::F16) => plain(2, 16),
            // Shared codes are no chunks: their ranges come from all ranks.
            Self::Fixed(Code::Shared { .. }) => plain(u8::MAX, 0),
            Self::Sparse(Sparse::Largest { power, halves }) => {
                Fields { id: 7, bits: if halves { 16 } else { 32 }, block: power as u8, flags: 0 }
            }
            Self::Sparse(Sparse::Blocks) => Fields { id: 8, bits: 32, block: 8, flags: 0 },
            Self::Fixed(Code::Rotated { bits, block }) => {
                Fields { id: 6, bits: bits as u8, block: power(block), flags: 0 }
            }
            Self::Fixed(Code::Blocks { grid, block, rounding }) => {
                let id = match grid {
                    Grid::Int8 | Grid::Int4 => 3,
                    Grid::E4m3 => 4,
                    Grid::E5m2 => 5,
                };
                let flags = if rounding == Rounding::Stochastic { STOCHASTIC } else { 0 };
                Fields { id, bits: grid.bits() as u8, block: power(block), flags }
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
            (4, 8) => blocks(Grid::E4m3),
            (5, 8) => blocks(Grid::E5m2),
            (6, bits) => Some(Self::Fixed(Code::Rotated { bits: bits.into(), block: size })),
            (7, 16 | 32) => Some(Self::largest(fields.block.into(), fields.bits == 16)),
            (8, _) => Some(Self::Sparse(Sparse::Blocks)),
            _ => None,
        };
        // What is left over in the fields, or a block that the code has not.
        codec.filter(|codec| codec.fields() == fields && codec.most_payload(0).is_some())
    }
}

fn power(block: usize) -> u8 {
    block.trailing_zeros() as u8
}
