//! Both ends of a mapped attachment: an arena and two rings that agent and tenant map, and a doorbell.

use crate::doorbell::Doorbell;
use crate::segment::{
    Completer, CompletionReader, RingKind, Shared, SubmissionReader, Submitter, segment_bytes,
};
use crate::{AgentEnd, Breach, EndError, Lease, Memory, MemoryError, Regions, Span, TenantEnd};
use harmonaize_abi::{Completion, Submission, Tag};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

/// The agent's end.
#[derive(Debug)]
pub struct MappedEnd {
    regions: Regions,
    entries: u32,
    submissions: SubmissionReader,
    completions: Completer,
    doorbell: Doorbell,
    /// The rings.
    segment: Arc<Memory>,
}

/// The tenant's end.
#[derive(Debug)]
pub struct MappedTenant {
    arena: Arc<Memory>,
    entries: u32,
    submissions: Submitter,
    completions: CompletionReader,
    doorbell: Doorbell,
}

impl MappedEnd {
    /// A new attachment: `arena_bytes` of tensor memory and rings of `entries` (a power of two up to
    /// [`crate::MAX_ENTRIES`]). With it comes what [`MappedTenant::open`] takes. The arena's memory is freed with this end, and
    /// the lease ends after that.
    pub fn create(arena_bytes: u64, entries: u32, lease: Lease) -> Result<(Self, [OwnedFd; 3]), EndError> {
        let bytes = segment_bytes(entries).ok_or(MemoryError::BadSize(entries.into()))?;
        let (arena, arena_fd) = Memory::lent(arena_bytes, "harmonaize-arena", lease)?;
        let (segment, rings_fd) = Memory::granted(bytes, "harmonaize-rings")?;
        let (doorbell, theirs) =
            Doorbell::pair().map_err(|source| EndError::System { call: "socketpair", source })?;
        let submissions = SubmissionReader::new(Shared::new(&segment, entries, RingKind::Submissions)?);
        let completions = Completer::new(Shared::new(&segment, entries, RingKind::Completions)?);
        let regions = Regions::new(arena);
        let end = Self { regions, entries, submissions, completions, doorbell, segment };
        Ok((end, [arena_fd, rings_fd, theirs]))
    }
}

/// What an agent's end is, for the process that takes its place: numbers, and descriptors in this order. One that is not mapped has no
/// regions.
///
/// Over RDMA the first numbers of `taken` and `put` count its descriptors and completions, and its descriptors are of a copy of its mailbox
/// for completions, and of the session's socket. Through a socket they count bytes that came and are to be sent, which the first
/// descriptor's file has in this order, and the second descriptor is the socket.
#[derive(Debug)]
pub struct InheritedEnd {
    /// Entries of each ring.
    pub entries: u32,
    /// Where this side stands in the ring of submissions.
    pub taken: [u64; 2],
    /// Where this side stands in the ring of completions.
    pub put: [u64; 3],
    /// Where each region begins and, in its memfd, from where and how many bytes; the arena first.
    pub regions: Vec<(u64, u64, u64)>,
    /// Of the rings, the doorbell, then of each region.
    pub descriptors: Vec<OwnedFd>,
}

impl MappedEnd {
    /// Goes on where another process stands with its end. `lease` gives what the region at an offset was lent on, if it was.
    ///
    /// # Errors
    /// If the parts do not make an attachment.
    pub fn inherit(
        from: InheritedEnd,
        lease: &mut dyn FnMut(u64) -> Option<Lease>,
    ) -> Result<Self, EndError> {
        let InheritedEnd { entries, taken, put, regions, descriptors } = from;
        let missing = || EndError::Protocol(Breach::InheritedDescriptor);
        let mut descriptors = descriptors.into_iter();
        let mut next = || descriptors.next().ok_or_else(missing);
        let bytes = segment_bytes(entries).ok_or(MemoryError::BadSize(entries.into()))?;
        let segment = Memory::map(next()?, bytes)?;
        let doorbell = Doorbell::from(next()?);
        let mut all: Option<Regions> = None;
        for (base, offset, bytes) in regions {
            let memory = Memory::inherit(next()?, (offset, bytes), lease(base))?;
            match &mut all {
                None => all = Some(Regions::new(memory)),
                Some(all) => all.add(base, memory)?,
            }
        }
        let submissions = Shared::new(&segment, entries, RingKind::Submissions)?;
        let completions = Shared::new(&segment, entries, RingKind::Completions)?;
        let (submissions, completions) =
            (SubmissionReader::resume(submissions, taken), Completer::resume(completions, put));
        Ok(Self { regions: all.ok_or_else(missing)?, entries, submissions, completions, doorbell, segment })
    }
}

