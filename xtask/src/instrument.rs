//! Builds in which the compiler adds something to the project's own crates. All others stay as they are in every build.

use anyhow::Result;
use harmonaize_testkit::workspace;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

/// Calls the compiler as cargo would, with more flags where it compiles a crate that is looked at. Instrumented, the loops of kernels take
/// 15 GB and many minutes to compile; what runs while others are built is none of it.
const WRAPPER: &str = r#"#!/bin/sh
case "$*" in
*"--crate-name build_script_"* | *"--crate-name ___ "* | *"--crate-name bindgen "* | *"--crate-name harmonaize_kernels "*) exec "$@" ;;
esac
export RUSTC_BOOTSTRAP=1
exec "$@" "#;

/// Has a call of cargo build the project's crates with these flags. The wrapper lies in the target's folder of this name. Flags of the
/// unstable kind are taken there alone: set for all, the permission would have others' crates built anew.
pub(crate) fn apply(command: &mut Command, name: &str, flags: &str) -> Result<()> {
    let wrapper = workspace::target().join(name).join("rustc");
    std::fs::create_dir_all(wrapper.parent().unwrap_or(&wrapper))?;
    // A compiler that is being written to cannot be started: it is put in place whole.
    let fresh = wrapper.with_extension("new");
    std::fs::write(&fresh, format!("{WRAPPER}{flags}\n"))?;
    std::fs::set_permissions(&fresh, std::fs::Permissions::from_mode(0o755))?;
    std::fs::rename(&fresh, &wrapper)?;
    command.env("RUSTC_WORKSPACE_WRAPPER", &wrapper);
    Ok(())
}
