//! Estimates of links from reports on paths: who congests what, how much is left, and when to look again.

use crate::conditions::{Conditions, Drains, LinkUse};
use harmonaize_abi::{CommunicatorId, CongestionCause, CongestionLevel};
use harmonaize_topology::{DirectedLink, Path};
use harmonaize_topology::{HostId, LinkId, Node, Topology};
use harmonaize_units::{Nanos, Rate};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

mod attribution;
mod probe;

use attribution::{Attribution, CongestedPath, attribute};
pub use probe::Probe;
use probe::{MAX_CLEAN_LOSS_PPM, max_cross_traffic};

/// Most reports that are kept.
const MAX_REPORTS: usize = 16_384;

/// How long a link is left alone before it is first looked at again.
const FIRST_PROBE_DELAY: Duration = Duration::from_millis(250);

/// The longest time between two looks: what has become free is back in use soon after.
const MAX_PROBE_INTERVAL: Duration = Duration::from_millis(2000);

/// Time from an inconclusive probe, which met traffic of ours, to the next one. It is short since that traffic has pauses.
const INCONCLUSIVE_PROBE_DELAY: Duration = Duration::from_millis(500);

/// After a good probe the next comes this soon.
const REPEAT_PROBE_DELAY: Duration = Duration::from_millis(50);

/// So many good probes in a row make a link as good as new.
const CLEAN_PROBES: u32 = 2;

/// With own traffic on it and no word against it, an estimate halves this often.
const HALF_LIFE_CROSSED: Duration = Duration::from_millis(1000);

/// With none, nobody looking: as long it stays.
const HALF_LIFE_IDLE: Duration = Duration::from_millis(60000);

/// One direction of an own connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Connection {
    /// Its communicator.
    pub communicator: CommunicatorId,
    /// The host that sends.
    pub from: HostId,
    /// The host that receives.
    pub to: HostId,
    /// The initiator's source port, whichever way the bytes go.
    pub port: u16,
}

/// What an agent found of a path that its own connection takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CongestionReport {
    /// Which connection.
    pub connection: Connection,
    /// Its path from sender to receiver.
    pub path: Path,
    /// How congested.
    pub level: CongestionLevel,
    /// By whom.
    pub cause: CongestionCause,
    /// What the connection moved then; 0 where not known.
    pub own_rate: Rate,
    /// Whether packets were lost or marked; else only round trips were long, as they are before a pause too.
    pub had_loss: bool,
    /// What others take, where a train over the same path has told; else it is reckoned from what is moved.
    pub cross_traffic: Option<Rate>,
}

/// What is thought of a directed link that others congest, or that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Estimate {
    /// What others take.
    pub cross_traffic: Rate,
    /// Whether nothing passes.
    pub failed: bool,
    /// Since when it is thought so.
    pub since: Nanos,
    /// When something last spoke for it.
    pub last_seen: Nanos,
    /// How sure it is that it is this link and not another of the path, of a million.
    pub confidence_ppm: u32,
    /// What it was found from, in words.
    pub evidence: String,
}

/// An estimate, and when to look at it again.
#[derive(Clone, Debug)]
struct TrackedEstimate {
    estimate: Estimate,
    /// Whether a report that still stands speaks for it.
    supported: bool,
    /// Whose reports did last.
    reporters: BTreeSet<Connection>,
    /// Whether own traffic crosses it.
    crossed: bool,
    probe_at: Nanos,
    probe_interval: Duration,
    clean_probes: u32,
    decay_at: Nanos,
}

/// Own traffic on a directed link.
#[derive(Clone, Copy, Debug, Default)]
struct OwnTraffic {
    connections: u32,
    rate: u64,
    /// The one host that it comes from; none where there are several.
    connections_by_host: Option<HostId>,
}

/// Own traffic that takes so much of a link, in percent, fills it. The next two: so much keeps it busy, and less than so much
/// is next to nothing.
const FULL_PERCENT: u128 = 75;
const BUSY_PERCENT: u128 = 30;
const IDLE_PERCENT: u128 = 10;

