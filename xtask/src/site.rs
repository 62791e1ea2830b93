//! `cargo xtask site`: the documents as a book, the crates' documentation beside it, and every link of the book checked.

mod book;
mod links;

use crate::package::empty;
use anyhow::{Context, Result, bail};
use harmonaize_testkit::packages::{self, Consent};
use harmonaize_testkit::workspace;
use links::Found;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

/// Where the site lies in the folder of build outputs.
pub const FOLDER: &str = "site/book";

/// What `cargo xtask site` takes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask site          target/site/book/index.html; asks before it installs mdbook
  cargo xtask site --yes    does not ask, as CI")]
pub struct Args {
    /// Install mdbook without asking, where it is missing
    #[arg(long)]
    pub yes: bool,
}

/// Runs the task.
pub fn run(args: &Args) -> Result<()> {
    let begun = Instant::now();
    let mdbook = packages::tool(packages::MDBOOK, Consent::from_flag(args.yes))?;
    document()?;
    println!("the crates are documented after {:.0} s", begun.elapsed().as_secs_f64());
    let (source, site) = (workspace::target().join("site/source"), workspace::target().join(FOLDER));
    empty(&source)?;
    empty(&site)?;
    book::write(&workspace::root(), &source)?;
    let mut build = Command::new(mdbook);
    build.arg("build").arg(&source).arg("--dest-dir").arg(&site).env("MDBOOK_LOG", "warn");
    workspace::run(&mut build)?;
    copy(&workspace::target().join("doc"), &site.join(book::CRATES))?;
    let found = links::check(&site, book::CRATES)?;
    for broken in &found.broken {
        println!("{broken}");
    }
    if !found.broken.is_empty() {
        bail!("{} links of the site lead nowhere", found.broken.len());
    }
    let (page, Found { pages, links, .. }) = (site.join("index.html"), found);
    let seconds = begun.elapsed().as_secs_f64();
    println!(
        "{} after {seconds:.0} s: {pages} pages, whose {links} links inside the site hold",
        page.display()
    );
    Ok(())
}

/// Has rustdoc write what the crates are.
fn document() -> Result<()> {
    let mut doc = workspace::cargo();
    doc.args(["doc", "--locked", "--quiet", "--no-deps", "--keep-going"]);
    // Documents for ourselves too: links to private items are welcome.
    doc.env("RUSTDOCFLAGS", "-D warnings -A rustdoc::private-intra-doc-links");
    workspace::run(&mut doc)
}

/// Copies a folder with all that it holds.
fn copy(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to).with_context(|| format!("cannot make {}", to.display()))?;
    for entry in std::fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let entry = entry?;
        let (path, copied) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type()?.is_dir() {
            copy(&path, &copied)?;
        } else {
            std::fs::copy(&path, &copied).with_context(|| format!("cannot copy {}", path.display()))?;
        }
    }
    Ok(())
}
