//! Jobs in the market. Each bids for units of one kind: for all of its fewest or for none of them, and for further ones beside them.

use super::{Bid, BidId, Market, MarketError, Traded};
use crate::inventory::KindId;
use std::collections::BTreeMap;

/// What a job wants.
#[derive(Debug, Clone, PartialEq)]
pub struct Demand {
    /// The fewest and the most units.
    pub units: (u32, u32),
    /// How many units of each kind it could use, in the kinds' order.
    pub usable: Vec<u32>,
    /// The highest price of each of its fewest units, and of each further one; the base price of the kind where there is none.
    pub highest: Option<(f64, f64)>,
    /// The kind of which it has units.
    pub current: Option<KindId>,
}

/// Units that a job gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Won {
    /// Of which kind.
    pub kind: KindId,
    /// How many: its fewest at least.
    pub units: u32,
}

/// Which jobs get what, and at which prices.
#[derive(Debug, Clone, PartialEq)]
pub struct ClearedJobs {
    /// What each job gets, in their order.
    pub won: Vec<Option<Won>>,
    /// The kind for which each job has bid; `None` where it could use enough of none.
    pub bid_for: Vec<Option<KindId>>,
    /// The price of each kind, in dollars an hour.
    pub prices: Vec<f64>,
}

/// Clears the market of jobs that come in the order of their arrival.
///
/// A job bids for the kind of which it has units. Another one bids where its units cost least beside the bids that stand. Whoever gets
/// nothing so bids for another kind, where it would win. Of equal bids fewest units go before further ones, then jobs that have units,
/// then those that came first. Where fewer units are left than a job needs, the next bids have them, and its own sets no price.
///
/// # Errors
///
/// A price that is no number.
pub fn clear_jobs(traded: &[Traded], demands: &[Demand]) -> Result<ClearedJobs, MarketError> {
    let mut book = Book { traded, demands, kinds: vec![None; demands.len()] };
    for (kind, demand) in book.kinds.iter_mut().zip(demands) {
        *kind = demand.current.filter(|kind| demand.fits(*kind));
    }
    let mut order: Vec<usize> = (0..demands.len()).collect();
    // Whoever bids most chooses first; of equal ones the first that came.
    let first = |job: &usize| {
        let demand = demands.get(*job)?;
        demand.highest.map(|highest| highest.0).or_else(|| demand.lowest_base_price(traded))
    };
    let first = |job: &usize| first(job).unwrap_or(0.0);
    order.sort_by(|one, other| first(other).total_cmp(&first(one)));
    let without = |job: &&usize| book.kinds.get(**job).is_some_and(Option::is_none);
    let without: Vec<usize> = order.iter().filter(without).copied().collect();
    book.choose(&without);
    let cleared = book.clear()?;
    let lost = |job: &&usize| cleared.won.get(**job).is_some_and(Option::is_none);
    let lost: Vec<usize> = order.iter().filter(lost).copied().collect();
    if book.choose(&lost) { book.clear() } else { Ok(cleared) }
}

impl Demand {
    /// Whether it could use its fewest units of a kind.
    fn fits(&self, kind: KindId) -> bool {
        self.units.0 > 0 && self.usable.get(kind.0).is_some_and(|usable| *usable >= self.units.0)
    }

    /// The lowest base price of a kind that it could use: what it bids there without a bid of its own.
    fn lowest_base_price(&self, traded: &[Traded]) -> Option<f64> {
        let fits = traded.iter().enumerate().filter(|(kind, _)| self.fits(KindId(*kind)));
        fits.map(|(_, traded)| traded.base_price).min_by(f64::total_cmp)
    }

    /// Its bids for a kind: for each of its fewest units, and for so many further ones.
    fn bids(&self, kind: KindId, base_price: f64) -> (f64, f64, u32) {
        let (least, further) = self.highest.unwrap_or((base_price, base_price));
        let most = self.usable.get(kind.0).copied().unwrap_or(0).min(self.units.1);
        (least, further.min(least), most.saturating_sub(self.units.0))
    }
}

/// Jobs, and the kind for which each bids.
struct Book<'a> {
    traded: &'a [Traded],
    demands: &'a [Demand],
    kinds: Vec<Option<KindId>>,
}

