//! How an agent's tenants share the rate at which its host sends.
//!
//! All of a host's connections meet in the queue of its port, which serves who came first. Who keeps it full makes everybody wait,
//! and has as large a share as it has connections. So a link that has more to send than it can is paced: the port's queue stays
//! short, and the shares are the tenants'. A link that never has a backlog is never bounded.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often shares are divided anew, at most.
pub(crate) const PERIOD: Duration = Duration::from_millis(1);
/// How long what an endpoint has said counts: one that has a backlog says more soon.
const FRESH: Duration = Duration::from_millis(20);

/// Who sends on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The agent's number of the tenant.
    pub tenant: u32,
    /// The tenant's weight, at least 1.
    pub weight: u32,
    /// The tenant's communicator.
    pub communicator: u64,
}

/// What a link has sent of late.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Usage {
    pub(crate) owner: Owner,
    /// Bytes a second.
    pub(crate) rate: u64,
    /// Whether it has more to send than it could.
    pub(crate) backlog: bool,
}

/// A host's port, which all endpoints of an agent send by.
#[derive(Debug, Default)]
pub struct Uplink {
    /// Bytes a second that it sends, headers included; 0 where nobody knows.
    rate: AtomicU64,
    /// What endpoints have said, and when.
    said: Mutex<Vec<(u64, Instant, Vec<Usage>)>>,
    endpoints: AtomicU64,
}

impl Uplink {
    /// Says how many bits a second the port sends; nothing where that is not known, and then nobody is bounded.
    pub fn set_rate(&self, bits_per_second: Option<u64>) {
        self.rate.store(bits_per_second.unwrap_or(0) / 8, Ordering::Relaxed);
    }

    /// A number for an endpoint that sends by this port.
    pub(crate) fn endpoint(&self) -> u64 {
        self.endpoints.fetch_add(1, Ordering::Relaxed)
    }

    /// Takes what an endpoint's links have sent of late, and returns what each may send at most, in bytes a second.
    pub(crate) fn divide(&self, endpoint: u64, now: Instant, usage: &[Usage]) -> Vec<Option<u64>> {
        let rate = self.rate.load(Ordering::Relaxed);
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        said.retain(|(of, at, _)| *of != endpoint && now.saturating_duration_since(*at) < FRESH);
        let all: Vec<Usage> = said.iter().flat_map(|(.., usage)| usage).chain(usage).copied().collect();
        said.push((endpoint, now, usage.to_vec()));
        drop(said);
        let bounds = bounds(payload(rate), &all);
        usage
            .iter()
            .map(|usage| {
                bounds
                    .iter()
                    .find(|(tenant, _)| *tenant == usage.owner.tenant)
                    .filter(|_| usage.backlog)
                    .map(|(_, bound)| *bound)
            })
            .collect()
    }
}

/// What a port carries of payload, a little less than it could: its queue shall not grow. Of a segment of 1448 bytes, 1514 are sent.
fn payload(rate: u64) -> u64 {
    rate / 100 * 94
}

/// What each link with a backlog may send, by tenant: weighted max-min fair among tenants, even among a tenant's links. None are
/// bounded while one communicator sends alone.
fn bounds(rate: u64, usage: &[Usage]) -> Vec<(u32, u64)> {
    let communicator = |usage: &Usage| usage.owner.communicator;
    let alone =
        usage.first().is_none_or(|first| usage.iter().all(|one| communicator(one) == communicator(first)));
    if rate == 0 || alone {
        return Vec::new();
    }
    let mut tenants: Vec<Tenant> = Vec::new();
    for Usage { owner, rate, backlog } in usage {
        let known = tenants.iter().position(|tenant| tenant.number == owner.tenant);
        let at = known.unwrap_or_else(|| {
            tenants.push(Tenant {
                number: owner.tenant,
                weight: u64::from(owner.weight.max(1)),
                free: 0,
                waiting: 0,
            });
            tenants.len() - 1
        });
        let Some(tenant) = tenants.get_mut(at) else { continue };
        if *backlog { tenant.waiting += 1 } else { tenant.free += rate }
    }
    let (mut left, mut weights) = (rate, tenants.iter().map(|tenant| tenant.weight).sum::<u64>());
    // Who wants less than its share has what it wants, and leaves the rest to the others.
    loop {
        let share = |tenant: &Tenant| {
            (u128::from(left) * u128::from(tenant.weight) / u128::from(weights.max(1))) as u64
        };
        let content = tenants.iter().position(|tenant| tenant.waiting == 0 && tenant.free <= share(tenant));
        let Some(content) = content else {
            let bound = |tenant: &Tenant| {
                let share = share(tenant);
                (
                    tenant.number,
                    (share.saturating_sub(tenant.free).max(share / 8) / tenant.waiting.max(1)).max(1),
                )
            };
            return tenants.iter().filter(|tenant| tenant.waiting > 0).map(bound).collect();
        };
        let content = tenants.swap_remove(content);
        left = left.saturating_sub(content.free);
        weights -= content.weight;
    }
}

/// A tenant's links.
struct Tenant {
    number: u32,
    weight: u64,
    /// Bytes a second of links without a backlog.
    free: u64,
    /// Links with one.
    waiting: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(tenant: u32, weight: u32, communicator: u64, rate: u64, backlog: bool) -> Usage {
        Usage { owner: Owner { tenant, weight, communicator }, rate, backlog }
    }

    #[test]
    fn tenants_share_by_weight_whatever_number_of_links_they_have() {
        let mut all = vec![usage(2, 4, 9, 0, true), usage(1, 2, 5, 0, true), usage(1, 2, 6, 0, true)];
        all.extend((10..14).map(|number| usage(0, 1, number, 0, true)));
        assert_eq!(bounds(7000, &all), [(2, 4000), (1, 1000), (0, 250)]);
    }

    #[test]
    fn what_one_does_not_want_is_the_others() {
        let all = [usage(0, 1, 1, 100, false), usage(1, 1, 2, 500, true), usage(2, 3, 3, 0, true)];
        assert_eq!(bounds(1000, &all), [(2, 675), (1, 225)]);
    }

    #[test]
    fn a_tenants_small_operations_come_out_of_its_own_share() {
        let all = [usage(0, 1, 1, 200, false), usage(0, 1, 2, 500, true), usage(1, 1, 3, 0, true)];
        assert_eq!(bounds(1000, &all), [(0, 300), (1, 500)]);
    }

    #[test]
    fn who_sends_alone_is_not_bounded() {
        assert_eq!(bounds(1000, &[usage(0, 1, 1, 500, true), usage(0, 1, 1, 500, true)]), []);
        assert_eq!(bounds(0, &[usage(0, 1, 1, 500, true), usage(1, 1, 2, 500, true)]), []);
        assert_eq!(bounds(1000, &[]), []);
    }

    #[test]
    fn endpoints_share_one_port_until_they_have_nothing_more_to_say() {
        let (port, now) = (Uplink::default(), Instant::now());
        port.set_rate(Some(80_000));
        let [one, other] = [port.endpoint(), port.endpoint()];
        assert_eq!(port.divide(one, now, &[usage(0, 1, 1, 0, true)]), [None]);
        assert_eq!(port.divide(other, now, &[usage(1, 3, 2, 0, true)]), [Some(7050)]);
        assert_eq!(port.divide(one, now, &[usage(0, 1, 1, 0, true)]), [Some(2350)]);
        assert_eq!(port.divide(one, now + FRESH, &[usage(0, 1, 1, 0, true)]), [None]);
    }
}
