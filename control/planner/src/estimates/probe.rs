//! What trains of packets tell of the paths that they took.

use crate::path::Path;
use crate::units::Rate;

/// A probe that lost more, of a million packets, is not good.
pub(super) const LOSSY_PPM: u32 = 50_000;

/// A probe that comes out at so much of the rate at which it goes in, in percent, met nobody.
const CLEAN: u128 = 85;

/// What a train of packets along a path told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// The way that the packets took.
    pub path: Path,
    /// The rate at which they came out; 0 where too few arrived to tell.
    pub received: Rate,
    /// Of a million packets, those that were lost.
    pub lost_ppm: u32,
    /// Whether a low rate tells of others: no traffic of ours was in the train's way. A high one always tells.
    pub conclusive: bool,
}

impl Probe {
    /// Whether it came out as it went into a path of such a rate.
    pub fn is_clean(&self, rate: Rate) -> bool {
        let received = u128::from(self.received.0.min(rate.0));
        self.lost_ppm < LOSSY_PPM && received * 100 >= u128::from(rate.0) * CLEAN
    }

    /// What others sent into the narrowest link of a path of such a rate meanwhile. A train that comes to a link of capacity C
    /// back to back at rate C comes out at C C / (C + f), where f is theirs.
    pub fn foreign(&self, rate: Rate) -> Rate {
        let received = self.received.0.clamp(1, rate.0.max(1));
        let sum = u128::from(rate.0) * u128::from(rate.0) / u128::from(received);
        let foreign = u64::try_from(sum).unwrap_or(u64::MAX).saturating_sub(rate.0);
        Rate(foreign.min(most_foreign(rate.0)))
    }
}

/// However much others take, something is thought to be left.
pub(super) fn most_foreign(rate: u64) -> u64 {
    rate - rate / 10
}
