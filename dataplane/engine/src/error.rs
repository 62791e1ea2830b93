//! Why the engine refuses what it was told to do, for the operator.

use harmonaize_core::CoreError;
use harmonaize_plan::Participant;
use harmonaize_shm::{EndError, MemoryError};
use harmonaize_transport::{DownReason, LinkHandOverError};
use std::num::TryFromIntError;

/// Why a communicator, or an epoch of one, cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// The engine ends, or the communicator exists.
    #[error("the agent is going down, or has this communicator already")]
    Closed,
    /// It has ended, or never formed.
    #[error("no such communicator")]
    NoCommunicator,
    /// The table has no place left.
    #[error("too many communicators")]
    Full,
    /// A peer came twice, or is none of the plan's participants.
    #[error("participant {} introduced twice or unknown", .0.0)]
    UnknownPeer(Participant),
    /// A participant of the plan did not come.
    #[error("participant {} was not introduced", .0.0)]
    MissingPeer(Participant),
    /// A link cannot be opened.
    #[error("link to participant {}: {error}", .participant.0)]
    Link {
        /// The peer.
        participant: Participant,
        /// The reason.
        error: LinkError,
    },
    /// A coded chunk of the plan has more bytes than a slot may have.
    #[error("chunks are too large")]
    ChunkBytes,
    /// A codec of the plan, by its number.
    #[error("codec {0} is not known here")]
    UnknownCodec(u16),
    /// The ranks that came are not those that the plan has here.
    #[error("local ranks are not those of the plan")]
    LocalRanks,
    /// A rank's attachment has ended.
    #[error("an attachment is gone")]
    AttachmentGone,
    /// The state machine refuses the plan.
    #[error(transparent)]
    Core(#[from] CoreError),
    /// The work panicked; the text says where.
    #[error("{0}")]
    Panicked(String),
    /// A link went down before all were up; the text says which and why.
    #[error("{0}")]
    LinkDown(String),
}

/// Why a link of an epoch cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// It should go on from the epoch before, which has none.
    #[error("there is none to go on with")]
    NoneToReuse,
    /// A coded chunk of the plan has more bytes than a slot may have.
    #[error("chunks are too large")]
    ChunkBytes,
    /// A number of the plan does not fit here.
    #[error(transparent)]
    Size(#[from] TryFromIntError),
    /// Memory for its landing rings.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The transport refuses it.
    #[error(transparent)]
    Transport(#[from] DownReason),
}

/// Why an engine cannot be handed over or taken over.
#[derive(Debug, thiserror::Error)]
pub enum HandOverError {
    /// Something ends; a while later it has.
    #[error("the engine is ending something; try again")]
    Ending,
    /// Frames are still under way.
    #[error("links to peers did not come to rest in time")]
    Busy,
    /// Its end cannot be described.
    #[error("attachment {attachment} cannot be handed over: {error}")]
    Attachment {
        /// Its number.
        attachment: u64,
        /// The reason.
        error: EndError,
    },
    /// Its tensors, which are not mapped, are read or written just now.
    #[error("attachment {0} has transfers under way; try again")]
    Transfers(u64),
    /// Fewer descriptors came than the state counts on.
    #[error("a descriptor is missing")]
    NoDescriptor,
    /// What came belongs to a communicator that did not come.
    #[error("{0} of no communicator")]
    NoCommunicator(&'static str),
    /// What waits, and came, is of an attachment that did not come, or cannot be read.
    #[error("a {0} that waits, of which nothing is known")]
    Waiting(&'static str),
    /// An attachment that came cannot go on.
    #[error(transparent)]
    End(#[from] EndError),
    /// Links cannot go on.
    #[error(transparent)]
    Links(#[from] LinkHandOverError),
    /// A link takes no landing ring.
    #[error(transparent)]
    Ring(#[from] DownReason),
    /// Memory cannot be copied.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The kernel refused.
    #[error(transparent)]
    System(#[from] std::io::Error),
    /// A number does not fit.
    #[error(transparent)]
    Size(#[from] TryFromIntError),
    /// The state cannot be written or read.
    #[error(transparent)]
    State(#[from] postcard::Error),
}
