//! The system's allocator, which tells of what it is asked for; several crates' tests take this file.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Calls its function before each allocation, which must not allocate itself.
pub(crate) struct Counting(pub(crate) fn());

thread_local! {
    /// Of this thread alone: the test harness allocates in its own when it likes.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// Counts for the thread at hand.
pub(crate) fn here() {
    // A thread that is ending has no counter any more.
    let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
}

/// What [`here`] has counted for this thread.
pub(crate) fn so_far() -> u64 {
    ALLOCATIONS.get()
}

// SAFETY: the system's allocator does the work; telling of it changes nothing about it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        (self.0)();
        // SAFETY: passed on as it came.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: passed on as it came.
        unsafe { System.dealloc(pointer, layout) }
    }
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        (self.0)();
        // SAFETY: passed on as it came.
        unsafe { System.realloc(pointer, layout, bytes) }
    }
}
