//! The communicator: puts calls, streams, channels, acknowledgements, switches and failures together.

use crate::ack_tree::AckTree;
use crate::aggregation::AggregationReport;
use crate::channel::{Channel, Segment};
use crate::departure::Departures;
use crate::epoch::{Epoch, EpochPlan, Timeouts, stream};
use crate::inquiry::Inquiry;
use crate::interleave::InterleaveSlot;
use crate::message::{Control, Header, Kind, Message, Payload};
use crate::operation::{Call, CallOutcome, Operations};
use crate::stream::Arrival;
use crate::switch::Switch;
use crate::{CoreError, Failure, Nanos};
use arrayvec::ArrayVec;
use harmonaize_abi::{Collective, Rank, Signature};
use harmonaize_plan::{Access, Algorithm, Group, MAX_STEP_PEERS, Participant, PlanError};
use std::collections::VecDeque;

/// What a communicator is made from.
#[derive(Clone, Debug)]
pub struct Config {
    /// Who we are.
    pub me: Participant,
    /// The first plan.
    pub plan: EpochPlan,
    /// How each local rank's memory is reached.
    pub access: Vec<(Rank, Access)>,
    /// Times.
    pub timeouts: Timeouts,
    /// Operations in flight at once; a call beyond is refused.
    pub operations: usize,
}

/// One message of a step: to or from whom, its number on the stream, and for sends the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerMessage {
    /// The other end.
    pub peer: Participant,
    /// Number on the stream; the payload lies in landing slot `sequence % landing_slots`.
    pub sequence: u32,
    /// Bytes of payload; of a coded one to be sent the most that it may have, and the caller knows how many it has.
    pub bytes: u32,
    /// The payload of this source lies in the step's first memory destination already (see [`Action::Post`]).
    pub posted: bool,
    /// The header to send (for a source: unused, as received).
    pub header: Header,
}

/// What the provider says of a completed operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Receipt {
    /// Number of the operation.
    pub operation: u64,
    /// What it was.
    pub signature: Signature,
    /// Tensor bytes that this participant sent, as they were sent.
    pub wire_bytes: u64,
    /// How it went between participants, where it was not coded.
    pub algorithm: Algorithm,
    /// What coding it came to; `None` if nothing was coded.
    pub coded: Option<CodingReport>,
    /// What aggregation it came to; `None` if no aggregator was to sum any of it.
    pub aggregation: Option<AggregationReport>,
}

/// What coding came to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CodingReport {
    /// Bytes of chunks that were sent, each as often as it was.
    pub wire_bytes: u64,
    /// The codec of what was not exact, as [`harmonaize_plan::Coding::codec`] says it; [`CodingReport::MIXED`] if it was not always the same.
    pub codec: u16,
    /// Of the results that were decoded: the most that the squared error of the sums is, as their owners told it, or what it is of what was moved,
    pub error: f64,
    /// what encoders measured of it,
    pub measured: f64,
    /// and the squares that it is an error of.
    pub squares: f64,
    /// Whether a chunk that was written or read here was exact although its plan says otherwise.
    pub uncompressed_chunks: bool,
}

impl CodingReport {
    /// Nothing travelled in fewer bits.
    pub const EXACT: u16 = 0;
    /// Parts of an operation travelled in different codecs.
    pub const MIXED: u16 = u16::MAX;
}

