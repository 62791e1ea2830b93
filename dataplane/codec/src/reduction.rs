//! A compressed AllReduce of one part of a tensor. It is what each participant contributes, what the part's owner adds up, and
//! the sum that it sends to all of them. Each element is encoded twice, whatever the number of participants.
//!
//! The budget holds for the whole: the squared error of the sum over the squares of all ranks' inputs. Chunks say what they lost,
//! and the owner adds up: squares themselves where errors are independent (and a margin for chance), their roots where they may
//! all point the same way. A part of the budget is for contributions, so that there is always one for the sum; whoever would pass
//! it sends exact elements, and so does, whatever the budget, who has elements that the codec would make infinite. Beside that bound, the sum's chunk says what the encoders measured.

use crate::chunk::{decode_by, encode_by};
use crate::passes::{self, Passes};
use crate::{Code, Codec, CodecError, Encoded, HEADER_BYTES, Header, Squares, Store, header, state};
use harmonaize_abi::{View, ViewMut};
use harmonaize_kernels::{Isa, codes};

/// Elements that share a scale in the smallest blocks. A chunk that has them has at least so many independent errors. Rotated blocks
/// spread theirs over the whole block.
const INDEPENDENT: usize = 256;
/// The part of the budget that all contributions may use together. Where errors are independent they lose a little less than the sum does,
/// for the owner's is not coded, and chance is allowed for. Elsewhere it is a half.
const CONTRIBUTED: f64 = 0.6;
/// Standard deviations that a sum of independent errors is allowed above its mean.
const DEVIATIONS: f64 = 4.0;

/// What encoders tell of their errors is right to some 1e-6 of it; so much more is reckoned with.
const ROUNDING: f64 = 1.000_01;
/// Those of rotated codes tell a difference, right to some 1e-7 of the tensor.
const ROTATED: f64 = 1e-6;

/// The terms on which an AllReduce, or an AllToAll, is coded, alike at all participants.
///
/// Its steps run in slices: they give nothing where the turn is over before they are done. See [`Passes`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Terms {
    /// The codec that is tried first; exact chunks are always allowed.
    pub codec: Codec,
    /// What a chunk that would lose too much by `codec` goes in, if it holds there. It is as unbiased as `codec`, or it
    /// is not used.
    pub finer: Option<Codec>,
    /// The budget: the most that the squared error of the sum may be, over the squares of all ranks' inputs.
    pub max_error: Option<f64>,
    /// How many contribute, the owner included.
    pub participants: u32,
}

/// A chunk that was written, or read, on such terms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Coded {
    /// Bytes of the chunk, with its header.
    pub bytes: usize,
    /// The codec that it is in.
    pub codec: Codec,
    /// What the header says.
    pub squares: Squares,
    /// Of a sum, the squared errors of all encodings on its path, as encoders measured them, added up. That is what is lost where
    /// errors of participants are not alike. At most the squared error, and the same where that is no bound.
    pub measured: f64,
    /// Whether it is exact because of the budget, or because of elements that the code has no room for.
    pub refused: bool,
}

/// What an owner knows of the sum so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Sums {
    errors: f64,
    roots: f64,
    /// The errors, each times what chance may make of it where it is independent of the others. It is infinite where one
    /// is not.
    by_chance: f64,
    signal: f64,
}

impl Terms {
    /// Encodes what a participant contributes, the sum of `ranks` ranks' elements. It is exact if it alone would use too much of the
    /// budget, or has what the codec has no room for, such as a NaN. `to` has room for the chunk and for the exact elements with a header.
    ///
    /// # Errors
    /// As [`crate::encode`].
    pub fn contribute(
        &self,
        passes: &mut Passes<'_>,
        ranks: u32,
        seed: u64,
        source: View<'_>,
        to: ViewMut<'_>,
    ) -> Result<Option<Coded>, CodecError> {
        let (others, elements) = (f64::from(self.participants.saturating_sub(1)), elements(source));
        self.encode(passes, seed, source, to, |codec, lost| {
            let share = if codec.is_unbiased() { CONTRIBUTED } else { 0.5 };
            let share = share / others.min(chance_of(codec, elements)).max(1.0);
            // The square of the ranks' sum is at most so many times the sum of their squares.
            let signal = lost.signal / f64::from(ranks.max(1));
            let holds = self.max_error.is_none_or(|most| lost.error <= share * most * signal);
            (HeaderValues::plain(Squares { error: lost.error, signal }), holds)
        })
    }

    /// Encodes elements that are only moved: exactly if the budget would be passed, or there is a NaN. `to` has room as for
    /// [`Terms::contribute`]; [`Terms::take`] reads them, and what they lost is what the chunk says.
    ///
    /// # Errors
    /// As [`crate::encode`].
    pub fn pass(
        &self,
        passes: &mut Passes<'_>,
        seed: u64,
        source: View<'_>,
        to: ViewMut<'_>,
    ) -> Result<Option<Coded>, CodecError> {
        self.encode(passes, seed, source, to, |_, lost| {
            (HeaderValues::plain(lost), self.max_error.is_none_or(|most| lost.error <= most * lost.signal))
        })
    }

