//! Suite telemetry: what measuring costs, and whether what it finds is true, on four emulated hosts with real agents.

mod accuracy;
mod congestion;
mod cost;
mod decision;
mod processor;
mod training;

use super::findings::SOCKET;
use super::lab::Lab;
use super::part::Part;
use super::suite::{Bench, BenchBudget, Request};
use anyhow::{Context, Result};
use std::sync::Arc;

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
const METRICS: &str = "127.0.0.1:9477";

impl Telemetry {
    /// Lines of an agent's configuration, for links of a rate, or unshaped ones. The driver of an emulated device knows no rate.
    fn lines(self, shaped: bool) -> String {
        let rate = if shaped { "[telemetry.rate]\neth0 = \"1Gbit/s\"\n" } else { "" };
        let record = match self {
            Self::Recorded | Self::Shown => "record = \"{folder}/trace\"\n",
            _ => "",
        };
        let show = match self {
            Self::Shown => format!("socket = \"{{folder}}/{SOCKET}\"\n"),
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

/// How much is measured.
#[derive(Debug, Clone)]
pub struct Budget {
    /// Interleaved pairs of runs with telemetry on and off.
    pub pairs: usize,
    /// Iterations of the training whose phases are compared with its log.
    pub iterations: usize,
    /// Trainings with and without injected delays, half of them over Gloo.
    pub trainings: usize,
    /// Bursts of cross traffic.
    pub bursts: usize,
    /// Flows that the telemetry thread must keep up with.
    pub flows: usize,
    /// For how many seconds.
    pub seconds: u64,
}

/// What all parts work with.
type Suite = Bench<Budget>;

impl BenchBudget for Budget {
    const PARTS: &'static [Part<Suite>] = &[
        ("packet", cost::packet),
        ("mark", cost::mark),
        ("busbw", cost::unshaped),
        ("busbw-shaped", cost::shaped),
        ("processor", processor::processor),
        ("thread", cost::thread),
        ("decision", decision::decision),
        ("phases", accuracy::phases_of_others),
        ("stragglers", accuracy::stragglers),
        ("congestion", congestion::idle),
        ("congestion-busy", congestion::busy),
    ];
    const SMOKE: &'static [&'static str] = &[
        "busbw",
        "busbw-shaped",
        "thread",
        "decision",
        "phases",
        "stragglers",
        "congestion",
        "congestion-busy",
    ];

    fn new(request: &Request) -> Self {
        Self {
            pairs: request.rounds_of((20, 60)),
            iterations: 110,
            trainings: 20,
            bursts: 50,
            flows: 10_000,
            seconds: 10,
        }
    }

    fn smoke() -> Self {
        Self { pairs: 1, iterations: 12, trainings: 1, bursts: 2, flows: 200, seconds: 1 }
    }
}

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

/// Records the traces that tests replay, beside the logs of the trainings, instead of measuring. They are those that the request
/// names, all if there are none.
pub fn record(suite: &Suite) -> Result<()> {
    let folder = suite.request.traces.as_deref().context("no folder for traces")?;
    accuracy::traces_into(suite, folder)
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
