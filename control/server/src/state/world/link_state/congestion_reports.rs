//! Congestion reports: what agents report on the paths of their own connections and queue pairs. They are taken within
//! bounds, placed on paths, and handed to the estimates.

use super::LinkState;
use super::ports::{Pair, pair_of};
use super::probing::Claim;
use crate::state::ctx::Ctx;
use crate::state::effects::{Effects, LearnedPort};
use crate::state::job::decisions::Noticed;
use crate::state::output::SessionId;
use crate::state::world::telemetry::check::{self, ReportFault};
use harmonaize_abi::{CommunicatorId, CongestionCause, CongestionLevel, Nanos};
use harmonaize_api::v1;
use harmonaize_planner::{CongestionReport, Connection, HostId, Path, Rate};
use harmonaize_units::Quota;
use std::time::Duration;

/// The most reports that an agent may send in a second; as many at once after a pause.
pub(crate) const MOST_A_SECOND: u32 = 100;

/// The most reports that wait until the path of their connection is known, and for how long.
const MOST_UNPLACED: usize = 256;
const UNPLACED_FOR: Duration = Duration::from_secs(3);

/// What is wrong with a congestion report. The text goes to operators.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum PlaceFault {
    /// It has no congestion.
    #[error("a congestion report without congestion")]
    Empty,
    /// Its congestion is badly made.
    #[error(transparent)]
    Congestion(#[from] ReportFault),
    /// It is of the other direction.
    #[error("a congestion report on what comes in")]
    Ingress,
    /// There is no such port.
    #[error("port {0}")]
    NoPort(u32),
    /// The agent has no part in the communicator.
    #[error("a congestion report on a communicator of others")]
    OtherCommunicator,
    /// The communicator has no such peer.
    #[error("a congestion report on the connection to participant {0}")]
    Peer(u32),
    /// The communicator had no such epoch.
    #[error("a congestion report on epoch {0}, which never was")]
    Epoch(u64),
    /// The port is none of a connection between the two.
    #[error("a congestion report on port {0}, which no connection to that participant has")]
    Port(u16),
}

impl LinkState {
    /// An agent's report. It has an effect only if it is about a connection of the agent's own, and comes no
    /// faster than it may.
    pub(crate) fn path_congestion(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        from: SessionId,
        message: v1::CongestionReport,
    ) {
        let Some(host) = ctx.sessions.get(&from).map(|session| session.host) else { return };
        let reporter = self.reports.reporters.entry(host).or_default();
        if reporter.may.take(ctx.now, Quota::per_second(MOST_A_SECOND)).is_err() {
            reporter.dropped += 1;
            let count = reporter.dropped;
            return effects.unusual(ctx, host, count, "congestion reports come faster than they may");
        }
        match self.place(ctx, effects, from, host, message) {
            Ok(()) => self.reports.reporters.entry(host).or_default().taken += 1,
            Err(fault) => {
                let reporter = self.reports.reporters.entry(host).or_default();
                reporter.refused += 1;
                let count = reporter.refused;
                effects.unusual(ctx, host, count, &fault.to_string());
            }
        }
    }

    /// Finds the connection and its path. One that has ended is no fault; neither is one whose path is not
    /// known yet. A report on a connection is passed over where the port was traced for queue pairs, and one on a queue pair
    /// where it was traced for connections. So is one on a queue pair whose way cannot be traced.
    fn place(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        from: SessionId,
        host: HostId,
        message: v1::CongestionReport,
    ) -> Result<(), PlaceFault> {
        let Some(found) = &message.congestion else {
            return Err(PlaceFault::Empty);
        };
        check::congestion(found)?;
        if found.ingress {
            return Err(PlaceFault::Ingress);
        }
        let port = u16::try_from(message.source_port).map_err(|_| PlaceFault::NoPort(message.source_port))?;
        let Some(known) = ctx.communicators.get(&CommunicatorId(message.communicator)) else { return Ok(()) };
        let me = known.index_of(from).ok_or(PlaceFault::OtherCommunicator)?;
        let peer = known.members.get(message.peer as usize).map(|member| member.host);
        let Some(peer) = peer.filter(|_| message.peer as usize != me) else {
            return Err(PlaceFault::Peer(message.peer));
        };
        if message.epoch == 0 || message.epoch >= u64::from(known.next_epoch) {
            return Err(PlaceFault::Epoch(message.epoch));
        }
        let pair = pair_of(host, peer);
        let traced_as = self.ports.is_of_queue_pairs(pair, port, host != pair.0);
        let by_queue_pairs = traced_as.unwrap_or_else(|| ctx.links_by_queue_pairs(pair));
        if message.queue_pair != by_queue_pairs || message.queue_pair && !ctx.can_trace(host, peer) {
            return Ok(());
        }
        if self.ports.traced(pair, port).is_none() && !self.adopt_port(ctx, effects, &message, me, pair, port)
        {
            return Err(PlaceFault::Port(port));
        }
        match self.path_of(host, peer, port).cloned() {
            Some(path) => {
                let (communicator, from, to) = (CommunicatorId(message.communicator), host, peer);
                let connection = Connection { communicator, from, to, port };
                self.consider(ctx, effects, connection, path, &message);
            }
            None if self.reports.unplaced.len() < MOST_UNPLACED => {
                self.reports.unplaced.insert((pair, port, host), (ctx.now, from, message));
                self.trace_anew(ctx, [pair].into_iter());
                self.ask_traces(ctx, effects);
            }
            None => {}
        }
        Ok(())
    }

