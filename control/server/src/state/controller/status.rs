//! Status requests: asked of all agents, answered once they have reported.

use super::Controller;
use crate::state::ctx::ctx;
use crate::state::output::Output;
use std::time::Duration;

impl Controller {
    /// Asks all agents; [`Output::Status`](crate::state::Output::Status) follows with the returned number,
    /// after `patience` at the latest.
    pub fn ask_status(&mut self, now: Duration, patience: Duration) -> u64 {
        let deadline = now.saturating_add(patience);
        let id = self.questions.ask(&ctx!(self, now), &mut self.outbox, deadline);
        self.answer_questions(now);
        id
    }

    /// Answers the status requests that wait for nobody any more.
    pub(crate) fn answer_questions(&mut self, now: Duration) {
        for (id, reports) in self.questions.take_answered(now) {
            let reply = self.queries(now).status(&reports);
            self.outbox.outputs.push(Output::Status(id, Box::new(reply)));
        }
    }
}
