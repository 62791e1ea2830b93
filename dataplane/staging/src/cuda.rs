//! CUDA's driver, where this process has loaded it: the few calls that staging needs. They have the names and types of its manual (CUDA
//! driver API 12 and later). Nothing here loads it.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::sync::OnceLock;

/// A context of the driver's.
pub(crate) type Context = *mut c_void;

/// A CUDA stream: the driver's handle, or one of its special values, of which 0 is the default stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stream(pub usize);

impl Stream {
    /// Whether it is the default stream of whatever context is current.
    pub(crate) fn is_default(self) -> bool {
        self.0 <= 2
    }

    fn handle(self) -> *mut c_void {
        std::ptr::with_exposed_provenance_mut(self.0)
    }
}

/// A call of the driver's that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaError {
    /// The call.
    pub call: &'static str,
    /// Its result.
    pub code: i32,
    /// The result's name, such as `CUDA_ERROR_INVALID_VALUE`.
    pub name: String,
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CUDA's driver: {} gave {} ({})", self.call, self.name, self.code)
    }
}

impl std::error::Error for CudaError {}

const NOT_READY: c_int = 600;
/// `CU_POINTER_ATTRIBUTE_CONTEXT` and `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`.
const CONTEXT: c_uint = 1;
const MEMORY_TYPE: c_uint = 2;
/// `CU_MEMORYTYPE_HOST`.
const HOST: c_uint = 1;
/// `CU_MEMHOSTREGISTER_PORTABLE` and `CU_MEMHOSTREGISTER_DEVICEMAP`, which are the same of `cuMemHostAlloc`.
const PORTABLE_AND_MAPPED: c_uint = 3;
/// `CU_STREAM_WAIT_VALUE_GEQ`.
const AT_LEAST: c_uint = 0;

/// A function that a stream calls.
pub(crate) type HostFunction = unsafe extern "C" fn(*mut c_void);

/// Declares the driver's functions: how each is called here, its symbol, its arguments.
macro_rules! functions {
    ($($name:ident = $symbol:literal ($($argument:ty),*);)*) => {
        /// The driver's functions.
        #[derive(Debug)]
        pub struct Driver {
            $($name: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Driver {
            /// Those of a library; none where one is missing.
            fn of(library: *mut c_void) -> Option<Self> {
                Some(Self {$(
                    $name: {
                        // SAFETY: looking a symbol up of a library that is loaded has no other effect.
                        let found = unsafe { libc::dlsym(library, concat!($symbol, "\0").as_ptr().cast()) };
                        if found.is_null() {
                            return None;
                        }
                        // SAFETY: CUDA's driver gives the function of that name this type.
                        unsafe {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> c_int>(found)
                        }
                    },
                )*})
            }
        }
    };
}

functions! {
    error_name = "cuGetErrorName"(c_int, *mut *const c_char);
    pointer_attribute = "cuPointerGetAttribute"(*mut c_void, c_uint, u64);
    current = "cuCtxGetCurrent"(*mut Context);
    push = "cuCtxPushCurrent_v2"(Context);
    pop = "cuCtxPopCurrent_v2"(*mut Context);
    stream_context = "cuStreamGetCtx"(*mut c_void, *mut Context);
    is_capturing = "cuStreamIsCapturing"(*mut c_void, *mut c_int);
    query = "cuStreamQuery"(*mut c_void);
    synchronize = "cuStreamSynchronize"(*mut c_void);
    register = "cuMemHostRegister_v2"(*mut c_void, usize, c_uint);
    unregister = "cuMemHostUnregister"(*mut c_void);
    allocate_device = "cuMemAlloc_v2"(*mut u64, usize);
    free_device = "cuMemFree_v2"(u64);
    allocate = "cuMemHostAlloc"(*mut *mut c_void, usize, c_uint);
    device_pointer = "cuMemHostGetDevicePointer_v2"(*mut u64, *mut c_void, c_uint);
    copy = "cuMemcpyAsync"(u64, u64, usize, *mut c_void);
    launch = "cuLaunchHostFunc"(*mut c_void, HostFunction, *mut c_void);
    wait_value = "cuStreamWaitValue32_v2"(*mut c_void, u64, u32, c_uint);
}

/// The driver, where this process has loaded one with all of its functions.
pub fn driver() -> Option<&'static Driver> {
    static DRIVER: OnceLock<Driver> = OnceLock::new();
    if let Some(driver) = DRIVER.get() {
        return Some(driver);
    }
    // Programs load it for themselves alone, so its symbols are found in it, and it may be loaded later.
    // SAFETY: the flag has a library looked for among those that are loaded; it stays loaded from then on.
    let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_NOW) };
    if library.is_null() {
        return None;
    }
    let driver = Driver::of(library)?;
    Some(DRIVER.get_or_init(|| driver))
}

