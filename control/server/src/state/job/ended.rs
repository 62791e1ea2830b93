//! Communicators that ended with an error, as operators see them.

use crate::state::job::communicator::{Communicator, EndCause};
use harmonaize_abi::CommunicatorId;
use harmonaize_api::v1::{self, FailureKind};
use harmonaize_planner::HostId;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Most ends that are remembered.
const MOST_ENDED: usize = 64;

/// A communicator that ended with an error.
#[derive(Debug)]
pub(crate) struct Ended {
    pub id: CommunicatorId,
    pub tenant: String,
    pub name: String,
    pub cause: EndCause,
    pub at: Duration,
    hosts: Vec<HostId>,
}

/// All that have ended, the latest of them kept.
#[derive(Debug, Default)]
pub(crate) struct History {
    latest: VecDeque<Ended>,
    errors: u64,
    by_tenant: BTreeMap<String, u64>,
}

impl History {
    /// Takes up a communicator that has ended.
    pub(crate) fn add(&mut self, at: Duration, id: CommunicatorId, ended: Communicator, cause: EndCause) {
        if cause.kind != FailureKind::Operator {
            self.errors += 1;
            *self.by_tenant.entry(ended.tenant.clone()).or_default() += 1;
        }
        if self.latest.len() == MOST_ENDED {
            self.latest.pop_front();
        }
        let hosts = ended.members.iter().map(|member| member.host).collect();
        self.latest.push_back(Ended { id, tenant: ended.tenant, name: ended.name, cause, at, hosts });
    }

    /// Returns why a communicator ended that an agent of it says is running. None where it is none of the
    /// latest, or of others, and not known to be `past` either.
    pub(crate) fn cause(&self, host: HostId, recipe: &v1::Recipe, past: bool) -> Option<EndCause> {
        let same = |ended: &&Ended| {
            ended.id.0 == recipe.communicator
                && (&ended.tenant, &ended.name) == (&recipe.tenant, &recipe.name)
                && ended.hosts.contains(&host)
        };
        let unknown = || {
            let detail = "it ended while the agent had no session".to_owned();
            EndCause { kind: FailureKind::RanksLost, ranks: Vec::new(), detail }
        };
        let latest = self.latest.iter().find(same).map(|ended| ended.cause.clone());
        latest.or_else(|| past.then(unknown))
    }

    /// Returns the latest, oldest first.
    pub(crate) fn latest(&self) -> impl Iterator<Item = &Ended> {
        self.latest.iter()
    }

    /// Returns how many ended with an error.
    pub(crate) fn errors(&self) -> u64 {
        self.errors
    }

    /// Returns how many of a tenant's ended with an error.
    pub(crate) fn errors_of(&self, tenant: &str) -> u64 {
        self.by_tenant.get(tenant).copied().unwrap_or(0)
    }

    /// Forgets a tenant that is gone.
    pub(crate) fn forget(&mut self, tenant: &str) {
        self.by_tenant.remove(tenant);
    }
}
