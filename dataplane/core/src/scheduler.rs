//! Running segments: what is done, what begins next, which step is issued, which credits are due.

mod post;

use crate::action::{Action, PeerMessage};
use crate::admission::{Admission, Decision, TAIL};
use crate::aggregation::Executor;
use crate::channel::{Channel, Segment};
use crate::epoch::peers;
use crate::inquiries::{Inquiries, Suspect};
use crate::message::{Header, Kind, Payload};
use crate::operation::{Operations, Run};
use crate::shared::Shared;
use arrayvec::ArrayVec;
use harmonaize_abi::{
    ChannelId, Epoch, Nanos, OperationId, Rank, SegmentId, SegmentIndex, Signature, SlotId, StepId,
};
use harmonaize_plan::{
    CODED_ROOM, Encoding, Group, Operand, Participant, Program, Retention, Step, StepKind,
};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// The outcome of an attempt to begin a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begin {
    /// It has begun.
    Begun,
    /// It has to wait.
    NotYet,
    /// It has to wait for a session with the aggregator of this epoch, which is to be requested.
    SessionNeeded(Epoch),
}

/// A segment about to begin.
struct Candidate {
    segment: SegmentId,
    epoch: Epoch,
    signature: Signature,
    retention: Retention,
}

/// Begins segments in order, and issues the steps of those that have begun.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Scheduler {
    channels: Vec<Channel>,
    /// The operation whose segments begin next.
    cursor: OperationId,
    /// Segments begun.
    begun: SegmentId,
    /// Segments below this are done here.
    done: SegmentId,
    /// Credits that are due: the epoch, the peer and the channel of each stream.
    credits: VecDeque<(Epoch, Participant, ChannelId)>,
}

impl Scheduler {
    pub(crate) fn new(channels: u16, participants: u32) -> Self {
        Self {
            channels: (0..channels).map(|_| Channel::default()).collect(),
            cursor: OperationId(0),
            begun: SegmentId(0),
            done: SegmentId(0),
            credits: VecDeque::with_capacity(2 * participants as usize * usize::from(channels)),
        }
    }

    /// Segments begun.
    pub(crate) fn begun(&self) -> SegmentId {
        self.begun
    }

    /// Segments below this are done here.
    pub(crate) fn done(&self) -> SegmentId {
        self.done
    }

    /// Segments below this are done here, and what comes of them is where it belongs.
    pub(crate) fn settled(&self) -> SegmentId {
        self.channels.iter().filter_map(Channel::copying).fold(self.done, SegmentId::min)
    }

    /// A channel.
    pub(crate) fn channel_mut(&mut self, channel: ChannelId) -> Option<&mut Channel> {
        self.channels.get_mut(usize::from(channel.0))
    }

    /// The segment on a channel.
    pub(crate) fn segment(&self, channel: ChannelId) -> Option<&Segment> {
        self.channels.get(usize::from(channel.0))?.segment()
    }

    /// The channels, each with its number.
    pub(crate) fn channels(&self) -> impl Iterator<Item = (ChannelId, &Channel)> {
        (0..).map(ChannelId).zip(&self.channels)
    }

    pub(crate) fn channels_mut(&mut self) -> impl Iterator<Item = &mut Channel> {
        self.channels.iter_mut()
    }

    /// The channel that a segment runs on.
    fn channel_of(&self, segment: SegmentId) -> ChannelId {
        ChannelId((segment.0 % (self.channels.len() as u64).max(1)) as u16)
    }

    /// What must hold between two calls.
    fn check(&self, shared: &Shared) {
        let (first, end) = shared.operations.bounds();
        debug_assert!(self.done <= self.begun, "a segment is done that has not begun");
        let placed = |(index, channel): (ChannelId, &Channel)| {
            let number = channel.segment().map(|segment| segment.number);
            number.is_none_or(|number| number < self.begun && self.channel_of(number) == index)
        };
        debug_assert!(self.channels().all(placed), "a segment runs on another's channel, or has not begun");
        debug_assert!((first..=end).contains(&self.cursor), "the next operation is not in flight");
        debug_assert_eq!(self.done, shared.acknowledgements.local_done(), "acknowledged is what is done");
        debug_assert!(
            shared.acknowledgements.acked_by_all() <= self.done,
            "all have done what is not done here"
        );
    }

