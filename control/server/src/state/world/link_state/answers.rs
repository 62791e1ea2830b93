//! What agents answer of the ways of ports, and what that says of links.

use super::LinkState;
use super::ports::Sample;
use super::routes::{MAX_HOPS, answered};
use super::traces::{BATCH, Learned, PendingTrace, asker};
use crate::state::ctx::Ctx;
use crate::state::effects::Effects;
use crate::state::output::{Fact, SessionId};
use harmonaize_api::v1;
use harmonaize_planner::{DirectedLink, HostId, Path, Topology};
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

/// Most addresses that are told of for being no switch's.
pub(crate) const MOST_STRANGE: usize = 32;

/// Ports that must die at a link, and none pass it, for it to count as failed.
const DEATHS: usize = 2;

impl LinkState {
    /// An agent's answer. Whatever it says, it is about the ports that were asked for.
    pub(crate) fn traced(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        from: SessionId,
        answer: &v1::PathsTraced,
    ) {
        if self.traces.open.get(&answer.request).is_none_or(|asked| asked.of != from) {
            return;
        }
        let Some(asked) = self.traces.close(answer.request) else { return };
        let (pair, back) = asked.direction;
        let by_destination = back && !asked.queue_pairs;
        let most = ctx.switches_between(pair);
        let asked_ports: BTreeSet<u16> = asked.ports.iter().copied().collect();
        let mut seen: BTreeMap<u16, Vec<Option<IpAddr>>> = BTreeMap::new();
        for path in answer.paths.iter().take(BATCH) {
            let port = if by_destination { path.destination_port } else { path.source_port };
            let Some(port) = u16::try_from(port).ok().filter(|port| asked_ports.contains(port)) else {
                continue;
            };
            seen.insert(port, path.hops.iter().take(MAX_HOPS).map(|hop| hop.parse().ok()).collect());
        }
        let hosts = ctx.settings.topology.hosts().len();
        let ends = if back { (pair.1, pair.0) } else { pair };
        let mut learned = Learned::default();
        let mut died: BTreeMap<DirectedLink, usize> = BTreeMap::new();
        for (port, hops) in &seen {
            let first = |count| hops.iter().copied().chain(std::iter::repeat(None)).take(count);
            // Silence beyond the topology's switches may be the host's own.
            let route: Vec<_> = first(most.max(answered(hops))).collect();
            self.report_unknown_hops(ctx, effects, asker(asked.direction), &route);
            self.routes.insert(hosts, ends, *port, &route, ctx.now);
            let hops: Vec<_> = first(most).collect();
            self.learn(ctx, &asked, *port, &hops, &mut learned, &mut died);
        }
        let dead = died.iter().filter(|(link, count)| **count >= DEATHS && !learned.alive.contains(link));
        learned.dead = dead.map(|(link, _)| *link).collect();
        self.answered(ctx, asked.direction, !seen.is_empty());
        if !died.is_empty() {
            // Whether others die there too decides.
            self.trace_direction_anew(ctx, asked.direction);
        }
        self.paths_learned(ctx, effects, asker(asked.direction), pair, &learned);
        self.place_again(ctx, effects, pair);
        self.ask_traces_of(ctx, effects, pair.0);
        self.ask_traces_of(ctx, effects, pair.1);
    }

    /// Reports addresses on a route that no switch of the topology has, once each. The route stays unknown
    /// because of them.
    fn report_unknown_hops(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        asker: HostId,
        hops: &[Option<IpAddr>],
    ) {
        for address in hops.iter().flatten() {
            let known = ctx.settings.topology.switch_at(*address).is_some();
            if known || self.traces.strange.len() >= MOST_STRANGE || !self.traces.strange.insert(*address) {
                continue;
            }
            let host = ctx.host_name(asker);
            effects.fact(Fact::UnknownHop { host, address: address.to_string() });
        }
    }

    /// Takes in the route of one port, and which links it shows to be alive or dead. A dead link is one that the
    /// port was known to cross.
    fn learn(
        &mut self,
        ctx: &Ctx<'_>,
        question: &PendingTrace,
        number: u16,
        hops: &[Option<IpAddr>],
        learned: &mut Learned,
        died: &mut BTreeMap<DirectedLink, usize>,
    ) {
        let topology = &ctx.settings.topology;
        let (pair, back) = question.direction;
        let (from, to) = if back { (pair.1, pair.0) } else { pair };
        let found = topology.traced_path(from, to, hops).ok();
        let Some(port) = self.ports.traced_mut(pair, number) else { return };
        let alike = port.sample(back).queue_pairs == question.queue_pairs;
        if port.sample(!back).queue_pairs != question.queue_pairs {
            port.forget(!back);
        }
        let leg = if back { &mut port.back } else { &mut port.there };
        let earlier = leg.clone();
        // The way of a connection is none of a queue pair's.
        let before = earlier.clone().filter(|_| alike);
        let broken = before.as_ref().and_then(|before| broken_at(topology, before, hops));
        learned.alive.extend(found.iter().flat_map(|path| path.links()));
        // A switch that did not answer, while one behind it did, tells nothing new.
        let kept = before.clone().filter(|_| found.is_none() && broken.is_none());
        let found = found.or(kept);
        leg.clone_from(&found);
        if let Some(look) = port.samples.get_mut(usize::from(back)) {
            let silent = if found.is_some() { 0 } else { look.silent.saturating_add(1) };
            *look = Sample { at: Some(ctx.now), silent, queue_pairs: question.queue_pairs };
        }
        learned.moved |= earlier.is_some() && earlier != found;
        learned.first |= earlier.is_none() && found.is_some();
        if let Some(link) = broken {
            *died.entry(link).or_default() += 1;
        }
    }
}

/// The first link of a known path that packets do not cross any more. Another switch answered than the one
/// behind it, or nobody from there on. None where nobody answered at all: that tells of the question, not of
/// the path.
fn broken_at(topology: &Topology, known: &Path, hops: &[Option<IpAddr>]) -> Option<DirectedLink> {
    let named: Vec<_> = hops.iter().map(|hop| hop.and_then(|hop| topology.switch_at(hop))).collect();
    let switches = topology.switches_of(known);
    let differs = named.iter().zip(&switches).position(|(hop, known)| hop.is_some_and(|hop| hop != *known));
    let last = named.iter().rposition(Option::is_some)?;
    let silent = (last + 1 < switches.len()).then_some(last + 1);
    known.links().get(differs.or(silent)?).copied()
}
