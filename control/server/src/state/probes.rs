//! Probes: trains of packets over links that no traffic of ours crosses any more, so that they come back to use; and over paths of
//! which agents say that others congest them, before that is believed.
//!
//! Two trains that meet tell nothing of anybody else, so no two cross the same link at a time. The best prober of a link is a
//! host of which nothing of ours is in the train's way, not even its own traffic: one that is quiet, or the one that sends to
//! the train's target anyway, by another path. The train then takes the place of the job's own bytes on the links of both.

use super::decisions::{Noticed, Trigger};
use super::verdicts::nanos;
use super::{SessionId, State};
use harmonaize_api::v1::{self, to_agent};
use harmonaize_planner::{Cause, Connection, DirectedLink, HostId, Level, Path, Probe, Rate, Verdict};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

/// How long an agent may take to answer.
const PATIENCE: Duration = Duration::from_secs(4);

/// Most probes at a time.
const MOST_OPEN: usize = 64;

/// Most hosts at each end that are looked at for a pair whose packets cross a link.
const MOST_HOSTS: usize = 48;

/// Bytes of a train: its second half counts, so that the first may empty the buckets of shapers on the way.
const TRAIN: u32 = 384 << 10;

/// How many are sent at most: others' steady traffic spreads all, own bursts and a busy host's pauses only some.
const TRAINS: u32 = 3;

/// A train that comes out at so much of its path's rate, in percent, is the last: nobody was in its way.
const ENOUGH: u64 = 88;

/// When a link that could not be looked at is due again.
const AGAIN: Duration = Duration::from_millis(100);

/// How long a connection is left alone after trains found nobody on its path, at first and at most; the latter also after they
/// found somebody.
const LEFT_ALONE: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(2));

/// When a connection of which nobody complained is forgotten.
const FORGOTTEN: Duration = Duration::from_secs(10);

/// Most connections that are kept in mind.
const MOST_SUSPECTED: usize = 4096;

/// Questions that are open.
#[derive(Debug, Default)]
pub(super) struct Probes {
    asked: u64,
    open: BTreeMap<u64, Asked>,
    /// Who was asked last about a link: the next time it is another, where there is one as good.
    last: BTreeMap<DirectedLink, HostId>,
    suspected: BTreeMap<Connection, Suspected>,
}

/// A probe that waits for its answer.
#[derive(Debug)]
struct Asked {
    of: SessionId,
    from: HostId,
    path: Path,
    deadline: Duration,
    /// The verdict that it is to prove.
    proves: Option<(Verdict, Noticed)>,
}

/// A connection whose path others are said to congest.
#[derive(Clone, Copy, Debug)]
struct Suspected {
    not_before: Duration,
    pause: Duration,
    heard: Duration,
}

impl Probes {
    pub(super) fn deadline(&self) -> Option<Duration> {
        self.open.values().map(|asked| asked.deadline).min()
    }

    /// Whether a train under way crosses a link of a path, or leaves the same host.
    fn meets(&self, from: HostId, path: &Path) -> bool {
        let crosses = |other: &Path| other.links().iter().any(|link| path.links().contains(link));
        self.open.values().any(|asked| asked.from == from || crosses(&asked.path))
    }
}

impl State {
    /// Asks agents about links that are due.
    pub(super) fn ask_probes(&mut self, now: Duration) {
        self.probes.open.retain(|_, asked| asked.deadline > now && self.sessions.contains_key(&asked.of));
        self.measure_active(now);
        for link in self.estimates.probes_due(nanos(now)) {
            // A train that crosses several tells of all.
            let told = self.probes.open.values().any(|asked| asked.path.links().contains(&link));
            if !told && !self.ask_about(now, link) {
                self.estimates.look_again_at(link, nanos(now.saturating_add(AGAIN)));
            }
        }
    }

