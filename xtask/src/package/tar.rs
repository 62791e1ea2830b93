//! The tarball, for systems that have neither dpkg nor rpm. It has the same files, with a note on how they are
//! installed.

use super::contents::{Contents, Libraries, compare, copy, mode, rows};
use super::{Package, empty, folder};
use anyhow::{Context, Result, bail};
use harmonaize_testkit::workspace;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What stands beside the files.
const DOCUMENTS: [&str; 3] = ["INSTALL", "LICENSE", "README.md"];

/// The folder in it, and its own name.
fn name(package: &Package) -> String {
    format!("harmonaize-{}-linux-{}", package.version, package.arch.name())
}

/// Makes it of these contents; its file.
pub(super) fn make(package: &Package, contents: &Contents) -> Result<PathBuf> {
    let name = name(package);
    let file = folder().join(format!("{name}.tar.gz"));
    let own = folder().join("note");
    empty(&own)?;
    let root = workspace::root();
    let note = fs::read_to_string(root.join("xtask/package/INSTALL")).context("cannot read the note")?;
    fs::write(own.join("INSTALL"), note.replace("@LIBRARIES@", &linked(&contents.libraries)))?;
    for document in DOCUMENTS.iter().filter(|document| **document != "INSTALL") {
        copy(&root.join(document), &own.join(document), 0o644)?;
    }
    mode(&own.join("INSTALL"), 0o644)?;
    let mut tar = archive(package, &file);
    tar.arg(format!("--transform=s,^\\.,{name},"));
    tar.arg("--directory").arg(&own).args(DOCUMENTS.map(|document| format!("./{document}")));
    tar.arg("--directory").arg(&contents.tree).args(["./etc", "./usr"]);
    workspace::run(&mut tar)?;
    Ok(file)
}

/// An error unless it has the same bytes when it is made again.
pub(super) fn repeat(file: &Path, package: &Package, contents: &Contents) -> Result<()> {
    let before = fs::read(file)?;
    make(package, contents)?;
    if fs::read(file)? != before {
        bail!("{} has other bytes when it is made again", file.display());
    }
    println!("the tarball is the same when it is made again");
    Ok(())
}

/// Reads it back: the files of the list, all of one time.
pub(super) fn check(file: &Path, package: &Package, contents: &Contents) -> Result<()> {
    let mut list = Command::new("tar");
    list.env("LC_ALL", "C").args(["--list", "--verbose", "--full-time", "--file"]);
    let output = list.arg(file).output()?;
    let listed = String::from_utf8(output.stdout)?;
    let times: BTreeSet<Vec<&str>> =
        listed.lines().map(|line| line.split_whitespace().skip(3).take(2).collect()).collect();
    if times.len() != 1 {
        bail!("the files of {} have several times: {times:?}", file.display());
    }
    let mut found = rows(&listed, &name(package));
    found.retain(|row| !DOCUMENTS.iter().any(|own| row.ends_with(&format!(" /{own}"))));
    compare("the tarball", &found, &contents.rows())
}

/// Debian's `tar` that writes a compressed file, of what is then named. It has the same bytes each time, and all of it
/// is root's.
pub(super) fn archive(package: &Package, file: &Path) -> Command {
    let mut tar = plain(package, file);
    tar.args(["--create", "--owner=root:0", "--group=root:0"]);
    tar.arg(if package.quick {
        "--use-compress-program=gzip --no-name -1"
    } else {
        "--use-compress-program=gzip --no-name -9"
    });
    tar
}

/// The same, of what is then said as well. That is whether the file is new, and whose what is in it is.
pub(super) fn plain(package: &Package, file: &Path) -> Command {
    let mut tar = Command::new("tar");
    tar.env("LC_ALL", "C").args(["--format=gnu", "--sort=name", "--numeric-owner", "--mode=u+rw,go-w"]);
    tar.arg(format!("--mtime=@{}", package.time)).arg("--file").arg(file);
    tar
}

/// The lines on what the programs load.
fn linked(libraries: &Libraries) -> String {
    let glibc = libraries.glibc.map(|(major, minor)| format!("  glibc {major}.{minor} or later\n"));
    let others = libraries.names.iter().filter(|name| {
        !["libc.so", "libm.so", "ld-linux", "libgcc_s"].iter().any(|own| name.starts_with(own))
    });
    let others: String = others.map(|name| format!("  {name}\n")).collect();
    let lines = format!("{}  libgcc_s.so.1\n{others}", glibc.unwrap_or_default());
    lines.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_note_names_what_programs_load() {
        let listed =
            "Shared library: [libc.so.6]\nShared library: [libibverbs.so.1]\nName: GLIBC_2.34  Flags\n";
        assert_eq!(
            linked(&Libraries::read(listed)),
            "  glibc 2.34 or later\n  libgcc_s.so.1\n  libibverbs.so.1"
        );
    }
}
