//! Hands everything that an engine has to the engine of another process, between two of its rounds. That engine takes it over
//! there.
//!
//! Nothing ends by it: operations go on where they stand. What is in memory that tenants map goes as descriptors; staging and landing
//! slots, which are this process's alone, are copied. What is read and written of tenants' memory that is not mapped ends first. Over RDMA
//! no more begins before the successor has a queue pair; what waits for that goes along. Sessions with aggregators end: hosts repeat what was
//! under way in them, and the successor is a worker in the next. What they have summed and held is done, and is stored by the successor
//! where that has not begun.

use crate::Engine;
use crate::aggregated::is_for_aggregator;
use crate::attachment::{Attachment, AttachmentImage};
use crate::command::{Aggregator, Notice};
use crate::communicator_state::{CommunicatorState, Links};
use crate::error::HandOverError;
use crate::formation::open_path;
use crate::p2p::Next;
use crate::table::{Key, Table};
use crate::transfer::{COUNTS, PendingTransfer, untag};
use crate::wake::watch_end;
use harmonaize_abi::{CommunicatorId, Epoch, Region, Submission, Tag};
use harmonaize_core::{AggregationState, PeerMessage};
use harmonaize_plan::Participant;
use harmonaize_shm::{
    AgentEnd, EndError, InheritEnd, InheritedEnd, Lease, MappedEnd, Memory, MemoryError, Span,
};
use harmonaize_transport::{Flow, LinkId, Ring};
use rustix::time::{ClockId, clock_gettime};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

/// How long what is under way on links may take to come to an end. Peers go on reading and sending, so it is short.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(200);

/// How long fetches and stores that are under way may take to end.
const TRANSFERS_TIMEOUT: Duration = Duration::from_millis(300);

/// Bytes that are copied at a time, and a page, of which those without content are not.
const COPY_BYTES: usize = 1 << 20;
const PAGE: usize = 4096;

/// What a state begins with where aggregation follows it. No number begins so: an agent that knows of none refuses it, which without it
/// would leave the agreement with its peers to nobody.
const AGGREGATED: [u8; 10] = [0xff; 10];

/// And where behind that, empty or not, comes what waits. An agent that knows of aggregation alone refuses it too.
const WAITING: [u8; 20] = [0xff; 20];

/// All that an engine has, for one in another process.
#[derive(Debug, Default)]
pub struct EngineImage {
    /// Its state, of the version that the two processes agree on.
    pub state: Vec<u8>,
    /// Descriptors that the state counts on, in order.
    pub descriptors: Vec<OwnedFd>,
}

/// What memory of attachments that are taken over was lent on, by attachment and first offset; and what goes on with those that are not
/// mapped.
#[derive(Default)]
pub struct Leases(Arc<Mutex<Lent>>);

#[derive(Default)]
struct Lent {
    leases: HashMap<(u64, u64), Lease>,
    ends: HashMap<u64, InheritEnd>,
}

impl Leases {
    /// These.
    pub fn new(leases: HashMap<(u64, u64), Lease>, ends: HashMap<u64, InheritEnd>) -> Self {
        Self(Arc::new(Mutex::new(Lent { leases, ends })))
    }

    /// The same, for another thread of the engine: each takes those of its attachments.
    #[must_use]
    pub fn share(&self) -> Self {
        Self(Arc::clone(&self.0))
    }

    fn take(&self, attachment: u64, base: u64) -> Option<Lease> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).leases.remove(&(attachment, base))
    }

    fn take_end(&self, attachment: u64) -> Option<InheritEnd> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).ends.remove(&attachment)
    }
}

impl std::fmt::Debug for Leases {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Leases")
    }
}

/// An epoch that was taken over: whose, and the flows of its links.
pub type InheritedEpoch = (CommunicatorId, Epoch, Vec<(Participant, Flow)>);

/// An engine as it is sent.
#[derive(Serialize, Deserialize)]
struct Image<C> {
    /// Nanoseconds of the host's monotonic clock when its time began.
    start: u64,
    attachments: Vec<(u16, Option<AttachmentImage>)>,
    communicators: Vec<(u16, Option<C>)>,
    staging: Vec<StagingImage>,
    landing: Vec<LandingImage>,
    /// The transport's part; none where there are no links.
    links: Option<Vec<u8>>,
}

