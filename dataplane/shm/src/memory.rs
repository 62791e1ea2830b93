//! A mapping that stays alive while anyone uses it, reached only through views.

use harmonaize_abi::session::RegionRefused;
use harmonaize_abi::{View, ViewMut};
use rustix::fs::{MemfdFlags, OFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::any::Any;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// What keeps a shared mapping from faulting: nobody can change the memfd's size, or these seals.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Of `statfs`, the kernel's own file system of memfds with usual pages, and that of huge ones (linux/magic.h).
const TMPFS: u64 = 0x0102_1994;
const HUGETLBFS: u64 = 0x9584_58f6;

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
    /// Another region has offsets of the one that was to be added.
    #[error("a region at {0} would overlap another, or end after 2^64")]
    Taken(u64),
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

/// Which file a registered mapping is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    /// The device of its file system.
    pub device: u64,
    /// Its number there.
    pub inode: u64,
}

/// A new memfd of so many zeroed bytes, with [`SEALS`].
fn sealed(bytes: u64, name: &str) -> Result<OwnedFd, MemoryError> {
    let system = |call| move |source| MemoryError::System { call, source };
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .map_err(system("memfd_create"))?;
    if bytes == 0 || isize::try_from(bytes).is_err() {
        return Err(MemoryError::BadSize(bytes));
    }
    rustix::fs::ftruncate(&fd, bytes).map_err(system("ftruncate"))?;
    rustix::fs::fcntl_add_seals(&fd, SEALS).map_err(system("fcntl(F_ADD_SEALS)"))?;
    Ok(fd)
}

/// Another descriptor of the same file.
fn copied(fd: BorrowedFd<'_>) -> Result<OwnedFd, MemoryError> {
    rustix::io::fcntl_dupfd_cloexec(fd, 0)
        .map_err(|source| MemoryError::System { call: "fcntl(F_DUPFD)", source })
}

