/* What user space reads: the structures of `ebpf/events` (endpoint.rs), field by field, and what is set before loading. A test
 * holds both against each other. */
#pragma once

struct SocketKey {
	u32 local[4];
	u32 remote[4];
	u16 local_port;
	u16 remote_port;
	u32 namespace;
};

struct Socket {
	u64 time_ns;
	u64 cgroup;
	u64 srtt_ns;
	u64 rttvar_ns;
	u64 min_rtt_ns;
	u64 delivery_rate;
	u64 acknowledged;
	u64 received;
	u64 retransmitted_bytes;
	u64 not_sent;
	u32 segments;
	u32 retransmissions;
	u32 unacknowledged;
	u32 lost;
	u32 congestion_window;
	u32 ssthresh;
	u32 peer_window;
	u32 delivered;
	u32 delivered_ce;
	u32 segment_size;
	u32 user;
	u32 state;
	u64 samples;
};

struct QueuePairKey {
	u32 device;
	u32 number;
};

struct QueuePair {
	u64 created_ns;
	u64 changed_ns;
	u64 destroyed_ns;
	u64 cgroup;
	u32 process;
	u32 user;
	u32 state;
	u32 peer;
	u32 local[4];
	u32 remote[4];
	u32 kind;
	u32 reserved;
	u8 device[16];
	u8 name[16];
};

struct EndpointLosses {
	u64 sockets;
	u64 sockets_unplaced;
	u64 queue_pairs;
	u64 queue_pairs_unplaced;
};

/* Set by the loader; what is set to 0 costs nothing. */
struct Settings {
	/* Segments that come in sooner after the last sample are not sampled. */
	u64 interval_ns;
	/* The one namespace whose sockets are followed. */
	u64 namespace;
	/* Only sockets of the namespaces, or the cgroups, that are listed in NAMESPACES or CGROUPS. */
	u32 by_namespace;
	u32 by_cgroup;
};
