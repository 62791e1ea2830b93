//! One queue pair of RoCE v2: operations, gaps and repeats of the sequence, NAKs, CNPs, and the time from request to ACK.
//!
//! InfiniBand Architecture, volume 1, chapter 9 (transport) and annex A17 (RoCE v2).

use crate::headers::PacketInfo;
use crate::maps;
use crate::traffic;
use aya_ebpf::bindings::{BPF_ANY, BPF_NOEXIST};
use harmonaize_events::{EventKind, PSN_MASK, RequestSent, RoceCounters, state};

/// Congestion notification packet.
const NOTIFICATION: u8 = 0x81;

/// Transport services: the upper three bits of an opcode.
const RELIABLE: u8 = 0;
const UNRELIABLE: u8 = 1;
const DATAGRAM: u8 = 3;
const EXTENDED: u8 = 5;

/// Operations: the lower five bits.
const READ: u8 = 12;
const RESPONSE_FIRST: u8 = 13;
const RESPONSE_MIDDLE: u8 = 14;
const RESPONSE_LAST: u8 = 15;
const RESPONSE_ONLY: u8 = 16;
const ACKNOWLEDGEMENT: u8 = 17;
const ATOMIC_RESPONSE: u8 = 18;
const COMPARE_SWAP: u8 = 19;
const FETCH_ADD: u8 = 20;

/// The state after an RDMA READ request: how many numbers its responses take is not known.
const AFTER_READ: u32 = 4;

/// Half of the sequence: what is not ahead by less is behind.
const HALF: u32 = 1 << 23;

/// A request without an answer for this long has been forgotten by its sender too.
const REQUEST_TIMEOUT_NS: u64 = 1_000_000_000;

/// Counts a buffer; false when its queue pair finds no place in the table.
#[inline(always)]
pub fn count<const EGRESS: bool>(seen: &PacketInfo) -> bool {
    let key = &seen.key;
    let Some(own) = maps::roce_flow(key, seen.ipv4 != 0) else { return false };
    let now = traffic::now();
    // SAFETY: as for TCP's entries.
    let own = unsafe { &mut *own };
    traffic::count::<EGRESS>(&mut own.traffic, seen, now);
    own.source_port = u32::from(seen.window);
    let opcode = seen.flags;
    if opcode == NOTIFICATION {
        own.notifications += seen.packets;
        let total = own.traffic.ecn_ce + own.notifications;
        traffic::congestion::<EGRESS>(&mut own.traffic, seen, now, total);
        return true;
    }
    let (service, operation) = (opcode >> 5, opcode & 31);
    let connected = matches!(service, RELIABLE | UNRELIABLE | EXTENDED);
    let reliable = matches!(service, RELIABLE | EXTENDED);
    let packets = seen.packets;
    match operation {
        0..=5 if connected => own.sends += packets,
        4 | 5 if service == DATAGRAM => {
            // Datagrams of many senders share a queue pair: their numbers are not one sequence.
            own.sends += packets;
            return true;
        }
        22 | 23 if reliable => own.sends += packets,
        6..=11 if connected => own.writes += packets,
        READ if reliable => own.reads += packets,
        COMPARE_SWAP | FETCH_ADD if reliable => own.atomics += packets,
        RESPONSE_FIRST..=RESPONSE_ONLY if reliable => {
            own.read_responses += packets;
            response::<EGRESS>(own, seen, now, operation);
            return true;
        }
        ATOMIC_RESPONSE if reliable => {
            own.atomics += packets;
            record_response::<EGRESS>(seen, now);
            return true;
        }
        ACKNOWLEDGEMENT if reliable => {
            acknowledgement::<EGRESS>(own, seen, now);
            return true;
        }
        _ => {
            own.unknown += packets;
            return true;
        }
    }
    request::<EGRESS>(own, seen, now, reliable, operation);
    true
}

/// Follows the sequence of requests.
#[inline(always)]
fn request<const EGRESS: bool>(
    own: &mut RoceCounters,
    seen: &PacketInfo,
    now: u64,
    reliable: bool,
    operation: u8,
) {
    let ahead = sequence(seen).wrapping_sub(own.next_request) & PSN_MASK;
    let known = own.state & state::SEQUENCE != 0;
    let repeated = known && ahead >= HALF;
    if repeated {
        record_retransmit::<EGRESS>(own, seen, now);
    } else {
        if known && ahead != 0 && own.state & AFTER_READ == 0 {
            record_gap::<EGRESS>(own, seen, now, ahead);
        }
        own.next_request = sequence(seen).wrapping_add(1) & PSN_MASK;
        let read = if operation == READ { AFTER_READ } else { 0 };
        own.state = (own.state & !AFTER_READ) | state::SEQUENCE | read;
    }
    if reliable && ((seen.sequence >> 31 != 0) || matches!(operation, READ | COMPARE_SWAP | FETCH_ADD)) {
        record_request::<EGRESS>(seen, now, repeated);
    }
}