    /// Learns a port that an earlier control had given to a connection, or that the kernel chose. Whether it
    /// may be so.
    fn adopt_port(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        message: &v1::CongestionReport,
        me: usize,
        pair: Pair,
        port: u16,
    ) -> bool {
        let most = ctx.settings.paths as usize;
        let known = ctx.communicators.get(&CommunicatorId(message.communicator));
        let Some(current) = known.and_then(|known| known.current()) else { return false };
        let peer = message.peer as usize;
        let ends = (me.min(peer) as u32, me.max(peer) as u32);
        let ports = current.links.get(&ends).map_or(&[][..], Vec::as_slice);
        let room = ports.len() < most || ports.contains(&0);
        if port == 0
            || message.epoch != u64::from(current.epoch)
            || !room
            || !self.ports.adopt(pair, port, &mut Vec::new())
        {
            return false;
        }
        effects.ports.push(LearnedPort {
            communicator: CommunicatorId(message.communicator),
            ends,
            host: pair.0,
            port,
        });
        self.want_traced(ctx, [pair].into_iter());
        true
    }

    /// Has a report verified, or accepts it as it is where that cannot be.
    fn consider(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        connection: Connection,
        path: Path,
        message: &v1::CongestionReport,
    ) {
        let Some(found) = &message.congestion else { return };
        let (level, cause) = (found.level().into(), found.cause().into());
        let (own, lost) = (Rate(found.own_bps), found.loss || found.ecn_ce);
        let report = CongestionReport {
            connection,
            path,
            level,
            cause,
            own_rate: own,
            had_loss: lost,
            cross_traffic: None,
        };
        if level == CongestionLevel::Severe && cause != CongestionCause::Own {
            effects.queues.push(CommunicatorId(message.communicator));
        }
        if level == CongestionLevel::Severe && found.loss {
            // It may be dead: whether it is, a trace tells.
            self.suspect(ctx, effects, &report.path);
        }
        let noticed = Noticed {
            host: ctx.host_name(connection.from),
            path: ctx.path_text(&report.path),
            what: describe_report(level, cause, own),
            since: Nanos(found.since_ns),
            found: Nanos(found.found_ns),
            received: ctx.now,
        };
        self.measure_active(ctx);
        let (path, what, starved) = (&noticed.path, noticed.what.as_str(), found.starved);
        tracing::debug!(%path, %what, starved, "a congestion report");
        let claim = Claim { starved: found.starved, queue_pair: message.queue_pair };
        if !self.verify(ctx, effects, &report, &noticed, claim) {
            self.accept(ctx, effects, report, noticed);
        }
    }

    /// A pair's paths were learned: what waited for that is looked at again.
    pub(crate) fn place_again(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, pair: Pair) {
        let waiting: Vec<_> = self
            .reports
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
            if let Some((at, from, told)) = self.reports.unplaced.remove(&key)
                && at + UNPLACED_FOR > ctx.now
                && ctx.sessions.contains_key(&from)
            {
                let _ = self.place(ctx, effects, from, key.2, told);
            }
        }
        self.reports.unplaced.retain(|_, (at, _, _)| *at + UNPLACED_FOR > ctx.now);
    }
}

fn describe_report(level: CongestionLevel, cause: CongestionCause, own: Rate) -> String {
    if level == CongestionLevel::None {
        return "no congestion any more".to_owned();
    }
    let cause = match cause {
        CongestionCause::Own => ", our own",
        CongestionCause::CrossTraffic => ", by others",
        CongestionCause::Unknown => "",
    };
    format!("{} congestion{cause}, with {own} of ours", level.as_str())
}
