//! Estimates of links from verdicts on paths: who congests what, how much is left, and when to look again.

use crate::conditions::{Conditions, Drains, Use};
use crate::path::{DirectedLink, Path};
use crate::topology::{HostId, LinkId, Node, Topology};
use crate::units::{Nanos, Rate};
use std::collections::{BTreeMap, BTreeSet, HashMap};

mod blame;
mod probe;

use blame::{Blame, Suspicion, blame};
pub use probe::Probe;
use probe::{LOSSY_PPM, most_foreign};

/// Most verdicts that are kept.
const MOST_VERDICTS: usize = 16_384;

/// How long a link is left alone before it is first looked at again.
const FIRST_PROBE: Nanos = Nanos(250_000_000);

/// The longest time between two looks: what has become free is back in use soon after.
const LONGEST_PROBE: Nanos = Nanos(2_000_000_000);

/// After one that told nothing, for traffic of ours was in its way, the next comes this soon: that traffic has pauses.
const UNCLEAR_PROBE: Nanos = Nanos(500_000_000);

/// After a good probe the next comes this soon.
const SECOND_PROBE: Nanos = Nanos(50_000_000);

/// So many good probes in a row make a link as good as new.
const GOOD_PROBES: u32 = 2;

/// With own traffic on it and no word against it, an estimate halves this often.
const FADE_CROSSED: Nanos = Nanos(1_000_000_000);

/// With none, nobody looking: as long it stays.
const FADE_ALONE: Nanos = Nanos(60_000_000_000);

/// One direction of an own connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Connection {
    /// Its communicator.
    pub communicator: u64,
    /// The host that sends.
    pub from: HostId,
    /// The host that receives.
    pub to: HostId,
    /// The initiator's source port, whichever way the bytes go.
    pub port: u16,
}

/// How congested a path is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Not at all.
    #[default]
    None,
    /// It is full, or a queue stands.
    Mild,
    /// The queue is long, or packets are lost.
    Severe,
}

/// Who congests it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cause {
    /// Not told. Counts as others where the level is severe.
    #[default]
    Unknown,
    /// We do. Where the queue is long, that holds only if what own connections move comes to about what the link carries.
    Own,
    /// Others.
    Others,
}

/// What an agent found of a path that its own connection takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Which connection.
    pub connection: Connection,
    /// Its path from sender to receiver.
    pub path: Path,
    /// How congested.
    pub level: Level,
    /// By whom.
    pub cause: Cause,
    /// What the connection moved then; 0 where not known.
    pub own: Rate,
    /// Whether packets were lost or marked; else only round trips were long, as they are before a pause too.
    pub lost: bool,
    /// What others take, where a train over the same path has told; else it is reckoned from what is moved.
    pub foreign: Option<Rate>,
}

/// What is thought of a directed link that others congest, or that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Estimate {
    /// What others take.
    pub foreign: Rate,
    /// Whether nothing passes.
    pub failed: bool,
    /// Since when it is thought so.
    pub since: Nanos,
    /// When something last spoke for it.
    pub seen: Nanos,
    /// How sure it is that it is this link and not another of the path, of a million.
    pub confidence_ppm: u32,
    /// What it was found from, in words.
    pub evidence: String,
}

/// An estimate, and when to look at it again.
#[derive(Clone, Debug)]
struct Kept {
    estimate: Estimate,
    /// Whether a verdict that still stands speaks for it.
    supported: bool,
    /// Whose verdicts did last.
    by: BTreeSet<Connection>,
    /// Whether own traffic crosses it.
    crossed: bool,
    probe_at: Nanos,
    probe_every: Nanos,
    good: u32,
    fade_at: Nanos,
}

/// Own traffic on a directed link.
#[derive(Clone, Copy, Debug, Default)]
struct Crossing {
    connections: u32,
    rate: u64,
    /// The one host that it comes from; none where there are several.
    by: Option<HostId>,
}

/// Own traffic that takes so much of a link, in percent, fills it; so much keeps it busy; less than so much is next to nothing.
const FULL: u128 = 75;
const BUSY: u128 = 30;
const IDLE: u128 = 10;

/// A link that was thought congested before is believed to be so again this much sooner.
const KNOWN: f64 = 1.5;

/// A link at a host is believed to be congested by others less than one between switches: what else it carries the host's own
/// agent sees.
const AT_HOST: f64 = 0.6;

