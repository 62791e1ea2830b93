//! One queue pair of a link. It has what waits to be sent, what is under way, and what arrives in the mailbox.

mod ending;

use super::delays::{Delay, Delays};
use super::exchange::{MAX_PIECE, PathEnd, RemoteMemory, RingEnd, slot_address};
use super::mailbox::{Credits, HEAD, Kind, Message, SLOT};
use super::outbox::{Outbox, carried};
use super::rail::Rail;
use crate::rings::Rings;
use crate::{DownReason, Event, Flow, Landing, MAX_HEADER, SendError};
use harmonaize_abi::Tag;
use harmonaize_shm::{Memory, Span};
use harmonaize_verbs::{
    Access, Completion, CompletionQueue, Connected, Depths, Domain, Endpoint, Gid, Local, Mtu,
};
use harmonaize_verbs::{QueuePair, Region, RemoteAddress, Status, Unconnected, VerbsError, Work};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Completions taken at once.
pub(super) const POLL: usize = 32;

/// What ends a path.
#[derive(Debug)]
pub(super) enum Fault {
    /// The peer did wrong: at once.
    Breach(DownReason),
    /// The network did, or the peer is gone: the TCP link may know more in a moment.
    Network(String),
}

impl From<DownReason> for Fault {
    fn from(reason: DownReason) -> Self {
        Self::Breach(reason)
    }
}

impl From<VerbsError> for Fault {
    fn from(error: VerbsError) -> Self {
        Self::Network(error.to_string())
    }
}

/// A message under way.
struct Posted {
    number: u32,
    /// Its header's length, if it is a frame without payload.
    header_bytes: Option<u16>,
    /// Of a payload that the device reads where it lies, or that comes after one.
    tag: Option<Tag>,
    /// Bytes of a payload that the device reads where it lies; 0 where no message is timed.
    bytes: u32,
}

/// What a path needs of its link to send.
pub(super) struct Outlet<'a> {
    pub(super) rails: &'a mut [Rail],
    /// The peer's rings, sorted.
    pub(super) rings: &'a [RingEnd],
    /// Set to what the peer must be asked for.
    pub(super) want: &'a mut Option<(Landing, u32)>,
    pub(super) inline_payload: usize,
    /// Whether some messages are timed.
    pub(super) timed: bool,
}

enum Pair {
    Unconnected(QueuePair<Unconnected>),
    Connected(QueuePair<Connected>),
    Gone,
}

/// One path.
pub(super) struct Path {
    /// Which of the devices.
    pub(super) rail: usize,
    /// Whose link it is, by the agent's number.
    tenant: Option<u32>,
    /// As it was opened; 0: the device chooses.
    source_port: u16,
    pair: Pair,
    completions: Arc<CompletionQueue>,
    /// Our mailbox, and behind it as many slots for messages under way.
    slots: Arc<Region>,
    count: u32,
    /// The peer's address and queue pair.
    theirs: (Gid, u32),
    their_mailbox: RemoteMemory,
    their_count: u32,
    credits: Credits,
    outbox: Outbox,
    posted: VecDeque<Posted>,
    /// Those of them with a tag.
    tagged: u32,
    /// Tags of payloads that were copied and are not reported yet.
    copied: Vec<Tag>,
    batch: Vec<Work>,
    /// Messages in the batch, and whether one of them has a tag.
    batched: u32,
    awaited: bool,
    /// Messages posted since one whose completion was asked for.
    unsignalled: u32,
    /// The oldest message under way when that was looked at, and since when it is.
    oldest: Option<(u32, Instant)>,
    delays: Delays,
    inline_bytes: usize,
    /// Taken from the queue and not looked at yet.
    taken: Vec<Completion>,
    next_out: u32,
    next_in: u32,
    /// The peer has been asked for the first frame's ring.
    ring_requested: bool,
    armed: bool,
    /// Last words of the peer came beside the path: nothing more comes on it.
    ended: bool,
    partial_header: Vec<u8>,
    /// A slot's copy.
    slot: Box<[u8]>,
}

