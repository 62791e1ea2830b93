//! Attaching to the agent.

use crate::agreement::ChoiceCache;
use crate::communicator::{Communicator, JoinOptions, PendingJoin, RegroupOptions};
use crate::feedback::Feedback;
use crate::group::Group;
use crate::journal::Journal;
use crate::pool::Pool;
use crate::session::Opening;
use crate::shared::Shared;
use crate::tensor::Tensor;
use crate::{Access, AgentAddress, Error, ProtocolError};
use harmonaize_abi::session::{Hello, Regrouping};
use harmonaize_abi::{Dtype, Rank};
use harmonaize_shm::{ForkGuard, MappedTenant, RemoteTenant, TenantEnd};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How to attach.
#[derive(Clone, Debug)]
pub struct AttachOptions {
    /// How the agent reaches tensors.
    pub access: Access,
    /// Bytes for all tensors together; each is rounded up to 64.
    pub arena_bytes: u64,
    /// How many bytes the arena may become by itself when a tensor finds no room. It grows if it is mapped and the
    /// tenant's quota allows. It doubles, or takes as much as the tensor needs where that is more, or where the quota
    /// leaves less. 0: it stays as it is.
    pub max_arena_bytes: u64,
    /// Most operations in flight, a power of two.
    pub entries: u32,
    /// How long waiting spins (yielding) before it sleeps; `Duration::MAX`: it never does.
    pub spin: Duration,
    /// How long each answer during the handshake may take.
    pub timeout: Duration,
    /// How attachments over RDMA find their device.
    #[cfg(feature = "rdma")]
    pub rdma: crate::RdmaOptions,
}

impl Default for AttachOptions {
    /// Mapped, 64 MiB that grow, 64 operations, 50 us, 10 s.
    fn default() -> Self {
        Self {
            access: Access::Mapped,
            arena_bytes: 64 << 20,
            max_arena_bytes: u64::MAX,
            entries: 64,
            spin: Duration::from_micros(50),
            timeout: Duration::from_secs(10),
            #[cfg(feature = "rdma")]
            rdma: crate::RdmaOptions::default(),
        }
    }
}

/// An attachment to the agent. Ends when it, its communicators and its operations are dropped.
///
/// It belongs to the process that attached. A child of that process by `fork` may drop what it has inherited, which does nothing; every
/// other call there fails with [`Error::Forked`], so that it cannot harm the parent's. The child may attach itself.
#[derive(Debug)]
pub struct Client {
    shared: Arc<Shared>,
    pool: Arc<Pool>,
    choices: Mutex<ChoiceCache>,
}

impl Client {
    /// Attaches to the agent: through its socket, given by its path, or at another [`AgentAddress`]. Blocks until the agent has
    /// answered, at most the options' timeout for each answer.
    pub fn attach(at: impl Into<AgentAddress>, options: AttachOptions) -> Result<Self, Error> {
        if options.access == Access::Rdma && !cfg!(feature = "rdma") {
            return Err(Error::NoRdma);
        }
        let journal = Journal::of_process()?;
        let opening = Opening::connect(&at.into(), options.timeout)?;
        let hello =
            Hello { access: options.access, arena_bytes: options.arena_bytes, entries: options.entries };
        let (welcome, descriptors) = opening.hello(&hello)?;
        let (bytes, entries) = (welcome.arena_bytes, welcome.entries);
        let unexpected = |came: Vec<OwnedFd>| ProtocolError::Descriptors {
            came: came.len(),
            needed: options.access.descriptors(),
        };
        let end: Box<dyn TenantEnd> = match options.access {
            Access::Mapped => {
                Box::new(MappedTenant::open(descriptors.try_into().map_err(unexpected)?, bytes, entries)?)
            }
            Access::Remote => {
                let [socket] = descriptors.try_into().map_err(unexpected)?;
                Box::new(RemoteTenant::open(socket, bytes, entries)?)
            }
            #[cfg(feature = "rdma")]
            Access::Rdma => crate::rdma::open(&opening, &welcome, &options.rdma)?,
            #[cfg(not(feature = "rdma"))]
            Access::Rdma => return Err(Error::NoRdma),
        };
        let guard = ForkGuard::new()?;
        let (arena, owner) = (Arc::clone(end.memory()), Arc::clone(&guard));
        let shared =
            Arc::new(Shared::new(end, opening.into_session(), options.spin, guard, &welcome, journal)?);
        #[cfg(feature = "rdma")]
        if options.access == Access::Rdma {
            shared.lock()?.announce_successors();
        }
        let pool = match options.access {
            Access::Mapped => Pool::growing(arena, owner, &shared, options.max_arena_bytes),
            Access::Remote | Access::Rdma => Pool::fixed(arena, owner),
        };
        Ok(Self { shared, pool, choices: Mutex::default() })
    }

