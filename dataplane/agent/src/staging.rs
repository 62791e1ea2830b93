//! How much memory of the agent's operations of a communicator need between their steps, at most: known before one begins.

use harmonaize_abi::Collective;
use harmonaize_core::{EpochPlan, p2p_staging_bytes};
use harmonaize_plan::{Access, Algorithm, Participant, Program, Retention, StagingSize, max_segment_bytes};

/// Bytes that may lie unused between two parts of staging.
const GAP: u64 = 64;

/// The ways of an operation that need staging of one size.
type Kind = (Collective, Algorithm, Retention, Access);

/// What a participant's programs need of staging: the most of each kind, whatever the root.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct StagingNeeds(Vec<(Kind, StagingSize)>);

/// The most staging of a communicator at this agent, in bytes, over all its channels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StagingBytes {
    /// Where the tensors of all local ranks are mapped.
    mapped: u64,
    /// Where those of some are not: with what is fetched of them and stored, residuals, messages and an aggregator's inputs included.
    remote: u64,
}

impl StagingNeeds {
    /// Takes a program in.
    pub(crate) fn add(&mut self, kind: Kind, program: &Program) {
        let size = program.staging_size();
        match self.0.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, most)) => *most = StagingSize::max(*most, size),
            None => self.0.push((kind, size)),
        }
    }

    /// Returns what they come to under a plan.
    pub(crate) fn bytes(&self, plan: &EpochPlan, me: Participant) -> StagingBytes {
        let (mut mapped, mut remote, mut largest, mut residual) = (0, 0, 0, 0);
        for ((collective, algorithm, retention, access), size) in &self.0 {
            let segment = max_segment_bytes(&plan.plan, *collective, *algorithm, *retention, &plan.tuning);
            let slots = size.bytes(segment);
            remote = slots.max(remote);
            if *access == Access::Mapped {
                mapped = slots.max(mapped);
            }
            largest = segment.max(largest);
            if collective.takes_feedback() {
                residual = segment.max(residual);
            }
        }
        // An aggregator's sum lies behind the slots, and behind it what stands for an input of a segment that is done.
        let sum = largest.saturating_add(GAP).saturating_mul(2);
        let sum = if plan.aggregation.is_some() { sum } else { 0 };
        let group = plan.plan.group();
        let halves = 2 * group.local(me).len() as u64;
        let residuals = residual.saturating_add(GAP).saturating_mul(halves);
        // What an aggregator is given of tensors that are not mapped.
        let inputs = largest.saturating_add(GAP).saturating_mul(halves / 2);
        let fetched = if plan.aggregation.is_some() { inputs } else { 0 };
        let messages = p2p_staging_bytes(group.participants(), plan.landing_slots, plan.tuning.chunk_bytes);
        let of_all = |channel: u64| channel.saturating_mul(u64::from(plan.channels));
        StagingBytes {
            mapped: of_all(mapped.saturating_add(sum)),
            remote: of_all([sum, residuals, fetched].into_iter().fold(remote, u64::saturating_add))
                .saturating_add(messages),
        }
    }
}

impl StagingBytes {
    /// Returns the most bytes; `mapped`: whether the tensors of all local ranks are mapped.
    pub fn bytes(self, mapped: bool) -> u64 {
        if mapped { self.mapped } else { self.remote }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::tests::recipe;
    use crate::recipe::{VerifiedPlans, expand};

    fn staging(hosts: u32, per_host: u32) -> StagingBytes {
        expand(&recipe(hosts, per_host), &mut VerifiedPlans::default()).unwrap().staging
    }

    #[test]
    fn a_plan_known_before_needs_the_same_staging() {
        let mut known = VerifiedPlans::default();
        let mut recipe = recipe(3, 2);
        let first = expand(&recipe, &mut known).unwrap().staging;
        recipe.epoch += 1;
        assert_eq!(expand(&recipe, &mut known).unwrap().staging, first);
        // Twice the channels have twice the staging of mapped tensors.
        recipe.tuning.as_mut().unwrap().channels *= 2;
        let doubled = expand(&recipe, &mut known).unwrap().staging;
        assert_eq!(doubled.bytes(true), 2 * first.bytes(true));
    }

    #[test]
    fn tensors_that_are_not_mapped_need_more_staging() {
        for (hosts, per_host) in [(1, 2), (2, 1), (5, 3)] {
            let staging = staging(hosts, per_host);
            assert!(staging.bytes(false) > staging.bytes(true), "{hosts} hosts: {staging:?}");
        }
        // On four channels both halves of each local rank's residual, of segments of 128 KiB.
        assert!(staging(2, 3).bytes(false) >= 4 * 3 * 2 * (128 << 10));
    }
}
