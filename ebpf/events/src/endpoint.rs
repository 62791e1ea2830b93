//! What the kernel itself knows of a flow's ends: TCP's sockets, and RDMA's queue pairs with their owners.

use crate::shared;

/// Bytes of a device's name that are kept.
pub const DEVICE_NAME: usize = 16;
/// Bytes of a process's name that are kept.
pub const PROCESS_NAME: usize = 16;

shared! {
    /// A TCP socket by its connection, as it stands in [`FlowKey`](crate::FlowKey), and by its network namespace.
    #[derive(Hash, PartialOrd, Ord)]
    pub struct SocketKey {
        /// The socket's own address: 16 bytes as in an IPv6 header, in memory order; IPv4 is mapped to `::ffff:a.b.c.d`.
        pub local: [u32; 4],
        /// The peer's address, likewise.
        pub remote: [u32; 4],
        /// The socket's own port.
        pub local_port: u16,
        /// The peer's port.
        pub remote_port: u16,
        /// The network namespace, by its inode number (as `stat -L /proc/PID/ns/net` says).
        pub namespace: u32,
    }

    /// What the kernel knew of a connection when it last sampled it. It does so at a segment that came in, a
    /// retransmission or a change of state.
    pub struct Socket {
        /// When it was sampled.
        pub time_ns: u64,
        /// The cgroup that owns the socket, by its id (the inode number of its directory in cgroup2).
        pub cgroup: u64,
        /// The smoothed round-trip time.
        pub srtt_ns: u64,
        /// The round-trip time's mean deviation.
        pub rttvar_ns: u64,
        /// The shortest round trip of the kernel's window (minutes); 2^32-1 microseconds while none is known.
        pub min_rtt_ns: u64,
        /// How fast the peer acknowledged at the latest sample of the kernel's own, in bytes a second; 0 while none is known.
        pub delivery_rate: u64,
        /// Bytes that the peer has acknowledged.
        pub acknowledged: u64,
        /// Bytes that came in, in order.
        pub received: u64,
        /// Bytes that were sent again.
        pub retransmitted_bytes: u64,
        /// Bytes handed to the socket and not sent yet.
        pub not_sent: u64,
        /// Segments that the socket has sent, retransmissions among them.
        pub segments: u32,
        /// Segments that were sent again.
        pub retransmissions: u32,
        /// Segments that are sent and not acknowledged.
        pub unacknowledged: u32,
        /// Segments among those that the kernel takes for lost.
        pub lost: u32,
        /// Segments that may be under way at once.
        pub congestion_window: u32,
        /// Above this window it grows slowly.
        pub ssthresh: u32,
        /// Bytes that the peer can take.
        pub peer_window: u32,
        /// Segments that the peer has received.
        pub delivered: u32,
        /// Of those, the segments whose acknowledgement echoed a mark.
        pub delivered_ce: u32,
        /// Bytes of payload in a full segment.
        pub segment_size: u32,
        /// Who owns the socket.
        pub user: u32,
        /// TCP's state, as in `tcp_states.h`: 1 is established, 7 closed.
        pub state: u32,
        /// How often the connection was sampled.
        pub samples: u64,
    }

    /// A queue pair by its device, which numbers its own.
    #[derive(Hash, PartialOrd, Ord)]
    pub struct QueuePairKey {
        /// The device's index, as RDMA's netlink says it.
        pub device: u32,
        /// The queue pair's number.
        pub number: u32,
    }

    /// A queue pair, and whose it is.
    pub struct QueuePair {
        /// When it was created; 0 for one that was there before.
        pub created_ns: u64,
        /// When it last changed its state.
        pub changed_ns: u64,
        /// When it was destroyed; 0 while it lives.
        pub destroyed_ns: u64,
        /// The cgroup of the process that created it.
        pub cgroup: u64,
        /// The process that created it.
        pub process: u32,
        /// Its user.
        pub user: u32,
        /// The state, as in `ib_verbs.h`: 0 reset, 1 initialised, 2 ready to receive, 3 ready to send, 6 error.
        pub state: u32,
        /// The peer's queue pair; 0 while none is known.
        pub peer: u32,
        /// The address on this side: a GID's 16 bytes, in memory order, as in [`FlowKey`](crate::FlowKey); zeros while unknown.
        pub local: [u32; 4],
        /// The peer's address, likewise.
        pub remote: [u32; 4],
        /// The kind, as in `ib_verbs.h`: 2 is a reliable connection, 4 datagrams.
        pub kind: u32,
        /// Always 0.
        pub reserved: u32,
        /// The device's name.
        pub device: [u8; DEVICE_NAME],
        /// The name of the process that created it.
        pub name: [u8; PROCESS_NAME],
    }

    /// What was lost of this.
    pub struct EndpointLosses {
        /// Sockets entered in their table.
        pub sockets: u64,
        /// Sockets that found no room.
        pub sockets_unplaced: u64,
        /// Queue pairs entered in their table.
        pub queue_pairs: u64,
        /// Queue pairs that found no room, or whose creation could not be followed.
        pub queue_pairs_unplaced: u64,
    }
}
