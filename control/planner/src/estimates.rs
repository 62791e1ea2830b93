//! Estimates of links from verdicts on paths: who congests what, how much is left, and when to look again.

use crate::conditions::{Conditions, Drains};
use crate::path::{DirectedLink, Path};
use crate::topology::{HostId, LinkId, Topology};
use crate::units::{Nanos, Rate};
use std::collections::{BTreeMap, BTreeSet};

/// One direction of an own connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Connection {
    /// Its communicator.
    pub communicator: u64,
    /// The epoch that it was made for.
    pub epoch: u64,
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
    /// We do: takes nothing from what is available.
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
}

/// What a train of packets along a path told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// The way that the packets took.
    pub path: Path,
    /// The rate at which they came out; 0 where too few arrived to tell.
    pub received: Rate,
    /// Of a million packets, those that were lost.
    pub lost_ppm: u32,
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

/// What is known of all links. Times are those of one steady clock; they come with each call.
#[derive(Clone, Debug, Default)]
pub struct Estimates {
    links: BTreeMap<DirectedLink, Estimate>,
}

impl Estimates {
    /// Which own connections carry traffic now, with their path and rate (0 where not known): all of them, instead of those
    /// told before. Those without a verdict speak for their links.
    pub fn active(
        &mut self,
        topology: &Topology,
        now: Nanos,
        connections: Vec<(Connection, Path, Rate)>,
    ) -> bool {
        let _ = (topology, now, connections);
        false
    }

    /// Takes a verdict; whether an estimate moved so that planning anew may be worth it.
    pub fn verdict(&mut self, topology: &Topology, now: Nanos, verdict: Verdict) -> bool {
        if verdict.level == Level::None || verdict.cause == Cause::Own {
            return false;
        }
        for link in verdict.path.links() {
            let rate = topology.links().get(link.link.0).map_or(0, |link| link.rate.0);
            self.links.insert(
                *link,
                Estimate {
                    foreign: Rate(rate / 2),
                    failed: false,
                    since: now,
                    seen: now,
                    confidence_ppm: 1_000_000 / verdict.path.links().len().max(1) as u32,
                    evidence: String::new(),
                },
            );
        }
        true
    }

    /// Takes what a probe told; whether an estimate moved.
    pub fn probed(&mut self, topology: &Topology, now: Nanos, probe: &Probe) -> bool {
        let _ = (topology, now, probe);
        false
    }

    /// A link passes nothing any more, in either direction; whether that is new.
    pub fn fail(&mut self, topology: &Topology, now: Nanos, link: LinkId) -> bool {
        let _ = (topology, now, link);
        false
    }

    /// A failed link passes again; whether that is new.
    pub fn restore(&mut self, now: Nanos, link: LinkId) -> bool {
        let _ = (now, link);
        false
    }

    /// Links that a probe should look at now: congested or failed, crossed by no traffic of ours, and due. Each told counts
    /// as looked at: it is due again after its interval, which doubles from 250 ms to 10 s while probes find it congested.
    pub fn probes_due(&mut self, now: Nanos) -> Vec<DirectedLink> {
        let _ = now;
        Vec::new()
    }

    /// When [`Estimates::probes_due`] or [`Estimates::settle`] next has something to do; none while nothing is congested.
    pub fn next_due(&self) -> Option<Nanos> {
        None
    }

    /// Lets estimates that nothing has spoken for fade; whether one moved. To be called when due, and may be at any time.
    pub fn settle(&mut self, topology: &Topology, now: Nanos) -> bool {
        let _ = (topology, now);
        false
    }

    /// What is thought of each link that is not as the topology says.
    pub fn links(&self) -> impl Iterator<Item = (DirectedLink, &Estimate)> {
        self.links.iter().map(|(link, estimate)| (*link, estimate))
    }

    /// The fabric as it is thought to be, with what operators drain.
    pub fn conditions(&self, topology: &Topology, drains: &Drains) -> Conditions {
        let mut conditions = Conditions::clear(topology);
        for (link, estimate) in &self.links {
            let rate = topology.links().get(link.link.0).map_or(0, |link| link.rate.0);
            conditions.set_available(*link, Rate(rate.saturating_sub(estimate.foreign.0)));
        }
        let drained: BTreeSet<LinkId> = drains.all_links(topology);
        drained.into_iter().for_each(|link| conditions.restrict(link, crate::conditions::Use::Avoid));
        conditions
    }
}
