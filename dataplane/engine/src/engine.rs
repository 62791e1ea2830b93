//! The engine: one thread's attachments, communicators and transport.

mod aggregate;
mod lifecycle;
mod panicked;
#[cfg(test)]
mod tests;

use crate::aggregated::{self, is_for_aggregator};
use crate::attachment::Attachment;
use crate::coded::vnmse;
use crate::command::{AttachmentId, Notice};
use crate::communicator_state::{CommunicatorState, Pending, status_of};
use crate::containment::{Aftermath, Task, contain};
use crate::context::Context;
use crate::execute::{is_scaled, post, run, scale_fetched, send_all, touched};
use crate::feedback;
use crate::gaps::{BusyTenants, Gaps, Leave};
use crate::marks::{MarkWriter, of_coded, of_end, of_message, zeros};
use crate::p2p;
use crate::passes::PassSharing;
use crate::reaper::Reaper;
use crate::sharing::Sharing;
use crate::slices::{Progress, Slices, Slicing, Unfinished};
use crate::step::{CodedStep, ExecuteError, StepResult};
use crate::table::{Key, Table};
use crate::transfer::{COUNTS, PendingTransfer, tag, untag};
use crate::turns::{Turn, Turns, Urgency, Work};
use crate::validate::{CheckedCall, check, check_p2p, read_counts, region_of_counts};
use crate::wake::{Woken, attend, watch};
use arrayvec::ArrayVec;
use harmonaize_abi::{
    ABI_VERSION, ChannelId, CommunicatorHandle, CommunicatorId, Completion, Cookie, Direction, Epoch,
    OperationId, Rank, Region, Sequence, Signature, Status as Code, StepId, Submission, Tag, Token,
};
use harmonaize_core::{
    Action, Call, CoreError, Kind, MAX_MESSAGE, Message, Nanos, Payload, PeerMessage, Receipt,
};
use harmonaize_events::{Mark, MarkKind};
use harmonaize_plan::{MAX_STEP_PEERS, Participant, Request};
use harmonaize_shm::{EndError, MemoryError, Span};
use harmonaize_transport::datagram::RdmaPort;
use harmonaize_transport::tcp::Dscp;
use harmonaize_transport::{Event, Landing, LinkId, Transport};
use rustix::event::epoll;
use std::collections::{BTreeSet, HashMap};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Actions in a row of an engine's only communicator.
const QUANTUM: usize = 32;
/// Descriptors of one attachment in a row.
const SUBMISSIONS: usize = 8;
/// [`Completion::algorithm`] of what an aggregator summed.
const AGGREGATED: u8 = 9;
/// How long a loop that stops goes on for last words.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(200);
/// How often timers are looked at while there is work.
const TIMER_INTERVAL: Duration = Duration::from_millis(1);
/// How long after the last operation nobody waits any more for what comes by the network.
const IDLE_AFTER: Duration = Duration::from_millis(10);

/// What a step consumes, or sends.
type Messages = ArrayVec<PeerMessage, MAX_STEP_PEERS>;

/// See the crate's documentation. The transport is the agent's way to others.
pub struct Engine {
    pub(crate) transport: Box<dyn Transport + Send>,
    pub(crate) attachments: Table<Attachment>,
    pub(crate) by_attachment: HashMap<AttachmentId, Key>,
    pub(crate) communicators: Table<CommunicatorState>,
    pub(crate) by_communicator: HashMap<CommunicatorId, Key>,
    pub(crate) links: HashMap<LinkId, (Key, Epoch, Participant)>,
    pub(crate) sharing: Sharing,
    /// What is in flight that background operations wait for.
    pub(crate) busy: BusyTenants,
    /// The order in which aggregators' packets were last sent; kept for its memory.
    pub(crate) packet_order: Vec<(Urgency, usize, Key)>,
    /// How packets to aggregators over UDP are marked.
    pub(crate) dscp: Option<Dscp>,
    pub(crate) turns: Turns,
    /// The device for datagrams to aggregators.
    pub(crate) port: Option<RdmaPort>,
    /// Transfers that a step asks for beside its own; empty between two.
    pub(crate) pending_transfers: Vec<PendingTransfer>,
    /// When links were last closed.
    pub(crate) closed: Nanos,
    /// When an operation or a change of plan was last under way here, or a command was given.
    pub(crate) served: Nanos,
    /// Whether what comes by the network ends no sleep.
    pub(crate) deaf: bool,
    pub(crate) broken: Vec<(Key, String)>,
    pub(crate) aftermath: Aftermath,
    /// Communicators that rest until a time, by when.
    pub(crate) resting: BTreeSet<(Nanos, Key)>,
    pub(crate) reaper: Reaper,
    pub(crate) notify: Box<dyn FnMut(Notice) + Send>,
    /// An epoll set of the transport and every attachment.
    pub(crate) wake: OwnedFd,
    pub(crate) marks: MarkWriter,
    /// With which other threads it shares long passes.
    pub(crate) passes: PassSharing,
    pub(crate) slicing: Slicing,
    pub(crate) start: Instant,
    pub(crate) timers: Nanos,
    pub(crate) stopping: bool,
    /// Whether all stands still, for a hand-over.
    pub(crate) still: bool,
}

