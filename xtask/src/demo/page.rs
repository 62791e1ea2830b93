//! The demo's report: one HTML file with its plots, without any outside resource.

use super::changes::Changes;
use super::schedule;
use super::timeline::Timeline;
use super::trade::Trade;
use super::views::{View, Views};
use anyhow::Result;
use harmonaize_plot::{Axes, Chart, Series, figure};
use harmonaize_testkit::summary::{Round, Step, Summary, TOLERANCE, WHY};
use maud::{Markup, html};

/// The rows of the table at the demo's end: what, figure.
pub fn rows(summary: &Summary) -> Vec<(String, String)> {
    let megabytes = |bytes: f64| format!("{:.1} MB/s", bytes / 1e6);
    let share = |share: f64| format!("{:.0}%", share * 100.0);
    let row = |what: &str, figure: String| (what.to_owned(), figure);
    vec![
        row("Steps", summary.steps.len().to_string()),
        row("Time", format!("{:.1} s", summary.seconds)),
        row(
            "Time in communication, a worker's mean (with waiting for late workers)",
            format!("{:.1} s, {}", summary.communication, share(summary.communication / summary.seconds)),
        ),
        row("AllReduce a step", format!("{:.2} MB of f32", summary.bytes as f64 / 1e6)),
        row("AllReduce algbw, median step", megabytes(summary.algbw)),
        row("AllReduce busbw, median step", megabytes(summary.busbw)),
        row(
            "Share of the ring's bound at line rate, the other tenant on the same links",
            share(summary.share),
        ),
        row("Use of the links by both tenants, of line rate", share(summary.used)),
        row("Accuracy on the test images", format!("{:.1}%", summary.accuracy * 100.0)),
        row("AllToAll rounds of the other tenant", summary.rounds.to_string()),
        row("AllToAll algbw, median round of the usual size", megabytes(summary.alltoall_algbw)),
        row("AllToAll bytes checked", format!("{:.1} MB", summary.verified_bytes as f64 / 1e6)),
    ]
}

fn series(name: &str, points: impl Iterator<Item = (f64, f64)>) -> Series {
    Series { name: name.to_owned(), points: points.collect() }
}

/// A chart of the page.
fn chart(
    (title, x, y): (&str, &str, &str),
    axes: Axes,
    series: Vec<Series>,
    marks: &[f64],
) -> Result<Markup> {
    let [title, x, y] = [title, x, y].map(str::to_owned);
    figure(&Chart { title, x, y, axes, series, marks: marks.to_vec() })
}

fn charts(summary: &Summary) -> Result<Vec<Markup>> {
    let steps = || summary.steps.iter().enumerate().map(|(number, step)| (number as f64, step));
    let last = summary.steps.len().saturating_sub(1) as f64;
    let difference = |step: &Step| (step.loss - step.reference).abs() / step.reference.abs();
    let usual = |round: &&Round| round.bytes >= 1 << 18 && (0.0..=summary.seconds).contains(&round.at);
    let exchanged = summary.exchange.iter().filter(usual);
    let algbw = |round: &Round| round.bytes as f64 / round.collective.max(1e-9) / 1e6;
    let loss = vec![
        series(&format!("{} workers", summary.workers), steps().map(|(at, step)| (at, step.loss))),
        series("one process", steps().map(|(at, step)| (at, step.reference))),
    ];
    let differences = vec![
        series("difference", steps().map(|(at, step)| (at, difference(step)))),
        series("tolerance", [(0.0, TOLERANCE), (last, TOLERANCE)].into_iter()),
    ];
    let times = vec![series("AllReduce", steps().map(|(at, step)| (at, step.collective * 1e3)))];
    let rates = vec![
        series("AllReduce busbw", summary.steps.iter().map(|step| (step.at, busbw(summary, step)))),
        series("AllToAll algbw", exchanged.map(|round| (round.at, algbw(round)))),
    ];
    [
        (("Loss", "step", "mean cross entropy"), Axes::LogY, loss),
        (("Difference of the two curves", "step", "relative difference of loss"), Axes::LogY, differences),
        (("Communication a step", "step", "milliseconds"), Axes::Linear, times),
        (("Bandwidth over time", "seconds", "MB/s"), Axes::Linear, rates),
    ]
    .into_iter()
    .map(|(names, axes, series)| chart(names, axes, series, &[]))
    .collect()
}

/// A step's busbw in MB/s.
fn busbw(summary: &Summary, step: &Step) -> f64 {
    let bus = 2.0 * (summary.workers as f64 - 1.0) / summary.workers as f64;
    summary.bytes as f64 / step.collective.max(1e-9) * bus / 1e6
}

