//! A topology of the routes that agents traced.
//!
//! A trace shows an address for each switch, and a switch may answer from a different one for each of its ports. Addresses of one
//! switch are those that control's topology has together. Others are taken together where the routes suggest it and none of
//! them speaks against it, and the file says so.

use super::draft::{Draft, ImportError, Kind, usable};
use super::refused;
use crate::Failure;
use crate::control::ControlArguments;
use crate::operate::Operate;
use crate::text::number_of;
use harmonaize_api::v1;
use harmonaize_planner::Rate;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

/// Examples of `topology discover`.
pub(super) const HELP: &str = "\
Examples:
  harmonaize topology discover                what agents' traces show, as a topology file
  harmonaize topology discover --out fabric.toml --rate 400Gbit/s

What is unsure is marked by `# ?` in the file, with the hosts that traced nothing. Control's topology may be a mere list of hosts, all on
one switch without addresses: agents trace whole routes within a minute of their start. Control takes the file when it is started again.";

/// Why addresses are one switch's, by the numbers of ports.
const CABLES: &str = "its addresses are guessed together: the two ends of a cable have neighbouring ones";
/// Why addresses are one switch's, by the hosts next to them.
const LAST_HOPS: &str = "its addresses are guessed together: they answer next to the same host";
/// Why a switch may be none.
const ONE_SIDE: &str = "entered from one side alone; it may be a port of another switch";
/// Why a host's link is unsure.
const TO_HOST: &str = "the host traced nothing; this is the last hop of routes to it";
/// Why a link beside a hop that did not answer is unsure.
const BESIDE_SILENCE: &str = "one end did not answer, and is taken for the host's switch";
/// What stands for switches that no route shows.
const UNSEEN: &str = "stands for all that no route shows";

/// What is to be made of the traces.
#[derive(clap::Args)]
pub(crate) struct Discover {
    /// Where the file goes; it is printed where this is left out.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// The rate of a link that control's topology does not have.
    #[arg(long, value_name = "RATE", default_value = "100Gbit/s")]
    rate: Rate,
}

impl Discover {
    pub(crate) async fn run(self, control: &ControlArguments) -> Result<String, Failure> {
        let (fabric, traced) = Operate::connect(control).await?.traced_paths().await?;
        let file = draft(&fabric, &traced).and_then(|draft| draft.assuming(self.rate).file());
        let file = file.map_err(refused)?;
        let Some(out) = self.out else { return Ok(file) };
        harmonaize_identity::write_file(&out, file.as_bytes(), 0o644)
            .map_err(|error| Failure::Refused(error.to_string()))?;
        let unsure = file.lines().filter(|line| line.contains("# ? ")).count();
        Ok(format!("{}: {} marked as unsure\n", out.display(), number_of(unsure, "line", "lines")))
    }
}

/// A route from one host to another: who answered at each time to live.
struct Trace<'a> {
    from: &'a str,
    to: &'a str,
    hops: Vec<Option<IpAddr>>,
}

/// A topology of traces between a fabric's hosts.
///
/// # Errors
/// No trace at all.
pub(super) fn draft(fabric: &v1::TopologyReply, traced: &v1::TracedPathsReply) -> Result<Draft, ImportError> {
    let traces = traces(fabric, traced);
    if traces.is_empty() {
        return Err(ImportError::NoTraces);
    }
    let hosts: BTreeSet<&str> = traces.iter().map(|trace| trace.from).collect();
    let mut draft = Draft::new(format!(
        "Made by `harmonaize topology discover`, of {} of {}.",
        number_of(traces.len(), "route", "routes"),
        number_of(hosts.len(), "host", "hosts")
    ));
    let mut switches = Switches::new(fabric, &traces);
    switches.guess(&traces);
    let shown = Shown::new(fabric, &traces, &switches);
    shown.note(&mut draft, fabric, &traces);
    let links = shown.links(&traces);
    shown.add_nodes(&mut draft, fabric, &traces);
    shown.add_links(&mut draft, fabric, &links);
    Ok(draft)
}

/// The traces that show something, between hosts of the fabric.
fn traces<'a>(fabric: &v1::TopologyReply, traced: &'a v1::TracedPathsReply) -> Vec<Trace<'a>> {
    let hosts: BTreeSet<&str> = fabric.hosts.iter().map(|host| host.name.as_str()).collect();
    // No switch has an address that the file could not have.
    let usual = |hop: &IpAddr| !hop.is_unspecified() && !hop.is_multicast();
    let traces = traced.paths.iter().map(|path| Trace {
        from: &path.from,
        to: &path.to,
        hops: path.hops.iter().map(|hop| hop.parse::<IpAddr>().ok().filter(usual)).collect(),
    });
    traces
        .filter(|trace| hosts.contains(trace.from) && hosts.contains(trace.to))
        .filter(|trace| trace.from != trace.to && trace.hops.iter().any(Option::is_some))
        .collect()
}

