//! What jobs bid: how often a bid may change, when a job that is outbid leaves, and what its tenant is told of the price.

use super::job::{GATHER, Job};
use super::round::Quote;
use crate::state::refusal::RequestRefusal;
use crate::state::settings::Settings;
use harmonaize_abi::session::{HostPrice, JobBid, Price};
use harmonaize_allocator::last_moment;
use harmonaize_disclose::coarse_price;
use harmonaize_units::{Gcra, Quota};
use std::time::Duration;

/// How often a job's bid may be changed: each change is stored, and brings a round about those that wait.
const CHANGES: Quota = Quota { interval: Duration::from_millis(7_500), burst: 8 };

/// Takes note that a job's bid is changed.
///
/// # Errors
/// If this is one too many.
pub(super) fn take_change(now: Duration, changes: &mut Gcra) -> Result<(), RequestRefusal> {
    let too_often = |next: Duration| {
        let seconds = next.saturating_sub(now).as_secs() + 1;
        RequestRefusal::BidChangedTooOften { most: CHANGES.burst, seconds }
    };
    changes.take(now, CHANGES).map_err(too_often)
}

/// What a job bids for each of its fewest workers. Without a bid it is the base price of the kind that it has, or else bids for.
pub(super) fn first_bid(settings: &Settings, job: &Job) -> Price {
    let kind = || match (&job.quote, job.runners.keys().next()) {
        (Some(quote), _) => quote.kind.as_str(),
        (None, Some((host, _))) => settings.topology.kind(*host),
        (None, None) => "",
    };
    let base_price = || settings.market.base_prices.get(kind()).copied().unwrap_or_default();
    job.bid.map_or_else(base_price, |bid| bid.least)
}

/// When a job that is outbid leaves: at the next moment that is cheap for it since it `began`, after the longest wait at most.
pub(super) fn leaves_at(
    now: Duration,
    began: Duration,
    bid: Option<JobBid>,
    longest_wait: Duration,
) -> Duration {
    let checkpoint = Duration::from_nanos(bid.map_or(0, |bid| bid.checkpoint_ns));
    let at = last_moment(now.as_secs_f64(), began.as_secs_f64(), checkpoint.as_secs_f64());
    Duration::try_from_secs_f64(at).unwrap_or(now).clamp(now, now.saturating_add(longest_wait))
}

/// When the next round about all jobs is: once the first of them leaves, or else after a `round`. What tenants say of their checkpoints
/// brings no more than one a second.
pub(super) fn next_round(now: Duration, round: Duration, leaves: impl Iterator<Item = Duration>) -> Duration {
    let (soon, next) = (now.saturating_add(GATHER), now.saturating_add(round));
    leaves.filter(|at| *at > now).min().map_or(next, |at| at.max(soon).min(next))
}

/// What a tenant is told of a job's price: of the kind that its workers have, and of no other. The bid is that of the round which quoted
/// the price. By one that it changes meanwhile a tenant would find out the price itself.
pub(super) fn disclosed(quote: Option<&Quote>, kind: &str, bid: Option<JobBid>) -> Option<HostPrice> {
    let Quote { price, .. } = quote.filter(|quote| quote.kind == kind)?;
    Some(HostPrice { kind: kind.to_owned(), price: coarse_price(*price, bid.map(|bid| bid.least)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_leaves_at_its_next_checkpoint_or_after_the_longest_wait() {
        let seconds = Duration::from_secs;
        let every = |checkpoint_ns| Some(JobBid { checkpoint_ns, ..JobBid::of(Price(1)) });
        let at = |bid, longest| leaves_at(seconds(100), seconds(30), bid, seconds(longest));
        assert_eq!(at(None, 600), seconds(100));
        assert_eq!(at(every(0), 600), seconds(100));
        assert_eq!(at(every(40_000_000_000), 600), seconds(110));
        assert_eq!(at(every(40_000_000_000), 5), seconds(105));
        assert_eq!(at(every(u64::MAX), 600), seconds(700));
    }

    #[test]
    fn checkpoints_bring_no_round_sooner_than_a_second_after_another() {
        let at = |milliseconds: &[u64]| {
            let leaves = milliseconds.iter().copied().map(Duration::from_millis);
            next_round(Duration::from_secs(100), Duration::from_secs(30), leaves).as_millis()
        };
        assert_eq!([at(&[]), at(&[90_000, 100_000]), at(&[200_000])], [130_000; 3]);
        assert_eq!(
            [at(&[100_001]), at(&[120_000, 100_999]), at(&[120_000, 105_000])],
            [101_000, 101_000, 105_000]
        );
    }

    #[test]
    fn tenants_hear_the_price_of_their_own_kind_alone() {
        let quote = Quote { kind: "a100".to_owned(), price: Price(606_000) };
        let price_of = |kind| disclosed(Some(&quote), kind, None).map(|price| (price.kind, price.price));
        assert_eq!(price_of("a100"), Some(("a100".to_owned(), Price(650_000))));
        assert_eq!((price_of("h100"), disclosed(None, "a100", None)), (None, None));
    }
}
