//! The picture that the report opens with: the fabric, who runs where, and the spine that cross traffic congests.

use harmonaize_testkit::topology::{Link, Topology};
use maud::{Markup, html};
use std::collections::BTreeMap;

/// The picture's width, and where its rows begin, in its own units.
const WIDTH: usize = 760;
const SPINES_TOP: usize = 8;
const LEAVES_TOP: usize = 100;
const HOSTS_TOP: usize = 160;
/// The size of a spine. Leaves are as high and as wide as their rack.
const SPINE_WIDTH: usize = 150;
const SWITCH_HEIGHT: usize = 28;
/// The height of a line of text, and the space around boxes.
const LINE: usize = 18;
const GAP: usize = 6;

/// The strokes of what cross traffic does not pass, of what it passes, and of hosts without an agent.
const PLAIN: &str = "stroke:var(--soft);stroke-width:1.5";
const BUSY: &str = "stroke:var(--bad);stroke-width:4";
const UNMANAGED: &str = "stroke:var(--soft);stroke-width:1.5;stroke-dasharray:5 3";

/// What runs on a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// Whether it has an agent.
    pub agent: bool,
    /// The tenants on it, each with what it has there.
    pub tenants: Vec<(char, String)>,
}

/// Where a node is drawn.
#[derive(Debug, Clone, Copy)]
struct Place {
    middle: usize,
    top: usize,
    width: usize,
    height: usize,
}

impl Place {
    fn start(&self) -> usize {
        self.middle.saturating_sub(self.width / 2)
    }

    fn text_at(&self, line: usize) -> usize {
        self.top + LINE * (line + 1)
    }
}

/// A leaf or a spine, and the hosts that are linked to it.
type Switch = (usize, Vec<usize>);

/// The fabric as racks below spines. `hosts` are in the topology's order; `cross` names the nodes that the cross traffic
/// passes, and is empty where there was none.
pub fn fabric(topology: &Topology, hosts: &[Host], cross: &[&str]) -> Markup {
    let (leaves, spines) = tiers(topology);
    let lines = hosts.iter().map(|host| host.tenants.len() + usize::from(!host.agent)).max().unwrap_or(0);
    let height = LINE * (lines + 1) + GAP + 2;
    let places = places(&leaves, &spines, height);
    let name = |node: usize| topology.nodes.get(node).map_or("", |node| node.name.as_str());
    let crossed = |link: &Link| {
        let [a, b] = link.ends.map(name);
        cross.windows(2).any(|pair| pair == [a, b] || pair == [b, a])
    };
    let (plain, busy): (Vec<&Link>, Vec<&Link>) = topology.links.iter().partition(|link| !crossed(link));
    let switches = leaves.iter().chain(&spines).map(|(switch, _)| *switch);
    let view = format!("0 0 {WIDTH} {}", HOSTS_TOP + height + GAP);
    let congested =
        |switch: usize| cross.contains(&name(switch)) && spines.iter().any(|(spine, _)| *spine == switch);
    html! {
        figure role="img" aria-label=(described(&leaves, &spines, hosts, name, cross)) {
            svg viewBox=(view) style="font:13px system-ui,sans-serif;fill:var(--ink)" {
                @for link in plain { (line(&places, link, PLAIN)) }
                @for link in busy { (line(&places, link, BUSY)) }
                @for switch in switches {
                    @if let Some(place) = places.get(&switch) {
                        (frame(place, if congested(switch) { BUSY } else { PLAIN }))
                        text x=(place.middle) y=(place.text_at(0)) text-anchor="middle" {
                            (name(switch)) @if congested(switch) { ", congested" }
                        }
                    }
                }
                @for (at, host) in topology.hosts().zip(hosts) {
                    @if let Some(place) = places.get(&at) { (drawn(place, name(at), host)) }
                }
            }
        }
    }
}

/// Switches with hosts, and those without.
fn tiers(topology: &Topology) -> (Vec<Switch>, Vec<Switch>) {
    let linked = |switch: usize, host: usize| {
        topology.links.iter().any(|link| link.ends == [switch, host] || link.ends == [host, switch])
    };
    let below = |switch| (switch, topology.hosts().filter(|host| linked(switch, *host)).collect());
    topology.switches().map(below).partition(|(_, hosts): &Switch| !hosts.is_empty())
}

fn places(leaves: &[Switch], spines: &[Switch], host_height: usize) -> BTreeMap<usize, Place> {
    let mut places = BTreeMap::new();
    let step = WIDTH / spines.len().max(1);
    for (at, (spine, _)) in spines.iter().enumerate() {
        let (middle, width) = (step * at + step / 2, SPINE_WIDTH.min(step.saturating_sub(GAP)));
        places.insert(*spine, Place { middle, top: SPINES_TOP, width, height: SWITCH_HEIGHT });
    }
    let rack = WIDTH / leaves.len().max(1);
    let inside = rack.saturating_sub(2 * GAP);
    for (at, (leaf, hosts)) in leaves.iter().enumerate() {
        let middle = rack * at + rack / 2;
        places.insert(*leaf, Place { middle, top: LEAVES_TOP, width: inside, height: SWITCH_HEIGHT });
        let step = inside / hosts.len().max(1);
        for (number, host) in hosts.iter().enumerate() {
            let middle = rack * at + GAP + step * number + step / 2;
            let width = step.saturating_sub(GAP);
            places.insert(*host, Place { middle, top: HOSTS_TOP, width, height: host_height });
        }
    }
    places
}

