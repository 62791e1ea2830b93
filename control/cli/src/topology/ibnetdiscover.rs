//! What `ibnetdiscover` prints: nodes, and the cable at each of their ports.

use super::Source;
use super::draft::{Draft, ImportError, Kind, usable};
use super::problem::Problem;
use harmonaize_planner::Rate;
use std::collections::{BTreeMap, BTreeSet};

/// What a node of the subnet is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Device {
    Adapter,
    Switch,
    Router,
}

struct Port {
    line: usize,
    peer: String,
    rate: Option<Rate>,
}

struct Entry {
    device: Device,
    description: String,
    ports: Vec<Port>,
}

/// Reads the subnet of each file; nodes that several have are the same.
///
/// # Errors
/// A line that is none of the format, or no node at all.
pub(super) fn read(sources: &[Source]) -> Result<Draft, ImportError> {
    let mut draft = Draft::new("Made by `harmonaize topology import ibnetdiscover`.");
    draft.note("Hosts are named by their adapters' node descriptions: an agent's `host` must be that name.");
    draft.note(
        "? Switches have no `addresses`: agents trace routes over IP, which this output does not have.",
    );
    for source in sources {
        let entries = entries(source)?;
        let names = names(&mut draft, &entries);
        for (guid, entry) in &entries {
            let Some(name) = names.get(guid) else { continue };
            for port in &entry.ports {
                let Some(peer) = entries.get(&port.peer) else {
                    let what = Problem::UnknownPeer(port.peer.clone());
                    return Err(ImportError::Line { file: source.name(), line: port.line, what });
                };
                match names.get(&port.peer) {
                    Some(other) if other != name => draft.cable(name, other, port.rate),
                    Some(_) => draft.note(format!("? {name}: a cable to itself, left out")),
                    None if peer.device == Device::Router => {
                        draft.note(format!("? {name}: a cable to a router, left out"));
                    }
                    None => {}
                }
            }
        }
    }
    Ok(draft)
}

fn entries(source: &Source) -> Result<BTreeMap<String, Entry>, ImportError> {
    let mut entries: BTreeMap<String, Entry> = BTreeMap::new();
    let mut current: Option<String> = None;
    for (index, text) in source.text.lines().enumerate() {
        let line = index + 1;
        let wrong = |what: fn(String) -> Problem| {
            let what = what(text.chars().take(80).collect());
            ImportError::Line { file: source.name(), line, what }
        };
        let device = match text.split_whitespace().next() {
            Some("Switch") => Some(Device::Switch),
            Some("Ca") => Some(Device::Adapter),
            Some("Rt") => Some(Device::Router),
            _ => None,
        };
        if let Some(device) = device {
            let guid = quoted(text).next().ok_or_else(|| wrong(Problem::NodeWithoutGuid))?;
            let description = quoted(text).nth(1).unwrap_or_default().to_owned();
            let entry = Entry { device, description, ports: Vec::new() };
            if entries.insert(guid.to_owned(), entry).is_some() {
                return Err(wrong(Problem::NodeTwice));
            }
            current = Some(guid.to_owned());
        } else if text.starts_with('[') {
            let entry = current.as_ref().and_then(|guid| entries.get_mut(guid));
            let Some(entry) = entry else {
                return Err(wrong(Problem::PortBeforeNode));
            };
            let peer = quoted(text).next().ok_or_else(|| wrong(Problem::PortWithoutPeer))?;
            let tail = text.rsplit('"').next().unwrap_or_default();
            let rate = tail.split_whitespace().find_map(link_rate);
            entry.ports.push(Port { line, peer: peer.to_owned(), rate });
        }
    }
    if entries.is_empty() {
        return Err(ImportError::Line { file: source.name(), line: 1, what: Problem::NoNodes });
    }
    Ok(entries)
}

/// What stands in quotes.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('"').skip(1).step_by(2)
}

/// Gives each switch and each adapter's host a name.
fn names(draft: &mut Draft, entries: &BTreeMap<String, Entry>) -> BTreeMap<String, String> {
    let mut names = BTreeMap::new();
    // A chassis has many switches of one name, which differ by what stands behind it.
    let switches = || entries.iter().filter(|(_, entry)| entry.device == Device::Switch);
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    for (_, entry) in switches() {
        *seen.entry(switch_name(&entry.description).0).or_default() += 1;
    }
    let mut taken = BTreeSet::new();
    for (guid, entry) in switches() {
        let (short, unit) = switch_name(&entry.description);
        let alone = seen.get(&short) == Some(&1);
        let long = usable(&format!("{short}-{unit}"));
        let (name, doubt) = match () {
            () if !short.is_empty() && alone => (short, None),
            () if !short.is_empty() && !unit.is_empty() && !taken.contains(&long) => (long, None),
            () => (usable(guid), Some(format!("its description names no switch: {}", entry.description))),
        };
        taken.insert(name.clone());
        draft.add(&name, Kind::Switch, doubt);
        names.insert(guid.clone(), name);
    }
    for (guid, entry) in entries.iter().filter(|(_, entry)| entry.device == Device::Adapter) {
        if entry.description.contains("Aggregation Node") {
            draft.note(format!("{}: a switch's own aggregation node, left out", usable(guid)));
            continue;
        }
        let (name, doubt) = match host_name(&entry.description) {
            Some(name) if !taken.contains(&name) => (name, None),
            _ => (usable(guid), Some(format!("its description names no host: {}", entry.description))),
        };
        draft.add(&name, Kind::Host, doubt);
        names.insert(guid.clone(), name);
    }
    names
}

/// The name in a switch's description, and which chip of a chassis it is: "MF0;leaf1:MQM8700/U1" is leaf1 and U1.
fn switch_name(description: &str) -> (String, String) {
    let managed = description.split_once(';').map(|(_, rest)| rest);
    match managed.map(|rest| rest.rsplit_once(':').unwrap_or((rest, ""))) {
        Some((name, model)) => {
            let unit = model.split_once('/').map_or("", |(_, unit)| unit);
            (usable(name), usable(unit))
        }
        // Names from a node name map stand alone; the vendors' own texts have blanks.
        None if !description.trim().contains(' ') => (usable(description), String::new()),
        None => (String::new(), String::new()),
    }
}

/// The host in an adapter's description: "node7 mlx5_0", "node7 HCA-1".
fn host_name(description: &str) -> Option<String> {
    let mut words = description.split_whitespace();
    let (host, adapter) = (words.next()?, words.next()?);
    let stem = adapter.trim_end_matches(|c: char| c.is_ascii_digit());
    let numbered = stem.len() < adapter.len() && (stem.ends_with('_') || stem.ends_with('-'));
    let name = usable(host);
    (words.next().is_none() && numbered && !name.is_empty()).then_some(name)
}

/// The data rate of a link's width and speed, such as "4xHDR". It is the number of lanes times what a lane carries behind its
/// code.
fn link_rate(text: &str) -> Option<Rate> {
    let (lanes, speed) = text.split_once('x')?;
    let lane: u64 = match speed {
        "SDR" => 2_000_000_000,
        "DDR" => 4_000_000_000,
        "QDR" => 8_000_000_000,
        "FDR10" => 10_000_000_000,
        "FDR" => 13_636_000_000,
        "EDR" => 25_000_000_000,
        "HDR" => 50_000_000_000,
        "NDR" => 100_000_000_000,
        "XDR" => 200_000_000_000,
        _ => return None,
    };
    let lanes = lanes.parse::<u64>().ok().filter(|lanes| (1..=12).contains(lanes))?;
    Some(Rate(lanes * lane))
}
