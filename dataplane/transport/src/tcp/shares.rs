//! What each link of an endpoint may send where tenants share the host's port.

use super::link::Link;
use crate::uplink::{PERIOD, Usage};
use crate::{LinkId, Owner, Uplink};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a link counts as one with a backlog after it had one. It may wait for other links for a moment.
const BACKLOG_TIME: Duration = Duration::from_millis(5);
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
    let owner = link.share.owner?;
    let (mut written, mut backlog) = (0, false);
    for (_, path) in link.paths() {
        written += path.pulse.written();
        backlog |= path.has_backlog();
    }
    let share = &mut link.share;
    let sent = written.saturating_sub(share.written);
    share.written = written;
    let first = share.sent_at.is_none();
    if sent > 0 || first {
        share.sent_at = Some(now);
    }
    if backlog {
        share.backlog_at = Some(now);
    }
    let within = |at: Option<Instant>, span| at.is_some_and(|at| now.saturating_duration_since(at) < span);
    if !within(share.sent_at, ACTIVE) && !backlog {
        share.sent_at = None;
        return None;
    }
    let rate = (u128::from(sent) * 1_000_000_000 / since.as_nanos().max(1)) as u64;
    Some(Usage { owner, rate, backlog: within(share.backlog_at, BACKLOG_TIME) })
}

/// Whether two bounds are so far apart that the kernel is to know.
fn differ(before: Option<u64>, now: Option<u64>) -> bool {
    match (before, now) {
        (Some(before), Some(now)) => before.abs_diff(now) > before / 32,
        (before, now) => before != now,
    }
}
