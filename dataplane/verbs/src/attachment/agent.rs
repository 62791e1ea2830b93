//! The agent's end of an attachment over RDMA.

use super::channel::{Channel, Slots, Waiting, failed};
use super::succession::{Arrival, Rejoin, Rejoining};
use crate::{Access, Domain, Function, Local, Registrations, RemoteAddress, VerbsError, Work};
use harmonaize_abi::session::{Offer, PairEnd, Registered};
use harmonaize_abi::{Completion, Submission, Tag};
use harmonaize_shm::{AgentEnd, Breach, EndError, InheritedEnd, Memory, Regions, Span, check_range};
use std::cell::Cell;
use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use zerocopy::{FromBytes, IntoBytes};

/// Most fetches and stores at a time.
const TRANSFERS: usize = 256;

/// The agent's end before the tenant has said where it is.
#[derive(Debug)]
pub struct AgentOffer {
    waiting: Waiting,
    domain: Arc<Domain>,
    arena_bytes: u64,
}

impl AgentOffer {
    /// A queue pair in a protection domain of its own. It is for an arena of so many bytes and at most `entries`
    /// operations in flight.
    pub fn new(function: &Function, arena_bytes: u64, entries: u32) -> Result<Self, VerbsError> {
        let domain = Domain::create(&function.device)?;
        let slots = Slots { inbox: size_of::<Submission>() as u32, outbox: size_of::<Completion>() as u32 };
        let waiting = Waiting::new(function, &domain, entries, slots, TRANSFERS)?;
        Ok(Self { waiting, domain, arena_bytes })
    }

    /// What the tenant must know.
    pub fn end(&self) -> PairEnd {
        self.waiting.end()
    }

    /// Joins it to the tenant's. `life` is the session's socket: it is shut down with this end, so that the tenant learns
    /// of it.
    pub fn connect(self, tenant: &Offer, life: OwnedFd) -> Result<RdmaEnd, VerbsError> {
        Ok(RdmaEnd {
            channel: self.waiting.connect(&tenant.end)?,
            regions: Registrations::new(self.domain),
            arena: tenant.arena,
            arena_bytes: self.arena_bytes,
            transfers: VecDeque::with_capacity(TRANSFERS),
            in_flight: 0,
            life,
            owned: Cell::new(true),
            rejoining: None,
        })
    }

    /// Takes the place of an end that another process has. With it comes what joins it to the tenant's, once that is told.
    ///
    /// # Errors
    /// If the kernel has no descriptor to wake it by.
    pub fn succeed(self) -> Result<(SuccessorEnd, Rejoin), EndError> {
        let end = self.end();
        let (pair, channel) = self.waiting.part();
        let rejoining = Arc::new(Rejoining::new(channel.wake_fd())?);
        let rejoin = Rejoin::new(pair, end, Arc::clone(&rejoining));
        Ok((SuccessorEnd { channel, domain: self.domain, arena_bytes: self.arena_bytes, rejoining }, rejoin))
    }
}

/// An end that waits for what the one before it is.
#[derive(Debug)]
pub struct SuccessorEnd {
    channel: Channel,
    domain: Arc<Domain>,
    arena_bytes: u64,
    rejoining: Arc<Rejoining>,
}

impl SuccessorEnd {
    /// Goes on where the end of the other process stands, which [`AgentEnd::hand_over`] describes.
    ///
    /// # Errors
    /// If that is no such end.
    pub fn inherit(self, from: InheritedEnd) -> Result<RdmaEnd, EndError> {
        let Self { mut channel, domain, arena_bytes, rejoining } = self;
        let InheritedEnd { entries, taken: [taken, _], put: [sent, ..], regions, descriptors } = from;
        let mut descriptors = descriptors.into_iter();
        let (outbox, life) = (descriptors.next(), descriptors.next());
        let (Some(outbox), Some(life)) = (outbox, life) else {
            return Err(EndError::Protocol(Breach::InheritedDescriptor));
        };
        let in_flight = taken.checked_sub(sent).filter(|more| *more <= u64::from(entries));
        let (Some(in_flight), true, true) = (in_flight, entries == channel.entries(), regions.is_empty())
        else {
            return Err(EndError::Protocol(Breach::InheritedRdma));
        };
        let bytes = channel.outbox().bytes();
        let (theirs, mut slots) = (Memory::map(outbox, bytes as u64)?, vec![0; bytes]);
        theirs.read(0, &mut slots)?;
        channel.outbox().write(0, &slots)?;
        channel.inherit(taken, sent);
        rejoining.begin(taken);
        Ok(RdmaEnd {
            channel,
            regions: Registrations::new(domain),
            // Nothing goes there before the tenant has said where it is.
            arena: Registered { address: 0, rkey: 0 },
            arena_bytes,
            transfers: VecDeque::with_capacity(TRANSFERS),
            in_flight: in_flight as u32,
            life,
            owned: Cell::new(false),
            rejoining: Some(rejoining),
        })
    }
}

/// The agent's end.
#[derive(Debug)]
pub struct RdmaEnd {
    channel: Channel,
    /// Where fetches land and stores come from.
    regions: Registrations,
    arena: Registered,
    arena_bytes: u64,
    /// Tags of those under way, in order.
    transfers: VecDeque<Tag>,
    /// Descriptors taken whose completions have not been sent.
    in_flight: u32,
    life: OwnedFd,
    /// Whether the session ends with this end: not while another process has it.
    owned: Cell<bool>,
    /// Where the tenant's queue pair comes from, of an end that was taken over.
    rejoining: Option<Arc<Rejoining>>,
}

