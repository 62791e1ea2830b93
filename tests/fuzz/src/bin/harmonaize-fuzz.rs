//! The targets under libFuzzer. `HARMONAIZE_FUZZ` names the one that runs; the arguments are libFuzzer's.
#![no_main]

use harmonaize_fuzz::{Target, named};
use std::sync::LazyLock;

static TARGET: LazyLock<Target> = LazyLock::new(|| {
    let name = std::env::var("HARMONAIZE_FUZZ").unwrap_or_default();
    let Some(target) = named(&name) else {
        eprintln!("HARMONAIZE_FUZZ names no target: {name:?}");
        std::process::exit(2);
    };
    *target
});

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| (TARGET.run)(bytes));
