//! What metrics tell of communicators: sums that never fall, in few series however many communicators come and go.

use crate::telemetry::own_flows::Traffic;
use std::collections::BTreeMap;

/// Communicators that have series of their own, over all time; others are summed up in `other`.
pub(crate) const COMMUNICATORS: usize = 50;
/// Longest label from a tenant's words.
const LABEL: usize = 64;
/// The label of what is summed up.
const OTHER: &str = "other";

/// What counters came to, in the order in which metrics name them.
pub(crate) type Sums = [u64; 10];

/// One label's series.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SeriesTotals {
    /// Sums over all communicators of the label, those that ended too.
    pub(crate) sums: Sums,
    /// The medians of those that live, added up; none where none lives.
    pub(crate) median_ns: Option<u64>,
}

/// Which communicators have series of their own (those that came first), and what those that ended came to.
#[derive(Clone, Debug, Default)]
pub struct Series {
    labels: Vec<String>,
    /// By label: as many as are known, and `other`.
    ended: BTreeMap<String, Sums>,
}

impl Series {
    /// A communicator begins: it has series of its own if there is room.
    pub(crate) fn begun(&mut self, tenant: &str, name: &str) {
        let label = label(tenant, name);
        if self.labels.len() < COMMUNICATORS && !self.labels.contains(&label) {
            self.labels.push(label);
        }
    }

    /// A communicator is over: what it came to stays.
    pub(crate) fn ended(&mut self, traffic: &Traffic) {
        add(self.ended.entry(self.label_of(traffic)).or_default(), traffic);
    }

    /// Everything that is told while these communicators live.
    pub(crate) fn totals<'a>(
        &self,
        living: impl Iterator<Item = &'a Traffic>,
    ) -> BTreeMap<String, SeriesTotals> {
        let ended = self.ended.iter();
        let mut told: BTreeMap<String, SeriesTotals> = ended
            .map(|(label, sums)| (label.clone(), SeriesTotals { sums: *sums, median_ns: None }))
            .collect();
        for traffic in living {
            let one = told.entry(self.label_of(traffic)).or_default();
            add(&mut one.sums, traffic);
            one.median_ns = Some(one.median_ns.unwrap_or(0).saturating_add(traffic.median_ns()));
        }
        told
    }

    fn label_of(&self, traffic: &Traffic) -> String {
        let label = label(&traffic.tenant, &traffic.name);
        if self.labels.contains(&label) { label } else { OTHER.to_owned() }
    }
}

fn label(tenant: &str, name: &str) -> String {
    let clean = |text: &str| -> String {
        text.chars()
            .map(|c| if c.is_ascii_graphic() && c != '"' && c != '\\' { c } else { '_' })
            .take(LABEL)
            .collect()
    };
    format!("{}/{}", clean(tenant), clean(name))
}

fn add(sums: &mut Sums, traffic: &Traffic) {
    let values = [
        traffic.operations,
        traffic.failed,
        traffic.sent_bytes,
        traffic.received_bytes,
        traffic.coded,
        traffic.refused,
        traffic.saved_bytes,
        traffic.aggregated,
        traffic.fallback,
        traffic.abandoned_sessions,
    ];
    for (sum, value) in sums.iter_mut().zip(values) {
        *sum = sum.saturating_add(value);
    }
}
