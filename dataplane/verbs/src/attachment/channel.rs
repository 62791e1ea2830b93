//! The queue pair of an attachment and its two mailboxes, alike at both ends.
//!
//! A mailbox has a slot for each operation that may be in flight. Whoever writes a message knows that the slot is free: each
//! descriptor is read, and its receive request posted again, before its operation completes, and each completion is read
//! before its operation stops to count. So neither end needs credits, nor ever meets a receiver that is not ready.
//!
//! Where an agent has a successor, the queue pair ends and the mailboxes' numbers go on. Each end says how many messages it has, and the
//! other writes those after them once more through a new queue pair. Their slots are still as they were, by the same rule.

use crate::{
    Access, Completion, CompletionQueue, Connected, Depths, Domain, Endpoint, Function, Gid, Local, Mtu,
    Path, QueuePair, Region, RemoteAddress, Status, Unconnected, VerbsError, Work,
};
use harmonaize_abi::session::{PairEnd, Registered};
use harmonaize_shm::{Breach, EndError, Memory, Span};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Reads under way at once: enough to keep the device's round trip filled with large ones.
const READS: u8 = 16;
/// Most bytes that any message has: a descriptor's.
const INLINE: u32 = 128;
/// Completions taken with one call.
const POLL: usize = 64;

/// What a work request's token says: a message, or a transfer that its owner waits for.
const MESSAGE: u64 = 0;
const TRANSFER: u64 = 1;

/// What goes wrong at a device, as the end says it.
pub(super) fn failed(error: VerbsError) -> EndError {
    EndError::Rdma(error.to_string())
}

/// A queue pair that waits for its peer, with the mailbox that the peer will write.
#[derive(Debug)]
pub(super) struct Waiting {
    pair: QueuePair<Unconnected>,
    channel: Channel,
}

/// Bytes of a slot of either mailbox.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slots {
    pub(super) inbox: u32,
    pub(super) outbox: u32,
}

impl Waiting {
    /// A queue pair of a domain of its own. It is for `entries` messages in each direction and `transfers` reads and
    /// writes at a time.
    pub(super) fn new(
        function: &Function,
        domain: &Arc<Domain>,
        entries: u32,
        slots: Slots,
        transfers: usize,
    ) -> Result<Self, VerbsError> {
        let register = |bytes: u32, access| {
            let size = bytes as usize * entries as usize;
            let memory = Memory::private(size).map_err(|_| VerbsError::OutOfRange {
                what: "a mailbox's length",
                value: size as u64,
                most: isize::MAX as u64,
            })?;
            Region::register(domain, &memory, access)
        };
        let inbox = register(slots.inbox, Access::REMOTE_WRITE)?;
        let outbox = register(slots.outbox, Access::SEND)?;
        // Messages without a signal go on being held until half the queue is full, so twice as many fit.
        let sends = 2 * (entries + transfers as u32);
        let queue = CompletionQueue::create(&function.device, sends + entries)?;
        let wake = queue.wake_fd()?.try_clone_to_owned().map_err(|error| VerbsError::Failed {
            call: crate::Call::CreateChannel,
            object: "its descriptor".into(),
            source: rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::MFILE),
        })?;
        let path = Path { reads: READS, ..function.path };
        let room = entries as usize + transfers;
        let channel = Channel {
            pair: None,
            domain: Arc::clone(domain),
            path,
            sends,
            queue,
            wake,
            inbox,
            outbox,
            peer: RemoteAddress { address: 0, rkey: 0 },
            entries,
            slots,
            inline: false,
            sent: 0,
            taken: 0,
            arrived: 0,
            waiting: Vec::with_capacity(room),
            batch: Vec::with_capacity(room),
            polled: Vec::with_capacity(POLL),
            finished: 0,
            armed: false,
            paused: false,
            corked: false,
            lost: false,
            why: None,
        };
        Ok(Self { pair: channel.create()?, channel })
    }

    /// This end, to be told to the peer.
    pub(super) fn end(&self) -> PairEnd {
        self.channel.end_of(&self.pair)
    }

    /// Joins it to the peer's, whose word this is.
    pub(super) fn connect(self, peer: &PairEnd) -> Result<Channel, VerbsError> {
        let Self { pair, mut channel } = self;
        channel.enter(connected(pair, peer)?, peer.mailbox);
        Ok(channel)
    }

    /// The queue pair, and the rest, which goes on without it until [`Channel::resume`].
    pub(super) fn part(self) -> (QueuePair<Unconnected>, Channel) {
        (self.pair, self.channel)
    }
}

