//! Stragglers: which rank holds the others up, because it computes or because its bytes move late.

mod finding;

pub use finding::{EdgeTimes, Kind, Observed, RankTimes, Straggler, Subject};