/// Neighbours on routes, both of which answered.
fn neighbours(traces: &[Trace<'_>]) -> impl Iterator<Item = (IpAddr, IpAddr)> {
    traces.iter().flat_map(|trace| {
        trace.hops.windows(2).filter_map(|pair| match pair {
            [Some(before), Some(after)] => Some((*before, *after)),
            _ => None,
        })
    })
}

/// By host: the addresses that answer next to it on routes from it.
fn first_hops<'a>(traces: &[Trace<'a>]) -> BTreeMap<&'a str, BTreeSet<IpAddr>> {
    let mut found: BTreeMap<&str, BTreeSet<IpAddr>> = BTreeMap::new();
    for trace in traces {
        if let [Some(first), ..] = trace.hops.as_slice() {
            found.entry(trace.from).or_default().insert(*first);
        }
    }
    found
}

/// A switch, as far as it is found.
#[derive(Default)]
struct Switch {
    /// As control's topology has it; none for one that it lacks, or has under the name that is given here.
    name: Option<String>,
    addresses: BTreeSet<IpAddr>,
    /// Why its addresses are taken together; none where that is sure.
    guess: Option<&'static str>,
}

/// The name of a switch that has none of the operator's.
fn made_name(lowest: &IpAddr) -> String {
    usable(&format!("switch-{lowest}"))
}

/// Which switch has which address.
#[derive(Default)]
struct Switches {
    all: Vec<Switch>,
    by_address: BTreeMap<IpAddr, usize>,
    /// Addresses on one route, the lower first: no route crosses a switch twice.
    apart: BTreeSet<(IpAddr, IpAddr)>,
}

