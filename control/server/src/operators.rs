//! What operators ask: looks at the state, and instructions that are kept before they are answered.

use crate::access::{Current, Role};
use crate::actor::{Command, Refusal, realtime};
use crate::leader::Commands;
use crate::relay::{Relay, Replies};
use crate::state::{
    Controller, Instruction, InstructionError, Settings, TopologyRefusal, WhatIfError, stored_plan_status,
};
use harmonaize_abi::{CommunicatorId, Nanos};
use harmonaize_api::v1::operator_server::Operator;
use harmonaize_api::v1::{self, WithdrawalKind};
use harmonaize_store::WithdrawalKind as Kind;
use harmonaize_store::etcd::Reader;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};
use tonic::{Request, Response, Status};

/// The service.
pub(crate) struct Operators {
    commands: Commands,
    access: Arc<Current>,
    /// What is read where another control leads.
    stored: Option<Stored>,
    relay: Arc<Relay>,
    /// One what-if is copied and decided at a time: each takes a processor, and a copy of all jobs.
    turns: Arc<Semaphore>,
}

/// What several controls share, and by which settings this one reads it.
#[derive(Clone)]
pub(crate) struct Stored {
    pub(crate) reader: Reader,
    pub(crate) settings: watch::Receiver<Settings>,
}

impl Stored {
    /// Whether the leader's state accepts other settings, as far as the store shows. What the store shows is the hosts of
    /// communicators.
    ///
    /// # Errors
    /// Why it does not.
    pub(crate) async fn check(&self, again: Settings) -> Result<(), TopologyRefusal> {
        match self.reader.read().await {
            Ok(stored) => restored(self.settings.borrow().clone(), stored).configure(Duration::ZERO, again),
            Err(error) => {
                tracing::warn!(%error, "the store does not say whether the topology lacks hosts that have ranks");
                Ok(())
            }
        }
    }
}

/// A state with what is stored. It forms nothing, and so needs no randomness.
fn restored(settings: Settings, stored: harmonaize_store::Stored) -> Controller {
    let mut state = Controller::new(settings, [0; 32]);
    state.restore(stored, realtime());
    state
}

/// How long agents may take to answer a question that does not say, and at most.
const PATIENCE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(60));

/// How long a trace is at most.
const MAX_TRACE: Duration = Duration::from_secs(3600);

/// Most values of a filter's field.
const MOST_VALUES: usize = 256;

/// Bytes of a store's copy in a message.
const BACKUP_CHUNK: usize = 1 << 20;

/// A store's copy, in order.
type Chunks = tokio_stream::Iter<std::vec::IntoIter<Result<v1::BackupChunk, Status>>>;

type Answer<T> = Result<Response<T>, Status>;

impl Operators {
    pub(crate) fn new(
        commands: Commands,
        access: Arc<Current>,
        stored: Option<Stored>,
        relay: Arc<Relay>,
    ) -> Self {
        Self { commands, access, stored, relay, turns: Arc::new(Semaphore::new(1)) }
    }

    /// Returns what `read` finds in the state.
    async fn query<T: Send + 'static>(
        &self,
        read: impl FnOnce(&mut Controller, Duration) -> T + Send + 'static,
    ) -> Result<T, Status> {
        let look = |answer: oneshot::Sender<T>| {
            Command::Look(Box::new(move |state, now| drop(answer.send(read(state, now)))))
        };
        self.commands.ask(look).await
    }

    /// Returns what is stored, and the settings to read it by; none where this control leads, whose state knows more.
    async fn stored(&self) -> Result<Option<(harmonaize_store::Stored, Settings)>, Status> {
        let Some(shared) = self.stored.as_ref().filter(|_| self.commands.queue().is_err()) else {
            return Ok(None);
        };
        let stored = shared.reader.read().await.map_err(|error| Status::unavailable(error.to_string()))?;
        Ok(Some((stored, shared.settings.borrow().clone())))
    }

    /// Returns what `read` finds in what is stored; in the state where this control leads.
    async fn query_stored<T: Send + 'static>(
        &self,
        read: impl FnOnce(&mut Controller, Duration) -> T + Send + 'static,
    ) -> Result<T, Status> {
        let Some((stored, settings)) = self.stored().await? else { return self.query(read).await };
        Ok(read(&mut restored(settings, stored), Duration::ZERO))
    }

    async fn instruct(&self, instruction: Instruction) -> Result<(), Status> {
        let outcome = self.commands.ask(|answer| Command::Instruct(instruction, answer)).await?;
        outcome.map_err(|refusal| match refusal {
            Refusal::Senseless(error) => senseless(&error),
            Refusal::Busy => Status::resource_exhausted("too many instructions wait to be stored; try again"),
            Refusal::NotStored(why) => Status::internal(format!("not stored, and not in effect: {why}")),
        })
    }
}

