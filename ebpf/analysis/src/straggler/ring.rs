//! What was usual lately: medians over a window that what is not usual does not enter.

/// How many values a window holds.
pub(super) const WINDOW: usize = 64;
/// How many of the latest values wait. An onset is found within as many, and they are then no part of what is usual.
pub(super) const PENDING: usize = 3;
/// The least number of values that make something usual.
pub(super) const MIN_VALUES: usize = 5;

/// The last values of one quantity, but for the latest few.
#[derive(Debug, Clone)]
pub(super) struct Baseline {
    values: [i64; WINDOW],
    count: usize,
    next: usize,
    pending: [i64; PENDING],
    pending_count: usize,
}

impl Default for Baseline {
    fn default() -> Self {
        Self { values: [0; WINDOW], count: 0, next: 0, pending: [0; PENDING], pending_count: 0 }
    }
}

impl Baseline {
    /// Adds a value; the oldest that waits becomes usual.
    pub(super) fn push(&mut self, value: i64) {
        let [first, second, third] = self.pending;
        if self.pending_count == PENDING {
            if let Some(place) = self.values.get_mut(self.next) {
                *place = first;
            }
            self.next = (self.next + 1) % WINDOW;
            self.count = (self.count + 1).min(WINDOW);
            self.pending = [second, third, value];
        } else if let Some(place) = self.pending.get_mut(self.pending_count) {
            *place = value;
            self.pending_count += 1;
        }
    }

    /// Forgets what waits: it is not usual.
    pub(super) fn discard(&mut self) {
        self.pending_count = 0;
    }

    /// What is usual, in no order.
    pub(super) fn values(&self) -> &[i64] {
        self.values.get(..self.count).unwrap_or_default()
    }

    /// What one in ten values reaches; of fewer, the largest.
    pub(super) fn upper(&self) -> Option<i64> {
        let mut values = self.values;
        let values = values.get_mut(..self.count)?;
        let place = (values.len() * 9).div_ceil(10).min(values.len().checked_sub(1)?);
        Some(*values.select_nth_unstable(place).1)
    }

    /// The median and the robust standard deviation (1.4826 times the median distance from it); none while too few are known.
    pub(super) fn spread(&self) -> Option<Spread> {
        let mut values = self.values;
        let values = values.get_mut(..self.count)?;
        if values.len() < MIN_VALUES {
            return None;
        }
        let middle = median(values)?;
        for value in values.iter_mut() {
            *value = value.saturating_sub(middle).saturating_abs();
        }
        let distance = median(values)?;
        Some(Spread { median: middle, deviation: (distance as f64 * 1.4826) as i64 })
    }
}

/// Where values lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Spread {
    /// Their median.
    pub(super) median: i64,
    /// Their robust standard deviation.
    pub(super) deviation: i64,
}

/// The median, the lower of two; none of nothing. Changes the order.
pub(super) fn median(values: &mut [i64]) -> Option<i64> {
    quantile(values, 1, 2)
}

/// The value that `part` of `whole` lie below or at. Changes the order.
pub(super) fn quantile(values: &mut [i64], part: usize, whole: usize) -> Option<i64> {
    if values.is_empty() {
        return None;
    }
    let place = (values.len() - 1) * part / whole;
    Some(*values.select_nth_unstable(place).1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_are_not_usual_yet() {
        let mut usual = Baseline::default();
        for value in [10, 12, 8, 11, 9, 1000, 1000, 1000] {
            usual.push(value);
        }
        assert_eq!(usual.spread(), Some(Spread { median: 10, deviation: 1 }));
        usual.push(1000);
        assert_eq!(usual.spread().map(|spread| spread.median), Some(10));
        usual.discard();
        for value in [10; 70] {
            usual.push(value);
        }
        assert_eq!(usual.spread(), Some(Spread { median: 10, deviation: 0 }));
    }

    #[test]
    fn medians_and_quantiles() {
        assert_eq!(median(&mut []), None);
        assert_eq!(median(&mut [3]), Some(3));
        assert_eq!(median(&mut [9, 1]), Some(1));
        assert_eq!(median(&mut [9, 1, 5]), Some(5));
        assert_eq!(quantile(&mut [5, 4, 3, 2, 1], 3, 4), Some(4));
    }
}