impl RdmaEnd {
    /// Goes on with the tenant's queue pair, if that has come.
    fn rejoin(&mut self) -> Result<(), EndError> {
        let Some(arrival) = self.rejoining.as_ref().and_then(|rejoining| rejoining.take()) else {
            return Ok(());
        };
        let Arrival { pair, tenant: Offer { end, arena }, arrived } = arrival;
        self.arena = arena;
        self.channel.resume(pair, end.mailbox, arrived)
    }

    fn transfer(
        &mut self,
        tag: Tag,
        span: Span,
        offset: u64,
        access: Access,
        work: fn(Local, RemoteAddress) -> Work,
    ) -> Result<(), EndError> {
        check_range(offset, span.bytes() as u64, self.arena_bytes)?;
        if self.transfers.len() >= TRANSFERS {
            return Err(EndError::Full);
        }
        let region = self.regions.region(span.memory(), access).map_err(failed)?;
        let local = Local::new(&region, span).map_err(failed)?;
        // The tenant's numbers: nonsense fails at its device.
        let address = self.arena.address.wrapping_add(offset);
        self.channel.transfer(work(local, RemoteAddress { address, rkey: self.arena.rkey }))?;
        self.transfers.push_back(tag);
        Ok(())
    }
}

impl AgentEnd for RdmaEnd {
    fn submission(&mut self) -> Result<Option<Submission>, EndError> {
        let mut bytes = [0; size_of::<Submission>()];
        if !self.channel.take(&mut bytes)? {
            return Ok(None);
        }
        if self.in_flight == self.channel.entries() {
            return Err(EndError::Protocol(Breach::TooManyOperations));
        }
        self.in_flight += 1;
        let read = Submission::read_from_bytes(&bytes);
        read.map(Some).map_err(|_| EndError::Protocol(Breach::Descriptor))
    }

    fn complete(&mut self, completion: &Completion) -> Result<(), EndError> {
        self.in_flight = self.in_flight.saturating_sub(1);
        self.channel.send(completion.as_bytes())
    }

    fn memory(&self) -> Option<&Regions> {
        None
    }

    fn arena_bytes(&self) -> u64 {
        self.arena_bytes
    }

    fn entries(&self) -> u32 {
        self.channel.entries()
    }

    fn hand_over(&self) -> Result<InheritedEnd, EndError> {
        if !self.rests() {
            return Err(EndError::Protocol(Breach::UnderWay));
        }
        let outbox = self.channel.outbox();
        let (copy, outbox_fd) = Memory::granted(outbox.bytes() as u64, "harmonaize-mailbox")?;
        let mut slots = vec![0; outbox.bytes()];
        outbox.read(0, &mut slots)?;
        copy.write(0, &slots)?;
        let life = rustix::io::fcntl_dupfd_cloexec(&self.life, 0)
            .map_err(|source| EndError::System { call: "fcntl(F_DUPFD)", source })?;
        let (taken, sent) = self.channel.counts();
        Ok(InheritedEnd {
            entries: self.entries(),
            taken: [taken, 0],
            put: [sent, 0, 0],
            regions: Vec::new(),
            descriptors: vec![outbox_fd, life],
        })
    }

    fn own(&self) {
        self.owned.set(true);
    }

    fn rests(&self) -> bool {
        self.transfers.is_empty()
    }

    fn is_away(&self) -> bool {
        let has_come = self.rejoining.as_ref().is_none_or(|rejoining| rejoining.has_come());
        !has_come && !self.channel.is_joined()
    }

    fn fetch(&mut self, tag: Tag, offset: u64, into: Span) -> Result<(), EndError> {
        self.transfer(tag, into, offset, Access::LOCAL, Work::read)
    }

    fn store(&mut self, tag: Tag, from: Span, offset: u64) -> Result<(), EndError> {
        self.transfer(tag, from, offset, Access::LOCAL, Work::write)
    }

    fn progress(&mut self, done: &mut dyn FnMut(Tag)) -> Result<usize, EndError> {
        self.rejoin()?;
        let polled = self.channel.poll();
        let finished = self.channel.finished();
        self.transfers.drain(..finished.min(self.transfers.len())).for_each(done);
        Ok(polled? + self.channel.post()?)
    }

    fn flush(&mut self) -> Result<(), EndError> {
        self.channel.post().map(|_| ())
    }

    fn prepare_sleep(&mut self) -> bool {
        self.regions.sweep();
        let joins = self.rejoining.as_ref().is_some_and(|rejoining| rejoining.has_come());
        !joins && self.channel.prepare_sleep()
    }

    fn cancel_sleep(&mut self, _: bool) {
        self.channel.cancel_sleep();
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.rejoining.as_ref().map_or_else(|| self.channel.wake_fd(), |rejoining| rejoining.as_fd())
    }
}

impl Drop for RdmaEnd {
    fn drop(&mut self) {
        if !self.owned.get() {
            return;
        }
        // It may be down already.
        let _ = rustix::net::shutdown(&self.life, rustix::net::Shutdown::Both);
    }
}
