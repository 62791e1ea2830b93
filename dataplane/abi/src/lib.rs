//! What a tenant's process and the provider's agent share byte for byte. Here are element types, operations,
//! versioned descriptors, status codes, and the view of tensor memory that nobody may turn into a reference.
//!
//! Architecture invariant: no I/O, no allocation beyond decoding a session message, no knowledge of hosts or links.
#![no_std]

extern crate alloc;

mod collective;
mod congestion;
mod congestion_control;
mod descriptor;
mod element;
mod ids;
mod mac;
mod p2p;
pub mod session;
mod status;
mod units;
mod view;

pub use collective::{
    AggregatorTask, BlockContent, Blocks, Collective, CollectiveTraits, Dtype, Holders, Pattern, Rank,
    ReduceOp, Signature,
};
pub use congestion::{CongestionCause, CongestionLevel, StragglerCause};
pub use congestion_control::{CongestionControl, CongestionControlError};
pub use descriptor::{CODECS, Completion, Region, SEVERAL_CODECS, SHARED_CODEC, Submission, flags};
pub use element::{Bool, Complex64, Complex128, F8E4M3, F8E5M2};
pub use ids::{
    ChannelId, CommunicatorHandle, CommunicatorId, Cookie, Epoch, GrantId, OperationId, SegmentId,
    SegmentIndex, Sequence, SlotId, StepId, Tag, Token,
};
pub use mac::keyed;
pub use p2p::{ANY_RANK, Called, Direction, P2pSignature};
pub use status::Status;
pub use units::{Bytes, Nanos, Rate, UnitError};
pub use view::{View, ViewMut};

/// Version of the shared-memory interface between a tenant's process and its agent. Every attach opens with it.
pub const ABI_VERSION: u16 = 7;
