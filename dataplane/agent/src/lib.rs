//! The provider's agent: the daemon on an offload unit or hypervisor that runs tenants' collectives.
//!
//! Architecture invariant: tokio carries control traffic only; tensors move in the engine's own threads.
#![forbid(unsafe_code)]

pub mod agent;
mod aggregation;
pub mod aggregator;
mod backlog;
pub mod coding;
pub mod config;
mod congestion;
pub mod control;
mod costs;
pub mod counters;
pub mod engines;
pub mod handover;
mod interleave;
pub mod observe;
pub mod paths;
mod questions;
pub mod recipe;
pub mod reload;
mod report;
pub mod run;
pub mod sandbox;
mod served;
pub mod session;
pub mod staging;
pub mod telemetry;
pub mod wiring;
