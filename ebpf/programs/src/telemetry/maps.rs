//! The tables that the programs share with user space, and what the loader may set before it loads them.
//!
//! The tables of flows are shared by all processors: sequence numbers have to be followed across them, for a flow's
//! packets do not stay on one (senders migrate, acknowledgements send from another than the application). The totals of
//! interfaces follow nothing, and are per processor.
//! A full table evicts its least recently used flow; the totals still have its packets.

use crate::diagnosis;
use crate::key::{PackedFlowKey, PackedRequestKey, PackedShortKey};
use aya_ebpf::Global;
use aya_ebpf::bindings::BPF_NOEXIST;
use aya_ebpf::macros::map;
use aya_ebpf::maps::{Array, LruHashMap, PerCpuArray, RingBuf};
use harmonaize_events::{
    Event, FoldingSecret, INTERFACE_PROBES, INTERFACE_SLOTS, InterfaceTotals, Losses, RequestSent,
    RoceCounters, RoceEntry, TcpEntry, TcpFlow, Totals,
};

/// A gap of this length between two packets of a flow ends a burst.
#[unsafe(no_mangle)]
static IDLE_GAP_NS: Global<u64> = Global::new(500_000);

/// Signals of congestion further apart than this begin anew.
#[unsafe(no_mangle)]
static CONGESTION_CLEAR_NS: Global<u64> = Global::new(10_000_000);

/// A round trip that is longer than the least by this, and by the least, is late; 0: none is.
#[unsafe(no_mangle)]
static LATE_RTT_NS: Global<u64> = Global::new(0);

/// What keys of flows are folded with.
#[unsafe(no_mangle)]
static FOLDING_SECRET: Global<FoldingSecret> = Global::new([0; 5]);

/// By a [`ShortKey`](harmonaize_events::ShortKey), word by word.
#[map]
static TCP_FLOWS: LruHashMap<[u32; 3], TcpEntry> = LruHashMap::with_max_entries(1 << 15, 0);

/// Likewise.
#[map]
static ROCE_FLOWS: LruHashMap<[u32; 3], RoceEntry> = LruHashMap::with_max_entries(1 << 14, 0);

#[map]
static REQUESTS: LruHashMap<PackedRequestKey, RequestSent> = LruHashMap::with_max_entries(1 << 14, 0);

/// Each interface at its index modulo the number of places, or in one of the next few. The loader lists the interfaces; the
/// programs only look them up.
#[map]
static INTERFACES: PerCpuArray<InterfaceTotals> = PerCpuArray::with_max_entries(INTERFACE_SLOTS, 0);

/// Where new entries are written before they are inserted: the stack has no room. Nothing is counted here.
#[map]
static NEW_TCP: PerCpuArray<TcpEntry> = PerCpuArray::with_max_entries(1, 0);

#[map]
static NEW_ROCE: PerCpuArray<RoceEntry> = PerCpuArray::with_max_entries(1, 0);

/// A word that the verifier knows nothing about.
#[map]
static OPAQUE_VALUE: PerCpuArray<u64> = PerCpuArray::with_max_entries(1, 0);

#[map]
static LOSSES: PerCpuArray<Losses> = PerCpuArray::with_max_entries(1, 0);

#[map]
static EVENTS: RingBuf = RingBuf::with_byte_size(1 << 20, 0);

/// Late round trips, apart from the other events: who lets those gather still wakes for these.
#[map]
static LATE_RTTS: RingBuf = RingBuf::with_byte_size(1 << 17, 0);

/// When the latest of them was told, on any processor.
#[map]
static LAST_LATE_RTT_NS: Array<u64> = Array::with_max_entries(1, 0);

/// How long a gap ends a burst.
#[inline(always)]
pub fn idle_gap_ns() -> u64 {
    IDLE_GAP_NS.load()
}

/// How long without a signal of congestion is clean.
#[inline(always)]
pub fn congestion_clear_ns() -> u64 {
    CONGESTION_CLEAR_NS.load()
}

/// How much longer than the least a late round trip takes; 0 where none is told.
#[inline(always)]
pub fn late_rtt_ns() -> u64 {
    LATE_RTT_NS.load()
}