#[derive(Serialize, Deserialize)]
struct StagingImage {
    communicator: Key,
    channel: usize,
    bytes: u64,
}

#[derive(Serialize, Deserialize)]
struct LandingImage {
    communicator: Key,
    link: LinkId,
    bytes: u64,
}

/// Aggregation in an epoch.
#[derive(Serialize, Deserialize)]
struct AggregatedImage<S> {
    communicator: Key,
    epoch: Epoch,
    state: S,
    /// How the aggregator is reached, and the number of the last packet to it. None where it cannot be reached from
    /// here.
    aggregator: Option<(Aggregator, u64)>,
}

/// What cannot go on by itself: transfers, before a tenant's process has come, and calls, before others have ended.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct WaitingImage {
    transfers: Vec<TransferImage>,
    calls: Vec<CallImage>,
}

/// A fetch or store of a tenant's memory that has not begun. Those of an attachment come in their order.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct TransferImage {
    attachment: Key,
    tag: u64,
    offset: u64,
    bytes: u64,
    here: TransferPlace,
}

/// Where the bytes of a transfer lie here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum TransferPlace {
    /// What is stored, next in the copy of all that is.
    Stored,
    /// From `at` on in a channel's staging.
    Staging { channel: usize, at: u64 },
    /// From `at` on in the mapped tensors of an attachment.
    Tensors { attachment: Key, at: u64 },
    /// In memory for a piece of a message, which is sent then.
    Sent(PeerMessage),
    /// In memory for a piece of a message, which is stored then in another attachment's.
    Copied { attachment: Key, offset: u64 },
    /// Where counts are fetched to; the descriptor comes with the calls.
    Counts,
}

/// A descriptor that was taken and has not begun, and its counts if they were fetched.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct CallImage {
    attachment: Key,
    submission: Vec<u8>,
    counts: Option<Vec<u64>>,
}

impl WaitingImage {
    fn is_empty(&self) -> bool {
        self.transfers.is_empty() && self.calls.is_empty()
    }

    /// Bytes of all that is stored; none where nothing is.
    fn stored(&self) -> Option<u64> {
        let stores = self.transfers.iter().filter(|transfer| transfer.here == TransferPlace::Stored);
        stores.map(|store| store.bytes).reduce(u64::saturating_add)
    }
}

/// An engine's state, and behind it aggregation and what waits, where there is any.
fn encode<S: Serialize>(
    image: &Image<impl Serialize>,
    aggregated: &[AggregatedImage<S>],
    waiting: &WaitingImage,
) -> Result<Vec<u8>, postcard::Error> {
    let state = postcard::to_allocvec(image)?;
    if aggregated.is_empty() && waiting.is_empty() {
        return Ok(state);
    }
    let aggregated = postcard::to_allocvec(aggregated)?;
    if waiting.is_empty() {
        return Ok([AGGREGATED.as_slice(), state.as_slice(), aggregated.as_slice()].concat());
    }
    let waiting = postcard::to_allocvec(waiting)?;
    Ok([WAITING.as_slice(), state.as_slice(), aggregated.as_slice(), waiting.as_slice()].concat())
}

/// What [`encode`] was given.
type Decoded<C, S> = (Image<C>, Vec<AggregatedImage<S>>, WaitingImage);

fn decode<C: DeserializeOwned, S: DeserializeOwned>(state: &[u8]) -> Result<Decoded<C, S>, postcard::Error> {
    if let Some(state) = state.strip_prefix(&WAITING) {
        let (image, rest) = postcard::take_from_bytes(state)?;
        let (aggregated, waiting) = postcard::take_from_bytes(rest)?;
        return Ok((image, aggregated, postcard::from_bytes(waiting)?));
    }
    let Some(state) = state.strip_prefix(&AGGREGATED) else {
        return Ok((postcard::from_bytes(state)?, Vec::new(), WaitingImage::default()));
    };
    let (image, aggregated) = postcard::take_from_bytes(state)?;
    Ok((image, postcard::from_bytes(aggregated)?, WaitingImage::default()))
}

