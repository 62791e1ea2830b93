//! The project's tasks as a library: each task is one module, and the emulated fabric serves tests and benches too.

#![forbid(unsafe_code)]

pub mod aarch64;
pub mod bench;
pub mod bystander;
pub mod ci;
pub mod clock;
pub mod counters;
mod delay;
pub mod demo;
pub mod deployment;
pub mod dpu;
pub mod ebpf;
pub mod elastic;
pub mod emulate;
pub mod fabric;
pub mod foreign;
pub mod job;
pub mod layout;
pub mod load;
pub mod namespace;
pub mod packages;
pub mod peers;
pub mod plans;
pub mod plot;
pub mod process;
pub mod route;
pub mod soak;
pub mod softroce;
pub mod task;
pub mod tenant;
pub mod test;
pub mod tidy;
pub mod topology;
pub mod vm;
pub mod workspace;
