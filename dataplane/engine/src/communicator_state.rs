//! A communicator as the engine holds it. It has the state machine, its links and landing rings, staging, and the calls
//! of its local ranks.

use crate::aggregated::{AggregatorPath, Away};
use crate::backlog::Backlog;
use crate::command::CommunicatorStatus;
use crate::gaps::{BusyPlace, Gaps};
use crate::p2p::P2pState;
use crate::slices::Unfinished;
use crate::step::{CodedStep, ExecuteError, Located, culprit};
use crate::table::Key;
use crate::turns::{CLASSES, Urgency};
use harmonaize_abi::{
    ChannelId, CommunicatorHandle, CommunicatorId, Cookie, Dtype, Epoch, OperationId, Rank, Region,
    SegmentId, SlotId, Status, StepId, Token,
};
use harmonaize_codec::Sums;
use harmonaize_core::{CodingReport, Communicator, Failure, Nanos, Segment};
use harmonaize_events::Mark;
use harmonaize_plan::{CODED_ROOM, Operand, Participant, Program, Slot};
use harmonaize_shm::{Memory, MemoryError, Span};
use harmonaize_transport::{DownReason, LinkId, TrafficClass, Transport};
use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// Staging slots start at multiples of this many bytes.
const ALIGNMENT: u64 = 64;

/// Bytes of what adds nothing that are written at once.
const ROW: usize = 4096;

/// In a hand-over, a bit of the channel of memory of what tensors are owed. Only attachments have it that agents without it refuse.
const RESIDUALS: usize = 1 << 31;

/// A rank that this agent drives.
#[derive(Clone, Copy, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Local {
    pub(crate) rank: Rank,
    pub(crate) attachment: Key,
    pub(crate) handle: CommunicatorHandle,
}

/// A call in flight, from its descriptor.
#[derive(Clone, Copy, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Pending {
    /// None of a call that is over.
    pub(crate) rank: Option<Rank>,
    pub(crate) cookie: Cookie,
    pub(crate) input: Region,
    pub(crate) output: Region,
    pub(crate) feedback: Option<[Region; 2]>,
    /// What the input of a `PremulSum` is multiplied by.
    pub(crate) factor: f64,
    pub(crate) urgency: Urgency,
}

/// The links of one epoch, by participant.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Links {
    pub(crate) epoch: Epoch,
    pub(crate) links: Vec<Option<LinkId>>,
    up: Vec<bool>,
    /// Landing slots, by participant: `landing_slots` slots of `slot_bytes` for each channel, and as many for messages from rank to rank.
    #[serde(skip)]
    pub(crate) landing: Vec<Option<Arc<Memory>>>,
    pub(crate) paths: Vec<u16>,
    /// The rate limit of each, in bits a second.
    rates: Vec<Option<u64>>,
    pub(crate) announced: bool,
    /// The path to the epoch's aggregator.
    #[serde(skip)]
    pub(crate) aggregator: Option<Box<AggregatorPath>>,
}

/// What lies in staging behind the slots of a segment's program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExtraStaging {
    /// The result of the segment.
    Result,
    /// An input that adds nothing to a sum; later an output that nobody reads.
    Neutral,
}