    /// A part of a step has ended. False if none was under way.
    #[must_use]
    pub(crate) fn handle_completion(&mut self, channel: ChannelId, step: StepId) -> bool {
        self.channels.get_mut(usize::from(channel.0)).is_some_and(|channel| channel.complete(step))
    }

    /// Segments from this one on are not done any more.
    pub(crate) fn undo(&mut self, from: SegmentId) {
        self.done = self.done.min(from);
    }

    /// Advances past segments that are done or released, and retires an old plan that nobody needs any more.
    pub(crate) fn advance(&mut self, shared: &mut Shared) {
        while self.done < self.begun && !shared.epochs.is_frozen() {
            let index = self.channel_of(self.done);
            let this = |segment: &Segment| segment.number == self.done;
            let channel = self.channels.get_mut(usize::from(index.0));
            if let Some(channel) = channel.filter(|channel| channel.segment().is_some_and(this)) {
                if !channel.done() {
                    break;
                }
                if channel.take_eager_copy_out() {
                    shared.actions.push_back(Action::CopyOut { channel: index });
                }
            }
            self.done = self.done.next();
        }
        shared.acknowledgements.advance_local(self.done);
        self.check(shared);
        // What is still to be brought from a channel's staging keeps the channel.
        if !shared.actions.is_empty() {
            return;
        }
        let everyone = shared.acknowledgements.acked_by_all();
        for channel in &mut self.channels {
            let acknowledged = channel.segment().is_some_and(|segment| segment.number < everyone);
            if !channel.released(acknowledged) {
                continue;
            }
            let operation = channel.clear().and_then(|segment| shared.operations.get_mut(segment.operation));
            if let Some(run) = operation.and_then(|operation| operation.run.as_mut()) {
                run.finish();
            }
        }
        shared.retire_epoch();
    }

    /// Begins the next segment in order, if it is ready. Its operation is called by all and admitted, its channel free and
    /// its plan known.
    pub(crate) fn begin_segment(
        &mut self,
        now: Nanos,
        shared: &mut Shared,
        admission: &mut Admission,
    ) -> Begin {
        let Some(candidate) = self.candidate(now, shared, admission) else { return Begin::NotYet };
        let Candidate { segment, epoch, signature, retention } = candidate;
        let state = shared.epochs.get_mut(epoch).filter(|epoch| epoch.aggregates(&signature, retention));
        let aggregated = match state.and_then(|epoch| epoch.aggregation.as_mut()) {
            None => None,
            Some(state) => match state.assign_executor(segment) {
                Executor::Hosts => None,
                Executor::Aggregator(index) => Some(index),
                Executor::Unknown { request: true } => return Begin::SessionNeeded(epoch),
                Executor::Unknown { request: false } => return Begin::NotYet,
            },
        };
        match self.begin(shared, &candidate, aggregated) {
            Some(()) => Begin::Begun,
            None => {
                shared.fail_internal(shared.me);
                Begin::NotYet
            }
        }
    }

    /// The next segment in order, if it may begin.
    fn candidate(&self, now: Nanos, shared: &mut Shared, admission: &mut Admission) -> Option<Candidate> {
        let segment = self.begun;
        let operation = shared.operations.get(self.cursor)?;
        let free = self.channels.get(usize::from(self.channel_of(segment).0))?.segment().is_none();
        if !free || !shared.operations.complete(self.cursor) {
            return None;
        }
        let epoch = shared.epochs.governing(segment)?;
        let signature = operation.signature;
        if operation.run.is_none() {
            let bytes = signature.count.saturating_mul(signature.dtype.size() as u64);
            match admission.admit(now, self.cursor, bytes, operation.timeout() / 4) {
                Decision::Admitted => {}
                Decision::Blocked => return None,
                Decision::SlotNeeded => {
                    shared.actions.push_back(Action::RequestSlot { slot: SlotId(self.cursor.0) });
                    return None;
                }
            }
        }
        let usual = || Some(shared.epochs.get(epoch)?.retention(&signature, operation.in_place));
        let retention = operation.run.map_or_else(usual, |run| Some(run.retention))?;
        Some(Candidate { segment, epoch, signature, retention })
    }

