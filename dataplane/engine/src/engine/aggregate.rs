//! Actions for a communicator's aggregator, and the packets of all.

use super::{Engine, transfer};
use crate::aggregated::{SegmentTensors, fetch, progress, reserve_aside, store_staged};
use crate::attachment::Attachment;
use crate::communicator_state::CommunicatorState;
use crate::containment::{Task as Work, contain};
use crate::context::Context;
use crate::feedback;
use crate::marks::MarkWriter;
use crate::slices::Slices;
use crate::table::{Key, Table};
use crate::transfer::PendingTransfer;
use arrayvec::ArrayVec;
use harmonaize_abi::{AggregatorTask, ChannelId, Epoch};
use harmonaize_core::Nanos;
use harmonaize_events::MarkKind;
use harmonaize_transport::tcp::Dscp;

impl Engine {
    /// Begins a session with the aggregator of an epoch, or one that only probes whether it answers.
    pub(super) fn join(&mut self, now: Nanos, key: Key, epoch: Epoch, session: u64, probe_only: bool) {
        let Some(member) = self.communicators.get_mut(key) else { return };
        match member.path(epoch) {
            Some(path) => path.begin(now, session, probe_only),
            None => member.core.handle_aggregation_ended(now, epoch),
        }
    }

    /// Has the aggregator do the segment on a channel, or goes on with that. Returns whether it is done.
    ///
    /// It is nothing any more if hosts have begun the segment again.
    pub(super) fn aggregate(
        &mut self,
        now: Nanos,
        key: Key,
        channel: ChannelId,
        slices: &mut Slices,
    ) -> bool {
        let Some(member) = self.communicators.get_mut(key) else { return true };
        let Some(segment) = member.core.segment(channel) else { return true };
        let (epoch, signature) = (segment.epoch, segment.signature);
        let Some(index) = segment.aggregated else { return true };
        if !slices.is_resumed() {
            if member.path(epoch).is_none() {
                member.core.handle_aggregation_ended(now, epoch);
                return true;
            }
            let reserved = member.reserve_staging(channel);
            let reserved = reserved.and_then(|()| feedback::reserve(member, channel, &self.attachments));
            if let Err(error) = reserved {
                member.fail_internal(&error.to_string());
                return true;
            }
            if self.marks.has_reader()
                && let Some(mark) = member.begin_mark(channel)
            {
                self.marks.write(MarkKind::SegmentBegan, || mark);
            }
        }
        let sources = ArrayVec::new();
        let context = Context { member, attachments: &self.attachments, channel, sources: &sources };
        let by = (&mut self.passes, &mut *slices);
        let begun = feedback::begin(&context, by, key, &mut self.pending_transfers);
        for pending in self.pending_transfers.drain(..) {
            transfer(&mut self.attachments, &mut self.broken, pending);
        }
        match begun {
            Ok(true) => {}
            Ok(false) => return false,
            Err(error) => {
                member.fail_internal(&error.to_string());
                return true;
            }
        }
        let tensors = SegmentTensors { member, attachments: &self.attachments, epoch, coder: None };
        let spreads = signature.collective.traits().aggregator == Some(AggregatorTask::Broadcast);
        let root = spreads && member.local(signature.root).is_some();
        if root {
            match tensors.copy_root_output(channel, (&mut self.passes, slices)) {
                Some(true) => {}
                Some(false) => return false,
                None => {
                    let me = member.core.me().0;
                    member.fail_internal(&format!("participant {me}'s broadcast lies nowhere"));
                    return true;
                }
            }
        }
        let fetched = fetch(member, (key, channel), &self.attachments, &mut self.pending_transfers);
        for pending in self.pending_transfers.drain(..) {
            transfer(&mut self.attachments, &mut self.broken, pending);
        }
        if let Err(error) = fetched {
            member.fail_internal(&error.to_string());
            return true;
        }
        match member.path(epoch) {
            // The worker has it before the next packets, or once it is fetched, and then what comes behind it.
            Some(path) => path.awaited.push_back((index, channel)),
            None => member.core.handle_aggregation_ended(now, epoch),
        }
        true
    }

