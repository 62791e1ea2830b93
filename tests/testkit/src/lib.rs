//! What end-to-end tests, benchmarks and the project's tasks share. It has the emulated fabric, deployments on it, tenants'
//! jobs, and what they print.

#![forbid(unsafe_code)]

#[cfg(feature = "agents")]
pub mod agents;
pub mod bystander;
pub mod c_library;
pub mod chromium;
pub mod clock;
pub mod counters;
pub mod cross_traffic;
mod delay;
pub mod deployment;
pub mod draw;
pub mod elastic;
pub mod etcd;
pub mod fabric;
pub mod found;
pub mod golden;
pub mod job;
pub mod kubernetes;
pub mod layout;
pub mod lines;
pub mod load;
pub mod namespace;
pub mod packages;
pub mod placed;
pub mod plans;
pub mod process;
pub mod python;
pub mod release;
pub mod route;
pub mod served;
pub mod strict;
pub mod summary;
pub mod tenant;
pub mod topology;
pub mod truth;
pub mod usage;
pub mod workspace;
