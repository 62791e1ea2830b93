//! What operators ask of control beyond its status: the fabric, tenants, plans, decisions, drains and maintenance.

#[cfg(test)]
mod tests;
mod text;

use crate::Failure;
use crate::control::{Control, ControlArguments, Target};
use crate::output::PageArguments;
use crate::text::{bytes, number_of};
use clap::Subcommand;
use harmonaize_analysis::CommunicatorId;
use harmonaize_api::v1::operator_client::OperatorClient;
use harmonaize_api::v1::{self, WithdrawalKind};
use harmonaize_planner::{Bytes, Nanos};
use serde_json::{Value, json};
use std::path::Path;
use std::str::FromStr;
use std::time::{Duration, SystemTime};
use tokio::time::Instant;
use tonic::transport::Channel;
use tonic::{Response, Status, Streaming};

/// How often a drain is looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Examples of `drain`.
pub(crate) const DRAIN_HELP: &str = "\
Examples:
  harmonaize drain spine0                     our traffic leaves it; waits until none is left
  harmonaize drain h3 leaf0:spine1 --reason 'a fan is loud'
  harmonaize drain                            what is drained, and what still crosses it
  harmonaize drain spine0 --end               it may carry again

A switch or link carries no connection of ours where there is another way. A host gets no new communicators; those that
it takes part in go on until they end, or are dissolved. A link is named by its two ends. Drains outlive restarts of
control, where its configuration names a store.";

/// Examples of `maintenance`.
pub(crate) const MAINTENANCE_HELP: &str = "\
Examples:
  harmonaize maintenance spine0 --for 2h                            from now on
  harmonaize maintenance spine0 --from 2026-11-22T22:00:00Z --for 2h
  harmonaize maintenance spine0 --from +30min --for 2h
  harmonaize maintenance                                            what is planned or under way
  harmonaize maintenance spine0 --cancel

In its window it is as if it were drained; afterwards it is used again by itself.";

/// Examples of `tenants`.
pub(crate) const TENANTS_HELP: &str = "\
Examples:
  harmonaize tenants                          who may form communicators, how many there are, and where agents serve it
  harmonaize tenants add bert-team --uid 10002 --host h0 --host h1 --arena 4GiB
  harmonaize tenants add gpt-team             one more; agents have it in their own configuration
  harmonaize tenants remove bert-team         once it has no communicators

A tenant that is added outlives restarts of control, where its configuration names a store. With --uid agents serve it at
once, within what [control_tenants] of their configuration allows; its processes attach at NAME.sock in the folder that is
named there.";

/// Examples of `backup`.
pub(crate) const BACKUP_HELP: &str = "\
Examples:
  harmonaize backup control.backup            all that control has stored, while it runs
  harmonaize-control --config control.toml --restore control.backup

The file has tenants that were added, drains and maintenance, plans and agreements; keys and the configuration are files of
their own. It takes the place of an earlier one of its name. An admin may ask for it.";

/// Examples of `explain`.
pub(crate) const EXPLAIN_HELP: &str = "\
Examples:
  harmonaize explain                          what control decided lately, and why
  harmonaize explain a/world --last 3         of one communicator
  harmonaize explain --json | jq '.decisions[-1]'

Times are counted from when control received the report, or, where there was none, from the decision. Scores are how
much longer operations take than on an idle fabric: 1.00 is best.";

/// What is done with tenants.
#[derive(Subcommand)]
pub(crate) enum TenantAction {
    /// One more.
    Add(AddTenant),
    /// One less; only one that was added, and has no communicators.
    Remove {
        /// Its name.
        name: String,
    },
}

/// A tenant to be added.
#[derive(clap::Args)]
pub(crate) struct AddTenant {
    /// 1 to 63 visible ASCII characters, no slash.
    name: String,
    /// A user whose processes may attach: agents serve the tenant beside those of their configuration. May be given several
    /// times.
    #[arg(long, value_name = "USER")]
    uid: Vec<u32>,
    /// A host where it may be, and is served; everywhere without. May be given several times.
    #[arg(long, value_name = "HOST")]
    host: Vec<String>,
    /// Its tensor memory at each agent, such as 4GiB.
    #[arg(long, value_name = "SIZE", requires = "uid")]
    arena: Option<Bytes>,
    /// Processes at each agent at once.
    #[arg(long, value_name = "NUMBER", requires = "uid")]
    attachments: Option<u32>,
    /// Regions of memory beside arenas at each agent.
    #[arg(long, value_name = "NUMBER", requires = "uid")]
    regions: Option<u32>,
    /// Communicators of a process at once.
    #[arg(long, value_name = "NUMBER", requires = "uid")]
    communicators: Option<u32>,
    /// The longest time-out of an operation, such as 1h.
    #[arg(long, value_name = "TIME", requires = "uid")]
    operation_timeout: Option<Nanos>,
}