/// When a late round trip was last told.
#[inline(always)]
pub fn last_late_rtt_ns() -> Option<&'static mut u64> {
    // SAFETY: the array's only entry is always there. Others may write it at the same time: one of the times stays.
    LAST_LATE_RTT_NS.get_ptr_mut(0).map(|told| unsafe { &mut *told })
}

/// The totals of an interface in one direction, on this processor.
#[inline(always)]
pub fn totals<const EGRESS: bool>(interface: u32) -> Option<&'static mut Totals> {
    for next in 0..INTERFACE_PROBES {
        let place = INTERFACES.get_ptr_mut(interface.wrapping_add(next) % INTERFACE_SLOTS)?;
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
pub fn opaque(value: u64) -> Option<u64> {
    let word = OPAQUE_VALUE.get_ptr_mut(0)?;
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

/// What is counted of a connection, from now on if it is new; none where there is no room.
#[inline(always)]
pub fn tcp_flow(key: &PackedFlowKey, ipv4: bool) -> Option<*mut TcpFlow> {
    let short = key.short_tcp(ipv4, &FOLDING_SECRET.load());
    let entry = match TCP_FLOWS.get_ptr_mut(short.key()) {
        Some(entry) => entry,
        None => {
            let new = NEW_TCP.get_ptr_mut(0)?;
            // SAFETY: as in `totals`; the array's only entry is always there.
            let new = unsafe { &mut *new };
            new.key = key.to_flow_key();
            insert(&TCP_FLOWS, &short, new)?
        }
    };
    // SAFETY: memory of the table stays until this program has ended.
    let entry = unsafe { &mut *entry };
    key.matches(&entry.key).then_some(&raw mut entry.counters)
}

/// What is counted of a queue pair, from now on if it is new; none where there is no room.
#[inline(always)]
pub fn roce_flow(key: &PackedFlowKey, ipv4: bool) -> Option<*mut RoceCounters> {
    let short = key.short_roce(ipv4, &FOLDING_SECRET.load());
    let entry = match ROCE_FLOWS.get_ptr_mut(short.key()) {
        Some(entry) => entry,
        None => {
            let new = NEW_ROCE.get_ptr_mut(0)?;
            // SAFETY: as for TCP.
            let new = unsafe { &mut *new };
            new.key = key.to_flow_key();
            insert(&ROCE_FLOWS, &short, new)?
        }
    };
    roce_counters(key, entry)
}

/// What is counted of a queue pair, if anything is.
#[inline(always)]
pub fn find_roce_flow(key: &PackedFlowKey, ipv4: bool) -> Option<*mut RoceCounters> {
    let short = key.short_roce(ipv4, &FOLDING_SECRET.load());
    roce_counters(key, ROCE_FLOWS.get_ptr_mut(short.key())?)
}

/// The counters of an entry, unless another queue pair has the same short key.
#[inline(always)]
fn roce_counters(key: &PackedFlowKey, entry: *mut RoceEntry) -> Option<*mut RoceCounters> {
    // SAFETY: memory of the table stays until this program has ended.
    let entry = unsafe { &mut *entry };
    key.matches(&entry.key).then_some(&raw mut entry.counters)
}

#[inline(always)]
fn insert<V>(table: &LruHashMap<[u32; 3], V>, short: &PackedShortKey, new: &V) -> Option<*mut V> {
    if table.insert(short.key(), new, u64::from(BPF_NOEXIST)).is_ok() {
        losses(|losses| losses.entries += 1);
    }
    // Another processor may have been quicker; and then it is there too.
    table.get_ptr_mut(short.key())
}

/// Requests that wait for their acknowledgement.
#[inline(always)]
pub fn requests() -> &'static LruHashMap<PackedRequestKey, RequestSent> {
    &REQUESTS
}

/// Tells user space, or counts that it could not be told. Apart from the rest, for it is rare.
#[inline(never)]
pub fn emit(event: &Event) {
    if EVENTS.output::<Event>(event, 0).is_err() {
        count_lost_event();
    }
}

/// Tells user space of a late round trip, likewise.
#[inline(never)]
pub fn emit_late_rtt(event: &Event) {
    if LATE_RTTS.output::<Event>(event, 0).is_err() {
        count_lost_event();
    }
}

/// An event found no room.
#[inline(always)]
fn count_lost_event() {
    losses(|losses| losses.events += 1);
    diagnosis::note_full_ring();
}