impl Engine {
    /// An engine without attachments or communicators. `notify` is called from [`Engine::progress`] and
    /// [`Engine::handle_command`]; it must not block.
    ///
    /// # Errors
    /// If the kernel grants no descriptor or no thread.
    pub fn new(
        transport: Box<dyn Transport + Send>,
        notify: Box<dyn FnMut(Notice) + Send>,
    ) -> std::io::Result<Self> {
        let wake = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        if let Some(fd) = transport.wake_fd() {
            watch(&wake, fd)?;
        }
        Ok(Self {
            transport,
            attachments: Table::default(),
            by_attachment: HashMap::new(),
            communicators: Table::default(),
            by_communicator: HashMap::new(),
            links: HashMap::new(),
            sharing: Sharing::default(),
            busy: BusyTenants::default(),
            packet_order: Vec::new(),
            dscp: None,
            turns: Turns::default(),
            port: None,
            pending_transfers: Vec::with_capacity(64),
            closed: Nanos(0),
            served: Nanos(0),
            deaf: false,
            broken: Vec::with_capacity(8),
            aftermath: Aftermath::default(),
            resting: BTreeSet::new(),
            reaper: Reaper::begin()?,
            notify,
            wake,
            marks: MarkWriter::default(),
            passes: PassSharing::default(),
            slicing: Slicing::default(),
            start: Instant::now(),
            timers: Nanos(0),
            stopping: false,
            still: false,
        })
    }

    /// From now on marks of operations go into this queue. A mark takes a look at the clock and no allocation.
    /// Where the transport's device tells completions, it is timed from now on, too.
    pub fn set_mark_writer(&mut self, marks: MarkWriter) {
        if marks.has_reader() {
            self.transport.time_completions();
        }
        self.marks = marks;
    }

    /// From now on long passes over memory are shared with the other threads of the agent.
    pub fn share_passes(&mut self, passes: PassSharing) {
        self.passes = passes;
    }

    /// Has each action give up its turn after so many bytes that it reads and writes, whatever the time. At least it does 64 of each
    /// operand before. Tests call this, before the first operation: an action then ends in the midst as often as it can.
    pub fn slice_actions(&mut self, bytes: usize) {
        self.slicing = Slicing::each(bytes);
    }

    /// From now on packets to aggregators over UDP carry the code point of their operations' class; none: they stay unmarked.
    pub fn set_dscp(&mut self, dscp: Option<Dscp>) {
        self.dscp = dscp;
    }

    /// From now on packets to aggregators that are there over RDMA go by this device.
    pub fn set_datagram_port(&mut self, port: RdmaPort) {
        self.port = Some(port);
    }

    pub(crate) fn now(&self) -> Nanos {
        self.start.elapsed().into()
    }

    /// Whether [`crate::Command::Stop`] was given and every communicator has been let go.
    pub fn stopped(&self) -> bool {
        self.stopping && self.by_communicator.is_empty() && self.now() >= self.closed.after(DRAIN_TIMEOUT)
    }

    /// Whether only commands are carried out, after a hand-over and before it is over.
    pub(crate) fn is_still(&self) -> bool {
        self.still
    }

    /// What is readable when something from outside brings the engine work.
    pub(crate) fn wake(&self) -> &OwnedFd {
        &self.wake
    }

    /// Whether nobody waits for what comes by the network: for a while no operation was under way, no links were on their way up, no plan
    /// was changed, and no command was given.
    ///
    /// Peers' operations need a rank of this host to call them too, whose descriptor ends any sleep.
    pub(crate) fn is_idle(&self) -> bool {
        self.now() >= self.served.after(IDLE_AFTER)
    }

    /// Has what comes by the network end sleeps, or not. Returns whether that could be set.
    pub(crate) fn attend_network(&mut self, attends: bool) -> bool {
        let set = self.transport.wake_fd().is_none_or(|fd| attend(&self.wake, fd, attends).is_ok());
        if set {
            self.deaf = !attends;
        }
        set
    }

    /// Announces to every attachment and the other threads that the loop will sleep; false if one of them has work.
    pub(crate) fn prepare_doze(&mut self) -> bool {
        let busy =
            self.attachments.iter_mut().filter_map(|attachment| (!attachment.prepare_sleep()).then_some(()));
        busy.count() == 0 && self.passes.prepare_sleep()
    }

    /// Announces to these and the network that the loop will sleep; false if one of them has work.
    pub(crate) fn prepare_sleep(&mut self) -> bool {
        let rest = self.prepare_doze();
        let mut datagrams = 0;
        for key in self.turns.iter() {
            contain(&mut self.communicators, &mut self.aftermath, (key, Task::Packets), |member| {
                let paths = member.epochs.iter_mut().filter_map(|links| links.aggregator.as_mut());
                datagrams += paths.filter_map(|path| (!path.prepare_sleep()).then_some(())).count();
            });
        }
        let hears = !self.deaf || self.attend_network(true);
        rest && hears && datagrams == 0 && self.transport.prepare_sleep()
    }

    /// Takes the announcement back. Ends that did not wake the loop cost no system call.
    pub(crate) fn cancel_sleep(&mut self, woken: &Woken) {
        for attachment in self.attachments.iter_mut() {
            attachment.end.cancel_sleep(woken.contains(attachment.id));
        }
        self.passes.cancel_sleep();
    }

    /// One round: the network, descriptors, transfers, then a slice of turns of communicators. Returns how much was done; 0 means
    /// that only something from outside, or time, can bring more.
    pub fn progress(&mut self, budget: usize) -> usize {
        if self.still {
            return 0;
        }
        let now = self.now();
        let mut worked = self.poll_network(now, budget);
        worked += self.poll_tenants(now);
        self.end_rests(now);
        let mut turns = std::mem::take(&mut self.turns);
        worked += turns.run(now, self);
        self.turns = turns;
        // Turns have told communicators of later times, and to none of them time goes back.
        let now = self.now();
        worked += self.poll_aggregators(now);
        for place in 0..self.attachments.places() {
            let Some(key) = self.attachments.key_at(place) else { continue };
            if self.attachments.get(key).is_some_and(Attachment::is_unflushed) {
                self.served = now;
                self.rings(key, |engine| engine.attachments.get_mut(key).map_or(Ok(()), Attachment::flush));
            }
        }
        worked += self.drop_broken();
        if now >= self.timers.after(TIMER_INTERVAL) {
            self.timers = now;
            self.tick(now);
        }
        worked += self.end_panicked();
        worked
    }