#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct CommunicatorState {
    pub(crate) id: CommunicatorId,
    pub(crate) tenant: u32,
    /// The tenant's weight where tenants compete.
    pub(crate) weight: u32,
    pub(crate) core: Communicator,
    pub(crate) ranks: u32,
    pub(crate) participants: u32,
    pub(crate) locals: Vec<Local>,
    pub(crate) epochs: Vec<Links>,
    /// An epoch that is agreed on, and its first segment, until all before that is done.
    pub(crate) switching: Option<(Epoch, SegmentId)>,
    pub(crate) landing_slots: u32,
    /// Bytes of a landing slot.
    pub(crate) slot_bytes: u32,
    /// By channel: the segment, and the sum so far of the part that it has of this participant's.
    sums: Vec<Option<(SegmentId, Sums)>>,
    /// By channel.
    #[serde(skip)]
    staging: Vec<Option<Arc<Memory>>>,
    /// By channel: the residuals, in and out, of local ranks whose tensors are not mapped, one rank after another.
    #[serde(skip)]
    pub(crate) residual_staging: Vec<Option<Arc<Memory>>>,
    /// By channel: what is fetched and stored of a segment that an aggregator does. After a hand-over, what waited in the other process.
    #[serde(skip)]
    pub(crate) away: Vec<Away>,
    calls: Vec<Pending>,
    free: Vec<u32>,
    /// Calls in flight, by class.
    in_flight: [u32; CLASSES],
    /// Those of them that are below every class.
    #[serde(skip)]
    background: usize,
    /// How it waits for gaps, where all of them are.
    #[serde(skip)]
    pub(crate) gaps: Gaps,
    /// Where it counts for others of its tenant's that wait for gaps.
    #[serde(skip)]
    busy: BusyPlace,
    /// The interleave slot that it has without having asked for it.
    #[serde(skip)]
    pub(crate) unasked: Option<SlotId>,
    /// The highest priority and the first deadline of calls in flight that ask for one.
    special: Urgency,
    /// What its links were last said to carry.
    pub(crate) class: TrafficClass,
    #[serde(skip)]
    pub(crate) backlog: Backlog,
    #[serde(skip)]
    pub(crate) p2p: P2pState,
    pub(crate) failed: u64,
    pub(crate) bytes_sent: u64,
    /// Bytes of memory that steps have read and written.
    pub(crate) bytes_touched: u64,
    pub(crate) bytes_received: u64,
    /// The network's reason when a link went down, for the operator.
    pub(crate) detail: String,
    pub(crate) ended: bool,
    /// By channel: the segment that was last marked as begun.
    begun: Vec<Option<u64>>,
    /// By channel: the segment, and the first of its steps whose blocks are not copied yet. Where it is forgotten they are copied again.
    #[serde(skip)]
    copied: Vec<Option<(SegmentId, Epoch, StepId)>>,
    /// What it is in the midst of, and does nothing else before. At a hand-over there is nothing.
    #[serde(skip)]
    pub(crate) unfinished: Option<Unfinished>,
    /// Steps of a `PremulSum` whose fetches have ended: what they have fetched is to be scaled. At a hand-over there is none.
    #[serde(skip)]
    pub(crate) fetched: VecDeque<(ChannelId, StepId)>,
    /// Whether something has happened to it since it last had nothing to do.
    #[serde(skip)]
    pub(crate) pending: bool,
    /// Set while it rests, which is until something happens to it, or the time has come: it has no turns.
    #[serde(skip)]
    pub(crate) resting: Option<Nanos>,
}

/// The parts that a communicator's state is made from.
pub(crate) struct CommunicatorParts {
    pub(crate) id: CommunicatorId,
    pub(crate) tenant: u32,
    pub(crate) weight: u32,
    pub(crate) core: Communicator,
    pub(crate) ranks: u32,
    pub(crate) participants: u32,
    pub(crate) locals: Vec<Local>,
    pub(crate) links: Links,
    pub(crate) channels: u16,
    pub(crate) landing_slots: u32,
    pub(crate) slot_bytes: u32,
    /// Calls in flight over all local ranks.
    pub(crate) calls: u32,
}

impl CommunicatorState {
    pub(crate) fn new(parts: CommunicatorParts) -> Self {
        Self {
            id: parts.id,
            tenant: parts.tenant,
            weight: parts.weight,
            core: parts.core,
            ranks: parts.ranks,
            participants: parts.participants,
            locals: parts.locals,
            epochs: vec![parts.links],
            switching: None,
            landing_slots: parts.landing_slots,
            slot_bytes: parts.slot_bytes,
            sums: vec![None; usize::from(parts.channels)],
            staging: vec![None; usize::from(parts.channels)],
            residual_staging: vec![None; usize::from(parts.channels)],
            away: (0..parts.channels).map(|_| Away::default()).collect(),
            calls: vec![Pending::default(); parts.calls as usize],
            free: (0..parts.calls).rev().collect(),
            in_flight: [0; CLASSES],
            background: 0,
            gaps: Gaps::default(),
            busy: BusyPlace::default(),
            unasked: None,
            special: Urgency::IDLE,
            class: TrafficClass::default(),
            backlog: Backlog::default(),
            p2p: P2pState::default(),
            failed: 0,
            bytes_sent: 0,
            bytes_touched: 0,
            bytes_received: 0,
            detail: String::new(),
            ended: false,
            begun: vec![None; usize::from(parts.channels)],
            copied: vec![None; usize::from(parts.channels)],
            unfinished: None,
            fetched: VecDeque::new(),
            pending: true,
            resting: None,
        }
    }

