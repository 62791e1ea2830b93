//! Quantities, times and names as people read them.

use harmonaize_planner::Bytes;
use serde::Serialize;
use std::fmt::Display;
use std::io::Write;
use std::time::{Duration, SystemTime};

/// "0-3,7" for ranks in ascending order.
pub(crate) fn ranks(ranks: &[u32]) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for rank in ranks.iter().copied() {
        match runs.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(rank) => *last = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let run = |(first, last): &(u32, u32)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    };
    runs.iter().map(run).collect::<Vec<_>>().join(",")
}

/// A count with its noun in the right number: "1 switch", "2 switches".
pub(crate) fn number_of<N: Display + PartialEq + From<u8>>(number: N, one: &str, many: &str) -> String {
    let noun = if number == N::from(1) { one } else { many };
    format!("{number} {noun}")
}

/// Three digits and a binary unit.
pub(crate) fn bytes(count: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if count < 1024 {
        return Bytes(count).to_string();
    }
    let step = (count.ilog2() / 10).clamp(1, 6);
    let value = count as f64 / (1_u64 << (step * 10)) as f64;
    let unit = units.get(step as usize - 1).unwrap_or(&"EiB");
    let digits = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
    format!("{value:.digits$}{unit}")
}

/// "350us", "12.3ms", "4.2s", "3min12s", "5h03min".
pub(crate) fn duration(nanos: u64) -> String {
    let seconds = nanos / 1_000_000_000;
    match nanos {
        0..1_000_000 => format!("{}us", nanos / 1000),
        1_000_000..1_000_000_000 => format!("{:.1}ms", nanos as f64 / 1e6),
        1_000_000_000..60_000_000_000 => format!("{:.1}s", nanos as f64 / 1e9),
        60_000_000_000..3_600_000_000_000 => format!("{}min{:02}s", seconds / 60, seconds % 60),
        _ => format!("{}h{:02}min", seconds / 3600, seconds / 60 % 60),
    }
}

/// Three digits and a decimal unit, of bits in a second: "0", "820k", "94.1M", "1.25G".
pub(crate) fn rate(bits: u64) -> String {
    let units = ["", "k", "M", "G", "T", "P", "E"];
    let mut step = (bits.max(1).ilog10() / 3) as usize;
    let mut value = bits as f64 / 1000_f64.powi(step as i32);
    if value >= 999.5 && step > 0 {
        (value, step) = (value / 1000.0, step + 1);
    }
    let unit = units.get(step).unwrap_or(&"E");
    let digits = if step == 0 || value >= 99.95 { 0 } else { 1 + usize::from(value < 9.995) };
    format!("{value:.digits$}{unit}")
}

/// The time of day of CLOCK_REALTIME nanoseconds, in UTC: "20:05:42.123"; "-" for 0.
pub(crate) fn clock(nanos: u64) -> String {
    if nanos == 0 {
        return "-".to_owned();
    }
    let (millis, seconds) = (nanos / 1_000_000 % 1000, nanos / 1_000_000_000);
    let (hours, minutes) = (seconds / 3600 % 24, seconds / 60 % 60);
    format!("{hours:02}:{minutes:02}:{:02}.{millis:03}", seconds % 60)
}

/// A date and time of CLOCK_REALTIME nanoseconds, in UTC: "2025-11-21T20:05:42Z"; "-" for 0.
pub(crate) fn date(nanos: u64) -> String {
    match nanos {
        0 => "-".to_owned(),
        nanos => humantime::format_rfc3339_seconds(SystemTime::UNIX_EPOCH + Duration::from_nanos(nanos))
            .to_string(),
    }
}

/// The time of day when something was, or a date where that is a day ago or more by a clock that reads `now`.
/// A date too where `now` is 0, which is not known; "-" where `then` is 0.
pub(crate) fn moment(now: u64, then: u64) -> String {
    const DAY: u64 = 24 * 3_600_000_000_000;
    if now == 0 || now.saturating_sub(then) >= DAY { date(then) } else { clock(then) }
}

/// How long ago something was, by a clock that reads `now`: "4.2s".
/// A date where `now` is 0, which is not known; "-" where `then` is 0.
pub(crate) fn age(now: u64, then: u64) -> String {
    if now == 0 || then == 0 { date(then) } else { duration(now.saturating_sub(then)) }
}

