//! The aggregator: many communicators, one pool. Packets and time in; packets out, and counts of what was not believed.

use crate::communicator::{Communicator, ParentSession};
use crate::packet::{Header, Kind, MAX_WORKERS, PacketError, Sealed};
use crate::{Key, PayloadFormat, Pool, PoolError, Share};
use harmonaize_abi::GrantId;
use std::collections::BTreeMap;
use std::time::Duration;

/// Whom a packet is for. The edge knows the addresses: control's, or those from which packets came that were believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Recipient {
    /// A worker of a communicator.
    Worker {
        /// The communicator.
        communicator: GrantId,
        /// Which of its workers.
        worker: u16,
    },
    /// The aggregator above this one.
    Parent {
        /// For which communicator.
        communicator: GrantId,
    },
}

/// Takes packets that are to be sent.
pub trait Outbox {
    /// Takes one; it is the caller's again on return.
    fn send(&mut self, to: Recipient, packet: &[u8]);

    /// What was received is believed: a worker's packet, by its tag. Whether it was sent after all that came before, its session and then
    /// its sequence say. What is sent for it comes after this.
    fn authenticated(&mut self, _from: &Header) {}
}

impl<F: FnMut(Recipient, &[u8])> Outbox for F {
    fn send(&mut self, to: Recipient, packet: &[u8]) {
        self(to, packet);
    }
}

/// The aggregator above, of which this one is a worker.
#[derive(Clone, Debug)]
pub struct Parent {
    /// Which of its workers this is.
    pub worker: u16,
    /// The key of that worker.
    pub key: Key,
    /// For how long it may leave packets unanswered, before the session is lost.
    pub timeout: Duration,
    /// How soon a sum may be sent up again.
    pub retry_after: Duration,
}

/// A communicator as control grants it.
#[derive(Clone, Debug)]
pub struct Grant {
    /// Its number, drawn at random.
    pub communicator: GrantId,
    /// Of which the workers' keys are derived ([`Key::derive`]).
    pub secret: [u8; 32],
    /// Its workers here, 1 to [`MAX_WORKERS`].
    pub workers: u16,
    /// What its payloads are.
    pub format: PayloadFormat,
    /// Elements of a chunk; the last one of a segment may have fewer.
    pub elements: u32,
    /// Whether parts are added in the order of the workers, so that sums of floats are the same each time. Takes a unit for each
    /// worker and chunk, not one a chunk. (Integers and shared codes are the same in any order.)
    pub ordered: bool,
    /// What it may use of the pool.
    pub share: Share,
    /// The aggregator above, if the sum goes on there.
    pub parent: Option<Parent>,
}

/// Why a grant is refused. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrantError {
    /// No workers, or more than [`MAX_WORKERS`].
    #[error("{0} workers, where 1 to {MAX_WORKERS} can be")]
    Workers(u16),
    /// The form has no sums, or none that add again under a parent, or not for so many workers.
    #[error("there are no such sums of {0:?}")]
    Format(PayloadFormat),
    /// A chunk is empty, not whole blocks, or does not fit a unit.
    #[error("a chunk of {elements} elements takes {bytes:?} bytes, and a unit holds {unit}")]
    Chunk {
        /// Elements of a chunk.
        elements: u32,
        /// Bytes, if there is such a chunk.
        bytes: Option<usize>,
        /// Bytes of a unit.
        unit: usize,
    },
    /// The pool refuses.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// What was done, and what was dropped and why, for one communicator. All are packets, but for `sums`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Believed.
    pub received: u64,
    /// Sent.
    pub sent: u64,
    /// Chunks summed.
    pub sums: u64,
    /// Parts that were in already.
    pub duplicates: u64,
    /// Of earlier sessions, or of chunks that all workers have.
    pub stale: u64,
    /// Of sessions or incarnations that are not here: answered with [`Kind::Lost`].
    pub lost: u64,
    /// Parts for which there was no slot.
    pub no_slot: u64,
    /// Payloads of a wrong length.
    pub size: u64,
    /// Acknowledgements of what is not there.
    pub ahead: u64,
    /// Workers that are not there.
    pub worker: u64,
    /// Wrong tags.
    pub tag: u64,
    /// Kinds that nobody sends here.
    pub kind: u64,
    /// Of those sent, to the aggregator above.
    pub up: u64,
    /// Of those believed, of the session's aggregator above.
    pub down: u64,
}

/// Packets of no communicator, dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unrecognized {
    /// Of a wrong length.
    pub length: u64,
    /// Of another protocol.
    pub magic: u64,
    /// Of another version.
    pub version: u64,
    /// Of an unknown kind.
    pub kind: u64,
    /// For a communicator that is not here.
    pub communicator: u64,
}

/// An aggregator.
#[derive(Debug)]
pub struct Aggregator {
    incarnation: u64,
    pool: Pool,
    communicators: BTreeMap<GrantId, Communicator>,
    unrecognized: Unrecognized,
}

