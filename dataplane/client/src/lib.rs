//! The tenant's library for collectives through the provider's agent. A process attaches to the agent, puts tensors
//! where the agent reaches them, joins communicators, and runs collectives on them.
//!
//! ```no_run
//! use harmonaize_client::{AttachOptions, Client, Dtype, Rank, ReduceOp};
//! use std::time::Duration;
//!
//! # fn main() -> Result<(), harmonaize_client::Error> {
//! let client = Client::attach("/run/harmonaize/tenant.sock", AttachOptions::default())?;
//! let gradients = client.tensor(Dtype::F32, 1024)?;
//! let job = client.join("job", Rank(0), 8, Duration::from_secs(60))?;
//! gradients.write(0, &[1.0f32; 1024])?;
//! let receipt = job.all_reduce_in_place(&gradients, ReduceOp::Sum)?.wait(Duration::from_secs(10))?;
//! println!("{} bytes sent", receipt.wire_bytes);
//! # Ok(())
//! # }
//! ```
//!
//! Every handle ([`Client`], [`Communicator`], [`Tensor`], [`Region`], [`Operation`]) is `Send` and `Sync`, and all but
//! tensors and regions keep the attachment alive. One thread at a time waits on the kernel for all others. A remote attachment's tensors are served to the agent
//! while some thread waits or polls, and not otherwise.
//!
//! With the feature `rdma` tensors may be reached over a queue pair ([`Access::Rdma`]), so that agent and process need not
//! share memory, nor a machine: then the agent answers over TCP ([`AgentAddress::Tcp`]). It links libibverbs. With the feature `async`
//! a program on tokio has its events as a stream (`Events::into_stream`); without it nothing here needs a runtime.
//!
//! Variables of the environment ask for a log, metrics, and a line for each operation: `HARMONAIZE_DEBUG`, `HARMONAIZE_METRICS` and
//! `HARMONAIZE_OPERATIONS`. A thread writes them; where none is set, an operation costs a branch more.
//!
//! Architecture invariant: knows ranks, its agent's socket or address, and whether ranks are on one machine (by the kernel's boot id); no
//! host's place, link or other tenant.
#![forbid(unsafe_code)]

mod address;
mod agent_loss;
mod agreement;
mod arena;
mod attach;
mod communicator;
mod completions;
mod element;
mod environment;
mod error;
mod events;
mod feedback;
mod group;
mod in_flight;
mod journal;
mod noise;
mod operation;
mod pool;
mod protection;
mod protocol_error;
#[cfg(feature = "rdma")]
mod rdma;
mod region;
mod runner;
mod session;
mod shared;
mod tensor;

pub use address::AgentAddress;
pub use agent_loss::AgentLoss;
pub use attach::{AttachOptions, Client};
pub use communicator::{Communicator, JoinOptions, OperationOptions, RegroupOptions};
pub use completions::Completions;
pub use element::Element;
pub use environment::{Place, job_from_env};
pub use error::{Error, ProtectionError};
#[cfg(feature = "async")]
pub use events::EventStream;
pub use events::Events;
pub use feedback::Feedback;
pub use group::Group;
pub use harmonaize_abi::session::{
    Access, Agreement, BatchChoice, BatchKnobs, BidError, Budget, Checkpoint, Choice, ChoiceReason, Clause,
    Constraints, ElasticOrder, Event, EventBatch, EventCursor, EventKind, Expected, FailureDetail, Hints,
    HostPrice, JobBid, JoinRefusal, Knobs, LearningRate, MessageError, Negotiated, OnFailure, Price,
    PricedOrder, Priority, Reason, RecallReason, Record, RefusalKind, RegionRefused, RunnerOrder,
    RunnerReport, Secret, Target, WorkerPlace, WorkerState,
};
pub use harmonaize_abi::{
    BlockContent, Bool, Called, Collective, Complex64, Complex128, CongestionLevel, Direction, Dtype, F8E4M3,
    F8E5M2, OperationId, P2pSignature, Rank, ReduceOp, Signature, Status, StragglerCause,
};
pub use harmonaize_shm::Pin;
#[cfg(feature = "rdma")]
pub use harmonaize_verbs::{Devices, VerbsError};
pub use journal::{DebugLevel, ExternalCommunicator, ExternalOperation};
pub use noise::GradientNoise;
pub use operation::{Algorithm, Operation, Receipt};
pub use protection::{ProtectOptions, Protection, RankState, Restored};
pub use protocol_error::{ProtocolError, RequestKind};
#[cfg(feature = "rdma")]
pub use rdma::RdmaOptions;
pub use region::Region;
pub use runner::Runner;
pub use tensor::Tensor;

#[cfg(test)]
mod tests {
    use super::*;

    /// As the crate's documentation promises.
    #[test]
    fn handles_go_to_and_are_used_from_any_thread() {
        fn any_thread<T: Send + Sync + 'static>() {}
        any_thread::<Client>();
        any_thread::<Communicator>();
        any_thread::<Tensor>();
        any_thread::<Operation>();
        any_thread::<Completions>();
        any_thread::<Feedback>();
        any_thread::<Region>();
        any_thread::<Events>();
        any_thread::<Receipt>();
        any_thread::<Protection>();
        any_thread::<RankState>();
        any_thread::<Error>();
    }
}