/// What is known of all links. Times are those of one steady clock; they come with each call.
///
/// A verdict speaks against its path, not against a link. Blamed are the fewest links that explain all verdicts that stand; a
/// link that other own connections cross without complaint is blamed last, so an agent that complains of everything harms
/// its own links alone. What has been estimated stays when the traffic has gone elsewhere, until probes find the link free.
#[derive(Clone, Debug, Default)]
pub struct Estimates {
    links: BTreeMap<DirectedLink, Kept>,
    active: BTreeMap<Connection, (Path, Rate)>,
    crossing: HashMap<DirectedLink, Crossing>,
    /// Hosts that send any of it.
    busy: BTreeSet<HostId>,
    /// Verdicts that stand: others congest the path.
    standing: BTreeMap<Connection, Verdict>,
}

impl Estimates {
    /// Which own connections carry traffic now, with their path and rate (0 where not known): all of them, instead of those
    /// told before; whether an estimate moved. Those without a verdict speak for their links. Verdicts on others are dropped.
    pub fn active(
        &mut self,
        topology: &Topology,
        now: Nanos,
        connections: Vec<(Connection, Path, Rate)>,
    ) -> bool {
        self.crossing.clear();
        self.active.clear();
        self.busy = connections.iter().map(|(connection, ..)| connection.from).collect();
        for (connection, path, rate) in connections {
            for link in path.links() {
                let alone = Crossing { by: Some(connection.from), ..Crossing::default() };
                let crossing = self.crossing.entry(*link).or_insert(alone);
                crossing.by = crossing.by.filter(|by| *by == connection.from);
                crossing.connections += 1;
                crossing.rate = crossing.rate.saturating_add(rate.0);
            }
            self.active.insert(connection, (path, rate));
        }
        let active = &self.active;
        self.standing.retain(|connection, _| active.contains_key(connection));
        for (link, kept) in &mut self.links {
            let crossed = self.crossing.contains_key(link);
            if kept.crossed != crossed {
                kept.crossed = crossed;
                kept.look_again(now);
            }
        }
        self.infer(topology, now)
    }

    /// Takes a verdict; whether an estimate moved so that planning anew may be worth it. A path that is not of the topology is
    /// left alone.
    pub fn verdict(&mut self, topology: &Topology, now: Nanos, verdict: Verdict) -> bool {
        let whole = verdict.path.links().iter().all(|link| topology.ends(*link).is_some());
        if !whole || !self.is_news(topology, &verdict) {
            return false;
        }
        let by_others = Self::is_of_others(&verdict, topology.path_rate(&verdict.path).0);
        if by_others {
            if self.standing.len() >= MOST_VERDICTS && !self.standing.contains_key(&verdict.connection) {
                return false;
            }
            self.standing.insert(verdict.connection, verdict);
        } else if self.standing.remove(&verdict.connection).is_none() {
            return false;
        }
        self.infer(topology, now)
    }

    /// Whether a verdict is of others' traffic. An agent that fills its link sees no traffic beside its own, and lays the queue to
    /// that: what is moved tells.
    fn is_of_others(verdict: &Verdict, narrow: u64) -> bool {
        match verdict.cause {
            Cause::Own => verdict.level == Level::Severe && percent(verdict.own.0, narrow) >= BUSY,
            Cause::Unknown => verdict.level == Level::Severe,
            Cause::Others => verdict.level != Level::None,
        }
    }

    /// Whether a verdict is news. A long round trip of a connection that moves next to nothing, with nothing lost, is none: what
    /// little it sent found the queues of others of ours, or was acknowledged late before a pause.
    pub fn is_news(&self, topology: &Topology, verdict: &Verdict) -> bool {
        let moves = percent(verdict.own.0, topology.path_rate(&verdict.path).0) >= IDLE;
        verdict.level == Level::None || verdict.lost || verdict.foreign.is_some() || moves
    }

    /// Whether a connection is among those that carry traffic.
    pub fn is_active(&self, connection: &Connection) -> bool {
        self.active.contains_key(connection)
    }

    /// Whether no host of ours but this one sends over a path's links. Then a train from there has none of our traffic in its way:
    /// it takes the place of what the host sends itself.
    pub fn is_alone(&self, from: HostId, path: &Path) -> bool {
        path.links().iter().all(|link| self.is_alone_on(from, *link))
    }

