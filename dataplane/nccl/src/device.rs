//! Which memory is a device's, where CUDA is loaded.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::OnceLock;

/// `cuPointerGetAttribute` of CUDA's driver.
type Attribute = extern "C" fn(*mut c_void, c_uint, u64) -> c_int;

/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`, and what it is for a device's memory.
const MEMORY_TYPE: c_uint = 2;
const DEVICE: c_uint = 2;

static ATTRIBUTE: OnceLock<Option<Attribute>> = OnceLock::new();

/// Whether an address is in a device's memory. Without CUDA in this process there is none.
pub(crate) fn is_device(address: *const c_void) -> bool {
    let attribute = ATTRIBUTE.get_or_init(|| {
        // SAFETY: the name ends with a zero; looking a symbol up has no other effect.
        let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"cuPointerGetAttribute".as_ptr()) };
        // SAFETY: CUDA's driver gives the function of that name this type. It follows the first argument alone, which is ours.
        (!found.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, Attribute>(found) })
    });
    let Some(attribute) = attribute else { return false };
    let mut kind: c_uint = 0;
    // `kind` takes that attribute's value; the driver looks the address up and does not follow it.
    let result = attribute((&raw mut kind).cast(), MEMORY_TYPE, address.addr() as u64);
    result == 0 && kind == DEVICE
}