    /// How long the loop may sleep for want of events.
    pub fn sleep_timeout(&mut self) -> Option<Duration> {
        let (now, stopping) = (self.now(), self.stopping.then(|| self.closed.after(DRAIN_TIMEOUT)));
        let mut due = self.resting.first().map(|(due, _)| *due).into_iter().chain(stopping).min();
        for key in self.turns.iter() {
            contain(&mut self.communicators, &mut self.aftermath, (key, Task::Timer), |member| {
                let paths =
                    member.epochs.iter().filter_map(|links| links.aggregator.as_ref()?.poll_timeout(now));
                let frames = member.backlog.poll_timeout();
                let gap = member.gaps.due();
                due = paths.chain(member.core.poll_timeout()).chain(frames).chain(gap).chain(due).min();
            });
        }
        // Who waits for a communicator that has panicked is told in the next round.
        if !self.aftermath.panicked.is_empty() || !self.aftermath.woken.is_empty() {
            due = Some(now);
        }
        Some(due?.since(now).max(Duration::from_millis(1)))
    }

    /// Those to which something has happened, or whose time has come, have turns again.
    fn end_rests(&mut self, now: Nanos) {
        let Self { communicators: members, aftermath, resting, turns, .. } = self;
        while let Some((due, key)) = resting.first().copied()
            && due <= now
        {
            resting.pop_first();
            if let Some(Some(tenant)) = contain(members, aftermath, (key, Task::Timer), |member| {
                member.core.handle_timeout(now);
                member.wake().map(|_| member.tenant)
            }) {
                turns.wake(tenant, key);
            }
        }
        for (due, key) in aftermath.woken.drain(..) {
            resting.remove(&(due, key));
            if let Some(member) = members.get(key) {
                turns.wake(member.tenant, key);
            }
        }
    }

    /// Has those rest that have nothing to do, and tells the others that time has passed.
    fn tick(&mut self, now: Nanos) {
        if self.attachments.iter().any(Attachment::has_calls) {
            self.served = now;
        }
        let Self { communicators: members, aftermath, resting, turns, served, .. } = self;
        turns.retain(|key| {
            let ticked = contain(members, aftermath, (key, Task::Timer), |member| {
                if member.is_changing() {
                    *served = now;
                }
                member.tick(now)
            });
            match ticked {
                Some(Some(due)) => {
                    if due != Nanos(u64::MAX) {
                        resting.insert((due, key));
                    }
                    false
                }
                Some(None) => true,
                None => false,
            }
        });
    }

    pub(crate) fn poll_network(&mut self, now: Nanos, budget: usize) -> usize {
        let Self { transport, communicators: members, links, marks, aftermath, .. } = self;
        let mut ups = Vec::new();
        let mut downs = Vec::new();
        let worked = transport.progress(budget, &mut |link, event| {
            let Some(&(key, epoch, peer)) = links.get(&link) else { return };
            contain(members, aftermath, (key, Task::Frame), |member| match event {
                Event::Up => {
                    if member.link_up(epoch, peer) {
                        ups.push((key, epoch));
                    }
                }
                Event::Received { header, payload, posted } => {
                    handle_frame(member, now, (epoch, peer), header, payload, posted, marks);
                }
                Event::Sent { tag } => {
                    let (_, channel, step) = untag(tag);
                    member.core.handle_completion(now, channel, step);
                }
                Event::Completed { path, took, bytes } => {
                    marks.write(MarkKind::Completed, || Mark {
                        segment: Nanos::from(took).0,
                        bytes,
                        epoch: epoch.0,
                        peer: peer.0,
                        channel: path.into(),
                        ..member.mark()
                    });
                }
                Event::Down { reason } => {
                    member.record_link_down(peer, &reason);
                    downs.push((key, epoch, peer, link));
                }
            });
        });
        for (key, epoch) in ups {
            self.contain((key, Task::Links), |engine| engine.handle_epoch_up(key, epoch));
        }
        for (key, epoch, peer, link) in downs {
            self.links.remove(&link);
            self.contain((key, Task::Links), |engine| engine.handle_link_down(key, epoch, peer));
        }
        worked
    }

    pub(crate) fn poll_tenants(&mut self, now: Nanos) -> usize {
        let mut worked = 0;
        for place in 0..self.attachments.places() {
            let Some(key) = self.attachments.key_at(place) else { continue };
            worked += self.rings(key, |engine| engine.poll_tenant(now, key)).unwrap_or(0);
        }
        worked
    }

    fn poll_tenant(&mut self, now: Nanos, key: Key) -> Result<usize, EndError> {
        let Self {
            attachments,
            communicators: members,
            pending_transfers: asked,
            transport,
            broken,
            aftermath,
            ..
        } = self;
        let Some(attachment) = attachments.get_mut(key) else { return Ok(0) };
        let mut counted = false;
        let mut worked = attachment.end.progress(&mut |tag| {
            if tag == COUNTS {
                counted = true;
                return;
            }
            let (of, channel, step) = untag(tag);
            contain(members, aftermath, (of, Task::Transfer), |member| {
                asked.extend(handle_transferred(now, member, transport.as_mut(), (of, channel, step)));
            });
        })?;
        // Of a message, it may be to another attachment.
        for asked in asked.drain(..) {
            transfer(attachments, broken, asked);
        }
        let Some(attachment) = attachments.get_mut(key) else { return Ok(worked) };
        worked += attachment.transfer_waiting()?;
        let mut next = if counted { attachment.take_counted()? } else { attachment.take_deferred() };
        while next.is_some() || worked < SUBMISSIONS {
            let (submission, counts) = match next.take() {
                Some(taken) => taken,
                None => match attachment.submission()? {
                    Some(submission) => (submission, None),
                    None => break,
                },
            };
            let called =
                submit(now, attachment, (&mut *members, &mut *aftermath), &submission, counts.clone());
            // If it were refused, the next one would be matched with what other ranks call in its place.
            if matches!(called, Err(Code::Busy)) {
                attachment.defer((submission, counts));
                break;
            }
            worked += 1;
            self.served = now;
            match called {
                Ok(Submitted::Message) => {}
                Ok(Submitted::WithoutCounts(region)) => attachment.fetch_counts(key, submission, region)?,
                Ok(Submitted::Collective(mark, checked)) => {
                    let looked =
                        || zeros(attachment, &checked.signature, checked.input, OperationId(mark.operation));
                    self.marks.write(MarkKind::Called, || Mark { segment: looked(), ..mark });
                }
                Err(status) => attachment.refuse(&submission, status)?,
            }
        }
        Ok(worked)
    }