fn monotonic() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}

/// Copies memory, but for pages of zeros, which fresh memory has already.
fn copy(from: &Memory, to: &Memory) -> Result<(), MemoryError> {
    let mut buffer = vec![0; COPY_BYTES];
    let bytes = from.bytes().min(to.bytes());
    for at in (0..bytes).step_by(COPY_BYTES) {
        let part = buffer.get_mut(..COPY_BYTES.min(bytes - at)).unwrap_or_default();
        from.read(at as u64, part)?;
        for (page, content) in part.chunks(PAGE).enumerate() {
            if content.iter().any(|byte| *byte != 0) {
                to.write((at + page * PAGE) as u64, content)?;
            }
        }
    }
    Ok(())
}

/// A copy behind a descriptor.
fn copied_out(memory: &Memory, name: &str) -> Result<OwnedFd, MemoryError> {
    let (copied, descriptor) = Memory::granted(memory.bytes() as u64, name)?;
    copy(memory, &copied)?;
    Ok(descriptor)
}

/// This process's own copy of what is behind a descriptor.
fn copied_in(descriptor: OwnedFd, bytes: u64) -> Result<Arc<Memory>, HandOverError> {
    let theirs = Memory::map(descriptor, bytes)?;
    let own = Memory::private(usize::try_from(bytes)?)?;
    copy(&theirs, &own)?;
    Ok(own)
}

impl Engine {
    /// Stands still, and reports all that it has; on an error it goes on.
    pub(crate) fn handle_hand_over(&mut self, thread: usize) {
        self.finish_actions();
        let rests = self.drain_transfers();
        // What was fetched meanwhile is scaled.
        self.finish_actions();
        let handed = rests.and_then(|()| self.drain()).and_then(|()| self.image());
        match handed.is_ok() {
            true => self.still = true,
            false => {
                self.transport.freeze(false);
                self.take_descriptors();
            }
        }
        (self.notify)(Notice::HandedOver { thread, image: handed.map(Box::new) });
    }

    /// Goes on after a hand-over that was called off, or begins after one.
    pub(crate) fn handle_resume(&mut self) {
        self.still = false;
        self.transport.freeze(false);
        self.take_descriptors();
        self.attachments.iter_mut().for_each(|attachment| attachment.end.own());
    }

    /// Descriptors are taken again.
    fn take_descriptors(&mut self) {
        self.attachments.iter_mut().for_each(|attachment| attachment.frozen = false);
    }

    /// Has fetches and stores of memory that is not mapped end, with what follows from them. Descriptors are taken no more.
    fn drain_transfers(&mut self) -> Result<(), HandOverError> {
        if self.attachments.iter().all(|attachment| attachment.end.memory().is_some()) {
            return Ok(());
        }
        self.attachments.iter_mut().for_each(|attachment| attachment.frozen = true);
        let deadline = Instant::now() + TRANSFERS_TIMEOUT;
        loop {
            let now = self.now();
            self.poll_tenants(now);
            let busy = self.attachments.iter().find(|attachment| !attachment.rests());
            let Some(busy) = busy.map(|attachment| attachment.id.0) else { return Ok(()) };
            if Instant::now() >= deadline {
                return Err(HandOverError::Transfers(busy));
            }
            std::thread::yield_now();
        }
    }

    /// Brings all links to the end of a frame, with nothing left to send.
    fn drain(&mut self) -> Result<(), HandOverError> {
        if self.links.is_empty() {
            return Ok(());
        }
        self.transport.freeze(true);
        let deadline = Instant::now() + DRAIN_TIMEOUT;
        loop {
            let now = self.now();
            self.poll_network(now, 64);
            let transport = self.transport.as_mut();
            let waiting = self.communicators.iter_mut().map(|member| {
                member.backlog.flush(transport);
                usize::from(!member.backlog.is_empty())
            });
            if waiting.sum::<usize>() == 0 && self.transport.is_frozen()? {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(HandOverError::Busy);
            }
            std::thread::yield_now();
        }
    }

