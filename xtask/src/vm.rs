//! Small virtual machines for tests that need another kernel: prepared from Debian's packages, kept under `target/vm`.

pub mod guest;
mod hosts;
pub mod initramfs;
pub mod job;
pub mod kernel;
pub mod machine;
mod modules;
mod payload;
pub mod programs;

use std::path::PathBuf;

/// What differs between the guests' processors.
#[derive(Debug, Clone, Copy)]
pub struct Architecture {
    /// Debian's name of it, as in packages' names.
    pub debian: &'static str,
    /// The folder of its shared libraries: `/usr/lib/NAME`.
    pub libraries: &'static str,
    /// The system emulator.
    pub emulator: &'static str,
    /// The emulator's machine and processor, without its accelerator.
    pub machine: &'static [&'static str],
    /// The kernel's name of the serial console.
    pub console: &'static str,
    /// The guest ends the emulator with a status of its own (isa-debug-exit), and does not only print one.
    pub debug_exit: bool,
}

/// A 64-bit PC.
pub const AMD64: Architecture = Architecture {
    debian: "amd64",
    libraries: "x86_64-linux-gnu",
    emulator: "qemu-system-x86_64",
    machine: &["-M", "q35"],
    console: "ttyS0",
    debug_exit: true,
};

/// The folder of everything that is kept for machines.
pub fn folder() -> PathBuf {
    crate::workspace::target().join("vm")
}
