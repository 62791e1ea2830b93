//! One bar, measured: a row of the table and an object of the JSON array.

use serde::{Deserialize, Serialize};

/// Which direction of a figure is good.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Better {
    /// Bandwidth, for example.
    More,
    /// Time, for example.
    Less,
}

/// What a row is about.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    /// The name of the suite.
    pub suite: &'static str,
    /// Collective, figure and unit.
    pub case: String,
    /// Bytes of a rank's tensor.
    pub size: u64,
    /// The number of ranks.
    pub ranks: usize,
    /// Which direction of the figure is good.
    pub better: Better,
    /// What ours must be of the reference: with [`Better::More`] at least so many times it, with [`Better::Less`] at most.
    /// `None` where the row only states its figures.
    pub bar: Option<f64>,
}

/// A row. Its ratio is always the larger the better, and it passes when `ratio >= bar`. Figures are medians of runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The name of the suite.
    pub suite: String,
    /// Collective, figure and unit.
    pub case: String,
    /// Bytes of a rank's tensor.
    pub size: u64,
    /// The number of ranks.
    pub ranks: usize,
    /// The median of our runs, if there were any.
    pub ours: Option<f64>,
    /// The smallest and the largest of our runs.
    pub ours_range: Option<[f64; 2]>,
    /// The median of the reference's runs, if there were any.
    pub reference: Option<f64>,
    /// The smallest and the largest of the reference's runs.
    pub reference_range: Option<[f64; 2]>,
    /// What the reference is; how to get it, if it is missing.
    pub reference_name: String,
    /// Ours over reference where more is better, reference over ours where less is.
    pub ratio: Option<f64>,
    /// The ratio that must be reached; `None` where the row only states its figures.
    pub bar: Option<f64>,
    /// Whether the bar is reached; `None` where there is none, so that the row counts for nothing.
    pub pass: Option<bool>,
    /// Largest less smallest ratio of the runs, over their median.
    pub spread: Option<f64>,
    /// How many runs of each, interleaved.
    pub runs: usize,
    /// Smallest and largest ratio of the runs.
    #[serde(skip)]
    pub ends: Option<(f64, f64)>,
    /// What the ratio would be if nothing but bytes and hops took time, where that is known.
    #[serde(skip)]
    pub ideal: Option<f64>,
}

impl Row {
    /// The same with its ideal.
    #[must_use]
    pub fn of_ideal(self, ideal: f64) -> Self {
        Self { ideal: Some(ideal), ..self }
    }

    /// Whether the row reaches its bar.
    pub fn passed(&self) -> bool {
        self.pass == Some(true)
    }

    /// Whether the row has a bar and does not reach it.
    pub fn failed(&self) -> bool {
        self.pass == Some(false)
    }
}

/// The middle of the values (the mean of the two middle ones), `None` of none.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    match sorted.len() % 2 {
        0 => Some((upper + sorted.get(sorted.len() / 2 - 1)?) / 2.0),
        _ => Some(upper),
    }
}

/// A ratio that is the larger the better; `None` if it cannot be formed.
fn ratio(better: Better, ours: f64, reference: f64) -> Option<f64> {
    let (above, below) = match better {
        Better::More => (ours, reference),
        Better::Less => (reference, ours),
    };
    // Nothing at all where less is better meets any limit.
    if better == Better::Less && ours <= 0.0 && reference > 0.0 {
        return Some(f64::MAX);
    }
    Some(above / below).filter(|ratio| ratio.is_finite() && *ratio >= 0.0)
}

/// Smallest and largest of the values.
fn range(values: &[f64]) -> Option<[f64; 2]> {
    let of = |choose: fn(f64, f64) -> f64| values.iter().copied().reduce(choose);
    Some([of(f64::min)?, of(f64::max)?])
}

impl Case {
    /// A case whose figure must be at least `bar` times the reference's. A bar that any figure reaches is none.
    pub fn more(suite: &'static str, case: impl Into<String>, bar: f64) -> Self {
        Self::new(suite, case, Better::More, bar)
    }

    /// A case whose figure may be at most `bar` times the reference's. A bar that any figure reaches is none.
    pub fn less(suite: &'static str, case: impl Into<String>, bar: f64) -> Self {
        Self::new(suite, case, Better::Less, bar)
    }

