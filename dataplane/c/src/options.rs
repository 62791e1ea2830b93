//! Options that begin with their size, so that a later version can have more of them.

use crate::error::Failure;
use std::mem::MaybeUninit;
use std::time::Duration;

/// Nanoseconds that are never over: some 584 years.
pub const HARMONAIZE_FOREVER: u64 = u64::MAX;

/// More bytes than any version's options have.
const MAX_SIZE: usize = 4096;

/// A structure whose first field is a `usize`: its size, as its caller knows it.
///
/// # Safety
/// `repr(C)`, with that first field, and a value whatever bytes it has, zeros included.
pub(crate) unsafe trait SizeFirst: Copy {}

/// The size that a caller has put first.
///
/// # Safety
/// `place` points to as many bytes as that says, and to no fewer than it has itself.
unsafe fn size_of_caller<T: SizeFirst>(place: *const T) -> Result<usize, Failure> {
    if !place.is_aligned() {
        return Err(Failure::argument(format!("options at {place:?}, which is not aligned")));
    }
    // SAFETY: aligned, and the caller has promised that it is there.
    let size = unsafe { place.cast::<usize>().read() };
    if !(size_of::<usize>()..=MAX_SIZE).contains(&size) {
        return Err(Failure::argument(format!(
            "a structure of {size} bytes; set its size to its sizeof first, and the rest to zero"
        )));
    }
    Ok(size)
}

/// What a caller has set; zeros for what it does not know, or for all where it gives none.
///
/// # Safety
/// `given` is NULL, or points to as many bytes as its size says.
pub(crate) unsafe fn read<T: SizeFirst>(given: *const T) -> Result<T, Failure> {
    let mut options = MaybeUninit::<T>::zeroed();
    if !given.is_null() {
        // SAFETY: as the caller has promised.
        let size = unsafe { size_of_caller(given) }?;
        let known = size.min(size_of::<T>());
        // SAFETY: so many bytes are there at both ends, and ours are new.
        unsafe { std::ptr::copy_nonoverlapping(given.cast::<u8>(), options.as_mut_ptr().cast(), known) };
        // SAFETY: the caller has promised as many bytes as the size says.
        let beyond = unsafe { std::slice::from_raw_parts(given.cast::<u8>().add(known), size - known) };
        if beyond.iter().any(|byte| *byte != 0) {
            return Err(Failure::argument(
                "options that this version of the library does not know; it is older than the header",
            ));
        }
    }
    // SAFETY: whatever bytes it has, they are a value.
    Ok(unsafe { options.assume_init() })
}

/// Gives a caller as much of a value as it knows, and leaves its size.
///
/// # Safety
/// `place` is NULL, or points to as many bytes as its size says.
pub(crate) unsafe fn write<T: SizeFirst>(place: *mut T, value: &T) -> Result<(), Failure> {
    if place.is_null() {
        return Ok(());
    }
    // SAFETY: as the caller has promised.
    let size = unsafe { size_of_caller(place) }?;
    let (first, known) = (size_of::<usize>(), size.min(size_of::<T>()));
    // SAFETY: so many bytes are there at both ends, behind the size; the value is borrowed, so they do not overlap.
    unsafe {
        let (from, to) = (std::ptr::from_ref(value).cast::<u8>(), place.cast::<u8>());
        std::ptr::copy_nonoverlapping(from.add(first), to.add(first), known - first);
        std::ptr::write_bytes(to.add(known), 0, size - known);
    }
    Ok(())
}

/// A duration in nanoseconds; none where it is 0.
pub(crate) fn duration(nanoseconds: u64) -> Option<Duration> {
    (nanoseconds > 0).then(|| Duration::from_nanos(nanoseconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Old {
        size: usize,
        one: u64,
    }

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct New {
        old: Old,
        two: u64,
    }

    // SAFETY: integers, of which the first is the size.
    unsafe impl SizeFirst for Old {}
    // SAFETY: as above.
    unsafe impl SizeFirst for New {}

    fn new(size: usize, two: u64) -> New {
        New { old: Old { size, one: 7 }, two }
    }

    #[test]
    fn older_headers_leave_newer_options_unset() {
        let caller = new(size_of::<Old>(), 9);
        // SAFETY: a structure with a size that it has.
        assert_eq!(unsafe { read(&raw const caller) }.unwrap(), new(size_of::<Old>(), 0));
        // SAFETY: none.
        let unset = unsafe { read::<New>(std::ptr::null()) }.unwrap();
        assert_eq!(unset, New { old: Old { size: 0, one: 0 }, two: 0 });
    }

    #[test]
    fn newer_headers_may_not_set_what_is_unknown() {
        let read = |caller: &New| {
            // SAFETY: a structure with a size that it has.
            unsafe { read(std::ptr::from_ref(caller).cast::<Old>()) }
        };
        assert_eq!(read(&new(size_of::<New>(), 0)).unwrap().one, 7);
        assert!(read(&new(size_of::<New>(), 9)).unwrap_err().text.contains("older than the header"));
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        for size in [0, 7, MAX_SIZE + 1, usize::MAX] {
            let caller = new(size, 0);
            // SAFETY: no more than the size is looked at.
            let text = unsafe { read(&raw const caller) }.unwrap_err().text;
            assert!(text.contains("sizeof"), "{text}");
        }
    }

    #[test]
    fn results_fill_what_the_caller_knows() {
        let mut old = new(size_of::<Old>(), 3);
        // SAFETY: a structure with a size that it has.
        unsafe { write(&raw mut old, &new(0, 5)) }.unwrap();
        assert_eq!(old, new(size_of::<Old>(), 3));
        let mut longer = new(size_of::<New>(), 3);
        // SAFETY: as above.
        unsafe { write((&raw mut longer).cast::<Old>(), &Old { size: 0, one: 8 }) }.unwrap();
        assert_eq!(longer, New { old: Old { size: size_of::<New>(), one: 8 }, two: 0 });
    }
}
