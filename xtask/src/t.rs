//! `cargo xtask t CRATE`: builds and runs the tests of one crate, for the minutes between two edits.

use anyhow::{Result, bail};
use harmonaize_testkit::packages::{self, Consent};
use harmonaize_testkit::workspace::{self, Package};

/// What `cargo xtask t` takes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask t core                 the tests of harmonaize-core
  cargo xtask t control/server       a crate by its folder
  cargo xtask t server agreements    those whose names contain a word
  cargo xtask t tests collectives    the end-to-end tests in tests/tests/collectives.rs, as root
  cargo xtask t core -- --no-capture arguments for the test runner")]
pub struct Args {
    /// The crate: its name, with or without `harmonaize-`, or its folder
    #[arg(value_name = "CRATE")]
    pub package: String,
    /// Tests whose names, or whose targets' names, contain one of these; all if none is given
    #[arg(value_name = "FILTER")]
    pub filters: Vec<String>,
    /// Install missing tools without asking
    #[arg(long)]
    pub yes: bool,
    /// Arguments for the test runner
    #[arg(last = true)]
    pub runner: Vec<String>,
}

/// Runs the task.
pub fn run(args: &Args) -> Result<()> {
    let packages = workspace::packages()?;
    let package = package_of(&packages, &args.package)?;
    let mut command =
        workspace::calling_cargo(packages::tool(packages::NEXTEST, Consent::from_flag(args.yes))?);
    command.args(["nextest", "run", "--package", &package.name]);
    if !args.filters.is_empty() {
        command.args(["--filterset", &filterset(&package.targets, &args.filters)]);
    }
    workspace::run(command.args(&args.runner))
}

/// The runner's expression for tests whose names, or whose targets' names, contain one of the words. The runner refuses a word for
/// targets that none of them has.
fn filterset(targets: &[String], words: &[String]) -> String {
    let of_targets = words.iter().filter(|word| targets.iter().any(|target| target.contains(*word)));
    let tests = words.iter().map(|word| format!("test(~{word})"));
    tests.chain(of_targets.map(|word| format!("binary(~{word})"))).collect::<Vec<_>>().join(" | ")
}

/// The package that a person means.
fn package_of<'a>(packages: &'a [Package], asked: &str) -> Result<&'a Package> {
    let asked = asked.trim_start_matches("./").trim_end_matches('/');
    let short = |package: &'a Package| package.name.strip_prefix("harmonaize-").unwrap_or(&package.name);
    let meant =
        |package: &&'a Package| [package.name.as_str(), short(package), &package.folder].contains(&asked);
    if let Some(package) = packages.iter().find(meant) {
        return Ok(package);
    }
    bail!(
        "there is no crate {asked}; there are {}",
        packages.iter().map(short).collect::<Vec<_>>().join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crate_has_three_names() {
        let packages =
            [("harmonaize-core", "dataplane/core"), ("xtask", "xtask")].map(|(name, folder)| Package {
                name: name.to_owned(),
                folder: folder.to_owned(),
                targets: Vec::new(),
                programs: Vec::new(),
            });
        for asked in ["core", "harmonaize-core", "dataplane/core", "./dataplane/core/"] {
            assert_eq!(package_of(&packages, asked).unwrap().name, "harmonaize-core");
        }
        assert_eq!(package_of(&packages, "xtask").unwrap().name, "xtask");
        let error = package_of(&packages, "cure").unwrap_err().to_string();
        assert_eq!(error, "there is no crate cure; there are core, xtask");
    }

    #[test]
    fn words_are_of_tests_or_of_targets_that_there_are() {
        let (targets, words) = (["core", "rings"].map(str::to_owned), ["ring", "shots"].map(str::to_owned));
        assert_eq!(filterset(&targets, &words), "test(~ring) | test(~shots) | binary(~ring)");
    }
}
