//! The plans in force at a participant: the current one, and the one that is about to take over.

use crate::aggregation::AggregationState;
use crate::epoch::{EpochPlan, EpochState};
use crate::error::{BadPlan, CoreError};
use crate::message::Header;
use crate::stream::Stream;
use crate::switch::Switch;
use harmonaize_abi::{ChannelId, Epoch, Nanos, Rank, SegmentId};
use harmonaize_plan::{Access, Participant};
use serde::{Deserialize, Serialize};

/// The current epoch, the next one while a change is under way, and which were given up.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct EpochSet {
    me: Participant,
    access: Vec<(Rank, Access)>,
    current: EpochState,
    next: Option<Switch>,
    /// The highest epoch that was given up.
    withdrawn: Option<Epoch>,
    /// By participant: the highest epoch that it is prepared for.
    prepared: Vec<Epoch>,
}

impl EpochSet {
    pub(crate) fn new(
        me: Participant,
        plan: EpochPlan,
        access: Vec<(Rank, Access)>,
    ) -> Result<Self, CoreError> {
        let participants = plan.plan.group().participants();
        let current = EpochState::new(plan, me, access.clone())?;
        let prepared = vec![current.number(); participants as usize];
        Ok(Self { me, access, current, next: None, withdrawn: None, prepared })
    }

    pub(crate) fn current(&self) -> &EpochState {
        &self.current
    }

    /// The change under way.
    pub(crate) fn next(&self) -> Option<&Switch> {
        self.next.as_ref()
    }

    /// The change under way, if it leads to this epoch.
    pub(crate) fn switch_to(&mut self, epoch: Epoch) -> Option<&mut Switch> {
        self.next.as_mut().filter(|switch| switch.epoch.number() == epoch)
    }

    pub(crate) fn get(&self, epoch: Epoch) -> Option<&EpochState> {
        let next = self.next.as_ref().map(|switch| &switch.epoch);
        std::iter::once(&self.current).chain(next).find(|known| known.number() == epoch)
    }

    pub(crate) fn get_mut(&mut self, epoch: Epoch) -> Option<&mut EpochState> {
        let next = self.next.as_mut().map(|switch| &mut switch.epoch);
        std::iter::once(&mut self.current).chain(next).find(|known| known.number() == epoch)
    }

    /// Aggregation in an epoch, if it has an aggregator.
    pub(crate) fn aggregation(&self, epoch: Epoch) -> Option<&AggregationState> {
        self.get(epoch)?.aggregation.as_ref()
    }

    /// Aggregation in an epoch, if it has an aggregator.
    pub(crate) fn aggregation_mut(&mut self, epoch: Epoch) -> Option<&mut AggregationState> {
        self.get_mut(epoch)?.aggregation.as_mut()
    }

    /// Whether the segments that are done must not grow in number, because a leader counts with them.
    pub(crate) fn is_frozen(&self) -> bool {
        let next = self.next.as_ref().map(|switch| &switch.epoch);
        let mut epochs = std::iter::once(&self.current).chain(next);
        epochs.any(|epoch| epoch.aggregation.as_ref().is_some_and(AggregationState::is_frozen))
    }

    /// When the leader of the current epoch's sessions wants to be polled: hosts have summed for long enough then.
    pub(crate) fn session_timeout(&self) -> Option<Nanos> {
        let leader = self.current.aggregation.as_ref()?.leader.as_ref()?;
        leader.poll_timeout().map(Nanos::from)
    }

    /// The epoch whose links carry messages that belong to no stream: the newest that everybody has.
    pub(crate) fn control_epoch(&self) -> Epoch {
        match &self.next {
            Some(switch) if switch.committed().is_some() => switch.epoch.number(),
            _ => self.current.number(),
        }
    }

    /// The epoch that a segment runs under; `None` while that is being agreed on.
    pub(crate) fn governing(&self, segment: SegmentId) -> Option<Epoch> {
        match &self.next {
            Some(switch) if switch.governs(segment)? => Some(switch.epoch.number()),
            _ => Some(self.current.number()),
        }
    }

    /// The epoch that has the streams to a peer of an epoch. For a link that is carried over it is the current one, until that
    /// is over.
    fn holder(&self, epoch: Epoch, peer: Participant) -> Epoch {
        let carried =
            self.next.as_ref().is_some_and(|s| s.epoch.number() == epoch && s.epoch.reuses_link(peer));
        if carried { self.current.number() } else { epoch }
    }

    /// The stream of an epoch to a peer on a channel.
    pub(crate) fn stream(&self, epoch: Epoch, peer: Participant, channel: ChannelId) -> Option<&Stream> {
        self.get(self.holder(epoch, peer))?.stream(peer, channel)
    }

    /// The stream of an epoch to a peer on a channel.
    pub(crate) fn stream_mut(
        &mut self,
        epoch: Epoch,
        peer: Participant,
        channel: ChannelId,
    ) -> Option<&mut Stream> {
        let holder = self.holder(epoch, peer);
        self.get_mut(holder)?.stream_mut(peer, channel)
    }

    /// The stream to a peer on the link that was made for the epoch `link`. It comes with an epoch that has
    /// that link.
    pub(crate) fn stream_of_link(
        &mut self,
        peer: Participant,
        link: Epoch,
        channel: ChannelId,
    ) -> Option<(Epoch, &mut Stream)> {
        let next = self.next.as_mut().map(|switch| &mut switch.epoch);
        let mut epochs = std::iter::once(&mut self.current).chain(next);
        let epoch = epochs.find(|epoch| epoch.link(peer) == Some(link))?;
        Some((epoch.number(), epoch.stream_mut(peer, channel)?))
    }

