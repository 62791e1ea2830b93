//! The table on the engine's threads.

use serde::Deserialize;
use std::num::NonZero;
use std::ops::RangeInclusive;

/// How many threads there may be.
const THREADS: RangeInclusive<usize> = 1..=64;

/// How the engine runs. What is left out is as usual.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct FileEngine {
    threads: Option<usize>,
}

impl FileEngine {
    /// How many threads are asked for, else as many as suit this machine.
    pub(super) fn threads(&self) -> Result<usize, String> {
        let cores = || std::thread::available_parallelism().map_or(1, NonZero::get);
        let threads = self.threads.unwrap_or_else(|| usual(cores()));
        let (least, most) = THREADS.into_inner();
        if (least..=most).contains(&threads) {
            Ok(threads)
        } else {
            Err(format!("`threads` of [engine] is {threads}; {least} to {most}"))
        }
    }
}

/// The usual number on a machine of so many cores. A thread without a tenant sleeps; one with a busy tenant takes a core that the
/// tenants' own processes may want, so that there are few of them however large the machine is.
fn usual(cores: usize) -> usize {
    match cores {
        0 | 1 => 1,
        2..16 => 2,
        _ => 4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_number_is_small() {
        assert_eq!([1, 2, 15, 16, 256].map(usual), [1, 2, 2, 4, 4]);
    }
}