/// A link that was thought congested before is believed to be so again this much sooner.
const PRIOR_WEIGHT: f64 = 1.5;

/// A link at a host is less believed to be congested by others than one between switches. What else it carries the host's own
/// agent sees.
const AT_HOST: f64 = 0.6;

/// What is known of all links. Times are those of one steady clock; they come with each call.
///
/// A report speaks against its path, not against a link. Blamed are the fewest links that explain all reports that stand; a
/// link that other own connections cross without complaint is blamed last, so an agent that complains of everything harms
/// its own links alone. What has been estimated stays when the traffic has gone elsewhere, until probes find the link free.
#[derive(Clone, Debug, Default)]
pub struct Estimates {
    links: BTreeMap<DirectedLink, TrackedEstimate>,
    active: BTreeMap<Connection, (Path, Rate)>,
    own_traffic: HashMap<DirectedLink, OwnTraffic>,
    /// Hosts that send any of it.
    busy: BTreeSet<HostId>,
    /// Reports that stand: others congest the path.
    reports: BTreeMap<Connection, CongestionReport>,
}

impl Estimates {
    /// Takes which own connections carry traffic now, with their path and rate (0 where not known). They are all, instead of
    /// those given before. Returns whether an estimate moved. Those without a report speak for their links. Reports on
    /// others are dropped.
    pub fn active(
        &mut self,
        topology: &Topology,
        now: Nanos,
        connections: Vec<(Connection, Path, Rate)>,
    ) -> bool {
        self.own_traffic.clear();
        self.active.clear();
        self.busy = connections.iter().map(|(connection, ..)| connection.from).collect();
        for (connection, path, rate) in connections {
            for link in path.links() {
                let alone =
                    OwnTraffic { connections_by_host: Some(connection.from), ..OwnTraffic::default() };
                let crossing = self.own_traffic.entry(*link).or_insert(alone);
                crossing.connections_by_host =
                    crossing.connections_by_host.filter(|by| *by == connection.from);
                crossing.connections += 1;
                crossing.rate = crossing.rate.saturating_add(rate.0);
            }
            self.active.insert(connection, (path, rate));
        }
        let active = &self.active;
        self.reports.retain(|connection, _| active.contains_key(connection));
        for (link, kept) in &mut self.links {
            let crossed = self.own_traffic.contains_key(link);
            if kept.crossed != crossed {
                kept.crossed = crossed;
                kept.reset_intervals(now);
            }
        }
        self.attribute(topology, now)
    }

    /// Takes a report. Returns whether an estimate moved so that planning anew may be worth it. A path that is not of the topology is
    /// left alone.
    pub fn apply_report(&mut self, topology: &Topology, now: Nanos, report: CongestionReport) -> bool {
        let whole = report.path.links().iter().all(|link| topology.ends(*link).is_some());
        if !whole || !self.is_significant(topology, &report) {
            return false;
        }
        let by_others = Self::is_cross_traffic(&report, topology.path_rate(&report.path).0);
        if by_others {
            if self.reports.len() >= MAX_REPORTS && !self.reports.contains_key(&report.connection) {
                return false;
            }
            self.reports.insert(report.connection, report);
        } else if self.reports.remove(&report.connection).is_none() {
            return false;
        }
        self.attribute(topology, now)
    }

    /// Whether a report is of cross traffic. An agent that fills its link sees no traffic beside its own, and lays the queue to
    /// that: what is moved tells.
    fn is_cross_traffic(report: &CongestionReport, narrow: u64) -> bool {
        match report.cause {
            CongestionCause::Own => {
                report.level == CongestionLevel::Severe && percent(report.own_rate.0, narrow) >= BUSY_PERCENT
            }
            CongestionCause::Unknown => report.level == CongestionLevel::Severe,
            CongestionCause::CrossTraffic => report.level != CongestionLevel::None,
        }
    }

    /// Whether a report is news. A long round trip of a connection that moves next to nothing, with nothing lost, is none: what
    /// little it sent found the queues of others of ours, or was acknowledged late before a pause.
    pub fn is_significant(&self, topology: &Topology, report: &CongestionReport) -> bool {
        let moves = percent(report.own_rate.0, topology.path_rate(&report.path).0) >= IDLE_PERCENT;
        report.level == CongestionLevel::None || report.had_loss || report.cross_traffic.is_some() || moves
    }