/// What the caller must do next.
#[derive(Clone, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "actions are passed by value, one at a time; a box would be an allocation a step"
)]
pub enum Action {
    /// Execute step `step` of the segment on `channel` (see [`Communicator::segment`]): memory operands, then `sends` in order. Call
    /// [`Communicator::handle_completion`] once per send when its bytes may be overwritten, and once for a fetch or store when it has ended; steps
    /// without either are complete when executed. After a step with coded operands call [`Communicator::handle_coded`].
    Step {
        /// Channel.
        channel: u16,
        /// Index in the segment's program.
        step: u32,
        /// Messages that the peer sources consume, in order of the operands.
        sources: ArrayVec<PeerMessage, MAX_STEP_PEERS>,
        /// Messages for the peer destinations, in order of the operands.
        sends: ArrayVec<PeerMessage, MAX_STEP_PEERS>,
    },
    /// If the transport can, let the payload of a message to come land in the first memory destination of step `step` of
    /// the segment on `channel`, and not in its slot. Nothing else touches that memory until the step is issued.
    Post {
        /// Channel.
        channel: u16,
        /// Index in the segment's program: a [`harmonaize_plan::StepKind::Move`] from a peer.
        step: u32,
        /// From whom the message comes, on the link of the segment's epoch.
        peer: Participant,
        /// Its number on the stream.
        sequence: u32,
    },
    /// Begin this session with the aggregator of `epoch`; see [`Communicator::handle_aggregated`] and [`Communicator::handle_aggregation_ended`].
    Join {
        /// The epoch.
        epoch: u32,
        /// The session.
        session: u64,
    },
    /// Ask the aggregator of `epoch` whether it is there, by the beginning of a session with it that nothing is submitted in, while hosts go
    /// on; what comes of it is told by [`Communicator::handle_aggregator_alive`] or [`Communicator::handle_aggregation_ended`].
    ProbeAggregator {
        /// The epoch.
        epoch: u32,
        /// The session.
        session: u64,
    },
    /// End the session with the aggregator of `epoch`: from now on nothing is read or written for it.
    Leave {
        /// The epoch.
        epoch: u32,
    },
    /// Have the aggregator do the segment on `channel`, the session's next (see [`Segment::aggregated`]). Of a sum the local ranks'
    /// inputs, added up, are this participant's part. What comes goes to their outputs, but if the segment's outputs are held
    /// ([`Segment::stages_output`]) to staging, and what is a broadcast's root's own at once.
    Aggregate {
        /// Channel.
        channel: u16,
    },
    /// Everybody has the sum of the segment on `channel`, or this one has it and keeps it ([`Segment::retains_output`]): copy it from staging to
    /// the local ranks' outputs; an average is divided on the way.
    CopyOut {
        /// Channel.
        channel: u16,
    },
    /// Send a message without payload, on path 0 of the link of `epoch`.
    Send {
        /// To whom.
        to: Participant,
        /// On which epoch's link.
        epoch: u32,
        /// What.
        message: Message,
    },
    /// A local rank's operation has ended well.
    Complete {
        /// Whose.
        rank: Rank,
        /// From the call.
        token: u64,
        /// What was done.
        receipt: Receipt,
    },
    /// A local rank's operation has ended badly; the reason came with [`Action::Ended`].
    Fail {
        /// Whose.
        rank: Rank,
        /// From the call.
        token: u64,
        /// Number of the operation.
        operation: u64,
    },
    /// The communicator has ended; only [`Action::Send`] and [`Action::Fail`] follow.
    Ended(Failure),
    /// Ask whoever gives turns for this one; see [`Communicator::handle_slot_granted`]. An [`Action::ReleaseSlot`] follows, unless the communicator ends.
    RequestSlot {
        /// Its number, higher than any before.
        slot: u64,
    },
    /// Say that this turn is over, or no longer wanted.
    ReleaseSlot {
        /// Its number.
        slot: u64,
    },
    /// All participants switch to `epoch` at `segment`.
    Switched {
        /// The new epoch.
        epoch: u32,
        /// Its first segment.
        segment: u64,
    },
    /// Nothing needs the links of this epoch any more.
    Retire {
        /// The old epoch.
        epoch: u32,
    },
}

/// See the crate's documentation.
#[derive(Debug)]
pub struct Communicator {
    pub(crate) me: Participant,
    pub(crate) group: Group,
    pub(crate) access: Vec<(Rank, Access)>,
    pub(crate) timeouts: Timeouts,
    pub(crate) current: Epoch,
    pub(crate) next: Option<Switch>,
    /// The highest epoch that was given up.
    pub(crate) withdrawn: Option<u32>,
    /// By participant: the highest epoch it is prepared for.
    pub(crate) prepared: Vec<u32>,
    pub(crate) operations: Operations,
    /// The operation whose segments begin next.
    pub(crate) cursor: u64,
    /// Segments begun.
    pub(crate) begun: u64,
    /// Segments below this are done here.
    pub(crate) done: u64,
    pub(crate) channels: Vec<Channel>,
    pub(crate) acknowledgements: AckTree,
    pub(crate) credits: VecDeque<(u32, Participant, u16)>,
    /// To whom, on which epoch's link if not the usual one, and what.
    pub(crate) outbox: VecDeque<(Participant, Option<u32>, Message)>,
    pub(crate) actions: VecDeque<Action>,
    pub(crate) inquiry: Option<Inquiry>,
    pub(crate) last_progress: Nanos,
    /// By participant: what it last called.
    last_calls: Vec<Option<(u64, Signature)>>,
    pub(crate) departures: Departures,
    pub(crate) interleave: InterleaveSlot,
    pub(crate) failure: Option<Failure>,
    /// Local ranks of the oldest operation whose completion was reported.
    pub(crate) reported_ranks: usize,
}

