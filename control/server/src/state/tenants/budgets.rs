//! What tenants have and do over all hosts together, and what the operator lets them.

use crate::state::ctx::Ctx;
use crate::state::settings::Terms;
use crate::state::world::agents::ProcessUsage;
use harmonaize_api::v1;
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
    /// What agents hold for its communicators that run or form.
    pub links: LinksInSum,
}

/// What links to other agents take, and operations between their steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LinksInSum {
    pub descriptors: u64,
    pub landing_bytes: u64,
}

impl InSum {
    /// Adds one more communicator of so many ranks.
    pub(crate) fn add(&mut self, ranks: u64) {
        self.communicators += 1;
        self.ranks = self.ranks.saturating_add(ranks);
    }

    /// Adds what processes have on one more host.
    pub(crate) fn add_processes(&mut self, usage: ProcessUsage) {
        let ProcessUsage { tensors, operations, descriptors } = self.processes;
        self.processes = ProcessUsage {
            tensors: tensors.saturating_add(usage.tensors),
            operations: operations.saturating_add(usage.operations),
            descriptors: descriptors.saturating_add(usage.descriptors),
        };
    }

    /// Adds what one more agent holds for a communicator.
    pub(crate) fn add_links(&mut self, usage: v1::LinkUsage) {
        let LinksInSum { descriptors, landing_bytes } = self.links;
        self.links = LinksInSum {
            descriptors: descriptors.saturating_add(usage.descriptors.into()),
            landing_bytes: landing_bytes.saturating_add(usage.landing_bytes),
        };
    }

    /// Descriptors of processes and of links.
    fn descriptors(&self) -> u64 {
        self.processes.descriptors.saturating_add(self.links.descriptors)
    }

    /// What the tenant has of all that these terms limit.
    pub(crate) fn limits(&self, terms: &Terms) -> Vec<v1::TenantLimit> {
        let number = |most: Option<u32>| most.map(u64::from);
        let limits = [
            ("communicators", self.communicators as u64, terms.communicators.map(|most| most as u64)),
            ("ranks", self.ranks, number(terms.ranks)),
            ("arena", self.processes.tensors, terms.arena),
            ("operations", self.processes.operations, number(terms.operations)),
            ("descriptors", self.descriptors(), number(terms.descriptors)),
            ("landing", self.links.landing_bytes, terms.landing),
        ];
        let limit = |(key, used, max): (&str, u64, Option<u64>)| {
            Some(v1::TenantLimit { key: key.to_owned(), used, max: max? })
        };
        limits.into_iter().filter_map(limit).collect()
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
        if let Some(max) = terms.operations.filter(|max| used > u64::from(*max)) {
            return Err(JoinFailure::TooManyOperationsInSum { used, max });
        }
        let used = self.descriptors();
        if let Some(max) = terms.descriptors.filter(|max| used > u64::from(*max)) {
            return Err(JoinFailure::TooManyDescriptorsInSum { used, max });
        }
        let used = self.links.landing_bytes;
        match terms.landing.filter(|max| used > *max) {
            Some(max) => Err(JoinFailure::TooMuchLandingInSum { used, max }),
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
