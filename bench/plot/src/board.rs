//! Boards of charts on a grid, as dashboards have them.

use crate::Chart;
use crate::chart::{HEIGHT, WIDTH, write};
use anyhow::Result;
use maud::{Markup, PreEscaped, html};
use std::path::Path;

/// Columns of the grid; a chart as it is drawn takes half of them.
const COLUMNS: u32 = 24;
/// Pixels of a row of the grid.
const ROW: u32 = 38;
/// Pixels above the panels, for the heading.
const HEAD: u32 = 56;

/// A chart of a board, and where it stands on a grid of 24 columns.
#[derive(Clone, Debug, PartialEq)]
pub struct Panel {
    /// The column and the row at which it begins.
    pub at: (u32, u32),
    /// Columns and rows that it takes.
    pub size: (u32, u32),
    /// The chart. One without a point says that it has no data.
    pub chart: Chart,
}

impl Panel {
    fn markup(&self) -> Result<Markup> {
        let columns = |count: u32| count * 2 * WIDTH / COLUMNS;
        let (x, y) = (columns(self.at.0), HEAD + self.at.1 * ROW);
        let (width, height) = (columns(self.size.0), self.size.1 * ROW);
        let chart = if self.chart.is_empty() { None } else { Some(self.chart.svg()?) };
        Ok(html! {
            svg x=(x) y=(y) width=(width) height=(height) viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) {
                @if let Some(chart) = chart {
                    (PreEscaped(chart))
                } @else {
                    text x=(WIDTH / 2) y="24" text-anchor="middle" font-size="14" { (self.chart.title) }
                    text x=(WIDTH / 2) y=(HEIGHT / 2) text-anchor="middle" font-size="14" fill="#777" {
                        "no data"
                    }
                }
            }
            rect x=(x) y=(y) width=(width) height=(height) fill="none" stroke="#ddd" {}
        })
    }
}

/// Writes a board into `folder`: `name`.svg, under a title and a note.
///
/// # Errors
/// Where it cannot be drawn or written.
pub fn write_board(folder: &Path, name: &str, title: &str, note: &str, panels: &[Panel]) -> Result<()> {
    let rows = panels.iter().map(|panel| panel.at.1 + panel.size.1).max().unwrap_or(0);
    let (width, height) = (2 * WIDTH, HEAD + rows * ROW);
    let panels = panels.iter().map(Panel::markup).collect::<Result<Vec<_>>>()?;
    let whole = format!("0 0 {width} {height}");
    let svg = html! {
        svg xmlns="http://www.w3.org/2000/svg" width=(width) height=(height) viewBox=(whole)
            font-family="sans-serif" {
            rect width=(width) height=(height) fill="#fff" {}
            text x="8" y="24" font-size="18" { (title) }
            text x="8" y="44" font-size="12" fill="#555" { (note) }
            @for panel in panels { (panel) }
        }
    };
    write(folder, name, &svg.into_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Axes, Series};

    #[test]
    fn panels_say_where_they_have_no_data() {
        let panel = |at, title: &str, points| {
            let series = vec![Series { name: "s".into(), points }];
            let [x, y] = ["x", "y"].map(str::to_owned);
            let chart = Chart { title: title.into(), x, y, axes: Axes::Linear, series, marks: Vec::new() };
            Panel { at, size: (12, 8), chart }
        };
        let panels = [
            panel((0, 0), "full", vec![(0.0, 1.0), (1.0, 2.0)]),
            panel((12, 8), "a <b>", vec![(0.0, f64::NAN)]),
        ];
        let folder = tempfile::tempdir().unwrap();
        write_board(folder.path(), "p", "T & t", "n", &panels).unwrap();
        let svg = std::fs::read_to_string(folder.path().join("p.svg")).unwrap();
        for drawn in [
            "T &amp; t",
            "x=\"0\" y=\"56\"",
            "x=\"760\" y=\"360\"",
            "width=\"1520\" height=\"664\"",
            "a &lt;b&gt;",
        ] {
            assert!(svg.contains(drawn), "{drawn}: {svg}");
        }
        assert_eq!((svg.matches("no data").count(), svg.matches("full").count()), (1, 1), "{svg}");
    }
}