    /// What a communicator's turn may be. One that has failed, or that changes its plan, waits for no gap.
    fn leave(&mut self, now: Nanos, key: Key) -> Leave {
        let Some(member) = self.communicators.get_mut(key) else { return Leave::Whole };
        let goes_on = member.core.failure().is_none() && !member.is_changing();
        if !member.is_background() || !goes_on {
            member.gaps = Gaps::default();
            return Leave::Whole;
        }
        let leave = member.gaps.leave(now, member.is_tenant_busy());
        // Who waits may have something to do, and so has no rest.
        member.pending |= leave == Leave::Nothing;
        leave
    }

    /// Executes a communicator's actions until it has none, or its time is over. Returns how many and whether there may be more.
    fn run_actions(&mut self, now: Nanos, key: Key, until: Option<Nanos>) -> (usize, bool) {
        let Some(member) = self.communicators.get_mut(key) else { return (0, false) };
        member.classify_links(self.transport.as_mut());
        let mut worked = member.backlog.flush(self.transport.as_mut());
        if !member.backlog.is_empty() && member.core.failure().is_some() {
            member.backlog.expire(now);
        }
        while let Some(member) = self.communicators.get_mut(key) {
            if !member.backlog.is_empty() {
                break;
            }
            let left = member.take_unfinished();
            let next = left.or_else(|| {
                Some(Unfinished { action: member.core.poll(now)?, progress: Progress::default() })
            });
            let Some(Unfinished { action, progress }) = next else {
                if member.core.finished() || member.core.failure().is_some() {
                    let status = member.core.failure().map_or(Code::Destroyed, status_of);
                    let (communicator, ended) = (member.id, member.ended);
                    self.forget_communicator(key, status);
                    if !ended {
                        (self.notify)(Notice::Closed { communicator });
                    }
                }
                break;
            };
            worked += 1;
            let long = is_long(&action);
            let mut slices = self.slicing.begin(self.start, until, progress);
            if let Some(action) = self.execute(now, key, action, &mut slices) {
                if let Some(member) = self.communicators.get_mut(key) {
                    member.core.handle_progress(now, &action);
                    member.unfinished = Some(slices.stand_by(action));
                }
                return (worked, true);
            }
            let over = match until {
                None => worked >= QUANTUM,
                Some(until) => (long || worked.is_multiple_of(QUANTUM)) && self.now() >= until,
            };
            if over {
                return (worked, true);
            }
        }
        (worked, false)
    }

    /// Sends what goes at once although a communicator waits for a gap: words that carry nothing of an operation. Operations that need no
    /// more than those end, too. Returns how many.
    fn run_control(&mut self, now: Nanos, key: Key) -> usize {
        let Some(member) = self.communicators.get_mut(key) else { return 0 };
        member.classify_links(self.transport.as_mut());
        let mut worked = member.backlog.flush(self.transport.as_mut());
        while let Some(member) = self.communicators.get_mut(key) {
            if !member.backlog.is_empty() {
                break;
            }
            let midst = member.unfinished.as_ref().map(|unfinished| &unfinished.action);
            let Some(action) = member.core.poll_control(now, midst) else { break };
            worked += 1;
            let mut slices = self.slicing.unending().begin(self.start, None, Progress::default());
            let left = self.execute(now, key, action, &mut slices);
            debug_assert!(left.is_none(), "a word moves no bytes");
        }
        worked
    }

    /// Finishes what communicators are in the midst of, however long that takes.
    pub(crate) fn finish_actions(&mut self) {
        for place in 0..self.communicators.places() {
            let Some(key) = self.communicators.key_at(place) else { continue };
            let nothing =
                |member: &CommunicatorState| member.unfinished.is_none() && member.fetched.is_empty();
            if self.communicators.get(key).is_none_or(nothing) {
                continue;
            }
            self.contain((key, Task::Turn), |engine| {
                let (now, slicing) = (engine.now(), engine.slicing.unending());
                let take = |engine: &mut Self| engine.communicators.get_mut(key)?.take_unfinished();
                while let Some(Unfinished { action, progress }) = take(engine) {
                    let mut slices = slicing.begin(engine.start, None, progress);
                    let left = engine.execute(now, key, action, &mut slices);
                    debug_assert!(left.is_none(), "nothing ends a turn, and yet it is over");
                }
            });
        }
    }

