//! The C library: built, linked with versioned symbols, and laid out as it is installed. Beside it, libraries with others' ABIs.

use crate::workspace::{self, Binaries, Profile};
use anyhow::{Context, Result, bail};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The name by which programs load it. Its number changes when programs that were linked with an older one would break.
pub const SONAME: &str = "libharmonaize.so.0";

/// A library that stands in for another one's functions, in programs that were built for that.
#[derive(Clone, Copy, Debug)]
pub struct StandIn {
    package: &'static str,
    /// As cargo builds it.
    built: &'static str,
    /// As it is installed.
    pub name: &'static str,
}

/// The library with NCCL's ABI.
pub const NCCL: StandIn =
    StandIn { package: "harmonaize-nccl", built: "libharmonaize_nccl.so", name: "libharmonaize-nccl.so" };

/// NCCL's tuner and profiler plugins.
pub const NCCL_PLUGIN: StandIn = StandIn {
    package: "harmonaize-nccl-plugin",
    built: "libharmonaize_nccl_plugin.so",
    name: "libharmonaize-nccl-plugin.so",
};

/// The library that programs of MPI preload.
pub const MPI: StandIn =
    StandIn { package: "harmonaize-mpi", built: "libharmonaize_mpi.so", name: "libharmonaize-mpi.so" };

/// What `pkg-config` says of it.
const PKG_CONFIG: &str = concat!(
    "prefix=${pcfiledir}/../..\n",
    "Name: harmonaize\n",
    "Description: Collectives as a service of the cloud provider\n",
    "Version: ",
    env!("CARGO_PKG_VERSION"),
    "\n",
    "Cflags: -I${prefix}/include\n",
    "Libs: -L${prefix}/lib -lharmonaize\n",
    "Libs.private: -lgcc_s -lpthread -ldl -lm\n",
);

/// Builds what the shared library is linked from, as `Binaries::build` does programs: not where `HARMONAIZE_BINARIES` names a folder.
pub fn build(profile: Profile) -> Result<PathBuf> {
    build_package("harmonaize-c", "libharmonaize.a", profile)
}

impl StandIn {
    /// Builds it, likewise.
    pub fn build(&self, profile: Profile) -> Result<PathBuf> {
        build_package(self.package, self.built, profile)
    }

    /// Builds it and puts it into a folder: `lib`. Returns its path there.
    pub fn install(&self, profile: Profile, folder: &Path) -> Result<PathBuf> {
        let library = self.build(profile)?;
        let lib = folder.join("lib");
        std::fs::create_dir_all(&lib).with_context(|| format!("cannot make {}", lib.display()))?;
        let to = lib.join(self.name);
        std::fs::copy(library, &to).with_context(|| format!("cannot write {}", to.display()))?;
        Ok(to)
    }
}

fn build_package(package: &str, file: &str, profile: Profile) -> Result<PathBuf> {
    let folder = match std::env::var_os("HARMONAIZE_BINARIES") {
        Some(folder) => PathBuf::from(folder),
        None => {
            // By itself: beside other packages it would have their features, and need their libraries.
            let mut build = workspace::cargo();
            build.args(["build", "--quiet", "--package", package]);
            build.args((profile == Profile::Release).then_some("--release"));
            workspace::run(&mut build)?;
            Binaries::folder_of(profile)
        }
    };
    let library = folder.join(file);
    if !library.is_file() {
        bail!("{} is not there; build it with `cargo build -p {package}`", library.display());
    }
    Ok(library)
}

/// Links the shared library from its archive and puts it into a folder: `lib`, `lib/pkgconfig` and `include`.
///
/// rustc links shared libraries with a version script of its own, beside which linkers take no other one or pass over it. So this is the
/// C compiler's work.
pub fn install(archive: &Path, folder: &Path) -> Result<()> {
    let source = workspace::root().join("dataplane/c");
    let (lib, include) = (folder.join("lib"), folder.join("include"));
    for folder in [&lib.join("pkgconfig"), &include] {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let mut link = Command::new("cc");
    link.arg("-shared").arg("-o").arg(lib.join(SONAME));
    link.arg(format!("-Wl,-soname,{SONAME}"));
    link.arg(format!("-Wl,--version-script={}", source.join("harmonaize.map").display()));
    link.args(["-Wl,--gc-sections", "-Wl,-z,defs,-z,relro,-z,now", "-Wl,--whole-archive"]).arg(archive);
    link.args(["-Wl,--no-whole-archive", "-lgcc_s", "-lpthread", "-ldl", "-lm"]);
    workspace::run(&mut link)?;
    let short = lib.join("libharmonaize.so");
    if short.is_symlink() {
        std::fs::remove_file(&short)?;
    }
    symlink(SONAME, &short)?;
    std::fs::copy(archive, lib.join("libharmonaize.a"))?;
    std::fs::copy(source.join("include/harmonaize.h"), include.join("harmonaize.h"))?;
    std::fs::write(lib.join("pkgconfig/harmonaize.pc"), PKG_CONFIG)?;
    Ok(())
}
