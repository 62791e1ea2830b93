//! The demo's report: one HTML file with its plots, without any outside resource.

use super::changes::Changes;
use super::timeline::Timeline;
use super::views::{View, Views};
use harmonaize_suites::plot::{self, Chart, Series, escape};
use harmonaize_testkit::summary::{Summary, TOLERANCE, WHY};
use std::fmt::Write;

const STYLE: &str = "
:root{color-scheme:light dark;--paper:#fff;--ink:#1a1a1a;--soft:#555;--grid:#ddd;--good:#00704f;--bad:#b00020;
--s0:#0072b2;--s1:#d55e00;--s2:#009e73;--s3:#aa4499;--s4:#3a7ca5}
@media (prefers-color-scheme:dark){:root{--paper:#16181c;--ink:#e8e8e8;--soft:#aaa;--grid:#3a3d44;--good:#3ddc97;
--bad:#ff6b81;--s0:#56b4e9;--s1:#f0a35e;--s2:#2fd3a0;--s3:#e58fd6;--s4:#f0e442}}
body{background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:1rem 0}td,th{text-align:left;padding:.25rem .9rem .25rem 0;border-bottom:1px solid var(--grid)}
td.n{text-align:right;font-variant-numeric:tabular-nums}.good{color:var(--good)}.bad{color:var(--bad)}small{color:var(--soft)}";

/// The rows of the table at the demo's end: what, figure.
pub fn rows(verdict: &Summary) -> Vec<(String, String)> {
    let megabytes = |bytes: f64| format!("{:.1} MB/s", bytes / 1e6);
    let share = |share: f64| format!("{:.0}%", share * 100.0);
    let row = |what: &str, figure: String| (what.to_owned(), figure);
    vec![
        row("Steps", verdict.steps.len().to_string()),
        row("Time", format!("{:.1} s", verdict.seconds)),
        row(
            "Time in communication, a worker's mean (with waiting for late workers)",
            format!("{:.1} s, {}", verdict.communication, share(verdict.communication / verdict.seconds)),
        ),
        row("AllReduce a step", format!("{:.2} MB of f32", verdict.bytes as f64 / 1e6)),
        row("AllReduce algbw, median step", megabytes(verdict.algbw)),
        row("AllReduce busbw, median step", megabytes(verdict.busbw)),
        row(
            "Share of the ring's bound at line rate, the other tenant on the same links",
            share(verdict.share),
        ),
        row("Use of the links by both tenants, of line rate", share(verdict.used)),
        row("Accuracy on the test images", format!("{:.1}%", verdict.accuracy * 100.0)),
        row("AllToAll rounds of the other tenant", verdict.rounds.to_string()),
        row("AllToAll algbw, median round of the usual size", megabytes(verdict.alltoall_algbw)),
        row("AllToAll bytes checked", format!("{:.1} MB", verdict.verified_bytes as f64 / 1e6)),
    ]
}

fn series(name: &str, points: impl Iterator<Item = (f64, f64)>) -> Series {
    Series { name: name.to_owned(), points: points.collect() }
}

fn charts(verdict: &Summary) -> Vec<Chart> {
    let steps = || verdict.steps.iter().enumerate().map(|(number, step)| (number as f64, step));
    let bus = 2.0 * (verdict.workers as f64 - 1.0) / verdict.workers as f64;
    let last = verdict.steps.len().saturating_sub(1) as f64;
    let chart = |title: &str, x: &str, y: &str, logarithmic, series| Chart {
        title: title.to_owned(),
        x: x.to_owned(),
        y: y.to_owned(),
        logarithmic,
        series,
        marks: Vec::new(),
    };
    vec![
        chart(
            "Loss",
            "step",
            "mean cross entropy",
            true,
            vec![
                series(&format!("{} workers", verdict.workers), steps().map(|(at, step)| (at, step.loss))),
                series("one process", steps().map(|(at, step)| (at, step.reference))),
            ],
        ),
        chart(
            "Difference of the two curves",
            "step",
            "relative difference of loss",
            true,
            vec![
                series(
                    "difference",
                    steps().map(|(at, step)| (at, (step.loss - step.reference).abs() / step.reference.abs())),
                ),
                series("tolerance", [(0.0, TOLERANCE), (last, TOLERANCE)].into_iter()),
            ],
        ),
        chart(
            "Communication a step",
            "step",
            "milliseconds",
            false,
            vec![series("AllReduce", steps().map(|(at, step)| (at, step.collective * 1e3)))],
        ),
        chart(
            "Bandwidth over time",
            "seconds",
            "MB/s",
            false,
            vec![
                series(
                    "AllReduce busbw",
                    verdict
                        .steps
                        .iter()
                        .map(|step| (step.at, verdict.bytes as f64 / step.collective.max(1e-9) * bus / 1e6)),
                ),
                series(
                    "AllToAll algbw",
                    verdict
                        .exchange
                        .iter()
                        .filter(|round| {
                            round.bytes >= 1 << 18 && round.at >= 0.0 && round.at <= verdict.seconds
                        })
                        .map(|round| (round.at, round.bytes as f64 / round.collective.max(1e-9) / 1e6)),
                ),
            ],
        ),
    ]
}

/// What the closed loop did: when, and how bandwidth and links went meanwhile.
fn timeline(html: &mut String, verdict: &Summary, timeline: &Timeline) {
    html.push_str("<h2>A foreign flow on a spine</h2>\n<p>");
    html.push_str(&escape(&timeline.story));
    html.push_str("</p>\n<table>\n");
    for (number, event) in timeline.events.iter().enumerate() {
        let _ = writeln!(
            html,
            "<tr><td class=\"n\">{}</td><td class=\"n\">{:.3} s</td><td>{}</td></tr>",
            number + 1,
            event.at,
            escape(&event.what)
        );
    }
    html.push_str("</table>\n");
    let bus = 2.0 * (verdict.workers as f64 - 1.0) / verdict.workers as f64;
    let rate = |step: &harmonaize_testkit::summary::Step| {
        verdict.bytes as f64 / step.collective.max(1e-9) * bus / 1e6
    };
    let steps = verdict.steps.iter().map(|step| (step.at, rate(step)));
    let loads = timeline.loads.iter().map(|(name, points)| series(name, points.iter().copied()));
    let charts: [(&str, &str, Vec<Series>); 3] = [
        ("AllReduce of the training", "busbw, MB/s", vec![series("busbw", steps)]),
        ("Load of the links to and from the spines", "Mbit/s", loads.collect()),
        ("Plans of the training", "epoch", vec![series("epoch", timeline.epochs.iter().copied())]),
    ];
    for (title, y, series) in charts {
        let chart = Chart {
            title: title.to_owned(),
            x: "seconds".to_owned(),
            y: y.to_owned(),
            logarithmic: false,
            series,
            marks: timeline.events.iter().map(|event| event.at).collect(),
        };
        html.push_str(&chart.svg());
    }
}

/// What the provider saw and did, beside what each tenant was told.
fn views(html: &mut String, views: &Views) {
    html.push_str(
        "<h2>What the provider knows, and what tenants are told</h2>\n<p>Tenants hear what lets them adapt, once a second at most: of \
         their own communicators, without a name of a host, link or neighbour. Tenant B asks for nothing and hears nothing.</p>\n<table>\n\
         <tr><th></th><th>provider</th><th>tenant A is told</th><th>tenant C is told</th></tr>\n",
    );
    columns(html, &views.views);
    html.push_str("</table>\n<h2>Tenant C's requests</h2>\n<table>\n");
    for (what, figure) in &views.figures {
        let _ = writeln!(html, "<tr><td>{}</td><td class=\"n\">{}</td></tr>", escape(what), escape(figure));
    }
    html.push_str("</table>\n");
}

/// What happened to the training that reacts: the provider's view beside the tenant's.
fn changes(html: &mut String, changes: &Changes) {
    html.push_str(
        "<h2>A tenant that reacts, and one that adopts nothing</h2>\n<p>Tenant A trains on with a rank a host, hears the provider's events and \
         leaves choices to it. Others fill both spines; a host is drained and taken away; a host is lost without notice; both come back. \
         Tenant D sends 512 KiB every 200 ms by TCP of its own between two hosts that have no agent; it is told nothing and asks for \
         nothing.</p>\n<table>\n<tr><th></th><th>provider</th><th>tenant A is told</th><th>tenant A does</th></tr>\n",
    );
    columns(html, &changes.views);
    html.push_str("</table>\n<table>\n");
    for (what, figure) in &changes.figures {
        let _ = writeln!(html, "<tr><td>{}</td><td class=\"n\">{}</td></tr>", escape(what), escape(figure));
    }
    html.push_str("</table>\n");
    let charts = [
        ("AllReduce of the training that reacts", "milliseconds", &changes.collectives),
        ("What it accumulates", "micro-batches a rank", &changes.accumulated),
    ];
    for (title, y, points) in charts {
        let chart = Chart {
            title: title.to_owned(),
            x: "seconds".to_owned(),
            y: y.to_owned(),
            logarithmic: false,
            series: vec![series(y, points.iter().copied())],
            marks: changes.marks.clone(),
        };
        html.push_str(&chart.svg());
    }
}

/// Rows of three columns, in one of which something stands.
fn columns(html: &mut String, views: &[View]) {
    for view in views {
        let cell = |whose: usize| if view.owner == whose { escape(&view.what) } else { String::new() };
        let _ = writeln!(
            html,
            "<tr><td class=\"n\">{:.3} s</td><td>{}</td><td>{}</td><td>{}</td></tr>",
            view.at,
            cell(0),
            cell(1),
            cell(2)
        );
    }
}

/// The page. `setting` describes fabric, machine and command, a sentence each.
pub fn page(
    summary: &Summary,
    timeline: &Timeline,
    (views, changes): (&Views, &Changes),
    setting: &[String],
) -> String {
    let (class, word) = match (summary.passed, summary.checks.iter().all(|check| check.passed)) {
        (true, true) => ("good", "All checks passed"),
        (true, false) => ("good", "All results right, with a warning"),
        (false, _) => ("bad", "A check failed"),
    };
    let mut html = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" \
         content=\"width=device-width,initial-scale=1\"><title>harmonaize demo</title><style>{STYLE}{}</style></head>\n\
         <body><h1>Four tenants on {} hosts</h1>\n<p>Tenant A trains a classifier of handwritten digits on {} workers; its \
         gradients go through the provider's AllReduce. Tenant B keeps exchanging by AllToAll on the same links, tenant C answers requests \
         by small AllReduces. Then tenant A trains so that it reacts to what it is told, beside tenant D, which adopts nothing.</p>\n\
         <p class=\"{class}\"><strong>{word}.</strong></p>\n<table>\n",
        plot::STYLE,
        summary.hosts,
        summary.workers,
    );
    // Writing to a String cannot fail.
    for check in &summary.checks {
        let (class, mark) = (if check.passed { "good" } else { "bad" }, check.label());
        let _ = writeln!(
            html,
            "<tr><td class=\"{class}\">{mark}</td><td>{}<br><small>{}</small></td></tr>",
            escape(&check.what),
            escape(&check.found)
        );
    }
    html.push_str("</table>\n<h2>Figures</h2>\n<table>\n");
    for (what, figure) in rows(summary) {
        let _ = writeln!(html, "<tr><td>{}</td><td class=\"n\">{}</td></tr>", escape(&what), escape(&figure));
    }
    html.push_str("</table>\n");
    self::timeline(&mut html, summary, timeline);
    self::views(&mut html, views);
    self::changes(&mut html, changes);
    for chart in charts(summary) {
        html.push_str(&chart.svg());
    }
    let _ = write!(html, "<h2>Why {TOLERANCE:e}</h2>\n<p>{}</p>\n<h2>How it ran</h2>\n<ul>\n", escape(WHY));
    for sentence in setting {
        let _ = writeln!(html, "<li>{}</li>", escape(sentence));
    }
    html.push_str(
        "</ul>\n<p><small>Data: Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak (1998), UCI Machine \
         Learning Repository, doi 10.24432/C50P49, CC BY 4.0.</small></p>\n</body></html>\n",
    );
    html
}

#[cfg(test)]
mod tests {
    use super::super::timeline::Event;
    use super::*;
    use harmonaize_testkit::summary::{Check, Round, Step};

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

    #[test]
    fn the_page_stands_alone_and_escapes_text() {
        let html = page(&sample_summary(true), &seen(), (&sample_views(), &reacting()), &["<script>".into()]);
        assert_eq!(html.matches("<svg").count(), 9);
        assert_eq!(html.matches("</svg>").count(), 9);
        for outside in ["http:", "https:", "src=", "href=", "url(", "@import", "<script"] {
            assert!(!html.contains(outside), "{outside}");
        }
        for text in [
            "a &lt; b",
            "c &amp; d",
            "spine0 &amp; half",
            "0.080 s</td><td>h0 tells",
            "&lt;script&gt;",
            "prefers-color-scheme:dark",
            "97.5%",
            "<td></td><td></td><td>Congestion(&lt;Mild&gt;)</td>",
            "4.0 ms",
            "<td></td><td>Maintenance</td><td></td>",
            "17.0 ms",
        ] {
            assert!(html.contains(text), "{text}");
        }
        assert!(
            !html.contains("FAILED")
                && page(&sample_summary(false), &seen(), (&sample_views(), &reacting()), &[])
                    .contains("FAILED")
        );
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
