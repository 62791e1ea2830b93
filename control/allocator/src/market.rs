//! A market of units that stand until they are outbid (LaissezCloud). It has bids with a highest price by kind, one price for all
//! units of a kind, and recalls that wait for the moment that the tenant named as cheap.
//!
//! The price of a kind is the least at which nobody prefers another kind or none. With one kind it is the highest bid that gets nothing,
//! or the base price. No tenant with one bid can gain by another price than its own. Who has several bids can, by withholding some.

mod clearing;
pub(crate) mod jobs;

use crate::inventory::KindId;
use clearing::{Buyer, Clearing};
use std::collections::BTreeMap;
use thiserror::Error;

/// A bid's number, which the caller gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BidId(pub u64);

/// Units that are alike: hosts of a kind, parts of a link, or slots of aggregators.
#[derive(Debug, Clone, PartialEq)]
pub struct Traded {
    /// The kind's name.
    pub name: String,
    /// How many units there are.
    pub units: u32,
    /// What an hour of a unit costs at least, in dollars.
    pub base_price: f64,
}

/// What an hour of a unit costs its operator.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OperatorCost {
    /// Dollars for all but its power.
    pub hire: f64,
    /// Its power, in kilowatts.
    pub kilowatts: f64,
    /// Dollars of a kilowatt-hour.
    pub energy: f64,
    /// Kilograms of carbon dioxide of a kilowatt-hour.
    pub carbon: f64,
    /// Dollars that the operator counts for each of those kilograms.
    pub carbon_price: f64,
}

impl OperatorCost {
    /// The base price, in dollars an hour.
    pub fn base_price(&self) -> f64 {
        self.hire + self.kilowatts * (self.energy + self.carbon * self.carbon_price)
    }
}

/// A bid for one unit of any of its kinds. It stands until it is changed or withdrawn.
#[derive(Debug, Clone, PartialEq)]
pub struct Bid {
    /// The highest price by kind, in dollars an hour: the tenant's launch table.
    pub highest: BTreeMap<KindId, f64>,
    /// Seconds between the moments at which the tenant can leave cheaply. They count from when it got its unit; 0 if it can
    /// always leave.
    pub checkpoint: f64,
}

/// What is wrong with a market, a bid, or a time.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum MarketError {
    /// A price or a cost that is no number, infinite or negative.
    #[error("{what} of {value}: it must be a finite number, 0 or more")]
    Value {
        /// Which one.
        what: &'static str,
        /// What was given.
        value: f64,
    },
    /// No such kind.
    #[error("the bid is for kind number {kind}, and there are {kinds}")]
    Kind {
        /// What was given.
        kind: usize,
        /// How many kinds there are.
        kinds: usize,
    },
    /// A bid for nothing.
    #[error("the bid names no kind: give the highest price of at least one")]
    Empty,
    /// Time that goes back, or is none.
    #[error("the round is at {now} s, and the one before was at {before} s")]
    Time {
        /// What was given.
        now: f64,
        /// The round before.
        before: f64,
    },
}

/// What a round changes for a bid.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MarketEvent {
    /// It gets a unit, at that price in dollars an hour.
    Offer {
        /// Whose.
        bid: BidId,
        /// The unit's kind.
        kind: KindId,
        /// The kind's price.
        price: f64,
    },
    /// It loses its unit at a time in seconds: the next moment that is cheap for it.
    Recall {
        /// Whose.
        bid: BidId,
        /// The unit's kind.
        kind: KindId,
        /// The last moment.
        by: f64,
    },
    /// A recall is cancelled: it won again before its last moment.
    Cancelled {
        /// Whose.
        bid: BidId,
        /// The unit's kind.
        kind: KindId,
    },
    /// Its last moment has come.
    Ended {
        /// Whose.
        bid: BidId,
        /// The unit's kind.
        kind: KindId,
    },
}

/// Who wins, and at which prices.
#[derive(Debug, Clone, PartialEq)]
pub struct Cleared {
    /// The kind that each winning bid gets a unit of.
    pub winners: BTreeMap<BidId, KindId>,
    /// The price of each kind, in dollars an hour.
    pub prices: Vec<f64>,
}

