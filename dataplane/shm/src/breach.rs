//! How the other side of an attachment broke the protocol.

/// How the other side broke the protocol. The attachment has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Breach {
    /// A frame of a kind that there is not.
    #[error("frame of unknown kind")]
    UnknownKind,
    /// A header whose reserved bits are not 0.
    #[error("reserved bits set")]
    Reserved,
    /// A header that makes no sense.
    #[error("header that cannot be read")]
    Header,
    /// A descriptor that makes no sense.
    #[error("descriptor that cannot be read")]
    Descriptor,
    /// A completion that makes no sense.
    #[error("completion that cannot be read")]
    Completion,
    /// A completion of another version of the ABI.
    #[error("completion of another version")]
    CompletionVersion,
    /// A completion of no operation in flight.
    #[error("completion of an operation that is not in flight")]
    NotInFlight,
    /// More operations than the rings have entries.
    #[error("more operations in flight than the rings have entries")]
    TooManyOperations,
    /// More requests than may be outstanding.
    #[error("more requests than may be outstanding")]
    TooManyRequests,
    /// Bytes of a tensor that nobody waits for.
    #[error("tensor bytes that nobody waits for")]
    Unasked,
    /// Bytes of a fetch before those of an older one.
    #[error("bytes of a fetch that is not the oldest")]
    FetchOrder,
    /// The end of a store before that of an older one.
    #[error("end of a store that is not the oldest")]
    StoreOrder,
    /// The end of a store before all its bytes were sent.
    #[error("end of a store whose bytes have not all been sent")]
    StoreUnsent,
    /// A message before or after its turn.
    #[error("a message out of turn")]
    MessageOrder,
    /// More messages than were sent, or fewer than were taken.
    #[error("a count of messages that cannot be")]
    MessageCount,
    /// A queue pair of a successor, for an attachment without any.
    #[error("a successor's queue pair for an attachment that has none")]
    NoSuccessor,
    /// An inherited attachment lacks a descriptor.
    #[error("a descriptor of an inherited attachment is missing")]
    InheritedDescriptor,
    /// Memory to hand over has no descriptor.
    #[error("memory without a descriptor cannot be handed over")]
    InheritedMemory,
    /// An inherited attachment does not go through a socket.
    #[error("an inherited attachment that is none through a socket")]
    InheritedSocket,
    /// An inherited attachment does not go over RDMA.
    #[error("an inherited attachment that is none over RDMA")]
    InheritedRdma,
    /// Transfers are under way, so nothing is handed over.
    #[error("transfers are under way")]
    UnderWay,
}
