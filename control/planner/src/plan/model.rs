//! What a plan is made of: rings over hops. Each hop has the paths that its connections may take, on links that others use too.

use super::{Current, Job, Request, RingEdge, Routes};
use crate::all_to_all::line_rate;
use crate::conditions::LinkUse;
use harmonaize_topology::{DirectedLink, Path, PathFinder};
use harmonaize_topology::{HostId, Node, Topology};
use harmonaize_units::Bytes;
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

/// A link's number within one plan: links that no job can use have none.
pub(super) type LinkIndex = u32;

/// A path that a connection may take.
#[derive(Debug)]
pub(super) struct Candidate {
    /// From the hop's sender to its receiver.
    pub(super) path: Path,
    /// Its links; of two participants, those of the way back too.
    pub(super) links: Box<[LinkIndex]>,
    /// The worst of them.
    pub(super) usable: LinkUse,
}

/// What the connections of a hop may take.
#[derive(Debug, Default)]
pub(super) struct EdgeOptions {
    /// To choose from; empty where the hop is spread by hash, or stuck.
    pub(super) candidates: Vec<Rc<Candidate>>,
    /// Where it is spread by hash.
    pub(super) ecmp: Option<EcmpSpread>,
}

/// Bytes that switches spread by hash over all ways: nobody knows which.
#[derive(Clone, Debug)]
pub(super) struct EcmpSpread {
    /// The part of its bytes on each link.
    parts: Rc<[(LinkIndex, f64)]>,
    /// The worst of them: some may go there.
    pub(super) usable: LinkUse,
}

/// What the connections of a hop do take.
#[derive(Clone, Debug)]
pub(super) enum EdgeRoutes {
    /// Both ends on one host.
    Local,
    /// No way is left.
    Unreachable,
    /// Spread by hash.
    EcmpSpread(EcmpSpread),
    /// A path each.
    Pinned(Vec<Rc<Candidate>>),
}

impl EdgeRoutes {
    /// Calls with each link and the part of the ring's rate that this hop puts on it. A link may come several times.
    pub(super) fn each(&self, mut call: impl FnMut(LinkIndex, f64)) {
        match self {
            Self::Local | Self::Unreachable => {}
            Self::EcmpSpread(spread) => spread.parts.iter().for_each(|(link, part)| call(*link, *part)),
            Self::Pinned(paths) => {
                let part = 1.0 / paths.len().max(1) as f64;
                paths.iter().flat_map(|path| path.links.iter()).for_each(|link| call(*link, part));
            }
        }
    }

    /// Whether it crosses a link that should not be crossed, or cannot be.
    pub(super) fn worst(&self) -> LinkUse {
        match self {
            Self::Local => LinkUse::Open,
            Self::EcmpSpread(spread) => spread.usable,
            Self::Unreachable => LinkUse::Failed,
            Self::Pinned(paths) => paths.iter().map(|path| path.usable).max().unwrap_or(LinkUse::Failed),
        }
    }

    fn same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Pinned(ours), Self::Pinned(theirs)) => {
                ours.len() == theirs.len() && ours.iter().zip(theirs).all(|(a, b)| a.path == b.path)
            }
            (Self::Pinned(_), _) | (_, Self::Pinned(_)) => false,
            _ => true,
        }
    }
}

/// A job's ring: of two participants one hop stands for both.
#[derive(Clone, Debug, Default)]
pub(super) struct Ring {
    pub(super) order: Vec<u32>,
    pub(super) edges: Vec<EdgeRoutes>,
}

impl Ring {
    pub(super) fn same(&self, other: &Self) -> bool {
        let hops = self.edges.len() == other.edges.len();
        hops && self.order == other.order && self.edges.iter().zip(&other.edges).all(|(a, b)| a.same(b))
    }

    pub(super) fn worst(&self) -> LinkUse {
        self.edges.iter().map(EdgeRoutes::worst).max().unwrap_or_default()
    }

    /// The part of the ring's rate on each link, by link.
    pub(super) fn usage(&self) -> Vec<(LinkIndex, f64)> {
        let mut parts: Vec<(LinkIndex, f64)> = Vec::new();
        self.edges.iter().for_each(|hop| hop.each(|link, part| parts.push((link, part))));
        parts.sort_unstable_by_key(|(link, _)| *link);
        parts.dedup_by(|next, kept| {
            let same = next.0 == kept.0;
            if same {
                kept.1 += next.1;
            }
            same
        });
        parts
    }
}

/// The jobs and the links that they can use. It also has the paths between their hosts, as far as they were asked for.
pub(super) struct Model<'a> {
    pub(super) request: &'a Request<'a>,
    all_paths: PathFinder<'a>,
    usable_paths: PathFinder<'a>,
    link_indices: HashMap<DirectedLink, LinkIndex>,
    /// Each link by number.
    pub(super) links: Vec<DirectedLink>,
    /// What others leave of each, bits a second; 0 where nothing passes.
    pub(super) capacity: Vec<f64>,
    /// What each has by the topology.
    pub(super) rate: Vec<f64>,
    options: HashMap<(HostId, HostId, bool), Rc<EdgeOptions>>,
    /// What each job would send from host to host if the fabric were never the limit. It is in bits a second on average.
    pub(super) demand: Vec<f64>,
    /// For each job, whether it stays as it is.
    pub(super) fixed: Vec<bool>,
}

