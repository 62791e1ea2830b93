//! Codes: forms of f32 tensors that take fewer bytes, and what each lost. Their layout, and how exact they are, is told at
//! [`Code`]; every instruction set gives the same bytes and the same [`Squares`].

mod blocks;
mod convert;
mod hadamard;
mod memory;
mod noise;
mod nonzero;
mod rotated;
mod rows;
mod shared;
mod signal;
mod totals;

use crate::simd::{Job, LANES, Simd, dispatch};
use crate::{Isa, KernelError};
use harmonaize_abi::{Dtype, View, ViewMut};
use memory::{Source, Target};
pub use nonzero::nonzero_bytes;
use shared::CodeLayout;

/// Elements of a vector: blocks and their rests are padded to whole ones.
pub const ROW: usize = LANES;
/// Fewest and most elements of a block that has one scale.
pub const BLOCK: std::ops::RangeInclusive<usize> = 32..=256;
/// Fewest and most elements of a rotated block.
pub const ROTATED: std::ops::RangeInclusive<usize> = 64..=4096;
/// The NaN that decoders give.
const NAN: u32 = 0x7fc0_0000;
/// Bits above those of any finite magnitude.
const INFINITE: u32 = 0x7f80_0000;

/// What the values of a block become, once divided by the block's scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Grid {
    /// Integers from -127 to 127, 8 bits each.
    Int8,
    /// Integers from -7 to 7, 4 bits each.
    Int4,
}

/// How a value between two of the grid's is rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// To the nearest, ties to even.
    Nearest,
    /// Up or down at random, so that the mean over seeds is the value itself.
    Stochastic,
}

/// A form in which `n` elements take a number of bytes that depends on `n` alone. All numbers are little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Code {
    /// As they are, any bits.
    F32,
    /// bfloat16: 2 bytes an element in rows of 16, the last one padded with zeros. Rounded to nearest even; what is beyond its range
    /// becomes an infinity, NaN is kept.
    Bf16,
    /// IEEE 754 binary16: as above.
    F16,
    /// Blocks of `block` elements (a power of two in [`BLOCK`], the last may be shorter). Each has a scale in f32, the block's
    /// greatest magnitude over the grid's, then the codes in rows of 16 (the last one padded with zeros). A row of codes of `b`
    /// bits has `2 b` bytes: of 8 bits one after another; of 4 bits byte `i` holds code `i`, and above it code `i + 8`.
    ///
    /// A block whose greatest magnitude is below 2^-100 becomes zeros; one with a NaN or an infinity becomes NaN everywhere.
    Blocks {
        /// What the elements become.
        grid: Grid,
        /// Elements that share a scale.
        block: usize,
        /// How they are rounded.
        rounding: Rounding,
    },
    /// Blocks rotated at random by the seed, then each element as the nearest of `2^bits` centroids (`bits` 1 to 4).
    /// A block has `block` elements, a power of two in [`ROTATED`]. The last is padded with zeros to a power of two, 16 at
    /// least. It has a scale in f32, then codes in rows, as above. Of 2 bits byte `i` holds the codes `i`, `i + 4`, `i + 8` and
    /// `i + 12` from its lowest bits on; of 1 bit byte `i` the codes `i`, `i + 2` and so on. Of 3 bits 4 bytes hold the lower 2
    /// of each and 2 bytes the upper. The top bit of a code is the sign. In the manner of DRIVE (NeurIPS 2021) and EDEN (ICML 2022): over random seeds the mean
    /// of the values is the elements. What is NaN or 0 is as with blocks; a block whose norm is above 2^112 becomes NaN too.
    Rotated {
        /// Bits of an element, 1 to 4.
        bits: usize,
        /// Elements that are rotated together and share a scale.
        block: usize,
    },
    /// Rotated as above, then rounded at random to a uniform grid whose range all ranks share, so that codes add. A block has a range
    /// in f32 and codes in rows. Codes of one rank have `bits` bits (1 to 4). Those of several ranks have 6, or 8 where they can
    /// exceed 63, or 16 where they can exceed 255. A row of 6-bit codes holds the lower 4 bits of each in 8 bytes, then the upper 2 in
    /// 4. Encoded by [`encode_shared`], added by [`add_shared`]. Rounding is unbiased, and independent between ranks. What lies beyond
    /// the grid's end is cut, alike on ranks that hold the same.
    Shared {
        /// Bits of one rank's element, 1 to 4.
        bits: usize,
        /// Elements that are rotated together and share a range.
        block: usize,
        /// How many ranks' codes are added, 1 to 4096.
        ranks: usize,
    },
}

