//! Sums over operations, as Prometheus's text.

use super::{Ended, Scope};
use harmonaize_abi::{Called, Direction, Status};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::time::Duration;

/// Communicators with series of their own; operations of more count as "other".
const NAMES: usize = 64;

/// Upper bounds of the histogram's buckets, in seconds.
const BOUNDS: [f64; 12] = [1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 10.0];

/// A communicator and a collective.
type Key = (String, &'static str);

#[derive(Debug, Default)]
struct Series {
    /// Operations by outcome.
    outcomes: BTreeMap<String, u64>,
    bytes: u64,
    wire_bytes: u64,
    /// By bucket, each without those before; the last is beyond all bounds.
    buckets: [u64; BOUNDS.len() + 1],
    seconds: f64,
}

/// A figure of a series.
type Value = fn(&Series) -> u64;

/// Sums over operations.
#[derive(Debug, Default)]
pub(super) struct Metrics {
    series: BTreeMap<Key, Series>,
    names: BTreeSet<String>,
}

/// A collective's name, or an end's of a message.
pub(super) fn name(called: &Called) -> &'static str {
    match called {
        Called::Collective(signature) => signature.collective.name(),
        Called::P2p(signature) => match signature.direction {
            Direction::Send => "send",
            Direction::Receive => "receive",
        },
    }
}

/// Bytes of the larger of a rank's tensors, as nccl-tests counts them, and a factor. The factor is busbw over the rate
/// at which the bytes go.
pub(super) fn bytes(called: &Called, ranks: u32) -> (u64, f64) {
    match called {
        Called::Collective(signature) => {
            let block = signature.count.saturating_mul(signature.dtype.size() as u64);
            let blocks = signature.collective.max_blocks(ranks);
            (block.saturating_mul(blocks.into()), signature.collective.bus_factor(ranks))
        }
        Called::P2p(signature) => (signature.bytes().unwrap_or(u64::MAX), 1.0),
    }
}

/// An outcome as one word: `ok`, `rank_lost`; `unfinished` where no end was seen.
pub(super) fn outcome(ended: &Ended) -> String {
    let Some(completion) = &ended.completion else { return "unfinished".to_owned() };
    let Some(status) = Status::from_code(completion.status) else { return "unknown".to_owned() };
    let mut word = String::new();
    for letter in format!("{status:?}").chars() {
        if letter.is_uppercase() && !word.is_empty() {
            word.push('_');
        }
        word.push(letter.to_ascii_lowercase());
    }
    word
}

impl Metrics {
    fn key(&mut self, scope: &Scope, called: &Called) -> Key {
        let room = self.names.len() < NAMES;
        if !self.names.contains(&scope.name) && room {
            self.names.insert(scope.name.clone());
        }
        let known = self.names.contains(&scope.name);
        (if known { scope.name.clone() } else { "other".to_owned() }, name(called))
    }

    pub(super) fn add(&mut self, ended: &Ended) {
        let key = self.key(&ended.scope, &ended.called);
        let series = self.series.entry(key).or_default();
        *series.outcomes.entry(outcome(ended)).or_default() += 1;
        let Some(completion) = ended.completion.filter(|it| it.status == Status::Ok.code()) else { return };
        series.bytes = series.bytes.saturating_add(bytes(&ended.called, ended.scope.ranks).0);
        series.wire_bytes = series.wire_bytes.saturating_add(completion.wire_bytes);
        let seconds = ended.took.as_secs_f64();
        series.seconds += seconds;
        let bucket = BOUNDS.iter().position(|bound| seconds <= *bound).unwrap_or(BOUNDS.len());
        if let Some(count) = series.buckets.get_mut(bucket) {
            *count += 1;
        }
    }