    fn image(&mut self) -> Result<EngineImage, HandOverError> {
        if self.stopping || !self.aftermath.panicked.is_empty() || !self.broken.is_empty() {
            return Err(HandOverError::Ending);
        }
        let mut descriptors = Vec::new();
        let mut attachments = Vec::new();
        for (generation, attachment) in self.attachments.all_places() {
            let image = attachment.map(|attachment| attachment.image(&mut descriptors)).transpose()?;
            attachments.push((generation, image));
        }
        let (mut staging, mut landing): (Vec<StagingImage>, Vec<LandingImage>) = (Vec::new(), Vec::new());
        let mut aggregated = Vec::new();
        for place in 0..self.communicators.places() {
            let Some(key) = self.communicators.key_at(place) else { continue };
            let Some(member) = self.communicators.get(key) else { continue };
            for Links { epoch, aggregator: path, .. } in &member.epochs {
                let Some(state) = member.core.aggregation(*epoch) else { continue };
                let aggregator = path.as_ref().map(|path| (path.aggregator.clone(), path.worker.sequence()));
                aggregated.push(AggregatedImage { communicator: key, epoch: *epoch, state, aggregator });
            }
            for (channel, memory) in member.used_staging().chain(member.used_residuals()) {
                descriptors.push(copied_out(memory, "harmonaize-staging")?);
                staging.push(StagingImage { communicator: key, channel, bytes: memory.bytes() as u64 });
            }
            for (link, memory) in member.epochs.iter().flat_map(Links::landings) {
                if landing.iter().all(|known| known.link != link) {
                    descriptors.push(copied_out(memory, "harmonaize-landing")?);
                    landing.push(LandingImage { communicator: key, link, bytes: memory.bytes() as u64 });
                }
            }
        }
        let waiting = self.waiting(&mut descriptors)?;
        let links = match self.links.is_empty() {
            true => None,
            false => {
                let (links, theirs) = self.transport.hand_over()?;
                descriptors.extend(theirs);
                Some(links)
            }
        };
        let start = monotonic().saturating_sub(self.start.elapsed());
        let image = Image {
            start: u64::try_from(start.as_nanos())?,
            attachments,
            communicators: self.communicators.all_places().collect(),
            staging,
            landing,
            links,
        };
        Ok(EngineImage { state: encode(&image, &aggregated, &waiting)?, descriptors })
    }

    /// What waits. Of what is to be stored a copy goes along, since what has it here may be other memory in the successor.
    fn waiting(&self, descriptors: &mut Vec<OwnedFd>) -> Result<WaitingImage, HandOverError> {
        let (mut waiting, mut stores) = (WaitingImage::default(), Vec::new());
        for place in 0..self.attachments.places() {
            let Some(key) = self.attachments.key_at(place) else { continue };
            let Some(attachment) = self.attachments.get(key) else { continue };
            let call = |submission: &Submission, counts: Option<&[u64]>| CallImage {
                attachment: key,
                submission: submission.as_bytes().to_vec(),
                counts: counts.map(<[u64]>::to_vec),
            };
            for transfer in attachment.waiting().filter(|transfer| !self.begins_again(transfer)) {
                let here = self.place_of(transfer).ok_or(HandOverError::Transfers(attachment.id.0))?;
                let PendingTransfer { tag: Tag(tag), offset, span, .. } = transfer;
                let (tag, offset, bytes) = (*tag, *offset, span.bytes() as u64);
                waiting.transfers.push(TransferImage { attachment: key, tag, offset, bytes, here });
                stores.extend((here == TransferPlace::Stored).then_some(span));
            }
            waiting.calls.extend(attachment.counted().map(|submission| call(submission, None)));
            let deferred = attachment.deferred();
            waiting.calls.extend(deferred.map(|(submission, counts)| call(submission, counts.as_deref())));
        }
        if let Some(bytes) = waiting.stored() {
            let (copy, descriptor) = Memory::granted(bytes.max(1), "harmonaize-stores")?;
            let (mut at, mut buffer) = (0, Vec::new());
            for span in stores {
                buffer.resize(span.bytes(), 0);
                span.memory().read(span.offset() as u64, &mut buffer)?;
                copy.write(at, &buffer)?;
                at += span.bytes() as u64;
            }
            descriptors.push(descriptor);
        }
        Ok(waiting)
    }

