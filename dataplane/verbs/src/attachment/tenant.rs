//! The tenant's end of an attachment over RDMA.

use super::channel::{Channel, Slots, Waiting};
use crate::{Access, Domain, Function, Region, VerbsError};
use harmonaize_abi::session::{Offer, PairEnd, Registered, Succession};
use harmonaize_abi::{Completion, Submission};
use harmonaize_shm::{Breach, EndError, Memory, TenantEnd};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use zerocopy::{FromBytes, IntoBytes};

/// The tenant's end before it is connected.
#[derive(Debug)]
pub struct TenantOffer {
    waiting: Waiting,
    arena: Arc<Region>,
}

impl TenantOffer {
    /// Fresh tensor memory of so many bytes, registered whole, and a queue pair for at most `entries` operations in flight.
    pub fn new(function: &Function, arena_bytes: u64, entries: u32) -> Result<Self, VerbsError> {
        let domain = Domain::create(&function.device)?;
        let impossible = || VerbsError::OutOfRange {
            what: "the arena's length",
            value: arena_bytes,
            most: function.device.limits().region_bytes,
        };
        let bytes = usize::try_from(arena_bytes).map_err(|_| impossible())?;
        let memory = Memory::private(bytes).map_err(|_| impossible())?;
        let arena = Region::register(&domain, &memory, Access::REMOTE)?;
        let slots = Slots { inbox: size_of::<Completion>() as u32, outbox: size_of::<Submission>() as u32 };
        Ok(Self { waiting: Waiting::new(function, &domain, entries, slots, 0)?, arena })
    }

    /// What the agent must know.
    pub fn offer(&self) -> Offer {
        let arena = Registered { address: self.arena.address(), rkey: self.arena.rkey() };
        Offer { end: self.waiting.end(), arena }
    }

    /// Joins it to the agent's.
    pub fn connect(self, agent: &PairEnd) -> Result<RdmaTenant, VerbsError> {
        Ok(RdmaTenant { channel: self.waiting.connect(agent)?, arena: self.arena })
    }
}

/// The tenant's end.
#[derive(Debug)]
pub struct RdmaTenant {
    // Dropped in this order: the agent's keys end with the queue pair.
    channel: Channel,
    arena: Arc<Region>,
}

impl TenantEnd for RdmaTenant {
    fn memory(&self) -> &Arc<Memory> {
        self.arena.memory()
    }

    fn entries(&self) -> u32 {
        self.channel.entries()
    }

    fn submit(&mut self, submission: &Submission) -> Result<(), EndError> {
        self.channel.send(submission.as_bytes())?;
        self.channel.post().map(|_| ())
    }

    fn completion(&mut self) -> Result<Option<Completion>, EndError> {
        let mut bytes = [0; size_of::<Completion>()];
        if !self.channel.take(&mut bytes)? {
            return Ok(None);
        }
        let read = Completion::read_from_bytes(&bytes);
        read.map(Some).map_err(|_| EndError::Protocol(Breach::Completion))
    }

    fn progress(&mut self) -> Result<usize, EndError> {
        Ok(self.channel.poll()? + self.channel.post()?)
    }

    fn succeed(&mut self, step: &Succession) -> Result<Option<(Offer, u64)>, EndError> {
        match step {
            Succession::Begins => self.channel.hold(),
            Succession::CalledOff => self.channel.call_off(),
            Succession::Connected => {
                self.channel.release();
                self.channel.post()?;
            }
            Succession::Connect { end, taken } => {
                let (end, arrived) = self.channel.renew(end, *taken)?;
                // The arena is registered as before, for all queue pairs of this attachment.
                let arena = Registered { address: self.arena.address(), rkey: self.arena.rkey() };
                return Ok(Some((Offer { end, arena }, arrived)));
            }
        }
        Ok(None)
    }

    fn is_paused(&self) -> bool {
        self.channel.paused()
    }

    fn prepare_sleep(&mut self) -> bool {
        self.channel.prepare_sleep()
    }

    fn cancel_sleep(&mut self) {
        self.channel.cancel_sleep();
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.channel.wake_fd()
    }
}
