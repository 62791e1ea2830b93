//! What the operations of jobs are predicted by: links as they are, and whose communicators use them.

use crate::state::job::coding::ring_links;
use crate::state::job::communicator::Communicator;
use crate::state::tenants::joins::root_job_named;
use crate::state::view::View;
use harmonaize_planner::{Beside, Bytes, Conditions, DirectedLink, HostId, HostScores, Node, Topology};
use std::collections::{BTreeMap, BTreeSet};

/// Bytes of an operation where nobody knows what the job's are.
const OPERATION: u64 = 1 << 20;

/// So much is spent on the predictions of a round, in looks at a host or at a link in use: 512 predictions where there are few of both.
/// Where that is not enough, hosts that remain count as equally good.
const EFFORT: usize = 1 << 21;

/// What a prediction costs beside a look at each host that its job could get: paths between eight hosts.
const PREDICTION: usize = 4096;

/// A tenant's name, and its job's.
type Key = (String, String);

/// How many communicators with traffic use each link.
#[derive(Clone, Debug, Default)]
struct Uses {
    /// Along their rings, as far as routes are known.
    rings: BTreeMap<DirectedLink, u32>,
    /// As the only link of a host.
    ends: BTreeMap<DirectedLink, u32>,
}

impl Uses {
    fn add(&mut self, rings: &[DirectedLink], ends: &[DirectedLink]) {
        for (counts, links) in [(&mut self.rings, rings), (&mut self.ends, ends)] {
            links.iter().for_each(|link| *counts.entry(*link).or_default() += 1);
        }
    }

    fn of(&self, link: DirectedLink) -> (u32, u32) {
        let of = |counts: &BTreeMap<DirectedLink, u32>| counts.get(&link).copied().unwrap_or(0);
        (of(&self.rings), of(&self.ends))
    }
}

/// Links, and what flows on them now.
#[derive(Clone, Debug)]
pub(crate) struct Links {
    conditions: Conditions,
    all: Uses,
    /// The same of each job's own communicators.
    own: BTreeMap<Key, Uses>,
    /// Bytes of a typical operation of each job.
    operations: BTreeMap<Key, u64>,
}

impl Links {
    /// As they are now. Communicators that have been silent use no link. Cost: a look at each one's ring.
    pub(crate) fn new(view: &View<'_>) -> Self {
        let mut links = Self::unused(view.conditions());
        for (id, known) in view.ctx.communicators {
            let key = (known.tenant.clone(), root_job_named(&known.name).to_owned());
            if let Some(operations) = view.ctx.iterations.get(id) {
                let bytes = links.operations.entry(key.clone()).or_default();
                *bytes = operations.bytes().max(*bytes);
            }
            if !view.ctx.seems_busy(*id) {
                continue;
            }
            let (rings, ends) = (ring_links(view, known), only_links(&view.ctx.settings.topology, known));
            links.all.add(&rings, &ends);
            links.own.entry(key).or_default().add(&rings, &ends);
        }
        links
    }

    /// Links that no communicator uses.
    pub(super) fn unused(conditions: Conditions) -> Self {
        let (own, operations) = (BTreeMap::new(), BTreeMap::new());
        Self { conditions, all: Uses::default(), own, operations }
    }

    /// How many communicators of other jobs have traffic on each link: along their rings as far as routes are known, and the only link of each of
    /// their hosts.
    pub(crate) fn others(&self, key: &Key) -> BTreeMap<DirectedLink, u32> {
        let own = self.own.get(key);
        let links = self.all.rings.keys().chain(self.all.ends.keys());
        let others = links.map(|link| {
            let (rings, ends) = self.all.of(*link);
            let (own_rings, own_ends) = own.map_or((0, 0), |own| own.of(*link));
            (*link, rings.saturating_sub(own_rings).max(ends.saturating_sub(own_ends)))
        });
        others.filter(|(_, count)| *count > 0).collect()
    }

    /// How many links are looked at for what other jobs use.
    fn in_use(&self) -> usize {
        self.all.rings.len().saturating_add(self.all.ends.len())
    }

    /// Bytes of a typical operation of a job.
    pub(crate) fn operation(&self, key: &Key) -> Bytes {
        let told = self.operations.get(key).copied().filter(|bytes| *bytes > 0);
        Bytes(told.unwrap_or(OPERATION))
    }

    /// What links have left for ours.
    pub(crate) fn into_conditions(self) -> Conditions {
        self.conditions
    }