    /// What it is in the midst of, or else a step whose fetch has ended and that is to be scaled. Of one that has failed the rest is
    /// dropped: its memory may be the tenant's again.
    pub(crate) fn take_unfinished(&mut self) -> Option<Unfinished> {
        let left = self.unfinished.take();
        let left = left.or_else(|| self.fetched.pop_front().map(Unfinished::fetched))?;
        Some(left).filter(|_| self.core.failure().is_none())
    }

    /// Something has happened to it: it has turns again. Until when it would have rested, if it did.
    pub(crate) fn wake(&mut self) -> Option<Nanos> {
        self.pending = true;
        self.resting.take()
    }

    /// Whether links are on their way up, or participants agree on a plan.
    pub(crate) fn is_changing(&self) -> bool {
        self.epochs.len() > 1 || !self.epochs.iter().all(Links::complete)
    }

    /// A tick has passed. It rests from now on if it has nothing to do, waits for no room on a link, has no change under way, and has no
    /// aggregator, whose packets it would have to look for: until when, the last of all times if it waits for no time.
    pub(crate) fn tick(&mut self, now: Nanos) -> Option<Nanos> {
        let looks = !self.backlog.is_empty() || self.epochs.iter().any(|links| links.aggregator.is_some());
        if !self.pending && !looks && !self.is_changing() {
            let due = self.core.poll_timeout().unwrap_or(Nanos(u64::MAX));
            if due > now {
                self.resting = Some(due);
                return Some(due);
            }
        }
        self.core.handle_timeout(now);
        self.pending = true;
        None
    }

    /// Memory of segments that have begun, by channel.
    pub(crate) fn used_staging(&self) -> impl Iterator<Item = (usize, &Arc<Memory>)> {
        let used = (0..).zip(&self.staging).filter_map(|(channel, memory)| Some((channel, memory.as_ref()?)));
        used.filter(|(channel, _)| self.core.segment(ChannelId(*channel)).is_some())
            .map(|(channel, memory)| (usize::from(channel), memory))
    }

    /// Memory of what tensors that are not mapped are owed, of segments that have begun, by channel and [`RESIDUALS`].
    pub(crate) fn used_residuals(&self) -> impl Iterator<Item = (usize, &Arc<Memory>)> {
        let used = (0..)
            .zip(&self.residual_staging)
            .filter_map(|(channel, memory)| Some((channel, memory.as_ref()?)));
        used.filter(|(channel, _)| self.core.segment(ChannelId(*channel)).is_some())
            .map(|(channel, memory)| (RESIDUALS | usize::from(channel), memory))
    }

    /// Gives a channel its memory, with what another process had there. With [`RESIDUALS`] it is that of what tensors are owed.
    pub(crate) fn set_staging(&mut self, channel: usize, memory: Arc<Memory>) {
        let all = if channel & RESIDUALS == 0 { &mut self.staging } else { &mut self.residual_staging };
        if let Some(staging) = all.get_mut(channel & !RESIDUALS) {
            *staging = Some(memory);
        }
    }

    /// How many channels there are.
    pub(crate) fn channels(&self) -> u16 {
        u16::try_from(self.begun.len()).unwrap_or(u16::MAX)
    }

    /// Makes room for what another process, which had it, does not hand over with it.
    pub(crate) fn make_room(&mut self) {
        let channels = self.begun.len();
        self.staging.resize(channels, None);
        self.residual_staging.resize(channels, None);
        self.away.resize_with(channels, Away::default);
        self.copied.resize(channels, None);
        for links in &mut self.epochs {
            links.landing.resize(links.links.len(), None);
        }
    }

