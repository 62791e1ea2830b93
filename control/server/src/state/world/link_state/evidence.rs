//! What is believed of links: congestion reports that are taken, and who spoke for them.

use super::LinkState;
use crate::state::ctx::Ctx;
use crate::state::effects::Effects;
use crate::state::job::decisions::{Noticed, Trigger};
use crate::state::time::nanos;
use harmonaize_abi::{CongestionCause, CongestionLevel};
use harmonaize_planner::{CongestionReport, DirectedLink, HostId, Path};
use std::collections::BTreeMap;

impl LinkState {
    /// Hands a report to the estimates.
    pub(crate) fn accept(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        report: CongestionReport,
        noticed: Noticed,
    ) {
        let others = report.cross_traffic.is_some() || report.cause != CongestionCause::Own;
        if report.level != CongestionLevel::None
            && others
            && self.estimates.is_significant(&ctx.settings.topology, &report)
        {
            self.reports.corroborate(report.connection.from, &report.path);
        }
        if self.estimates.apply_report(&ctx.settings.topology, nanos(ctx.now), report) {
            effects.want_plan(Trigger::CongestionReport(noticed));
        }
    }

    /// A probe of this host's found a link congested.
    pub(crate) fn corroborate_by_probe(&mut self, host: HostId, path: &Path) {
        let known: Vec<DirectedLink> = self.estimates.links().map(|(link, _)| link).collect();
        if known.iter().any(|link| path.links().contains(link)) {
            self.reports.corroborate(host, path);
        }
    }

    /// Links that are thought to be congested by the report of a single host, and those hosts. One agent's
    /// report moves only communicators that it has a part in.
    pub(crate) fn uncorroborated(&mut self) -> BTreeMap<DirectedLink, HostId> {
        let known: BTreeMap<DirectedLink, bool> =
            self.estimates.links().map(|(link, estimate)| (link, estimate.failed)).collect();
        self.reports.corroborating.retain(|link, _| known.contains_key(link));
        let alone = known.iter().filter(|(_, failed)| !**failed);
        let alone = alone.filter_map(|(link, _)| match self.reports.corroborating.get(link)?.as_slice() {
            [one] => Some((*link, *one)),
            _ => None,
        });
        alone.collect()
    }
}
