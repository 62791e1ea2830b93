//! What libibverbs made, destroyed when dropped; each object holds what it was made from.

use super::post::Scratch;
use super::{device_name, errno};
use harmonaize_shm::Pin;
use harmonaize_verbs::calls::{Handle, Kind};
use rdma_sys::{ibv_ah, ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_mr, ibv_pd, ibv_qp};
use rustix::io::Errno;
use std::any::Any;
use std::ffi::{CStr, CString};
use std::marker::PhantomData;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Mutex;

/// The object behind a handle, if it is one of this kind.
pub(super) fn object<T: Any>(handle: &Handle) -> Result<&T, Errno> {
    handle.downcast_ref().ok_or(Errno::INVAL)
}

/// What the library made, or why not: to be called straight after it, while errno is the call's.
pub(super) fn made<T>(raw: *mut T) -> Result<NonNull<T>, Errno> {
    NonNull::new(raw).ok_or_else(errno)
}

/// A device of a list that lives for `'a`.
#[derive(Clone, Copy)]
pub(super) struct Listed<'a>(*mut ibv_device, PhantomData<&'a ()>);

/// Shows `f` the devices with their names. The list ends with the call; contexts opened in it stay.
pub(super) fn with_devices<T>(f: impl FnOnce(&[(String, Listed<'_>)]) -> T) -> Result<T, Errno> {
    let mut found = 0;
    // SAFETY: the call allocates a list of `found` devices, or gives null.
    let list = unsafe { rdma_sys::ibv_get_device_list(&raw mut found) };
    if list.is_null() {
        // What the library says where the kernel has no RDMA at all.
        return match errno() {
            Errno::NOSYS | Errno::NOENT => Ok(f(&[])),
            errno => Err(errno),
        };
    }
    let devices = (0..usize::try_from(found).unwrap_or(0)).map(|at| {
        // SAFETY: `at` is within the list, which is freed only below.
        let device = unsafe { list.add(at).read() };
        // SAFETY: the device is of the list.
        (unsafe { device_name(device) }, Listed(device, PhantomData))
    });
    let devices: Vec<_> = devices.collect();
    let result = f(&devices);
    // SAFETY: the list was made above; open contexts hold their device by a count of their own.
    unsafe { rdma_sys::ibv_free_device_list(list) };
    Ok(result)
}

/// An open device.
pub(super) struct Context {
    raw: NonNull<ibv_context>,
    /// Where the kernel says whose the descriptor is, as long as the device is there.
    sign: CString,
    name: String,
}

// SAFETY: libibverbs locks its objects; any thread may use them (ibverbs(3): "thread safe").
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(super) fn open(device: Listed<'_>) -> Result<Self, Errno> {
        // SAFETY: the device's list lives; its path and name are C strings inside it.
        let (sign, name) = unsafe {
            let folder = CStr::from_ptr((&raw const (*device.0).dev_path).cast()).to_bytes();
            (CString::new([folder, b"/ibdev"].concat()), device_name(device.0))
        };
        let sign = sign.map_err(|_| Errno::INVAL)?;
        // SAFETY: the device's list lives.
        made(unsafe { rdma_sys::ibv_open_device(device.0) }).map(|raw| Self { raw, sign, name })
    }

    /// Whether the host still has the device. A driver that cannot be told from its users (rxe) waits with the device's end
    /// until all have closed it, and serves them until then; what vanishes at once is the way to open it.
    pub(super) fn present(&self) -> bool {
        use rustix::fs::{Mode, OFlags};
        let mut name = [0; 128];
        let read = rustix::fs::open(&self.sign, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .and_then(|file| rustix::io::read(&file, &mut name));
        match read {
            Ok(bytes) => name.get(..bytes).unwrap_or_default().trim_ascii() == self.name.as_bytes(),
            // Out of descriptors, for one, says nothing about the device.
            Err(errno) => !matches!(errno, Errno::NOENT | Errno::NODEV | Errno::NXIO),
        }
    }

    pub(super) fn raw(&self) -> *mut ibv_context {
        self.raw.as_ptr()
    }

    pub(super) fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the context lives, and with it its descriptor, as long as `self` is borrowed.
        unsafe { BorrowedFd::borrow_raw((*self.raw()).async_fd) }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: everything made from the context held it, and is gone.
        let code = unsafe { rdma_sys::ibv_close_device(self.raw()) };
        debug_assert_eq!(code, 0, "ibv_close_device");
    }
}

/// A type for an object that is destroyed by one call after which nothing refers to it.
macro_rules! owned {
    ($(#[$doc:meta])* $name:ident($raw:ty) { $($field:ident: $kind:ty),* } by $destroy:ident) => {
        $(#[$doc])*
        pub(super) struct $name {
            raw: NonNull<$raw>,
            $($field: $kind,)*
        }

        // SAFETY: libibverbs locks its objects; any thread may use them (ibverbs(3): "thread safe").
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}

        impl $name {
            /// # Safety
            /// The library must have made `raw` from what the other arguments hold, and nobody else may destroy it.
            pub(super) unsafe fn new(raw: NonNull<$raw>, $($field: $kind),*) -> Self {
                Self { raw, $($field),* }
            }

            #[allow(dead_code, reason = "not every kind of object is an argument of a call")]
            pub(super) fn raw(&self) -> *mut $raw {
                self.raw.as_ptr()
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: the object lives until here; what was made from it held it, and is gone. What it was made from is
                // released afterwards, with the fields.
                let code = unsafe { rdma_sys::$destroy(self.raw.as_ptr()) };
                // A device that is gone may say so; its objects are gone with it.
                let fine = [0, libc::EIO, libc::ENODEV].contains(&code);
                debug_assert!(fine, concat!(stringify!($destroy), ": {}"), code);
            }
        }
    };
}

owned! {
    /// A protection domain.
    Domain(ibv_pd) { _context: Handle } by ibv_dealloc_pd
}
owned! {
    /// Registered memory.
    Region(ibv_mr) { _domain: Handle, _memory: Pin } by ibv_dereg_mr
}
owned! {
    /// A channel for completion events.
    Channel(ibv_comp_channel) { _context: Handle } by ibv_destroy_comp_channel
}
owned! {
    /// A completion queue with its channel.
    Queue(ibv_cq) { channel: Channel } by ibv_destroy_cq
}
owned! {
    /// A queue pair.
    QueuePair(ibv_qp) { kind: Kind, scratch: Mutex<Scratch>, _domain: Handle, _queue: Handle } by ibv_destroy_qp
}
owned! {
    /// Where a datagram goes.
    AddressHandle(ibv_ah) { _domain: Handle } by ibv_destroy_ah
}

impl Region {
    pub(super) fn keys(&self) -> (u32, u32) {
        // SAFETY: the region lives.
        unsafe { ((*self.raw()).lkey, (*self.raw()).rkey) }
    }
}

impl Channel {
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel lives, and with it its descriptor, as long as `self` is borrowed.
        unsafe { BorrowedFd::borrow_raw((*self.raw()).fd) }
    }
}

impl Queue {
    pub(super) fn channel(&self) -> &Channel {
        &self.channel
    }

    pub(super) fn entries(&self) -> u32 {
        // SAFETY: the queue lives.
        u32::try_from(unsafe { (*self.raw()).cqe }).unwrap_or(0)
    }
}

impl QueuePair {
    pub(super) fn number(&self) -> u32 {
        // SAFETY: the pair lives.
        unsafe { (*self.raw()).qp_num }
    }

    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    pub(super) fn scratch(&self) -> &Mutex<Scratch> {
        &self.scratch
    }
}
