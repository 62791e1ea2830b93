//! What is counted of each interface, and what could not be counted or told.

use crate::shared;

shared! {
    /// Everything that crossed an interface in one direction; each packet is in exactly one of the classes.
    pub struct Totals {
        /// Buffers, as software interfaces (veth) count packets: one for all segments that the device would cut.
        pub buffers: u64,
        /// Their bytes, with the link's header.
        pub buffer_bytes: u64,
        /// Packets on the wire, as devices that cut segments count them.
        pub packets: u64,
        /// Their bytes on the wire, each with headers of its own.
        pub bytes: u64,
        /// Packets of TCP.
        pub tcp: u64,
        /// Packets of RoCE v2.
        pub roce: u64,
        /// Packets of anything else, those behind too many or too long headers among them.
        pub other: u64,
        /// Fragments of IP packets.
        pub fragments: u64,
        /// Packets that are cut short or contradict themselves.
        pub malformed: u64,
        /// Packets of TCP or RoCE v2 that found no place in the table of flows, and are in no flow's counters.
        pub unplaced: u64,
    }

    /// Both directions of an interface.
    pub struct InterfaceTotals {
        /// The interface's index; 0 where none is listed.
        pub interface: u64,
        /// What came in.
        pub ingress: Totals,
        /// What left.
        pub egress: Totals,
    }

    /// What was lost, and what tells how much; since the programs were loaded.
    pub struct Losses {
        /// Entries made in the table of flows. Entries read now and entries removed make up as many, or the table was full
        /// and the least recently used were evicted.
        pub entries: u64,
        /// Events that found no room in the ring.
        pub events: u64,
        /// Requests of RoCE whose acknowledgements could not be told apart from those of another queue pair.
        pub ambiguous: u64,
        /// Buffers on an interface that is not listed: the programs were attached and not yet, or no longer, told of it.
        pub unregistered: u64,
    }
}
