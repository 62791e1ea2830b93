//! Tensors: in the arena, and in memory that the process has already.

use crate::client::harmonaize_client_t;
use crate::error::{Failure, call, create, free, given, result};
use crate::status::harmonaize_status_t;
use harmonaize_client::{Dtype, Error, Region, RegionRefused, Tensor};
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::sync::{Mutex, PoisonError};

/// The type of a tensor's elements: `HARMONAIZE_I8` and so on.
pub type harmonaize_dtype_t = u32;

/// 8-bit signed integer.
pub const HARMONAIZE_I8: harmonaize_dtype_t = 0;
/// 8-bit unsigned integer.
pub const HARMONAIZE_U8: harmonaize_dtype_t = 1;
/// 32-bit signed integer.
pub const HARMONAIZE_I32: harmonaize_dtype_t = 2;
/// 32-bit unsigned integer.
pub const HARMONAIZE_U32: harmonaize_dtype_t = 3;
/// 64-bit signed integer.
pub const HARMONAIZE_I64: harmonaize_dtype_t = 4;
/// 64-bit unsigned integer.
pub const HARMONAIZE_U64: harmonaize_dtype_t = 5;
/// IEEE 754 binary16.
pub const HARMONAIZE_F16: harmonaize_dtype_t = 6;
/// bfloat16.
pub const HARMONAIZE_BF16: harmonaize_dtype_t = 7;
/// IEEE 754 binary32.
pub const HARMONAIZE_F32: harmonaize_dtype_t = 8;
/// IEEE 754 binary64.
pub const HARMONAIZE_F64: harmonaize_dtype_t = 9;
/// 16-bit signed integer.
pub const HARMONAIZE_I16: harmonaize_dtype_t = 10;
/// 16-bit unsigned integer.
pub const HARMONAIZE_U16: harmonaize_dtype_t = 11;
/// A byte that is false where it is 0, else true.
pub const HARMONAIZE_BOOL: harmonaize_dtype_t = 12;
/// A real and an imaginary part, each of IEEE 754 binary32.
pub const HARMONAIZE_COMPLEX64: harmonaize_dtype_t = 13;
/// A real and an imaginary part, each of IEEE 754 binary64.
pub const HARMONAIZE_COMPLEX128: harmonaize_dtype_t = 14;
/// The 8-bit float E4M3 of the Open Compute Project (e4m3fn).
pub const HARMONAIZE_F8E4M3: harmonaize_dtype_t = 15;
/// The 8-bit float E5M2 of the Open Compute Project.
pub const HARMONAIZE_F8E5M2: harmonaize_dtype_t = 16;

/// Elements of one type in memory that process and agent both reach. Any thread may use it, at the same time as others;
/// what they write to its bytes at the same time is their own business. Its memory is free again when it and its slices are
/// freed and no operation on it is in flight.
pub struct harmonaize_tensor_t(pub(crate) Tensor);

/// A range of a memfd of the process's own that the agent has mapped. Any thread may use it, at the same time as others. Let
/// go when it and all tensors on it are freed and no operation on them is in flight.
pub struct harmonaize_region_t(Mutex<Option<Region>>);

fn dtype_of(dtype: harmonaize_dtype_t) -> Result<Dtype, Failure> {
    let found = u8::try_from(dtype).ok().and_then(Dtype::from_code);
    found.ok_or_else(|| Failure::argument(format!("{dtype} is no element type")))
}

/// Makes a tensor in the arena, which grows if it must and may. Its contents are unspecified, its first byte is aligned to 64.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_tensor_create(
    client: Option<&harmonaize_client_t>,
    dtype: harmonaize_dtype_t,
    elements: u64,
    tensor: Option<&mut MaybeUninit<Option<Box<harmonaize_tensor_t>>>>,
) -> harmonaize_status_t {
    create(tensor, || Ok(harmonaize_tensor_t(given(client, "client")?.0.tensor(dtype_of(dtype)?, elements)?)))
}

/// Makes a part of a tensor: so many elements from `first` on. It shares the tensor's memory and is used wherever a tensor is.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_tensor_slice(
    tensor: Option<&harmonaize_tensor_t>,
    first: u64,
    elements: u64,
    slice: Option<&mut MaybeUninit<Option<Box<harmonaize_tensor_t>>>>,
) -> harmonaize_status_t {
    create(slice, || {
        let tensor = &given(tensor, "tensor")?.0;
        let whole = tensor.elements();
        let out = || Error::OutOfRange { offset: first, count: elements, elements: whole };
        let end = first.checked_add(elements).ok_or_else(out)?;
        Ok(harmonaize_tensor_t(tensor.slice(first..end)?))
    })
}

/// Says where a tensor's bytes are in this process. They are there until the tensor and all its slices are freed. While an
/// operation on it is in flight, what is read and written there is torn.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_tensor_data(
    tensor: Option<&harmonaize_tensor_t>,
    data: Option<&mut MaybeUninit<*mut c_void>>,
) -> harmonaize_status_t {
    call(|| {
        result(data)?.write(given(tensor, "tensor")?.0.view_mut()?.pointer().cast());
        Ok(())
    })
}

/// Says how many elements a tensor has.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_tensor_elements(
    tensor: Option<&harmonaize_tensor_t>,
    elements: Option<&mut MaybeUninit<u64>>,
) -> harmonaize_status_t {
    call(|| {
        result(elements)?.write(given(tensor, "tensor")?.0.elements());
        Ok(())
    })
}