impl AddTenant {
    fn request(self) -> v1::AddTenantRequest {
        let quota = v1::TenantQuota {
            arena_bytes: self.arena.map_or(0, |bytes| bytes.0),
            attachments: self.attachments.unwrap_or(0),
            regions: self.regions.unwrap_or(0),
            communicators: self.communicators.unwrap_or(0),
            operation_timeout_ns: self.operation_timeout.map_or(0, |time| time.0),
        };
        v1::AddTenantRequest { name: self.name, uids: self.uid, hosts: self.host, quota: Some(quota) }
    }
}

/// What `drain` and `maintenance` are asked for.
pub(crate) struct WithdrawOptions {
    pub targets: Vec<String>,
    pub window: Option<(Moment, Option<Nanos>)>,
    pub end: bool,
    pub reason: String,
    pub wait: Nanos,
    pub print: PageArguments,
}

/// A time of day, or so long from now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moment {
    At(SystemTime),
    In(Nanos),
}

impl FromStr for Moment {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(later) = text.strip_prefix('+') {
            return later
                .parse()
                .map(Self::In)
                .map_err(|error: harmonaize_planner::UnitError| error.to_string());
        }
        let wrong = |_| "neither a time, such as 2026-11-22T22:00:00Z (UTC), nor +30min".to_owned();
        humantime::parse_rfc3339_weak(text).map(Self::At).map_err(wrong)
    }
}

impl Moment {
    /// How long until then; nothing where it is over.
    pub(crate) fn remaining(self, now: SystemTime) -> Duration {
        match self {
            Self::At(at) => at.duration_since(now).unwrap_or_default(),
            Self::In(later) => later.into(),
        }
    }

    /// CLOCK_REALTIME nanoseconds.
    fn nanos(self) -> u64 {
        let since = |at: SystemTime| at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let nanos = |since: Duration| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
        match self {
            Self::At(at) => nanos(since(at)),
            Self::In(later) => nanos(since(SystemTime::now())).saturating_add(later.0),
        }
    }
}

/// A connection to control for operators.
pub(crate) struct Operate {
    control: Control,
    client: OperatorClient<Channel>,
}

impl Operate {
    pub(crate) async fn connect(at: &ControlArguments) -> Result<Self, Failure> {
        let control = Control::connect(at).await?;
        let client = OperatorClient::new(control.channel()).max_decoding_message_size(64 << 20);
        Ok(Self { control, client })
    }

    /// The fabric's telemetry, once an interval.
    pub(crate) async fn watch(&mut self, interval: Nanos) -> Result<Streaming<v1::FabricSnapshot>, Failure> {
        self.control.watch(interval).await
    }

    pub(crate) fn failure(&self, status: &Status) -> Failure {
        self.control.failure(status)
    }

    /// Rows of hosts, as their agents send them.
    pub(crate) async fn ask(&mut self, request: v1::AskRequest) -> Result<Streaming<v1::AskReply>, Failure> {
        let outcome = self.client.ask(request).await;
        self.done(outcome)
    }

    /// The id of a communicator.
    pub(crate) async fn resolve(&mut self, target: &Target) -> Result<CommunicatorId, Failure> {
        self.control.resolve(target).await
    }

    fn done<T>(&self, outcome: Result<Response<T>, Status>) -> Result<T, Failure> {
        outcome.map(Response::into_inner).map_err(|status| self.control.failure(&status))
    }

    pub(crate) async fn topology(&mut self, print: &PageArguments) -> Result<String, Failure> {
        let outcome = self.client.topology(v1::TopologyRequest {}).await;
        let reply = self.done(outcome)?;
        Ok(print.page(&reply, text::topology))
    }

    /// The fabric as control has it, and the routes that agents traced.
    pub(crate) async fn traced_paths(
        &mut self,
    ) -> Result<(v1::TopologyReply, v1::TracedPathsReply), Failure> {
        let outcome = self.client.topology(v1::TopologyRequest {}).await;
        let fabric = self.done(outcome)?;
        let outcome = self.client.traced_paths(v1::TracedPathsRequest {}).await;
        Ok((fabric, self.done(outcome)?))
    }

