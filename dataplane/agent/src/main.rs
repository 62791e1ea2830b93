//! `harmonaize-agent`: runs on each offload unit or hypervisor host.
#![forbid(unsafe_code)]

use anyhow::{Context, bail};
use clap::{Parser, Subcommand, ValueEnum};
use harmonaize_agent::aggregator::{self, AggregatorConfig};
use harmonaize_agent::config::Config;
use harmonaize_agent::observe::Observe;
use harmonaize_agent::sandbox;
use harmonaize_identity::raise_open_files;
use harmonaize_program::LogArguments;
use std::path::PathBuf;

/// The provider's agent: runs the collectives of this host's tenants, or aggregates those of others.
#[derive(Parser)]
#[command(
    version,
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:
  harmonaize-agent --config /etc/harmonaize/agent.toml
  harmonaize-agent --config agent.toml --check          says whether the file is right, and ends
  harmonaize-agent --role aggregator --config aggregator.toml   sums on the way what hosts send: see below
  harmonaize-agent observe                              only shows what crosses this host's interfaces: see observe --help

A configuration:
  host = \"h0\"                      # this host's name in control's topology
  control = \"10.0.0.1:7000\"
  tls = \"tls/hosts/h0\"           # made by `harmonaize init`; relative to this file
  listen = \"10.1.0.1:7100\"         # where other agents connect
  handover = \"/run/harmonaize/handover.sock\"  # may be left out; where a successor asks for this agent's place: see --take-over
  metrics = \"127.0.0.1:9477\"      # where Prometheus reads; this is where it does by default
  [links]                          # may be left out
  protection = \"authenticated\"     # what crosses them; or \"encrypted\", or \"none\": all agents alike
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

To measure what crosses this host's interfaces:
  [telemetry]                      # all keys may be left out
  interfaces = [\"eth0\"]            # else the one that has the address of `listen`
  socket = \"/run/harmonaize/telemetry.sock\"  # for `harmonaize top`; the agent's own user, and `uids`
  rate = { eth0 = \"25Gbit/s\" }    # what a link carries, where the driver does not know it
  idle_gap = \"500us\"              # a silence that ends a burst
  late_round_trip = \"600us\"       # so much later than the least, flows are looked at; else by the links' rates
  interval = \"5ms\"                # how often flows under way are looked at
  flows = 32768                    # connections that are kept
  record = \"agent.trace\"          # everything, for `observe --replay`; this file and the one before it take `record_limit`, 1 GiB
  run_time = false                 # true: how long the programs run in the kernel, at some 30 ns a packet
  diagnosis = false                # true: the log says why packets are of no flow, or found no place

An aggregator, on an offload unit or a machine near the switch that control's topology says it hangs on:
  name = \"agg0\"                    # this aggregator's name in control's topology
  control = \"10.0.0.1:7000\"
  tls = \"tls/hosts/agg0\"
  listen = \"10.1.0.9:7400\"         # UDP; where workers send their parts
  # The rest may be left out:
  pool = \"8MiB\"                    # memory for sums; else half of the last-level cache
  mtu = 1500                       # what a frame carries between here and the hosts; up to 9000 is worth it
  spin = \"50us\"                    # how long it looks for packets before it sleeps
  packets_per_second = 400000      # what control takes one core to do; else it is measured at the start
  metrics = \"127.0.0.1:9478\"       # Prometheus

RUST_LOG sets what is logged (for example RUST_LOG=debug), and so does --log."
)]
struct Arguments {
    /// What to be.
    #[arg(long, value_enum, default_value_t = Role::Host)]
    role: Role,
    /// The configuration file.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Take the place of the agent that runs here by the same configuration, with its tenants and their operations in flight: no operation
    /// fails. The other ends. Without one, start as usual. Needs `handover` in the configuration.
    #[arg(long, requires = "config")]
    take_over: bool,
    /// What a service manager runs to reload the agent that is process PID. Where that is of this program, it reads its files again. Else
    /// this program takes its place, and this ends once it has; where it cannot, the agent goes on and this fails.
    #[arg(long, value_name = "PID", requires = "config", conflicts_with_all = ["take_over", "check"])]
    reload: Option<u32>,
    /// Only check the configuration.
    #[arg(long, requires = "config")]
    check: bool,
    #[command(flatten)]
    log: LogArguments,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Role {
    /// The agent of a host: runs its tenants' collectives.
    Host,
    /// An aggregator on the way.
    Aggregator,
}

#[derive(Subcommand)]
enum Command {
    /// Shows what crosses this host's interfaces: telemetry alone, for any library, without control and configuration.
    Observe(Observe),
}

fn main() -> anyhow::Result<()> {
    let arguments: Arguments = harmonaize_program::parse();
    arguments.log.start()?;
    // Made once the process is confined, since its threads are what they are begun as.
    let runtime = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.context("cannot start the control thread")
    };
    if let Some(Command::Observe(observe)) = arguments.command {
        return runtime()?.block_on(async {
            let stop = harmonaize_agent::run::signalled()?;
            observe.run(&mut std::io::stdout().lock(), stop).await
        });
    }
    let Some(file) = arguments.config else { bail!("--config is missing; see --help") };
    if matches!(arguments.role, Role::Aggregator) {
        let config = AggregatorConfig::read(&file)?;
        if arguments.check {
            return Ok(());
        }
        raise_open_files();
        sandbox::confine_aggregator(&config);
        return runtime()?.block_on(async {
            let stop = harmonaize_agent::run::signalled()?;
            aggregator::run(config, stop).await
        });
    }
    let config = Config::read(&file)?;
    if arguments.check {
        return Ok(());
    }
    if let Some(agent) = arguments.reload {
        return harmonaize_agent::reload::reload(agent, &file);
    }
    raise_open_files();
    sandbox::confine_agent(&config);
    runtime()?.block_on(async {
        let stop = harmonaize_agent::run::signalled()?;
        match arguments.take_over {
            true => harmonaize_agent::run::take_over(config, stop).await,
            false => harmonaize_agent::run::run(config, stop).await,
        }
    })
}
