//! Whether this process is the one that made something, or a child that it has forked. Nothing asks the kernel for it: a page that the
//! kernel wipes in children tells.

use crate::{Memory, MemoryError};
use rustix::mm::Advice;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of the page; the kernel rounds up.
const PAGE: usize = 4096;

/// Tells the process that made it from its children by `fork`. One load to ask.
#[derive(Debug)]
pub struct ForkGuard(Arc<Memory>);

impl ForkGuard {
    /// A guard of this process.
    ///
    /// # Errors
    /// Where the kernel has no page that children do not inherit.
    pub fn new() -> Result<Arc<Self>, MemoryError> {
        let memory = Memory::private(PAGE)?;
        // SAFETY: the advice concerns children alone, and the mapping is private, anonymous and as long as this.
        let advised =
            unsafe { rustix::mm::madvise(memory.base().cast(), memory.bytes(), Advice::LinuxWipeOnFork) };
        advised.map_err(|source| MemoryError::System { call: "madvise(MADV_WIPEONFORK)", source })?;
        let guard = Self(memory);
        guard.mark().store(1, Ordering::Relaxed);
        Ok(Arc::new(guard))
    }

    fn mark(&self) -> &AtomicU64 {
        // SAFETY: the page is mapped as long as this lives, aligned, and never accessed but through this.
        unsafe { AtomicU64::from_ptr(self.0.base().cast()) }
    }

    /// Whether this is a child of the process that made the guard.
    pub fn is_inherited(&self) -> bool {
        self.mark().load(Ordering::Relaxed) == 0
    }
}

/// A value that only the process that made it drops. A child of it leaks its copy: what dropping does to the kernel's objects would be done to
/// the parent's.
#[derive(Debug)]
pub struct DroppedByOwner<T> {
    value: ManuallyDrop<T>,
    guard: Arc<ForkGuard>,
}

impl<T> DroppedByOwner<T> {
    /// Guards a value.
    pub fn new(value: T, guard: &Arc<ForkGuard>) -> Self {
        Self { value: ManuallyDrop::new(value), guard: Arc::clone(guard) }
    }
}

impl<T> Deref for DroppedByOwner<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for DroppedByOwner<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for DroppedByOwner<T> {
    fn drop(&mut self) {
        if !self.guard.is_inherited() {
            // SAFETY: the value is dropped here alone, and never used again.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Says when it is dropped: as a byte through a pipe.
    struct Told(std::os::fd::OwnedFd, u8);

    impl Drop for Told {
        fn drop(&mut self) {
            rustix::io::write(&self.0, &[self.1]).unwrap();
        }
    }

    #[test]
    fn a_child_knows_that_it_is_one_and_drops_nothing() {
        let (read, write) = rustix::pipe::pipe().unwrap();
        let guard = ForkGuard::new().unwrap();
        let owned = DroppedByOwner::new(Told(write, b'd'), &guard);
        assert!(!guard.is_inherited());
        // SAFETY: the child allocates nothing, takes no lock, and leaves by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let inherited = guard.is_inherited();
            drop(owned);
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(inherited)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above; the pointer is valid.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 1));
        assert!(!guard.is_inherited());
        drop(owned);
        let mut bytes = [0; 2];
        assert_eq!(rustix::io::read(&read, &mut bytes).unwrap(), 1, "once, and here");
    }
}
