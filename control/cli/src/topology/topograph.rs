//! NVIDIA topograph's files: models (switches, nodes, capacity blocks), and instances with their layers of switches.

use super::Source;
use super::draft::{Draft, ImportError, Kind, usable};
use super::json::{At, parse_yaml};
use super::problem::{MAX_RANGE, Problem};
use std::collections::BTreeMap;

/// A tree: each node's parent, and the racks of hosts.
#[derive(Default)]
struct Tree {
    parents: BTreeMap<String, String>,
    hosts: BTreeMap<String, Option<String>>,
}

impl Tree {
    fn hang(&mut self, child: &str, parent: &str, at: &At<'_>) -> Result<(), ImportError> {
        match self.parents.insert(child.to_owned(), parent.to_owned()) {
            Some(other) if other != parent => {
                let (child, parent) = (child.to_owned(), parent.to_owned());
                Err(at.wrong(Problem::TwoParents { child, other, parent }))
            }
            _ => Ok(()),
        }
    }
}

/// Reads models and instances.
///
/// # Errors
/// What is neither, with line or path.
pub(super) fn read(sources: &[Source]) -> Result<Draft, ImportError> {
    let mut tree = Tree::default();
    for source in sources {
        let (file, value) = (source.name(), parse_yaml(source)?);
        let root = At::root(&file, &value);
        match (root.get("instances"), root.get("switches")) {
            (Some(instances), _) => read_instances(&mut tree, &instances)?,
            (None, Some(switches)) => read_model(&mut tree, &root, &switches)?,
            (None, None) => return Err(root.wrong(Problem::NoSwitches)),
        }
    }
    Ok(draft(&tree))
}

/// What the engine `graph` writes: each instance with its switches from the leaf up.
fn read_instances(tree: &mut Tree, instances: &At<'_>) -> Result<(), ImportError> {
    for instance in instances.elements() {
        let id = instance.get("id").ok_or_else(|| instance.wrong(Problem::Missing("id")))?;
        let mut below = name(&id)?;
        let rack = instance.get("attributes").and_then(|attributes| attributes.get("nvlink")?.text());
        tree.hosts.insert(below.clone(), rack);
        let layers = instance.get("network_layers").map(|layers| layers.elements()).unwrap_or_default();
        for layer in layers {
            let switch = name(&layer)?;
            tree.hang(&below, &switch, &layer)?;
            below = switch;
        }
    }
    Ok(())
}

/// A model: switches with their children; nodes by themselves, or in capacity blocks.
fn read_model(tree: &mut Tree, root: &At<'_>, switches: &At<'_>) -> Result<(), ImportError> {
    let nvlink = |at: &At<'_>| match at.get("attributes") {
        Some(attributes) => attributes.get("nvlink")?.text(),
        None => at.get("nvlink")?.text(),
    };
    let mut blocks: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (block, at) in root.get("capacity_blocks").map(|at| at.named()).transpose()?.unwrap_or_default() {
        let nodes = ranges(at.get("nodes"))?;
        for node in &nodes {
            tree.hosts.insert(node.clone(), nvlink(&at));
        }
        blocks.insert(block, nodes);
    }
    for (node, at) in root.get("nodes").map(|at| at.named()).transpose()?.unwrap_or_default() {
        let node = usable(&node);
        let rack = nvlink(&at).or_else(|| tree.hosts.get(&node).cloned().flatten());
        tree.hosts.insert(node, rack);
    }
    for (switch, at) in switches.named()? {
        let switch = usable(&switch);
        let beneath = at.get("switches").map(|list| list.elements()).unwrap_or_default();
        for child in beneath {
            tree.hang(&name(&child)?, &switch, &child)?;
        }
        let mut nodes = ranges(at.get("nodes"))?;
        for block in at.get("capacity_blocks").map(|list| list.elements()).unwrap_or_default() {
            let id = block.name()?;
            let Some(more) = blocks.get(&id) else {
                return Err(block.wrong(Problem::UnknownBlock(id)));
            };
            nodes.extend(more.iter().cloned());
        }
        for node in nodes {
            if !tree.hosts.contains_key(&node) {
                return Err(at.wrong(Problem::UnknownNode(node)));
            }
            tree.hang(&node, &switch, &at)?;
        }
    }
    Ok(())
}

fn name(at: &At<'_>) -> Result<String, ImportError> {
    let name = usable(&at.name()?);
    if name.is_empty() { Err(at.wrong(Problem::UnusableName)) } else { Ok(name) }
}

/// Names, of which "n[1-4]" stands for four, and "gpu[001-004]" for four of three digits.
fn ranges(list: Option<At<'_>>) -> Result<Vec<String>, ImportError> {
    let mut names = Vec::new();
    for at in list.map(|list| list.elements()).unwrap_or_default() {
        let text = at.name()?;
        let Some((stem, inner)) = text.split_once('[') else {
            names.push(name(&at)?);
            continue;
        };
        let inner = inner.strip_suffix(']').ok_or_else(|| at.wrong(Problem::OpenRange))?;
        for part in inner.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (Ok(low), Ok(high)) = (first.parse::<u64>(), last.parse::<u64>()) else {
                return Err(at.wrong(Problem::NoRange(part.to_owned())));
            };
            if high < low || high - low >= MAX_RANGE {
                return Err(at.wrong(Problem::LargeRange(part.to_owned())));
            }
            let width = first.len();
            names.extend((low..=high).map(|number| usable(&format!("{stem}{number:0width$}"))));
        }
    }
    Ok(names)
}

fn draft(tree: &Tree) -> Draft {
    let mut draft = Draft::new("Made by `harmonaize topology import topograph`.");
    draft.note("Hosts are named as topograph's nodes: an agent's `host` must be that name.");
    draft.note(
        "? Topograph has a tree without rates. Each host has one cable here, and each switch one for each",
    );
    draft.note("  host below it: no switch is oversubscribed. A layer of several switches is one here.");
    for host in tree.hosts.keys() {
        if tree.parents.contains_key(host) {
            draft.add(host, Kind::Host, None);
        } else {
            draft.note(format!("? {host}: it hangs on no switch, left out"));
        }
    }
    for (host, rack) in &tree.hosts {
        if let Some(rack) = rack {
            draft.rack(host, rack);
        }
        let mut below = host;
        // A circle of switches ends here; the parser finds what it disconnects.
        for _ in 0..16 {
            let Some(parent) = tree.parents.get(below) else { break };
            draft.add(parent, Kind::Switch, None);
            draft.cable(below, parent, None);
            below = parent;
        }
    }
    draft
}
