//! Which paths connections take, and which of them carry traffic.

use super::LinkState;
use super::ports::{Pair, pair_of};
use crate::state::ctx::Ctx;
use crate::state::job::communicator::Communicator;
use crate::state::job::lifecycle::EpochConfig;
use crate::state::time::nanos;
use harmonaize_api::v1;
use harmonaize_planner::{Connection, HostId, Path, Rate, RingEdge};
use std::time::Duration;

/// How long it holds which connections carry traffic, if no epoch and no path has changed.
const ACTIVE: Duration = Duration::from_millis(100);

/// Up to so many hosts of a communicator all their pairs are traced.
const MOST_PAIRED: usize = 64;

impl LinkState {
    /// Returns the hops of an epoch's ring, by the paths of its links.
    pub(crate) fn hops(&self, known: &Communicator, config: &EpochConfig) -> Vec<RingEdge> {
        let EpochConfig { order, links, .. } = config;
        if order.len() < 2 {
            return Vec::new();
        }
        let host = |index: u32| known.members.get(index as usize).map(|member| member.host);
        let hop = |(from, to): (&u32, &u32)| {
            let ports = links.get(&(*from.min(to), *from.max(to))).map_or(&[][..], Vec::as_slice);
            let ends = host(*from).zip(host(*to));
            let path = |port: &u16| ends.and_then(|(from, to)| self.path_of(from, to, *port)).cloned();
            let paths: Option<Vec<Path>> = ports.iter().map(path).collect();
            RingEdge { paths: paths.unwrap_or_default() }
        };
        order.iter().zip(order.iter().cycle().skip(1)).map(hop).collect()
    }

    /// Which path a connection's packets take from one host to another; none where that is not known. `port`
    /// is that of the end that connected.
    pub(crate) fn path_of(&self, from: HostId, to: HostId, port: u16) -> Option<&Path> {
        let pair: Pair = pair_of(from, to);
        self.ports.traced(pair, port)?.leg(from != pair.0)
    }

    /// Updates the estimates with the connections that carry traffic now. They are those of rings that run,
    /// and whose agents would report if they were held up.
    pub(crate) fn measure_active(&mut self, ctx: &Ctx<'_>) {
        if self.active_at.is_some_and(|at| at + ACTIVE > ctx.now) {
            return;
        }
        self.active_at = Some(ctx.now);
        let mut active = Vec::new();
        for (id, known) in ctx.communicators {
            let flows =
                matches!(known.phase(), v1::Phase::Running | v1::Phase::Changing | v1::Phase::Recovering);
            if !flows || !ctx.seems_busy(*id) {
                continue;
            }
            let Some(EpochConfig { order, links, .. }) = known.current() else { continue };
            let hops = order.iter().zip(order.iter().cycle().skip(1)).filter(|_| order.len() > 1);
            for (from, to) in hops {
                let member = |index: u32| known.members.get(index as usize);
                let Some((sender, receiver)) = member(*from).zip(member(*to)) else { continue };
                let session = sender.session.and_then(|session| ctx.sessions.get(&session));
                if !session.is_some_and(|session| session.abilities.congestion_reports) {
                    continue;
                }
                for port in links.get(&(*from.min(to), *from.max(to))).into_iter().flatten() {
                    let Some(path) = self.path_of(sender.host, receiver.host, *port) else { continue };
                    let (from, to, port) = (sender.host, receiver.host, *port);
                    let connection = Connection { communicator: *id, from, to, port };
                    active.push((connection, path.clone(), Rate(0)));
                }
            }
        }
        // Whether it moved something is told by whatever made it be looked at.
        self.estimates.active(&ctx.settings.topology, nanos(ctx.now), active);
    }
}

/// Pairs of a communicator's hosts whose paths are to be known. Those next to each other in its ring; and
/// all, where those are few.
pub(crate) fn pairs_of(known: &Communicator) -> (Vec<Pair>, Vec<Pair>) {
    let hosts: Vec<HostId> = known.members.iter().map(|member| member.host).collect();
    let order = known.latest().map_or(&[][..], |latest| &latest.order);
    let ring: Vec<HostId> = order.iter().filter_map(|at| hosts.get(*at as usize)).copied().collect();
    let next = ring.iter().zip(ring.iter().cycle().skip(1));
    let ring = next.map(|(one, other)| pair_of(*one, *other)).collect();
    let all = hosts.iter().enumerate().filter(|_| hosts.len() <= MOST_PAIRED);
    let all = all.flat_map(|(at, one)| hosts.iter().skip(at + 1).map(|other| pair_of(*one, *other)));
    (ring, all.collect())
}
