//! What a tenant lets be lost.

use crate::Codec;
use harmonaize_abi::session::{Budget as Said, MAX_CODECS};
use std::fmt;
use thiserror::Error;

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

/// Why a budget makes no sense.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum BudgetError {
    /// A bound that is none.
    #[error("a bound of {0} on vNMSE; it must be above 0 and at most 1")]
    Bound(f64),
    /// No codec, or very many.
    #[error("{0} codecs are allowed; a list has 1 to {MAX_CODECS}")]
    Count(usize),
    /// No codec of that name.
    #[error("no codec is called \"{name}\"; there are {known}", known = names(Codec::all().map(|(name, _)| name)))]
    Unknown {
        /// As said, the first characters.
        name: String,
    },
}

impl TryFrom<&Said> for Budget {
    type Error = BudgetError;

    fn try_from(said: &Said) -> Result<Self, BudgetError> {
        match said {
            Said::Exact => Ok(Self::Exact),
            Said::Vnmse(most) if *most > 0.0 && *most <= 1.0 => Ok(Self::Vnmse(*most)),
            Said::Vnmse(most) => Err(BudgetError::Bound(*most)),
            Said::Codecs(named) if named.is_empty() || named.len() > MAX_CODECS => {
                Err(BudgetError::Count(named.len()))
            }
            Said::Codecs(named) => {
                let unknown = |name: &String| BudgetError::Unknown { name: name.chars().take(64).collect() };
                let codec = |name: &String| Codec::named(name).ok_or_else(|| unknown(name));
                let mut codecs = named.iter().map(codec).collect::<Result<Vec<_>, _>>()?;
                // In whichever order and however often they are named, it is the same budget.
                let place = |codec: &Codec| Codec::all().position(|(_, known)| known == *codec);
                codecs.sort_by_key(place);
                codecs.dedup();
                Ok(Self::Codecs(codecs))
            }
            Said::MatchBf16 => Ok(Self::MatchBf16),
        }
    }
}

impl From<&Budget> for Said {
    fn from(budget: &Budget) -> Self {
        match budget {
            Budget::Exact => Self::Exact,
            Budget::Vnmse(most) => Self::Vnmse(*most),
            Budget::Codecs(codecs) => {
                Self::Codecs(codecs.iter().map(|codec| codec.name().to_owned()).collect())
            }
            Budget::MatchBf16 => Self::MatchBf16,
        }
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact => f.write_str("exact"),
            Self::Vnmse(most) => write!(f, "vNMSE at most {most}"),
            Self::Codecs(codecs) => f.write_str(&names(codecs.iter().map(|codec| codec.name()))),
            Self::MatchBf16 => f.write_str("as bf16"),
        }
    }
}

fn names<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.collect::<Vec<_>>().join(", ")
}

impl Budget {
    /// The most that [`crate::Squares::relative`] may be; `None` where no bound is given.
    pub fn max_error(&self) -> Option<f64> {
        match self {
            Self::Exact => Some(0.0),
            Self::Vnmse(most) => Some(*most),
            Self::Codecs(_) => None,
            Self::MatchBf16 => Some(0.5_f64.powi(18)),
        }
    }

    /// The same for what travels by `codec`. Bfloat16 itself needs no bound to match bfloat16, and what loses nothing needs none
    /// at all.
    pub fn max_error_of(&self, codec: Codec) -> Option<f64> {
        let matches = *self == Self::MatchBf16 && codec == Codec::BF16;
        self.max_error().filter(|_| !matches && !codec.is_lossless())
    }

    /// Whether the codec may be tried at all. None is ever needed: exact is always allowed, and what loses nothing.
    pub fn allows(&self, codec: Codec) -> bool {
        match self {
            _ if codec.is_lossless() => true,
            Self::Exact => false,
            Self::Codecs(codecs) => codecs.contains(&codec),
            Self::Vnmse(_) | Self::MatchBf16 => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_makes_sense_is_read_and_shown() {
        let list = |names: &[&str]| Said::Codecs(names.iter().map(|name| (*name).to_owned()).collect());
        let cases = [
            (Said::Exact, "exact"),
            (Said::Vnmse(1e-3), "vNMSE at most 0.001"),
            (Said::Vnmse(1.0), "vNMSE at most 1"),
            (list(&["int8", "bf16", "int8"]), "bf16, int8"),
            (list(&["shared 4", "bf16"]), "bf16, shared 4"),
            (Said::MatchBf16, "as bf16"),
        ];
        for (said, shown) in cases {
            let budget = Budget::try_from(&said).unwrap();
            assert_eq!(budget.to_string(), shown);
            assert_eq!(Budget::try_from(&Said::from(&budget)).unwrap(), budget);
        }
        for (name, codec) in Codec::NAMED {
            assert_eq!((Codec::named(name), codec.name()), (Some(*codec), *name));
        }
        let names: Vec<&str> = Codec::all().map(|(name, _)| name).collect();
        assert_eq!(names, harmonaize_abi::CODECS, "completions tell codecs by number");
        assert_eq!(names[usize::from(harmonaize_abi::SHARED_CODEC)], Codec::SHARED4.name());
    }

    #[test]
    fn what_makes_none_is_refused_with_the_value() {
        for bound in [f64::NAN, f64::INFINITY, 0.0, -0.0, -1e-3, 1.000_001] {
            let error = Budget::try_from(&Said::Vnmse(bound)).unwrap_err();
            let BudgetError::Bound(refused) = error else { panic!("{error}") };
            assert_eq!(refused.to_bits(), bound.to_bits());
        }
        for count in [0, MAX_CODECS + 1] {
            let error = Budget::try_from(&Said::Codecs(vec!["int8".to_owned(); count])).unwrap_err();
            assert!(matches!(error, BudgetError::Count(found) if found == count), "{error}");
        }
        let error = Budget::try_from(&Said::Codecs(vec!["int9".to_owned()])).unwrap_err();
        assert!(matches!(&error, BudgetError::Unknown { name } if name == "int9"), "{error}");
        let shown = error.to_string();
        assert!(shown.starts_with("no codec is called \"int9\"; there are exact, bf16"), "{shown}");
    }

    #[test]
    fn bf16_itself_matches_bf16() {
        assert_eq!(Budget::MatchBf16.max_error_of(Codec::BF16), None);
        assert_eq!(Budget::MatchBf16.max_error_of(Codec::INT8), Some(0.5_f64.powi(18)));
        assert_eq!(Budget::Vnmse(0.1).max_error_of(Codec::BF16), Some(0.1));
        let lossless = Codec::all().filter(|(_, codec)| Budget::Exact.allows(*codec));
        assert_eq!(lossless.map(|(name, _)| name).collect::<Vec<_>>(), ["exact", "nonzero blocks"]);
        assert_eq!(Budget::Exact.max_error_of(Codec::NonzeroBlocks), None);
    }
}
