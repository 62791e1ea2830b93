//! What a tenant lets be lost of its tensors, as it says so.

use super::list::bounded;
use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use core::str::FromStr;
use serde::{Deserialize, Serialize};

/// Most codecs that a budget names.
pub const MAX_CODECS: usize = 32;

/// What a tenant lets be lost of the tensors of a communicator's operations. All ranks must say the same. Whatever is let be lost,
/// exact is always within it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub enum Budget {
    /// Nothing.
    #[default]
    Exact,
    /// The vNMSE of each operation is at most this, above 0 and at most 1. Its definition is |error of the sum|^2 / sum
    /// over ranks of |x_i|^2.
    Vnmse(f64),
    /// Whatever the codecs of these names lose, such as "bf16" or "int8".
    Codecs(#[serde(deserialize_with = "bounded::<MAX_CODECS, _, _>")] Vec<String>),
    /// What sending bfloat16 would lose.
    MatchBf16,
}

impl fmt::Display for Budget {
    /// As people write it: `exact`, `bf16`, `vnmse=0.01`, or names of codecs separated by commas.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact => f.write_str("exact"),
            Self::Vnmse(most) => write!(f, "vnmse={most}"),
            Self::Codecs(names) => f.write_str(&names.join(",")),
            Self::MatchBf16 => f.write_str("bf16"),
        }
    }
}

impl FromStr for Budget {
    type Err = String;
    /// From what people write. A codec that nobody knows is refused by the agent.
    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text {
            "exact" => Self::Exact,
            "bf16" => Self::MatchBf16,
            text => match text.strip_prefix("vnmse=") {
                Some(most) => Self::Vnmse(most.parse().map_err(|_| format!("`{most}` is no number"))?),
                None => Self::Codecs(text.split(',').map(str::to_owned).collect()),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn budgets_are_read_as_they_are_written() {
        for text in ["exact", "bf16", "vnmse=0.01", "int8", "int8,rotated 4"] {
            assert_eq!(text.parse::<Budget>().unwrap().to_string(), text);
        }
        assert!("vnmse=x".parse::<Budget>().unwrap_err().contains("`x`"));
    }
}
