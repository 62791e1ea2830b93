//! Times rounds of the market, and measures what misreports gain. Prints lines of JSON.
#![allow(clippy::print_stdout)] // what it is for

use harmonaize_allocator::{Bid, BidId, KindId, Market, MarketError, Traded};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;
use std::error::Error;
use std::time::Instant;

const USAGE: &str = "market rounds NODES SEED | market gains SEED
  rounds   how long a round takes with three bids for two nodes, of which each hundredth changes from one round to the next
  gains    what a tenant gains at most by withholding, with one bid and with several";

/// Kinds of nodes that are traded.
const KINDS: u32 = 12;

/// Rounds that are timed.
const ROUNDS: u32 = 50;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["rounds", nodes, seed] => rounds(nodes.parse()?, seed.parse()?)?,
        ["gains", seed] => gains(seed.parse()?)?,
        _ => return Err(USAGE.into()),
    }
    Ok(())
}

/// A node's worth on one to four kinds, of which some are faster than others.
fn values(random: &mut ChaCha8Rng) -> BTreeMap<KindId, f64> {
    let worth = 0.2 + 2.0 * random.random::<f64>();
    let kinds = random.random_range(1..=4);
    let kind = |random: &mut ChaCha8Rng| {
        let kind = random.random_range(0..KINDS);
        (KindId(kind as usize), worth * (0.5 + f64::from(kind) / f64::from(KINDS)))
    };
    (0..kinds).map(|_| kind(random)).collect()
}

fn rounds(nodes: u32, seed: u64) -> Result<(), Box<dyn Error>> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let traded = (0..KINDS).map(|kind| Traded {
        name: format!("kind {kind}"),
        units: nodes / KINDS + u32::from(kind < nodes % KINDS),
        base_price: 0.2 + f64::from(kind) / f64::from(KINDS),
    });
    let mut market = Market::new(traded.collect(), 300.0)?;
    let bids = u64::from(nodes) * 3 / 2;
    let mut place = |market: &mut Market, id: u64| {
        let checkpoint = 600.0 * random.random::<f64>();
        market.bid(BidId(id), Bid { highest: values(&mut random), checkpoint })
    };
    for id in 0..bids {
        place(&mut market, id)?;
    }
    let mut times = Vec::new();
    let mut events = 0;
    for round in 0..ROUNDS {
        let began = Instant::now();
        events += market.round(60.0 * f64::from(round))?.len();
        times.push(began.elapsed().as_secs_f64() * 1e3);
        for id in (0..bids).filter(|id| id % 100 == u64::from(round)) {
            place(&mut market, id)?;
        }
    }
    times.sort_by(f64::total_cmp);
    let at = |part: f64| times.get(((times.len() - 1) as f64 * part) as usize).copied().unwrap_or(0.0);
    let table = market.exchange_table();
    let used: u32 = table.iter().map(|line| line.used).sum();
    let revenue: f64 = table.iter().map(|line| f64::from(line.used) * line.price).sum();
    println!(
        "{{\"nodes\":{nodes},\"bids\":{bids},\"kinds\":{KINDS},\"rounds\":{ROUNDS},\"events\":{events},\"used\":{used},\
         \"revenue_an_hour\":{revenue:.2},\"round_p50_ms\":{:.1},\"round_p95_ms\":{:.1},\"round_max_ms\":{:.1}}}",
        at(0.5),
        at(0.95),
        at(1.0)
    );
    Ok(())
}

/// Random markets of one kind: 20 units, and about 30 bids. The first tenant has several, and lowers all but the first of them by a factor.
fn gains(seed: u64) -> Result<(), MarketError> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    for bids in [1_u64, 2, 4, 8] {
        let (mut sum, mut most, markets) = (0.0, 0.0_f64, 300);
        for _ in 0..markets {
            let values: Vec<f64> = (0..30).map(|_| 0.2 + 2.0 * random.random::<f64>()).collect();
            let honest = gain(&values, bids, 1.0)?;
            let factors = [0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.2, 2.0];
            let mut best = honest;
            for factor in factors {
                best = gain(&values, bids, factor)?.max(best);
            }
            let part = if honest > 0.0 { 100.0 * (best / honest - 1.0) } else { 0.0 };
            (sum, most) = (sum + part, most.max(part));
        }
        let mean = sum / f64::from(markets);
        println!(
            "{{\"seed\":{seed},\"bids\":{bids},\"gain_mean_percent\":{mean:.3},\"gain_max_percent\":{most:.3}}}"
        );
    }
    Ok(())
}

/// What the first tenant gains, which multiplies all but one of its bids by a factor. It has the first bids; if it has but one, it
/// multiplies that one.
fn gain(values: &[f64], bids: u64, factor: f64) -> Result<f64, MarketError> {
    let mut market = Market::new(vec![Traded { name: "gpu".to_owned(), units: 20, base_price: 0.1 }], 0.0)?;
    for (id, value) in (0_u64..).zip(values) {
        let is_changed = id < bids && (bids == 1 || id > 0);
        let price = if is_changed { value * factor } else { *value };
        market.bid(BidId(id), Bid { highest: BTreeMap::from([(KindId(0), price)]), checkpoint: 0.0 })?;
    }
    let cleared = market.clear();
    let price = cleared.prices.first().copied().unwrap_or(0.0);
    let own = (0_u64..bids).zip(values).filter(|(id, _)| cleared.winners.contains_key(&BidId(*id)));
    Ok(own.map(|(_, value)| value - price).sum())
}
