//! A plan in force: participants' order, tuning, compiled programs, and the streams that belong to it.

use crate::aggregation::{Aggregation, AggregationState};
use crate::error::{BadPlan, CoreError};
use crate::stream::Stream;
use harmonaize_abi::{ChannelId, Dtype, Epoch, Rank, ReduceOp, Signature};
use harmonaize_plan::{
    Access, Algorithm, Buffer, Coding, Local, MAX_STEP_PEERS, Operand, Participant, Plan, Program, Request,
    Retention, Segmentation, Step, StepKind, Tuning, program, retention, segmentation, select_algorithm,
};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Control's decision for a communicator in an epoch.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EpochPlan {
    /// The number of the epoch; later plans have higher ones.
    pub epoch: Epoch,
    /// Participants and their order.
    pub plan: Plan,
    /// How operations are cut.
    pub tuning: Tuning,
    /// Segments that may be under way at once.
    pub channels: u16,
    /// Landing slots of each stream; a power of two.
    pub landing_slots: u32,
    /// How large AllReduces, AllToAlls and AllGathers of f32 are compressed; `None`: not at all.
    pub coding: Option<Coding>,
    /// The operations that an aggregator on the path sums; `None`: there is none.
    #[serde(skip)]
    pub aggregation: Option<Aggregation>,
}

/// An epoch at this participant.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct EpochState {
    pub(crate) config: EpochPlan,
    me: Participant,
    access: Vec<(Rank, Access)>,
    programs: Vec<((Request, Retention, bool), Arc<Program>)>,
    streams: Vec<Stream>,
    /// By participant: the epoch that the link to it was made for. It is an earlier one than this where the link was
    /// carried over.
    links: Vec<Epoch>,
    /// By participant: whether the link to it is down.
    down: Vec<bool>,
    #[serde(skip)]
    pub(crate) aggregation: Option<AggregationState>,
}

impl EpochState {
    pub(crate) fn new(
        decided: EpochPlan,
        me: Participant,
        access: Vec<(Rank, Access)>,
    ) -> Result<Self, CoreError> {
        if decided.channels == 0 || !decided.landing_slots.is_power_of_two() {
            return Err(BadPlan::Shape.into());
        }
        let participants = decided.plan.group().participants() as usize;
        let streams = participants * streams_of_peer(decided.channels);
        let streams = (0..streams).map(|_| Stream::new(decided.landing_slots)).collect();
        let (links, down) = (vec![decided.epoch; participants], vec![false; participants]);
        let aggregation = decided.aggregation.filter(|_| participants > 1).map(AggregationState::new);
        Ok(Self { config: decided, me, access, programs: Vec::new(), streams, links, down, aggregation })
    }

    /// Goes on with the links that `today` has to these participants. Their streams stay with `today` until [`EpochState::take_over_streams`].
    pub(crate) fn reuse_links(&mut self, today: &Self, carried: &[Participant]) -> Result<(), CoreError> {
        for (at, peer) in carried.iter().enumerate() {
            let known = today.link(*peer).filter(|_| *peer != self.me);
            let (Some(since), Some(link)) = (known, self.links.get_mut(peer.0 as usize)) else {
                return Err(BadPlan::LinkToNobody.into());
            };
            if carried.iter().skip(at + 1).any(|other| other == peer) {
                return Err(BadPlan::LinkTwice.into());
            }
            *link = since;
        }
        if !carried.is_empty() && self.config.landing_slots != today.config.landing_slots {
            return Err(BadPlan::LandingSlots.into());
        }
        Ok(())
    }

    /// Takes the streams of the links that are carried over from the epoch before, which is over.
    pub(crate) fn take_over_streams(&mut self, before: &mut Self) {
        let channels = streams_of_peer(self.config.channels);
        let number = self.number();
        let carried = self.links.iter().map(|link| *link != number);
        let streams = self.streams.chunks_mut(channels).zip(before.streams.chunks_mut(channels));
        for ((ours, theirs), _) in streams.zip(carried).filter(|(_, carried)| *carried) {
            ours.swap_with_slice(theirs);
        }
    }

    /// The epoch that the link to a peer was made for.
    pub(crate) fn link(&self, peer: Participant) -> Option<Epoch> {
        self.links.get(peer.0 as usize).copied()
    }

    /// Whether the link to a peer is one of an earlier epoch.
    pub(crate) fn reuses_link(&self, peer: Participant) -> bool {
        self.link(peer).is_some_and(|link| link != self.number())
    }

    /// Notes that the link to a peer is down, if it is this one.
    pub(crate) fn handle_link_down(&mut self, link: Epoch, peer: Participant) -> bool {
        let this = self.link(peer) == Some(link);
        if let Some(down) = self.down.get_mut(peer.0 as usize) {
            *down |= this;
        }
        this
    }

    /// Whether the link to a peer is down.
    pub(crate) fn is_down(&self, peer: Participant) -> bool {
        self.down.get(peer.0 as usize) == Some(&true)
    }

    /// Whether any link is down.
    pub(crate) fn any_down(&self) -> bool {
        self.down.contains(&true)
    }

    /// Whether operations like this may go by the epoch's aggregator.
    ///
    /// Where inputs are only copied aside they may not, for their copy is gone once the operation is, unless their sum is kept.
    pub(crate) fn aggregates(&self, signature: &Signature, retention: Retention) -> bool {
        let state = self.aggregation.as_ref().filter(|state| state.supports(signature));
        state.is_some_and(|state| retention != Retention::CopyInputs || state.is_eager(signature))
    }

    /// Whether inputs of an operation like this, which are usually copied, must be kept. It may have to be begun again.
    fn needs_inputs(&self, signature: &Signature) -> bool {
        let state = self.aggregation.as_ref().filter(|state| state.supports(signature));
        state.is_some_and(|state| !state.is_eager(signature))
    }

    pub(crate) fn number(&self) -> Epoch {
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
            let collective = signature.collective;
            let can = collective.traits().compressible && (adds || !collective.reduces());
            can && large && !signature.uneven && signature.dtype == Dtype::F32
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
        let scaled = signature.reduce == ReduceOp::PremulSum;
        let key = (request, retention, scaled);
        if let Some((_, program)) = self.programs.iter().find(|(known, _)| *known == key) {
            return Ok(Arc::clone(program));
        }
        let access = |rank: Rank| {
            self.access.iter().find(|(r, _)| *r == rank).map_or(Access::Mapped, |(_, access)| *access)
        };
        let compiled =
            program(&self.config.plan, request, self.me, &Local { access: &access, retention, scaled })?;
        if !compiled.steps.iter().all(runnable) {
            return Err(BadPlan::Step.into());
        }
        let compiled = Arc::new(compiled);
        self.programs.push((key, Arc::clone(&compiled)));
        Ok(compiled)
    }

    fn stream_index(&self, peer: Participant, channel: ChannelId) -> Option<usize> {
        let streams = streams_of_peer(self.config.channels);
        let channel = usize::from(channel.0);
        (channel < streams).then(|| peer.0 as usize * streams + channel)
    }

    pub(crate) fn stream_mut(&mut self, peer: Participant, channel: ChannelId) -> Option<&mut Stream> {
        let index = self.stream_index(peer, channel)?;
        self.streams.get_mut(index)
    }

    pub(crate) fn stream(&self, peer: Participant, channel: ChannelId) -> Option<&Stream> {
        self.streams.get(self.stream_index(peer, channel)?)
    }
}

/// The streams to and from a peer: one a channel. Behind them is the stream of messages from one rank to
/// another.
fn streams_of_peer(channels: u16) -> usize {
    usize::from(channels) + 1
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
