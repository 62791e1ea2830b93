//! A topology while it is put together, and the file that it becomes.

use super::problem::Problem;
use harmonaize_planner::{Nanos, Rate, Topology, TopologyError};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::net::IpAddr;

/// Why an input makes no topology.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ImportError {
    /// A file that cannot be read.
    #[error("{file}: {why}")]
    Read {
        /// The file.
        file: String,
        /// Why not.
        why: std::io::Error,
    },
    /// A line that says nothing of the format.
    #[error("{file}: line {line}: {what}")]
    Line {
        /// The file.
        file: String,
        /// Counted from 1.
        line: usize,
        /// What is wrong.
        what: Problem,
    },
    /// A text that is not of the format.
    #[error("{file}: line {line}, column {column}: {what}")]
    Text {
        /// The file.
        file: String,
        /// Counted from 1.
        line: u64,
        /// Counted from 1.
        column: u64,
        /// What is wrong.
        what: Problem,
    },
    /// A value that is missing, or is another than the format has.
    #[error("{file}: {path}: {what}")]
    Input {
        /// The file.
        file: String,
        /// The keys to the value.
        path: String,
        /// What is wrong.
        what: Problem,
    },
    /// A node that is to be left out, and is not there.
    #[error("--without {0}: there is no such node; nodes are {1}")]
    Unknown(String, String),
    /// Several racks, which nothing joins.
    #[error("{racks} racks need a spine at least")]
    NoSpine {
        /// How many.
        racks: u16,
    },
    /// More hosts than a topology may have.
    #[error("{racks} racks of {hosts} hosts are more than 16384 hosts")]
    ManyHosts {
        /// Racks.
        racks: u16,
        /// Hosts of each.
        hosts: u16,
    },
    /// No route was traced in the fabric.
    #[error(
        "no agent has traced a route yet: that takes two of them, `source_ports` in control's configuration, \
         and what agents' logs say that they lack"
    )]
    NoTraces,
    /// The file that came out is no topology.
    #[error("what was read makes no topology: {error}; it would be:\n{file}")]
    Topology {
        /// What is wrong with it.
        error: TopologyError,
        /// What it would be.
        file: String,
    },
}

/// What a node is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Host,
    Switch,
}

struct DraftNode {
    kind: Kind,
    rack: Option<String>,
    /// The kind of a host's accelerators.
    accelerators: Option<String>,
    /// Where a switch answers from when a packet's time to live has run out.
    addresses: Vec<IpAddr>,
    /// What is unsure about it.
    doubt: Option<String>,
}

/// The cables between two nodes as each end reports them: the rates that the ends know.
#[derive(Default)]
struct Cables {
    forward: Vec<Option<Rate>>,
    backward: Vec<Option<Rate>>,
    /// What is unsure about them beside their rates.
    doubt: Option<String>,
}

/// Nodes by name, and the cables between them.
pub(super) struct Draft {
    /// What made it, for the file's first line.
    origin: String,
    notes: Vec<String>,
    nodes: BTreeMap<String, DraftNode>,
    cables: BTreeMap<(String, String), Cables>,
    assumed: Rate,
    delay: Option<Nanos>,
}

impl Draft {
    pub(super) fn new(origin: impl Into<String>) -> Self {
        Self {
            origin: origin.into(),
            notes: Vec::new(),
            nodes: BTreeMap::new(),
            cables: BTreeMap::new(),
            assumed: Rate(100_000_000_000),
            delay: None,
        }
    }

    /// Takes a rate for cables whose own is not known.
    pub(super) const fn assuming(mut self, rate: Rate) -> Self {
        self.assumed = rate;
        self
    }

    /// Takes a delay for all links.
    pub(super) const fn with_delay(mut self, delay: Nanos) -> Self {
        self.delay = Some(delay);
        self
    }

    /// Adds a remark for the file's head.
    pub(super) fn note(&mut self, text: impl Into<String>) {
        self.notes.push(text.into());
    }

    /// Adds a node; one that is there already stays as it is.
    pub(super) fn add(&mut self, name: &str, kind: Kind, doubt: Option<String>) {
        let node = DraftNode { kind, rack: None, accelerators: None, addresses: Vec::new(), doubt };
        self.nodes.entry(name.to_owned()).or_insert(node);
    }

