//! Pictures of a suite: how far each row is from its bar, and how figures of runs are spread.

use super::row::Row;
use anyhow::Result;
use harmonaize_plot::{Axes, Chart, Lane, Scale, Series, write_lanes};
use std::path::Path;

/// Times the bar at which the scale of [`of_rows`] ends.
const FARTHEST: f64 = 8.0;
const TIMES: [(f64, &str); 5] =
    [(0.25, "a quarter of"), (0.5, "half"), (1.0, "the bar"), (2.0, "twice"), (4.0, "four times")];

/// Draws `suite`.svg into `folder`: a line for each row, whose ratio stands right of the bar where it reaches it. Rows
/// without a bar are left out.
pub fn of_rows(folder: &Path, suite: &str, rows: &[Row]) -> Result<()> {
    let lane = |row: &Row| {
        let bar = row.bar?;
        let note = match row.ratio {
            None => format!("not measured: {}", row.reference_name),
            Some(ratio) if ratio < 1e6 => format!("{ratio:.3} of {bar:.3}"),
            Some(_) => "none at all".to_owned(),
        };
        let ends = row.ends.filter(|_| row.ratio.is_some());
        Some(Lane {
            name: row.case.clone(),
            note,
            good: !row.failed(),
            bar: ends.map(|(least, most)| (least / bar, most / bar)),
            dot: row.ratio.map(|ratio| ratio / bar),
            mark: None,
        })
    };
    let lanes: Vec<Lane> = rows.iter().filter_map(lane).collect();
    let scale = Scale { ends: (1.0 / FARTHEST, FARTHEST), logarithmic: true, ticks: &TIMES };
    write_lanes(folder, suite, &format!("Suite {suite}: each row against its bar"), scale, &lanes)
}

/// Draws `suite`-ideals.svg into `folder`, for each row whose ideal is known. A row has a bar as long as its ratio is of
/// that, and a line where its bar is. Nothing where there is no such row.
pub fn of_ideals(folder: &Path, suite: &str, rows: &[Row]) -> Result<()> {
    let lane = |row: &Row| {
        let ideal = row.ideal?;
        let bar = row.bar.map_or("no bar".to_owned(), |bar| format!("bar {bar:.2}"));
        let figure = row.ratio.map_or("not measured".to_owned(), |ratio| format!("{ratio:.2}"));
        let case = row.case.rsplit_once(": ").map_or(row.case.as_str(), |(case, _)| case);
        Some(Lane {
            name: format!("{case}, {} bytes", row.size),
            note: format!("{figure}; {bar}, ideal {ideal:.2}"),
            good: !row.failed(),
            bar: row.ratio.map(|ratio| (0.0, ratio / ideal)),
            dot: None,
            mark: row.bar.map(|bar| bar / ideal),
        })
    };
    let lanes: Vec<Lane> = rows.iter().filter_map(lane).collect();
    if lanes.is_empty() {
        return Ok(());
    }
    let scale = Scale { ends: (0.0, 1.15), logarithmic: false, ticks: &[(1.0, "the ideal")] };
    let title = format!("Suite {suite}: how much of what bytes and hops allow");
    write_lanes(folder, &format!("{suite}-ideals"), &title, scale, &lanes)
}

/// The share of values that are at most so large. The line rises by a step at each of them.
pub fn shares(name: &str, values: &[f64]) -> Series {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let each = 100.0 / sorted.len().max(1) as f64;
    let steps = sorted
        .iter()
        .enumerate()
        .flat_map(|(below, value)| [(*value, below as f64 * each), (*value, (below + 1) as f64 * each)]);
    Series { name: name.to_owned(), points: std::iter::once((0.0, 0.0)).chain(steps).collect() }
}

/// A chart with linear axes.
pub fn chart(title: String, (x, y): (&str, &str), series: Vec<Series>, marks: Vec<f64>) -> Chart {
    Chart { title, x: x.to_owned(), y: y.to_owned(), axes: Axes::Linear, series, marks }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::Case;

    #[test]
    fn rows_stand_where_their_ratio_is() {
        let folder = tempfile::tempdir().unwrap();
        let case = |case: &str, bar| Case::more("s", case, bar).of(1, 2);
        let rows = [
            case("reached <twice>", 0.5).compare(&[1.0, 2.0, 0.9], &[1.0, 1.0, 1.0], "r"),
            case("missed", 1.0).compare(&[0.5], &[1.0], "r"),
            case("not there", 1.0).missing("Gloo", "no package"),
            case("only said", 1.0).stated().compare(&[0.5], &[1.0], "r"),
        ];
        of_rows(folder.path(), "s", &rows).unwrap();
        let svg = std::fs::read_to_string(folder.path().join("s.svg")).unwrap();
        // The bar is in the middle of the scale, each factor of two a sixth of it.
        for drawn in
            ["cx=\"687\"", "cx=\"573\"", "0.500 of 1.000", "reached &lt;twice&gt;", "not measured: Gloo"]
        {
            assert!(svg.contains(drawn), "no {drawn} in {svg}");
        }
        assert!(!svg.contains("only said"), "{svg}");
    }

    #[test]
    fn bar_lengths_follow_ratios_to_ideals() {
        let folder = tempfile::tempdir().unwrap();
        let case = |case: &str, bar: f64| Case::less("s", case, 1.0 / bar).of(7, 2);
        let rows = [
            case("four hosts: us", 1.4).compare(&[2.0], &[3.0], "r").of_ideal(1.5),
            case("half <of> it: us", 4.0).compare(&[1.0], &[3.0], "r").of_ideal(6.0),
            case("more than there can be: us", 1.0).compare(&[1.0], &[9.0], "r").of_ideal(2.0),
            case("not there: us", 1.2).missing("the same", "time").of_ideal(2.0),
            case("without an ideal: us", 1.0).compare(&[1.0], &[1.0], "r"),
        ];
        of_ideals(folder.path(), "s", &rows).unwrap();
        let svg = std::fs::read_to_string(folder.path().join("s-ideals.svg")).unwrap();
        let drawn =
            ["width=\"296\"", "width=\"148\"", "width=\"340\"", "four hosts, 7 bytes", "half &lt;of&gt; it"];
        let notes = ["1.50; bar 1.40, ideal 1.50", "not measured; bar 1.20, ideal 2.00"];
        for drawn in drawn.iter().chain(&notes) {
            assert!(svg.contains(drawn), "no {drawn} in {svg}");
        }
        assert!(!svg.contains("without an ideal"), "{svg}");
        of_ideals(&folder.path().join("none"), "s", &rows[4..]).unwrap();
        assert!(!folder.path().join("none").exists());
    }

    #[test]
    fn shares_rise_to_all() {
        let points = shares("s", &[30.0, 10.0]).points;
        assert_eq!(points, [(0.0, 0.0), (10.0, 0.0), (10.0, 50.0), (30.0, 50.0), (30.0, 100.0)]);
    }
}
