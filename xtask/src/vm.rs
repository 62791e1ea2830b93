//! Small virtual machines for tests that need another kernel: prepared from Debian's packages, kept under `target/vm`.

pub mod initramfs;
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
    /// The emulator's machine.
    pub machine: &'static str,
    /// The processor that it emulates.
    pub processor: &'static str,
    /// The program that takes the debug information out of programs.
    pub strip: &'static str,
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
    machine: "q35",
    processor: "max",
    strip: "strip",
    console: "ttyS0",
    debug_exit: true,
};

/// 64-bit ARM, as in offload units.
pub const ARM64: Architecture = Architecture {
    debian: "arm64",
    libraries: "aarch64-linux-gnu",
    emulator: "qemu-system-aarch64",
    machine: "virt",
    // Newer ones authenticate pointers, which makes their emulation three times slower.
    processor: "cortex-a76",
    strip: "aarch64-linux-gnu-strip",
    console: "ttyAMA0",
    debug_exit: false,
};

/// The folder of everything that is kept for machines.
pub fn folder() -> PathBuf {
    harmonaize_testkit::workspace::target().join("vm")
}
