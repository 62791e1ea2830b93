//! Who runs where, with how many workers. Here are an inventory of accelerators by kind, jobs with ranges, goodput fitted to
//! what was measured, policies behind one trait, a market, and a simulator in virtual time.
//!
//! Architecture invariant: no clock, no socket, no thread, no file; time, profiles and workloads come in as arguments. The
//! solver of programs alone reads a clock, against limits that callers give.
#![forbid(unsafe_code)]

mod allocation;
mod artifact;
mod fairness;
mod fit;
mod goodput;
mod inventory;
mod job;
mod market;
mod model;
mod policy;
mod profile;
mod program;
mod simulator;
mod synthetic;

pub use allocation::{Allocation, AllocationError, check};
pub use artifact::{Artifact, ArtifactError};
pub use fairness::{MakePolicy, finish_time_ratios};
pub use fit::{Measured, fit};
pub use goodput::{
    BatchRange, Choice, LearningRate, LocalBatch, Noise, StepModel, best, best_of, candidates,
};
pub use inventory::{Inventory, InventoryError, Kind, KindId};
pub use job::{Job, RangeError, Ranges};
pub use market::jobs::{ClearedJobs, Demand, Won, clear_jobs};
pub use market::{
    Bid, BidId, Cleared, Exchange, Market, MarketError, MarketEvent, OperatorCost, Traded, highest_price,
    last_moment,
};
pub use model::{Epoch, Facts, Model, ModelError};
pub use policy::{
    Candidate, Fifo, Gavel, LeastAttained, MarketPolicy, Policy, PolicyError, Pollux, PolluxSettings, Round,
    Sia, SiaSettings,
};
pub use profile::{Placement, Profile, ProfileError, Scaling, StepTime};
pub use program::{Configuration, Program};
pub use simulator::{JobOutcome, Outcome, Settings, SimulationError, simulate};
pub use synthetic::Synthetic;
