//! What follows from a call, once the parts have done their own: groups form, and control plans.

use super::Controller;
use crate::state::ctx::ctx;
use crate::state::output::SessionId;
use harmonaize_planner::HostId;
use std::time::Duration;

impl Controller {
    /// Forms who regrouped, and plans, if something moved and the last plan is long enough ago.
    pub(crate) fn act(&mut self, now: Duration) {
        self.settle(now);
        loop {
            let groups = self.regroups.take_complete(&ctx!(self, now), &mut self.outbox);
            if groups.is_empty() {
                break;
            }
            groups.into_iter().for_each(|group| self.form(now, group));
        }
        self.settle(now);
        self.plan(now);
        self.settle(now);
        self.check_invariants();
    }

    /// Checks what holds between calls, where that is soon done.
    fn check_invariants(&self) {
        if cfg!(debug_assertions) && self.communicators.len() <= 64 && self.hosts.len() <= 256 {
            let topology = &self.settings.topology;
            self.communicators.values().for_each(|known| known.check_invariants(topology));
            let agree = |(host, session): (&HostId, &SessionId)| {
                self.sessions.get(session).is_some_and(|known| known.host == *host)
            };
            debug_assert!(self.hosts.iter().all(agree), "a host's session is not the host's");
            debug_assert_eq!(self.hosts.len(), self.sessions.len(), "each session is of one host");
        }
    }
}
