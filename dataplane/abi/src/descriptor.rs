//! Descriptors in the rings between tenant and agent. Plain bytes: any bit pattern is a value, and the agent copies
//! each descriptor once before it looks at it.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bits of [`Submission::flags`]. Unknown bits are refused.
pub mod flags {
    /// The operation has [`super::Submission::residual_in`] and [`super::Submission::residual_out`]: an AllReduce of f32, through a mapped attachment.
    pub const FEEDBACK: u8 = 1;
    /// Ranks' counts differ ([`crate::Signature::uneven`]): they lie where [`super::Submission::residual_in`] says. Of an AllGather,
    /// a ReduceScatter, a Gather, a Scatter or an AllToAll, through a mapped attachment.
    pub const UNEVEN: u8 = 2;
    /// All bits that this version knows.
    pub const ALL: u8 = FEEDBACK | UNEVEN;
}

/// `bytes` bytes of the attachment's tensor memory, from `offset`. They lie in its arena, which begins at 0, or in one
/// region that was [added](crate::session::AddedRegion).
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    serde::Serialize,
    serde::Deserialize,
)]
#[repr(C)]
pub struct Region {
    /// Where it begins.
    pub offset: u64,
    /// Length in bytes; must be what the operation needs.
    pub bytes: u64,
}

/// One operation, submitted by one rank. 128 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Submission {
    /// [`crate::ABI_VERSION`].
    pub version: u16,
    /// [`crate::Collective`] code, or [`crate::Direction`] code of a send or a receive.
    pub collective: u8,
    /// [`crate::Dtype`] code.
    pub dtype: u8,
    /// [`crate::ReduceOp`] code.
    pub reduce: u8,
    /// [`flags`].
    pub flags: u8,
    /// Class among the tenant's operations: 1 latency, 2 normal, 3 bulk, 4 background; 0 and what is unknown: by its size.
    pub tensor_class: u8,
    /// Within its class, operations of a higher priority go first.
    pub priority: u8,
    /// Communicator handle of this attachment, from joining.
    pub communicator: u32,
    /// Root rank, where the collective has one. Of a send or a receive: the other end, or [`crate::ANY_RANK`].
    pub root: u32,
    /// The submitter's own number for this operation; comes back in the completion.
    pub cookie: u64,
    /// Elements, as in [`crate::Signature::count`].
    pub count: u64,
    /// Where the input lies. Ignored for Barrier.
    pub input: Region,
    /// Where the output goes; equal to `input` for an operation in place.
    pub output: Region,
    /// Wanted completion in nanoseconds from submission, 0 none. Among equals of class and priority the earliest goes first.
    pub deadline_ns: u64,
    /// Training or inference step that this operation belongs to, 0 unknown. Among equals of class, priority and deadline the smallest goes
    /// first, and what is unknown last.
    pub iteration: u64,
    /// With [`flags::FEEDBACK`]: as many elements as the input that are owed to the sum, as earlier operations left them out.
    /// With [`flags::UNEVEN`]: the counts in elements as `u64` ([`crate::Collective::said_counts`]), by rank; of an AllToAll what goes to each,
    /// then what comes from each. The agent reads them once. Else zero.
    pub residual_in: Region,
    /// With [`flags::FEEDBACK`]: where what is owed after a successful operation goes; all of it is written. Overlaps no other region. Else zero.
    pub residual_out: Region,
    /// How long the operation may make no progress, in nanoseconds; 0: 10 min, or as long as the operator allows. More than that is refused.
    pub timeout_ns: u64,
    /// Of a [`crate::ReduceOp::PremulSum`]: what this rank's input is multiplied by, as the bits of an `f64`. Else zero.
    pub factor: u64,
}

/// The end of one operation at one rank. 64 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Completion {
    /// [`crate::ABI_VERSION`].
    pub version: u16,
    /// [`crate::Status`] code.
    pub status: u16,
    /// Communicator handle.
    pub communicator: u32,
    /// The submission's cookie.
    pub cookie: u64,
    /// Number of this operation on its communicator, from 0. Of a message: its number among those of its two ranks in its direction.
    pub operation: u64,
    /// Receipt: tensor bytes this rank's host sent for the operation.
    pub wire_bytes: u64,
    /// Receipt: bits on the wire per element, times 256 (fixed point); 0 where nothing was sent.
    pub bits_per_element_x256: u32,
    /// Receipt: the class of the algorithm. Value 0 is none, 1 within one host, 2 ring, 3 pairwise, 4 chain, 5
    /// dissemination. Value 6 is direct exchange, coded; 7 is direct exchange in one shot, 8 in two. Value 9 is by an
    /// aggregator, 10 recursive doubling, 11 recursive halving. Value 12 is binomial tree, 13 within racks and between
    /// them.
    pub algorithm: u8,
    /// Receipt: 1 if part of the operation was run again another way, or chunks went exact though others were coded.
    pub fallback: u8,
    /// Zero.
    pub reserved1: u16,
    /// Receipt: the most that the error (vNMSE) is, by what encoders measured, as `f32` bits; 0 for exact operations.
    pub error: u32,
    /// Receipt: the error (vNMSE) that encoders measured, added up over all encodings, as `f32` bits. It is what was lost where the
    /// errors of several hosts are not alike, and at most `error`. It is 0 for exact operations.
    pub measured_error: u32,
    /// Receipt: in which codec the tensor travelled, an index into [`CODECS`]; [`SEVERAL_CODECS`] where that was not always the same.
    pub codec: u16,
    /// Zero.
    pub reserved2: u16,
    /// Of a send or a receive: the rank at the other end. Else zero.
    pub peer: u32,
    /// Zero.
    pub reserved3: [u32; 2],
}

/// Names of codecs, at the numbers that completions tell. New ones come at the end.
pub const CODECS: [&str; 12] = [
    "exact",
    "bf16",
    "fp16",
    "int8",
    "int4",
    "int8 stochastic",
    "rotated 4",
    "rotated 3",
    "rotated 2",
    "rotated 1",
    "nonzero blocks",
    "shared 4",
];

/// In [`Completion::codec`]: codes that an aggregator adds.
pub const SHARED_CODEC: u16 = 11;

/// In [`Completion::codec`]: parts travelled in different codecs.
pub const SEVERAL_CODECS: u16 = u16::MAX;

const _: () = assert!(size_of::<Submission>() == 128);
const _: () = assert!(size_of::<Completion>() == 64);