    /// The same of all links but the last, on which what comes to the host at its end can be counted.
    pub fn is_alone_before_last(&self, from: HostId, path: &Path) -> bool {
        let inner = path.links().split_last().map_or(&[][..], |(_, inner)| inner);
        inner.iter().all(|link| self.is_alone_on(from, *link))
    }

    fn is_alone_on(&self, from: HostId, link: DirectedLink) -> bool {
        self.crossing.get(&link).is_none_or(|crossing| crossing.by == Some(from))
    }

    /// How many own connections of other hosts cross a path's links: each once a link, and where a link has others', all of it.
    pub fn others_on(&self, from: HostId, path: &Path) -> u32 {
        let crossings = path.links().iter().filter_map(|link| self.crossing.get(link));
        crossings.filter(|crossing| crossing.by != Some(from)).map(|crossing| crossing.connections).sum()
    }

    /// Whether a host sends traffic of ours.
    pub fn is_busy(&self, host: HostId) -> bool {
        self.busy.contains(&host)
    }

    /// Blames links for the verdicts that stand, and reckons what others take there.
    fn infer(&mut self, topology: &Topology, now: Nanos) -> bool {
        let verdicts = self.unexplained(topology);
        let suspicions: Vec<Suspicion<'_>> = verdicts
            .iter()
            .map(|verdict| Suspicion {
                path: &verdict.path,
                active: self.active.contains_key(&verdict.connection),
            })
            .collect();
        let clear = |link: DirectedLink| self.crossing.get(&link).map_or(0, |crossing| crossing.connections);
        let trust = |link: DirectedLink| {
            let ends = topology.ends(link).map_or([None; 2], |(from, to)| [Some(from), Some(to)]);
            let at_host = ends.iter().any(|end| matches!(end, Some(Node::Host(_))));
            (if self.links.contains_key(&link) { KNOWN } else { 1.0 }) * (if at_host { AT_HOST } else { 1.0 })
        };
        let blamed = blame(&suspicions, &clear, &trust);
        let mut moved = false;
        self.links.retain(|link, kept| {
            if !kept.supported || blamed.contains_key(link) {
                return true;
            }
            kept.supported = false;
            kept.look_again(now);
            // Those who spoke against it still do, and are explained better by another link: it was never this one.
            let mistaken = !kept.estimate.failed && kept.by.iter().any(|by| self.standing.contains_key(by));
            moved |= mistaken;
            !mistaken
        });
        for (link, blame) in &blamed {
            moved |= self.support(topology, now, *link, blame, &verdicts);
        }
        moved
    }

    /// The verdicts that own traffic does not explain. An agent sees what its own host sends: on a link that own connections,
    /// of this host or others, fill for the most part, the queue is ours, unless a train has told otherwise.
    fn unexplained(&self, topology: &Topology) -> Vec<Verdict> {
        let mut own: HashMap<DirectedLink, u64> = HashMap::new();
        for verdict in self.standing.values() {
            for link in verdict.path.links() {
                let moved = own.entry(*link).or_default();
                *moved = moved.saturating_add(verdict.own.0);
            }
        }
        let moved = |link: &DirectedLink| own.get(link).copied().unwrap_or(0);
        let full = |verdict: &Verdict| {
            let mut links = verdict.path.links().iter();
            links.any(|link| percent(moved(link), capacity(topology, *link)) >= FULL)
        };
        let explained = |verdict: &Verdict| verdict.foreign.is_none() && full(verdict);
        self.standing.values().filter(|verdict| !explained(verdict)).cloned().collect()
    }