    /// Whether a transfer is for a session with an aggregator, which does not go along: hosts do its segment again.
    fn begins_again(&self, PendingTransfer { tag, .. }: &PendingTransfer) -> bool {
        let (communicator, channel, step) = untag(*tag);
        let member = self.communicators.get(communicator);
        let member = member.filter(|_| *tag != COUNTS && is_for_aggregator(step));
        // Pieces of messages have a channel of their own, and none of these.
        let away = member.and_then(|member| member.away.get(usize::from(channel.0)));
        away.is_some_and(|away| away.begins_again(step))
    }

    /// Where the bytes of a transfer lie that has not begun. None while its communicator comes to its end.
    fn place_of(&self, transfer: &PendingTransfer) -> Option<TransferPlace> {
        let PendingTransfer { tag, store, span, .. } = transfer;
        let (communicator, channel, step) = untag(*tag);
        let member = self.communicators.get(communicator);
        if *store {
            return Some(TransferPlace::Stored);
        }
        if *tag == COUNTS {
            return Some(TransferPlace::Counts);
        }
        let member = member?;
        let is = |memory: &Arc<Memory>| Arc::ptr_eq(memory, span.memory());
        let at = span.offset() as u64;
        if channel == member.core.p2p_channel() {
            match member.p2p.next(step) {
                Some(Next::Send(message)) => return Some(TransferPlace::Sent(*message)),
                Some(Next::Store(PendingTransfer { attachment, offset, .. })) => {
                    return Some(TransferPlace::Copied { attachment: *attachment, offset: *offset });
                }
                None => {}
            }
        }
        let mut staging = member.used_staging().chain(member.used_residuals());
        if let Some((channel, _)) = staging.find(|(_, memory)| is(memory)) {
            return Some(TransferPlace::Staging { channel, at });
        }
        member.locals.iter().find_map(|local| {
            let mut regions = self.attachments.get(local.attachment)?.end.memory()?.all();
            let (base, _) = regions.find(|(_, memory)| is(memory))?;
            Some(TransferPlace::Tensors { attachment: local.attachment, at: base + at })
        })
    }

    /// Takes another process's engine over, and stands still until it is told to go on.
    pub(crate) fn handle_take_over(&mut self, thread: usize, image: EngineImage, leases: Leases) {
        self.still = true;
        let epochs = self.take_over(image, &leases);
        (self.notify)(Notice::TakenOver { thread, epochs });
    }