impl std::fmt::Debug for Path {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Path").field(&(self.rail, self.next_out, self.next_in)).finish()
    }
}

impl Path {
    /// A queue pair with `count` slots of mailbox, and its parameters for the peer.
    pub(super) fn create(
        rail: &mut Rail,
        at: usize,
        (tenant, count, queue_frames): (Option<u32>, u32, usize),
        source_port: u16,
        number: u16,
    ) -> Result<(Self, PathEnd), VerbsError> {
        // The memory that a peer writes into, and never the tenants'.
        let memory = Memory::private(2 * count as usize * SLOT).map_err(|_| VerbsError::NotRegistered)?;
        let domain = Arc::clone(rail.registrations(tenant)?.domain());
        let slots = Region::register(&domain, &memory, Access::REMOTE_WRITE)?;
        let completions = CompletionQueue::create(&rail.device, 2 * count + receives(count))?;
        let flow_label = harmonaize_verbs::flow_label(source_port);
        // A device chooses where there is none: which port it sends from is not known.
        let source_port = if flow_label == 0 { 0 } else { source_port };
        let route = harmonaize_verbs::Path { flow_label, ..rail.route };
        let pair = create_pair(&domain, &completions, count, route)?;
        let endpoint = pair.endpoint();
        let end = PathEnd {
            number,
            queue_pair: endpoint.number,
            packet_sequence: endpoint.psn,
            gid: endpoint.gid.0,
            lid: endpoint.lid,
            mtu: endpoint.mtu.bytes() as u16,
            mailbox: RemoteMemory { address: slots.address(), rkey: slots.rkey() },
        };
        let path = Self {
            rail: at,
            tenant,
            source_port,
            inline_bytes: pair.depths().inline_bytes as usize,
            pair: Pair::Unconnected(pair),
            completions,
            slots,
            count,
            theirs: (Gid::default(), 0),
            their_mailbox: end.mailbox,
            their_count: count,
            credits: Credits::new(count, count),
            outbox: Outbox::new(queue_frames),
            posted: VecDeque::with_capacity(count as usize),
            batch: Vec::with_capacity(2 * count as usize),
            tagged: 0,
            copied: Vec::with_capacity(count as usize),
            batched: 0,
            awaited: false,
            unsignalled: 0,
            oldest: None,
            delays: Delays::new(&rail.bytes),
            taken: Vec::with_capacity(POLL),
            next_out: 0,
            next_in: 0,
            ring_requested: false,
            armed: false,
            ended: false,
            partial_header: Vec::new(),
            slot: vec![0; SLOT].into_boxed_slice(),
        };
        Ok((path, end))
    }

    /// Joins the queue pair to the peer's, whose mailbox has `their_count` slots.
    pub(super) fn connect(&mut self, end: &PathEnd, their_count: u32) -> Result<(), DownReason> {
        let Some(mtu) = Mtu::from_bytes(end.mtu.into()) else {
            return Err(DownReason::Protocol(format!("path {}: an MTU of {} bytes", end.number, end.mtu)));
        };
        let Pair::Unconnected(mut pair) = std::mem::replace(&mut self.pair, Pair::Gone) else {
            return Err(DownReason::Protocol(format!("path {} is connected already", end.number)));
        };
        let (gid, lid) = (Gid(end.gid), end.lid);
        one_network(pair.endpoint().gid, gid).map_err(|why| {
            DownReason::Connect(format!("path {} on {}: {why}", end.number, pair.domain().device().name()))
        })?;
        let remote = Endpoint { number: end.queue_pair, psn: end.packet_sequence, gid, mtu, lid, reads: 0 };
        let failed = |error: VerbsError| DownReason::Connect(format!("path {}: {error}", end.number));
        pair.post_receives(receives(self.count)).map_err(failed)?;
        self.pair = Pair::Connected(pair.connect(&remote).map_err(failed)?);
        self.theirs = (gid, end.queue_pair);
        self.their_mailbox = end.mailbox;
        self.their_count = their_count;
        self.credits = Credits::new(self.count, their_count);
        Ok(())
    }