    fn support(
        &mut self,
        topology: &Topology,
        now: Nanos,
        link: DirectedLink,
        blame: &Blame,
        verdicts: &[Verdict],
    ) -> bool {
        let rate = capacity(topology, link);
        let against = blame.verdicts.iter().filter_map(|index| verdicts.get(*index));
        let by: BTreeSet<Connection> = against.clone().map(|verdict| verdict.connection).collect();
        let level = against.clone().map(|verdict| verdict.level).max().unwrap_or_default();
        let own = self.own(link, against.clone());
        let measured = against.clone().filter_map(|verdict| verdict.foreign).max();
        let measured = measured.map(|foreign| foreign.0.min(most_foreign(rate)));
        let foreign = measured.unwrap_or_else(|| foreign_share(rate, own, level));
        let mut hosts: Vec<HostId> = against.map(|verdict| verdict.connection.from).collect();
        let paths = hosts.len();
        hosts.sort_unstable();
        hosts.dedup();
        let estimate = Estimate {
            foreign: Rate(foreign),
            failed: false,
            since: now,
            seen: now,
            confidence_ppm: 1_000_000 / blame.alike.max(1),
            evidence: format!("{paths} paths of {} hosts are congested there", hosts.len()),
        };
        let crossed = self.crossing.contains_key(&link);
        let Some(kept) = self.links.get_mut(&link) else {
            let mut kept = Kept::new(estimate, crossed, now);
            (kept.supported, kept.by) = (true, by);
            self.links.insert(link, kept);
            return true;
        };
        let (old, fresh) = (kept.estimate.clone(), !kept.supported);
        kept.estimate = Estimate { failed: old.failed, since: old.since, ..estimate };
        // What was found before, by a train too, is worth more than a guess of about the same size.
        if old.foreign.0.abs_diff(foreign) <= rate / if measured.is_some() { 20 } else { 5 } {
            kept.estimate.foreign = old.foreign;
        }
        (kept.supported, kept.by) = (true, by);
        if fresh {
            kept.look_again(now);
        }
        kept.estimate.foreign != old.foreign
    }

