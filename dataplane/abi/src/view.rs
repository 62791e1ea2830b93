//! Views of tensor memory. A tenant may write to its tensors at any moment, so no Rust reference to them may exist:
//! a view is a pointer, a length and a lifetime, and only raw-pointer kernels touch what lies behind it.

use core::marker::PhantomData;

/// Bytes that may be read through raw pointers while `'a` lasts, and that others may change meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    pointer: *const u8,
    bytes: usize,
    memory: PhantomData<&'a ()>,
}

/// Bytes that may be read and written through raw pointers while `'a` lasts. Views may alias one another: whoever writes
/// through one must read each operand element before it writes the element of the same index.
#[derive(Clone, Copy, Debug)]
pub struct ViewMut<'a> {
    pointer: *mut u8,
    bytes: usize,
    memory: PhantomData<&'a ()>,
}

impl<'a> View<'a> {
    /// A view of `bytes` bytes from `pointer`.
    ///
    /// # Safety
    /// The range `pointer..pointer + bytes` must stay mapped and readable for `'a`. It must never be covered by a Rust
    /// reference while others may write to it.
    pub const unsafe fn new(pointer: *const u8, bytes: usize) -> Self {
        Self { pointer, bytes, memory: PhantomData }
    }

    /// First byte.
    pub const fn pointer(self) -> *const u8 {
        self.pointer
    }

    /// Length in bytes.
    pub const fn bytes(self) -> usize {
        self.bytes
    }

    /// `bytes` bytes from `offset`, or `None` if they do not lie inside.
    pub fn range(self, offset: usize, bytes: usize) -> Option<Self> {
        if offset.checked_add(bytes)? > self.bytes {
            return None;
        }
        Some(Self { pointer: self.pointer.wrapping_add(offset), bytes, memory: PhantomData })
    }
}

impl<'a> ViewMut<'a> {
    /// A view of `bytes` bytes from `pointer`.
    ///
    /// # Safety
    /// The range `pointer..pointer + bytes` must stay mapped and writable for `'a`. It must never be covered by a Rust
    /// reference while this view is in use.
    pub const unsafe fn new(pointer: *mut u8, bytes: usize) -> Self {
        Self { pointer, bytes, memory: PhantomData }
    }

    /// First byte.
    pub const fn pointer(self) -> *mut u8 {
        self.pointer
    }

    /// Length in bytes.
    pub const fn bytes(self) -> usize {
        self.bytes
    }

    /// `bytes` bytes from `offset`, or `None` if they do not lie inside.
    pub fn range(self, offset: usize, bytes: usize) -> Option<Self> {
        if offset.checked_add(bytes)? > self.bytes {
            return None;
        }
        Some(Self { pointer: self.pointer.wrapping_add(offset), bytes, memory: PhantomData })
    }

    /// The same bytes, to read.
    pub const fn as_view(self) -> View<'a> {
        View { pointer: self.pointer, bytes: self.bytes, memory: PhantomData }
    }
}

macro_rules! of_slices {
    ($($element:ty)*) => {$(
        /// Whoever holds the slice keeps others from writing.
        impl<'a> From<&'a [$element]> for View<'a> {
            fn from(slice: &'a [$element]) -> Self {
                Self { pointer: slice.as_ptr().cast(), bytes: size_of_val(slice), memory: PhantomData }
            }
        }

        /// Nobody else reaches the slice while the view lasts.
        impl<'a> From<&'a mut [$element]> for ViewMut<'a> {
            fn from(slice: &'a mut [$element]) -> Self {
                Self { pointer: slice.as_mut_ptr().cast(), bytes: size_of_val(slice), memory: PhantomData }
            }
        }
    )*};
}

of_slices!(u8 f32);
