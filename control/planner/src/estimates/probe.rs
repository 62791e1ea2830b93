//! What trains of packets tell of the paths that they took.

use harmonaize_topology::Path;
use harmonaize_topology::Topology;
use harmonaize_units::Rate;

/// A probe that lost more, of a million packets, is not good.
pub(super) const MAX_CLEAN_LOSS_PPM: u32 = 50_000;

/// A probe that comes out at so much of the rate at which it goes in, in percent, met nobody.
const CLEAN_PERCENT: u128 = 85;

/// One that comes out at more than so much of it, in percent, tells nothing.
const MAX_PERCENT: u128 = 102;

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
        let received = u128::from(self.received.0);
        let quick = received * 100 >= u128::from(rate.0) * CLEAN_PERCENT;
        self.lost_ppm < MAX_CLEAN_LOSS_PPM && quick && !self.is_impossible(rate)
    }

    /// Whether it came out quicker than a path of such a rate carries. Something on the path was late, and let it go all at once, with
    /// whatever others sent. That tells nothing.
    pub fn is_impossible(&self, rate: Rate) -> bool {
        u128::from(self.received.0) * 100 > u128::from(rate.0) * MAX_PERCENT
    }

    /// What others sent into a link of such a rate meanwhile. A train that comes to a link of capacity C at rate `into`, its own or that
    /// of a quicker link before it, comes out at C `into` / (`into` + f), where f is theirs.
    pub fn cross_traffic(&self, rate: Rate, into: Rate) -> Rate {
        let received = self.received.0.clamp(1, rate.0.max(1));
        let sum = u128::from(rate.0) * u128::from(into.0) / u128::from(received);
        let cross_traffic = u64::try_from(sum).unwrap_or(u64::MAX).saturating_sub(into.0);
        Rate(cross_traffic.min(max_cross_traffic(rate.0)))
    }

    /// What others sent into the first of the narrowest links of the path.
    pub fn cross_traffic_on_path(&self, topology: &Topology) -> Rate {
        let narrow = topology.path_rate(&self.path);
        let mut before: Option<Rate> = None;
        for link in self.path.links() {
            let rate = topology.links().get(link.link.0).map_or(Rate(0), |link| link.rate);
            if rate == narrow {
                return self.cross_traffic(rate, before.unwrap_or(rate));
            }
            before = Some(before.map_or(rate, |before| before.min(rate)));
        }
        Rate(0)
    }
}

/// However much others take, something is thought to be left.
pub(super) fn max_cross_traffic(rate: u64) -> u64 {
    rate - rate / 10
}