    /// Begins a sum with the owner's own contribution, the exact sum of `ranks` ranks' elements.
    ///
    /// # Errors
    /// If `own` is no whole number of elements.
    pub fn begin(
        &self,
        passes: &mut Passes<'_>,
        ranks: u32,
        own: View<'_>,
    ) -> Result<Option<Sums>, CodecError> {
        if self.codec.is_lossless() {
            // Of no error nobody asks what it is a part of.
            return Ok(Some(Sums::default()));
        }
        let signal = signal(passes, own)?.map(|signal| signal / f64::from(ranks.max(1)));
        Ok(signal.map(|signal| Sums { signal, ..Sums::default() }))
    }

    /// Adds a contribution to the owner's sum in `to`.
    ///
    /// # Errors
    /// As [`crate::decode`], and [`CodecError::NotAgreed`]; nothing is added then.
    pub fn add(
        &self,
        passes: &mut Passes<'_>,
        sums: &mut Sums,
        from: View<'_>,
        to: ViewMut<'_>,
    ) -> Result<Option<Coded>, CodecError> {
        let Some(coded) = self.read(passes, from, Store::Add, to)? else { return Ok(None) };
        sums.add(coded.squares.error, chance_of(coded.codec, to.bytes() / size_of::<f32>()));
        sums.signal += coded.squares.signal;
        Ok(Some(coded))
    }

    /// Encodes the sum, or with `average_of` ranks their average. It goes exactly if the whole would pass the budget, or there
    /// is a NaN. `to` has room as for [`Terms::contribute`]. The chunk says what was lost of the sum on the whole way.
    ///
    /// # Errors
    /// As [`crate::encode`].
    pub fn conclude(
        &self,
        passes: &mut Passes<'_>,
        sums: &Sums,
        average_of: Option<u32>,
        seed: u64,
        source: View<'_>,
        to: ViewMut<'_>,
    ) -> Result<Option<Coded>, CodecError> {
        let elements = elements(source);
        let scale = f64::from(average_of.unwrap_or(1)).powi(2);
        self.encode(passes, seed, source, to, |codec, lost| {
            let mut all = *sums;
            all.add(lost.error * scale, chance_of(codec, elements));
            let squares = Squares { error: all.bound(), signal: sums.signal };
            let part = all.errors / squares.error;
            // Of what is no number, or nothing, all was measured.
            let part = if (0.0..1.0).contains(&part) { part as f32 } else { 1.0 };
            (
                HeaderValues { squares, part },
                self.max_error.is_none_or(|most| squares.error <= most * squares.signal),
            )
        })
    }

    /// Reads a sum into `to`; what was lost of it is in what comes back.
    ///
    /// # Errors
    /// As [`crate::decode`], and [`CodecError::NotAgreed`]; nothing is written then.
    pub fn take(
        &self,
        passes: &mut Passes<'_>,
        from: View<'_>,
        to: ViewMut<'_>,
    ) -> Result<Option<Coded>, CodecError> {
        self.read(passes, from, Store::Set, to)
    }

    fn read(
        &self,
        passes: &mut Passes<'_>,
        from: View<'_>,
        store: Store,
        to: ViewMut<'_>,
    ) -> Result<Option<Coded>, CodecError> {
        let header = passes.header(|| header(from))?;
        let given = header.codec;
        if given != Codec::EXACT && self.codecs().all(|codec| codec != given) {
            return Err(CodecError::NotAgreed { given });
        }
        let refused = given == Codec::EXACT && self.codec != Codec::EXACT;
        Ok(decode_by(passes, &header, from, store, to)?.map(|()| Coded::new(&header, refused)))
    }

    /// Those of chunks that are not exact, coarsest first.
    fn codecs(&self) -> impl Iterator<Item = Codec> {
        let finer = self.finer.filter(|finer| finer.is_unbiased() == self.codec.is_unbiased());
        [Some(self.codec), finer].into_iter().flatten().filter(|codec| *codec != Codec::EXACT)
    }

