//! What follows from a call, once the parts have done their own: groups form, and control plans.

use super::Controller;
use crate::state::ctx::{Ctx, ctx};
use crate::state::output::SessionId;
use harmonaize_api::v1::JoinRefusedKind;
use harmonaize_disclose::JoinFailure;
use harmonaize_planner::HostId;
use std::time::Duration;

impl Controller {
    /// Forms who regrouped, and plans, if something moved and the last plan is long enough ago.
    pub(crate) fn act(&mut self, now: Duration) {
        self.settle(now);
        restart_stranded(self, now);
        loop {
            let groups = self.regroups.take_complete(&ctx!(self, now), &mut self.outbox);
            if groups.is_empty() {
                break;
            }
            groups.into_iter().for_each(|group| self.form(now, vec![group]));
        }
        self.settle(now);
        self.plan(now);
        self.settle(now);
        self.communicators.refresh();
        check_invariants(&ctx!(self, now));
    }
}

/// Ends joins that wait for a worker that is gone, and has the job's workers start together again.
fn restart_stranded(state: &mut Controller, now: Duration) {
    for key in state.jobs.stranded() {
        let joined = state.joins.take_of_job(&key);
        if joined.is_empty() {
            continue;
        }
        let entered = state.regroups.take_of_job(&key);
        for (session, request) in joined.into_iter().chain(entered) {
            let (kind, failure) = (JoinRefusedKind::RankLost, JoinFailure::JobRestarts);
            state.outbox.end_join(session, request, kind, &failure);
        }
        state.jobs.restart(&ctx!(state, now), &mut state.outbox, &key);
        state.settle(now);
    }
}

/// Checks what holds between calls, where that is soon done.
fn check_invariants(ctx: &Ctx<'_>) {
    if cfg!(debug_assertions) && ctx.communicators.len() <= 64 && ctx.hosts.len() <= 256 {
        let topology = &ctx.settings.topology;
        ctx.communicators.values().for_each(|known| known.check_invariants(topology));
        let agree = |(host, session): (&HostId, &SessionId)| {
            ctx.sessions.get(session).is_some_and(|known| known.host == *host)
        };
        debug_assert!(ctx.hosts.iter().all(agree), "a host's session is not the host's");
        debug_assert_eq!(ctx.hosts.len(), ctx.sessions.len(), "each session is of one host");
    }
}
