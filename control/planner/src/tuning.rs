//! Sizes of segments, messages and rings for a group of hosts.

use crate::ring_order::order;
use harmonaize_topology::{HostId, Topology};
use harmonaize_topology::{Path, PathFinder};
use harmonaize_units::{Bytes, Nanos, Rate};
use std::cmp::Reverse;

/// How long a segment may last at the planned rate. All that are in flight are done before a change of plan takes effect.
const SEGMENT_TIME: Nanos = Nanos(7_500_000);

/// Segments are no smaller, however slow links are, and messages as they are cut no smaller and no larger.
const MIN_SEGMENT: u64 = 32 << 10;
const CHUNK_RANGE: (u64, u64) = (8 << 10, 256 << 10);

/// Segments in flight.
const CHANNEL_RANGE: (u64, u64) = (4, 8);

/// What all participants of a communicator share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Segments in flight.
    pub channels: u32,
    /// Most bytes of a message.
    pub chunk: Bytes,
    /// Most bytes of a segment.
    pub segment: Bytes,
    /// Operations up to so many bytes have their inputs copied.
    pub copy_threshold: Bytes,
    /// Slots of a landing ring.
    pub landing_slots: u32,
}

impl Tuning {
    /// For ranks that share a host: nothing crosses a wire, so segments are as large as is useful.
    pub const ONE_HOST: Self = Self {
        channels: 4,
        chunk: Bytes(256 << 10),
        segment: Bytes(4 << 20),
        copy_threshold: Bytes(64 << 10),
        landing_slots: 4,
    };
}

/// Returns the sizes for a group of hosts.
/// A segment lasts at most some 7.5 ms on the slowest link of the ring, where that is not very slow; each of n hosts sends
/// 2(n-1)/n of it. A message is a host's share of it within 8..=256 KiB. Four to eight segments are in flight, as many, and as
/// large, as cover twice what the longest way holds.
pub fn tuning(topology: &Topology, hosts: &[HostId]) -> Tuning {
    let mut ways = PathFinder::new(topology);
    tuning_by(topology, hosts, |from, to| ways.between(from, to))
}

/// The same where these are the paths between two.
pub(crate) fn tuning_by(
    topology: &Topology,
    hosts: &[HostId],
    mut paths: impl FnMut(HostId, HostId) -> Vec<Path>,
) -> Tuning {
    let count = hosts.len() as u64;
    let ring: Vec<HostId> =
        order(topology, hosts).iter().filter_map(|index| hosts.get(*index)).copied().collect();
    let hops = ring.iter().zip(ring.iter().cycle().skip(1));
    let widest = |(from, to): (&HostId, &HostId)| {
        let paths = paths(*from, *to).into_iter();
        let kinds = paths.map(|path| (topology.path_rate(&path), Reverse(topology.path_delay(&path))));
        kinds.max()
    };
    let paths: Vec<(Rate, Reverse<Nanos>)> = hops.filter_map(widest).collect();
    let Some(rate) = paths.iter().map(|(rate, _)| *rate).min() else {
        return Tuning::ONE_HOST;
    };
    let delay = paths.iter().map(|(_, delay)| delay.0).max().unwrap_or_default();
    let allowed = segment_at(rate, count);
    let round_trip = Nanos(delay.0.saturating_mul(2));
    let held = rate.bytes_in(round_trip).0.saturating_mul(2);
    let covers = held.div_ceil(CHANNEL_RANGE.1).min(CHUNK_RANGE.1).next_power_of_two();
    let chunk = previous_power_of_two(allowed / count).max(covers).clamp(CHUNK_RANGE.0, CHUNK_RANGE.1);
    let segment = (chunk * count).min(allowed.max(covers * count).max(MIN_SEGMENT)) & !4095;
    let channels = held.div_ceil(chunk).clamp(CHANNEL_RANGE.0, CHANNEL_RANGE.1) as u32;
    Tuning {
        channels,
        chunk: Bytes(chunk),
        segment: Bytes(segment),
        copy_threshold: Bytes(64 << 10),
        landing_slots: 4,
    }
}

/// Bytes of a segment that lasts [`SEGMENT_TIME`] in a ring of `count` hosts.
fn segment_at(rate: Rate, count: u64) -> u64 {
    let sent = rate.bytes_in(SEGMENT_TIME).0;
    let steps = count.saturating_sub(1).max(1).saturating_mul(2);
    (u128::from(sent) * u128::from(count) / u128::from(steps)).min(1 << 30) as u64
}

fn previous_power_of_two(value: u64) -> u64 {
    1 << value.max(1).ilog2()
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_topology::text::star_text;
    use proptest::prelude::*;

    fn star(hosts: usize, rate: &str, delay: &str) -> (Topology, Vec<HostId>) {
        (Topology::parse(&star_text(hosts, rate, delay)).unwrap(), (0..hosts).map(HostId).collect())
    }

    #[test]
    fn four_hosts_at_one_gigabit() {
        let (topology, hosts) = star(4, "1Gbit/s", "50us");
        let expected = Tuning {
            channels: 4,
            chunk: Bytes(128 << 10),
            segment: Bytes(512 << 10),
            copy_threshold: Bytes(64 << 10),
            landing_slots: 4,
        };
        assert_eq!(tuning(&topology, &hosts), expected);
        assert_eq!(tuning(&topology, &hosts[..1]), Tuning::ONE_HOST);
        assert_eq!(tuning(&topology, &[]), Tuning::ONE_HOST);
    }

    #[test]
    fn long_paths_have_more_in_flight() {
        let (topology, hosts) = star(4, "10Gbit/s", "250us");
        assert_eq!(tuning(&topology, &hosts).channels, 8);
        // So slow that a segment's time is small messages.
        let (topology, hosts) = star(8, "200Mbit/s", "50us");
        let slow = tuning(&topology, &hosts);
        assert_eq!((slow.channels, slow.chunk, slow.segment), (4, Bytes(8 << 10), Bytes(64 << 10)));
        // And so long a way that these would not fill it.
        let (topology, hosts) = star(8, "200Mbit/s", "5ms");
        let long = tuning(&topology, &hosts);
        assert_eq!((long.channels, long.chunk, long.segment), (8, Bytes(128 << 10), Bytes(1 << 20)));
    }

    proptest! {
        #[test]
        fn within_bounds(hosts in 2_usize..40, rate in 1_u64..400_000_000_000, delay in 0_u64..1_000_000_000) {
            let (topology, group) = star(hosts, &format!("{rate}bit/s"), &format!("{delay}ns"));
            let tuning = tuning(&topology, &group);
            prop_assert!((8 << 10..=256 << 10).contains(&tuning.chunk.0) && tuning.chunk.0.is_power_of_two());
            prop_assert!((4..=8).contains(&tuning.channels));
            prop_assert!(tuning.segment.0 >= 32 << 10 && tuning.segment.0.is_multiple_of(4096));
            let held = Rate(rate).bytes_in(Nanos(delay * 4)).0.saturating_mul(2);
            prop_assert!(tuning.chunk.0 * u64::from(tuning.channels) >= held.min(2 << 20), "it fills the way");
            let lasts = |bytes: u64| u128::from(bytes) * 2 * (hosts as u128 - 1) / hosts as u128 * 8_000_000_000;
            let short = lasts(tuning.segment.0) / u128::from(rate) <= 7_500_000;
            let needed = tuning.segment.0 <= (32 << 10).max(held / 4 * hosts as u64);
            prop_assert!(short || needed);
        }
    }
}
