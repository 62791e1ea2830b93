//! Links that go over TCP alone, where links go over RDMA otherwise: those of agents that hand over.

use crate::state::ctx::Ctx;
use crate::state::job::communicator::Communicator;
use crate::state::output::SessionId;
use crate::state::reason::Reason;
use std::collections::BTreeSet;

/// Returns the participants of a communicator whose links are to go over TCP alone. None where an agent of it cannot
/// have links both ways.
pub(crate) fn over_tcp(ctx: &Ctx<'_>, known: &Communicator) -> BTreeSet<u32> {
    let can = |session: SessionId| {
        ctx.sessions.get(&session).is_some_and(|session| session.abilities.links_over_tcp)
    };
    if ctx.handovers.is_empty() || !known.members.iter().all(|member| member.session.is_some_and(can)) {
        return BTreeSet::new();
    }
    let members = (0..).zip(&known.members);
    members.filter(|(_, member)| ctx.handovers.has(member.host)).map(|(index, _)| index).collect()
}

/// Whether the link of two participants is one of them.
pub(crate) fn is_over_tcp(participants: &BTreeSet<u32>, (low, high): (u32, u32)) -> bool {
    participants.contains(&low) || participants.contains(&high)
}

/// Why a communicator gets another epoch if its links are to go another way than they do.
pub(crate) fn other_network(ctx: &Ctx<'_>, known: &Communicator) -> Option<Reason> {
    let (current, wanted) = (&known.current()?.over_tcp, over_tcp(ctx, known));
    if *current == wanted {
        return None;
    }
    Some(if wanted.is_subset(current) { Reason::OverRdma } else { Reason::OverTcp })
}
