//! How long events took from the kernel to what was decided by them.

use crate::telemetry::cpu_budget::nanoseconds;
use harmonaize_metrics::Buckets;
use std::time::Duration;

/// Upper bounds, in seconds.
static SECONDS: [f64; 18] = [
    20e-6, 50e-6, 75e-6, 100e-6, 150e-6, 200e-6, 300e-6, 500e-6, 750e-6, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3,
    10e-3, 20e-3, 50e-3, 100e-3,
];

/// Events by how long they took.
#[derive(Clone, Debug, PartialEq)]
pub struct Latencies(pub(crate) Buckets<18>);

impl Default for Latencies {
    fn default() -> Self {
        Self(Buckets::new(&SECONDS))
    }
}

impl Latencies {
    /// An event that took so long.
    pub(crate) fn note(&mut self, lag: Duration) {
        self.0.observe(nanoseconds(lag) as f64 / 1e9);
    }
}
