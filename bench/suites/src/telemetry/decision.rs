//! How long it takes an agent from an event in the kernel to its decision. The agents' metrics give the
//! times.

use super::cost::{Talk, operation};
use super::{METRICS, Suite, Telemetry};
use crate::lab::Lab;
use crate::row::{Case, Row};
use anyhow::{Context, Result, ensure};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// The most at the median, in milliseconds.
const LIMIT_MS: f64 = 1.0;
/// Connections of others that speak now and then, and their messages a second.
const FLOWS: usize = 10;
const MESSAGES: u32 = 50;
/// An AllReduce's bytes, and how many are run back to back.
const BYTES: u64 = 128 << 10;
const OPERATIONS: usize = 4000;
/// The metric.
const NAME: &str = "harmonaize_event_decision_seconds_bucket";
/// How long a scrape may take.
const SCRAPE: Duration = Duration::from_secs(5);

/// Events that are few, which are acted on at once. Beside them are as many as a job of ours makes, which
/// gather.
pub(super) fn decision(suite: &Suite) -> Result<Vec<Row>> {
    let mut lab = suite.lab(Telemetry::Shown)?;
    let mut talk = Talk::begin(&lab, FLOWS, MESSAGES, suite.budget.seconds + 2)?;
    std::thread::sleep(Duration::from_secs(1));
    let before = classes(&lab)?;
    std::thread::sleep(Duration::from_secs(suite.budget.seconds));
    let few = since(&before, &classes(&lab)?);
    talk.end()?;
    let before = classes(&lab)?;
    operation(&mut lab, BYTES, OPERATIONS.min(suite.budget.seconds as usize * 1000))?;
    let many = since(&before, &classes(&lab)?);
    let rows = [
        (format!("{MESSAGES} messages of others a second"), few),
        ("AllReduces back to back".to_owned(), many),
    ];
    rows.iter().map(|(what, lags)| row(what, lags)).collect()
}

/// How many events took no longer than so many seconds; the last are all of them.
type Classes = Vec<(f64, u64)>;

fn row(what: &str, lags: &Classes) -> Result<Row> {
    let all = lags.last().map_or(0, |(_, all)| *all);
    ensure!(all > 0, "no events: {what}");
    let share = |part: f64| lags.iter().find(|(_, within)| *within as f64 >= part * all as f64);
    let within = |part: f64| share(part).map_or(f64::INFINITY, |(bound, _)| bound * 1e3);
    let (half, most) = (within(0.5), within(0.99));
    eprintln!("decision, {what}: of {all} events half within {half} ms, 99% within {most} ms");
    let case = Case::less(
        "telemetry",
        format!("from an event in the kernel to what is decided by it, {what}: ms within which half are"),
        1.0,
    )
    .of(0, 1);
    Ok(case.limit(&[half], LIMIT_MS))
}

/// What came after a reading.
fn since(before: &Classes, now: &Classes) -> Classes {
    let passed =
        |((bound, now), (_, before)): (&(f64, u64), &(f64, u64))| (*bound, now.saturating_sub(*before));
    now.iter().zip(before).map(passed).collect()
}

/// The first host's events so far.
fn classes(lab: &Lab) -> Result<Classes> {
    let host = lab.fabric().hosts().first().context("no host")?;
    let text = host.namespace.enter(|| -> Result<String> {
        let mut stream = TcpStream::connect(METRICS).context("the agent serves no metrics")?;
        stream.set_read_timeout(Some(SCRAPE))?;
        stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    })??;
    read(&text)
}

fn read(text: &str) -> Result<Classes> {
    let mut classes = Vec::new();
    for line in text.lines().filter_map(|line| line.strip_prefix(NAME)) {
        let (bound, count) = line.split_once("\"} ").with_context(|| format!("not a class: {line}"))?;
        let bound = bound.strip_prefix("{le=\"").with_context(|| format!("not a class: {line}"))?;
        let bound = if bound == "+Inf" { f64::INFINITY } else { bound.parse()? };
        classes.push((bound, count.parse()?));
    }
    ensure!(!classes.is_empty(), "no {NAME} in: {text}");
    Ok(classes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_covers_half_of_a_class() {
        let text = |counts: [u64; 3]| {
            let line = |(bound, count): (&str, u64)| format!("{NAME}{{le=\"{bound}\"}} {count}\n");
            let lines = ["0.0005", "0.001", "+Inf"].into_iter().zip(counts).map(line);
            format!("# HELP x\n{}harmonaize_flows 3\n", lines.collect::<String>())
        };
        let (before, now) = (read(&text([5, 5, 5])).unwrap(), read(&text([6, 9, 10])).unwrap());
        let lags = since(&before, &now);
        assert_eq!(lags.iter().map(|(_, count)| *count).collect::<Vec<_>>(), [1, 4, 5]);
        let told = row("here", &lags).unwrap();
        assert_eq!((told.ours, told.passed()), (Some(1.0), true));
        assert!(row("nothing", &since(&now, &now)).is_err());
        assert!(read("nothing").is_err() && read(&format!("{NAME}{{le=\"x\"}} 1")).is_err());
    }
}
