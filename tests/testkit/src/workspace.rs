//! Where the workspace is, and how cargo is called in it.

use anyhow::{Context, Result, bail};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The workspace's root folder.
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_path_buf()
}

/// The folder of build outputs: `CARGO_TARGET_DIR`, or `target` in the root.
pub fn target() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(folder) => root().join(folder),
        None => root().join("target"),
    }
}

/// A cargo call in the workspace's root, by the cargo that runs us.
pub fn cargo() -> Command {
    calling_cargo(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// A call of a program that calls cargo, in the workspace's root, as if a person called it. A build script that looks at what cargo says of
/// the package that it runs (ring's does) would run again, and all that depends on it would be compiled again.
pub fn calling_cargo(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root());
    for (name, _) in std::env::vars_os() {
        if ["CARGO_PKG_", "CARGO_MANIFEST_"]
            .iter()
            .any(|of| name.as_encoded_bytes().starts_with(of.as_bytes()))
        {
            command.env_remove(name);
        }
    }
    command
}

/// Runs a command with our own output streams; an error names it and its status.
pub fn run(command: &mut Command) -> Result<()> {
    let shown = describe(command);
    let status = command.status().with_context(|| format!("cannot start `{shown}`"))?;
    if !status.success() {
        bail!("`{shown}` ended with {status}");
    }
    Ok(())
}

/// A command as a person would type it.
pub fn describe(command: &Command) -> String {
    let mut words = vec![Path::new(command.get_program()).file_name().unwrap_or_default().to_string_lossy()];
    words.extend(command.get_args().map(|word| word.to_string_lossy()));
    words.join(" ")
}

/// Runs a call of cargo that builds, and returns those of the named targets that it built, with their programs.
pub fn executables(cargo: &mut Command, targets: &[&str]) -> Result<Vec<(String, PathBuf)>> {
    cargo.args(["--quiet", "--message-format", "json-render-diagnostics"]);
    let output = cargo.stderr(Stdio::inherit()).output().context("cannot start cargo")?;
    if !output.status.success() {
        bail!("`{}` ended with {}", describe(cargo), output.status);
    }
    Ok(built(&String::from_utf8_lossy(&output.stdout), targets))
}

fn built(messages: &str, targets: &[&str]) -> Vec<(String, PathBuf)> {
    let mut found = Vec::new();
    for message in messages.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok()) {
        let text = |pointer: &str| message.pointer(pointer).and_then(serde_json::Value::as_str);
        let (Some(name), Some(path)) = (text("/target/name"), text("/executable")) else { continue };
        if targets.contains(&name) {
            found.push((name.to_owned(), PathBuf::from(path)));
        }
    }
    found
}

/// A package of the workspace.
#[derive(Debug, Clone)]
pub struct Package {
    /// Its name.
    pub name: String,
    /// Its folder, relative to the root.
    pub folder: String,
    /// The names of its library, programs, tests and benchmarks.
    pub targets: Vec<String>,
    /// The names of its programs that need no feature.
    pub programs: Vec<String>,
}

/// The workspace's packages.
pub fn packages() -> Result<Vec<Package>> {
    let mut cargo = cargo();
    cargo.args(["metadata", "--no-deps", "--format-version", "1"]).stderr(Stdio::inherit());
    let output = cargo.output().context("cannot start cargo")?;
    if !output.status.success() {
        bail!("`{}` ended with {}", describe(&cargo), output.status);
    }
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let (root, packages) = (root(), metadata.get("packages").and_then(serde_json::Value::as_array));
    let text = |package: &serde_json::Value, key: &str| Some(package.get(key)?.as_str()?.to_owned());
    let found = packages.into_iter().flatten().filter_map(|package| {
        let manifest = PathBuf::from(text(package, "manifest_path")?);
        let folder = manifest.parent()?.strip_prefix(&root).ok()?;
        let all = package.get("targets").and_then(serde_json::Value::as_array)?;
        let is_program = |target: &&serde_json::Value| {
            target.pointer("/kind/0").is_some_and(|kind| kind == "bin")
                && target.get("required-features").is_none()
        };
        Some(Package {
            name: text(package, "name")?,
            folder: folder.to_string_lossy().into_owned(),
            targets: all.iter().filter_map(|target| text(target, "name")).collect(),
            programs: all.iter().filter(is_program).filter_map(|target| text(target, "name")).collect(),
        })
    });
    Ok(found.collect())
}

