//! Agents' verdicts on the paths of their own connections: taken within bounds, placed on paths, handed to the estimates.

use super::decisions::{Noticed, Trigger};
use super::lately::PerSecond;
use super::ports::Pair;
use super::trace::pair_of;
use super::{SessionId, State, telemetry};
use harmonaize_api::v1::{self, CongestionCause, CongestionLevel};
use harmonaize_planner::{Cause, Connection, DirectedLink, HostId, Level, Nanos, Node, Path, Rate, Verdict};
use std::collections::BTreeMap;
use std::time::Duration;

/// Most verdicts that an agent may tell in a second; as many at once after a pause.
pub(super) const MOST_A_SECOND: u32 = 100;

/// Most verdicts that wait until the way of their connection is known, and for how long.
const MOST_UNPLACED: usize = 256;
const UNPLACED_FOR: Duration = Duration::from_secs(3);

/// Most hosts that are remembered to have spoken against a link.
const MOST_WITNESSES: usize = 8;

/// What is remembered of verdicts.
#[derive(Debug, Default)]
pub(super) struct Verdicts {
    heard: BTreeMap<HostId, Heard>,
    /// By pair and port: verdicts whose way is not known yet.
    unplaced: BTreeMap<(Pair, u16, HostId), (Duration, SessionId, v1::PathCongestion)>,
    /// Which hosts spoke against a link.
    witnesses: BTreeMap<DirectedLink, Vec<HostId>>,
}

/// What one host's agent may still say, and what of it was not taken.
#[derive(Clone, Debug, Default)]
pub(super) struct Heard {
    may: PerSecond,
    taken: u64,
    dropped: u64,
    refused: u64,
    /// What trains told of those that others congest a path: that it is so, and that it is not.
    proven: u64,
    refuted: u64,
}

impl State {
    /// An agent's verdict. It has an effect only if it is about a connection of the agent's own, and comes no faster than it may.
    pub(super) fn path_congestion(&mut self, now: Duration, from: SessionId, told: v1::PathCongestion) {
        let Some(host) = self.sessions.get(&from).map(|session| session.host) else { return };
        let heard = self.verdicts.heard.entry(host).or_default();
        if !heard.may.take(now, MOST_A_SECOND) {
            heard.dropped += 1;
            let count = heard.dropped;
            return self.unusual(host, count, "verdicts on paths come faster than they may");
        }
        match self.place(now, from, host, told) {
            Ok(()) => self.verdicts.heard.entry(host).or_default().taken += 1,
            Err(why) => {
                let heard = self.verdicts.heard.entry(host).or_default();
                heard.refused += 1;
                let count = heard.refused;
                self.unusual(host, count, &why);
            }
        }
    }

    /// Finds the connection and its path. One that has ended is no fault; neither is one whose path is not known yet.
    fn place(
        &mut self,
        now: Duration,
        from: SessionId,
        host: HostId,
        told: v1::PathCongestion,
    ) -> Result<(), String> {
        let Some(found) = &told.congestion else {
            return Err("a verdict on a path without a verdict".to_owned());
        };
        telemetry::check_congestion(found)?;
        if found.ingress {
            return Err("a verdict on a path, of what comes in".to_owned());
        }
        let port = u16::try_from(told.source_port).map_err(|_| format!("port {}", told.source_port))?;
        let Some(known) = self.communicators.get(&told.communicator) else { return Ok(()) };
        let me = known.index_of(from).ok_or("a verdict on a communicator of others")?;
        let peer = known.members.get(told.peer as usize).map(|member| member.host);
        let Some(peer) = peer.filter(|_| told.peer as usize != me) else {
            return Err(format!("a verdict on the connection to participant {}", told.peer));
        };
        if told.epoch == 0 || told.epoch >= known.next_epoch {
            return Err(format!("a verdict on epoch {}, which never was", told.epoch));
        }
        let pair = pair_of(host, peer);
        if self.ports.traced(pair, port).is_none() && !self.adopt_port(now, &told, me, pair, port) {
            return Err(format!("a verdict on port {port}, which no connection to that participant has"));
        }
        match self.path_of(host, peer, port).cloned() {
            Some(path) => self.believe(now, host, peer, port, &path, &told),
            None if self.verdicts.unplaced.len() < MOST_UNPLACED => {
                self.verdicts.unplaced.insert((pair, port, host), (now, from, told));
                self.trace_anew(now, [pair].into_iter());
                self.ask_traces(now);
            }
            None => {}
        }
        Ok(())
    }

