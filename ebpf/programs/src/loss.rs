//! Drops buffers by chance, but for short ones: the network of a test, where the kernel has no netem. And a program that
//! does nothing, to know what a run costs by itself.
#![no_std]
#![no_main]

use aya_ebpf::Global;
use aya_ebpf::helpers::bpf_get_prandom_u32;
use aya_ebpf::macros::{classifier, map};
use aya_ebpf::maps::PerCpuArray;
use aya_ebpf::programs::TcContext;

/// Of 2^32 packets, how many are dropped.
#[unsafe(no_mangle)]
static DROP_PROBABILITY: Global<u32> = Global::new(0);

/// Shorter buffers pass: acknowledgements and handshakes.
#[unsafe(no_mangle)]
static MIN_BYTES: Global<u32> = Global::new(200);

/// How many were dropped.
#[map]
static DROPPED: PerCpuArray<u64> = PerCpuArray::with_max_entries(1, 0);

/// Lets the packet go on.
const NEXT: i32 = -1;
/// Ends its way.
const DROP: i32 = 2;

/// Drops some of what comes in.
#[classifier]
pub fn drop_randomly(context: TcContext) -> i32 {
    // SAFETY: the helper takes nothing.
    let drawn = unsafe { bpf_get_prandom_u32() };
    if context.len() < MIN_BYTES.load() || drawn >= DROP_PROBABILITY.load() {
        return NEXT;
    }
    if let Some(dropped) = DROPPED.get_ptr_mut(0) {
        // SAFETY: the array's only entry is always there, and this processor runs nothing else of ours.
        unsafe { *dropped += 1 };
    }
    DROP
}

/// Does nothing.
#[classifier]
pub fn pass(_context: TcContext) -> i32 {
    NEXT
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