/// Follows the sequence within read responses.
#[inline(always)]
fn response<const EGRESS: bool>(own: &mut RoceCounters, seen: &PacketInfo, now: u64, operation: u8) {
    let within = matches!(operation, RESPONSE_MIDDLE | RESPONSE_LAST) && own.state & state::RESPONSE != 0;
    let ahead = sequence(seen).wrapping_sub(own.next_response) & PSN_MASK;
    if within && ahead >= HALF {
        return record_retransmit::<EGRESS>(own, seen, now);
    }
    if within && ahead != 0 {
        record_gap::<EGRESS>(own, seen, now, ahead);
    }
    own.next_response = sequence(seen).wrapping_add(1) & PSN_MASK;
    own.state |= state::RESPONSE;
    if matches!(operation, RESPONSE_FIRST | RESPONSE_ONLY) {
        record_response::<EGRESS>(seen, now);
    }
}

#[inline(always)]
fn record_retransmit<const EGRESS: bool>(own: &mut RoceCounters, seen: &PacketInfo, now: u64) {
    own.retransmissions += seen.packets;
    traffic::emit::<EGRESS>(EventKind::Retransmission, &seen.key, now, own.retransmissions);
}

#[inline(always)]
fn record_gap<const EGRESS: bool>(own: &mut RoceCounters, seen: &PacketInfo, now: u64, missing: u32) {
    own.gaps += u64::from(missing);
    traffic::emit::<EGRESS>(EventKind::Gap, &seen.key, now, own.gaps);
}

/// An ACK, or a NAK by its syndrome.
#[inline(always)]
fn acknowledgement<const EGRESS: bool>(own: &mut RoceCounters, seen: &PacketInfo, now: u64) {
    let packets = seen.packets;
    match seen.syndrome >> 5 {
        0 => {
            own.acknowledgements += packets;
            return record_response::<EGRESS>(seen, now);
        }
        1 => own.not_ready_naks += packets,
        3 if seen.syndrome & 31 == 0 => own.sequence_naks += packets,
        3 => own.fatal_naks += packets,
        _ => {
            own.unknown += packets;
            return;
        }
    }
    let total = own.not_ready_naks + own.sequence_naks + own.fatal_naks;
    traffic::emit::<EGRESS>(EventKind::Refusal, &seen.key, now, total);
}

/// Remembers a request that will be answered. Where another one cannot be told from it, or the same was sent twice, neither
/// is measured.
#[inline(always)]
fn record_request<const EGRESS: bool>(seen: &PacketInfo, now: u64, repeated: bool) {
    let key = seen.key.request(sequence(seen), EGRESS);
    let sent = RequestSent { time_ns: now, queue_pair: seen.key.queue_pair(), reserved: 0 };
    let requests = maps::requests();
    if !repeated && requests.insert(&key, &sent, u64::from(BPF_NOEXIST)).is_ok() {
        return;
    }
    let Some(found) = requests.get_ptr_mut(&key) else { return };
    // SAFETY: as for the entries of flows.
    let found = unsafe { &mut *found };
    if !repeated && traffic::exceeds(now, found.time_ns, REQUEST_TIMEOUT_NS) {
        let _ = requests.insert(&key, &sent, u64::from(BPF_ANY));
        return;
    }
    if found.queue_pair != seen.key.queue_pair() {
        maps::losses(|losses| losses.ambiguous += 1);
    }
    found.queue_pair = RequestSent::AMBIGUOUS;
}

/// Finds the request that a packet answers, and takes the time.
#[inline(always)]
fn record_response<const EGRESS: bool>(seen: &PacketInfo, now: u64) {
    let request = seen.key.request(sequence(seen), !EGRESS);
    let Some(sent) = maps::requests().get_ptr_mut(&request) else { return };
    // SAFETY: as for the entries of flows.
    let sent = unsafe { *sent };
    let _ = maps::requests().remove(&request);
    if sent.queue_pair == RequestSent::AMBIGUOUS {
        return;
    }
    let key = seen.key.reversed(sent.queue_pair);
    if let Some(asker) = maps::find_roce_flow(&key, seen.ipv4 != 0) {
        // SAFETY: as for the entries of flows.
        let asker = unsafe { &mut *asker };
        traffic::record_rtt(&mut asker.rtt, sent.time_ns, now);
        if !EGRESS {
            traffic::emit_if_late(&key, &asker.rtt, sent.time_ns, now, |event| event);
        }
    }
}

/// A packet's sequence number.
#[inline(always)]
fn sequence(seen: &PacketInfo) -> u32 {
    seen.sequence & PSN_MASK
}
