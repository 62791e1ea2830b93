//! What an attachment's tensor memory is made of: the arena, and the regions that were added behind it.

use super::handover::RegionImage;
use super::tenant::{Grant, Tenant};
use harmonaize_abi::session::{Access, AddedRegion, RegionRefused};
use harmonaize_shm::{FileId, Lease, Memory};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// A file's bytes from one offset up to another.
type FileRange = (FileId, u64, u64);

/// A region, and whether the engine has it. It keeps the region's part of the tenant's quota where its memory does not
/// give that back.
struct RegionEntry {
    place: AddedRegion,
    /// Of one that the tenant's process made.
    file: Option<FileRange>,
    /// For the process, of one that the agent made.
    descriptor: Option<OwnedFd>,
    stage: Stage,
    _grant: Option<Grant>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Coming,
    There,
    Leaving,
}

/// The first free offset in the image of an attachment over RDMA, which has none; of one that is mapped it is behind the arena.
pub(super) const OVER_RDMA: u64 = 0;
/// The same of one whose tensors are reached through a socket. Agents without it take it for mapped, and refuse it for what it lacks.
pub(super) const THROUGH_SOCKET: u64 = 1;

/// The memory of one attachment.
pub(super) struct AttachedMemory {
    tenant: Arc<Tenant>,
    access: Access,
    /// The first offset that nothing has had yet. Never goes back, so that a stale offset names nothing.
    next: u64,
    regions: Vec<RegionEntry>,
}

fn page() -> u64 {
    rustix::param::page_size() as u64
}

impl AttachedMemory {
    /// An arena alone.
    pub(super) fn new(tenant: Arc<Tenant>, access: Access, arena_bytes: u64) -> Self {
        let next = after(0, arena_bytes).unwrap_or(u64::MAX);
        Self { tenant, access, next, regions: Vec::new() }
    }

    /// What another process of the agent's had: its first free offset, and the regions. With it comes what their memory is lent on, by
    /// offset, where the agent made it.
    pub(super) fn inherit(
        tenant: Arc<Tenant>,
        next: u64,
        regions: Vec<RegionImage>,
    ) -> (Self, Vec<(u64, Lease)>) {
        let mut leases: Vec<(u64, Lease)> = Vec::new();
        let entry = |RegionImage { base, bytes, file }| {
            let mut grant = Some(tenant.inherit_region(bytes));
            if file.is_none() {
                leases.extend(grant.take().map(|grant| (base, Box::new(grant) as Lease)));
            }
            let place = AddedRegion { base, bytes };
            let file = file.map(|(device, inode, from, to)| (FileId { device, inode }, from, to));
            RegionEntry { place, file, descriptor: None, stage: Stage::There, _grant: grant }
        };
        let regions = regions.into_iter().map(entry).collect();
        let access = match next {
            OVER_RDMA => Access::Rdma,
            THROUGH_SOCKET => Access::Remote,
            _ => Access::Mapped,
        };
        (Self { tenant, access, next, regions }, leases)
    }

    /// The first free offset and the regions, for another process. None where a region is coming or leaving. Of an attachment that is not
    /// mapped they are [`OVER_RDMA`] or [`THROUGH_SOCKET`], and no regions.
    pub(super) fn image(&self) -> Option<(u64, Vec<RegionImage>)> {
        let stands = |held: &RegionEntry| held.stage == Stage::There;
        match self.access {
            Access::Mapped if self.regions.iter().all(stands) => {}
            Access::Mapped => return None,
            Access::Remote => return Some((THROUGH_SOCKET, Vec::new())),
            Access::Rdma => return Some((OVER_RDMA, Vec::new())),
        }
        let image = |held: &RegionEntry| RegionImage {
            base: held.place.base,
            bytes: held.place.bytes,
            file: held.file.map(|(id, from, to)| (id.device, id.inode, from, to)),
        };
        Some((self.next, self.regions.iter().map(image).collect()))
    }

    /// How tensors are reached.
    pub(super) fn access(&self) -> Access {
        self.access
    }

