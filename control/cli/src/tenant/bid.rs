//! What a tenant bids for a job, and `harmonaize tenant bid`, which changes it.

use crate::Failure;
use harmonaize_client::{Client, JobBid, Price};
use harmonaize_planner::Nanos;

/// Examples of `tenant bid`.
pub(super) const HELP: &str = "\
Examples:
  harmonaize tenant bid bert 0.65                          0.65 an hour for each worker
  harmonaize tenant bid bert 0.65 --further 0.30           and less for workers beyond its fewest
  harmonaize tenant bid bert 0.65 --checkpoint 10min       where it is outbid it leaves at its next checkpoint

The bid stands until it is changed, or the job is gone. It counts from the provider's next round on. It replaces all of the one
before: repeat --further and --checkpoint where they are to stay.";

/// What a bid says beside its price.
#[derive(clap::Args, Clone, Copy)]
pub(super) struct BidTerms {
    /// The highest price of each worker beyond the fewest; the same where nothing is said.
    #[arg(long, value_name = "PRICE")]
    further: Option<Price>,
    /// The time between checkpoints, from when workers start: a job that is outbid leaves at one.
    #[arg(long, value_name = "DURATION")]
    checkpoint: Option<Nanos>,
}

impl BidTerms {
    /// The bid of a price; none without one.
    ///
    /// # Errors
    /// Terms of no price, or what makes no sense.
    pub(super) fn bid(self, price: Option<Price>) -> Result<Option<JobBid>, Failure> {
        let Some(least) = price else {
            let terms = self.further.is_some() || self.checkpoint.is_some();
            let text = "--further and --checkpoint are terms of a bid; say --bid PRICE, too";
            return if terms { Err(Failure::Usage(text.to_owned())) } else { Ok(None) };
        };
        let (further, checkpoint_ns) =
            (self.further.unwrap_or(least), self.checkpoint.map_or(0, |checkpoint| checkpoint.0));
        let bid = JobBid { least, further, checkpoint_ns };
        bid.check().map_err(|error| Failure::Usage(error.to_string()))?;
        Ok(Some(bid))
    }
}

/// Changes what a job bids.
pub(super) fn set(client: &Client, job: &str, bid: JobBid) -> Result<String, Failure> {
    let refused = |error: harmonaize_client::Error| Failure::Refused(error.to_string());
    let runner = client.runner().map_err(refused)?;
    runner.check_bids().map_err(refused)?;
    runner.bid(job, bid).map_err(refused)?;
    let JobBid { least, further, .. } = bid;
    let beyond = if further < least { format!(", {further} beyond its fewest") } else { String::new() };
    Ok(format!("{job}: bids {least} an hour of a worker{beyond}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terms_are_of_a_bid_that_makes_sense() {
        let price = |text: &str| text.parse::<Price>().unwrap();
        let none = BidTerms { further: None, checkpoint: None };
        assert!(matches!(none.bid(None), Ok(None)));
        assert_eq!(none.bid(Some(price("0.65"))).ok().flatten(), Some(JobBid::of(price("0.65"))));
        let terms = BidTerms { further: Some(price("0.7")), checkpoint: Some(Nanos(5)) };
        assert!(matches!(terms.bid(None), Err(Failure::Usage(text)) if text.contains("--bid")));
        let refused = terms.bid(Some(price("0.65")));
        assert!(matches!(refused, Err(Failure::Usage(text)) if text.contains("bid 0.65 at most")));
        let bid = terms.bid(Some(price("0.7"))).ok().flatten().unwrap();
        assert_eq!((bid.further, bid.checkpoint_ns), (price("0.7"), 5));
    }
}
