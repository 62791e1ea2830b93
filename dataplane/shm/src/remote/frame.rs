//! Frames on a remote attachment's socket: a header of fixed size, and what its kind says.

use harmonaize_abi::Submission;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Values of [`Header::kind`].
pub(crate) mod kind {
    /// Tenant to agent: a submission follows.
    pub(crate) const SUBMISSION: u32 = 1;
    /// Agent to tenant: a completion follows.
    pub(crate) const COMPLETION: u32 = 2;
    /// Agent to tenant: send `bytes` bytes from `offset`.
    pub(crate) const FETCH: u32 = 3;
    /// Tenant to agent: the bytes of the oldest fetch follow.
    pub(crate) const FETCH_DATA: u32 = 4;
    /// Agent to tenant: `bytes` bytes follow, for `offset`.
    pub(crate) const STORE: u32 = 5;
    /// Tenant to agent: the oldest store is done.
    pub(crate) const STORE_DONE: u32 = 6;
}

/// Opens every frame. 32 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Header {
    /// One of [`kind`].
    pub(crate) kind: u32,
    /// Zero.
    pub(crate) reserved: u32,
    /// The agent's number for a fetch or store, else 0.
    pub(crate) tag: u64,
    /// Of the tenant's tensor memory, else 0.
    pub(crate) offset: u64,
    /// Tensor bytes that the frame is about, else 0.
    pub(crate) bytes: u64,
}

/// Bytes of a header.
pub(crate) const HEADER: usize = size_of::<Header>();
/// Most bytes that follow a header without being tensor bytes.
pub(crate) const BODY: usize = size_of::<Submission>();
