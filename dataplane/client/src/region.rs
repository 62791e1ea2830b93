//! Tensors in memory that the process has already.

use crate::attach::Client;
use crate::pool::{Pool, ask};
use crate::shared::Shared;
use crate::tensor::Tensor;
use crate::{Error, ProtocolError, RegionRefused, RequestKind};
use harmonaize_abi::Dtype;
use harmonaize_abi::session::{Answer, Request};
use harmonaize_shm::{Memory, MemoryError, check_range};
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::{Arc, Weak};

/// A range of a memfd of the process's own that the agent has mapped ([`Client::register`]). Operations read and write its bytes where
/// they are.
///
/// The agent lets go of it when this and all tensors on it are dropped and no operation on them is in flight, and at the latest when the
/// attachment ends. Until then it counts towards the tenant's quota of tensor memory.
#[derive(Debug)]
pub struct Region {
    pool: Arc<Pool>,
    registration: Arc<Registration>,
}

/// A registered range, until its last user drops it.
#[derive(Debug)]
pub(crate) struct Registration {
    pub(crate) memory: Arc<Memory>,
    pub(crate) base: u64,
    shared: Weak<Shared>,
    /// The agent has been told.
    over: bool,
}

impl Drop for Registration {
    fn drop(&mut self) {
        if !self.over
            && let Some(shared) = self.shared.upgrade()
        {
            shared.unregister(self.base);
        }
    }
}

impl Client {
    /// Has the agent map a range of the process's own memfd, in bytes of the file. Tensors on it then need no copy.
    ///
    /// The memfd must have the seal `F_SEAL_SHRINK`, so that it cannot be cut off under the agent, and must not be sealed against
    /// writing; the descriptor is for reading and writing. The range begins and ends at multiples of a page, lies within the file, and has
    /// no bytes that this attachment has registered already. The descriptor may be closed afterwards.
    ///
    /// # Errors
    /// [`Error::Region`] says which of these does not hold, or what of the tenant's quota is left; [`RegionRefused::Access`] where the
    /// attachment is not [mapped](crate::Access::Mapped).
    pub fn register(&self, memfd: impl AsFd, range: Range<u64>) -> Result<Region, Error> {
        let bytes = range.end.checked_sub(range.start).ok_or(Error::Region(RegionRefused::Size))?;
        // Looked at and mapped here first: what is wrong costs no request.
        let (memory, _) = Memory::register(memfd.as_fd(), range.start, bytes).map_err(Error::Region)?;
        let copy = memfd.as_fd().try_clone_to_owned();
        let copy = copy.map_err(|source| Error::System { call: "dup", source })?;
        let (shared, place) = self.pool().register(copy, range.start, bytes)?;
        let (base, shared) = (place.base, Arc::downgrade(&shared));
        let registration = Arc::new(Registration { memory, base, shared, over: false });
        Ok(Region { pool: Arc::clone(self.pool()), registration })
    }
}

impl Region {
    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        self.registration.memory.bytes() as u64
    }

    /// A tensor of `elements` elements on the bytes from `offset` of the region on, with whatever they hold. Kernels are fastest where
    /// that is a multiple of 64. The order of operations on tensors that overlap is the caller's.
    ///
    /// # Errors
    /// [`Error::Memory`] where it does not end within the region; [`Error::Shape`] where the offset is no multiple of an element's bytes.
    pub fn tensor(&self, dtype: Dtype, offset: u64, elements: u64) -> Result<Tensor, Error> {
        let (size, region) = (dtype.size() as u64, self.bytes());
        if !offset.is_multiple_of(size) {
            let text = format!(
                "a tensor of {dtype} at byte {offset} of a region; it begins at a multiple of {size}"
            );
            return Err(Error::Shape(text));
        }
        let beyond = MemoryError::OutOfRange { offset, bytes: u64::MAX, size: region };
        let bytes = elements.checked_mul(size).ok_or(beyond)?;
        check_range(offset, bytes, region)?;
        Ok(Tensor::registered(&self.pool, &self.registration, dtype, offset, elements))
    }

    /// Has the agent let go of the region, and waits until it has.
    ///
    /// # Errors
    /// [`Error::Region`] with [`RegionRefused::InUse`] where tensors on it are left, or operations on them in flight: it is let go once those are.
    pub fn unregister(self) -> Result<(), Error> {
        self.pool.owned()?;
        let Self { registration, .. } = self;
        let in_use = || Error::Region(RegionRefused::InUse);
        let mut registration = Arc::try_unwrap(registration).map_err(|_| in_use())?;
        // With the attachment it is gone already.
        let Some(shared) = registration.shared.upgrade() else { return Ok(()) };
        registration.over = true;
        let base = registration.base;
        match ask(&shared, None, |id| Request::Unregister { id, base })?.0 {
            Answer::Unregistered { refused, .. } => refused.map_or(Ok(()), |why| Err(Error::Region(why))),
            _ => Err(ProtocolError::Unexpected(RequestKind::Unregistration).into()),
        }
    }
}
