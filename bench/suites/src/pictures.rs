//! Pictures of a suite: how far each row is from its bar, and how figures of runs are spread.

use super::row::Row;
use crate::plot::{self, Chart, Series, escape};
use anyhow::Result;
use std::fmt::Write;
use std::path::Path;

const STYLE: &str = "
.good{fill:var(--good);stroke:var(--good)}.bad{fill:var(--bad);stroke:var(--bad)}
svg.chart text.good,svg.chart text.bad{stroke:none}.good,.bad{stroke-width:2}.bar{stroke:var(--ink)}
svg.chart text.good{fill:var(--good)}svg.chart text.bad{fill:var(--bad)}";
const WIDTH: f64 = 760.0;
/// Pixels of a row, and above the first one.
const ROW: f64 = 36.0;
const TOP: f64 = 52.0;
/// Where the bar is, and pixels of a factor of two; what is farther off is drawn at the end of the scale.
const BAR: f64 = 380.0;
const OCTAVE: f64 = 85.0;
const FARTHEST: f64 = 8.0;

/// Draws `suite`.svg into `folder`: a line for each row, whose ratio stands right of the bar where it reaches it. Rows without a bar are
/// left out.
pub fn of_rows(folder: &Path, suite: &str, rows: &[Row]) -> Result<()> {
    let rows: Vec<&Row> = rows.iter().filter(|row| row.bar > 0.0).collect();
    let bottom = TOP + ROW * rows.len() as f64;
    let mut svg = format!(
        "<text class=\"title\" x=\"10\" y=\"18\">Suite {}: each row against its bar</text>\n",
        escape(suite)
    );
    for (times, name) in
        [(0.25, "a quarter of"), (0.5, "half"), (1.0, "the bar"), (2.0, "twice"), (4.0, "four times")]
    {
        let (x, class) = (along(times), if times == 1.0 { "bar" } else { "grid" });
        // Writing to a String cannot fail.
        let _ =
            writeln!(svg, "<line class=\"{class}\" x1=\"{x:.1}\" y1=\"42\" x2=\"{x:.1}\" y2=\"{bottom}\"/>");
        let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"36\" text-anchor=\"middle\">{name}</text>");
    }
    for (place, row) in rows.iter().enumerate() {
        one(&mut svg, TOP + ROW * place as f64, row);
    }
    plot::write(folder, suite, STYLE, (WIDTH, bottom + 10.0), &svg)
}

/// Where the bars of [`of_ideals`] begin, pixels of a ratio that is the ideal, and how many ideals a bar is at most.
const LEFT: f64 = 10.0;
const IDEAL: f64 = 500.0;
const BEYOND: f64 = 1.15;

/// Draws `suite`-ideals.svg into `folder`: for each row whose ideal is known a bar as long as its ratio is of that, and a line where its bar is. Nothing
/// where there is no such row.
pub fn of_ideals(folder: &Path, suite: &str, rows: &[Row]) -> Result<()> {
    let rows: Vec<(&Row, f64)> = rows.iter().filter_map(|row| Some((row, row.ideal?))).collect();
    if rows.is_empty() {
        return Ok(());
    }
    let (bottom, whole) = (TOP + ROW * rows.len() as f64, LEFT + IDEAL);
    let mut svg = format!(
        "<text class=\"title\" x=\"{LEFT}\" y=\"18\">Suite {}: how much of what bytes and hops allow</text>\n\
         <line class=\"grid\" x1=\"{whole}\" y1=\"42\" x2=\"{whole}\" y2=\"{bottom}\"/>\n\
         <text x=\"{whole}\" y=\"36\" text-anchor=\"middle\">the ideal</text>\n",
        escape(suite)
    );
    for (place, (row, ideal)) in rows.into_iter().enumerate() {
        let (top, class) = (TOP + ROW * place as f64, if row.pass { "good" } else { "bad" });
        let of = |ratio: f64| IDEAL * (ratio / ideal).clamp(0.0, BEYOND);
        let case = row.case.rsplit_once(": ").map_or(row.case.as_str(), |(case, _)| case);
        let _ = writeln!(
            svg,
            "<text x=\"{LEFT}\" y=\"{:.1}\">{}, {} bytes</text>",
            top + 12.0,
            escape(case),
            row.size
        );
        let (line, bar) = (top + 22.0, LEFT + of(row.bar));
        let said = match row.ratio {
            Some(ratio) => {
                let _ = writeln!(
                    svg,
                    "<rect class=\"{class}\" x=\"{LEFT}\" y=\"{:.1}\" width=\"{:.1}\" height=\"8\" fill-opacity=\"0.6\"/>",
                    line - 4.0,
                    of(ratio)
                );
                format!("{ratio:.2}; bar {:.2}, ideal {ideal:.2}", row.bar)
            }
            None => format!("not measured; bar {:.2}, ideal {ideal:.2}", row.bar),
        };
        let _ = writeln!(
            svg,
            "<line class=\"bar\" x1=\"{bar:.1}\" y1=\"{:.1}\" x2=\"{bar:.1}\" y2=\"{:.1}\"/>",
            line - 8.0,
            line + 8.0
        );
        let _ = writeln!(
            svg,
            "<text class=\"{class}\" x=\"{:.1}\" y=\"{:.1}\">{said}</text>",
            LEFT + IDEAL * BEYOND + 6.0,
            line + 5.0
        );
    }
    plot::write(folder, &format!("{suite}-ideals"), STYLE, (WIDTH, bottom + 10.0), &svg)
}