/// A link from the lower end of the upper node to the lower node.
fn line(places: &BTreeMap<usize, Place>, link: &Link, style: &str) -> Markup {
    let [Some(a), Some(b)] = link.ends.map(|end| places.get(&end)) else { return html! {} };
    let (upper, lower) = if a.top < b.top { (a, b) } else { (b, a) };
    let from = lower.middle.clamp(upper.start(), upper.start() + upper.width);
    html! { line x1=(from) y1=(upper.top + upper.height) x2=(lower.middle) y2=(lower.top) style=(style) {} }
}

/// The frame of a node, whose stroke is given as a style.
fn frame(place: &Place, stroke: &str) -> Markup {
    let style = format!("fill:var(--paper);{stroke}");
    html! {
        rect x=(place.start()) y=(place.top) width=(place.width) height=(place.height) rx="4" style=(style) {}
    }
}

fn drawn(place: &Place, name: &str, host: &Host) -> Markup {
    let left = place.start() + GAP;
    let first = 1 + usize::from(!host.agent);
    html! {
        (frame(place, if host.agent { PLAIN } else { UNMANAGED }))
        text x=(left) y=(place.text_at(0)) style="font-weight:600" { (name) }
        @if !host.agent { text x=(left) y=(place.text_at(1)) { "no agent" } }
        @for (line, (tenant, what)) in (first..).zip(&host.tenants) {
            @let style = format!("fill:{}", colour(*tenant));
            rect x=(left) y=(place.text_at(line).saturating_sub(10)) width="10" height="10" style=(style) {}
            text x=(left + 15) y=(place.text_at(line)) { (tenant) ": " (what) }
        }
    }
}

/// The colour beside a tenant's name, which says the same; Okabe and Ito's.
pub(super) fn colour(tenant: char) -> &'static str {
    match tenant {
        'A' => "#0072b2",
        'B' => "#e69f00",
        'C' => "#009e73",
        _ => "#cc79a7",
    }
}

/// The same in words, for those who do not see it.
fn described<'a>(
    leaves: &[Switch],
    spines: &[Switch],
    hosts: &[Host],
    name: impl Fn(usize) -> &'a str,
    cross: &[&str],
) -> String {
    let names: Vec<&str> = spines.iter().map(|(spine, _)| name(*spine)).collect();
    let mut text = format!("The spines are {}.", names.join(" and "));
    for (leaf, below) in leaves {
        let of = |host: &usize| {
            let placed = hosts.get(*host)?;
            let mut what: Vec<String> = (!placed.agent).then(|| "no agent".to_owned()).into_iter().collect();
            what.extend(placed.tenants.iter().map(|(tenant, what)| format!("{tenant}: {what}")));
            Some(format!("{} ({})", name(*host), what.join(", ")))
        };
        let below: Vec<String> = below.iter().filter_map(of).collect();
        text += &format!(" Below {} are {}.", name(*leaf), below.join(", "));
    }
    if !cross.is_empty() {
        text += &format!(" Cross traffic passes {}.", cross.join(", "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::{HOSTS, HOSTS_A_RACK, RACKS, SPINES, course, fabric_topology, placed};
    use super::*;

    const CROSSED: &str = "stroke:var(--bad);stroke-width:4\"></line>";

    fn demo(cross: &[&str]) -> String {
        let topology = fabric_topology().unwrap();
        let hosts: Vec<Host> = topology.hosts().map(placed).collect();
        fabric(&topology, &hosts, cross).into_string()
    }

    #[test]
    fn the_demos_own_fabric_is_drawn() {
        let html = demo(&course::path("spine1"));
        let links = HOSTS + RACKS + RACKS * SPINES;
        assert_eq!(html.matches("<line").count(), links, "{html}");
        assert_eq!(html.matches("no agent</text>").count(), RACKS, "{html}");
        for host in 0..HOSTS {
            assert!(html.contains(&format!(">h{host}</text>")), "h{host}: {html}");
        }
        for (tenant, hosts) in [('A', HOSTS), ('B', RACKS), ('C', HOSTS_A_RACK), ('D', RACKS)] {
            assert_eq!(html.matches(&format!(">{tenant}: ")).count(), hosts, "{tenant}: {html}");
        }
    }

    #[test]
    fn the_congested_spine_stands_out_in_lines_and_words() {
        let html = demo(&course::path("spine1"));
        assert_eq!(html.matches(CROSSED).count(), 4, "{html}");
        assert!(html.contains("spine1, congested</text>") && html.contains(">spine0</text>"), "{html}");
        assert!(html.contains("Cross traffic passes f0, leaf0, spine1, leaf1, f1."), "{html}");
        assert!(
            html.contains("h0 (A: 2 ranks, B: 2 ranks, C: 1 rank), h1 (A: 2 ranks, C: 1 rank)"),
            "{html}"
        );
        let calm = demo(&[]);
        assert!(!calm.contains(CROSSED) && !calm.contains("congested") && !calm.contains("Cross"), "{calm}");
    }
}
