//! Charts as SVG, boards of them, and HTML pages that hold them without any outside resource.

#![forbid(unsafe_code)]

mod board;
mod chart;
mod page;

pub use board::{Panel, write_board};
pub use chart::{Axes, Chart, Lane, Scale, Series, write_lanes};
pub use page::{figure, page};
