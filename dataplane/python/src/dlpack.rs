//! DLPack: a tensor's memory for other libraries, without a copy. The structures are those of its version 1.

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use std::ffi::{CStr, c_void};

/// The device of host memory.
pub(crate) const CPU: (i32, i32) = (1, 0);

/// What is exported.
pub(crate) struct Layout {
    pub(crate) pointer: *mut u8,
    /// Code and bits.
    pub(crate) dtype: (u8, u8),
    pub(crate) shape: Vec<i64>,
}

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    dimensions: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

// SAFETY: of the type alone; a consumer calls it once, with what it was given.
type Deleter<T> = unsafe extern "C" fn(*mut T);

#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<Deleter<Managed>>,
}

#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<Deleter<Versioned>>,
    flags: u64,
    tensor: Tensor,
}

/// What a managed tensor keeps alive.
struct Context {
    #[expect(dead_code, reason = "held for its drop")]
    owner: Py<PyAny>,
    shape: Vec<i64>,
    strides: Vec<i64>,
}

const NAME: &CStr = c"dltensor";
const NAME_VERSIONED: &CStr = c"dltensor_versioned";

/// A capsule that keeps `owner`, whose memory it describes.
pub(crate) fn export(
    py: Python<'_>,
    owner: Py<PyAny>,
    layout: Layout,
    versioned: bool,
) -> PyResult<Bound<'_, PyCapsule>> {
    let Layout { pointer, dtype: (code, bits), shape } = layout;
    let mut strides = vec![1; shape.len()];
    let mut stride = 1_i64;
    for (slot, dimension) in strides.iter_mut().zip(&shape).rev() {
        *slot = stride;
        stride = stride.saturating_mul(*dimension);
    }
    let mut context = Box::new(Context { owner, shape, strides });
    let tensor = Tensor {
        data: pointer.cast(),
        device_type: CPU.0,
        device_id: CPU.1,
        dimensions: context.shape.len() as i32,
        code,
        bits,
        lanes: 1,
        shape: context.shape.as_mut_ptr(),
        strides: context.strides.as_mut_ptr(),
        byte_offset: 0,
    };
    let context = Box::into_raw(context).cast();
    let (managed, name): (*mut c_void, _) = if versioned {
        let deleter = Some(delete_versioned as Deleter<Versioned>);
        let made = Versioned { major: 1, minor: 0, context, deleter, flags: 0, tensor };
        (Box::into_raw(Box::new(made)).cast(), NAME_VERSIONED)
    } else {
        let deleter = Some(delete as Deleter<Managed>);
        (Box::into_raw(Box::new(Managed { tensor, context, deleter })).cast(), NAME)
    };
    // SAFETY: the pointer is not null and the name is static; the destructor takes a capsule of these names.
    unsafe {
        let capsule = ffi::PyCapsule_New(managed, name.as_ptr(), Some(destruct));
        if capsule.is_null() {
            free(managed, versioned);
        }
        Ok(Bound::from_owned_ptr_or_err(py, capsule)?.cast_into::<PyCapsule>()?)
    }
}

/// Frees what a capsule holds.
///
/// # Safety
/// The pointer is that of [`export`], and nobody uses it any more.
unsafe fn free(managed: *mut c_void, versioned: bool) {
    // SAFETY: as this function's.
    unsafe { if versioned { delete_versioned(managed.cast()) } else { delete(managed.cast()) } }
}

unsafe extern "C" fn delete(managed: *mut Managed) {
    // SAFETY: a consumer calls it once, with what it was given.
    unsafe {
        let managed = Box::from_raw(managed);
        drop_context(managed.context);
    }
}

unsafe extern "C" fn delete_versioned(managed: *mut Versioned) {
    // SAFETY: as above.
    unsafe {
        let managed = Box::from_raw(managed);
        drop_context(managed.context);
    }
}

/// # Safety
/// The context is that of [`export`], and dropped once.
unsafe fn drop_context(context: *mut c_void) {
    if !context.is_null() {
        // SAFETY: as this function's.
        let context = unsafe { Box::from_raw(context.cast::<Context>()) };
        // From whichever thread: where it has no interpreter, the reference is dropped by the next that has.
        drop(context);
    }
}

/// Of a capsule that nobody has consumed: a consumer renames it.
unsafe extern "C" fn destruct(capsule: *mut ffi::PyObject) {
    for (name, versioned) in [(NAME, false), (NAME_VERSIONED, true)] {
        // SAFETY: the interpreter gives the capsule that it destroys.
        unsafe {
            if ffi::PyCapsule_IsValid(capsule, name.as_ptr()) == 1 {
                let managed = ffi::PyCapsule_GetPointer(capsule, name.as_ptr());
                free(managed, versioned);
            }
        }
    }
}
