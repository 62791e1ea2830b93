//! What both ends of an attachment over RDMA tell each other before their queue pairs connect.
//!
//! After [`Welcome`](super::Welcome) the agent sends its [`PairEnd`], the tenant answers with an [`Offer`], and the agent with
//! `Result<(), Refused>`; then both are connected. Submissions are written, with immediate, into the agent's mailbox, and
//! completions into the tenant's: number n, counted from 0 on each side, into slot n modulo the rings' entries, with n modulo
//! 2^32 as immediate. A slot holds one [`Submission`](crate::Submission) or [`Completion`](crate::Completion).

use serde::{Deserialize, Serialize};

/// Registered memory of whoever names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registered {
    /// Address of its first byte.
    pub address: u64,
    /// Its remote key.
    pub rkey: u32,
}

/// One end of the queue pair, and the mailbox that belongs to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PairEnd {
    /// Number of the queue pair, 24 bits.
    pub queue_pair: u32,
    /// First packet sequence number, 24 bits.
    pub psn: u32,
    /// Address of its port, in network order.
    pub gid: [u8; 16],
    /// Most bytes per packet that it takes: 256, 512, 1024, 2048 or 4096.
    pub mtu: u16,
    /// Local identifier, of InfiniBand.
    pub lid: u16,
    /// RDMA reads that it answers at once.
    pub reads: u8,
    /// Where the other end writes descriptors or completions.
    pub mailbox: Registered,
}

/// The tenant's end, and its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// The queue pair.
    pub end: PairEnd,
    /// The arena, as large as [`Welcome`](super::Welcome) says; the agent reads and writes it.
    pub arena: Registered,
}
