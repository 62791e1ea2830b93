//! A tenant's process as the poll loop sees it: its end of the rings, and which communicators its handles name.

use crate::command::{AttachmentId, AttachmentStatus};
use crate::error::HandOverError;
use crate::table::Key;
use crate::transfer::{COUNTS, PendingTransfer, untag};
use harmonaize_abi::{
    ABI_VERSION, CommunicatorHandle, CommunicatorId, Completion, Rank, Region, Status, Submission,
};
use harmonaize_core::Nanos;
use harmonaize_shm::{AgentEnd, Breach, EndError, Memory, Span};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use zerocopy::IntoBytes;

/// The time-out of operations that ask for none.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(600);

#[derive(Debug)]
pub(crate) struct Attachment {
    pub(crate) id: AttachmentId,
    pub(crate) end: Box<dyn AgentEnd>,
    /// The longest time-out that its operations may have.
    operation_timeout: Duration,
    joined: Vec<JoinedCommunicator>,
    in_flight: u32,
    unflushed: bool,
    /// Whether no descriptor is taken: it is about to be handed over.
    pub(crate) frozen: bool,
    /// Since when its other side is gone.
    pub(crate) closed: Option<Nanos>,
    /// Transfers that this end had no room for yet, in order.
    waiting: VecDeque<PendingTransfer>,
    /// A descriptor whose counts are being fetched, and their bytes. Those behind it are not taken yet.
    counted: Option<(Submission, usize)>,
    /// Where fetched counts land.
    counts: Option<Arc<Memory>>,
    /// A descriptor for which its communicator has no room yet. Those behind it are not taken yet.
    deferred: Option<Taken>,
}

/// A descriptor that was taken, and its counts if they were fetched.
pub(crate) type Taken = (Submission, Option<Arc<[u64]>>);

/// An attachment as it is handed to another process.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct AttachmentImage {
    pub(crate) id: AttachmentId,
    pub(crate) entries: u32,
    pub(crate) taken: [u64; 2],
    pub(crate) put: [u64; 3],
    pub(crate) regions: Vec<(u64, u64, u64)>,
    operation_timeout: Duration,
    joined: Vec<JoinedCommunicator>,
    in_flight: u32,
    unflushed: bool,
}

/// A communicator that this attachment has joined and not left.
#[derive(Clone, Copy, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct JoinedCommunicator {
    /// The number of its [`CommunicatorHandle`]: a hand-over's layout keeps the integer.
    handle: u32,
    id: CommunicatorId,
    communicator: Key,
    rank: Rank,
    /// How it ended, if it has.
    ended: Option<Status>,
}

impl Attachment {
    pub(crate) fn new(id: AttachmentId, end: Box<dyn AgentEnd>, operation_timeout: Duration) -> Self {
        Self {
            id,
            end,
            operation_timeout,
            joined: Vec::new(),
            in_flight: 0,
            unflushed: false,
            frozen: false,
            closed: None,
            waiting: VecDeque::with_capacity(64),
            counted: None,
            counts: None,
            deferred: None,
        }
    }

    /// The attachment for another process; its end stands so in its rings.
    ///
    /// # Errors
    /// If a transfer is under way. Those that wait for its process are handed over beside it, and so is a deferred descriptor.
    pub(crate) fn describe(
        &self,
        entries: u32,
        (taken, put): ([u64; 2], [u64; 3]),
        regions: Vec<(u64, u64, u64)>,
    ) -> Result<AttachmentImage, HandOverError> {
        if !self.rests() {
            return Err(HandOverError::Transfers(self.id.0));
        }
        let Self { id, operation_timeout, in_flight, unflushed, .. } = *self;
        let joined = self.joined.clone();
        Ok(AttachmentImage {
            id,
            entries,
            taken,
            put,
            regions,
            operation_timeout,
            joined,
            in_flight,
            unflushed,
        })
    }

    /// The attachment that another process had.
    pub(crate) fn from_image(image: AttachmentImage, end: Box<dyn AgentEnd>) -> Self {
        let AttachmentImage { id, operation_timeout, joined, in_flight, unflushed, .. } = image;
        Self { joined, in_flight, unflushed, ..Self::new(id, end, operation_timeout) }
    }

    pub(crate) fn join(
        &mut self,
        handle: CommunicatorHandle,
        (id, communicator): (CommunicatorId, Key),
        rank: Rank,
    ) {
        self.joined.push(JoinedCommunicator { handle: handle.0, id, communicator, rank, ended: None });
    }

    /// The communicator is no more; calls on it are answered with `status` until the tenant leaves it. Its transfers that have not
    /// started never do: once the tenant hears of the end, its tensors are its own again. Those under way end before it hears.
    pub(crate) fn mark_ended(&mut self, communicator: Key, status: Status) {
        for joined in self.joined.iter_mut().filter(|joined| joined.communicator == communicator) {
            joined.ended.get_or_insert(status);
        }
        self.waiting.retain(|asked| untag(asked.tag).0 != communicator);
    }