/// Most ranks whose shared codes add.
pub const SHARED_RANKS: usize = 4096;

impl Code {
    /// Bytes that `elements` elements take; `None` if the block's size is none that this code has, or the product overflows.
    pub fn bytes(self, elements: usize) -> Option<usize> {
        match self {
            Self::F32 => elements.checked_mul(4),
            Self::Bf16 | Self::F16 => elements.div_ceil(ROW).checked_mul(2 * ROW),
            Self::Blocks { grid, block, .. } => {
                let fine = block.is_power_of_two() && BLOCK.contains(&block);
                fine.then(|| rows::bytes(elements, block, grid.bits())).flatten()
            }
            Self::Rotated { bits, block } => {
                let fine = block.is_power_of_two() && ROTATED.contains(&block) && (1..=4).contains(&bits);
                fine.then(|| rows::rotated_bytes(elements, block, bits)).flatten()
            }
            Self::Shared { bits, block, ranks } => {
                let fine = (1..=SHARED_RANKS).contains(&ranks);
                Self::Rotated { bits, block }.bytes(0).filter(|_| fine)?;
                rows::rotated_bytes(elements, block, CodeLayout { bits, block, ranks, seed: 0 }.width())
            }
        }
    }
}

impl Grid {
    /// Bits of an element.
    pub const fn bits(self) -> usize {
        if matches!(self, Self::Int4) { 4 } else { 8 }
    }
}

/// What a decoder does with the values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Store {
    /// Writes them.
    Set,
    /// Adds them to what is there.
    Add,
    /// Takes them from what is there.
    Subtract,
}

/// What an encoder lost. Both are sums over the elements in f64, of products that are f32 where f32 holds them well: right to
/// some 1e-6 of themselves. NaN where an element was NaN or became infinite.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Squares {
    /// Of the differences between the elements and what a decoder will give.
    pub error: f64,
    /// Of the elements.
    pub signal: f64,
}

impl Squares {
    /// The error over the signal; 0 if nothing was lost, also of nothing.
    pub fn relative(self) -> f64 {
        if self.error == 0.0 { 0.0 } else { self.error / self.signal }
    }

    /// As encoders tell them: NaN where a sum is not finite.
    fn rounded(self) -> Self {
        let finite = self.signal.is_finite() && self.error.is_finite();
        if finite { self } else { Self { error: f64::NAN, signal: f64::NAN } }
    }

    /// Of two parts of a tensor.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self { error: self.error + other.error, signal: self.signal + other.signal }
    }
}

/// Where a part lies in a tensor that is encoded, or decoded, part after part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartOf {
    /// Elements before it: whole blocks, and whole groups of 256. Shared codes have none, for each of their parts has seeds of its own.
    pub first: usize,
    /// Bytes of all that the parts write. Where they are [many](crate::STREAM_FROM), writing past the caches pays.
    pub whole: usize,
}

/// Encodes the f32 elements of `source` into `to`, which has exactly [`Code::bytes`]. `seed` is what random choices come from:
/// the same seed and elements give the same bytes.
///
/// # Errors
/// [`KernelError::PartialElement`], [`KernelError::Block`], [`KernelError::Length`] and [`KernelError::Isa`]; nothing is
/// written then.
pub fn encode(
    isa: Isa,
    code: Code,
    seed: u64,
    source: View<'_>,
    to: ViewMut<'_>,
) -> Result<Squares, KernelError> {
    encode_part(isa, code, seed, source, to, PartOf { first: 0, whole: to.bytes() })
}

/// [`encode`] where `source` is a part of a tensor. Its bytes are those that it has among the whole tensor's.
///
/// # Errors
/// As [`encode`].
pub fn encode_part(
    isa: Isa,
    code: Code,
    seed: u64,
    source: View<'_>,
    to: ViewMut<'_>,
    part: PartOf,
) -> Result<Squares, KernelError> {
    let elements = checked(code, source.bytes(), to.bytes())?;
    if code == Code::F32 {
        return crate::copy(source, &[to]).map(|()| Squares::default());
    }
    if matches!(code, Code::Shared { .. }) {
        return Err(KernelError::Block);
    }
    let (source, to) = (Source::new(source), Target::part_of(to, part.whole));
    dispatch(isa, Encode { code, seed, first: part.first, source, to, elements })
}