    /// Learns a port that an earlier control had given to a connection, or that the kernel chose. Whether it may be so.
    fn adopt_port(
        &mut self,
        now: Duration,
        told: &v1::PathCongestion,
        me: usize,
        pair: Pair,
        port: u16,
    ) -> bool {
        let most = self.settings.paths as usize;
        let Some(known) = self.communicators.get_mut(&told.communicator) else { return false };
        let peer = told.peer as usize;
        let ports = known.links.entry((me.min(peer) as u32, me.max(peer) as u32)).or_default();
        let open = ports.iter().position(|known| *known == 0);
        let room = ports.len() < most || open.is_some();
        if port == 0 || told.epoch != known.epoch || !room || !self.ports.adopt(pair, port, &mut known.ports)
        {
            return false;
        }
        match open.and_then(|at| ports.get_mut(at)) {
            Some(slot) => *slot = port,
            None => ports.push(port),
        }
        self.want_traced(now, [pair].into_iter());
        true
    }

    /// Has a verdict proven, or takes it as it is where that cannot be.
    fn believe(
        &mut self,
        now: Duration,
        from: HostId,
        to: HostId,
        port: u16,
        path: &Path,
        told: &v1::PathCongestion,
    ) {
        let Some(found) = &told.congestion else { return };
        let level = match found.level() {
            CongestionLevel::Mild => Level::Mild,
            CongestionLevel::Severe => Level::Severe,
            CongestionLevel::None | CongestionLevel::Unspecified => Level::None,
        };
        let cause = match found.cause() {
            CongestionCause::Own => Cause::Own,
            CongestionCause::Foreign => Cause::Others,
            CongestionCause::Unspecified => Cause::Unknown,
        };
        let connection = Connection { communicator: told.communicator, from, to, port };
        let (path, own, lost) = (path.clone(), Rate(found.own_bits), found.loss || found.marks);
        let verdict = Verdict { connection, path, level, cause, own, lost, foreign: None };
        if level == Level::Severe && cause != Cause::Own {
            self.queue_stands(now, told.communicator);
        }
        if level == Level::Severe && found.loss {
            // It may be dead: whether it is, a trace tells.
            self.suspect(now, &verdict.path);
        }
        let noticed = Noticed {
            host: self.host_name(from),
            path: self.path_text(&verdict.path),
            what: words(level, cause, own),
            since_ns: found.since_ns,
            found_ns: found.found_ns,
            received: now,
        };
        self.measure_active(now);
        let (path, what, starved) = (&noticed.path, noticed.what.as_str(), found.starved);
        tracing::debug!(%path, %what, starved, "a verdict");
        if !self.prove(now, &verdict, &noticed, found.starved) {
            self.accept(now, verdict, noticed);
        }
    }

    /// Hands a verdict to the estimates.
    pub(super) fn accept(&mut self, now: Duration, verdict: Verdict, noticed: Noticed) {
        let others = verdict.foreign.is_some() || verdict.cause != Cause::Own;
        if verdict.level != Level::None && others && self.estimates.is_news(&self.settings.topology, &verdict)
        {
            self.witness(verdict.connection.from, &verdict.path);
        }
        if self.estimates.verdict(&self.settings.topology, nanos(now), verdict) {
            self.want_plan(Trigger::Verdict(noticed));
        }
    }

    /// A pair's paths were learned: what waited for that is looked at again.
    pub(super) fn place_again(&mut self, now: Duration, pair: Pair) {
        let waiting: Vec<_> = self
            .verdicts
            .unplaced
            .range((pair, 0, HostId(0))..=(pair, u16::MAX, HostId(usize::MAX)))
            .map(|(key, _)| *key)
            .collect();
        for key in waiting {
            let known =
                self.ports.traced(pair, key.1).is_some_and(|port| port.leg(key.2 != pair.0).is_some());
            if !known {
                continue;
            }
            if let Some((at, from, told)) = self.verdicts.unplaced.remove(&key)
                && at + UNPLACED_FOR > now
                && self.sessions.contains_key(&from)
            {
                let _ = self.place(now, from, key.2, told);
            }
        }
        self.verdicts.unplaced.retain(|_, (at, _, _)| *at + UNPLACED_FOR > now);
    }

