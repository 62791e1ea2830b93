//! The agent's own part of a hand-over: who is attached, and which communicators there are.

use super::{Agent, Attachment, Communicator, LocalMember};
use crate::engines::Thread;
use crate::recipe::goes_over_rdma;
use crate::session::{AttachmentId, LinkNeeds, TenantLimits};
use harmonaize_abi::session::FailureDetail;
use harmonaize_abi::{CommunicatorHandle, CommunicatorId, Rank};
use harmonaize_api::v1::{self, from_agent};
use harmonaize_engine::{Command, InheritedEpoch};
use prost::Message;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

/// The agent's part.
#[derive(Debug, Serialize, Deserialize)]
pub struct AgentImage {
    attachments: Vec<AttachedImage>,
    communicators: Vec<(u64, CommunicatorImage)>,
    next_request: u64,
    tenants: Vec<String>,
    errors: u64,
    recent: Vec<String>,
}

#[derive(Debug, Serialize, Deserialize)]
struct AttachedImage {
    attachment: AttachmentId,
    tenant: String,
    thread: Thread,
    joined: Vec<(u32, u64, Rank)>,
    next_handle: u32,
}

#[derive(Debug, Serialize, Deserialize)]
struct CommunicatorImage {
    recipe: Vec<u8>,
    thread: Thread,
    members: Vec<(AttachmentId, Rank, u32)>,
    ended: Option<FailureDetail>,
    granted: Option<LinkNeeds>,
    needs: LinkNeeds,
}

impl Agent {
    /// Whether nobody waits for anything that another process could not go on with.
    pub fn rests(&self) -> bool {
        let asked = |known: &Communicator| {
            !known.detail_requests.is_empty() || known.members.iter().any(|member| member.reply.is_some())
        };
        !self.is_late()
            && self.checking.is_none()
            && self.pending_joins.is_empty()
            && self.pending_regions.is_empty()
            && self.dissolving.is_empty()
            && !self.communicators.values().any(asked)
    }

    /// How many communicators have links that another process cannot go on with, where links go over RDMA unless control says
    /// otherwise: in the epoch in use, in one under way, or in one whose recipe is being checked.
    pub fn over_rdma(&self) -> usize {
        let over_rdma = |known: &Communicator| {
            let goes = |over_tcp: &[u32]| goes_over_rdma(&known.recipe, over_tcp);
            let change = known.change_over_tcp.as_ref();
            let current = goes(&known.recipe.over_tcp);
            known.ended.is_none() && (current || change.is_some_and(|(_, over_tcp)| goes(over_tcp)))
        };
        let known = self.communicators.iter().filter(|(_, known)| over_rdma(known)).map(|(id, _)| *id);
        let checked = self.checking.filter(|(.., over_rdma)| *over_rdma).map(|(id, ..)| id);
        known.chain(checked).collect::<BTreeSet<_>>().len()
    }

    /// Has control have all links here go over TCP alone for so long from now on; no time: they need not any more.
    pub fn ask_over_tcp(&mut self, time: Duration) {
        let for_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.send_to_control(from_agent::Message::LinksOverTcp(v1::LinksOverTcp { for_ns }));
    }

    /// Gives every thread of the engine a command; how many there are, or none if one did not take it.
    pub fn command_all(&mut self, command: impl FnMut(usize) -> Command) -> Option<usize> {
        self.engines.command_all(command).then(|| self.engines.count())
    }

    /// How many threads the engine has.
    pub fn threads(&self) -> usize {
        self.engines.count()
    }

    /// Whether control's session has taken in all that it was told.
    pub fn has_sent_all(&self) -> bool {
        self.unsent.is_empty() && self.control.capacity() == self.control.max_capacity()
    }

    /// The agent's part, for another process. It changes no more.
    pub fn image(&self) -> AgentImage {
        let attached = |(id, attached): (&AttachmentId, &Attachment)| AttachedImage {
            attachment: *id,
            tenant: attached.tenant.clone(),
            thread: attached.thread,
            joined: attached.joined.iter().map(|(handle, (id, rank))| (handle.0, id.0, *rank)).collect(),
            next_handle: attached.next_handle.0,
        };
        let communicator = |(id, known): (&CommunicatorId, &Communicator)| {
            let member = |member: &LocalMember| (member.attachment, member.rank, member.handle.0);
            let image = CommunicatorImage {
                recipe: known.recipe.encode_to_vec(),
                thread: known.thread,
                members: known.members.iter().map(member).collect(),
                ended: known.ended.clone(),
                granted: known.granted.as_ref().map(|granted| granted.needs()),
                needs: known.needs,
            };
            (id.0, image)
        };
        AgentImage {
            attachments: self.attachments.iter().map(attached).collect(),
            communicators: self.communicators.iter().map(communicator).collect(),
            next_request: self.next_request,
            tenants: self.tenants.clone(),
            errors: self.errors,
            recent: self.recent.clone(),
        }
    }

    /// Takes over what another process's agent had. Of each attachment `limits` has those of its tenant, and whether tensors are mapped
    /// here; `changes` are the recipes of epochs under way. An attachment that it lacks has ended with the other process.
    ///
    /// # Errors
    /// If a communicator's recipe cannot be read.
    pub fn inherit(
        &mut self,
        image: AgentImage,
        limits: &HashMap<AttachmentId, (TenantLimits, bool)>,
        changes: &[v1::Recipe],
    ) -> Result<(), prost::DecodeError> {
        let AgentImage { attachments, communicators, next_request, tenants, errors, recent } = image;
        (self.next_request, self.tenants, self.errors, self.recent) = (next_request, tenants, errors, recent);
        for AttachedImage { attachment, tenant, thread, joined, next_handle } in attachments {
            // Nobody could go on with it by now: the other process is gone.
            let Some((limits, mapped)) = limits.get(&attachment).cloned() else {
                tracing::warn!(tenant, %attachment, "ended: it came without its session");
                continue;
            };
            self.engines.place_on(&tenant, thread);
            let joined = joined
                .into_iter()
                .map(|(handle, id, rank)| (CommunicatorHandle(handle), (CommunicatorId(id), rank)))
                .collect();
            let attached = Attachment {
                tenant,
                limits,
                thread,
                mapped,
                joined,
                next_handle: CommunicatorHandle(next_handle),
            };
            self.attachments.insert(attachment, attached);
        }
        for (id, image) in communicators {
            let recipe = v1::Recipe::decode(image.recipe.as_slice())?;
            let member = |(attachment, rank, handle)| LocalMember {
                attachment,
                rank,
                handle: CommunicatorHandle(handle),
                reply: None,
            };
            let members: Vec<_> = image.members.into_iter().map(member).collect();
            let attached = members.iter().find_map(|member| self.attachments.get(&member.attachment));
            let limits = attached.map(|attached| attached.limits.clone());
            let granted = limits.as_ref().zip(image.granted).map(|(limits, part)| limits.inherit_links(part));
            let (thread, ended, needs) = (image.thread, image.ended, image.needs);
            let change = changes.iter().find(|change| change.communicator == id);
            let known = Communicator {
                recipe,
                change_over_tcp: change.map(|change| (change.epoch, change.over_tcp.clone())),
                thread,
                members,
                ended,
                limits,
                granted,
                needs,
                detail_requests: Vec::new(),
            };
            self.communicators.insert(CommunicatorId(id), known);
        }
        Ok(())
    }

    /// Telemetry hears whose flows those are that were taken over.
    pub fn report_inherited(&self, epochs: &[InheritedEpoch]) {
        for (id, epoch, flows) in epochs {
            self.report_links(*id, *epoch, flows);
        }
    }
}
