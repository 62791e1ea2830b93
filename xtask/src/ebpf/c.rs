//! The programs in C: Debian's clang, unpacked under `target` beside whatever is installed, and what it builds.

use super::{folder, object, printed};
use crate::aarch64::archive::Archive;
use crate::aarch64::tree::{Contents, Tree};
use anyhow::{Context, Result, bail};
use harmonaize_testkit::packages::{self, Consent};
use harmonaize_testkit::workspace;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The package whose version counts.
const KEY: &str = "clang-22";
/// Where it is, unpacked.
const CLANG: &str = "usr/lib/llvm-22/bin/clang";
/// The folders of its libraries, unpacked.
const LIBRARIES: [&str; 2] = ["usr/lib/x86_64-linux-gnu", "usr/lib/llvm-22/lib"];
/// The package with the headers for programs in the kernel.
const HEADERS: &str = "libbpf-dev";

/// Each object: its name, the source, and what the library's headers call the architecture whose calls it follows.
pub(super) const OBJECTS: &[(&str, &str, &str)] =
    &[("endpoints-x86_64", "endpoints.bpf.c", "x86"), ("endpoints-aarch64", "endpoints.bpf.c", "arm64")];

/// A compiler that is ready to be used.
#[derive(Debug)]
pub(super) struct Compiler {
    version: String,
    headers: String,
    root: PathBuf,
}

impl Compiler {
    /// Finds what an earlier run left, or fetches it; installs the library of LLVM. None where Debian has no such package.
    pub(super) fn prepare(consent: Consent) -> Result<Option<Self>> {
        let tree =
            Tree { home: folder().join("clang"), key: KEY, request: "compiler of C", size: 15, contents };
        let Some((version, root, needs)) = tree.find(&mut None)? else { return Ok(None) };
        let needs: Vec<&str> = needs.iter().map(String::as_str).collect();
        packages::require(&needs, consent)?;
        let version_file = root.join("usr/include/bpf/libbpf_version.h");
        let headers = fs::read_to_string(&version_file)
            .with_context(|| format!("cannot read {}", version_file.display()))?;
        let number = |name: &str| {
            let line = headers.lines().find(|line| line.contains(name));
            line.and_then(|line| line.split_whitespace().last()).unwrap_or("?").to_owned()
        };
        let headers =
            format!("{HEADERS} {}.{}", number("LIBBPF_MAJOR_VERSION"), number("LIBBPF_MINOR_VERSION"));
        Ok(Some(Self { version, headers, root }))
    }

    /// What decides how the objects come out: name and version of each.
    pub(super) fn record(&self) -> [(&'static str, String); 2] {
        [("c_compiler", format!("{KEY} {}", self.version)), ("c_headers", self.headers.clone())]
    }

    /// Builds every object into `into`.
    pub(super) fn compile(&self, into: &Path) -> Result<()> {
        let source = workspace::root().join("ebpf").join("core-c").join("programs");
        for (name, file, architecture) in OBJECTS {
            let linked = folder().join("build").join(format!("{name}.o"));
            fs::create_dir_all(folder().join("build"))?;
            let mut clang = Command::new(self.root.join(CLANG));
            let libraries = LIBRARIES.map(|inside| self.root.join(inside).display().to_string());
            clang.env("LD_LIBRARY_PATH", libraries.join(":")).current_dir(&source);
            clang.args(["-target", "bpfel", "-mcpu=v3", "-O2", "-g", "-Wall", "-Wextra", "-Werror"]);
            // What the library's macros leave unused.
            clang.args(["-Wno-unused-parameter", "-nostdinc"]);
            clang.arg(format!("-D__TARGET_ARCH_{architecture}"));
            clang.arg("-isystem").arg(self.root.join("usr/include"));
            // No path of this machine in what is built.
            clang.arg(format!("-ffile-prefix-map={}=include", self.root.join("usr/include").display()));
            clang.arg(format!("-ffile-prefix-map={}=programs", source.display()));
            clang.args(["-c", file, "-o"]).arg(&linked);
            printed(&mut clang)?;
            let bytes = fs::read(&linked).with_context(|| format!("cannot read {}", linked.display()))?;
            object::put(name, &bytes, into)?;
        }
        Ok(())
    }
}

/// The compiler with what it loads, and the headers; the library of LLVM has to be installed.
fn contents(archive: &Archive, version: &str) -> Result<Contents> {
    let mut installed = archive.depends(KEY, version)?;
    installed.retain(|name| name.starts_with("libllvm"));
    if installed.is_empty() {
        bail!("{KEY} {version} names no package of LLVM");
    }
    let same = ["clang-22", "libclang-cpp22", "libclang-common-22-dev"];
    let mut unpacked: Vec<String> = same.iter().map(|name| format!("{name}={version}")).collect();
    unpacked.push(HEADERS.to_owned());
    Ok(Contents { unpacked, installed })
}