    /// What a node is, if it is there.
    pub(super) fn kind(&self, name: &str) -> Option<Kind> {
        self.nodes.get(name).map(|node| node.kind)
    }

    /// Sets a node's rack.
    pub(super) fn rack(&mut self, name: &str, rack: &str) {
        if let Some(node) = self.nodes.get_mut(name) {
            node.rack = Some(rack.to_owned());
        }
    }

    /// Sets the kind of a host's accelerators.
    pub(super) fn accelerators(&mut self, name: &str, kind: &str) {
        if let Some(node) = self.nodes.get_mut(name) {
            node.accelerators = Some(kind.to_owned());
        }
    }

    /// Sets a switch's addresses.
    pub(super) fn addresses(&mut self, name: &str, addresses: Vec<IpAddr>) {
        if let Some(node) = self.nodes.get_mut(name) {
            node.addresses = addresses;
        }
    }

    /// Adds a cable that `from` reports. One that both ends report is added at both.
    pub(super) fn cable(&mut self, from: &str, to: &str, rate: Option<Rate>) {
        let forward = from <= to;
        let cables = self.cables_of(from, to);
        if forward { cables.forward.push(rate) } else { cables.backward.push(rate) }
    }

    /// Marks the cables between two nodes as unsure.
    pub(super) fn doubt_cables(&mut self, from: &str, to: &str, doubt: &str) {
        self.cables_of(from, to).doubt = Some(doubt.to_owned());
    }

    fn cables_of(&mut self, from: &str, to: &str) -> &mut Cables {
        let (low, high) = if from <= to { (from, to) } else { (to, from) };
        self.cables.entry((low.to_owned(), high.to_owned())).or_default()
    }

    /// Leaves nodes out, with their cables.
    ///
    /// # Errors
    /// A name of no node.
    pub(super) fn without(mut self, names: &[String]) -> Result<Self, ImportError> {
        for name in names {
            if self.nodes.remove(name).is_none() {
                let all: Vec<&str> = self.nodes.keys().map(String::as_str).take(32).collect();
                return Err(ImportError::Unknown(name.clone(), all.join(", ")));
            }
            self.cables.retain(|(low, high), _| low != name && high != name);
        }
        Ok(self)
    }