    /// Begins a segment; `None` if it has no program.
    fn begin(
        &mut self,
        shared: &mut Shared,
        next: &Candidate,
        aggregated: Option<SegmentIndex>,
    ) -> Option<()> {
        let Candidate { segment: number, epoch, signature, retention } = *next;
        let index = self.channel_of(number);
        let state = shared.epochs.get_mut(epoch)?;
        let operation = shared.operations.get_mut(self.cursor)?;
        let run = operation.run.get_or_insert_with(|| Run {
            first_segment: number,
            segmentation: state.segmentation(&signature),
            retention,
            algorithm: state.algorithm(&signature),
            begun: 0,
            finished: 0,
        });
        let coding = state.coding(&signature, retention);
        let program: Arc<Program> = state.program(&signature, retention, run.algorithm).ok()?;
        let (lo, hi) = run.segmentation.range(number.0 - run.first_segment.0);
        run.begin();
        if retention != Retention::CopyInputs {
            shared.acknowledgements.await_below(number.next());
        }
        let all_begun = run.all_begun();
        if aggregated.is_some() {
            operation.aggregated_segments += 1;
            let root = shared.group.local(shared.me).contains(&signature.root);
            let sent = state.aggregation.as_ref().map_or(0, |state| state.bytes(&signature, hi - lo, root));
            operation.wire_bytes += sent;
            shared.actions.push_back(Action::Aggregate { channel: index });
        }
        self.channels.get_mut(usize::from(index.0))?.begin(Segment {
            number,
            operation: self.cursor,
            signature,
            epoch,
            lo,
            hi,
            program,
            coding,
            retention,
            counts: operation.counts.clone(),
            aggregated,
            resume: None,
        });
        self.begun = self.begun.next();
        if all_begun {
            self.cursor = self.cursor.next();
        }
        self.check(shared);
        Some(())
    }

    /// How many more segments the operation that has begun may begin by today's plan while a switch is agreed on. One for four that
    /// are under way: those last long enough, and what follows them had better go by the new plan.
    pub(crate) fn segments_ahead(&self, operations: &Operations) -> u64 {
        let run = operations.get(self.cursor).and_then(|operation| operation.run);
        run.map_or(0, |run| run.segmentation.segments - run.begun).min(self.channels.len().div_ceil(4) as u64)
    }

    /// Releases an interleave slot that is over.
    pub(crate) fn release_slot(&self, now: Nanos, shared: &mut Shared, admission: &mut Admission) {
        // The next one's first segments fill the link while the last of these leave it, and the release takes its time.
        let operations = &shared.operations;
        let last = self.cursor.0.checked_sub(1).and_then(|last| operations.get(OperationId(last))?.run);
        let (open, tail) =
            (self.begun.0 - self.done.0, last.map_or(0, |run| run.segmentation.segments / TAIL));
        if open > tail {
            return;
        }
        let called = operations.get(self.cursor).is_some() && operations.complete(self.cursor);
        if let Some(slot) = admission.take_over(now, open == 0, (self.cursor, called)) {
            shared.actions.push_back(Action::ReleaseSlot { slot: SlotId(slot.0) });
        }
    }

    /// Issues the next step of the lowest segment that has one ready.
    pub(crate) fn poll_step(
        &mut self,
        now: Nanos,
        shared: &mut Shared,
        inquiries: &mut Inquiries,
    ) -> Option<Action> {
        if shared.has_failed() {
            return None;
        }
        let everyone = shared.acknowledgements.acked_by_all();
        let first = self.begun.0.saturating_sub(self.channels.len() as u64);
        for segment in (first..self.begun.0).map(SegmentId) {
            let index = self.channel_of(segment);
            let channel = self.channels.get_mut(usize::from(index.0)).filter(|_| segment < everyone);
            if channel.is_some_and(Channel::take_copy_out) {
                return Some(Action::CopyOut { channel: index });
            }
            if let Some(action) = self.poll_post(shared, index) {
                return Some(action);
            }
            match self.issue_on(shared, index, everyone) {
                Ok(None) => {}
                Ok(Some(action)) => {
                    inquiries.restart(now);
                    return Some(action);
                }
                Err(suspect) => {
                    inquiries.handle_unexpected(now, shared, suspect);
                    if let Some(action) = shared.poll_control() {
                        return Some(action);
                    }
                }
            }
        }
        None
    }

