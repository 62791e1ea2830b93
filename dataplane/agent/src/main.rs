//! `harmonaize-agent`: runs on each offload unit or hypervisor host.
#![forbid(unsafe_code)]

use anyhow::Context;
use clap::Parser;
use harmonaize_agent::config::Config;
use std::path::PathBuf;

/// The provider's agent: runs the collectives of this host's tenants.
#[derive(Parser)]
#[command(
    version,
    after_help = "\
Examples:
  harmonaize-agent --config /etc/harmonaize/agent.toml
  harmonaize-agent --config agent.toml --check          says whether the file is right, and ends

A configuration:
  host = \"h0\"                      # this host's name in control's topology
  control = \"10.0.0.1:7000\"
  listen = \"10.1.0.1:7100\"         # where other agents connect
  [[tenant]]
  name = \"a\"
  socket = \"/run/harmonaize/a.sock\"
  uids = [10001]

On an offload unit, for processes on its host, which come over TCP and attach over RDMA:
  [rdma]
  device = \"mlx5_2\"                # this unit's, towards the host
  listen = \"192.168.7.1:7300\"
  [[tenant]]
  name = \"b\"
  rdma = true
  secret = \"b.secret\"              # relative to this file; 32 bytes or more, mode 600
  addresses = [\"192.168.7.2\"]

RUST_LOG sets what is logged (for example RUST_LOG=debug)."
)]
struct Arguments {
    /// The configuration file.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Only check the configuration.
    #[arg(long)]
    check: bool,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let config = Config::read(&arguments.config)?;
    if arguments.check {
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("cannot start the control thread")?.block_on(async {
        let stop = harmonaize_agent::run::signalled()?;
        harmonaize_agent::run::run(config, stop).await
    })
}