    /// What own connections move on a link: as the verdicts say, else as was told.
    fn own<'a>(&self, link: DirectedLink, verdicts: impl Iterator<Item = &'a Verdict>) -> u64 {
        let mut own = self.crossing.get(&link).map_or(0, |crossing| crossing.rate);
        for verdict in verdicts.filter(|verdict| verdict.own.0 > 0) {
            let told = self.active.get(&verdict.connection).map_or(0, |(_, rate)| rate.0);
            own = own.saturating_sub(told).saturating_add(verdict.own.0);
        }
        own
    }

    /// Takes what a probe told; whether an estimate moved so that planning anew may be worth it: a link is free again, or others
    /// take more than was thought. That they take less, but something, is for the next plan that is made for another reason.
    ///
    /// See Strauss, Katabi and Kaashoek, "A measurement study of available bandwidth estimation tools", IMC 2003 (direct
    /// probing).
    pub fn probed(&mut self, topology: &Topology, now: Nanos, probe: &Probe) -> bool {
        let mut moved = false;
        let mut into = u64::MAX;
        for link in probe.path.links() {
            let rate = capacity(topology, *link);
            let before = if into == u64::MAX { rate } else { into };
            into = into.min(rate);
            let Some(kept) = self.links.get_mut(link) else { continue };
            kept.estimate.seen = now;
            if probe.is_clean(Rate(into)) {
                kept.good += 1;
                // It is believed, and looked at often until it is sure.
                (kept.probe_at, kept.probe_every) = (later(now, SECOND_PROBE), FIRST_PROBE);
                if kept.good >= GOOD_PROBES {
                    self.links.remove(link);
                    moved = true;
                }
            } else if probe.conclusive {
                kept.good = 0;
                if probe.received.0 > 0 && !kept.estimate.failed {
                    let foreign = probe.foreign(Rate(rate), Rate(before)).0;
                    // What was lost did not come out later: the rest may seem quicker than it was.
                    let least = if probe.lost_ppm < LOSSY_PPM { 0 } else { kept.estimate.foreign.0 };
                    let foreign = foreign.max(least);
                    moved |= foreign.saturating_sub(kept.estimate.foreign.0) > rate / 20;
                    kept.estimate.foreign = Rate(foreign);
                    let received = Rate(probe.received.0.min(into));
                    kept.estimate.evidence = format!("of a probe at {}, {received} came out", Rate(into));
                    kept.fade_at = later(now, FADE_ALONE);
                }
            } else {
                kept.probe_every = kept.probe_every.min(UNCLEAR_PROBE);
                kept.probe_at = kept.probe_at.min(later(now, kept.probe_every));
            }
        }
        moved
    }

    /// A probe of a link could not be sent, or told nothing: it is due again then.
    pub fn look_again_at(&mut self, link: DirectedLink, at: Nanos) {
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
                foreign: Rate(capacity(topology, link)),
                failed: true,
                since: now,
                seen: now,
                confidence_ppm: 1_000_000,
                evidence: "nothing passes".to_owned(),
            };
            let crossed = self.crossing.contains_key(&link);
            if !self.links.get(&link).is_some_and(|kept| kept.estimate.failed) {
                self.links.insert(link, Kept::new(estimate, crossed, now));
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

    /// Links that a probe should look at now: congested or failed, crossed by no traffic of ours, and due. Each told counts
    /// as looked at: it is due again after its interval, which doubles from 250 ms to 2 s.
    pub fn probes_due(&mut self, now: Nanos) -> Vec<DirectedLink> {
        let mut due = Vec::new();
        for (link, kept) in
            self.links.iter_mut().filter(|(_, kept)| kept.wants_probe() && kept.probe_at <= now)
        {
            kept.probe_every = Nanos(kept.probe_every.0.saturating_mul(2)).min(LONGEST_PROBE);
            kept.probe_at = later(now, kept.probe_every);
            due.push(*link);
        }
        due
    }

    /// When [`Estimates::probes_due`] or [`Estimates::settle`] next has something to do; none while nothing is congested.
    pub fn next_due(&self) -> Option<Nanos> {
        let probes = self.links.values().filter(|kept| kept.wants_probe()).map(|kept| kept.probe_at);
        probes.chain(self.links.values().filter(|kept| kept.fades()).map(|kept| kept.fade_at)).min()
    }

    /// Lets estimates that nothing speaks for any more fade; whether one moved. To be called when due, and may be at any time.
    pub fn settle(&mut self, topology: &Topology, now: Nanos) -> bool {
        let mut moved = false;
        self.links.retain(|link, kept| {
            let rate = capacity(topology, *link);
            while kept.fades() && kept.fade_at <= now && kept.estimate.foreign.0 >= rate / 16 && rate > 0 {
                kept.estimate.foreign.0 /= 2;
                kept.fade_at = later(kept.fade_at, if kept.crossed { FADE_CROSSED } else { FADE_ALONE });
                moved = true;
            }
            !kept.fades() || kept.estimate.foreign.0 >= (rate / 16).max(1)
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
            let left = capacity(topology, *link).saturating_sub(kept.estimate.foreign.0);
            conditions.set_available(*link, Rate(left));
            if kept.estimate.failed {
                conditions.restrict(link.link, Use::Failed);
                risks.extend(topology.links().get(link.link.0).into_iter().flat_map(|link| &link.risk));
            }
        }
        if !risks.is_empty() {
            for (index, link) in topology.links().iter().enumerate() {
                if !link.risk.iter().all(|risk| !risks.contains(risk)) {
                    conditions.restrict(LinkId(index), Use::Avoid);
                }
            }
        }
        drains.all_links(topology).into_iter().for_each(|link| conditions.restrict(link, Use::Avoid));
        conditions
    }
}

impl Kept {
    fn new(estimate: Estimate, crossed: bool, now: Nanos) -> Self {
        let (probe_at, fade_at) = (Nanos(0), Nanos(0));
        let mut kept = Self {
            estimate,
            supported: false,
            by: BTreeSet::new(),
            crossed,
            probe_at,
            probe_every: FIRST_PROBE,
            good: 0,
            fade_at,
        };
        kept.look_again(now);
        kept
    }

    /// Things have changed: intervals begin anew.
    fn look_again(&mut self, now: Nanos) {
        self.good = 0;
        self.probe_every = FIRST_PROBE;
        self.probe_at = later(now, FIRST_PROBE);
        self.fade_at = later(now, if self.crossed { FADE_CROSSED } else { FADE_ALONE });
    }

    fn wants_probe(&self) -> bool {
        !self.crossed || self.estimate.failed
    }

    fn fades(&self) -> bool {
        !self.supported && !self.estimate.failed
    }
}

fn capacity(topology: &Topology, link: DirectedLink) -> u64 {
    topology.links().get(link.link.0).map_or(0, |link| link.rate.0)
}

fn percent(part: u64, whole: u64) -> u128 {
    u128::from(part) * 100 / u128::from(whole.max(1))
}

/// What others take of a link that carries `own` of ours: what we do not, within what such a verdict can mean. Where ours is
/// not known, half.
fn foreign_share(rate: u64, own: u64, level: Level) -> u64 {
    let left = rate.saturating_sub(own);
    match level {
        _ if own == 0 => rate / 2,
        Level::Severe => left.clamp(rate / 2, most_foreign(rate)),
        _ => left.clamp(rate / 4, rate / 2),
    }
}

fn later(now: Nanos, by: Nanos) -> Nanos {
    Nanos(now.0.saturating_add(by.0))
}

#[cfg(test)]
mod tests;