fn senseless(error: &InstructionError) -> Status {
    use InstructionError as Error;
    let text = error.to_string();
    match error {
        Error::BadName(_) | Error::Targets(_) | Error::Window(_) | Error::Users | Error::QuotaOfNobody => {
            Status::invalid_argument(text)
        }
        Error::TenantThere(_) => Status::already_exists(text),
        Error::NoTenant(_) | Error::Unknown(_) => Status::not_found(text),
        Error::TooManyTenants => Status::resource_exhausted(text),
        Error::Configured(_) | Error::TenantBusy(..) | Error::NotWithdrawn(_) => {
            Status::failed_precondition(text)
        }
    }
}

/// Decides where nobody waits for it. The turn ends with that, also where the caller has left before.
async fn in_turn<T: Send + 'static>(
    turn: OwnedSemaphorePermit,
    decide: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Status> {
    let decided = tokio::task::spawn_blocking(move || {
        let decided = decide();
        drop(turn);
        decided
    });
    decided.await.map_err(|error| Status::internal(error.to_string()))
}

fn unanswered(error: &WhatIfError) -> Status {
    use WhatIfError as Error;
    let text = error.to_string();
    match error {
        Error::Nothing
        | Error::Policy(_)
        | Error::Contradiction(_)
        | Error::Job(_)
        | Error::Bid(_)
        | Error::Workers { .. } => Status::invalid_argument(text),
        Error::Host(_) | Error::Kind { .. } | Error::Tenant(_) => Status::not_found(text),
        Error::JobThere(_) => Status::already_exists(text),
        Error::MostJobs(_) => Status::resource_exhausted(text),
        Error::NoAllocator | Error::NoAgent => Status::failed_precondition(text),
        Error::Undecided(_) => Status::internal(text),
    }
}

fn kind(kind: WithdrawalKind) -> Result<Kind, Status> {
    match kind {
        WithdrawalKind::Drain => Ok(Kind::Drain),
        WithdrawalKind::Maintenance => Ok(Kind::Maintenance),
        WithdrawalKind::Unspecified => Err(Status::invalid_argument("a drain or maintenance? say which")),
    }
}

#[tonic::async_trait]
impl Operator for Operators {
    async fn topology(&self, request: Request<v1::TopologyRequest>) -> Answer<v1::TopologyReply> {
        self.access.caller(&request, Role::Viewer, "topology")?;
        Ok(Response::new(self.query_stored(|state, now| state.queries(now).topology()).await?))
    }

    async fn tenants(&self, request: Request<v1::TenantsRequest>) -> Answer<v1::TenantsReply> {
        self.access.caller(&request, Role::Viewer, "tenants")?;
        Ok(Response::new(self.query_stored(|state, now| state.queries(now).tenants()).await?))
    }

    async fn add_tenant(&self, request: Request<v1::AddTenantRequest>) -> Answer<v1::AddTenantReply> {
        let caller = self.access.caller(&request, Role::Admin, "tenants add")?;
        let asked = request.into_inner();
        caller.log(&asked, self.instruct(Instruction::AddTenant(asked.clone())).await)?;
        Ok(Response::new(v1::AddTenantReply {}))
    }

    async fn remove_tenant(
        &self,
        request: Request<v1::RemoveTenantRequest>,
    ) -> Answer<v1::RemoveTenantReply> {
        let caller = self.access.caller(&request, Role::Admin, "tenants remove")?;
        let v1::RemoveTenantRequest { name } = request.into_inner();
        caller.log(&name, self.instruct(Instruction::RemoveTenant { name: name.clone() }).await)?;
        Ok(Response::new(v1::RemoveTenantReply {}))
    }

    async fn plans(&self, request: Request<v1::PlansRequest>) -> Answer<v1::PlansReply> {
        self.access.caller(&request, Role::Viewer, "plans")?;
        let id = request.into_inner().communicator;
        if let Some((stored, _)) = self.stored().await? {
            let asked = |communicator: &CommunicatorId| id == 0 || communicator.0 == id;
            let plans = stored.plans.iter().filter(|(communicator, _)| asked(communicator));
            let plans: Vec<_> = plans.map(|(_, plan)| stored_plan_status(plan)).collect();
            let none = id != 0 && plans.is_empty();
            let reply = v1::PlansReply { plans, ..v1::PlansReply::default() };
            return if none { Err(unknown()) } else { Ok(Response::new(reply)) };
        }
        let reply = self.query(move |state, now| state.queries(now).plans(CommunicatorId(id))).await?;
        reply.map(Response::new).ok_or_else(unknown)
    }