    /// Has a job's operations predicted beside what others have flow.
    pub(super) fn beside<T>(
        &self,
        topology: &Topology,
        key: &Key,
        predict: impl FnOnce(Beside<'_>) -> T,
    ) -> T {
        let (others, operation) = (self.others(key), self.operation(key));
        predict(Beside { topology, conditions: &self.conditions, others: &others, operation })
    }
}

/// The links of a communicator's hosts that have one alone: it crosses them whatever its ring is. None where it has one host.
fn only_links(topology: &Topology, known: &Communicator) -> Vec<DirectedLink> {
    if known.members.len() < 2 {
        return Vec::new();
    }
    let members = known.members.iter().filter(|member| !member.closed);
    let links = members.filter_map(|member| match topology.links_at(Node::Host(member.host)) {
        [link] => Some(*link),
        _ => None,
    });
    links.flat_map(|link| [true, false].map(|forward| DirectedLink { link, forward })).collect()
}

/// The predictions of a round.
#[derive(Debug)]
pub(super) struct Predictions<'a> {
    topology: &'a Topology,
    links: &'a Links,
    /// What may be spent still.
    effort: usize,
}

impl<'a> Predictions<'a> {
    pub(super) fn new(topology: &'a Topology, links: &'a Links) -> Self {
        Self { topology, links, effort: EFFORT }
    }

    pub(super) fn topology(&self) -> &'a Topology {
        self.topology
    }

    /// How good each of these hosts is for the next worker of a job that has hosts and is to have so many in all; the more the better.
    /// None of them is in the answer where too much has been spent.
    pub(super) fn scores(
        &mut self,
        key: &Key,
        has: &BTreeSet<HostId>,
        candidates: &[HostId],
        workers: usize,
    ) -> BTreeMap<HostId, u8> {
        let looks = has.len().saturating_add(candidates.len());
        self.effort = self.effort.saturating_sub(looks.saturating_add(self.links.in_use()));
        if self.effort == 0 {
            return BTreeMap::new();
        }
        let (links, topology) = (self.links, self.topology);
        links.beside(topology, key, |beside| {
            let scores = HostScores { beside, placed: has, candidates, workers };
            scores.scores(|| {
                let late = self.effort == 0;
                self.effort = self.effort.saturating_sub(looks.saturating_add(PREDICTION));
                late
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_planner::LinkId;

    fn two_hosts() -> Topology {
        let text = "host = [{ name = \"a\" }, { name = \"b\" }]\n\
                    link = [{ from = \"a\", to = \"b\", rate = \"1Gbit/s\" }]\n";
        Topology::parse(text).unwrap()
    }

    fn key(job: &str) -> Key {
        ("a".to_owned(), job.to_owned())
    }

    #[test]
    fn what_a_job_has_flow_itself_is_none_of_others() {
        let mut links = Links::unused(Conditions::clear(&two_hosts()));
        let [there, back] = [true, false].map(|forward| DirectedLink { link: LinkId(0), forward });
        // A ring that crosses a link twice, and two whose routes are not known.
        for (job, rings, ends) in [
            ("x", vec![there, there], vec![there]),
            ("y", vec![], vec![there, back]),
            ("y", vec![], vec![there]),
        ] {
            links.all.add(&rings, &ends);
            links.own.entry(key(job)).or_default().add(&rings, &ends);
        }
        assert_eq!(links.others(&key("z")), BTreeMap::from([(there, 3), (back, 1)]));
        assert_eq!(links.others(&key("x")), BTreeMap::from([(there, 2), (back, 1)]));
        assert_eq!(links.others(&key("y")), BTreeMap::from([(there, 2)]));
        assert_eq!(links.operation(&key("x")), Bytes(OPERATION));
        links.operations.insert(key("x"), 7);
        assert_eq!(links.operation(&key("x")), Bytes(7));
    }

    #[test]
    fn groups_of_a_split_are_of_its_job() {
        for (name, job) in [
            ("bert", "bert"),
            ("bert/x", "bert"),
            ("bert#0.1", "bert"),
            ("bert#0.1#12.3", "bert"),
            ("bert/x#0.1", "bert"),
            ("team#5", "team#5"),
            ("#0.1", "#0.1"),
        ] {
            assert_eq!(root_job_named(name), job, "{name}");
        }
    }

    #[test]
    fn once_too_much_is_spent_no_host_has_a_score() {
        let topology = two_hosts();
        let links = Links::unused(Conditions::clear(&topology));
        let mut predictions = Predictions { effort: 2 * PREDICTION, ..Predictions::new(&topology, &links) };
        let hosts = [HostId(0), HostId(1)];
        let mut scores = || predictions.scores(&key("x"), &BTreeSet::new(), &hosts, 2);
        assert_eq!(scores().len(), 2);
        (0..4).for_each(|_| drop(scores()));
        assert_eq!(scores(), BTreeMap::new());
    }

    #[test]
    fn links_in_use_cost_effort_too() {
        let topology = two_hosts();
        let mut links = Links::unused(Conditions::clear(&topology));
        let used: Vec<DirectedLink> =
            (0..1000).map(|link| DirectedLink { link: LinkId(link), forward: true }).collect();
        links.all.add(&used, &used);
        let hosts = [HostId(0), HostId(1)];
        let scored = |effort| {
            let mut predictions = Predictions { effort, ..Predictions::new(&topology, &links) };
            predictions.scores(&key("x"), &BTreeSet::new(), &hosts, 2).len()
        };
        assert_eq!([scored(1500), scored(2500)], [0, 2]);
    }
}
