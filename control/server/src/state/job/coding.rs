//! In which codec a communicator's tensors travel: what its ranks let be lost, and what control chooses
//! within that.
//!
//! The choice is made anew for every epoch, and whenever control plans: where it is another than that of the
//! epoch in use, a new epoch follows that goes on with all links.

use crate::state::breach::Breach;
use crate::state::ctx::Ctx;
use crate::state::effects::Effects;
use crate::state::job::codec::{CodecState, budget};
use crate::state::job::communicator::{Communicator, MOST_DIRECT};
use crate::state::job::communicators::Communicators;
use crate::state::job::lifecycle::{EpochConfig, Planned};
use crate::state::output::SessionId;
use crate::state::reason::Reason;
use crate::state::view::View;
use crate::state::world::iterations::Operations;
use harmonaize_abi::CommunicatorId;
use harmonaize_api::v1;
use harmonaize_codec::{Budget, Codec, Level};
use harmonaize_planner::{
    Bytes, CodecChoice, CodecRates, CodecReason, CodecRequest, DirectedLink, HostId, coded_ratio,
    common_levels, exchange_rate, line_rate, nonzero_ratio,
};
use std::collections::BTreeMap;
use std::time::Duration;

/// What an operation by a codec came to, or would have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CodecOutcome {
    /// The codec, and what it takes.
    pub level: Level,
    /// What was lost, as vNMSE.
    pub loss: f64,
    /// The bytes that were sent, relative to the exact ones.
    pub ratio: f64,
}

/// How the next epoch of a communicator has its tensors travel, by this plan.
pub(crate) fn choose_coding(view: &View<'_>, id: CommunicatorId, planned: Option<&Planned>) -> CodecChoice {
    let ctx = &view.ctx;
    let Some(known) = ctx.communicators.get(&id) else {
        return CodecChoice::exact(Budget::Exact, CodecReason::Exact);
    };
    let CodecState { agreed: budget, controller, usage, .. } = &known.coding;
    let lossless = *budget == Budget::Exact;
    let sums = || known.current().is_some_and(|current| current.aggregation.grant.is_some());
    let exact = if lossless && !controller.has_learned(ctx.now, Codec::NonzeroBlocks) {
        Some(CodecReason::Exact)
    } else if view.agreements.reduction_policy(id).ordered {
        Some(CodecReason::Ordered)
    } else if lossless && sums() {
        Some(CodecReason::Aggregated)
    } else if !ctx.settings.compression {
        Some(CodecReason::Disabled)
    } else if known.members.len() < 2 {
        Some(CodecReason::OneHost)
    } else {
        (known.members.len() > MOST_DIRECT).then_some(CodecReason::TooManyHosts)
    };
    if let Some(reason) = exact {
        return CodecChoice::exact(budget.clone(), reason);
    }
    let told = ctx.iterations.get(&id).map_or(0, Operations::dominant_bytes);
    let request = CodecRequest {
        now: ctx.now,
        budget,
        controller,
        current: known.codec(),
        levels: &levels_of(ctx, known),
        hosts: known.members.len(),
        operation: Bytes(if told == 0 { view.hints.dominant_bytes(id) } else { told }),
        copy_threshold: known.tuning.copy_threshold,
        chunk: known.tuning.chunk,
    };
    request.choose(|bytes| {
        let coded = exchange_rate(usage, &view.conditions(), &takers(view, id)).0 as f64 / 8.0;
        let members: Vec<HostId> = known.members.iter().map(|member| member.host).collect();
        let line = line_rate(&ctx.settings.topology, &members).0 as f64 / 8.0;
        let exact = planned.map_or(coded, |planned| line / planned.slowdown.max(1.0));
        CodecRates { exact, coded, overlapped: view.hints.overlapped(ctx, id, bytes) }
    })
}

/// Returns what all agents of a communicator take.
pub(crate) fn levels_of(ctx: &Ctx<'_>, known: &Communicator) -> Vec<Level> {
    common_levels(known.members.iter().map(|member| {
        let session = member.session.and_then(|session| ctx.sessions.get(&session));
        session.map_or(&[][..], |session| &session.abilities.codecs)
    }))
}