    /// Executes an action, or goes on with it. Returns it if its turn is over in its midst.
    fn execute(&mut self, now: Nanos, key: Key, action: Action, slices: &mut Slices) -> Option<Action> {
        let member = self.communicators.get_mut(key)?;
        let communicator = member.id;
        match action {
            Action::Step { channel, step, sources, sends } => {
                return self.step(now, key, (channel, step), (sources, sends), slices);
            }
            Action::P2pSend { rank, token, offset, step, message } => {
                self.p2p_send(key, (rank, token), (offset, step), message)
            }
            Action::P2pReceive { rank, token, offset, step, message } => {
                let done = self.p2p_receive(now, key, (rank, token), (offset, step), message, slices);
                return (!done).then_some(Action::P2pReceive { rank, token, offset, step, message });
            }
            Action::P2pCopy { from, to, offset, bytes, step } => {
                let done = self.p2p_copy(now, key, (from, to), (offset, bytes), step, slices);
                return (!done).then_some(Action::P2pCopy { from, to, offset, bytes, step });
            }
            Action::P2pComplete { rank, token, receipt } => self.p2p_complete(key, rank, token, &receipt),
            Action::Post { channel, step, peer, sequence } => self.post(key, (channel, step), peer, sequence),
            Action::Join { epoch, session } => self.join(now, key, epoch, session, false),
            Action::ProbeAggregator { epoch, session } => self.join(now, key, epoch, session, true),
            Action::Leave { epoch } => {
                if let Some(path) = member.path(epoch) {
                    path.leave();
                }
            }
            Action::Aggregate { channel } => {
                let done = self.aggregate(now, key, channel, slices);
                return (!done).then_some(Action::Aggregate { channel });
            }
            Action::CopyOut { channel } => {
                let done = self.copy_out(key, channel, slices);
                return (!done).then_some(Action::CopyOut { channel });
            }
            Action::Send { to, epoch, message } => self.send(key, to, epoch, &message),
            Action::Complete { rank, token, receipt } => self.complete(key, rank, token, &receipt),
            Action::Fail { rank, token, operation } => self.fail(key, rank, token, operation),
            Action::Ended(failure) => self.handle_ended(key, failure),
            // Others would wait for its slot as long as it waits for gaps, here or on another host.
            Action::RequestSlot { slot } if member.is_background() => {
                member.unasked = Some(slot);
                member.core.handle_slot_granted(slot);
            }
            Action::RequestSlot { slot } => (self.notify)(Notice::SlotRequested { communicator, slot }),
            Action::ReleaseSlot { slot } => {
                if member.unasked.take_if(|unasked| *unasked == slot).is_none() {
                    (self.notify)(Notice::SlotReleased { communicator, slot });
                }
            }
            Action::Switched { epoch, segment } => {
                tracing::debug!(communicator = communicator.0, %epoch, segment = segment.0, "switch is agreed on");
                debug_assert!(
                    member.switching.is_none_or(|(before, _)| before < epoch),
                    "epochs never go back"
                );
                member.switching = Some((epoch, segment));
                let before = member.links(member.core.link_epoch());
                let rates = member.links(epoch).zip(before).map(|(links, before)| links.other_rates(before));
                for (link, rate) in rates.into_iter().flatten() {
                    self.transport.pace(link, rate);
                }
            }
            Action::Retire { epoch: retired } => {
                if let Some((epoch, segment)) = member.switching.take_if(|(epoch, _)| retired < *epoch) {
                    (self.notify)(Notice::Switched { communicator, epoch, segment });
                }
                self.drop_links(communicator, retired);
            }
        }
        None
    }

    /// Executes a step of the segment on a channel: its memory operands, then its sends. Or goes on with that. Returns the action if
    /// the turn is over in its midst.
    fn step(
        &mut self,
        now: Nanos,
        key: Key,
        (channel, step): (ChannelId, StepId),
        (sources, mut sends): (Messages, Messages),
        slices: &mut Slices,
    ) -> Option<Action> {
        if slices.is_fetched() {
            return self.scale(now, key, (channel, step), slices);
        }
        let member = self.communicators.get_mut(key)?;
        if !slices.is_resumed()
            && let Err(error) = begin_step(member, &self.attachments, &self.marks, channel, step)
        {
            member.fail_internal(&error.to_string());
            return None;
        }
        // It was counted with the step that copied its blocks.
        if member.is_copied(channel, step) {
            return None;
        }
        let tag = tag(key, channel, step);
        let context = Context { member, attachments: &self.attachments, channel, sources: &sources };
        let (by, asked) = ((&mut self.passes, &mut *slices), &mut self.pending_transfers);
        let result = run_step(&context, by, key, (step, tag), asked);
        for pending in self.pending_transfers.drain(..) {
            transfer(&mut self.attachments, &mut self.broken, pending);
        }
        let whole = match &result {
            // Codecs count the bytes of all their passes.
            Ok(StepResult::Unfinished | StepResult::Coded(_)) => None,
            Ok(StepResult::Copied { steps }) => Some(touched(member, channel, step, *steps)),
            _ => Some(touched(member, channel, step, 1)),
        };
        member.bytes_touched += slices.charge(whole);
        let from = match result {
            Ok(StepResult::Sends(from)) => from,
            Ok(StepResult::Coded(outcome)) => {
                member.record_step(channel, &outcome, sends.len());
                let bytes = outcome.from.as_ref().map_or(0, Span::bytes) as u32;
                sends.iter_mut().for_each(|message| message.bytes = bytes);
                outcome.from
            }
            Ok(StepResult::Unfinished) => return Some(Action::Step { channel, step, sources, sends }),
            Ok(StepResult::Copied { steps }) => {
                member.set_copied(channel, step, steps);
                return None;
            }
            Ok(StepResult::Transferred) => {
                member.core.handle_completion(now, channel, step);
                return None;
            }
            Ok(StepResult::Transfer(pending)) if pending.span.bytes() == 0 => {
                member.core.handle_completion(now, channel, step);
                return None;
            }
            Ok(StepResult::Transfer(pending)) => {
                transfer(&mut self.attachments, &mut self.broken, pending);
                return None;
            }
            Err(error) => {
                member.blame(&error);
                return None;
            }
        };
        crate::containment::strike(Task::Step);
        member.bytes_received += sources.iter().map(|message| u64::from(message.bytes)).sum::<u64>();
        let empty = send_all(member, self.transport.as_mut(), &sends, from.as_ref(), tag);
        for sent in &sends {
            self.marks.write(MarkKind::Sent, || of_message(member, sent.peer, &sent.header, sent.bytes));
        }
        (0..empty).for_each(|_| member.core.handle_completion(now, channel, step));
        None
    }

