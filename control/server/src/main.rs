//! `harmonaize-control`: reads its configuration, serves until it is told to stop.
#![forbid(unsafe_code)]

use anyhow::{Context, bail};
use clap::Parser;
use harmonaize_identity::raise_open_files;
use harmonaize_program::LogArguments;
use harmonaize_server::{Config, Place, Server, count_panics};
use harmonaize_store::Stored;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tokio::signal::unix::{SignalKind, signal};

/// harmonaize's control server: knows hosts, agents and tenants, and forms communicators.
#[derive(Parser)]
#[command(
    name = "harmonaize-control",
    version,
    after_help = "\
Examples:
  harmonaize-control --config control.toml                  serves until SIGTERM
  harmonaize-control --config control.toml --check          reads configuration and topology, and exits
  harmonaize-control --config control.toml --log debug --log-json
  harmonaize-control --config control.toml --restore control.backup   makes the store of a copy, and exits

A configuration:
  listen = \"10.0.0.1:7000\"         # where agents connect; tools at this port of 127.0.0.1, or at listen_operators
  tls = \"tls/control\"             # made by `harmonaize init`; relative to this file, as are the others
  metrics = \"127.0.0.1:9476\"      # where Prometheus reads; this is where it does by default
  page = \"127.0.0.1:9479\"         # where operators' browsers look; this is where they do by default
  topology = \"topology.toml\"
  store = \"control.redb\"           # may be left out: what outlives a restart; or, for several controls:
  # etcd = [\"10.0.0.1:2379\", \"10.0.0.2:2379\", \"10.0.0.3:2379\"]
  [[tenant]]
  name = \"a\"
  [[operator]]
  name = \"alice\"
  role = \"admin\"

Tenants, operators and the topology are read again when a file changes, and at SIGHUP."
)]
struct Arguments {
    /// Configuration file (TOML).
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Check configuration and topology, and exit.
    #[arg(long)]
    check: bool,
    /// Make the store anew of what `harmonaize backup` wrote, and exit. The store that was there is kept beside it.
    #[arg(long, value_name = "COPY", conflicts_with = "check")]
    restore: Option<PathBuf>,
    #[command(flatten)]
    log: LogArguments,
}

fn main() -> ExitCode {
    let arguments: Arguments = harmonaize_program::parse();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("harmonaize-control: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let config = Config::load(&arguments.config)?;
    if arguments.check {
        let topology = &config.settings.topology;
        let (hosts, tenants) = (topology.hosts().len(), config.settings.tenants.len());
        println!("ok: {hosts} hosts, {} links, {tenants} tenants", topology.links().len());
        return Ok(());
    }
    if let Some(copy) = &arguments.restore {
        let store = config.store.context("the configuration names no `store` to restore")?;
        let Place::File(path) = &store.place else {
            bail!("the store is in etcd: restore a snapshot of it with `etcdctl snapshot restore`");
        };
        let (stored, kept) = restore(copy, path)?;
        let (path, tenants, withdrawn) = (path.display(), stored.tenants.len(), stored.withdrawals.len());
        println!("{path}: {tenants} tenants, {withdrawn} withdrawals, {} plans", stored.plans.len());
        if let Some(kept) = kept {
            println!("the store that was there is {} now", kept.display());
        }
        return Ok(());
    }
    arguments.log.start()?;
    count_panics();
    raise_open_files();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(serve(config))
}

/// Makes the store of a copy. Communicators that were formed after it keep their ids to themselves: the next start's number is random.
fn restore(copy: &Path, store: &Path) -> anyhow::Result<(Stored, Option<PathBuf>)> {
    let mut boot = [0; 4];
    getrandom::fill(&mut boot).context("the system gives no randomness")?;
    Ok(harmonaize_store::restore(copy, store, u32::from_le_bytes(boot))?)
}

async fn serve(config: Config) -> anyhow::Result<()> {
    let server = Server::bind(config).await?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tracing::info!(listen = %server.local_address(), listen_operators = %server.operators_address(), "control serves");
    harmonaize_program::ready();
    let stop = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("control goes down");
        harmonaize_program::stopping();
    };
    Ok(server.run(stop).await?)
}
