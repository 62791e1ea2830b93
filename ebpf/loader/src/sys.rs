//! The calls of bpf(2) that the library beneath does not have. They read a map in batches, and run a program on a
//! packet that nobody sent.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const PROGRAM_TEST_RUN: libc::c_long = 10;
const MAP_LOOKUP_BATCH: libc::c_long = 24;

/// `batch` in `union bpf_attr`.
#[repr(C)]
struct Batch {
    from: u64,
    to: u64,
    keys: u64,
    values: u64,
    count: u32,
    map: u32,
    element_flags: u64,
    flags: u64,
}

/// `test` in `union bpf_attr`.
#[repr(C)]
#[derive(Default)]
struct Test {
    program: u32,
    returned: u32,
    input_length: u32,
    output_length: u32,
    input: u64,
    output: u64,
    repeat: u32,
    duration_ns: u32,
    context_length: u32,
    context_out_length: u32,
    context: u64,
    context_out: u64,
    flags: u32,
    processor: u32,
    batch: u32,
    reserved: u32,
}

fn bpf<T>(command: libc::c_long, attributes: &mut T) -> io::Result<i32> {
    // SAFETY: the kernel reads and writes `attributes` alone, of the size that it is told, and what it points to: buffers
    // that the callers below hold borrowed until this returns.
    let done =
        unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attributes), size_of::<T>()) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(i32::try_from(done).unwrap_or(0)) }
}

/// What one call brought.
pub(crate) struct BatchResult {
    /// How many entries.
    pub(crate) count: usize,
    /// There are no more.
    pub(crate) done: bool,
}

/// Reads entries of a hash table into the beginning of `keys` and `values`. `place` is where the last call stopped, none at
/// first.
///
/// # Errors
/// ENOSPC: the buffers are too small for the next bucket.
pub(crate) fn lookup_batch<K, V>(
    map: BorrowedFd<'_>,
    place: &mut Option<u32>,
    keys: &mut [K],
    values: &mut [V],
) -> io::Result<BatchResult>
where
    K: FromBytes + IntoBytes + Immutable + KnownLayout,
    V: FromBytes + IntoBytes + Immutable + KnownLayout,
{
    let room = keys.len().min(values.len());
    let from = *place;
    let mut to = 0u32;
    let mut batch = Batch {
        from: from.as_ref().map_or(0, |from| std::ptr::from_ref(from) as u64),
        to: std::ptr::from_mut(&mut to) as u64,
        keys: keys.as_mut_ptr() as u64,
        values: values.as_mut_ptr() as u64,
        count: u32::try_from(room).unwrap_or(u32::MAX),
        map: u32::try_from(map.as_raw_fd()).map_err(|_| io::ErrorKind::InvalidInput)?,
        element_flags: 0,
        flags: 0,
    };
    let done = match bpf(MAP_LOOKUP_BATCH, &mut batch) {
        Ok(_) => false,
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => true,
        Err(error) => return Err(error),
    };
    *place = Some(to);
    Ok(BatchResult { count: (batch.count as usize).min(room), done })
}

/// What a run on a packet gave.
pub(crate) struct TestRunResult {
    /// What the program returned.
    pub(crate) returned: i32,
    /// Mean nanoseconds of a run.
    pub(crate) duration_ns: u32,
}

/// Runs a program `repeat` times on a packet, with a context (`struct __sk_buff`) or with none where that is empty.
pub(crate) fn test_run(
    program: BorrowedFd<'_>,
    packet: &[u8],
    context: &[u8],
    repeat: u32,
) -> io::Result<TestRunResult> {
    let short = |length: usize| u32::try_from(length).map_err(|_| io::ErrorKind::InvalidInput);
    let mut test = Test {
        program: u32::try_from(program.as_raw_fd()).map_err(|_| io::ErrorKind::InvalidInput)?,
        input_length: short(packet.len())?,
        input: packet.as_ptr() as u64,
        repeat,
        context_length: short(context.len())?,
        context: if context.is_empty() { 0 } else { context.as_ptr() as u64 },
        ..Test::default()
    };
    bpf(PROGRAM_TEST_RUN, &mut test)?;
    Ok(TestRunResult { returned: test.returned.cast_signed(), duration_ns: test.duration_ns })
}

