//! Probes: trains of packets over links and paths. Over links that no traffic of ours crosses any more, so
//! that they come back to use. Over paths that agents report as congested by others, before that is believed.
//!
//! Two trains that meet tell nothing of anybody else, so no two cross the same link at a time. The best
//! prober of a link is a host of which nothing of ours is in the train's way, not even its own traffic: one
//! that is quiet, or the one that sends to the train's target anyway, by another path. The train then takes
//! the place of the job's own bytes on the links of both.

use super::LinkState;
use super::ports::pair_of;
use super::probing::{BACKOFF, Claim, Pause, Paused, PendingProbe, PendingReport, Reported, STARVED_BACKOFF};
use crate::state::ctx::Ctx;
use crate::state::effects::Effects;
use crate::state::job::decisions::{Noticed, Trigger};
use crate::state::output::SessionId;
use crate::state::time::nanos;
use harmonaize_abi::{CongestionCause, CongestionLevel};
use harmonaize_api::v1::{self, to_agent};
use harmonaize_planner::{CongestionReport, Connection, DirectedLink, HostId, Path, PathFinder, Probe, Rate};
use std::time::Duration;

/// How long an agent may take to answer.
const PATIENCE: Duration = Duration::from_secs(4);

/// Most probes at a time.
const MOST_OPEN: usize = 64;

/// Most hosts at each end that are looked at for a pair whose packets cross a link.
const MOST_HOSTS: usize = 48;

/// Bytes of a train, and how many are sent at most. Others' steady traffic spreads all, own bursts and a busy
/// host's pauses only some.
#[derive(Clone, Copy, Debug)]
struct Trains {
    bytes: u32,
    most: u32,
    /// The percentage of its path's rate below which a train is the last. All of its parts must have come out
    /// slower than that.
    spread: u64,
}

/// Over a link that is not in use. The second half of a train counts, so that the first may empty the buckets
/// of shapers.
const UNUSED: Trains = Trains { bytes: 384 << 10, most: 3, spread: 0 };

/// Over a path that is in use: shorter, for more buckets are empty there.
const USED: Trains = Trains { bytes: 256 << 10, most: 3, spread: 0 };

/// Over a path of which the agent says that little passes and a queue stands. Fewer are enough then: one,
/// where all of it is spread. If one was not, others follow as long as the agent says so.
const STARVED: Trains = Trains { most: 2, spread: 80, ..USED };

/// The percentage of its path's rate from which a train is the last. Nobody was in its way.
const ENOUGH: u64 = 88;

/// The load of a path's last link, in percent, below which it did not hold a train up. It is the train and
/// what came beside it.
const ROOM: u128 = 85;

/// What of others of ours was in a train's way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ours {
    Nothing,
    /// Their connections share links with it, and nobody counted what they carried meanwhile.
    Perhaps,
    /// They filled the last link together with it; or it came out quicker than it can, which tells nothing
    /// either.
    Something,
}

/// When a link that could not be looked at is due again.
const AGAIN: Duration = Duration::from_millis(100);

/// For how long an agent's report of a starved connection may wait. It waits for other trains, or for the end
/// of a pause.
const WAITS: Duration = Duration::from_millis(100);

/// Most connections that are kept in mind.
const MOST_REPORTED: usize = 4096;

impl LinkState {
    /// Asks agents about links that are due.
    pub(crate) fn ask_probes(&mut self, ctx: &Ctx<'_>, effects: &mut Effects) {
        self.probes.open.retain(|_, asked| asked.deadline > ctx.now && ctx.sessions.contains_key(&asked.of));
        self.measure_active(ctx);
        for link in self.estimates.probes_due(nanos(ctx.now)) {
            // A train that crosses several tells of all.
            let told = self.probes.open.values().any(|asked| asked.path.links().contains(&link));
            if !told && !self.ask_about(ctx, effects, link) {
                self.estimates.schedule_probe(link, nanos(ctx.now.saturating_add(AGAIN)));
            }
        }
    }

