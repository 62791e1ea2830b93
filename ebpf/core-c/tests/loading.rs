//! The programs that read the kernel's structures, loaded into this kernel.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone
use harmonaize_core_c::{Options, Tracing};
#[test]
fn x() {
    let t = Tracing::open(&Options::default());
    match t {
        Ok(t) => eprintln!("{t:?} {:?}", t.missing()),
        Err(e) => panic!("{e}"),
    }
}
#[test]
fn raw() {
    let t = Tracing::open(&Options { types: Some("/sys/kernel/btf/vmlinux".into()), ..Options::default() });
    match t {
        Ok(t) => eprintln!("{t:?} {:?}", t.missing()),
        Err(e) => panic!("{e}"),
    }
}
