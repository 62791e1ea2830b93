//! From control's recipe to what the engine takes, checked: an agent runs no plan that it has not checked itself.

use harmonaize_abi::{Collective, Rank};
use harmonaize_api::v1::{self, Recipe};
use harmonaize_core::{EpochPlan, Nanos, Timeouts};
use harmonaize_engine::Peer;
use harmonaize_plan::{Access, Group, Local, Participant, Plan, Request, Retention, Tuning, check, program};
use harmonaize_transport::Introduction;

/// Longest that participants have to answer before a time-out is declared.
const INQUIRY: u64 = 1_000_000_000;

/// A recipe that can be executed.
#[derive(Debug)]
pub struct Expanded {
    /// The plan under its epoch.
    pub plan: EpochPlan,
    /// Who we are.
    pub me: Participant,
    /// The others.
    pub peers: Vec<Peer>,
    /// Times.
    pub timeouts: Timeouts,
}

/// Why a recipe cannot be executed, for the operator.
#[derive(Debug, thiserror::Error)]
#[error("recipe for communicator {communicator:016x}, epoch {epoch}: {what}")]
pub struct RecipeError {
    communicator: u64,
    epoch: u64,
    what: String,
}

/// Expands a recipe.
///
/// # Errors
/// If anything in it does not fit together.
pub fn expand(recipe: &Recipe) -> Result<Expanded, RecipeError> {
    let error = |what: String| RecipeError { communicator: recipe.communicator, epoch: recipe.epoch, what };
    let members = recipe.participants.iter().map(|p| p.ranks.iter().map(|&rank| Rank(rank)).collect());
    let group = Group::new(members.collect()).ok_or_else(|| error("ranks missing or there twice".into()))?;
    let order = recipe.order.iter().map(|&participant| Participant(participant)).collect();
    let plan = Plan::new(group, order).map_err(|e| error(e.to_string()))?;
    let me = Participant(recipe.me);
    if plan.group().local(me).is_empty() {
        return Err(error(format!("participant {} has no rank", me.0)));
    }
    let tuning = recipe.tuning.as_ref().ok_or_else(|| error("no tuning".into()))?;
    let small = |name: &str, value: u64| {
        u32::try_from(value)
            .ok()
            .filter(|v| *v > 0)
            .ok_or_else(|| error(format!("{name} {value} out of range")))
    };
    let channels = u16::try_from(tuning.channels).ok().filter(|channels| (1..=4096).contains(channels));
    let plan = EpochPlan {
        epoch: small("epoch", recipe.epoch)?,
        plan,
        tuning: Tuning {
            chunk_bytes: small("chunk", tuning.chunk_bytes)?,
            segment_bytes: small("segment", tuning.segment_bytes)?,
            copy_bytes: tuning.copy_bytes,
            ..Tuning::default()
        },
        channels: channels.ok_or_else(|| error(format!("{} channels", tuning.channels)))?,
        landing_slots: tuning.landing_slots,
    };
    let operation = Nanos(tuning.operation_timeout_ns);
    let timeouts = Timeouts { operation, inquiry: Nanos((operation.0 / 4).min(INQUIRY)) };
    prove(&plan).map_err(error)?;
    let peers = recipe.peers.iter().map(|peer| introduce(peer).map_err(error)).collect::<Result<_, _>>()?;
    Ok(Expanded { plan, me, peers, timeouts })
}

/// Expands every algorithm for every participant and has the checker prove the whole: each output holds what it must,
/// nobody waits on himself.
fn prove(plan: &EpochPlan) -> Result<(), String> {
    for &collective in Collective::ALL {
        let request = Request { collective, root: Rank(0) };
        let local = Local { access: &|_| Access::Mapped, retention: Retention::KeepInputs };
        let everyone = (0..plan.plan.participants()).map(Participant);
        let programs = everyone.map(|participant| program(&plan.plan, request, participant, &local));
        let programs = programs.collect::<Result<Vec<_>, _>>().map_err(|error| error.to_string())?;
        let locals: Vec<_> = programs.iter().map(|_| local).collect();
        check(&plan.plan, request, &programs, plan.landing_slots, &locals)
            .map_err(|error| format!("{collective}: {error}"))?;
    }
    Ok(())
}

fn introduce(peer: &v1::Peer) -> Result<Peer, String> {
    let at = |what: &str| format!("participant {}: {what}", peer.participant);
    let ports = peer.source_ports.iter().map(|&port| u16::try_from(port));
    let source_ports: Vec<u16> = ports.collect::<Result<_, _>>().map_err(|_| at("source port"))?;
    if source_ports.is_empty() {
        return Err(at("no path"));
    }
    let introduction = Introduction {
        name: peer.link.as_slice().try_into().map_err(|_| at("link name of another length"))?,
        secret: peer.secret.as_slice().try_into().map_err(|_| at("secret of another length"))?,
        peer: peer.address.parse().map_err(|_| at("address"))?,
        initiate: peer.initiate,
        source_ports,
    };
    Ok(Peer { participant: Participant(peer.participant), introduction })
}