    pub(crate) fn local(&self, rank: Rank) -> Option<&Local> {
        self.locals.iter().find(|local| local.rank == rank)
    }

    pub(crate) fn links(&self, epoch: Epoch) -> Option<&Links> {
        self.epochs.iter().find(|links| links.epoch == epoch)
    }

    /// Remembers a call. Returns its token, or `None` if too many are in flight.
    pub(crate) fn remember(&mut self, pending: Pending) -> Option<Token> {
        let token = self.free.pop()?;
        let call = self.calls.get_mut(token as usize)?;
        *call = pending;
        if let Some(count) = self.in_flight.get_mut(pending.urgency.class as usize) {
            *count += 1;
        }
        self.background += usize::from(pending.urgency.background);
        self.special.raise(&pending.urgency);
        self.busy.set(self.is_busy());
        debug_assert!(self.free.len() < self.calls.len(), "a token is given that is in use");
        Some(Token(token.into()))
    }

    /// Forgets a call.
    pub(crate) fn forget(&mut self, token: Token) -> Option<Pending> {
        let call = std::mem::take(self.calls.get_mut(usize::try_from(token.0).ok()?)?);
        self.free.push(u32::try_from(token.0).ok()?);
        debug_assert!(self.free.len() <= self.calls.len(), "a call is forgotten twice");
        if let Some(count) = self.in_flight.get_mut(call.urgency.class as usize) {
            *count = count.saturating_sub(1);
        }
        self.background = self.background.saturating_sub(call.urgency.background.into());
        self.busy.set(self.is_busy());
        if call.urgency.is_special() {
            self.special = Urgency::IDLE;
            let calls = self.calls.iter().filter(|call| call.rank.is_some());
            calls.for_each(|call| self.special.raise(&call.urgency));
        }
        Some(call)
    }

    /// How many calls are in flight.
    pub(crate) fn calls_in_flight(&self) -> usize {
        self.calls.len().saturating_sub(self.free.len())
    }

    /// Has it count among its tenant's from now on, with the calls that are in flight.
    pub(crate) fn enter_busy(&mut self, mut place: BusyPlace) {
        place.set(self.is_busy());
        self.busy = place;
    }

    /// Whether its tenant has a communicator here with a call in flight that is not below every class.
    pub(crate) fn is_tenant_busy(&self) -> bool {
        self.busy.any()
    }

    /// Whether a call is in flight that is not below every class.
    pub(crate) fn is_busy(&self) -> bool {
        self.calls_in_flight() > self.background
    }

    /// Whether calls are in flight, all of them below every class.
    pub(crate) fn is_background(&self) -> bool {
        self.background > 0 && !self.is_busy()
    }

    /// By local rank, the cookies of calls in flight, in the state that a panic may have left.
    pub(crate) fn outstanding(&self) -> impl Iterator<Item = (&Local, Cookie)> {
        self.calls.iter().filter_map(|call| Some((self.local(call.rank?)?, call.cookie)))
    }

    /// How urgent the communicator's operations are. Each counts as the most urgent of them, for which the others are in
    /// the way.
    pub(crate) fn urgency(&self) -> Urgency {
        let class = self.most_urgent().unwrap_or(TrafficClass::Latency);
        Urgency { background: self.is_background(), class, ..self.special }
    }

    /// The most urgent class of calls in flight, if there are any.
    fn most_urgent(&self) -> Option<TrafficClass> {
        let mut classes = TrafficClass::ALL.into_iter().zip(self.in_flight);
        classes.find_map(|(class, count)| (count > 0).then_some(class))
    }

    /// Has its links carry what they do as of the class of the calls in flight. With none they stay as they are.
    pub(crate) fn classify_links(&mut self, transport: &mut dyn Transport) {
        let Some(class) = self.most_urgent() else { return };
        if std::mem::replace(&mut self.class, class) != class {
            let links = self.epochs.iter().flat_map(|links| links.links.iter().flatten());
            links.for_each(|link| transport.set_class(*link, class));
        }
    }

