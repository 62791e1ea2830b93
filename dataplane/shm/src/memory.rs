//! A mapping that stays alive while anyone uses it, reached only through views.

use harmonaize_abi::{View, ViewMut};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// Why memory could not be had or reached.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The range asked for does not lie in the mapping.
    #[error("bytes {offset}..{offset}+{bytes} do not lie in a mapping of {size} bytes")]
    OutOfRange {
        /// Start asked for.
        offset: u64,
        /// Length asked for.
        bytes: u64,
        /// Size of the mapping.
        size: u64,
    },
    /// A size of zero, or one that no mapping can have.
    #[error("a mapping of {0} bytes cannot be made")]
    BadSize(u64),
    /// The kernel refused.
    #[error("{call}: {source}")]
    System {
        /// Which call.
        call: &'static str,
        /// What it said.
        source: rustix::io::Errno,
    },
}

/// A readable and writable mapping, private to this process or shared through a memfd. Unmapped when dropped; its bytes
/// may change at any time, so they are reached through views alone.
#[derive(Debug)]
pub struct Memory {
    base: *mut u8,
    bytes: usize,
    fd: Option<OwnedFd>,
}

// SAFETY: the mapping belongs to the process, not to a thread, and is reached only through raw-pointer views, which
// promise nothing about who else reads or writes at the same time.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Zeroed memory of this process alone.
    pub fn private(bytes: usize) -> Result<Arc<Self>, MemoryError> {
        if bytes == 0 || isize::try_from(bytes).is_err() {
            return Err(MemoryError::BadSize(bytes as u64));
        }
        use rustix::mm::{MapFlags, ProtFlags};
        // SAFETY: a fresh anonymous mapping at an address that the kernel picks touches no existing memory.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        };
        let base = base.map_err(|source| MemoryError::System { call: "mmap", source })?;
        Ok(Arc::new(Self { base: base.cast(), bytes, fd: None }))
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The memfd behind a shared mapping.
    pub fn fd(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    fn check(&self, offset: u64, bytes: u64) -> Result<(usize, usize), MemoryError> {
        let size = self.bytes as u64;
        match offset.checked_add(bytes) {
            Some(end) if end <= size => Ok((offset as usize, bytes as usize)),
            _ => Err(MemoryError::OutOfRange { offset, bytes, size }),
        }
    }

    /// A range to read.
    pub fn view(&self, offset: u64, bytes: u64) -> Result<View<'_>, MemoryError> {
        let (offset, bytes) = self.check(offset, bytes)?;
        // SAFETY: the range lies in the mapping, which lives as long as `self` is borrowed and is never referenced.
        Ok(unsafe { View::new(self.base.wrapping_add(offset), bytes) })
    }

    /// A range to write. Aliasing is allowed; see [`ViewMut`].
    pub fn view_mut(&self, offset: u64, bytes: u64) -> Result<ViewMut<'_>, MemoryError> {
        let (offset, bytes) = self.check(offset, bytes)?;
        // SAFETY: as in `view`; the mapping is writable.
        Ok(unsafe { ViewMut::new(self.base.wrapping_add(offset), bytes) })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by this value, and every view of it has ended with the last borrow.
        if let Err(error) = unsafe { rustix::mm::munmap(self.base.cast(), self.bytes) } {
            debug_assert!(false, "munmap: {error}");
        }
    }
}

/// A range of a mapping that keeps the mapping alive: what a transport holds until it has sent it.
#[derive(Clone, Debug)]
pub struct Span {
    memory: Arc<Memory>,
    offset: usize,
    bytes: usize,
}

impl Span {
    /// `bytes` bytes of `memory` from `offset`.
    pub fn new(memory: &Arc<Memory>, offset: u64, bytes: u64) -> Result<Self, MemoryError> {
        let (offset, bytes) = memory.check(offset, bytes)?;
        Ok(Self { memory: Arc::clone(memory), offset, bytes })
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The bytes, to read.
    pub fn view(&self) -> View<'_> {
        // SAFETY: checked in `new`; the mapping lives as long as `self`.
        unsafe { View::new(self.memory.base.wrapping_add(self.offset), self.bytes) }
    }

    /// The bytes, to write.
    pub fn view_mut(&self) -> ViewMut<'_> {
        // SAFETY: checked in `new`; the mapping lives as long as `self`.
        unsafe { ViewMut::new(self.memory.base.wrapping_add(self.offset), self.bytes) }
    }

    /// `bytes` bytes from `offset` of this span.
    pub fn range(&self, offset: u64, bytes: u64) -> Result<Self, MemoryError> {
        let size = self.bytes as u64;
        match offset.checked_add(bytes) {
            Some(end) if end <= size => Ok(Self {
                memory: Arc::clone(&self.memory),
                offset: self.offset + offset as usize,
                bytes: bytes as usize,
            }),
            _ => Err(MemoryError::OutOfRange { offset, bytes, size }),
        }
    }
}