    fn witness(&mut self, host: HostId, path: &Path) {
        for link in path.links() {
            let witnesses = self.verdicts.witnesses.entry(*link).or_default();
            if witnesses.len() < MOST_WITNESSES && !witnesses.contains(&host) {
                witnesses.push(host);
            }
        }
    }

    /// A probe of this host's found a link congested.
    pub(super) fn witness_probe(&mut self, host: HostId, path: &Path) {
        let known: Vec<DirectedLink> = self.estimates.links().map(|(link, _)| link).collect();
        if known.iter().any(|link| path.links().contains(link)) {
            self.witness(host, path);
        }
    }

    /// Links that are thought to be congested on the word of a single host, and those hosts: one agent's word moves only
    /// communicators that it has a part in.
    pub(super) fn uncorroborated(&mut self) -> BTreeMap<DirectedLink, HostId> {
        let known: BTreeMap<DirectedLink, bool> =
            self.estimates.links().map(|(link, estimate)| (link, estimate.failed)).collect();
        self.verdicts.witnesses.retain(|link, _| known.contains_key(link));
        let alone = known.iter().filter(|(_, failed)| !**failed);
        let alone = alone.filter_map(|(link, _)| match self.verdicts.witnesses.get(link)?.as_slice() {
            [one] => Some((*link, *one)),
            _ => None,
        });
        alone.collect()
    }

    /// What an agent's verdicts came to: taken, dropped as too many, refused as wrong.
    pub fn verdict_counts(&self, host: &str) -> (u64, u64, u64) {
        let heard = self.settings.topology.host(host).and_then(|host| self.verdicts.heard.get(&host));
        heard.map_or((0, 0, 0), |heard| (heard.taken, heard.dropped, heard.refused))
    }

    /// Trains have told whether a host's agent was right that others congest a path.
    pub(super) fn suspected(&mut self, host: HostId, proven: bool) {
        let heard = self.verdicts.heard.entry(host).or_default();
        let count = if proven { &mut heard.proven } else { &mut heard.refuted };
        *count += 1;
    }

    /// What became of suspicions since control began, of all agents: proven, and refuted.
    pub(super) fn suspicions(&self) -> (u64, u64) {
        let heard = self.verdicts.heard.values();
        heard.fold((0, 0), |(proven, refuted), one| (proven + one.proven, refuted + one.refuted))
    }

    /// For operators: what became of the verdicts of a host's agent.
    pub(super) fn tell_verdicts(&self, host: HostId, told: &mut v1::HostTelemetry) {
        let Some(heard) = self.verdicts.heard.get(&host) else { return };
        (told.verdicts, told.verdicts_dropped, told.verdicts_refused) =
            (heard.taken, heard.dropped, heard.refused);
        (told.suspicions_proven, told.suspicions_refuted) = (heard.proven, heard.refuted);
    }

    /// A path in words: its host, switches and host.
    pub(super) fn path_text(&self, path: &Path) -> String {
        let topology = &self.settings.topology;
        let ends: Vec<(Node, Node)> = path.links().iter().filter_map(|link| topology.ends(*link)).collect();
        let nodes = ends.first().map(|(from, _)| *from).into_iter().chain(ends.iter().map(|(_, to)| *to));
        nodes.map(|node| topology.node_name(node)).collect::<Vec<_>>().join(" > ")
    }
}

fn words(level: Level, cause: Cause, own: Rate) -> String {
    let level = match level {
        Level::None => return "no congestion any more".to_owned(),
        Level::Mild => "mild",
        Level::Severe => "severe",
    };
    let cause = match cause {
        Cause::Own => ", our own",
        Cause::Others => ", by others",
        Cause::Unknown => "",
    };
    format!("{level} congestion{cause}, with {own} of ours")
}

/// Control's time as the planner counts it.
pub(super) fn nanos(time: Duration) -> Nanos {
    Nanos(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}