    /// The two queue pairs as the wire sees them; none before they are joined, or without IP addresses.
    pub(super) fn flow(&self) -> Option<Flow> {
        let Pair::Connected(pair) = &self.pair else { return None };
        let (local, (gid, remote_pair)) = (pair.endpoint(), self.theirs);
        let (here, there) = (local.gid.ip()?, gid.ip()?);
        let (local_pair, source_port) = (local.number, self.source_port);
        Some(Flow::Roce { local: here, remote: there, local_pair, remote_pair, source_port })
    }

    /// What one sleeps on.
    pub(super) fn completions(&self) -> &CompletionQueue {
        &self.completions
    }

    /// Asks to be woken; false if something has completed meanwhile.
    pub(super) fn prepare_sleep(&mut self) -> bool {
        if !self.armed {
            self.armed = self.completions.arm().is_ok();
        }
        let before = self.taken.len();
        let quiet = self.completions.poll(&mut self.taken, POLL.saturating_sub(before)).is_ok();
        self.armed && quiet && self.taken.is_empty()
    }

    /// The completion queue's descriptor was readable.
    pub(super) fn woken(&mut self) {
        if self.completions.take_events().is_ok() {
            self.armed = false;
        }
    }

    /// Queues a frame. One that may go and is copied whole is put into the next batch at once.
    pub(super) fn push(
        &mut self,
        header: &[u8],
        payload: Option<(Landing, Span, Tag)>,
        inline_payload: usize,
    ) -> Result<(), SendError> {
        let may_go = self.outbox.front().is_none() && self.may_post() && header.len() <= MAX_HEADER;
        let posted = match &payload {
            _ if !may_go => return self.outbox.push(header, payload),
            None => self.post(Kind::Bare, header, None),
            Some((landing, span, tag)) if carried(header.len(), span, inline_payload) => {
                let kind = Kind::Carried(*landing, span.bytes() as u32);
                let posted = self.post(kind, header, Some(span));
                self.copied(*tag);
                posted
            }
            Some(_) => return self.outbox.push(header, payload),
        };
        // A message that is not to be had from this memory would fail from the queue, too.
        posted.map_err(|_| SendError::Invalid)
    }

    /// Takes how long a message took that was timed and has completed.
    pub(super) fn take_delay(&mut self) -> Option<Delay> {
        self.delays.take()
    }

    /// Whether messages are ready to be posted.
    pub(super) fn has_batch(&self) -> bool {
        !self.batch.is_empty()
    }

    /// Whether there is credit and a slot for a frame.
    fn may_post(&self) -> bool {
        self.credits.frame() && self.posted.len() < self.count as usize
    }

    /// A ring became known, for which the first frame may have waited.
    pub(super) fn ring_announced(&mut self) {
        self.ring_requested = false;
    }

