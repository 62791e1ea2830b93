//! What a tenant lets be lost.

use crate::{Codec, CodecError, Encoded, Squares, encode};
use harmonaize_abi::{View, ViewMut};

/// What a tenant lets be lost of its tensors.
#[derive(Clone, Debug, PartialEq)]
pub enum Budget {
    /// Nothing.
    Exact,
    /// The squared error over the squared tensor, at most so much.
    Vnmse(f64),
    /// Whatever these lose.
    Codecs(Vec<Codec>),
    /// What bfloat16 may lose: 2^-9 of each element, 2^-18 of the squares.
    MatchBf16,
}

impl Budget {
    /// The most that [`Squares::relative`] may be; `None` where no bound is given.
    pub fn most(&self) -> Option<f64> {
        match self {
            Self::Exact => Some(0.0),
            Self::Vnmse(most) => Some(*most),
            Self::Codecs(_) => None,
            Self::MatchBf16 => Some(0.5_f64.powi(18)),
        }
    }

    /// Whether the codec may be tried at all. None is ever needed: exact is always allowed.
    pub fn allows(&self, codec: Codec) -> bool {
        match self {
            Self::Exact => codec == Codec::EXACT,
            Self::Codecs(codecs) => codec == Codec::EXACT || codecs.contains(&codec),
            Self::Vnmse(_) | Self::MatchBf16 => true,
        }
    }

    /// Whether so much may be lost; what is NaN may not.
    pub fn holds(&self, squares: Squares) -> bool {
        self.most().is_none_or(|most| squares.relative() <= most)
    }

    /// [`encode`] with `codec`, or exactly where the budget does not allow the codec or what it lost. `to` has room for both.
    /// Returns the codec that was used, and what the other one would have lost.
    ///
    /// # Errors
    /// As [`encode`].
    pub fn encode(
        &self,
        codec: Codec,
        seed: u64,
        source: View<'_>,
        to: ViewMut<'_>,
    ) -> Result<(Codec, Encoded, Option<Squares>), CodecError> {
        let mut refused = None;
        if self.allows(codec) {
            let encoded = encode(codec, seed, source, to)?;
            if self.holds(encoded.squares) {
                return Ok((codec, encoded, None));
            }
            refused = Some(encoded.squares);
        }
        Ok((Codec::EXACT, encode(Codec::EXACT, seed, source, to)?, refused))
    }
}
