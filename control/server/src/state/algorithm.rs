//! Up to which sizes a communicator's operations go straight between all its hosts; chosen anew for every epoch.

use super::State;
use super::coding::MOST_HOSTS;
use super::communicator::Communicator;
use super::lifecycle::Planned;
use harmonaize_abi::session::MAX_TARGET_BYTES;
use harmonaize_planner::{
    AlgorithmChoice, AlgorithmPolicy, Bytes, DirectThresholds, GroupCosts, HostId, Rate, delays,
    exchange_rate, line_rate,
};

impl State {
    /// For the next epoch of a communicator, by this plan and with hosts in this order.
    pub(super) fn choose_algorithm(
        &self,
        id: u64,
        order: &[u32],
        planned: Option<&Planned>,
    ) -> AlgorithmChoice {
        let Some(known) = self.communicators.get(&id) else { return AlgorithmChoice::default() };
        let hosts = known.members.len();
        if hosts < 2 {
            return AlgorithmChoice::ring("nothing crosses a wire");
        }
        if let Some(why) = Self::indirect(known) {
            return AlgorithmChoice::ring(why);
        }
        let policy = self.settings.direct.get(&known.tenant).copied().unwrap_or_default();
        if let Some(forced) = AlgorithmChoice::forced(policy) {
            return forced;
        }
        let members: Vec<HostId> = known.members.iter().map(|member| member.host).collect();
        let ring: Vec<HostId> = order.iter().filter_map(|at| members.get(*at as usize)).copied().collect();
        let conditions = self.conditions();
        let direct = exchange_rate(&known.coding.usage, &conditions, &self.takers(id));
        let line = line_rate(&self.settings.topology, &members).0 as f64;
        let along = planned.map_or(direct.0 as f64, |planned| line / planned.slowdown.max(1.0));
        let (delay, hop) = delays(&self.settings.topology, &ring);
        let reach = GroupCosts {
            hosts: hosts as u32,
            delay,
            hop_delay: hop,
            direct_rate: direct,
            ring_rate: Rate(along as u64),
            chunk: known.tuning.chunk,
        };
        let before =
            known.current().map_or_else(DirectThresholds::default, |current| current.algorithm.sizes);
        let ordered = self.reduction_policy(id).ordered.then_some(Bytes(MAX_TARGET_BYTES));
        AlgorithmChoice::fastest(&reach, before, ordered)
    }

    /// Why a communicator's contributions cannot be promised to be added in one order; none where they can.
    pub(super) fn unordered(&self, known: &Communicator) -> Option<&'static str> {
        if known.members.len() < 2 {
            return None;
        }
        let directly = self.settings.direct.get(&known.tenant).copied().unwrap_or_default();
        if directly != AlgorithmPolicy::Chosen {
            return Some("the provider has chosen a way for this tenant's operations");
        }
        Self::indirect(known)
    }

    /// Why a communicator's operations cannot go straight from each of its hosts to all; none where they can.
    pub(super) fn indirect(known: &Communicator) -> Option<&'static str> {
        (known.members.len() > MOST_HOSTS).then_some("too many hosts to send to each other directly")
    }
}
