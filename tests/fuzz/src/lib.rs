//! Fuzz targets. Each takes any bytes to one decoder, or to the state machine behind it, and checks what must hold.
//!
//! `cargo xtask fuzz` runs them under libFuzzer. Their corpora lie in `corpora`, a folder a target, and every run of the tests
//! plays them.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

mod input;
mod targets;

/// One target.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name, and that of its corpus.
    pub name: &'static str,
    /// What its bytes are.
    pub about: &'static str,
    /// Takes an input in. Panics where something is wrong.
    pub run: fn(&[u8]),
}

pub use targets::TARGETS;

/// The target of that name.
pub fn named(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}