fn one(svg: &mut String, top: f64, row: &Row) {
    let class = if row.pass { "good" } else { "bad" };
    let (text, line) = (top + 12.0, top + 22.0);
    let _ = writeln!(svg, "<text x=\"10\" y=\"{text}\">{}</text>", escape(&row.case));
    let Some(ratio) = row.ratio else {
        let why = format!("not measured: {}", row.reference_name);
        let _ = writeln!(svg, "<text class=\"bad\" x=\"10\" y=\"{:.1}\">{}</text>", line + 5.0, escape(&why));
        return;
    };
    if let Some((least, most)) = row.ends {
        let (from, to) = (along(least / row.bar), along(most / row.bar));
        let _ = writeln!(
            svg,
            "<line class=\"{class}\" x1=\"{from:.1}\" y1=\"{line}\" x2=\"{to:.1}\" y2=\"{line}\"/>"
        );
    }
    let at = along(ratio / row.bar);
    let _ = writeln!(svg, "<circle class=\"{class}\" cx=\"{at:.1}\" cy=\"{line}\" r=\"4\"/>");
    let said = if ratio < 1e6 { format!("{ratio:.3} of {:.3}", row.bar) } else { "none at all".to_owned() };
    let _ = writeln!(svg, "<text class=\"{class}\" x=\"10\" y=\"{:.1}\">{said}</text>", line + 5.0);
}

/// Where so many times the bar is.
fn along(times: f64) -> f64 {
    BAR + OCTAVE * times.clamp(1.0 / FARTHEST, FARTHEST).log2()
}

/// Which part of values is at most so large: a line that rises by a step at each of them.
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
    Chart { title, x: x.to_owned(), y: y.to_owned(), logarithmic: false, series, marks }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::{Better, Case};

    #[test]
    fn rows_stand_where_their_ratio_is() {
        let folder = tempfile::tempdir().unwrap();
        let case = |case: &str, bar| Case {
            suite: "s",
            case: case.into(),
            size: 1,
            ranks: 2,
            better: Better::More,
            bar,
        };
        let rows = [
            case("reached <twice>", 0.5).compare(&[1.0, 2.0, 0.9], &[1.0, 1.0, 1.0], "r"),
            case("missed", 1.0).compare(&[0.5], &[1.0], "r"),
            case("not there", 1.0).missing("Gloo", "no package"),
            case("stated", 0.0).compare(&[0.5], &[1.0], "r"),
        ];
        of_rows(&folder.path().join("new"), "s", &rows).unwrap();
        let svg = std::fs::read_to_string(folder.path().join("new/s.svg")).unwrap();
        assert!(svg.contains("<circle class=\"good\" cx=\"465.0\""), "{svg}");
        assert!(svg.contains("<line class=\"good\" x1=\"452.1\" y1=\"74\" x2=\"550.0\""), "{svg}");
        assert!(
            svg.contains("<circle class=\"bad\" cx=\"295.0\"") && svg.contains("0.500 of 1.000"),
            "{svg}"
        );
        assert!(svg.contains("reached &lt;twice&gt;") && svg.contains("not measured: Gloo"), "{svg}");
        assert!(!svg.contains("stated"), "{svg}");
    }

    #[test]
    fn bar_lengths_follow_ratios_to_ideals() {
        let folder = tempfile::tempdir().unwrap();
        let case = |case: &str, bar: f64| Case {
            suite: "s",
            case: case.into(),
            size: 7,
            ranks: 2,
            better: Better::Less,
            bar: 1.0 / bar,
        };
        let rows = [
            case("four hosts: us", 1.4).compare(&[2.0], &[3.0], "r").of_ideal(1.5),
            case("half <of> it: us", 4.0).compare(&[1.0], &[3.0], "r").of_ideal(6.0),
            case("more than there can be: us", 1.0).compare(&[1.0], &[9.0], "r").of_ideal(2.0),
            case("not there: us", 1.2).missing("the same", "time").of_ideal(2.0),
            case("without an ideal: us", 1.0).compare(&[1.0], &[1.0], "r"),
        ];
        of_ideals(folder.path(), "s", &rows).unwrap();
        let svg = std::fs::read_to_string(folder.path().join("s-ideals.svg")).unwrap();
        for drawn in [
            "<rect class=\"good\" x=\"10\" y=\"70.0\" width=\"500.0\"",
            "<line class=\"bar\" x1=\"476.7\" y1=\"66.0\"",
            "<rect class=\"bad\" x=\"10\" y=\"106.0\" width=\"250.0\"",
            "<rect class=\"good\" x=\"10\" y=\"142.0\" width=\"575.0\"",
            "four hosts, 7 bytes",
            "half &lt;of&gt; it",
            "1.50; bar 1.40, ideal 1.50",
            "not measured; bar 1.20, ideal 2.00",
        ] {
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
