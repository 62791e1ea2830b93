//! What is due by the time, of every part.

use super::Controller;
use crate::state::ctx::ctx;
use crate::state::job::decisions::Trigger;
use crate::state::tenants::events::note_maintenance;
use crate::state::view::view;
use std::time::Duration;

impl Controller {
    /// The next time at which [`Controller::expire`] has something to do.
    pub fn next_deadline(&self) -> Option<Duration> {
        let ctx = ctx!(self, Duration::ZERO);
        let parts = [
            self.communicators.next_timeout(),
            self.joins.next_timeout(),
            self.splits.next_timeout(),
            self.questions.next_timeout(),
            self.operator.next_timeout(),
            self.handovers.next_timeout(),
            self.link_state.next_timeout(),
            self.plan_request.next_timeout().filter(|_| self.settings.replan),
            self.aggregators.next_timeout(),
            self.events.next_timeout(&ctx),
            self.regroups.next_timeout(),
            self.agreements.next_timeout(&self.settings),
            self.turns.deadline(),
            self.jobs.next_timeout(),
        ];
        parts.into_iter().flatten().min()
    }

    /// Ends what has waited long enough.
    pub fn expire(&mut self, now: Duration) {
        self.joins.expire(now, &mut self.outbox);
        self.splits.expire(&ctx!(self, now), &mut self.outbox);
        let groups = self.regroups.expire_past(&ctx!(self, now), &mut self.outbox);
        groups.into_iter().for_each(|group| self.form(now, vec![group]));
        let groups = self.regroups.expire(&ctx!(self, now), &mut self.outbox);
        groups.into_iter().for_each(|group| self.form(now, vec![group]));
        self.expire_communicators(now);
        self.answer_questions(now);
        let mut again = self.aggregators.expire(&ctx!(self, now), &mut self.outbox);
        let mut settled = false;
        for id in self.communicators.due(now) {
            let Some(known) = self.communicators.get_mut(&id) else { continue };
            again |= known.refused.expire(now);
            settled |= known.coding.again.take_if(|at| *at <= now).is_some();
            settled |= known.backoff_until.take_if(|until| *until <= now).is_some();
        }
        if again {
            self.outbox.want_plan(Trigger::Aggregators);
        }
        if self.operator.update_windows(&self.settings, now, &mut self.outbox.trigger) {
            note_maintenance(&ctx!(self, now), &mut self.outbox, None);
        }
        if self.handovers.expire(now) {
            self.outbox.want_plan(Trigger::HandOver);
        }
        self.link_state.expire(&ctx!(self, now), &mut self.outbox);
        self.link_state.fade(&ctx!(self, now), &mut self.outbox);
        if settled {
            self.outbox.want_plan(Trigger::Settled);
        }
        self.agreements.expire(&ctx!(self, now), &mut self.outbox);
        self.turns.expire(&ctx!(self, now), &mut self.outbox);
        self.jobs.expire(&view!(self, now), &mut self.outbox);
        self.act(now);
        self.events.expire(&ctx!(self, now), &mut self.outbox);
    }
}