    /// Whether a call in flight of this attachment's has a tensor that begins in a region, or at its end.
    pub(crate) fn uses(&self, attachment: Key, region: &RangeInclusive<u64>) -> bool {
        let inside = |used: &Region| region.contains(&used.offset);
        self.calls.iter().any(|call| {
            let local = call.rank.and_then(|rank| self.local(rank));
            let mut tensors = [&call.input, &call.output].into_iter().chain(call.feedback.iter().flatten());
            local.is_some_and(|local| local.attachment == attachment) && tensors.any(inside)
        })
    }

    /// A local rank's call.
    pub(crate) fn pending(&self, operation: OperationId, rank: Rank) -> Option<&Pending> {
        self.call(self.core.token(operation, rank)?)
    }

    /// The call of a token.
    pub(crate) fn call(&self, token: Token) -> Option<&Pending> {
        self.calls.get(usize::try_from(token.0).ok()?)
    }

    /// Makes the channel's staging large enough for its segment. Allocates only when a segment needs more than any before
    /// it on this channel.
    pub(crate) fn reserve_staging(&mut self, channel: ChannelId) -> Result<(), MemoryError> {
        let Some((segment, size)) = self.segment_and_size(channel) else { return Ok(()) };
        let slots = segment.program.slots.len();
        let bytes = slot_offset(&segment.program, slots, segment.hi - segment.lo, size);
        // A sum that is held lies there whole.
        let whole = segment.aggregated.map_or(0, |_| (segment.hi - segment.lo) * size);
        let keeps = segment.aggregated.is_some() && segment.retains_output();
        let bytes = if keeps {
            self.extra_offset(segment, size, ExtraStaging::Neutral) + whole
        } else {
            bytes.max(whole)
        };
        let Some(staging) = self.staging.get_mut(usize::from(channel.0)) else { return Ok(()) };
        // A segment without elements has staging, too: of no bytes, but somewhere.
        if staging.as_ref().is_none_or(|memory| bytes > memory.bytes() as u64) {
            let bytes = usize::try_from(bytes.max(ALIGNMENT)).map_err(|_| MemoryError::BadSize(bytes))?;
            *staging = Some(Memory::private(bytes)?);
        }
        Ok(())
    }

    /// A channel's staging.
    pub(crate) fn staging_of(&self, channel: ChannelId) -> Option<&Arc<Memory>> {
        self.staging.get(usize::from(channel.0))?.as_ref()
    }

    /// Where something is kept in a segment's staging.
    pub(crate) fn extra_offset(&self, segment: &Segment, size: u64, kept: ExtraStaging) -> u64 {
        let elements = segment.hi - segment.lo;
        let slots = slot_offset(&segment.program, segment.program.slots.len(), elements, size);
        match kept {
            ExtraStaging::Result => slots,
            ExtraStaging::Neutral => slots + (elements * size).next_multiple_of(ALIGNMENT),
        }
    }

