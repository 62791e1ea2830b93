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
use harmonaize_planner::{Cause, Connection, DirectedLink, HostId, Level, Path, Probe, Rate, Verdict, Ways};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

/// How long an agent may take to answer.
const PATIENCE: Duration = Duration::from_secs(4);

/// Most probes at a time.
const MOST_OPEN: usize = 64;

/// Most hosts at each end that are looked at for a pair whose packets cross a link.
const MOST_HOSTS: usize = 48;

/// Bytes of a train, and how many are sent at most: others' steady traffic spreads all, own bursts and a busy host's pauses only
/// some.
#[derive(Clone, Copy, Debug)]
struct Trains {
    bytes: u32,
    most: u32,
    /// The last is one that came out slower than this part of its path's rate, in percent, in all of its parts.
    spread: u64,
}

/// Over a link that is not in use. The second half of a train counts, so that the first may empty the buckets of shapers.
const UNUSED: Trains = Trains { bytes: 384 << 10, most: 3, spread: 0 };

/// Over a path that is in use: shorter, for more buckets are empty there.
const USED: Trains = Trains { bytes: 256 << 10, most: 3, spread: 0 };

/// Over a path of which the agent says that little passes and a queue stands: with that fewer are enough, one where all of it is
/// spread, and if one was not, others follow as long as it is said.
const STARVED: Trains = Trains { most: 2, spread: 80, ..USED };

/// A train that comes out at so much of its path's rate, in percent, is the last: nobody was in its way.
const ENOUGH: u64 = 88;

/// Where a train and what came beside it take less than so much of a path's last link, in percent, that link did not hold it up.
const ROOM: u128 = 85;

/// What of others of ours was in a train's way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ours {
    Nothing,
    /// Their connections share links with it, and nobody counted what they carried meanwhile.
    Perhaps,
    /// They filled the last link together with it; or it came out quicker than it can, which tells nothing either.
    Something,
}

/// When a link that could not be looked at is due again.
const AGAIN: Duration = Duration::from_millis(100);

/// How long a connection is left alone after trains were sent for it.
#[derive(Clone, Copy, Debug)]
struct Alone {
    /// At least.
    least: Duration,
    /// After they found somebody; and on average where they find nobody again and again,
    most: Duration,
    /// which they may so often before that counts.
    in_vain: u32,
}

/// A connection whose path others congest, as its agent says.
const LEFT_ALONE: Alone =
    Alone { least: Duration::from_millis(250), most: Duration::from_secs(2), in_vain: 1 };

/// The same where the connection is starved: that is seldom said without cause.
const STARVED_ALONE: Alone =
    Alone { least: Duration::from_millis(40), most: Duration::from_millis(500), in_vain: 4 };

/// For how long what an agent said of a starved connection may wait, for other trains or for the end of a pause.
const WAITS: Duration = Duration::from_millis(100);

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
    proves: Option<Suspicion>,
}

/// A verdict that trains are to prove.
#[derive(Clone, Debug)]
struct Suspicion {
    verdict: Verdict,
    noticed: Noticed,
    /// Whether the agent says that the connection is starved, and nobody else of ours takes the rest.
    starved: bool,
}

/// A connection whose path others are said to congest.
#[derive(Clone, Debug)]
struct Suspected {
    usual: Pause,
    starved: Pause,
    heard: Duration,
    /// That it is starved could not be looked at, for other trains were under way, or until a time.
    waits: Option<(Suspicion, Option<Duration>)>,
}

/// When trains may be sent for a connection again.
#[derive(Clone, Copy, Debug)]
struct Pause {
    not_before: Duration,
    /// Until when what was sent in vain is made up for.
    made_up: Duration,
    limits: Alone,
}

impl Pause {
    fn new(now: Duration, limits: Alone) -> Self {
        Self { not_before: now, made_up: now, limits }
    }

    /// Trains told: where nobody was there too often in a row, it is left alone for longer.
    fn told(&mut self, now: Duration, clean: bool) {
        let Alone { least, most, in_vain } = self.limits;
        if !clean {
            (self.not_before, self.made_up) = (now.saturating_add(most), now);
            return;
        }
        self.made_up = self.made_up.max(now).saturating_add(most);
        let row = most.saturating_mul(in_vain);
        self.not_before = now.saturating_add(least).max(self.made_up.saturating_sub(row));
    }

    /// Trains met our own traffic, which has pauses: this belongs to no row.
    fn told_nothing(&mut self, now: Duration) {
        self.not_before = now.saturating_add(self.limits.least);
    }
}

impl Probes {
    pub(super) fn deadline(&self) -> Option<Duration> {
        let waiting = self.suspected.values().filter_map(|known| known.waits.as_ref()?.1);
        self.open.values().map(|asked| asked.deadline).chain(waiting).min()
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
        self.ask_probe(now, (from, to), path, UNUSED, None)
    }

