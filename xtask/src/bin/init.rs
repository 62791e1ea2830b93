//! The first process of a guest that `cargo xtask` boots.

#![forbid(unsafe_code)]

fn main() {
    xtask::vm::guest::main();
}