    /// A new region of at least so many bytes, for the engine.
    pub(super) fn grow(&mut self, bytes: u64) -> Result<(AddedRegion, Arc<Memory>), RegionRefused> {
        let bytes = bytes.checked_next_multiple_of(page()).ok_or(RegionRefused::Size)?;
        let grant = self.grant(bytes)?;
        let made = Memory::lent(bytes, "harmonaize-arena", Box::new(grant)).map_err(|error| {
            tracing::error!("cannot make a region of {bytes} bytes: {error}");
            RegionRefused::Failed
        });
        let (memory, descriptor) = made?;
        let place = self.place(bytes)?;
        let (file, descriptor, stage) = (None, Some(descriptor), Stage::Coming);
        self.regions.push(RegionEntry { place, file, descriptor, stage, _grant: None });
        Ok((place, memory))
    }

    /// A range of the process's own memfd, for the engine.
    pub(super) fn register(
        &mut self,
        memfd: Option<OwnedFd>,
        offset: u64,
        bytes: u64,
    ) -> Result<(AddedRegion, Arc<Memory>), RegionRefused> {
        let grant = self.grant(bytes)?;
        let memfd = memfd.ok_or(RegionRefused::NoDescriptor)?;
        let (memory, id) = Memory::register(memfd.as_fd(), offset, bytes)?;
        let range = (id, offset, offset.saturating_add(bytes));
        let overlaps = |entry: &RegionEntry| entry.file.is_some_and(|file| overlap(file, range));
        if self.regions.iter().any(overlaps) {
            return Err(RegionRefused::Overlap);
        }
        let place = self.place(bytes)?;
        let (file, stage) = (Some(range), Stage::Coming);
        self.regions.push(RegionEntry { place, file, descriptor: None, stage, _grant: Some(grant) });
        Ok((place, memory))
    }

    /// Begins to let a region go. One that is not there yet, or going already, is none.
    pub(super) fn unregister(&mut self, base: u64) -> Result<(), RegionRefused> {
        let mut held = self.regions.iter_mut();
        let held = held.find(|held| held.place.base == base && held.stage == Stage::There);
        held.ok_or(RegionRefused::Unknown)?.stage = Stage::Leaving;
        Ok(())
    }

    /// Notes whether the engine has a region. Returns where it lies, and the descriptor for the process if the agent
    /// made it.
    pub(super) fn added(
        &mut self,
        base: u64,
        done: bool,
    ) -> Result<(AddedRegion, Option<OwnedFd>), RegionRefused> {
        if !done {
            self.regions.retain(|held| held.place.base != base);
        }
        let held = self.regions.iter_mut().find(|held| held.place.base == base);
        let held = held.ok_or(RegionRefused::Failed)?;
        held.stage = Stage::There;
        Ok((held.place, held.descriptor.take()))
    }

    /// The engine has let go of a region, or not.
    pub(super) fn removed(&mut self, base: u64, done: bool) -> Result<(), RegionRefused> {
        if done {
            self.regions.retain(|held| held.place.base != base);
            return Ok(());
        }
        let held = self.regions.iter_mut().find(|held| held.place.base == base);
        held.into_iter().for_each(|held| held.stage = Stage::There);
        Err(RegionRefused::InUse)
    }

    fn grant(&self, bytes: u64) -> Result<Grant, RegionRefused> {
        if self.access != Access::Mapped {
            return Err(RegionRefused::Access);
        }
        if bytes == 0 {
            return Err(RegionRefused::Size);
        }
        self.tenant.region(bytes)
    }

    /// Offsets for so many bytes, with a page after them that nothing has. What runs over a region's end is in no
    /// region.
    fn place(&mut self, bytes: u64) -> Result<AddedRegion, RegionRefused> {
        let base = self.next;
        self.next = after(base, bytes).ok_or(RegionRefused::Size)?;
        Ok(AddedRegion { base, bytes })
    }
}

fn after(base: u64, bytes: u64) -> Option<u64> {
    base.checked_add(bytes)?.checked_next_multiple_of(page())?.checked_add(page())
}

fn overlap((id, begin, end): FileRange, (other, from, to): FileRange) -> bool {
    id == other && begin < to && from < end
}
