//! Clears the market of hosts of one kind, by the allocator's rules. Prints a line of JSON.
#![forbid(unsafe_code)]

use anyhow::{Context, Result};
use clap::Parser;
use harmonaize_allocator::{Bid, BidId, KindId, Market, Traded};
use harmonaize_bench::report::print;
use serde::Serialize;
use std::collections::BTreeMap;

/// Bids of a job have numbers of their own.
const BIDS: u64 = 1 << 16;

/// Says which jobs win hosts, and at which price.
#[derive(Parser)]
#[command(after_help = "Example:
  exchange --hosts 4 --base 0.30 --bid a/one=3.00,0.90 --bid b/two=2.50,0.70")]
struct Arguments {
    /// How many hosts there are
    #[arg(long)]
    hosts: u32,
    /// What an hour of a host costs at least, in dollars
    #[arg(long)]
    base: f64,
    /// A job's highest price for each host, in dollars an hour: the first host's first
    #[arg(long = "bid", value_name = "JOB=PRICE,PRICE", value_parser = bids)]
    bids: Vec<(String, Vec<f64>)>,
}

/// What came of it.
#[derive(Serialize)]
struct Cleared<'a> {
    /// Of an hour of a host, in dollars.
    price: f64,
    /// How many hosts each job wins.
    hosts: BTreeMap<&'a str, u32>,
}

fn bids(text: &str) -> Result<(String, Vec<f64>)> {
    let (job, prices) = text.split_once('=').context("no bid, such as a/one=3.00,0.90")?;
    let price = |text: &str| text.parse::<f64>().with_context(|| format!("`{text}` is no price"));
    Ok((job.to_owned(), prices.split(',').map(price).collect::<Result<_>>()?))
}

fn main() -> Result<()> {
    let Arguments { hosts, base, bids } = Arguments::parse();
    let kind = KindId(0);
    let traded = Traded { name: "hosts".to_owned(), units: hosts, base_price: base };
    let mut market = Market::new(vec![traded], 0.0)?;
    let mut won: BTreeMap<&str, u32> = BTreeMap::new();
    for ((job, prices), first) in bids.iter().zip((0..).step_by(BIDS as usize)) {
        won.insert(job, 0);
        for (price, number) in prices.iter().zip(first..first + BIDS) {
            let bid = Bid { highest: BTreeMap::from([(kind, *price)]), checkpoint: 0.0 };
            market.bid(BidId(number), bid).with_context(|| format!("the bid of {job}"))?;
        }
    }
    let cleared = market.clear();
    for bid in cleared.winners.keys() {
        let job = usize::try_from(bid.0 / BIDS).ok().and_then(|place| bids.get(place));
        let (job, _) = job.context("a bid that nobody made has won")?;
        *won.entry(job).or_default() += 1;
    }
    let price = cleared.prices.first().copied().context("the market has no price")?;
    print(&Cleared { price, hosts: won })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bid_has_a_job_and_prices() {
        assert_eq!(bids("a/one=3.00,0.90").unwrap(), ("a/one".to_owned(), vec![3.0, 0.9]));
        for wrong in ["a/one", "a/one=", "a/one=1,x"] {
            assert!(bids(wrong).is_err(), "{wrong}");
        }
    }
}
