//! Ranks that join, leave or close.

use super::Controller;
use crate::state::breach::Breach;
use crate::state::ctx::ctx;
use crate::state::output::{Fact, SessionId};
use crate::state::world::agents::{OpenJoin, ProcessUsage};
use harmonaize_abi::CommunicatorId;
use harmonaize_api::v1;
use std::time::Duration;

impl Controller {
    pub(crate) fn join(&mut self, now: Duration, from: SessionId, mut join: v1::Join) -> Result<(), Breach> {
        if self.sessions.get(&from).is_some_and(|session| session.joins.contains_key(&join.request)) {
            return Err(Breach::JoinTwice);
        }
        // Of tenants without such a limit nothing is noted: their names are as many as a session likes.
        if self.settings.terms(&join.tenant).bound_processes()
            && let Some(session) = self.sessions.get_mut(&from)
        {
            let usage = ProcessUsage {
                tensors: join.tensor_bytes,
                operations: join.ring_entries,
                descriptors: join.process_descriptors,
            };
            session.processes.insert(join.tenant.clone(), usage);
        }
        let ctx = &ctx!(self, now);
        if let Err(failure) = self.join_rates.take(ctx, &join.tenant) {
            self.outbox.refuse_join(from, join.request, v1::JoinRefusedKind::Limit, &failure);
            return Ok(());
        }
        if let Some(asked) = join.regroup.take() {
            self.regroups.regroup(ctx, &mut self.outbox, &self.joins, from, (join, asked));
            return Ok(());
        }
        if let Some(asked) = join.split.take() {
            let of_job = self.regroups.communicators_of(ctx, &self.joins, &join.tenant, &join.communicator);
            let in_sum = self.regroups.in_sum(ctx, &self.joins, &join.tenant, Some(from));
            let groups = self.splits.split(ctx, &mut self.outbox, from, (join, asked), (of_job, in_sum))?;
            self.form(now, groups);
            return Ok(());
        }
        let room = self.regroups.check_room(ctx, &self.joins, &join.tenant, &join.communicator);
        let room = room.and_then(|()| {
            let in_sum = self.regroups.in_sum(ctx, &self.joins, &join.tenant, Some(from));
            in_sum.check(&self.settings.terms(&join.tenant), 1, join.ranks.into())
        });
        if let Some(group) = self.joins.join(ctx, &mut self.outbox, from, join, room) {
            self.form(now, vec![group]);
        }
        Ok(())
    }

    pub(crate) fn leave(&mut self, now: Duration, from: SessionId, leave: &v1::Leave) -> Result<(), Breach> {
        if leave.communicator == 0 {
            let join = self.sessions.get_mut(&from).and_then(|session| session.joins.remove(&leave.request));
            if let Some(join) = join {
                self.withdraw_join((from, leave.request), join);
            }
            return Ok(());
        }
        let id = CommunicatorId(leave.communicator);
        self.regroups.past.member_left(id, leave.rank, from);
        let Some((_, index)) = ctx!(self, now).part(from, id)? else { return Ok(()) };
        let member = self.communicators.get_mut(&id).and_then(|known| known.members.get_mut(index));
        let Some(member) = member else { return Ok(()) };
        if !member.ranks.contains(&leave.rank) {
            return Err(Breach::OtherLeave);
        }
        member.departed.insert(leave.rank);
        self.splits.lost(&mut self.outbox, id, &[leave.rank]);
        member.closed |= member.departed.len() == member.ranks.len();
        self.close_if_over(now, id);
        Ok(())
    }

    pub(crate) fn closed(
        &mut self,
        now: Duration,
        from: SessionId,
        id: CommunicatorId,
    ) -> Result<(), Breach> {
        let Some((_, index)) = ctx!(self, now).part(from, id)? else { return Ok(()) };
        let known = self.communicators.get_mut(&id);
        if let Some(member) = known.and_then(|known| known.members.get_mut(index)) {
            member.closed = true;
            self.splits.lost(&mut self.outbox, id, &member.ranks);
        }
        self.close_if_over(now, id);
        Ok(())
    }

    /// Ends a communicator in good order once all have closed it.
    pub(crate) fn close_if_over(&mut self, now: Duration, id: CommunicatorId) {
        let Some(known) = self.communicators.get(&id) else { return };
        self.regroups.mark_due(&(known.tenant.clone(), known.name.clone()));
        let over = known.members.iter().all(|member| member.closed);
        if over && let Some(known) = self.remove(now, id) {
            self.outbox.fact(Fact::Closed { communicator: id, tenant: known.tenant, name: known.name });
        } else {
            self.switch_if_complete(now, id);
        }
    }

    /// Takes back an open join of an agent, whatever it was for.
    pub(crate) fn withdraw_join(&mut self, (session, request): (SessionId, u64), join: OpenJoin) {
        match join {
            OpenJoin::Rank(key, rank) => self.joins.withdraw(&key, rank),
            OpenJoin::Regroup(key) => self.regroups.withdraw(&key, session, request),
            OpenJoin::Split(id) => self.splits.withdraw(id, session, request),
        }
    }
}
