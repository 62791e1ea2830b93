//! Ranks that become a communicator.

use crate::state::ctx::Ctx;
use crate::state::job::codec::CodecState;
use crate::state::job::communicator::{Communicator, Member};
use crate::state::job::lifecycle::Lifecycle;
use crate::state::job::refusals::Refusals;
use crate::state::output::SessionId;
use harmonaize_abi::{CommunicatorId, Epoch};
use harmonaize_api::v1;
use harmonaize_codec::Budget;
use harmonaize_planner::{HostId, tuning};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The ranks of a communicator that is about to form.
#[derive(Debug)]
pub(crate) struct Group {
    /// The tenant, and its name for the communicator.
    pub key: (String, String),
    /// By rank, from 0 without gaps: whose session, and the agent's number for the join.
    pub joined: BTreeMap<u32, (SessionId, u64)>,
    pub budget: Budget,
    /// Where it goes on from another: see [`Communicator::before`].
    pub before: Vec<u32>,
    pub succeeds: Option<CommunicatorId>,
}

impl Group {
    /// Returns the communicator that these ranks become.
    pub(crate) fn into_communicator(self, ctx: &Ctx<'_>) -> Communicator {
        let ranks = self.joined.len() as u32;
        let mut by_session: BTreeMap<SessionId, Vec<(u32, u64)>> = BTreeMap::new();
        for (rank, (session, request)) in &self.joined {
            by_session.entry(*session).or_default().push((*rank, *request));
        }
        let mut members: Vec<Member> = by_session
            .into_iter()
            .filter_map(|(session, requests)| {
                let host = ctx.sessions.get(&session)?.host;
                let ranks = requests.iter().map(|(rank, _)| *rank).collect();
                let (session, departed) = (Some(session), BTreeSet::new());
                let links = v1::LinkUsage::default();
                Some(Member { host, session, lease: None, ranks, requests, departed, closed: false, links })
            })
            .collect();
        members.sort_by_key(|member| member.ranks.first().copied());
        let hosts: Vec<HostId> = members.iter().map(|member| member.host).collect();
        let (tenant, name) = self.key;
        let mut formed = Communicator {
            tenant,
            name,
            ranks,
            members,
            tuning: tuning(&ctx.settings.topology, &hosts),
            lifecycle: Lifecycle::default(),
            next_epoch: Epoch(1),
            last_change: String::new(),
            pinned: false,
            changes: VecDeque::new(),
            backoff_until: None,
            failures: 0,
            coding: CodecState::new(self.budget),
            refused: Refusals::default(),
            before: self.before,
            succeeds: self.succeeds,
            restarted: false,
        };
        formed.learn_usage(&ctx.settings.topology);
        formed
    }
}
