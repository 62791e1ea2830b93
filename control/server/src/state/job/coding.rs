//! In which codec a communicator's tensors travel: what its ranks let be lost, and what control chooses
//! within that.
//!
//! The choice is made anew for every epoch, and whenever control plans: where it is another than that of the
//! epoch in use, a new epoch follows that goes on with all links.

use crate::state::ctx::Ctx;
use crate::state::job::codec::CodecChoice;
use crate::state::job::communicator::{Communicator, MOST_DIRECT};
use crate::state::job::lifecycle::{EpochConfig, Planned};
use crate::state::output::SessionId;
use crate::state::reason::Reason;
use crate::state::view::View;
use crate::state::world::iterations::Operations;
use harmonaize_api::v1;
use harmonaize_codec::{Budget, Choice, Codec, Level, Outlook};
use harmonaize_planner::{DirectedLink, HostId, exchange_rate, line_rate};
use std::collections::BTreeMap;
use std::time::Duration;

/// Bytes of an operation where agents have told of none.
const TYPICAL: u64 = 16 << 20;

/// Blocks of a tensor that agents look at, of 256 elements each.
const LOOKED: f64 = 32.0;
/// Which blocks are sent, and chunks' headers, for a byte of a tensor.
const PLACES: f64 = 0.001;

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
pub(crate) fn choose_coding(view: &View<'_>, id: u64, planned: Option<&Planned>) -> CodecChoice {
    let (ctx, now) = (&view.ctx, view.ctx.now);
    let Some(known) = ctx.communicators.get(&id) else { return CodecChoice::exact() };
    let budget = known.coding.agreed.clone();
    let exact = |reason: &str| (Codec::EXACT, reason.to_owned(), None);
    let controller = &known.coding.controller;
    let (codec, reason, chosen) =
        if budget == Budget::Exact && !controller.has_learned(now, Codec::NonzeroBlocks) {
            exact("")
        } else if view.agreements.reduction_policy(id).ordered {
            exact("its tenant wants contributions added in one order")
        } else if budget == Budget::Exact
            && known.current().is_some_and(|current| current.aggregation.grant.is_some())
        {
            exact("an aggregator sums")
        } else if !ctx.settings.compression {
            exact("compression is switched off")
        } else if known.members.len() < 2 {
            exact("nothing crosses a wire")
        } else if known.members.len() > MOST_DIRECT {
            exact("too many hosts to send to each other directly")
        } else {
            fastest(view, id, known, planned)
        };
    let finer = chosen
        .as_ref()
        .filter(|_| codec != Codec::EXACT)
        .and_then(|(outlook, _)| controller.finer(&budget, codec, &common_levels(ctx, known), outlook));
    let (outlook, speed) = chosen.unzip();
    let speed = speed.filter(|_| codec != Codec::EXACT).unwrap_or(0);
    CodecChoice { codec, budget, reason, finer, outlook, speed }
}

fn fastest(
    view: &View<'_>,
    id: u64,
    communicator: &Communicator,
    planned: Option<&Planned>,
) -> (Codec, String, Option<(Outlook, u64)>) {
    let ctx = &view.ctx;
    let coding = &communicator.coding;
    let told = ctx.iterations.get(&id).map_or(0, Operations::dominant_bytes);
    let told = if told == 0 { view.hints.dominant_bytes(id) } else { told };
    if told > 0 && told <= communicator.tuning.copy_threshold.0 {
        return (Codec::EXACT, format!("operations of {told} bytes are too small to gain"), None);
    }
    let bytes = if told == 0 { TYPICAL } else { told } as f64;
    let hosts = communicator.members.len() as f64;
    let levels = common_levels(ctx, communicator);
    if levels.is_empty() {
        return (Codec::EXACT, "no codec that all agents take".to_owned(), None);
    }
    let conditions = view.conditions();
    let direct = exchange_rate(&coding.usage, &conditions, &takers(view, id)).0 as f64 / 8.0;
    let members: Vec<HostId> = communicator.members.iter().map(|member| member.host).collect();
    let line = line_rate(&ctx.settings.topology, &members).0 as f64 / 8.0;
    let rate = planned.map_or(direct, |planned| line / planned.slowdown.max(1.0));
    if rate < 1.0 || direct < 1.0 {
        return (communicator.codec(), "nothing passes now".to_owned(), None);
    }
    let outlook = Outlook {
        wire: 2.0 * (hosts - 1.0) / hosts * bytes,
        encoded: bytes,
        decoded: (2.0 * hosts - 1.0) / hosts * bytes,
        rate,
        coded_rate: direct,
        overlapped: view.hints.overlapped(ctx, id, bytes).as_secs_f64(),
        chunks: bytes / communicator.tuning.chunk.0.max(1) as f64,
    };
    let current = communicator.codec();
    let choice = coding.controller.choose(ctx.now, &coding.agreed, current, &levels, &outlook);
    let speed = (8.0 * bytes / (choice.time + outlook.overlapped).max(1e-9)) as u64;
    (choice.codec, describe_choice(choice, bytes), Some((outlook, speed)))
}

