//! `cargo xtask`: runs one of the project's tasks.

#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

/// What cargo tells the program that it runs about its package. Build scripts watch some of these variables: handed on to another
/// cargo, they would have it build again what a cargo by hand has built.
const ABOUT_THE_PACKAGE: [&str; 2] = ["CARGO_PKG_", "CARGO_MANIFEST_"];

fn main() -> ExitCode {
    let about_the_package = |name: &OsString| {
        ABOUT_THE_PACKAGE.iter().any(|prefix| name.as_encoded_bytes().starts_with(prefix.as_bytes()))
    };
    let about: Vec<_> = std::env::vars_os().map(|(name, _)| name).filter(about_the_package).collect();
    if about.is_empty() {
        return xtask::task::main();
    }
    match std::env::current_exe() {
        Ok(program) => {
            let mut again = Command::new(program);
            again.args(std::env::args_os().skip(1));
            for name in about {
                again.env_remove(name);
            }
            eprintln!("error: cannot start again: {}", again.exec());
        }
        Err(error) => eprintln!("error: cannot find the program itself: {error}"),
    }
    ExitCode::FAILURE
}