    /// Whether an epoch has this link to a peer.
    pub(crate) fn has_link(&self, peer: Participant, link: Epoch) -> bool {
        let next = self.next.as_ref().map(|switch| &switch.epoch);
        std::iter::once(&self.current).chain(next).any(|epoch| epoch.link(peer) == Some(link))
    }

    /// Takes the credit in a header that came on the link made for the epoch `link`. False if it makes no sense.
    pub(crate) fn handle_credit(&mut self, from: Participant, link: Epoch, header: &Header) -> bool {
        let newest = self.next.as_ref().map_or(self.current.number(), |switch| switch.epoch.number());
        if header.epoch < link || header.epoch > newest {
            return false;
        }
        // The last credits of a link that is no longer needed here.
        if !self.has_link(from, link) {
            return link < self.current.number();
        }
        let stream = self.stream_of_link(from, link, header.channel);
        stream.is_some_and(|(_, stream)| stream.handle_credit(header.credit))
    }

    /// Begins a change to a plan, which goes on with the current links to the participants in `carried`.
    pub(crate) fn prepare(&mut self, decided: EpochPlan, carried: &[Participant]) -> Result<(), CoreError> {
        let today = &self.current.config;
        let refused = [
            (self.next.is_some(), BadPlan::ChangeUnderWay),
            (decided.epoch <= today.epoch, BadPlan::NotNewer),
            (self.withdrawn.is_some_and(|withdrawn| decided.epoch <= withdrawn), BadPlan::Withdrawn),
            (decided.plan.group() != today.plan.group(), BadPlan::Members),
            (
                decided.channels != today.channels || decided.tuning.chunk_bytes != today.tuning.chunk_bytes,
                BadPlan::Chunks,
            ),
            (carried.iter().any(|peer| self.current.is_down(*peer)), BadPlan::LinkDown),
        ];
        if let Some((_, reason)) = refused.into_iter().find(|(refused, _)| *refused) {
            return Err(reason.into());
        }
        let participants = decided.plan.group().participants();
        let mut epoch = EpochState::new(decided, self.me, self.access.clone())?;
        epoch.reuse_links(&self.current, carried)?;
        debug_assert!(epoch.number() > self.current.number(), "epochs never go back");
        self.next = Some(Switch::new(epoch, participants));
        Ok(())
    }

    /// Gives up a change before anything was promised. False if there is no such change, or it is too late for that.
    pub(crate) fn give_up(&mut self, epoch: Epoch) -> bool {
        let early = |switch: &mut Switch| {
            switch.epoch.number() == epoch && switch.promised_below.is_none() && switch.committed().is_none()
        };
        let given_up = self.next.take_if(early).is_some();
        if given_up {
            self.note_withdrawn(epoch);
        }
        given_up
    }

    /// Whether this epoch was given up, or a later one.
    pub(crate) fn is_withdrawn(&self, epoch: Epoch) -> bool {
        self.withdrawn.is_some_and(|withdrawn| epoch <= withdrawn)
    }

    pub(crate) fn note_withdrawn(&mut self, epoch: Epoch) {
        self.withdrawn = self.withdrawn.max(Some(epoch));
    }

    pub(crate) fn note_prepared(&mut self, participant: Participant, epoch: Epoch) {
        if let Some(prepared) = self.prepared.get_mut(participant.0 as usize) {
            *prepared = (*prepared).max(epoch);
        }
    }

    /// At the leader: the epoch that it is time to propose. Returns it once.
    pub(crate) fn propose(&mut self) -> Option<Epoch> {
        let switch = self.next.as_mut()?;
        switch.propose(&self.prepared).then(|| switch.epoch.number())
    }

    /// Makes the new plan the current one once everybody has acknowledged all segments of the old one. Everybody has
    /// acknowledged those below `acknowledged`. Returns the old epoch.
    pub(crate) fn retire(&mut self, acknowledged: SegmentId) -> Option<Epoch> {
        let over = |switch: &mut Switch| switch.committed().is_some_and(|commit| acknowledged >= commit);
        let switch = self.next.take_if(over)?;
        debug_assert!(switch.epoch.number() > self.current.number(), "epochs never go back");
        let mut old = std::mem::replace(&mut self.current, switch.epoch);
        self.current.take_over_streams(&mut old);
        Some(old.number())
    }

    /// Notes that a link is down. Returns the next epoch if its links were up here, and this was one of them.
    pub(crate) fn handle_link_down(&mut self, link: Epoch, peer: Participant) -> Option<Epoch> {
        self.current.handle_link_down(link, peer);
        let switch = self.next.as_mut()?;
        (switch.epoch.handle_link_down(link, peer) && switch.ready).then(|| switch.epoch.number())
    }

    /// Whether a peer cannot be reached any more, where segments below `done` are done.
    ///
    /// A peer closes the old link once all of its segments are done by everybody, which it may know before we do, even of the commit;
    /// before that, what is to go by the old link cannot go by another. The new one it may have given up, until the commit.
    pub(crate) fn is_lost(&self, peer: Participant, done: SegmentId) -> bool {
        let current = self.current.is_down(peer);
        let needed = |below: Option<SegmentId>| below.is_none_or(|below| done < below);
        match &self.next {
            Some(switch) if switch.committed().is_some() => {
                switch.epoch.is_down(peer) || current && needed(switch.committed())
            }
            Some(switch) if switch.ready => {
                current && (switch.epoch.is_down(peer) || needed(switch.promised_below))
            }
            _ => current,
        }
    }
}