    pub(crate) fn new(suite: &'static str, case: impl Into<String>, better: Better, bar: f64) -> Self {
        let bar = Some(bar).filter(|bar| bar.is_finite() && *bar > 0.0);
        Self { suite, case: case.into(), size: 0, ranks: 0, better, bar }
    }

    /// The same with the bytes of a rank's tensor and the number of ranks.
    #[must_use]
    pub fn of(self, size: u64, ranks: usize) -> Self {
        Self { size, ranks, ..self }
    }

    /// The same without a bar: its rows state their figures, and neither pass nor fail.
    #[must_use]
    pub fn stated(self) -> Self {
        Self { bar: None, ..self }
    }

    fn row(&self, reference_name: &str) -> Row {
        let bar = self.bar.map(|bar| if self.better == Better::More { bar } else { 1.0 / bar });
        Row {
            suite: self.suite.to_owned(),
            case: self.case.clone(),
            size: self.size,
            ranks: self.ranks,
            ours: None,
            ours_range: None,
            reference: None,
            reference_range: None,
            reference_name: reference_name.to_owned(),
            ratio: None,
            bar,
            pass: bar.map(|_| false),
            spread: None,
            runs: 0,
            ends: None,
            ideal: None,
        }
    }

    /// A row from the figures of runs, `ours` and `reference` interleaved, so that those of the same place belong together.
    pub fn compare(&self, ours: &[f64], reference: &[f64], reference_name: &str) -> Row {
        let mut row = self.row(reference_name);
        (row.ours, row.ours_range) = (median(ours), range(ours));
        (row.reference, row.reference_range) = (median(reference), range(reference));
        row.runs = ours.len().min(reference.len());
        if let (Some(ours), Some(reference)) = (row.ours, row.reference) {
            row.ratio = ratio(self.better, ours, reference);
        }
        let pairs = ours.iter().zip(reference);
        let ratios: Vec<f64> =
            pairs.filter_map(|(ours, reference)| ratio(self.better, *ours, *reference)).collect();
        row.ends = range(&ratios).map(|[least, most]| (least, most));
        if let (Some((least, most)), Some(middle)) = (row.ends, median(&ratios)) {
            row.spread = Some((most - least) / middle).filter(|spread| spread.is_finite());
        }
        let reached = |bar| row.runs > 0 && row.ratio.is_some_and(|ratio| ratio >= bar);
        row.pass = row.bar.map(reached);
        row
    }

    /// A row against a limit: the limit is the reference, and the bar is 1.
    pub fn limit(&self, ours: &[f64], limit: f64) -> Row {
        self.compare(ours, &vec![limit; ours.len()], "limit")
    }

    /// A row that states figures beside nothing.
    pub fn state(&self, ours: &[f64]) -> Row {
        let row = self.clone().stated().compare(ours, &[], "");
        Row { runs: ours.len(), ..row }
    }

    /// A row that states figures alone, because what they would be beside is not there. `why` says what is missing, and how
    /// to get it.
    pub(crate) fn state_without(&self, ours: &[f64], reference_name: &str, why: &str) -> Row {
        Row { reference_name: format!("{reference_name} (missing: {why})"), ..self.state(ours) }
    }

    /// A row that fails, because what it needs is not there; `why` says what, and how to get it.
    pub fn missing(&self, reference_name: &str, why: &str) -> Row {
        self.row(&format!("{reference_name} (missing: {why})"))
    }
}

/// A figure in as many digits as mean something.
pub(crate) fn figure(value: Option<f64>) -> String {
    match value {
        None => "-".to_owned(),
        Some(value) if value.abs() >= 1e6 => format!("{value:.2e}"),
        Some(value) if value.abs() >= 100.0 => format!("{value:.1}"),
        Some(value) if value != 0.0 && value.abs() < 0.01 => format!("{value:.2e}"),
        Some(value) => format!("{value:.3}"),
    }
}