    pub(crate) async fn tenants(
        &mut self,
        action: Option<TenantAction>,
        print: &PageArguments,
    ) -> Result<String, Failure> {
        match action {
            Some(TenantAction::Add(tenant)) => {
                let (name, request) = (tenant.name.clone(), tenant.request());
                let outcome = self.client.add_tenant(request).await;
                self.done(outcome)?;
                Ok(tenant_outcome(&name, "added", print))
            }
            Some(TenantAction::Remove { name }) => {
                let outcome = self.client.remove_tenant(v1::RemoveTenantRequest { name: name.clone() }).await;
                self.done(outcome)?;
                Ok(tenant_outcome(&name, "removed", print))
            }
            None => {
                let outcome = self.client.tenants(v1::TenantsRequest {}).await;
                let reply = self.done(outcome)?;
                Ok(print.page(&reply, text::tenants))
            }
        }
    }

    /// Writes a copy of control's store into a file.
    pub(crate) async fn backup(&mut self, file: &Path, print: &PageArguments) -> Result<String, Failure> {
        let outcome = self.client.backup(v1::BackupRequest {}).await;
        let mut chunks = self.done(outcome)?;
        let (mut copy, mut total) = (Vec::new(), 0);
        while let Some(chunk) = chunks.message().await.map_err(|status| self.control.failure(&status))? {
            copy.extend_from_slice(&chunk.bytes);
            total = chunk.total;
        }
        if copy.is_empty() || copy.len() as u64 != total {
            let (length, file) = (copy.len(), file.display());
            return Err(Failure::Refused(format!(
                "the copy was cut off at {length} of {total} bytes; {file} is not written"
            )));
        }
        harmonaize_identity::write_file(file, &copy, 0o600)
            .map_err(|error| Failure::Refused(error.to_string()))?;
        let written = json!({"file": file, "bytes": total});
        Ok(print.page(&written, |_| format!("{}: {}\n", file.display(), bytes(total))))
    }

    pub(crate) async fn plans(
        &mut self,
        of: Option<&Target>,
        print: &PageArguments,
    ) -> Result<String, Failure> {
        let communicator = self.id(of).await?;
        let reply = self.plans_of(communicator).await?;
        Ok(print.page(&reply, text::plans))
    }

    /// Plans of one communicator, or of all.
    pub(crate) async fn plans_of(
        &mut self,
        communicator: Option<CommunicatorId>,
    ) -> Result<v1::PlansReply, Failure> {
        let communicator = communicator.map_or(0, u64::from);
        let outcome = self.client.plans(v1::PlansRequest { communicator }).await;
        self.done(outcome)
    }

    /// The last decisions, of one communicator or of all.
    pub(crate) async fn decisions(
        &mut self,
        communicator: Option<CommunicatorId>,
        last: u32,
    ) -> Result<v1::ExplainReply, Failure> {
        let communicator = communicator.map_or(0, u64::from);
        let outcome = self.client.explain(v1::ExplainRequest { communicator, last }).await;
        self.done(outcome)
    }

    /// Jobs, what they have, and why.
    pub(crate) async fn jobs(&mut self) -> Result<v1::JobsReply, Failure> {
        let outcome = self.client.jobs(v1::JobsRequest {}).await;
        self.done(outcome)
    }

    /// What jobs would have if something else were so.
    pub(crate) async fn what_if(&mut self, request: v1::WhatIfRequest) -> Result<v1::WhatIfReply, Failure> {
        let outcome = self.client.what_if(request).await;
        self.done(outcome)
    }

    pub(crate) async fn explain(
        &mut self,
        of: Option<&Target>,
        last: u32,
        print: &PageArguments,
    ) -> Result<String, Failure> {
        let communicator = self.id(of).await?;
        let decisions = self.decisions(communicator, last).await?;
        let plans = match communicator.is_none() || print.is_for_programs() {
            true => None,
            false => Some(self.plans_of(communicator).await?),
        };
        Ok(print.page(&decisions, |decisions| text::explain(decisions, plans.as_ref())))
    }

    pub(crate) async fn dry_run(
        &mut self,
        targets: Vec<String>,
        print: &PageArguments,
    ) -> Result<String, Failure> {
        let outcome = self.client.dry_run(v1::DryRunRequest { targets }).await;
        let reply = self.done(outcome)?;
        Ok(print.page(&reply, text::dry_run))
    }

