//! The suites of benchmarks: each bar is one row, measured beside what it is compared with.

#![forbid(unsafe_code)]

pub mod aggregation;
mod allocation;
mod calls;
pub mod cluster;
pub mod codec;
pub mod compression;
pub mod control;
pub mod cooperation;
pub mod dataplane;
mod figures;
mod findings;
pub mod hosts;
pub mod lab;
pub mod launcher;
pub mod part;
pub mod peers;
pub mod perftest;
pub mod pictures;
mod processors;
pub mod rdma;
pub mod report;
pub mod row;
mod runs;
mod sharing;
pub mod small;
pub mod stale;
mod state;
mod steady;
pub mod suite;
pub mod suites;
pub mod sweep;
pub mod telemetry;
pub mod testbed;
mod threads;
mod torch;
mod trust;
