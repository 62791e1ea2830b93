//! The report's section on the trade: a picture of who ran on which host, the price, each change with its reason, and what it was worth.

use super::picture::colour;
use super::trade::{Change, Price, Span, Trade};
use anyhow::Result;
use harmonaize_plot::{Axes, Chart, Series, figure};
use maud::{Markup, html};

/// The picture's width, where its scale begins and ends, and the heights of its rows, in its own units.
const WIDTH: f64 = 760.0;
const MARGIN: f64 = 48.0;
const RIGHT: f64 = 750.0;
const TOP: f64 = 24.0;
const ROW: f64 = 30.0;
const BAR: f64 = 22.0;
/// Seconds between two ticks, and the least width of a bar with its job's name inside.
const TICK: usize = 5;
const NAMED: f64 = 70.0;

/// The section.
///
/// # Errors
/// Where a chart cannot be drawn.
pub fn section(trade: &Trade) -> Result<Markup> {
    let dollars = |amount: f64| format!("{amount:.2}");
    Ok(html! {
        h2 { "Two elastic jobs and an inference tenant trade hosts" }
        p {
            "Tenants A and B have an elastic job each, of one to two workers. Tenant C answers requests on two hosts while it has them. \
             Each host has one worker. Runners of all three wait on each host, and say what their job bids. Tenant C changes its bid as \
             its load changes. Control clears its market every two seconds, recalls and offers, and tells runners the price, coarsely. \
             A second counts as an hour of its prices. Workers of A and B run on meanwhile."
        }
        @for sentence in &trade.story { p { (sentence) } }
        (picture(trade))
        (prices(trade)?)
        h3 { "Each change of hosts" }
        p {
            "The reason is what " code { "harmonaize why" } " says. The last column is what an hour of these hosts is worth to the job, by \
             its bids."
        }
        table {
            tr { th {} th { "job" } th { "change" } th { "reason" } th.n { "price, $" } th.n { "worth, $" } }
            @for change in &trade.changes {
                tr {
                    td.n { (format!("{:.1} s", change.at)) }
                    td { (change.job) }
                    td { (what(change)) }
                    td { (change.why) }
                    td.n { (dollars(change.price)) }
                    td.n { (format!("{:+.2}", change.worth)) }
                }
            }
        }
        h3 { "What it was worth" }
        table {
            tr {
                th { "job" } th.n { "hours of hosts" } th.n { "steps or requests" } th.n { "value by its bids, $" }
                th.n { "paid, $" } th.n { "left, $" }
            }
            @for worth in &trade.worth {
                tr {
                    td { (worth.job) }
                    td.n { (format!("{:.1}", worth.host_hours)) }
                    td.n { (worth.done) }
                    td.n { (dollars(worth.value)) }
                    td.n { (dollars(worth.paid)) }
                    td.n { (dollars(worth.value - worth.paid)) }
                }
            }
        }
        h3 { "Tenant C's requests in the trade" }
        table { @for (what, figure) in &trade.requests { tr { td { (what) } td.n { (figure) } } } }
        @if !trade.decided.is_empty() {
            h3 { "Congestion in the trade" }
            table {
                @for (at, what) in &trade.decided { tr { td.n { (format!("{at:.1} s")) } td { (what) } } }
            }
        }
    })
}

/// A change in words.
fn what(change: &Change) -> String {
    let got = (!change.got.is_empty()).then(|| format!("gets {}", change.got.join(", ")));
    let lost = (!change.lost.is_empty()).then(|| format!("loses {}", change.lost.join(", ")));
    got.into_iter().chain(lost).collect::<Vec<_>>().join(", ")
}

/// Where a time is drawn.
fn x(trade: &Trade, seconds: f64) -> f64 {
    let share = seconds / trade.seconds.max(1e-9);
    MARGIN + share.clamp(0.0, 1.0) * (RIGHT - MARGIN)
}

/// Who ran on which host: a row for each host, a bar for each time in which a job had it. Upright lines stand where the price changed.
fn picture(trade: &Trade) -> Markup {
    let rows = trade.hosts.len() as f64;
    let bottom = TOP + rows * ROW;
    let view = format!("0 0 {WIDTH} {}", bottom + ROW + 20.0);
    let top = |row: usize| TOP + row as f64 * ROW;
    let ticks = (0..=trade.seconds.max(0.0) as usize).step_by(TICK);
    html! {
        figure role="img" aria-label=(described(trade)) {
            svg viewBox=(view) style="font:13px system-ui,sans-serif;fill:var(--ink)" {
                @for (row, host) in trade.hosts.iter().enumerate() {
                    text x="0" y=(top(row) + 15.0) { (host) }
                    @for span in trade.spans.iter().filter(|span| span.host == *host) { (bar(trade, span, top(row))) }
                }
                @for price in &trade.prices {
                    @let at = x(trade, price.at);
                    line x1=(at) y1=(TOP - 6.0) x2=(at) y2=(bottom) style="stroke:var(--ink);stroke-dasharray:3 3" {}
                    text x=(at + 3.0) y=(TOP - 9.0) { "$" (format!("{:.2}", price.price)) }
                }
                @if let Some((spine, from, to)) = &trade.congested {
                    @let (start, end) = (x(trade, *from), x(trade, *to));
                    rect x=(start) y=(bottom + 4.0) width=((end - start).max(1.0)) height="8" style="fill:var(--bad)" {}
                    text x=(start) y=(bottom + 26.0) { (spine) " congested" }
                }
                @for tick in ticks {
                    text x=(x(trade, tick as f64)) y=(bottom + 44.0) text-anchor="middle" { (tick) " s" }
                }
            }
        }
    }
}

