//! The aggregator's memory, cut into units, and who may use how many. What is guaranteed is never lent. All else is divided
//! max-min between the tenants that ask for it, by their weights.

use crate::packet::{HEADER_BYTES, MAX_PAYLOAD};
use harmonaize_abi::GrantId;
use std::collections::BTreeMap;
use std::mem;

/// What a communicator may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Whose it is.
    pub tenant: u32,
    /// The tenant's weight where tenants compete, at least 1; its communicators share alike.
    pub weight: u32,
    /// Units that are its own, used or not.
    pub guaranteed: u32,
    /// Most units that it can use.
    pub most: u32,
}

/// Why a communicator is not admitted. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// More would be guaranteed than there is.
    #[error("{requested} units are to be guaranteed, and {free} are not yet promised to others")]
    Promised {
        /// Units asked for.
        requested: u32,
        /// Units that nobody has a promise of.
        free: u32,
    },
    /// Fewer units than one chunk needs, no weight, or less at most than guaranteed.
    #[error("this share is none that can work: {0:?}")]
    Share(Share),
    /// The communicator is there already.
    #[error("communicator {0:#x} has been admitted before")]
    Duplicate(GrantId),
}

struct Holding {
    share: Share,
    /// Whether it takes part in the division of what nobody is guaranteed.
    active: bool,
    /// What it may hold by the last division.
    quota: u32,
    /// Units that nobody else can take; falls to the quota when those above it are empty.
    owned: u32,
    used: u32,
}

/// Units of memory and their holders.
pub struct Pool {
    units: Vec<Box<[u8]>>,
    unit_bytes: usize,
    free: Vec<u32>,
    holdings: BTreeMap<GrantId, Holding>,
    /// Whether a holding differs from its quota.
    rebalancing: bool,
    /// Whether there was a division that holders have not been told of.
    shares_changed: bool,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("units", &self.units.len()).field("free", &self.free.len()).finish()
    }
}

impl Pool {
    /// A pool of `units` units, each for a payload of `unit_bytes` bytes, at most [`MAX_PAYLOAD`].
    pub fn new(units: u32, unit_bytes: usize) -> Self {
        let unit_bytes = unit_bytes.min(MAX_PAYLOAD);
        let unit = || vec![0; HEADER_BYTES + unit_bytes].into_boxed_slice();
        Self {
            units: (0..units).map(|_| unit()).collect(),
            unit_bytes,
            free: (0..units).rev().collect(),
            holdings: BTreeMap::new(),
            rebalancing: false,
            shares_changed: false,
        }
    }

    /// Bytes of payload that a unit holds.
    pub fn unit_bytes(&self) -> usize {
        self.unit_bytes
    }

    /// Units that hold nothing.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// All units.
    pub fn units(&self) -> u32 {
        u32::try_from(self.units.len()).unwrap_or(u32::MAX)
    }

    /// Units that nobody is guaranteed.
    fn unpromised(&self) -> u32 {
        let promised = self.holdings.values().map(|holding| holding.share.guaranteed).sum::<u32>();
        self.units().saturating_sub(promised)
    }

    /// Promises `share` to a communicator whose chunks take `grain` units each.
    ///
    /// # Errors
    /// See [`PoolError`].
    pub fn admit(&mut self, communicator: GrantId, share: Share, grain: u32) -> Result<(), PoolError> {
        // Two sets of at least one slot.
        if share.guaranteed < grain.saturating_mul(2)
            || grain == 0
            || share.weight == 0
            || share.most < share.guaranteed
        {
            return Err(PoolError::Share(share));
        }
        if self.holdings.contains_key(&communicator) {
            return Err(PoolError::Duplicate(communicator));
        }
        let free = self.unpromised();
        if share.guaranteed > free {
            return Err(PoolError::Promised { requested: share.guaranteed, free });
        }
        let holding = Holding { share, active: false, quota: share.guaranteed, owned: 0, used: 0 };
        self.holdings.insert(communicator, holding);
        self.divide();
        Ok(())
    }

