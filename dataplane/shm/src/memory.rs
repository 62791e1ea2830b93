//! A mapping that stays alive while anyone uses it, reached only through views.

use harmonaize_abi::{View, ViewMut};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What keeps a shared mapping from faulting: nobody can change the memfd's size, or these seals.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

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
    /// A descriptor from elsewhere that is not the sealed memfd it should be.
    #[error("not a memfd of {bytes} bytes sealed against growing and shrinking: {found}")]
    NotSealed {
        /// Size expected.
        bytes: u64,
        /// What was found.
        found: String,
    },
    /// The kernel refused.
    #[error("{call}: {source}")]
    System {
        /// Which call.
        call: &'static str,
        /// What it said.
        source: rustix::io::Errno,
    },
}

/// Whether `bytes` bytes from `offset` lie in `size` bytes.
pub fn check_range(offset: u64, bytes: u64, size: u64) -> Result<(), MemoryError> {
    match offset.checked_add(bytes) {
        Some(end) if end <= size => Ok(()),
        _ => Err(MemoryError::OutOfRange { offset, bytes, size }),
    }
}

/// A readable and writable mapping, private to this process or shared through a memfd. Unmapped when dropped; its bytes
/// may change at any time, so they are reached through views alone.
#[derive(Debug)]
pub struct Memory {
    base: *mut u8,
    bytes: usize,
    fd: Option<OwnedFd>,
    pins: AtomicUsize,
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
        Ok(Arc::new(Self { base: base.cast(), bytes, fd: None, pins: AtomicUsize::new(0) }))
    }

    /// Zeroed memory behind a new memfd, sealed against growing, shrinking and further seals, so that whoever maps it
    /// never faults. `name` shows in `/proc`.
    pub fn shared(bytes: u64, name: &str) -> Result<Arc<Self>, MemoryError> {
        let system = |call| move |source| MemoryError::System { call, source };
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(system("memfd_create"))?;
        if bytes == 0 || isize::try_from(bytes).is_err() {
            return Err(MemoryError::BadSize(bytes));
        }
        rustix::fs::ftruncate(&fd, bytes).map_err(system("ftruncate"))?;
        rustix::fs::fcntl_add_seals(&fd, SEALS).map_err(system("fcntl(F_ADD_SEALS)"))?;
        Self::map(fd, bytes)
    }

    /// Maps a memfd received from elsewhere, after a look at its size and seals.
    pub fn map(fd: OwnedFd, bytes: u64) -> Result<Arc<Self>, MemoryError> {
        let size = isize::try_from(bytes).map_err(|_| MemoryError::BadSize(bytes))?.unsigned_abs();
        if size == 0 {
            return Err(MemoryError::BadSize(bytes));
        }
        let refused = |found: String| MemoryError::NotSealed { bytes, found };
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(|error| refused(error.to_string()))?;
        if !seals.contains(SEALS) {
            return Err(refused(format!("seals {:#x}", seals.bits())));
        }
        let stat = rustix::fs::fstat(&fd).map_err(|source| MemoryError::System { call: "fstat", source })?;
        if u64::try_from(stat.st_size) != Ok(bytes) {
            return Err(refused(format!("{} bytes", stat.st_size)));
        }
        let (null, protection) = (std::ptr::null_mut(), ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a fresh mapping at an address that the kernel picks touches no existing memory; the seals keep the file
        // as long as the mapping.
        let base = unsafe { rustix::mm::mmap(null, size, protection, MapFlags::SHARED, &fd, 0) };
        let base = base.map_err(|source| MemoryError::System { call: "mmap", source })?;
        Ok(Arc::new(Self { base: base.cast(), bytes: size, fd: Some(fd), pins: AtomicUsize::new(0) }))
    }

    /// Copies bytes out. Costs one pass; sees torn values if someone writes meanwhile.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), MemoryError> {
        let view = self.view(offset, into.len() as u64)?;
        // SAFETY: the view was checked to hold as many bytes, and a mapping never overlaps memory behind a reference.
        unsafe { std::ptr::copy_nonoverlapping(view.pointer(), into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Copies bytes in. Costs one pass.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), MemoryError> {
        let view = self.view_mut(offset, from.len() as u64)?;
        // SAFETY: as in `read`.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), view.pointer(), from.len()) };
        Ok(())
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Address of the first byte in this process, for devices that are told addresses.
    pub fn address(&self) -> u64 {
        self.base.expose_provenance() as u64
    }

    /// First byte, page-aligned.
    pub(crate) fn base(&self) -> *mut u8 {
        self.base
    }

    /// The memfd behind a shared mapping.
    pub fn fd(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    fn check(&self, offset: u64, bytes: u64) -> Result<(usize, usize), MemoryError> {
        check_range(offset, bytes, self.bytes as u64)?;
        Ok((offset as usize, bytes as usize))
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

/// A hold on a mapping for a device's sake: it keeps the mapping, but is no [use](Self::used) of it. So that who keeps
/// mappings registered for the next use can tell when there will be none.
#[derive(Debug)]
pub struct Pin(Arc<Memory>);

impl Pin {
    /// Holds a mapping.
    pub fn new(memory: &Arc<Memory>) -> Self {
        memory.pins.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(memory))
    }

    /// The mapping.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.0
    }

    /// Whether anyone holds the mapping but by pins. As of some moment during the call.
    pub fn used(&self) -> bool {
        Arc::strong_count(&self.0) > self.0.pins.load(Ordering::Relaxed)
    }
}

impl Clone for Pin {
    fn clone(&self) -> Self {
        Self::new(&self.0)
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.0.pins.fetch_sub(1, Ordering::Relaxed);
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

    /// The mapping that it lies in.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Where in the mapping it begins.
    pub fn offset(&self) -> usize {
        self.offset
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
        check_range(offset, bytes, self.bytes as u64)?;
        Ok(Self {
            memory: Arc::clone(&self.memory),
            offset: self.offset + offset as usize,
            bytes: bytes as usize,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_of_a_shared_mapping_see_the_same_bytes() {
        let ours = Memory::shared(5000, "test").unwrap();
        let fd = ours.fd().unwrap().try_clone_to_owned().unwrap();
        let theirs = Memory::map(fd, 5000).unwrap();
        ours.write(4990, &[7; 10]).unwrap();
        let mut seen = [0; 10];
        theirs.read(4990, &mut seen).unwrap();
        assert_eq!(seen, [7; 10]);
        assert!(ours.write(4991, &[7; 10]).is_err());
        assert!(ours.read(u64::MAX, &mut seen).is_err());
    }

    #[test]
    fn pins_keep_a_mapping_without_using_it() {
        let memory = Memory::private(4096).unwrap();
        let pin = Pin::new(&memory);
        let another = pin.clone();
        let span = Span::new(&memory, 0, 1).unwrap();
        assert!(pin.used());
        drop(memory);
        assert!(pin.used());
        drop(span);
        assert!(!pin.used() && !another.used());
        drop(pin);
        assert!(!another.used());
        another.memory().write(0, &[1]).unwrap();
    }

    #[test]
    fn only_a_sealed_memfd_of_the_right_size_is_mapped() {
        let fd = |bytes: u64, seals: SealFlags| {
            let fd = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
            rustix::fs::ftruncate(&fd, bytes).unwrap();
            rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
            fd
        };
        Memory::map(fd(4096, SEALS), 4096).unwrap();
        for (bytes, seals) in [
            (4096, SealFlags::GROW | SealFlags::SEAL),
            (4095, SEALS),
            (8192, SEALS),
            (4096, SealFlags::empty()),
        ] {
            let error = Memory::map(fd(bytes, seals), 4096).unwrap_err();
            assert!(matches!(error, MemoryError::NotSealed { bytes: 4096, .. }), "{error}");
        }
        let file =
            rustix::fs::open("/dev/null", rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty()).unwrap();
        assert!(matches!(Memory::map(file, 4096), Err(MemoryError::NotSealed { .. })));
        assert!(matches!(Memory::shared(0, "test"), Err(MemoryError::BadSize(0))));
        assert!(matches!(Memory::shared(u64::MAX, "test"), Err(MemoryError::BadSize(u64::MAX))));
    }
}
