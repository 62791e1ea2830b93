//! Memory that the library allocates, and registrations.

use crate::registry::{find, lock, ncclComm_t};
use crate::result::{Failure, entry, give, ncclResult_t};
use harmonaize_staging::cuda::driver;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Mutex;

/// Where the allocations begin, and how they were made: a device's have no layout.
static ALLOCATED: Mutex<BTreeMap<usize, Option<Layout>>> = Mutex::new(BTreeMap::new());

const PAGE: usize = 4096;

/// Allocates memory: the current device's, and where there is none the host's, in whole pages, zeroed.
#[unsafe(no_mangle)]
pub extern "C" fn ncclMemAlloc(pointer: *mut *mut c_void, bytes: usize) -> ncclResult_t {
    entry(|| {
        if pointer.is_null() {
            return Err(Failure::argument("where the address goes is NULL"));
        }
        let device = driver().map(|driver| driver.allocate_device(bytes.max(1))).transpose()?.flatten();
        if let Some(address) = device {
            lock(&ALLOCATED).insert(address, None);
            return give(std::ptr::with_exposed_provenance_mut(address), pointer, "where the address goes");
        }
        let layout = Layout::from_size_align(bytes.max(1), PAGE).map(|layout| layout.pad_to_align());
        let layout = layout.map_err(|_| Failure::argument(format!("{bytes} bytes are too many")))?;
        // SAFETY: the layout has at least a byte.
        let memory = unsafe { alloc_zeroed(layout) };
        if memory.is_null() {
            return Err(Failure::argument(format!("no memory for {bytes} bytes")));
        }
        lock(&ALLOCATED).insert(memory.addr(), Some(layout));
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
        match (layout, driver()) {
            // SAFETY: it was allocated by this layout, and is freed once.
            (Some(layout), _) => unsafe { dealloc(pointer.cast(), layout) },
            (None, Some(driver)) => driver.free_device(pointer.addr())?,
            (None, None) => return Err(Failure::internal("memory of a device without CUDA")),
        }
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