    /// Whether a connection is among those that carry traffic.
    pub fn is_active(&self, connection: &Connection) -> bool {
        self.active.contains_key(connection)
    }

    /// Whether no host of ours but this one sends over a path's links. Then a train from there has none of our traffic in its way:
    /// it takes the place of what the host sends itself.
    pub fn is_exclusive(&self, from: HostId, path: &Path) -> bool {
        path.links().iter().all(|link| self.is_exclusive_on(from, *link))
    }

    /// Whether the same holds of all links but the last. On the last, what comes to the host at its end can be counted.
    pub fn is_exclusive_before_last(&self, from: HostId, path: &Path) -> bool {
        let inner = path.links().split_last().map_or(&[][..], |(_, inner)| inner);
        inner.iter().all(|link| self.is_exclusive_on(from, *link))
    }

    fn is_exclusive_on(&self, from: HostId, link: DirectedLink) -> bool {
        self.own_traffic.get(&link).is_none_or(|crossing| crossing.connections_by_host == Some(from))
    }

    /// How many own connections of other hosts cross a path's links. Each counts once a link. On a link that
    /// other hosts' connections cross, all connections count.
    pub fn other_connections_on(&self, from: HostId, path: &Path) -> u32 {
        let crossings = path.links().iter().filter_map(|link| self.own_traffic.get(link));
        crossings
            .filter(|crossing| crossing.connections_by_host != Some(from))
            .map(|crossing| crossing.connections)
            .sum()
    }

    /// Whether a host sends traffic of ours.
    pub fn is_busy(&self, host: HostId) -> bool {
        self.busy.contains(&host)
    }

    /// Blames links for the reports that stand, and reckons what others take there.
    fn attribute(&mut self, topology: &Topology, now: Nanos) -> bool {
        let reports = self.unexplained_reports(topology);
        let congested: Vec<CongestedPath<'_>> = reports
            .iter()
            .map(|report| CongestedPath {
                path: &report.path,
                active: self.active.contains_key(&report.connection),
            })
            .collect();
        let clear =
            |link: DirectedLink| self.own_traffic.get(&link).map_or(0, |crossing| crossing.connections);
        let trust = |link: DirectedLink| {
            let ends = topology.ends(link).map_or([None; 2], |(from, to)| [Some(from), Some(to)]);
            let at_host = ends.iter().any(|end| matches!(end, Some(Node::Host(_))));
            (if self.links.contains_key(&link) { PRIOR_WEIGHT } else { 1.0 })
                * (if at_host { AT_HOST } else { 1.0 })
        };
        let blamed = attribute(&congested, &clear, &trust);
        let mut moved = false;
        self.links.retain(|link, kept| {
            if !kept.supported || blamed.contains_key(link) {
                return true;
            }
            kept.supported = false;
            kept.reset_intervals(now);
            // Those who spoke against it still do, and are explained better by another link: it was never this one.
            let mistaken =
                !kept.estimate.failed && kept.reporters.iter().any(|by| self.reports.contains_key(by));
            moved |= mistaken;
            !mistaken
        });
        for (link, blame) in &blamed {
            moved |= self.update_support(topology, now, *link, blame, &reports);
        }
        moved
    }

    /// The reports that own traffic does not explain. An agent sees what its own host sends: on a link that own connections,
    /// of this host or others, fill for the most part, the queue is ours, unless a train has told otherwise.
    fn unexplained_reports(&self, topology: &Topology) -> Vec<CongestionReport> {
        let mut own: HashMap<DirectedLink, u64> = HashMap::new();
        for report in self.reports.values() {
            for link in report.path.links() {
                let moved = own.entry(*link).or_default();
                *moved = moved.saturating_add(report.own_rate.0);
            }
        }
        let moved = |link: &DirectedLink| own.get(link).copied().unwrap_or(0);
        let full = |report: &CongestionReport| {
            let mut links = report.path.links().iter();
            links.any(|link| percent(moved(link), capacity(topology, *link)) >= FULL_PERCENT)
        };
        let explained = |report: &CongestionReport| report.cross_traffic.is_none() && full(report);
        self.reports.values().filter(|report| !explained(report)).cloned().collect()
    }

