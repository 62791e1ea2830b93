//! What operators ask: replies that change nothing.

mod candidates;
mod dry_run;
mod fabric;
mod metrics;
pub(crate) mod questions;
mod reply;
mod status;

use crate::state::ctx::Ctx;
use crate::state::job::decisions::{Counts, Decision, Decisions};
use crate::state::job::ended::History;
use crate::state::jobs::Jobs;
use crate::state::jobs::what_if::{WhatIf, WhatIfError};
use crate::state::tenants::agreements::Agreements;
use crate::state::tenants::hints::AllHints;
use crate::state::tenants::joins::Joins;
use crate::state::tenants::regroup::Regroups;
use crate::state::tenants::turns::AllTurns;
use crate::state::view::View;
use crate::state::world::aggregators::Aggregators;
use crate::state::world::link_state::LinkState;
use crate::state::world::telemetry::Telemetry;
use harmonaize_planner::Drains;

pub use candidates::{Candidates, NextWorker, Unfit};
pub use dry_run::DryRun;
pub use fabric::{LastOperation, RankTime};

/// What replies to operators read.
#[derive(Clone, Copy, Debug)]
pub struct Queries<'a> {
    pub(crate) ctx: Ctx<'a>,
    pub(crate) links: &'a LinkState,
    pub(crate) agreements: &'a Agreements,
    pub(crate) hints: &'a AllHints,
    pub(crate) aggregators: &'a Aggregators,
    pub(crate) turns: &'a AllTurns,
    pub(crate) telemetry: &'a Telemetry,
    pub(crate) joins: &'a Joins,
    pub(crate) regroups: &'a Regroups,
    pub(crate) decisions: &'a Decisions,
    pub(crate) history: &'a History,
    pub(crate) jobs: &'a Jobs,
}

impl<'a> Queries<'a> {
    /// Returns what was decided lately, oldest first.
    pub fn decisions(self) -> impl Iterator<Item = &'a Decision> {
        self.decisions.recent()
    }

    /// Returns the jobs, what they have, and why.
    pub fn jobs(self) -> harmonaize_api::v1::JobsReply {
        self.jobs.reply(&self.ctx)
    }

    /// Returns what tells which hosts jobs would have if something else were so.
    ///
    /// # Errors
    /// What of the question makes no sense, or names what is not there.
    pub fn what_if(self, request: &harmonaize_api::v1::WhatIfRequest) -> Result<WhatIf, WhatIfError> {
        WhatIf::new(&self.view(), self.jobs, request)
    }

    /// Returns how often control has planned, decided and switched.
    pub fn decision_counts(self) -> Counts {
        self.decisions.counts
    }

    /// Returns what is to carry nothing now.
    pub fn withdrawn(self) -> &'a Drains {
        self.ctx.operator.withdrawn()
    }

    fn view(self) -> View<'a> {
        let Self { ctx, links, agreements, hints, aggregators, .. } = self;
        View { ctx, links, agreements, hints, aggregators }
    }
}
