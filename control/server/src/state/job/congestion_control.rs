//! By which TCP congestion control a communicator's links go; chosen anew for every epoch.

use crate::state::ctx::Ctx;
use harmonaize_abi::CommunicatorId;
use harmonaize_planner::CongestionChoices;
use std::collections::BTreeSet;

/// For the next epoch of a communicator, by what agents that have a session say of their hosts.
pub(crate) fn choose_congestion(ctx: &Ctx<'_>, id: CommunicatorId) -> CongestionChoices {
    let Some(known) = ctx.communicators.get(&id) else { return CongestionChoices::default() };
    let nothing = BTreeSet::new();
    let hosts = known.members.iter().map(|member| {
        let session = member.session.and_then(|session| ctx.sessions.get(&session));
        (member.host, session.map_or(&nothing, |session| &session.abilities.congestion_controls))
    });
    let overrides = ctx.settings.congestion_controls_of(&known.tenant);
    CongestionChoices::new(&ctx.settings.topology, &hosts.collect::<Vec<_>>(), &overrides)
}
