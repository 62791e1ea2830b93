/* What the kernel itself knows of flows' ends: TCP's sockets at its tracepoints, and the life of RDMA's queue pairs.
 *
 * Tracepoints see the whole machine: what is not in scope is left before anything is looked up. */
#include "kernel.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_endian.h>
#include "schema.h"

char LICENSE[] SEC("license") = "Dual MIT/GPL";

const volatile struct Settings SETTINGS;

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1 << 14);
	__type(key, struct SocketKey);
	__type(value, struct Socket);
} SOCKETS SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1 << 13);
	__type(key, struct QueuePairKey);
	__type(value, struct QueuePair);
} QUEUE_PAIRS SEC(".maps");

/* What is in scope: namespaces by their inode number, cgroups by their id. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__type(key, u64);
	__type(value, u64);
} NAMESPACES SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__type(key, u64);
	__type(value, u64);
} CGROUPS SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct EndpointLosses);
} ENDPOINT_LOSSES SEC(".maps");

/* A change of a queue pair that is under way, by the thread that makes it. */
struct change {
	struct ib_qp *pair;
	struct ib_qp_attr *attributes;
	u64 mask;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, u64);
	__type(value, struct change);
} CHANGES SEC(".maps");

#define AF_INET 2
#define AF_INET6 10
#define IPPROTO_TCP 6
#define TCP_ESTABLISHED 1
#define TCP_SYN_SENT 2
#define TCP_SYN_RECV 3
#define TCP_CLOSE 7
#define TCP_LISTEN 10
#define TCP_NEW_SYN_RECV 12

/* Why a socket is looked at. */
enum reason { SEGMENT, RETRANSMISSION, STATE };

static __always_inline struct EndpointLosses *losses(void)
{
	u32 first = 0;

	return bpf_map_lookup_elem(&ENDPOINT_LOSSES, &first);
}

/* Reads a field: directly where the verifier follows the pointer, else by a call that checks it. */
#define FIELD(pointer, field) (direct ? (pointer)->field : BPF_CORE_READ(pointer, field))

static __always_inline bool scoped(u64 namespace, u64 cgroup)
{
	if (SETTINGS.by_namespace && !bpf_map_lookup_elem(&NAMESPACES, &namespace))
		return false;
	if (SETTINGS.by_cgroup && !bpf_map_lookup_elem(&CGROUPS, &cgroup))
		return false;
	return true;
}

static __always_inline bool identify(struct tcp_sock *tcp, struct SocketKey *key, bool direct)
{
	struct sock *sk = (struct sock *)tcp;
	u16 family = FIELD(sk, __sk_common.skc_family);

	/* A socket of IPv6 whose peer is one of IPv4 has both. */
	u32 v4 = FIELD(sk, __sk_common.skc_daddr);

	if (family == AF_INET || (family == AF_INET6 && v4)) {
		if (family == AF_INET6) {
			u32 mark = FIELD(sk, __sk_common.skc_v6_daddr.in6_u.u6_addr32[2]);
			if (mark != bpf_htonl(0xffff))
				goto six;
		}
		key->local[2] = key->remote[2] = bpf_htonl(0xffff);
		key->local[3] = FIELD(sk, __sk_common.skc_rcv_saddr);
		key->remote[3] = v4;
	} else if (family == AF_INET6) {
six:
#pragma unroll
		for (int word = 0; word < 4; word++) {
			key->local[word] = FIELD(sk, __sk_common.skc_v6_rcv_saddr.in6_u.u6_addr32[word]);
			key->remote[word] = FIELD(sk, __sk_common.skc_v6_daddr.in6_u.u6_addr32[word]);
		}
	} else {
		return false;
	}
	key->local_port = bpf_ntohs(FIELD(tcp, inet_conn.icsk_inet.inet_sport));
	key->remote_port = bpf_ntohs(FIELD(sk, __sk_common.skc_dport));
	return true;
}

static __always_inline void fill(struct Socket *to, struct tcp_sock *tcp, u64 owner, u64 now, u32 state, bool direct)
{
	struct sock *sk = (struct sock *)tcp;
	u64 rate = FIELD(tcp, rate_delivered), interval = FIELD(tcp, rate_interval_us);
	u32 segment = FIELD(tcp, mss_cache);

	to->time_ns = now;
	/* Every time: another process may have the socket by now, or another socket the connection. */
	to->cgroup = owner;
	to->user = FIELD(sk, sk_uid.val);
	to->srtt_ns = (u64)(FIELD(tcp, srtt_us) >> 3) * 1000;
	to->rttvar_ns = (u64)(FIELD(tcp, mdev_us) >> 2) * 1000;
	to->min_rtt_ns = (u64)FIELD(tcp, rtt_min.s[0].v) * 1000;
	to->delivery_rate = interval ? rate * segment * 1000000 / interval : 0;
	to->acknowledged = FIELD(tcp, bytes_acked);
	to->received = FIELD(tcp, bytes_received);
	to->retransmitted_bytes = FIELD(tcp, bytes_retrans);
	to->not_sent = (u32)(FIELD(tcp, write_seq) - FIELD(tcp, snd_nxt));
	to->segments = FIELD(tcp, segs_out);
	to->retransmissions = FIELD(tcp, total_retrans);
	to->unacknowledged = FIELD(tcp, packets_out);
	to->lost = FIELD(tcp, lost_out);
	to->congestion_window = FIELD(tcp, snd_cwnd);
	to->ssthresh = FIELD(tcp, snd_ssthresh);
	to->peer_window = FIELD(tcp, snd_wnd);
	to->delivered = FIELD(tcp, delivered);
	to->delivered_ce = FIELD(tcp, delivered_ce);
	to->segment_size = segment;
	to->state = state;
	to->samples += 1;
}

