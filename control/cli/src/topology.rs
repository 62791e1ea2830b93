//! A topology file, checked or shown.

use crate::Failure;
use crate::table::{row, table};
use harmonaize_planner::{HostId, Node, SwitchKind, Topology, order, ring_crossings, tuning};
use std::path::Path;

/// Most hosts of which the ring is shown.
const MAX_HOSTS: usize = 256;

pub(crate) fn run(file: &Path, show: bool) -> Result<String, Failure> {
    let wrong = |error: &dyn std::fmt::Display| Failure::Refused(format!("{}: {error}", file.display()));
    let text = std::fs::read_to_string(file).map_err(|error| wrong(&error))?;
    let topology = Topology::parse(&text).map_err(|error| wrong(&error))?;
    let (hosts, switches, links) =
        (topology.hosts().len(), topology.switches().len(), topology.links().len());
    let summary = format!("{}: {hosts} hosts, {switches} switches, {links} links", file.display());
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
    let mut rows = vec![row(["name", "kind", "rack"])];
    for host in topology.hosts() {
        rows.push(row([&host.name, "host", host.rack.as_deref().unwrap_or("-")]));
    }
    for switch in topology.switches() {
        let kind = match switch.kind {
            SwitchKind::Leaf => "leaf",
            SwitchKind::Spine => "spine",
            SwitchKind::Core => "core",
        };
        rows.push(row([&switch.name, kind, "-"]));
    }
    for aggregator in topology.aggregators() {
        let at = topology.node_name(Node::Switch(aggregator.switch));
        rows.push(row([&aggregator.name, &format!("aggregator at {at}, {}", aggregator.rate), "-"]));
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
        "\nRING OVER ALL HOSTS\n  {}\n  crosses {crossings} links between switches; segments of {}, messages of {}, {} in flight\n",
        names.join(" "),
        sizes.segment,
        sizes.chunk,
        sizes.channels,
    )
}
