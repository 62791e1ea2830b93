//! Communicators and attachments coming and going: commands, links up and down, the end.

use super::Engine;
use crate::attachment::Attachment;
use crate::command::{Aggregator, AttachmentId, Command, Formation, MAX_PATIENCE, Notice, Peer, Status};
use crate::communicator_state::{Links, status_of};
use crate::containment::{PanicScope, Task, contain, describe, guarded};
use crate::error::PrepareError;
use crate::formation::{close_links, form, open_links, open_path, unsupported};
use crate::table::Key;
use crate::wake::watch_end;
use harmonaize_abi::Status as Code;
use harmonaize_abi::{CommunicatorId, Epoch};
use harmonaize_core::{EpochPlan, Failure, Interleaving};
use harmonaize_plan::Participant;
use harmonaize_transport::{Flow, LinkId, Owner};
use rustix::event::epoll;

impl Engine {
    /// Carries out a command.
    pub fn handle_command(&mut self, command: Command) {
        self.served = self.now();
        self.dispatch(command);
        self.end_panicked();
    }

    fn dispatch(&mut self, command: Command) {
        match command {
            Command::Attach { attachment, end, operation_timeout } => {
                let watched =
                    watch_end(&self.wake, attachment, end.wake_fd()).map_err(|error| error.to_string());
                let entered = watched.and_then(|()| {
                    self.attachments
                        .insert(Attachment::new(attachment, end, operation_timeout))
                        .ok_or("too many attachments".into())
                });
                match entered {
                    Ok(key) => drop(self.by_attachment.insert(attachment, key)),
                    Err(reason) => (self.notify)(Notice::Detached { attachment, reason }),
                }
            }
            Command::Detach { attachment } => {
                if let Some(key) = self.by_attachment.get(&attachment).copied() {
                    self.detach(key);
                }
            }
            Command::AddRegion { attachment, base, memory } => {
                let end = self.attachment(attachment);
                let done = end.is_some_and(|end| end.end.add_region(base, memory).is_ok());
                (self.notify)(Notice::Regions { attachment, base, done });
            }
            Command::RemoveRegion { attachment, base } => {
                let done = self.remove_region(attachment, base);
                (self.notify)(Notice::Regions { attachment, base, done });
            }
            Command::Form(formation) => self.form(*formation),
            Command::Change { communicator, plan, peers, aggregator } => {
                self.change(communicator, *plan, peers, aggregator.as_deref());
            }
            Command::AllPrepared { communicator, epoch } => {
                self.with_member(communicator, |member| member.core.handle_all_prepared(epoch));
            }
            Command::Interleave { communicator, interleaving } => {
                let bounded = |rules: Interleaving| Interleaving {
                    max_wait: rules.max_wait.min(MAX_PATIENCE),
                    idle_timeout: rules.idle_timeout.min(MAX_PATIENCE),
                    ..rules
                };
                let rules = interleaving.map(bounded);
                self.with_member(communicator, |member| member.core.set_interleaving(rules));
            }
            Command::SlotGranted { communicator, slot } => {
                self.with_member(communicator, |member| member.core.handle_slot_granted(slot));
            }
            Command::Abandon { communicator, epoch } => {
                if self.with_member(communicator, |member| member.core.abandon(epoch)) == Some(true) {
                    self.drop_links(communicator, epoch);
                }
            }
            Command::Leave { communicator, rank } => {
                self.with_member(communicator, |member| member.core.handle_rank_departed(rank));
                self.attachments.iter_mut().for_each(|attachment| attachment.leave(communicator, rank));
            }
            Command::Dissolve { communicator, failure } => {
                self.with_member(communicator, |member| member.core.dissolve(failure));
            }
            Command::Status { id } => {
                let (now, mut communicators) = (self.now(), Vec::new());
                self.for_each_communicator(Task::Report, |member| communicators.push(member.status(now)));
                let attachments = self.attachments.iter().map(Attachment::status).collect();
                let status = Status { communicators, attachments };
                (self.notify)(Notice::Status { id, status });
            }
            Command::HandOver { thread } => self.handle_hand_over(thread),
            Command::TakeOver { thread, image, leases } => self.handle_take_over(thread, *image, leases),
            Command::Resume => self.handle_resume(),
            Command::Stop => {
                self.stopping = true;
                // Completions that tenants have not taken name results in memory that ends with this process.
                self.attachments.iter_mut().for_each(|attachment| attachment.end.leave());
                self.for_each_communicator(Task::Command, |member| member.core.shut_down());
            }
        }
    }