    fn take_over(
        &mut self,
        image: EngineImage,
        leases: &Leases,
    ) -> Result<Vec<InheritedEpoch>, HandOverError> {
        let EngineImage { state, descriptors } = image;
        let mut descriptors = descriptors.into_iter();
        let (image, aggregated, waiting) = decode::<CommunicatorState, AggregationState>(&state)?;
        let age = monotonic().saturating_sub(Duration::from_nanos(image.start));
        self.start = Instant::now().checked_sub(age).unwrap_or(self.start);
        let mut attachments = Vec::new();
        for (generation, attachment) in image.attachments {
            let entered = attachment.map(|image| {
                let id = image.id;
                let lease = &mut |base| leases.take(id.0, base);
                let ours = descriptors.by_ref().take(2 + image.regions.len()).collect();
                let attachment = Attachment::inherit(image, ours, lease, leases.take_end(id.0))?;
                watch_end(&self.wake, id, attachment.end.wake_fd())?;
                Ok::<_, HandOverError>(attachment)
            });
            attachments.push((generation, entered.transpose()?));
        }
        self.attachments = Table::from_places(attachments);
        for place in 0..self.attachments.places() {
            if let Some(key) = self.attachments.key_at(place)
                && let Some(attachment) = self.attachments.get(key)
            {
                self.by_attachment.insert(attachment.id, key);
            }
        }
        self.communicators = Table::from_places(image.communicators);
        self.communicators.iter_mut().for_each(CommunicatorState::make_room);
        let mut next = || descriptors.next().ok_or(HandOverError::NoDescriptor);
        for StagingImage { communicator, channel, bytes } in image.staging {
            let memory = copied_in(next()?, bytes)?;
            let member = self.communicators.get_mut(communicator);
            let member = member.ok_or(HandOverError::NoCommunicator("staging"))?;
            member.set_staging(channel, memory);
        }
        let mut landings = Vec::new();
        for LandingImage { communicator, link, bytes } in image.landing {
            landings.push((communicator, link, copied_in(next()?, bytes)?));
        }
        let stored = waiting.stored().map(|bytes| copied_in(next()?, bytes.max(1))).transpose()?;
        if let Some(links) = image.links {
            self.transport.take_over(&links, descriptors.collect())?;
        }
        for (communicator, link, memory) in landings {
            let member = self.communicators.get_mut(communicator);
            let member = member.ok_or(HandOverError::NoCommunicator("landing"))?;
            for ring in 0..=member.channels() {
                let bytes = u64::from(member.landing_slots) * u64::from(member.slot_bytes);
                let span = Span::new(&memory, u64::from(ring) * bytes, bytes)?;
                let attached =
                    Ring { memory: span, slot_bytes: member.slot_bytes, slots: member.landing_slots };
                self.transport.attach_ring(link, ring, attached)?;
            }
            member.epochs.iter_mut().for_each(|links| links.set_landing(link, &memory));
        }
        for image in aggregated {
            self.inherit_aggregation(image)?;
        }
        self.inherit_waiting(waiting, stored)?;
        Ok(self.enter_inherited())
    }

    /// Has what waited in another process wait here. `stored` has the bytes of all that is to be stored.
    fn inherit_waiting(
        &mut self,
        waiting: WaitingImage,
        stored: Option<Arc<Memory>>,
    ) -> Result<(), HandOverError> {
        let mut calls = Vec::new();
        for CallImage { attachment, submission, counts } in waiting.calls {
            let read = Submission::read_from_bytes(&submission);
            let submission = read.map_err(|_| HandOverError::Waiting("descriptor"))?;
            calls.push((attachment, submission, counts));
        }
        let mut begun = 0;
        for TransferImage { attachment: key, tag, offset, bytes, here } in waiting.transfers {
            let lost = HandOverError::Waiting("transfer");
            let tag = Tag(tag);
            if here == TransferPlace::Counts {
                // It is the first of the attachment's, before one that was deferred.
                let at = calls.iter().position(|(of, ..)| *of == key);
                let (at, attachment) = at.zip(self.attachments.get_mut(key)).ok_or(lost)?;
                let (_, submission, _) = calls.remove(at);
                attachment.fetch_counts(key, submission, Region { offset, bytes })?;
                continue;
            }
            let span = match here {
                TransferPlace::Stored => {
                    let span = Span::new(stored.as_ref().ok_or(lost)?, begun, bytes)?;
                    begun += bytes;
                    span
                }
                here => self.inherit_fetch(tag, bytes, here)?.ok_or(lost)?,
            };
            let store = here == TransferPlace::Stored;
            if store {
                self.inherit_copy_out(tag);
            }
            let attachment = self.attachments.get_mut(key).ok_or(HandOverError::Waiting("transfer"))?;
            attachment.transfer(PendingTransfer { attachment: key, tag, store, offset, span })?;
        }
        for (key, submission, counts) in calls {
            let attachment = self.attachments.get_mut(key).ok_or(HandOverError::Waiting("descriptor"))?;
            attachment.defer((submission, counts.map(Into::into)));
        }
        Ok(())
    }

    /// Has an operation wait for a store, if that is of what an aggregator summed and was held.
    fn inherit_copy_out(&mut self, tag: Tag) {
        let (communicator, channel, step) = untag(tag);
        let member = self.communicators.get_mut(communicator).filter(|_| is_for_aggregator(step));
        let Some(member) = member else { return };
        let segment = member.core.segment(channel).map(|segment| segment.number);
        // Steps of messages' pieces have any number, but their channel has none of these.
        let away = member.away.get_mut(usize::from(channel.0));
        if let Some((away, segment)) = away.zip(segment) {
            away.inherit(segment, step);
            member.core.defer_copy_out(channel);
        }
    }