/// Units for which a job bids alike.
#[derive(Clone, Copy)]
struct Block {
    price: f64,
    /// Beyond its fewest.
    further: bool,
    /// Whether the job has units of the kind.
    has: bool,
    job: usize,
    units: u32,
}

impl Book<'_> {
    /// Has these jobs choose their kinds anew, one after the other. Returns whether any bids for another kind than before.
    fn choose(&mut self, jobs: &[usize]) -> bool {
        let mut standing: Vec<Vec<f64>> =
            (0..self.traded.len()).map(|kind| self.standing(KindId(kind))).collect();
        let mut changed = false;
        for job in jobs {
            let (Some(demand), Some(before)) = (self.demands.get(*job), self.kinds.get(*job).copied()) else {
                continue;
            };
            if let Some(kind) = before {
                self.replace(&mut standing, (demand, kind), false);
            }
            let after = self.cheapest(demand, before, &standing);
            if let Some(kind) = after {
                self.replace(&mut standing, (demand, kind), true);
            }
            if let Some(kind) = self.kinds.get_mut(*job) {
                *kind = after;
            }
            changed |= after != before;
        }
        changed
    }

    /// The bids for a kind, the highest first.
    fn standing(&self, kind: KindId) -> Vec<f64> {
        let blocks = self.blocks(kind).into_iter();
        blocks.flat_map(|block| std::iter::repeat_n(block.price, block.units as usize)).collect()
    }

    /// Adds a job's bids for a kind to those that stand, or takes them away.
    fn replace(&self, standing: &mut [Vec<f64>], (demand, kind): (&Demand, KindId), adds: bool) {
        let (Some(traded), Some(bids)) = (self.traded.get(kind.0), standing.get_mut(kind.0)) else { return };
        let (least, further, more) = demand.bids(kind, traded.base_price);
        for (price, units) in [(least, demand.units.0), (further, more)] {
            // Where bids that are lower begin.
            let at = bids.partition_point(|bid| bid.total_cmp(&price).is_ge());
            if adds {
                bids.splice(at..at, std::iter::repeat_n(price, units as usize));
            } else {
                let from = bids.partition_point(|bid| bid.total_cmp(&price).is_gt());
                bids.drain(from..at.min(from + units as usize));
            }
        }
    }

    /// The kind on which a job's fewest units cost least. Those where it would win come first, then the one for which it has bid.
    fn cheapest(&self, demand: &Demand, before: Option<KindId>, standing: &[Vec<f64>]) -> Option<KindId> {
        let cost = |(kind, traded): (usize, &Traded)| {
            let (id, bids) = (KindId(kind), standing.get(kind)?);
            let (least, ..) = demand.bids(id, traded.base_price);
            let above = bids.partition_point(|bid| bid.total_cmp(&least).is_ge());
            let units = traded.units as usize;
            let loses = least < traded.base_price || above + demand.units.0 as usize > units;
            let kept_out = units.checked_sub(demand.units.0 as usize).and_then(|within| bids.get(within));
            let price = kept_out.copied().unwrap_or(traded.base_price).max(traded.base_price);
            demand.fits(id).then_some((id, loses, price, before != Some(id)))
        };
        let costs = self.traded.iter().enumerate().filter_map(cost);
        let key = |cost: &(KindId, bool, f64, bool)| (cost.1, cost.2, cost.3);
        let better = |best: (KindId, bool, f64, bool), next: (KindId, bool, f64, bool)| {
            let (one, other) = (key(&best), key(&next));
            let order = one.0.cmp(&other.0).then(one.1.total_cmp(&other.1)).then(one.2.cmp(&other.2));
            if order.is_gt() { next } else { best }
        };
        costs.reduce(better).map(|(kind, ..)| kind)
    }

    /// What jobs bid for a kind, in the order in which bids win.
    fn blocks(&self, kind: KindId) -> Vec<Block> {
        let base_price = self.traded.get(kind.0).map_or(0.0, |traded| traded.base_price);
        let mut blocks = Vec::new();
        for (job, (demand, bids_for)) in self.demands.iter().zip(&self.kinds).enumerate() {
            if *bids_for == Some(kind) {
                let (least, further, more) = demand.bids(kind, base_price);
                let has = demand.current == Some(kind);
                blocks.push(Block { price: least, further: false, has, job, units: demand.units.0 });
                blocks.push(Block { price: further, further: true, has, job, units: more });
            }
        }
        blocks.sort_by(|one, other| {
            let equal = (one.further, !one.has, one.job).cmp(&(other.further, !other.has, other.job));
            other.price.total_cmp(&one.price).then(equal)
        });
        blocks
    }

    /// Clears bids of single units, without those of jobs for whose fewest too few are left.
    fn clear(&self) -> Result<ClearedJobs, MarketError> {
        let mut market = Market::new(self.traded.to_vec(), 0.0)?;
        let (mut number, mut job_of) = (0, BTreeMap::new());
        for (kind, traded) in self.traded.iter().enumerate() {
            let kind = KindId(kind);
            let mut left = traded.units;
            let mut has_fewest = vec![false; self.demands.len()];
            for Block { price, further, job, units, .. } in self.blocks(kind) {
                let Some(has_fewest) = has_fewest.get_mut(job) else { continue };
                let sells = price >= traded.base_price && left > 0;
                if (further && !*has_fewest) || (!further && sells && left < units) {
                    continue;
                }
                *has_fewest |= !further && sells;
                let wins = if sells { units.min(left) } else { 0 };
                left -= wins;
                // The first that gets nothing sets the price: others say no more.
                let bids = if wins < units { wins + 1 } else { wins };
                for _ in 0..bids {
                    let highest = BTreeMap::from([(kind, price)]);
                    market.bid(BidId(number), Bid { highest, checkpoint: 0.0 })?;
                    job_of.insert(BidId(number), job);
                    number += 1;
                }
            }
        }
        let cleared = market.clear();
        let mut won: Vec<Option<Won>> = vec![None; self.demands.len()];
        for (bid, kind) in &cleared.winners {
            if let Some(won) = job_of.get(bid).and_then(|job| won.get_mut(*job)) {
                won.get_or_insert(Won { kind: *kind, units: 0 }).units += 1;
            }
        }
        Ok(ClearedJobs { won, bid_for: self.kinds.clone(), prices: cleared.prices })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    fn traded(units: &[u32]) -> Vec<Traded> {
        let one = |units: &u32| Traded { name: String::new(), units: *units, base_price: 0.5 };
        units.iter().map(one).collect()
    }

    fn demand(units: (u32, u32), usable: &[u32], price: f64) -> Demand {
        Demand { units, usable: usable.to_vec(), highest: Some((price, price)), current: None }
    }

    fn units(cleared: &ClearedJobs) -> Vec<(usize, u32)> {
        cleared.won.iter().map(|won| won.map_or((usize::MAX, 0), |won| (won.kind.0, won.units))).collect()
    }

    #[test]
    fn the_highest_bid_without_units_is_the_price() {
        let demands = [0.60, 0.65, 0.70].map(|price| demand((1, 1), &[2], price));
        let cleared = clear_jobs(&traded(&[2]), &demands).unwrap();
        assert_eq!(cleared.prices, [0.60]);
        assert_eq!(units(&cleared), [(usize::MAX, 0), (0, 1), (0, 1)]);
        // With a unit for each it is the base price, and below that nobody gets any.
        assert_eq!(clear_jobs(&traded(&[3]), &demands).unwrap().prices, [0.5]);
        let low = clear_jobs(&traded(&[3]), &[demand((1, 1), &[3], 0.4)]).unwrap();
        assert_eq!((low.won, low.prices), (vec![None], vec![0.5]));
    }

    #[test]
    fn a_job_gets_its_fewest_or_nothing() {
        let demands = [demand((3, 3), &[4], 0.9), demand((2, 2), &[4], 0.8), demand((1, 1), &[4], 0.6)];
        let cleared = clear_jobs(&traded(&[4]), &demands).unwrap();
        // The second lacks one, so the third has it; a bid that does not fit sets no price.
        assert_eq!(units(&cleared), [(0, 3), (usize::MAX, 0), (0, 1)]);
        assert_eq!(cleared.prices, [0.5]);
    }

    #[test]
    fn further_units_go_to_who_bids_more_for_them() {
        let highest = Some((0.9, 0.6));
        let elastic = Demand { highest, ..demand((1, 4), &[4], 0.0) };
        let cleared = clear_jobs(&traded(&[4]), &[elastic.clone(), demand((2, 2), &[4], 0.7)]).unwrap();
        assert_eq!((units(&cleared), cleared.prices), (vec![(0, 2), (0, 2)], vec![0.6]));
        let alone = clear_jobs(&traded(&[4]), &[elastic]).unwrap();
        assert_eq!((units(&alone), alone.prices), (vec![(0, 4)], vec![0.5]));
    }

    #[test]
    fn who_has_units_keeps_them_against_an_equal_bid() {
        let mut demands = [demand((2, 2), &[2], 0.7), demand((2, 2), &[2], 0.7)];
        demands[1].current = Some(KindId(0));
        let cleared = clear_jobs(&traded(&[2]), &demands).unwrap();
        assert_eq!(units(&cleared), [(usize::MAX, 0), (0, 2)]);
    }

    #[test]
    fn who_is_outbid_goes_to_another_kind() {
        let mut demands = [demand((1, 1), &[1, 1], 0.6), demand((1, 1), &[1, 0], 0.7)];
        demands[0].current = Some(KindId(0));
        let cleared = clear_jobs(&traded(&[1, 1]), &demands).unwrap();
        assert_eq!(units(&cleared), [(1, 1), (0, 1)]);
    }

    #[test]
    fn no_bid_is_the_base_price_of_its_kind() {
        let none = Demand { highest: None, ..demand((1, 2), &[2], 0.0) };
        let cleared = clear_jobs(&traded(&[2]), &[none.clone(), none.clone()]).unwrap();
        assert_eq!((units(&cleared), cleared.prices), (vec![(0, 1), (0, 1)], vec![0.5]));
        let wrong = Demand { highest: Some((f64::NAN, 0.0)), ..none };
        assert!(clear_jobs(&traded(&[2]), &[wrong]).is_err());
    }

    #[test]
    fn who_bids_nothing_chooses_its_kind_as_one_who_bids_the_base_price() {
        let none = Demand { highest: None, ..demand((1, 1), &[1, 1], 0.0) };
        let cleared = clear_jobs(&traded(&[1, 1]), &[none, demand((1, 1), &[1, 1], 0.5)]).unwrap();
        assert_eq!((units(&cleared), cleared.prices), (vec![(0, 1), (1, 1)], vec![0.5, 0.5]));
    }

    #[test]
    fn random_markets_are_fair() {
        for seed in 0..500 {
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            let kinds = random.random_range(1..=3_usize);
            let counts: Vec<u32> = (0..kinds).map(|_| random.random_range(0..=6)).collect();
            let traded = traded(&counts);
            let demands: Vec<Demand> = (0..random.random_range(0..=8))
                .map(|_| {
                    let least = random.random_range(1..=3);
                    let price = f64::from(random.random_range(3..=12_u32)) / 10.0;
                    let usable = counts.iter().map(|count| random.random_range(0..=*count)).collect();
                    let highest = random.random_bool(0.8).then_some((price, price * 0.75));
                    let current = random.random_bool(0.3).then(|| KindId(random.random_range(0..kinds)));
                    Demand { units: (least, least + random.random_range(0..=3)), usable, highest, current }
                })
                .collect();
            let cleared = clear_jobs(&traded, &demands).unwrap();
            let mut used = vec![0; kinds];
            for (demand, won) in demands.iter().zip(&cleared.won) {
                let Some(Won { kind, units }) = *won else { continue };
                used[kind.0] += units;
                let (least, most) = demand.units;
                assert!((least..=most.min(demand.usable[kind.0])).contains(&units), "seed {seed}");
                let (highest, _) = demand.highest.unwrap_or((0.5, 0.5));
                assert!(cleared.prices[kind.0] <= highest + 1e-9, "seed {seed}: {cleared:?} {demands:?}");
            }
            for (kind, used) in used.iter().enumerate() {
                assert!(*used <= counts[kind], "seed {seed}: {used} of {}", counts[kind]);
                assert!(cleared.prices[kind] >= 0.5, "seed {seed}: {:?}", cleared.prices);
            }
        }
    }
}
