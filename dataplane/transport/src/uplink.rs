//! How an agent's tenants share the rate at which its host sends.
//!
//! All of a host's connections meet in the queue of its port, which serves who came first. Who keeps it full makes everybody wait,
//! and has as large a share as it has connections. So a link that has more to send than it can is paced: the port's queue stays
//! short, and the shares are the tenants'. A link that never has a backlog is never bounded.

use harmonaize_abi::CommunicatorId;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often shares are divided anew, at most.
pub(crate) const PERIOD: Duration = Duration::from_millis(1);
/// How long a report of an endpoint counts. One that sleeps between two chunks gives none, and its links stay bounded meanwhile: it is
/// longer than they do.
const FRESH: Duration = Duration::from_millis(30);

/// Who sends on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The agent's number of the tenant.
    pub tenant: u32,
    /// The tenant's weight, at least 1.
    pub weight: u32,
    /// The tenant's communicator.
    pub communicator: CommunicatorId,
}

/// What a link has sent of late.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Usage {
    pub(crate) owner: Owner,
    /// Bytes a second.
    pub(crate) rate: u64,
    /// Whether it has more to send than it could, or had a moment ago: then it is bounded.
    pub(crate) backlog: bool,
    /// Whether it sends, or has something to send. One that only had a backlog has no part in its tenant's share.
    pub(crate) waits: bool,
}

/// A host's port, which all endpoints of an agent send by.
#[derive(Debug, Default)]
pub struct Uplink {
    /// Bytes a second that it sends, headers included; 0 where nobody knows.
    rate: AtomicU64,
    table: Mutex<Table>,
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

    /// Takes what an endpoint's links have sent of late. Gives what each may send at most, in bytes a second. Allocates
    /// only where there is more than ever before.
    pub(crate) fn divide(&self, endpoint: u64, now: Instant, usage: &[Usage], bounds: &mut Vec<Option<u64>>) {
        let rate = self.rate.load(Ordering::Relaxed);
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        table.note(endpoint, now, usage);
        table.divide(payload(rate), now);
        bounds.clear();
        bounds.extend(usage.iter().map(|one| table.bound(one)));
    }
}

/// What a port carries of payload, a little less than it could: its queue shall not grow. Of a segment of 1514 bytes, 1448 are payload.
fn payload(rate: u64) -> u64 {
    rate / 100 * 94
}

/// What endpoints have reported, and what was made of it.
#[derive(Debug, Default)]
struct Table {
    reports: Vec<Report>,
    tenants: Vec<Tenant>,
}

/// What an endpoint has reported last.
#[derive(Debug)]
struct Report {
    endpoint: u64,
    at: Instant,
    usage: Vec<Usage>,
}

impl Table {
    fn note(&mut self, endpoint: u64, at: Instant, usage: &[Usage]) {
        let known = self.reports.iter_mut().find(|report| report.endpoint == endpoint);
        match known {
            Some(report) => {
                report.at = at;
                report.usage.clear();
                report.usage.extend_from_slice(usage);
            }
            None => self.reports.push(Report { endpoint, at, usage: usage.to_vec() }),
        }
    }

    /// Finds what each tenant's links with a backlog may send: weighted max-min fair among tenants, even among those of a tenant's links
    /// that have something to send. None are bounded while one communicator sends alone.
    fn divide(&mut self, rate: u64, now: Instant) {
        let Self { reports, tenants } = self;
        tenants.clear();
        let fresh = |report: &&Report| now.saturating_duration_since(report.at) < FRESH;
        let usage = || reports.iter().filter(fresh).flat_map(|report| &report.usage);
        let communicator = |usage: &Usage| usage.owner.communicator;
        let alone =
            usage().next().is_none_or(|first| usage().all(|one| communicator(one) == communicator(first)));
        if rate == 0 || alone {
            return;
        }
        for Usage { owner, rate, backlog, waits } in usage() {
            let known = tenants.iter().position(|tenant| tenant.number == owner.tenant);
            let at = known.unwrap_or(tenants.len());
            if known.is_none() {
                tenants.push(Tenant::new(owner));
            }
            let Some(tenant) = tenants.get_mut(at) else { continue };
            if *backlog {
                tenant.waiting += u64::from(*waits);
            } else {
                tenant.free = tenant.free.saturating_add(*rate);
            }
        }
        let (mut left, mut weights) = (rate, tenants.iter().map(|tenant| tenant.weight).sum::<u64>());
        // Who wants less than its share has what it wants, and leaves the rest to the others.
        loop {
            let wants_less = |tenant: &&mut Tenant| {
                !tenant.content && tenant.waiting == 0 && tenant.free <= tenant.share(left, weights)
            };
            let Some(tenant) = tenants.iter_mut().find(wants_less) else { break };
            tenant.content = true;
            left = left.saturating_sub(tenant.free);
            weights -= tenant.weight;
        }
        for tenant in tenants {
            // Its links may begin to send again, each with what it would have then.
            let share = match tenant.content {
                true => tenant.share(left.saturating_add(tenant.free), weights + tenant.weight),
                false => tenant.share(left, weights),
            };
            tenant.bound = tenant.of_each(share, tenant.waiting);
            tenant.next = tenant.of_each(share, tenant.waiting + 1);
        }
    }