    pub(crate) fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// What was chosen for iterations lately.
    pub(crate) fn choices(&self) -> &Mutex<ChoiceCache> {
        &self.choices
    }

    /// A group, to call operations together.
    pub fn group(&self) -> Group {
        Group::new(&self.shared)
    }

    /// Makes the arena larger by at least so many bytes. Tensors that come then find room without waiting for the
    /// agent. What it has grown by stays until the attachment ends.
    ///
    /// # Errors
    /// [`Error::Region`] says what of the tenant's quota is left, or that the attachment is not [mapped](Access::Mapped).
    pub fn grow(&self, bytes: u64) -> Result<(), Error> {
        self.pool.grow(bytes)
    }

    /// Bytes of the arena, with what it has grown by.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn arena_bytes(&self) -> Result<u64, Error> {
        self.pool.bytes()
    }

    /// A tensor of `elements` elements. Its contents are unspecified. Where the arena has no room it [grows](AttachOptions::max_arena_bytes),
    /// which waits for the agent.
    ///
    /// # Errors
    /// [`Error::NoRoom`] where it may not, and why.
    pub fn tensor(&self, dtype: Dtype, elements: u64) -> Result<Tensor, Error> {
        Tensor::new(&self.pool, dtype, elements)
    }

    /// Error feedback for a tensor of `elements` f32, of which nothing is owed yet. Takes twice the tensor's bytes of the arena.
    pub fn feedback(&self, elements: u64) -> Result<Feedback, Error> {
        Feedback::new(&self.pool, elements)
    }

    /// Becomes `rank` of the communicator `name`, of `ranks` ranks. Blocks until all have come, or fails after `timeout`
    /// with the ranks that never came.
    pub fn join(&self, name: &str, rank: Rank, ranks: u32, timeout: Duration) -> Result<Communicator, Error> {
        self.join_with(name, rank, ranks, &JoinOptions { timeout, ..JoinOptions::default() })
    }

    /// As [`Client::join`], with options. They are what may be lost of tensors, so that operations on slow links can end sooner, and how
    /// long operations wait for late ranks.
    ///
    /// # Errors
    /// [`Error::TimeoutTooLong`] where that time-out is longer than the operator allows.
    pub fn join_with(
        &self,
        name: &str,
        rank: Rank,
        ranks: u32,
        options: &JoinOptions,
    ) -> Result<Communicator, Error> {
        PendingJoin::start(&self.shared, &self.pool, name, rank, ranks, options)?.wait()
    }

    /// Becomes a rank of the communicator `name` that runs already, or whose members start anew. Blocks until its members
    /// [regroup](Communicator::regroup), of whom those who read [`Events`](crate::Events) hear that somebody waits.
    ///
    /// # Errors
    /// [`Error::Regroup`] where they have not in time. Where there are no members, whoever has come within the time of the first begins
    /// without any.
    pub fn enter(&self, name: &str, options: &RegroupOptions) -> Result<Communicator, Error> {
        let who = Regrouping::Newcomer { name: name.to_owned() };
        let key = options.key.unwrap_or(u32::MAX);
        PendingJoin::regroup(&self.shared, &self.pool, name, who, (key, 0), options)?.wait()
    }
}

#[cfg(all(test, not(feature = "rdma")))]
mod tests {
    use super::*;

    #[test]
    fn without_the_feature_rdma_is_an_error_of_its_own() {
        let options = AttachOptions { access: Access::Rdma, ..AttachOptions::default() };
        assert!(matches!(Client::attach("/nowhere", options), Err(Error::NoRdma)));
    }
}