impl Communicator {
    /// A communicator whose links are up.
    pub fn new(config: Config) -> Result<Self, CoreError> {
        let group = config.plan.plan.group().clone();
        let participants = group.participants();
        if group.local(config.me).is_empty() {
            return Err(CoreError::BadPlan("this participant has no rank"));
        }
        let channels = config.plan.channels;
        let current = Epoch::new(config.plan, config.me, config.access.clone())?;
        Ok(Self {
            me: config.me,
            access: config.access,
            timeouts: config.timeouts,
            prepared: vec![current.number(); participants as usize],
            current,
            next: None,
            withdrawn: None,
            operations: Operations::new(group.local(config.me), config.operations),
            cursor: 0,
            begun: 0,
            done: 0,
            channels: (0..channels).map(|_| Channel::default()).collect(),
            acknowledgements: AckTree::new(config.me, participants, channels),
            credits: VecDeque::with_capacity(2 * participants as usize * usize::from(channels)),
            outbox: VecDeque::with_capacity(4 * participants as usize),
            actions: VecDeque::with_capacity(10 + usize::from(channels)),
            inquiry: None,
            last_progress: Nanos(0),
            last_calls: vec![None; participants as usize],
            departures: Departures::new(participants),
            interleave: InterleaveSlot::default(),
            failure: None,
            reported_ranks: 0,
            group,
        })
    }

    /// A local rank calls an operation. It is number n for a rank that has called n before.
    pub fn handle_call(&mut self, now: Nanos, rank: Rank, call: Call) -> Result<u64, CoreError> {
        self.check_open()?;
        if call.signature.collective == Collective::Broadcast && call.signature.root.0 >= self.group.ranks() {
            return Err(CoreError::BadPlan("root outside the communicator"));
        }
        if call.signature.collective == Collective::AllToAll && call.in_place {
            return Err(CoreError::Plan(PlanError::InPlace));
        }
        let idle = self.operations.oldest().is_none();
        let number = match self.operations.call(now, rank, call) {
            CallOutcome::Accepted(number) => number,
            CallOutcome::Full => return Err(CoreError::Full),
            CallOutcome::NotLocal => return Err(CoreError::NotLocal(rank)),
            CallOutcome::Mismatch { number, other } => {
                let failure =
                    Failure::Mismatch { operation: number, calls: vec![other, (rank, call.signature)] };
                self.fail(failure.clone());
                return Err(CoreError::Ended(failure));
            }
        };
        if idle {
            self.last_progress = now;
        }
        self.compare_with_peers(number, (rank, call.signature));
        self.refuse_impossible();
        Ok(number)
    }

    /// Whether what peers called as operation `number` is the same.
    fn compare_with_peers(&mut self, number: u64, call: (Rank, Signature)) {
        let other = (0..).map(Participant).zip(&self.last_calls).find_map(|(peer, heard)| {
            let (operation, signature) = (*heard)?;
            (operation == number && signature != call.1).then_some((peer, signature))
        });
        if let Some((peer, signature)) = other {
            self.fail(self.mismatch(number, call, peer, signature));
        }
    }

    /// A peer called another thing than we did.
    pub(crate) fn mismatch(
        &self,
        operation: u64,
        call: (Rank, Signature),
        peer: Participant,
        signature: Signature,
    ) -> Failure {
        let other = self.group.local(peer).iter().map(|rank| (*rank, signature));
        Failure::Mismatch { operation, calls: std::iter::once(call).chain(other.take(1)).collect() }
    }

    /// The segment on a channel.
    pub fn segment(&self, channel: u16) -> Option<&Segment> {
        self.channels.get(usize::from(channel))?.segment()
    }

    /// What an operation in flight is.
    pub fn signature(&self, operation: u64) -> Option<Signature> {
        self.operations.get(operation).map(|operation| operation.signature)
    }

    /// The epoch that the next segment runs under, as far as is known here.
    pub fn active_epoch(&self) -> u32 {
        self.control_epoch()
    }

    /// The epoch whose links a change may carry over.
    pub fn link_epoch(&self) -> u32 {
        self.current.number()
    }