    /// Whether somebody was asked, or nobody can be.
    fn ask_about(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, link: DirectedLink) -> bool {
        let (prober, others_meet) = self.prober(ctx, link);
        let Some((from, to, path)) = prober else { return !others_meet };
        self.probes.last.insert(link, from);
        self.ask_probe(ctx, effects, (from, to), path, UNUSED, None)
    }

    /// Whether it was asked.
    fn ask_probe(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        (from, to): (HostId, HostId),
        path: Path,
        trains: Trains,
        verifies: Option<PendingReport>,
    ) -> bool {
        let (Some(of), Some((address, key))) = (ctx.hosts.get(&from).copied(), ctx.train_to(from, to)) else {
            return false;
        };
        if self.probes.open.len() >= MOST_OPEN || self.probes.meets(from, &path) {
            return false;
        }
        let topology = &ctx.settings.topology;
        let via = topology.switches_of(&path).into_iter().map(|switch| {
            let addresses = topology.switches().get(switch.0).map_or(&[][..], |switch| &switch.addresses);
            v1::Hop { addresses: addresses.iter().take(256).map(ToString::to_string).collect() }
        });
        let via: Vec<v1::Hop> = via.collect();
        self.probes.next_probe += 1;
        let question = self.probes.next_probe;
        let enough_bits = topology.path_rate(&path).0 / 100 * ENOUGH;
        let spread_bits = topology.path_rate(&path).0 / 100 * trains.spread;
        let Trains { bytes, most: trains, .. } = trains;
        let deadline = ctx.now.saturating_add(PATIENCE);
        self.probes.open.insert(question, PendingProbe { of, from, to, path, deadline, verifies });
        let address = address.to_string();
        let message = v1::ProbePath {
            request: question,
            address,
            via,
            bytes,
            trains,
            enough_bps: enough_bits,
            spread_bps: spread_bits,
            key: key.to_vec(),
        };
        effects.send(of, to_agent::Message::ProbePath(message));
        true
    }

