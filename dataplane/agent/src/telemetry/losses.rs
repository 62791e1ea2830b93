//! What was lost on the way from the kernel to analysis, kept as sums that only grow.

use harmonaize_abi::Nanos;
use harmonaize_analysis::trace::{Lost, LostKind, Record};

/// Losses since telemetry began; see `TelemetryLosses` in the provider's interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Losses {
    /// Events that found no room in the ring.
    pub events: u64,
    /// Flows that a full table evicted.
    pub flows: u64,
    /// Requests of RoCE whose acknowledgements could not be told apart.
    pub ambiguous: u64,
    /// Marks that found no room in the engine's queue.
    pub marks: u64,
    /// Records that a trace could not be given in time.
    pub records: u64,
    /// Times that measuring began anew somewhere.
    pub count: u64,
    /// Buffers that crossed an interface before the programs there were told of it, or after.
    pub unregistered: u64,
    /// Sockets and queue pairs that found no room, when the flows' ends were last read.
    pub ends: u64,
}

impl Losses {
    /// A loss as analysis is told of it.
    pub(crate) fn lost(&self, time: Nanos, what: LostKind, count: u64) -> Record {
        Record::Lost(Lost { time_ns: time.0, kind: what, count })
    }

    /// Takes in what was lost so far; a record for each kind of which it is more than before.
    pub(crate) fn note(&mut self, time: Nanos, now: Self, into: &mut Vec<Record>) {
        let kinds = [
            (LostKind::Events, &mut self.events, now.events),
            (LostKind::Flows, &mut self.flows, now.flows),
            (LostKind::Marks, &mut self.marks, now.marks),
        ];
        for (what, known, now) in kinds {
            let count = now.saturating_sub(*known);
            if count > 0 {
                *known = now;
                into.push(Record::Lost(Lost { time_ns: time.0, kind: what, count }));
            }
        }
        self.ambiguous = self.ambiguous.max(now.ambiguous);
        self.unregistered = self.unregistered.max(now.unregistered);
        self.ends = self.ends.max(now.ends);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_new_is_told() {
        let (mut gaps, mut records) = (Losses::default(), Vec::new());
        let now = Losses { events: 3, marks: 1, ambiguous: 2, unregistered: 6, ends: 7, ..Losses::default() };
        gaps.note(Nanos(5), now, &mut records);
        gaps.note(Nanos(6), now, &mut records);
        gaps.note(Nanos(7), Losses { events: 4, ..now }, &mut records);
        let told: Vec<_> = records
            .iter()
            .map(|record| match record {
                Record::Lost(lost) => (lost.time_ns, lost.kind, lost.count),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(told, [(5, LostKind::Events, 3), (5, LostKind::Marks, 1), (7, LostKind::Events, 1)]);
        gaps.note(Nanos(8), Losses::default(), &mut records);
        assert_eq!((gaps.events, gaps.ambiguous, gaps.unregistered, gaps.ends), (4, 2, 6, 7));
    }
}
