//! What was seen, as numbers for each two ranks.

use super::experiment::RANKS;
use harmonaize_abi::session::{Event, EventKind};
use harmonaize_abi::{Rank, StragglerCause};
use harmonaize_disclose::Fact;
use std::collections::{BTreeMap, BTreeSet};

/// A communicator's name, by its ranks.
pub(super) fn name(ranks: &[usize]) -> String {
    ranks.iter().map(usize::to_string).collect::<Vec<_>>().join("-")
}

fn ranks(name: &str) -> Vec<usize> {
    name.split('-').map(|rank| rank.parse().unwrap()).collect()
}

/// When, of what kind, and how much.
type Mark = (u128, u8, i64);

/// A sum, and of how many.
type Mean = (f64, f64);

/// Everything about two ranks that comes by one way.
pub(super) struct Evidence {
    /// Of this while, by communicator.
    marks: BTreeMap<Vec<usize>, BTreeSet<Mark>>,
    /// The share that a communicator had last.
    shares: BTreeMap<(Vec<usize>, u8), i64>,
    /// Whose host goes, by when it was said.
    going: BTreeMap<u128, BTreeSet<usize>>,
    /// Told with both, told with one of them, not told with both, not told with one.
    counts: Vec<[f64; 4]>,
    /// How much was told with both.
    weight: Vec<f64>,
    /// How alike what the two share with every third is.
    alike: Vec<Mean>,
    times: Vec<f64>,
    sizes: Vec<[f64; 2]>,
    rates: Vec<Mean>,
    /// Of this while, by communicator: ranks that were named as behind a slow link.
    late: BTreeMap<Vec<usize>, BTreeSet<usize>>,
    /// Communicators that both were in, by who was named there. The first number counts those of which one was
    /// named, the second those of which none was. The third counts those where one of both was the named one.
    late_counts: Vec<[f64; 3]>,
    /// All that were named in a while.
    named: Vec<BTreeSet<usize>>,
    /// As one communicator formed beside another: told with one in each, not told; and both in the one that formed.
    met: Vec<[f64; 4]>,
}

fn at(i: usize, j: usize) -> usize {
    i.min(j) * RANKS + i.max(j)
}

impl Evidence {
    pub(super) fn new() -> Self {
        let all = RANKS * RANKS;
        Self {
            marks: BTreeMap::new(),
            shares: BTreeMap::new(),
            going: BTreeMap::new(),
            counts: vec![[0.0; 4]; all],
            weight: vec![0.0; all],
            alike: vec![(0.0, 0.0); all],
            times: vec![f64::NAN; all],
            sizes: vec![[f64::NAN; 2]; all],
            rates: vec![(0.0, 0.0); all],
            late: BTreeMap::new(),
            late_counts: vec![[0.0; 3]; all],
            named: Vec::new(),
            met: vec![[0.0; 4]; all],
        }
    }

    /// A tenant's event.
    pub(super) fn event(&mut self, event: &Event) {
        let group = ranks(&event.communicator);
        let when = u128::from(event.since_ns);
        let mark = match &event.kind {
            EventKind::Congestion(level) => (when, 0, *level as i64),
            EventKind::Capacity(level) => (when, 1, *level as i64),
            EventKind::PlanChanged => (when, 2, 1),
            EventKind::Maintenance { ranks, .. } => {
                let going = ranks.iter().filter_map(|rank| group.get(rank.0 as usize));
                self.going.entry(when).or_default().extend(going);
                return;
            }
            EventKind::Stragglers { cause: StragglerCause::Network, ranks } => {
                self.late_in(&group, ranks.iter());
                return;
            }
            _ => return,
        };
        self.marks.entry(group).or_default().insert(mark);
    }

