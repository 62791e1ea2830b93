//! Sizes swept over a collective through the provider's agents, with the flags and the text of nccl-tests.
//!
//! Source of flags, columns and meaning of each time: NVIDIA, nccl-tests 2.19.6, `src/common.cu` and `src/util.cu`.
#![forbid(unsafe_code)]

mod arguments;
mod launch;
mod measured;
mod page;
mod pattern;
mod report;
mod sweep;

use anyhow::Result;
use arguments::Arguments;
use std::process::ExitCode;

fn main() -> Result<ExitCode> {
    let arguments = harmonaize_program::parse::<Arguments>();
    arguments.check()?;
    match launch::seat(&arguments)? {
        Some(seat) => {
            launch::end_with_launcher()?;
            sweep::run(&arguments, &seat)
        }
        None => launch::ranks(&arguments),
    }
}
