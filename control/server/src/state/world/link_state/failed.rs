//! What hosts' traces tell of links that pass nothing.

use crate::state::ctx::Ctx;
use harmonaize_planner::{DirectedLink, HostId, LinkId, Path};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// What hosts' traces tell of links.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    /// By link: whose packets died there. A host's word stands until its packets cross the link again, or its
    /// agent is gone.
    pub against: BTreeMap<DirectedLink, BTreeSet<HostId>>,
    /// By link that failed: whose packets have crossed it since.
    pub failed: BTreeMap<DirectedLink, BTreeSet<HostId>>,
    pub suspected: BTreeMap<LinkId, Duration>,
}

impl Failures {
    /// Whether any link counts as failed.
    pub(crate) fn any(&self) -> bool {
        !self.failed.is_empty()
    }

    /// Whether a link of a path counts as failed.
    pub(crate) fn on(&self, path: &Path) -> bool {
        self.failed.keys().any(|failed| path.crosses(failed.link))
    }

    pub(crate) fn agreeing(&mut self, ctx: &Ctx<'_>, link: DirectedLink) -> usize {
        let hosts = &ctx.hosts;
        let Some(words) = self.against.get_mut(&link) else { return 0 };
        words.retain(|host| hosts.contains_key(host));
        words.len()
    }
}