    /// Scales what a step has fetched, or goes on with that; then the step is over. Returns it if the turn is over in its midst.
    fn scale(
        &mut self,
        now: Nanos,
        key: Key,
        (channel, step): (ChannelId, StepId),
        slices: &mut Slices,
    ) -> Option<Action> {
        let member = self.communicators.get_mut(key)?;
        let scaled = scale_fetched(member, (channel, step), (&mut self.passes, &mut *slices));
        member.bytes_touched += slices.charge(None);
        match scaled {
            Ok(true) => member.core.handle_completion(now, channel, step),
            Ok(false) => {
                let (sources, sends) = (Messages::new(), Messages::new());
                return Some(Action::Step { channel, step, sources, sends });
            }
            Err(error) => member.fail_internal(&error.to_string()),
        }
        None
    }

    /// Offers the transport where a payload to come may land.
    fn post(
        &mut self,
        key: Key,
        (channel, step): (ChannelId, StepId),
        peer: Participant,
        sequence: Sequence,
    ) {
        let Some(member) = self.communicators.get_mut(key) else { return };
        if let Err(error) = member.reserve_staging(channel) {
            return member.fail_internal(&error.to_string());
        }
        let sources = ArrayVec::new();
        let context = Context { member, attachments: &self.attachments, channel, sources: &sources };
        let landing = Landing { ring: channel.0, sequence: sequence.0 };
        if let Err(error) = post(&context, self.transport.as_mut(), step, peer, landing) {
            member.fail_internal(&error.to_string());
        }
    }

    fn send(&mut self, key: Key, to: Participant, epoch: Epoch, message: &Message) {
        let Some(member) = self.communicators.get_mut(key) else { return };
        let Some(links) = member.epochs.iter().find(|links| links.epoch == epoch) else { return };
        let channel = if message.control.is_some() { ChannelId(0) } else { message.header.channel };
        let Some(route) = links.route(to, channel) else { return };
        let mut buffer = [0; MAX_MESSAGE];
        let used = message.encode(&mut buffer);
        member.backlog.send(self.transport.as_mut(), route, buffer.get(..used).unwrap_or(&[]), None);
    }

    fn complete(&mut self, key: Key, rank: Rank, token: Token, receipt: &Receipt) {
        let Some(member) = self.communicators.get_mut(key) else { return };
        // Once for all local ranks, whom all the receipt concerns.
        if let Some(coded) = &receipt.coded
            && receipt.signature.collective.reduces()
            && member.locals.first().is_some_and(|first| first.rank == rank)
        {
            self.marks.write(MarkKind::Coded, || of_coded(member, receipt, coded));
        }
        if let Some(aggregated) = receipt.aggregation
            && member.locals.first().is_some_and(|first| first.rank == rank)
        {
            let (operation, segment) = (receipt.operation.0, aggregated.fallback_segments);
            self.marks.write(MarkKind::Aggregated, || Mark { operation, segment, ..member.mark() });
        }
        let Some(call) = member.call(token).copied() else { return };
        let Some(local) = member.local(rank).copied() else { return };
        let attachment = self.attachments.get(local.attachment);
        let looked = |end| zeros(end, &receipt.signature, call.output, receipt.operation);
        let segment = || attachment.map_or(0, looked);
        self.marks.write(MarkKind::Ended, || Mark {
            segment: segment(),
            ..of_end(member, rank, receipt.operation)
        });
        let blocks = receipt.signature.collective.max_blocks(member.ranks);
        let most = receipt.signature.count.saturating_mul(blocks.into());
        let own = call.input.bytes.max(call.output.bytes) / receipt.signature.dtype.size() as u64;
        let elements = if receipt.signature.uneven { own } else { most }.max(1);
        let bits = receipt.wire_bytes.saturating_mul(8 * 256) / elements;
        let Signature { collective, root, .. } = receipt.signature;
        let request =
            Request { collective, root, coded: receipt.coded.is_some(), algorithm: receipt.algorithm };
        let [error, measured] = receipt.coded.map_or([0.0; 2], |coded| vnmse(&coded));
        let completion = Completion {
            version: ABI_VERSION,
            status: Code::Ok.code(),
            communicator: local.handle.0,
            cookie: call.cookie.0,
            operation: receipt.operation.0,
            wire_bytes: receipt.wire_bytes,
            bits_per_element_x256: u32::try_from(bits).unwrap_or(u32::MAX),
            algorithm: match &receipt.aggregation {
                Some(aggregated) if aggregated.segments > 0 => AGGREGATED,
                _ => harmonaize_plan::algorithm_code(member.participants, request),
            },
            fallback: fell_back(receipt).into(),
            error: error.to_bits(),
            measured_error: measured.to_bits(),
            codec: receipt.coded.map_or(0, |coded| coded.codec),
            ..Completion::default()
        };
        // Last: who waits for a call that is forgotten hears nothing of a panic.
        member.forget(token);
        self.report(local.attachment, &completion);
    }

    fn fail(&mut self, key: Key, rank: Rank, token: Token, operation: OperationId) {
        let Some(member) = self.communicators.get_mut(key) else { return };
        member.failed += 1;
        self.marks.write(MarkKind::Failed, || of_end(member, rank, operation));
        let status = member.core.failure().map_or(Code::Internal, status_of);
        let Some(call) = member.call(token).copied() else { return };
        let Some(local) = member.local(rank).copied() else { return };
        member.forget(token);
        let completion = Completion {
            version: ABI_VERSION,
            status: status.code(),
            communicator: local.handle.0,
            cookie: call.cookie.0,
            operation: operation.0,
            ..Completion::default()
        };
        self.report(local.attachment, &completion);
    }

