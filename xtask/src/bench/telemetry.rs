//! Suite telemetry: what measuring costs, and whether what it finds is true, on four emulated hosts with real agents.

mod congestion;
mod cost;
mod decision;
pub mod found;
mod processor;
mod training;
pub mod truth;
mod verdicts;

use super::lab::Lab;
use super::part::{self, Outcome, Part};
use crate::fabric::Host;
use crate::packages::Consent;
use crate::workspace::Binaries;
use anyhow::Result;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Hosts around one switch.
const HOSTS: usize = 4;
/// What the agents are told of telemetry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Telemetry {
    /// Nothing: there is none.
    Off,
    /// The programs run on packets, and the thread has next to nothing to do.
    Programs,
    /// Packets alone: nothing of what the kernel knows of sockets.
    Packets,
    /// What is usual.
    On,
    /// The same, and that everything is recorded.
    Recorded,
    /// That too, and that agents tell what they find, and their metrics.
    Shown,
}

/// Where an agent serves its metrics, in its own namespace.
const METRICS: &str = "127.0.0.1:9464";

impl Telemetry {
    /// Lines of an agent's configuration, for links of a rate, or unshaped ones. The driver of an emulated device knows no rate.
    fn lines(self, shaped: bool) -> String {
        let rate = if shaped { "[telemetry.rate]\neth0 = \"1Gbit/s\"\n" } else { "" };
        let record = match self {
            Self::Recorded | Self::Shown => "record = \"{folder}/trace\"\n",
            _ => "",
        };
        let show = match self {
            Self::Shown => format!("socket = \"{{folder}}/{SOCKET}\"\nmetrics = \"{METRICS}\"\n"),
            _ => String::new(),
        };
        let looks = match self {
            Self::Off => return String::new(),
            Self::Programs => {
                "interval = \"10s\"\nidle_gap = \"10s\"\nlate_round_trip = \"0ns\"\nkernel = false\n"
            }
            Self::Packets => "interval = \"3ms\"\nkernel = false\n",
            Self::On | Self::Recorded | Self::Shown => "interval = \"3ms\"\n",
        };
        format!("[telemetry]\ninterfaces = [\"eth0\"]\n{looks}{show}{record}{rate}")
    }
}

/// The file of the socket at which an agent tells what it finds, in its host's folder.
const SOCKET: &str = "telemetry.sock";

/// How `harmonaize` reaches the agent of a host.
fn socket(host: &Host) -> String {
    format!("unix:{}", host.folder.join(SOCKET).display())
}

/// How much is measured.
#[derive(Debug, Clone)]
pub struct Effort {
    /// Interleaved pairs of runs with telemetry on and off.
    pub pairs: usize,
    /// Iterations of the training whose phases are compared with its log.
    pub iterations: usize,
    /// Trainings with and without injected delays, half of them over Gloo.
    pub trainings: usize,
    /// Bursts of a foreign flow.
    pub bursts: usize,
    /// Flows that the telemetry thread must keep up with.
    pub flows: usize,
    /// For how many seconds.
    pub seconds: u64,
    /// Parts alone, see [`PARTS`]; all if empty.
    pub only: Vec<String>,
    /// Where to keep the traces of trainings whose verdicts are wrong.
    pub wrong: Option<PathBuf>,
}

impl Effort {
    /// For figures.
    pub fn new(pairs: usize, only: &[String]) -> Self {
        Self {
            pairs,
            iterations: 110,
            trainings: 20,
            bursts: 50,
            flows: 10_000,
            seconds: 10,
            only: only.to_vec(),
            wrong: None,
        }
    }

    /// Shows that everything runs, and measures nothing worth a figure.
    pub fn smoke() -> Self {
        let only =
            ["busbw", "busbw-shaped", "thread", "decision", "stragglers", "congestion", "congestion-busy"];
        let only = only.map(str::to_owned).to_vec();
        Self { pairs: 1, iterations: 12, trainings: 1, bursts: 2, flows: 200, seconds: 1, only, wrong: None }
    }
}

/// What all parts work with.
struct Suite {
    effort: Effort,
    binaries: Binaries,
    consent: Consent,
    stop: Arc<AtomicBool>,
}

const PARTS: &[Part<Suite>] = &[
    ("packet", cost::packet),
    ("mark", cost::mark),
    ("busbw", cost::unshaped),
    ("busbw-shaped", cost::shaped),
    ("processor", processor::processor),
    ("thread", cost::thread),
    ("decision", decision::decision),
    ("phases", verdicts::foreign),
    ("stragglers", verdicts::stragglers),
    ("congestion", congestion::idle),
    ("congestion-busy", congestion::busy),
];

/// Names of the traces that [`record`] makes, for `--only`.
pub const TRACES: &[&str] = &[
    "gloo-clean",
    "ours-clean",
    "gloo-slow-worker",
    "ours-slow-worker",
    "gloo-slow-link",
    "ours-slow-link",
    "gloo-long",
];

/// Names of parts, for `--only`.
pub fn parts() -> Vec<&'static str> {
    part::names(PARTS)
}

/// Records the traces that tests replay, beside the logs of the trainings, instead of measuring: those of these names, all if
/// there are none.
pub fn record(
    folder: &Path,
    only: &[String],
    binaries: Binaries,
    consent: Consent,
    stop: Arc<AtomicBool>,
) -> Result<()> {
    let effort = Effort { only: only.to_vec(), ..Effort::smoke() };
    verdicts::traces_into(&Suite { effort, binaries, consent, stop }, folder)
}

/// Measures.
pub fn run(effort: Effort, binaries: Binaries, consent: Consent, stop: Arc<AtomicBool>) -> Outcome {
    let suite = Suite { effort, binaries, consent, stop };
    part::run(&suite, PARTS, &suite.effort.only)
}

impl Suite {
    /// Hosts with links of 1 Gbit/s and agents.
    fn lab(&self, telemetry: Telemetry) -> Result<Lab> {
        self.build(telemetry, true)
    }

    /// The same with links that nothing shapes.
    fn unshaped(&self, telemetry: Telemetry) -> Result<Lab> {
        let lab = self.build(telemetry, false)?;
        for host in lab.fabric().hosts() {
            lab.fabric().set_rate(&host.name, None)?;
        }
        Ok(lab)
    }

    fn build(&self, telemetry: Telemetry, shaped: bool) -> Result<Lab> {
        let (binaries, stop) = (self.binaries.clone(), Arc::clone(&self.stop));
        Lab::build_with(HOSTS, "1Gbit/s", binaries, stop, |mut setup| {
            setup.agent += &telemetry.lines(shaped);
            // Else where telemetry is, control hears of the zeros in tensors and spares the wire of them: another program than without.
            setup.control += "compression = false\n";
            setup
        })
    }
}
