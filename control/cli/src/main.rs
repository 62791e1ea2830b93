//! `harmonaize`: what operators ask of control, of agents, and of files.
#![forbid(unsafe_code)]

mod agent;
mod control;
mod describe;
mod doctor;
mod flows;
mod hello;
mod help;
mod init;
mod jobs;
mod operate;
mod output;
mod perfetto;
mod phases;
mod rotated;
mod rows;
mod status;
mod table;
mod tenant;
mod text;
mod top;
mod topology;
mod trace;
mod what_if;
mod yaml;

use agent::Socket;
use clap::{Parser, Subcommand};
use control::{Control, ControlArguments, Target};
use harmonaize_api::v1::RowKind;
use harmonaize_planner::Nanos;
use operate::{Moment, Operate, TenantAction, WithdrawOptions};
use output::{Format, PageArguments};
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;
use topology::TopologyAction;

const EXAMPLES: &str = "\
Examples:
  harmonaize init tls --topology topology.toml --operator alice    certificates for a first deployment
  harmonaize hello                            two emulated hosts, and a sum over both
  harmonaize doctor                           what this host lacks for its agent
  harmonaize status                           what is connected, formed and in flight
  harmonaize status --json | jq .tenants      the same, complete, for programs
  harmonaize reorder a/world h0,h2,h1,h3      another ring order, while operations run
  harmonaize reorder a/world --automatic      control chooses its order again
  harmonaize dissolve 5f3a9c1200000001        end a communicator
  harmonaize topology                         what control takes each link to carry
  harmonaize topology check fabric.toml       is the file right? if not, which line?
  harmonaize topology import lldp hosts/*.json    a topology file of what hosts see
  harmonaize plans                            rings, paths and shares of communicators
  harmonaize explain a/world                  why it runs by its plan, and when that changed
  harmonaize jobs                             tenants' jobs, the hosts that they have, and why
  harmonaize what-if --job a/gpt --workers 2..8   who would run, and where, if this job came
  harmonaize plan --dry-run --drain spine0    what would happen if
  harmonaize drain spine0                     our traffic leaves a switch, while collectives run
  harmonaize maintenance h3 --from +30min --for 2h
  harmonaize tenants add bert-team            one more tenant
  harmonaize tenant constraints job --weight 2    for tenants: what they want, and are promised
  harmonaize top                              links, communicators and stragglers of all hosts, live
  harmonaize top --agent unix:PATH            one host: flows and phases too
  harmonaize flows --follow --tenant a        every flow of a tenant on all hosts, as it appears
  harmonaize phases --json --follow           what all hosts find, as it is found, an object a line
  harmonaize trace --seconds 5 --out a.pftrace    a trace that ui.perfetto.dev opens

Exit status: 0 done; 1 refused or failed; 2 wrong usage; 3 control or the agent cannot be reached;
4 no such communicator, host, switch, link or tenant; 5 under way, but not done in the time given.";

/// Sees and steers harmonaize, the provider's collectives.
#[derive(Parser)]
#[command(name = "harmonaize", version, after_help = EXAMPLES)]
struct Arguments {
    #[command(flatten)]
    control: ControlArguments,
    #[command(subcommand)]
    command: Command,
}

/// Whether what is shown is shown again.
#[derive(Clone, Copy, clap::Args)]
struct Watch {
    /// Shows it again and again, every two seconds or so often, until Ctrl-C.
    #[arg(
        short,
        long,
        value_name = "DURATION",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "2s"
    )]
    watch: Option<Nanos>,
}

/// The least time between two pages of `--watch`: more often nobody reads, and control has others to serve.
const LEAST_INTERVAL: Duration = Duration::from_millis(100);

impl Watch {
    /// Asks once and returns the page; or again and again, and prints each page in place of the one before.
    async fn show(self, mut ask: impl AsyncFnMut() -> Result<String, Failure>) -> Result<String, Failure> {
        loop {
            let page = ask().await?;
            let Some(interval) = self.watch else { return Ok(page) };
            let place = if std::io::stdout().is_terminal() { "\x1b[H\x1b[2J" } else { "" };
            if !text::put(&format!("{place}{page}")) {
                return Ok(String::new());
            }
            tokio::time::sleep(Duration::from(interval).max(LEAST_INTERVAL)).await;
        }
    }
}

#[derive(Subcommand)]
enum Command {
    /// Makes an authority and certificates for control, each host and operators.
    #[command(after_help = init::HELP)]
    Init(init::Init),
    /// Tries out the installed programs: two emulated hosts and an AllReduce between them, on this machine.
    #[command(after_help = hello::HELP)]
    Hello(hello::Hello),
    /// Checks whether this host has what its agent needs, and says what to do where it has not.
    #[command(after_help = doctor::HELP)]
    Doctor(doctor::Doctor),
    /// Ends certificates before their time, as when a key is lost.
    #[command(after_help = init::REVOKE_HELP)]
    Revoke(init::Revoke),
    /// Shows agents, tenants, communicators, operations in flight and whom they wait for, bytes and errors.
    #[command(after_help = help::STATUS)]
    Status {
        #[command(flatten)]
        print: PageArguments,
        /// How long agents may take to answer; at most 30s.
        #[arg(long, value_name = "DURATION", default_value = "1s")]
        patience: Nanos,
        #[command(flatten)]
        watch: Watch,
    },
    /// Shows the fabric as control sees it; or checks, shows and makes topology files.
    #[command(after_help = help::TOPOLOGY, args_conflicts_with_subcommands = true)]
    Topology {
        /// What to do with a file; control is asked where it is left out.
        #[command(subcommand)]
        action: Option<TopologyAction>,
        #[command(flatten)]
        print: PageArguments,
        #[command(flatten)]
        watch: Watch,
    },
    /// Lists tenants, adds or removes one.
    #[command(after_help = operate::TENANTS_HELP)]
    Tenants {
        /// What to do; lists them where it is left out.
        #[command(subcommand)]
        action: Option<TenantAction>,
        /// How it is printed: table, json, yaml, or by a template, such as `jsonpath={.tenants[*].name}`.
        #[arg(short, long, global = true, value_name = "FORMAT", default_value = "table", value_parser = Format::of_page)]
        output: Format,
        /// The same as `-o json`.
        #[arg(long, global = true)]
        json: bool,
    },
    /// Shows which of several controls leads.
    Leader {
        #[command(flatten)]
        print: PageArguments,
    },
    /// Writes a copy of all that control has stored, while it runs.
    #[command(after_help = operate::BACKUP_HELP)]
    Backup {
        /// Where it goes.
        file: PathBuf,
        #[command(flatten)]
        print: PageArguments,
    },
    /// Shows what communicators run by: rings, paths, shares, and why.
    #[command(after_help = help::PLANS)]
    Plans {
        /// One alone: its id, or tenant/name.
        #[arg(value_name = "COMMUNICATOR")]
        communicator: Option<Target>,
        #[command(flatten)]
        print: PageArguments,
        #[command(flatten)]
        watch: Watch,
    },
    /// Says what control decided lately, why, and when each stage was reached.
    #[command(after_help = operate::EXPLAIN_HELP)]
    Explain {
        /// About one alone: its id, or tenant/name.
        #[arg(value_name = "COMMUNICATOR")]
        communicator: Option<Target>,
        /// The last N alone; 0 for all that control keeps.
        #[arg(short = 'n', long, value_name = "N", default_value_t = 0)]
        last: u32,
        #[command(flatten)]
        print: PageArguments,
    },
    /// Lists jobs: what each has, where, and why.
    #[command(after_help = jobs::JOBS_HELP)]
    Jobs {
        #[command(flatten)]
        print: PageArguments,
        #[command(flatten)]
        watch: Watch,
    },
    /// Lists jobs that wait for hosts, the next one first.
    #[command(after_help = jobs::QUEUE_HELP)]
    Queue {
        #[command(flatten)]
        print: PageArguments,
        #[command(flatten)]
        watch: Watch,
    },
    /// Says why a job has the workers that it has.
    #[command(after_help = jobs::WHY_HELP)]
    Why {
        /// Its name, or tenant/name.
        #[arg(value_name = "JOB")]
        job: String,
        #[command(flatten)]
        print: PageArguments,
    },
    /// Says what jobs would have if one more came, hosts came or went, or another policy allocated; nothing changes.
    #[command(after_help = what_if::HELP)]
    WhatIf(what_if::WhatIf),
    /// Says what control would plan now, or if more were drained; nothing changes.
    #[command(after_help = help::PLAN)]
    Plan {
        /// Control plans by itself, so there is only this.
        #[arg(long, required = true)]
        dry_run: bool,
        /// As if these hosts, switches or links were drained too.
        #[arg(long, value_delimiter = ',', value_name = "TARGET,...")]
        drain: Vec<String>,
        #[command(flatten)]
        print: PageArguments,
    },
    /// Takes hosts, switches or links out of use while collectives run, or lists what is drained.
    #[command(after_help = operate::DRAIN_HELP)]
    Drain {
        /// Names of hosts and switches; a link is named by its ends, such as leaf0:spine0.
        #[arg(value_name = "TARGET")]
        targets: Vec<String>,
        /// They may be used again.
        #[arg(long)]
        end: bool,
        /// For whoever looks at it later.
        #[arg(long, value_name = "TEXT", default_value = "")]
        reason: String,
        /// How long to wait until no connection of ours crosses switches and links; 0s not at all.
        #[arg(long, value_name = "DURATION", default_value = "10s")]
        wait: Nanos,
        #[command(flatten)]
        print: PageArguments,
    },
    /// Plans a window in which hosts, switches or links are out of use, or lists those that are planned.
    #[command(after_help = operate::MAINTENANCE_HELP)]
    Maintenance {
        /// Names of hosts and switches; a link is named by its ends, such as leaf0:spine0.
        #[arg(value_name = "TARGET")]
        targets: Vec<String>,
        /// When it begins: a time (UTC), or so long from now.
        #[arg(long, value_name = "TIME|+DURATION", default_value = "+0s")]
        from: Moment,
        /// How long it lasts.
        #[arg(long = "for", value_name = "DURATION")]
        length: Option<Nanos>,
        /// Take it back.
        #[arg(long, conflicts_with = "length")]
        cancel: bool,
        /// For whoever looks at it later.
        #[arg(long, value_name = "TEXT", default_value = "")]
        reason: String,
        #[command(flatten)]
        print: PageArguments,
    },
    /// Changes the ring order of a communicator while its operations run. Control then leaves the order alone, until it is given back.
    #[command(after_help = help::REORDER)]
    Reorder {
        /// Its id, or tenant/name.
        #[arg(value_name = "COMMUNICATOR")]
        communicator: Target,
        /// Every host of it once, in ring order, separated by commas.
        #[arg(required_unless_present = "automatic", value_delimiter = ',', value_name = "HOST,HOST,...")]
        hosts: Vec<String>,
        /// Gives the order back to control, which changes it where another is better.
        #[arg(long, conflicts_with = "hosts")]
        automatic: bool,
        /// How long to wait until the new order is in use; 0s not at all.
        #[arg(long, value_name = "DURATION", default_value = "10s")]
        wait: Nanos,
        #[command(flatten)]
        print: PageArguments,
    },
    /// Shows what is measured, live: links, flows, communicators, phases, stragglers. ? explains the keys.
    #[command(after_help = help::TOP)]
    Top {
        /// The socket of an agent's telemetry; else, or for `control`, control is asked for all hosts.
        #[arg(long, env = "HARMONAIZE_AGENT", value_name = "unix:PATH|control")]
        agent: Option<WatchTarget>,
        /// Time between two pictures; 100ms to 1min.
        #[arg(long, value_name = "DURATION", default_value = "1s")]
        interval: Nanos,
        /// Most flows, the fastest first.
        #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
        flows: u32,
        /// Only rows with this text.
        #[arg(long, value_name = "TEXT", default_value = "")]
        filter: String,
        #[command(flatten)]
        selection: top::Selection,
        /// One picture as plain text, and no more; or what it shows, in the format of -o.
        #[arg(long)]
        once: bool,
        #[command(flatten)]
        print: PageArguments,
        /// Characters of a line of that picture.
        #[arg(long, value_name = "N", default_value_t = 100, requires = "once", value_parser = clap::value_parser!(u16).range(40..=500))]
        width: u16,
    },
    /// Lists the flows of all hosts.
    #[command(after_help = flows::FIELDS)]
    Flows(rows::RowArguments),
    /// Lists what agents found: own operations, phases of external jobs, congestion of links, late ranks.
    #[command(after_help = phases::FIELDS)]
    Phases(rows::RowArguments),
    /// Makes a trace that Perfetto opens (ui.perfetto.dev), of what agents measure or of recorded files.
    #[command(after_help = trace::HELP)]
    Trace {
        /// Sockets of agents' telemetry, which are recorded at once; else, or for `control`, all hosts through control.
        #[arg(long, env = "HARMONAIZE_AGENT", value_name = "unix:PATH|control", value_delimiter = ',')]
        agent: Vec<WatchTarget>,
        /// Only of these hosts.
        #[arg(long, value_name = "HOST", value_delimiter = ',', conflicts_with_all = ["from", "diff"])]
        host: Vec<String>,
        /// How long to record; at most 3600.
        #[arg(
            long,
            value_name = "N",
            required_unless_present_any = ["from", "diff"],
            conflicts_with = "from",
            value_parser = clap::value_parser!(u32).range(1..=3600)
        )]
        seconds: Option<u32>,
        /// A file that an agent recorded; once for each host that is to be in the trace.
        #[arg(long, value_name = "TRACEFILE")]
        from: Vec<PathBuf>,
        /// Where the trace goes.
        #[arg(long, value_name = "FILE", required_unless_present = "diff")]
        out: Option<PathBuf>,
        /// Keep what was recorded too, for `--from`; of one agent.
        #[arg(long, value_name = "TRACEFILE", conflicts_with = "from")]
        keep: Option<PathBuf>,
        /// Prints what two recorded files do not have in common, as JSON.
        #[arg(
            long,
            num_args = 2,
            value_names = ["TRACEFILE", "TRACEFILE"],
            conflicts_with_all = ["seconds", "from", "out", "keep"]
        )]
        diff: Vec<PathBuf>,
        /// Records that say the same at most so far apart are the same to `--diff`.
        #[arg(long, value_name = "DURATION", default_value = "0ns", requires = "diff")]
        tolerance: Nanos,
    },
    /// For tenants: constraints and agreements, hints, events, and how agreements were kept.
    #[command(after_help = tenant::HELP)]
    Tenant(tenant::Tenant),
    /// Ends a communicator; its ranks are told that the provider did.
    #[command(after_help = help::DISSOLVE)]
    Dissolve {
        /// Its id, or tenant/name.
        #[arg(value_name = "COMMUNICATOR")]
        communicator: Target,
        /// For the records.
        #[arg(long, default_value = "ended by an operator")]
        reason: String,
        #[command(flatten)]
        print: PageArguments,
    },
}

/// What `top` watches, and of whom rows and traces are.
#[derive(Clone, Debug)]
enum WatchTarget {
    /// All hosts, as control knows them.
    Control,
    /// One agent.
    Agent(Socket),
}

impl FromStr for WatchTarget {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "control" => Ok(Self::Control),
            text => text.parse().map(Self::Agent),
        }
    }
}

/// Why a command did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// A file, or what control said.
    #[error("{0}")]
    Refused(String),
    /// No control.
    #[error(
        "control at {address} cannot be reached: {why}; is it running there? (--control, HARMONAIZE_CONTROL)"
    )]
    Unreachable {
        /// Where.
        address: String,
        /// Why not.
        why: String,
    },
    /// No agent.
    #[error(
        "the agent's socket {socket} cannot be reached: {why}; does [telemetry] of its configuration name it?"
    )]
    NoAgent {
        /// Where.
        socket: String,
        /// Why not.
        why: String,
    },
    /// No agent for tenants.
    #[error(
        "the agent's socket {socket} cannot be reached: {why}; is it that of this tenant? (--socket, HARMONAIZE_SOCKET)"
    )]
    NoSocket {
        /// Where.
        socket: String,
        /// Why not.
        why: String,
    },
    /// No communicator.
    #[error("{0}")]
    NotFound(String),
    /// Time is over.
    #[error("{0}")]
    UnderWay(String),
    /// Something is missing in what was asked.
    #[error("{0}")]
    Usage(String),
}

impl Failure {
    fn code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Refused(_) => 1,
            Self::Usage(_) => 2,
            Self::Unreachable { .. } | Self::NoAgent { .. } | Self::NoSocket { .. } => 3,
            Self::NotFound(_) => 4,
            Self::UnderWay(_) => 5,
        })
    }
}

fn main() -> ExitCode {
    match run(harmonaize_program::parse()) {
        Ok(text) => {
            // A reader that has seen enough, such as `head`, is no failure.
            let _ = std::io::stdout().write_all(text.as_bytes());
            ExitCode::SUCCESS
        }
        Err(failure) => {
            eprintln!("harmonaize: {failure}");
            failure.code()
        }
    }
}

fn run(arguments: Arguments) -> Result<String, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::Refused(error.to_string()))?;
    let Arguments { control, command } = arguments;
    let outcome = match command {
        Command::Topology { action: Some(TopologyAction::Discover(asked)), .. } => {
            runtime.block_on(asked.run(&control))
        }
        Command::Topology { action: Some(action), .. } => topology::run(action),
        Command::Init(asked) => asked.run(),
        Command::Revoke(asked) => asked.run(),
        Command::Doctor(asked) => runtime.block_on(asked.run()),
        Command::Hello(asked) => runtime.block_on(asked.run()),
        Command::Tenant(asked) => asked.run(&runtime),
        Command::Top { once: false, print, .. } if print.is_for_programs() => {
            Err(Failure::Usage("one picture, or one after the other? say --once too".to_owned()))
        }
        Command::Top { agent: Some(WatchTarget::Agent(_)), selection, .. }
            if selection != top::Selection::default() =>
        {
            let text =
                "--host, --tenant and --communicator ask control; leave --agent out, or set it to control";
            Err(Failure::Usage(text.to_owned()))
        }
        Command::Top { agent, interval, flows, filter, selection, once, print, width } => {
            let source = match agent {
                Some(WatchTarget::Agent(socket)) => top::Source::Agent(socket),
                Some(WatchTarget::Control) | None => top::Source::Control(control, selection),
            };
            let once = once.then_some((width, print));
            let options = top::Options { interval, flows, once, filter };
            runtime.block_on(top::run(source, options))
        }
        Command::Flows(asked) => runtime.block_on(rows::run(&control, asked, RowKind::Flow)),
        Command::Phases(asked) => runtime.block_on(rows::run(&control, asked, RowKind::Finding)),
        Command::Trace { agent, host, seconds, from, out, keep, diff, tolerance } => {
            match (diff.as_slice(), out, seconds) {
                ([first, second], ..) => trace::diff(first, second, tolerance),
                (_, Some(out), Some(seconds)) => {
                    let of = (agent, host);
                    runtime.block_on(trace::record(&control, of, seconds, &out, keep.as_deref()))
                }
                (_, Some(out), None) => trace::convert(&from, &out),
                (_, None, _) => Err(Failure::Usage("where does the trace go? say --out FILE".to_owned())),
            }
        }
        command @ (Command::Status { .. } | Command::Reorder { .. } | Command::Dissolve { .. }) => {
            runtime.block_on(ask(&control, command))
        }
        Command::Leader { print } => runtime.block_on(Control::roles(&control, &print)),
        command => runtime.block_on(operate(&control, command)),
    };
    // A thread that waits for keys does not hold the end up.
    runtime.shutdown_background();
    outcome
}

/// What operators ask of control beyond its status.
async fn operate(control: &ControlArguments, command: Command) -> Result<String, Failure> {
    let mut control = Operate::connect(control).await?;
    match command {
        Command::Topology { action: _, print, watch } => {
            watch.show(async || control.topology(&print).await).await
        }
        Command::Tenants { action, output, json } => {
            control.tenants(action, &PageArguments { output, json }).await
        }
        Command::Backup { file, print } => control.backup(&file, &print).await,
        Command::Plans { communicator, print, watch } => {
            watch.show(async || control.plans(communicator.as_ref(), &print).await).await
        }
        Command::Explain { communicator, last, print } => {
            control.explain(communicator.as_ref(), last, &print).await
        }
        Command::Jobs { print, watch } => {
            watch.show(async || Ok(print.page(&control.jobs().await?, jobs::jobs))).await
        }
        Command::Queue { print, watch } => {
            watch.show(async || Ok(print.page(&jobs::waiting(control.jobs().await?), jobs::queue))).await
        }
        Command::Why { job, print } => Ok(print.page(&jobs::find(control.jobs().await?, &job)?, jobs::why)),
        Command::WhatIf(asked) => {
            let reply = control.what_if(asked.request()?).await?;
            Ok(asked.print.page(&reply, what_if::text))
        }
        Command::Plan { dry_run: _, drain, print } => control.dry_run(drain, &print).await,
        Command::Drain { targets, end, reason, wait, print } => {
            control.withdraw(WithdrawOptions { targets, window: None, end, reason, wait, print }).await
        }
        Command::Maintenance { targets, from, length, cancel: end, reason, print } => {
            let (window, wait) = (Some((from, length)), Nanos(0));
            control.withdraw(WithdrawOptions { targets, window, end, reason, wait, print }).await
        }
        // None of control's; see `run`.
        _ => Ok(String::new()),
    }
}

/// What is asked of control.
async fn ask(control: &ControlArguments, command: Command) -> Result<String, Failure> {
    let mut control = Control::connect(control).await?;
    match command {
        Command::Status { print, patience, watch } => {
            let ask = async || Ok(print.page(&control.status(patience).await?, status::text));
            watch.show(ask).await
        }
        Command::Reorder { communicator, hosts, automatic: _, wait, print } => {
            let done = control.reorder(&communicator, hosts, wait).await?;
            Ok(print.page(&done.json(), |_| done.text()))
        }
        Command::Dissolve { communicator, reason, print } => {
            control.dissolve(&communicator, reason, &print).await
        }
        // None of control's; see `run`.
        _ => Ok(String::new()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use harmonaize_testkit::golden;

    #[test]
    fn help_of_every_command() {
        golden::same("control/cli/tests/golden/help.txt", &golden::help(Arguments::command()));
    }

    #[test]
    fn short_flags_are_the_long_ones() {
        let parsed = |words: &str| {
            let words = std::iter::once("harmonaize").chain(words.split(' '));
            let mut parsed = Arguments::command().try_get_matches_from(words).unwrap();
            while let Some((_, of_command)) = parsed.remove_subcommand() {
                parsed = of_command;
            }
            parsed
        };
        for (words, seconds) in [("status -w", 2), ("topology -w=5s", 5), ("jobs -w=1min", 60)] {
            let every = parsed(words).get_one::<Nanos>("watch").copied();
            assert_eq!(every, Some(Nanos(seconds * 1_000_000_000)), "{words}");
        }
        for words in ["flows -fn 3", "phases -f -n 3", "explain -n 3"] {
            assert_eq!(parsed(words).get_one::<u32>("last"), Some(&3), "{words}");
        }
        for words in ["flows -fn 3", "phases -f -n 3", "tenant events -f"] {
            assert!(parsed(words).get_flag("follow"), "{words}");
        }
    }
}
