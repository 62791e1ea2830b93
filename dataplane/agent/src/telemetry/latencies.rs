//! How long events took from the kernel to what was decided by them.

/// Upper bounds of classes, in nanoseconds; the last class has none.
pub(crate) const BOUNDS_NS: [u64; 18] = [
    20_000,
    50_000,
    75_000,
    100_000,
    150_000,
    200_000,
    300_000,
    500_000,
    750_000,
    1_000_000,
    1_500_000,
    2_000_000,
    3_000_000,
    5_000_000,
    10_000_000,
    20_000_000,
    50_000_000,
    100_000_000,
];

/// Events by how long they took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Latencies {
    /// Of each class of [`BOUNDS_NS`], and beyond.
    pub(crate) classes: [u64; BOUNDS_NS.len() + 1],
    /// The sum of their times.
    pub(crate) sum_ns: u64,
}

impl Latencies {
    /// An event that took so long.
    ///
    /// Cost: a search among 18 bounds.
    pub(crate) fn note(&mut self, lag_ns: u64) {
        let class = BOUNDS_NS.partition_point(|bound| *bound < lag_ns);
        if let Some(class) = self.classes.get_mut(class) {
            *class += 1;
        }
        self.sum_ns = self.sum_ns.saturating_add(lag_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_in_the_first_class_whose_bound_it_does_not_pass() {
        let mut lags = Latencies::default();
        [0, 20_000, 20_001, 1_000_000, u64::MAX].into_iter().for_each(|lag| lags.note(lag));
        let told: Vec<usize> = (0..lags.classes.len()).filter(|class| lags.classes[*class] > 0).collect();
        assert_eq!(told, [0, 1, 9, BOUNDS_NS.len()]);
        assert_eq!((lags.classes[0], lags.sum_ns), (2, u64::MAX));
        assert!(BOUNDS_NS.is_sorted());
    }
}
