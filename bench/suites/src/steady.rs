//! What the program `steady` prints: operations of a tenant that always has another, and when each was done.

use crate::lab::Lab;
use anyhow::{Context, Result, ensure};
use harmonaize_testkit::job::Job;
use serde::Deserialize;
use std::time::Duration;

/// The figures of one job's first rank.
#[derive(Debug, Deserialize)]
pub(crate) struct Steady {
    pub(crate) bytes: u64,
    pub(crate) done_ns: Vec<u64>,
    pub(crate) took_us: Vec<f64>,
    pub(crate) aggregated: Vec<bool>,
}

/// An interval of CLOCK_MONOTONIC, nanoseconds.
#[derive(Clone, Copy)]
pub(crate) struct Interval(pub(crate) u64, pub(crate) u64);

impl Steady {
    pub(crate) fn first(&self) -> u64 {
        self.done_ns.first().copied().unwrap_or(u64::MAX)
    }

    pub(crate) fn last(&self) -> u64 {
        self.done_ns.last().copied().unwrap_or(0)
    }

    /// Places of the operations that were done within an interval.
    fn within(&self, Interval(from, until): Interval) -> std::ops::Range<usize> {
        let below = |ns: u64| self.done_ns.partition_point(|done| *done < ns);
        below(from)..below(until)
    }

    /// Bytes of a rank's tensors a second, from one operation's end to another's.
    pub(crate) fn rate(&self, interval: Interval) -> f64 {
        let done = self.done_ns.get(self.within(interval)).unwrap_or_default();
        let (Some(first), Some(last)) = (done.first(), done.last()) else { return 0.0 };
        (done.len() - 1) as f64 * self.bytes as f64 / ((last - first).max(1) as f64 / 1e9)
    }

    /// The median time of an operation, ms.
    pub(crate) fn middle_ms(&self, interval: Interval) -> f64 {
        let took = self.took_us.get(self.within(interval)).unwrap_or_default();
        crate::row::median(took).unwrap_or(f64::NAN) / 1e3
    }

    /// Of the operations, those that were an aggregator's.
    pub(crate) fn aggregated(&self, interval: Interval) -> f64 {
        let of = self.aggregated.get(self.within(interval)).unwrap_or_default();
        of.iter().filter(|aggregated| **aggregated).count() as f64 / of.len().max(1) as f64
    }
}

pub(crate) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Waits for jobs of `steady`.
pub(crate) fn finish(lab: &mut Lab, jobs: Vec<Job>, limit: Duration) -> Result<Vec<Steady>> {
    jobs.into_iter()
        .map(|job| lab.finish::<Steady>(job, limit)?.into_iter().next().context("no figures"))
        .collect()
}

/// When all were under way and had settled, up to `until`.
pub(crate) fn common(steady: &[Steady], until: u64, warm_up: Duration) -> Result<Interval> {
    let from = steady.iter().map(Steady::first).max().unwrap_or(0).saturating_add(nanos(warm_up));
    let until = steady.iter().map(Steady::last).min().unwrap_or(0).min(until);
    ensure!(from < until, "not all tenants had begun in time");
    Ok(Interval(from, until))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_of_whole_operations_within_an_interval() {
        let steady = Steady {
            bytes: 1_000_000,
            done_ns: (1..=10).map(|second| second * 1_000_000_000).collect(),
            took_us: vec![500_000.0; 10],
            aggregated: (0..10).map(|at| at >= 5).collect(),
        };
        let interval = Interval(3_500_000_000, 8_500_000_000);
        assert_eq!(steady.within(interval), 3..8);
        assert_eq!((steady.rate(interval), steady.middle_ms(interval)), (1e6, 500.0));
        assert_eq!(steady.aggregated(interval), 0.6);
        assert_eq!(steady.rate(Interval(0, 1)), 0.0);
    }
}