    /// Why it ended, if it has.
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// Who we are.
    pub fn me(&self) -> Participant {
        self.me
    }

    /// The token of a local rank's call.
    pub fn token(&self, operation: u64, rank: Rank) -> Option<u64> {
        let local = self.operations.ranks().iter().position(|r| *r == rank)?;
        *self.operations.get(operation)?.calls.get(local)?
    }

    /// A frame came from a peer on the link that was made for the epoch `link`; a data frame's payload lies in its slot, or
    /// where it was posted.
    pub fn handle_frame(
        &mut self,
        now: Nanos,
        from: Participant,
        link: u32,
        header: Header,
        control: Option<Control>,
        payload: Payload,
    ) {
        if self.failure.is_some() || from == self.me || from.0 >= self.group.participants() {
            return;
        }
        let before = self.acknowledgements.acked_by_all();
        self.acknowledgements.handle_header(from, &header);
        if self.acknowledgements.acked_by_all() > before {
            self.note_progress(now);
        }
        let right = match header.kind {
            k if k == Kind::Acknowledge as u8 => true,
            k if k == Kind::Credit as u8 => self.handle_credit(from, link, &header),
            k if k == Kind::Data as u8 => {
                self.note_progress(now);
                self.handle_credit(from, link, &header) && self.handle_data(now, from, link, &header, payload)
            }
            k if k == Kind::Control as u8 => {
                control.is_some_and(|control| self.handle_control(now, from, control))
            }
            _ => false,
        };
        if !right {
            self.fail(Failure::Internal { ranks: self.group.local(from).to_vec() });
        }
    }

    pub(crate) fn epoch(&mut self, number: u32) -> Option<&mut Epoch> {
        if self.current.number() == number {
            return Some(&mut self.current);
        }
        self.next.as_mut().map(|switch| &mut switch.epoch).filter(|epoch| epoch.number() == number)
    }

    fn handle_credit(&mut self, from: Participant, link: u32, header: &Header) -> bool {
        let newest = self.next.as_ref().map_or(self.current.number(), |switch| switch.epoch.number());
        if header.epoch < link || header.epoch > newest {
            return false;
        }
        let next = self.next.as_mut().map(|switch| &mut switch.epoch);
        let of_link = |epoch: &&mut Epoch| epoch.link(from) == Some(link);
        match Some(&mut self.current).filter(of_link).or(next.filter(of_link)) {
            Some(epoch) => {
                epoch.stream(from, header.channel).is_some_and(|stream| stream.handle_credit(header.credit))
            }
            // The last credits of a link that is no longer needed here.
            None => link < self.current.number(),
        }
    }

    fn handle_data(
        &mut self,
        now: Nanos,
        from: Participant,
        link: u32,
        header: &Header,
        payload: Payload,
    ) -> bool {
        let Some(signature) = header.signature() else { return false };
        // Who called something else counts segments otherwise too; nothing more can be asked of the message.
        let other = self.operations.caller(header.operation).filter(|(_, ours)| *ours != signature);
        if let Some(call) = other {
            self.fail(self.mismatch(header.operation, call, from, signature));
            return true;
        }
        if header.epoch < self.current.number() {
            self.handle_unexpected(now, from, header.operation);
            return true;
        }
        let arrival = Arrival { operation: header.operation, segment: header.segment, signature, payload };
        if self.epoch(header.epoch).is_none_or(|epoch| epoch.link(from) != Some(link)) {
            return false;
        }
        let plans = (&mut self.current, &mut self.next);
        let Some(stream) = stream(plans, header.epoch, from, header.channel) else { return false };
        if !stream.handle_arrival(header.sequence, arrival) {
            return false;
        }
        if let Some(heard) = self.last_calls.get_mut(from.0 as usize)
            && heard.is_none_or(|(operation, _)| operation <= header.operation)
        {
            *heard = Some((header.operation, signature));
        }
        true
    }