/// Joins a queue pair to the peer's.
pub(super) fn connected(
    pair: QueuePair<Unconnected>,
    peer: &PairEnd,
) -> Result<QueuePair<Connected>, VerbsError> {
    let mtu = Mtu::from_bytes(peer.mtu.into()).ok_or(VerbsError::BadMtu { bytes: peer.mtu.into() })?;
    pair.connect(&Endpoint {
        number: peer.queue_pair,
        psn: peer.psn,
        gid: Gid(peer.gid),
        mtu,
        lid: peer.lid,
        reads: peer.reads,
    })
}

/// A queue pair with its mailboxes. After an error it is of no more use, unless it was [held](Self::hold).
#[derive(Debug)]
pub(super) struct Channel {
    // Dropped first. None while the agent's successor has not been joined.
    pair: Option<QueuePair<Connected>>,
    domain: Arc<Domain>,
    path: Path,
    /// Entries of a send queue.
    sends: u32,
    queue: Arc<CompletionQueue>,
    wake: OwnedFd,
    inbox: Arc<Region>,
    outbox: Arc<Region>,
    /// The peer's mailbox.
    peer: RemoteAddress,
    entries: u32,
    slots: Slots,
    inline: bool,
    /// Messages sent, taken, and arrived, since the beginning.
    sent: u64,
    taken: u64,
    arrived: u64,
    /// Work that is not posted yet.
    waiting: Vec<Work>,
    batch: Vec<Work>,
    polled: Vec<Completion>,
    /// Transfers that have ended and were not told.
    finished: usize,
    armed: bool,
    /// Whether the queue pair may fail: the peer is about to have a successor.
    paused: bool,
    /// Whether nothing is posted, for the peer may not have joined its queue pair to this one yet.
    corked: bool,
    lost: bool,
    why: Option<Status>,
}

impl Channel {
    /// Messages that may be in flight.
    pub(super) fn entries(&self) -> u32 {
        self.entries
    }

    /// Messages taken, and sent.
    pub(super) fn counts(&self) -> (u64, u64) {
        (self.taken, self.sent)
    }

    /// Whether the peer's queue pair is known.
    pub(super) fn is_joined(&self) -> bool {
        self.pair.is_some()
    }

    /// The slots that the peer may ask for once more.
    pub(super) fn outbox(&self) -> &Arc<Memory> {
        self.outbox.memory()
    }

    /// A queue pair of this channel's, which waits for as many messages as may come.
    fn create(&self) -> Result<QueuePair<Unconnected>, VerbsError> {
        let create = |inline_bytes| {
            let depths = Depths { sends: self.sends, receives: self.entries, inline_bytes };
            QueuePair::create(&self.domain, &self.queue, depths, self.path)
        };
        // Some devices take less than a descriptor inline, or nothing.
        let mut pair = create(INLINE).or_else(|first| create(0).map_err(|_| first))?;
        // Each message that is taken makes room for another.
        let untaken = (self.arrived - self.taken) as u32;
        pair.post_receives(self.entries.saturating_sub(untaken))?;
        Ok(pair)
    }

    /// This end with such a queue pair, to be told to the peer.
    fn end_of(&self, pair: &QueuePair<Unconnected>) -> PairEnd {
        let Endpoint { number, psn, gid, mtu, lid, reads } = pair.endpoint();
        let mailbox = Registered { address: self.inbox.address(), rkey: self.inbox.rkey() };
        let mtu = mtu.bytes() as u16;
        PairEnd { queue_pair: number, psn, gid: gid.0, mtu, lid, reads, mailbox }
    }

    fn enter(&mut self, pair: QueuePair<Connected>, mailbox: Registered) {
        self.inline = pair.depths().inline_bytes >= self.slots.outbox;
        self.peer = RemoteAddress { address: mailbox.address, rkey: mailbox.rkey };
        self.pair = Some(pair);
    }

    /// Goes on where another process stands with its end, of whose messages these were taken and sent.
    pub(super) fn inherit(&mut self, taken: u64, sent: u64) {
        (self.taken, self.arrived, self.sent) = (taken, taken, sent);
    }

    /// Goes on with a queue pair that is joined to the peer's, which has so many of the messages. Those after them are sent once more.
    pub(super) fn resume(
        &mut self,
        pair: QueuePair<Connected>,
        mailbox: Registered,
        arrived: u64,
    ) -> Result<(), EndError> {
        let again = self.sent.checked_sub(arrived).filter(|again| *again <= u64::from(self.entries));
        if again.is_none() {
            return Err(EndError::Protocol(Breach::MessageCount));
        }
        self.enter(pair, mailbox);
        self.waiting.clear();
        for number in arrived..self.sent {
            let work = self.message(number)?;
            self.waiting.push(work);
        }
        Ok(())
    }