fn bar(trade: &Trade, span: &Span, top: f64) -> Markup {
    let (start, end) = (x(trade, span.from), x(trade, span.to));
    let width = (end - start).max(1.0);
    let colour = colour(span.tenant);
    let style = format!("fill:{colour};fill-opacity:.3;stroke:{colour};stroke-width:1.5");
    html! {
        rect x=(start) y=(top) width=(width) height=(BAR) rx="3" style=(style) {}
        text x=(start + 5.0) y=(top + 15.0) {
            @if width >= NAMED { (span.job) } @else if width >= 14.0 { (span.tenant) }
        }
    }
}

/// The same in words, for those who do not see it.
fn described(trade: &Trade) -> String {
    let host = |host: &String| {
        let mut on: Vec<&Span> = trade.spans.iter().filter(|span| span.host == *host).collect();
        on.sort_by(|one, other| one.from.total_cmp(&other.from));
        let on: Vec<String> = on
            .into_iter()
            .map(|span| format!("{} from {:.1} to {:.1} s", span.job, span.from, span.to))
            .collect();
        format!("{host} had {}.", if on.is_empty() { "no worker".to_owned() } else { on.join(", ") })
    };
    trade.hosts.iter().map(host).collect::<Vec<_>>().join(" ")
}

/// The price over time, and the load beside it.
fn prices(trade: &Trade) -> Result<Markup> {
    let series = |name: &str, of: fn(&Price) -> f64| {
        let mut points: Vec<(f64, f64)> = Vec::new();
        for price in &trade.prices {
            // A price holds until the next: a step, not a slope.
            points.extend(points.last().map(|(_, before)| (price.at, *before)));
            points.push((price.at, of(price)));
        }
        points.extend(points.last().map(|(_, last)| (trade.seconds, *last)));
        Series { name: name.to_owned(), points }
    };
    let charts = [
        ("Price of a host", "dollars an hour", series("price", |price| price.price)),
        ("Load of tenant C", "requests a second", series("load", |price| price.load)),
    ];
    let drawn = charts.map(|(title, y, series)| {
        let [title, x, y] = [title, "seconds", y].map(str::to_owned);
        figure(&Chart { title, x, y, axes: Axes::Linear, series: vec![series], marks: Vec::new() })
    });
    let [price, load] = drawn;
    let (price, load) = (price?, load?);
    Ok(html! { (price) (load) })
}

#[cfg(test)]
mod tests {
    use super::super::trade::example::record;
    use super::*;

    #[test]
    fn a_bar_stands_for_each_time_of_a_host() {
        let trade = Trade::of(&record());
        let html = picture(&trade).into_string();
        assert_eq!(html.matches("rx=\"3\"").count(), trade.spans.len(), "{html}");
        assert_eq!(html.matches("<line").count(), 3, "a line for each price: {html}");
        for text in [
            ">h3</text>",
            ">$0.90</text>",
            ">spine1 congested</text>",
            ">c/answers</text>",
            ">20 s</text>",
            "h1 had a/pretrain from 1.0 to 6.0 s, c/answers from 7.0 to 18.0 s, a/pretrain from 20.0 to 24.0 s.",
        ] {
            assert!(html.contains(text), "{text}: {html}");
        }
    }

    #[test]
    fn the_section_has_every_change_and_its_worth() {
        let html = section(&Trade::of(&record())).unwrap().into_string();
        assert_eq!((html.matches("<svg").count(), html.matches("</svg>").count()), (3, 3));
        for text in [
            "<td>loses h1</td><td>spare: policy &lt;market&gt;</td><td class=\"n\">0.90</td><td class=\"n\">-0.90</td>",
            "<td>gets h1, h3</td>",
            "<td class=\"n\">+3.60</td>",
            "<td class=\"n\">39.60</td><td class=\"n\">19.80</td><td class=\"n\">19.80</td>",
            "Then tenant C had 20 requests a second. A host cost 0.90 dollars an hour.",
            "17.20 dollars more",
        ] {
            assert!(html.contains(text), "{text}: {html}");
        }
        assert!(!html.contains("Congestion in the trade"), "nothing was decided");
    }

    #[test]
    fn nothing_recorded_is_drawn() {
        let trade = Trade::of(&super::super::trade::Record::default());
        assert!(section(&trade).unwrap().into_string().contains("<svg"));
    }
}
