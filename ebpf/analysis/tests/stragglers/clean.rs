//! Clean runs of a ring AllReduce between compute phases, as the simulation draws them.

/// Times in nanoseconds. Fitted to the training recorded in `tests/traces/gloo-clean` (four hosts, 1 Gbit/s, 1.2 MB).
#[derive(Debug, Clone)]
pub(crate) struct Clean {
    /// What every rank computes in an iteration.
    pub(crate) base: f64,
    /// The iteration's own part, the same for all ranks, as of batches that differ: the standard deviation, of the base.
    pub(crate) common: f64,
    /// A rank's own part: exponential, its mean.
    pub(crate) jitter: f64,
    /// How likely a rank is to pause while it computes.
    pub(crate) pause_probability: f64,
    /// The mean of the exponential time that a pause takes.
    pub(crate) pause: f64,
    /// Bytes that an edge carries in a nanosecond.
    pub(crate) rate: f64,
    /// One way, unloaded.
    pub(crate) latency: f64,
    /// The mean of the exponential time that a rank takes before it sends on what has arrived.
    pub(crate) turnaround: f64,
    /// How likely a rank is to stall before it sends on what has arrived.
    pub(crate) stall_probability: f64,
    /// The mean of the exponential time that a stall takes.
    pub(crate) stall: f64,
    /// Bytes that a sender has under way.
    pub(crate) window: f64,
    /// Bytes of the pieces that messages are cut into.
    pub(crate) segment: f64,
    /// The most that hosts' clocks are apart.
    pub(crate) offset: f64,
    /// The most that a host's clock drifts, as a part of time.
    pub(crate) drift: f64,
}

pub(crate) const CLEAN: Clean = Clean {
    base: 23.8e6,
    common: 0.01,
    jitter: 1.0e6,
    pause_probability: 0.02,
    pause: 5.0e6,
    rate: 0.125,
    latency: 60e3,
    turnaround: 120e3,
    stall_probability: 0.0005,
    stall: 8e6,
    window: 262_144.0,
    segment: 65_536.0,
    offset: 300e3,
    drift: 20e-6,
};