/// A kind's line of the exchange table.
#[derive(Debug, Clone, PartialEq)]
pub struct Exchange {
    /// The kind's name.
    pub name: String,
    /// How many units there are.
    pub units: u32,
    /// How many of them tenants have.
    pub used: u32,
    /// How many bids accept the kind.
    pub bids: usize,
    /// The base price, in dollars an hour.
    pub base_price: f64,
    /// The price, in dollars an hour.
    pub price: f64,
}

/// A unit that a bid has.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Unit {
    kind: KindId,
    /// When it was given, in seconds.
    since: f64,
    /// Its last moment, where it is recalled.
    recall: Option<f64>,
}

/// Standing bids, and the units that they have.
#[derive(Debug, Clone)]
pub struct Market {
    traded: Vec<Traded>,
    bids: BTreeMap<BidId, Bid>,
    units: BTreeMap<BidId, Unit>,
    longest_notice: f64,
    now: f64,
}

impl Market {
    /// A market without bids. No recall waits for longer than a notice in seconds, whatever a bid says.
    ///
    /// # Errors
    ///
    /// A base price or a notice that is no number.
    pub fn new(traded: Vec<Traded>, longest_notice: f64) -> Result<Self, MarketError> {
        checked("a longest notice", longest_notice)?;
        for each in &traded {
            checked("a base price", each.base_price)?;
        }
        let (bids, units) = (BTreeMap::new(), BTreeMap::new());
        Ok(Self { traded, bids, units, longest_notice, now: f64::NEG_INFINITY })
    }

    /// Makes a bid, or changes one that stands.
    ///
    /// # Errors
    ///
    /// A price or time that is no number, a kind that is not traded, or no kind. What stood before still stands.
    pub fn bid(&mut self, id: BidId, bid: Bid) -> Result<(), MarketError> {
        checked("a time between checkpoints", bid.checkpoint)?;
        if bid.highest.is_empty() {
            return Err(MarketError::Empty);
        }
        for (kind, price) in &bid.highest {
            checked("a highest price", *price)?;
            if kind.0 >= self.traded.len() {
                return Err(MarketError::Kind { kind: kind.0, kinds: self.traded.len() });
            }
        }
        self.bids.insert(id, bid);
        Ok(())
    }

    /// Withdraws a bid. Its unit is free at once.
    pub fn withdraw(&mut self, id: BidId) {
        self.bids.remove(&id);
        self.units.remove(&id);
    }

    /// Who should have what now, and at which prices. Of equal bids those win that have units.
    pub fn clear(&self) -> Cleared {
        let unit = |id: &BidId| self.units.get(id).map(|unit| unit.kind.0);
        let (having, others): (Vec<_>, Vec<_>) = self.bids.iter().partition(|(id, _)| unit(id).is_some());
        let order: Vec<(&BidId, &Bid)> = having.into_iter().chain(others).collect();
        let gains = |bid: &Bid| {
            let gain = |(kind, traded): (usize, &Traded)| {
                let gain = bid.highest.get(&KindId(kind))? - traded.base_price;
                Some(gain).filter(|gain| *gain >= 0.0)
            };
            self.traded.iter().enumerate().map(gain).collect()
        };
        let buyers: Vec<Buyer> =
            order.iter().map(|(id, bid)| Buyer { gains: gains(bid), current: unit(id) }).collect();
        let units: Vec<u32> = self.traded.iter().map(|traded| traded.units).collect();
        let mut clearing = Clearing::new(&units, &buyers);
        let above = clearing.worth_of_another();
        let prices = self.traded.iter().zip(above).map(|(traded, above)| traded.base_price + above).collect();
        let seats = order.iter().zip(clearing.seats());
        Cleared {
            winners: seats.filter_map(|((id, _), seat)| Some((**id, KindId((*seat)?)))).collect(),
            prices,
        }
    }