    /// From now on the queue pair may fail. One that has failed already did so for the same reason.
    pub(super) fn hold(&mut self) {
        self.paused = true;
        if std::mem::take(&mut self.lost) {
            (self.pair, self.why) = (None, None);
        }
    }

    /// Whether the queue pair may fail.
    pub(super) fn paused(&self) -> bool {
        self.paused
    }

    /// The queue pair may fail no longer, and what waits is sent.
    pub(super) fn release(&mut self) {
        (self.paused, self.corked) = (false, false);
        self.lost |= self.pair.is_none();
    }

    /// There will be no successor. Where the agent has not joined this queue pair yet, [`Self::release`] comes with that.
    pub(super) fn call_off(&mut self) {
        if !self.corked {
            self.release();
        }
    }

    /// Another queue pair in place of the one before, joined to that of the peer's successor, which has so many of the messages. Nothing
    /// is sent before [`Self::release`]. Says where it is, and how many messages have arrived here.
    pub(super) fn renew(&mut self, peer: &PairEnd, theirs: u64) -> Result<(PairEnd, u64), EndError> {
        // What came before counts, and of what comes after it nothing may be left.
        while matches!(self.poll(), Ok(more) if more > 0) {}
        self.pair = None;
        while self.queue.poll(&mut self.polled, POLL).is_ok_and(|more| more > 0) {
            self.polled.clear();
        }
        (self.lost, self.why) = (false, None);
        let pair = self.create().map_err(failed)?;
        let end = self.end_of(&pair);
        (self.paused, self.corked) = (true, true);
        self.resume(connected(pair, peer).map_err(failed)?, peer.mailbox, theirs)?;
        Ok((end, self.arrived))
    }

    fn slot(&self, number: u64, bytes: u32) -> u64 {
        number % u64::from(self.entries) * u64::from(bytes)
    }

    /// The next message, copied once into `into`, which has a slot's length. Its receive request is posted again.
    pub(super) fn take(&mut self, into: &mut [u8]) -> Result<bool, EndError> {
        if self.taken == self.arrived {
            return match (self.lost, self.why) {
                (false, _) => Ok(false),
                (true, None) => Err(EndError::Closed),
                (true, Some(status)) => Err(EndError::Rdma(status.to_string())),
            };
        }
        self.inbox.memory().read(self.slot(self.taken, self.slots.inbox), into)?;
        self.taken += 1;
        if !self.lost
            && let Some(pair) = &mut self.pair
            && let Err(error) = pair.post_receives(1)
        {
            self.fail(error)?;
        }
        Ok(true)
    }

    /// Whether the queue pair's failure is one.
    fn fail(&mut self, error: VerbsError) -> Result<(), EndError> {
        if !self.paused {
            return Err(failed(error));
        }
        self.pair = None;
        Ok(())
    }

    /// Writes a message, of a slot's length, into the peer's mailbox, with the next [`Self::post`].
    pub(super) fn send(&mut self, message: &[u8]) -> Result<(), EndError> {
        let slot = self.slot(self.sent, self.slots.outbox);
        self.outbox.memory().write(slot, message)?;
        let number = self.sent;
        self.sent += 1;
        // Without a queue pair it is sent with the next.
        if self.pair.is_some() {
            let work = self.message(number)?;
            self.waiting.push(work);
        }
        Ok(())
    }

    /// The work that writes a message from its slot.
    fn message(&self, number: u64) -> Result<Work, EndError> {
        let slot = self.slot(number, self.slots.outbox);
        let span = Span::new(self.outbox.memory(), slot, self.slots.outbox.into())?;
        let from = Local::new(&self.outbox, span).map_err(failed)?;
        // The peer's numbers: nonsense fails at its device.
        let to = RemoteAddress { address: self.peer.address.wrapping_add(slot), ..self.peer };
        let work = Work::write_with_immediate(from, to, number as u32).token(MESSAGE);
        Ok(if self.inline { work.inline() } else { work })
    }

    /// Reads or writes the peer's memory, with the next [`Self::post`]. Transfers end in order; the caller has no more under way
    /// than it said.
    pub(super) fn transfer(&mut self, work: Work) -> Result<(), EndError> {
        if self.lost {
            return Err(EndError::Closed);
        }
        if self.pair.is_none() {
            return Err(EndError::Full);
        }
        self.waiting.push(work.signalled().token(TRANSFER));
        Ok(())
    }

