//! Messages of agents and aggregators: which part takes each.

use super::Controller;
use crate::state::breach::Breach;
use crate::state::ctx::ctx;
use crate::state::job::coding::set_budget;
use crate::state::job::decisions::Trigger;
use crate::state::output::{Fact, SessionId};
use crate::state::tenants::agreements::Room;
use crate::state::tenants::elsewhere::for_a_tenant;
use crate::state::view::view;
use harmonaize_abi::{CommunicatorId, Epoch};
use harmonaize_api::v1::{self, from_agent};
use harmonaize_planner::AggregationReason;
use std::time::Duration;

impl Controller {
    /// A message of an agent. Whatever it holds, it costs at most that agent's session. A congestion report
    /// that makes another plan better leads to that plan's messages within this call.
    pub fn message(&mut self, now: Duration, from: SessionId, message: v1::FromAgent) {
        use from_agent::Message;
        let Some(message) = message.message else {
            return self.breach(now, from, Breach::Empty);
        };
        let taken = match message {
            message if self.aggregators.is_aggregator(from) => self.aggregator_message(now, from, message),
            Message::Hello(hello) if !self.sessions.contains_key(&from) => self.hello(now, from, &hello),
            _ if !self.sessions.contains_key(&from) => Err(Breach::BeforeHello),
            message => self.agent_message(now, from, message),
        };
        self.settle(now);
        if let Err(breach) = taken {
            self.breach(now, from, breach);
        }
        self.act(now);
    }

    /// A message of an aggregator. An error is a breach of protocol.
    fn aggregator_message(
        &mut self,
        now: Duration,
        from: SessionId,
        message: from_agent::Message,
    ) -> Result<(), Breach> {
        let refused = self.aggregators.message(&ctx!(self, now), &mut self.outbox, from, message)?;
        let Some(refused) = refused else { return Ok(()) };
        if let Some(known) = refused.of.and_then(|of| self.communicators.get_mut(&of)) {
            known.refused.refuse(now, refused.by, &refused.reason);
            for chosen in known.lifecycle.configs_mut().map(|config| &mut config.aggregation) {
                if chosen.grant == Some(refused.grant) {
                    chosen.reason = AggregationReason::Refused(refused.reason.clone());
                }
            }
        }
        Ok(())
    }

    /// A message of an agent that has a session. An error is a breach of protocol.
    fn agent_message(
        &mut self,
        now: Duration,
        from: SessionId,
        message: from_agent::Message,
    ) -> Result<(), Breach> {
        use from_agent::Message;
        if let Some((tenant, what, answer)) = for_a_tenant(&message)
            && let Some(session) = self.sessions.get(&from)
            && let host = self.settings.host_name(session.host)
            && ctx!(self, now).is_elsewhere(tenant, &host)
        {
            self.outbox.send(from, answer);
            self.outbox.fact(Fact::TenantElsewhere { host, tenant: tenant.to_owned(), what });
            return Ok(());
        }
        let ctx = &ctx!(self, now);
        match message {
            Message::TenantsServed(told) => {
                if let Some(session) = self.sessions.get_mut(&from) {
                    session.serves(&told);
                }
            }
            Message::LinksOverTcp(told) => {
                if let Some(session) = self.sessions.get(&from)
                    && session.abilities.links_over_tcp
                    && self.handovers.requested(now, session.host, Duration::from_nanos(told.for_ns))
                {
                    self.outbox.want_plan(Trigger::HandOver);
                }
            }
            Message::Hello(_) => return Err(Breach::SecondHello),
            Message::Join(join) => return self.join(now, from, join),
            Message::Leave(leave) => return self.leave(now, from, &leave),
            Message::Prepared(prepared) => {
                let id = CommunicatorId(prepared.communicator);
                return self.prepared(now, from, (id, epoch_of(prepared.epoch)?), prepared.links);
            }
            Message::PrepareFailed(failed) => return self.prepare_failed(now, from, &failed),
            Message::Switched(switched) => {
                let (id, epoch) = (CommunicatorId(switched.communicator), epoch_of(switched.epoch)?);
                if let Some((_, index)) = ctx.part(from, id)? {
                    self.switched(now, id, index, epoch);
                }
            }
            Message::Failed(failed) => return self.failed(now, from, failed),
            Message::Closed(closed) => return self.closed(now, from, CommunicatorId(closed.communicator)),
            Message::Report(report) => {
                self.questions.report(ctx, from, report);
                self.answer_questions(now);
            }
            Message::Telemetry(report) => {
                if let Some(reports) = self.telemetry.report(ctx, &mut self.outbox, from, report) {
                    self.take_operations(now, from, reports);
                }
            }
            Message::CongestionReport(told) => {
                self.link_state.path_congestion(ctx, &mut self.outbox, from, told);
            }
            Message::PathsTraced(answer) => self.link_state.traced(ctx, &mut self.outbox, from, &answer),
            Message::PathProbed(answer) => self.link_state.probed(ctx, &mut self.outbox, from, &answer),
            Message::SetBudget(said) => {
                return set_budget(&mut self.communicators, &mut self.outbox, from, &said);
            }
            Message::ReadEvents(asked) => return self.events.read(ctx, &mut self.outbox, from, asked),
            Message::CancelRead(gone) => self.events.cancel(from, gone.request),
            Message::Negotiate(asked) => {
                let conditions = view!(self, now).conditions();
                let room = Room { conditions, set_aside: self.regroups.past.set_aside().collect() };
                self.agreements.negotiate(ctx, &mut self.outbox, &room, from, &asked);
            }
            Message::BeginIteration(asked) => {
                self.events.begin_iteration(ctx, &mut self.outbox, from, &asked);
            }
            Message::Hint(asked) => self.hints.hint(ctx, &mut self.outbox, from, &asked),
            Message::AwaitOrder(asked) => {
                return self.jobs.await_order(ctx, &mut self.outbox, from, &asked);
            }
            Message::SetBid(asked) => self.jobs.set_bid(ctx, &mut self.outbox, from, &asked),
            Message::CancelOrder(gone) => self.jobs.cancel(ctx, &mut self.outbox, from, gone.request),
            Message::RequestSlot(wanted) => {
                return self.turns.slot_requested(ctx, &mut self.outbox, from, wanted);
            }
            Message::ReleaseSlot(done) => return self.turns.turn_done(ctx, &mut self.outbox, from, done),
            Message::AggregationGranted(_) | Message::Aggregator(_) => {
                return Err(Breach::AsAggregator);
            }
        }
        Ok(())
    }
}

fn epoch_of(number: u64) -> Result<Epoch, Breach> {
    Epoch::from_wire(number).map_err(|_| Breach::Epoch)
}