/// Decodes `from`, which has exactly [`Code::bytes`] for the f32 elements of `to`, and stores the values there. Any bytes decode
/// to something. `seed` is the encoder's.
///
/// # Errors
/// As [`encode`].
pub fn decode(
    isa: Isa,
    code: Code,
    seed: u64,
    from: View<'_>,
    store: Store,
    to: ViewMut<'_>,
) -> Result<(), KernelError> {
    decode_part(isa, code, seed, from, store, to, PartOf { first: 0, whole: to.bytes() })
}

/// [`decode`] where `to` is a part of a tensor, and `from` what that part has of the codes.
///
/// # Errors
/// As [`encode`].
pub fn decode_part(
    isa: Isa,
    code: Code,
    seed: u64,
    from: View<'_>,
    store: Store,
    to: ViewMut<'_>,
    part: PartOf,
) -> Result<(), KernelError> {
    let elements = checked(code, to.bytes(), from.bytes())?;
    if code == Code::F32 && store == Store::Set {
        return crate::copy(from, &[to]);
    }
    let (from, to) = (Source::new(from), Target::part_of(to, part.whole));
    dispatch(isa, Decode { code, seed, first: part.first, from, store, to, elements })
}

/// The sum of the squares of the f32 elements of `source`, as exact as [`Squares`]. It is NaN where an element is NaN or
/// infinite.
///
/// # Errors
/// [`KernelError::PartialElement`] and [`KernelError::Isa`].
pub fn signal(isa: Isa, source: View<'_>) -> Result<f64, KernelError> {
    let elements = counted(source.bytes())?;
    dispatch(isa, signal::Signal { source: Source::new(source), elements })
}

/// The number of elements, if the lengths are right.
fn checked(code: Code, tensor: usize, coded: usize) -> Result<usize, KernelError> {
    let elements = counted(tensor)?;
    let expected = code.bytes(elements).ok_or(KernelError::Block)?;
    if expected != coded {
        return Err(KernelError::Length { expected, given: coded });
    }
    Ok(elements)
}

/// The f32 elements of a tensor of so many bytes.
fn counted(bytes: usize) -> Result<usize, KernelError> {
    let dtype = Dtype::F32;
    if bytes.is_multiple_of(dtype.size()) {
        Ok(bytes / dtype.size())
    } else {
        Err(KernelError::PartialElement { bytes, dtype })
    }
}

/// The blocks of a tensor, or of a part of it.
#[derive(Clone, Copy)]
struct Blocks {
    /// Elements of each.
    block: usize,
    /// Blocks of the tensor before these.
    before: usize,
    seed: u64,
}

impl Blocks {
    /// What the random choices of block `index` of these come from.
    #[inline(always)]
    fn stream(self, index: usize) -> noise::Stream {
        noise::Stream::new(self.seed, self.before.wrapping_add(index))
    }
}

struct Encode<'a> {
    code: Code,
    seed: u64,
    /// Elements before these in their tensor.
    first: usize,
    source: Source<'a>,
    to: Target<'a>,
    elements: usize,
}

impl Job for Encode<'_> {
    type Output = Squares;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Squares {
        let Self { code, seed, first, source, to, elements } = self;
        let squares = match code {
            // Copied, and encoded with ranges.
            Code::F32 | Code::Shared { .. } => Squares::default(),
            Code::Rotated { bits, block } => {
                let blocks = Blocks { block, before: first / block, seed };
                rotated::encode(simd, bits, blocks, source, to, elements)
            }
            Code::Bf16 => convert::encode::<S, convert::Brain>(simd, source, to, elements),
            Code::F16 => convert::encode::<S, convert::Half>(simd, source, to, elements),
            Code::Blocks { grid, block, rounding } => {
                let blocks = Blocks { block, before: first / block, seed };
                blocks::encode(simd, grid, rounding, blocks, source, to, elements)
            }
        };
        simd.fence();
        squares
    }
}

