//! Traces that Perfetto opens, made of the records that the analysis takes in.

mod build;
mod export;
#[cfg(test)]
mod picture;
mod schema;
#[cfg(test)]
mod tests;
mod track;

pub(crate) use build::Builder;
pub(crate) use export::encode;
pub(crate) use track::{Fact, Slice, lanes};