/// An agent told of an operation: what it lost and sent is what the next choice goes by.
pub(crate) fn coded_outcome(ctx: &Ctx<'_>, told: &v1::Operation) -> Option<CodecOutcome> {
    let (coded, known) =
        (told.compression.as_ref()?, ctx.communicators.get(&CommunicatorId(told.communicator))?);
    let ratio = coded_ratio(known.members.len(), Bytes(told.bytes), Bytes(coded.saved_bytes))?;
    let EpochConfig { epoch, codec: CodecChoice { codec: current, .. }, aggregation, .. } =
        known.current()?;
    // What ran by several epochs was coded by several codecs; sums of an aggregator's codes say nothing of
    // the hosts'.
    if (told.first_epoch, told.last_epoch) != (u64::from(*epoch), u64::from(*epoch)) || aggregation.is_coded()
    {
        return None;
    }
    let levels = levels_of(ctx, known);
    let level = levels.iter().find(|level| level.codec == *current)?;
    Some(CodecOutcome { level: *level, loss: coded.error, ratio })
}

/// An agent reported an operation, and how many zeros are in its tensors. The next choice goes by that,
/// until operations in blocks that are not zeros show what was saved. Of a dense tensor nothing is learned.
pub(crate) fn zeros_outcome(ctx: &Ctx<'_>, told: &v1::Operation) -> Option<CodecOutcome> {
    let inputs = told.ranks.iter().map(|rank| rank.zero_input);
    let ratio = nonzero_ratio(inputs, told.ranks.first().and_then(|rank| rank.zero_output))?;
    let known = ctx.communicators.get(&CommunicatorId(told.communicator))?;
    let dense = !known.coding.controller.heeds_zeros(ctx.now, ratio);
    if dense || known.codec() == Codec::NonzeroBlocks || !ctx.settings.compression {
        return None;
    }
    let mut levels = levels_of(ctx, known).into_iter();
    let level = levels.find(|level| level.codec == Codec::NonzeroBlocks)?;
    Some(CodecOutcome { level, loss: 0.0, ratio })
}

/// A rank wants another budget. An error is a breach of protocol.
pub(crate) fn set_budget(
    communicators: &mut Communicators,
    effects: &mut Effects,
    from: SessionId,
    message: &v1::SetBudget,
) -> Result<(), Breach> {
    let Ok(budget) = budget(message.budget.as_ref()) else { return Err(Breach::Budget) };
    let id = CommunicatorId(message.communicator);
    let Some(known) = communicators.get_mut(&id) else { return Ok(()) };
    let member = known.member_of(from).ok_or(Breach::OtherCommunicator)?;
    if !member.ranks.contains(&message.rank) {
        return Err(Breach::OtherBudget);
    }
    if known.coding.want(message.rank, known.ranks, &budget) {
        effects.budgets.push((id, budget));
    }
    Ok(())
}

/// How many other communicators use each link along their rings.
pub(crate) fn takers(view: &View<'_>, id: CommunicatorId) -> BTreeMap<DirectedLink, u32> {
    let mut takers = BTreeMap::new();
    for (_, known) in view.ctx.communicators.iter().filter(|(other, _)| **other != id) {
        for link in ring_links(view, known) {
            *takers.entry(link).or_default() += 1;
        }
    }
    takers
}

/// Links along a communicator's ring, as far as routes are known, each as often as it is crossed.
pub(crate) fn ring_links(view: &View<'_>, known: &Communicator) -> Vec<DirectedLink> {
    let hops = known.current().map_or_else(Vec::new, |current| view.links.hops(known, current));
    let paths = hops.iter().filter_map(|hop| hop.paths.first());
    paths.flat_map(|path| path.links().iter().copied()).collect()
}

/// Returns another codec if that is the best now, or the ranks agreed on another budget, and why. What was
/// found is remembered.
pub(crate) fn other_codec(now: Duration, known: &mut Communicator, chosen: CodecChoice) -> Option<Reason> {
    let current = &mut known.lifecycle.current_mut()?.codec;
    let same = chosen.same(current);
    known.coding.again = known.coding.controller.retry_at(now).filter(|_| same);
    if let Some(outlook) = &chosen.outlook {
        known.coding.controller.handle_outlook(now, outlook);
    }
    if same {
        current.reason = chosen.reason;
        return None;
    }
    Some(Reason::of_codec(chosen, current))
}

/// Returns why another budget is to be had: the ranks agreed on it.
pub(crate) fn other_budget(view: &View<'_>, id: CommunicatorId) -> Option<Reason> {
    let known = view.ctx.communicators.get(&id).filter(|known| known.is_coded())?;
    let current = known.current()?;
    if known.coding.agreed == current.codec.budget {
        return None;
    }
    Some(Reason::of_codec(choose_coding(view, id, current.plan.as_ref()), &current.codec))
}