    /// Encodes by the first codec that `judge` lets pass and whose result stays finite, or exactly. From a codec and what was lost by it,
    /// `judge` says what goes into the header and whether that may be.
    fn encode(
        &self,
        passes: &mut Passes<'_>,
        seed: u64,
        source: View<'_>,
        to: ViewMut<'_>,
        judge: impl Fn(Codec, Squares) -> (HeaderValues, bool),
    ) -> Result<Option<Coded>, CodecError> {
        let room = to.bytes();
        let fits = |codec: &Codec| codec.max_bytes(elements(source)).is_some_and(|most| most <= room);
        // Of no error nobody asks what it is a part of.
        let mut known = if self.codec == Codec::EXACT { 0.0 } else { f64::NAN };
        for codec in self.codecs().filter(fits) {
            let encoded = encode_by(passes, codec, seed, source, to)?;
            let Some(Encoded { squares: mut lost, .. }) = encoded else { return Ok(None) };
            if matches!(codec, Codec::Fixed(Code::Rotated { .. })) {
                lost.error += ROTATED * lost.signal;
            }
            let (stated, holds) = judge(codec, lost);
            if holds && self.is_finite(lost) {
                return stated.write(to, false).map(Some);
            }
            known = lost.signal;
        }
        if !known.is_finite() {
            // None was tried, or perhaps the code alone had no room for an element, or for the squares.
            let Some(signal) = signal(passes, source)? else { return Ok(None) };
            known = signal;
        }
        if encode_by(passes, Codec::EXACT, seed, source, to)?.is_none() {
            return Ok(None);
        }
        let (stated, _) = judge(Codec::EXACT, Squares { error: 0.0, signal: known });
        stated.write(to, self.codec != Codec::EXACT).map(Some)
    }

    /// Whether what comes back is finite, and so is a sum of as many as there are participants. No element is farther off than all
    /// together. False of NaN.
    fn is_finite(&self, lost: Squares) -> bool {
        let most = f64::from(f32::MAX) / f64::from(self.participants.max(1));
        lost.signal.sqrt() + lost.error.sqrt() < most
    }
}

/// How far above their mean, 1, the squares of a sum of a codec's errors may lie. It is infinite where they may all point one way. Where
/// codecs differ, each error counts with its own: that of a rotated block points anywhere in it, wherever the other's does.
fn chance_of(codec: Codec, elements: usize) -> f64 {
    match codec {
        _ if !codec.is_unbiased() => f64::INFINITY,
        // Whole blocks alone: all that is lost may be in one, and a rest may be small.
        Codec::Fixed(Code::Rotated { block, .. }) if elements.is_multiple_of(block) => chance(block),
        _ => chance(INDEPENDENT.min(elements)),
    }
}

/// The squared error of workers' sum, as it is reckoned, over the sum of their squared errors. There are `workers` workers, and each
/// sent shared codes of `bits` bits. Rounding is independent between them; the cut at the grid's end is alike where elements are, and
/// of 4 bits it is less than a quarter of what a worker loses.
pub fn shared_spread(bits: u8, workers: u32) -> f64 {
    let cut = if bits == 4 { 0.25 } else { 1.0 };
    chance(INDEPENDENT).max(1.0 + cut * f64::from(workers.saturating_sub(1)))
}

/// What a chunk's header is to say.
struct HeaderValues {
    squares: Squares,
    /// The part of the squared error that was measured.
    part: f32,
}

impl HeaderValues {
    fn plain(squares: Squares) -> Self {
        Self { squares, part: 1.0 }
    }

    /// Has the chunk that was written at the start of `to` say it.
    fn write(&self, to: ViewMut<'_>, refused: bool) -> Result<Coded, CodecError> {
        state(self.squares, self.part, to)?;
        Ok(Coded::new(&header(to.as_view())?, refused))
    }
}

impl Coded {
    fn new(header: &Header, refused: bool) -> Self {
        let Header { codec, squares, .. } = *header;
        let bytes = HEADER_BYTES + header.payload as usize;
        Self { bytes, codec, squares, measured: header.measured_error(), refused }
    }
}

impl Sums {
    fn add(&mut self, error: f64, chance: f64) {
        let error = error * ROUNDING;
        self.errors += error;
        self.roots += error.sqrt();
        self.by_chance += if error == 0.0 { 0.0 } else { chance * error };
    }

    /// The most that the squared error of the sum is.
    fn bound(&self) -> f64 {
        (self.roots * self.roots).min(self.by_chance)
    }
}

/// How far above their mean, 1, the squares of a sum of independent errors may lie. Each participant has so
/// many errors.
fn chance(errors: usize) -> f64 {
    1.0 + DEVIATIONS * (2.0 / (errors as f64).max(1.0)).sqrt()
}

/// The sum of the squares of the elements, or NaN; none: the turn is over before.
fn signal(passes: &mut Passes<'_>, source: View<'_>) -> Result<Option<f64>, CodecError> {
    let (elements, isa) = (passes::elements(source.bytes())?, Isa::detect());
    let done = passes.run(elements, (1, 1), |part, so_far| {
        so_far.squares.signal += codes::signal(isa, part.of(source)?)?;
        Ok(())
    })?;
    Ok(done.map(|done| done.squares.signal))
}

fn elements(source: View<'_>) -> usize {
    source.bytes() / size_of::<f32>()
}
