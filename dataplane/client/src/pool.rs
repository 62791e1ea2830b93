//! The memory that an attachment's tensors are taken from: the arena, and what it has grown by.

use crate::arena::Arena;
use crate::shared::{Presence, Shared};
use crate::{AgentLoss, Error, ProtocolError, RequestKind};
use harmonaize_abi::session::{AddedRegion, Answer, RegionRefused, Request};
use harmonaize_shm::{ForkGuard, Memory};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How long the agent may take to add memory or let it go.
const WITHIN: Duration = Duration::from_secs(10);

/// The memory of an attachment and what is free in it. While tensors have it the process stays attached.
#[derive(Debug)]
pub(crate) struct Pool {
    guard: Arc<ForkGuard>,
    /// The arena, then what it has grown by, which stays.
    parts: Mutex<Vec<Part>>,
    /// None where the attachment has one region of fixed size.
    growth: Option<Growth>,
    /// Held while the agent is asked, so that two threads do not both double.
    growing: Mutex<()>,
}

/// Of whom more memory is had, and how much the arena may become by itself.
#[derive(Debug)]
struct Growth {
    shared: Weak<Shared>,
    /// The agent frees the memory at the attachment's end.
    _presence: Arc<Presence>,
    most: u64,
}

#[derive(Debug)]
struct Part {
    memory: Arc<Memory>,
    base: u64,
    free: Arena,
}

/// A piece of the pool.
#[derive(Debug)]
pub(crate) struct Piece {
    /// Which part.
    part: usize,
    pub(crate) memory: Arc<Memory>,
    /// Where that memory begins among the attachment's offsets.
    pub(crate) base: u64,
    /// Where in it the piece begins.
    pub(crate) offset: u64,
}

impl Part {
    fn new(memory: Arc<Memory>, base: u64) -> Self {
        let free = Arena::new(memory.bytes() as u64);
        Self { memory, base, free }
    }

    fn take(&mut self, part: usize, bytes: u64) -> Option<Piece> {
        let offset = self.free.take(bytes)?;
        Some(Piece { part, memory: Arc::clone(&self.memory), base: self.base, offset })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    /// An arena that stays as it is.
    pub(crate) fn fixed(arena: Arc<Memory>, guard: Arc<ForkGuard>) -> Arc<Self> {
        Self::with(arena, guard, None)
    }

    /// An arena that grows when it is full, by itself up to so many bytes in all.
    pub(crate) fn growing(
        arena: Arc<Memory>,
        guard: Arc<ForkGuard>,
        shared: &Arc<Shared>,
        most: u64,
    ) -> Arc<Self> {
        let (of, presence) = (Arc::downgrade(shared), Arc::clone(shared.presence()));
        Self::with(arena, guard, Some(Growth { shared: of, _presence: presence, most }))
    }

    fn with(arena: Arc<Memory>, guard: Arc<ForkGuard>, growth: Option<Growth>) -> Arc<Self> {
        let parts = Mutex::new(vec![Part::new(arena, 0)]);
        Arc::new(Self { guard, parts, growth, growing: Mutex::new(()) })
    }

    /// Fails in a child by `fork`, which would write into its parent's tensors.
    pub(crate) fn owned(&self) -> Result<(), Error> {
        if self.guard.is_inherited() { Err(Error::Forked) } else { Ok(()) }
    }

    /// Whether the agent has mapped it.
    pub(crate) fn is_mapped(&self) -> bool {
        self.growth.is_some()
    }

    fn parts(&self) -> Result<MutexGuard<'_, Vec<Part>>, Error> {
        self.owned()?;
        Ok(lock(&self.parts))
    }

    /// Bytes of the arena, with what it has grown by.
    pub(crate) fn bytes(&self) -> Result<u64, Error> {
        Ok(self.parts()?.iter().map(|part| part.memory.bytes() as u64).sum())
    }

    /// A piece of so many bytes, for which the arena grows if it must and may. It doubles, or grows by the piece where that is
    /// more or the quota leaves less.
    pub(crate) fn take(&self, bytes: u64) -> Result<Piece, Error> {
        if let Some(piece) = self.find(bytes)? {
            return Ok(piece);
        }
        let Some(growth) = &self.growth else { return Err(self.no_room(bytes, None)) };
        let _alone = lock(&self.growing);
        // Another thread may have made room meanwhile.
        if let Some(piece) = self.find(bytes)? {
            return Ok(piece);
        }
        let arena = self.bytes()?;
        let left = growth.most.saturating_sub(arena);
        if bytes > left {
            return Err(self.no_room(bytes, None));
        }
        let mut grown = self.add(bytes.max(arena.min(left)), bytes)?;
        if let Err(RegionRefused::Bytes { left, limit, .. }) = grown {
            // To double is too much; maybe the piece alone is not.
            grown = match bytes <= left {
                true => self.add(bytes, bytes)?,
                false => Err(RegionRefused::Bytes { asked: bytes, left, limit }),
            };
        }
        match grown {
            Ok(Some(piece)) => Ok(piece),
            Ok(None) => Err(self.no_room(bytes, None)),
            Err(refused) => Err(self.no_room(bytes, Some(refused))),
        }
    }