    async fn explain(&self, request: Request<v1::ExplainRequest>) -> Answer<v1::ExplainReply> {
        self.access.caller(&request, Role::Viewer, "explain")?;
        let v1::ExplainRequest { communicator, last } = request.into_inner();
        Ok(Response::new(
            self.query(move |state, now| state.queries(now).explain(CommunicatorId(communicator), last))
                .await?,
        ))
    }

    async fn dry_run(&self, request: Request<v1::DryRunRequest>) -> Answer<v1::DryRunReply> {
        self.access.caller(&request, Role::Viewer, "plan")?;
        let targets = request.into_inner().targets;
        let run = self.query(move |state, now| state.dry_run(now, &targets)).await?;
        let run = run.map_err(|error| senseless(&error))?;
        // Planning for very many takes a while; nobody else waits for it.
        let planned = tokio::task::spawn_blocking(move || run.reply()).await;
        planned.map(Response::new).map_err(|error| Status::internal(error.to_string()))
    }

    type BackupStream = Chunks;

    async fn backup(&self, request: Request<v1::BackupRequest>) -> Answer<Self::BackupStream> {
        let caller = self.access.caller(&request, Role::Admin, "backup")?;
        let copy = match self.stored().await? {
            Some((stored, _)) => {
                let made = tokio::task::spawn_blocking(|| harmonaize_store::backup(stored)).await;
                made.map_err(|error| error.to_string())
                    .and_then(|made| made.map_err(|error| error.to_string()))
            }
            None => self.commands.ask(Command::Backup).await?.map_err(|error| error.to_string()),
        };
        let copy = copy.map_err(|why| Status::internal(format!("the store cannot be copied: {why}")));
        let copy = caller.log(&"the store", copy)?;
        let chunks: Vec<_> = copy
            .chunks(BACKUP_CHUNK)
            .map(|bytes| Ok(v1::BackupChunk { bytes: bytes.to_vec(), total: copy.len() as u64 }))
            .collect();
        Ok(Response::new(tokio_stream::iter(chunks)))
    }

    async fn withdraw(&self, request: Request<v1::WithdrawRequest>) -> Answer<v1::WithdrawReply> {
        let caller = self.access.caller(&request, Role::Operator, "withdraw")?;
        let request = request.into_inner();
        let kind = kind(request.kind())?;
        let v1::WithdrawRequest { targets, from_ns, until_ns, reason, .. } = request.clone();
        let named = targets.clone();
        let (from, until) = (Nanos(from_ns), Nanos(until_ns));
        let done = self.instruct(Instruction::Withdraw { targets, kind, from, until, reason }).await;
        caller.log(&request, done)?;
        let withdrawals =
            self.query(move |state, now| state.queries(now).withdrawals(Some((&named, kind)))).await?;
        Ok(Response::new(v1::WithdrawReply { withdrawals }))
    }

    async fn restore(&self, request: Request<v1::RestoreRequest>) -> Answer<v1::RestoreReply> {
        let caller = self.access.caller(&request, Role::Operator, "restore")?;
        let request = request.into_inner();
        let kind = kind(request.kind())?;
        let targets = request.targets.clone();
        caller.log(&request, self.instruct(Instruction::Restore { targets, kind }).await)?;
        Ok(Response::new(v1::RestoreReply {}))
    }

    async fn withdrawals(&self, request: Request<v1::WithdrawalsRequest>) -> Answer<v1::WithdrawalsReply> {
        self.access.caller(&request, Role::Viewer, "withdrawals")?;
        let withdrawals = self.query_stored(|state, now| state.queries(now).withdrawals(None)).await?;
        Ok(Response::new(v1::WithdrawalsReply { withdrawals }))
    }

    async fn traced_paths(&self, request: Request<v1::TracedPathsRequest>) -> Answer<v1::TracedPathsReply> {
        self.access.caller(&request, Role::Viewer, "topology discover")?;
        Ok(Response::new(self.query(|state, now| state.queries(now).traced_paths()).await?))
    }

    async fn jobs(&self, request: Request<v1::JobsRequest>) -> Answer<v1::JobsReply> {
        self.access.caller(&request, Role::Viewer, "jobs")?;
        Ok(Response::new(self.query(|state, now| state.queries(now).jobs()).await?))
    }

