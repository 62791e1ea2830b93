//! Weighted max-min shares. All rates rise together, each by its weight, until a link is full, and who crosses it stays there.
//! Bertsekas and Gallager, "Data Networks", 1992, 6.5.2. Who has something promised begins with that, and rises once the others
//! have come so far; where a link cannot hold all that is promised, each has the same part of its promise, and who has none a
//! little.

use super::model::LinkIndex;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Most of a link that promises take before all others have anything.
const MAX_GUARANTEED: f64 = 0.95;

/// One that takes part.
pub(super) struct FairFlow<'a> {
    /// The part of its rate on each link.
    pub(super) usage: &'a [(LinkIndex, f64)],
    /// How fast it rises.
    pub(super) weight: f64,
    /// More it does not take.
    pub(super) demand: f64,
    /// Less it does not get, if its links can hold what is promised on them.
    pub(super) guaranteed: f64,
}

/// Memory that is used again from one call to the next.
#[derive(Default)]
pub(super) struct Shares {
    links: Vec<Filling>,
    used: Vec<LinkIndex>,
    /// Flows of each used link, as ranges of `crossing`.
    crossing: Vec<(u32, f64)>,
    rates: Vec<f64>,
    /// What each has from the first on.
    guaranteed: Vec<f64>,
    /// Whether each has begun to rise.
    rises: Vec<bool>,
    heap: BinaryHeap<Reverse<(Level, Event, u32)>>,
}

/// What happens at a level; of several at one level, those further up first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A link is full.
    Full,
    /// A flow has what it was promised, and rises with the others.
    Rises,
    /// A flow has all it takes.
    Satisfied,
}

/// A link while it fills.
#[derive(Clone, Copy, Default)]
struct Filling {
    /// What is left for those who still rise.
    available: f64,
    /// How fast it fills.
    slope: f64,
    /// Flows that have not stopped, whether they rise yet or not.
    crossing: u32,
    /// When it will be full, as last reckoned.
    level: f64,
    begin: u32,
    end: u32,
}

/// A level, ordered as numbers are.
#[derive(Clone, Copy, PartialEq)]
struct Level(f64);

impl Eq for Level {}