/// A part of a million as a percentage: "0%", "0.02%", "1.5%", "37%".
pub(crate) fn share(ppm: u64) -> String {
    let percent = ppm as f64 / 10_000.0;
    match ppm {
        0 => "0%".to_owned(),
        1..10_000 => format!("{percent:.2}%"),
        10_000..100_000 => format!("{percent:.1}%"),
        _ => format!("{percent:.0}%"),
    }
}

/// JSON on lines of its own.
pub(crate) fn page(value: &impl Serialize) -> String {
    // Messages have no keys but texts, and so can always be written.
    serde_json::to_string_pretty(value).unwrap_or_default() + "\n"
}

/// Prints a text at once. Returns whether somebody reads: one that has seen enough, such as `head`, is no failure.
pub(crate) fn put(text: &str) -> bool {
    let mut out = std::io::stdout();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_ok()
}

/// JSON on one line.
pub(crate) fn line(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default() + "\n"
}

/// Another's text for a terminal: without control characters, and at most 64 characters of it.
pub(crate) fn clean(text: &str) -> String {
    text.chars().take(64).map(visible).collect()
}

/// A character for a terminal: `?` for one that controls it or reorders what is shown.
pub(crate) fn visible(c: char) -> char {
    if c.is_control() || is_direction(c) { '?' } else { c }
}

/// Characters that reorder what is shown around them.
fn is_direction(c: char) -> bool {
    matches!(c, '\u{200e}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_short() {
        assert_eq!(
            [0, 1023, 1024, 65 << 20, u64::MAX].map(bytes),
            ["0B", "1023B", "1.00KiB", "65.0MiB", "16.0EiB"]
        );
        let times = [350_000, 12_340_000, 4_200_000_000, 192_000_000_000, 18_180_000_000_000];
        assert_eq!(times.map(duration), ["350us", "12.3ms", "4.2s", "3min12s", "5h03min"]);
        assert_eq!(ranks(&[0, 1, 2, 7]), "0-2,7");
        let rates = [0, 7, 820_000, 94_140_000, 999_960_000, 1_250_000_000, u64::MAX];
        assert_eq!(rates.map(rate), ["0", "7", "820k", "94.1M", "1.00G", "1.25G", "18.4E"]);
        assert_eq!([0, 200, 15_000, 370_000].map(share), ["0%", "0.02%", "1.5%", "37%"]);
        assert_eq!([0, 1_763_755_542_123_456_789].map(clock), ["-", "20:05:42.123"]);
    }

    #[test]
    fn what_is_a_day_ago_has_a_date() {
        const SECOND: u64 = 1_000_000_000;
        let then = 1_763_755_542_123_456_789;
        let ago = |seconds: u64| then + seconds * SECOND;
        let moments = [ago(0), ago(86_399), ago(86_400), 0].map(|now| moment(now, then));
        let date = "2025-11-21T20:05:42Z";
        assert_eq!(moments, ["20:05:42.123", "20:05:42.123", date, date]);
        assert_eq!((moment(then, 0), moment(then, ago(1))), ("-".to_owned(), "20:05:43.123".to_owned()));
        assert_eq!([ago(4), ago(7200), 0].map(|now| age(now, then)), ["4.0s", "2h00min", date]);
        assert_eq!((age(then, 0), age(then, ago(1))), ("-".to_owned(), "0us".to_owned()));
    }

    #[test]
    fn one_is_singular_and_all_else_plural() {
        let links = [0_u32, 1, 2].map(|count| number_of(count, "link", "links"));
        assert_eq!(links, ["0 links", "1 link", "2 links"]);
        assert_eq!(number_of(1_usize, "change of plan", "changes of plan"), "1 change of plan");
        assert_eq!(number_of(u64::MAX, "switch", "switches"), "18446744073709551615 switches");
    }

    #[test]
    fn control_characters_are_removed() {
        assert_eq!(clean("a\u{1b}[2J\nb\u{202e}c"), "a?[2J?b?c");
        assert_eq!(clean(&"x".repeat(99)).len(), 64);
    }
}