/// The programs that a deployment runs, built from this tree.
#[derive(Debug, Clone)]
pub struct Binaries {
    folder: PathBuf,
}

/// The build profile of the programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Profile {
    /// Quick to build, for tests.
    Dev,
    /// Optimised, for the demo and the benches.
    Release,
}

impl Binaries {
    /// Builds agent, control and command line in `profile`, and says where they are.
    ///
    /// `HARMONAIZE_BINARIES` names a folder to use as it is instead: set by tasks that have built already.
    pub fn build(profile: Profile) -> Result<Self> {
        Self::build_with(profile, &[])
    }

    /// The same with the programs of further packages. Of the whole workspace: cargo unifies features over what a call names, and calls
    /// that name different packages would build shared crates anew.
    pub fn build_with(profile: Profile, packages: &[&str]) -> Result<Self> {
        if let Some(folder) = std::env::var_os("HARMONAIZE_BINARIES") {
            return Ok(Self { folder: folder.into() });
        }
        let mut build = cargo();
        build.args(["build", "--quiet", "--workspace"]);
        let always = ["harmonaize-agent", "harmonaize-server", "harmonaize-cli"];
        for package in self::packages()? {
            if always.iter().chain(packages).any(|name| **name == package.name) {
                package.programs.iter().for_each(|program| {
                    build.args(["--bin", program]);
                });
            }
        }
        if profile == Profile::Release {
            build.arg("--release");
        }
        run(&mut build)?;
        Ok(Self { folder: Self::folder_of(profile) })
    }

    /// Programs that lie in this folder.
    pub fn at(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// The folder where cargo leaves programs of `profile`.
    pub fn folder_of(profile: Profile) -> PathBuf {
        target().join(if profile == Profile::Release { "release" } else { "debug" })
    }

    /// The folder where they are.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The path of one program, which must be there.
    pub fn path(&self, name: &str) -> Result<PathBuf> {
        let path = self.folder.join(name);
        if !path.is_file() {
            bail!("{} is not there; build it with `cargo build`", path.display());
        }
        Ok(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_have_folders() {
        let own = packages().unwrap().into_iter().find(|package| package.name == "harmonaize-testkit");
        assert_eq!(own.unwrap().folder, "tests/testkit");
        let programs = |name: &str| {
            let found = packages().unwrap().into_iter().find(|package| package.name == name);
            found.unwrap().programs
        };
        assert_eq!(programs("harmonaize-agent"), ["harmonaize-agent"]);
        assert_eq!(programs("harmonaize-fuzz"), [""; 0], "its program needs a feature");
    }

    #[test]
    fn cargo_is_called_as_by_a_person() {
        // Cargo says it of this test's own package.
        assert!(
            std::env::var_os("CARGO_PKG_NAME").is_some() && std::env::var_os("CARGO_MANIFEST_DIR").is_some()
        );
        let cargo = cargo();
        let removed = |name: &str| cargo.get_envs().any(|(one, value)| one == name && value.is_none());
        assert!(removed("CARGO_PKG_NAME") && removed("CARGO_MANIFEST_DIR") && !removed("PATH"));
    }

    #[test]
    fn programs_are_found_in_cargos_messages() {
        let messages = r#"{"reason":"compiler-artifact","target":{"name":"device"},"executable":"/t/device-1"}
{"reason":"compiler-artifact","target":{"name":"device"},"executable":null}
{"reason":"compiler-artifact","target":{"name":"other"},"executable":"/t/other"}
{"reason":"build-finished","success":true}"#;
        assert_eq!(built(messages, &["device"]), [("device".to_owned(), PathBuf::from("/t/device-1"))]);
    }
}