impl Aggregator {
    /// A new one, of an incarnation that was drawn at random, not 0.
    pub fn new(incarnation: u64, pool: Pool) -> Self {
        Self { incarnation, pool, communicators: BTreeMap::new(), unrecognized: Unrecognized::default() }
    }

    /// Admits a communicator. All that it will ever need is allocated here.
    ///
    /// # Errors
    /// See [`GrantError`].
    pub fn grant(&mut self, mut grant: Grant) -> Result<(), GrantError> {
        if !(1..=MAX_WORKERS).contains(&grant.workers) {
            return Err(GrantError::Workers(grant.workers));
        }
        // A sum of codes is decoded as one of all workers'.
        let enough = !matches!(grant.format, PayloadFormat::Shared { ranks, .. } if ranks < grant.workers);
        if !grant.format.is_supported() || !enough || (grant.parent.is_some() && !grant.format.adds_sums()) {
            return Err(GrantError::Format(grant.format));
        }
        grant.ordered &= grant.format.adds_sums();
        let (elements, unit) = (grant.elements, self.pool.unit_bytes());
        let bytes = usize::try_from(elements).ok().filter(|elements| grant.format.are_whole(*elements));
        let bytes = bytes
            .and_then(|elements| grant.format.part_bytes(elements).max(grant.format.sum_bytes(elements)));
        if elements == 0 || bytes.is_none_or(|bytes| bytes > unit) {
            return Err(GrantError::Chunk { elements, bytes, unit });
        }
        let grain = if grant.ordered { u32::from(grant.workers) } else { 1 };
        self.pool.admit(grant.communicator, grant.share, grain)?;
        self.communicators.insert(grant.communicator, Communicator::new(grant, grain));
        self.release_surplus();
        Ok(())
    }

    /// Ends a communicator; its memory is free again.
    pub fn revoke(&mut self, communicator: GrantId) {
        if let Some(mut ended) = self.communicators.remove(&communicator) {
            ended.clear(&mut self.pool);
            self.pool.dismiss(communicator);
        }
    }

    /// Takes any bytes that came from the network. What is to be sent goes to `out` before this returns.
    pub fn receive(&mut self, now: Duration, bytes: &[u8], out: &mut impl Outbox) {
        let sealed = match Sealed::read(bytes) {
            Ok(sealed) => sealed,
            Err(error) => {
                let strangers = &mut self.unrecognized;
                *match error {
                    PacketError::Length | PacketError::Tag => &mut strangers.length,
                    PacketError::Magic => &mut strangers.magic,
                    PacketError::Version(_) => &mut strangers.version,
                    PacketError::Kind(_) => &mut strangers.kind,
                } += 1;
                return;
            }
        };
        let Some(communicator) = self.communicators.get_mut(&sealed.communicator()) else {
            self.unrecognized.communicator += 1;
            return;
        };
        let below = sealed.kind().of_workers();
        let key = if below {
            communicator.key(sealed.worker())
        } else {
            communicator.up().filter(|up| up.is(sealed.worker())).map(ParentSession::key)
        };
        let Some(key) = key else {
            let nobody = !below && communicator.up().is_none();
            let counters = &mut communicator.counters;
            *(if nobody { &mut counters.kind } else { &mut counters.worker }) += 1;
            return;
        };
        let Ok((header, payload)) = sealed.open(key) else {
            communicator.counters.tag += 1;
            return;
        };
        communicator.counters.received += 1;
        if below {
            out.authenticated(&header);
        }
        let pool = &mut self.pool;
        match header.kind {
            Kind::Begin => communicator.begin(now, self.incarnation, &header, pool, out),
            Kind::Contribution | Kind::Acknowledge => {
                communicator.worker(now, self.incarnation, &header, payload, pool, out);
            }
            Kind::Granted | Kind::Result | Kind::Waiting | Kind::Lost => {
                communicator.handle_parent(self.incarnation, &header, payload, pool, out);
            }
        }
        self.release_surplus();
    }

    /// Whoever has nothing above a new quota says so at once, also if it is still.
    fn release_surplus(&mut self) {
        if self.pool.take_shares_changed() {
            self.communicators.values().for_each(|communicator| communicator.release_surplus(&mut self.pool));
        }
    }

    /// Lets go what communicators borrowed of which nothing was heard for `idle`. To be called now and then.
    pub fn handle_timeout(&mut self, now: Duration, idle: Duration) {
        for communicator in self.communicators.values_mut() {
            communicator.release_if_idle(now, idle, &mut self.pool);
        }
        self.release_surplus();
    }

    /// What happened to a communicator's packets.
    pub fn counters(&self, communicator: GrantId) -> Option<Counters> {
        self.communicators.get(&communicator).map(|communicator| communicator.counters)
    }

    /// What happened to packets of no communicator.
    pub fn unrecognized(&self) -> Unrecognized {
        self.unrecognized
    }

    /// The memory, and who has how much of it.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }
}