    pub(crate) fn report(&mut self, attachment: Key, completion: &Completion) {
        let Some(end) = self.attachments.get_mut(attachment) else { return };
        if let Err(error) = end.complete(completion) {
            self.broken.push((attachment, error.to_string()));
        }
    }

    fn drop_broken(&mut self) -> usize {
        let count = self.broken.len();
        while let Some((key, reason)) = self.broken.pop() {
            if let Some(attachment) = self.attachments.get(key).map(|attachment| attachment.id) {
                self.detach(key);
                (self.notify)(Notice::Detached { attachment, reason });
            }
        }
        count
    }
}

/// Whether an action may take a while: it moves bytes of tensors.
fn is_long(action: &Action) -> bool {
    match action {
        Action::Step { .. }
        | Action::CopyOut { .. }
        | Action::Aggregate { .. }
        | Action::P2pSend { .. }
        | Action::P2pReceive { .. }
        | Action::P2pCopy { .. } => true,
        Action::Post { .. }
        | Action::Join { .. }
        | Action::ProbeAggregator { .. }
        | Action::Leave { .. }
        | Action::P2pComplete { .. }
        | Action::Send { .. }
        | Action::Complete { .. }
        | Action::Fail { .. }
        | Action::Ended(_)
        | Action::RequestSlot { .. }
        | Action::ReleaseSlot { .. }
        | Action::Switched { .. }
        | Action::Retire { .. } => false,
    }
}

impl Work for Engine {
    fn now(&self) -> Nanos {
        Self::now(self)
    }

    fn alone(&self) -> bool {
        self.by_communicator.len() <= 1
    }

    fn urgency(&self, key: Key) -> Option<Urgency> {
        self.communicators.get(key).map(CommunicatorState::urgency)
    }

    fn run(&mut self, now: Nanos, key: Key, until: Option<Nanos>) -> Turn {
        let until = match self.leave(now, key) {
            Leave::Whole => until,
            Leave::Action => Some(now),
            Leave::Nothing => {
                let words = self.contain((key, Task::Turn), |engine| engine.run_control(now, key));
                return Turn { worked: words.unwrap_or(1), ..Turn::default() };
            }
        };
        let moved = |member: &CommunicatorState| {
            (member.bytes_sent.saturating_add(member.bytes_received), member.bytes_touched)
        };
        let before = self.communicators.get(key).map_or((0, 0), moved);
        let ran = self.contain((key, Task::Turn), |engine| engine.run_actions(now, key, until));
        let (worked, unfinished) = ran.unwrap_or((1, false));
        if let Some(member) = self.communicators.get_mut(key) {
            member.pending = worked > 0 || unfinished;
        }
        let after = self.communicators.get(key).map_or(before, moved);
        let (carried, touched) = (after.0.saturating_sub(before.0), after.1.saturating_sub(before.1));
        Turn { worked, carried, touched, helped: self.passes.take_helped(), unfinished }
    }
}

/// Gets a segment ready for a step. It prepares its staging and its mark, and before its first step what is
/// kept of it.
fn begin_step(
    member: &mut CommunicatorState,
    attachments: &Table<Attachment>,
    marks: &MarkWriter,
    channel: ChannelId,
    step: StepId,
) -> Result<(), MemoryError> {
    member.reserve_staging(channel)?;
    if marks.has_reader()
        && let Some(mark) = member.begin_mark(channel)
    {
        marks.write(MarkKind::SegmentBegan, || mark);
    }
    if step != StepId(0) {
        return Ok(());
    }
    member.forget_sums(channel);
    member.prepare_resume(channel)?;
    feedback::reserve(member, channel, attachments)
}

/// Executes a step's memory operands, or goes on with them. The transfers of error feedback that it needs go into `pending`.
fn run_step(
    context: &Context<'_>,
    (passes, slices): (&mut PassSharing, &mut Slices),
    key: Key,
    (step, tag): (StepId, Tag),
    pending: &mut Vec<PendingTransfer>,
) -> Result<StepResult, ExecuteError> {
    if step == StepId(0) && !feedback::begin(context, (&mut *passes, &mut *slices), key, pending)? {
        return Ok(StepResult::Unfinished);
    }
    let result = run(context, (passes, slices), step, tag)?;
    if let StepResult::Coded(CodedStep { residual_part: Some(part), .. }) = &result {
        feedback::store_residual(context, key, *part, pending)?;
    }
    Ok(result)
}

/// Whether something went another way than it was to.
fn fell_back(receipt: &Receipt) -> bool {
    receipt.coded.is_some_and(|coded| coded.uncompressed_chunks)
        || receipt.aggregation.is_some_and(|aggregated| aggregated.fallback_segments > 0)
}

/// Takes a frame in. One that is not of the protocol ends the communicator.
fn handle_frame(
    member: &mut CommunicatorState,
    now: Nanos,
    (epoch, peer): (Epoch, Participant),
    header: &[u8],
    payload: Option<(Landing, u32)>,
    posted: bool,
    marks: &MarkWriter,
) {
    let bytes = payload.map_or(0, |(_, bytes)| bytes);
    match Message::decode(header) {
        Some((header, control))
            if payload.is_none_or(|(l, _)| l.ring == header.channel.0 && l.sequence == header.sequence.0) =>
        {
            if header.kind == Kind::Data as u8 {
                marks.write(MarkKind::Received, || of_message(member, peer, &header, bytes));
            }
            member.core.handle_frame(now, peer, epoch, header, control, Payload { bytes, posted });
        }
        _ => member.core.handle_breach(peer),
    }
}

