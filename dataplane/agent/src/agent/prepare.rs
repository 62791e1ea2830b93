//! What control has this agent prepare: communicators that form, changes of plan, and that all have prepared.

use super::{Agent, Communicator, LocalMember, engine_id, refuse};
use crate::engines::Thread;
use crate::recipe::{ExpandedRecipe, RecipeError, VerifiedPlans, expand, goes_over_rdma};
use crate::session::{Joined, LinkNeeds};
use harmonaize_abi::session::JoinRefusal;
use harmonaize_abi::{CommunicatorHandle, Rank};
use harmonaize_api::v1::{self, from_agent};
use harmonaize_core::EpochPlan;
use harmonaize_engine::{Command, CommunicatorId, Epoch, Formation, LocalRank, Peer, landing_bytes};
use std::time::{Duration, Instant};

/// Longer than checking a plan should take.
const SLOW_CHECK: Duration = Duration::from_secs(1);

const ENGINE_BUSY: &str = "the agent's engine has stopped";

/// A recipe that is to be checked before the agent takes in more messages of control. It is checked on another thread, for with many hosts
/// that lasts a while.
#[derive(Debug)]
pub struct Check {
    recipe: v1::Recipe,
    forms: bool,
    verified: VerifiedPlans,
}

/// What a [`Check`] found.
#[derive(Debug)]
pub struct Checked {
    check: Check,
    expanded: Result<ExpandedRecipe, RecipeError>,
}

impl Check {
    /// Expands and proves the recipe; [`Agent::handle_checked`] takes the outcome in.
    pub fn run(mut self) -> Checked {
        let begun = Instant::now();
        let expanded = expand(&self.recipe, &mut self.verified);
        let v1::Recipe { communicator, epoch, participants, .. } = &self.recipe;
        let (participants, took_ms, right) = (participants.len(), millis(begun), expanded.is_ok());
        tracing::debug!(communicator, epoch, participants, took_ms, right, "a plan is checked");
        if begun.elapsed() > SLOW_CHECK {
            tracing::warn!(communicator, epoch, participants, took_ms, "checking a plan took long");
        }
        Checked { check: self, expanded }
    }
}

fn millis(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}

impl Agent {
    /// Has a recipe of a communicator that forms, or changes its plan, checked.
    pub(super) fn check(&mut self, recipe: v1::Recipe, forms: bool) -> Check {
        // An epoch that control never gives counts as none: the recipe is refused, and the reason has the number.
        let epoch = Epoch::from_wire(recipe.epoch).unwrap_or_default();
        let over_rdma = goes_over_rdma(&recipe, &recipe.over_tcp);
        self.checking = Some((CommunicatorId(recipe.communicator), epoch, over_rdma));
        Check { recipe, forms, verified: std::mem::take(&mut self.verified) }
    }

    /// Whether a recipe is being checked: what control says waits until [`Agent::handle_checked`].
    pub fn is_checking(&self) -> bool {
        self.checking.is_some()
    }

    /// Takes in what became of a recipe; nothing of one whose thread has failed.
    pub fn handle_checked(&mut self, checked: Option<Checked>) {
        let Some((communicator, epoch, _)) = self.checking.take() else { return };
        let Some(Checked { check: Check { recipe, forms, verified: proved }, expanded }) = checked else {
            return self.prepare_failed(communicator, epoch, "checking the plan has failed".into());
        };
        self.verified = proved;
        match expanded {
            Err(error) => self.prepare_failed(communicator, epoch, error.to_string()),
            Ok(expanded) if forms => self.form(recipe, expanded),
            Ok(expanded) => self.change(communicator, expanded, recipe.over_tcp),
        }
    }

