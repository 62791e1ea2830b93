//! `harmonaize doctor`: whether a host has what its agent's configuration asks for, and what to do where it has not.

mod host;
mod reach;

use crate::Failure;
use crate::table::{row, table};
use crate::text::number_of;
use host::Host;
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

pub(crate) const HELP: &str = "\
Examples:
  harmonaize doctor                         of this host, by /etc/harmonaize/agent.toml
  harmonaize doctor --config agent.toml --json | jq '.checks[] | select(.state != \"fine\")'

It changes nothing. As root it sees most. Exit status: 0 where nothing is wrong, though there may be advice; 1 else.
`harmonaize-agent --config FILE --check` reads every key of a configuration; this command reads those that it needs.";

/// What `harmonaize doctor` takes.
#[derive(clap::Args)]
pub(crate) struct Doctor {
    /// The agent's configuration
    #[arg(long, value_name = "FILE", default_value = "/etc/harmonaize/agent.toml")]
    config: PathBuf,
    /// As JSON
    #[arg(long)]
    json: bool,
}

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    /// As it should be.
    Fine,
    /// It works, and could be better or is not known.
    Advice,
    /// The agent will not do what it is configured for.
    Wrong,
}

/// What one check found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Finding {
    /// What was checked.
    check: &'static str,
    state: State,
    /// What was found.
    found: String,
    /// What to do; none where all is fine.
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
}

impl Finding {
    fn fine(check: &'static str, found: impl Into<String>) -> Self {
        Self { check, state: State::Fine, found: found.into(), remedy: None }
    }

    fn advice(check: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { check, state: State::Advice, found: found.into(), remedy: Some(remedy.into()) }
    }

    fn wrong(check: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { check, state: State::Wrong, found: found.into(), remedy: Some(remedy.into()) }
    }
}

/// One address of control, or several.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Controls {
    One(String),
    Several(Vec<String>),
}

/// The keys of an agent's configuration that a host has to answer for.
#[derive(Debug, Deserialize)]
struct Config {
    host: String,
    control: Controls,
    tls: Option<PathBuf>,
    #[serde(default)]
    insecure_loopback: bool,
    listen: SocketAddr,
    verbs: Option<toml::Table>,
    rdma: Option<toml::Table>,
    telemetry: Option<toml::Table>,
    #[serde(default)]
    sandbox: Sandbox,
}

/// Whether the agent gives up what it does not need.
#[derive(Debug, Deserialize)]
#[serde(default)]
struct Sandbox {
    on: bool,
}

impl Default for Sandbox {
    fn default() -> Self {
        Self { on: true }
    }
}

impl Config {
    fn read(path: &Path) -> Result<Self, Failure> {
        let wrong = |why: String| Failure::Usage(format!("{}: {why}", path.display()));
        let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
        let mut config: Self = toml::from_str(&text).map_err(|error| wrong(error.to_string()))?;
        let folder = path.parent().unwrap_or(Path::new(""));
        config.tls = config.tls.map(|tls| folder.join(tls));
        Ok(config)
    }

    fn controls(&self) -> &[String] {
        match &self.control {
            Controls::One(address) => std::slice::from_ref(address),
            Controls::Several(addresses) => addresses,
        }
    }

    /// Whether devices for RDMA are asked for.
    fn uses_rdma(&self) -> bool {
        self.verbs.is_some() || self.rdma.is_some()
    }
}

impl Doctor {
    pub(crate) async fn run(self) -> Result<String, Failure> {
        let config = Config::read(&self.config)?;
        let mut findings = host::check(&Host::read(), &config);
        findings.extend(reach::check(&config).await);
        let page = if self.json {
            crate::text::page(&serde_json::json!({ "host": config.host, "checks": findings }))
        } else {
            page(&findings)
        };
        let wrong = findings.iter().filter(|finding| finding.state == State::Wrong).count();
        if wrong == 0 {
            return Ok(page);
        }
        std::io::stdout().write_all(page.as_bytes()).map_err(|error| Failure::Refused(error.to_string()))?;
        let checks = number_of(findings.len(), "check", "checks");
        Err(Failure::Refused(format!("{wrong} of {checks} of {} failed", config.host)))
    }
}

/// A line for each check, and then what to do.
fn page(findings: &[Finding]) -> String {
    let state = |state| match state {
        State::Fine => "fine",
        State::Advice => "advice",
        State::Wrong => "WRONG",
    };
    let head = row(["check", "state", "found"]);
    let rows = findings.iter().map(|finding| row([finding.check, state(finding.state), &finding.found]));
    let mut page = table(&std::iter::once(head).chain(rows).collect::<Vec<_>>());
    for Finding { check, remedy, .. } in findings {
        if let Some(remedy) = remedy {
            page += &format!("\n{check}: {remedy}\n");
        }
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remedies_stand_below_the_table() {
        let findings =
            [Finding::fine("kernel", "6.1.0"), Finding::wrong("clock", "not synchronised", "install chrony")];
        let expected = "  check   state  found\n  kernel  fine   6.1.0\n  clock   WRONG  not synchronised\n\n\
             clock: install chrony\n";
        assert_eq!(page(&findings), expected);
        let json = serde_json::to_value(findings).unwrap();
        assert_eq!(json[1]["state"], "wrong");
        assert_eq!(json[0].get("remedy"), None);
    }

    #[test]
    fn a_configuration_is_read_beside_its_certificates() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.toml");
        let text = "host = \"h0\"\ncontrol = [\"10.0.0.1:7000\", \"10.0.0.2:7000\"]\ntls = \"tls/h0\"\n\
             listen = \"10.1.0.1:7100\"\n[verbs]\n[[tenant]]\nname = \"a\"\n";
        std::fs::write(&path, text).unwrap();
        let config = Config::read(&path).unwrap();
        assert_eq!(config.tls, Some(folder.path().join("tls/h0")));
        assert_eq!(config.controls().len(), 2);
        assert!(config.uses_rdma() && config.telemetry.is_none());
        std::fs::write(&path, text.replace("10.1.0.1:7100", "10.1.0.1")).unwrap();
        let error = Config::read(&path).err().unwrap().to_string();
        assert!(error.contains("agent.toml") && error.contains("listen"), "{error}");
    }
}