    /// Whether somebody was asked, or nobody can be.
    fn ask_about(&mut self, now: Duration, link: DirectedLink) -> bool {
        let (prober, others_meet) = self.prober(link);
        let Some((from, to, path)) = prober else { return !others_meet };
        self.probes.last.insert(link, from);
        self.ask_probe(now, (from, to), path, None)
    }

    /// Whether it was asked.
    fn ask_probe(
        &mut self,
        now: Duration,
        (from, to): (HostId, HostId),
        path: Path,
        proves: Option<(Verdict, Noticed)>,
    ) -> bool {
        let (Some(of), Some(address)) = (self.hosts.get(&from).copied(), self.probe_address(to)) else {
            return false;
        };
        if self.probes.open.len() >= MOST_OPEN || self.probes.meets(from, &path) {
            return false;
        }
        let topology = &self.settings.topology;
        let via = topology.switches_of(&path).into_iter().map(|switch| {
            let addresses = topology.switches().get(switch.0).map_or(&[][..], |switch| &switch.addresses);
            v1::Hop { addresses: addresses.iter().take(256).map(ToString::to_string).collect() }
        });
        let via: Vec<v1::Hop> = via.collect();
        self.probes.asked += 1;
        let question = self.probes.asked;
        let enough_bits = topology.path_rate(&path).0 / 100 * ENOUGH;
        let deadline = now.saturating_add(PATIENCE);
        self.probes.open.insert(question, Asked { of, from, path, deadline, proves });
        let (address, bytes, trains) = (address.to_string(), TRAIN, TRAINS);
        let message = v1::ProbePath { question, address, via, bytes, trains, enough_bits };
        self.send(of, to_agent::Message::ProbePath(message));
        true
    }

    fn probe_address(&self, host: HostId) -> Option<SocketAddr> {
        self.sessions.get(self.hosts.get(&host)?)?.abilities.probe
    }

    /// Whether every switch of a path can be named.
    fn is_named(&self, path: &Path) -> bool {
        let topology = &self.settings.topology;
        let switches = topology.switches_of(path);
        let known = |id: &harmonaize_planner::SwitchId| {
            topology.switches().get(id.0).is_some_and(|switch| !switch.addresses.is_empty())
        };
        !switches.is_empty() && switches.iter().all(known)
    }

    /// Who may look at a link: two hosts and a path between them that crosses it and of which every switch can be named. First those
    /// with nothing of others of ours in the way, among them those that send nothing of ours at all; not the one who looked last,
    /// where another is as good. And whether trains under way were in the way of some.
    fn prober(&self, link: DirectedLink) -> (Option<(HostId, HostId, Path)>, bool) {
        let topology = &self.settings.topology;
        let able = |host: &HostId| self.probe_address(*host).is_some();
        let mut hosts: Vec<HostId> = self.hosts.keys().copied().filter(able).collect();
        let last = self.probes.last.get(&link).copied();
        hosts.sort_by_cached_key(|host| (self.estimates.is_busy(*host), Some(*host) == last, *host));
        let (mut best, mut others_meet) = (None, false);
        for from in hosts.iter().take(MOST_HOSTS) {
            let busy = self.estimates.is_busy(*from);
            for to in hosts.iter().take(MOST_HOSTS).filter(|to| *to != from) {
                let mut paths = topology.equal_cost_paths(*from, *to).into_iter();
                let fits = |path: &Path| path.links().contains(&link) && self.is_named(path);
                let Some(path) = paths.find(fits) else { continue };
                if self.probes.meets(*from, &path) {
                    others_meet = true;
                    continue;
                }
                let rank = (!self.estimates.is_alone(*from, &path), busy);
                if rank == (false, false) {
                    return (Some((*from, *to, path)), false);
                }
                if best.as_ref().is_none_or(|(least, _)| rank < *least) {
                    best = Some((rank, (*from, *to, path)));
                }
            }
        }
        (best.map(|(_, found)| found), others_meet)
    }