    /// Returns who may probe a link: two hosts and a path between them. The path crosses the link, and every
    /// switch of it can be named. First come those with the least of our other traffic in the way, among them
    /// those that send nothing of ours at all. The one that probed last gives way to another that is as good.
    /// It also returns whether trains under way were in the way of some.
    fn prober(&self, ctx: &Ctx<'_>, link: DirectedLink) -> (Option<(HostId, HostId, Path)>, bool) {
        let topology = &ctx.settings.topology;
        let able = |host: &HostId| ctx.can_probe(*host);
        let last = self.probes.last.get(&link).copied();
        let ends = topology.hosts_across(link).map(|mut hosts| {
            hosts.retain(able);
            hosts.sort_by_cached_key(|host| (self.estimates.is_busy(*host), Some(*host) == last, *host));
            hosts.truncate(MOST_HOSTS);
            hosts
        });
        let [senders, receivers] = &ends;
        let (mut best, mut others_meet, mut ways) = (None, false, PathFinder::new(topology));
        for from in senders {
            let busy = self.estimates.is_busy(*from);
            for to in receivers.iter().filter(|to| *to != from) {
                let mut paths = ways.between(*from, *to).into_iter();
                let fits = |path: &Path| path.links().contains(&link) && ctx.is_named(path);
                let Some(path) = paths.find(fits) else { continue };
                if self.probes.meets(*from, &path) {
                    others_meet = true;
                    continue;
                }
                let rank = (self.estimates.other_connections_on(*from, &path), busy);
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

    /// Has trains tell whether a report is right, before it is believed. Whether that is so, or was so a
    /// moment ago, and nothing else is to be made of the report. One of a connection that is `starved`,
    /// where nobody else of ours takes the rest, hardly waits. One of a connection that moves next to nothing
    /// is no news; but where others leave it next to nothing, that is all that it can move, so that where the
    /// queue is long and nobody of ours is in their way, trains are asked.
    pub(crate) fn verify(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        report: &CongestionReport,
        noticed: &Noticed,
        claim: Claim,
    ) -> bool {
        let connection = report.connection;
        let (from, to) = (connection.from, connection.to);
        let able = ctx.can_probe(from) && ctx.can_probe(to);
        if report.level == CongestionLevel::None || !able || !ctx.is_named(&report.path) {
            return false;
        }
        let alone = self.estimates.is_exclusive_before_last(from, &report.path);
        let starved = claim.starved && alone;
        let faint = alone && report.level == CongestionLevel::Severe;
        let news = starved || faint || self.estimates.is_significant(&ctx.settings.topology, report);
        if !self.estimates.is_active(&connection) || !news {
            // Next to nothing passes: it found the queues of others of ours, or was acknowledged late, unless
            // something was lost. What a queue pair lost may have been others'.
            return claim.queue_pair || !report.had_loss;
        }
        self.probes.forget(ctx.now);
        let fresh = || Reported {
            usual: Pause::new(ctx.now, BACKOFF),
            starved: Pause::new(ctx.now, STARVED_BACKOFF),
            received_at: ctx.now,
        };
        if self.probes.reported.len() >= MOST_REPORTED && !self.probes.reported.contains_key(&connection) {
            return true;
        }
        self.probes.withdraw(&connection);
        let known = self.probes.reported.entry(connection).or_insert_with(fresh);
        known.received_at = ctx.now;
        let (pause, trains) = if starved { (known.starved, STARVED) } else { (known.usual, USED) };
        let claim = Claim { starved, ..claim };
        let pending = PendingReport { report: report.clone(), noticed: noticed.clone(), claim };
        if pause.not_before > ctx.now {
            if starved {
                self.probes.paused.insert(connection, Paused { report: pending, until: pause.not_before });
            }
            return true;
        }
        let verifies = Some(pending.clone());
        let asked = self.ask_probe(ctx, effects, (from, to), report.path.clone(), trains, verifies);
        if starved && !asked {
            self.probes.blocked.insert(connection, pending);
        }
        true
    }

    /// Trains have come in that others had to wait for, or pauses may have ended.
    pub(crate) fn verify_pending(&mut self, ctx: &Ctx<'_>, effects: &mut Effects) {
        let mut waiting = self.probes.take_waiting(ctx.now);
        let received = |connection: &Connection| Some(self.probes.reported.get(connection)?.received_at);
        waiting.retain(|connection, _| received(connection).is_some_and(|at| at + WAITS > ctx.now));
        if !waiting.is_empty() {
            self.measure_active(ctx);
        }
        for PendingReport { report, noticed, claim } in waiting.into_values() {
            let heard = self.probes.reported.get(&report.connection).map(|known| known.received_at);
            self.verify(ctx, effects, &report, &noticed, claim);
            if let Some((known, heard)) = self.probes.reported.get_mut(&report.connection).zip(heard) {
                known.received_at = heard;
            }
        }
    }

    /// An agent's answer. It speaks of the path that was asked about.
    pub(crate) fn probed(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        from: SessionId,
        answer: &v1::PathProbed,
    ) {
        if self.probes.open.get(&answer.request).is_none_or(|asked| asked.of != from) {
            return;
        }
        let Some(asked) = self.probes.open.remove(&answer.request) else { return };
        self.conclude(ctx, effects, asked, answer);
        self.verify_pending(ctx, effects);
    }

    fn conclude(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        pending: PendingProbe,
        answer: &v1::PathProbed,
    ) {
        let sent = answer.packets_sent;
        let arrived = answer.packets_received.min(sent);
        let path = pending.path.clone();
        self.measure_active(ctx);
        // One that left slower than the path takes is spread by whoever sent it.
        let whole = ctx.settings.topology.path_rate(&path);
        let way = self.own_traffic_on(ctx, pending.from, &path, answer);
        let (received, beside, verifies) =
            (answer.received_bps, answer.cross_traffic_bps, pending.verifies.is_some());
        tracing::debug!(path = %ctx.path_text(&path), received, ?beside, ?way, sent, arrived, verifies, "trains");
        if answer.unreachable && !self.failures.on(&path) {
            // No port leads over it: a link of it may pass nothing any more.
            self.trace_anew(ctx, [pair_of(pending.from, pending.to)].into_iter());
            self.ask_traces(ctx, effects);
        }
        let conclusive = way == Ours::Nothing && answer.sent_bps >= whole.0;
        let probe = if answer.unreachable {
            Probe { path, received: Rate(0), lost_ppm: 1_000_000, conclusive }
        } else if !answer.error.is_empty() || sent < 2 {
            return;
        } else {
            let lost_ppm = (u64::from(sent - arrived) * 1_000_000 / u64::from(sent)) as u32;
            Probe { path, received: Rate(answer.received_bps), lost_ppm, conclusive }
        };
        let (probe, way) = match probe.is_impossible(whole) {
            true => (Probe { conclusive: false, ..probe }, Ours::Something),
            false => (probe, way),
        };
        if !probe.is_clean(whole) && !probe.is_impossible(whole) {
            self.corroborate_by_probe(pending.from, &pending.path);
        }
        if probe.received.0 > 0 {
            self.crossed(ctx, effects, pending.from, &pending.path);
        }
        if let Some(pending) = pending.verifies {
            return self.verified(ctx, effects, pending, &probe, (whole, way));
        }
        if self.estimates.apply_probe(&ctx.settings.topology, nanos(ctx.now), &probe) {
            let host = ctx.host_name(pending.from);
            effects.want_plan(Trigger::Probe { host });
        }
    }

    /// What of others of ours was in a train's way.
    fn own_traffic_on(&self, ctx: &Ctx<'_>, from: HostId, path: &Path, answer: &v1::PathProbed) -> Ours {
        if self.estimates.is_exclusive(from, path) {
            return Ours::Nothing;
        }
        let Some(beside) =
            answer.cross_traffic_bps.filter(|_| self.estimates.is_exclusive_before_last(from, path))
        else {
            return Ours::Perhaps;
        };
        let last = path.links().last().and_then(|link| ctx.settings.topology.links().get(link.link.0));
        let rate = u128::from(last.map_or(0, |link| link.rate.0));
        let came = u128::from(answer.received_bps) + u128::from(beside);
        if came * 100 < rate * ROOM { Ours::Nothing } else { Ours::Something }
    }

    /// What trains told of a report's path. Where traffic of ours may have been in their way, and nobody can
    /// say, the report has to speak for itself; that a connection is starved says too little for that.
    fn verified(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        pending: PendingReport,
        probe: &Probe,
        (whole, way): (Rate, Ours),
    ) {
        let PendingReport { report, noticed, claim: Claim { starved, .. } } = pending;
        let clean = probe.is_clean(whole);
        let speaks = match way {
            Ours::Nothing => !starved,
            Ours::Perhaps => true,
            Ours::Something => false,
        };
        let told = clean || probe.conclusive || speaks;
        if clean || probe.conclusive {
            self.reports.verified_report(report.connection.from, !clean);
        }
        if let Some(known) = self.probes.reported.get_mut(&report.connection) {
            match told {
                true => known.usual.record_result(ctx.now, clean),
                false => known.usual.record_no_result(ctx.now),
            }
            known.starved.record_result(ctx.now, clean || !told);
        }
        // The connection may be gone by now.
        if !told || !self.estimates.is_active(&report.connection) {
            return;
        }
        let report = if clean {
            CongestionReport { level: CongestionLevel::None, ..report }
        } else if probe.conclusive && probe.received.0 > 0 {
            CongestionReport {
                cause: CongestionCause::CrossTraffic,
                cross_traffic: Some(probe.cross_traffic_on_path(&ctx.settings.topology)),
                ..report
            }
        } else {
            report
        };
        self.accept(ctx, effects, report, noticed);
    }
}