    /// What a link may send; anything where it has, and had, no backlog.
    fn bound(&self, usage: &Usage) -> Option<u64> {
        let tenant = self.tenants.iter().find(|tenant| tenant.number == usage.owner.tenant)?;
        usage.backlog.then_some(if usage.waits { tenant.bound } else { tenant.next })
    }
}

/// A tenant's links.
#[derive(Debug)]
struct Tenant {
    number: u32,
    weight: u64,
    /// Bytes a second of links without a backlog.
    free: u64,
    /// Links with one that have something to send.
    waiting: u64,
    /// Whether it wants less than its share.
    content: bool,
    /// What each of those that wait may send, in bytes a second.
    bound: u64,
    /// What a link that had a backlog may send as it begins again.
    next: u64,
}

impl Tenant {
    fn new(owner: &Owner) -> Self {
        let (number, weight) = (owner.tenant, u64::from(owner.weight.max(1)));
        Self { number, weight, free: 0, waiting: 0, content: false, bound: 0, next: 0 }
    }

    /// Its part of a rate, among tenants that have so many weights together.
    fn share(&self, rate: u64, weights: u64) -> u64 {
        (u128::from(rate) * u128::from(self.weight) / u128::from(weights.max(1))) as u64
    }

    /// What each of so many links has of the tenant's share. Links without a backlog may leave little, and not nothing.
    fn of_each(&self, share: u64, links: u64) -> u64 {
        (share.saturating_sub(self.free).max(share / 8) / links.max(1)).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(tenant: u32, weight: u32, communicator: u64, rate: u64, backlog: bool) -> Usage {
        let communicator = CommunicatorId(communicator);
        Usage { owner: Owner { tenant, weight, communicator }, rate, backlog, waits: backlog }
    }

    /// A link that had a backlog a moment ago, and has nothing to send.
    fn drained(tenant: u32, communicator: u64) -> Usage {
        Usage { waits: false, ..usage(tenant, 1, communicator, 0, true) }
    }

    /// What each link may send.
    fn bounds_of_links<const N: usize>(rate: u64, usage: [Usage; N]) -> [Option<u64>; N] {
        let (mut table, now) = (Table::default(), Instant::now());
        table.note(0, now, &usage);
        table.divide(rate, now);
        usage.map(|one| table.bound(&one))
    }

    /// What each tenant's links with a backlog may send, by tenant.
    fn bounds(rate: u64, usage: &[Usage]) -> Vec<(u32, u64)> {
        let (mut table, now) = (Table::default(), Instant::now());
        table.note(0, now, usage);
        table.divide(rate, now);
        let waiting = table.tenants.iter().filter(|tenant| tenant.waiting > 0);
        let mut bounds: Vec<_> = waiting.map(|tenant| (tenant.number, tenant.bound)).collect();
        bounds.sort_unstable();
        bounds
    }

    #[test]
    fn tenants_share_by_weight_whatever_number_of_links_they_have() {
        let mut all = vec![usage(2, 4, 9, 0, true), usage(1, 2, 5, 0, true), usage(1, 2, 6, 0, true)];
        all.extend((10..14).map(|number| usage(0, 1, number, 0, true)));
        assert_eq!(bounds(7000, &all), [(0, 250), (1, 1000), (2, 4000)]);
    }

    #[test]
    fn what_one_does_not_want_is_the_others() {
        let all = [usage(0, 1, 1, 100, false), usage(1, 1, 2, 500, true), usage(2, 3, 3, 0, true)];
        assert_eq!(bounds(1000, &all), [(1, 225), (2, 675)]);
    }

    #[test]
    fn a_tenants_small_operations_come_out_of_its_own_share() {
        let all = [usage(0, 1, 1, 200, false), usage(0, 1, 2, 500, true), usage(1, 1, 3, 0, true)];
        assert_eq!(bounds(1000, &all), [(0, 300), (1, 500)]);
    }

    #[test]
    fn communicators_that_take_turns_have_the_tenants_whole_share_in_turn() {
        let all = [usage(0, 1, 1, 500, true), drained(0, 2), drained(0, 3)];
        assert_eq!(bounds_of_links(1000, all), [Some(1000), Some(500), Some(500)]);
        let beside = [usage(0, 1, 1, 500, true), drained(0, 2), drained(0, 3), usage(1, 1, 4, 500, true)];
        assert_eq!(bounds_of_links(1000, beside), [Some(500), Some(250), Some(250), Some(500)]);
    }

    /// Bounded they stay, by what they would have if they sent.
    #[test]
    fn links_that_have_nothing_to_send_leave_the_tenants_share_to_others() {
        let all = [drained(0, 1), usage(0, 1, 2, 100, false), usage(1, 1, 3, 500, true)];
        assert_eq!(bounds_of_links(1000, all), [Some(400), None, Some(900)]);
        let nobody = [drained(0, 1), drained(1, 2)];
        assert_eq!(bounds_of_links(1000, nobody), [Some(1000), Some(1000)]);
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
        let divide = |endpoint, at, usage: Usage| {
            let mut bounds = Vec::new();
            port.divide(endpoint, at, &[usage], &mut bounds);
            bounds
        };
        let (mine, yours) = (usage(0, 1, 1, 0, true), usage(1, 3, 2, 0, true));
        assert_eq!(divide(one, now, mine), [None]);
        assert_eq!(divide(other, now, yours), [Some(7050)]);
        assert_eq!(divide(one, now, mine), [Some(2350)]);
        assert_eq!(divide(one, now + FRESH, mine), [None]);
    }
}