/// A median with the range of its runs, where they differ.
pub(crate) fn figures(value: Option<f64>, range: Option<[f64; 2]>) -> String {
    match range {
        Some([least, most]) if least < most => {
            format!("{} ({} to {})", figure(value), figure(Some(least)), figure(Some(most)))
        }
        _ => figure(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(better: Better, bar: f64) -> Case {
        Case::new("s", "c", better, bar).of(1, 2)
    }

    #[test]
    fn more_is_better_must_reach_the_bar() {
        let row = case(Better::More, 0.97).compare(&[97.0, 99.0, 1.0], &[100.0, 100.0, 100.0], "r");
        assert_eq!((row.ours, row.reference, row.ratio), (Some(97.0), Some(100.0), Some(0.97)));
        assert!(row.pass == Some(true) && row.bar == Some(0.97) && row.runs == 3);
        assert!(case(Better::More, 0.97).compare(&[96.9], &[100.0], "r").failed());
    }

    #[test]
    fn less_is_better_inverts_ratio_and_bar() {
        let row = case(Better::Less, 1.25).compare(&[10.0], &[8.0], "r");
        assert_eq!((row.ratio, row.bar, row.pass), (Some(0.8), Some(0.8), Some(true)));
        assert!(case(Better::Less, 1.25).compare(&[10.1], &[8.0], "r").failed());
    }

    #[test]
    fn a_limit_is_the_reference_with_bar_one() {
        let row = case(Better::Less, 1.0).limit(&[20.0, 30.0], 40.0);
        assert_eq!((row.ratio, row.bar, row.pass, row.runs), (Some(1.6), Some(1.0), Some(true), 2));
        assert!(case(Better::Less, 1.0).limit(&[41.0], 40.0).failed());
        assert!(!case(Better::Less, 1.0).limit(&[-3.0], 40.0).failed());
    }

    #[test]
    fn what_is_missing_or_no_number_fails() {
        let missing = case(Better::More, 1.0).missing("Gloo", "apt-get install x");
        assert!(
            missing.failed()
                && missing.ratio.is_none()
                && missing.reference_name.contains("apt-get install x")
        );
        for (ours, reference) in
            [(vec![], vec![]), (vec![1.0], vec![]), (vec![f64::NAN], vec![1.0]), (vec![1.0], vec![0.0])]
        {
            let row = case(Better::More, 1e-9).compare(&ours, &reference, "r");
            assert!(row.failed(), "{row:?}");
            assert!(!serde_json::to_string(&row).unwrap().contains("NaN"));
        }
    }

    #[test]
    fn a_row_that_cannot_fail_leaves_pass_empty() {
        let stated = [
            case(Better::More, 0.0),
            case(Better::Less, f64::INFINITY),
            case(Better::More, 2.0).stated(),
            case(Better::Less, 100.0).stated(),
        ];
        for case in stated {
            let row = case.compare(&[1.0], &[2.0], "r");
            assert_eq!((row.pass, row.bar, row.failed()), (None, None, false), "{case:?}");
            assert!(!case.missing("r", "gone").failed());
        }
    }

    #[test]
    fn runs_are_reported_with_their_range() {
        let row = case(Better::More, 1.0).compare(&[3.0, 1.0, 2.0], &[2.0, 2.0, 2.0], "r");
        assert_eq!((row.ours, row.ours_range, row.runs), (Some(2.0), Some([1.0, 3.0]), 3));
        assert_eq!(figures(row.ours, row.ours_range), "2.000 (1.000 to 3.000)");
        assert_eq!(figures(row.reference, row.reference_range), "2.000");
    }

    #[test]
    fn the_spread_is_of_ratios_run_by_run() {
        // Both swing together: the ratio does not.
        let row = case(Better::More, 1.0).compare(&[1.0, 4.0, 2.0], &[1.0, 4.0, 2.0], "r");
        assert_eq!(row.spread, Some(0.0));
        let row = case(Better::More, 1.0).compare(&[1.0, 2.0, 3.0], &[1.0, 1.0, 1.0], "r");
        assert_eq!(row.spread, Some(1.0));
    }

    #[test]
    fn json_keys_are_stable() {
        let row = case(Better::More, 1.0).compare(&[1.0], &[1.0], "r");
        let serde_json::Value::Object(object) = serde_json::to_value(&row).unwrap() else {
            panic!("no object")
        };
        let mut keys: Vec<&str> = object.keys().map(String::as_str).collect();
        let mut expected = [
            "suite",
            "case",
            "size",
            "ranks",
            "ours",
            "ours_range",
            "reference",
            "reference_range",
            "reference_name",
            "ratio",
            "bar",
            "pass",
            "spread",
            "runs",
        ];
        keys.sort_unstable();
        expected.sort_unstable();
        assert_eq!(keys, expected);
    }
}
