//! In construction.
fn main() {}