/// Starts a transfer, or notes why an attachment is broken.
pub(crate) fn transfer(
    attachments: &mut Table<Attachment>,
    broken: &mut Vec<(Key, String)>,
    transfer: PendingTransfer,
) {
    let key = transfer.attachment;
    if let Some(Err(error)) = attachments.get_mut(key).map(|attachment| attachment.transfer(transfer)) {
        broken.push((key, error.to_string()));
    }
}

/// What became of a descriptor.
enum Submitted {
    /// A send or a receive was called.
    Message,
    /// A collective was called; what is to be marked of it.
    Collective(Mark, CheckedCall),
    /// Nothing yet: its counts are there, in memory that is not mapped.
    WithoutCounts(Region),
}

/// What follows from the end of a transfer: another one, if any.
fn handle_transferred(
    now: Nanos,
    member: &mut CommunicatorState,
    transport: &mut dyn Transport,
    (key, channel, step): (Key, ChannelId, StepId),
) -> Option<PendingTransfer> {
    // Nothing follows from what ends after its communicator.
    if member.ended {
        return None;
    }
    if channel == member.core.p2p_channel() {
        return p2p::handle_transferred(now, member, transport, (key, step));
    }
    if is_for_aggregator(step) {
        aggregated::handle_transferred(now, member, channel, step);
        return None;
    }
    match feedback::is_untracked(step) {
        // In the communicator's turn, for it may take a while.
        None if is_scaled(member, (channel, step)) => member.fetched.push_back((channel, step)),
        None => member.core.handle_completion(now, channel, step),
        Some(place) => return place.and_then(|place| feedback::carried(member, key, channel, place)),
    }
    None
}

/// Takes a descriptor in, with its counts if they were fetched.
fn submit(
    now: Nanos,
    attachment: &Attachment,
    (members, aftermath): (&mut Table<CommunicatorState>, &mut Aftermath),
    submission: &Submission,
    fetched: Option<Arc<[u64]>>,
) -> Result<Submitted, Code> {
    let (key, rank) = attachment.find(CommunicatorHandle(submission.communicator))?;
    // One that is not there has panicked, and is about to be ended.
    let calls = members.get(key).ok_or(Code::Internal)?.calls_in_flight();
    let submitted = contain(members, aftermath, (key, Task::Call), |member| {
        call(now, attachment, (member, rank), submission, fetched)
    });
    submitted.unwrap_or_else(|| {
        let remains = aftermath.panicked.last().and_then(|last| last.remains.as_ref());
        // A call that was remembered is ended with the others.
        match remains.is_some_and(|remains| remains.calls_in_flight() > calls) {
            true => Ok(Submitted::Message),
            false => Err(Code::Internal),
        }
    })
}

/// Calls what a descriptor asks for.
fn call(
    now: Nanos,
    attachment: &Attachment,
    (member, rank): (&mut CommunicatorState, Rank),
    submission: &Submission,
    fetched: Option<Arc<[u64]>>,
) -> Result<Submitted, Code> {
    if let Some(direction) = Direction::from_code(submission.collective) {
        let checked = check_p2p(submission, direction, &*attachment.end, member.ranks)?;
        let timeout = attachment.timeout(submission.timeout_ns)?;
        let bytes = checked.input.bytes.max(checked.output.bytes);
        let urgency = urgency_of(now, bytes, submission);
        return p2p::submit(now, member, rank, (Cookie(submission.cookie), timeout, urgency), checked)
            .map(|()| Submitted::Message);
    }
    let counts = match (fetched, region_of_counts(submission, member.ranks)?, attachment.end.memory()) {
        (Some(fetched), ..) => Some(fetched),
        (None, None, _) => None,
        (None, Some(region), Some(memory)) => Some(read_counts(memory, region)?),
        (None, Some(region), None) if attachment.end.holds(region.offset, region.bytes) => {
            return Ok(Submitted::WithoutCounts(region));
        }
        (None, Some(_), None) => return Err(Code::OutOfRange),
    };
    let checked = check(submission, &*attachment.end, (rank, member.ranks), counts.as_deref())?;
    let timeout = attachment.timeout(submission.timeout_ns)?;
    let CheckedCall { input, output, feedback, factor, .. } = checked;
    let cookie = Cookie(submission.cookie);
    let urgency = urgency_of(now, input.bytes.max(output.bytes), submission);
    let pending = Pending { rank: Some(rank), cookie, input, output, feedback, factor, urgency };
    let token = member.remember(pending).ok_or(Code::Busy)?;
    let call = Call { signature: checked.signature, counts, in_place: checked.in_place, token, timeout };
    let result = member.core.handle_call(now, rank, call);
    if result.is_err() {
        member.forget(token);
    }
    match result {
        Ok(operation) => {
            let bytes = checked.input.bytes.max(checked.output.bytes);
            let channel = 1 + u32::from(checked.signature.collective.code());
            let mark = Mark { operation: operation.0, rank: rank.0, bytes, channel, ..member.mark() };
            Ok(Submitted::Collective(mark, checked))
        }
        Err(error) => Err(refusal(&error)),
    }
}

/// How urgent a descriptor says that its operation is.
fn urgency_of(now: Nanos, bytes: u64, submission: &Submission) -> Urgency {
    let Submission { tensor_class, priority, deadline_ns, iteration, .. } = *submission;
    Urgency::new(now, bytes, (tensor_class, priority, deadline_ns)).of_iteration(iteration)
}

/// What a tenant's completion says of a call that is refused.
pub(crate) fn refusal(error: &CoreError) -> Code {
    match error {
        CoreError::Full => Code::Busy,
        CoreError::NotLocal(_) => Code::BadCommunicator,
        CoreError::BadPlan(_) | CoreError::Plan(_) | CoreError::BadRoot(_) => Code::BadRank,
        CoreError::BadCounts => Code::OutOfRange,
        CoreError::Ended(failure) => status_of(failure),
    }
}
