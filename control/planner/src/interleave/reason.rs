//! Why jobs take turns: a code for programs, and a text for operators.

use harmonaize_units::Nanos;
use std::fmt;

/// Why jobs take turns.
#[derive(Clone, Debug, PartialEq)]
pub enum InterleaveReason {
    /// They are in each other's way.
    Overlaps(Overlap),
    /// They take turns already, and could be in each other's way without.
    WouldOverlap(Overlap),
}

/// Where jobs meet, and how much of an iteration they wait for each other.
#[derive(Clone, Debug, PartialEq)]
pub struct Overlap {
    /// How many meet.
    pub jobs: usize,
    /// The name of the link that is asked for most.
    pub link: String,
    /// How long the longest iteration is.
    pub period: Nanos,
    /// The part of it that they are in each other's way without turns.
    pub before: f64,
    /// The part of it that they are as they take turns.
    pub after: f64,
}

impl InterleaveReason {
    /// Returns a name for programs that never changes with the text.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Overlaps(_) => "overlaps",
            Self::WouldOverlap(_) => "would_overlap",
        }
    }
}

impl fmt::Display for InterleaveReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (is, Overlap { jobs, link, period, before, after }) = match self {
            Self::Overlaps(overlap) => ("is", overlap),
            Self::WouldOverlap(overlap) => ("could be", overlap),
        };
        let (before, after, period) = (before * 100.0, after * 100.0, period.0 as f64 / 1e6);
        write!(
            f,
            "{jobs} periodic jobs meet on {link}: {before:.0}% of an iteration of {period:.0} ms {is} in each other's way, {after:.0}% as they take turns"
        )
    }
}
