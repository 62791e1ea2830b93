//! `harmonaize`: what operators ask of control and of a topology file.
#![forbid(unsafe_code)]

mod control;
mod json;
mod status;
mod table;
mod topology;

use clap::{Parser, Subcommand, ValueEnum};
use control::{Control, Target};
use harmonaize_planner::Nanos;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  harmonaize status                           what is connected, formed and in flight
  harmonaize status --json | jq .tenants      the same, complete, for programs
  harmonaize reorder a/world h0,h2,h1,h3      another ring order, while operations run
  harmonaize dissolve 5f3a9c1200000001        end a communicator
  harmonaize topology fabric.toml check       is the file right? if not, which line?

Exit status: 0 done; 1 refused or failed; 2 wrong usage; 3 control cannot be reached;
4 no such communicator; 5 under way, but not done in the time given.";

/// Sees and steers harmonaize, the provider's collectives.
#[derive(Parser)]
#[command(name = "harmonaize", version, after_help = EXAMPLES)]
struct Arguments {
    /// Where control listens.
    #[arg(
        long,
        global = true,
        env = "HARMONAIZE_CONTROL",
        value_name = "HOST:PORT",
        default_value = "127.0.0.1:7000"
    )]
    control: String,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Shows agents, tenants, communicators, operations in flight and whom they wait for, bytes and errors.
    Status {
        /// As JSON, complete.
        #[arg(long)]
        json: bool,
        /// How long agents may take to answer; at most 30s.
        #[arg(long, value_name = "DURATION", default_value = "1s")]
        patience: Nanos,
    },
    /// Checks or shows a topology file, without control.
    Topology {
        /// The file.
        file: PathBuf,
        /// What to do with it.
        #[arg(default_value = "check")]
        action: TopologyAction,
    },
    /// Changes the ring order of a communicator while its operations run.
    Reorder {
        /// Its id, or tenant/name.
        #[arg(value_name = "COMMUNICATOR")]
        communicator: Target,
        /// Every host of it once, in ring order, separated by commas.
        #[arg(required = true, value_delimiter = ',', value_name = "HOST,HOST,...")]
        hosts: Vec<String>,
        /// How long to wait until the new order is in use; 0s not at all.
        #[arg(long, value_name = "DURATION", default_value = "10s")]
        wait: Nanos,
    },
    /// Ends a communicator; its ranks are told that the provider did.
    Dissolve {
        /// Its id, or tenant/name.
        #[arg(value_name = "COMMUNICATOR")]
        communicator: Target,
        /// For the records.
        #[arg(long, default_value = "ended by an operator")]
        reason: String,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum TopologyAction {
    /// Say whether it is right.
    Check,
    /// Show hosts, switches, links, and the ring over all hosts.
    Show,
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
    /// No communicator.
    #[error("{0}")]
    NotFound(String),
    /// Time is over.
    #[error("{0}")]
    UnderWay(String),
}

impl Failure {
    fn code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Refused(_) => 1,
            Self::Unreachable { .. } => 3,
            Self::NotFound(_) => 4,
            Self::UnderWay(_) => 5,
        })
    }
}

fn main() -> ExitCode {
    match run(Arguments::parse()) {
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
    if let Command::Topology { file, action } = &arguments.command {
        return topology::run(file, *action == TopologyAction::Show);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::Refused(error.to_string()))?;
    runtime.block_on(ask(arguments))
}

async fn ask(arguments: Arguments) -> Result<String, Failure> {
    let mut control = Control::connect(&arguments.control).await?;
    match arguments.command {
        Command::Status { json, patience } => {
            let status = control.status(patience).await?;
            Ok(if json { format!("{:#}\n", json::status(&status)) } else { status::text(&status) })
        }
        Command::Reorder { communicator, hosts, wait } => control.reorder(&communicator, hosts, wait).await,
        Command::Dissolve { communicator, reason } => control.dissolve(&communicator, reason).await,
        // Needs no control; see `run`.
        Command::Topology { file, action } => topology::run(&file, action == TopologyAction::Show),
    }
}
