//! What a sweep hands out beside its rows: each run as comma-separated values, and a page with charts.

use super::{Entry, Role, Setting};
use crate::report::Report;
use crate::row::Row;
use anyhow::Result;
use harmonaize_plot::{Axes, Chart, Series, figure};
use maud::{Markup, html};
use std::collections::BTreeMap;

const COLUMNS: &str = "setting,ranks,collective,bytes,contestant,round,p50_us,busbw_gbs,failed";

/// A field that may hold commas.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('"', "'").replace('\n', " "))
}

/// A line for each run of each size, and one for each contestant that failed.
pub(super) fn comma_separated(settings: &[Setting]) -> String {
    let mut text = format!("{COLUMNS}\n");
    for setting in settings {
        let start = format!("{},{},{}", quoted(setting.site.title()), setting.ranks, setting.collective.name);
        for entry in &setting.entries {
            let name = quoted(&entry.name);
            for (round, times) in (1..).zip(&entry.rounds) {
                for (bytes, time) in times {
                    let busbw = setting.busbw(entry, *bytes, *time);
                    text += &format!("{start},{bytes},{name},{round},{time},{busbw},\n");
                }
            }
            if let Some(why) = &entry.failed {
                text += &format!("{start},,{name},,,,{}\n", quoted(why));
            }
        }
    }
    text
}

/// The page, without any outside resource.
pub(super) fn page(settings: &[Setting], report: &Report) -> Result<String> {
    // Who failed, why, and where.
    let mut failures: BTreeMap<(&str, &str), Vec<String>> = BTreeMap::new();
    for setting in settings {
        for entry in &setting.entries {
            if let Some(why) = &entry.failed {
                failures.entry((&entry.name, why)).or_default().push(setting.title());
            }
        }
    }
    let (failed, judged) = report.judged();
    let details = settings.iter().map(details).collect::<Result<Vec<_>>>()?;
    let body = html! {
        h1 { "Collectives beside their peers" }
        @if !failures.is_empty() {
            h2.bad { "Not measured" }
            table {
                @for ((name, why), places) in &failures {
                    tr { td.bad { strong { (name) } } td { (why) br; small { (places.join("; ")) } } }
                }
            }
        }
        h2 { "How it ran" }
        table { @for (name, what) in report.provenance.facts() { tr { td { (name) } td { (what.trim_matches('`')) } } } }
        p {
            "A figure is the median of the rounds; of a round it is the greatest of the ranks' medians of single operations of f32. "
            "Behind it stands the largest less the smallest of the rounds, over the median. "
            "Charts draw of each library the better of the ways to wait."
        }
        h2 { "Bars: " (judged - failed) " of " (judged) " are met" }
        (bars(&report.rows))
        @for setting in details { (setting) }
    };
    Ok(harmonaize_plot::page("harmonaize sweep", &body))
}

fn bars(rows: &[Row]) -> Markup {
    let number = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}"));
    html! {
        table {
            tr {
                th { "case" } th.n { "bytes" } th.n { "ours" } th.n { "reference" } th { "which" }
                th.n { "ratio" } th.n { "bar" } th { "met" }
            }
            @for row in rows.iter().filter(|row| row.bar.is_some()) {
                tr {
                    td { (row.case) }
                    td.n { (row.size) }
                    td.n { (number(row.ours)) }
                    td.n { (number(row.reference)) }
                    td { (row.reference_name) }
                    td.n { (number(row.ratio)) }
                    td.n { (number(row.bar)) }
                    td class=(if row.passed() { "good" } else { "bad" }) { (if row.passed() { "yes" } else { "NO" }) }
                }
            }
        }
    }
}

/// Charts and table of a setting.
fn details(setting: &Setting) -> Result<Markup> {
    let chart = |what: &str, unit: &str, value: &dyn Fn(&Entry, u64, f64) -> f64| {
        figure(&Chart {
            title: format!("{}: {what}", setting.title()),
            x: "bytes of a rank's larger tensor".to_owned(),
            y: unit.to_owned(),
            axes: Axes::Sizes,
            series: series(setting, value),
            marks: Vec::new(),
        })
    };
    let time = chart("time", "microseconds", &|_, _, time| time)?;
    let busbw = chart("bus bandwidth", "GB/s", &|entry, bytes, time| setting.busbw(entry, bytes, time))?;
    Ok(html! {
        h2 { (setting.title()) }
        (time)
        (busbw)
        table {
            tr { th { "p50 us" } @for bytes in &setting.sizes { th.n { (bytes) } } }
            @for entry in &setting.entries {
                tr {
                    td { (entry.name) @if entry.failed.is_some() { " " span.bad { "FAILED" } } }
                    @for bytes in &setting.sizes { td.n { (cell(entry, *bytes)) } }
                }
            }
        }
    })
}