    /// Sends what may go, and credit where it is due; says how many messages went. Costs a copy of each header and small
    /// payload, and one call of the library. A completion is asked for where a payload's owner waits for it, and before
    /// slots run out.
    pub(super) fn flush(
        &mut self,
        outlet: &mut Outlet<'_>,
        sink: &mut dyn FnMut(Event<'_>),
    ) -> Result<usize, Fault> {
        if self.outbox.front().is_some() {
            let mut outbox = std::mem::take(&mut self.outbox);
            let taken = self.take_frames(&mut outbox, outlet);
            self.outbox = outbox;
            taken?;
        }
        if self.credits.must_return() && self.posted.len() < self.count as usize {
            self.post(Kind::Credit, &[], None)?;
        }
        self.copied.drain(..).for_each(|tag| sink(Event::Sent { tag }));
        let Some(last) = self.batch.pop() else { return Ok(0) };
        let sent = std::mem::take(&mut self.batched);
        self.unsignalled += sent;
        if std::mem::take(&mut self.awaited) || self.unsignalled >= self.count / 4 {
            self.unsignalled = 0;
            self.batch.push(last.signalled());
            // Where a payload is under way: credit alone says little of the network.
            if outlet.timed && self.tagged > 0 {
                self.delays.begin(self.next_out.wrapping_sub(1), Instant::now);
            }
        } else {
            self.batch.push(last);
        }
        let Pair::Connected(pair) = &mut self.pair else { return Err(gone()) };
        pair.post(&mut self.batch)?;
        Ok(sent as usize)
    }

    /// Looks whether the device gets on, about once a second. Of a message that is still under way then, and of which no completion was
    /// asked for, one is: by a message behind it that gives credit alone. A device that settles nothing within `limit`, and as long again for
    /// each payload that is under way, has lost it.
    pub(super) fn check(&mut self, now: Instant, limit: Duration) -> Result<(), Fault> {
        let oldest = self.posted.front().map(|posted| posted.number);
        let Some((number, since)) = self.oldest.filter(|(number, _)| Some(*number) == oldest) else {
            self.oldest = oldest.map(|number| (number, now));
            return Ok(());
        };
        let under_way = (self.posted.len() as u32).saturating_sub(self.batched);
        let limit = limit.saturating_mul(1 + self.tagged);
        if under_way <= self.unsignalled {
            self.oldest = Some((number, now));
            if self.may_post() {
                self.awaited = true;
                self.post(Kind::Credit, &[], None)?;
            }
        } else if now.saturating_duration_since(since) >= limit {
            let why = format!("the device has neither sent message {number} nor failed within {limit:?}");
            return Err(Fault::Network(why));
        }
        Ok(())
    }

    /// Adds the frames that may go to the batch.
    fn take_frames(&mut self, outbox: &mut Outbox, outlet: &mut Outlet<'_>) -> Result<(), Fault> {
        while self.may_post()
            && let Some(frame) = outbox.front()
        {
            let Some(kind) = frame.kind(outlet, &mut self.ring_requested) else { break };
            let Some(frame) = outbox.pop() else { break };
            let header = outbox.header(&frame);
            match frame.payload {
                None => self.post(kind, header, None)?,
                Some((landing, span, tag)) if matches!(kind, Kind::Landed(..)) => {
                    let to = slot_address(outlet.rings, landing, self.rail).ok_or_else(gone)?;
                    let rail = outlet.rails.get_mut(self.rail).ok_or_else(gone)?;
                    let region = rail.registrations(self.tenant)?.region(span.memory(), Access::SEND)?;
                    let bytes = if outlet.timed { span.bytes() as u32 } else { 0 };
                    self.batch.push(Work::write(Local::new(&region, span)?, to));
                    self.post(kind, header, None)?;
                    if let Some(posted) = self.posted.back_mut() {
                        posted.bytes = bytes;
                        self.delays.posted(bytes);
                    }
                    self.await_tag(tag);
                }
                Some((_, span, tag)) => {
                    self.post(kind, header, Some(&span))?;
                    self.copied(tag);
                }
            }
        }
        Ok(())
    }

    /// The latest message's payload has been copied. It is reported with the next batch, unless others come before it.
    fn copied(&mut self, tag: Tag) {
        if self.tagged == 0 {
            self.copied.push(tag);
        } else {
            self.await_tag(tag);
        }
    }

    /// The latest message's payload is reported when it is done.
    fn await_tag(&mut self, tag: Tag) {
        if let Some(posted) = self.posted.back_mut() {
            posted.tag = Some(tag);
            self.tagged += 1;
            self.awaited = true;
        }
    }

    /// Adds a message to the batch; a span is copied behind the header.
    fn post(&mut self, kind: Kind, header: &[u8], carried: Option<&Span>) -> Result<(), Fault> {
        let header_bytes = header.len() as u16;
        let number = self.next_out;
        let message = Message { number, kind, header_bytes, credits: self.credits.spend() };
        let memory = self.slots.memory();
        let local = u64::from(self.count + (number & (self.count - 1))) * SLOT as u64;
        let wrong = |error: harmonaize_shm::MemoryError| Fault::Network(error.to_string());
        memory.write(local, message.head().as_bytes()).map_err(wrong)?;
        if !header.is_empty() {
            memory.write(local + HEAD as u64, header).map_err(wrong)?;
        }
        if let Some(span) = carried {
            let at = local + (HEAD + header.len()) as u64;
            let to = memory.view_mut(at, span.bytes() as u64).map_err(wrong)?;
            // SAFETY: both views have as many bytes, of different mappings, and are never referenced.
            unsafe { std::ptr::copy_nonoverlapping(span.view().pointer(), to.pointer(), to.bytes()) };
        }
        let from = Span::new(memory, local, message.bytes() as u64).map_err(wrong)?;
        let place = u64::from(number & (self.their_count - 1)) * SLOT as u64;
        let RemoteMemory { address, rkey } = self.their_mailbox;
        let to = RemoteAddress { address: address.wrapping_add(place), rkey };
        let mut work = Work::write_with_immediate(Local::new(&self.slots, from)?, to, number).token(1);
        if message.bytes() <= self.inline_bytes {
            work = work.inline();
        }
        self.batch.push(work);
        self.batched += 1;
        self.next_out = number.wrapping_add(1);
        let word = (kind == Kind::Bare).then_some(header_bytes);
        self.posted.push_back(Posted { number, header_bytes: word, tag: None, bytes: 0 });
        Ok(())
    }

    /// Looks at what completed, at most `most`, and reports it; says how much that was.
    pub(super) fn poll(
        &mut self,
        most: usize,
        rings: &Rings,
        sink: &mut dyn FnMut(Event<'_>),
    ) -> Result<usize, Fault> {
        if self.taken.is_empty() {
            self.completions.poll(&mut self.taken, most.min(POLL))?;
        }
        let mut taken = std::mem::take(&mut self.taken);
        let count = taken.len();
        let outcome = taken.iter().try_for_each(|completion| {
            if completion.status() != Status::Success {
                return Err(self.cause(completion, &taken));
            }
            self.completed(completion, rings, sink)
        });
        if outcome.is_err() {
            self.forget(&taken);
        }
        taken.clear();
        self.taken = taken;
        outcome?;
        if count > 0
            && let Pair::Connected(pair) = &mut self.pair
        {
            let missing = receives(self.count).saturating_sub(pair.receives());
            if missing >= self.count / 4 {
                pair.post_receives(missing)?;
            }
        }
        Ok(count)
    }

    fn completed(
        &mut self,
        completion: &Completion,
        rings: &Rings,
        sink: &mut dyn FnMut(Event<'_>),
    ) -> Result<(), Fault> {
        let Pair::Connected(pair) = &mut self.pair else { return Err(gone()) };
        let mut messages = 0;
        pair.handle_completion(completion, |token| messages += token)?;
        for _ in 0..messages {
            let Some(posted) = self.posted.pop_front() else { break };
            self.delays.settled(posted.number, posted.bytes, Instant::now);
            if let Some(tag) = posted.tag {
                self.tagged -= 1;
                sink(Event::Sent { tag });
            }
        }
        if completion.is_receive() && !self.ended {
            let mut slot = std::mem::take(&mut self.slot);
            let read = self.arrived(completion.immediate(), &mut slot, rings, sink);
            self.slot = slot;
            read?;
        }
        Ok(())
    }

    /// Reads the next message of the mailbox, by way of `slot`, which has a slot's length.
    fn arrived(
        &mut self,
        immediate: Option<u32>,
        slot: &mut [u8],
        rings: &Rings,
        sink: &mut dyn FnMut(Event<'_>),
    ) -> Result<(), Fault> {
        let number = self.next_in;
        if immediate != Some(number) {
            let found = immediate.map_or("none".into(), |number| number.to_string());
            return Err(DownReason::Protocol(format!("message {found} where {number} was due")).into());
        }
        let at = u64::from(number & (self.count - 1)) * SLOT as u64;
        let wrong = |error: harmonaize_shm::MemoryError| Fault::Network(error.to_string());
        let (head, rest) = slot.split_at_mut_checked(HEAD).ok_or_else(gone)?;
        self.slots.memory().read(at, head).map_err(wrong)?;
        let message = Message::read(head, number)?;
        let rest = rest.get_mut(..message.bytes() - HEAD).unwrap_or_default();
        self.slots.memory().read(at + HEAD as u64, rest).map_err(wrong)?;
        let (header, carried) = rest.split_at_checked(message.header_bytes.into()).unwrap_or_default();
        self.next_in = number.wrapping_add(1);
        self.credits.read(message.credits)?;
        let payload = match message.kind {
            Kind::Credit => return Ok(()),
            Kind::Bare => None,
            Kind::Landed(landing, bytes) => {
                rings.slot(landing, bytes)?;
                Some((landing, bytes))
            }
            Kind::Carried(landing, bytes) => {
                let to = rings.slot(landing, bytes)?;
                let bytes_there = carried.len().min(to.bytes());
                // SAFETY: as many bytes lie in both; the slot is never referenced, and `carried` is not part of it.
                unsafe { std::ptr::copy_nonoverlapping(carried.as_ptr(), to.pointer(), bytes_there) };
                Some((landing, bytes))
            }
        };
        sink(Event::Received { header, payload, posted: false });
        Ok(())
    }

    /// Takes a piece of a last word; the whole word once it is complete and new.
    pub(super) fn handle_piece(
        &mut self,
        message: u32,
        total: u16,
        offset: u16,
        bytes: &[u8],
    ) -> Result<Option<Vec<u8>>, DownReason> {
        if offset == 0 {
            self.partial_header.clear();
        }
        if self.partial_header.len() != usize::from(offset) {
            return Err(DownReason::Protocol(format!("a piece at {offset} of a last word")));
        }
        self.partial_header.extend_from_slice(bytes);
        if self.partial_header.len() < usize::from(total) {
            return Ok(None);
        }
        self.ended = true;
        let word = std::mem::take(&mut self.partial_header);
        if message.wrapping_sub(self.next_in) > u32::MAX / 2 {
            return Ok(None);
        }
        self.next_in = message.wrapping_add(1);
        Ok(Some(word))
    }
}

/// The two ends have addresses of two networks.
#[derive(Debug, thiserror::Error)]
#[error(
    "the GID here is {ours}, the peer's {theirs}: set `gid_index` of [verbs] to entries of one network at both ends"
)]
struct OtherNetwork {
    ours: Gid,
    theirs: Gid,
}

/// Ends of which one has an IPv4 address and the other another kind would never hear of each other.
fn one_network(ours: Gid, theirs: Gid) -> Result<(), OtherNetwork> {
    let ipv4 = |gid: Gid| gid.ip().is_some_and(|ip| ip.is_ipv4());
    if ipv4(ours) == ipv4(theirs) { Ok(()) } else { Err(OtherNetwork { ours, theirs }) }
}

/// Receive requests for a mailbox of so many slots. They are a quarter more than messages that may come, so that they need to
/// be posted again only when so many are used up.
fn receives(count: u32) -> u32 {
    count + count / 4
}

/// A queue pair with as much inline data as the device allows. A frame is two work requests at most.
fn create_pair(
    domain: &Arc<Domain>,
    completions: &Arc<CompletionQueue>,
    count: u32,
    route: harmonaize_verbs::Path,
) -> Result<QueuePair<Unconnected>, VerbsError> {
    let create = |inline_bytes| {
        let depths = Depths { sends: 2 * count, receives: receives(count), inline_bytes };
        QueuePair::create(domain, completions, depths, route)
    };
    create(220).or_else(|first| create(60).or_else(|_| create(0)).map_err(|_| first))
}

fn gone() -> Fault {
    Fault::Network("the queue pair is gone".into())
}

/// The frames of a last word.
pub(super) fn pieces(header: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    let empty = header.is_empty().then_some(header);
    empty
        .into_iter()
        .chain(header.chunks(MAX_PIECE))
        .zip(0_u16..)
        .map(|(piece, at)| (at * MAX_PIECE as u16, piece))
}
