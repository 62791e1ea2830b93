//! What a tenant lets be lost of its tensors, as it says so.

use alloc::string::String;
use alloc::vec::Vec;
use serde::{Deserialize, Serialize};

/// What a tenant lets be lost of the tensors of a communicator's operations. All ranks must say the same. Whatever is let be lost,
/// exact is always within it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub enum Budget {
    /// Nothing.
    #[default]
    Exact,
    /// vNMSE = |error of the sum|^2 / sum over ranks of |x_i|^2 of each operation, at most so much: above 0, at most 1.
    Vnmse(f64),
    /// Whatever the codecs of these names lose, such as "bf16" or "int8".
    Codecs(Vec<String>),
    /// What sending bfloat16 would lose.
    MatchBf16,
}
