//! Congestion of links: none, mild or severe, by our own traffic or by others'.

mod finding;

pub use finding::{Cause, Congestion, Link, Path, Signals, State};
