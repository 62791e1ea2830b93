//! What tenants want of their sums: whether they may be summed on the way, in which order floats are added, and whether hosts that are late
//! may be left out.

use super::State;
use super::communicator::Communicator;
use super::decisions::Changed;
use super::direct::Directly;
use super::replan::changed;
use harmonaize_abi::session::PartialSums;
use harmonaize_api::v1;

/// Of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sums {
    /// Aggregators may sum.
    pub aggregated: bool,
    /// Contributions are added in one order, by whomever.
    pub ordered: bool,
    /// When sums may leave hosts out.
    pub partial: Option<PartialSums>,
}

impl Sums {
    /// Where nothing was agreed on.
    const USUAL: Self = Self { aggregated: true, ordered: false, partial: None };

    /// Units of an aggregator's pool that a chunk takes: to be added in order all hosts' parts are kept.
    pub(super) fn grain(&self, hosts: usize) -> u32 {
        if self.ordered { u32::try_from(hosts).unwrap_or(u32::MAX) } else { 1 }
    }
}

impl State {
    /// What was agreed on for a communicator's sums.
    pub(super) fn sums(&self, id: u64) -> Sums {
        let wanted = self.agreements.constraints(id);
        Sums {
            aggregated: wanted.is_none_or(|wanted| wanted.aggregation),
            ordered: wanted.is_some_and(|wanted| wanted.ordered),
            partial: wanted.and_then(|wanted| wanted.partial),
        }
    }

    /// Why a communicator's contributions cannot be promised to be added in one order; none where they can.
    pub(super) fn unordered(&self, known: &Communicator) -> Option<&'static str> {
        if known.members.len() < 2 {
            return None;
        }
        let directly = self.settings.direct.get(&known.tenant).copied().unwrap_or_default();
        if directly != Directly::Chosen {
            return Some("the provider has chosen a way for this tenant's operations");
        }
        self.indirect(known)
    }

    /// Has communicators of which other sums were agreed on than their epoch has go on by another epoch, with the links that they have.
    pub(super) fn resum(
        &mut self,
        now: std::time::Duration,
        number: Option<u64>,
        changes: &mut Vec<Changed>,
    ) {
        let other = |(id, known): (&u64, &Communicator)| {
            let still = known.phase() == v1::Phase::Running && known.held_off.is_none();
            let wanted = self.sums(*id);
            // What an earlier control had agents do is known in part.
            let unknown = known.aggregation.left_out || wanted != Sums::USUAL;
            let differs = known.aggregation.sums.map_or(unknown, |has| has != wanted);
            (still && differs).then_some(*id)
        };
        for id in self.communicators.iter().filter_map(other).collect::<Vec<_>>() {
            let epoch = self.propose_same(now, id, number);
            changes.push(changed(id, epoch, "other sums were agreed on", now));
        }
    }
}
