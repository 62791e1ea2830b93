//! The rpm, for Fedora, RHEL, SUSE and what descends from them: the same files, packed by Debian's `rpmbuild`.

use super::contents::{Contents, File, compare};
use super::{DESCRIPTION, Package, SUMMARY, empty, folder};
use anyhow::{Context, Result, bail};
use harmonaize_testkit::packages::{self, Consent};
use harmonaize_testkit::workspace;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What packs and reads.
const TOOLS: &[&str] = &["rpm"];

/// Where zsh looks for completions, on Debian and elsewhere.
const ZSH: (&str, &str) = ("/usr/share/zsh/vendor-completions/", "/usr/share/zsh/site-functions/");

/// What programs and scripts call. Libraries are found by rpmbuild, which reads the programs.
const CALLED: &str = "iproute, shadow-utils";

/// The scripts, and what rpm calls them.
const SCRIPTS: [(&str, &str); 3] = [("post", "POSTIN"), ("preun", "PREUN"), ("postun", "POSTUN")];

/// Makes it of these contents; its file.
pub(super) fn make(package: &Package, contents: &Contents, consent: Consent) -> Result<PathBuf> {
    packages::require(TOOLS, consent)?;
    let home = folder().join("rpm");
    empty(&home)?;
    let root = home.join("root");
    let mut copy = Command::new("cp");
    workspace::run(copy.arg("--archive").arg(&contents.tree).arg(&root))?;
    let [debian, elsewhere] = [ZSH.0, ZSH.1].map(|path| root.join(path.trim_start_matches('/')));
    fs::rename(debian, elsewhere).context("there are no completions for zsh")?;
    let spec = home.join("harmonaize.spec");
    fs::write(&spec, describe(package, contents, &root)?)?;
    let mut build = Command::new("rpmbuild");
    build.env("SOURCE_DATE_EPOCH", package.time.to_string()).env("LC_ALL", "C");
    build.args(["-bb", "--quiet", "--target", package.arch.machine()]);
    let defined = [
        ("_topdir", home.join("top").display().to_string()),
        ("_rpmdir", home.display().to_string()),
        ("_build_name_fmt", format!("harmonaize-{}.{}.rpm", package.version, package.arch.machine())),
        ("_binary_payload", if package.quick { "w1.gzdio" } else { "w6.xzdio" }.into()),
        ("_buildhost", "localhost".into()),
        ("use_source_date_epoch_as_buildtime", "1".into()),
        ("clamp_mtime_to_source_date_epoch", "1".into()),
        ("_build_id_links", "none".into()),
        ("__os_install_post", "%{nil}".into()),
        ("debug_package", "%{nil}".into()),
    ];
    for (name, value) in defined {
        build.arg("--define").arg(format!("{name} {value}"));
    }
    workspace::run(build.arg(&spec))?;
    let made = home.join(format!("harmonaize-{}.{}.rpm", package.version, package.arch.machine()));
    let file = folder().join(made.file_name().context("a package without a name")?);
    fs::rename(&made, &file).with_context(|| format!("rpmbuild has not made {}", made.display()))?;
    Ok(file)
}

/// What rpmbuild reads.
fn describe(package: &Package, contents: &Contents, root: &Path) -> Result<String> {
    let mut text = format!(
        "Name: harmonaize\nVersion: {}\nRelease: 1\nSummary: {SUMMARY}\nLicense: Apache-2.0 OR MIT\n\
         Requires: {CALLED}\nAutoProv: no\n%description\n{}\n%install\ncp --archive {}/. %{{buildroot}}/\n",
        package.version,
        DESCRIPTION.join("\n"),
        root.display(),
    );
    for (name, _) in SCRIPTS {
        text += &format!("%{name}\n{}", script(name)?);
    }
    text += "%files\n%dir /etc/harmonaize\n%dir /usr/share/doc/harmonaize\n";
    for file in &contents.files {
        let config = if file.config { "%config(noreplace) " } else { "" };
        text += &format!("{config}%attr({:04o}, root, root) {}\n", file.mode, placed(file));
    }
    Ok(text)
}

/// Where a file lies on systems with rpm.
fn placed(file: &File) -> String {
    file.path.replace(ZSH.0, ZSH.1)
}

/// A script, as `xtask/package/rpm` has it.
fn script(name: &str) -> Result<String> {
    let path = workspace::root().join("xtask/package/rpm").join(name);
    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}

/// Reads it back: files, configuration and scripts, and what it needs.
pub(super) fn check(file: &Path, contents: &Contents) -> Result<()> {
    let query = |format: &str| -> Result<String> {
        let mut rpm = Command::new("rpm");
        rpm.env("LC_ALL", "C").args(["--query", "--package", "--nosignature", "--queryformat", format]);
        let output = rpm.arg(file).output().context("cannot start rpm")?;
        Ok(String::from_utf8(output.stdout)?)
    };
    let row = "[%{FILEMODES:perms} %{FILEUSERNAME}/%{FILEGROUPNAME} %{FILENAMES}|%{FILEFLAGS:fflags}\\n]";
    let listed = query(row)?;
    let mut found: Vec<&str> = listed.lines().filter(|line| !line.starts_with('d')).collect();
    let path = |row: &str| row.rsplit(' ').next().map(str::to_owned);
    found.sort_by_key(|row| path(row));
    let flags = contents.files.iter().map(|file| if file.config { "|cn" } else { "|" });
    let expected = contents.rows().into_iter().zip(flags);
    let mut expected: Vec<String> = expected.map(|(row, flags)| row.replace(ZSH.0, ZSH.1) + flags).collect();
    expected.sort_by_key(|row| path(row));
    // Manual and documents have flags of their own, by where they lie.
    let found: Vec<String> = found
        .iter()
        .map(|row| row.strip_suffix("|d").map_or(row.to_string(), |row| format!("{row}|")))
        .collect();
    compare("the rpm", &found, &expected)?;
    for (name, tag) in SCRIPTS {
        if query(&format!("%{{{tag}}}"))?.trim() != script(name)?.trim() {
            bail!("the rpm has another script {name}");
        }
    }
    let needed = query("[%{REQUIRENAME}\\n]")?;
    for library in &contents.libraries.names {
        if !library.starts_with("ld-linux") && !needed.contains(library.as_str()) {
            bail!("the rpm does not ask for {library}, but for {needed}");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_and_folders_are_those_of_the_debian_package() {
        let debian = fs::read_to_string(workspace::root().join("xtask/package/debian/postinst")).unwrap();
        let note = fs::read_to_string(workspace::root().join("xtask/package/INSTALL")).unwrap();
        let made = |text: &str| -> Vec<String> {
            let lines = text.lines().map(str::trim);
            lines
                .filter(|line| line.starts_with("useradd") || line.starts_with("install -d"))
                .map(str::to_owned)
                .collect()
        };
        assert_eq!(made(&debian).len(), 3);
        assert_eq!(made(&script("post").unwrap()), made(&debian));
        assert_eq!(made(&note), made(&debian));
    }
}
