//! What control shows Prometheus. It is the operator's: nothing of it goes to tenants.

use crate::state::Fact;
use harmonaize_api::v1::FailureKind;
use harmonaize_metrics::{Buckets, Page, label};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Tenants of which breaches are counted by name.
const TENANTS: usize = 1024;

/// Upper bounds of writes to the store, in seconds.
static STORE_SECONDS: [f64; 10] = [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 5.0];

/// Work of the state whose panics are contained. Each is shown from the start: no query sees a series' first value as an increase.
const CONTAINED: [&str; 7] = ["command", "message", "outputs", "session", "shutdown", "store", "timer"];

/// Panics on other threads than the state's: a task that panics ends alone.
static PANICS_ELSEWHERE: AtomicU64 = AtomicU64::new(0);

/// Counts a panic on another thread than the state's.
pub(crate) fn panicked_elsewhere() {
    PANICS_ELSEWHERE.fetch_add(1, Ordering::Relaxed);
}

/// What happened since control began to lead, how often.
#[derive(Debug, Default)]
pub(crate) struct Happened {
    changes: BTreeMap<&'static str, u64>,
    abandoned: u64,
    ended: BTreeMap<FailureKind, u64>,
    closed: u64,
    breaches: BTreeMap<String, u64>,
    sessions_refused: u64,
    /// By the work that panicked.
    panics: BTreeMap<&'static str, u64>,
}

impl Happened {
    /// Counts a fact.
    pub(crate) fn take(&mut self, fact: &Fact) {
        match fact {
            Fact::EpochCurrent { reason, .. } => *self.changes.entry(reason.code()).or_default() += 1,
            Fact::EpochAbandoned { .. } => self.abandoned += 1,
            Fact::Ended { kind, .. } => *self.ended.entry(*kind).or_default() += 1,
            Fact::Closed { .. } => self.closed += 1,
            Fact::SessionRefused { .. } => self.sessions_refused += 1,
            Fact::AgreementBroken { tenant, broken, .. } if !broken.is_empty() => {
                let room = self.breaches.len() < TENANTS || self.breaches.contains_key(tenant);
                let tenant = if room { tenant } else { "other" };
                *self.breaches.entry(tenant.to_owned()).or_default() += 1;
            }
            _ => {}
        }
    }

    /// Counts a panic that was contained.
    pub(crate) fn panicked(&mut self, work: &'static str) {
        *self.panics.entry(work).or_default() += 1;
    }

    /// Adds the counts to a page.
    pub(crate) fn show(&self, page: &mut Page) {
        let help = "Epochs that came to use, by why the plan was changed";
        let family = page.counter("control_plan_changes", "", help);
        for (reason, count) in &self.changes {
            family.count(vec![("reason", (*reason).to_owned())], *count);
        }
        page.counter("control_epochs_abandoned", "", "Epochs that were given up")
            .count(Vec::new(), self.abandoned);
        let family =
            page.counter("control_communicators_ended", "", "Communicators that are over, by how they ended");
        family.count(vec![("kind", "closed".to_owned())], self.closed);
        for (kind, count) in &self.ended {
            let name = kind.as_str_name();
            let name = name.strip_prefix("FAILURE_KIND_").unwrap_or(name).to_lowercase();
            family.count(vec![("kind", name)], *count);
        }
        let family =
            page.counter("control_agreement_breaches", "", "Times that an agreement began not to be kept");
        for (tenant, count) in &self.breaches {
            family.count(vec![("tenant", label(tenant))], *count);
        }
        page.counter("control_sessions_refused", "", "Sessions that control refused or ended")
            .count(Vec::new(), self.sessions_refused);
        let help = "Panics that cost no more than the work in which they were";
        let family = page.counter("control_panics", "", help);
        let mut panics = BTreeMap::from(CONTAINED.map(|work| (work, 0_u64)));
        panics.extend(&self.panics);
        panics.insert("other", PANICS_ELSEWHERE.load(Ordering::Relaxed));
        for (work, count) in panics {
            family.count(vec![("work", work.to_owned())], count);
        }
    }
}

/// What the store's thread has done. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct StoreWrites(Arc<Mutex<(Buckets<10>, u64)>>);

impl Default for StoreWrites {
    fn default() -> Self {
        Self(Arc::new(Mutex::new((Buckets::new(&STORE_SECONDS), 0))))
    }
}

impl StoreWrites {
    /// A group was written, or was not, and that took so long.
    pub(crate) fn wrote(&self, took: Duration, well: bool) {
        let mut writes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        writes.0.observe(took.as_secs_f64());
        writes.1 += u64::from(!well);
    }

    /// Adds them to a page.
    pub(crate) fn show(&self, page: &mut Page) {
        let (times, failed) = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        page.histogram("control_store_write", "seconds", "Writes of groups of changes to the store")
            .buckets(Vec::new(), &times);
        page.counter("control_store_write_errors", "", "Of those, the ones that failed")
            .count(Vec::new(), failed);
    }
}