    /// `drain`, or `maintenance` where there is a window.
    pub(crate) async fn withdraw(&mut self, options: WithdrawOptions) -> Result<String, Failure> {
        let kind = match options.window {
            None => WithdrawalKind::Drain,
            Some(_) => WithdrawalKind::Maintenance,
        };
        let text = |reply: &v1::WithdrawalsReply| text::withdrawals(kind, &reply.withdrawals);
        if options.targets.is_empty() {
            if options.end {
                return Err(Failure::Usage("which? name hosts, switches or links".to_owned()));
            }
            let records = self.withdrawals(kind, &[]).await?;
            return Ok(options.print.page(&v1::WithdrawalsReply { withdrawals: records }, text));
        }
        if options.end {
            let targets = options.targets.clone();
            let outcome = self.client.restore(v1::RestoreRequest { targets, kind: kind.into() }).await;
            self.done(outcome)?;
            let text = |target: &String| format!("{target}: may be used again\n");
            let reply = restored(kind, &options.targets);
            return Ok(options.print.page(&reply, |_| options.targets.iter().map(text).collect()));
        }
        let (from_ns, until_ns) = match options.window {
            None => (0, 0),
            Some((_, None)) => return Err(Failure::Usage("for how long? say --for 2h".to_owned())),
            Some((from, Some(length))) => (from.nanos(), from.nanos().saturating_add(length.0)),
        };
        let (targets, reason) = (options.targets.clone(), options.reason);
        let request = v1::WithdrawRequest { targets, kind: kind.into(), from_ns, until_ns, reason };
        let outcome = self.client.withdraw(request).await;
        let records = self.done(outcome)?.withdrawals;
        let records = match options.wait {
            Nanos(0) => records,
            wait => self.wait_until_drained(records, kind, wait).await?,
        };
        Ok(options.print.page(&v1::WithdrawalsReply { withdrawals: records }, text))
    }

    /// Waits until no connection of ours crosses switches and links that are drained.
    async fn wait_until_drained(
        &mut self,
        records: Vec<v1::WithdrawalRecord>,
        kind: WithdrawalKind,
        wait: Nanos,
    ) -> Result<Vec<v1::WithdrawalRecord>, Failure> {
        let until = Instant::now() + wait.into();
        let names: Vec<String> = records.iter().map(|record| record.target.clone()).collect();
        let mut records = records;
        loop {
            let crossed =
                |record: &&v1::WithdrawalRecord| record.target_kind != "host" && record.remaining > 0;
            let Some(record) = records.iter().find(crossed) else { return Ok(records) };
            if Instant::now() >= until {
                let remaining = number_of(
                    record.remaining,
                    "connection of ours still crosses",
                    "connections of ours still cross",
                );
                return Err(Failure::UnderWay(format!(
                    "{}: drained, but {remaining} it after {wait}; see `harmonaize plans`",
                    record.target
                )));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
            records = self.withdrawals(kind, &names).await?;
        }
    }

    /// What is withdrawn in a way: these, or all where none is named.
    async fn withdrawals(
        &mut self,
        kind: WithdrawalKind,
        names: &[String],
    ) -> Result<Vec<v1::WithdrawalRecord>, Failure> {
        let outcome = self.client.withdrawals(v1::WithdrawalsRequest {}).await;
        let mut records = self.done(outcome)?.withdrawals;
        records
            .retain(|record| record.kind() == kind && (names.is_empty() || names.contains(&record.target)));
        Ok(records)
    }

    async fn id(&mut self, target: Option<&Target>) -> Result<Option<CommunicatorId>, Failure> {
        match target {
            None => Ok(None),
            Some(target) => self.control.resolve(target).await.map(Some),
        }
    }
}

/// What was done with a tenant.
fn tenant_outcome(name: &str, outcome: &str, print: &PageArguments) -> String {
    print.page(&json!({"tenant": name, "outcome": outcome}), |_| format!("tenant {name}: {outcome}\n"))
}

fn restored(kind: WithdrawalKind, targets: &[String]) -> Value {
    let kind = kind.text();
    let restored =
        targets.iter().map(|target| json!({"target": target, "kind": kind, "outcome": "restored"}));
    json!({"restored": restored.collect::<Vec<_>>()})
}