    fn update_support(
        &mut self,
        topology: &Topology,
        now: Nanos,
        link: DirectedLink,
        blame: &Attribution,
        reports: &[CongestionReport],
    ) -> bool {
        let rate = capacity(topology, link);
        let against = blame.paths.iter().filter_map(|index| reports.get(*index));
        let by: BTreeSet<Connection> = against.clone().map(|report| report.connection).collect();
        let level = against.clone().map(|report| report.level).max().unwrap_or_default();
        let own = self.own_rate(link, against.clone());
        let measured = against.clone().filter_map(|report| report.cross_traffic).max();
        let measured = measured.map(|measured| measured.0.min(max_cross_traffic(rate)));
        let cross_traffic = measured.unwrap_or_else(|| cross_traffic_rate(rate, own, level));
        let mut hosts: Vec<HostId> = against.map(|report| report.connection.from).collect();
        let paths = hosts.len();
        hosts.sort_unstable();
        hosts.dedup();
        let estimate = Estimate {
            cross_traffic: Rate(cross_traffic),
            failed: false,
            since: now,
            last_seen: now,
            confidence_ppm: 1_000_000 / blame.equivalent_links.max(1),
            evidence: format!("{paths} paths of {} hosts are congested there", hosts.len()),
        };
        let crossed = self.own_traffic.contains_key(&link);
        let Some(kept) = self.links.get_mut(&link) else {
            let mut kept = TrackedEstimate::new(estimate, crossed, now);
            (kept.supported, kept.reporters) = (true, by);
            self.links.insert(link, kept);
            return true;
        };
        let (old, fresh) = (kept.estimate.clone(), !kept.supported);
        kept.estimate = Estimate { failed: old.failed, since: old.since, ..estimate };
        // What was found before, by a train too, is worth more than a guess of about the same size.
        if old.cross_traffic.0.abs_diff(cross_traffic) <= rate / if measured.is_some() { 20 } else { 5 } {
            kept.estimate.cross_traffic = old.cross_traffic;
        }
        (kept.supported, kept.reporters) = (true, by);
        if fresh {
            kept.reset_intervals(now);
        }
        kept.estimate.cross_traffic != old.cross_traffic
    }

