//! What metrics show of own communicators and their tenants: few series, however many communicators come and go.

use crate::telemetry::cpu_budget::nanoseconds;
use crate::telemetry::own_flows::Traffic;
use harmonaize_abi::Collective;
use harmonaize_metrics::{Buckets, Recent};
use std::collections::BTreeMap;
use std::time::Duration;

/// Communicators with series of their own: all that live, up to this number, and those that ended last.
pub(crate) const COMMUNICATORS: usize = 1280;
/// Those of one tenant among them at most: a quarter, so that no tenant has all.
pub(crate) const TENANT_COMMUNICATORS: usize = COMMUNICATORS / 4;
/// Tenants, likewise.
const TENANTS: usize = 512;
/// The label of those that live beyond.
pub(crate) const OTHER: &str = "other";

/// Upper bounds of operations' durations, in seconds.
static SECONDS: [f64; 10] = [0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 10.0];
/// Upper bounds of busbw, in bytes a second.
static BUSBW: [f64; 9] = [1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10, 3e10, 1e11];

/// Size classes of tensors: the largest bytes of each, and its name.
const SIZES: [(u64, &str); SIZE_CLASSES] = [(64 << 10, "small"), (4 << 20, "medium"), (u64::MAX, "large")];
/// How many there are.
const SIZE_CLASSES: usize = 3;

/// How long operations took, by size class.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Durations([Buckets<10>; SIZE_CLASSES]);

impl Default for Durations {
    fn default() -> Self {
        Self([const { Buckets::new(&SECONDS) }; SIZE_CLASSES])
    }
}

impl Durations {
    /// An operation on a tensor of so many bytes took so long.
    pub(crate) fn observe(&mut self, bytes: u64, took: Duration) {
        if let Some(buckets) = self.0.get_mut(size_class(bytes)) {
            buckets.observe(nanoseconds(took) as f64 / 1e9);
        }
    }

    fn add(&mut self, more: &Self) {
        self.0.iter_mut().zip(&more.0).for_each(|(buckets, more)| buckets.add(more));
    }

    /// Returns those that there are, by the names of their size classes.
    pub(crate) fn classes(&self) -> impl Iterator<Item = (&'static str, &Buckets<10>)> {
        let named = SIZES.iter().map(|(_, name)| *name).zip(&self.0);
        named.filter(|(_, buckets)| buckets.count() > 0)
    }
}

fn size_class(bytes: u64) -> usize {
    SIZES.partition_point(|(most, _)| *most < bytes)
}

/// What counters came to, in the order in which metrics name them.
pub(crate) type Sums = [u64; 10];

/// Tenant and name.
pub(crate) type Key = (String, String);

/// What all of a key or tenant came to.
#[derive(Clone, Debug, Default)]
pub(crate) struct SeriesTotals {
    /// By tenant and communicator.
    pub(crate) communicators: BTreeMap<Key, Sums>,
    /// By tenant.
    pub(crate) tenants: BTreeMap<String, Durations>,
}

/// Which communicators and tenants have series of their own, and what those that ended came to.
#[derive(Clone, Debug)]
pub struct Series {
    communicators: Recent<Key, Sums>,
    tenants: Recent<String, Durations>,
    /// What those without a series of their own came to.
    other: (Sums, Durations),
    /// By collective and size class.
    busbw: BTreeMap<(Collective, usize), Buckets<9>>,
}

impl Default for Series {
    fn default() -> Self {
        Self {
            communicators: Recent::new(COMMUNICATORS),
            tenants: Recent::new(TENANTS),
            other: (Sums::default(), Durations::default()),
            busbw: BTreeMap::new(),
        }
    }
}

/// Which series a communicator has of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Named {
    communicator: bool,
    tenant: bool,
}

impl Series {
    /// A communicator begins. It has series of its own if there is room, and its tenant does not have its share
    /// already.
    pub(crate) fn begun(&mut self, tenant: &str, name: &str) -> Named {
        let key = (tenant.to_owned(), name.to_owned());
        let communicator =
            self.communicators.begin_within(&key, TENANT_COMMUNICATORS, |(of, _)| of == tenant);
        Named { communicator, tenant: self.tenants.begin(&tenant.to_owned()) }
    }

    /// A communicator is over: what it came to stays for as long as there is room.
    pub(crate) fn ended(&mut self, traffic: &Traffic) {
        let key = (traffic.tenant.clone(), traffic.name.clone());
        let (own, tenant) = (traffic.named.communicator, traffic.named.tenant);
        let sums = self.communicators.get_mut(&key).filter(|_| own);
        add(sums.unwrap_or(&mut self.other.0), traffic);
        let durations = self.tenants.get_mut(&key.0).filter(|_| tenant);
        durations.unwrap_or(&mut self.other.1).add(&traffic.durations);
        if own {
            self.communicators.end(&key);
        }
        if tenant {
            self.tenants.end(&key.0);
        }
    }

    /// An operation of a communicator of so many ranks has ended well.
    pub(crate) fn operation(&mut self, collective: Collective, ranks: u32, bytes: u64, took: Duration) {
        let factor = collective.bus_factor(ranks);
        if factor > 0.0 && !took.is_zero() && bytes > 0 {
            let buckets = self.busbw.entry((collective, size_class(bytes)));
            let busbw = bytes as f64 * factor / (nanoseconds(took) as f64 / 1e9);
            buckets.or_insert(Buckets::new(&BUSBW)).observe(busbw);
        }
    }

    /// Returns busbw by collective and size class.
    pub(crate) fn busbw(&self) -> impl Iterator<Item = (Collective, &'static str, &Buckets<9>)> {
        let name = |class: usize| SIZES.get(class).map_or(OTHER, |(_, name)| name);
        self.busbw.iter().map(move |((collective, class), buckets)| (*collective, name(*class), buckets))
    }

    /// Returns everything that is shown while these communicators live.
    pub(crate) fn totals<'a>(&self, living: impl Iterator<Item = &'a Traffic>) -> SeriesTotals {
        let other = || (OTHER.to_owned(), OTHER.to_owned());
        let communicators = self.communicators.iter().map(|(key, sums)| (key.clone(), *sums));
        let tenants = self.tenants.iter().map(|(tenant, durations)| (tenant.clone(), durations.clone()));
        let mut totals = SeriesTotals { communicators: communicators.collect(), tenants: tenants.collect() };
        if self.other.0 != Sums::default() {
            totals.communicators.insert(other(), self.other.0);
        }
        if self.other.1 != Durations::default() {
            totals.tenants.insert(OTHER.to_owned(), self.other.1.clone());
        }
        for traffic in living {
            let Named { communicator, tenant } = traffic.named;
            let key = if communicator { (traffic.tenant.clone(), traffic.name.clone()) } else { other() };
            add(totals.communicators.entry(key).or_default(), traffic);
            let tenant = if tenant { traffic.tenant.clone() } else { OTHER.to_owned() };
            totals.tenants.entry(tenant).or_default().add(&traffic.durations);
        }
        totals
    }
}

fn add(sums: &mut Sums, traffic: &Traffic) {
    let values = [
        traffic.operations,
        traffic.failed,
        traffic.sent_bytes,
        traffic.received_bytes,
        traffic.coded,
        traffic.refused,
        traffic.saved_bytes,
        traffic.aggregated,
        traffic.fallback,
        traffic.abandoned_sessions,
    ];
    for (sum, value) in sums.iter_mut().zip(values) {
        *sum = sum.saturating_add(value);
    }
}