    /// Issues what the channel is ready for. `Err` names a peer whose message is not the one that the plan
    /// says, and the operation that is in doubt.
    fn issue_on(
        &mut self,
        shared: &mut Shared,
        index: ChannelId,
        everyone: SegmentId,
    ) -> Result<Option<Action>, Suspect> {
        let Some(channel) = self.channels.get_mut(usize::from(index.0)) else { return Ok(None) };
        let acknowledged = channel.segment().is_some_and(|segment| segment.number < everyone);
        let Some((step, segment, what)) = channel.ready(acknowledged) else { return Ok(None) };
        if !may_issue(shared, index, segment, what)? {
            return Ok(None);
        }
        let (epoch, signature) = (segment.epoch, segment.signature);
        let (mut sources, mut sends) = (ArrayVec::new(), ArrayVec::new());
        let mut header = Header::new(Kind::Data, epoch);
        (header.channel, header.operation, header.segment) = (index, segment.operation.0, segment.number.0);
        header.sign(&signature);
        for (peer, _) in peers(&what.sources) {
            let Some(stream) = shared.epochs.stream_mut(epoch, peer, index) else { return Ok(None) };
            let Some((sequence, arrival)) = stream.peek(0) else { return Ok(None) };
            stream.consume();
            if stream.credit_due() {
                self.credits.push_back((epoch, peer, index));
            }
            let Payload { bytes, posted } = arrival.payload;
            sources.push(PeerMessage { peer, sequence, bytes, posted, header });
        }
        for (peer, operand) in peers(&what.destinations) {
            let Some(stream) = shared.epochs.stream_mut(epoch, peer, index) else { return Ok(None) };
            header.sequence = stream.send();
            header.credit = stream.take_credit();
            shared.acknowledgements.fill_header(peer, &mut header);
            let bytes = *payload_bytes(segment, operand).end() as u32;
            if operand.encoding == Encoding::Exact
                && let Some(operation) = shared.operations.get_mut(segment.operation)
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

    pub(crate) fn poll_credit(&mut self, shared: &mut Shared) -> Option<Action> {
        while let Some((epoch, peer, channel)) = self.credits.pop_front() {
            // What is due on a link that was carried over since is due still.
            let epoch = epoch.max(shared.epochs.current().number());
            let Some(stream) = shared.epochs.stream_mut(epoch, peer, channel) else { continue };
            if stream.credit_due() {
                let credit = stream.take_credit();
                let fill = |header: &mut Header| (header.channel, header.credit) = (channel, credit);
                return Some(shared.bare(Kind::Credit, peer, epoch, fill));
            }
        }
        None
    }

    /// Ranks of the participants that the steps to be issued next wait for, in order.
    pub(crate) fn awaited(&self, group: &Group) -> Vec<Rank> {
        let steps = self.channels.iter().filter_map(|channel| channel.ready(true));
        let waiting = steps.flat_map(|(_, _, step)| peers(&step.sources).chain(peers(&step.destinations)));
        let mut ranks: Vec<Rank> = waiting.flat_map(|(peer, _)| group.local(peer).iter().copied()).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }
}

/// The fewest and the most bytes of an operand's payload; of no elements there is no chunk.
fn payload_bytes(segment: &Segment, operand: &Operand) -> RangeInclusive<u64> {
    let elements = segment.elements(operand).1;
    let exact = elements * segment.signature.dtype.size() as u64;
    match operand.encoding {
        Encoding::Coded(_) if exact > 0 => 1..=exact + u64::from(CODED_ROOM),
        _ => exact..=exact,
    }
}

/// Whether every message that a step consumes is there, and every peer that it sends to has a free slot.
///
/// `Err` names a peer whose message is not the one that the plan says, and the operation that is in doubt.
fn may_issue(shared: &Shared, index: ChannelId, segment: &Segment, step: &Step) -> Result<bool, Suspect> {
    let stream = |peer| shared.epochs.stream(segment.epoch, peer, index);
    for (peer, operand) in peers(&step.sources) {
        let Some((_, arrival)) = stream(peer).and_then(|stream| stream.peek(0)) else { return Ok(false) };
        let right = arrival.operation == segment.operation
            && arrival.segment == segment.number
            && arrival.signature == segment.signature;
        let fits = payload_bytes(segment, operand).contains(&u64::from(arrival.payload.bytes));
        if !(right && fits) {
            let count = (right && segment.counts.is_some()).then_some(operand.part.block);
            return Err(Suspect { peer, operation: segment.operation.min(arrival.operation), count });
        }
    }
    let mut receivers = peers(&step.destinations);
    Ok(receivers.all(|(peer, _)| stream(peer).is_some_and(|stream| stream.may_send())))
}