/// A context is current on this thread until this is dropped.
pub(crate) struct Current<'a>(&'a Driver);

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: what was pushed is popped by the same thread; the address is that of a place for it.
        unsafe { (self.0.pop)(&raw mut popped) };
    }
}

impl Driver {
    fn check(&self, call: &'static str, code: c_int) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        let mut text = std::ptr::null();
        // SAFETY: the place takes the address of a text that stays.
        unsafe { (self.error_name)(code, &raw mut text) };
        let name = match text.is_null() {
            true => "an unknown error".to_owned(),
            // SAFETY: the driver gives a text that ends with a zero and stays.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        };
        Err(CudaError { call, code, name })
    }

    fn memory_type(&self, address: usize) -> Option<c_uint> {
        let mut kind: c_uint = 0;
        // SAFETY: `kind` takes that attribute's value; the driver looks the address up and does not follow it.
        let result = unsafe { (self.pointer_attribute)((&raw mut kind).cast(), MEMORY_TYPE, address as u64) };
        (result == 0).then_some(kind)
    }

    /// Whether CUDA knows the memory at an address: a device's, or the host's that CUDA has allocated or registered.
    pub fn manages(&self, address: usize) -> bool {
        self.memory_type(address).is_some_and(|kind| kind != 0)
    }

    /// Whether the memory at an address is a device's.
    pub fn is_device(&self, address: usize) -> bool {
        self.memory_type(address).is_some_and(|kind| kind != 0 && kind != HOST)
    }

    /// The context that calls for a stream are made in: the stream's. Of the default one it is that of the memory at `address`,
    /// else the thread's.
    pub(crate) fn context(&self, stream: Stream, address: usize) -> Result<usize, CudaError> {
        let mut context = std::ptr::null_mut();
        let place: *mut Context = &raw mut context;
        if !stream.is_default() {
            // SAFETY: the caller of the library gives a stream; the place takes a context's handle.
            let code = unsafe { (self.stream_context)(stream.handle(), place) };
            return self.check("cuStreamGetCtx", code).map(|()| context.expose_provenance());
        }
        // SAFETY: as in `memory_type`; this attribute is a context's handle.
        let code = unsafe { (self.pointer_attribute)(place.cast(), CONTEXT, address as u64) };
        if code != 0 || context.is_null() {
            // SAFETY: the place takes a context's handle.
            self.check("cuCtxGetCurrent", unsafe { (self.current)(place) })?;
        }
        Ok(context.expose_provenance())
    }

    /// Makes a context current.
    pub(crate) fn enter(&self, context: usize) -> Result<Current<'_>, CudaError> {
        // SAFETY: `context` gave the handle. Who destroys a context has ended its streams before.
        let code = unsafe { (self.push)(std::ptr::with_exposed_provenance_mut(context)) };
        self.check("cuCtxPushCurrent", code).map(|()| Current(self))
    }

    /// Whether a graph captures the stream.
    pub(crate) fn is_capturing(&self, stream: Stream) -> Result<bool, CudaError> {
        let mut status = 0;
        // SAFETY: the caller of the library gives a stream; the place takes a status.
        let code = unsafe { (self.is_capturing)(stream.handle(), &raw mut status) };
        self.check("cuStreamIsCapturing", code).map(|()| status != 0)
    }

