//! Which hosts may get a worker of a job that another scheduler places, and how good each is predicted to be.

use super::Queries;
use crate::state::job::communicator::Communicator;
use crate::state::jobs::links::Links;
use crate::state::tenants::joins::root_job_named;
use harmonaize_planner::{Beside, Bytes, Conditions, DirectedLink, HostId, HostScores, Topology};
use std::collections::{BTreeMap, BTreeSet};

/// A worker that is to get a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NextWorker {
    /// The tenant's name.
    pub tenant: String,
    /// The name of its job.
    pub job: String,
    /// Workers of the job in all.
    pub workers: usize,
    /// Names of hosts that the job's other workers have got, as far as the scheduler alone knows.
    pub assumed: Vec<String>,
}

/// Why a host gets no worker of a job. The texts name nothing, for schedulers count those that are alike, and tenants read them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// The tenant is not there.
    #[error("harmonaize knows no such tenant; correct the label harmonaize.dev/tenant, or add the tenant")]
    NoTenant,
    /// The topology has no such host.
    #[error("harmonaize knows no such host; its topology must have the node's name")]
    NoHost,
    /// The tenant is bound to other hosts.
    #[error("the tenant may not be on this host")]
    Elsewhere,
    /// An operator has withdrawn it.
    #[error("the host is drained")]
    Drained,
    /// Nobody serves the worker there.
    #[error("the host's agent is not connected")]
    NoAgent,
    /// Nobody does, and control has led for so short a time that an agent may come back.
    #[error("control has just begun to lead, and agents are still to come back; try again")]
    NotYet,
}

/// Everything that scores are made from: taken from the state at once, computed where nobody waits for it.
#[derive(Debug)]
pub struct Candidates {
    topology: Topology,
    conditions: Conditions,
    others: BTreeMap<DirectedLink, u32>,
    placed: BTreeSet<HostId>,
    /// As they were named, so that one may be there twice.
    hosts: Vec<HostId>,
    workers: usize,
    operation: Bytes,
}

impl Queries<'_> {
    /// Whether a tenant's worker can be on each of these hosts, in their order. The errors say why it cannot.
    pub fn fits(&self, tenant: &str, hosts: &[String]) -> Vec<Result<HostId, Unfit>> {
        let is_known = self.ctx.settings.tenants.iter().any(|known| known == tenant);
        let fits = |host: &String| if is_known { self.fits_on(tenant, host) } else { Err(Unfit::NoTenant) };
        hosts.iter().map(fits).collect()
    }

    /// The same for a tenant that is there, and one host.
    fn fits_on(&self, tenant: &str, host: &str) -> Result<HostId, Unfit> {
        let ctx = &self.ctx;
        let id = ctx.settings.topology.host(host).ok_or(Unfit::NoHost)?;
        if ctx.is_elsewhere(tenant, host) {
            return Err(Unfit::Elsewhere);
        }
        if ctx.is_withdrawn(id) {
            return Err(Unfit::Drained);
        }
        if !ctx.hosts.contains_key(&id) {
            let soon = ctx.now < ctx.settings.return_time();
            return Err(if soon { Unfit::NotYet } else { Unfit::NoAgent });
        }
        Ok(id)
    }

    /// Returns what the scores of these hosts are made from. Hosts that do not [fit](Self::fits) are left out. The job has the hosts of its
    /// runners, of its communicators, and those that the scheduler knows.
    ///
    /// # Errors
    /// [`Unfit::NotYet`], where one of the hosts may fit soon.
    pub fn candidates(&self, worker: &NextWorker, hosts: &[String]) -> Result<Candidates, Unfit> {
        let ctx = &self.ctx;
        let NextWorker { tenant, job, workers, assumed } = worker;
        let is_own = |known: &&Communicator| known.tenant == *tenant && root_job_named(&known.name) == job;
        let own = ctx.communicators.values().filter(is_own);
        let members = own.flat_map(|known| &known.members).filter(|member| !member.closed);
        let topology = &ctx.settings.topology;
        let mut placed = self.jobs.hosts_of(tenant, job);
        placed.extend(members.map(|member| member.host));
        placed.extend(assumed.iter().filter_map(|host| topology.host(host)));
        let fit = self.fits(tenant, hosts);
        if fit.contains(&Err(Unfit::NotYet)) {
            return Err(Unfit::NotYet);
        }
        let links = Links::new(&self.view());
        let key = (tenant.clone(), job.clone());
        Ok(Candidates {
            topology: topology.clone(),
            others: links.others(&key),
            operation: links.operation(&key),
            conditions: links.into_conditions(),
            placed,
            hosts: fit.into_iter().flatten().collect(),
            workers: *workers,
        })
    }
}

impl Candidates {
    /// Scores the hosts by their names, from 0 to 10. In a fabric of thousands of hosts that all differ it takes seconds. Once it is
    /// `late`, hosts are scored by their place alone.
    pub fn scores(&self, late: impl FnMut() -> bool) -> BTreeMap<&str, u8> {
        let each: BTreeSet<HostId> = self.hosts.iter().copied().collect();
        let each: Vec<HostId> = each.into_iter().collect();
        let scores = HostScores {
            beside: Beside {
                topology: &self.topology,
                conditions: &self.conditions,
                others: &self.others,
                operation: self.operation,
            },
            placed: &self.placed,
            candidates: &each,
            workers: self.workers,
        };
        let name = |host: HostId| self.topology.hosts().get(host.0).map(|host| host.name.as_str());
        scores.scores(late).into_iter().filter_map(|(host, score)| Some((name(host)?, score))).collect()
    }
}
