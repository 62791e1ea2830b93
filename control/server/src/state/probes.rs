//! Probes: links that no traffic of ours crosses any more are looked at by trains of packets, so that they come back to use.

use super::decisions::Trigger;
use super::verdicts::nanos;
use super::{SessionId, State};
use harmonaize_api::v1::{self, to_agent};
use harmonaize_planner::{DirectedLink, HostId, Path, Probe, Rate};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

/// How long an agent may take to answer.
const PATIENCE: Duration = Duration::from_secs(4);

/// Most probes at a time, and of one agent.
const MOST_OPEN: usize = 64;

/// Most hosts at each end that are looked at for a pair whose packets cross a link.
const MOST_HOSTS: usize = 48;

/// Bytes of a train: its second half counts, so that the first may empty the buckets of shapers on the way.
const TRAIN: u32 = 384 << 10;

/// Questions that are open.
#[derive(Debug, Default)]
pub(super) struct Probes {
    asked: u64,
    open: BTreeMap<u64, Asked>,
    /// Who was asked last about a link: the next time it is another, where there is one.
    last: BTreeMap<DirectedLink, HostId>,
}

/// A probe that waits for its answer.
#[derive(Debug)]
struct Asked {
    of: SessionId,
    from: HostId,
    to: HostId,
    path: Path,
    deadline: Duration,
}

impl Probes {
    pub(super) fn deadline(&self) -> Option<Duration> {
        self.open.values().map(|asked| asked.deadline).min()
    }
}

impl State {
    /// Asks agents about links that are due.
    pub(super) fn ask_probes(&mut self, now: Duration) {
        self.probes.open.retain(|_, asked| asked.deadline > now && self.sessions.contains_key(&asked.of));
        self.measure_active(now);
        let due = self.estimates.probes_due(nanos(now));
        for link in due {
            if self.probes.open.len() < MOST_OPEN {
                self.ask_probe(now, link);
            }
        }
    }

    fn ask_probe(&mut self, now: Duration, link: DirectedLink) {
        let Some((from, to, path)) = self.prober(link) else { return };
        let session = |host: &HostId| self.hosts.get(host).copied();
        let Some(of) = session(&from) else { return };
        let Some(address) = self.probe_address(to) else { return };
        let topology = &self.settings.topology;
        let via = topology.switches_of(&path).into_iter().map(|switch| {
            let addresses = topology.switches().get(switch.0).map_or(&[][..], |switch| &switch.addresses);
            v1::Hop { addresses: addresses.iter().take(256).map(ToString::to_string).collect() }
        });
        let via: Vec<v1::Hop> = via.collect();
        self.probes.asked += 1;
        let question = self.probes.asked;
        let deadline = now.saturating_add(PATIENCE);
        self.probes.last.insert(link, from);
        self.probes.open.insert(question, Asked { of, from, to, path, deadline });
        let address = address.to_string();
        self.send(of, to_agent::Message::ProbePath(v1::ProbePath { question, address, via, bytes: TRAIN }));
    }

    fn probe_address(&self, host: HostId) -> Option<SocketAddr> {
        self.sessions.get(self.hosts.get(&host)?)?.abilities.probe
    }

    /// Who may look at a link: two hosts and a path between them that crosses it and of which every switch can be named. Not the
    /// one who looked last, where another can; hosts that send little rather than others.
    fn prober(&self, link: DirectedLink) -> Option<(HostId, HostId, Path)> {
        let topology = &self.settings.topology;
        let able = |host: &HostId| self.probe_address(*host).is_some();
        let mut hosts: Vec<HostId> = self.hosts.keys().copied().filter(able).collect();
        let last = self.probes.last.get(&link).copied();
        let busy: Vec<HostId> = self.probes.open.values().map(|asked| asked.from).collect();
        hosts.sort_by_key(|host| (Some(*host) == last, busy.contains(host), self.own_bits(*host), *host));
        let named = |path: &Path| {
            let switches = topology.switches_of(path);
            let known = |id: &harmonaize_planner::SwitchId| {
                topology.switches().get(id.0).is_some_and(|switch| !switch.addresses.is_empty())
            };
            !switches.is_empty() && switches.iter().all(known)
        };
        for from in hosts.iter().take(MOST_HOSTS).filter(|from| !busy.contains(from)) {
            for to in hosts.iter().take(MOST_HOSTS).filter(|to| *to != from) {
                let paths = topology.equal_cost_paths(*from, *to);
                if let Some(path) = paths.into_iter().find(|path| path.links().contains(&link) && named(path))
                {
                    return Some((*from, *to, path));
                }
            }
        }
        None
    }

    /// An agent's answer. It speaks of the path that was asked about.
    pub(super) fn probed(&mut self, now: Duration, from: SessionId, answer: &v1::PathProbed) {
        if self.probes.open.get(&answer.question).is_none_or(|asked| asked.of != from) {
            return;
        }
        let Some(asked) = self.probes.open.remove(&answer.question) else { return };
        let sent = answer.packets_sent;
        let arrived = answer.packets_received.min(sent);
        let probe = if answer.unreachable {
            Probe { path: asked.path.clone(), received: Rate(0), lost_ppm: 1_000_000 }
        } else if !answer.error.is_empty() || sent < 2 {
            return;
        } else {
            let lost = u64::from(sent - arrived) * 1_000_000 / u64::from(sent);
            let received = self.without_own(&asked, Rate(answer.received_bits));
            Probe { path: asked.path.clone(), received, lost_ppm: lost as u32 }
        };
        let whole = self.settings.topology.path_rate(&asked.path).0;
        if probe.received.0 < whole / 5 * 4 {
            self.witness_probe(asked.from, &asked.path);
        }
        if probe.received.0 > 0 {
            self.crossed(now, asked.from, &asked.path);
        }
        if self.estimates.probed(&self.settings.topology, nanos(now), &probe) {
            let host = self.host_name(asked.from);
            self.want_plan(Trigger::Probe { host });
        }
    }

    /// The rate at which a train would have arrived if the hosts at its ends had not sent and received anything else of ours
    /// meanwhile: through a queue that others fill at a rate f, a train at C comes out at C C / (C + f).
    fn without_own(&self, asked: &Asked, received: Rate) -> Rate {
        let whole = self.settings.topology.path_rate(&asked.path).0;
        let own = self.own_bits(asked.from).max(self.own_bits(asked.to)).min(whole);
        let scaled =
            u128::from(received.0) * (u128::from(whole) + u128::from(own)) / u128::from(whole.max(1));
        Rate(scaled.min(u128::from(whole)) as u64)
    }
}