    /// Copies a sum that is staged to the local ranks' outputs, or goes on with that. Returns whether it is done; of outputs that are not
    /// mapped, whether it is on its way.
    pub(super) fn copy_out(&mut self, key: Key, channel: ChannelId, slices: &mut Slices) -> bool {
        let Some(member) = self.communicators.get_mut(key) else { return true };
        let Some(epoch) = member.core.segment(channel).map(|segment| segment.epoch) else { return true };
        if !slices.is_resumed()
            && let Err(error) = reserve_aside(member, channel, &self.attachments)
        {
            member.fail_internal(&error.to_string());
            return true;
        }
        let tensors = SegmentTensors { member, attachments: &self.attachments, epoch, coder: None };
        let done = tensors.copy_out(channel, (&mut self.passes, slices));
        if done == Some(false) {
            return false;
        }
        let asked = &mut self.pending_transfers;
        let stored = done.map(|_| store_staged(member, (key, channel), &self.attachments, asked));
        for pending in self.pending_transfers.drain(..) {
            transfer(&mut self.attachments, &mut self.broken, pending);
        }
        match stored {
            Some(Ok(())) => {}
            Some(Err(error)) => member.fail_internal(&error.to_string()),
            None => member.fail_internal("a staged sum cannot be copied to its tensors"),
        }
        true
    }

    /// Packets of all aggregators, of each tenant's communicators the most urgent first.
    ///
    /// Cost: a look at each communicator that does not rest to count, and one to work, and a sort.
    pub(super) fn poll_aggregators(&mut self, now: Nanos) -> usize {
        let members = self.turns.iter().filter_map(|key| self.communicators.get(key));
        let busy = members.flat_map(|member| {
            let paths = member.epochs.iter().filter_map(|links| links.aggregator.as_ref());
            paths.filter(|path| path.is_busy()).map(|_| (member.tenant, member.class))
        });
        self.sharing.count(busy);
        let mut worked = 0;
        let Self {
            communicators: members,
            aftermath,
            sharing,
            attachments,
            marks,
            turns,
            packet_order,
            dscp,
            pending_transfers: asked,
            broken,
            ..
        } = self;
        turns.sort(packet_order, |key| members.get(key).map(CommunicatorState::urgency));
        for (_, _, key) in packet_order.iter() {
            let done = contain(members, aftermath, (*key, Work::Packets), |member| {
                let sharers = sharing.of(member.tenant, member.class);
                packets(now, (*key, member), (sharers, *dscp), attachments, (&*marks, &mut *asked))
            });
            worked += done.unwrap_or(1);
            for asked in asked.drain(..) {
                transfer(attachments, broken, asked);
            }
        }
        worked
    }
}

/// The packets of a communicator's aggregators. What is to be stored goes into the list beside `marks`. Returns how much was done.
fn packets(
    now: Nanos,
    (key, member): (Key, &mut CommunicatorState),
    (sharers, dscp): (u16, Option<Dscp>),
    attachments: &Table<Attachment>,
    (marks, asked): (&MarkWriter, &mut Vec<PendingTransfer>),
) -> usize {
    let mut worked = 0;
    for at in 0..member.epochs.len() {
        let taken = member.epochs.get_mut(at).and_then(|links| links.aggregator.take());
        let Some(mut path) = taken else { continue };
        path.worker.share_window(sharers);
        if let Some(dscp) = dscp {
            path.mark(member.class, dscp);
        }
        worked += progress(&mut path, now, (key, &mut *member), attachments, asked);
        if std::mem::take(&mut path.session.abandoned) {
            marks.write(MarkKind::GivenUp, || member.mark());
        }
        if let Some(links) = member.epochs.get_mut(at) {
            links.aggregator = Some(path);
        }
    }
    worked
}