impl AgentEnd for MappedEnd {
    fn hand_over(&self) -> Result<InheritedEnd, EndError> {
        let copy = |fd: Option<BorrowedFd<'_>>| {
            let fd = fd.ok_or(EndError::Protocol(Breach::InheritedMemory))?;
            rustix::io::fcntl_dupfd_cloexec(fd, 0)
                .map_err(|source| EndError::System { call: "fcntl(F_DUPFD)", source })
        };
        let mut descriptors = vec![copy(self.segment.fd())?, copy(Some(self.doorbell.fd()))?];
        let mut regions = Vec::new();
        for (base, memory) in self.regions.all() {
            descriptors.push(copy(memory.fd())?);
            regions.push((base, memory.offset(), memory.bytes() as u64));
        }
        let (taken, put) = (self.submissions.position(), self.completions.position());
        Ok(InheritedEnd { entries: self.entries, taken, put, regions, descriptors })
    }

    fn leave(&self) {
        self.regions.all().for_each(|(_, memory)| memory.leave());
    }

    fn own(&self) {
        self.regions.all().for_each(|(_, memory)| memory.own());
    }

    fn submission(&mut self) -> Result<Option<Submission>, EndError> {
        match self.submissions.pop()? {
            Some(words) => Ok(Some(zerocopy::transmute!(words))),
            None if self.doorbell.closed() => Err(EndError::Closed),
            None => Ok(None),
        }
    }

    fn complete(&mut self, completion: &Completion) -> Result<(), EndError> {
        Ok(self.completions.push(&zerocopy::transmute!(*completion))?)
    }

    fn memory(&self) -> Option<&Regions> {
        Some(&self.regions)
    }

    fn arena_bytes(&self) -> u64 {
        self.regions.bytes()
    }

    fn add_region(&mut self, base: u64, memory: Arc<Memory>) -> Result<(), EndError> {
        Ok(self.regions.add(base, memory)?)
    }

    fn remove_region(&mut self, base: u64) -> Option<Arc<Memory>> {
        self.regions.remove(base)
    }

    fn entries(&self) -> u32 {
        self.entries
    }

    fn fetch(&mut self, _: Tag, _: u64, _: Span) -> Result<(), EndError> {
        Err(EndError::Mapped("fetch"))
    }

    fn store(&mut self, _: Tag, _: Span, _: u64) -> Result<(), EndError> {
        Err(EndError::Mapped("store"))
    }

    fn progress(&mut self, _: &mut dyn FnMut(Tag)) -> Result<usize, EndError> {
        Ok(0)
    }

    fn flush(&mut self) -> Result<(), EndError> {
        if self.completions.must_wake() {
            self.doorbell.ring();
        }
        Ok(())
    }

    fn prepare_sleep(&mut self) -> bool {
        !self.doorbell.closed() && self.submissions.prepare_sleep()
    }

    fn cancel_sleep(&mut self, woken: bool) {
        self.submissions.wake();
        if woken {
            self.doorbell.quiet();
        }
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.doorbell.fd()
    }
}

impl MappedTenant {
    /// The tenant's end from the descriptors that came with the agent's welcome: arena, ring segment, doorbell.
    pub fn open(descriptors: [OwnedFd; 3], arena_bytes: u64, entries: u32) -> Result<Self, EndError> {
        let bytes = segment_bytes(entries).ok_or(MemoryError::BadSize(entries.into()))?;
        let [arena, segment, doorbell] = descriptors;
        let (arena, segment) = (Memory::map(arena, arena_bytes)?, Memory::map(segment, bytes)?);
        let submissions = Submitter::new(Shared::new(&segment, entries, RingKind::Submissions)?);
        let completions = CompletionReader::new(Shared::new(&segment, entries, RingKind::Completions)?);
        Ok(Self { arena, entries, submissions, completions, doorbell: Doorbell::from(doorbell) })
    }
}

impl TenantEnd for MappedTenant {
    fn memory(&self) -> &Arc<Memory> {
        &self.arena
    }

    fn entries(&self) -> u32 {
        self.entries
    }

    fn submit(&mut self, submission: &Submission) -> Result<(), EndError> {
        self.submissions.push(&zerocopy::transmute!(*submission))?;
        if self.submissions.must_wake() {
            self.doorbell.ring();
        }
        Ok(())
    }

    fn completion(&mut self) -> Result<Option<Completion>, EndError> {
        match self.completions.pop()? {
            Some(words) => Ok(Some(zerocopy::transmute!(words))),
            None if self.doorbell.closed() => Err(EndError::Closed),
            None => Ok(None),
        }
    }

    fn progress(&mut self) -> Result<usize, EndError> {
        Ok(0)
    }

    fn prepare_sleep(&mut self) -> bool {
        !self.doorbell.closed() && self.completions.prepare_sleep()
    }

    fn cancel_sleep(&mut self) {
        self.completions.wake();
        self.doorbell.quiet();
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.doorbell.fd()
    }
}