    /// Takes back what a communicator has; its units were given back before.
    pub fn dismiss(&mut self, communicator: GrantId) {
        self.holdings.remove(&communicator);
        self.divide();
    }

    /// Says whether a communicator wants more than what it is guaranteed.
    pub fn set_active(&mut self, communicator: GrantId, active: bool) {
        let holding = self.holdings.get_mut(&communicator);
        if holding.is_some_and(|holding| mem::replace(&mut holding.active, active) != active) {
            self.divide();
        }
    }

    /// What a communicator may hold by the last division, units.
    pub fn quota(&self, communicator: GrantId) -> u32 {
        self.holdings.get(&communicator).map_or(0, |holding| holding.quota)
    }

    /// The units that a communicator has for itself now. It has more than its quota until it has emptied what is above it,
    /// and less until others have.
    pub fn owned(&self, communicator: GrantId) -> u32 {
        self.holdings.get(&communicator).map_or(0, |holding| holding.owned)
    }

    /// Divides anew. Allocates: only when communicators come, go, wake or fall idle.
    fn divide(&mut self) {
        let mut tenants: BTreeMap<u32, (u32, u32)> = BTreeMap::new();
        for holding in self.holdings.values().filter(|holding| holding.active) {
            let (wanted, weight) = tenants.entry(holding.share.tenant).or_default();
            *wanted = wanted.saturating_add(holding.share.most - holding.share.guaranteed);
            *weight = (*weight).max(holding.share.weight);
        }
        let wants: Vec<(u32, u32)> = tenants.values().copied().collect();
        let burst = fill(self.unpromised(), &wants);
        for holding in self.holdings.values_mut() {
            holding.quota = holding.share.guaranteed;
        }
        for (tenant, burst) in tenants.keys().zip(burst) {
            let of_tenant = |holding: &&mut Holding| holding.active && holding.share.tenant == *tenant;
            let wants: Vec<(u32, u32)> = self
                .holdings
                .values_mut()
                .filter(of_tenant)
                .map(|holding| (holding.share.most - holding.share.guaranteed, 1))
                .collect();
            let parts = fill(burst, &wants);
            for (holding, part) in self.holdings.values_mut().filter(of_tenant).zip(parts) {
                holding.quota += part;
            }
        }
        (self.rebalancing, self.shares_changed) = (true, true);
        self.hand_out();
    }

    /// Whether quotas changed since this was last asked.
    pub(crate) fn take_shares_changed(&mut self) -> bool {
        mem::take(&mut self.shares_changed)
    }

    /// A communicator has nothing above its quota any more.
    pub(crate) fn drained(&mut self, communicator: GrantId) {
        let Some(holding) = self.holdings.get_mut(&communicator) else { return };
        if holding.owned > holding.quota {
            holding.owned = holding.quota;
            self.hand_out();
        }
    }

    /// Gives what nobody owns to those below their quota, guarantees first.
    fn hand_out(&mut self) {
        if !self.rebalancing {
            return;
        }
        let owned = self.holdings.values().map(|holding| holding.owned).sum::<u32>();
        let mut spare = self.units().saturating_sub(owned);
        for guaranteed in [true, false] {
            for holding in self.holdings.values_mut() {
                let up_to = if guaranteed { holding.share.guaranteed } else { holding.quota };
                let part = up_to.saturating_sub(holding.owned).min(spare);
                holding.owned += part;
                spare -= part;
            }
        }
        self.rebalancing = self.holdings.values().any(|holding| holding.owned != holding.quota);
    }

    /// Whether holdings are on their way to other quotas.
    pub(crate) fn is_rebalancing(&self) -> bool {
        self.rebalancing
    }

    /// A unit for a communicator, if it owns one more than it uses.
    pub(crate) fn take(&mut self, communicator: GrantId) -> Option<u32> {
        let holding = self.holdings.get_mut(&communicator)?;
        if holding.used >= holding.owned {
            return None;
        }
        let unit = self.free.pop()?;
        holding.used += 1;
        Some(unit)
    }