    /// Adds memory of so many bytes at least.
    pub(crate) fn grow(&self, bytes: u64) -> Result<(), Error> {
        self.owned()?;
        let _alone = lock(&self.growing);
        self.add(bytes, 0)?.map(drop).map_err(Error::Region)
    }

    /// Gives a piece of so many bytes back.
    pub(crate) fn give_back(&self, piece: &Piece, bytes: u64) {
        if let Ok(mut parts) = self.parts()
            && let Some(part) = parts.get_mut(piece.part)
        {
            part.free.give_back(piece.offset, bytes);
        }
    }

    fn find(&self, bytes: u64) -> Result<Option<Piece>, Error> {
        Ok(self.parts()?.iter_mut().enumerate().find_map(|(index, part)| part.take(index, bytes)))
    }

    /// Has the agent make memory, and takes the first bytes of it.
    fn add(&self, bytes: u64, taken: u64) -> Result<Result<Option<Piece>, RegionRefused>, Error> {
        let shared = match self.attachment()? {
            Ok(shared) => shared,
            Err(refused) => return Ok(Err(refused)),
        };
        let (answer, memfd) = ask(&shared, None, |id| Request::Grow { id, bytes })?;
        let (place, memfd) = match (answer, memfd) {
            (Answer::Grown { added: Ok(place), .. }, Some(memfd)) => (place, memfd),
            (Answer::Grown { added: Err(refused), .. }, _) => return Ok(Err(refused)),
            _ => return Err(ProtocolError::Unexpected(RequestKind::Memory).into()),
        };
        let mut part = Part::new(Memory::map(memfd, place.bytes)?, place.base);
        let mut parts = self.parts()?;
        let piece = part.take(parts.len(), taken);
        parts.push(part);
        Ok(Ok(piece))
    }

    /// What memory can be added through.
    fn attachment(&self) -> Result<Result<Arc<Shared>, RegionRefused>, Error> {
        self.owned()?;
        let Some(growth) = &self.growth else { return Ok(Err(RegionRefused::Access)) };
        match growth.shared.upgrade() {
            Some(shared) => Ok(Ok(shared)),
            None => Err(Error::AgentLost { reason: AgentLoss::Detached }),
        }
    }

    /// Has the agent map a range of a memfd.
    pub(crate) fn register(
        &self,
        memfd: OwnedFd,
        offset: u64,
        bytes: u64,
    ) -> Result<(Arc<Shared>, AddedRegion), Error> {
        let shared = self.attachment()?.map_err(Error::Region)?;
        match ask(&shared, Some(memfd), |id| Request::Register { id, offset, bytes })?.0 {
            Answer::Registered { added, .. } => Ok((shared, added.map_err(Error::Region)?)),
            _ => Err(ProtocolError::Unexpected(RequestKind::Registration).into()),
        }
    }

    fn no_room(&self, requested: u64, refused: Option<RegionRefused>) -> Error {
        let parts = match self.parts() {
            Ok(parts) => parts,
            Err(error) => return error,
        };
        let arena = parts.iter().map(|part| part.memory.bytes() as u64).sum();
        let rooms = parts.iter().map(|part| part.free.room());
        let (free, largest) =
            rooms.fold((0, 0), |(free, largest), room| (free + room.0, room.1.max(largest)));
        Error::NoRoom { requested, arena, free, largest, refused }
    }
}

/// Asks the agent for memory, or to let some go; its answer, and the descriptor that came along.
pub(crate) fn ask(
    shared: &Shared,
    descriptor: Option<OwnedFd>,
    request: impl FnOnce(u64) -> Request,
) -> Result<(Answer, Option<OwnedFd>), Error> {
    let id = shared.lock()?.request_with(descriptor, request)?;
    let deadline = Instant::now().checked_add(WITHIN);
    if let Some(answer) = shared.wait(deadline, |state| state.answer_with(id))? {
        return Ok(answer);
    }
    shared.lock()?.forget(id);
    Err(ProtocolError::NoAnswer(WITHIN).into())
}