/// `map_elem` in `union bpf_attr`.
#[repr(C)]
struct Element {
    map: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

const MAP_LOOKUP: libc::c_long = 1;
const MAP_DELETE: libc::c_long = 3;

/// Reads one entry; false when there is none. Does not count as a use of it.
pub(crate) fn lookup<V: FromBytes + IntoBytes + KnownLayout>(
    map: BorrowedFd<'_>,
    key: &[u8],
    value: &mut V,
) -> io::Result<bool> {
    let mut element = Element {
        map: u32::try_from(map.as_raw_fd()).map_err(|_| io::ErrorKind::InvalidInput)?,
        padding: 0,
        key: key.as_ptr() as u64,
        value: value.as_mut_bytes().as_mut_ptr() as u64,
        flags: 0,
    };
    match bpf(MAP_LOOKUP, &mut element) {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Removes an entry; false when there is none.
pub(crate) fn delete(map: BorrowedFd<'_>, key: &[u8]) -> io::Result<bool> {
    let mut element = Element {
        map: u32::try_from(map.as_raw_fd()).map_err(|_| io::ErrorKind::InvalidInput)?,
        padding: 0,
        key: key.as_ptr() as u64,
        value: 0,
        flags: 0,
    };
    match bpf(MAP_DELETE, &mut element) {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Err(error) => Err(error),
    }
}

const LINK_CREATE: libc::c_long = 28;
/// `BPF_XDP` of `enum bpf_attach_type`.
const ATTACH_XDP: u32 = 37;
/// The stack's own path instead of the device's driver (`XDP_FLAGS_SKB_MODE`).
const GENERIC: u32 = 2;

/// `link_create` in `union bpf_attr`.
#[repr(C)]
struct LinkCreate {
    program: u32,
    interface: u32,
    kind: u32,
    flags: u32,
}

/// Attaches an XDP program for as long as the result is open. The library beneath would replace a program of somebody else
/// where the kernel refuses.
pub(crate) fn attach_xdp(program: BorrowedFd<'_>, interface: u32, generic: bool) -> io::Result<OwnedFd> {
    let mut attributes = LinkCreate {
        program: u32::try_from(program.as_raw_fd()).map_err(|_| io::ErrorKind::InvalidInput)?,
        interface,
        kind: ATTACH_XDP,
        flags: if generic { GENERIC } else { 0 },
    };
    let link = bpf(LINK_CREATE, &mut attributes)?;
    // SAFETY: the call has returned a new descriptor, which nobody else has.
    Ok(unsafe { OwnedFd::from_raw_fd(link) })
}

const OBJECT_INFO: libc::c_long = 15;
/// Bytes of `struct bpf_prog_info` up to what is read, and where in it the fields lie.
const INFO: usize = 224;
const RUN_TIME_AT: usize = 192;
const RUN_COUNT_AT: usize = 200;
const VERIFIED_AT: usize = 216;

/// `info` in `union bpf_attr`.
#[repr(C)]
struct Info {
    object: u32,
    length: u32,
    info: u64,
}

/// What the kernel says of a program's runs.
pub(crate) struct ProgramStats {
    pub(crate) runs: u64,
    pub(crate) time: Duration,
    /// Instructions that the verifier went through; none where the kernel does not tell.
    pub(crate) verified: Option<u32>,
}

/// How often a program ran while runs were timed, and for how long.
pub(crate) fn program_stats(program: BorrowedFd<'_>) -> io::Result<ProgramStats> {
    let mut bytes = [0u8; INFO];
    let mut info = Info {
        object: u32::try_from(program.as_raw_fd()).map_err(|_| io::ErrorKind::InvalidInput)?,
        length: INFO as u32,
        info: bytes.as_mut_ptr() as u64,
    };
    bpf(OBJECT_INFO, &mut info)?;
    let at = |at: usize| {
        let word = bytes.get(at..at + 8).and_then(|word| word.first_chunk());
        word.map_or(0, |word| u64::from_ne_bytes(*word))
    };
    let verified = u32::try_from(at(VERIFIED_AT) & u64::from(u32::MAX)).ok().filter(|count| *count != 0);
    Ok(ProgramStats { runs: at(RUN_COUNT_AT), time: Duration::from_nanos(at(RUN_TIME_AT)), verified })
}