    /// Where a fetch that waited in another process lands here; none where that is gone.
    fn inherit_fetch(
        &mut self,
        tag: Tag,
        bytes: u64,
        here: TransferPlace,
    ) -> Result<Option<Span>, HandOverError> {
        let (communicator, _, step) = untag(tag);
        if let TransferPlace::Tensors { attachment, at } = here {
            let regions = self.attachments.get(attachment).and_then(|attachment| attachment.end.memory());
            let Some((memory, at)) = regions.map(|regions| regions.locate(at, bytes)).transpose()? else {
                return Ok(None);
            };
            return Ok(Some(Span::new(memory, at, bytes)?));
        }
        let Some(member) = self.communicators.get_mut(communicator) else { return Ok(None) };
        if let TransferPlace::Staging { channel: of, at } = here {
            let mut staging = member.used_staging().chain(member.used_residuals());
            let found = staging.find(|(channel, _)| *channel == of);
            return Ok(found.map(|(_, memory)| Span::new(memory, at, bytes)).transpose()?);
        }
        let span = Span::new(&Memory::private(usize::try_from(bytes)?)?, 0, bytes)?;
        let next = match here {
            TransferPlace::Sent(message) => Next::Send(message),
            TransferPlace::Copied { attachment, offset } => {
                Next::Store(PendingTransfer { attachment, tag, store: true, offset, span: span.clone() })
            }
            _ => return Ok(None),
        };
        member.p2p.inherit(step, &span, next);
        Ok(Some(span))
    }

    /// Goes on with aggregation in an epoch, by a worker that is in no session yet.
    fn inherit_aggregation(&mut self, image: AggregatedImage<AggregationState>) -> Result<(), HandOverError> {
        let AggregatedImage { communicator, epoch, state, aggregator } = image;
        let now = self.now();
        let member = self.communicators.get_mut(communicator);
        let member = member.ok_or(HandOverError::NoCommunicator("aggregation"))?;
        member.core.inherit_aggregation(now, epoch, state);
        let Some((aggregator, sequence)) = aggregator else { return Ok(()) };
        // One that is over by now has none.
        let Some(plan) = member.core.plan(epoch) else { return Ok(()) };
        let wake = (&self.wake, self.port.as_ref());
        let mut path = open_path(Some(&aggregator), plan, member.core.me(), wake);
        if let Some(path) = &mut path {
            path.worker.resume_sequence(sequence);
        }
        if let Some(links) = member.epochs.iter_mut().find(|links| links.epoch == epoch) {
            links.aggregator = path;
        }
        Ok(())
    }

    /// Enters communicators that were taken over wherever a formed one is.
    fn enter_inherited(&mut self) -> Vec<InheritedEpoch> {
        let mut epochs = Vec::new();
        for place in 0..self.communicators.places() {
            let Some(key) = self.communicators.key_at(place) else { continue };
            let Some(member) = self.communicators.get_mut(key) else { continue };
            let (id, tenant, weight) = (member.id, member.tenant, member.weight);
            member.pending = true;
            self.sharing.admit(tenant);
            member.enter_busy(self.busy.place(tenant));
            self.turns.enter(tenant, weight, key);
            self.by_communicator.insert(id, key);
            let links: Vec<_> =
                member.epochs.iter().map(|links| (links.epoch, links.links.clone())).collect();
            for (epoch, links) in links {
                let new: Vec<_> =
                    links.iter().map(|link| link.filter(|link| !self.links.contains_key(link))).collect();
                self.enter_links(key, epoch, &new);
                epochs.push((id, epoch, self.flows(key, epoch)));
            }
        }
        epochs
    }
}

impl Attachment {
    fn image(&self, descriptors: &mut Vec<OwnedFd>) -> Result<AttachmentImage, HandOverError> {
        let end = self.end.hand_over();
        let why = |error| HandOverError::Attachment { attachment: self.id.0, error };
        let InheritedEnd { entries, taken, put, regions, descriptors: own } = end.map_err(why)?;
        descriptors.extend(own);
        self.describe(entries, (taken, put), regions)
    }

