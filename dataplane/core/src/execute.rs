//! Running segments: what is done, what begins next, which step is issued, which credits are due.

use crate::aggregation::Executor;
use crate::channel::{Channel, Segment};
use crate::communicator::{Action, Communicator, PeerMessage};
use crate::epoch::{peers, stream};
use crate::interleave::Admission;
use crate::message::{Header, Kind, Message, Payload};
use crate::operation::Run;
use crate::{Failure, Nanos};
use arrayvec::ArrayVec;
use harmonaize_abi::Signature;
use harmonaize_plan::{CODED_ROOM, Encoding, Operand, Participant, Retention, StepKind};

impl Communicator {
    /// Takes note of segments that are done or released, and of an old plan that nobody needs any more.
    pub(crate) fn advance_completions(&mut self) {
        let count = self.channels.len() as u64;
        while self.done < self.begun && !self.is_frozen() {
            let index = self.done % count;
            let channel = self.channels.get_mut(index as usize);
            let this = |segment: &Segment| segment.number == self.done;
            if let Some(channel) = channel.filter(|channel| channel.segment().is_some_and(this)) {
                if !channel.done() {
                    break;
                }
                if channel.take_eager_copy_out() {
                    self.actions.push_back(Action::CopyOut { channel: index as u16 });
                }
            }
            self.done += 1;
        }
        self.acknowledgements.advance_local(self.done);
        // What is still to be brought from a channel's staging keeps the channel.
        if !self.actions.is_empty() {
            return;
        }
        let everyone = self.acknowledgements.acked_by_all();
        for channel in &mut self.channels {
            let acknowledged = channel.segment().is_some_and(|segment| segment.number < everyone);
            if !channel.released(acknowledged) {
                continue;
            }
            let segment = channel.clear();
            let Some(operation) = segment.and_then(|it| self.operations.get_mut(it.operation)) else {
                continue;
            };
            if let Some(run) = operation.run.as_mut() {
                run.finished += 1;
            }
        }
        self.retire_epoch();
    }

    /// Begins the next segment in order, if its operation is called by all and does not wait for its turn, its channel free and its plan known.
    pub(crate) fn begin_segment(&mut self, now: Nanos) -> bool {
        let segment = self.begun;
        let Some(operation) = self.operations.get(self.cursor) else { return false };
        if !self.operations.complete(self.cursor) {
            return false;
        }
        let channel = (segment % self.channels.len() as u64) as usize;
        if self.channels.get(channel).is_none_or(|channel| channel.segment().is_some()) {
            return false;
        }
        let Some(new_plan) = self.next.as_ref().map_or(Some(false), |switch| switch.governs(segment)) else {
            return false;
        };
        if operation.run.is_none() {
            let Signature { count, dtype, .. } = operation.signature;
            match self.interleave.admit(now, self.cursor, count.saturating_mul(dtype.size() as u64)) {
                Admission::Admitted => {}
                Admission::Blocked => return false,
                Admission::SlotNeeded => {
                    self.actions.push_back(Action::RequestSlot { slot: self.cursor });
                    return false;
                }
            }
        }
        let (signature, in_place, run) = (operation.signature, operation.in_place, operation.run);
        let epoch = match &self.next {
            Some(switch) if new_plan => &switch.epoch,
            _ => &self.current,
        };
        let retention = run.map_or_else(|| epoch.retention(&signature, in_place), |run: Run| run.retention);
        let (number, aggregates) = (epoch.number(), epoch.aggregates(&signature, retention));
        let by = if aggregates { self.assign_executor(now, number, segment) } else { Executor::Hosts };
        let aggregated = match by {
            Executor::Unknown => return false,
            Executor::Aggregator(index) => Some(index),
            Executor::Hosts => None,
        };
        let epoch = match &mut self.next {
            Some(switch) if new_plan => &mut switch.epoch,
            _ => &mut self.current,
        };
        let Some(operation) = self.operations.get_mut(self.cursor) else { return false };
        let run = operation.run.get_or_insert_with(|| Run {
            first_segment: segment,
            segmentation: epoch.segmentation(&signature),
            retention,
            algorithm: epoch.algorithm(&signature),
            begun: 0,
            finished: 0,
        });
        let coding = epoch.coding(&signature, retention);
        let Ok(program) = epoch.program(&signature, retention, run.algorithm) else {
            let ranks = self.group.local(self.me).to_vec();
            self.fail(Failure::Internal { ranks });
            return false;
        };
        let (lo, hi) = run.segmentation.range(segment - run.first_segment);
        run.begun += 1;
        if run.retention != Retention::CopyInputs {
            self.acknowledgements.await_below(segment + 1);
        }
        let all_begun = run.begun == run.segmentation.segments;
        if aggregated.is_some() {
            operation.aggregated_segments += 1;
            let root = self.group.local(self.me).contains(&signature.root);
            let state = epoch.aggregation.as_ref();
            operation.wire_bytes += state.map_or(0, |state| state.bytes(&signature, hi - lo, root));
            self.actions.push_back(Action::Aggregate { channel: channel as u16 });
        }
        if let Some(channel) = self.channels.get_mut(channel) {
            let (operation, number, epoch) = (self.cursor, segment, number);
            let restored = None;
            channel.begin(Segment {
                number,
                operation,
                signature,
                epoch,
                lo,
                hi,
                program,
                coding,
                retention,
                aggregated,
                resume: restored,
            });
        }
        self.begun += 1;
        self.cursor += u64::from(all_begun);
        true
    }