    /// All of it as text.
    pub(super) fn text(&self, rank: Option<u32>, in_flight: usize, lost: u64) -> String {
        let mut text = String::new();
        let own = rank.map_or_else(String::new, |rank| format!("rank=\"{rank}\""));
        let labels = |(communicator, collective): &Key| {
            let comma = if own.is_empty() { "" } else { "," };
            let name = escaped(communicator);
            format!("communicator=\"{name}\",collective=\"{collective}\"{comma}{own}")
        };
        let mut family = |name: &str, kind: &str, help: &str, lines: &dyn Fn(&mut String)| {
            let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
            lines(&mut text);
        };
        let operations = "harmonaize_tenant_operations_total";
        family(operations, "counter", "Operations that have ended.", &|text| {
            for (key, series) in &self.series {
                for (outcome, count) in &series.outcomes {
                    let _ = writeln!(text, "{operations}{{{},outcome=\"{outcome}\"}} {count}", labels(key));
                }
            }
        });
        let sums: [(&str, &str, Value); 2] = [
            (
                "harmonaize_tenant_operation_bytes_total",
                "Bytes of tensors of operations that ended well.",
                |it| it.bytes,
            ),
            ("harmonaize_tenant_wire_bytes_total", "Bytes of tensors that this host sent for them.", |it| {
                it.wire_bytes
            }),
        ];
        for (name, help, value) in sums {
            family(name, "counter", help, &|text| {
                for (key, series) in &self.series {
                    let _ = writeln!(text, "{name}{{{}}} {}", labels(key), value(series));
                }
            });
        }
        let duration = "harmonaize_tenant_operation_duration_seconds";
        family(duration, "histogram", "From the call to the end, of operations that ended well.", &|text| {
            for (key, series) in &self.series {
                let (labels, mut count) = (labels(key), 0);
                let bounds = BOUNDS.iter().map(f64::to_string).chain(["+Inf".to_owned()]);
                for (bound, bucket) in bounds.zip(series.buckets) {
                    count += bucket;
                    let _ = writeln!(text, "{duration}_bucket{{{labels},le=\"{bound}\"}} {count}");
                }
                let _ = writeln!(text, "{duration}_sum{{{labels}}} {}", series.seconds);
                let _ = writeln!(text, "{duration}_count{{{labels}}} {count}");
            }
        });
        let braces = if own.is_empty() { String::new() } else { format!("{{{own}}}") };
        let name = "harmonaize_tenant_operations_in_flight";
        family(name, "gauge", "Operations that have not ended.", &|text| {
            let _ = writeln!(text, "{name}{braces} {in_flight}");
        });
        let name = "harmonaize_tenant_records_lost_total";
        family(name, "counter", "Records that found no room: other figures are too low by these.", &|text| {
            let _ = writeln!(text, "{name}{braces} {lost}");
        });
        text
    }
}

/// A label's value.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// A time for people.
pub(super) fn time(took: Duration) -> String {
    format!("{took:.1?}")
}

#[cfg(test)]
mod tests {
    use super::super::Journal;
    use super::*;
    use harmonaize_abi::{Completion, Dtype, P2pSignature, Rank};
    use std::sync::Arc;
    use std::sync::mpsc::sync_channel;
    use std::time::SystemTime;

    #[test]
    fn communicators_beyond_the_room_are_others() {
        let (sender, _records) = sync_channel(1);
        let journal = Arc::new(Journal::new(sender, Arc::default()));
        let mut metrics = Metrics::default();
        for number in 0..NAMES as u64 + 3 {
            let name = format!("job{number}");
            let scope = Arc::new(Scope { journal: Arc::clone(&journal), name, rank: Rank(0), ranks: 2 });
            let called = Called::P2p(P2pSignature {
                direction: Direction::Send,
                peer: Some(Rank(1)),
                dtype: Dtype::U16,
                count: 5,
            });
            let took = Duration::from_millis(200);
            let completion = Some(Completion::default());
            metrics.add(&Ended { number, scope, called, at: SystemTime::UNIX_EPOCH, took, completion });
        }
        let text = metrics.text(None, 1, 2);
        let others = "communicator=\"other\",collective=\"send\"";
        assert!(text.contains(&format!("operations_total{{{others},outcome=\"ok\"}} 3\n")), "{text}");
        assert!(text.contains(&format!("operation_bytes_total{{{others}}} 30\n")), "{text}");
        assert!(text.contains(&format!("seconds_bucket{{{others},le=\"0.1\"}} 0\n")), "{text}");
        assert!(text.contains(&format!("seconds_bucket{{{others},le=\"0.3\"}} 3\n")), "{text}");
        assert!(text.contains("in_flight 1\n") && text.contains("lost_total 2\n"), "{text}");
        assert_eq!(text.matches("outcome=").count(), NAMES + 1);
    }
}