    /// Where what an aggregator's segment comes to lies in staging, if it does.
    pub(crate) fn result(&self, channel: ChannelId, segment: &Segment) -> Option<Located<'_>> {
        let size = segment.signature.dtype.size() as u64;
        let held = segment.retains_output();
        let at = if held { self.extra_offset(segment, size, ExtraStaging::Result) } else { 0 };
        Some((self.staging_of(channel)?, at, (segment.hi - segment.lo) * size))
    }

    /// A segment begins again that somebody has the sum of: what adds nothing to it is made.
    pub(crate) fn prepare_resume(&mut self, channel: ChannelId) -> Result<(), MemoryError> {
        let Some((segment, size)) = self.segment_and_size(channel) else { return Ok(()) };
        if segment.resume.is_none() {
            return Ok(());
        }
        let (dtype, bytes) = (segment.signature.dtype, (segment.hi - segment.lo) * size);
        let at = self.extra_offset(segment, size, ExtraStaging::Neutral);
        let Some(staging) = self.staging_of(channel) else { return Ok(()) };
        let mut element = [0_u8; 16];
        // 0 + -0 is 0, and -0 + -0 is -0: nothing but -0 leaves every float as it is.
        let float = match dtype {
            Dtype::F32 | Dtype::Complex64 => Some(size_of::<f32>()),
            Dtype::F64 | Dtype::Complex128 => Some(size_of::<f64>()),
            _ => None,
        };
        if let Some(bytes) = float {
            element.iter_mut().skip(bytes - 1).step_by(bytes).for_each(|sign| *sign = 0x80);
        }
        let element = element.get(..dtype.size()).unwrap_or_default();
        // Whole elements, of any type.
        let mut row = [0_u8; ROW];
        row.iter_mut().zip(element.iter().cycle()).for_each(|(to, byte)| *to = *byte);
        for offset in (0..bytes).step_by(ROW) {
            let row = row.get(..ROW.min((bytes - offset) as usize)).unwrap_or_default();
            let to = staging.view_mut(at + offset, row.len() as u64)?;
            // Of one length.
            let _ = harmonaize_kernels::copy(row.into(), &[to]);
        }
        Ok(())
    }

    /// The way to an epoch's aggregator.
    pub(crate) fn path(&mut self, epoch: Epoch) -> Option<&mut AggregatorPath> {
        let links = self.epochs.iter_mut().find(|links| links.epoch == epoch)?;
        links.aggregator.as_deref_mut()
    }

    /// The segment on a channel and its operation's element size.
    pub(crate) fn segment_and_size(&self, channel: ChannelId) -> Option<(&Segment, u64)> {
        let segment = self.core.segment(channel)?;
        Some((segment, segment.signature.dtype.size() as u64))
    }

    /// The blocks of so many steps from this one on are copied.
    pub(crate) fn set_copied(&mut self, channel: ChannelId, step: StepId, steps: u32) {
        let Some(segment) = self.core.segment(channel) else { return };
        let copied = (segment.number, segment.epoch, StepId(step.0.saturating_add(steps)));
        if let Some(place) = self.copied.get_mut(usize::from(channel.0)) {
            *place = Some(copied);
        }
    }

    /// Whether the blocks of a step of the channel's segment are copied.
    pub(crate) fn is_copied(&self, channel: ChannelId, step: StepId) -> bool {
        let copied = self.copied.get(usize::from(channel.0)).copied().flatten();
        let Some((copied, segment)) = copied.zip(self.core.segment(channel)) else { return false };
        let (number, epoch, next) = copied;
        (number, epoch) == (segment.number, segment.epoch) && step < next
    }

    /// Where an operand in a staging slot of the channel's segment starts.
    pub(crate) fn staging(
        &self,
        channel: ChannelId,
        segment: &Segment,
        size: u64,
        (slot, operand): (Slot, &Operand),
    ) -> Option<(&Arc<Memory>, u64)> {
        let memory = self.staging.get(usize::from(channel.0))?.as_ref()?;
        let start = slot_offset(&segment.program, usize::from(slot.0), segment.hi - segment.lo, size);
        Some((memory, start + segment.offset_in_slot(slot, operand) * size))
    }

    /// The sum so far of the own part of a channel's segment, if anything was added to it.
    pub(crate) fn sums(&self, channel: ChannelId, segment: SegmentId) -> Option<Sums> {
        let (of, sums) = (*self.sums.get(usize::from(channel.0))?)?;
        (of == segment).then_some(sums)
    }

    /// A channel's segment begins, perhaps once more: nothing was added to its sum yet.
    pub(crate) fn forget_sums(&mut self, channel: ChannelId) {
        if let Some(sums) = self.sums.get_mut(usize::from(channel.0)) {
            *sums = None;
        }
    }

    /// Takes note of what a coded step came to that is sent so often.
    pub(crate) fn record_step(&mut self, channel: ChannelId, outcome: &CodedStep, sends: usize) {
        let Some((segment, operation)) = self.core.segment(channel).map(|s| (s.number, s.operation)) else {
            return;
        };
        if let (Some(sums), Some(known)) = (outcome.sums, self.sums.get_mut(usize::from(channel.0))) {
            *known = Some((segment, sums));
        }
        if let Some(done) = outcome.done {
            let bytes = outcome.from.as_ref().map_or(0, Span::bytes) as u64;
            self.core.handle_coded(operation, &CodingReport { wire_bytes: bytes * sends as u64, ..done });
        }
    }

    /// The mark of the channel's segment, if it has none yet.
    pub(crate) fn begin_mark(&mut self, channel: ChannelId) -> Option<Mark> {
        let (segment, size) = self.segment_and_size(channel)?;
        let mark = Mark {
            operation: segment.operation.0,
            segment: segment.number.0,
            bytes: (segment.hi - segment.lo) * size,
            epoch: segment.epoch.0,
            channel: channel.0.into(),
            ..self.mark()
        };
        let begun = self.begun.get_mut(usize::from(channel.0))?;
        (begun.replace(mark.segment) != Some(mark.segment)).then_some(mark)
    }

    /// What every mark of this communicator says.
    pub(crate) fn mark(&self) -> Mark {
        Mark { communicator: self.id.0, participant: self.core.me().0, ..Mark::default() }
    }

    /// Notes that a link is up; whether that completes an epoch's links.
    pub(crate) fn link_up(&mut self, epoch: Epoch, peer: Participant) -> bool {
        let Some(links) = self.epochs.iter_mut().find(|links| links.epoch == epoch) else { return false };
        if let Some(up) = links.up.get_mut(peer.0 as usize) {
            *up = true;
        }
        links.complete() && !std::mem::replace(&mut links.announced, true)
    }

    /// Takes an epoch's links out, to close them.
    pub(crate) fn take_links(&mut self, epoch: Epoch) -> Option<Links> {
        let position = self.epochs.iter().position(|links| links.epoch == epoch)?;
        Some(self.epochs.remove(position))
    }

    /// Ends the communicator because of an error of this agent's.
    pub(crate) fn fail_internal(&mut self, error: &str) {
        self.detail = error.to_owned();
        self.core.handle_breach(self.core.me());
    }

    /// Ends the communicator because of an error in a step: the peer's, if what it sent is the reason.
    pub(crate) fn blame(&mut self, error: &ExecuteError) {
        self.detail = error.to_string();
        self.core.handle_breach(culprit(error).unwrap_or(self.core.me()));
    }

    pub(crate) fn record_link_down(&mut self, peer: Participant, reason: &DownReason) {
        if self.detail.is_empty() {
            self.detail = format!("link to participant {}: {reason}", peer.0);
        }
    }

    pub(crate) fn status(&self, now: Nanos) -> CommunicatorStatus {
        CommunicatorStatus {
            communicator: self.id,
            epoch: self.core.active_epoch(),
            completed: self.core.operations_ended(),
            failed: self.failed,
            bytes_sent: self.bytes_sent,
            bytes_received: self.bytes_received,
            in_flight: self.core.in_flight(),
            messages: self.core.messages_in_flight(),
            now,
        }
    }
}

