//! Which seeds a simulation runs, and which one failed; several crates' simulations take this file.

use std::ops::Range;

/// A family's seed under way; if it fails, says how to run it again.
pub(crate) struct Seed(pub(crate) &'static str, pub(crate) u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "run again: HARMONAIZE_SEED={} cargo test -p {} --test simulation {}",
                self.1,
                env!("CARGO_PKG_NAME"),
                self.0
            );
        }
    }
}

/// The seeds that the environment chooses (`HARMONAIZE_SEED=x` or `HARMONAIZE_SEEDS=a..b`), or the first `usual`.
pub(crate) fn seeds(usual: u64) -> Range<u64> {
    let number = |text: &str| text.trim().parse::<u64>().expect("a number");
    if let Ok(seed) = std::env::var("HARMONAIZE_SEED") {
        return number(&seed)..number(&seed) + 1;
    }
    match std::env::var("HARMONAIZE_SEEDS") {
        Ok(seeds) => {
            let (from, to) = seeds.split_once("..").expect("a range like 0..1000");
            number(from)..number(to)
        }
        Err(_) => 0..usual,
    }
}
