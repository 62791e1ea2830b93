//! The market as a policy: an agent for each job bids for accelerators of one kind. It makes one bid for each accelerator, and
//! the market clears. A job's agent counts an hour of the job's time as one unit of money. It bids where its work costs least
//! beside all others' bids, and for each further accelerator what the time that it saves is worth.

use super::elastic::{Size, assign, pinned, sizes};
use super::{Policy, PolicyError, Round};
use crate::allocation::Allocation;
use crate::inventory::KindId;
use crate::market::{Bid, BidId, Market, MarketError, Traded, highest_price};
use std::collections::BTreeMap;

/// An agent's bid for the first worker, so that its job runs at all. It is more than doubling that worker is worth.
const FIRST: f64 = 2.0;

/// The market's policy.
#[derive(Debug, Clone, Default)]
pub struct MarketPolicy {
    base_price: f64,
    /// The kind for which each job's agent bids, by the job's number.
    kinds: BTreeMap<usize, KindId>,
}

impl MarketPolicy {
    /// With a base price of all kinds, in what an hour of a job's time is worth.
    pub fn new(base_price: f64) -> Self {
        Self { base_price, ..Self::default() }
    }
}

impl Policy for MarketPolicy {
    fn name(&self) -> &'static str {
        "Market"
    }

    fn allocate(&mut self, round: &Round<'_>) -> Result<Vec<Option<Allocation>>, PolicyError> {
        let mut free: Vec<u32> = round.inventory.kinds().map(|(_, kind)| kind.capacity()).collect();
        for kept in round.jobs.iter().filter_map(pinned) {
            if let Some(free) = free.get_mut(kept.kind.0) {
                *free = free.saturating_sub(kept.workers());
            }
        }
        let bidders = round.jobs.iter().filter(|candidate| pinned(candidate).is_none());
        let bidders: BTreeMap<usize, Vec<Size>> =
            bidders.map(|candidate| (candidate.number, sizes(round, candidate))).collect();
        self.kinds.retain(|job, _| bidders.contains_key(job));
        let mut standing = Standing { base_price: self.base_price, free, by_kind: Vec::new() };
        standing.by_kind.resize(standing.free.len(), Vec::new());
        for (job, sizes) in &bidders {
            if let Some(kind) = self.kinds.get(job) {
                standing.add(*job, *kind, sizes);
            }
        }
        for (job, sizes) in &bidders {
            standing.remove(*job);
            if let Some(kind) = standing.cheapest(sizes) {
                self.kinds.insert(*job, kind);
                standing.add(*job, kind, sizes);
            }
        }
        let mut won: BTreeMap<usize, u32> = BTreeMap::new();
        for bid in standing.exchange(round)?.clear().winners.keys() {
            *won.entry(job_of(*bid)).or_default() += 1;
        }
        let chosen = round.jobs.iter().map(|candidate| match pinned(candidate) {
            Some(kept) => Some((kept.kind, kept.workers())),
            None => {
                let (job, kind) = (&candidate.number, *self.kinds.get(&candidate.number)?);
                let won = won.get(job).copied().unwrap_or(0);
                let fits = bidders.get(job)?.iter().filter(|size| size.kind == kind && size.workers <= won);
                let best = fits.max_by(|one, other| one.worth.total_cmp(&other.worth));
                best.map(|size| (kind, size.workers))
            }
        });
        Ok(assign(round, &chosen.collect::<Vec<_>>()))
    }
}

/// The bids that stand, and what there is.
struct Standing {
    base_price: f64,
    /// Accelerators by kind that no job keeps.
    free: Vec<u32>,
    /// Bids by kind, the highest first, each with its job.
    by_kind: Vec<Vec<(f64, usize)>>,
}

impl Standing {
    /// Has a job's bids for a kind stand.
    fn add(&mut self, job: usize, kind: KindId, sizes: &[Size]) {
        if let Some(bids) = self.by_kind.get_mut(kind.0) {
            bids.extend(prices(kind, sizes).into_iter().map(|price| (price, job)));
            // Equal ones stay in their order.
            bids.sort_by(|one, other| other.0.total_cmp(&one.0));
        }
    }

    fn remove(&mut self, job: usize) {
        for bids in &mut self.by_kind {
            bids.retain(|(_, of)| *of != job);
        }
    }

    /// The kind on which a job's work costs least, time and accelerators together. So many workers cost each the highest bid that they keep
    /// out.
    fn cheapest(&self, sizes: &[Size]) -> Option<KindId> {
        let cost = |size: &Size| {
            let (bids, free) = (self.by_kind.get(size.kind.0)?, self.free.get(size.kind.0)?);
            let within = free.checked_sub(size.workers)?;
            let price = bids.get(within as usize).map_or(self.base_price, |(price, _)| *price);
            Some((size.kind, (1.0 + price * f64::from(size.workers)) / size.worth))
        };
        let costs = sizes.iter().filter_map(cost);
        costs.reduce(|best, next| if next.1 < best.1 { next } else { best }).map(|(kind, _)| kind)
    }

    /// The market with these bids.
    fn exchange(&self, round: &Round<'_>) -> Result<Market, MarketError> {
        let traded = round.inventory.kinds().zip(&self.free).map(|((_, kind), units)| Traded {
            name: kind.name.clone(),
            units: *units,
            base_price: self.base_price,
        });
        let mut exchange = Market::new(traded.collect(), 0.0)?;
        let mut numbers: BTreeMap<usize, u64> = BTreeMap::new();
        for (kind, bids) in self.by_kind.iter().enumerate() {
            for (price, job) in bids {
                let number = numbers.entry(*job).or_default();
                let highest = BTreeMap::from([(KindId(kind), *price)]);
                exchange.bid(BidId(*job as u64 * BIDS + *number), Bid { highest, checkpoint: 0.0 })?;
                *number += 1;
            }
        }
        Ok(exchange)
    }
}

/// Bids of a job have numbers of their own.
const BIDS: u64 = 1 << 16;

fn job_of(bid: BidId) -> usize {
    usize::try_from(bid.0 / BIDS).unwrap_or(usize::MAX)
}

/// What a job bids for each worker of a kind. It is as much as the time that its size saves is worth, and never more than for the one
/// before.
fn prices(kind: KindId, sizes: &[Size]) -> Vec<f64> {
    let mut prices: Vec<f64> = Vec::new();
    let (mut workers, mut worth, mut price) = (0, 0.0, FIRST);
    for size in sizes.iter().filter(|size| size.kind == kind) {
        if size.worth <= worth || size.workers <= workers {
            continue;
        }
        if workers > 0 {
            let saved = highest_price(1.0 / worth - 1.0 / size.worth, 1.0 / size.worth).unwrap_or(0.0);
            price = (saved / f64::from(size.workers - workers)).min(price);
        }
        prices.resize(size.workers as usize, price);
        (workers, worth) = (size.workers, size.worth);
    }
    prices
}