    fn inherit(
        image: AttachmentImage,
        descriptors: Vec<OwnedFd>,
        lease: &mut dyn FnMut(u64) -> Option<Lease>,
        away: Option<InheritEnd>,
    ) -> Result<Self, EndError> {
        let AttachmentImage { entries, taken, put, regions, .. } = &image;
        let end = InheritedEnd {
            entries: *entries,
            taken: *taken,
            put: *put,
            regions: regions.clone(),
            descriptors,
        };
        // One that maps nothing has no region. Agents without it refuse it for that.
        let end: Box<dyn AgentEnd> = match away {
            Some(inherit) if regions.is_empty() => inherit(end)?,
            _ => Box::new(MappedEnd::inherit(end, lease)?),
        };
        Ok(Self::from_image(image, end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image() -> Image<u8> {
        let nothing = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (attachments, communicators, staging, landing) = nothing;
        Image { start: 5, attachments, communicators, staging, landing, links: None }
    }

    #[test]
    fn a_state_without_aggregation_is_as_it_ever_was() {
        let nothing = WaitingImage::default();
        let state = encode::<u8>(&image(), &[], &nothing).unwrap();
        assert_eq!(state, postcard::to_allocvec(&image()).unwrap());
        let (image, aggregated, waiting) = decode::<u8, u8>(&state).unwrap();
        assert_eq!((image.start, aggregated.len(), waiting), (5, 0, nothing));
    }

    /// Agents that know of nothing behind the state, or of aggregation alone.
    #[test]
    fn who_knows_of_nothing_that_waits_refuses_a_state_with_some() {
        let attachment = Key { index: 1, generation: 1 };
        let transfer = |here, bytes| TransferImage { attachment, tag: 9, offset: 4096, bytes, here };
        let call = CallImage { attachment, submission: vec![7; 128], counts: Some(vec![1, 2]) };
        let waiting = WaitingImage {
            transfers: vec![
                transfer(TransferPlace::Staging { channel: 1, at: 64 }, 10),
                transfer(TransferPlace::Stored, 20),
                transfer(TransferPlace::Counts, 16),
                transfer(TransferPlace::Stored, 30),
            ],
            calls: vec![call],
        };
        assert_eq!(waiting.stored(), Some(50));
        let state = encode::<u8>(&image(), &[], &waiting).unwrap();
        assert!(postcard::from_bytes::<Image<u8>>(&state).is_err());
        let behind = state.strip_prefix(&AGGREGATED).unwrap();
        assert!(postcard::take_from_bytes::<Image<u8>>(behind).is_err());
        let (image, aggregated, found) = decode::<u8, u8>(&state).unwrap();
        assert_eq!((image.start, aggregated.len(), found), (5, 0, waiting));
    }

    #[test]
    fn who_knows_of_no_aggregation_refuses_a_state_with_some() {
        let aggregator = Aggregator {
            address: ([10, 0, 0, 9], 7300).into(),
            rdma: None,
            communicator: 3,
            worker: 1,
            key: [7; 32],
            chunk_elements: 256,
            window: 64,
            max_error: Some(0.5),
        };
        let communicator = Key { index: 4, generation: 2 };
        let one = AggregatedImage {
            communicator,
            epoch: Epoch(6),
            state: 8_u8,
            aggregator: Some((aggregator, 99)),
        };
        let state = encode(&image(), &[one], &WaitingImage::default()).unwrap();
        assert!(postcard::from_bytes::<Image<u8>>(&state).is_err());
        let (image, aggregated, _) = decode::<u8, u8>(&state).unwrap();
        assert_eq!((image.start, aggregated.len()), (5, 1));
        let AggregatedImage { communicator: found, epoch, state, aggregator } = &aggregated[0];
        assert_eq!((*found, *epoch, *state), (communicator, Epoch(6), 8));
        let (aggregator, sequence) = aggregator.as_ref().unwrap();
        assert_eq!((aggregator.communicator, aggregator.key, *sequence), (3, [7; 32], 99));
    }
}