    /// A rank leaves, if it is here. Of a communicator that is over, too.
    pub(crate) fn leave(&mut self, communicator: CommunicatorId, rank: Rank) {
        self.joined.retain(|joined| joined.id != communicator || joined.rank != rank);
    }

    /// Which communicator and rank a handle names.
    pub(crate) fn find(&self, handle: CommunicatorHandle) -> Result<(Key, Rank), Status> {
        let joined =
            self.joined.iter().find(|joined| joined.handle == handle.0).ok_or(Status::BadCommunicator)?;
        joined.ended.map_or(Ok((joined.communicator, joined.rank)), Err)
    }

    /// The time-out of an operation that asks for so many nanoseconds; for none, the usual one.
    pub(crate) fn timeout(&self, asked_ns: u64) -> Result<Duration, Status> {
        match Duration::from_nanos(asked_ns) {
            Duration::ZERO => Ok(OPERATION_TIMEOUT.min(self.operation_timeout)),
            asked if asked > self.operation_timeout => Err(Status::TimeoutTooLong),
            asked => Ok(asked),
        }
    }

    /// Of communicators that are not over.
    pub(crate) fn ranks(&self) -> impl Iterator<Item = (Key, Rank)> + '_ {
        let running = self.joined.iter().filter(|joined| joined.ended.is_none());
        running.map(|joined| (joined.communicator, joined.rank))
    }

    /// Fetches the counts of a descriptor, which the caller has checked to be few.
    pub(crate) fn fetch_counts(
        &mut self,
        own: Key,
        submission: Submission,
        region: Region,
    ) -> Result<(), EndError> {
        let bytes = region.bytes as usize;
        let memory = match self.counts.take_if(|memory| memory.bytes() >= bytes) {
            Some(memory) => memory,
            None => Memory::private(bytes)?,
        };
        let span = Span::new(&memory, 0, region.bytes)?;
        (self.counts, self.counted) = (Some(memory), Some((submission, bytes)));
        self.transfer(PendingTransfer {
            attachment: own,
            tag: COUNTS,
            store: false,
            offset: region.offset,
            span,
        })
    }

    /// The descriptor whose counts have been fetched, and they.
    pub(crate) fn take_counted(&mut self) -> Result<Option<Taken>, EndError> {
        let Some(((submission, bytes), memory)) = self.counted.take().zip(self.counts.as_ref()) else {
            return Ok(None);
        };
        let mut counts = vec![0_u64; bytes / size_of::<u64>()];
        memory.read(0, counts.as_mut_bytes())?;
        Ok(Some((submission, Some(counts.into()))))
    }

    /// Its communicator has no room for a descriptor until it has seen that others have ended. It is the next one again.
    pub(crate) fn defer(&mut self, taken: Taken) {
        self.deferred = Some(taken);
    }

    /// The descriptor that was deferred.
    pub(crate) fn take_deferred(&mut self) -> Option<Taken> {
        self.deferred.take()
    }

    /// The same, which stays so.
    pub(crate) fn deferred(&self) -> Option<&Taken> {
        self.deferred.as_ref()
    }

    /// Transfers that have not begun, in order.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = &PendingTransfer> {
        self.waiting.iter()
    }

    /// The descriptor whose counts are being fetched.
    pub(crate) fn counted(&self) -> Option<&Submission> {
        self.counted.as_ref().map(|(submission, _)| submission)
    }

    /// Whether operations that it asked for are under way.
    pub(crate) fn has_calls(&self) -> bool {
        self.in_flight > 0
    }

    /// Announces that the loop will sleep. False: there is work. Room for a deferred descriptor comes without anything from outside:
    /// its rank has fewer operations in flight than there is room for, once the communicator has seen that others have ended.
    pub(crate) fn prepare_sleep(&mut self) -> bool {
        self.deferred.is_none() && self.end.prepare_sleep()
    }

    /// The next descriptor. More than the rings' entries in flight is the tenant's breach.
    pub(crate) fn submission(&mut self) -> Result<Option<Submission>, EndError> {
        if self.counted.is_some() || self.frozen {
            return Ok(None);
        }
        let submission = self.end.submission()?;
        self.in_flight += u32::from(submission.is_some());
        match self.in_flight > self.end.entries() {
            true => Err(EndError::Protocol(Breach::TooManyOperations)),
            false => Ok(submission),
        }
    }

    pub(crate) fn complete(&mut self, completion: &Completion) -> Result<(), EndError> {
        self.in_flight = self.in_flight.saturating_sub(1);
        self.unflushed = true;
        self.end.complete(completion)
    }

    /// Whether its tensors can be read and written here.
    pub(crate) fn is_mapped(&self) -> bool {
        self.end.memory().is_some()
    }

    /// Whether no fetch and no store is under way, and none waits but for its process to come.
    pub(crate) fn rests(&self) -> bool {
        let waits = !self.waiting.is_empty() || self.counted.is_some();
        self.end.rests() && (!waits || self.end.is_away())
    }

    /// Starts a fetch or store, behind all that were asked for before.
    pub(crate) fn transfer(&mut self, asked: PendingTransfer) -> Result<(), EndError> {
        self.waiting.push_back(asked);
        self.transfer_waiting().map(drop)
    }

    /// Starts those for which there is room now; how many.
    pub(crate) fn transfer_waiting(&mut self) -> Result<usize, EndError> {
        let mut started = 0;
        while let Some(PendingTransfer { tag, store, offset, span, .. }) = self.waiting.front() {
            let (tag, offset, span) = (*tag, *offset, span.clone());
            let result =
                if *store { self.end.store(tag, span, offset) } else { self.end.fetch(tag, offset, span) };
            match result {
                Ok(()) => drop(self.waiting.pop_front()),
                Err(EndError::Full) => break,
                Err(error) => return Err(error),
            }
            started += 1;
        }
        Ok(started)
    }

    /// Answers a descriptor that cannot be executed.
    pub(crate) fn refuse(&mut self, submission: &Submission, status: Status) -> Result<(), EndError> {
        self.complete(&Completion {
            version: ABI_VERSION,
            status: status.code(),
            communicator: submission.communicator,
            cookie: submission.cookie,
            ..Completion::default()
        })
    }

    /// Whether [`Attachment::flush`] would do anything.
    pub(crate) fn is_unflushed(&self) -> bool {
        self.unflushed
    }

    /// Wakes the tenant, once for all completions since the last time.
    pub(crate) fn flush(&mut self) -> Result<(), EndError> {
        if std::mem::take(&mut self.unflushed) { self.end.flush() } else { Ok(()) }
    }

    pub(crate) fn status(&self) -> AttachmentStatus {
        AttachmentStatus {
            attachment: self.id,
            arena_bytes: self.end.arena_bytes(),
            in_flight: self.in_flight,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transfer::tag;
    use harmonaize_abi::{ChannelId, StepId};
    use harmonaize_shm::{Memory, REMOTE_DEPTH, RemoteEnd, RemoteTenant, Span, TenantEnd};

    #[test]
    fn a_timeout_is_the_asked_one_up_to_the_longest() {
        let of = |longest, asked_ns| {
            let (end, _socket) = RemoteEnd::create(1 << 16, 4).unwrap();
            Attachment::new(AttachmentId(1), Box::new(end), longest).timeout(asked_ns)
        };
        let hour = Duration::from_secs(3600);
        assert_eq!(of(hour, 0), Ok(OPERATION_TIMEOUT));
        assert_eq!(of(Duration::from_secs(1), 0), Ok(Duration::from_secs(1)));
        assert_eq!(of(hour, 1), Ok(Duration::from_nanos(1)));
        assert_eq!(of(hour, 3_600_000_000_000), Ok(hour));
        for asked_ns in [3_600_000_000_001, u64::MAX] {
            assert_eq!(of(hour, asked_ns), Err(Status::TimeoutTooLong));
        }
    }

    #[test]
    fn nothing_is_stored_any_more_for_a_communicator_that_has_ended() {
        let (over, other) = (Key { index: 0, generation: 1 }, Key { index: 1, generation: 1 });
        let (end, socket) = RemoteEnd::create(1 << 16, 4).unwrap();
        let mut tenant = RemoteTenant::open(socket, 1 << 16, 4).unwrap();
        let mut attachment = Attachment::new(AttachmentId(1), Box::new(end), Duration::from_secs(1));
        let memory = Memory::private(1).unwrap();
        memory.write(0, &[1]).unwrap();
        let store = |communicator: Key, offset: u64| PendingTransfer {
            attachment: Key { index: 0, generation: 1 },
            tag: tag(communicator, ChannelId(0), StepId(3)),
            store: true,
            offset,
            span: Span::new(&memory, 0, 1).unwrap(),
        };
        // The last of this communicator's finds no room, and neither does the other's behind it.
        let depth = REMOTE_DEPTH as u64;
        for offset in 0..=depth {
            attachment.transfer(store(over, offset)).unwrap();
        }
        attachment.transfer(store(other, depth + 1)).unwrap();
        attachment.mark_ended(over, Status::Dissolved);
        loop {
            let served = attachment.end.progress(&mut |_| {}).unwrap() + tenant.progress().unwrap();
            if served + attachment.transfer_waiting().unwrap() == 0 {
                break;
            }
        }
        let mut bytes = vec![9; REMOTE_DEPTH + 2];
        tenant.memory().read(0, &mut bytes).unwrap();
        let (stored, rest) = bytes.split_at(REMOTE_DEPTH);
        assert!(stored.iter().all(|byte| *byte == 1), "what had started");
        assert_eq!(rest, [0, 1], "only the other communicator's was still to start");
    }
}
