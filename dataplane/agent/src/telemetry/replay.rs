//! The same analysis on a recorded trace.

use crate::telemetry::analysis::Analysis;
use crate::telemetry::finding::Finding;
use crate::telemetry::names::Names;
use harmonaize_analysis::trace::{self, Record, Replayed};

/// Hands what is found in a trace to `with`, with the names of interfaces then.
///
/// # Errors
/// The bytes are no trace, or end within a record.
pub fn replay(bytes: &[u8], mut with: impl FnMut(&Finding, &Names)) -> Result<Replayed, trace::Error> {
    let (mut analysis, mut names) = (Analysis::default(), Names::default());
    let (mut offset_ns, mut now_ns) = (0, 0);
    let mut tell = |analysis: &mut Analysis, names: &Names, time_ns, offset_ns| {
        for found in analysis.found() {
            with(&Finding { time_ns, offset_ns, found }, names);
        }
    };
    let replayed = trace::replay(bytes, |record| {
        if let Record::Observer(observer) = record {
            offset_ns = observer.realtime_offset_ns;
        }
        names.take(record);
        now_ns = record.time_ns().max(now_ns);
        analysis.take(record);
        analysis.advance(now_ns);
        tell(&mut analysis, &names, now_ns, offset_ns);
    })?;
    analysis.finish();
    tell(&mut analysis, &names, now_ns, offset_ns);
    Ok(replayed)
}