impl Links {
    pub(crate) fn new(epoch: Epoch, participants: u32) -> Self {
        let participants = participants as usize;
        Self {
            epoch,
            links: vec![None; participants],
            up: vec![false; participants],
            landing: vec![None; participants],
            paths: vec![0; participants],
            rates: vec![None; participants],
            announced: false,
            aggregator: None,
        }
    }

    /// Whether every link is up.
    pub(crate) fn complete(&self) -> bool {
        self.links.iter().zip(&self.up).all(|(link, up)| link.is_none() || *up)
    }

    pub(crate) fn set(&mut self, peer: Participant, link: LinkId, landing: Arc<Memory>, paths: u16) {
        let peer = peer.0 as usize;
        if let (Some(l), Some(s), Some(p)) =
            (self.links.get_mut(peer), self.landing.get_mut(peer), self.paths.get_mut(peer))
        {
            (*l, *s, *p) = (Some(link), Some(landing), paths);
        }
    }

    /// Each link with the memory that it lands in.
    pub(crate) fn landings(&self) -> impl Iterator<Item = (LinkId, &Arc<Memory>)> {
        self.links.iter().zip(&self.landing).filter_map(|(link, landing)| Some(((*link)?, landing.as_ref()?)))
    }

    /// Gives a link, if it is one of these, its memory.
    pub(crate) fn set_landing(&mut self, link: LinkId, memory: &Arc<Memory>) {
        for (own, landing) in self.links.iter().zip(&mut self.landing) {
            if *own == Some(link) {
                *landing = Some(Arc::clone(memory));
            }
        }
    }

