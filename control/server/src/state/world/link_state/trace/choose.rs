//! Which ports of a pair are worth packets now. They are no more than plans need, and none whose packets
//! would cross what is withdrawn.

use super::super::LinkState;
use super::super::ports::{MOST_POOL, Pair, Port, Ports, pair_of};
use super::super::traces::{BATCH, retry};
use crate::state::ctx::Ctx;
use crate::state::job::communicator::Communicator;
use harmonaize_planner::{LinkId, Path};
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

/// How long the path of ports counts as fresh after one of them was traced. First of connections along a
/// ring, then of others, then of ports that no connection has.
const FRESH: [Duration; 3] = [Duration::from_secs(20), Duration::from_secs(60), Duration::from_secs(300)];

/// How soon it is looked at again whether something is still withdrawn that keeps a pair from being traced.
const WITHHELD: Duration = Duration::from_secs(20);

/// Free ports that a pair is to have of each path, at least. A communicator takes as many as its links have
/// connections, and the next epoch as many again.
const RESERVE: usize = 4;

/// From so many ports on, a pair is content with less.
const LARGE: usize = 64;

/// Why a port is traced, the most urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Need {
    /// A connection has it, and nobody knows its way.
    Unknown,
    /// Its way may have changed, and a connection has it.
    AnewUsed,
    /// Its way may have changed.
    Anew,
    /// Some path has too few ports, and this one may take it.
    Search,
    /// Nothing was heard of its path for a while.
    Stale,
}

/// What is to be asked of one direction of a pair.
#[derive(Debug, Default)]
pub(crate) struct TraceChoice {
    /// Ports to ask about now.
    pub ports: Vec<u16>,
    /// How many more the pool should have, before there is something to ask.
    pub grow: usize,
    /// When to look again, if there is nothing to ask.
    pub next: Duration,
    /// Whether all that may be found is found.
    pub explored: bool,
}

/// What is wanted of a pair as a whole.
struct PairNeeds {
    paths: Vec<Path>,
    /// Links that are withdrawn, where the pair has ways around them.
    closed: BTreeSet<LinkId>,
    /// Paths with too few ports.
    lacking: Vec<Path>,
    /// Whether ports of unknown ways are left alone.
    withheld: bool,
}

impl PairNeeds {
    fn is_closed(&self, path: &Path) -> bool {
        path.links().iter().any(|link| self.closed.contains(&link.link))
    }

    /// Whether a port with one way known may be one of a path with too few.
    fn may_serve(&self, port: &Port, back: bool) -> bool {
        let fits = |path: &Path| self.lacking.contains(path);
        if self.lacking.is_empty() {
            return false;
        }
        match (back, port.leg(!back)) {
            (true, there) => there.is_some_and(fits),
            (false, home) => home.is_none_or(|home| fits(&home.reversed())),
        }
    }
}

impl LinkState {
    pub(crate) fn choose(
        &self,
        ctx: &Ctx<'_>,
        pair: Pair,
        back: bool,
        anew: Option<Duration>,
    ) -> TraceChoice {
        let wanted = self.needs(ctx, pair);
        let periods = self.periods(ctx, pair);
        // Operators want the routes of both directions, though none of them is of use to plans.
        let uncharted = self.is_uncharted(ctx, pair);
        let queue_pairs = ctx.links_by_queue_pairs(pair);
        let mut chosen = TraceChoice { next: ctx.now.saturating_add(periods[2]), ..TraceChoice::default() };
        if wanted.withheld {
            chosen.next = chosen.next.min(ctx.now.saturating_add(WITHHELD));
        }
        let mut needs: Vec<(Need, Option<Duration>, u16)> = Vec::new();
        for (number, port) in self.ports.pool_of(pair) {
            let look = port.sample(back);
            // An agent that was started again may link otherwise.
            let other = look.queue_pairs != queue_pairs;
            let need = match port.leg(back) {
                Some(path) if wanted.is_closed(path) => continue,
                Some(_) if other || anew.is_some_and(|anew| look.at < Some(anew)) => {
                    if port.is_used() {
                        Need::AnewUsed
                    } else {
                        Need::Anew
                    }
                }
                Some(_) => continue,
                None if port.is_used() => Need::Unknown,
                None if !wanted.withheld && (uncharted || wanted.may_serve(port, back)) => Need::Search,
                None => continue,
            };
            let due = look.at.filter(|at| port.leg(back).is_none() && anew.is_none_or(|anew| *at >= anew));
            match due.map(|at| at.saturating_add(retry(look.silent))).filter(|due| *due > ctx.now) {
                Some(due) => chosen.next = chosen.next.min(due),
                None => needs.push((need, look.at, number)),
            }
        }
        for path in &wanted.paths {
            let (at, stale) = stalest(&self.ports, pair, back, path, periods);
            match stale.filter(|_| !wanted.is_closed(path)) {
                Some(number) if at <= ctx.now => needs.push((Need::Stale, None, number)),
                Some(_) => chosen.next = chosen.next.min(at),
                None => {}
            }
        }
        needs.sort_unstable();
        let searched = needs.iter().any(|(need, ..)| *need == Need::Search)
            || waits_for(&self.ports, &wanted, pair, back);
        chosen.ports = needs.into_iter().map(|(.., number)| number).collect();
        chosen.ports.dedup();
        chosen.ports.truncate(BATCH);
        if !searched && !wanted.withheld && !wanted.lacking.is_empty() && may_grow(&self.ports, pair) {
            chosen.grow = if back { 0 } else { BATCH };
        } else {
            chosen.explored = !searched;
        }
        chosen
    }

