//! Arithmetic on figures of runs.

/// A bound that the median lies below with 95% confidence, from values whose distribution is not known. It is the smallest of
/// the sorted values that at least so many binomial cases leave below it (Conover, Practical Nonparametric Statistics, 3.2).
/// With less than five values there is none.
pub(super) fn upper_bound(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let count = sorted.len();
    // P(exactly k of n values lie below the median), from k = 0 on.
    let mut exactly = 0.5f64.powi(i32::try_from(count).ok()?);
    let mut at_most = exactly;
    for (k, value) in sorted.iter().enumerate() {
        // `value` is below the median only if more than k values are.
        if at_most >= 0.95 {
            return Some(*value);
        }
        exactly *= (count - k) as f64 / (k + 1) as f64;
        at_most += exactly;
    }
    None
}

/// Magnitudes.
pub(super) fn magnitudes(values: &[f64]) -> Vec<f64> {
    values.iter().map(|value| value.abs()).collect()
}

/// The value that so many percent of all do not exceed; `None` if there are none. It is one of them, and
/// nothing between two.
pub(super) fn percentile(values: &[f64], percent: usize) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get((sorted.len() * percent).div_ceil(100).saturating_sub(1)).copied()
}

/// Smallest, middle and largest, for people.
pub(super) fn summary(values: &[f64]) -> String {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match (sorted.first(), sorted.get(sorted.len() / 2), sorted.last()) {
        (Some(least), Some(middle), Some(most)) => format!("{middle:.3} ({least:.3} to {most:.3})"),
        _ => "nothing".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_is_the_binomial_order_statistic() {
        let values = |count: u32| (1..=count).map(f64::from).collect::<Vec<_>>();
        assert_eq!(upper_bound(&values(4)), None);
        // P(all five below the median) = 1/32.
        assert_eq!(upper_bound(&values(5)), Some(5.0));
        // P(Bin(10, 1/2) <= 7) = 0.945, <= 8 = 0.989.
        assert_eq!(upper_bound(&values(10)), Some(9.0));
        // P(Bin(20, 1/2) <= 13) = 0.942, <= 14 = 0.979.
        assert_eq!(upper_bound(&values(20)), Some(15.0));
        assert_eq!(upper_bound(&[]), None);
    }

    #[test]
    fn a_percentile_is_one_of_the_values() {
        let values: Vec<f64> = (1..=20).rev().map(f64::from).collect();
        assert_eq!([50, 90, 100].map(|percent| percentile(&values, percent)), [10.0, 18.0, 20.0].map(Some));
        assert_eq!((percentile(&[7.0], 90), percentile(&[], 90)), (Some(7.0), None));
    }

    #[test]
    fn figures_are_summed_up() {
        assert_eq!(summary(&[2.0, -1.0, 0.5]), "0.500 (-1.000 to 2.000)");
        assert_eq!(summary(&[]), "nothing");
        assert_eq!(magnitudes(&[-1.0, 2.0]), [1.0, 2.0]);
    }
}