    /// Posts what the queue pair has room for; says how much.
    pub(super) fn post(&mut self) -> Result<usize, EndError> {
        let Some(pair) = self.pair.as_mut().filter(|_| !self.corked && !self.lost) else { return Ok(0) };
        let count = self.waiting.len().min(pair.room());
        if count == 0 {
            return Ok(0);
        }
        self.batch.extend(self.waiting.drain(..count));
        if let Err(error) = pair.post(&mut self.batch) {
            // Messages have numbers, by which they are sent once more.
            self.batch.clear();
            self.fail(error)?;
        }
        Ok(count)
    }

    /// Takes what has completed; says how much. What went wrong at the device or on the way shows in [`Self::take`], after
    /// the messages that arrived before.
    pub(super) fn poll(&mut self) -> Result<usize, EndError> {
        // What the next queue pair receives may come before it is known here, and waits for it.
        if self.pair.is_none() {
            return Ok(0);
        }
        self.queue.poll(&mut self.polled, POLL).map_err(failed)?;
        let done = self.polled.len();
        for completion in self.polled.drain(..) {
            // What is left of a queue pair that is no more says nothing.
            let Some(pair) = self.pair.as_mut().filter(|pair| pair.owns(&completion)) else { continue };
            if completion.status() != Status::Success {
                if self.paused {
                    self.pair = None;
                    continue;
                }
                self.lost = true;
                // The one that was not merely flushed says why.
                if completion.status() != Status::WorkRequestFlushed {
                    self.why.get_or_insert(completion.status());
                }
                continue;
            }
            if completion.is_receive() {
                // The peer counts the same way.
                if completion.immediate() != Some(self.arrived as u32) {
                    self.lost = true;
                    return Err(EndError::Protocol(Breach::MessageOrder));
                }
                self.arrived += 1;
            }
            let finished = &mut self.finished;
            pair.handle_completion(&completion, |token| *finished += usize::from(token == TRANSFER))
                .map_err(failed)?;
        }
        Ok(done)
    }

    /// How many transfers have ended since the last time.
    pub(super) fn finished(&mut self) -> usize {
        std::mem::take(&mut self.finished)
    }

    /// Arms the completion queue. `false`: there is work.
    pub(super) fn prepare_sleep(&mut self) -> bool {
        if self.lost || self.taken != self.arrived || self.finished > 0 {
            return false;
        }
        if !matches!(self.post(), Ok(0)) {
            return false;
        }
        if self.queue.arm().is_err() {
            // Without a queue pair nothing else says that the device is lost.
            self.lost |= self.pair.is_none();
            return false;
        }
        self.armed = true;
        // What completed before the arming gives no event.
        matches!(self.poll(), Ok(0)) && !self.lost
    }

    /// Takes the events that woke.
    pub(super) fn cancel_sleep(&mut self) {
        if std::mem::take(&mut self.armed) && self.queue.take_events().is_err() {
            self.lost = true;
        }
    }

    pub(super) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PortOptions;
    use crate::fake::Fabric;
    use std::net::Ipv4Addr;

    /// The peer writes as soon as it may, and perhaps before this end knows its queue pair.
    #[test]
    fn a_message_waits_until_its_queue_pair_is_known() {
        let fabric = Fabric::new();
        let [one, other] = [("one", 1), ("other", 2)].map(|(name, host)| {
            let address = Ipv4Addr::new(10, 0, 0, host);
            fabric.add(name, address).unwrap();
            let opened = Function::open(&fabric.devices(), &PortOptions::default(), Some(address.into()));
            let function = opened.unwrap();
            let domain = Domain::create(&function.device).unwrap();
            Waiting::new(&function, &domain, 4, Slots { inbox: 8, outbox: 8 }, 0).unwrap()
        });
        let (end, theirs) = (one.end(), other.end());
        let (pair, mut one) = one.part();
        let (pair, mut other) = (connected(pair, &theirs).unwrap(), other.connect(&end).unwrap());
        let mut message = [0; 8];
        for byte in [7, 8] {
            other.send(&[byte; 8]).unwrap();
            assert_eq!(other.post().unwrap(), 1);
            let _ = one.poll().unwrap();
            assert!(one.prepare_sleep() && !one.take(&mut message).unwrap());
            one.cancel_sleep();
        }
        one.resume(pair, theirs.mailbox, 0).unwrap();
        one.poll().unwrap();
        for byte in [7, 8] {
            assert!(one.take(&mut message).unwrap(), "the message is lost");
            assert_eq!(message, [byte; 8]);
        }
    }
}
