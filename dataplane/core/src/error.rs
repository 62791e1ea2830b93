//! Why a request to a communicator is refused.

use crate::Failure;
use harmonaize_abi::Rank;
use harmonaize_plan::PlanError;

/// Why a request to the communicator was refused. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CoreError {
    /// The plan cannot be run.
    #[error("plan refused: {0}")]
    BadPlan(#[from] BadPlan),
    /// The plan has no program for this operation.
    #[error("plan: {0}")]
    Plan(#[from] PlanError),
    /// The root of a broadcast is no rank of the communicator.
    #[error("root {0} is outside the communicator")]
    BadRoot(Rank),
    /// Counts where all are alike, none where they differ, of another number, or more than the signature says.
    #[error("counts do not fit the operation")]
    BadCounts,
    /// Too many operations in flight.
    #[error("too many operations in flight")]
    Full,
    /// The rank is not one of this participant's.
    #[error("rank {0} is not local")]
    NotLocal(Rank),
    /// The communicator has ended.
    #[error("the communicator has ended: {0}")]
    Ended(Failure),
}

/// Why a plan cannot be run, or cannot follow the one in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadPlan {
    /// It gives this participant no rank.
    #[error("this participant has no rank")]
    NoLocalRank,
    /// It has no channel, or landing slots that are not a power of two.
    #[error("channels must not be 0, landing slots a power of two")]
    Shape,
    /// A step that this version cannot run.
    #[error("a step that this version cannot run")]
    Step,
    /// Another change is under way.
    #[error("another change is under way")]
    ChangeUnderWay,
    /// Its epoch is not newer than the one in force.
    #[error("the epoch is not newer")]
    NotNewer,
    /// Another participant gave up this change.
    #[error("another participant gave up this change")]
    Withdrawn,
    /// Its members are not the communicator's.
    #[error("members differ")]
    Members,
    /// Its channels or its chunk size are not those in force.
    #[error("channels or chunk size differ")]
    Chunks,
    /// A link to carry over is down.
    #[error("a link to carry over is down")]
    LinkDown,
    /// A link to carry over leads to nobody.
    #[error("a link to carry over is to nobody")]
    LinkToNobody,
    /// A link is to be carried over twice.
    #[error("a link is to be carried over twice")]
    LinkTwice,
    /// Its landing slots are not those of the links to carry over.
    #[error("landing slots differ, so that no link can be carried over")]
    LandingSlots,
}
