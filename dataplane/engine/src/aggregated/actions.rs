//! What a communicator wants of its aggregator, and the packets of all.

use super::SegmentTensors;
use crate::engine::{Engine, transfer};
use crate::execute::Context;
use crate::feedback;
use crate::table::Key;
use arrayvec::ArrayVec;
use harmonaize_abi::Collective;
use harmonaize_aggregator::{PayloadFormat, Task};
use harmonaize_core::{Action, Nanos};
use harmonaize_events::MarkKind;
use std::time::Duration;

impl Engine {
    /// What a communicator wants of its aggregator.
    pub(crate) fn aggregate(&mut self, now: Nanos, key: Key, action: &Action) {
        let Some(member) = self.communicators.get_mut(key) else { return };
        match *action {
            Action::Join { epoch, session } | Action::ProbeAggregator { epoch, session } => {
                match member.path(epoch) {
                    Some(path) => {
                        path.session.probe_only = matches!(action, Action::ProbeAggregator { .. });
                        path.worker.begin(Duration::from_nanos(now.0), session);
                    }
                    None => member.core.handle_aggregation_ended(now, epoch),
                }
            }
            Action::Leave { epoch } => {
                if let Some(path) = member.path(epoch) {
                    path.worker.stop();
                }
            }
            Action::Aggregate { channel } => {
                let reserved = member.reserve_staging(channel);
                let reserved = reserved.and_then(|()| member.reserve_feedback(channel, &self.attachments));
                if let Err(error) = reserved {
                    return member.fail_internal(&error.to_string());
                }
                if self.marks.has_reader()
                    && let Some(mark) = member.begin_mark(channel)
                {
                    self.marks.write(MarkKind::SegmentBegan, || mark);
                }
                let sources = ArrayVec::new();
                let context = Context { member, attachments: &self.attachments, channel, sources: &sources };
                if let Err(error) = feedback::begin(&context, key, &mut self.pending_transfers) {
                    return member.fail_internal(&error.to_string());
                }
                for asked in self.pending_transfers.drain(..) {
                    transfer(&mut self.attachments, &mut self.broken, asked);
                }
                let me = member.core.me();
                let Some(segment) = member.core.segment(channel) else { return };
                let (epoch, number, signature) = (segment.epoch, segment.aggregated, segment.signature);
                let (elements, size) = (segment.hi - segment.lo, signature.dtype.size() as u64);
                let root = member.local(signature.root).is_some();
                let Some(index) = number else { return };
                let (task, given) = match signature.collective {
                    Collective::Broadcast => {
                        let bytes = elements * size;
                        (Task::Broadcast { bytes, root }, if root { bytes } else { 0 })
                    }
                    Collective::Barrier => (Task::Barrier, 0),
                    Collective::AllReduce
                    | Collective::AllToAll
                    | Collective::AllGather
                    | Collective::ReduceScatter => {
                        let rules = member.path(epoch).map(|path| path.coder.rules);
                        let form = rules.and_then(|rules| rules.format_of(&signature));
                        let task = match form.filter(|form| rules.is_some_and(|it| it.format != *form)) {
                            Some(PayloadFormat::Tensor { dtype, op }) => Task::Other { elements, dtype, op },
                            _ => Task::Sum(elements),
                        };
                        (task, form.map_or(0, |form| form.sent(elements)))
                    }
                };
                member.bytes_sent += given;
                let reach = SegmentTensors { member, attachments: &self.attachments, epoch, coder: None };
                if signature.collective == Collective::Broadcast
                    && root
                    && reach.copy_root_output(channel).is_none()
                {
                    return member.fail_internal(&format!("participant {}'s broadcast lies nowhere", me.0));
                }
                if !member.path(epoch).is_some_and(|path| path.worker.submit(index, task)) {
                    member.core.handle_aggregation_ended(now, epoch);
                }
            }
            Action::CopyOut { channel } => {
                let epoch = member.core.segment(channel).map_or(0, |segment| segment.epoch);
                let reach = SegmentTensors { member, attachments: &self.attachments, epoch, coder: None };
                if reach.copy_out(channel).is_none() {
                    member.fail_internal("a sum that was held cannot be brought to its tensors");
                }
            }
            _ => {}
        }
    }

    /// Packets of all aggregators.
    ///
    /// Cost: a look at each communicator to count, and one to work.
    pub(crate) fn poll_aggregators(&mut self, now: Nanos) -> usize {
        let busy = self.communicators.iter().flat_map(|member| {
            let paths = member.epochs.iter().filter_map(|links| links.aggregator.as_ref());
            paths.filter(|path| path.worker.is_busy()).map(|_| member.tenant)
        });
        self.sharing.count(busy);
        let mut worked = 0;
        for member in self.communicators.iter_mut() {
            let sharers = self.sharing.of(member.tenant);
            for at in 0..member.epochs.len() {
                let Some(mut path) = member.epochs.get_mut(at).and_then(|links| links.aggregator.take())
                else {
                    continue;
                };
                path.worker.share_window(sharers);
                worked += path.progress(now, member, &self.attachments);
                if std::mem::take(&mut path.session.abandoned) {
                    self.marks.write(MarkKind::GivenUp, || member.mark());
                }
                if let Some(links) = member.epochs.get_mut(at) {
                    links.aggregator = Some(path);
                }
            }
        }
        worked
    }
}
