//! Environments of Python: tools, torch, and the project's wheel.

use crate::packages::{self, Consent};
use crate::workspace;
use anyhow::{Context, Result, bail};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What builds the wheel and runs its tests, with what torch's tests need.
const TOOLS: &[&str] = &["maturin==1.16.0", "numpy>=2,<3", "pytest>=9,<10", "expecttest==0.3.0"];

/// PyTorch, and what it needs to be imported.
const TORCH: &str = "torch==2.15.0";
const TORCH_NEEDS: &[&str] = &["typing-extensions", "sympy", "networkx", "jinja2", "fsspec", "filelock"];

/// PyPI's torch is built for CUDA, whose libraries are three times as large as it. This stands in for them: no device is found.
const CUDA_STUBS: &str = include_str!("python/cuda-stubs.sh");

/// A virtual environment.
#[derive(Debug, Clone)]
pub struct Environment {
    folder: PathBuf,
}

impl Environment {
    /// The one of a folder, made or not.
    pub fn at(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// The one that the wheel's tests and benchmarks share.
    pub fn shared() -> Self {
        Self::at(workspace::target().join("python"))
    }

    /// Makes it, empty.
    ///
    /// # Errors
    /// If Python cannot.
    pub fn make(&self) -> Result<()> {
        workspace::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&self.folder)).context(
            "python3 cannot make a virtual environment; Debian's package python3-venv makes it able to",
        )
    }

    /// Its interpreter.
    pub fn interpreter(&self) -> PathBuf {
        self.folder.join("bin/python")
    }

    /// A call of its interpreter.
    pub fn python(&self) -> Command {
        workspace::calling_cargo(self.interpreter())
    }

    /// Whether a line of Python runs there.
    pub(crate) fn runs(&self, line: &str) -> Result<bool> {
        if !self.interpreter().is_file() {
            return Ok(false);
        }
        Ok(self.python().args(["-W", "ignore", "-c", line]).stderr(Stdio::null()).status()?.success())
    }

    /// Installs packages.
    ///
    /// # Errors
    /// If pip cannot.
    pub fn pip(&self, options: &[&str], packages: &[impl AsRef<OsStr>]) -> Result<()> {
        let mut pip = self.python();
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]).args(options);
        workspace::run(pip.args(packages))
    }

    /// Makes it, where it is not there yet, for `what` to be installed, if consented.
    fn prepare(&self, what: &str, consent: Consent) -> Result<()> {
        packages::require(&[packages::BUILDING, packages::PYTHON].concat(), consent)?;
        consent.obtain(&format!("{what} in {}", self.folder.display()))?;
        if self.runs("")? { Ok(()) } else { self.make() }
    }

    /// Installs what builds and tests the wheel, if consented, where it is missing.
    ///
    /// # Errors
    /// Without consent, or if pip cannot.
    pub fn add_tools(&self, consent: Consent) -> Result<()> {
        if self.runs("import maturin, numpy, pytest, expecttest")? {
            return Ok(());
        }
        self.prepare(&TOOLS.join(", "), consent)?;
        self.pip(&[], TOOLS)
    }

    /// Whether torch is there, with its Gloo.
    ///
    /// # Errors
    /// If the interpreter cannot be started.
    pub fn has_torch(&self) -> Result<bool> {
        self.runs("import torch.distributed as d, sys; sys.exit(not d.is_gloo_available())")
    }

    /// Installs torch with its Gloo, if consented, where it is missing.
    ///
    /// # Errors
    /// Without consent, or if it cannot be imported afterwards.
    pub fn add_torch(&self, consent: Consent) -> Result<()> {
        if self.has_torch()? {
            return Ok(());
        }
        self.prepare(&format!("{TORCH} (1.4 GB)"), consent)?;
        self.pip(&[], TORCH_NEEDS)?;
        self.pip(&["--no-deps"], &[TORCH])?;
        workspace::run(Command::new("bash").args(["-c", CUDA_STUBS, "cuda-stubs"]).arg(&self.folder))?;
        if self.has_torch()? {
            Ok(())
        } else {
            bail!("{} cannot import torch.distributed", self.folder.display())
        }
    }

    /// Installs the wheel in the place of an earlier one.
    ///
    /// # Errors
    /// If pip cannot.
    pub fn add_wheel(&self, wheel: &Path) -> Result<()> {
        self.pip(&["--no-index", "--no-deps", "--force-reinstall"], &[wheel])
    }

    /// Builds the wheel with its tools, alone in a folder of `target/wheel`. It calls maturin; `configure` adds to the
    /// call.
    ///
    /// # Errors
    /// If it does not build.
    pub fn build_wheel(
        &self,
        folder: &str,
        release: bool,
        configure: impl FnOnce(&mut Command),
    ) -> Result<PathBuf> {
        let into = workspace::target().join("wheel").join(folder);
        let _ = std::fs::remove_dir_all(&into);
        let mut maturin = self.python();
        maturin.args(["-m", "maturin", "build", "--quiet", "--locked", "--manifest-path"]);
        let manifest = workspace::root().join("dataplane/python/Cargo.toml");
        maturin.arg(manifest).arg("--out").arg(&into).args(release.then_some("--release"));
        configure(&mut maturin);
        workspace::run(&mut maturin)?;
        let wheels: Vec<PathBuf> = std::fs::read_dir(&into)?
            .map(|entry| entry.map(|entry| entry.path()))
            .collect::<Result<_, _>>()?;
        match wheels.as_slice() {
            [wheel] => Ok(wheel.clone()),
            others => bail!("{} wheels in {}", others.len(), into.display()),
        }
    }
}