impl PartialOrd for Level {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Level {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl Shares {
    /// The rate of each flow, in their order. Cost: the flows' usages together, times the logarithm of the links.
    pub(super) fn fill(&mut self, capacity: &[f64], flows: &[FairFlow<'_>]) -> &[f64] {
        self.begin(capacity, flows);
        while let Some(Reverse((Level(level), event, index))) = self.heap.pop() {
            match event {
                Event::Full => {}
                Event::Rises => {
                    self.rise(flows, index, level);
                    continue;
                }
                Event::Satisfied => {
                    self.freeze(flows, index, level);
                    continue;
                }
            }
            let Some(link) = self.links.get(index as usize).copied() else { continue };
            if link.crossing == 0 || link.level != level {
                continue;
            }
            for at in link.begin..link.end {
                if let Some((flow, _)) = self.crossing.get(at as usize).copied() {
                    self.freeze(flows, flow, level);
                }
            }
        }
        debug_assert!(self.fits(capacity, flows), "no link carries more than it has");
        &self.rates
    }

    /// Whether the rates fit the links; asserted alone.
    fn fits(&self, capacity: &[f64], flows: &[FairFlow<'_>]) -> bool {
        let mut load = vec![0.0; capacity.len()];
        for ((number, part), rate) in flows
            .iter()
            .zip(&self.rates)
            .flat_map(|(flow, rate)| flow.usage.iter().map(move |one| (one, rate)))
        {
            if let Some(load) = load.get_mut(*number as usize) {
                *load += part * rate;
            }
        }
        load.iter().zip(capacity).all(|(load, capacity)| *load <= capacity.max(0.0) * (1.0 + 1e-6) + 1.0)
    }

    fn begin(&mut self, capacity: &[f64], flows: &[FairFlow<'_>]) {
        for link in self.used.drain(..) {
            if let Some(link) = self.links.get_mut(link as usize) {
                *link = Filling::default();
            }
        }
        self.links.resize(capacity.len(), Filling::default());
        self.rates.clear();
        self.rates.resize(flows.len(), f64::NAN);
        self.rises.clear();
        self.heap.clear();
        self.start_from_guarantees(capacity, flows);
        for (index, (flow, least)) in flows.iter().zip(&self.guaranteed).enumerate() {
            self.heap.push(Reverse((Level(flow.demand / flow.weight), Event::Satisfied, index as u32)));
            let waits = *least > 0.0;
            if waits {
                self.heap.push(Reverse((Level(least / flow.weight), Event::Rises, index as u32)));
            }
            self.rises.push(!waits);
            for (number, part) in flow.usage {
                let Some(filling) = self.links.get_mut(*number as usize) else { continue };
                if filling.crossing == 0 {
                    self.used.push(*number);
                    filling.available = capacity.get(*number as usize).copied().unwrap_or(0.0);
                }
                filling.crossing += 1;
                match waits {
                    true => filling.available -= part * least,
                    false => filling.slope += part * flow.weight,
                }
            }
        }
        let mut begin = 0;
        for number in &self.used {
            let Some(link) = self.links.get_mut(*number as usize) else { continue };
            (link.begin, link.end) = (begin, begin);
            begin += link.crossing;
            link.available = link.available.max(0.0);
            link.level = link.available / link.slope.max(f64::MIN_POSITIVE);
            self.heap.push(Reverse((Level(link.level), Event::Full, *number)));
        }
        self.crossing.clear();
        self.crossing.resize(begin as usize, (0, 0.0));
        for (index, flow) in flows.iter().enumerate() {
            for (link, part) in flow.usage {
                let Some(link) = self.links.get_mut(*link as usize) else { continue };
                if let Some(cell) = self.crossing.get_mut(link.end as usize) {
                    *cell = (index as u32, *part);
                    link.end += 1;
                }
            }
        }
    }

    /// Starts each flow with what it was promised. If the worst of its links cannot carry that, the flow starts with the part
    /// that the link can.
    fn start_from_guarantees(&mut self, capacity: &[f64], flows: &[FairFlow<'_>]) {
        self.guaranteed.clear();
        self.guaranteed.extend(flows.iter().map(|flow| flow.guaranteed.min(flow.demand).max(0.0)));
        if self.guaranteed.iter().all(|least| *least == 0.0) {
            return;
        }
        let mut promised = vec![0.0; capacity.len()];
        for (flow, least) in flows.iter().zip(&self.guaranteed) {
            for (number, part) in flow.usage {
                if let Some(cell) = promised.get_mut(*number as usize) {
                    *cell += part * least;
                }
            }
        }
        for (flow, least) in flows.iter().zip(&mut self.guaranteed) {
            let held = |(number, _): &(LinkIndex, f64)| {
                let of = |all: &[f64]| all.get(*number as usize).copied().unwrap_or(0.0);
                if of(&promised) > 0.0 {
                    (of(capacity) * MAX_GUARANTEED / of(&promised)).min(1.0)
                } else {
                    1.0
                }
            };
            *least *= flow.usage.iter().map(held).fold(1.0, f64::min);
        }
    }

    /// A flow rises with the others from now on.
    fn rise(&mut self, flows: &[FairFlow<'_>], index: u32, level: f64) {
        let at = index as usize;
        let (Some(flow), Some(least), Some(rises)) =
            (flows.get(at), self.guaranteed.get(at), self.rises.get_mut(at))
        else {
            return;
        };
        if self.rates.get(at).is_none_or(|rate| !rate.is_nan()) || std::mem::replace(rises, true) {
            return;
        }
        for (number, part) in flow.usage {
            let Some(link) = self.links.get_mut(*number as usize) else { continue };
            link.available += part * least;
            link.slope += part * flow.weight;
            link.level = (link.available / link.slope.max(f64::MIN_POSITIVE)).max(level);
            self.heap.push(Reverse((Level(link.level), Event::Full, *number)));
        }
    }

    /// A flow stays at this level from now on.
    fn freeze(&mut self, flows: &[FairFlow<'_>], index: u32, level: f64) {
        let at = index as usize;
        let (Some(flow), Some(rate), Some(least), Some(rises)) =
            (flows.get(at), self.rates.get_mut(at), self.guaranteed.get(at), self.rises.get(at))
        else {
            return;
        };
        if !rate.is_nan() {
            return;
        }
        *rate = if *rises { level * flow.weight } else { *least };
        for (number, part) in flow.usage {
            let Some(link) = self.links.get_mut(*number as usize) else { continue };
            if *rises {
                link.available = (link.available - part * *rate).max(0.0);
                link.slope -= part * flow.weight;
            }
            link.crossing = link.crossing.saturating_sub(1);
            if link.crossing > 0 {
                // Never below the level reached: what was full stays full.
                link.level = (link.available / link.slope.max(f64::MIN_POSITIVE)).max(level);
                self.heap.push(Reverse((Level(link.level), Event::Full, *number)));
            }
        }
    }
}