    /// The hosts' switches are leaves, their neighbours spines, and others cores.
    fn kinds(&self) -> BTreeMap<&str, &'static str> {
        let ends = |wanted: &dyn Fn(&str) -> bool| -> BTreeSet<&str> {
            let pairs = self.cables.keys().flat_map(|(low, high)| [(low, high), (high, low)]);
            pairs.filter(|(from, _)| wanted(from)).map(|(_, to)| to.as_str()).collect()
        };
        let leaves = ends(&|name| self.kind(name) == Some(Kind::Host));
        let spines = ends(&|name| leaves.contains(name));
        let switches = self.nodes.iter().filter(|(_, node)| node.kind == Kind::Switch);
        let kind = |name: &str| match (leaves.contains(name), spines.contains(name)) {
            (true, _) => "leaf",
            (_, true) => "spine",
            _ => "core",
        };
        switches.map(|(name, _)| (name.as_str(), kind(name))).collect()
    }

    fn text(&self) -> String {
        let mut text = format!("# {}\n", self.origin);
        for note in &self.notes {
            let _ = writeln!(text, "# {note}");
        }
        text += "# `# ?` marks what is unsure.\n\nhost = [\n";
        let mut names: Vec<(&String, &DraftNode)> = self.nodes.iter().collect();
        names.sort_by_key(|(name, _)| natural(name));
        for (name, node) in names.iter().filter(|(_, node)| node.kind == Kind::Host) {
            let rack = node.rack.as_ref().map(|rack| format!(", rack = {}", quoted(rack)));
            let kind = node.accelerators.as_ref().map(|kind| format!(", kind = {}", quoted(kind)));
            let _ = writeln!(
                text,
                "  {{ name = {}{}{} }},{}",
                quoted(name),
                rack.unwrap_or_default(),
                kind.unwrap_or_default(),
                mark(node.doubt.as_deref())
            );
        }
        text += "]\nswitch = [\n";
        let kinds = self.kinds();
        for (name, node) in names.iter().filter(|(_, node)| node.kind == Kind::Switch) {
            let kind = kinds.get(name.as_str()).copied().unwrap_or("leaf");
            let addresses: Vec<String> =
                node.addresses.iter().map(|address| quoted(&address.to_string())).collect();
            let addresses = match addresses.as_slice() {
                [] => String::new(),
                addresses => format!(", addresses = [{}]", addresses.join(", ")),
            };
            let _ = writeln!(
                text,
                "  {{ name = {}, kind = \"{kind}\"{addresses} }},{}",
                quoted(name),
                mark(node.doubt.as_deref())
            );
        }
        text += "]\nlink = [\n";
        // A host stands before its switch, and a leaf before its spine.
        let level = |name: &str| match kinds.get(name) {
            None => 0,
            Some(&"leaf") => 1,
            Some(&"spine") => 2,
            Some(_) => 3,
        };
        let mut lines = Vec::new();
        for ((low, high), cables) in &self.cables {
            let (from, to) = if level(low) <= level(high) { (low, high) } else { (high, low) };
            let key = (level(from), natural(from), natural(to));
            lines.push((key, self.link(from, to, cables)));
        }
        lines.sort_by(|a, b| a.0.cmp(&b.0));
        text.extend(lines.into_iter().map(|(_, line)| line));
        text + "]\n"
    }

    fn link(&self, from: &str, to: &str, cables: &Cables) -> String {
        let longer = cables.forward.len() >= cables.backward.len();
        let rates = if longer { &cables.forward } else { &cables.backward };
        let sum = rates.iter().fold(0_u64, |sum, rate| sum.saturating_add(rate.unwrap_or(self.assumed).0));
        let unknown = rates.iter().filter(|rate| rate.is_none()).count();
        let mut doubts: Vec<String> = cables.doubt.iter().cloned().collect();
        match (unknown, rates.len()) {
            (0, _) => {}
            (1, 1) => doubts.push("rate assumed".to_owned()),
            (unknown, count) if unknown == count => doubts.push(format!("rates of {count} cables assumed")),
            (unknown, count) => doubts.push(format!("rates of {unknown} of {count} cables assumed")),
        }
        if cables.forward.len() != cables.backward.len()
            && !cables.forward.is_empty()
            && !cables.backward.is_empty()
        {
            doubts.push("the two ends report different numbers of cables".to_owned());
        }
        let comment = match (doubts.is_empty(), rates.len()) {
            (true, 0..=1) => String::new(),
            (true, count) => format!(" # {count} cables"),
            (false, _) => format!(" # ? {}", doubts.join("; ")),
        };
        let delay = self.delay.map(|delay| format!(", delay = \"{delay}\"")).unwrap_or_default();
        let (from, to) = (quoted(from), quoted(to));
        format!("  {{ from = {from}, to = {to}, rate = \"{}\"{delay} }},{comment}\n", Rate(sum))
    }

    /// The file, once the parser of topologies has taken it.
    ///
    /// # Errors
    /// What the parser finds.
    pub(super) fn file(&self) -> Result<String, ImportError> {
        let file = self.text();
        match Topology::parse(&file) {
            Ok(_) => Ok(file),
            Err(error) => {
                let head: Vec<&str> = file.lines().take(200).collect();
                Err(ImportError::Topology { error, file: head.join("\n") })
            }
        }
    }
}

fn mark(doubt: Option<&str>) -> String {
    // A comment ends with its line, whatever a file's text has.
    let clean = |text: &str| text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect::<String>();
    doubt.map(|doubt| format!(" # ? {}", clean(doubt))).unwrap_or_default()
}

fn quoted(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

/// A name that topologies take: what others have beside letters, digits, `.`, `_` and `-` becomes `-`.
pub(super) fn usable(name: &str) -> String {
    let usual = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-') { c } else { '-' };
    let name: String = name.trim().chars().map(usual).collect();
    name.trim_matches(['.', '_', '-']).chars().take(63).collect()
}

/// A key that sorts h2 before h10.
fn natural(name: &str) -> Vec<(u64, String)> {
    let mut parts = Vec::new();
    let mut rest = name;
    while !rest.is_empty() {
        let word: String = rest.chars().take_while(|c| !c.is_ascii_digit()).collect();
        rest = rest.get(word.len()..).unwrap_or_default();
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        rest = rest.get(digits.len()..).unwrap_or_default();
        parts.push((0, word));
        parts.push((digits.parse().unwrap_or(u64::MAX), digits));
    }
    parts
}
