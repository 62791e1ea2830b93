//! The tables that the programs share with user space, and what the loader may set before it loads them.
//!
//! The tables of flows are shared by all processors: sequence numbers have to be followed across them, for a flow's
//! packets do not stay on one (senders migrate, acknowledgements send from another than the application). The totals of
//! interfaces follow nothing, and are per processor.
//! A full table evicts its least recently used flow; the totals still have its packets.

use crate::key::{Key, Requested};
use aya_ebpf::Global;
use aya_ebpf::bindings::BPF_NOEXIST;
use aya_ebpf::macros::map;
use aya_ebpf::maps::{LruHashMap, PerCpuArray, RingBuf};
use harmonaize_events::{
    Event, INTERFACE_PLACES, INTERFACE_TRIES, InterfaceTotals, Losses, RequestSent, RoceCounters, TcpFlow,
    Totals,
};

/// A gap of this length between two packets of a flow ends a burst.
#[unsafe(no_mangle)]
static IDLE_GAP_NS: Global<u64> = Global::new(500_000);

/// Signals of congestion further apart than this begin anew.
#[unsafe(no_mangle)]
static CLEAN_NS: Global<u64> = Global::new(10_000_000);

/// By an [`Ipv4Key`](harmonaize_events::Ipv4Key), word by word.
#[map]
static TCP4_FLOWS: LruHashMap<[u64; 2], TcpFlow> = LruHashMap::with_max_entries(1 << 15, 0);

#[map]
static TCP6_FLOWS: LruHashMap<Key, TcpFlow> = LruHashMap::with_max_entries(1 << 14, 0);

/// By an [`Ipv4RoceKey`](harmonaize_events::Ipv4RoceKey), word by word.
#[map]
static ROCE4_FLOWS: LruHashMap<[u64; 3], RoceCounters> = LruHashMap::with_max_entries(1 << 14, 0);

#[map]
static ROCE6_FLOWS: LruHashMap<Key, RoceCounters> = LruHashMap::with_max_entries(1 << 14, 0);

#[map]
static REQUESTS: LruHashMap<Requested, RequestSent> = LruHashMap::with_max_entries(1 << 14, 0);

/// Each interface at its index modulo the number of places, or in one of the next few. The loader lists the interfaces; the
/// programs only look them up.
#[map]
static INTERFACES: PerCpuArray<InterfaceTotals> = PerCpuArray::with_max_entries(INTERFACE_PLACES, 0);

/// A word that the verifier knows nothing about.
#[map]
static WORD: PerCpuArray<u64> = PerCpuArray::with_max_entries(1, 0);

#[map]
static LOSSES: PerCpuArray<Losses> = PerCpuArray::with_max_entries(1, 0);

#[map]
static EVENTS: RingBuf = RingBuf::with_byte_size(1 << 20, 0);

// Begun from these instead of the stack, which has 512 bytes.
#[unsafe(link_section = ".rodata")]
static NEW_TCP: TcpFlow = zeroed();
#[unsafe(link_section = ".rodata")]
static NEW_ROCE: RoceCounters = zeroed();

/// Zeros, for structures of integers.
pub const fn zeroed<T>() -> T {
    // SAFETY: used for structures of integers alone.
    unsafe { core::mem::zeroed() }
}

/// How long a gap ends a burst.
#[inline(always)]
pub fn idle_gap_ns() -> u64 {
    IDLE_GAP_NS.load()
}

/// How long without a signal of congestion is clean.
#[inline(always)]
pub fn clean_ns() -> u64 {
    CLEAN_NS.load()
}

/// The totals of an interface in one direction, on this processor.
#[inline(always)]
pub fn totals<const EGRESS: bool>(interface: u32) -> Option<&'static mut Totals> {
    for next in 0..INTERFACE_TRIES {
        let place = INTERFACES.get_ptr_mut(interface.wrapping_add(next) % INTERFACE_PLACES)?;
        // SAFETY: the array's places are always there, and on this processor no other program of ours runs meanwhile.
        let totals = unsafe { &mut *place };
        if totals.interface == u64::from(interface) {
            return Some(if EGRESS { &mut totals.egress } else { &mut totals.ingress });
        }
    }
    None
}

/// The same value, of which the verifier knows nothing any more.
#[inline(always)]
pub fn unfollowed(value: u64) -> Option<u64> {
    let word = WORD.get_ptr_mut(0)?;
    // SAFETY: the array's only entry is always there, and this processor runs nothing else of ours.
    unsafe {
        word.write_volatile(value);
        Some(word.read_volatile())
    }
}

/// Notes a loss on this processor.
#[inline(always)]
pub fn losses(note: impl FnOnce(&mut Losses)) {
    if let Some(losses) = LOSSES.get_ptr_mut(0) {
        // SAFETY: as in `totals`; the array's only entry is always there.
        note(unsafe { &mut *losses });
    }
}

/// The entry of a connection over IPv4, made if it is new; none where there is no room.
#[inline(always)]
pub fn tcp4_flow(key: &Key) -> Option<*mut TcpFlow> {
    entry(&TCP4_FLOWS, &key.ipv4(), &NEW_TCP)
}

/// The entry of a connection over IPv6, made if it is new; none where there is no room.
#[inline(always)]
pub fn tcp6_flow(key: &Key) -> Option<*mut TcpFlow> {
    entry(&TCP6_FLOWS, &key.apart(), &NEW_TCP)
}

#[inline(always)]
fn entry<K, V>(table: &LruHashMap<K, V>, key: &K, new: &V) -> Option<*mut V> {
    if let Some(flow) = table.get_ptr_mut(key) {
        return Some(flow);
    }
    if table.insert(key, new, u64::from(BPF_NOEXIST)).is_ok() {
        losses(|losses| losses.entries += 1);
    }
    // Another processor may have been quicker; and then it is there too.
    table.get_ptr_mut(key)
}

/// The entry of a queue pair over IPv4, made if it is new; none where there is no room.
#[inline(always)]
pub fn roce4_flow(key: &Key) -> Option<*mut RoceCounters> {
    entry(&ROCE4_FLOWS, &key.ipv4_roce(), &NEW_ROCE)
}

/// The entry of a queue pair over IPv6, made if it is new; none where there is no room.
#[inline(always)]
pub fn roce6_flow(key: &Key) -> Option<*mut RoceCounters> {
    entry(&ROCE6_FLOWS, &key.apart(), &NEW_ROCE)
}

/// The entry of a queue pair, if there is one.
#[inline(always)]
pub fn known_roce_flow(key: &Key, ipv4: bool) -> Option<*mut RoceCounters> {
    if ipv4 { ROCE4_FLOWS.get_ptr_mut(key.ipv4_roce()) } else { ROCE6_FLOWS.get_ptr_mut(key) }
}

/// Requests that wait for their acknowledgement.
#[inline(always)]
pub fn requests() -> &'static LruHashMap<Requested, RequestSent> {
    &REQUESTS
}

/// Tells user space, or counts that it could not be told. Apart from the rest, for it is rare.
#[inline(never)]
pub fn tell(event: &Event) {
    if EVENTS.output::<Event>(event, 0).is_err() {
        losses(|losses| losses.events += 1);
    }
}