    /// An error where the stream can do nothing any more.
    pub(crate) fn query(&self, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: the caller of the library gives a stream.
        match unsafe { (self.query)(stream.handle()) } {
            NOT_READY => Ok(()),
            code => self.check("cuStreamQuery", code),
        }
    }

    /// Waits until the stream has done what it was given.
    pub(crate) fn synchronize(&self, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: the caller of the library gives a stream.
        self.check("cuStreamSynchronize", unsafe { (self.synchronize)(stream.handle()) })
    }

    /// Pins memory of the host's, in whole pages.
    ///
    /// # Safety
    /// It stays mapped until it is [unregistered](Self::unregister).
    pub(crate) unsafe fn register(&self, address: *mut u8, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the caller vouches for the memory.
        self.check("cuMemHostRegister", unsafe {
            (self.register)(address.cast(), bytes, PORTABLE_AND_MAPPED)
        })
    }

    /// Ends that.
    pub(crate) fn unregister(&self, address: usize) -> Result<(), CudaError> {
        let address = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: the driver looks the address up among those registered.
        self.check("cuMemHostUnregister", unsafe { (self.unregister)(address) })
    }

    /// Pinned memory for as long as the process lasts.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<*mut u8, CudaError> {
        let mut memory = std::ptr::null_mut();
        // SAFETY: the place takes an address.
        let code = unsafe { (self.allocate)(&raw mut memory, bytes, PORTABLE_AND_MAPPED) };
        self.check("cuMemHostAlloc", code).map(|()| memory.cast())
    }

    /// Memory of the device whose context is current on this thread, as an address; none where none is.
    ///
    /// # Errors
    /// Where the device has none.
    pub fn allocate_device(&self, bytes: usize) -> Result<Option<usize>, CudaError> {
        let mut context = std::ptr::null_mut();
        // SAFETY: the place takes a context's handle.
        self.check("cuCtxGetCurrent", unsafe { (self.current)(&raw mut context) })?;
        if context.is_null() {
            return Ok(None);
        }
        let mut memory = 0;
        // SAFETY: the place takes an address.
        let code = unsafe { (self.allocate_device)(&raw mut memory, bytes) };
        self.check("cuMemAlloc", code).map(|()| Some(memory as usize))
    }

    /// Frees such memory.
    ///
    /// # Errors
    /// Where it is none.
    pub fn free_device(&self, address: usize) -> Result<(), CudaError> {
        // SAFETY: the driver looks the address up among its allocations.
        self.check("cuMemFree", unsafe { (self.free_device)(address as u64) })
    }

    /// Has the stream copy.
    ///
    /// # Safety
    /// Both are memory that CUDA knows, of so many bytes, until the stream has copied.
    pub(crate) unsafe fn copy(
        &self,
        to: usize,
        from: usize,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller vouches for both.
        self.check("cuMemcpyAsync", unsafe { (self.copy)(to as u64, from as u64, bytes, stream.handle()) })
    }

    /// Has the stream call a function once it has done what it was given before.
    ///
    /// # Safety
    /// `data` is what the function takes, it does not unwind, and calls nothing of CUDA's.
    pub(crate) unsafe fn launch(
        &self,
        stream: Stream,
        function: HostFunction,
        data: *mut c_void,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller vouches for the function and its data.
        self.check("cuLaunchHostFunc", unsafe { (self.launch)(stream.handle(), function, data) })
    }

    /// Has the stream wait until a number in pinned memory is no longer 0.
    ///
    /// # Safety
    /// `flag` is pinned until the stream has waited.
    pub(crate) unsafe fn wait_for(&self, stream: Stream, flag: *mut u32) -> Result<(), CudaError> {
        let mut device = 0;
        // SAFETY: the place takes an address; the caller vouches for the number.
        let code = unsafe { (self.device_pointer)(&raw mut device, flag.cast(), 0) };
        self.check("cuMemHostGetDevicePointer", code)?;
        // SAFETY: likewise.
        self.check("cuStreamWaitValue32", unsafe { (self.wait_value)(stream.handle(), device, 1, AT_LEAST) })
    }
}
