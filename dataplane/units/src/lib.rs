//! Configuration as people write it: rates, sizes and durations with their units, and TOML whose errors name the line. And
//! how often something may happen.
#![forbid(unsafe_code)]

mod gcra;
mod text;

pub use gcra::{Gcra, Quota};
pub use harmonaize_abi::{Bytes, Nanos, Rate, UnitError};
pub use text::{Lines, Position, TextError, TextFlaw, parse_toml, unchanged_but};