    /// Whether it was asked.
    fn ask_probe(
        &mut self,
        now: Duration,
        (from, to): (HostId, HostId),
        path: Path,
        trains: Trains,
        proves: Option<Suspicion>,
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
        let spread_bits = topology.path_rate(&path).0 / 100 * trains.spread;
        let Trains { bytes, most: trains, .. } = trains;
        let deadline = now.saturating_add(PATIENCE);
        self.probes.open.insert(question, Asked { of, from, path, deadline, proves });
        let address = address.to_string();
        let message = v1::ProbePath { question, address, via, bytes, trains, enough_bits, spread_bits };
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
    /// with the least of others of ours in the way, among them those that send nothing of ours at all; not the one who looked last,
    /// where another is as good. And whether trains under way were in the way of some.
    fn prober(&self, link: DirectedLink) -> (Option<(HostId, HostId, Path)>, bool) {
        let topology = &self.settings.topology;
        let able = |host: &HostId| self.probe_address(*host).is_some();
        let last = self.probes.last.get(&link).copied();
        let ends = topology.across(link).map(|mut hosts| {
            hosts.retain(able);
            hosts.sort_by_cached_key(|host| (self.estimates.is_busy(*host), Some(*host) == last, *host));
            hosts.truncate(MOST_HOSTS);
            hosts
        });
        let [senders, receivers] = &ends;
        let (mut best, mut others_meet, mut ways) = (None, false, Ways::new(topology));
        for from in senders {
            let busy = self.estimates.is_busy(*from);
            for to in receivers.iter().filter(|to| *to != from) {
                let mut paths = ways.between(*from, *to).into_iter();
                let fits = |path: &Path| path.links().contains(&link) && self.is_named(path);
                let Some(path) = paths.find(fits) else { continue };
                if self.probes.meets(*from, &path) {
                    others_meet = true;
                    continue;
                }
                let rank = (self.estimates.others_on(*from, &path), busy);
                if rank == (0, false) {
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
    /// is to be made of the verdict. One of a connection that is `starved`, where nobody else of ours takes the rest, hardly waits. One
    /// of a connection that moves next to nothing is no news; but where others leave it next to nothing, that is all that it can
    /// move, so that where the queue is long and nobody of ours is in their way, trains are asked.
    pub(super) fn prove(
        &mut self,
        now: Duration,
        verdict: &Verdict,
        noticed: &Noticed,
        starved: bool,
    ) -> bool {
        let connection = verdict.connection;
        let (from, to) = (connection.from, connection.to);
        let able = self.probe_address(from).is_some() && self.probe_address(to).is_some();
        if verdict.level == Level::None || !able || !self.is_named(&verdict.path) {
            return false;
        }
        let alone = self.estimates.is_alone_before_last(from, &verdict.path);
        let starved = starved && alone;
        let faint = alone && verdict.level == Level::Severe;
        let news = starved || faint || self.estimates.is_news(&self.settings.topology, verdict);
        if !self.estimates.is_active(&connection) || !news {
            // Next to nothing passes: it found the queues of others of ours, or was acknowledged late, unless something was lost.
            return !verdict.lost;
        }
        self.probes.suspected.retain(|_, known| known.heard + FORGOTTEN > now);
        let fresh = || Suspected {
            usual: Pause::new(now, LEFT_ALONE),
            starved: Pause::new(now, STARVED_ALONE),
            heard: now,
            waits: None,
        };
        if self.probes.suspected.len() >= MOST_SUSPECTED && !self.probes.suspected.contains_key(&connection) {
            return true;
        }
        let known = self.probes.suspected.entry(connection).or_insert_with(fresh);
        known.heard = now;
        known.waits = None;
        let (pause, trains) = if starved { (known.starved, STARVED) } else { (known.usual, USED) };
        let suspicion = Suspicion { verdict: verdict.clone(), noticed: noticed.clone(), starved };
        if pause.not_before > now {
            known.waits = Some((suspicion, Some(pause.not_before))).filter(|_| starved);
            return true;
        }
        let proves = Some(suspicion.clone());
        let asked = self.ask_probe(now, (from, to), verdict.path.clone(), trains, proves);
        if let Some(known) = self.probes.suspected.get_mut(&connection).filter(|_| starved && !asked) {
            known.waits = Some((suspicion, None));
        }
        true
    }

    /// Trains have come in that others had to wait for, or pauses may have ended.
    pub(super) fn prove_waiting(&mut self, now: Duration) {
        let due = |known: &mut Suspected| {
            let (suspicion, _) = known.waits.take_if(|(_, until)| until.is_none_or(|until| until <= now))?;
            Some(suspicion).filter(|_| known.heard + WAITS > now)
        };
        let waiting: Vec<Suspicion> = self.probes.suspected.values_mut().filter_map(due).collect();
        if !waiting.is_empty() {
            self.measure_active(now);
        }
        for Suspicion { verdict, noticed, .. } in waiting {
            let heard = self.probes.suspected.get(&verdict.connection).map(|known| known.heard);
            self.prove(now, &verdict, &noticed, true);
            if let Some((known, heard)) = self.probes.suspected.get_mut(&verdict.connection).zip(heard) {
                known.heard = heard;
            }
        }
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
        // One that left slower than the path takes is spread by whoever sent it.
        let whole = self.settings.topology.path_rate(&path);
        let way = self.in_the_way(asked.from, &path, answer);
        let (received, beside, proves) = (answer.received_bits, answer.beside_bits, asked.proves.is_some());
        tracing::debug!(path = %self.path_text(&path), received, ?beside, ?way, sent, arrived, proves, "trains");
        let conclusive = way == Ours::Nothing && answer.sent_bits >= whole.0;
        let probe = if answer.unreachable {
            Probe { path, received: Rate(0), lost_ppm: 1_000_000, conclusive }
        } else if !answer.error.is_empty() || sent < 2 {
            return;
        } else {
            let lost_ppm = (u64::from(sent - arrived) * 1_000_000 / u64::from(sent)) as u32;
            Probe { path, received: Rate(answer.received_bits), lost_ppm, conclusive }
        };
        let (probe, way) = match probe.is_impossible(whole) {
            true => (Probe { conclusive: false, ..probe }, Ours::Something),
            false => (probe, way),
        };
        if !probe.is_clean(whole) && !probe.is_impossible(whole) {
            self.witness_probe(asked.from, &asked.path);
        }
        if probe.received.0 > 0 {
            self.crossed(now, asked.from, &asked.path);
        }
        if let Some(suspicion) = asked.proves {
            return self.proved(now, suspicion, &probe, (whole, way));
        }
        if self.estimates.probed(&self.settings.topology, nanos(now), &probe) {
            let host = self.host_name(asked.from);
            self.want_plan(Trigger::Probe { host });
        }
    }

    /// What of others of ours was in a train's way.
    fn in_the_way(&self, from: HostId, path: &Path, answer: &v1::PathProbed) -> Ours {
        if self.estimates.is_alone(from, path) {
            return Ours::Nothing;
        }
        let Some(beside) = answer.beside_bits.filter(|_| self.estimates.is_alone_before_last(from, path))
        else {
            return Ours::Perhaps;
        };
        let last = path.links().last().and_then(|link| self.settings.topology.links().get(link.link.0));
        let rate = u128::from(last.map_or(0, |link| link.rate.0));
        let came = u128::from(answer.received_bits) + u128::from(beside);
        if came * 100 < rate * ROOM { Ours::Nothing } else { Ours::Something }
    }

    /// What trains told of a verdict's path. Where traffic of ours may have been in their way, and nobody can say, the verdict has to
    /// speak for itself; that a connection is starved says too little for that.
    fn proved(&mut self, now: Duration, suspicion: Suspicion, probe: &Probe, (whole, way): (Rate, Ours)) {
        let Suspicion { verdict, noticed, starved } = suspicion;
        let clean = probe.is_clean(whole);
        let speaks = match way {
            Ours::Nothing => !starved,
            Ours::Perhaps => true,
            Ours::Something => false,
        };
        let told = clean || probe.conclusive || speaks;
        if clean || probe.conclusive {
            self.suspected(verdict.connection.from, !clean);
        }
        if let Some(known) = self.probes.suspected.get_mut(&verdict.connection) {
            match told {
                true => known.usual.told(now, clean),
                false => known.usual.told_nothing(now),
            }
            known.starved.told(now, clean || !told);
        }
        // The connection may be gone by now.
        if !told || !self.estimates.is_active(&verdict.connection) {
            return;
        }
        let verdict = if clean {
            Verdict { level: Level::None, ..verdict }
        } else if probe.conclusive && probe.received.0 > 0 {
            Verdict {
                cause: Cause::Others,
                foreign: Some(probe.foreign_on_path(&self.settings.topology)),
                ..verdict
            }
        } else {
            verdict
        };
        self.accept(now, verdict, noticed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_in_vain_is_looked_at_less_often_only_after_some_in_a_row() {
        let ms = Duration::from_millis;
        let mut pause = Pause::new(ms(0), STARVED_ALONE);
        let mut alone = |now: u64, clean| {
            pause.told(ms(now), clean);
            (pause.not_before - ms(now)).as_millis()
        };
        assert_eq!([0, 40, 80, 120].map(|now| alone(now, true)), [40; 4]);
        assert_eq!([160, 500, 1000].map(|now| alone(now, true)), [340, 500, 500], "one in half a second");
        assert_eq!([3000, 3040].map(|now| alone(now, true)), [40; 2], "what was long ago is made up for");
        assert_eq!(alone(3080, false), 500);
        assert_eq!([3580, 3620, 3660, 3700].map(|now| alone(now, true)), [40; 4], "it was right meanwhile");
        pause.told_nothing(ms(5600));
        assert_eq!(pause.not_before, ms(5640));
    }
}