    /// How many more segments the operation that has begun may begin by today's plan while a switch is agreed on. One for four that
    /// are under way: those last long enough, and what follows them had better go by the new plan.
    pub(crate) fn segments_ahead(&self) -> u64 {
        let run = self.operations.get(self.cursor).and_then(|operation| operation.run);
        run.map_or(0, |run| run.segmentation.segments - run.begun).min(self.channels.len().div_ceil(4) as u64)
    }

    /// Issues the next step of the lowest segment that has one ready.
    pub(crate) fn poll_step(&mut self, now: Nanos) -> Option<Action> {
        let everyone = self.acknowledgements.acked_by_all();
        let count = self.channels.len() as u64;
        let first = self.begun.saturating_sub(count);
        if self.failure().is_some() {
            return None;
        }
        for segment in first..self.begun {
            let index = (segment % count) as u16;
            let channel = self.channels.get_mut(usize::from(index)).filter(|_| segment < everyone);
            if channel.is_some_and(Channel::take_copy_out) {
                return Some(Action::CopyOut { channel: index });
            }
            if let Some(action) = self.poll_post(index) {
                return Some(action);
            }
            match self.issue_on(index, everyone) {
                Ok(None) => {}
                Ok(Some(action)) => {
                    self.last_progress = now;
                    return Some(action);
                }
                Err((peer, operation)) => {
                    self.handle_unexpected(now, peer, operation);
                    if let Some(action) = self.poll_control() {
                        return Some(action);
                    }
                }
            }
        }
        None
    }

    /// `Err` names a peer whose message is not the one that the plan says, and the operation that is in doubt.
    fn issue_on(&mut self, index: u16, everyone: u64) -> Result<Option<Action>, (Participant, u64)> {
        let Some(channel) = self.channels.get_mut(usize::from(index)) else { return Ok(None) };
        let acknowledged = channel.segment().is_some_and(|segment| segment.number < everyone);
        let Some((step, segment, what)) = channel.ready(acknowledged) else { return Ok(None) };
        let epoch = segment.epoch;
        let signature = segment.signature;
        // Fewest and most bytes; of no elements there is no chunk.
        let expected = |operand: &Operand| {
            let exact = operand.part.elements(segment.lo, segment.hi).1 * signature.dtype.size() as u64;
            match operand.encoding {
                Encoding::Coded(_) if exact > 0 => 1..=exact + u64::from(CODED_ROOM),
                _ => exact..=exact,
            }
        };
        for (peer, operand) in peers(&what.sources) {
            let plans = (&mut self.current, &mut self.next);
            let Some(stream) = stream(plans, epoch, peer, index) else { return Ok(None) };
            let Some((_, arrival)) = stream.peek(0) else { return Ok(None) };
            let right = arrival.operation == segment.operation
                && arrival.segment == segment.number
                && arrival.signature == signature
                && expected(operand).contains(&u64::from(arrival.payload.bytes));
            if !right {
                let operation = segment.operation.min(arrival.operation);
                return Err((peer, operation));
            }
        }
        for (peer, _) in peers(&what.destinations) {
            let plans = (&mut self.current, &mut self.next);
            if !stream(plans, epoch, peer, index).is_some_and(|stream| stream.may_send()) {
                return Ok(None);
            }
        }
        let (mut sources, mut sends) = (ArrayVec::new(), ArrayVec::new());
        let mut header = Header::new(Kind::Data, segment.epoch);
        (header.channel, header.operation, header.segment) = (index, segment.operation, segment.number);
        header.sign(&signature);
        for (peer, _) in peers(&what.sources) {
            let plans = (&mut self.current, &mut self.next);
            let Some(stream) = stream(plans, epoch, peer, index) else { return Ok(None) };
            let Some((sequence, arrival)) = stream.peek(0) else { return Ok(None) };
            stream.consume();
            if stream.credit_due() {
                self.credits.push_back((segment.epoch, peer, index));
            }
            let Payload { bytes, posted } = arrival.payload;
            sources.push(PeerMessage { peer, sequence, bytes, posted, header });
        }
        for (peer, operand) in peers(&what.destinations) {
            let plans = (&mut self.current, &mut self.next);
            let Some(stream) = stream(plans, epoch, peer, index) else { return Ok(None) };
            header.sequence = stream.send();
            header.credit = stream.take_credit();
            self.acknowledgements.fill_header(peer, &mut header);
            let bytes = *expected(operand).end() as u32;
            if operand.encoding == Encoding::Exact
                && let Some(operation) = self.operations.get_mut(segment.operation)
            {
                operation.wire_bytes += u64::from(bytes);
            }
            sends.push(PeerMessage { peer, sequence: header.sequence, bytes, posted: false, header });
        }
        let parts = match what.kind {
            StepKind::Fetch | StepKind::Store => 1,
            StepKind::Move | StepKind::Reduce { .. } => sends.len() as u8,
        };
        channel.issue(parts);
        Ok(Some(Action::Step { channel: index, step, sources, sends }))
    }

    pub(crate) fn poll_credit(&mut self) -> Option<Action> {
        while let Some((number, peer, channel)) = self.credits.pop_front() {
            // What is due on a link that was carried over since is due still.
            let number = number.max(self.current.number());
            let plans = (&mut self.current, &mut self.next);
            let Some(stream) = stream(plans, number, peer, channel) else { continue };
            if !stream.credit_due() {
                continue;
            }
            let mut header = Header::new(Kind::Credit, number);
            header.channel = channel;
            header.credit = stream.take_credit();
            self.acknowledgements.fill_header(peer, &mut header);
            return Some(Action::Send {
                to: peer,
                epoch: number,
                message: Message { header, control: None },
            });
        }
        None
    }
}
