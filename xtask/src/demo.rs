//! `cargo xtask demo`: not built yet.

use anyhow::{Result, bail};

/// What `cargo xtask demo` takes.
#[derive(Debug, clap::Args)]
pub struct Args {}

/// Runs the task.
pub fn run(_args: &Args) -> Result<()> {
    bail!("`cargo xtask demo` is not built yet")
}
