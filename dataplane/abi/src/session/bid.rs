//! What a tenant bids for a job's workers where the provider's hosts have prices, and what it is told of them.

use super::runner::ElasticOrder;
use alloc::string::String;
use serde::{Deserialize, Serialize};

/// A bit of the id of [`Request::Detail`](super::Request::Detail), of whichever communicator: the process wants to bid. An agent that
/// reads [`Request::Bid`](super::Request::Bid) and [`Request::Bidding`](super::Request::Bidding) answers
/// [`Answer::TakesBids`](super::Answer::TakesBids), and one of an earlier release as ever.
pub const BIDS: u64 = 1 << 58;

/// The highest price that can be bid: a million.
pub const MAX_PRICE: Price = Price(1_000_000 * UNIT);

/// The longest time between checkpoints that a bid can name: a week, in nanoseconds.
pub const MAX_CHECKPOINT_NS: u64 = 7 * 24 * 3600 * 1_000_000_000;

/// A price of one.
const UNIT: u64 = 1_000_000;

/// What a worker costs an hour, in millionths of the operator's currency.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Price(pub u64);

impl Price {
    /// The price of so much an hour, to the nearest millionth.
    ///
    /// # Errors
    /// A value that is no number, negative, infinite, or above [`MAX_PRICE`].
    pub fn new(an_hour: f64) -> Result<Self, BidError> {
        // What is no number is in no range.
        if !(0.0..=MAX_PRICE.an_hour()).contains(&an_hour) {
            return Err(BidError::Value);
        }
        // The half rounds. A finite value in this range fits.
        Ok(Self((an_hour * UNIT as f64 + 0.5) as u64))
    }

    /// So much an hour.
    pub fn an_hour(self) -> f64 {
        self.0 as f64 / UNIT as f64
    }
}

/// As people write it, such as 0.65: with two decimals at least, and six at most.
impl core::fmt::Display for Price {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let (whole, rest) = (self.0 / UNIT, self.0 % UNIT);
        let (mut digits, mut decimals) = (rest, 6);
        while decimals > 2 && digits % 10 == 0 {
            (digits, decimals) = (digits / 10, decimals - 1);
        }
        write!(f, "{whole}.{digits:0decimals$}")
    }
}

impl core::str::FromStr for Price {
    type Err = BidError;

    fn from_str(text: &str) -> Result<Self, BidError> {
        Self::new(text.trim().parse().map_err(|_| BidError::Value)?)
    }
}

/// What a tenant bids for a job. It stands until it is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobBid {
    /// The highest price of each of its fewest workers.
    pub least: Price,
    /// That of each further one, at most as much.
    pub further: Price,
    /// The time between moments at which its workers can leave cheaply, in nanoseconds from when they started; 0 if they always can.
    pub checkpoint_ns: u64,
}

/// Why a bid makes no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BidError {
    /// No number, a negative one, or one above [`MAX_PRICE`].
    Value,
    /// Further workers are to be worth more than the fewest.
    Further {
        /// The bid for each of the fewest.
        least: Price,
        /// The bid for each further one.
        further: Price,
    },
    /// Checkpoints too far apart: so many nanoseconds.
    Checkpoint(u64),
    /// Hours that are not above 0.
    Hours,
}

impl core::fmt::Display for BidError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Value => write!(f, "a price is a number from 0 to {MAX_PRICE} an hour; bid such a one"),
            Self::Further { least, further } => write!(
                f,
                "{further} for each further worker is more than {least} for each of the fewest; bid {least} at most"
            ),
            Self::Checkpoint(given) => write!(
                f,
                "checkpoints every {given} ns are too far apart; say {MAX_CHECKPOINT_NS} ns, a week, at most"
            ),
            Self::Hours => f.write_str("hours must be a number above 0"),
        }
    }
}

impl core::error::Error for BidError {}

impl JobBid {
    /// A bid of one price for all workers, which can always leave.
    pub const fn of(price: Price) -> Self {
        Self { least: price, further: price, checkpoint_ns: 0 }
    }

    /// What an economic agent bids: what the work costs on the next best hosts, over the hours of workers that it takes here.
    ///
    /// # Errors
    /// A cost that is no price, hours that are not above 0, or a quotient that is no price.
    pub fn of_work(cost_elsewhere: f64, hours_here: f64) -> Result<Self, BidError> {
        if !hours_here.is_finite() || hours_here <= 0.0 {
            return Err(BidError::Hours);
        }
        Price::new(cost_elsewhere)?;
        Price::new(cost_elsewhere / hours_here).map(Self::of)
    }

    /// Whether it makes sense.
    ///
    /// # Errors
    /// What makes none.
    pub fn check(&self) -> Result<(), BidError> {
        let Self { least, further, checkpoint_ns } = *self;
        if least > MAX_PRICE {
            return Err(BidError::Value);
        }
        if further > least {
            return Err(BidError::Further { least, further });
        }
        if checkpoint_ns > MAX_CHECKPOINT_NS {
            return Err(BidError::Checkpoint(checkpoint_ns));
        }
        Ok(())
    }
}

/// What a tenant is told of prices: that of the kind of hosts that its job has, and coarsely.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostPrice {
    /// The kind; empty where it has no name.
    pub kind: String,
    /// The price of a worker, never above the job's own bid while that wins.
    pub price: Price,
}

/// What a runner is to do, and at which price.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PricedOrder {
    /// What it is to do.
    pub order: ElasticOrder,
    /// The price; none where hosts have no price.
    pub price: Option<HostPrice>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn what_is_no_price_is_refused() {
        for wrong in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.01, 1_000_000.1] {
            assert_eq!(Price::new(wrong), Err(BidError::Value), "{wrong}");
        }
        for wrong in ["", "much", "NaN", "inf", "-1", "1e7", "0,65"] {
            assert_eq!(wrong.parse::<Price>(), Err(BidError::Value), "{wrong}");
        }
        assert_eq!((Price::new(0.0), Price::new(1e6)), (Ok(Price(0)), Ok(MAX_PRICE)));
    }

    #[test]
    fn prices_are_read_as_they_are_written() {
        for text in ["0.00", "0.65", "0.606", "12.50", "0.000001", "1000000.00"] {
            assert_eq!(text.parse::<Price>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn bids_that_make_no_sense_say_what_would() {
        let (least, further) = (Price(600_000), Price(650_000));
        let bid = JobBid { least, further, checkpoint_ns: 0 };
        assert!(bid.check().unwrap_err().to_string().ends_with("bid 0.60 at most"));
        let bid = JobBid { least: Price(MAX_PRICE.0 + 1), ..JobBid::of(least) };
        assert_eq!(bid.check(), Err(BidError::Value));
        let bid = JobBid { checkpoint_ns: MAX_CHECKPOINT_NS + 1, ..JobBid::of(least) };
        assert_eq!(bid.check(), Err(BidError::Checkpoint(MAX_CHECKPOINT_NS + 1)));
        assert_eq!(JobBid::of(least).check(), Ok(()));
    }

    #[test]
    fn an_agent_bids_its_cost_elsewhere_over_its_hours_here() {
        // The paper's first: 0.24 elsewhere, over 0.35 hours here.
        let bid = JobBid::of_work(0.24, 0.35).unwrap();
        assert_eq!(bid.least.to_string(), "0.685714");
        for hours in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(JobBid::of_work(0.24, hours), Err(BidError::Hours));
        }
        assert_eq!(JobBid::of_work(f64::NAN, 1.0), Err(BidError::Value));
        assert_eq!(JobBid::of_work(1.0, 1e-9), Err(BidError::Value));
    }
}