impl<'a> Model<'a> {
    pub(super) fn new(request: &'a Request<'a>) -> Self {
        let (topology, conditions) = (request.topology, request.conditions);
        let mut model = Self {
            request,
            all_paths: PathFinder::new(topology),
            usable_paths: PathFinder::excluding(topology, |link| conditions.usable(link) == LinkUse::Failed),
            link_indices: HashMap::new(),
            links: Vec::new(),
            capacity: Vec::new(),
            rate: Vec::new(),
            options: HashMap::new(),
            demand: Vec::new(),
            fixed: Vec::new(),
        };
        // Beside a promise, everybody counts as always communicating: what is left over is held to, at any time.
        let promises = request.jobs.iter().any(|job| job.guaranteed.0 > 0);
        for job in request.jobs {
            let duty = if promises { 1.0 } else { duty_cycle(job, model.line_rate(job)) };
            model.demand.push(model.line_rate(job) * duty);
            model.fixed.push(!job.movable && job.current.is_some());
        }
        model
    }

    pub(super) fn jobs(&self) -> &'a [Job] {
        self.request.jobs
    }

    pub(super) fn job(&self, index: usize) -> Option<&'a Job> {
        self.request.jobs.get(index)
    }

    pub(super) fn line_rate(&self, job: &Job) -> f64 {
        hosts_rate(self.request.topology, job)
    }

    /// Links between switches from one host to another; none where there is no way.
    pub(super) fn switch_hops(&mut self, from: HostId, to: HostId) -> Option<u64> {
        self.all_paths.crossings(from, to)
    }

    fn link_index(&mut self, link: DirectedLink) -> LinkIndex {
        let next = self.links.len() as LinkIndex;
        let number = *self.link_indices.entry(link).or_insert(next);
        if number == next {
            let conditions = self.request.conditions;
            let failed = conditions.usable(link) == LinkUse::Failed;
            self.links.push(link);
            self.capacity.push(if failed { 0.0 } else { conditions.available(link).0 as f64 });
            let rate = self.request.topology.links().get(link.link.0).map_or(0, |link| link.rate.0);
            self.rate.push(rate as f64);
        }
        number
    }

    fn candidate(&mut self, path: Path, both: bool) -> Rc<Candidate> {
        let mut links: Vec<LinkIndex> = path.links().iter().map(|link| self.link_index(*link)).collect();
        let mut usable = self.request.conditions.path(&path);
        if both {
            let back = path.reversed();
            links.extend(back.links().iter().map(|link| self.link_index(*link)));
            usable = usable.max(self.request.conditions.path(&back));
        }
        Rc::new(Candidate { path, links: links.into(), usable })
    }

    /// What the connections from one host to another may take. The open paths, else those to be avoided; where all have failed,
    /// the shortest of what is left. `both`: their way back counts too.
    pub(super) fn options(&mut self, from: HostId, to: HostId, both: bool) -> Rc<EdgeOptions> {
        if let Some(options) = self.options.get(&(from, to, both)) {
            return Rc::clone(options);
        }
        let options = Rc::new(self.find(from, to, both));
        self.options.insert((from, to, both), Rc::clone(&options));
        options
    }

    fn find(&mut self, from: HostId, to: HostId, both: bool) -> EdgeOptions {
        let known = match self.request.routes {
            Routes::All => Some(self.all_paths.between(from, to)),
            Routes::Listed(known) => known.get(&(from, to)).filter(|paths| !paths.is_empty()).cloned(),
            Routes::Hashed => None,
        };
        let known = known.unwrap_or_default();
        let mut candidates: Vec<_> = known.into_iter().map(|path| self.candidate(path, both)).collect();
        let best = candidates.iter().map(|path| path.usable).min().unwrap_or(LinkUse::Failed);
        if best != LinkUse::Failed {
            candidates.retain(|path| path.usable == best);
            return EdgeOptions { candidates, ecmp: None };
        }
        let left = self.usable_paths.between(from, to);
        if matches!(self.request.routes, Routes::All) {
            let found = left.into_iter().map(|path| self.candidate(path, both));
            return EdgeOptions {
                candidates: found.filter(|path| path.usable != LinkUse::Failed).collect(),
                ecmp: None,
            };
        }
        EdgeOptions { candidates: Vec::new(), ecmp: self.ecmp_spread(&left, both) }
    }

    /// Bytes spread evenly over paths; none over none.
    fn ecmp_spread(&mut self, paths: &[Path], both: bool) -> Option<EcmpSpread> {
        let part = 1.0 / paths.len() as f64;
        let mut parts: BTreeMap<LinkIndex, f64> = BTreeMap::new();
        let mut usable = LinkUse::Open;
        for path in paths {
            usable = usable.max(self.request.conditions.path(path));
            if both {
                usable = usable.max(self.request.conditions.path(&path.reversed()));
            }
            for link in path.links() {
                *parts.entry(self.link_index(*link)).or_default() += part;
                if both {
                    *parts.entry(self.link_index(link.reversed())).or_default() += part;
                }
            }
        }
        (!parts.is_empty()).then(|| EcmpSpread { parts: parts.into_iter().collect(), usable })
    }

    /// The hosts at both ends of each hop of an order, and whether one hop stands for both.
    pub(super) fn ends(&self, job: &Job, order: &[u32]) -> Vec<(HostId, HostId, bool)> {
        let host = |at: &u32| job.hosts.get(*at as usize).copied().unwrap_or(HostId(usize::MAX));
        let both = order.len() == 2;
        let count = if order.len() < 3 { order.len().saturating_sub(1) } else { order.len() };
        let next = order.iter().cycle().skip(1);
        order.iter().zip(next).take(count).map(|(from, to)| (host(from), host(to), both)).collect()
    }

    /// What runs now; none for what forms, or does not fit the job.
    pub(super) fn current(&mut self, job: &Job) -> Option<Ring> {
        let Current { order, edges: hops, .. } = job.current.as_ref()?;
        if !is_order(order, job.hosts.len()) {
            return None;
        }
        let mut ring = Ring { order: order.clone(), edges: Vec::new() };
        for (index, (from, to, both)) in self.ends(job, order).into_iter().enumerate() {
            let paths = hops.get(index).map_or(&[][..], |hop| hop.paths.as_slice());
            let choice = if from == to {
                EdgeRoutes::Local
            } else if paths.is_empty() || !paths.iter().all(|path| joins(self.request, path, from, to)) {
                self.hashed(from, to, both)
            } else {
                EdgeRoutes::Pinned(paths.iter().map(|path| self.candidate(path.clone(), both)).collect())
            };
            ring.edges.push(choice);
        }
        Some(ring)
    }

    fn hashed(&mut self, from: HostId, to: HostId, both: bool) -> EdgeRoutes {
        let left = self.usable_paths.between(from, to);
        self.ecmp_spread(&left, both).map_or(EdgeRoutes::Unreachable, EdgeRoutes::EcmpSpread)
    }

    /// A ring as others read it.
    pub(super) fn ring_edges(&self, ring: &Ring) -> Vec<RingEdge> {
        let paths = |hop: &EdgeRoutes| match hop {
            EdgeRoutes::Pinned(paths) => paths.iter().map(|path| path.path.clone()).collect(),
            _ => Vec::new(),
        };
        let mut hops: Vec<RingEdge> = ring.edges.iter().map(|hop| RingEdge { paths: paths(hop) }).collect();
        if ring.order.len() == 2 {
            let back = hops.first().map(|hop| hop.paths.iter().map(Path::reversed).collect());
            hops.push(RingEdge { paths: back.unwrap_or_default() });
        }
        hops
    }
}

