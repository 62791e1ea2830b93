//! `cargo xtask tidy`: the project's invariants, checked by reading the tree.

pub mod documents;
pub mod graph;
pub mod source;
pub mod tree;

use anyhow::{Context, Result, bail};
use harmonaize_testkit::workspace;
use std::fmt;
use std::path::{Path, PathBuf};

/// What `cargo xtask tidy` takes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cargo xtask tidy    prints FILE:LINE and the rule for each violation")]
pub struct Args {}

/// A place that breaks a rule.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Violation {
    /// The file, relative to the root.
    pub path: PathBuf,
    /// The line, from 1; 0 when the rule is about the whole file.
    pub line: usize,
    /// The rule, and what breaks it.
    pub rule: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path.display(), self.line, self.rule)
    }
}

/// Makes a violation.
pub(crate) fn violation(path: &Path, line: usize, rule: impl Into<String>) -> Violation {
    Violation { path: path.to_path_buf(), line, rule: rule.into() }
}

/// A text file of the tree.
#[derive(Debug, Clone)]
pub struct TextFile {
    /// Relative to the root.
    pub path: PathBuf,
    /// All of it.
    pub text: String,
}

/// The files that the rules read.
#[derive(Debug, Clone, Default)]
pub struct Tree {
    /// What stands at the top, files and folders.
    pub top: Vec<String>,
    /// Rust sources.
    pub rust: Vec<TextFile>,
    /// Cargo manifests.
    pub manifests: Vec<TextFile>,
    /// Markdown.
    pub documents: Vec<TextFile>,
    /// Every path, files and folders, relative to the root.
    pub paths: Vec<PathBuf>,
}

impl Tree {
    /// Reads the tree under `root`, without build outputs and dot folders.
    pub fn read(root: &Path) -> Result<Self> {
        let mut tree = Self::default();
        for entry in std::fs::read_dir(root)? {
            tree.top.push(entry?.file_name().to_string_lossy().into_owned());
        }
        tree.top.sort();
        tree.walk(root, Path::new(""))?;
        Ok(tree)
    }

    fn walk(&mut self, root: &Path, folder: &Path) -> Result<()> {
        let mut entries: Vec<_> = std::fs::read_dir(root.join(folder))?.collect::<Result<_, _>>()?;
        entries.sort_by_key(|entry| entry.file_name());
        for entry in entries {
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = folder.join(&name);
            self.paths.push(path.clone());
            let kind = entry.file_type()?;
            if kind.is_dir() {
                if !name.starts_with('.') && name != "target" {
                    self.walk(root, &path)?;
                }
                continue;
            }
            let list = if name == "Cargo.toml" {
                &mut self.manifests
            } else if name.ends_with(".rs") {
                &mut self.rust
            } else if name.ends_with(".md") {
                &mut self.documents
            } else {
                continue;
            };
            let text = std::fs::read_to_string(entry.path())
                .with_context(|| format!("cannot read {}", path.display()))?;
            list.push(TextFile { path, text });
        }
        Ok(())
    }
}

/// Every violation in a tree, in the order of paths and lines.
pub fn check(tree: &Tree) -> Result<Vec<Violation>> {
    let mut found = tree::check(tree);
    found.extend(graph::check(tree)?);
    found.extend(documents::check(tree));
    found.sort();
    found.dedup();
    Ok(found)
}

/// Runs the task.
pub fn run(_args: &Args) -> Result<()> {
    let tree = Tree::read(&workspace::root())?;
    let found = check(&tree)?;
    for violation in &found {
        println!("{violation}");
    }
    if !found.is_empty() {
        bail!(
            "{} places break the project's rules (docs/ARCHITECTURE.md says why they are rules)",
            found.len()
        );
    }
    println!(
        "tidy: {} sources, {} manifests and {} documents keep the rules",
        tree.rust.len(),
        tree.manifests.len(),
        tree.documents.len()
    );
    Ok(())
}
