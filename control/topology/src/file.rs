//! Topology files: text in, a checked topology or the first thing that is wrong out.

use super::MAX_NODES;
use super::{Aggregator, Host, HostId, Link, Node, Switch, SwitchId, SwitchKind, Topology, TopologyError};
use core::net::IpAddr;
use harmonaize_units::{Lines, Nanos, Position, Rate, parse_toml};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use toml::Spanned;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    host: Vec<FileHost>,
    #[serde(default)]
    switch: Vec<FileSwitch>,
    #[serde(default)]
    link: Vec<FileLink>,
    #[serde(default)]
    aggregator: Vec<FileAggregator>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileHost {
    name: Spanned<String>,
    rack: Option<String>,
    kind: Option<Spanned<String>>,
    #[serde(default)]
    addresses: Vec<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileSwitch {
    name: Spanned<String>,
    #[serde(default)]
    kind: SwitchKind,
    #[serde(default)]
    addresses: Vec<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileLink {
    from: Spanned<String>,
    to: Spanned<String>,
    rate: Spanned<Rate>,
    #[serde(default)]
    delay: Nanos,
    #[serde(default)]
    risk: Vec<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileAggregator {
    name: Spanned<String>,
    switch: Spanned<String>,
    rate: Spanned<Rate>,
    #[serde(default)]
    delay: Nanos,
    #[serde(default)]
    addresses: Vec<Spanned<String>>,
}

/// What is known while a file is read.
struct Reader<'a> {
    lines: Lines<'a>,
    names: HashMap<String, (Node, usize)>,
    addresses: BTreeMap<IpAddr, SwitchId>,
}

/// Whether a text can name a node or a kind.
fn is_usable(text: &str) -> bool {
    let usual = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    text.len() <= 63 && text.chars().all(usual) && text.starts_with(|c: char| c.is_ascii_alphanumeric())
}

impl Reader<'_> {
    fn at<T>(&self, value: &Spanned<T>) -> Position {
        self.lines.position(value.span().start)
    }

    fn name(&mut self, name: &Spanned<String>, node: Node) -> Result<String, TopologyError> {
        let (at, text) = (self.at(name), name.get_ref().clone());
        if !is_usable(&text) {
            return Err(TopologyError::BadName { at, name: text.chars().take(80).collect() });
        }
        if let Some((_, first)) = self.names.insert(text.clone(), (node, at.line)) {
            return Err(TopologyError::DuplicateName { at, name: text, first });
        }
        Ok(text)
    }

    /// The kind of a host's accelerators.
    fn kind(&self, host: &FileHost) -> Result<Option<String>, TopologyError> {
        match &host.kind {
            Some(kind) if !is_usable(kind.get_ref()) => {
                let name = kind.get_ref().chars().take(80).collect();
                Err(TopologyError::BadKind { at: self.at(kind), name })
            }
            kind => Ok(kind.as_ref().map(|kind| kind.get_ref().clone())),
        }
    }

    /// The addresses of a host or an aggregator; both may be on one machine.
    fn addresses(&self, texts: &[Spanned<String>]) -> Result<Vec<IpAddr>, TopologyError> {
        texts.iter().map(|text| self.address(text)).collect()
    }

    fn address(&self, text: &Spanned<String>) -> Result<IpAddr, TopologyError> {
        let address: Option<IpAddr> = text.get_ref().parse().ok();
        address.filter(|address| !address.is_unspecified() && !address.is_multicast()).ok_or_else(|| {
            TopologyError::BadAddress { at: self.at(text), text: text.get_ref().chars().take(80).collect() }
        })
    }

    /// The addresses of a switch, which no other has.
    fn switch_addresses(
        &mut self,
        switch: &FileSwitch,
        id: SwitchId,
        before: &[Switch],
    ) -> Result<Vec<IpAddr>, TopologyError> {
        let mut addresses = Vec::with_capacity(switch.addresses.len());
        for text in &switch.addresses {
            let address = self.address(text)?;
            if let Some(other) = self.addresses.insert(address, id) {
                let other = before.get(other.0).map_or(switch.name.get_ref(), |other| &other.name).clone();
                return Err(TopologyError::DuplicateAddress { at: self.at(text), address, other });
            }
            addresses.push(address);
        }
        Ok(addresses)
    }

    fn risk(&self, link: &FileLink) -> Result<BTreeSet<String>, TopologyError> {
        if let Some(bad) = link.risk.iter().find(|risk| !(1..=63).contains(&risk.get_ref().chars().count())) {
            return Err(TopologyError::BadRisk { at: self.at(bad) });
        }
        Ok(link.risk.iter().map(|risk| risk.get_ref().clone()).collect())
    }

    fn end(&self, name: &Spanned<String>) -> Result<Node, TopologyError> {
        let known = self.names.get(name.get_ref()).map(|(node, _)| *node);
        known.ok_or_else(|| TopologyError::UnknownNode { at: self.at(name), name: name.get_ref().clone() })
    }

    fn aggregator(&mut self, aggregator: &FileAggregator) -> Result<Aggregator, TopologyError> {
        let switch = self.names.get(aggregator.switch.get_ref()).map(|(node, _)| *node);
        let Some(Node::Switch(switch)) = switch else {
            let name = aggregator.switch.get_ref().chars().take(80).collect();
            return Err(TopologyError::NoSwitch { at: self.at(&aggregator.switch), name });
        };
        if *aggregator.rate.get_ref() == Rate(0) {
            return Err(TopologyError::ZeroRate { at: self.at(&aggregator.rate) });
        }
        let name = self.name(&aggregator.name, Node::Switch(switch))?;
        let addresses = self.addresses(&aggregator.addresses)?;
        Ok(Aggregator { name, switch, rate: *aggregator.rate.get_ref(), delay: aggregator.delay, addresses })
    }

    fn link(
        &self,
        link: &FileLink,
        joined: &mut HashMap<(Node, Node), usize>,
    ) -> Result<Link, TopologyError> {
        let (from, to) = (self.end(&link.from)?, self.end(&link.to)?);
        let at = self.at(&link.from);
        if from == to {
            return Err(TopologyError::Loop { at, name: link.from.get_ref().clone() });
        }
        if *link.rate.get_ref() == Rate(0) {
            return Err(TopologyError::ZeroRate { at: self.at(&link.rate) });
        }
        if let Some(first) = joined.insert((from.min(to), from.max(to)), at.line) {
            let (from, to) = (link.from.get_ref().clone(), link.to.get_ref().clone());
            return Err(TopologyError::DuplicateLink { at, from, to, first });
        }
        Ok(Link { from, to, rate: *link.rate.get_ref(), delay: link.delay, risk: self.risk(link)? })
    }
}

impl Topology {
    /// Reads a topology file. The operator's guide shows one with all keys.
    ///
    /// # Errors
    /// The first thing that is wrong, with its line.
    pub fn parse(text: &str) -> Result<Self, TopologyError> {
        let file: File = parse_toml(text)?;
        if file.host.is_empty() {
            return Err(TopologyError::NoHosts);
        }
        let counts = [
            (file.host.len(), "hosts"),
            (file.switch.len(), "switches"),
            (file.aggregator.len(), "aggregators"),
        ];
        for (count, what) in counts {
            if count > MAX_NODES {
                return Err(TopologyError::TooMany(what));
            }
        }
        let mut reader =
            Reader { lines: Lines::new(text), names: HashMap::new(), addresses: BTreeMap::new() };
        let mut hosts = Vec::with_capacity(file.host.len());
        for (index, host) in file.host.iter().enumerate() {
            let name = reader.name(&host.name, Node::Host(HostId(index)))?;
            let (rack, kind) = (host.rack.clone(), reader.kind(host)?);
            hosts.push(Host { name, rack, kind, addresses: reader.addresses(&host.addresses)? });
        }
        let mut switches = Vec::with_capacity(file.switch.len());
        for (index, switch) in file.switch.iter().enumerate() {
            let name = reader.name(&switch.name, Node::Switch(SwitchId(index)))?;
            let addresses = reader.switch_addresses(switch, SwitchId(index), &switches)?;
            switches.push(Switch { name, kind: switch.kind, addresses });
        }
        let aggregators: Result<Vec<_>, _> =
            file.aggregator.iter().map(|aggregator| reader.aggregator(aggregator)).collect();
        let aggregators = aggregators?;
        // Links join hosts and switches alone.
        for aggregator in &aggregators {
            reader.names.remove(&aggregator.name);
        }
        let mut joined = HashMap::new();
        let links: Result<Vec<_>, _> = file.link.iter().map(|link| reader.link(link, &mut joined)).collect();
        let by_name = reader.names.iter().map(|(name, (node, _))| (name.clone(), *node)).collect();
        let topology = Self::wire(hosts, switches, links?, aggregators, by_name, reader.addresses.clone());
        if let Some((host, other)) = topology.disconnected() {
            let at =
                file.host.get(host.0).map_or(Position { line: 1, column: 1 }, |host| reader.at(&host.name));
            let name = |id: HostId| topology.node_name(Node::Host(id)).to_owned();
            return Err(TopologyError::Disconnected { at, host: name(host), other: name(other) });
        }
        Ok(topology)
    }
}
