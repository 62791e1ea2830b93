//! The Debian package: its fields and sums, and Debian's own program that packs them with the files.

use super::contents::{Contents, Libraries, compare, copy, files, mode, name, rows};
use super::{Package, folder};
use anyhow::{Context, Result, bail};
use harmonaize_testkit::workspace;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Libraries that programs may load, by the names that they are loaded by, and the packages that have them.
const LIBRARIES: &[(&str, &str)] = &[
    ("libc.so.6", "libc6"),
    ("libm.so.6", "libc6"),
    ("ld-linux-x86-64.so.2", "libc6"),
    ("ld-linux-aarch64.so.1", "libc6"),
    ("libgcc_s.so.1", "libgcc-s1"),
    ("libibverbs.so.1", "libibverbs1"),
    ("librdmacm.so.1", "librdmacm1"),
    ("libelf.so.1", "libelf1"),
    ("libz.so.1", "zlib1g"),
    ("libnl-3.so.200", "libnl-3-200"),
    ("libnl-route-3.so.200", "libnl-route-3-200"),
];

/// What programs and maintainer scripts call beside what every Debian has.
const CALLED: &[&str] = &["iproute2", "passwd"];

/// Makes it of these contents; its file.
pub(super) fn make(package: &Package, contents: &Contents) -> Result<PathBuf> {
    let mut needs = needs(&contents.libraries)?;
    needs.extend(CALLED.iter().map(|package| (*package).to_owned()));
    let needs: Vec<String> = needs.into_iter().collect();
    let file = folder().join(format!("harmonaize_{}_{}.deb", package.version, package.arch.name()));
    let control = contents.tree.join("DEBIAN");
    let packed = describe(package, contents, &control, &needs.join(", ")).and_then(|()| {
        let mut pack = Command::new("dpkg-deb");
        pack.env("SOURCE_DATE_EPOCH", package.time.to_string()).arg("--root-owner-group");
        pack.args(if package.quick { ["-Zgzip", "-z1"] } else { ["-Zxz", "-z6"] });
        pack.arg("--build").arg(&contents.tree).arg(&file).stdout(Stdio::null());
        workspace::run(&mut pack)
    });
    // Other packages are made of the same tree.
    fs::remove_dir_all(&control)?;
    packed.map(|()| file)
}

/// Reads it back: files, and those that an upgrade leaves as the operator has them.
pub(super) fn check(file: &Path, contents: &Contents) -> Result<()> {
    let output = |verb: &str, name: Option<&str>| -> Result<String> {
        let mut read = Command::new("dpkg-deb");
        Ok(String::from_utf8(read.env("LC_ALL", "C").arg(verb).arg(file).args(name).output()?.stdout)?)
    };
    compare("the Debian package", &rows(&output("--contents", None)?, "."), &contents.rows())?;
    let config: String =
        contents.files.iter().filter(|file| file.config).map(|file| format!("{}\n", file.path)).collect();
    let found = output("--info", Some("conffiles"))?;
    if found != config {
        bail!("the Debian package would overwrite other configuration than the list says: {found}");
    }
    Ok(())
}

/// What dpkg reads: fields, scripts, files that an operator may change, and a sum of each file.
fn describe(package: &Package, contents: &Contents, control: &Path, needs: &str) -> Result<()> {
    fs::create_dir(control)?;
    mode(control, 0o755)?;
    let (mut sums, mut changed, mut bytes) = (String::new(), String::new(), 0);
    for file in &contents.files {
        let inside = file.path.trim_start_matches('/');
        bytes += contents.tree.join(inside).metadata()?.len();
        if file.config {
            changed += &format!("{}\n", file.path);
        }
        let output = Command::new("md5sum").current_dir(&contents.tree).arg(inside).output()?;
        sums += &String::from_utf8(output.stdout)?;
    }
    let (version, arch) = (package.version, package.arch.name());
    let fields = format!(
        "Package: harmonaize\nVersion: {version}\nArchitecture: {arch}\nSection: net\nPriority: optional\n\
         Maintainer: The harmonaize project <packages@harmonaize.invalid>\nInstalled-Size: {}\nDepends: {needs}\n\
         Recommends: ibverbs-providers\nDescription: {}\n {}\n",
        bytes.div_ceil(1024),
        super::SUMMARY,
        super::DESCRIPTION.join("\n "),
    );
    for (name, text) in [("control", fields), ("md5sums", sums), ("conffiles", changed)] {
        fs::write(control.join(name), text)?;
        mode(&control.join(name), 0o644)?;
    }
    for script in files(&workspace::root().join("xtask/package/debian"))? {
        copy(&script, &control.join(name(&script)?), 0o755)?;
    }
    Ok(())
}

/// The packages that have these libraries, with the least version of the C library.
fn needs(libraries: &Libraries) -> Result<BTreeSet<String>> {
    let mut needs = BTreeSet::new();
    for library in &libraries.names {
        let package = package_of(library)?;
        needs.insert(match libraries.glibc {
            Some((major, minor)) if package == "libc6" => format!("libc6 (>= {major}.{minor})"),
            _ => package.to_owned(),
        });
    }
    Ok(needs)
}

/// The package that has a library.
pub(super) fn package_of(library: &str) -> Result<&'static str> {
    let found = LIBRARIES.iter().find(|(name, _)| *name == library).map(|(_, package)| *package);
    found.with_context(|| format!("{library} is of no package that is listed in xtask/src/package/deb.rs"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_needs_the_packages_of_its_libraries() {
        let listed = " 0x01 (NEEDED)  Shared library: [libibverbs.so.1]\n 0x01 (NEEDED)  Shared library: [libc.so.6]\n\
             0x01 (NEEDED)  Shared library: [libm.so.6]\n\
             0x0010:   Name: GLIBC_2.4  Flags: none  Version: 3\n  0x0020:   Name: GLIBC_2.34  Flags: none  Version: 2\n\
             0x0030:   Name: IBVERBS_1.1  Flags: none  Version: 4\n";
        let found: Vec<String> = needs(&Libraries::read(listed)).unwrap().into_iter().collect();
        assert_eq!(found, ["libc6 (>= 2.34)", "libibverbs1"]);
        let unknown =
            needs(&Libraries::read(" (NEEDED) Shared library: [libodd.so.9]\n")).unwrap_err().to_string();
        assert!(unknown.contains("libodd.so.9"), "{unknown}");
    }
}
