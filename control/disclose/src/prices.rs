//! Prices, as coarse as tenants are told them.

use harmonaize_abi::session::Price;

/// The next of the prices 1, 1.5, 2, and so on to 9.5, times a power of ten. A job whose bid wins hears of none above it: it pays no
/// more.
pub fn coarse_price(price: Price, bid: Option<Price>) -> Price {
    let power = price.0.checked_ilog10().map_or(1, |digits| 10_u64.saturating_pow(digits));
    let step = (power / 2).max(1);
    let coarse = price.0.div_ceil(step).saturating_mul(step);
    // Whoever bids less than the price is told the step, and no more.
    let within = bid.filter(|bid| *bid >= price).map_or(coarse, |bid| coarse.min(bid.0));
    Price(within)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_prices_are_alike() {
        let coarse = |price| coarse_price(Price(price), None).0;
        assert_eq!([0, 1, 9].map(coarse), [0, 1, 9]);
        assert_eq!([600_001, 606_000, 650_000].map(coarse), [650_000; 3]);
        assert_eq!([650_001, 687_000].map(coarse), [700_000; 2]);
        assert_eq!(coarse(9_700_000), 10_000_000);
        assert_eq!(coarse(u64::MAX), u64::MAX);
        let told: std::collections::BTreeSet<u64> = (100_000..1_000_000).map(coarse).collect();
        assert_eq!(told.len(), 19, "steps of a twentieth, whatever the bids are");
    }

    #[test]
    fn nobody_is_told_more_than_it_bids_while_it_pays_less() {
        let told = |bid| coarse_price(Price(606_000), Some(Price(bid))).0;
        assert_eq!([606_000, 620_000, 700_000].map(told), [606_000, 620_000, 650_000]);
        assert_eq!(told(600_000), 650_000, "it is outbid");
    }
}