struct Decode<'a> {
    code: Code,
    seed: u64,
    /// Elements before these in their tensor.
    first: usize,
    from: Source<'a>,
    store: Store,
    to: Target<'a>,
    elements: usize,
}

impl Job for Decode<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { code, seed, first, from, store, to, elements } = self;
        let place = rows::RowTarget { to, store, elements };
        match code {
            Code::F32 => convert::decode_whole(simd, from, place),
            Code::Rotated { bits, block } => {
                let blocks = Blocks { block, before: first / block, seed };
                rotated::decode(simd, bits, blocks, from, place);
            }
            Code::Shared { bits, block, ranks } => {
                shared::decode(simd, CodeLayout { bits, block, ranks, seed }, from, place);
            }
            Code::Bf16 => convert::decode::<S, convert::Brain>(simd, from, place),
            Code::F16 => convert::decode::<S, convert::Half>(simd, from, place),
            Code::Blocks { grid, block, .. } => blocks::decode(simd, grid, block, from, place),
        }
        simd.fence();
    }
}

/// Encodes the blocks of `source` that are not zeros at the start of `to`. That has room for the most that [`nonzero_bytes`] gives. Returns
/// the bytes that it wrote.
///
/// # Errors
/// As [`encode`].
pub fn encode_nonzero(isa: Isa, source: View<'_>, to: ViewMut<'_>) -> Result<usize, KernelError> {
    let elements = counted(source.bytes())?;
    let expected = *nonzero_bytes(elements).ok_or(KernelError::Block)?.end();
    if to.bytes() < expected {
        return Err(KernelError::Length { expected, given: to.bytes() });
    }
    dispatch(isa, EncodeNonzero { source: Source::new(source), to: Target::new(to), elements })
}

/// Looks whether `from` has what [`encode_nonzero`] wrote of `elements` elements, and no more.
///
/// # Errors
/// [`KernelError::Content`] where an encoder cannot have written the bytes.
pub fn check_nonzero(from: View<'_>, elements: usize) -> Result<(), KernelError> {
    nonzero::check(Source::new(from), from.bytes(), elements)
}

/// Decodes `from`, which has what [`encode_nonzero`] wrote and no more, for the f32 elements of `to`.
///
/// # Errors
/// As [`encode`], and [`KernelError::Content`] where an encoder cannot have written the bytes; nothing is written then.
pub fn decode_nonzero(isa: Isa, from: View<'_>, store: Store, to: ViewMut<'_>) -> Result<(), KernelError> {
    check_nonzero(from, counted(to.bytes())?)?;
    decode_nonzero_part(isa, from, store, to, to.bytes()).map(|_| ())
}

/// Decodes the next part of a tensor, of which each but the last has a multiple of 16384 elements. `from` begins with that part's bytes and
/// has been [checked](check_nonzero) as a whole: other bytes give some values. All parts write `whole` bytes. Returns the part's bytes.
///
/// # Errors
/// [`KernelError::PartialElement`] and [`KernelError::Isa`]; nothing is written then.
pub fn decode_nonzero_part(
    isa: Isa,
    from: View<'_>,
    store: Store,
    to: ViewMut<'_>,
    whole: usize,
) -> Result<usize, KernelError> {
    let elements = counted(to.bytes())?;
    let place = rows::RowTarget { to: Target::part_of(to, whole), store, elements };
    dispatch(isa, DecodeNonzero { from: Source::new(from), place })
}

/// Returns how many of `samples` blocks [`encode_nonzero`] would leave out. They are blocks of the f32 elements of `source`, drawn at
/// random by `seed`.
///
/// # Errors
/// [`KernelError::PartialElement`].
pub fn zero_blocks(source: View<'_>, seed: u64, samples: u32) -> Result<u32, KernelError> {
    let elements = counted(source.bytes())?;
    Ok(nonzero::zeros(Source::new(source), elements, seed, samples))
}

struct EncodeNonzero<'a> {
    source: Source<'a>,
    to: Target<'a>,
    elements: usize,
}

impl Job for EncodeNonzero<'_> {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> usize {
        nonzero::encode(simd, self.source, self.to, self.elements)
    }
}

struct DecodeNonzero<'a> {
    from: Source<'a>,
    place: rows::RowTarget<'a>,
}

