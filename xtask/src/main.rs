//! `cargo xtask`: runs one of the project's tasks.

#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    xtask::task::main()
}