    /// What own connections move on a link: as the reports say, else as is known of active ones.
    fn own_rate<'a>(&self, link: DirectedLink, reports: impl Iterator<Item = &'a CongestionReport>) -> u64 {
        let mut own = self.own_traffic.get(&link).map_or(0, |crossing| crossing.rate);
        for report in reports.filter(|report| report.own_rate.0 > 0) {
            let active = self.active.get(&report.connection).map_or(0, |(_, rate)| rate.0);
            own = own.saturating_sub(active).saturating_add(report.own_rate.0);
        }
        own
    }

    /// Takes a probe's result; returns whether an estimate moved so that planning anew may be worth it. It may where a link is
    /// free again, or others take more than was thought. That they take less, but something, is for the next plan that is made
    /// for another reason.
    ///
    /// See Strauss, Katabi and Kaashoek, "A measurement study of available bandwidth estimation tools", IMC 2003 (direct
    /// probing).
    pub fn apply_probe(&mut self, topology: &Topology, now: Nanos, probe: &Probe) -> bool {
        let mut moved = false;
        let mut into = u64::MAX;
        for link in probe.path.links() {
            let rate = capacity(topology, *link);
            let before = if into == u64::MAX { rate } else { into };
            into = into.min(rate);
            let Some(kept) = self.links.get_mut(link) else { continue };
            kept.estimate.last_seen = now;
            if probe.is_clean(Rate(into)) {
                kept.clean_probes += 1;
                // It is believed, and looked at often until it is sure.
                (kept.probe_at, kept.probe_interval) = (now.after(REPEAT_PROBE_DELAY), FIRST_PROBE_DELAY);
                if kept.clean_probes >= CLEAN_PROBES {
                    self.links.remove(link);
                    moved = true;
                }
            } else if probe.conclusive {
                kept.clean_probes = 0;
                if probe.received.0 > 0 && !kept.estimate.failed {
                    let measured = probe.cross_traffic(Rate(rate), Rate(before)).0;
                    // What was lost did not come out later: the rest may seem quicker than it was.
                    let least =
                        if probe.lost_ppm < MAX_CLEAN_LOSS_PPM { 0 } else { kept.estimate.cross_traffic.0 };
                    let cross_traffic = measured.max(least);
                    moved |= cross_traffic.saturating_sub(kept.estimate.cross_traffic.0) > rate / 20;
                    kept.estimate.cross_traffic = Rate(cross_traffic);
                    let received = Rate(probe.received.0.min(into));
                    kept.estimate.evidence = format!("of a probe at {}, {received} came out", Rate(into));
                    kept.decay_at = now.after(HALF_LIFE_IDLE);
                }
            } else {
                kept.probe_interval = kept.probe_interval.min(INCONCLUSIVE_PROBE_DELAY);
                kept.probe_at = kept.probe_at.min(now.after(kept.probe_interval));
            }
        }
        moved
    }

    /// A probe of a link could not be sent, or told nothing: it is due again then.
    pub fn schedule_probe(&mut self, link: DirectedLink, at: Nanos) {
        if let Some(kept) = self.links.get_mut(&link) {
            kept.probe_at = at;
        }
    }

    /// A link passes nothing any more, in either direction; whether that is new.
    pub fn fail(&mut self, topology: &Topology, now: Nanos, link: LinkId) -> bool {
        let mut new = false;
        for link in [true, false].map(|forward| DirectedLink { link, forward }) {
            if topology.ends(link).is_none() {
                return false;
            }
            let estimate = Estimate {
                cross_traffic: Rate(capacity(topology, link)),
                failed: true,
                since: now,
                last_seen: now,
                confidence_ppm: 1_000_000,
                evidence: "nothing passes".to_owned(),
            };
            let crossed = self.own_traffic.contains_key(&link);
            if !self.links.get(&link).is_some_and(|kept| kept.estimate.failed) {
                self.links.insert(link, TrackedEstimate::new(estimate, crossed, now));
                new = true;
            }
        }
        new
    }

    /// A failed link passes again; whether that is new.
    pub fn restore(&mut self, now: Nanos, link: LinkId) -> bool {
        let _ = now;
        let mut new = false;
        for link in [true, false].map(|forward| DirectedLink { link, forward }) {
            if self.links.get(&link).is_some_and(|kept| kept.estimate.failed) {
                self.links.remove(&link);
                new = true;
            }
        }
        new
    }

    /// Forgets what is thought of links that the topology has no longer.
    pub fn forget_gone(&mut self, topology: &Topology) {
        self.links.retain(|link, _| capacity(topology, *link) > 0);
        self.reports.retain(|_, report| topology.path_rate(&report.path).0 > 0);
    }

    /// Links that a probe should look at now: congested or failed, crossed by no traffic of ours, and due. Each told counts
    /// as looked at: it is due again after its interval, which doubles from 250 ms to 2 s.
    pub fn probes_due(&mut self, now: Nanos) -> Vec<DirectedLink> {
        let mut due = Vec::new();
        for (link, kept) in
            self.links.iter_mut().filter(|(_, kept)| kept.wants_probe() && kept.probe_at <= now)
        {
            kept.probe_interval = kept.probe_interval.saturating_mul(2).min(MAX_PROBE_INTERVAL);
            kept.probe_at = now.after(kept.probe_interval);
            due.push(*link);
        }
        due
    }

    /// When [`Estimates::probes_due`] or [`Estimates::decay`] next has something to do; none while nothing is congested.
    pub fn next_due(&self) -> Option<Nanos> {
        let probes = self.links.values().filter(|kept| kept.wants_probe()).map(|kept| kept.probe_at);
        probes.chain(self.links.values().filter(|kept| kept.decays()).map(|kept| kept.decay_at)).min()
    }

    /// Lets estimates that nothing speaks for any more fade; whether one moved. To be called when due, and may be at any time.
    pub fn decay(&mut self, topology: &Topology, now: Nanos) -> bool {
        let mut moved = false;
        self.links.retain(|link, kept| {
            let rate = capacity(topology, *link);
            while kept.decays()
                && kept.decay_at <= now
                && kept.estimate.cross_traffic.0 >= rate / 16
                && rate > 0
            {
                kept.estimate.cross_traffic.0 /= 2;
                kept.decay_at =
                    kept.decay_at.after(if kept.crossed { HALF_LIFE_CROSSED } else { HALF_LIFE_IDLE });
                moved = true;
            }
            !kept.decays() || kept.estimate.cross_traffic.0 >= (rate / 16).max(1)
        });
        moved
    }

    /// What is thought of each link that is not as the topology says.
    pub fn links(&self) -> impl Iterator<Item = (DirectedLink, &Estimate)> {
        self.links.iter().map(|(link, kept)| (*link, &kept.estimate))
    }

    /// The fabric as it is thought to be, with what operators drain. Links that share a risk with a failed one are to be avoided.
    pub fn conditions(&self, topology: &Topology, drains: &Drains) -> Conditions {
        let mut conditions = Conditions::clear(topology);
        let mut risks = BTreeSet::new();
        for (link, kept) in &self.links {
            let left = capacity(topology, *link).saturating_sub(kept.estimate.cross_traffic.0);
            conditions.set_available(*link, Rate(left));
            if kept.estimate.failed {
                conditions.restrict(link.link, LinkUse::Failed);
                risks.extend(topology.links().get(link.link.0).into_iter().flat_map(|link| &link.risk));
            }
        }
        if !risks.is_empty() {
            for (index, link) in topology.links().iter().enumerate() {
                if !link.risk.iter().all(|risk| !risks.contains(risk)) {
                    conditions.restrict(LinkId(index), LinkUse::Avoid);
                }
            }
        }
        drains.all_links(topology).into_iter().for_each(|link| conditions.restrict(link, LinkUse::Avoid));
        conditions
    }
}

