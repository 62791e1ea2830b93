//! Communicators of a tenant that use one window to aggregators together.

use harmonaize_transport::TrafficClass;

/// What a way of each class counts in the window, as in [`TrafficClass::ALL`].
const WEIGHTS: [u32; TrafficClass::ALL.len()] = [4, 2, 1];

/// The ways to aggregators of each tenant that have something to do, by their weights. They share a window, so that who has many
/// communicators gets no more of the links from this host than who has one; of the window urgent ones have more.
#[derive(Debug, Default)]
pub(crate) struct Sharing(Vec<u32>);

fn weight(class: TrafficClass) -> u32 {
    WEIGHTS.get(class as usize).copied().unwrap_or(1)
}

impl Sharing {
    /// Makes room for a tenant of this number.
    pub(crate) fn admit(&mut self, tenant: u32) {
        let least = tenant as usize + 1;
        if self.0.len() < least {
            self.0.resize(least, 0);
        }
    }

    /// Counts anew: tenant and class of each that has something to do.
    pub(crate) fn count(&mut self, busy: impl Iterator<Item = (u32, TrafficClass)>) {
        self.0.fill(0);
        for (tenant, class) in busy {
            if let Some(sum) = self.0.get_mut(tenant as usize) {
                *sum = sum.saturating_add(weight(class));
            }
        }
    }

    /// The number of parts of the tenant's window of which a path of this class has one. All parts together are no more than
    /// the window.
    pub(crate) fn of(&self, tenant: u32, class: TrafficClass) -> u16 {
        let Some(sum) = self.0.get(tenant as usize) else { return 1 };
        u16::try_from(sum.div_ceil(weight(class))).unwrap_or(u16::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use TrafficClass::{Bulk, Latency, Normal};

    #[test]
    fn each_tenant_s_are_counted_anew_and_strangers_share_with_nobody() {
        let mut sharing = Sharing::default();
        sharing.admit(2);
        sharing.admit(0);
        sharing.count([2, 0, 2, 7, 2].map(|tenant| (tenant, Normal)).into_iter());
        assert_eq!([0, 1, 2, 7].map(|tenant| sharing.of(tenant, Normal)), [1, 0, 3, 1]);
        sharing.count(std::iter::once((1, Normal)));
        assert_eq!([0, 1, 2].map(|tenant| sharing.of(tenant, Normal)), [0, 1, 0]);
    }

    #[test]
    fn urgent_ways_have_more_of_the_window() {
        let mut sharing = Sharing::default();
        sharing.admit(0);
        let parts = |sharing: &Sharing| [Latency, Normal, Bulk].map(|class| sharing.of(0, class));
        for class in [Latency, Normal, Bulk] {
            sharing.count(std::iter::repeat_n((0, class), 5));
            assert_eq!(sharing.of(0, class), 5, "equals have equal parts");
        }
        sharing.count([Latency, Bulk, Bulk, Bulk, Bulk].map(|class| (0, class)).into_iter());
        assert_eq!(parts(&sharing), [2, 4, 8], "one of five has half of it");
        sharing.count([Latency, Normal, Bulk].map(|class| (0, class)).into_iter());
        let all: f64 = parts(&sharing).iter().map(|parts| 1.0 / f64::from(*parts)).sum();
        assert!(all <= 1.0, "{all}");
    }
}
