//! How agents and aggregators break the protocol.

/// A breach of protocol, which costs the session. The text goes to the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Breach {
    /// It has no content.
    #[error("a message without content")]
    Empty,
    /// It comes before the session is open.
    #[error("a message before Hello")]
    BeforeHello,
    /// The session is open already.
    #[error("a second Hello")]
    SecondHello,
    /// It is an aggregator's.
    #[error("a host's agent that speaks as an aggregator")]
    AsAggregator,
    /// It is a host's agent's.
    #[error("a message of hosts' agents from an aggregator")]
    AsAgent,
    /// Its epoch is none.
    #[error("an epoch that control never gives")]
    Epoch,
    /// The agent has no part in the communicator.
    #[error("a message about a communicator of others")]
    OtherCommunicator,
    /// Nothing keeps such a budget.
    #[error("a budget that makes no sense")]
    Budget,
    /// The rank is not the agent's.
    #[error("a budget for a rank of others")]
    OtherBudget,
    /// The rank is not the agent's.
    #[error("a rank of others splits")]
    OtherSplit,
    /// The rank is not the agent's.
    #[error("a rank of others left")]
    OtherLeave,
    /// The request's number is in use.
    #[error("a join with the number of an open one")]
    JoinTwice,
    /// The request's number is in use.
    #[error("a number of AwaitOrder twice")]
    OrderTwice,
    /// The request's number is in use.
    #[error("a number of ReadEvents twice")]
    ReadTwice,
    /// A communicator comes twice.
    #[error("a communicator that is named twice in Hello")]
    NamedTwice,
    /// The agent names no participant of its recipe.
    #[error("a participant that is not there")]
    NoParticipant,
    /// The agent has no part in the communicator.
    #[error("a communicator of others in Hello")]
    OtherInHello,
    /// The agent had no part in the communicator.
    #[error("an ended communicator of others in Hello")]
    EndedOfOthers,
    /// The epoch is newer than all that control gave.
    #[error("an epoch that control never gave in Hello")]
    NeverGiven,
    /// Epoch, participants and order do not fit each other.
    #[error("a running communicator without sense in Hello")]
    Senseless,
    /// A host or a rank is there twice, or ranks are missing.
    #[error("a running communicator with senseless participants in Hello")]
    SenselessParticipants,
}
