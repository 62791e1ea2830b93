//! What a plan is made of: rings over hops, each with the paths that its connections may take, on links that others use too.

use super::{Current, Hop, Job, Request, Routes};
use crate::conditions::Use;
use crate::exchange::line_rate;
use crate::path::{DirectedLink, Path, Ways};
use crate::topology::{HostId, Node, Topology};
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

/// A link's number within one plan: links that no job can use have none.
pub(super) type Local = u32;

/// A path that a connection may take.
#[derive(Debug)]
pub(super) struct Candidate {
    /// From the hop's sender to its receiver.
    pub(super) path: Path,
    /// Its links; of two participants, those of the way back too.
    pub(super) links: Box<[Local]>,
    /// The worst of them.
    pub(super) usable: Use,
}

/// What the connections of a hop may take.
#[derive(Debug, Default)]
pub(super) struct Options {
    /// To choose from; empty where the hop is spread by hash, or stuck.
    pub(super) candidates: Vec<Rc<Candidate>>,
    /// Where it is spread by hash.
    pub(super) spread: Option<Spread>,
}

/// Bytes that switches spread by hash over all ways: nobody knows which.
#[derive(Clone, Debug)]
pub(super) struct Spread {
    /// The part of its bytes on each link.
    parts: Rc<[(Local, f64)]>,
    /// The worst of them: some may go there.
    pub(super) usable: Use,
}

/// What the connections of a hop do take.
#[derive(Clone, Debug)]
pub(super) enum Choice {
    /// Both ends on one host.
    Local,
    /// No way is left.
    Stuck,
    /// Spread by hash.
    Spread(Spread),
    /// A path each.
    Pinned(Vec<Rc<Candidate>>),
}

impl Choice {
    /// Calls with each link and the part of the ring's rate that this hop puts on it; a link may come several times.
    pub(super) fn each(&self, mut call: impl FnMut(Local, f64)) {
        match self {
            Self::Local | Self::Stuck => {}
            Self::Spread(spread) => spread.parts.iter().for_each(|(link, part)| call(*link, *part)),
            Self::Pinned(paths) => {
                let part = 1.0 / paths.len().max(1) as f64;
                paths.iter().flat_map(|path| path.links.iter()).for_each(|link| call(*link, part));
            }
        }
    }