    fn attachment(&mut self, attachment: AttachmentId) -> Option<&mut Attachment> {
        let key = self.by_attachment.get(&attachment)?;
        self.attachments.get_mut(*key)
    }

    /// Lets a region go that no call in flight uses; whether it has.
    fn remove_region(&mut self, attachment: AttachmentId, base: u64) -> bool {
        let Some(key) = self.by_attachment.get(&attachment).copied() else { return false };
        let Some(end) = self.attachments.get_mut(key).map(|attachment| &mut attachment.end) else {
            return false;
        };
        let Some(memory) = end.remove_region(base) else { return false };
        let range = base..=base.saturating_add(memory.bytes() as u64);
        if !self.communicators.iter().any(|member| member.uses(key, &range)) {
            self.reaper.reap(memory);
            return true;
        }
        // Where it was there is room.
        let kept = end.add_region(base, memory);
        debug_assert!(kept.is_ok(), "a region does not go back: {kept:?}");
        false
    }

    fn form(&mut self, formation: Formation) {
        let (communicator, epoch) = (formation.communicator, formation.plan.epoch);
        let keys: Vec<Key> = formation
            .locals
            .iter()
            .filter_map(|local| self.by_attachment.get(&local.attachment).copied())
            .collect();
        let handles = formation.locals.clone();
        let formed = if self.stopping || self.by_communicator.contains_key(&communicator) {
            Err(PrepareError::Closed)
        } else {
            let mut links = Links::new(epoch, formation.plan.plan.group().participants());
            let transport = self.transport.as_mut();
            let wake = (&self.wake, self.port.as_ref());
            let formed = guarded(Task::Command, || {
                form(transport, &self.attachments, &keys, wake, (formation, &mut links))
            });
            let formed = formed.unwrap_or_else(|cause| {
                let reason = describe(Task::Command, &*cause);
                self.log_panic(
                    PanicScope::Communicator,
                    format!("communicator {:016x} {reason} as it formed", communicator.0),
                );
                Err(PrepareError::Panicked(reason))
            });
            if formed.is_err() {
                close_links(self.transport.as_mut(), &links, None);
            }
            formed
        };
        let formed = formed.and_then(|mut member| {
            let links: Vec<_> = member.epochs.iter().flat_map(|links| links.links.clone()).collect();
            let alone = member.epochs.iter().all(crate::communicator_state::Links::complete);
            self.sharing.admit(member.tenant);
            let (tenant, weight) = (member.tenant, member.weight);
            member.enter_busy(self.busy.place(tenant));
            let key = self.communicators.insert(member).ok_or(PrepareError::Full)?;
            self.turns.enter(tenant, weight, key);
            self.by_communicator.insert(communicator, key);
            self.enter_links(key, epoch, &links);
            for (local, attachment) in handles.iter().zip(&keys) {
                if let Some(attachment) = self.attachments.get_mut(*attachment) {
                    attachment.join(local.handle, (communicator, key), local.rank);
                }
            }
            Ok(alone)
        });
        match formed {
            Ok(false) => {}
            Ok(true) => {
                (self.notify)(Notice::Prepared { communicator, epoch, flows: Vec::new() });
            }
            Err(reason) => (self.notify)(Notice::PrepareFailed { communicator, epoch, reason }),
        }
    }

