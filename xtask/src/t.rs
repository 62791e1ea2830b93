//! `cargo xtask t CRATE`: builds and runs the tests of one crate, for the minutes between two edits.

use anyhow::{Result, bail};
use harmonaize_testkit::packages::{self, Consent};
use harmonaize_testkit::workspace;
use std::process::Command;

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
    let package = package_of(&workspace::packages()?, &args.package)?;
    let mut command = Command::new(packages::tool(packages::NEXTEST, Consent::from_flag(args.yes))?);
    command.current_dir(workspace::root()).args(["nextest", "run", "--package", &package]);
    if !args.filters.is_empty() {
        command.args(["--filterset", &filterset(&args.filters)]);
    }
    workspace::run(command.args(&args.runner))
}

/// The runner's expression for tests whose names, or whose targets' names, contain one of the words.
fn filterset(words: &[String]) -> String {
    let either = words.iter().map(|word| format!("test(~{word}) | binary(~{word})"));
    either.collect::<Vec<_>>().join(" | ")
}

/// The package that a person means, of those with their folders.
fn package_of(packages: &[(String, String)], asked: &str) -> Result<String> {
    let asked = asked.trim_start_matches("./").trim_end_matches('/');
    let meant = |(name, folder): &&(String, String)| {
        [name.as_str(), name.strip_prefix("harmonaize-").unwrap_or(name), folder].contains(&asked)
    };
    if let Some((name, _)) = packages.iter().find(meant) {
        return Ok(name.clone());
    }
    let names = packages.iter().map(|(name, _)| name.strip_prefix("harmonaize-").unwrap_or(name));
    bail!("there is no crate {asked}; there are {}", names.collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crate_has_three_names() {
        let packages = [("harmonaize-core", "dataplane/core"), ("xtask", "xtask")]
            .map(|(name, folder)| (name.to_owned(), folder.to_owned()));
        for asked in ["core", "harmonaize-core", "dataplane/core", "./dataplane/core/"] {
            assert_eq!(package_of(&packages, asked).unwrap(), "harmonaize-core");
        }
        assert_eq!(package_of(&packages, "xtask").unwrap(), "xtask");
        let error = package_of(&packages, "cure").unwrap_err().to_string();
        assert_eq!(error, "there is no crate cure; there are core, xtask");
    }

    #[test]
    fn words_are_of_tests_or_targets() {
        let words = ["ring", "shots"].map(str::to_owned);
        let expected = "test(~ring) | binary(~ring) | test(~shots) | binary(~shots)";
        assert_eq!(filterset(&words), expected);
    }
}