    async fn what_if(&self, request: Request<v1::WhatIfRequest>) -> Answer<v1::WhatIfReply> {
        self.access.caller(&request, Role::Viewer, "what-if")?;
        let asked = request.into_inner();
        let turn = Arc::clone(&self.turns).acquire_owned().await;
        let turn = turn.map_err(|error| Status::internal(error.to_string()))?;
        let copy = self.query(move |state, now| state.queries(now).what_if(&asked)).await?;
        let copy = copy.map_err(|error| unanswered(&error))?;
        // Rounds over very many hosts take a while; only the next what-if waits for them.
        let reply = in_turn(turn, move || copy.reply()).await?;
        reply.map(Response::new).map_err(|error| unanswered(&error))
    }

    type AskStream = Replies;

    async fn ask(&self, request: Request<v1::AskRequest>) -> Answer<Self::AskStream> {
        self.access.caller(&request, Role::Viewer, "flows, findings and traces")?;
        let asked = request.into_inner();
        let (hosts, filter) = (self.hosts(&asked.hosts).await?, self.filter(&asked).await?);
        let patience = match asked.patience_ns {
            0 => PATIENCE.0,
            wanted => Duration::from_nanos(wanted).min(PATIENCE.1),
        };
        // A trace ends by itself.
        let (duration, follow) = match asked.kind() {
            v1::RowKind::Trace => (Duration::from_nanos(asked.duration_ns).min(MAX_TRACE), false),
            _ => (Duration::ZERO, asked.follow),
        };
        let v1::AskRequest { kind, last, duration_ns, .. } = asked;
        let question = v1::Question { id: 0, kind, filter: Some(filter), last, follow, duration_ns };
        self.relay.ask(question, hosts, duration + patience).map(Response::new)
    }
}

impl Operators {
    /// Hosts of the topology: those that are named, or all.
    async fn hosts(&self, named: &[String]) -> Result<Vec<String>, Status> {
        let topology = self.query(|state, now| state.queries(now).topology()).await?;
        let all: BTreeSet<String> = topology.hosts.into_iter().map(|host| host.name).collect();
        if let Some(unknown) = named.iter().find(|name| !all.contains(*name)) {
            let shown: String = unknown.chars().take(63).collect();
            return Err(Status::not_found(format!("the topology has no host `{shown}`")));
        }
        Ok(if named.is_empty() { all.into_iter().collect() } else { named.to_vec() })
    }

    /// What agents can tell by themselves: findings have no tenants, but communicators.
    async fn filter(&self, asked: &v1::AskRequest) -> Result<v1::RowFilter, Status> {
        let mut filter = asked.filter.clone().unwrap_or_default();
        let counts =
            [filter.tenants.len(), filter.communicators.len(), filter.peers.len(), filter.causes.len()];
        if counts.iter().any(|count| *count > MOST_VALUES) {
            return Err(Status::invalid_argument(format!("a filter takes {MOST_VALUES} values at most")));
        }
        if asked.kind() == v1::RowKind::Finding && !filter.tenants.is_empty() {
            let tenants = std::mem::take(&mut filter.tenants);
            let plans = self.query(|state, now| state.queries(now).plans(CommunicatorId(0))).await?;
            let plans = plans.map(|reply| reply.plans).unwrap_or_default();
            let theirs = plans.iter().filter(|plan| tenants.contains(&plan.tenant));
            let theirs: Vec<u64> = theirs.map(|plan| plan.communicator).collect();
            if theirs.is_empty() {
                let text =
                    format!("{} has no communicator now; findings name communicators", tenants.join(", "));
                return Err(Status::not_found(text));
            }
            match filter.communicators.is_empty() {
                true => filter.communicators = theirs,
                false => {
                    filter.communicators.retain(|id| theirs.contains(id));
                    if filter.communicators.is_empty() {
                        return Err(Status::not_found("these communicators are of other tenants"));
                    }
                }
            }
        }
        Ok(filter)
    }
}

fn unknown() -> Status {
    Status::not_found("no such communicator; it may have ended")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[tokio::test]
    async fn a_caller_who_leaves_keeps_the_turn_until_all_is_decided() {
        let turns = Arc::new(Semaphore::new(1));
        let turn = Arc::clone(&turns).acquire_owned().await.unwrap();
        let (begin, begun) = oneshot::channel();
        let (go_on, wait) = mpsc::channel::<()>();
        let caller = tokio::spawn(in_turn(turn, move || {
            begin.send(()).unwrap();
            wait.recv().unwrap();
        }));
        begun.await.unwrap();
        caller.abort();
        assert!(caller.await.unwrap_err().is_cancelled());
        assert_eq!(turns.available_permits(), 0);
        go_on.send(()).unwrap();
        let turn = Arc::clone(&turns).acquire_owned().await.unwrap();
        assert_eq!(in_turn(turn, || 7).await.unwrap(), 7);
        assert_eq!(turns.available_permits(), 1);
    }
}
