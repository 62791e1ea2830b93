//! Weighted max-min shares: all rates rise together, each by its weight, until a link is full; who crosses it stays there.
//! Bertsekas and Gallager, "Data Networks", 1992, 6.5.2.

use super::model::Local;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// One that takes part.
pub(super) struct Flow<'a> {
    /// The part of its rate on each link.
    pub(super) usage: &'a [(Local, f64)],
    /// How fast it rises.
    pub(super) weight: f64,
    /// More it does not take.
    pub(super) demand: f64,
}

/// Memory that is used again from one call to the next.
#[derive(Default)]
pub(super) struct Shares {
    links: Vec<Filling>,
    used: Vec<Local>,
    /// Flows of each used link, as ranges of `crossing`.
    crossing: Vec<(u32, f64)>,
    rates: Vec<f64>,
    heap: BinaryHeap<Reverse<(Level, bool, u32)>>,
}

/// A link while it fills.
#[derive(Clone, Copy, Default)]
struct Filling {
    /// What is left for those who still rise.
    left: f64,
    /// How fast it fills.
    slope: f64,
    rising: u32,
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
    pub(super) fn fill(&mut self, capacity: &[f64], flows: &[Flow<'_>]) -> &[f64] {
        self.begin(capacity, flows);
        while let Some(Reverse((Level(level), is_flow, index))) = self.heap.pop() {
            if is_flow {
                self.freeze(flows, index, level);
                continue;
            }
            let Some(link) = self.links.get(index as usize).copied() else { continue };
            if link.rising == 0 || link.level != level {
                continue;
            }
            for at in link.begin..link.end {
                if let Some((flow, _)) = self.crossing.get(at as usize).copied() {
                    self.freeze(flows, flow, level);
                }
            }
        }
        &self.rates
    }

    fn begin(&mut self, capacity: &[f64], flows: &[Flow<'_>]) {
        for link in self.used.drain(..) {
            if let Some(link) = self.links.get_mut(link as usize) {
                *link = Filling::default();
            }
        }
        self.links.resize(capacity.len(), Filling::default());
        self.rates.clear();
        self.rates.resize(flows.len(), f64::NAN);
        self.heap.clear();
        for (index, flow) in flows.iter().enumerate() {
            self.heap.push(Reverse((Level(flow.demand / flow.weight), true, index as u32)));
            for (link, part) in flow.usage {
                let Some(filling) = self.links.get_mut(*link as usize) else { continue };
                if filling.rising == 0 {
                    self.used.push(*link);
                }
                filling.rising += 1;
                filling.slope += part * flow.weight;
            }
        }
        let mut begin = 0;
        for number in &self.used {
            let Some(link) = self.links.get_mut(*number as usize) else { continue };
            (link.begin, link.end) = (begin, begin);
            begin += link.rising;
            link.left = capacity.get(*number as usize).copied().unwrap_or(0.0);
            link.level = link.left / link.slope;
            self.heap.push(Reverse((Level(link.level), false, *number)));
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

    /// A flow stays at this level from now on.
    fn freeze(&mut self, flows: &[Flow<'_>], index: u32, level: f64) {
        let (Some(flow), Some(rate)) = (flows.get(index as usize), self.rates.get_mut(index as usize)) else {
            return;
        };
        if !rate.is_nan() {
            return;
        }
        *rate = level * flow.weight;
        for (number, part) in flow.usage {
            let Some(link) = self.links.get_mut(*number as usize) else { continue };
            link.left = (link.left - part * *rate).max(0.0);
            link.slope -= part * flow.weight;
            link.rising = link.rising.saturating_sub(1);
            if link.rising > 0 {
                // Never below the level reached: what was full stays full.
                link.level = (link.left / link.slope.max(f64::MIN_POSITIVE)).max(level);
                self.heap.push(Reverse((Level(link.level), false, *number)));
            }
        }
    }
}