    fn form(&mut self, recipe: v1::Recipe, expanded: ExpandedRecipe) {
        let (communicator, epoch) = (CommunicatorId(recipe.communicator), expanded.plan.epoch);
        let (mut members, mut tenant, mut thread) = (Vec::new(), 0, Thread::default());
        let mut limits = None;
        for local in &recipe.local_ranks {
            let waiting = self
                .pending_joins
                .remove(&local.request)
                .filter(|w| w.rank.is_none_or(|rank| rank.0 == local.rank));
            let joined = waiting.and_then(|w| Some((self.attachments.get_mut(&w.attachment)?, w)));
            let Some((attached, waiting)) = joined else { continue };
            let handle = attached.next_handle;
            attached.next_handle = CommunicatorHandle(handle.0.wrapping_add(1).max(1));
            (tenant, thread) = (tenant_index(&mut self.tenants, &attached.tenant), attached.thread);
            limits.get_or_insert_with(|| attached.limits.clone());
            let (attachment, rank) = (waiting.attachment, Rank(local.rank));
            attached.joined.insert(handle, (communicator, rank));
            members.push(LocalMember { attachment, rank, handle, reply: Some(waiting.reply) });
        }
        let complete = members.len() == recipe.local_ranks.len();
        let locals = members.iter().map(|member| LocalRank {
            rank: member.rank,
            attachment: engine_id(member.attachment),
            handle: member.handle,
        });
        let formation = Formation {
            communicator,
            tenant,
            weight: recipe.weight.max(1),
            me: expanded.me,
            plan: expanded.plan,
            peers: expanded.peers,
            aggregator: expanded.aggregator,
            locals: locals.collect(),
        };
        let (ended, detail_requests) = (None, Vec::new());
        let staging = expanded.staging.bytes(self.are_mapped(&members));
        let needs = needs(&formation.plan, &formation.peers, staging);
        let granted = limits.as_ref().map(|limits| limits.links(needs)).transpose();
        let refused = granted.as_ref().err().map(ToString::to_string);
        if let Some(refused) = &refused {
            self.refuse_members(&mut members, refused);
        }
        let granted = granted.ok().flatten();
        let formed = Communicator {
            recipe,
            change_over_tcp: None,
            thread,
            members,
            ended,
            limits,
            granted,
            needs,
            detail_requests,
        };
        self.communicators.insert(communicator, formed);
        if !complete {
            self.prepare_failed(communicator, epoch, "a process that had joined is gone".into());
        } else if let Some(refused) = refused {
            self.prepare_failed(communicator, epoch, refused);
        } else if !self.try_command(thread, Command::Form(Box::new(formation))) {
            self.prepare_failed(communicator, epoch, ENGINE_BUSY.into());
        }
    }

    /// Whether the tensors of all these ranks are mapped here.
    fn are_mapped(&self, members: &[LocalMember]) -> bool {
        members.iter().all(|member| self.attachments.get(&member.attachment).is_some_and(|at| at.mapped))
    }

    /// Answers joins of members that the tenant's quota has no room for.
    fn refuse_members(&mut self, members: &mut [LocalMember], why: &str) {
        for member in members {
            if let Some(attached) = self.attachments.get_mut(&member.attachment) {
                attached.joined.remove(&member.handle);
            }
            if let Some(reply) = member.reply.take() {
                refuse(reply, JoinRefusal::Quota, Vec::new(), why);
            }
        }
    }

    /// Tells control that an epoch cannot be prepared.
    pub(super) fn prepare_failed(&mut self, communicator: CommunicatorId, epoch: Epoch, reason: String) {
        self.keep_one_epoch(communicator);
        let limits = self.communicators.get(&communicator).and_then(|known| known.limits.clone());
        self.note_of(limits.as_ref(), format!("communicator {communicator:016x}, epoch {epoch}: {reason}"));
        self.send_to_control(from_agent::Message::PrepareFailed(v1::PrepareFailed {
            communicator: communicator.0,
            epoch: epoch.into(),
            reason,
        }));
    }

    fn change(&mut self, communicator: CommunicatorId, expanded: ExpandedRecipe, over_tcp: Vec<u32>) {
        let epoch = expanded.plan.epoch;
        let mapped = self.communicators.get(&communicator).is_some_and(|of| self.are_mapped(&of.members));
        let Some(known) = self.communicators.get_mut(&communicator) else {
            return self.prepare_failed(communicator, epoch, "no such communicator".into());
        };
        let staging = expanded.staging.bytes(mapped);
        let (thread, more) = (known.thread, needs(&expanded.plan, &expanded.peers, staging));
        if let (Some(limits), Some(granted)) = (&known.limits, &mut known.granted) {
            // Each epoch has links of its own, and both have one staging.
            let staging_bytes = staging.saturating_sub(granted.needs().staging_bytes);
            match limits.links(LinkNeeds { staging_bytes, ..more }) {
                Ok(more) => granted.add(more),
                Err(refused) => return self.prepare_failed(communicator, epoch, refused.to_string()),
            }
        }
        // What was refused is not held, and control does not count it.
        known.needs = known.needs.max(more);
        known.change_over_tcp = Some((epoch.into(), over_tcp));
        let change = Command::Change {
            communicator,
            plan: Box::new(expanded.plan),
            peers: expanded.peers,
            aggregator: expanded.aggregator.map(Box::new),
        };
        if !self.try_command(thread, change) {
            self.prepare_failed(communicator, epoch, ENGINE_BUSY.into());
        }
    }

