//! The market: the story of its paper, misreports, and bad input.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_allocator::{
    Bid, BidId, KindId, Market, MarketError, MarketEvent, OperatorCost, Traded, highest_price,
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;

const ONLY: KindId = KindId(0);

fn traded(units: u32, base_price: f64) -> Traded {
    Traded { name: "gpu".to_owned(), units, base_price }
}

/// Seconds of a day.
const DAY: f64 = 86_400.0;

/// A market of one kind with so many units.
fn market(units: u32, base_price: f64) -> Market {
    Market::new(vec![traded(units, base_price)], DAY).unwrap()
}

fn bid(price: f64, checkpoint: f64) -> Bid {
    Bid { highest: BTreeMap::from([(ONLY, price)]), checkpoint }
}

fn offer(bid: BidId, price: f64) -> MarketEvent {
    MarketEvent::Offer { bid, kind: ONLY, price }
}

fn recall(bid: BidId, by: f64) -> MarketEvent {
    MarketEvent::Recall { bid, kind: ONLY, by }
}

fn ended(bid: BidId) -> MarketEvent {
    MarketEvent::Ended { bid, kind: ONLY }
}

fn rounded(price: f64) -> f64 {
    (price * 1e3).round() / 1e3
}

/// The price to a tenth of a cent.
fn price(market: &Market) -> f64 {
    rounded(market.exchange_table()[0].price)
}

/// What a round changes, with prices to a tenth of a cent.
fn round(market: &mut Market, now: f64) -> Vec<MarketEvent> {
    let event = |event| match event {
        MarketEvent::Offer { bid, kind, price } => MarketEvent::Offer { bid, kind, price: rounded(price) },
        other => other,
    };
    market.round(now).unwrap().into_iter().map(event).collect()
}

#[test]
fn the_papers_story_has_its_prices_and_migrations() {
    let (a, b) = (BidId(1), BidId(2));
    let mut market = market(1, 0.606);
    market.bid(a, bid(0.687, 300.0)).unwrap();
    assert_eq!(round(&mut market, 0.0), [offer(a, 0.606)]);
    assert_eq!(price(&market), 0.606);
    // B outbids A, which goes at its checkpoint.
    market.bid(b, bid(0.762, 200.0)).unwrap();
    assert_eq!(round(&mut market, 100.0), [recall(a, 300.0)]);
    assert_eq!(price(&market), 0.687);
    assert_eq!(round(&mut market, 299.0), []);
    assert_eq!(round(&mut market, 300.0), [ended(a), offer(b, 0.687)]);
    // B's work is worth less now, and it goes at its own.
    market.bid(b, bid(0.652, 200.0)).unwrap();
    assert_eq!(round(&mut market, 410.0), [recall(b, 500.0)]);
    assert_eq!(price(&market), 0.652);
    assert_eq!(round(&mut market, 500.0), [ended(b), offer(a, 0.652)]);
    market.withdraw(b);
    assert_eq!(round(&mut market, 600.0), []);
    assert_eq!((price(&market), market.unit(a)), (0.606, Some(ONLY)));
}

#[test]
fn the_agents_bids_are_those_of_the_paper() {
    let bid = |cost, hours| rounded(highest_price(cost, hours).unwrap());
    // The paper prints 0.687, of figures that it did not round.
    assert_eq!((bid(0.24, 0.35), bid(0.15, 0.23)), (0.686, 0.652));
    for (cost, hours) in
        [(f64::NAN, 1.0), (-1.0, 1.0), (1.0, 0.0), (1.0, f64::NAN), (1.0, -1.0), (1.0, 1e-320)]
    {
        assert!(matches!(highest_price(cost, hours), Err(MarketError::Value { .. })), "{cost} {hours}");
    }
}

#[test]
fn all_units_of_a_kind_have_one_price() {
    let mut market = market(3, 0.1);
    for (id, price) in [0.9, 0.5, 0.7, 0.4, 0.3].into_iter().enumerate() {
        market.bid(BidId(id as u64), bid(price, 0.0)).unwrap();
    }
    let offers: Vec<MarketEvent> = [0, 1, 2].map(|id| offer(BidId(id), 0.4)).to_vec();
    assert_eq!(round(&mut market, 0.0), offers);
    let table = &market.exchange_table()[0];
    assert_eq!((table.units, table.used, table.bids), (3, 3, 5));
}

#[test]
fn a_recall_is_cancelled_when_its_bid_wins_again() {
    let (a, b) = (BidId(1), BidId(2));
    let mut market = market(1, 0.0);
    market.bid(a, bid(1.0, 100.0)).unwrap();
    market.round(0.0).unwrap();
    market.bid(b, bid(2.0, 0.0)).unwrap();
    assert_eq!(market.round(10.0).unwrap(), [recall(a, 100.0)]);
    market.bid(a, bid(3.0, 100.0)).unwrap();
    assert_eq!(market.round(20.0).unwrap(), [MarketEvent::Cancelled { bid: a, kind: ONLY }]);
    assert_eq!(market.round(200.0).unwrap(), []);
}

