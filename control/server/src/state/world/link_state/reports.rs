//! What is remembered of congestion reports.

use super::ports::Pair;
use crate::state::output::SessionId;
use harmonaize_api::v1;
use harmonaize_planner::{DirectedLink, HostId, Path};
use harmonaize_units::Gcra;
use std::collections::BTreeMap;
use std::time::Duration;

/// Most hosts that are remembered to have spoken against a link.
const MOST_CORROBORATING: usize = 8;

/// What is remembered of congestion reports.
#[derive(Debug, Default)]
pub(crate) struct Reports {
    pub reporters: BTreeMap<HostId, Reporter>,
    /// By pair and port: reports whose way is not known yet.
    pub unplaced: BTreeMap<(Pair, u16, HostId), (Duration, SessionId, v1::CongestionReport)>,
    /// Which hosts spoke against a link.
    pub corroborating: BTreeMap<DirectedLink, Vec<HostId>>,
}

/// What one host's agent may still say, and what of it was not taken.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reporter {
    pub may: Gcra,
    pub taken: u64,
    pub dropped: u64,
    pub refused: u64,
    /// What trains told of those that others congest a path: that it is so, and that it is not.
    pub proven: u64,
    pub refuted: u64,
}

impl Reports {
    /// What became of suspicions since control began, of all agents: proven, and refuted.
    pub(crate) fn suspicions(&self) -> (u64, u64) {
        let reporters = self.reporters.values();
        reporters.fold((0, 0), |(proven, refuted), one| (proven + one.proven, refuted + one.refuted))
    }

    /// For operators: what became of the reports of a host's agent.
    pub(crate) fn add_report_counts(&self, host: HostId, told: &mut v1::HostTelemetry) {
        let Some(reporter) = self.reporters.get(&host) else { return };
        (told.congestion_reports, told.congestion_reports_dropped, told.congestion_reports_refused) =
            (reporter.taken, reporter.dropped, reporter.refused);
        (told.congestion_reports_verified, told.congestion_reports_refuted) =
            (reporter.proven, reporter.refuted);
    }

    /// What an agent's reports came to: taken, dropped as too many, refused as wrong.
    #[cfg(feature = "testing")]
    pub(crate) fn counts(&self, host: HostId) -> (u64, u64, u64) {
        self.reporters
            .get(&host)
            .map_or((0, 0, 0), |reporter| (reporter.taken, reporter.dropped, reporter.refused))
    }

    /// Trains have told whether a host's agent was right that others congest a path.
    pub(crate) fn verified_report(&mut self, host: HostId, proven: bool) {
        let reporter = self.reporters.entry(host).or_default();
        let count = if proven { &mut reporter.proven } else { &mut reporter.refuted };
        *count += 1;
    }

    pub(crate) fn corroborate(&mut self, host: HostId, path: &Path) {
        for link in path.links() {
            let corroborating = self.corroborating.entry(*link).or_default();
            if corroborating.len() < MOST_CORROBORATING && !corroborating.contains(&host) {
                corroborating.push(host);
            }
        }
    }
}
