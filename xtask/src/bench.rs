//! `cargo xtask bench`: not built yet.

use anyhow::{Result, bail};

/// What `cargo xtask bench` takes.
#[derive(Debug, clap::Args)]
pub struct Args {}

/// Runs the task.
pub fn run(_args: &Args) -> Result<()> {
    bail!("`cargo xtask bench` is not built yet")
}