/// What all agents of a communicator take, each as slow as at the slowest; what an operation loses by it, in
/// which each element is encoded twice, and where errors of several ranks may be alike.
pub(crate) fn common_levels(ctx: &Ctx<'_>, known: &Communicator) -> Vec<Level> {
    let session = |session: Option<SessionId>| ctx.sessions.get(&session?);
    let mut agents = known.members.iter().map(|member| session(member.session));
    let Some(first) = agents.next().flatten() else { return Vec::new() };
    let mut levels = first.abilities.codecs.clone();
    for agent in agents {
        let theirs = agent.map_or(&[][..], |agent| &agent.abilities.codecs);
        levels.retain_mut(|level| {
            let same = theirs.iter().find(|other| other.codec == level.codec);
            same.is_some_and(|other| {
                (level.encode, level.decode) =
                    (level.encode.min(other.encode), level.decode.min(other.decode));
                true
            })
        });
    }
    for level in &mut levels {
        level.loss *= if level.codec.is_unbiased() { 2.0 } else { known.members.len() as f64 + 1.0 };
    }
    levels
}

/// An agent told of an operation: what it lost and sent is what the next choice goes by.
pub(crate) fn coded_outcome(ctx: &Ctx<'_>, told: &v1::Operation) -> Option<CodecOutcome> {
    let (coded, known) = (told.compression.as_ref()?, ctx.communicators.get(&told.communicator)?);
    let of = known.members.len() as f64;
    let exact = 2.0 * (of - 1.0) / of * told.bytes as f64;
    let EpochConfig { epoch, codec: CodecChoice { codec: current, .. }, aggregation, .. } =
        known.current()?;
    // What ran by several epochs was coded by several codecs; sums of an aggregator's codes say nothing of
    // the hosts'.
    if (told.first_epoch, told.last_epoch) != (*epoch, *epoch) || exact < 1.0 || aggregation.is_coded() {
        return None;
    }
    let levels = common_levels(ctx, known);
    let level = levels.iter().find(|level| level.codec == *current)?;
    let ratio = (1.0 - coded.saved_bytes as f64 / exact).max(0.0);
    Some(CodecOutcome { level: *level, loss: coded.error, ratio })
}

/// An agent told of an operation, and how many zeros are in its tensors: by that the next choice goes, until
/// operations in blocks that are not zeros tell what was saved. Of a dense tensor nothing is learned.
pub(crate) fn zeros_outcome(ctx: &Ctx<'_>, told: &v1::Operation) -> Option<CodecOutcome> {
    let part = |zeros: Option<u32>| zeros.map(|zeros| 1.0 - (f64::from(zeros) / LOOKED).min(1.0));
    // A host sends what any of its ranks has.
    let sent: Option<f64> = told.ranks.iter().map(|rank| part(rank.zero_input)).sum();
    let sum = told.ranks.first().and_then(|rank| part(rank.zero_output));
    let (sent, sum) = (sent?, sum?);
    let ratio = (sent.min(1.0) + sum) / 2.0 + PLACES;
    let known = ctx.communicators.get(&told.communicator)?;
    let dense = !known.coding.controller.heeds_zeros(ctx.now, ratio);
    if dense || known.codec() == Codec::NonzeroBlocks || !ctx.settings.compression {
        return None;
    }
    let mut levels = common_levels(ctx, known).into_iter();
    let level = levels.find(|level| level.codec == Codec::NonzeroBlocks)?;
    Some(CodecOutcome { level, loss: 0.0, ratio })
}

/// How many other communicators use each link along their rings.
pub(crate) fn takers(view: &View<'_>, id: u64) -> BTreeMap<DirectedLink, u32> {
    let mut takers = BTreeMap::new();
    for (_, known) in view.ctx.communicators.iter().filter(|(other, _)| **other != id) {
        let hops = known.current().map_or_else(Vec::new, |current| view.links.hops(known, current));
        let links = hops.iter().filter_map(|hop| hop.paths.first()).flat_map(|path| path.links());
        for link in links {
            *takers.entry(*link).or_default() += 1;
        }
    }
    takers
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
    Some(chosen.reason_after(current))
}

/// Returns why another budget is to be had: the ranks agreed on it.
pub(crate) fn other_budget(view: &View<'_>, id: u64) -> Option<Reason> {
    let known = view.ctx.communicators.get(&id).filter(|known| known.is_coded())?;
    let current = known.current()?;
    if known.coding.agreed == current.codec.budget {
        return None;
    }
    Some(choose_coding(view, id, current.plan.as_ref()).reason_after(&current.codec))
}

/// Why a codec, in words.
fn describe_choice(choice: Choice, bytes: f64) -> String {
    let Choice { codec, time, exact } = choice;
    let (time, exact, bytes) = (time * 1e3, exact * 1e3, bytes / f64::from(1 << 20));
    match codec {
        Codec::EXACT if exact <= 0.0 => "operations end before the tenant waits for them".to_owned(),
        Codec::EXACT => format!("nothing within the budget is faster than {exact:.3} ms for {bytes:.1} MiB"),
        _ => format!("{time:.3} ms for {bytes:.1} MiB, which take {exact:.3} ms exact"),
    }
}