    /// Takes a unit back.
    pub(crate) fn give_back(&mut self, communicator: GrantId, unit: u32) {
        if let Some(holding) = self.holdings.get_mut(&communicator) {
            holding.used = holding.used.saturating_sub(1);
        }
        self.free.push(unit);
    }

    /// A unit's bytes: room for a header, then its payload.
    pub(crate) fn unit(&self, unit: u32) -> &[u8] {
        self.units.get(unit as usize).map_or(&[], |unit| unit)
    }

    /// The same, to write.
    pub(crate) fn unit_mut(&mut self, unit: u32) -> &mut [u8] {
        self.units.get_mut(unit as usize).map_or(&mut [], |unit| unit)
    }

    /// Takes a unit's memory out while others are read beside it; [`Pool::put`] brings it back.
    pub(crate) fn lift(&mut self, unit: u32) -> Box<[u8]> {
        self.units.get_mut(unit as usize).map(mem::take).unwrap_or_default()
    }

    /// Brings back what [`Pool::lift`] took.
    pub(crate) fn put(&mut self, unit: u32, memory: Box<[u8]>) {
        if let Some(unit) = self.units.get_mut(unit as usize) {
            *unit = memory;
        }
    }
}

/// Divides `capacity` max-min between those who want some, by weight. Nobody gets more than wanted, and nobody could get more
/// without another having less, by weight, than itself. Whole units; the odd ones go to the first.
fn fill(mut capacity: u32, wants: &[(u32, u32)]) -> Vec<u32> {
    let mut given = vec![0; wants.len()];
    let mut open: Vec<usize> = (0..wants.len()).collect();
    let want = |index: usize| wants.get(index).copied().unwrap_or_default();
    loop {
        let weights: u64 = open.iter().map(|index| u64::from(want(*index).1)).sum();
        let share = |index: usize| {
            u32::try_from(u64::from(capacity) * u64::from(want(index).1) / weights.max(1)).unwrap_or(u32::MAX)
        };
        let content: Vec<usize> =
            open.iter().copied().filter(|index| want(*index).0 <= share(*index)).collect();
        if content.is_empty() {
            let shares: Vec<(usize, u32)> = open.iter().map(|index| (*index, share(*index))).collect();
            let mut odd = capacity.saturating_sub(shares.iter().map(|(_, share)| share).sum());
            for (index, share) in shares {
                let more = u32::from(odd > 0);
                odd -= more;
                if let Some(given) = given.get_mut(index) {
                    *given = share + more;
                }
            }
            return given;
        }
        for index in content {
            open.retain(|other| *other != index);
            if let Some(given) = given.get_mut(index) {
                *given = want(index).0;
                capacity -= want(index).0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn share(tenant: u32, guaranteed: u32, most: u32) -> Share {
        Share { tenant, weight: 1, guaranteed, most }
    }

    fn jain(values: &[f64]) -> f64 {
        let (sum, squares) =
            values.iter().fold((0.0, 0.0), |(sum, squares), value| (sum + value, squares + value * value));
        sum * sum / (values.len() as f64 * squares)
    }

    proptest! {
        #[test]
        fn a_division_is_max_min(capacity in 0..5000_u32, wants in proptest::collection::vec((0..2000_u32, 1..8_u32), 0..12)) {
            let given = fill(capacity, &wants);
            let wanted = wants.iter().map(|(want, _)| want).sum::<u32>();
            prop_assert_eq!(given.iter().sum::<u32>(), capacity.min(wanted));
            for (one, (want, weight)) in given.iter().zip(&wants) {
                prop_assert!(one <= want);
                if one < want {
                    // Nobody has, by weight, more than whoever lacks something: to within a unit.
                    for (other, (_, others)) in given.iter().zip(&wants) {
                        prop_assert!(u64::from(other.saturating_sub(1)) * u64::from(*weight) <= u64::from(one + 1) * u64::from(*others));
                    }
                }
            }
        }
    }

    #[test]
    fn eight_tenants_share_alike_however_many_communicators_one_has() {
        let mut pool = Pool::new(1024, 64);
        for tenant in 0..8 {
            for number in 0..=tenant {
                let communicator = GrantId(u64::from(tenant * 100 + number));
                pool.admit(communicator, share(tenant, 2, 4096), 1).unwrap();
                pool.set_active(communicator, true);
            }
        }
        let of = |tenant: u32| {
            (0..=tenant).map(|number| f64::from(pool.quota(GrantId(u64::from(tenant * 100 + number))))).sum()
        };
        let totals: Vec<f64> = (0..8).map(of).collect();
        // A promise counts beside the division: 2 units a communicator.
        assert!(jain(&totals) >= 0.99, "{totals:?}");
        assert_eq!(totals.iter().sum::<f64>(), 1024.0);
    }

    #[test]
    fn a_hog_takes_no_reserved_unit() {
        let mut pool = Pool::new(100, 64);
        pool.admit(GrantId(1), share(1, 20, 1000), 1).unwrap();
        pool.admit(GrantId(2), share(2, 30, 1000), 1).unwrap();
        pool.set_active(GrantId(1), true);
        let units: Vec<u32> = std::iter::from_fn(|| pool.take(GrantId(1))).collect();
        assert_eq!(units.len(), 70, "all but what the other is guaranteed");
        let reserved: Vec<u32> = std::iter::from_fn(|| pool.take(GrantId(2))).collect();
        assert_eq!(reserved.len(), 30);
        assert!(pool.take(GrantId(1)).is_none());
        pool.set_active(GrantId(2), true);
        assert_eq!((pool.quota(GrantId(1)), pool.quota(GrantId(2))), (45, 55));
        assert!(pool.take(GrantId(2)).is_none(), "what the hog still holds is not there yet");
        units.iter().for_each(|unit| pool.give_back(GrantId(1), *unit));
        assert_eq!(pool.owned(GrantId(1)), 70, "until it has emptied what is above its quota");
        pool.drained(GrantId(1));
        assert_eq!((pool.owned(GrantId(1)), pool.owned(GrantId(2))), (45, 55));
        pool.set_active(GrantId(1), false);
        pool.drained(GrantId(1));
        assert_eq!((pool.owned(GrantId(1)), pool.owned(GrantId(2))), (20, 80));
    }

    #[test]
    fn promises_are_kept_or_not_made() {
        let mut pool = Pool::new(10, 64);
        pool.admit(GrantId(1), share(1, 6, 10), 1).unwrap();
        assert_eq!(
            pool.admit(GrantId(2), share(2, 6, 6), 1),
            Err(PoolError::Promised { requested: 6, free: 4 })
        );
        assert_eq!(pool.admit(GrantId(1), share(2, 2, 6), 1), Err(PoolError::Duplicate(GrantId(1))));
        assert!(matches!(pool.admit(GrantId(3), share(2, 3, 6), 2), Err(PoolError::Share(_))));
        assert!(matches!(
            pool.admit(GrantId(3), Share { weight: 0, ..share(2, 4, 6) }, 1),
            Err(PoolError::Share(_))
        ));
        pool.set_active(GrantId(1), true);
        assert_eq!(pool.owned(GrantId(1)), 10);
        pool.admit(GrantId(2), share(2, 4, 4), 1).unwrap();
        assert_eq!(
            (pool.quota(GrantId(1)), pool.owned(GrantId(2))),
            (6, 0),
            "the promise waits for what is lent"
        );
        pool.drained(GrantId(1));
        assert_eq!((pool.owned(GrantId(1)), pool.owned(GrantId(2))), (6, 4));
        pool.dismiss(GrantId(2));
        assert_eq!(pool.owned(GrantId(1)), 10);
    }
}