static __always_inline int sample(struct tcp_sock *tcp, enum reason reason, u32 state, bool direct)
{
	struct sock *sk = (struct sock *)tcp;
	struct SocketKey key = {};
	struct Socket *known;
	struct net *net;
	struct cgroup *cgroup;
	u64 now, owner;
	bool established;

	net = FIELD(sk, __sk_common.skc_net.net);
	key.namespace = FIELD(net, ns.inum);
	/* The most frequent question, and the cheapest: others' segments end here. */
	if (SETTINGS.namespace && key.namespace != SETTINGS.namespace)
		return 0;
	cgroup = FIELD(sk, sk_cgrp_data.cgroup);
	if (direct && !cgroup)
		return 0;
	owner = direct ? cgroup->kn->id : BPF_CORE_READ(cgroup, kn, id);
	established = reason == STATE && state == TCP_ESTABLISHED;
	if (!scoped(key.namespace, owner)) {
		/* Nor is it one in scope that had its addresses and ports before. */
		if (established && identify(tcp, &key, direct))
			bpf_map_delete_elem(&SOCKETS, &key);
		return 0;
	}
	if (!identify(tcp, &key, direct))
		return 0;
	now = bpf_ktime_get_ns();
	known = bpf_map_lookup_elem(&SOCKETS, &key);
	if (!known) {
		struct Socket new = {};
		struct EndpointLosses *lost = losses();

		/* What ends unseen was not seen at all. */
		if (state == TCP_CLOSE)
			return 0;
		if (bpf_map_update_elem(&SOCKETS, &key, &new, BPF_NOEXIST) == 0) {
			if (lost)
				lost->sockets += 1;
		}
		known = bpf_map_lookup_elem(&SOCKETS, &key);
		if (!known) {
			if (lost)
				lost->sockets_unplaced += 1;
			return 0;
		}
	} else if (established) {
		/* A new connection, with the addresses and ports of one that is over. */
		known->samples = 0;
	} else if (reason == SEGMENT && known->samples && now - known->time_ns < SETTINGS.interval_ns) {
		return 0;
	}
	fill(known, tcp, owner, now, state, direct);
	return 0;
}

static __always_inline bool settled(int state)
{
	return state != TCP_SYN_SENT && state != TCP_SYN_RECV && state != TCP_NEW_SYN_RECV &&
	       state != TCP_LISTEN;
}

/* The same thrice where the verifier knows the types of a tracepoint's arguments, */

SEC("tp_btf/tcp_probe")
int BPF_PROG(segment_typed, struct sock *sk, struct sk_buff *skb)
{
	struct tcp_sock *tcp = bpf_skc_to_tcp_sock(sk);

	return tcp ? sample(tcp, SEGMENT, sk->__sk_common.skc_state, true) : 0;
}

SEC("tp_btf/tcp_retransmit_skb")
int BPF_PROG(retransmission_typed, struct sock *sk, struct sk_buff *skb)
{
	struct tcp_sock *tcp = bpf_skc_to_tcp_sock(sk);

	return tcp && settled(sk->__sk_common.skc_state) ?
		       sample(tcp, RETRANSMISSION, sk->__sk_common.skc_state, true) :
		       0;
}

SEC("tp_btf/inet_sock_set_state")
int BPF_PROG(state_typed, struct sock *sk, int before, int after)
{
	struct tcp_sock *tcp = bpf_skc_to_tcp_sock(sk);

	return tcp && settled(after) ? sample(tcp, STATE, after, true) : 0;
}

/* and where it does not: a kernel without type information of its own. */

SEC("raw_tp/tcp_probe")
int BPF_PROG(segment_untyped, struct sock *sk, struct sk_buff *skb)
{
	return sample((struct tcp_sock *)sk, SEGMENT, BPF_CORE_READ(sk, __sk_common.skc_state), false);
}

SEC("raw_tp/tcp_retransmit_skb")
int BPF_PROG(retransmission_untyped, struct sock *sk, struct sk_buff *skb)
{
	u8 state = BPF_CORE_READ(sk, __sk_common.skc_state);

	return settled(state) ? sample((struct tcp_sock *)sk, RETRANSMISSION, state, false) : 0;
}

