//! Why control does not answer what a tenant asks, or gives a runner no order.

use crate::state::tenants::batch::NoBatch;
use crate::state::tenants::limits::OverLimit;
use harmonaize_abi::session::{BidError, HintsError, KnobsError, Refusal, RunnerError};
use harmonaize_disclose::CursorError;

/// Why control does not answer what a tenant asks, or gives a runner no order. The text goes to the tenant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestRefusal {
    /// No tenant has the name.
    #[error("the provider does not know this tenant")]
    UnknownTenant,
    /// An operator lets the tenant be on other hosts alone.
    #[error("the provider serves this tenant elsewhere")]
    Elsewhere,
    /// The tenant was removed while its process waited.
    #[error("the tenant is gone")]
    TenantGone,
    /// None of the tenant's communicators that run has the name.
    #[error("no communicator `{0}` of this tenant runs; join it first")]
    NoCommunicator(String),
    /// The communicator ended before its agreement was stored.
    #[error("the communicator has ended")]
    CommunicatorEnded,
    /// Requests wait for control, as many as may.
    #[error(
        "{waits} requests {} wait for the provider, and {most} may; ask again once some are answered",
        if *of_all { "of all tenants" } else { "of this tenant" }
    )]
    TooManyRequests {
        /// How many wait.
        waits: usize,
        /// How many may.
        most: usize,
        /// They are those of all tenants together.
        of_all: bool,
    },
    /// The tenant asks too often.
    #[error(transparent)]
    OverLimit(#[from] OverLimit),
    /// Another proposal for the communicator is not stored yet.
    #[error("a proposal for it is being written down; propose again after it")]
    ProposalPending,
    /// The store took no agreement.
    #[error("the provider could not write it down; what was agreed on before still is")]
    NotStored,
    /// A communicator would lose ranks and go on.
    #[error("communicators do not go on by themselves without ranks that are lost; their processes regroup")]
    ContinueOnLoss,
    /// A later version's collective, by its code.
    #[error("the provider does not know collective {0} yet")]
    UnknownCollective(u32),
    /// Hints make no sense.
    #[error(transparent)]
    Hints(#[from] HintsError),
    /// Hints expect a later version's collective.
    #[error("hints of a collective that the provider does not know")]
    HintedCollective,
    /// Knobs make no sense.
    #[error(transparent)]
    Knobs(#[from] KnobsError),
    /// Ranks can make no batch of the range.
    #[error(transparent)]
    Batch(#[from] NoBatch),
    /// A cursor that is not of the tenant's feed.
    #[error(transparent)]
    Cursor(#[from] CursorError),
    /// Processes wait for events, as many as may.
    #[error("too many processes of this tenant wait for events; try again")]
    TooManyReaders,
    /// Operators give no hosts to jobs.
    #[error("the provider allocates no hosts to jobs")]
    NoAllocator,
    /// The agent that brought a report has gone.
    #[error("the agent has no session")]
    NoSession,
    /// A runner's report makes no sense.
    #[error(transparent)]
    Report(#[from] RunnerError),
    /// A job's bid makes no sense.
    #[error(transparent)]
    Bid(#[from] BidError),
    /// A bid where hosts are given by another policy, or by none.
    #[error("the provider's hosts have no prices, so nothing is bid for")]
    NoMarket,
    /// A bid for a job that is not there.
    #[error("the tenant has no job of this name; start its runners first, with `--bid`")]
    NoJob,
    /// A change of a bid, without one.
    #[error("the question names no bid")]
    NoBid,
    /// A job's bid was changed too often of late.
    #[error("a job's bid can be changed {most} times in a minute; change it again in {seconds} s")]
    BidChangedTooOften {
        /// How often it may be.
        most: u32,
        /// How long until it can be changed again, rounded up.
        seconds: u64,
    },
    /// A worker has a place in a job of more workers than any has.
    #[error("a worker of a place that is never given")]
    NoSuchPlace,
    /// The job went while its runner was heard.
    #[error("the job is gone")]
    JobGone,
    /// Runners of the job before of this name are still there.
    #[error("a job of this name is over, and its runners end still; ask again soon")]
    JobOver,
    /// A job has so many runners, which are the most.
    #[error("the job has {0} runners, as many as it may")]
    TooManyRunners(usize),
    /// A tenant has so many jobs, which are the most.
    #[error("the tenant has {0} jobs, as many as it may")]
    TooManyJobs(usize),
}

impl From<RequestRefusal> for Refusal {
    fn from(why: RequestRefusal) -> Self {
        let text = why.to_string();
        match why {
            RequestRefusal::NoCommunicator(_) => Self::NoCommunicator(text),
            _ => Self::Other(text),
        }
    }
}
