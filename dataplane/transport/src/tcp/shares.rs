//! What each link of an endpoint may send where tenants share the host's port.

use super::link::Link;
use crate::uplink::{PERIOD, Usage};
use crate::{LinkId, Owner, Uplink};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a link stays bounded after it had a backlog. One that passes on what it receives has none between two chunks. Unbounded
/// it would send each chunk as fast as the port does, and small operations would wait behind those of all such links. Twenty of them
/// have a chunk of 128 KiB each 22 ms at 1 Gbit/s. It has no part in its tenant's share meanwhile, unless it sends.
const BACKLOG_TIME: Duration = Duration::from_millis(25);
/// How long a link counts as one that sends.
const ACTIVE: Duration = Duration::from_millis(100);

/// A link's part in what the host sends.
#[derive(Debug, Default)]
pub(super) struct Share {
    pub(super) owner: Option<Owner>,
    /// Bytes a second at most.
    pub(super) bound: Option<u64>,
    /// Whether it is among the links that are looked at.
    listed: bool,
    /// Bytes that the kernel had taken at the last look.
    written: u64,
    /// When it last sent anything, and had a backlog.
    sent_at: Option<Instant>,
    backlog_at: Option<Instant>,
}

/// The links of an endpoint that send by a port.
#[derive(Debug)]
pub(super) struct Shares {
    port: Arc<Uplink>,
    endpoint: u64,
    /// Those that have sent of late.
    listed: Vec<LinkId>,
    /// What they have sent, and may send: the same order.
    usage: Vec<Usage>,
    bounds: Vec<Option<u64>>,
    looked: Instant,
}

impl Shares {
    pub(super) fn new(port: Arc<Uplink>) -> Self {
        let endpoint = port.endpoint();
        let (listed, usage, bounds) = (Vec::new(), Vec::new(), Vec::new());
        Self { port, endpoint, listed, usage, bounds, looked: Instant::now() }
    }

    /// Makes room for so many links, so that none is made while they send.
    pub(super) fn reserve(&mut self, links: usize) {
        self.listed.reserve(links.saturating_sub(self.listed.len()));
        self.usage.reserve(links.saturating_sub(self.usage.len()));
        self.bounds.reserve(links.saturating_sub(self.bounds.len()));
    }

    /// A frame is to be sent on a link.
    pub(super) fn note_send(&mut self, id: LinkId, share: &mut Share) {
        if !share.listed && share.owner.is_some() {
            share.listed = true;
            self.listed.push(id);
        }
    }

    /// Divides the port anew once it is time.
    pub(super) fn divide(&mut self, links: &mut BTreeMap<LinkId, Link>) {
        if self.listed.is_empty() {
            return;
        }
        let now = Instant::now();
        let since = now.saturating_duration_since(self.looked);
        if since < PERIOD {
            return;
        }
        self.looked = now;
        let usage = &mut self.usage;
        usage.clear();
        self.listed.retain(|id| {
            let Some(link) = links.get_mut(id) else { return false };
            let Some(one) = sample(link, now, since) else {
                link.share.listed = false;
                if link.share.bound.take().is_some() {
                    link.pace();
                }
                return false;
            };
            usage.push(one);
            true
        });
        self.port.divide(self.endpoint, now, &self.usage, &mut self.bounds);
        for (id, bound) in self.listed.iter().zip(&self.bounds) {
            let Some(link) = links.get_mut(id) else { continue };
            if differ(link.share.bound, *bound) {
                link.share.bound = *bound;
                link.pace();
            }
        }
    }
}

/// What a link has sent since the last look; none if it has not for long.
fn sample(link: &mut Link, now: Instant, since: Duration) -> Option<Usage> {
    let (mut written, mut unsent, mut backlog) = (0, false, false);
    for (_, path) in link.paths() {
        written += path.pulse.written();
        let (some, many) = path.unsent();
        (unsent, backlog) = (unsent || some, backlog || many);
    }
    link.share.usage(now, since, (written, unsent, backlog))
}

impl Share {
    /// The same, of a link for which the kernel has taken so many bytes in all. It has some of them left or not, and a backlog or not.
    fn usage(
        &mut self,
        now: Instant,
        since: Duration,
        (written, unsent, backlog): (u64, bool, bool),
    ) -> Option<Usage> {
        let owner = self.owner?;
        let sent = written.saturating_sub(self.written);
        self.written = written;
        if sent > 0 || self.sent_at.is_none() {
            self.sent_at = Some(now);
        }
        if backlog {
            self.backlog_at = Some(now);
        }
        let within =
            |at: Option<Instant>, span| at.is_some_and(|at| now.saturating_duration_since(at) < span);
        if !within(self.sent_at, ACTIVE) && !backlog {
            self.sent_at = None;
            return None;
        }
        let rate = (u128::from(sent) * 1_000_000_000 / since.as_nanos().max(1)) as u64;
        let waits = sent > 0 || unsent || backlog;
        Some(Usage { owner, rate, backlog: within(self.backlog_at, BACKLOG_TIME), waits })
    }
}

/// Whether two bounds are so far apart that the kernel is to know.
fn differ(before: Option<u64>, now: Option<u64>) -> bool {
    match (before, now) {
        (Some(before), Some(now)) => before.abs_diff(now) > before / 32,
        (before, now) => before != now,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_abi::CommunicatorId;

    /// What an endpoint said before it slept counts for as long as its links are bounded.
    #[test]
    fn an_endpoint_that_sleeps_between_two_chunks_does_not_leave_others_alone() {
        let (port, begin) = (Uplink::default(), Instant::now());
        port.set_rate(Some(80_000));
        let usage = |communicator| {
            let owner = Owner { tenant: 0, weight: 1, communicator: CommunicatorId(communicator) };
            let mut share = Share { owner: Some(owner), ..Share::default() };
            share.usage(begin, PERIOD, (128 << 10, true, true)).unwrap()
        };
        let [sleeps, sends] = [port.endpoint(), port.endpoint()];
        let mut bounds = Vec::new();
        port.divide(sleeps, begin, &[usage(1)], &mut bounds);
        port.divide(sends, begin + BACKLOG_TIME, &[usage(2)], &mut bounds);
        assert!(matches!(bounds[..], [Some(_)]), "{bounds:?}");
    }

    /// Chunks of 128 KiB, one each 9 ms: four such links at half of 1 Gbit/s. Half a chunk is a backlog at one look of nine.
    #[test]
    fn who_passes_chunks_on_counts_as_one_with_a_backlog_between_them() {
        let owner = Owner { tenant: 0, weight: 1, communicator: CommunicatorId(1) };
        let mut share = Share { owner: Some(owner), ..Share::default() };
        let begin = Instant::now();
        let mut look = |number: u64, chunk: bool, written| {
            let now = begin + number as u32 * PERIOD;
            share.usage(now, PERIOD, (written, chunk, chunk))
        };
        let mut written = 0;
        for number in 0..200 {
            let chunk = number % 9 == 0;
            written += if chunk { 128 << 10 } else { 0 };
            let usage = look(number, chunk, written).unwrap();
            assert!(usage.backlog && usage.waits == chunk, "look {number}");
        }
        let bounded = (200..400).map_while(|number| look(number, false, written));
        let bounded = bounded.filter(|usage| usage.backlog).count();
        assert!(bounded < 25, "it has not been bounded for long: {bounded} ms");
        assert!(
            look(400, false, written).is_some_and(|usage| !usage.backlog),
            "it begins anew without a bound"
        );
    }
}