#[test]
fn no_notice_is_longer_than_the_operators() {
    let mut market = Market::new(vec![traded(1, 0.0)], 60.0).unwrap();
    market.bid(BidId(1), bid(1.0, 1e300)).unwrap();
    market.round(0.0).unwrap();
    market.bid(BidId(2), bid(2.0, 0.0)).unwrap();
    assert_eq!(market.round(10.0).unwrap(), [recall(BidId(1), 70.0)]);
    assert_eq!(market.round(70.0).unwrap()[0], ended(BidId(1)));
}

#[test]
fn equal_bids_move_nobody() {
    let mut market = Market::new(vec![traded(1, 0.0), traded(1, 0.0)], DAY).unwrap();
    let both =
        |price| Bid { highest: BTreeMap::from([(KindId(0), price), (KindId(1), price)]), checkpoint: 0.0 };
    for id in 0..4 {
        market.bid(BidId(id), both(1.0)).unwrap();
        market.round(id as f64).unwrap();
    }
    assert_eq!([0, 1, 2].map(|id| market.unit(BidId(id)).is_some()), [true, true, false]);
    assert_eq!(market.round(9.0).unwrap(), []);
}

#[test]
fn what_is_no_bid_is_refused_and_nothing_changes() {
    let mut market = market(1, 0.5);
    market.bid(BidId(1), bid(1.0, 0.0)).unwrap();
    market.round(5.0).unwrap();
    for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.1] {
        let text = market.bid(BidId(1), bid(value, 0.0)).unwrap_err().to_string();
        assert!(text.ends_with("it must be a finite number, 0 or more"), "{text}");
        assert!(matches!(market.bid(BidId(1), bid(1.0, value)), Err(MarketError::Value { .. })));
        assert!(matches!(Market::new(vec![traded(1, value)], DAY), Err(MarketError::Value { .. })));
        assert!(matches!(Market::new(vec![traded(1, 1.0)], value), Err(MarketError::Value { .. })));
    }
    let nothing = Bid { highest: BTreeMap::new(), checkpoint: 0.0 };
    assert_eq!(market.bid(BidId(1), nothing), Err(MarketError::Empty));
    let other = Bid { highest: BTreeMap::from([(KindId(3), 1.0)]), checkpoint: 0.0 };
    assert_eq!(market.bid(BidId(1), other), Err(MarketError::Kind { kind: 3, kinds: 1 }));
    // A clock that jumps back, and one that stands still.
    for now in [4.0, f64::NAN, f64::INFINITY] {
        assert!(matches!(market.round(now), Err(MarketError::Time { .. })));
    }
    assert_eq!((market.round(5.0).unwrap(), market.unit(BidId(1))), (Vec::new(), Some(ONLY)));
}

#[test]
fn power_and_carbon_count_in_the_base_price() {
    let cost = OperatorCost { hire: 0.5, kilowatts: 0.7, energy: 0.1, carbon: 0.4, carbon_price: 0.05 };
    assert!((cost.base_price() - 0.584).abs() < 1e-12);
}

/// What a tenant gains that has one bid and counts its unit as worth such values.
fn gain(market: &Market, id: BidId, values: &BTreeMap<KindId, f64>) -> f64 {
    let cleared = market.clear();
    cleared
        .winners
        .get(&id)
        .map_or(0.0, |kind| values.get(kind).copied().unwrap_or(0.0) - cleared.prices[kind.0])
}

#[test]
fn no_misreport_gains_more_than_one_percent() {
    let (mut tried, mut lost) = (0, 0);
    for seed in 0..200 {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let kinds = random.random_range(1..=4);
        let traded = (0..kinds).map(|_| traded(random.random_range(0..=3), random.random::<f64>() / 2.0));
        let mut market = Market::new(traded.collect(), DAY).unwrap();
        let tenants: u64 = random.random_range(1..=10);
        let mut values = Vec::new();
        for id in 0..tenants {
            let mut own = BTreeMap::new();
            for kind in 0..kinds {
                if random.random_bool(0.7) {
                    own.insert(KindId(kind), 2.0 * random.random::<f64>());
                }
            }
            if !own.is_empty() {
                market.bid(BidId(id), Bid { highest: own.clone(), checkpoint: 0.0 }).unwrap();
                values.push((BidId(id), own));
            }
        }
        for (id, own) in &values {
            let honest = gain(&market, *id, own);
            assert!(honest > -1e-9, "seed {seed}: {id:?} pays more than it bid");
            for number in 0..30 {
                // All its prices alike, or each by a factor of its own; some kinds may be left out.
                let factor = [0.0, 0.5, 0.8, 0.95, 1.05, 1.3, 3.0][number % 7];
                let mut misreport = own.clone();
                for price in misreport.values_mut() {
                    *price *= if number < 7 { factor } else { 2.5 * random.random::<f64>() };
                }
                let mut other = market.clone();
                other.bid(*id, Bid { highest: misreport.clone(), checkpoint: 0.0 }).unwrap();
                let misreported = gain(&other, *id, own);
                let most = honest + 0.01 * honest.max(1e-6);
                assert!(
                    misreported <= most,
                    "seed {seed}: {id:?} of {own:?} gains {misreported}, not {honest}, by {misreport:?}"
                );
                tried += 1;
                lost += u32::from(misreported < honest - 1e-6);
            }
        }
    }
    assert!(tried > 10_000 && lost > 1_000, "{tried} misreports, {lost} of which cost something");
}
