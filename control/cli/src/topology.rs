//! Topology files: checked, shown, imported from what operators have, and made from counts or from traces.

use crate::Failure;
use crate::table::{row, table};
use crate::text::number_of;
use clap::{Args, Subcommand};
use harmonaize_planner::{HostId, Node, Rate, SwitchKind, Topology, order, ring_crossings, tuning};
use std::path::{Path, PathBuf};

mod discover;
mod draft;
mod ibnetdiscover;
mod json;
mod lldp;
mod new;
mod problem;
#[cfg(test)]
mod tests;
mod topograph;

use draft::ImportError;

/// Most hosts of which the ring is shown.
const MAX_HOSTS: usize = 256;

/// What to do with a topology file.
#[derive(Subcommand)]
pub(crate) enum TopologyAction {
    /// Says whether a file is right; if not, which line is wrong.
    Check {
        /// The file.
        file: PathBuf,
    },
    /// Shows a file's hosts, switches, links, and the ring over all hosts.
    Show {
        /// The file.
        file: PathBuf,
    },
    /// Makes a topology file of what describes the fabric already, and prints it.
    #[command(after_help = IMPORT_HELP)]
    Import {
        /// From what.
        #[command(subcommand)]
        source: ImportSource,
    },
    /// Makes a topology file of racks with a leaf each, joined by spines, and prints it.
    #[command(after_help = NEW_HELP)]
    New(new::New),
    /// Makes a topology file of the routes that agents traced, as control has them.
    #[command(after_help = discover::HELP)]
    Discover(discover::Discover),
}