    pub(super) fn handle_ready(&mut self, communicator: CommunicatorId, epoch: Epoch) {
        self.command_of(communicator, Command::AllPrepared { communicator, epoch });
        let Some(Communicator { recipe, members, .. }) = self.communicators.get_mut(&communicator) else {
            return;
        };
        let ranks = recipe.participants.iter().map(|participant| participant.ranks.len() as u32).sum();
        let before = || recipe.previous_ranks.iter().map(|rank| rank.checked_sub(1).map(Rank)).collect();
        for member in members {
            if let Some(reply) = member.reply.take() {
                let (communicator, rank, before) = (member.handle, member.rank, before());
                let name = recipe.name.clone();
                // Nobody hears it if the process went away; its end shows as a detachment.
                let _ = reply.send(Ok(Joined { communicator, name, rank, ranks, before }));
            }
        }
    }
}

/// What links to other agents that are opened take, and operations of this staging.
fn needs(plan: &EpochPlan, peers: &[Peer], staging_bytes: u64) -> LinkNeeds {
    let opened = || peers.iter().filter_map(|peer| peer.introduction.as_ref());
    let paths: usize = opened().map(|introduction| introduction.source_ports.len()).sum();
    LinkNeeds {
        descriptors: u32::try_from(paths).unwrap_or(u32::MAX),
        landing_bytes: landing_bytes(plan).saturating_mul(opened().count() as u64),
        staging_bytes,
    }
}