impl TrackedEstimate {
    fn new(estimate: Estimate, crossed: bool, now: Nanos) -> Self {
        let (probe_at, fade_at) = (Nanos(0), Nanos(0));
        let mut kept = Self {
            estimate,
            supported: false,
            reporters: BTreeSet::new(),
            crossed,
            probe_at,
            probe_interval: FIRST_PROBE_DELAY,
            clean_probes: 0,
            decay_at: fade_at,
        };
        kept.reset_intervals(now);
        kept
    }

    /// Things have changed: intervals begin anew.
    fn reset_intervals(&mut self, now: Nanos) {
        self.clean_probes = 0;
        self.probe_interval = FIRST_PROBE_DELAY;
        self.probe_at = now.after(FIRST_PROBE_DELAY);
        self.decay_at = now.after(if self.crossed { HALF_LIFE_CROSSED } else { HALF_LIFE_IDLE });
    }

    fn wants_probe(&self) -> bool {
        !self.crossed || self.estimate.failed
    }

    fn decays(&self) -> bool {
        !self.supported && !self.estimate.failed
    }
}

fn capacity(topology: &Topology, link: DirectedLink) -> u64 {
    topology.links().get(link.link.0).map_or(0, |link| link.rate.0)
}

fn percent(part: u64, whole: u64) -> u128 {
    u128::from(part) * 100 / u128::from(whole.max(1))
}

/// What others take of a link that carries `own` of ours. It is what we do not use, within what such a congestion report can
/// mean. Where ours is not known, half.
fn cross_traffic_rate(rate: u64, own: u64, level: CongestionLevel) -> u64 {
    let left = rate.saturating_sub(own);
    match level {
        _ if own == 0 => rate / 2,
        CongestionLevel::Severe => left.clamp(rate / 2, max_cross_traffic(rate)),
        _ => left.clamp(rate / 4, rate / 2),
    }
}

#[cfg(test)]
mod tests;