impl Switches {
    /// The switches of control's topology, and one for each other address.
    fn new(fabric: &v1::TopologyReply, traces: &[Trace<'_>]) -> Self {
        let mut switches = Self::default();
        for switch in &fabric.switches {
            let addresses: BTreeSet<IpAddr> =
                switch.addresses.iter().filter_map(|address| address.parse().ok()).collect();
            // What an earlier file left apart may be one switch by now.
            let made = addresses.first().map(made_name);
            let name = Some(switch.name.clone()).filter(|_| made.as_ref() != Some(&switch.name));
            switches.push(Switch { name, addresses, guess: None });
        }
        let hops: BTreeSet<IpAddr> = traces.iter().flat_map(|trace| &trace.hops).flatten().copied().collect();
        for hop in hops {
            if !switches.by_address.contains_key(&hop) {
                switches.push(Switch { addresses: [hop].into(), ..Switch::default() });
            }
        }
        for trace in traces {
            let hops: BTreeSet<IpAddr> = trace.hops.iter().flatten().copied().collect();
            for one in &hops {
                switches.apart.extend(hops.range(*one..).skip(1).map(|other| (*one, *other)));
            }
        }
        switches
    }

    fn push(&mut self, switch: Switch) {
        let number = self.all.len();
        self.by_address.extend(switch.addresses.iter().map(|address| (*address, number)));
        self.all.push(switch);
    }

    fn are_apart(&self, one: IpAddr, other: IpAddr) -> bool {
        self.apart.contains(&(one.min(other), one.max(other)))
    }

    /// Takes addresses together that are likely to be one switch's.
    fn guess(&mut self, traces: &[Trace<'_>]) {
        let mut before: BTreeMap<IpAddr, BTreeSet<IpAddr>> = BTreeMap::new();
        for (one, next) in neighbours(traces) {
            before.entry(next).or_default().insert(one);
        }
        // A port of a cable is entered from the switch at its other end. An address that is entered from two switches is no port's,
        // and such a fabric's switches answer from one address each.
        let entered_from_two = |before: &BTreeSet<IpAddr>| {
            before.iter().any(|one| before.range(*one..).any(|other| self.are_apart(*one, *other)))
        };
        if before.values().any(entered_from_two) {
            return;
        }
        let by_host = first_hops(traces);
        let first: BTreeSet<IpAddr> = by_host.values().flatten().copied().collect();
        self.join_ends_of_cables(&before, &first);
        self.join_last_hops(traces, &by_host, &first);
    }

    /// A port's neighbour by number is the port at the cable's other end. So it is one of the switch from which the port is
    /// entered.
    fn join_ends_of_cables(&mut self, before: &BTreeMap<IpAddr, BTreeSet<IpAddr>>, first: &BTreeSet<IpAddr>) {
        // Pairs are of a /31, or of a /30, whose first and last address no port has.
        let mut ports = before.keys().filter_map(|port| match port {
            IpAddr::V4(port) => Some(port.to_bits()),
            IpAddr::V6(_) => None,
        });
        let flip = if ports.any(|port| matches!(port % 4, 0 | 3)) { 1 } else { 3 };
        for (port, entered) in before {
            let IpAddr::V4(address) = port else { continue };
            let other_end = IpAddr::V4(Ipv4Addr::from_bits(address.to_bits() ^ flip));
            // What hosts enter is no cable between switches.
            let by_hosts = [port, &other_end].into_iter().chain(entered).any(|one| first.contains(one));
            if !by_hosts && !entered.contains(&other_end) {
                entered.iter().for_each(|one| self.join(other_end, *one, CABLES));
            }
        }
    }

    /// The last hop of routes to a host is of the switch that is the first of its own.
    fn join_last_hops(
        &mut self,
        traces: &[Trace<'_>],
        by_host: &BTreeMap<&str, BTreeSet<IpAddr>>,
        first: &BTreeSet<IpAddr>,
    ) {
        let mut last: BTreeMap<&str, BTreeSet<IpAddr>> = BTreeMap::new();
        for trace in traces {
            if let [_, .., Some(hop)] = trace.hops.as_slice()
                && !first.contains(hop)
            {
                last.entry(trace.to).or_default().insert(*hop);
            }
        }
        for (host, hops) in &last {
            let own = by_host.get(host).unwrap_or(hops);
            let numbers: BTreeSet<Option<usize>> = own.iter().map(|hop| self.number(*hop)).collect();
            // A host on several switches has several first hops, and nothing says which is whose.
            if let Some(anchor) = own.first().filter(|_| !by_host.contains_key(host) || numbers.len() == 1) {
                hops.iter().for_each(|hop| self.join(*anchor, *hop, LAST_HOPS));
            }
        }
    }

    fn number(&self, address: IpAddr) -> Option<usize> {
        self.by_address.get(&address).copied()
    }

    /// Makes two addresses' switches one, unless a route or control's topology speaks against it.
    fn join(&mut self, one: IpAddr, other: IpAddr, why: &'static str) {
        let (Some(one), Some(other)) = (self.number(one), self.number(other)) else { return };
        let (Some(stays), Some(goes)) = (self.all.get(one), self.all.get(other)) else { return };
        let mut pairs =
            stays.addresses.iter().flat_map(|one| goes.addresses.iter().map(move |other| (*one, *other)));
        let both_named = stays.name.is_some() && goes.name.is_some();
        if one == other || both_named || pairs.any(|(one, other)| self.are_apart(one, other)) {
            return;
        }
        let Some(goes) = self.all.get_mut(other).map(std::mem::take) else { return };
        self.by_address.extend(goes.addresses.iter().map(|address| (*address, one)));
        if let Some(stays) = self.all.get_mut(one) {
            stays.name = stays.name.take().or(goes.name);
            stays.addresses.extend(goes.addresses);
            stays.guess = Some(why);
        }
    }
}

/// Links by their ends, the lower first, with what is unsure about each.
#[derive(Default)]
struct Links<'a>(BTreeMap<(&'a str, &'a str), Option<&'static str>>);

impl<'a> Links<'a> {
    fn add(&mut self, one: &'a str, other: &'a str, doubt: Option<&'static str>) {
        if one != other {
            let link = self.0.entry((one.min(other), one.max(other))).or_insert(doubt);
            // What one route shows is sure, whatever others leave open.
            *link = link.and(doubt);
        }
    }

    fn joins(&self, one: &str, other: &str) -> bool {
        self.0.contains_key(&(one.min(other), one.max(other)))
    }
}

/// Switches under the names that the file has for them, and what routes show of them.
struct Shown<'a> {
    switches: &'a Switches,
    /// By the switch's number; those that no route shows have none.
    names: BTreeMap<usize, String>,
    /// By host: the switches next to it on its own routes.
    homes: BTreeMap<&'a str, BTreeSet<usize>>,
    /// Hosts, in the order of control's topology.
    hosts: Vec<&'a str>,
    /// The name of what stands for switches that no route shows.
    unseen: String,
}

impl<'a> Shown<'a> {
    fn new(fabric: &'a v1::TopologyReply, traces: &[Trace<'a>], switches: &'a Switches) -> Self {
        let hosts: Vec<&str> = fabric.hosts.iter().map(|host| host.name.as_str()).collect();
        let mut taken: BTreeSet<String> = hosts.iter().map(|host| (*host).to_owned()).collect();
        let named = switches.all.iter().filter(|switch| !switch.addresses.is_empty());
        taken.extend(named.filter_map(|switch| switch.name.clone()));
        let mut unused = |mut name: String| {
            while !taken.insert(name.clone()) {
                name.push('x');
            }
            name
        };
        let unseen = unused("unseen".to_owned());
        let hops: BTreeSet<IpAddr> = traces.iter().flat_map(|trace| &trace.hops).flatten().copied().collect();
        let mut names = BTreeMap::new();
        for (number, switch) in switches.all.iter().enumerate() {
            let Some(lowest) = switch.addresses.first().filter(|_| !switch.addresses.is_disjoint(&hops))
            else {
                continue;
            };
            let made = || unused(made_name(lowest));
            names.insert(number, switch.name.clone().unwrap_or_else(made));
        }
        let homes = first_hops(traces)
            .into_iter()
            .map(|(host, hops)| (host, hops.iter().filter_map(|hop| switches.number(*hop)).collect()));
        Self { switches, names, homes: homes.collect(), hosts, unseen }
    }

