//! The programs of the release before, which those of this tree must work with.

use crate::workspace::{self, Binaries};
use anyhow::{Context, Result, ensure};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// A release of the project, as the file `.release` at the top names it: `VERSION COMMIT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Release {
    /// Its version.
    pub version: String,
    /// The commit that it was made of, in full.
    pub commit: String,
}

impl Release {
    /// The release before this tree.
    ///
    /// # Errors
    /// If the file cannot be read, or does not name a version and a whole commit.
    pub fn before() -> Result<Self> {
        Self::parse(&std::fs::read_to_string(workspace::root().join(".release")).context("no .release")?)
    }

    fn parse(text: &str) -> Result<Self> {
        let mut words = text.split_whitespace().map(str::to_owned);
        let (Some(version), Some(commit), None) = (words.next(), words.next(), words.next()) else {
            anyhow::bail!(".release must say `VERSION COMMIT`, and says {text:?}");
        };
        let whole = commit.len() == 40 && commit.bytes().all(|digit| digit.is_ascii_hexdigit());
        ensure!(whole, ".release names the commit {commit:?}: it must have its 40 digits");
        Ok(Self { version, commit })
    }

    /// Whether agents of this release and of this tree hand over to each other. They do if their schemas of it have
    /// one version.
    ///
    /// # Errors
    /// If the commit is not in this clone.
    pub fn hands_over(&self) -> Result<bool> {
        let mut list = Command::new("git");
        list.current_dir(workspace::root()).args(["ls-tree", "--name-only", &self.commit]);
        let listed = list.arg("tests/schemas/released/").output().context("cannot start git")?;
        ensure!(listed.status.success(), "commit {} is not in this clone: git fetch it", self.commit);
        let listed = String::from_utf8(listed.stdout)?;
        let mut schemas = listed.lines().filter(|path| path.contains("/handover."));
        Ok(schemas.any(|path| workspace::root().join(path).exists()))
    }

    fn folder(&self) -> PathBuf {
        workspace::target().join("release-programs").join(&self.commit)
    }

    /// Its agent, control, command line and measurement, if [`Release::build`] has built them here.
    pub fn built(&self) -> Option<Binaries> {
        let binaries = Binaries::at(self.folder().join("debug"));
        let all = ["harmonaize-agent", "harmonaize-control", "harmonaize", "harmonaize-perf"];
        all.iter().all(|name| binaries.path(name).is_ok()).then_some(binaries)
    }

    /// Builds them from its commit, into a folder of their own: some minutes, once.
    ///
    /// # Errors
    /// If the commit is not in this clone, or does not build.
    pub fn build(&self) -> Result<Binaries> {
        if let Some(built) = self.built() {
            return Ok(built);
        }
        let (folder, source) = (self.folder(), self.folder().join("source"));
        std::fs::create_dir_all(&source)?;
        let mut archive = Command::new("git");
        archive.current_dir(workspace::root()).args(["archive", &self.commit]).stdout(Stdio::piped());
        let mut archive = archive.spawn().context("cannot start git")?;
        let from = archive.stdout.take().context("git has no output")?;
        workspace::run(Command::new("tar").arg("-xC").arg(&source).stdin(from))?;
        ensure!(archive.wait()?.success(), "commit {} is not in this clone: git fetch it", self.commit);
        let mut build = workspace::cargo();
        build.current_dir(&source).env("CARGO_TARGET_DIR", &folder).args(["build", "--quiet"]);
        for program in ["harmonaize-agent", "harmonaize-control", "harmonaize", "harmonaize-perf"] {
            build.args(["--bin", program]);
        }
        workspace::run(&mut build)?;
        self.built().with_context(|| format!("{} was not built", self.version))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_names_a_release() {
        let release = Release::before().unwrap();
        assert!(release.version.split('.').count() == 3, "{release:?}");
    }

    #[test]
    fn a_release_without_its_whole_commit_is_refused() {
        for text in ["", "0.1.0", "0.1.0 3b7b63cc", "0.1.0 main", "0.1.0 a b"] {
            assert!(Release::parse(text).is_err(), "{text}");
        }
    }
}