SEC("raw_tp/inet_sock_set_state")
int BPF_PROG(state_untyped, struct sock *sk, int before, int after)
{
	if (BPF_CORE_READ(sk, sk_protocol) != IPPROTO_TCP || !settled(after))
		return 0;
	return sample((struct tcp_sock *)sk, STATE, after, false);
}

/* Queue pairs. What a call was given stands when it returns, and only then is known whether it was done. */

#define CHANGES_STATE (1 << 0)
#define CHANGES_ADDRESS (1 << 7)
#define CHANGES_PEER (1 << 20)

static __always_inline void place(struct ib_qp *pair, struct QueuePairKey *key)
{
	key->device = BPF_CORE_READ(pair, device, index);
	key->number = BPF_CORE_READ(pair, qp_num);
}

static __always_inline int created(struct ib_qp *pair)
{
	struct QueuePairKey key = {};
	struct QueuePair new = {};
	struct EndpointLosses *lost;
	u64 process = bpf_get_current_pid_tgid();
	struct ib_device *device;

	/* An error, or none. */
	if (!pair || (unsigned long)pair >= (unsigned long)-4095)
		return 0;
	place(pair, &key);
	new.created_ns = new.changed_ns = bpf_ktime_get_ns();
	new.cgroup = bpf_get_current_cgroup_id();
	new.process = process >> 32;
	new.user = (u32)bpf_get_current_uid_gid();
	new.kind = BPF_CORE_READ(pair, qp_type);
	device = BPF_CORE_READ(pair, device);
	bpf_core_read_str(new.device, sizeof(new.device), &device->name);
	bpf_get_current_comm(new.name, sizeof(new.name));
	lost = losses();
	if (bpf_map_update_elem(&QUEUE_PAIRS, &key, &new, BPF_ANY) == 0) {
		if (lost)
			lost->queue_pairs += 1;
	} else if (lost) {
		lost->queue_pairs_unplaced += 1;
	}
	return 0;
}

SEC("kretprobe/ib_create_qp_user")
int BPF_KRETPROBE(pair_created, struct ib_qp *pair)
{
	return created(pair);
}

SEC("kretprobe/ib_create_qp_kernel")
int BPF_KRETPROBE(kernels_pair_created, struct ib_qp *pair)
{
	return created(pair);
}

SEC("kprobe/ib_modify_qp_with_udata")
int BPF_KPROBE(pair_changes, struct ib_qp *pair, struct ib_qp_attr *attributes, int mask)
{
	u64 thread = bpf_get_current_pid_tgid();
	struct change change = { pair, attributes, (u32)mask };
	struct EndpointLosses *lost;

	if (bpf_map_update_elem(&CHANGES, &thread, &change, BPF_ANY)) {
		lost = losses();
		if (lost)
			lost->queue_pairs_unplaced += 1;
	}
	return 0;
}

SEC("kretprobe/ib_modify_qp_with_udata")
int BPF_KRETPROBE(pair_changed, int failed)
{
	u64 thread = bpf_get_current_pid_tgid();
	struct change *found = bpf_map_lookup_elem(&CHANGES, &thread);
	/* On their own: what is read through a structure of ours would be looked for in the kernel's types. */
	struct ib_qp_attr *attributes;
	struct ib_qp *pair;
	u64 mask;
	struct QueuePairKey key = {};
	struct QueuePair *known;

	if (!found)
		return 0;
	pair = found->pair;
	attributes = found->attributes;
	mask = found->mask;
	bpf_map_delete_elem(&CHANGES, &thread);
	if (failed)
		return 0;
	place(pair, &key);
	known = bpf_map_lookup_elem(&QUEUE_PAIRS, &key);
	if (!known) {
		/* It was there before these programs: its owner is not known. */
		struct QueuePair new = {};

		new.kind = BPF_CORE_READ(pair, qp_type);
		bpf_map_update_elem(&QUEUE_PAIRS, &key, &new, BPF_NOEXIST);
		known = bpf_map_lookup_elem(&QUEUE_PAIRS, &key);
		if (!known)
			return 0;
	}
	known->changed_ns = bpf_ktime_get_ns();
	if (mask & CHANGES_STATE)
		known->state = BPF_CORE_READ(attributes, qp_state);
	if (mask & CHANGES_PEER)
		known->peer = BPF_CORE_READ(attributes, dest_qp_num);
	if (mask & CHANGES_ADDRESS) {
		const struct ib_gid_attr *own = BPF_CORE_READ(pair, av_sgid_attr);

		bpf_core_read(known->remote, sizeof(known->remote), &attributes->ah_attr.grh.dgid);
		if (own)
			bpf_core_read(known->local, sizeof(known->local), &own->gid);
	}
	return 0;
}

SEC("kprobe/ib_destroy_qp_user")
int BPF_KPROBE(pair_destroyed, struct ib_qp *pair)
{
	struct QueuePairKey key = {};
	struct QueuePair *known;

	place(pair, &key);
	known = bpf_map_lookup_elem(&QUEUE_PAIRS, &key);
	if (known)
		known->destroyed_ns = bpf_ktime_get_ns();
	return 0;
}