/// A tenant's place among those that have had a communicator here.
fn tenant_index(tenants: &mut Vec<String>, tenant: &str) -> u32 {
    let at = tenants.iter().position(|known| known == tenant).unwrap_or_else(|| {
        tenants.push(tenant.to_owned());
        tenants.len() - 1
    });
    u32::try_from(at).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::RESERVE;
    use crate::control::{ControlAnswer, Event};
    use crate::counters::{Counted, Counters};
    use crate::engines::Engines;
    use crate::paths::Paths;
    use crate::recipe::tests::recipe;
    use crate::session::{AttachmentId, Question, Quota, SessionRequest, TenantLimits};
    use crate::wiring::Wiring;
    use harmonaize_abi::SegmentId;
    use harmonaize_abi::session::{Budget, JoinRefused, RunnerReport, WorkerState};
    use harmonaize_engine::{Engine, Notice, start};
    use harmonaize_transport::loopback::Hub;
    use std::time::Duration;
    use tokio::sync::mpsc;
    use tokio::sync::oneshot;

    /// Telemetry of marks alone, which nobody writes; its thread ends with the process.
    fn unmeasured() -> crate::telemetry::Handle {
        let links = std::net::Ipv4Addr::LOCALHOST.into();
        crate::telemetry::begin(None, "h0", links, &[]).unwrap().handle()
    }

    #[test]
    fn control_hears_of_what_the_engine_does_not_take() {
        let (mut agent, mut told, thread, counters) = agent_with(RESERVE + 1);
        agent.engines.stop();
        thread.join().unwrap();
        for event in [Event::Form(recipe(2, 1)), Event::Change(recipe(2, 1))] {
            assert!(agent.has_room());
            let check = agent.handle_control(event).expect("recipes are checked");
            assert!(agent.is_checking() && told.try_recv().is_err());
            agent.handle_checked(Some(check.run()));
            assert!(!agent.has_room(), "what is left is the engine's");
            let Ok(from_agent::Message::PrepareFailed(failed)) = told.try_recv() else {
                panic!("nothing was told");
            };
            assert_eq!((failed.communicator, failed.epoch), (7, 1));
            assert_eq!(failed.reason, ENGINE_BUSY);
            assert!(told.try_recv().is_err());
        }
        assert_eq!(counters.get(Counted::CommandLost), 2);
        // Nor does a check that fails itself leave anybody waiting.
        assert!(agent.handle_control(Event::Change(recipe(2, 1))).is_some());
        agent.handle_checked(None);
        assert!(!agent.is_checking());
        assert!(matches!(told.try_recv(), Ok(from_agent::Message::PrepareFailed(_))));
    }

    /// An agent with one thread, and what it says to control. The thread is to be stopped.
    fn agent() -> (Agent, mpsc::Receiver<from_agent::Message>, std::thread::JoinHandle<()>, Counters) {
        agent_with(2 * RESERVE)
    }

    /// The same with room for so many messages to control.
    fn agent_with(
        room: usize,
    ) -> (Agent, mpsc::Receiver<from_agent::Message>, std::thread::JoinHandle<()>, Counters) {
        let transport = Box::new(Hub::new().endpoint().unwrap());
        let engine = Engine::new(transport, Box::new(|_| {})).unwrap();
        let (engine, thread) = start(engine, 0, Duration::ZERO).unwrap();
        let (control, told) = mpsc::channel(room);
        let counters = Counters::default();
        let engines = Engines::new(vec![engine], counters.clone());
        let paths = Paths::begin("127.0.0.1:0".parse().unwrap(), false);
        (Agent::new(engines, control, unmeasured(), paths, counters.clone()), told, thread, counters)
    }

    fn attached(attachment: AttachmentId, limits: &TenantLimits) -> SessionRequest {
        let (end, _) = harmonaize_shm::MappedEnd::create(1 << 16, 4, Box::new(())).unwrap();
        SessionRequest::Attached {
            attachment,
            tenant: "a".into(),
            end: Box::new(end),
            operation_timeout: Duration::from_secs(1),
            limits: limits.clone(),
        }
    }

    fn attach(agent: &mut Agent, attachment: AttachmentId, limits: &TenantLimits) {
        agent.handle_request(attached(attachment, limits));
    }

    type JoinAnswer = oneshot::Receiver<Result<Joined, JoinRefused>>;

    fn join_request(attachment: AttachmentId, name: &str) -> (SessionRequest, JoinAnswer) {
        let (reply, answer) = oneshot::channel();
        let request = SessionRequest::Join {
            attachment,
            name: name.into(),
            rank: Rank(0),
            ranks: 2,
            timeout: Duration::from_secs(1),
            budget: Budget::default(),
            reply,
        };
        (request, answer)
    }

    fn join(agent: &mut Agent, attachment: AttachmentId, name: &str) -> JoinAnswer {
        let (request, answer) = join_request(attachment, name);
        agent.handle_request(request);
        answer
    }

    /// A rank of the first attachment joins, and control has its communicator form; what the process hears.
    fn form(
        agent: &mut Agent,
        messages: &mut mpsc::Receiver<from_agent::Message>,
        communicator: u64,
    ) -> JoinAnswer {
        let answer = join(agent, AttachmentId(1), "job");
        let message = messages.try_recv().unwrap();
        let from_agent::Message::Join(v1::Join { request, .. }) = message else { panic!("{message:?}") };
        let local_ranks = vec![v1::LocalRank { rank: 0, request }];
        let recipe = v1::Recipe { communicator, local_ranks, ..recipe(4, 1) };
        let check = agent.handle_control(Event::Form(recipe));
        agent.handle_checked(Some(check.unwrap().run()));
        answer
    }

    #[test]
    fn an_oversized_epoch_is_refused_with_its_number() {
        let (mut agent, mut told, thread, _) = agent();
        let check = agent.handle_control(Event::Change(v1::Recipe { epoch: 1 << 32, ..recipe(2, 1) }));
        agent.handle_checked(Some(check.unwrap().run()));
        let Ok(from_agent::Message::PrepareFailed(failed)) = told.try_recv() else {
            panic!("nothing was told");
        };
        assert_eq!((failed.communicator, failed.epoch), (7, 0));
        assert!(failed.reason.contains("epoch 4294967296 out of range"), "{}", failed.reason);
        agent.stop();
        thread.join().unwrap();
    }

    /// A process that attached in the last moment. The agent that had it is gone, so this one goes on without.
    #[test]
    fn an_attachment_without_its_session_is_left_behind() {
        let (mut before, _told, thread, counters) = agent();
        attach(&mut before, AttachmentId(1), &TenantLimits::of(Quota::default(), &counters));
        let (mut successor, _heard, other, _) = agent();
        successor.inherit(before.image(), &std::collections::HashMap::new(), &[]).unwrap();
        assert!(before.attachments.len() == 1 && successor.attachments.is_empty());
        for (mut agent, thread) in [(before, thread), (successor, other)] {
            agent.stop();
            thread.join().unwrap();
        }
    }

    #[test]
    fn rdma_links_count_until_an_epoch_without_them() {
        let (mut agent, mut told, thread, counters) = agent();
        attach(&mut agent, AttachmentId(1), &TenantLimits::of(Quota::default(), &counters));
        assert_eq!(agent.over_rdma(), 0);
        let _answer = form(&mut agent, &mut told, 7);
        assert_eq!(agent.over_rdma(), 1);
        // By whose links go over TCP alone: what counts when the epoch is under way, and once it is in use.
        let epochs =
            [(vec![0], 1, 0), (vec![1], 1, 1), (vec![1, 2, 3], 1, 0), (vec![0, 2], 0, 0), (vec![], 1, 1)];
        for (epoch, (over_tcp, under_way, in_use)) in (2..).zip(epochs) {
            let change = v1::Recipe { epoch, over_tcp: over_tcp.clone(), ..recipe(4, 1) };
            let check = agent.handle_control(Event::Change(change));
            assert_eq!(agent.over_rdma(), under_way, "{over_tcp:?} is checked");
            agent.handle_checked(Some(check.unwrap().run()));
            assert_eq!(agent.over_rdma(), under_way, "{over_tcp:?} under way");
            let (communicator, epoch) = (CommunicatorId(7), Epoch(u32::try_from(epoch).unwrap()));
            agent.handle_notice(Notice::Switched { communicator, epoch, segment: SegmentId(0) });
            assert_eq!(agent.over_rdma(), in_use, "{over_tcp:?} in use");
        }
        agent.stop();
        thread.join().unwrap();
    }

    #[test]
    fn an_epochs_links_over_tcp_are_handed_over() {
        let (mut agents, mut threads) = (Vec::new(), Vec::new());
        let counters = Counters::default();
        let limits = TenantLimits::of(Quota::default(), &counters);
        for _ in 0..2 {
            let (agent, told, thread, _) = agent();
            agents.push((agent, told));
            threads.push(thread);
        }
        let [(before, told), (successor, _)] = agents.as_mut_slice() else { panic!("two") };
        attach(before, AttachmentId(1), &limits);
        let _answer = form(before, told, 7);
        let change = v1::Recipe { communicator: 7, epoch: 2, over_tcp: vec![0], ..recipe(4, 1) };
        let check = before.handle_control(Event::Change(change.clone()));
        before.handle_checked(Some(check.unwrap().run()));
        let all = [(AttachmentId(1), (limits.clone(), true))].into();
        successor.inherit(before.image(), &all, &[change]).unwrap();
        assert_eq!(successor.over_rdma(), 1, "its current epoch");
        let (communicator, epoch) = (CommunicatorId(7), Epoch(2));
        successor.handle_notice(Notice::Switched { communicator, epoch, segment: SegmentId(0) });
        assert_eq!(successor.over_rdma(), 0);
        agents.iter_mut().for_each(|(agent, _)| agent.stop());
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }

    #[test]
    fn a_request_that_panics_ends_its_attachment_alone() {
        let (mut agent, mut told, thread, counters) = agent();
        let limits = TenantLimits::of(Quota::default(), &counters);
        let [one, other] = [1, 2].map(AttachmentId);
        attach(&mut agent, one, &limits);
        attach(&mut agent, other, &limits);
        let mut waiting = join(&mut agent, one, "first");
        assert!(join(&mut agent, one, "panics").try_recv().is_err(), "nobody answers it");
        assert_eq!(counters.get(Counted::SessionPanic), 1);
        assert_eq!(agent.attachments.keys().collect::<Vec<_>>(), [&other]);
        assert_eq!(waiting.try_recv(), Err(oneshot::error::TryRecvError::Closed));
        let _second = join(&mut agent, other, "second");
        let mut names = Vec::new();
        while let Ok(message) = told.try_recv() {
            match message {
                from_agent::Message::Join(join) => names.push(join.communicator),
                from_agent::Message::Leave(leave) => names.push(format!("leaves {}", leave.request)),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(names, ["first", "leaves 1", "second"], "the join of who is gone is withdrawn");
        agent.stop();
        thread.join().unwrap();
    }

    #[test]
    fn only_what_control_has_ended_has_an_agent_wake() {
        let (mut agent, mut told, thread, counters) = agent();
        attach(&mut agent, AttachmentId(1), &TenantLimits::of(Quota::default(), &counters));
        let _answer = form(&mut agent, &mut told, 7);
        assert_eq!(agent.poll_timeout(), None, "a communicator has no timer");
        let kind = v1::FailureKind::RanksLost.into();
        let dissolved = v1::Dissolved { communicator: 7, kind, ranks: vec![1], reason: "gone".into() };
        assert!(agent.handle_control(Event::Dissolve(dissolved)).is_none());
        let due = agent.poll_timeout().expect("links may say more until then");
        agent.handle_timeout(due);
        assert_eq!(agent.poll_timeout(), None);
        agent.stop();
        thread.join().unwrap();
    }

    #[test]
    fn more_links_than_the_quota_are_refused() {
        // Three more beside the attachment's; each recipe here has three paths.
        let quota = Quota { descriptors: 5, ..Quota::default() };
        refused_second(
            quota,
            LinkNeeds { descriptors: 5, ..LinkNeeds::default() },
            &["3 descriptors", "2 are left", "the 5", "leave communicators", "`descriptors`"],
        );
        let (links, staging) = memory_of(&recipe(4, 1));
        let bytes = links + staging;
        let quota = Quota { landing_bytes: 2 * bytes - 1, ..Quota::default() };
        refused_second(
            quota,
            LinkNeeds { landing_bytes: 2 * bytes - 1, ..LinkNeeds::default() },
            &[
                &format!("{bytes} bytes"),
                &format!("{} are left", bytes - 1),
                "leave communicators",
                "`landing`",
            ],
        );
    }

    /// Has all that is asked taken in, and what waits tried again.
    async fn run_until_empty(wiring: &mut Wiring, requests: &mpsc::Sender<SessionRequest>) {
        loop {
            let _ = tokio::time::timeout(Duration::from_millis(5), wiring.next()).await;
            if requests.capacity() == requests.max_capacity() {
                return;
            }
        }
    }

    #[tokio::test]
    async fn a_late_control_delays_joins_alone() {
        let (agent, mut messages, thread, counters) = agent();
        let limits = TenantLimits::of(Quota::default(), &counters);
        let (_notices, heard) = mpsc::unbounded_channel();
        let (requests, incoming) = mpsc::channel(64);
        let (_control, events) = mpsc::channel(8);
        let mut wiring = Wiring::new(agent, heard, incoming, events);
        let [one, gone, new] = [1, 2, 3].map(AttachmentId);
        attach(&mut wiring.agent, one, &limits);
        attach(&mut wiring.agent, gone, &limits);
        while wiring.agent.has_room() {
            wiring.agent.tenants_served(v1::TenantsServed::default());
        }
        let send = |request| requests.try_send(request).unwrap();
        let (join_one, mut joined) = join_request(one, "late");
        let (join_gone, mut forgotten) = join_request(gone, "gone");
        let (reply, mut detail) = oneshot::channel();
        send(join_one);
        send(join_gone);
        send(SessionRequest::Detail { attachment: one, communicator: CommunicatorHandle(5), reply });
        send(SessionRequest::Detached { attachment: gone });
        send(attached(new, &limits));
        run_until_empty(&mut wiring, &requests).await;
        let mut known: Vec<_> = wiring.agent.attachments.keys().copied().collect();
        known.sort_unstable();
        assert_eq!((detail.try_recv(), known), (Ok(None), vec![one, new]));
        assert_eq!(
            forgotten.try_recv(),
            Err(oneshot::error::TryRecvError::Closed),
            "who is gone asks nothing"
        );
        assert_eq!(joined.try_recv(), Err(oneshot::error::TryRecvError::Empty));
        assert!(!wiring.is_idle(), "the other join waits");
        let joins = |messages: &mut mpsc::Receiver<from_agent::Message>| {
            let mut names = Vec::new();
            while let Ok(message) = messages.try_recv() {
                if let from_agent::Message::Join(join) = message {
                    names.push(join.communicator);
                }
            }
            names
        };
        assert!(joins(&mut messages).is_empty(), "nothing passed the queue's reserve");
        run_until_empty(&mut wiring, &requests).await;
        assert_eq!(joins(&mut messages), ["late"]);
        assert!(wiring.is_idle());
        wiring.agent.stop();
        thread.join().unwrap();
    }

    #[tokio::test]
    async fn joins_beyond_a_tenant_s_share_are_refused() {
        let (agent, _messages, thread, counters) = agent();
        let limits = TenantLimits::of(Quota::default(), &counters);
        let (_notices, heard) = mpsc::unbounded_channel();
        let (requests, incoming) = mpsc::channel(2048);
        let (_control, events) = mpsc::channel(8);
        let mut wiring = Wiring::new(agent, heard, incoming, events);
        attach(&mut wiring.agent, AttachmentId(1), &limits);
        while wiring.agent.has_room() {
            wiring.agent.tenants_served(v1::TenantsServed::default());
        }
        let mut answers = Vec::new();
        for _ in 0..300 {
            let (request, answer) = join_request(AttachmentId(1), "many");
            requests.try_send(request).unwrap();
            answers.push(answer);
        }
        run_until_empty(&mut wiring, &requests).await;
        let replies = answers.iter_mut().map(oneshot::Receiver::try_recv);
        let refused: Vec<_> = replies.filter_map(|reply| Some(reply.ok()?.unwrap_err().kind)).collect();
        assert_eq!(refused, [JoinRefusal::Unavailable; 300 - 256]);
        wiring.agent.stop();
        thread.join().unwrap();
    }

    #[test]
    fn runners_that_a_stopping_agent_detaches_are_not_gone() {
        for stops in [false, true] {
            let (mut agent, mut messages, thread, counters) = agent();
            attach(&mut agent, AttachmentId(1), &TenantLimits::of(Quota::default(), &counters));
            agent.questions.session(true, true, true);
            let state = WorkerState::None;
            let report = RunnerReport { runner: 1, job: "job".to_owned(), workers: (1, 1), state };
            let (reply, answer) = oneshot::channel();
            let wait = Duration::from_secs(1);
            let question = Question::Runner { report, elastic: false, bid: None, wait, reply };
            agent.handle_request(SessionRequest::Ask { attachment: AttachmentId(1), question });
            assert!(matches!(messages.try_recv(), Ok(from_agent::Message::AwaitOrder(_))));
            if stops {
                agent.stop();
            }
            drop(answer);
            agent.handle_request(SessionRequest::Detached { attachment: AttachmentId(1) });
            let cancelled = matches!(messages.try_recv(), Ok(from_agent::Message::CancelOrder(_)));
            assert_eq!(cancelled, !stops);
            if !stops {
                agent.stop();
            }
            thread.join().unwrap();
        }
    }

    /// Its last question, on an attachment of its own, is one that control does not answer.
    #[test]
    fn a_runner_that_leaves_is_gone_though_an_order_crosses_its_end() {
        let (mut agent, mut messages, thread, counters) = agent();
        agent.questions.session(true, true, true);
        let attachments = [AttachmentId(1), AttachmentId(2)];
        let asked = attachments.map(|attachment| {
            attach(&mut agent, attachment, &TenantLimits::of(Quota::default(), &counters));
            let state = WorkerState::None;
            let report = RunnerReport { runner: 1, job: "job".to_owned(), workers: (1, 1), state };
            let (reply, answer) = oneshot::channel();
            let question = Question::Runner { report, elastic: false, bid: None, wait: Duration::MAX, reply };
            agent.handle_request(SessionRequest::Ask { attachment, question });
            let Ok(from_agent::Message::AwaitOrder(told)) = messages.try_recv() else {
                panic!("control was not asked");
            };
            (told.request, answer)
        });
        let [first, last] = asked.map(|(request, _answer)| request);
        let order = v1::RunnerOrder { request: first, ..v1::RunnerOrder::default() };
        agent.questions.answer(ControlAnswer::Runner(order));
        for attachment in attachments {
            agent.handle_request(SessionRequest::Detached { attachment });
        }
        let Ok(from_agent::Message::CancelOrder(gone)) = messages.try_recv() else {
            panic!("control does not hear of the end");
        };
        assert_eq!(gone.request, last);
        assert!(messages.try_recv().is_err());
        agent.stop();
        thread.join().unwrap();
    }

    /// Bytes that the links of a recipe of four hosts land in, and its staging where tensors are mapped.
    fn memory_of(recipe: &v1::Recipe) -> (u64, u64) {
        let expanded = expand(recipe, &mut VerifiedPlans::default()).unwrap();
        (3 * landing_bytes(&expanded.plan), expanded.staging.bytes(true))
    }

    #[test]
    fn staging_beyond_the_quota_is_refused_with_the_limit() {
        let (links, staging) = memory_of(&recipe(4, 1));
        assert!(staging > 0);
        let limit = links + staging - 1;
        let (mut agent, mut messages, thread, counters) = agent();
        let limits = TenantLimits::of(Quota { landing_bytes: limit, ..Quota::default() }, &counters);
        attach(&mut agent, AttachmentId(1), &limits);
        let mut answer = form(&mut agent, &mut messages, 7);
        let refused = answer.try_recv().unwrap().unwrap_err();
        assert_eq!((refused.kind, counters.get(Counted::LandingRefused)), (JoinRefusal::Quota, 1));
        for word in [links + staging, links, staging, limit].map(|bytes| bytes.to_string()) {
            assert!(refused.text.contains(&word), "{word} in {}", refused.text);
        }
        assert!(refused.text.contains("leave communicators") && refused.text.contains("`landing`"));
        agent.stop();
        thread.join().unwrap();
    }

    #[test]
    fn a_change_of_plan_takes_no_staging_twice() {
        let (links, staging) = memory_of(&recipe(4, 1));
        let (mut agent, mut messages, thread, counters) = agent();
        let quota = Quota { landing_bytes: 2 * links + staging, ..Quota::default() };
        let limits = TenantLimits::of(quota, &counters);
        attach(&mut agent, AttachmentId(1), &limits);
        let _answer = form(&mut agent, &mut messages, 7);
        let check = agent.handle_control(Event::Change(v1::Recipe { epoch: 2, ..recipe(4, 1) }));
        agent.handle_checked(Some(check.unwrap().run()));
        assert!(messages.try_recv().is_err(), "both are within the quota");
        let granted =
            |agent: &Agent| agent.communicators[&CommunicatorId(7)].granted.as_ref().unwrap().needs();
        assert_eq!((granted(&agent).landing_bytes, granted(&agent).staging_bytes), (2 * links, staging));
        let (communicator, epoch) = (CommunicatorId(7), Epoch(2));
        agent.handle_notice(harmonaize_engine::Notice::Prepared { communicator, epoch, flows: Vec::new() });
        let Ok(from_agent::Message::Prepared(told)) = messages.try_recv() else { panic!("control hears it") };
        assert_eq!(told.links.map(|told| told.landing_bytes), Some(links + staging), "of one epoch");
        agent.keep_one_epoch(CommunicatorId(7));
        assert_eq!((granted(&agent).landing_bytes, granted(&agent).staging_bytes), (links, staging));
        agent.stop();
        thread.join().unwrap();
    }

    #[test]
    fn control_counts_no_change_that_the_quota_refused() {
        let (mut agent, mut messages, thread, counters) = agent();
        let limits = TenantLimits::of(Quota { descriptors: 3, ..Quota::default() }, &counters);
        attach(&mut agent, AttachmentId(1), &limits);
        let _answer = form(&mut agent, &mut messages, 7);
        let held = |agent: &Agent| agent.communicators[&CommunicatorId(7)].needs;
        let before = held(&agent);
        assert_eq!(before.descriptors, 3);
        let mut wider = v1::Recipe { epoch: 2, ..recipe(4, 1) };
        wider.peers.iter_mut().for_each(|peer| peer.source_ports.extend([50_001, 50_002]));
        let check = agent.handle_control(Event::Change(wider));
        agent.handle_checked(Some(check.unwrap().run()));
        let Ok(from_agent::Message::PrepareFailed(failed)) = messages.try_recv() else {
            panic!("not refused")
        };
        assert!(failed.reason.contains("0 are left of the 3"), "{}", failed.reason);
        assert_eq!(held(&agent), before);
        agent.stop();
        thread.join().unwrap();
    }

    /// Checks that a quota refuses the second of two communicators, for these reasons. With the end of the first one
    /// `all` is free.
    fn refused_second(quota: Quota, all: LinkNeeds, reasons: &[&str]) {
        let (mut agent, mut told, thread, counters) = agent();
        let limits = TenantLimits::of(quota, &counters);
        attach(&mut agent, AttachmentId(1), &limits);
        let mut forms = |agent: &mut Agent, communicator: u64| {
            let mut answer = form(agent, &mut told, communicator);
            let failed = match told.try_recv() {
                Ok(from_agent::Message::PrepareFailed(failed)) => Some(failed.reason),
                Ok(other) => panic!("{other:?}"),
                Err(_) => None,
            };
            let refused = answer.try_recv().ok().map(|joined| joined.unwrap_err());
            (refused, failed)
        };
        assert_eq!(forms(&mut agent, 7), (None, None));
        let (refused, failed) = forms(&mut agent, 8);
        let refused = refused.expect("the process hears at once");
        assert_eq!(refused.kind, JoinRefusal::Quota);
        assert_eq!(Some(&refused.text), failed.as_ref());
        for word in reasons {
            assert!(refused.text.contains(word), "{word} in {}", refused.text);
        }
        // With the end of the first there is room.
        let failure = harmonaize_core::Failure::Dissolved;
        let communicator = CommunicatorId(7);
        agent.handle_notice(harmonaize_engine::Notice::Ended {
            communicator,
            failure,
            detail: String::new(),
        });
        assert!(limits.links(all).is_ok());
        agent.stop();
        thread.join().unwrap();
    }
}