    pub(crate) fn enter_links(&mut self, key: Key, epoch: Epoch, links: &[Option<LinkId>]) {
        let Some(member) = self.communicators.get(key) else { return };
        let owner = Owner { tenant: member.tenant, weight: member.weight, communicator: member.id };
        let class = member.class;
        for (peer, link) in links.iter().enumerate() {
            if let Some(link) = link {
                self.transport.set_owner(*link, owner);
                self.transport.set_class(*link, class);
                self.links.insert(*link, (key, epoch, Participant(peer as u32)));
            }
        }
    }

    fn change(
        &mut self,
        communicator: CommunicatorId,
        plan: EpochPlan,
        peers: Vec<Peer>,
        aggregator: Option<&Aggregator>,
    ) {
        let epoch = plan.epoch;
        let Some(key) = self.by_communicator.get(&communicator).copied() else {
            return self.refuse_change(communicator, epoch, PrepareError::NoCommunicator);
        };
        let mut links = Links::new(epoch, plan.plan.group().participants());
        let changed = self.contain((key, Task::Command), |engine| {
            engine.open_epoch(key, plan, peers, aggregator, &mut links);
        });
        // Those that were opened and are nowhere else yet.
        if changed.is_none() {
            let known = &self.links;
            let opened = links.links.iter().flatten().filter(|link| !known.contains_key(*link));
            opened.for_each(|link| self.transport.close(*link));
        }
    }

    /// Opens the links of a communicator's next epoch, into `links` while they are not yet its own.
    fn open_epoch(
        &mut self,
        key: Key,
        plan: EpochPlan,
        peers: Vec<Peer>,
        aggregator: Option<&Aggregator>,
        opened: &mut Links,
    ) {
        let Some(communicator) = self.communicators.get(key).map(|member| member.id) else { return };
        let epoch = plan.epoch;
        if let Err(reason) = unsupported(&plan) {
            return self.refuse_change(communicator, epoch, reason);
        }
        let Some(member) = self.communicators.get_mut(key) else { return };
        let goes_on = peers.iter().filter(|peer| peer.introduction.is_none());
        let carried: Vec<Participant> = goes_on.map(|peer| peer.participant).collect();
        if let Err(error) = member.core.handle_plan_change(plan.clone(), &carried) {
            return self.refuse_change(communicator, epoch, error.into());
        }
        let before = member.links(member.core.link_epoch());
        let me = member.core.me();
        let result = open_links(self.transport.as_mut(), &plan, me, peers, before, opened);
        match result {
            Ok(()) => {
                let mut links = std::mem::replace(opened, Links::new(epoch, 0));
                links.aggregator = open_path(aggregator, &plan, me, (&self.wake, self.port.as_ref()));
                let new = |link: &LinkId| before.is_none_or(|before| !before.has(*link));
                let ids: Vec<_> = links.links.iter().map(|link| link.filter(new)).collect();
                let complete = links.complete();
                links.announced = complete;
                let made = ids.iter().flatten().count();
                tracing::debug!(communicator = communicator.0, %epoch, made, carried = carried.len(), "links");
                member.epochs.push(links);
                self.enter_links(key, epoch, &ids);
                if complete {
                    self.handle_epoch_up(key, epoch);
                }
            }
            Err(reason) => {
                close_links(self.transport.as_mut(), opened, before);
                member.core.abandon(epoch);
                self.refuse_change(communicator, epoch, reason);
            }
        }
    }

    fn refuse_change(&mut self, communicator: CommunicatorId, epoch: Epoch, reason: PrepareError) {
        (self.notify)(Notice::PrepareFailed { communicator, epoch, reason });
    }

    /// All links of an epoch are up.
    pub(crate) fn handle_epoch_up(&mut self, key: Key, epoch: Epoch) {
        let Some(member) = self.communicators.get_mut(key) else { return };
        member.core.handle_links_up(epoch);
        let communicator = member.id;
        let flows = self.flows(key, epoch);
        (self.notify)(Notice::Prepared { communicator, epoch, flows });
    }

