//! Another topology while control runs. What stays keeps its number, and so all that is known of it.

use super::Controller;
use crate::state::ctx::ctx;
use crate::state::job::communicator::Communicator;
use crate::state::job::decisions::Trigger;
use crate::state::output::SessionId;
use harmonaize_api::v1::RefusedKind;
use harmonaize_planner::{AggregatorId, HostId, Node, Topology};
use std::time::Duration;

/// Why another topology is not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TopologyRefusal {
    /// A host is gone that has ranks, or processes that join.
    #[error("the topology lacks host `{0}`, which has ranks: drain it, let its jobs end, and send SIGHUP")]
    HostInUse(String),
    /// An aggregator is gone that serves communicators.
    #[error("the topology lacks aggregator `{0}`, which serves communicators: stop it, and send SIGHUP")]
    AggregatorInUse(String),
}

impl Controller {
    /// Puts another topology in force. Sessions end of hosts and aggregators that it lacks, and control plans anew.
    ///
    /// # Errors
    /// Where it lacks what is in use. Nothing has changed then.
    pub(crate) fn change_topology(
        &mut self,
        now: Duration,
        topology: Topology,
    ) -> Result<(), TopologyRefusal> {
        let topology = topology.numbered_as(&self.settings.topology);
        if topology == self.settings.topology {
            return Ok(());
        }
        let mut ended: Vec<SessionId> = Vec::new();
        for (index, host) in topology.hosts().iter().enumerate() {
            let id = HostId(index);
            if topology.has(Node::Host(id)) {
                continue;
            }
            if self.is_used(id) || self.operator.awaits(&host.name) {
                return Err(TopologyRefusal::HostInUse(host.name.clone()));
            }
            ended.extend(self.hosts.get(&id));
        }
        for (index, aggregator) in topology.aggregators().iter().enumerate() {
            let id = AggregatorId(index);
            if aggregator.is_gone() && self.aggregators.is_granting(id) {
                return Err(TopologyRefusal::AggregatorInUse(aggregator.name.clone()));
            }
            ended.extend(self.aggregators.session_of(id).filter(|_| aggregator.is_gone()));
        }
        self.settings.topology = topology;
        for session in ended {
            let reason = "the topology lacks it from now on".to_owned();
            self.outbox.refuse(session, RefusedKind::UnknownHost, reason);
            self.session_ended(now, session);
        }
        for known in self.communicators.values_mut() {
            known.coding.usage.clear();
            known.learn_usage(&self.settings.topology);
        }
        self.agreements.topology_changed();
        self.link_state.topology_changed(&ctx!(self, now), &mut self.outbox);
        self.operator.update_windows(&self.settings, now, &mut self.outbox.trigger);
        self.outbox.want_plan(Trigger::Topology);
        Ok(())
    }

    /// Whether a host has ranks of a communicator, or processes that join one. Closed ranks count while others of the
    /// communicator go on.
    fn is_used(&self, host: HostId) -> bool {
        let session = self.hosts.get(&host).and_then(|session| self.sessions.get(session));
        let ranks = |known: &Communicator| known.members.iter().any(|member| member.host == host);
        session.is_some_and(|session| !session.joins.is_empty()) || self.communicators.values().any(ranks)
    }
}
