//! What both protocols count: packets, bytes, bursts, marks, round trips; and how events are told.

use crate::headers::PacketInfo;
use crate::key::PackedFlowKey;
use crate::maps;
use aya_ebpf::helpers::bpf_ktime_get_ns;
use harmonaize_events::{Direction, Event, EventKind, RttStats, Traffic};

/// Late round trips are told at least so far apart, those of all flows: a flood of them becomes none of events.
const MIN_LATE_INTERVAL_NS: u64 = 1_000_000;
/// Beyond the least by this, a receiver may have delayed an acknowledgement, or it waited for an answer. Linux delays for 40 ms.
const DELAYED_ACK_NS: u64 = 30_000_000;

/// What was handed to a function; the verifier wants to see that it is there.
#[inline(always)]
pub fn packet_info<'a>(seen: *const PacketInfo) -> Option<&'a PacketInfo> {
    // SAFETY: it lies on the caller's stack, whole, until the function returns.
    unsafe { seen.as_ref() }
}

/// The time.
#[inline(always)]
pub fn now() -> u64 {
    // SAFETY: the helper takes nothing and only reads the clock.
    unsafe { bpf_ktime_get_ns() }
}

/// Counts a buffer for a flow, and tells of a flow or burst that begins, and of marks.
///
/// Several processors may do so for one flow at once: what a peer's softirq and its application send over a veth comes in
/// on both of their processors. So packets and bytes are added atomically, and exact. The rest is not: two writers may
/// lose one of their two steps there.
#[inline(always)]
pub fn count<const EGRESS: bool>(traffic: &mut Traffic, seen: &PacketInfo, now: u64) {
    let before = traffic.bytes;
    add(&mut traffic.packets, seen.packets);
    add(&mut traffic.bytes, seen.bytes);
    if traffic.first_ns == 0 {
        traffic.first_ns = now;
        traffic.burst_began_ns = now;
        emit::<EGRESS>(EventKind::FlowBegan, &seen.key, now, 0);
    } else if exceeds(now, traffic.last_ns, maps::idle_gap_ns()) {
        let event = Event {
            burst_began_ns: traffic.burst_began_ns,
            burst_ended_ns: traffic.last_ns,
            burst_bytes: before - traffic.burst_after,
            ..event::<EGRESS>(EventKind::BurstBegan, &seen.key, now, 0)
        };
        maps::emit(&event);
        traffic.burst_began_ns = now;
        traffic.burst_after = before;
    }
    traffic.last_ns = now;
    if seen.ecn_ce != 0 {
        traffic.ecn_ce += seen.packets;
        let total = traffic.ecn_ce;
        congestion::<EGRESS>(traffic, seen, now, total);
    }
}

/// Notes a signal of congestion, and tells of the first after a clean while; `total` is what is counted of them.
#[inline(always)]
pub fn congestion<const EGRESS: bool>(traffic: &mut Traffic, seen: &PacketInfo, now: u64, total: u64) {
    if traffic.congestion_signal_ns == 0
        || exceeds(now, traffic.congestion_signal_ns, maps::congestion_clear_ns())
    {
        emit::<EGRESS>(EventKind::CongestionBegan, &seen.key, now, total);
    }
    traffic.congestion_signal_ns = now;
}

/// Tells what happened.
#[inline(always)]
pub fn emit<const EGRESS: bool>(kind: EventKind, key: &PackedFlowKey, now: u64, total: u64) {
    maps::emit(&event::<EGRESS>(kind, key, now, total));
}

#[inline(always)]
fn event<const EGRESS: bool>(kind: EventKind, key: &PackedFlowKey, now: u64, total: u64) -> Event {
    let direction = if EGRESS { Direction::Egress } else { Direction::Ingress };
    Event {
        time_ns: now,
        flow: key.flow(direction),
        kind: kind as u32,
        count: 0,
        total,
        burst_began_ns: 0,
        burst_ended_ns: 0,
        burst_bytes: 0,
        paused_ns: 0,
        size: 0,
    }
}

/// Adds to a counter that several processors may add to at once.
#[inline(always)]
fn add(counter: &mut u64, value: u64) {
    // SAFETY: the counter is eight bytes, aligned, in a table's entry.
    unsafe {
        core::arch::asm!("lock *(u64 *)({at} + 0) += {value}", at = in(reg) counter, value = in(reg) value);
    }
}

/// True when `later` is more than `span` after `earlier`; times of other processors may be a little ahead of ours.
#[inline(always)]
pub fn exceeds(later: u64, earlier: u64, span: u64) -> bool {
    later > earlier && later - earlier > span
}

/// Takes a sample.
#[inline(always)]
pub fn record_rtt(trips: &mut RttStats, from: u64, to: u64) {
    let time = to.saturating_sub(from);
    if trips.count == 0 || time < trips.min_ns {
        trips.min_ns = time;
    }
    trips.last_ns = time;
    trips.sum_ns += time;
    trips.count += 1;
}

/// Tells of the latest round trip of what left at a time, if it was late; `with` says more of it. For that a round trip must have ended: packets that end
/// none pay nothing.
#[inline(always)]
pub fn emit_if_late(
    key: &PackedFlowKey,
    trips: &RttStats,
    sent_ns: u64,
    now: u64,
    with: impl FnOnce(Event) -> Event,
) {
    let (threshold, least, last) = (maps::late_rtt_ns(), trips.min_ns, trips.last_ns);
    if threshold == 0 {
        return;
    }
    let threshold = if least > threshold { least } else { threshold };
    let beyond = last.saturating_sub(least);
    if beyond < threshold || beyond >= DELAYED_ACK_NS {
        return;
    }
    let Some(told) = maps::last_late_rtt_ns() else { return };
    if exceeds(now, *told, MIN_LATE_INTERVAL_NS) {
        *told = now;
        let event = event::<true>(EventKind::LateRtt, key, now, 0);
        maps::emit_late_rtt(&with(Event { count: trips.count as u32, burst_ended_ns: sent_ns, ..event }));
    }
}