    /// Whether no port of a pair has a known path, and switches answer on its routes that the topology lacks.
    pub(super) fn is_uncharted(&self, ctx: &Ctx<'_>, pair: Pair) -> bool {
        let lacks = |hop: &IpAddr| ctx.settings.topology.switch_at(*hop).is_none();
        let charted = |port: &Port| port.there.is_some() || port.back.is_some();
        !self.ports.pool_of(pair).any(|(_, port)| charted(port))
            && self.routes.between(pair).any(|route| route.hops.iter().flatten().any(lacks))
    }

    fn needs(&self, ctx: &Ctx<'_>, pair: Pair) -> PairNeeds {
        let topology = &ctx.settings.topology;
        let paths = topology.equal_cost_paths(pair.0, pair.1);
        let mut closed = ctx.operator.withdrawn().all_links(topology);
        let crosses = |path: &Path, closed: &BTreeSet<LinkId>| {
            path.links().iter().any(|link| closed.contains(&link.link))
        };
        if paths.iter().all(|path| crosses(path, &closed)) {
            closed.clear();
        }
        let known = |port: &Port| {
            port.there
                .as_ref()
                .zip(port.back.as_ref())
                .filter(|ways| !crosses(ways.0, &closed) && !crosses(ways.1, &closed))
                .is_some()
        };
        let usable = self.ports.pool_of(pair).any(|(_, port)| known(port));
        let connections = ctx.settings.paths as usize;
        let large = self.ports.pool_of(pair).count() >= LARGE;
        let enough = if large { connections } else { RESERVE.max(connections * 2) };
        let free = |path: &Path| {
            let same =
                |port: &Port| !port.is_used() && port.is_symmetric() && port.there.as_ref() == Some(path);
            self.ports.pool_of(pair).filter(|(_, port)| same(port)).count()
        };
        // A way is of use if it is known both there and back.
        let both = ctx.can_trace(pair.0, pair.1) && ctx.can_trace(pair.1, pair.0);
        let lacks = |path: &&Path| both && !crosses(path, &closed) && free(path) < enough;
        let lacking = paths.iter().filter(lacks).cloned().collect();
        let withheld = !closed.is_empty() && usable;
        PairNeeds { paths, closed, lacking, withheld }
    }

    /// How long a path's ports count as fresh: one of them is used, and none.
    fn periods(&self, ctx: &Ctx<'_>, pair: Pair) -> [Duration; 3] {
        let [ring, used, idle] = FRESH;
        let next = |known: &Communicator| {
            let host = |index: &u32| known.members.get(*index as usize).map(|member| member.host);
            let order = known.latest().map_or(&[][..], |latest| &latest.order);
            let hops = order.iter().zip(order.iter().cycle().skip(1));
            hops.filter_map(|(from, to)| host(from).zip(host(to))).any(|(from, to)| pair_of(from, to) == pair)
        };
        let along = ctx.communicators.values().any(next);
        [ring, if along { ring } else { used }, idle]
    }
}

/// When a path of a pair is to be traced again, and by which of its ports. A port that a connection has
/// goes first, and of those the one that was traced longest ago.
fn stalest(
    ports: &Ports,
    pair: Pair,
    back: bool,
    path: &Path,
    periods: [Duration; 3],
) -> (Duration, Option<u16>) {
    let leads = |port: &Port| match port.leg(back) {
        Some(home) if back => home.reversed() == *path,
        Some(there) => there == path,
        None => false,
    };
    let mut newest = None;
    let mut stalest: Option<(bool, Option<Duration>, u16)> = None;
    for (number, port) in ports.pool_of(pair).filter(|(_, port)| leads(port)) {
        let look = port.sample(back);
        newest = newest.max(look.at);
        let key = (!port.is_used(), look.at, number);
        stalest = Some(stalest.map_or(key, |before| before.min(key)));
    }
    let period = match stalest {
        Some((false, ..)) => periods[1],
        _ => periods[2],
    };
    (newest.unwrap_or_default().saturating_add(period), stalest.map(|(.., number)| number))
}

/// Whether the other end is to find out first which of the ports come back the way they go.
fn waits_for(ports: &Ports, wanted: &PairNeeds, pair: Pair, back: bool) -> bool {
    let other = |port: &Port| {
        port.leg(!back).is_none() && port.sample(!back).silent == 0 && wanted.may_serve(port, !back)
    };
    !wanted.withheld && ports.pool_of(pair).any(|(_, port)| other(port))
}

/// Whether more ports may help: there is room, and the fabric answers questions about those that there are.
fn may_grow(ports: &Ports, pair: Pair) -> bool {
    let looked = |port: &Port| port.sample(false).at.is_some();
    let (mut all, mut asked, mut known) = (0, 0, 0);
    for (_, port) in ports.pool_of(pair) {
        all += 1;
        asked += usize::from(looked(port));
        known += usize::from(looked(port) && port.there.is_some());
    }
    all < MOST_POOL && asked <= known * 4
}
