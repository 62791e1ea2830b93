//! What control knows and decides, as a pure state machine: messages, calls and the time come in, outputs go
//! out.
//!
//! [`Controller`] owns the parts and alone has them meet. `world` holds facts, `job` what each communicator
//! runs by, `jobs` which hosts tenants' jobs have, `tenants` what tenants ask for and are promised, `queries` what operators ask. A part owns its
//! fields, reads the others through a context, and says what it did by them as effects.

mod breach;
mod controller;
mod ctx;
mod effects;
mod job;
mod jobs;
mod output;
mod queries;
mod reason;
mod refusal;
mod settings;
mod tenants;
#[cfg(feature = "testing")]
pub mod testing;
mod time;
mod timed;
mod view;
mod world;

pub use controller::Controller;
pub use controller::change::ReorderError;
pub use controller::topology::TopologyRefusal;
pub use job::decisions::{Changed, Counts, Decision, Noticed, Outcome, Trigger};
pub(crate) use job::stored::{plan_change, stored_plan_status, touched};
pub use jobs::what_if::{WhatIf, WhatIfError};
pub use output::{Fact, Output, SessionId};
pub use queries::{Candidates, DryRun, LastOperation, NextWorker, Queries, RankTime, Unfit};
pub use reason::{RateChange, Reason, TurnsEnd};
pub use refusal::RequestRefusal;
pub use settings::{
    AllocatorSettings, LivePolicy, MarketSettings, Settings, TenantAlgorithm, TenantCongestion, Terms,
    UnknownPolicy,
};
pub use tenants::batch::NoBatch;
pub(crate) use tenants::elsewhere::for_a_tenant;
pub use tenants::limits::OverLimit;
pub use world::operator::Instruction;
pub use world::withdrawals::InstructionError;
