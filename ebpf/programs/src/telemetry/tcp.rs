//! One connection: retransmissions, congestion echoes, windows, and round trips, from sequence numbers and ACKs.

use crate::headers::PacketInfo;
use crate::maps;
use crate::traffic;
use harmonaize_events::{Event, EventKind, TcpCounters, state};

const FIN: u8 = 0x01;
const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const ACK: u8 = 0x10;
const ECE: u8 = 0x40;
const CWR: u8 = 0x80;

/// A late round trip goes unreported where the connection sent fewer bytes than this since the one before. Such bytes make no queue, and
/// their acknowledgement may have been delayed.
const MIN_LATE_BYTES: u32 = 4 << 10;

/// `ended` counts in units of two to this of nanoseconds.
const ENDED_UNIT: u32 = 10;

/// The largest window that TCP can have: further away is another connection, or a lie.
const MAX_WINDOW: i32 = 1 << 30;

/// Counts a buffer; false when its connection finds no place in the table.
#[inline(always)]
pub fn count<const EGRESS: bool>(seen: &PacketInfo) -> bool {
    let key = &seen.key;
    let Some(flow) = maps::tcp_flow(key, seen.ipv4 != 0) else { return false };
    let now = traffic::now();
    // SAFETY: memory of the table stays until this program has ended. Others may write it at the same time: what must be
    // exact is added atomically, and the rest is single words, of which any value makes sense.
    let flow = unsafe { &mut *flow };
    let (own, other) =
        if EGRESS { (&mut flow.egress, &mut flow.ingress) } else { (&mut flow.ingress, &mut flow.egress) };
    traffic::count::<EGRESS>(&mut own.traffic, seen, now);
    let flags = seen.flags;
    if flags & RST != 0 {
        return true;
    }
    if flags & SYN == 0 {
        if flags & CWR != 0 {
            own.cwr += 1;
        }
        if flags & ECE != 0 {
            own.ece += seen.packets;
        }
        if seen.window == 0 {
            own.zero_windows += seen.packets as u32;
        }
    }
    if flags & ACK != 0
        && other.measured_ns != 0
        && seen.acknowledgement.wrapping_sub(other.measured_end) as i32 >= 0
    {
        let (before, sent_ns, ended) = (other.rtt.last_ns, other.measured_ns, other.ended);
        traffic::record_rtt(&mut other.rtt, sent_ns, now);
        other.measured_ns = 0;
        other.ended = (now >> ENDED_UNIT) as u32;
        let (all, sent) = (other.traffic.bytes, other.measured_bytes);
        let between = sent.wrapping_sub(other.bytes_before);
        other.bytes_before = sent;
        if !EGRESS && between >= MIN_LATE_BYTES {
            traffic::emit_if_late(&seen.key, &other.rtt, sent_ns, now, |event| Event {
                total: all - u64::from((all as u32).wrapping_sub(sent)),
                burst_began_ns: sent_ns - before,
                burst_bytes: u64::from(between),
                paused_ns: idle_since(sent_ns, ended),
                size: other.measured_size,
                ..event
            });
        }
    }
    let span = seen.payload + u32::from(flags & SYN != 0) + u32::from(flags & FIN != 0);
    if span != 0 {
        track_sequence::<EGRESS>(own, seen, span, now);
    }
    true
}

/// Follows the sequence numbers of one direction by a segment that takes `span` of them.
#[inline(always)]
fn track_sequence<const EGRESS: bool>(own: &mut TcpCounters, seen: &PacketInfo, span: u32, now: u64) {
    let end = seen.sequence.wrapping_add(span);
    let next = own.next_sequence;
    let another = seen.flags & SYN != 0 && end != next;
    if own.state & state::SEQUENCE == 0 || another {
        own.state |= state::SEQUENCE;
        return start_rtt_sample(own, seen, end, now);
    }
    let ahead = seen.sequence.wrapping_sub(next) as i32;
    if !(-MAX_WINDOW..=MAX_WINDOW).contains(&ahead) {
        own.jumps += 1;
        own.measured_ns = 0;
        own.next_sequence = end;
        return;
    }
    if ahead >= 0 {
        if own.measured_ns == 0 {
            return start_rtt_sample(own, seen, end, now);
        }
        own.next_sequence = end;
        return;
    }
    // An ACK may now be for either copy, or have waited for one.
    own.measured_ns = 0;
    let beyond = end.wrapping_sub(next) as i32;
    if beyond <= 0 {
        own.retransmissions += seen.packets;
    } else {
        let old = u64::from(ahead.unsigned_abs());
        let size = u64::from(if seen.segment_size == 0 { span } else { seen.segment_size });
        own.retransmissions += old.div_ceil(size.max(1));
        own.next_sequence = end;
    }
    traffic::emit::<EGRESS>(EventKind::Retransmission, &seen.key, now, own.retransmissions);
}

/// From when a round trip had ended, as `ended` says, until a time.
#[inline(always)]
fn idle_since(until_ns: u64, ended: u32) -> u32 {
    let paused_ns = u64::from(((until_ns >> ENDED_UNIT) as u32).wrapping_sub(ended)) << ENDED_UNIT;
    if paused_ns > u64::from(u32::MAX) { u32::MAX } else { paused_ns as u32 }
}

/// Goes on to `end`, and measures how long its ACK takes.
#[inline(always)]
fn start_rtt_sample(own: &mut TcpCounters, seen: &PacketInfo, end: u32, now: u64) {
    own.next_sequence = end;
    own.measured_end = end;
    own.measured_ns = now;
    own.measured_bytes = own.traffic.bytes as u32;
    own.measured_size = seen.bytes as u32;
}
