//! The same analysis on recorded traces: of one host, or of several together.

use crate::telemetry::analysis::Analysis;
use crate::telemetry::finding::Finding;
use crate::telemetry::names::Names;
use harmonaize_abi::Nanos;
use harmonaize_analysis::trace::{self, Record, Replayed};

/// Hands what is found in a trace to `with`, with the names of interfaces then.
///
/// # Errors
/// The bytes are no trace, or end within a record.
pub fn replay(bytes: &[u8], with: impl FnMut(&Finding, &Names)) -> Result<Replayed, trace::Error> {
    let mut replay = Replay::new(with);
    let replayed = trace::replay(bytes, |record| replay.take(record))?;
    replay.end();
    Ok(replayed)
}

/// The same of several hosts' records, made one by [`trace::merge`]. It has external jobs as all the hosts together show them, each
/// host's operations, and the congestion of the host that speaks first.
pub fn replay_merged(records: &[Record], with: impl FnMut(&Finding, &Names)) {
    let mut replay = Replay::new(with);
    records.iter().for_each(|record| replay.take(record));
    replay.end();
}

struct Replay<F> {
    with: F,
    analysis: Analysis,
    names: Names,
    /// The host that spoke first: indices of interfaces are its own.
    host: Option<u64>,
    named: bool,
    offset_ns: i64,
    now: Nanos,
}

impl<F: FnMut(&Finding, &Names)> Replay<F> {
    fn new(with: F) -> Self {
        let (analysis, names) = (Analysis::default(), Names::default());
        Self { with, analysis, names, host: None, named: true, offset_ns: 0, now: Nanos(0) }
    }

    fn take(&mut self, record: &Record) {
        if let Record::Observer(observer) = record {
            self.offset_ns = observer.realtime_offset_ns;
            self.named = *self.host.get_or_insert(observer.host) == observer.host;
        }
        if self.named {
            self.names.take(record);
        }
        self.analysis.take(record);
        self.publish();
        self.now = record.time().max(self.now);
    }

    fn end(mut self) {
        self.analysis.advance(self.now);
        self.analysis.finish();
        self.publish();
    }

    fn publish(&mut self) {
        for found in self.analysis.found() {
            (self.with)(&Finding { time: self.now, offset_ns: self.offset_ns, found }, &self.names);
        }
    }
}