    /// A round at a time in seconds. It recalls units of bids that lost, ends those whose last moment has come, and gives free ones to
    /// bids that won.
    ///
    /// # Errors
    ///
    /// Time that went back or is no number. Nothing changes then.
    pub fn round(&mut self, now: f64) -> Result<Vec<MarketEvent>, MarketError> {
        if !(now.is_finite() && now >= self.now) {
            return Err(MarketError::Time { now, before: self.now });
        }
        self.now = now;
        let cleared = self.clear();
        let mut events = Vec::new();
        for (id, unit) in &mut self.units {
            let (bid, kind) = (*id, unit.kind);
            match (cleared.winners.get(id) == Some(&kind), unit.recall) {
                (true, Some(_)) => {
                    unit.recall = None;
                    events.push(MarketEvent::Cancelled { bid, kind });
                }
                (false, None) => {
                    let checkpoint = self.bids.get(id).map_or(0.0, |bid| bid.checkpoint);
                    let by = last_moment(now, unit.since, checkpoint).min(now + self.longest_notice);
                    unit.recall = Some(by);
                    events.push(MarketEvent::Recall { bid, kind, by });
                }
                _ => {}
            }
        }
        self.units.retain(|id, unit| {
            let is_over = unit.recall.is_some_and(|by| by <= now);
            events.extend(is_over.then_some(MarketEvent::Ended { bid: *id, kind: unit.kind }));
            !is_over
        });
        let mut used = self.used();
        for (id, kind) in &cleared.winners {
            let (Some(traded), Some(used)) = (self.traded.get(kind.0), used.get_mut(kind.0)) else {
                continue;
            };
            if *used < traded.units && !self.units.contains_key(id) {
                *used += 1;
                self.units.insert(*id, Unit { kind: *kind, since: now, recall: None });
                let price = cleared.prices.get(kind.0).copied().unwrap_or(traded.base_price);
                events.push(MarketEvent::Offer { bid: *id, kind: *kind, price });
            }
        }
        Ok(events)
    }

    /// The kind of which a bid has a unit.
    pub fn unit(&self, id: BidId) -> Option<KindId> {
        self.units.get(&id).map(|unit| unit.kind)
    }

    /// The exchange table, a line for each kind.
    pub fn exchange_table(&self) -> Vec<Exchange> {
        let prices = self.clear().prices;
        let lines = self.traded.iter().zip(self.used()).zip(prices).enumerate();
        lines
            .map(|(kind, ((traded, used), price))| Exchange {
                name: traded.name.clone(),
                units: traded.units,
                used,
                bids: self.bids.values().filter(|bid| bid.highest.contains_key(&KindId(kind))).count(),
                base_price: traded.base_price,
                price,
            })
            .collect()
    }

    /// Units by kind that bids have.
    fn used(&self) -> Vec<u32> {
        let mut used = vec![0; self.traded.len()];
        for unit in self.units.values() {
            if let Some(used) = used.get_mut(unit.kind.0) {
                *used += 1;
            }
        }
        used
    }
}

/// The highest price that a tenant should bid, in dollars an hour. It is what its work costs on the next best units, in dollars, over the
/// hours that it lasts here.
///
/// # Errors
///
/// A cost that is no number, or hours that are not above 0.
pub fn highest_price(cost_elsewhere: f64, hours_here: f64) -> Result<f64, MarketError> {
    checked("a cost on other units", cost_elsewhere)?;
    let price = cost_elsewhere / hours_here;
    if hours_here > 0.0 && price.is_finite() {
        return Ok(price);
    }
    Err(MarketError::Value { what: "hours", value: hours_here })
}

/// The first moment from now on that is cheap for a tenant that has had its unit since some time, all in seconds. It is now where
/// checkpoints are 0 s apart.
pub fn last_moment(now: f64, since: f64, checkpoint: f64) -> f64 {
    let ahead = since + ((now - since) / checkpoint).ceil() * checkpoint;
    if ahead.is_finite() { ahead.max(now) } else { now }
}

/// A value that is a finite number, 0 or more.
fn checked(what: &'static str, value: f64) -> Result<(), MarketError> {
    if value.is_finite() && value >= 0.0 {
        return Ok(());
    }
    Err(MarketError::Value { what, value })
}
