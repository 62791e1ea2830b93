//! A plan in force: participants' order, tuning, compiled programs, and the streams that belong to it.

use crate::aggregation::{Aggregation, AggregationState};
use crate::stream::Stream;
use crate::switch::Switch;
use crate::{CoreError, Nanos};
use harmonaize_abi::{Collective, Dtype, Rank, ReduceOp, Signature};
use harmonaize_plan::{
    Access, Algorithm, Buffer, Coding, Local, MAX_STEP_PEERS, Operand, Participant, Plan, Program, Request,
    Retention, Segmentation, Step, StepKind, Tuning, program, retention, segmentation, select_algorithm,
};
use std::sync::Arc;

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
    /// How large AllReduces, AllToAlls and AllGathers of f32 are coded; `None`: not at all.
    pub coding: Option<Coding>,
    /// What an aggregator on the way sums; `None`: there is none.
    pub aggregation: Option<Aggregation>,
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
    pub(crate) config: EpochPlan,
    me: Participant,
    access: Vec<(Rank, Access)>,
    programs: Vec<(Request, Retention, Arc<Program>)>,
    streams: Vec<Stream>,
    /// By participant: the epoch that the link to it was made for; an earlier one than this where it was carried over.
    links: Vec<u32>,
    pub(crate) aggregation: Option<AggregationState>,
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
        let participants = decided.plan.group().participants() as usize;
        let streams = participants * usize::from(decided.channels);
        let streams = (0..streams).map(|_| Stream::new(decided.landing_slots)).collect();
        let links = vec![decided.epoch; participants];
        let aggregation = decided.aggregation.filter(|_| participants > 1).map(AggregationState::new);
        Ok(Self { config: decided, me, access, programs: Vec::new(), streams, links, aggregation })
    }

    /// Goes on with the links that `today` has to these participants. Their streams stay with `today` until [`Epoch::take_over_streams`].
    pub(crate) fn reuse_links(&mut self, today: &Self, carried: &[Participant]) -> Result<(), CoreError> {
        for (at, peer) in carried.iter().enumerate() {
            let known = today.link(*peer).filter(|_| *peer != self.me);
            let (Some(since), Some(link)) = (known, self.links.get_mut(peer.0 as usize)) else {
                return Err(CoreError::BadPlan("a link to carry over is to nobody"));
            };
            if carried.iter().skip(at + 1).any(|other| other == peer) {
                return Err(CoreError::BadPlan("a link is to be carried over twice"));
            }
            *link = since;
        }
        if !carried.is_empty() && self.config.landing_slots != today.config.landing_slots {
            return Err(CoreError::BadPlan("landing slots differ, so that no link can be carried over"));
        }
        Ok(())
    }

    /// Takes the streams of the links that are carried over from the epoch before, which is over.
    pub(crate) fn take_over_streams(&mut self, before: &mut Self) {
        let channels = usize::from(self.config.channels).max(1);
        let number = self.number();
        let carried = self.links.iter().map(|link| *link != number);
        let streams = self.streams.chunks_mut(channels).zip(before.streams.chunks_mut(channels));
        for ((ours, theirs), _) in streams.zip(carried).filter(|(_, carried)| *carried) {
            ours.swap_with_slice(theirs);
        }
    }

    /// The epoch that the link to a peer was made for.
    pub(crate) fn link(&self, peer: Participant) -> Option<u32> {
        self.links.get(peer.0 as usize).copied()
    }

    /// Whether the link to a peer is one of an earlier epoch.
    pub(crate) fn reuses_link(&self, peer: Participant) -> bool {
        self.link(peer).is_some_and(|link| link != self.number())
    }

    pub(crate) fn number(&self) -> u32 {
        self.config.epoch
    }

    /// How an operation is cut.
    pub(crate) fn segmentation(&self, signature: &Signature) -> Segmentation {
        segmentation(&self.config.plan, signature, &self.config.tuning)
    }

    /// How an operation goes between participants.
    pub(crate) fn algorithm(&self, signature: &Signature) -> Algorithm {
        select_algorithm(&self.config.plan, signature, &self.config.tuning)
    }

    /// How this participant keeps inputs for a second run.
    pub(crate) fn retention(&self, signature: &Signature, in_place: bool) -> Retention {
        let usual = retention(&self.config.plan, signature, in_place, &self.config.tuning);
        let aggregates = self.needs_inputs(signature);
        match usual {
            // What may be aggregated may have to be begun again.
            Retention::CopyInputs if aggregates && in_place => Retention::HoldOutputs,
            Retention::CopyInputs if aggregates => Retention::KeepInputs,
            usual => usual,
        }
    }

    /// How an operation that keeps its inputs so is coded, if it is. Depends only on what all share: how inputs are kept differs
    /// between participants, but whether they are copied does not.
    pub(crate) fn coding(&self, signature: &Signature, retention: Retention) -> Option<Coding> {
        let adds = matches!(signature.reduce, ReduceOp::Sum | ReduceOp::Average);
        let large = retention != Retention::CopyInputs && self.config.plan.participants() > 1;
        self.config.coding.filter(|_| {
            let can = match signature.collective {
                Collective::AllReduce => adds,
                Collective::AllToAll | Collective::AllGather => true,
                Collective::ReduceScatter | Collective::Broadcast | Collective::Barrier => false,
            };
            can && large && signature.dtype == Dtype::F32
        })
    }

    /// The program for an operation, compiled at its first use.
    pub(crate) fn program(
        &mut self,
        signature: &Signature,
        retention: Retention,
        algorithm: Algorithm,
    ) -> Result<Arc<Program>, CoreError> {
        let coded = self.coding(signature, retention).is_some();
        let shots = if coded { Algorithm::Ring } else { algorithm };
        let request =
            Request { collective: signature.collective, root: signature.root, coded, algorithm: shots };
        let known = self.programs.iter().find(|(r, k, _)| *r == request && *k == retention);
        if let Some((_, _, program)) = known {
            return Ok(Arc::clone(program));
        }
        let access = |rank: Rank| {
            self.access.iter().find(|(r, _)| *r == rank).map_or(Access::Mapped, |(_, access)| *access)
        };
        let compiled = program(&self.config.plan, request, self.me, &Local { access: &access, retention })?;
        if !compiled.steps.iter().all(runnable) {
            return Err(CoreError::BadPlan("a step that this version cannot run"));
        }
        let compiled = Arc::new(compiled);
        self.programs.push((request, retention, Arc::clone(&compiled)));
        Ok(compiled)
    }

    fn stream_index(&self, peer: Participant, channel: u16) -> Option<usize> {
        let channels = self.config.channels;
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

/// The stream of an epoch, given by its number: for a link that is carried over it is the present epoch's until that is over.
pub(crate) fn stream<'a>(
    (current, next): (&'a mut Epoch, &'a mut Option<Switch>),
    epoch: u32,
    peer: Participant,
    channel: u16,
) -> Option<&'a mut Stream> {
    let carried = current.number() != epoch
        && next.as_ref().is_some_and(|next| next.epoch.number() == epoch && next.epoch.reuses_link(peer));
    if carried || current.number() == epoch {
        return current.stream(peer, channel);
    }
    let next = next.as_mut().map(|switch| &mut switch.epoch).filter(|next| next.number() == epoch);
    next?.stream(peer, channel)
}

/// Peers among operands.
pub(crate) fn peers(operands: &[Operand]) -> impl Iterator<Item = (Participant, &Operand)> {
    operands.iter().filter_map(|operand| match operand.buffer {
        Buffer::Peer(peer) => Some((peer, operand)),
        _ => None,
    })
}

/// What the interpreter relies on: few peers, and a landing slot that is free once the step has run.
fn runnable(step: &Step) -> bool {
    let (from, to) = (peers(&step.sources).count(), peers(&step.destinations).count());
    let kept = from == 0 || to == 0 || to < step.destinations.len();
    let peerless = !matches!(step.kind, StepKind::Fetch | StepKind::Store) || from + to == 0;
    from <= MAX_STEP_PEERS && to <= MAX_STEP_PEERS && kept && peerless
}
