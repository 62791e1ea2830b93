//! What is counted of each flow.

use crate::{FlowKey, shared};

/// Bits of `state` in [`TcpCounters`] and [`RoceCounters`].
pub mod state {
    /// The next sequence number is known (RoCE: of requests).
    pub const SEQUENCE: u32 = 1;
    /// RoCE: the next sequence number of read responses is known.
    pub const RESPONSE: u32 = 2;
}

shared! {
    /// What both protocols count, in one direction.
    pub struct Traffic {
        /// Packets on the wire.
        pub packets: u64,
        /// Their bytes on the wire with the link's header, without its checksum.
        pub bytes: u64,
        /// When the first passed; 0 while none has.
        pub first_ns: u64,
        /// When the last passed.
        pub last_ns: u64,
        /// When the running burst began: traffic without a gap as long as the set idle gap.
        pub burst_began_ns: u64,
        /// `bytes` before the running burst, which has had the rest.
        pub burst_after: u64,
        /// Packets that a queue has marked (ECN CE in the IP header); of a merged buffer, all of it.
        pub ecn_ce: u64,
        /// When the last signal of congestion passed: a mark, or for RoCE a CNP.
        pub congestion_signal_ns: u64,
    }

    /// Times from a packet to what acknowledges it on its way back, both taken at this interface.
    pub struct RttStats {
        /// The shortest; meaningless while `count` is 0.
        pub min_ns: u64,
        /// The latest.
        pub last_ns: u64,
        /// The sum of all.
        pub sum_ns: u64,
        /// How many were taken: at most one is under way at a time.
        pub count: u64,
    }

    /// One direction of a TCP connection.
    pub struct TcpCounters {
        /// Packets, bytes, times, marks.
        pub traffic: Traffic,
        /// From a segment with data in this direction to the ACK in the other. What was sent again is not measured (Karn).
        pub rtt: RttStats,
        /// Packets whose sequence numbers begin before the highest end seen: retransmissions seen from here.
        pub retransmissions: u64,
        /// Packets that say that the sender has slowed down (CWR), handshake excluded.
        pub cwr: u32,
        /// When the last round trip ended, in units of 1024 ns, modulo 2^32.
        pub ended: u32,
        /// Packets that echo marks to the other side (ECE), handshake excluded.
        pub ece: u64,
        /// Packets that offer the other side a window of zero.
        pub zero_windows: u32,
        /// The bytes on the wire of the segment under measurement.
        pub measured_size: u32,
        /// Jumps of more than 2^30 in the sequence, after which counting begins anew: not plausible within a connection.
        pub jumps: u32,
        /// `traffic.bytes`, modulo 2^32, when the segment of the last round trip that has ended had passed.
        pub bytes_before: u32,
        /// The time at which the segment under measurement passed; 0 when there is none.
        pub measured_ns: u64,
        /// The sequence number that acknowledges it.
        pub measured_end: u32,
        /// The highest end of a segment so far: the next sequence number.
        pub next_sequence: u32,
        /// Bits of [`state`](crate::state).
        pub state: u32,
        /// `traffic.bytes`, modulo 2^32, when the segment under measurement had passed.
        pub measured_bytes: u32,
    }

    /// Both directions of a TCP connection.
    pub struct TcpFlow {
        /// What comes in.
        pub ingress: TcpCounters,
        /// What leaves.
        pub egress: TcpCounters,
    }

    /// What goes to one RoCE queue pair through an interface.
    pub struct RoceCounters {
        /// Packets, bytes, times, marks.
        pub traffic: Traffic,
        /// From a request that asks for an answer to its ACK, first read response or atomic response.
        pub rtt: RttStats,
        /// Packets of SENDs.
        pub sends: u64,
        /// Packets of RDMA WRITEs.
        pub writes: u64,
        /// RDMA READ requests.
        pub reads: u64,
        /// Packets of RDMA READ responses.
        pub read_responses: u64,
        /// Atomic requests and responses.
        pub atomics: u64,
        /// Acknowledgements, NAKs not among them.
        pub acknowledgements: u64,
        /// NAKs that ask for a repetition after a gap in the sequence.
        pub sequence_naks: u64,
        /// NAKs of a receiver that is not ready (RNR).
        pub not_ready_naks: u64,
        /// All other NAKs, which end a connection.
        pub fatal_naks: u64,
        /// Congestion notifications (CNP) to this queue pair.
        pub notifications: u64,
        /// Packets of any other opcode.
        pub unknown: u64,
        /// Sequence numbers left out, of requests on reliable and unreliable connections and within read responses: lost
        /// before this interface. After an RDMA READ request the next request may leave out any number.
        pub gaps: u64,
        /// Packets with a sequence number before the highest: repetitions seen from here.
        pub retransmissions: u64,
        /// When the request under measurement passed; 0 when there is none.
        pub measured_ns: u64,
        /// The next sequence number of requests.
        pub next_request: u32,
        /// The next sequence number of read responses.
        pub next_response: u32,
        /// Bits of [`state`](crate::state).
        pub state: u32,
        /// The UDP source port of the latest packet, which chooses the path where several are equal.
        pub source_port: u32,
    }

    /// A connection in the programs' own table.
    pub struct TcpEntry {
        /// Whose it is.
        pub key: FlowKey,
        /// What was counted.
        pub counters: TcpFlow,
    }

    /// What goes to a RoCE v2 queue pair, likewise.
    pub struct RoceEntry {
        /// Whose it is.
        pub key: FlowKey,
        /// What was counted.
        pub counters: RoceCounters,
    }
}