/// What the closed loop did: when, and how bandwidth and links went meanwhile.
fn timeline(summary: &Summary, timeline: &Timeline) -> Result<Markup> {
    let steps = summary.steps.iter().map(|step| (step.at, busbw(summary, step)));
    let loads = timeline.loads.iter().map(|(name, points)| series(name, points.iter().copied()));
    let marks: Vec<f64> = timeline.events.iter().map(|event| event.at).collect();
    let charts = [
        ("AllReduce of the training", "busbw, MB/s", vec![series("busbw", steps)]),
        ("Load of the links to and from the spines", "Mbit/s", loads.collect()),
        ("Plans of the training", "epoch", vec![series("epoch", timeline.epochs.iter().copied())]),
    ]
    .map(|(title, y, series)| chart((title, "seconds", y), Axes::Linear, series, &marks));
    Ok(html! {
        h2 { "Cross traffic on a spine" }
        p { "Numbers in the charts are those of the table." }
        table {
            @for (number, event) in (1..).zip(&timeline.events) {
                tr { td.n { (number) } td.n { (format!("{:.3} s", event.at)) } td { (event.what) } }
            }
        }
        @for chart in charts { (chart?) }
    })
}

/// A table of names and figures.
fn figures(rows: &[(String, String)]) -> Markup {
    html! { table { @for (what, figure) in rows { tr { td { (what) } td.n { (figure) } } } } }
}

/// What the provider saw and did, beside what each tenant was told.
fn views(views: &Views) -> Markup {
    html! {
        h2 { "What the provider knows, and what tenants are told" }
        p {
            "Tenants hear what lets them adapt, once a second at most: of their own communicators, without a name of a host, link or \
             neighbour. Tenant B asks for nothing and hears nothing."
        }
        (columns(["provider", "tenant A is told", "tenant C is told"], &views.views))
        h2 { "Tenant C's requests" }
        (figures(&views.figures))
    }
}

/// What happened to the training that reacts: the provider's view beside the tenant's.
fn changes(changes: &Changes) -> Result<Markup> {
    let charts = [
        ("AllReduce of the training that reacts", "milliseconds", &changes.collectives),
        ("What it accumulates", "micro-batches a rank", &changes.accumulated),
    ]
    .map(|(title, y, points)| {
        chart((title, "seconds", y), Axes::Linear, vec![series(y, points.iter().copied())], &changes.marks)
    });
    Ok(html! {
        h2 { "A tenant that reacts, and one that adopts nothing" }
        p {
            "Tenant A trains on with a rank a host, hears the provider's events and leaves choices to it. Others fill both spines; a \
             host is drained and taken away; a host is lost without notice; both come back. Tenant D sends 512 KiB every 200 ms by \
             TCP of its own between two hosts that have no agent; it is told nothing and asks for nothing."
        }
        (columns(["provider", "tenant A is told", "tenant A does"], &changes.views))
        (figures(&changes.figures))
        @for chart in charts { (chart?) }
    })
}

/// Rows of three columns, in one of which something stands.
fn columns(heads: [&str; 3], views: &[View]) -> Markup {
    html! {
        table {
            tr { th {} @for head in heads { th { (head) } } }
            @for view in views {
                tr {
                    td.n { (format!("{:.3} s", view.at)) }
                    @for owner in 0..3 { td { @if view.owner == owner { (view.what) } } }
                }
            }
        }
    }
}

/// The page. It opens with `picture`, that of the fabric. `setting` describes fabric, machine and command, a sentence each.
///
/// # Errors
/// Where a chart cannot be drawn.
pub fn page(
    summary: &Summary,
    picture: &Markup,
    timeline: &Timeline,
    (views, changes, trade): (&Views, &Changes, &Trade),
    setting: &[String],
) -> Result<String> {
    let (class, word) = match (summary.passed, summary.checks.iter().all(|check| check.passed)) {
        (true, true) => ("good", "All checks passed."),
        (true, false) => ("good", "All results right, with a warning."),
        (false, _) => ("bad", "A check failed."),
    };
    let body = html! {
        h1 { "Four tenants on " (summary.hosts) " hosts" }
        (picture)
        p {
            "Tenant A trains a classifier of handwritten digits on " (summary.workers) " workers; its gradients go through \
             the provider's AllReduce. Tenant B keeps exchanging by AllToAll on the same links, tenant C answers requests by \
             small AllReduces. Then tenant A trains the same model so that it reacts to what it is told, beside tenant D, \
             which adopts nothing. At last tenants A, B and C trade hosts by bids."
        }
        p { (timeline.story) }
        p class=(class) { strong { (word) } }
        table {
            @for check in &summary.checks {
                tr {
                    td class=(if check.passed { "good" } else { "bad" }) { (check.label()) }
                    td { (check.what) br; small { (check.found) } }
                }
            }
        }
        h2 { "Figures" }
        (figures(&rows(summary)))
        (self::timeline(summary, timeline)?)
        (self::views(views))
        (self::changes(changes)?)
        (schedule::section(trade)?)
        @for chart in charts(summary)? { (chart) }
        h2 { "Why " (format!("{TOLERANCE:e}")) }
        p { (WHY) }
        h2 { "How it ran" }
        ul { @for sentence in setting { li { (sentence) } } }
        p {
            small {
                "Data: Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak (1998), UCI Machine Learning \
                 Repository, doi 10.24432/C50P49, CC BY 4.0."
            }
        }
    };
    Ok(harmonaize_plot::page("harmonaize demo", &body))
}