/// What a job's hosts could send, in bits a second. Only their own links, and the job's limit, are taken to limit them.
pub(crate) fn hosts_rate(topology: &Topology, job: &Job) -> f64 {
    let least = line_rate(topology, &job.hosts);
    job.rate_limit.map_or(least, |limit| limit.min(least)).0.max(1) as f64
}

/// The part of its time in which a job would communicate if the fabric were never the limit.
fn duty_cycle(job: &Job, line: f64) -> f64 {
    let Some(rhythm) = job.iteration_pattern.filter(|rhythm| rhythm.busy.0 > 0) else { return 1.0 };
    let busy = if rhythm.bytes.0 == 0 {
        rhythm.busy.0 as f64
    } else {
        (ring_bits(rhythm.bytes, job.hosts.len()) / line * 1e9).min(rhythm.busy.0 as f64)
    };
    let quiet = rhythm.period.0.saturating_sub(rhythm.busy.0) as f64;
    if busy + quiet > 0.0 { (busy / (busy + quiet)).clamp(0.001, 1.0) } else { 1.0 }
}

/// Bits that each host of a ring sends for an AllReduce of so many bytes.
pub(crate) fn ring_bits(bytes: Bytes, hosts: usize) -> f64 {
    let hosts = hosts.max(1) as f64;
    bytes.0 as f64 * 8.0 * 2.0 * (hosts - 1.0) / hosts
}

/// Whether an order names each of `count` participants once.
pub(super) fn is_order(order: &[u32], count: usize) -> bool {
    let mut seen = vec![false; count];
    let fresh = |at: &u32| seen.get_mut(*at as usize).is_some_and(|seen| !std::mem::replace(seen, true));
    order.len() == count && order.iter().all(fresh)
}

/// Whether a path is whole and joins two hosts.
pub(super) fn joins(request: &Request<'_>, path: &Path, from: HostId, to: HostId) -> bool {
    let mut node = Node::Host(from);
    for link in path.links() {
        match request.topology.ends(*link) {
            Some((start, end))
                if start == node && (end == Node::Host(to) || matches!(end, Node::Switch(_))) =>
            {
                node = end
            }
            _ => return false,
        }
    }
    node == Node::Host(to) && from != to
}