/// Says how many bytes a tensor has.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_tensor_bytes(
    tensor: Option<&harmonaize_tensor_t>,
    bytes: Option<&mut MaybeUninit<u64>>,
) -> harmonaize_status_t {
    call(|| {
        result(bytes)?.write(given(tensor, "tensor")?.0.bytes());
        Ok(())
    })
}

/// Says of which type a tensor's elements are.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_tensor_dtype(
    tensor: Option<&harmonaize_tensor_t>,
    dtype: Option<&mut MaybeUninit<harmonaize_dtype_t>>,
) -> harmonaize_status_t {
    call(|| {
        result(dtype)?.write(given(tensor, "tensor")?.0.dtype().code().into());
        Ok(())
    })
}

/// Where so many bytes from one on lie, if they are the tensor's and there is something to copy them from or to.
fn range(
    tensor: Option<&harmonaize_tensor_t>,
    other: *const c_void,
    offset: u64,
    bytes: usize,
) -> Result<*mut u8, Failure> {
    let tensor = &given(tensor, "tensor")?.0;
    if other.is_null() && bytes > 0 {
        return Err(Failure::argument("NULL where bytes are to be copied"));
    }
    let whole = tensor.bytes();
    let found =
        usize::try_from(offset).ok().map(|offset| Ok::<_, Error>(tensor.view_mut()?.range(offset, bytes)));
    let found = found.transpose()?.flatten();
    let out = || Error::OutOfRange { offset, count: bytes as u64, elements: whole };
    Ok(found.ok_or_else(out)?.pointer())
}

/// Copies bytes into a tensor, from byte `offset` of it on.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_tensor_write(
    tensor: Option<&harmonaize_tensor_t>,
    offset: u64,
    from: *const c_void,
    bytes: usize,
) -> harmonaize_status_t {
    call(|| {
        let to = range(tensor, from, offset, bytes)?;
        if bytes > 0 {
            // SAFETY: so many bytes of the tensor are mapped while it is borrowed; the caller has as many at `from`, which may be
            // the tensor's own.
            unsafe { std::ptr::copy(from.cast(), to, bytes) };
        }
        Ok(())
    })
}

/// Copies bytes out of a tensor, from byte `offset` of it on.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_tensor_read(
    tensor: Option<&harmonaize_tensor_t>,
    offset: u64,
    into: *mut c_void,
    bytes: usize,
) -> harmonaize_status_t {
    call(|| {
        let from = range(tensor, into, offset, bytes)?;
        if bytes > 0 {
            // SAFETY: as in `harmonaize_tensor_write`; the caller's bytes may be written.
            unsafe { std::ptr::copy(from, into.cast(), bytes) };
        }
        Ok(())
    })
}

/// Frees a tensor. An operation in flight on it goes on, and its memory stays taken until then. NULL does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_tensor_free(tensor: Option<Box<harmonaize_tensor_t>>) {
    free(tensor);
}

/// Has the agent map a range of the process's own memfd, in bytes of the file, so that tensors on it need no copy. The memfd
/// has the seal `F_SEAL_SHRINK`, none against writing, and usual pages; the range begins and ends at multiples of a page. The
/// descriptor may be closed afterwards.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_register(
    client: Option<&harmonaize_client_t>,
    memfd: c_int,
    offset: u64,
    bytes: u64,
    region: Option<&mut MaybeUninit<Option<Box<harmonaize_region_t>>>>,
) -> harmonaize_status_t {
    create(region, || {
        let client = &given(client, "client")?.0;
        if memfd < 0 {
            return Err(Failure::argument(format!("{memfd} is no descriptor")));
        }
        let end = offset.checked_add(bytes).ok_or(Error::Region(RegionRefused::Size))?;
        // SAFETY: not -1, and the caller keeps it open during the call. Of one that is not open the kernel says so.
        let memfd = unsafe { BorrowedFd::borrow_raw(memfd) };
        Ok(harmonaize_region_t(Mutex::new(Some(client.register(memfd, offset..end)?))))
    })
}

/// Makes a tensor of so many elements on the bytes of a region from `offset` on, with whatever they hold. The offset is a
/// multiple of an element's bytes; kernels are fastest where it is one of 64.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_region_tensor(
    region: Option<&harmonaize_region_t>,
    dtype: harmonaize_dtype_t,
    offset: u64,
    elements: u64,
    tensor: Option<&mut MaybeUninit<Option<Box<harmonaize_tensor_t>>>>,
) -> harmonaize_status_t {
    create(tensor, || {
        let region = given(region, "region")?.0.lock().unwrap_or_else(PoisonError::into_inner);
        let region = region.as_ref().ok_or(Error::Region(RegionRefused::Unknown))?;
        Ok(harmonaize_tensor_t(region.tensor(dtype_of(dtype)?, offset, elements)?))
    })
}

/// Has the agent let go of a region, and waits until it has. Where tensors on it are left it is refused, and let go once
/// those are freed. The handle makes no tensors any more, and is still to be freed.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_region_unregister(region: Option<&harmonaize_region_t>) -> harmonaize_status_t {
    call(|| {
        let region = given(region, "region")?.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        Ok(region.ok_or(Error::Region(RegionRefused::Unknown))?.unregister()?)
    })
}

/// Frees a region. NULL does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_region_free(region: Option<Box<harmonaize_region_t>>) {
    free(region);
}
