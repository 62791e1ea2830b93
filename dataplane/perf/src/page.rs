//! The report as a page: charts by size, the rows, and what they were measured on.

use crate::arguments::Arguments;
use crate::report::{Place, Row};
use anyhow::Result;
use harmonaize_plot::{Axes, Chart, Series, figure};
use maud::{Markup, html};
use std::time::SystemTime;

/// A way of running, of a row.
type OfRow = fn(&Row) -> Option<&Place>;

/// The ways by name.
const PLACES: [(&str, OfRow); 2] =
    [("out of place", |row| row.out_of_place.as_ref()), ("in place", |row| row.in_place.as_ref())];

/// What rows were measured on.
pub(crate) struct Environment {
    pub(crate) program: String,
    pub(crate) ranks: u32,
    /// Each rank's line about itself.
    pub(crate) lines: Vec<String>,
    /// Sockets of agents, in the order of the ranks that attach there.
    pub(crate) agents: Vec<String>,
    /// When the run began, as RFC 3339 has it.
    pub(crate) date: String,
    /// The options that say how it was measured.
    pub(crate) options: String,
}

impl Environment {
    pub(crate) fn here(arguments: &Arguments, program: &str, ranks: u32, lines: &[String]) -> Self {
        let Arguments { iters, warmup, check, blocking, average, .. } = arguments;
        Self {
            program: program.to_owned(),
            ranks,
            lines: lines.to_vec(),
            agents: arguments.agent.iter().map(|agent| agent.display().to_string()).collect(),
            date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            options: format!("-n {iters} -w {warmup} -c {check} -z {blocking} -a {average}"),
        }
    }
}

/// The page, without any outside resource.
///
/// # Errors
/// Where a chart cannot be drawn.
pub(crate) fn page(environment: &Environment, rows: &[Row], wrong: u64) -> Result<String> {
    let Environment { program, ranks, lines, agents, date, options } = environment;
    let kind = |row: &Row| (row.type_name.clone(), row.op_name.clone(), row.root);
    let groups = rows.chunk_by(|one, other| kind(one) == kind(other));
    let groups = groups.map(|rows| group(program, rows)).collect::<Result<Vec<_>>>()?;
    let body = html! {
        h1 { (program) }
        @if wrong > 0 { p.bad { strong { (wrong) " sizes gave wrong results." } } }
        table {
            tr { td { "harmonaize-perf" } td { (harmonaize_program::version()) } }
            tr { td { "Date" } td { (date) } }
            tr { td { "Ranks" } td { (ranks) } }
            @for agent in agents { tr { td { "Agent" } td { (agent) } } }
            tr { td { "Options" } td { (options) } }
        }
        @for group in groups { (group) }
        h2 { "Ranks" }
        pre { @for line in lines { (line.trim_start_matches('#').trim()) "\n" } }
    };
    Ok(harmonaize_plot::page(&format!("harmonaize-perf: {program}"), &body))
}

/// The rows of one element type, reduction and root.
fn group(program: &str, rows: &[Row]) -> Result<Markup> {
    let Some(first) = rows.first() else { return Ok(html! {}) };
    let op = Some(first.op_name.as_str()).filter(|op| *op != "none").map(|op| format!(", {op}"));
    let root = Some(first.root).filter(|root| *root >= 0).map(|root| format!(", root {root}"));
    let title = format!("{}{}{}", first.type_name, op.unwrap_or_default(), root.unwrap_or_default());
    let chart = |what: &str, unit: &str, value: fn(&Place) -> f64| {
        let series = PLACES.map(|(name, of)| Series {
            name: name.to_owned(),
            points: rows.iter().filter_map(|row| Some((row.bytes as f64, value(of(row)?)))).collect(),
        });
        figure(&Chart {
            title: format!("{program}, {title}: {what}"),
            x: "bytes of a rank's larger tensor".to_owned(),
            y: unit.to_owned(),
            axes: Axes::Sizes,
            series: series.into_iter().filter(|series| !series.points.is_empty()).collect(),
            marks: Vec::new(),
        })
    };
    let (time, busbw) = (
        chart("time", "microseconds", |place| place.time_us)?,
        chart("bus bandwidth", "GB/s", |place| place.busbw)?,
    );
    Ok(html! {
        h2 { (title) }
        (time)
        (busbw)
        table {
            tr {
                th.n { "bytes" } th {} th.n { "time us" } th.n { "algbw GB/s" } th.n { "busbw GB/s" }
                th.n { "wrong" } th.n { "p50 us" } th.n { "p99 us" } th.n { "max us" } th { "slowest rank" }
            }
            @for (row, (name, place)) in rows.iter().flat_map(|row| PLACES.map(|(name, of)| (row, (name, of(row))))) {
                @if let Some(place) = place {
                    tr {
                        td.n { (row.bytes) }
                        td { (name) }
                        @for figure in [place.time_us, place.algbw, place.busbw] { td.n { (format!("{figure:.2}")) } }
                        td.n { (place.wrong.map_or_else(|| "N/A".to_owned(), |wrong| wrong.to_string())) }
                        @for figure in [place.p50_us, place.p99_us, place.max_us] { td.n { (format!("{figure:.2}")) } }
                        td { (place.slowest_rank) " in " (format!("{:.2} us", place.slowest_us)) }
                    }
                }
            }
        }
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // tests alone

    use super::*;

    fn row(bytes: u64, type_name: &str, in_place: bool) -> Row {
        let place =
            Place { time_us: bytes as f64, algbw: 1.0, busbw: 1.5, wrong: Some(0), ..Place::default() };
        Row {
            bytes,
            count: bytes / 4,
            type_name: type_name.into(),
            op_name: "sum".into(),
            root: -1,
            out_of_place: Some(place),
            in_place: in_place.then_some(place),
        }
    }

    #[test]
    fn the_page_stands_alone_with_charts_and_rows() {
        let environment = Environment {
            program: "all_reduce_perf".into(),
            ranks: 2,
            lines: vec!["#  Rank  0 on <h0>".into()],
            agents: vec!["/run/a.sock".into()],
            date: "2026-11-24T00:00:00Z".into(),
            options: "-n 5".into(),
        };
        let rows = [row(1024, "float", true), row(4096, "float", true), row(1024, "half", false)];
        let html = page(&environment, &rows, 0).unwrap();
        // A chart of time and one of busbw for each type.
        assert_eq!(html.matches("<svg").count(), 4);
        for outside in ["http:", "https:", "src=", "href=", "url(", "@import", "<script"] {
            assert!(!html.contains(outside), "{outside}");
        }
        for text in [
            "/run/a.sock",
            "2026-11-24T00:00:00Z",
            "Rank  0 on &lt;h0&gt;",
            harmonaize_program::version(),
            "<h2>float, sum</h2>",
            "4096.00",
        ] {
            assert!(html.contains(text), "{text}: {html}");
        }
        assert_eq!(html.matches("<td>out of place</td>").count(), 3);
        assert_eq!(html.matches("<td>in place</td>").count(), 2);
        assert!(!html.contains("wrong results"));
        assert!(page(&environment, &rows, 2).unwrap().contains("2 sizes gave wrong results"));
    }
}
