//! Memory that the library allocates, and registrations.

use crate::registry::{find, lock, ncclComm_t};
use crate::result::{Failure, entry, give, ncclResult_t};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Mutex;

/// Where the allocations begin, and how they were made.
static ALLOCATED: Mutex<BTreeMap<usize, Layout>> = Mutex::new(BTreeMap::new());

const PAGE: usize = 4096;

/// Allocates host memory, in whole pages, zeroed.
#[unsafe(no_mangle)]
pub extern "C" fn ncclMemAlloc(pointer: *mut *mut c_void, bytes: usize) -> ncclResult_t {
    entry(|| {
        if pointer.is_null() {
            return Err(Failure::argument("where the address goes is NULL"));
        }
        let layout = Layout::from_size_align(bytes.max(1), PAGE).map(|layout| layout.pad_to_align());
        let layout = layout.map_err(|_| Failure::argument(format!("{bytes} bytes are too many")))?;
        // SAFETY: the layout has at least a byte.
        let memory = unsafe { alloc_zeroed(layout) };
        if memory.is_null() {
            return Err(Failure::argument(format!("no memory for {bytes} bytes")));
        }
        lock(&ALLOCATED).insert(memory.addr(), layout);
        give(memory.cast(), pointer, "where the address goes")
    })
}

/// Frees what [`ncclMemAlloc`] allocated.
#[unsafe(no_mangle)]
pub extern "C" fn ncclMemFree(pointer: *mut c_void) -> ncclResult_t {
    entry(|| {
        if pointer.is_null() {
            return Ok(());
        }
        let layout = lock(&ALLOCATED).remove(&pointer.addr());
        let layout = layout.ok_or_else(|| Failure::argument("ncclMemAlloc did not allocate that"))?;
        // SAFETY: it was allocated by this layout, and is freed once.
        unsafe { dealloc(pointer.cast(), layout) };
        Ok(())
    })
}

/// Takes note of a buffer. Buffers are copied whether they are registered or not.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommRegister(
    comm: ncclComm_t,
    buffer: *mut c_void,
    _bytes: usize,
    handle: *mut *mut c_void,
) -> ncclResult_t {
    entry(|| {
        find(comm)?;
        give(buffer, handle, "where the handle goes")
    })
}

/// Ends a registration.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDeregister(comm: ncclComm_t, _handle: *mut c_void) -> ncclResult_t {
    entry(|| find(comm).map(drop))
}