/// Maps a range of a file that never ends before the range. The caller has checked the file's seals, which keep it so.
fn map_shared(fd: BorrowedFd<'_>, offset: u64, bytes: usize) -> Result<*mut u8, MemoryError> {
    let (null, protection) = (std::ptr::null_mut(), ProtFlags::READ | ProtFlags::WRITE);
    // SAFETY: a fresh mapping at an address that the kernel picks touches no existing memory; the seals keep the file as
    // long as the mapping.
    let base = unsafe { rustix::mm::mmap(null, bytes, protection, MapFlags::SHARED, fd, offset) };
    base.map(<*mut _>::cast).map_err(|source| MemoryError::System { call: "mmap", source })
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
pub struct Memory {
    base: *mut u8,
    bytes: usize,
    fd: Option<OwnedFd>,
    /// Where in its file it begins.
    offset: u64,
    pins: AtomicUsize,
    lease: Option<Lease>,
    /// Whether another process has its pages still: this one's end frees none.
    inherited: AtomicBool,
}

/// What memory is lent on, as a part of a quota: dropped once the memory's pages are free.
pub type Lease = Box<dyn Any + Send + Sync>;

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("Memory");
        shown.field("base", &self.base).field("bytes", &self.bytes).field("fd", &self.fd);
        shown.field("lent", &self.lease.is_some()).finish_non_exhaustive()
    }
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
        Ok(Arc::new(Self::of(base.cast(), bytes, None)))
    }

    /// Zeroed memory behind a new memfd, sealed against growing, shrinking and further seals, so that whoever maps it
    /// never faults. `name` shows in `/proc`.
    pub fn shared(bytes: u64, name: &str) -> Result<Arc<Self>, MemoryError> {
        Self::map(sealed(bytes, name)?, bytes)
    }

    /// The same, with the memfd for whoever else maps it.
    pub fn granted(bytes: u64, name: &str) -> Result<(Arc<Self>, OwnedFd), MemoryError> {
        let (memory, fd) = Self::made(bytes, name)?;
        Ok((Arc::new(memory), fd))
    }

    /// The same for as long as this mapping is there. At its end
    /// all pages are freed, whoever has the memfd still, and the lease ends after that.
    pub fn lent(bytes: u64, name: &str, lease: Lease) -> Result<(Arc<Self>, OwnedFd), MemoryError> {
        let (mut memory, fd) = Self::made(bytes, name)?;
        memory.lease = Some(lease);
        Ok((Arc::new(memory), fd))
    }

    fn made(bytes: u64, name: &str) -> Result<(Self, OwnedFd), MemoryError> {
        let fd = sealed(bytes, name)?;
        let size = usize::try_from(bytes).map_err(|_| MemoryError::BadSize(bytes))?;
        let own = copied(fd.as_fd())?;
        let base = map_shared(fd.as_fd(), 0, size)?;
        Ok((Self::of(base, size, Some(own)), fd))
    }

    fn of(base: *mut u8, bytes: usize, fd: Option<OwnedFd>) -> Self {
        let (pins, inherited) = (AtomicUsize::new(0), AtomicBool::new(false));
        Self { base, bytes, fd, offset: 0, pins, lease: None, inherited }
    }

    /// Maps what another process of this agent's had mapped. It is `bytes` bytes of a memfd from `offset`, lent on
    /// `lease` if that process lent it. Its end frees no page before [`Memory::own`].
    ///
    /// # Errors
    /// If the file can shrink, or does not have so many bytes.
    pub fn inherit(
        fd: OwnedFd,
        (offset, bytes): (u64, u64),
        lease: Option<Lease>,
    ) -> Result<Arc<Self>, MemoryError> {
        let size = isize::try_from(bytes).map_err(|_| MemoryError::BadSize(bytes))?.unsigned_abs();
        let refused = |found: String| MemoryError::NotSealed { bytes, found };
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(|error| refused(error.to_string()))?;
        let stat = rustix::fs::fstat(&fd).map_err(|source| MemoryError::System { call: "fstat", source })?;
        let within = offset.checked_add(bytes).is_some_and(|end| end <= stat.st_size.unsigned_abs());
        if size == 0 || !within || !seals.contains(SealFlags::SHRINK) {
            return Err(refused(format!("{} bytes, seals {:#x}", stat.st_size, seals.bits())));
        }
        let mut memory = Self::of(map_shared(fd.as_fd(), offset, size)?, size, Some(fd));
        (memory.offset, memory.lease, memory.inherited) = (offset, lease, AtomicBool::new(true));
        Ok(Arc::new(memory))
    }

    /// Notes that this process is about to end. From now on the memory's end frees no page that another process may
    /// still read.
    pub fn leave(&self) {
        self.inherited.store(true, Ordering::Relaxed);
    }

    /// The process that had this memory before is gone.
    pub fn own(&self) {
        self.inherited.store(false, Ordering::Relaxed);
    }

    /// Where in its memfd the mapping begins, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Maps a range of somebody else's memfd, which must not be able to shrink. Before that it checks all that could
    /// make the mapping fault. With it comes which file it is.
    ///
    /// # Errors
    /// What is wrong with file or range.
    pub fn register(
        fd: BorrowedFd<'_>,
        offset: u64,
        bytes: u64,
    ) -> Result<(Arc<Self>, FileId), RegionRefused> {
        let page = rustix::param::page_size() as u64;
        if !offset.is_multiple_of(page) || !bytes.is_multiple_of(page) {
            return Err(RegionRefused::Unaligned { page });
        }
        let size = isize::try_from(bytes).map_err(|_| RegionRefused::Size)?.unsigned_abs();
        if size == 0 {
            return Err(RegionRefused::Size);
        }
        // Of what is no memfd there are none.
        let seals = rustix::fs::fcntl_get_seals(fd).map_err(|_| RegionRefused::NotMemfd)?;
        match rustix::fs::fstatfs(fd).map(|found| found.f_type as u64) {
            Ok(TMPFS) => {}
            Ok(HUGETLBFS) => return Err(RegionRefused::HugePages),
            _ => return Err(RegionRefused::NotMemfd),
        }
        if !seals.contains(SealFlags::SHRINK) {
            return Err(RegionRefused::Shrinkable);
        }
        let mode = rustix::fs::fcntl_getfl(fd).map_err(|_| RegionRefused::NotMemfd)?;
        if seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE)
            || mode & OFlags::RWMODE != OFlags::RDWR
        {
            return Err(RegionRefused::ReadOnly);
        }
        // Sealed before this look, the file only grows from now on.
        let stat = rustix::fs::fstat(fd).map_err(|_| RegionRefused::Failed)?;
        let file = u64::try_from(stat.st_size).map_err(|_| RegionRefused::Failed)?;
        if offset.checked_add(bytes).is_none_or(|end| end > file) {
            return Err(RegionRefused::Beyond { size: file });
        }
        let own = copied(fd).map_err(|_| RegionRefused::Failed)?;
        let base = map_shared(fd, offset, size).map_err(|_| RegionRefused::Failed)?;
        let mut memory = Self::of(base, size, Some(own));
        memory.offset = offset;
        Ok((Arc::new(memory), FileId { device: stat.st_dev, inode: stat.st_ino }))
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
        let base = map_shared(fd.as_fd(), 0, size)?;
        Ok(Arc::new(Self::of(base, size, Some(fd))))
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
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
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
        if self.lease.is_some() && !self.inherited.load(Ordering::Relaxed) {
            // SAFETY: all of it is this value's mapping of a memfd; its bytes become zeros, as anybody who maps it might make them.
            let freed = unsafe { rustix::mm::madvise(self.base.cast(), self.bytes, Advice::LinuxRemove) };
            debug_assert!(freed.is_ok(), "madvise: {freed:?}");
        }
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

    /// A memfd of two pages with these seals.
    fn memfd(flags: MemfdFlags, seals: SealFlags) -> OwnedFd {
        let fd = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING | flags).unwrap();
        rustix::fs::ftruncate(&fd, 2 * page()).unwrap();
        rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
        fd
    }

    fn page() -> u64 {
        rustix::param::page_size() as u64
    }

    #[test]
    fn a_registered_range_shares_the_files_bytes() {
        let fd = memfd(MemfdFlags::empty(), SealFlags::SHRINK);
        let (memory, id) = Memory::register(fd.as_fd(), page(), page()).unwrap();
        assert_eq!((memory.fd().is_some(), memory.offset()), (true, page()));
        memory.write(3, b"seen").unwrap();
        let mut seen = [0; 4];
        rustix::io::pread(&fd, &mut seen, page() + 3).unwrap();
        assert_eq!(&seen, b"seen");
        let (whole, same) = Memory::register(fd.as_fd(), 0, 2 * page()).unwrap();
        assert_eq!((whole.bytes() as u64, same), (2 * page(), id));
        // It may grow, and what is mapped stays.
        rustix::fs::ftruncate(&fd, 3 * page()).unwrap();
        drop(fd);
        whole.read(page() + 3, &mut seen).unwrap();
        assert_eq!(&seen, b"seen");
    }

    #[test]
    fn what_could_fault_or_cannot_be_written_is_not_registered() {
        let (none, shrink) = (MemfdFlags::empty(), SealFlags::SHRINK);
        let refused = |fd: &OwnedFd, offset, bytes| Memory::register(fd.as_fd(), offset, bytes).unwrap_err();
        let right = memfd(none, shrink);
        let unaligned = RegionRefused::Unaligned { page: page() };
        let beyond = RegionRefused::Beyond { size: 2 * page() };
        let last = u64::MAX - page() + 1;
        for (offset, bytes, why) in [
            (1, page(), unaligned),
            (0, page() - 1, unaligned),
            (0, 0, RegionRefused::Size),
            (0, last, RegionRefused::Size),
            (page(), 2 * page(), beyond),
            (last, page(), beyond),
            (2 * page(), page(), beyond),
        ] {
            assert_eq!(refused(&right, offset, bytes), why, "{bytes} bytes at {offset}");
        }
        let whole = |fd: &OwnedFd| refused(fd, 0, page());
        let open = |path: &str, flags| rustix::fs::open(path, flags, rustix::fs::Mode::empty()).unwrap();
        for seals in [SealFlags::empty(), SealFlags::GROW, SealFlags::SEAL] {
            assert_eq!(whole(&memfd(none, seals)), RegionRefused::Shrinkable, "{seals:?}");
        }
        for seals in [SealFlags::WRITE, SealFlags::FUTURE_WRITE] {
            assert_eq!(whole(&memfd(none, shrink | seals)), RegionRefused::ReadOnly, "{seals:?}");
        }
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&right));
        assert_eq!(whole(&open(&path, OFlags::RDONLY)), RegionRefused::ReadOnly);
        assert_eq!(whole(&open(&path, OFlags::PATH)), RegionRefused::NotMemfd);
        for strange in
            [open("/dev/zero", OFlags::RDWR), open("/dev/null", OFlags::RDWR), open("/", OFlags::RDONLY)]
        {
            assert_eq!(whole(&strange), RegionRefused::NotMemfd);
        }
        assert_eq!(whole(&rustix::pipe::pipe().unwrap().0), RegionRefused::NotMemfd);
        // A file of tmpfs is none whose size is kept.
        if let Ok(file) = tempfile_in_memory() {
            assert_eq!(whole(&file), RegionRefused::Shrinkable);
        }
        // Where the kernel has huge pages at all.
        let huge = rustix::fs::memfd_create("huge", MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB);
        if let Ok(huge) = huge {
            assert_eq!(whole(&huge), RegionRefused::HugePages);
        }
    }

    fn tempfile_in_memory() -> rustix::io::Result<OwnedFd> {
        let flags = OFlags::RDWR | OFlags::TMPFILE;
        rustix::fs::open("/dev/shm", flags, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)
    }
}
