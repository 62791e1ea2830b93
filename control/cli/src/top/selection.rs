//! Which hosts, tenants and communicators `top` shows of what control knows.

use crate::Failure;
use crate::control::Target;
use harmonaize_api::v1::{ExplainReply, FabricSnapshot, PlansReply, finding_change::Finding};
use std::collections::BTreeSet;

/// What is shown; everything where all are empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args)]
pub(crate) struct Selection {
    /// Only of these hosts, and of communicators over one of them.
    #[arg(long, value_name = "HOST", value_delimiter = ',')]
    pub host: Vec<String>,
    /// Only of these tenants' communicators.
    #[arg(long, value_name = "TENANT", value_delimiter = ',')]
    pub tenant: Vec<String>,
    /// Only of these communicators: an id, or tenant/name.
    #[arg(long, value_name = "COMMUNICATOR", value_delimiter = ',')]
    pub communicator: Vec<Target>,
}

impl Selection {
    fn has_host(&self, host: &str) -> bool {
        self.host.is_empty() || self.host.iter().any(|one| one == host)
    }

    fn has_communicator(&self, tenant: &str, name: &str, id: u64) -> bool {
        let is = |target: &Target| match target {
            Target::Id(one) => one.0 == id,
            Target::Name(of, one) => of == tenant && one == name,
        };
        (self.tenant.is_empty() || self.tenant.iter().any(|one| one == tenant))
            && (self.communicator.is_empty() || self.communicator.iter().any(is))
    }

    /// Leaves out what is not selected.
    ///
    /// # Errors
    /// A host that the fabric does not have.
    pub(super) fn apply(
        &self,
        fabric: &mut FabricSnapshot,
        plans: &mut PlansReply,
        decisions: &mut ExplainReply,
    ) -> Result<(), Failure> {
        if *self == Self::default() {
            return Ok(());
        }
        let unknown = self.host.iter().find(|name| fabric.hosts.iter().all(|host| host.host != **name));
        if let Some(name) = unknown {
            return Err(Failure::NotFound(format!("the topology has no host `{name}`")));
        }
        fabric.hosts.retain(|host| self.has_host(&host.host));
        plans.plans.retain(|plan| {
            self.has_communicator(&plan.tenant, &plan.name, plan.communicator)
                && (self.host.is_empty() || plan.order.iter().any(|host| self.has_host(host)))
        });
        let selected: BTreeSet<u64> = plans.plans.iter().map(|plan| plan.communicator).collect();
        fabric.communicators.retain(|one| selected.contains(&one.communicator));
        // What is of a host and of no communicator of ours is nobody's who selects these.
        let any = self.tenant.is_empty() && self.communicator.is_empty();
        let has_rank =
            |host: &str, communicator| self.has_host(host) && (any || selected.contains(&communicator));
        fabric.stragglers.retain(|one| has_rank(&one.host, one.communicator));
        fabric.changes.retain(|change| match &change.finding {
            Some(Finding::Straggler(one)) => {
                let host = if one.host.is_empty() { &change.host } else { &one.host };
                has_rank(host, one.communicator)
            }
            _ => any && self.has_host(&change.host),
        });
        for decision in &mut decisions.decisions {
            decision.changes.retain(|one| {
                self.has_communicator(&one.tenant, &one.name, one.communicator)
                    && (self.host.is_empty() || selected.contains(&one.communicator))
            });
        }
        decisions.decisions.retain(|decision| !decision.changes.is_empty());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_api::v1::{CommunicatorTelemetry, HostTelemetry, PlanStatus, Straggler};

    /// Three hosts; the first two have a communicator of each of two tenants, the last one of the second. A rank of each is late.
    fn fabric() -> (FabricSnapshot, PlansReply) {
        let jobs = [("a", 1, &["h0", "h1"][..]), ("b", 2, &["h0", "h1"][..]), ("b", 3, &["h2"][..])];
        let plan = |(tenant, communicator, hosts): &(&str, u64, &[&str])| PlanStatus {
            tenant: (*tenant).to_owned(),
            name: "job".to_owned(),
            communicator: *communicator,
            order: hosts.iter().map(|host| (*host).to_owned()).collect(),
            ..PlanStatus::default()
        };
        let telemetry = |(_, communicator, _): &(&str, u64, &[&str])| CommunicatorTelemetry {
            communicator: *communicator,
            ..CommunicatorTelemetry::default()
        };
        let straggler = |(_, communicator, hosts): &(&str, u64, &[&str])| Straggler {
            communicator: *communicator,
            host: hosts[0].to_owned(),
            ..Straggler::default()
        };
        let host = |name: &str| HostTelemetry { host: name.to_owned(), ..HostTelemetry::default() };
        let snapshot = FabricSnapshot {
            hosts: ["h0", "h1", "h2"].map(host).into(),
            communicators: jobs.iter().map(telemetry).collect(),
            stragglers: jobs.iter().map(straggler).collect(),
            ..FabricSnapshot::default()
        };
        (snapshot, PlansReply { plans: jobs.iter().map(plan).collect(), ..PlansReply::default() })
    }

    /// How many hosts are left, and of which communicators telemetry and stragglers are.
    fn remaining(selection: &Selection) -> (usize, Vec<u64>, Vec<u64>) {
        let (mut fabric, mut plans) = fabric();
        selection.apply(&mut fabric, &mut plans, &mut ExplainReply::default()).unwrap();
        let communicators: Vec<u64> = fabric.communicators.iter().map(|one| one.communicator).collect();
        assert!(plans.plans.iter().map(|plan| plan.communicator).eq(communicators.iter().copied()));
        (fabric.hosts.len(), communicators, fabric.stragglers.iter().map(|one| one.communicator).collect())
    }

    #[test]
    fn hosts_tenants_and_communicators_are_selected() {
        let all = Selection::default;
        let texts = |text: &str| vec![text.to_owned()];
        assert_eq!(remaining(&all()), (3, vec![1, 2, 3], vec![1, 2, 3]));
        assert_eq!(remaining(&Selection { host: texts("h2"), ..all() }), (1, vec![3], vec![3]));
        assert_eq!(remaining(&Selection { host: texts("h1"), ..all() }), (1, vec![1, 2], vec![]));
        assert_eq!(remaining(&Selection { tenant: texts("b"), ..all() }), (3, vec![2, 3], vec![2, 3]));
        let communicator = vec!["a/job".parse().unwrap(), "3".parse().unwrap()];
        assert_eq!(remaining(&Selection { communicator, ..all() }), (3, vec![1, 3], vec![1, 3]));
        let (mut fabric, mut plans) = fabric();
        let unknown = Selection { host: texts("h9"), ..all() };
        assert!(unknown.apply(&mut fabric, &mut plans, &mut ExplainReply::default()).is_err());
    }
}
