//! What is due by the time: questions to agents, answers that are late, and estimates that fade.

use super::LinkState;
use crate::state::ctx::Ctx;
use crate::state::effects::Effects;
use crate::state::job::decisions::Trigger;
use crate::state::time::nanos;
use std::time::Duration;

/// The interval between two measurements of which connections carry traffic, while some link is thought to be
/// congested. They show whether jobs have gone quiet.
const ACTIVE_AGAIN: Duration = Duration::from_millis(500);

impl LinkState {
    /// Returns when [`LinkState::expire`] or [`LinkState::fade`] has something to do.
    pub(crate) fn next_timeout(&self) -> Option<Duration> {
        let fades = self.estimates.next_due().map(|at| Duration::from_nanos(at.0));
        let active = self.active_at.map_or(Duration::ZERO, |at| at.saturating_add(ACTIVE_AGAIN));
        let active = self.estimates.links().next().map(|_| active);
        self.traces.deadline().into_iter().chain(self.probes.deadline()).chain(fades).chain(active).min()
    }

    /// Asks what is due, and gives up on what was not answered.
    pub(crate) fn expire(&mut self, ctx: &Ctx<'_>, effects: &mut Effects) {
        self.expire_traces(ctx, effects);
        self.verify_pending(ctx, effects);
    }

    /// Lets estimates fade, and has links probed that are not in use.
    pub(crate) fn fade(&mut self, ctx: &Ctx<'_>, effects: &mut Effects) {
        if self.estimates.decay(&ctx.settings.topology, nanos(ctx.now)) {
            effects.want_plan(Trigger::Faded);
        }
        self.ask_probes(ctx, effects);
    }
}
