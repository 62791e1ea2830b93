//! Charts as SVG, and HTML pages that hold them without any outside resource.

#![forbid(unsafe_code)]

mod chart;
mod page;

pub use chart::{Axes, Chart, Lane, Scale, Series, write_lanes};
pub use page::{figure, page};