const IMPORT_HELP: &str = "\
Examples:
  harmonaize topology import lldp hosts/*.json > topology.toml
  harmonaize topology import lldp hosts/*.json --switches switches/*.json --without oob-switch
  ibnetdiscover > fabric.txt; harmonaize topology import ibnetdiscover fabric.txt
  harmonaize topology import topograph model.yaml --rate 400Gbit/s

What is unsure is marked by `# ?` in the file. The file is checked before it is printed.";

const NEW_HELP: &str = "\
Examples:
  harmonaize topology new --racks 4 --hosts 16 --spines 2 > topology.toml
  harmonaize topology new --racks 1 --hosts 8 --spines 0 --rate 25Gbit/s
  harmonaize topology new --racks 4 --hosts 16 --spines 2 --uplink 400Gbit/s --delay 1us";

/// What describes the fabric.
#[derive(Subcommand)]
pub(crate) enum ImportSource {
    /// Outputs of `lldpctl -f json`, a file a host: the file's name is the host's.
    Lldp {
        #[command(flatten)]
        common: Import,
        /// Outputs of switches, a file a switch.
        #[arg(long, value_name = "FILE", num_args = 1..)]
        switches: Vec<PathBuf>,
    },
    /// The output of `ibnetdiscover`.
    Ibnetdiscover {
        #[command(flatten)]
        common: Import,
    },
    /// NVIDIA topograph: models as YAML or JSON, or instances as its engine `graph` writes them.
    Topograph {
        #[command(flatten)]
        common: Import,
    },
}

/// What every import takes.
#[derive(Args)]
pub(crate) struct Import {
    /// What is read.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The rate of a cable whose own is not in the files.
    #[arg(long, value_name = "RATE", default_value = "100Gbit/s")]
    rate: Rate,
    /// Nodes that are left out, such as the switch of a management network.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    without: Vec<String>,
}

pub(crate) fn run(action: TopologyAction) -> Result<String, Failure> {
    match action {
        TopologyAction::Check { file } => check(&file, false),
        TopologyAction::Show { file } => check(&file, true),
        TopologyAction::New(new) => new.draft().and_then(|draft| draft.file()).map_err(refused),
        TopologyAction::Import { source } => import(source).map_err(refused),
        // Control is asked; see `run` of the program.
        TopologyAction::Discover(_) => Ok(String::new()),
    }
}

fn refused(error: ImportError) -> Failure {
    Failure::Refused(error.to_string())
}

fn import(source: ImportSource) -> Result<String, ImportError> {
    let (common, draft) = match source {
        ImportSource::Lldp { common, switches } => {
            let draft = lldp::read(&load(&common.files)?, &load(&switches)?)?;
            (common, draft)
        }
        ImportSource::Ibnetdiscover { common } => {
            let draft = ibnetdiscover::read(&load(&common.files)?)?;
            (common, draft)
        }
        ImportSource::Topograph { common } => {
            let draft = topograph::read(&load(&common.files)?)?;
            (common, draft)
        }
    };
    draft.assuming(common.rate).without(&common.without)?.file()
}

/// A file with its text.
struct Source {
    path: PathBuf,
    text: String,
}

impl Source {
    /// The path, as errors show it.
    fn name(&self) -> String {
        self.path.display().to_string()
    }
}

fn load(files: &[PathBuf]) -> Result<Vec<Source>, ImportError> {
    let read = |path: &PathBuf| {
        let text = std::fs::read_to_string(path)
            .map_err(|why| ImportError::Read { file: path.display().to_string(), why })?;
        Ok(Source { path: path.clone(), text })
    };
    files.iter().map(read).collect()
}

fn check(file: &Path, show: bool) -> Result<String, Failure> {
    let wrong = |error: &dyn std::fmt::Display| Failure::Refused(format!("{}: {error}", file.display()));
    let text = std::fs::read_to_string(file).map_err(|error| wrong(&error))?;
    let topology = Topology::parse(&text).map_err(|error| wrong(&error))?;
    let summary = format!(
        "{}: {}, {}, {}",
        file.display(),
        number_of(topology.hosts().len(), "host", "hosts"),
        number_of(topology.switches().len(), "switch", "switches"),
        number_of(topology.links().len(), "link", "links")
    );
    Ok(if show { format!("{summary}\n{}", page(&topology)) } else { format!("{summary}: ok\n") })
}

fn page(topology: &Topology) -> String {
    let mut rows = vec![row(["from", "to", "rate", "delay"])];
    for link in topology.links() {
        let ends = [link.from, link.to].map(|node| topology.node_name(node));
        let [from, to] = ends;
        rows.push(row([from, to, &link.rate.to_string(), &link.delay.to_string()]));
    }
    let mut page = format!("\nLINKS\n{}", table(&rows));
    let mut rows = vec![row(["name", "kind", "rack", "accelerators"])];
    for host in topology.hosts() {
        let [rack, kind] = [&host.rack, &host.kind].map(|text| text.as_deref().unwrap_or("-"));
        rows.push(row([&host.name, "host", rack, kind]));
    }
    for switch in topology.switches() {
        let kind = match switch.kind {
            SwitchKind::Leaf => "leaf",
            SwitchKind::Spine => "spine",
            SwitchKind::Core => "core",
        };
        rows.push(row([&switch.name, kind, "-", "-"]));
    }
    for aggregator in topology.aggregators() {
        let at = topology.node_name(Node::Switch(aggregator.switch));
        rows.push(row([&aggregator.name, &format!("aggregator at {at}, {}", aggregator.rate), "-", "-"]));
    }
    page += &format!("\nNODES\n{}", table(&rows));
    if topology.hosts().len() <= MAX_HOSTS {
        page += &ring(topology);
    }
    page
}

/// What a communicator over all hosts would get.
fn ring(topology: &Topology) -> String {
    let hosts: Vec<HostId> = (0..topology.hosts().len()).map(HostId).collect();
    let ring: Vec<HostId> =
        order(topology, &hosts).iter().filter_map(|index| hosts.get(*index)).copied().collect();
    let names: Vec<&str> = ring.iter().map(|host| topology.node_name(Node::Host(*host))).collect();
    let (crossings, sizes) = (ring_crossings(topology, &ring), tuning(topology, &hosts));
    format!(
        "\nRING OVER ALL HOSTS\n  {}\n  crosses {} between switches; segments of {}, messages of {}, {} in flight\n",
        names.join(" "),
        number_of(crossings, "link", "links"),
        sizes.segment,
        sizes.chunk,
        sizes.channels,
    )
}
