//! The table on the engine's threads.

use super::error::ValueError;
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
    senders: Option<bool>,
}

impl FileEngine {
    /// How many threads are asked for, else as many as suit this machine.
    pub(super) fn threads(&self) -> Result<usize, ValueError> {
        let threads = self.threads.unwrap_or_else(|| usual(cores()));
        if THREADS.contains(&threads) {
            Ok(threads)
        } else {
            Err(ValueError::EngineThreads { threads, within: THREADS })
        }
    }

    /// Whether a sender runs beside each of so many threads, as asked for or as suits this machine.
    pub(super) fn senders(&self, threads: usize) -> bool {
        self.senders.unwrap_or_else(|| suit_senders(threads, cores()))
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

/// Whether a machine has a core for each thread and its sender, and some beside them. On fewer a sender takes what the ranks want.
fn suit_senders(threads: usize, cores: usize) -> bool {
    cores >= 4 && cores >= 2 * threads
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

    #[test]
    fn senders_run_where_cores_are_free() {
        let suits = |cores: usize| suit_senders(usual(cores), cores);
        assert_eq!([1, 2, 3, 4, 16].map(suits), [false, false, false, true, true]);
        assert!(!suit_senders(1, 2) && suit_senders(1, 4) && !suit_senders(9, 16));
        let asked = |senders| FileEngine { threads: None, senders: Some(senders) }.senders(1);
        assert_eq!([true, false].map(asked), [true, false]);
    }
}