#[cfg(test)]
mod tests {
    use super::super::picture::{self, Host};
    use super::super::timeline::Event;
    use super::super::trade::example::record;
    use super::*;
    use harmonaize_testkit::summary::Check;
    use harmonaize_testkit::topology::{self, Topology};

    fn sample_summary(passed: bool) -> Summary {
        let step = |loss| Step { loss, reference: loss * 1.000_01, collective: 0.02, at: 0.1 };
        Summary {
            passed,
            checks: vec![Check { what: "a < b".into(), passed, found: "c & d".into(), warns: false }],
            workers: 8,
            hosts: 4,
            line_rate: 125e6,
            bytes: 1_204_268,
            seconds: 20.0,
            communication: 5.0,
            algbw: 6e7,
            busbw: 1.05e8,
            share: 0.5,
            used: 0.9,
            accuracy: 0.975,
            largest_difference: 1e-5,
            rounds: 1,
            verified_bytes: 1_000_000,
            alltoall_algbw: 1e7,
            steps: vec![step(2.0), step(1.0)],
            exchange: vec![Round { bytes: 1 << 20, collective: 0.01, at: 0.1 }],
        }
    }

    fn seen() -> Timeline {
        let event = |at, what: &str| Event { at, what: what.to_owned() };
        Timeline {
            story: "spine0 & half".into(),
            spine: Some("spine0".into()),
            events: vec![event(0.05, "the flow begins"), event(0.08, "h0 tells")],
            loads: vec![("leaf0 to spine0".into(), vec![(0.0, 0.0), (0.2, 100.0)])],
            epochs: vec![(0.0, 1.0), (0.2, 2.0)],
            checks: vec![Check { what: "w".into(), passed: false, found: "f".into(), warns: true }],
        }
    }

    fn sample_views() -> Views {
        let view = View { at: 0.5, owner: 2, what: "Congestion(<Mild>)".to_owned() };
        let figures = vec![("p99".to_owned(), "4.0 ms".to_owned())];
        let check = Check { what: "w".into(), passed: true, found: "f".into(), warns: true };
        Views { views: vec![view], figures, check }
    }

    fn reacting() -> Changes {
        Changes {
            views: vec![View { at: 1.25, owner: 1, what: "Maintenance".to_owned() }],
            figures: vec![("D".to_owned(), "17.0 ms".to_owned())],
            collectives: vec![(0.1, 9.0), (0.2, 90.0)],
            accumulated: vec![(0.1, 2.0), (0.2, 16.0)],
            marks: vec![0.15],
            checks: Vec::new(),
        }
    }

    fn picture() -> Markup {
        let topology = Topology::parse(&topology::racks(1, 1, 1, "1Gbit/s")).unwrap();
        let host = Host { agent: true, tenants: vec![('A', "<ranks>".into())] };
        picture::fabric(&topology, &[host], &["h0", "leaf0", "spine0"])
    }

    fn html(passed: bool) -> String {
        let views = (&sample_views(), &reacting(), &Trade::of(&record()));
        page(&sample_summary(passed), &picture(), &seen(), views, &["<script>".into()]).unwrap()
    }

    #[test]
    fn the_page_opens_with_picture_and_story() {
        let html = html(true);
        let at = |text: &str| html.find(text).unwrap_or_else(|| panic!("{text}: {html}"));
        assert!(at("<h1>") < at("<svg") && at("<svg") < at("spine0 &amp; half"));
        assert!(
            at("spine0 &amp; half") < at("All checks passed.") && at("All checks passed.") < at("<table")
        );
        assert_eq!(html.matches("spine0 &amp; half").count(), 1);
    }

    #[test]
    fn the_page_stands_alone_and_escapes_text() {
        let html = html(true);
        assert_eq!(html.matches("<svg").count(), 13);
        assert_eq!(html.matches("</svg>").count(), 13);
        for outside in ["http:", "https:", "src=", "href=", "url(", "@import", "<script"] {
            assert!(!html.contains(outside), "{outside}");
        }
        for text in [
            "a &lt; b",
            "c &amp; d",
            "spine0 &amp; half",
            "0.080 s</td><td>h0 tells",
            "&lt;script&gt;",
            "A: &lt;ranks&gt;",
            "prefers-color-scheme:dark",
            "97.5%",
            "<td></td><td></td><td>Congestion(&lt;Mild&gt;)</td>",
            "4.0 ms",
            "<td></td><td>Maintenance</td><td></td>",
            "17.0 ms",
            "<td>gets h1, h3</td>",
        ] {
            assert!(html.contains(text), "{text}");
        }
        assert!(!html.contains("FAILED") && self::html(false).contains("FAILED"));
    }

    #[test]
    fn the_table_has_what_was_asked_for() {
        let rows = rows(&sample_summary(true));
        let figure =
            |what: &str| rows.iter().find(|(row, _)| row.contains(what)).map(|(_, figure)| figure.as_str());
        assert_eq!(figure("Steps"), Some("2"));
        assert_eq!(figure("Time in communication"), Some("5.0 s, 25%"));
        assert_eq!(figure("AllReduce busbw"), Some("105.0 MB/s"));
        assert_eq!(figure("ring's bound"), Some("50%"));
    }
}
