//! Congestion of links: none, mild or severe, by our own traffic or by others'.

mod bins;
mod detector;
mod finding;
mod flow;
mod level;
mod monitor;

pub use detector::Detector;
pub use finding::{Cause, Congestion, Link, Path, Signals, State};

/// What a link's capacity is taken from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Capacity {
    /// What was seen: what the link carried while a queue stood, and the most that it carried while none did; what is stated
    /// where that is close (70%), or nothing was seen. Right where the narrowest place of a path may lie behind the interface.
    #[default]
    Seen,
    /// What is stated.
    Stated,
}

/// What decides.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// A round trip that is longer than at rest by this, and by half of that at rest, shows a queue: mild.
    pub delay_ns: u64,
    /// And by this, and twice that at rest, a long one: severe.
    pub severe_delay_ns: u64,
    /// Of a million packets, so many marked: mild, and severe. At least 2 and 8 packets.
    pub marked_ppm: (u32, u32),
    /// Of a million packets, so many lost or sent again: mild, and severe. At least 2 and 8 packets.
    pub lost_ppm: (u32, u32),
    /// The part of the capacity in use that makes an interface mildly congested.
    pub load: f64,
    /// How long a pressure must last.
    pub dwell_ns: u64,
    /// In which time so many round trips, marks, losses (or readings of the load) must speak for it.
    pub evidence: u64,
    /// How long a state is kept when the pressure is gone; doubled each time that it comes back soon,
    pub hold_ns: u64,
    /// up to this.
    pub longest_hold_ns: u64,
    /// How soon is soon, at least.
    pub calm_ns: u64,
    /// How long another cause must seem right before it is told; doubled each time that it turns again soon.
    pub turn_ns: u64,
    /// How long the least round trip counts, at least; ten times as long while the link is congested.
    pub rest_age_ns: u64,
    /// What a link's capacity is taken from.
    pub capacity: Capacity,
    /// At most so many flows.
    pub flows: usize,
    /// At most so many links: an interface is two, a path of it two more. Each takes 5 KiB.
    pub links: usize,
    /// At most so many findings wait to be fetched; beyond, the oldest is dropped and counted.
    pub findings: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            delay_ns: 500_000,
            severe_delay_ns: 5_000_000,
            marked_ppm: (20_000, 200_000),
            lost_ppm: (10_000, 50_000),
            load: 0.9,
            dwell_ns: 1_000_000,
            evidence: 2,
            hold_ns: 50_000_000,
            longest_hold_ns: 30_000_000_000,
            calm_ns: 2_000_000_000,
            turn_ns: 2_000_000,
            rest_age_ns: 60_000_000_000,
            capacity: Capacity::Seen,
            flows: 1 << 16,
            links: 4096,
            findings: 1024,
        }
    }
}
