//! What a choice for a communicator is made by.

use crate::state::ctx::Ctx;
use crate::state::tenants::agreements::Agreements;
use crate::state::tenants::hints::AllHints;
use crate::state::world::aggregators::Aggregators;
use crate::state::world::link_state::LinkState;
use harmonaize_planner::Conditions;

/// All that choices read. They change nothing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'a> {
    /// Settings, agents, communicators and time.
    pub ctx: Ctx<'a>,
    /// What is known of links.
    pub links: &'a LinkState,
    /// What is promised.
    pub agreements: &'a Agreements,
    /// What tenants expect.
    pub hints: &'a AllHints,
    /// Aggregators and whom they serve.
    pub aggregators: &'a Aggregators,
}

impl View<'_> {
    /// Returns what links have left for ours.
    pub(crate) fn conditions(&self) -> Conditions {
        self.links.conditions(&self.ctx.settings.topology, self.ctx.operator.withdrawn())
    }
}

/// Lends the parts that a [`View`] reads.
macro_rules! view {
    ($of:expr, $now:expr) => {
        $crate::state::view::View {
            ctx: $crate::state::ctx::ctx!($of, $now),
            links: &$of.link_state,
            agreements: &$of.agreements,
            hints: &$of.hints,
            aggregators: &$of.aggregators,
        }
    };
}
pub(crate) use view;