    /// Has trains tell whether a verdict is right, before it is believed. Whether that is so, or was so a moment ago, and nothing else
    /// is to be made of the verdict.
    pub(super) fn prove(&mut self, now: Duration, verdict: &Verdict, noticed: &Noticed) -> bool {
        let connection = verdict.connection;
        let (from, to) = (connection.from, connection.to);
        let able = self.probe_address(from).is_some() && self.probe_address(to).is_some();
        if verdict.level == Level::None || !able || !self.is_named(&verdict.path) {
            return false;
        }
        let news = self.estimates.is_news(&self.settings.topology, verdict);
        if !self.estimates.is_active(&connection) || !news {
            // Next to nothing passes: it found the queues of others of ours, unless something was lost.
            return !verdict.lost;
        }
        self.probes.suspected.retain(|_, known| known.heard + FORGOTTEN > now);
        let fresh = Suspected { not_before: now, pause: LEFT_ALONE.0, heard: now };
        if self.probes.suspected.len() >= MOST_SUSPECTED && !self.probes.suspected.contains_key(&connection) {
            return true;
        }
        let known = self.probes.suspected.entry(connection).or_insert(fresh);
        known.heard = now;
        if known.not_before <= now {
            let proves = Some((verdict.clone(), noticed.clone()));
            self.ask_probe(now, (from, to), verdict.path.clone(), proves);
        }
        true
    }

    /// An agent's answer. It speaks of the path that was asked about.
    pub(super) fn probed(&mut self, now: Duration, from: SessionId, answer: &v1::PathProbed) {
        if self.probes.open.get(&answer.question).is_none_or(|asked| asked.of != from) {
            return;
        }
        let Some(asked) = self.probes.open.remove(&answer.question) else { return };
        let sent = answer.packets_sent;
        let arrived = answer.packets_received.min(sent);
        let path = asked.path.clone();
        self.measure_active(now);
        let conclusive = self.estimates.is_alone(asked.from, &path);
        let probe = if answer.unreachable {
            Probe { path, received: Rate(0), lost_ppm: 1_000_000, conclusive }
        } else if !answer.error.is_empty() || sent < 2 {
            return;
        } else {
            let lost_ppm = (u64::from(sent - arrived) * 1_000_000 / u64::from(sent)) as u32;
            Probe { path, received: Rate(answer.received_bits), lost_ppm, conclusive }
        };
        let whole = self.settings.topology.path_rate(&asked.path);
        if !probe.is_clean(whole) {
            self.witness_probe(asked.from, &asked.path);
        }
        if probe.received.0 > 0 {
            self.crossed(now, asked.from, &asked.path);
        }
        if let Some((verdict, noticed)) = asked.proves {
            return self.proved(now, verdict, noticed, &probe, whole);
        }
        if self.estimates.probed(&self.settings.topology, nanos(now), &probe) {
            let host = self.host_name(asked.from);
            self.want_plan(Trigger::Probe { host });
        }
    }

    /// What trains told of a verdict's path. Where traffic of ours may have been in their way, the verdict has to speak for itself.
    fn proved(&mut self, now: Duration, verdict: Verdict, noticed: Noticed, probe: &Probe, whole: Rate) {
        let clean = probe.is_clean(whole);
        if let Some(known) = self.probes.suspected.get_mut(&verdict.connection) {
            let pause = if clean { known.pause } else { LEFT_ALONE.1 };
            known.not_before = now.saturating_add(pause);
            known.pause = if clean { pause.saturating_mul(2).min(LEFT_ALONE.1) } else { LEFT_ALONE.0 };
        }
        // The connection may be gone by now.
        if !self.estimates.is_active(&verdict.connection) {
            return;
        }
        let verdict = if clean {
            Verdict { level: Level::None, ..verdict }
        } else if probe.conclusive && probe.received.0 > 0 {
            Verdict { cause: Cause::Others, foreign: Some(probe.foreign(whole)), ..verdict }
        } else {
            verdict
        };
        self.accept(now, verdict, noticed);
    }
}
