//! Operations that agents tell of: what iterations, hints, agreements, codecs and events learn of them.

use super::Controller;
use crate::state::ctx::ctx;
use crate::state::job::coding::{CodecOutcome, choose_coding, coded_outcome, zeros_outcome};
use crate::state::job::communicator::Communicator;
use crate::state::job::decisions::Trigger;
use crate::state::output::{Fact, SessionId};
use crate::state::view::view;
use crate::state::world::telemetry::OperationReports;
use harmonaize_abi::CommunicatorId;
use harmonaize_api::v1;
use std::time::Duration;

impl Controller {
    /// Takes in what an agent tells of operations.
    pub(crate) fn take_operations(&mut self, now: Duration, from: SessionId, reports: OperationReports) {
        for mut operation in reports.ended {
            self.record_operation(now, from, &operation);
            operation.complete &= !self.turns.delayed(&operation);
            let (id, number) = (CommunicatorId(operation.communicator), operation.operation);
            let ctx = &ctx!(self, now);
            if let Some((bytes, took)) = self.telemetry.operation(ctx, &mut self.outbox, from, operation) {
                // What it waited for its turn is nobody's slowness.
                let took = took.saturating_sub(self.turns.waited(id, number));
                self.events.operation_took(ctx, &mut self.outbox, id, (bytes, took));
            }
        }
        for operation in &reports.open {
            self.agreements.watch_open(&ctx!(self, now), &mut self.outbox, reports.at, operation);
        }
        self.take_turns(now);
    }

    /// Takes in an operation of a communicator. Its times are by the clock of the first participant alone, so
    /// that all are by one clock.
    pub(crate) fn record_operation(&mut self, now: Duration, from: SessionId, operation: &v1::Operation) {
        self.agreements.watch_operation(&ctx!(self, now), &mut self.outbox, operation);
        let id = CommunicatorId(operation.communicator);
        let Some(known) = self.communicators.get(&id) else { return };
        let first = known.members.first().and_then(|member| member.session) == Some(from);
        self.iterations.entry(id).or_default().record(now, operation, first);
        if first {
            let ctx = &ctx!(self, now);
            self.hints.compare(ctx, &mut self.outbox, id);
            let coded = coded_outcome(ctx, operation);
            self.learn_codec(now, id, coded);
            let zeros = zeros_outcome(&ctx!(self, now), operation);
            self.learn_codec(now, id, zeros);
        }
    }

    /// Learns what an operation by a codec came to, or would have come to. Control plans anew where the
    /// choice is another codec now.
    pub(crate) fn learn_codec(&mut self, now: Duration, id: CommunicatorId, outcome: Option<CodecOutcome>) {
        let Some(CodecOutcome { level, loss, ratio }) = outcome else { return };
        let Some(known) = self.communicators.get_mut(&id) else { return };
        let current = known.codec();
        if known.coding.controller.handle_outcome(now, &level, loss, ratio) {
            self.outbox.fact(Fact::LossLearned { communicator: id, codec: level.codec.name() });
        }
        let known = self.communicators.get(&id);
        let plan = known.and_then(Communicator::current).and_then(|current| current.plan.as_ref());
        let chosen = choose_coding(&view!(self, now), id, plan);
        if chosen.codec != current && known.is_some_and(|known| known.phase() == v1::Phase::Running) {
            self.outbox.want_plan(Trigger::Losses);
        }
    }
}