    /// Whether it crosses a link that should not be crossed, or cannot be.
    pub(super) fn worst(&self) -> Use {
        match self {
            Self::Local => Use::Open,
            Self::Spread(spread) => spread.usable,
            Self::Stuck => Use::Failed,
            Self::Pinned(paths) => paths.iter().map(|path| path.usable).max().unwrap_or(Use::Failed),
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
    pub(super) hops: Vec<Choice>,
}

impl Ring {
    pub(super) fn same(&self, other: &Self) -> bool {
        let hops = self.hops.len() == other.hops.len();
        hops && self.order == other.order && self.hops.iter().zip(&other.hops).all(|(a, b)| a.same(b))
    }

    pub(super) fn worst(&self) -> Use {
        self.hops.iter().map(Choice::worst).max().unwrap_or_default()
    }

    /// The part of the ring's rate on each link, by link.
    pub(super) fn usage(&self) -> Vec<(Local, f64)> {
        let mut parts: Vec<(Local, f64)> = Vec::new();
        self.hops.iter().for_each(|hop| hop.each(|link, part| parts.push((link, part))));
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

/// The jobs, the links that they can use, and the paths between their hosts as far as they were asked for.
pub(super) struct Model<'a> {
    pub(super) request: &'a Request<'a>,
    ways: Ways<'a>,
    left: Ways<'a>,
    local: HashMap<DirectedLink, Local>,
    /// Each link by number.
    pub(super) links: Vec<DirectedLink>,
    /// What others leave of each, bits a second; 0 where nothing passes.
    pub(super) capacity: Vec<f64>,
    /// What each has by the topology.
    pub(super) rate: Vec<f64>,
    options: HashMap<(HostId, HostId, bool), Rc<Options>>,
    /// For each job what it would send from host to host if the fabric were never the limit, bits a second on average.
    pub(super) demand: Vec<f64>,
    /// For each job, whether it stays as it is.
    pub(super) fixed: Vec<bool>,
}

impl<'a> Model<'a> {
    pub(super) fn new(request: &'a Request<'a>) -> Self {
        let (topology, conditions) = (request.topology, request.conditions);
        let mut model = Self {
            request,
            ways: Ways::new(topology),
            left: Ways::without(topology, |link| conditions.usable(link) == Use::Failed),
            local: HashMap::new(),
            links: Vec::new(),
            capacity: Vec::new(),
            rate: Vec::new(),
            options: HashMap::new(),
            demand: Vec::new(),
            fixed: Vec::new(),
        };
        // Beside a promise, everybody counts as always communicating: what is left over is held to, at any time.
        let promises = request.jobs.iter().any(|job| job.promised.0 > 0);
        for job in request.jobs {
            let duty = if promises { 1.0 } else { duty(job, model.line_rate(job)) };
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
    pub(super) fn crossings(&mut self, from: HostId, to: HostId) -> Option<u64> {
        self.ways.crossings(from, to)
    }

    fn number(&mut self, link: DirectedLink) -> Local {
        let next = self.links.len() as Local;
        let number = *self.local.entry(link).or_insert(next);
        if number == next {
            let conditions = self.request.conditions;
            let failed = conditions.usable(link) == Use::Failed;
            self.links.push(link);
            self.capacity.push(if failed { 0.0 } else { conditions.available(link).0 as f64 });
            let rate = self.request.topology.links().get(link.link.0).map_or(0, |link| link.rate.0);
            self.rate.push(rate as f64);
        }
        number
    }

    fn candidate(&mut self, path: Path, both: bool) -> Rc<Candidate> {
        let mut links: Vec<Local> = path.links().iter().map(|link| self.number(*link)).collect();
        let mut usable = self.request.conditions.path(&path);
        if both {
            let back = path.reversed();
            links.extend(back.links().iter().map(|link| self.number(*link)));
            usable = usable.max(self.request.conditions.path(&back));
        }
        Rc::new(Candidate { path, links: links.into(), usable })
    }

    /// What the connections from one host to another may take: the open paths, else those to be avoided; where all have failed,
    /// the shortest of what is left. `both`: their way back counts too.
    pub(super) fn options(&mut self, from: HostId, to: HostId, both: bool) -> Rc<Options> {
        if let Some(options) = self.options.get(&(from, to, both)) {
            return Rc::clone(options);
        }
        let options = Rc::new(self.find(from, to, both));
        self.options.insert((from, to, both), Rc::clone(&options));
        options
    }

    fn find(&mut self, from: HostId, to: HostId, both: bool) -> Options {
        let known = match self.request.routes {
            Routes::All => Some(self.ways.between(from, to)),
            Routes::Known(known) => known.get(&(from, to)).filter(|paths| !paths.is_empty()).cloned(),
            Routes::Hashed => None,
        };
        let known = known.unwrap_or_default();
        let mut candidates: Vec<_> = known.into_iter().map(|path| self.candidate(path, both)).collect();
        let best = candidates.iter().map(|path| path.usable).min().unwrap_or(Use::Failed);
        if best != Use::Failed {
            candidates.retain(|path| path.usable == best);
            return Options { candidates, spread: None };
        }
        let left = self.left.between(from, to);
        if matches!(self.request.routes, Routes::All) {
            let found = left.into_iter().map(|path| self.candidate(path, both));
            return Options {
                candidates: found.filter(|path| path.usable != Use::Failed).collect(),
                spread: None,
            };
        }
        Options { candidates: Vec::new(), spread: self.spread(&left, both) }
    }

    /// Bytes spread evenly over paths; none over none.
    fn spread(&mut self, paths: &[Path], both: bool) -> Option<Spread> {
        let part = 1.0 / paths.len() as f64;
        let mut parts: BTreeMap<Local, f64> = BTreeMap::new();
        let mut usable = Use::Open;
        for path in paths {
            usable = usable.max(self.request.conditions.path(path));
            if both {
                usable = usable.max(self.request.conditions.path(&path.reversed()));
            }
            for link in path.links() {
                *parts.entry(self.number(*link)).or_default() += part;
                if both {
                    *parts.entry(self.number(link.reversed())).or_default() += part;
                }
            }
        }
        (!parts.is_empty()).then(|| Spread { parts: parts.into_iter().collect(), usable })
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
        let Current { order, hops, .. } = job.current.as_ref()?;
        if !is_order(order, job.hosts.len()) {
            return None;
        }
        let mut ring = Ring { order: order.clone(), hops: Vec::new() };
        for (index, (from, to, both)) in self.ends(job, order).into_iter().enumerate() {
            let paths = hops.get(index).map_or(&[][..], |hop| hop.paths.as_slice());
            let choice = if from == to {
                Choice::Local
            } else if paths.is_empty() || !paths.iter().all(|path| leads(self.request, path, from, to)) {
                self.hashed(from, to, both)
            } else {
                Choice::Pinned(paths.iter().map(|path| self.candidate(path.clone(), both)).collect())
            };
            ring.hops.push(choice);
        }
        Some(ring)
    }

    fn hashed(&mut self, from: HostId, to: HostId, both: bool) -> Choice {
        let left = self.left.between(from, to);
        self.spread(&left, both).map_or(Choice::Stuck, Choice::Spread)
    }

    /// A ring as others read it.
    pub(super) fn hops(&self, ring: &Ring) -> Vec<Hop> {
        let paths = |hop: &Choice| match hop {
            Choice::Pinned(paths) => paths.iter().map(|path| path.path.clone()).collect(),
            _ => Vec::new(),
        };
        let mut hops: Vec<Hop> = ring.hops.iter().map(|hop| Hop { paths: paths(hop) }).collect();
        if ring.order.len() == 2 {
            let back = hops.first().map(|hop| hop.paths.iter().map(Path::reversed).collect());
            hops.push(Hop { paths: back.unwrap_or_default() });
        }
        hops
    }
}

/// What a job's hosts could send, bits a second, if their own links, and the job's limit, were the only ones.
pub(crate) fn hosts_rate(topology: &Topology, job: &Job) -> f64 {
    let least = line_rate(topology, &job.hosts);
    job.limit.map_or(least, |limit| limit.min(least)).0.max(1) as f64
}

/// The part of its time in which a job would communicate if the fabric were never the limit.
fn duty(job: &Job, line: f64) -> f64 {
    let Some(rhythm) = job.rhythm.filter(|rhythm| rhythm.busy.0 > 0) else { return 1.0 };
    let busy = if rhythm.bytes.0 == 0 {
        rhythm.busy.0 as f64
    } else {
        (ring_bits(rhythm.bytes.0, job.hosts.len()) / line * 1e9).min(rhythm.busy.0 as f64)
    };
    let quiet = rhythm.period.0.saturating_sub(rhythm.busy.0) as f64;
    if busy + quiet > 0.0 { (busy / (busy + quiet)).clamp(0.001, 1.0) } else { 1.0 }
}

/// Bits that each host of a ring sends for an AllReduce of so many bytes.
pub(crate) fn ring_bits(bytes: u64, hosts: usize) -> f64 {
    let hosts = hosts.max(1) as f64;
    bytes as f64 * 8.0 * 2.0 * (hosts - 1.0) / hosts
}

/// Whether an order names each of `count` participants once.
pub(super) fn is_order(order: &[u32], count: usize) -> bool {
    let mut seen = vec![false; count];
    let fresh = |at: &u32| seen.get_mut(*at as usize).is_some_and(|seen| !std::mem::replace(seen, true));
    order.len() == count && order.iter().all(fresh)
}

/// Whether a path is whole and joins two hosts.
pub(super) fn leads(request: &Request<'_>, path: &Path, from: HostId, to: HostId) -> bool {
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
