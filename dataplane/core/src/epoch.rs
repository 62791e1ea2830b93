//! A plan in force: participants' order, tuning, compiled programs, and the streams that belong to it.

use crate::stream::Stream;
use crate::{CoreError, Nanos};
use harmonaize_abi::{Rank, Signature};
use harmonaize_plan::{
    Access, Local, Operand, Participant, Place, Plan, Program, Request, Retention, Segmentation, Step,
    StepKind, Tuning, program, retention, segmentation,
};
use std::sync::Arc;

/// Most peers that one step receives from or sends to.
pub const MAX_STEP_PEERS: usize = 4;

/// What control decided for a communicator, under an epoch.
#[derive(Clone, Debug)]
pub struct EpochPlan {
    /// Number of the epoch; later plans have higher ones.
    pub epoch: u32,
    /// Participants and their order.
    pub plan: Plan,
    /// How operations are cut.
    pub tuning: Tuning,
    /// Segments that may be under way at once.
    pub channels: u16,
    /// Landing slots of each stream; a power of two.
    pub landing_slots: u32,
}

/// Times a communicator keeps.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// An operation in flight fails after this long without progress.
    pub operation: Nanos,
    /// How long participants have to answer before it does.
    pub inquiry: Nanos,
}

/// An epoch at this participant.
#[derive(Debug)]
pub(crate) struct Epoch {
    pub(crate) decided: EpochPlan,
    me: Participant,
    access: Vec<(Rank, Access)>,
    programs: Vec<(Request, Retention, Arc<Program>)>,
    streams: Vec<Stream>,
}

impl Epoch {
    pub(crate) fn new(
        decided: EpochPlan,
        me: Participant,
        access: Vec<(Rank, Access)>,
    ) -> Result<Self, CoreError> {
        if decided.channels == 0 || !decided.landing_slots.is_power_of_two() {
            return Err(CoreError::BadPlan("channels must not be 0, landing slots a power of two"));
        }
        let streams = decided.plan.group().participants() as usize * usize::from(decided.channels);
        let streams = (0..streams).map(|_| Stream::new(decided.landing_slots)).collect();
        Ok(Self { decided, me, access, programs: Vec::new(), streams })
    }

    pub(crate) fn number(&self) -> u32 {
        self.decided.epoch
    }

    /// How an operation is cut.
    pub(crate) fn cut(&self, signature: &Signature) -> Segmentation {
        segmentation(&self.decided.plan, signature, &self.decided.tuning)
    }

    /// How this participant keeps inputs for a second run.
    pub(crate) fn retention(&self, signature: &Signature, in_place: bool) -> Retention {
        retention(&self.decided.plan, signature, in_place, &self.decided.tuning)
    }

    /// The program for an operation, compiled at its first use.
    pub(crate) fn program(
        &mut self,
        signature: &Signature,
        retention: Retention,
    ) -> Result<Arc<Program>, CoreError> {
        let request = Request { collective: signature.collective, root: signature.root };
        let known = self.programs.iter().find(|(r, k, _)| *r == request && *k == retention);
        if let Some((_, _, program)) = known {
            return Ok(Arc::clone(program));
        }
        let access = |rank: Rank| {
            self.access.iter().find(|(r, _)| *r == rank).map_or(Access::Mapped, |(_, access)| *access)
        };
        let compiled = program(&self.decided.plan, request, self.me, &Local { access: &access, retention })?;
        if !compiled.steps.iter().all(runnable) {
            return Err(CoreError::BadPlan("a step that this version cannot run"));
        }
        let compiled = Arc::new(compiled);
        self.programs.push((request, retention, Arc::clone(&compiled)));
        Ok(compiled)
    }

    fn stream_index(&self, peer: Participant, channel: u16) -> Option<usize> {
        let channels = self.decided.channels;
        (channel < channels).then(|| peer.0 as usize * usize::from(channels) + usize::from(channel))
    }

    pub(crate) fn stream(&mut self, peer: Participant, channel: u16) -> Option<&mut Stream> {
        let index = self.stream_index(peer, channel)?;
        self.streams.get_mut(index)
    }

    pub(crate) fn stream_ref(&self, peer: Participant, channel: u16) -> Option<&Stream> {
        self.streams.get(self.stream_index(peer, channel)?)
    }
}

/// Peers among operands.
pub(crate) fn peers(operands: &[Operand]) -> impl Iterator<Item = (Participant, &Operand)> {
    operands.iter().filter_map(|operand| match operand.place {
        Place::Peer(peer) => Some((peer, operand)),
        _ => None,
    })
}

/// What the interpreter relies on: few peers, and a landing slot that is free once the step has run.
fn runnable(step: &Step) -> bool {
    let (from, to) = (peers(&step.sources).count(), peers(&step.destinations).count());
    let kept = from == 0 || to == 0 || to < step.destinations.len();
    let exact = step.sources.iter().chain(&step.destinations).all(|o| o.form == harmonaize_plan::Form::Exact);
    let peerless = !matches!(step.kind, StepKind::Fetch | StepKind::Store) || from + to == 0;
    from <= MAX_STEP_PEERS && to <= MAX_STEP_PEERS && kept && exact && peerless
}
