//! The project's tasks: one module each.

#![forbid(unsafe_code)]

pub mod aarch64;
pub mod bench;
pub mod c;
pub mod ci;
pub mod demo;
pub mod dpu;
pub mod ebpf;
pub mod emulate;
pub mod fuzz;
pub mod house;
mod instrument;
pub mod package;
pub mod sanitize;
pub mod site;
pub mod soak;
pub mod softroce;
pub mod t;
pub mod task;
pub mod test;
pub mod tidy;
pub mod vm;
pub mod wheel;