    /// Goes on with the link to a peer that another epoch has, and returns it; none if it has none.
    pub(crate) fn reuse(&mut self, peer: Participant, from: &Self, rate: Option<u64>) -> Option<LinkId> {
        let at = peer.0 as usize;
        let theirs = (from.links.get(at).copied().flatten(), from.landing.get(at).cloned().flatten());
        let ((Some(link), Some(landing)), Some(paths)) = (theirs, from.paths.get(at)) else { return None };
        self.set(peer, link, landing, *paths);
        self.limit(peer, rate);
        if let Some(up) = self.up.get_mut(at) {
            *up = true;
        }
        Some(link)
    }

    /// Notes what may be sent to a peer.
    pub(crate) fn limit(&mut self, peer: Participant, rate: Option<u64>) {
        if let Some(known) = self.rates.get_mut(peer.0 as usize) {
            *known = rate;
        }
    }

    /// The links that another epoch has too, with another rate than here: what they may send by this one.
    pub(crate) fn other_rates(&self, before: &Self) -> impl Iterator<Item = (LinkId, Option<u64>)> {
        let ours = self.links.iter().zip(&self.rates);
        let pairs = ours.zip(before.links.iter().zip(&before.rates));
        pairs.filter_map(|(ours, theirs)| {
            Some(((*ours.0)?, *ours.1)).filter(|_| ours.0 == theirs.0 && ours.1 != theirs.1)
        })
    }

    /// Whether a link is one of these.
    pub(crate) fn has(&self, link: LinkId) -> bool {
        self.links.contains(&Some(link))
    }

    /// Every path of every link, and to whom it leads.
    pub(crate) fn all_paths(&self) -> impl Iterator<Item = (Participant, LinkId, u16)> {
        (0..).map(Participant).zip(self.links.iter().zip(&self.paths)).flat_map(|(peer, (link, paths))| {
            let paths = link.map_or(0, |_| *paths);
            (0..paths).filter_map(move |path| Some((peer, (*link)?, path)))
        })
    }

    /// The link to a peer, and the path on it that a channel uses.
    pub(crate) fn route(&self, peer: Participant, channel: ChannelId) -> Option<(LinkId, u16)> {
        let link = (*self.links.get(peer.0 as usize)?)?;
        let paths = *self.paths.get(peer.0 as usize)?;
        Some((link, channel.0 % paths.max(1)))
    }
}

/// Where slot `slot` of a program's staging starts, in bytes; for the number of slots: how long all are. Each has room for its
/// elements coded, too.
fn slot_offset(program: &Program, slot: usize, elements: u64, size: u64) -> u64 {
    let sizes = program.slots.iter().take(slot);
    let room = u64::from(CODED_ROOM);
    sizes.map(|&of| (elements.div_ceil(u64::from(of.max(1))) * size + room).next_multiple_of(ALIGNMENT)).sum()
}

/// What a tenant's completion says of a failure.
pub(crate) fn status_of(failure: &Failure) -> Status {
    match failure {
        Failure::Timeout { .. } | Failure::P2pTimeout { .. } => Status::Timeout,
        Failure::Mismatch { .. } | Failure::Counts { .. } | Failure::P2pMismatch { .. } => Status::Mismatch,
        Failure::RanksLost { .. } => Status::RankLost,
        Failure::Dissolved => Status::Dissolved,
        Failure::Aborted { .. } => Status::Aborted,
        Failure::Internal { .. } => Status::Internal,
    }
}
