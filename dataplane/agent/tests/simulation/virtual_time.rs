//! Virtual time and seeded randomness for one thread. Clock, waiting and randomness of the C library are replaced in
//! this test's process.
//!
//! What the thread and its runtime read of clocks is this clock, and it goes on only when the runtime would wait. Other threads have the
//! system's.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

thread_local! {
    static SIMULATED: Cell<bool> = const { Cell::new(false) };
}

/// Nanoseconds since the clock began. It begins late enough that everybody may subtract.
static NOW: AtomicU64 = AtomicU64::new(BEGIN);
static RANDOM: AtomicU64 = AtomicU64::new(0);

const BEGIN: u64 = 1_000_000_000_000;
/// What the clock of the day says when this one begins, in seconds.
const DAY: u64 = 1_800_000_000;

/// From now on time is virtual on this thread, and its randomness comes from a seed.
pub(crate) fn begin(seed: u64) {
    RANDOM.store(seed, Relaxed);
    SIMULATED.set(true);
}

/// Nanoseconds since the beginning.
pub(crate) fn now() -> u64 {
    NOW.load(Relaxed) - BEGIN
}

/// Steele, Lea, Flood: Fast splittable pseudorandom number generators (SplitMix64).
fn random() -> u64 {
    let mut bits = RANDOM.fetch_add(0x9e37_79b9_7f4a_7c15, Relaxed);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

// SAFETY: as the C library's, of which this is a replacement with the same signature.
#[unsafe(no_mangle)]
unsafe extern "C" fn clock_gettime(clock: libc::clockid_t, time: *mut libc::timespec) -> libc::c_int {
    if !SIMULATED.get() {
        // SAFETY: the same call, with the caller's arguments.
        return unsafe { libc::syscall(libc::SYS_clock_gettime, clock, time) } as libc::c_int;
    }
    let now = NOW.load(Relaxed);
    let day = if clock == libc::CLOCK_REALTIME { DAY } else { 0 };
    // SAFETY: whoever calls gives a place for the time.
    unsafe {
        (*time).tv_sec = (day + now / 1_000_000_000) as libc::time_t;
        (*time).tv_nsec = (now % 1_000_000_000) as libc::c_long;
    }
    0
}

// SAFETY: as the C library's, of which this is a replacement with the same signature.
#[unsafe(no_mangle)]
unsafe extern "C" fn epoll_wait(
    set: libc::c_int,
    events: *mut libc::epoll_event,
    most: libc::c_int,
    timeout: libc::c_int,
) -> libc::c_int {
    let simulated = SIMULATED.get();
    let wait = if simulated { 0 } else { timeout };
    // SAFETY: the same call, with the caller's arguments and no mask of signals.
    let ready = unsafe { libc::epoll_pwait(set, events, most, wait, std::ptr::null()) };
    if simulated && ready == 0 && timeout != 0 {
        // Nobody wakes a thread that waits for ever. Nothing may unwind from here.
        let Ok(milliseconds @ 1..) = u64::try_from(timeout) else {
            eprintln!("everything waits for ever");
            std::process::abort();
        };
        NOW.fetch_add(milliseconds * 1_000_000, Relaxed);
    }
    ready
}

// SAFETY: as the C library's, of which this is a replacement with the same signature.
#[unsafe(no_mangle)]
unsafe extern "C" fn getrandom(
    into: *mut libc::c_void,
    bytes: libc::size_t,
    flags: libc::c_uint,
) -> libc::ssize_t {
    if !SIMULATED.get() {
        // SAFETY: the same call, with the caller's arguments.
        return unsafe { libc::syscall(libc::SYS_getrandom, into, bytes, flags) } as libc::ssize_t;
    }
    for at in 0..bytes {
        // SAFETY: whoever calls gives a place for so many bytes.
        unsafe { into.cast::<u8>().add(at).write(random() as u8) };
    }
    bytes as libc::ssize_t
}
