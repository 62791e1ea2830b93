/* The kernel's structures as far as they are read here. Where a field lies is found when the programs are loaded, from the type
 * information of the kernel that they are loaded into; a field's name and type are all that counts. */
#pragma once

/* What the library's headers take from the kernel's. */
#define __VMLINUX_H__

typedef unsigned char __u8;
typedef unsigned short __u16;
typedef unsigned int __u32;
typedef unsigned long long __u64;
typedef signed char __s8;
typedef short __s16;
typedef int __s32;
typedef long long __s64;
typedef __u16 __be16;
typedef __u32 __be32;
typedef __u32 __wsum;
typedef __u8 u8;
typedef __u16 u16;
typedef __u32 u32;
typedef __u64 u64;
typedef __s32 s32;
typedef __s64 s64;
typedef _Bool bool;

enum {
	false = 0,
	true = 1,
};

enum bpf_map_type {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_ARRAY = 2,
	BPF_MAP_TYPE_PERCPU_ARRAY = 6,
	BPF_MAP_TYPE_LRU_HASH = 9,
};

enum {
	BPF_ANY = 0,
	BPF_NOEXIST = 1,
};

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

#if defined(__TARGET_ARCH_x86)
struct pt_regs {
	unsigned long bp, cx, dx, si, di, ax, ip, sp, r8, r9;
};
#else
struct user_pt_regs {
	__u64 regs[31];
	__u64 sp;
	__u64 pc;
	__u64 pstate;
};
struct pt_regs {
	__u64 orig_x0;
};
#endif

struct kernfs_node {
	u64 id;
};

struct cgroup {
	struct kernfs_node *kn;
};

struct sock_cgroup_data {
	struct cgroup *cgroup;
};

struct ns_common {
	unsigned int inum;
};

struct net {
	struct ns_common ns;
};

typedef struct {
	struct net *net;
} possible_net_t;

struct in6_addr {
	union {
		__be32 u6_addr32[4];
	} in6_u;
};

struct sock_common {
	__be32 skc_daddr;
	__be32 skc_rcv_saddr;
	__be16 skc_dport;
	unsigned short skc_family;
	volatile unsigned char skc_state;
	possible_net_t skc_net;
	struct in6_addr skc_v6_daddr;
	struct in6_addr skc_v6_rcv_saddr;
};

typedef struct {
	u32 val;
} kuid_t;

struct sock {
	struct sock_common __sk_common;
	u16 sk_protocol;
	kuid_t sk_uid;
	struct sock_cgroup_data sk_cgrp_data;
};

struct inet_sock {
	struct sock sk;
	__be16 inet_sport;
};

struct inet_connection_sock {
	struct inet_sock icsk_inet;
};

struct minmax_sample {
	u32 v;
};

struct minmax {
	struct minmax_sample s[3];
};

struct tcp_sock {
	struct inet_connection_sock inet_conn;
	u32 srtt_us;
	u32 mdev_us;
	struct minmax rtt_min;
	u32 rate_delivered;
	u32 rate_interval_us;
	u64 bytes_acked;
	u64 bytes_received;
	u64 bytes_retrans;
	u32 write_seq;
	u32 snd_nxt;
	u32 segs_out;
	u32 total_retrans;
	u32 packets_out;
	u32 lost_out;
	u32 snd_cwnd;
	u32 snd_ssthresh;
	u32 snd_wnd;
	u32 delivered;
	u32 delivered_ce;
	u32 mss_cache;
};

struct sk_buff;

union ib_gid {
	u8 raw[16];
};

struct ib_gid_attr {
	union ib_gid gid;
};

struct ib_global_route {
	union ib_gid dgid;
};

struct rdma_ah_attr {
	struct ib_global_route grh;
};

enum ib_qp_state { IB_QPS_RESET };
enum ib_qp_type { IB_QPT_RC = 2 };

struct ib_qp_attr {
	enum ib_qp_state qp_state;
	u32 dest_qp_num;
	struct rdma_ah_attr ah_attr;
};

struct ib_device {
	char name[64];
	u32 index;
};

struct ib_qp {
	struct ib_device *device;
	u32 qp_num;
	enum ib_qp_type qp_type;
	const struct ib_gid_attr *av_sgid_attr;
};

#pragma clang attribute pop
