//! What `lldpctl -f json` (or json0) prints on hosts and switches.

use super::Source;
use super::draft::{Draft, ImportError, Kind, usable};
use super::json::{At, parse_json};
use super::problem::Problem;
use crate::text::number_of;
use harmonaize_planner::Rate;
use std::collections::BTreeMap;

/// A neighbour at an interface.
struct Neighbour {
    interface: String,
    name: String,
    /// The name is made of the chassis' number.
    unnamed: bool,
    /// It says that it forwards.
    forwards: bool,
    rate: Option<Rate>,
}

/// Reads a file of each host, and of switches where there are any.
///
/// # Errors
/// What is no output of `lldpctl`, or two files of one name.
pub(super) fn read(hosts: &[Source], switches: &[Source]) -> Result<Draft, ImportError> {
    let mut draft = Draft::new(format!(
        "Made by `harmonaize topology import lldp`, of files of {} and {}.",
        number_of(hosts.len(), "host", "hosts"),
        number_of(switches.len(), "switch", "switches")
    ));
    draft.note("Hosts are named as their files: an agent's `host` must be that name.");
    draft.note("? Switches have no `addresses`: where several routes lead to a host, add them.");
    let mut files = Vec::new();
    let mut seen: BTreeMap<String, String> = BTreeMap::new();
    let all = hosts.iter().map(|source| (source, Kind::Host));
    for (source, kind) in all.chain(switches.iter().map(|source| (source, Kind::Switch))) {
        let name = owner(source)?;
        if let Some(other) = seen.insert(name.clone(), source.name()) {
            let what = Problem::FileTwice(other);
            return Err(ImportError::Line { file: source.name(), line: 1, what });
        }
        draft.add(&name, kind, None);
        files.push((name, kind, source, neighbours(source)?));
    }
    for (name, kind, source, neighbours) in &files {
        if neighbours.is_empty() {
            draft.note(format!("? {}: no neighbour", source.name()));
        }
        for neighbour in neighbours {
            join(&mut draft, name, *kind, neighbour);
        }
    }
    Ok(draft)
}

/// Whose output a file is, by the file's name.
fn owner(source: &Source) -> Result<String, ImportError> {
    let stem = source.path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let name = usable(stem.strip_suffix(".lldp").unwrap_or(&stem));
    if name.is_empty() {
        return Err(ImportError::Line { file: source.name(), line: 1, what: Problem::FileName });
    }
    Ok(name)
}

fn join(draft: &mut Draft, name: &str, kind: Kind, neighbour: &Neighbour) {
    // A host may report its full domain name, and its file have the short one.
    let short = neighbour.name.split('.').next().unwrap_or_default();
    let other = match draft.kind(short) {
        Some(_) => short,
        None => &neighbour.name,
    };
    if other == name {
        draft.note(format!("? {name}: interface {} sees {name} itself, left out", neighbour.interface));
        return;
    }
    match (kind, draft.kind(other)) {
        (Kind::Host, Some(Kind::Host)) => {
            let interface = &neighbour.interface;
            draft.note(format!("? {name}: interface {interface} sees host {other}, left out"));
            return;
        }
        (_, Some(_)) => {}
        (Kind::Host, None) => {
            let doubt = neighbour.unnamed.then(|| "it reports no name".to_owned());
            draft.add(other, Kind::Switch, doubt);
        }
        (Kind::Switch, None) if neighbour.forwards => {
            draft.add(other, Kind::Switch, Some(format!("no file of it; {name} sees that it forwards")));
        }
        (Kind::Switch, None) => {
            let interface = &neighbour.interface;
            draft.note(format!(
                "? {name}: interface {interface} sees {other}, of which there is no file, left out"
            ));
            return;
        }
    }
    draft.cable(name, other, neighbour.rate);
}

fn neighbours(source: &Source) -> Result<Vec<Neighbour>, ImportError> {
    let (file, value) = (source.name(), parse_json(source)?);
    let root = At::root(&file, &value);
    let Some(lldp) = root.get("lldp") else {
        return Err(root.wrong(Problem::NoLldp));
    };
    let mut found = Vec::new();
    for part in lldp.elements() {
        let Some(interfaces) = part.get("interface") else { continue };
        for element in interfaces.elements() {
            // json0 has the interface's name as a value, json has it as the key.
            if let Some(name) = element.get("name").filter(|_| element.get("chassis").is_some()) {
                found.push(neighbour(name.name()?, &element)?);
                continue;
            }
            for (name, interface) in element.entries()? {
                found.push(neighbour(name, &interface)?);
            }
        }
    }
    Ok(found)
}

fn neighbour(interface: String, at: &At<'_>) -> Result<Neighbour, ImportError> {
    let chassis = at.get("chassis").and_then(|chassis| chassis.first());
    let Some(chassis) = chassis else {
        return Err(at.wrong(Problem::Missing("chassis")));
    };
    // json has a chassis that reports a name beneath that name.
    let (name, chassis) = match (chassis.get("name"), chassis.get("id")) {
        (None, None) => match chassis.entries()?.into_iter().next() {
            Some((name, beneath)) => (Some(name), beneath),
            None => return Err(chassis.wrong(Problem::NoNeighbourName)),
        },
        (name, _) => (name.and_then(|name| name.text()), chassis),
    };
    let unnamed = name.is_none();
    let id = || chassis.get("id").and_then(|id| id.text());
    let name = usable(&match name {
        Some(name) => name,
        None => format!("chassis-{}", id().ok_or_else(|| chassis.wrong(Problem::NoNeighbourName))?),
    });
    if name.is_empty() {
        return Err(chassis.wrong(Problem::NeighbourName));
    }
    let capabilities = chassis.get("capability").map(|list| list.elements()).unwrap_or_default();
    let forwards = capabilities.iter().any(|capability| {
        let kind = capability.get("type").and_then(|kind| kind.text()).unwrap_or_default();
        matches!(kind.as_str(), "Bridge" | "Router")
            && capability.get("enabled").is_some_and(|on| on.is_true())
    });
    let port = at.get("port").and_then(|port| port.first());
    let current = port.and_then(|port| port.get("auto-negotiation")?.first()?.get("current")?.text());
    Ok(Neighbour { interface, name, unnamed, forwards, rate: current.and_then(|text| medium_rate(&text)) })
}

/// The rate of a medium's name of 802.3, such as "100GbaseCR4" or "10GigBaseSR" or "1000BaseTFD".
fn medium_rate(medium: &str) -> Option<Rate> {
    let digits: String = medium.chars().take_while(char::is_ascii_digit).collect();
    let rest = medium.get(digits.len()..)?.to_ascii_lowercase();
    let unit = match () {
        () if rest.starts_with("gigbase") || rest.starts_with("gbase") => 1_000_000_000,
        () if rest.starts_with("base") => 1_000_000,
        () => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(unit).filter(|rate| *rate > 0).map(Rate)
}
