//! How long control really takes for what it is told, in virtual time or not.

use harmonaize_api::v1::from_agent::Message;
use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

/// By kind of event: how many, and how long they took together and at most.
#[derive(Debug, Default)]
pub(crate) struct Spent(BTreeMap<&'static str, (u32, Duration, Duration)>);

impl Spent {
    /// Does something, and counts what it took.
    pub(super) fn on<T>(&mut self, kind: &'static str, work: impl FnOnce() -> T) -> T {
        let begun = Instant::now();
        let result = work();
        let took = begun.elapsed();
        let (count, together, most) = self.0.entry(kind).or_default();
        (*count, *together, *most) = (*count + 1, *together + took, took.max(*most));
        result
    }
}

impl fmt::Display for Spent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (kind, (count, together, most)) in &self.0 {
            let mean = together.as_secs_f64() * 1e6 / f64::from(*count);
            let (ms, most) = (together.as_secs_f64() * 1e3, most.as_secs_f64() * 1e3);
            writeln!(
                f,
                "  {kind:14} {count:7} times {mean:10.1} us each, {ms:9.1} ms together, {most:8.2} ms at most"
            )?;
        }
        Ok(())
    }
}

/// What a message is called.
pub(super) fn kind(message: &Message) -> &'static str {
    match message {
        Message::Hello(_) => "Hello",
        Message::Join(join) if join.regroup.is_some() => "Regroup",
        Message::Join(_) => "Join",
        Message::Leave(_) => "Leave",
        Message::Prepared(_) => "Prepared",
        Message::Switched(_) => "Switched",
        Message::CongestionReport(_) => "PathCongestion",
        Message::PathsTraced(_) => "PathsTraced",
        Message::PathProbed(_) => "PathProbed",
        Message::Telemetry(_) => "Telemetry",
        _ => "other",
    }
}