    fn late_in<'a>(&mut self, group: &[usize], named: impl Iterator<Item = &'a Rank>) {
        let named: Vec<usize> = named.filter_map(|rank| group.get(rank.0 as usize).copied()).collect();
        if !named.is_empty() {
            self.late.entry(group.to_vec()).or_default().extend(named);
        }
    }

    /// What the provider knows.
    pub(super) fn fact(&mut self, when: std::time::Duration, group: &[usize], fact: &Fact) {
        let (kind, share) = match fact {
            Fact::Congestion { share } => (0, *share),
            Fact::Capacity { share } => (1, *share),
            Fact::PlanChanged => {
                self.marks.entry(group.to_vec()).or_default().insert((when.as_nanos(), 2, 1));
                return;
            }
            Fact::Maintenance { ranks } => {
                let going = ranks.keys().filter_map(|rank| group.get(rank.0 as usize));
                self.going.entry(when.as_nanos()).or_default().extend(going);
                return;
            }
            Fact::Stragglers { cause: StragglerCause::Network, ranks, .. } => {
                self.late_in(group, ranks.keys());
                return;
            }
            _ => return,
        };
        let lost = ((1.0 - share) * 50.0).round() as i64;
        let before = self.shares.insert((group.to_vec(), kind), lost).unwrap_or(0);
        if before != lost {
            self.marks.entry(group.to_vec()).or_default().insert((when.as_nanos(), kind, lost));
        }
    }

    /// The time that is promised at best.
    pub(super) fn time(&mut self, i: usize, j: usize, seconds: f64) {
        self.times[at(i, j)] = seconds.ln();
    }

    /// Up to which sizes operations go in one shot and in two, as receipts show.
    pub(super) fn sizes(&mut self, i: usize, j: usize, (one, two): (u64, u64)) {
        self.sizes[at(i, j)] = [one, two].map(|size| (size as f64 + 1.0).ln());
    }

    /// The bandwidth that was promised of all that could be asked for.
    pub(super) fn rate(&mut self, i: usize, j: usize, bytes: u64) {
        let mean = &mut self.rates[at(i, j)];
        *mean = (mean.0 + (bytes as f64 + 1.0).ln(), mean.1 + 1.0);
    }

    /// A communicator of two formed beside others: whether anything was told.
    pub(super) fn met(&mut self, before: &[usize], formed: &[usize]) {
        let quiet = usize::from(std::mem::take(&mut self.marks).is_empty());
        for new in formed {
            before.iter().for_each(|old| self.met[at(*old, *new)][quiet] += 1.0);
        }
        self.met[at(formed[0], formed[1])][2 + quiet] += 1.0;
    }

    /// Who was named of the communicators that there were is counted.
    fn end_of_late(&mut self, groups: &[Vec<usize>]) {
        let late = std::mem::take(&mut self.late);
        for group in groups {
            let pairs = group.iter().flat_map(|i| group.iter().map(move |j| (*i, *j))).filter(|(i, j)| i < j);
            for (i, j) in pairs {
                let [told, quiet, one] = &mut self.late_counts[at(i, j)];
                match late.get(group) {
                    None => *quiet += 1.0,
                    Some(named) => {
                        *told += 1.0;
                        *one += f64::from(u8::from(named.contains(&i) != named.contains(&j)));
                    }
                }
            }
        }
        self.named
            .extend(Some(late.into_values().flatten().collect()).filter(|all: &BTreeSet<_>| !all.is_empty()));
    }

    /// What was told of the communicators that there were is counted.
    pub(super) fn end_of_while(&mut self, groups: &[Vec<usize>]) {
        self.end_of_late(groups);
        let none = BTreeSet::new();
        for group in groups {
            let marks = self.marks.get(group).unwrap_or(&none);
            let told = marks.iter().map(|(.., much)| *much as f64).fold(0.0, f64::max);
            let quiet = if marks.is_empty() { 2 } else { 0 };
            for i in 0..RANKS {
                for j in i + 1..RANKS {
                    match (group.contains(&i), group.contains(&j)) {
                        (true, true) => {
                            self.counts[at(i, j)][quiet] += 1.0;
                            self.weight[at(i, j)] += told;
                        }
                        (false, false) => {}
                        _ => self.counts[at(i, j)][quiet + 1] += 1.0,
                    }
                }
            }
        }
        for i in 0..RANKS {
            for j in i + 1..RANKS {
                for k in (0..RANKS).filter(|k| *k != i && *k != j) {
                    let of = |a: usize| self.marks.get(&vec![a.min(k), a.max(k)]).unwrap_or(&none);
                    let either = of(i).union(of(j)).count();
                    if either > 0 {
                        let both = of(i).intersection(of(j)).count();
                        let mean = &mut self.alike[at(i, j)];
                        *mean = (mean.0 + both as f64 / either as f64, mean.1 + 1.0);
                    }
                }
            }
        }
        self.marks.clear();
    }

    /// How much what two ranks have with every third differs.
    fn rows(i: usize, j: usize, of: impl Fn(usize) -> f64) -> f64 {
        let others = (0..RANKS).filter(|k| *k != i && *k != j);
        let differ = others.map(|k| (of(at(i, k)) - of(at(j, k))).abs());
        differ.sum::<f64>() / (RANKS - 2) as f64
    }

    /// Congestion, capacity and changes of plan.
    pub(super) fn events(&self, i: usize, j: usize) -> Vec<f64> {
        let pair = at(i, j);
        let part = |(told, quiet): (f64, f64)| told / (told + quiet);
        let [both, one, both_quiet, one_quiet] = self.counts[pair];
        let mut all = self.counts[pair].to_vec();
        all.extend([part((both, both_quiet)), part((one, one_quiet)), self.weight[pair]]);
        all.push(mean(self.alike[pair]));
        all
    }

    /// Ranks behind slow links.
    pub(super) fn stragglers(&self, i: usize, j: usize) -> Vec<f64> {
        let [told, quiet, one] = self.late_counts[at(i, j)];
        let mut all = vec![told, told / (told + quiet), one];
        all.extend(together(self.named.iter(), i, j));
        all
    }

    /// For each while in which somebody was named as behind a slow link, who was.
    pub(super) fn named(&self) -> &[BTreeSet<usize>] {
        &self.named
    }

    /// Promised times.
    pub(super) fn times(&self, i: usize, j: usize) -> Vec<f64> {
        vec![self.times[at(i, j)], Self::rows(i, j, |pair| self.times[pair])]
    }

    /// Receipts.
    pub(super) fn receipts(&self, i: usize, j: usize) -> Vec<f64> {
        let [one, two] = self.sizes[at(i, j)];
        let differ = |which: usize| Self::rows(i, j, |pair| self.sizes[pair][which]);
        vec![one, two, differ(0), differ(1)]
    }

    /// Promised bandwidth.
    pub(super) fn rates(&self, i: usize, j: usize) -> Vec<f64> {
        vec![mean(self.rates[at(i, j)])]
    }

    /// Own communicators beside each other.
    pub(super) fn meetings(&self, i: usize, j: usize) -> Vec<f64> {
        let [told, quiet, formed_told, formed_quiet] = self.met[at(i, j)];
        vec![told / (told + quiet), formed_told / (formed_told + formed_quiet)]
    }

    /// Whose hosts go together, and whose alone.
    pub(super) fn going(&self, i: usize, j: usize) -> Vec<f64> {
        together(self.going.values(), i, j)
    }
}

fn mean((sum, count): Mean) -> f64 {
    sum / count
}

/// How often both are in a set, and how often one is.
pub(super) fn together<'a>(sets: impl Iterator<Item = &'a BTreeSet<usize>>, i: usize, j: usize) -> Vec<f64> {
    let (mut both, mut one) = (0.0, 0.0);
    for set in sets {
        match (set.contains(&i), set.contains(&j)) {
            (true, true) => both += 1.0,
            (false, false) => {}
            _ => one += 1.0,
        }
    }
    vec![both, one]
}
