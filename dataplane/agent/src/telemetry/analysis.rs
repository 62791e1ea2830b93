//! Everything that analysis finds in the records, live and replayed alike.

use crate::telemetry::finding::Found;
use harmonaize_analysis::trace::Record;

/// See the module's documentation.
#[derive(Default)]
pub(crate) struct Analysis {}

impl Analysis {
    /// Takes in a record.
    pub(crate) fn take(&mut self, _record: &Record) {}

    /// So late is it now.
    pub(crate) fn advance(&mut self, _now_ns: u64) {}

    /// Nothing more comes: what is open is found as it stands.
    pub(crate) fn finish(&mut self) {}

    /// What was found since the last time.
    pub(crate) fn found(&mut self) -> Vec<Found> {
        Vec::new()
    }
}