    /// The switch that a host hangs on, where its own routes show one alone.
    fn home(&self, host: &str) -> Option<&str> {
        let homes = self.homes.get(host).filter(|homes| homes.len() == 1)?;
        self.names.get(homes.first()?).map(String::as_str)
    }

    /// The names of a route's switches.
    fn along(&self, trace: &Trace<'_>) -> Vec<Option<&str>> {
        let name = |hop: IpAddr| self.names.get(&self.switches.number(hop)?).map(String::as_str);
        trace.hops.iter().map(|hop| hop.and_then(name)).collect()
    }

    /// Whether a route's last hop is not next to its host, as far as that host's own routes show.
    fn is_cut(&self, trace: &Trace<'_>) -> bool {
        let last = trace.hops.last().copied().flatten().and_then(|hop| self.switches.number(hop));
        let homes = self.homes.get(trace.to);
        last.zip(homes).is_some_and(|(last, homes)| !homes.contains(&last))
    }

    fn links<'b>(&'b self, traces: &[Trace<'b>]) -> Links<'b> {
        let mut links = Links::default();
        for trace in traces {
            let along = self.along(trace);
            match along.as_slice() {
                [Some(first), ..] => links.add(trace.from, first, None),
                [None, Some(second), ..] => {
                    if let Some(home) = self.home(trace.from) {
                        links.add(home, second, Some(BESIDE_SILENCE));
                    }
                }
                _ => {}
            }
            for pair in along.windows(2) {
                if let [Some(one), Some(other)] = pair {
                    links.add(one, other, None);
                }
            }
            match along.as_slice() {
                [.., Some(last)] if !self.is_cut(trace) => {
                    let doubt = (!self.homes.contains_key(trace.to)).then_some(TO_HOST);
                    links.add(last, trace.to, doubt);
                }
                [.., Some(before), None] => {
                    if let Some(home) = self.home(trace.to) {
                        links.add(before, home, Some(BESIDE_SILENCE));
                    }
                }
                _ => {}
            }
        }
        links
    }

    /// What the file's head says beside its nodes and links.
    fn note(&self, draft: &mut Draft, fabric: &v1::TopologyReply, traces: &[Trace<'_>]) {
        draft.note(
            "Rates are those of control's topology. Delays, shared risks and aggregators are not traced.",
        );
        let traced: BTreeSet<&str> = traces.iter().map(|trace| trace.from).collect();
        let silent: Vec<&str> = self.hosts.iter().copied().filter(|host| !traced.contains(host)).collect();
        if !silent.is_empty() {
            draft.note(format!("? Hosts without traces: {}", silent.join(", ")));
        }
        let is_shown = |address: IpAddr| {
            self.switches.number(address).is_some_and(|number| self.names.contains_key(&number))
        };
        let absent = fabric.switches.iter().filter(|switch| {
            let mut addresses = switch.addresses.iter().filter_map(|address| address.parse::<IpAddr>().ok());
            switch.name != self.unseen && !addresses.any(is_shown)
        });
        let absent: Vec<&str> = absent.map(|switch| switch.name.as_str()).collect();
        if !absent.is_empty() {
            let names = absent.join(", ");
            draft.note(format!("? Switches of control's topology that no route shows, left out: {names}"));
        }
        let has_gap = |trace: &&Trace<'_>| {
            let answered = trace.hops.iter().rposition(Option::is_some);
            trace.hops.iter().take(answered.unwrap_or(0)).any(Option::is_none)
        };
        let (gaps, cut) =
            (traces.iter().filter(has_gap).count(), traces.iter().filter(|trace| self.is_cut(trace)).count());
        if gaps > 0 {
            let routes = number_of(gaps, "route has", "routes have");
            draft.note(format!("? {routes} hops that did not answer: switches may be missing."));
        }
        if cut > 0 {
            let routes = number_of(cut, "route ends before its host", "routes end before their hosts");
            let further = "agents trace further within a minute where control's topology lacks what answers";
            draft.note(format!("? {routes}: {further}."));
        }
    }

    /// By switch: the hosts and switches from which routes enter it.
    fn entered<'b>(&'b self, traces: &[Trace<'b>]) -> BTreeMap<&'b str, BTreeSet<&'b str>> {
        let mut entered: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for trace in traces {
            let mut before = Some(trace.from);
            for switch in self.along(trace) {
                if let (Some(before), Some(switch)) = (before, switch) {
                    entered.entry(switch).or_default().insert(before);
                }
                before = switch;
            }
        }
        entered
    }

    fn add_nodes(&self, draft: &mut Draft, fabric: &v1::TopologyReply, traces: &[Trace<'_>]) {
        for host in &fabric.hosts {
            let traced = self.homes.contains_key(host.name.as_str());
            let doubt = (!traced).then(|| "no route of its own shows its switch".to_owned());
            draft.add(&host.name, Kind::Host, doubt);
            if !host.rack.is_empty() {
                draft.rack(&host.name, &host.rack);
            }
            if !host.kind.is_empty() {
                draft.accelerators(&host.name, &host.kind);
            }
        }
        let entered = self.entered(traces);
        for (number, name) in &self.names {
            let Some(switch) = self.switches.all.get(*number) else { continue };
            let sides = entered.get(name.as_str()).map_or(0, BTreeSet::len);
            let alone = switch.name.is_none() && switch.addresses.len() == 1 && sides < 2;
            let doubt = switch.guess.or_else(|| alone.then_some(ONE_SIDE));
            draft.add(name, Kind::Switch, doubt.map(str::to_owned));
            draft.addresses(name, switch.addresses.iter().copied().collect());
        }
    }

    fn add_links(&self, draft: &mut Draft, fabric: &v1::TopologyReply, links: &Links<'_>) {
        let mut rates: BTreeMap<(&str, &str), Rate> = BTreeMap::new();
        for link in &fabric.links {
            rates.insert((link.from.as_str(), link.to.as_str()), Rate(link.capacity_bps));
        }
        for ((one, other), doubt) in &links.0 {
            draft.cable(one, other, rates.get(&(*one, *other)).copied());
            if let Some(doubt) = doubt {
                draft.doubt_cables(one, other, doubt);
            }
        }
        for part in self.unjoined(links) {
            draft.add(&self.unseen, Kind::Switch, Some(UNSEEN.to_owned()));
            draft.cable(part, &self.unseen, None);
            draft.doubt_cables(part, &self.unseen, "no route shows how this joins the others");
        }
    }

    /// Where what no route shows has to be joined on: nowhere if switches that hang together reach all hosts.
    fn unjoined(&self, links: &Links<'_>) -> Vec<&str> {
        let mut groups: Vec<Vec<&str>> = Vec::new();
        for name in self.names.values().map(String::as_str) {
            let touches = |group: &Vec<&str>| group.iter().any(|other| links.joins(name, other));
            let (near, mut far): (Vec<_>, Vec<_>) = groups.into_iter().partition(touches);
            far.push(near.into_iter().flatten().chain([name]).collect());
            groups = far;
        }
        let has_host = |name: &str| self.hosts.iter().any(|host| links.joins(name, host));
        let reaches = |group: &Vec<&str>, host: &str| group.iter().any(|name| links.joins(name, host));
        if groups.iter().any(|group| self.hosts.iter().all(|host| reaches(group, host))) {
            return Vec::new();
        }
        let mut parts: Vec<&str> = Vec::new();
        for group in &groups {
            let inner: Vec<&str> = group.iter().copied().filter(|name| !has_host(name)).collect();
            parts.extend(if inner.is_empty() { group } else { &inner });
        }
        parts.extend(self.hosts.iter().filter(|host| !groups.iter().any(|group| reaches(group, host))));
        parts
    }
}

#[cfg(test)]
mod tests;