    /// The flows of an epoch's paths to others, where the transport knows them.
    pub(crate) fn flows(&self, key: Key, epoch: Epoch) -> Vec<(Participant, Flow)> {
        let member = self.communicators.get(key);
        let paths = member.and_then(|member| member.links(epoch)).into_iter().flat_map(Links::all_paths);
        paths.filter_map(|(peer, link, path)| Some((peer, self.transport.flow(link, path)?))).collect()
    }

    pub(crate) fn drop_links(&mut self, communicator: CommunicatorId, epoch: Epoch) {
        let Some(key) = self.by_communicator.get(&communicator).copied() else { return };
        let Some(member) = self.communicators.get_mut(key) else { return };
        let Some(mut links) = member.take_links(epoch) else { return };
        let kept = |link: &LinkId| member.epochs.iter().any(|other| other.has(*link));
        links.links.iter_mut().for_each(|link| *link = link.filter(|link| !kept(link)));
        self.close(&links);
    }

    /// An attachment is gone: its ranks leave.
    pub(crate) fn detach(&mut self, key: Key) {
        let Some(attachment) = self.attachments.remove(key) else { return };
        self.by_attachment.remove(&attachment.id);
        for (key, rank) in attachment.ranks() {
            contain(&mut self.communicators, &mut self.aftermath, (key, Task::Command), |member| {
                member.core.handle_rank_departed(rank);
            });
        }
        // Nobody looks after it any more, so it must not wake the loop until it is gone.
        let _ = epoll::delete(&self.wake, attachment.end.wake_fd());
        self.reaper.reap(attachment.end);
    }

    pub(crate) fn handle_link_down(&mut self, key: Key, epoch: Epoch, peer: Participant) {
        let Some(member) = self.communicators.get_mut(key) else { return };
        let communicator = member.id;
        let announced = member.links(epoch).is_none_or(|links| links.announced);
        if announced || member.ended {
            member.core.handle_link_down(epoch, peer);
            return;
        }
        let reason = PrepareError::LinkDown(std::mem::take(&mut member.detail));
        if member.epochs.len() == 1 {
            (self.notify)(Notice::PrepareFailed { communicator, epoch, reason });
            self.forget_communicator(key, Code::Dissolved);
        } else {
            member.core.abandon(epoch);
            self.drop_links(communicator, epoch);
            (self.notify)(Notice::PrepareFailed { communicator, epoch, reason });
        }
    }

    /// Forgets a communicator: closes its links, answers later calls on its handles with `status`.
    pub(crate) fn forget_communicator(&mut self, key: Key, status: Code) {
        let Some(member) = self.communicators.remove(key) else { return };
        self.by_communicator.remove(&member.id);
        for links in &member.epochs {
            self.close(links);
        }
        for attachment in self.attachments.iter_mut() {
            attachment.mark_ended(key, status);
        }
    }

    /// Closes an epoch's links. What is queued without payload still goes out. Payloads do not, so that nothing reads a
    /// tenant's memory any more.
    fn close(&mut self, links: &Links) {
        // One that two epochs have is closed with the first.
        for link in links.links.iter().flatten().filter(|link| self.links.remove(link).is_some()) {
            self.transport.close(*link);
        }
        self.closed = self.now();
    }

    /// A communicator has ended with an error. Its links go first, and its transfers that wait: once a tenant hears of it, its tensors
    /// are its own again.
    pub(crate) fn handle_ended(&mut self, key: Key, failure: Failure) {
        let Some(member) = self.communicators.get_mut(key) else { return };
        member.ended = true;
        let (communicator, detail) = (member.id, std::mem::take(&mut member.detail));
        for links in std::mem::take(&mut member.epochs) {
            self.close(&links);
        }
        let status = status_of(&failure);
        self.attachments.iter_mut().for_each(|attachment| attachment.mark_ended(key, status));
        (self.notify)(Notice::Ended { communicator, failure, detail });
    }
}
