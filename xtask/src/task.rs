//! The command line of `cargo xtask`: every task with its arguments.

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// The project's tasks.
#[derive(Parser)]
#[command(name = "cargo xtask", version, about, after_help = EXAMPLES)]
pub struct Arguments {
    #[command(subcommand)]
    task: Task,
}

const EXAMPLES: &str = "Examples:
  cargo xtask demo                         four tenants on an emulated fabric, with a report
  cargo xtask test --yes                   every test; installs what is missing without asking
  cargo xtask t server agreements          tests of one crate, those with that word in their names
  cargo xtask emulate fabric.toml          the fabric of a topology file, until Ctrl-C
  cargo xtask softroce test --yes          the tests that need an RDMA device, in a virtual machine
  cargo xtask dpu --yes                    the agent on an emulated offload unit, its tenants on the host
  cargo xtask bench shaped --json out.json one suite of benchmarks
  cargo xtask ci                           what a change must pass";

#[derive(Subcommand)]
enum Task {
    /// Run four tenants beside each other on a fabric that is congested and loses hosts, and prove their results right
    Demo(crate::demo::Args),
    /// Build and run every test, in namespaces too where the privilege is there
    Test(crate::test::Args),
    /// Build and run one crate's tests
    T(crate::t::Args),
    /// Run everything that a change must pass, stage by stage
    Ci(crate::ci::Args),
    /// Run the simulation with rotating seeds for as long as asked
    Soak(crate::soak::Args),
    /// Feed the decoders what nobody has seen, under libFuzzer
    Fuzz(crate::fuzz::Args),
    /// Run the tests of rooms with unsafe code under AddressSanitizer
    Sanitize(crate::sanitize::Args),
    /// Run the tests that need an RDMA device, on emulated hosts in a virtual machine
    Softroce(crate::softroce::Args),
    /// Build the fabric that a topology file describes, with control and agents, and keep it up
    Emulate(crate::emulate::Args),
    /// Run a suite of benchmarks and compare each with its bar
    Bench(Box<crate::bench::Args>),
    /// Build the C library with its header, and put both where they are asked for
    C(crate::c::Args),
    /// Build for the offload unit's architecture, and run tests of the result under emulation
    Aarch64(crate::aarch64::Args),
    /// Run the agent on emulated offload units of another architecture, for tenants on their hosts
    Dpu(crate::dpu::Args),
    /// Build packages, container images and charts of daemons and command line, and test them
    Package(crate::package::Args),
    /// Build the Python wheel and run its tests on an emulated fabric
    Wheel(crate::wheel::Args),
    /// Build the documents as a book, with the crates' documentation beside it, and check every link
    Site(crate::site::Args),
    /// Build the programs for the kernel, and check that the committed objects are theirs
    Ebpf(crate::ebpf::Args),
    /// Check the project's invariants by reading the tree
    Tidy(crate::tidy::Args),
    /// Report what to look at in the sources: pairs and circles of files, large types, long functions
    House(crate::house::Args),
}

/// Runs the task that the command line names.
pub fn main() -> ExitCode {
    let done = match Arguments::parse().task {
        Task::Demo(args) => crate::demo::run(&args),
        Task::Test(args) => crate::test::run(&args),
        Task::T(args) => crate::t::run(&args),
        Task::Ci(args) => crate::ci::run(&args),
        Task::Soak(args) => crate::soak::run(&args),
        Task::Fuzz(args) => crate::fuzz::run(&args),
        Task::Sanitize(args) => crate::sanitize::run(&args),
        Task::Softroce(args) => crate::softroce::run(&args),
        Task::Emulate(args) => crate::emulate::run(&args),
        Task::Bench(args) => crate::bench::run(&args),
        Task::C(args) => crate::c::run(&args),
        Task::Aarch64(args) => crate::aarch64::run(&args),
        Task::Dpu(args) => crate::dpu::run(&args),
        Task::Package(args) => crate::package::run(&args),
        Task::Wheel(args) => crate::wheel::run(&args),
        Task::Site(args) => crate::site::run(&args),
        Task::Ebpf(args) => crate::ebpf::run(&args),
        Task::Tidy(args) => crate::tidy::run(&args),
        Task::House(args) => crate::house::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
