//! `cargo xtask demo`: not built yet.

pub mod lines;
pub mod page;
pub mod plot;
pub mod verdict;

use anyhow::{Result, bail};

/// What `cargo xtask demo` takes.
#[derive(Debug, clap::Args)]
pub struct Args {}

/// Runs the task.
pub fn run(_args: &Args) -> Result<()> {
    bail!("`cargo xtask demo` is not built yet")
}