impl Job for DecodeNonzero<'_> {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> usize {
        let bytes = nonzero::decode(simd, self.from, self.place);
        simd.fence();
        bytes
    }
}

/// Writes the norm of each block of `block` elements of `source` into `to`, as f32. Reduced over the ranks by the maximum, they
/// are the ranges for [`encode_shared`]. A block with a NaN or an infinity, or with a norm above 2^112, has the norm NaN.
///
/// # Errors
/// As [`encode`]; `to` has 4 bytes a block.
pub fn ranges(isa: Isa, block: usize, source: View<'_>, to: ViewMut<'_>) -> Result<(), KernelError> {
    let code = Code::Shared { bits: 1, block, ranks: 1 };
    let elements = counted(source.bytes())?;
    code.bytes(elements).ok_or(KernelError::Block)?;
    let expected = 4 * elements.div_ceil(block);
    if to.bytes() != expected {
        return Err(KernelError::Length { expected, given: to.bytes() });
    }
    dispatch(isa, Ranges { block, source: Source::new(source), to: Target::new(to), elements })
}

/// Encodes one rank's elements as `Code::Shared { bits, block, ranks: 1 }`. `seed` is the same on all ranks, `noise` another on
/// each. `ranges` are the greatest of all ranks' [`ranges`]; a block that has none above 0 is encoded as zeros, one whose range is
/// not finite, and one of elements that are not finite, as NaN.
///
/// # Errors
/// As [`encode`]; `ranges` has 4 bytes a block.
#[expect(clippy::too_many_arguments, reason = "the code's two, two seeds, and three views")]
pub fn encode_shared(
    isa: Isa,
    bits: usize,
    block: usize,
    seed: u64,
    noise: u64,
    ranges: View<'_>,
    source: View<'_>,
    to: ViewMut<'_>,
) -> Result<Squares, KernelError> {
    let elements = checked(Code::Shared { bits, block, ranks: 1 }, source.bytes(), to.bytes())?;
    let expected = 4 * elements.div_ceil(block);
    if ranges.bytes() != expected {
        return Err(KernelError::Length { expected, given: ranges.bytes() });
    }
    let form = CodeLayout { bits, block, ranks: 1, seed };
    let (ranges, source, to) = (Source::new(ranges), Source::new(source), Target::new(to));
    dispatch(isa, EncodeShared(shared::Pass { form, noise, ranges, source, to, elements }))
}

/// Adds one rank's codes of `elements` elements to the sum of `ranks` ranks' in `to`; `begin` begins it. Nothing is decoded.
/// Where the ranges are not the same bits, the block becomes NaN.
///
/// # Errors
/// As [`encode`]: `from` has the bytes of one rank's codes, `to` those of the sum.
#[expect(
    clippy::too_many_arguments,
    reason = "the code's three, the two views, and how many elements they hold"
)]
pub fn add_shared(
    isa: Isa,
    bits: usize,
    block: usize,
    ranks: usize,
    elements: usize,
    from: View<'_>,
    begin: bool,
    to: ViewMut<'_>,
) -> Result<(), KernelError> {
    for (ranks, given) in [(1, from.bytes()), (ranks, to.bytes())] {
        let expected = Code::Shared { bits, block, ranks }.bytes(elements).ok_or(KernelError::Block)?;
        if given != expected {
            return Err(KernelError::Length { expected, given });
        }
    }
    let total = CodeLayout { bits, block, ranks, seed: 0 };
    if ranks == 1 {
        return crate::copy(from, &[to]);
    }
    dispatch(isa, AddShared { total, from: Source::new(from), to: Target::new(to), begin, elements })
}

struct Ranges<'a> {
    block: usize,
    source: Source<'a>,
    to: Target<'a>,
    elements: usize,
}

impl Job for Ranges<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        shared::ranges(simd, self.block, self.source, self.to, self.elements);
    }
}

struct EncodeShared<'a>(shared::Pass<'a>);

impl Job for EncodeShared<'_> {
    type Output = Squares;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Squares {
        self.0.encode(simd)
    }
}

struct AddShared<'a> {
    total: CodeLayout,
    from: Source<'a>,
    to: Target<'a>,
    begin: bool,
    elements: usize,
}

impl Job for AddShared<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        shared::add(simd, self.total, self.from, self.to, self.begin, self.elements);
    }
}
