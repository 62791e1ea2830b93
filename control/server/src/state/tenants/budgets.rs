//! What tenants have and do over all hosts together, and what the operator lets them.

use crate::state::ctx::Ctx;
use crate::state::settings::Terms;
use crate::state::world::agents::ProcessUsage;
use harmonaize_disclose::JoinFailure;
use harmonaize_units::{Gcra, Quota};
use std::collections::BTreeMap;

/// What a tenant has over all hosts: of communicators that run or form, and of those that wait for ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct InSum {
    pub communicators: usize,
    pub ranks: u64,
    /// What its processes have on hosts with ranks of it.
    pub processes: ProcessUsage,
}

impl InSum {
    /// Adds one more communicator of so many ranks.
    pub(crate) fn add(&mut self, ranks: u64) {
        self.communicators += 1;
        self.ranks = self.ranks.saturating_add(ranks);
    }

    /// Adds what processes have on one more host.
    pub(crate) fn add_processes(&mut self, held: ProcessUsage) {
        let ProcessUsage { tensors, operations } = self.processes;
        self.processes = ProcessUsage {
            tensors: tensors.saturating_add(held.tensors),
            operations: operations.saturating_add(held.operations),
        };
    }

    /// Whether the tenant may have so many communicators more, of so many ranks together.
    ///
    /// # Errors
    /// The limit that they would break, and what the tenant has.
    pub(crate) fn check(&self, terms: &Terms, communicators: usize, ranks: u64) -> Result<(), JoinFailure> {
        let used = self.communicators;
        if let Some(max) = terms.communicators.filter(|max| used.saturating_add(communicators) > *max) {
            return Err(JoinFailure::TooManyCommunicatorsInSum { used, max });
        }
        let used = self.ranks;
        if let Some(max) = terms.ranks.filter(|max| used.saturating_add(ranks) > u64::from(*max)) {
            return Err(JoinFailure::TooManyRanksInSum { ranks, used, max });
        }
        let used = self.processes.tensors;
        if let Some(max) = terms.arena.filter(|max| used > *max) {
            return Err(JoinFailure::TooMuchMemoryInSum { used, max });
        }
        let used = self.processes.operations;
        match terms.operations.filter(|max| used > u64::from(*max)) {
            Some(max) => Err(JoinFailure::TooManyOperationsInSum { used, max }),
            None => Ok(()),
        }
    }
}

/// How often ranks of those tenants have joined of late whose rate has a limit.
#[derive(Debug, Default)]
pub(crate) struct JoinRates {
    tenants: BTreeMap<String, Gcra>,
}

impl JoinRates {
    /// Takes note that a rank of the tenant joins. As many as a communicator may have can come at once.
    ///
    /// # Errors
    /// Where this is one too many.
    pub(crate) fn take(&mut self, ctx: &Ctx<'_>, tenant: &str) -> Result<(), JoinFailure> {
        let Some(per_second) = ctx.settings.terms(tenant).joins else {
            self.tenants.remove(tenant);
            return Ok(());
        };
        let at_once = per_second.max(ctx.settings.most_ranks);
        let quota = Quota { burst: at_once, ..Quota::per_second(per_second) };
        let taken = self.tenants.entry(tenant.to_owned()).or_default().take(ctx.now, quota);
        taken.map_err(|next| {
            let after = next.saturating_sub(ctx.now);
            JoinFailure::JoinsTooOften { per_second, at_once, after }
        })
    }
}