    fn handle_control(&mut self, now: Nanos, from: Participant, control: Control) -> bool {
        match control {
            Control::Inquire { operation } => self.handle_inquiry(from, operation),
            Control::Answer { operation, missing, call } => {
                self.handle_answer(now, from, operation, missing, call)
            }
            Control::Left { rank, operations } => return self.handle_peer_departed(from, rank, operations),
            Control::Abort { failure } => self.fail(failure),
            Control::Prepared { epoch } => {
                if let Some(prepared) = self.prepared.get_mut(from.0 as usize) {
                    *prepared = (*prepared).max(epoch);
                }
                self.propose_if_leader();
            }
            Control::Propose { epoch } => return self.handle_proposal(from, epoch),
            Control::Promise { epoch, below } => self.handle_promise(from, epoch, below),
            Control::Commit { epoch, segment } => {
                return from == self.leader() && self.handle_commit(epoch, segment);
            }
            Control::Withdrawn { epoch } => self.handle_withdrawn(from, epoch),
            Control::Aggregation { epoch, generation, agreement } => {
                return self.handle_agreement(now, from, epoch, agreement, generation);
            }
        }
        true
    }

    /// A send, fetch or store that an [`Action::Step`] asked for has ended.
    pub fn handle_completion(&mut self, now: Nanos, channel: u16, step: u32) {
        if self.failure.is_some() {
            return;
        }
        let right = self.channels.get_mut(usize::from(channel)).is_some_and(|c| c.complete(step));
        debug_assert!(right, "a completion that nobody waits for");
        self.note_progress(now);
    }

    pub(crate) fn send_control(&mut self, to: Participant, control: Control) {
        let mut header = Header::new(Kind::Control, self.current.number());
        self.acknowledgements.fill_header(to, &mut header);
        let twice = matches!(
            control,
            Control::Left { .. } | Control::Abort { .. } | Control::Inquire { .. } | Control::Answer { .. }
        );
        // Until the old epoch is done, a peer may have closed its link, or not know of the commit; and either link may have
        // broken with nobody here knowing.
        let other =
            self.next.as_ref().filter(|switch| twice && switch.ready && !switch.epoch.reuses_link(to));
        let message = Message { header, control: Some(Box::new(control)) };
        match other.map(|switch| switch.epoch.number()) {
            Some(next) => {
                self.outbox.push_back((to, Some(next), message.clone()));
                self.outbox.push_back((to, Some(self.current.number()), message));
            }
            None => self.outbox.push_back((to, None, message)),
        }
    }

    pub(crate) fn broadcast_control(&mut self, control: &Control) {
        for peer in (0..self.group.participants()).map(Participant) {
            if peer != self.me {
                self.send_control(peer, control.clone());
            }
        }
    }

    /// The epoch whose links carry messages that belong to no stream: the newest that everybody has.
    pub(crate) fn control_epoch(&self) -> u32 {
        match &self.next {
            Some(switch) if switch.commit.is_some() => switch.epoch.number(),
            _ => self.current.number(),
        }
    }

    /// The next control message.
    pub(crate) fn poll_control(&mut self) -> Option<Action> {
        while let Some((to, epoch, message)) = self.outbox.pop_front() {
            let epoch = epoch.unwrap_or(self.control_epoch());
            if self.epoch(epoch).is_some() {
                return Some(Action::Send { to, epoch, message });
            }
        }
        None
    }

    /// The next thing to do, if any.
    pub fn poll(&mut self, now: Nanos) -> Option<Action> {
        if let Some(action) = self.poll_control() {
            return Some(action);
        }
        if let Some(action) = self.actions.pop_front() {
            return Some(action);
        }
        if self.failure.is_some() {
            return self.poll_failed();
        }
        self.handle_aggregation_timeout(now);
        loop {
            self.advance_completions();
            // What is done here is where it belongs before anybody hears of it.
            if let Some(action) = self.actions.pop_front() {
                return Some(action);
            }
            if let Some(action) = self.poll_completed() {
                return Some(action);
            }
            self.poll_slot_over(now);
            let begun = self.begun;
            while self.begin_segment(now) {}
            if let Some(action) = self.poll_step(now) {
                return Some(action);
            }
            // A segment without steps is done as it begins.
            if begun == self.begun {
                break;
            }
        }
        if let Some(action) = self.poll_control().or_else(|| self.actions.pop_front()) {
            return Some(action);
        }
        if self.failure.is_some() {
            return None;
        }
        if let Some(action) = self.poll_credit() {
            return Some(action);
        }
        // Who changes plans, or leaves, waits for those of everything that is done.
        let all = self.next.is_some() || self.departures.any_departed();
        let (to, epoch) = (self.acknowledgements.poll_due(now, all)?, self.control_epoch());
        let mut header = Header::new(Kind::Acknowledge, epoch);
        self.acknowledgements.fill_header(to, &mut header);
        Some(Action::Send { to, epoch, message: Message { header, control: None } })
    }
}