fn cell(entry: &Entry, bytes: u64) -> Markup {
    let times = entry.times(bytes);
    let Some(middle) = entry.median(bytes) else { return html! { "-" } };
    let ends =
        times.iter().fold((f64::INFINITY, 0.0f64), |(low, high), time| (low.min(*time), high.max(*time)));
    let spread = (ends.1 - ends.0) / middle * 100.0;
    html! { (format!("{middle:.1}")) " " small { (format!("{spread:.0}%")) } }
}

/// A line for each library that has figures: at each size its better way.
fn series(setting: &Setting, value: &dyn Fn(&Entry, u64, f64) -> f64) -> Vec<Series> {
    let mut libraries: Vec<(&str, Vec<&Entry>)> = Vec::new();
    for entry in setting.entries.iter().filter(|entry| entry.failed.is_none() || entry.role == Role::Ours) {
        match libraries.iter_mut().find(|(name, _)| *name == entry.library) {
            Some((_, ways)) => ways.push(entry),
            None => libraries.push((&entry.library, vec![entry])),
        }
    }
    let lines = libraries.into_iter().map(|(name, ways)| {
        let best = |bytes: &u64| {
            let timed = ways.iter().filter_map(|entry| Some((*entry, entry.median(*bytes)?)));
            let (entry, time) = timed.min_by(|one, other| one.1.total_cmp(&other.1))?;
            Some((*bytes as f64, value(entry, *bytes, time)))
        };
        Series { name: name.to_owned(), points: setting.sizes.iter().filter_map(best).collect() }
    });
    lines.filter(|line| !line.points.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::setting;
    use super::super::{KIB, Site};
    use super::*;

    fn settings() -> Vec<Setting> {
        let mut one = setting(
            Site::Host,
            &[
                ("ours", Role::Ours, &[10.0, 20.0, 30.0]),
                ("a", Role::Peer, &[40.0]),
                ("a, yielding", Role::Peer, &[30.0]),
                ("<b>", Role::Peer, &[]),
            ],
        );
        one.entries[3].failed = Some("no \"package\",\nnone".into());
        vec![one]
    }

    #[test]
    fn every_run_is_a_line_and_every_failure() {
        let text = comma_separated(&settings());
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 1 + 3 + 1 + 1 + 1, "{text}");
        // 96 KiB on the bus in 10 us.
        assert_eq!(lines[1], "\"one host\",4,all_reduce,65536,\"ours\",1,10,9.8304,");
        assert!(lines[6].ends_with("\"<b>\",,,,\"no 'package', none\""), "{text}");
    }

    #[test]
    fn the_page_stands_alone_and_is_loud_about_failures() {
        let settings = settings();
        let rows = settings.iter().flat_map(Setting::rows).collect();
        let html = page(&settings, &Report::new(rows)).unwrap();
        for outside in ["http:", "https:", "src=", "href=", "url(", "@import", "<script"] {
            assert!(!html.contains(outside), "{outside}");
        }
        for text in [
            "Not measured",
            "&lt;b&gt;",
            "FAILED",
            "20.0 <small>100%",
            "1.50",
            "1.70",
            ">NO<",
            "0 of 2 are met",
        ] {
            assert!(html.contains(text), "{text}: {html}");
        }
        assert_eq!(html.matches("<svg").count(), 2);
    }

    #[test]
    fn charts_draw_the_better_way_of_a_library() {
        let settings = settings();
        let lines = series(&settings[0], &|_, _, time| time);
        let shown: Vec<_> = lines.iter().map(|line| (line.name.as_str(), line.points[0])).collect();
        let at = (64 * KIB) as f64;
        assert_eq!(shown, [("ours", (at, 20.0)), ("a", (at, 30.0))]);
    }
}
