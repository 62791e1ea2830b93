//! Calls to etcd: over one member at a time, and the next where that one does not answer.

use super::wire::{
    Done, Lease, LeaseGrant, LeaseGrantReply, LeaseKept, Range, RangeReply, Transaction, TransactionReply,
};
use harmonaize_identity::{ETCD, Protection, Remote, root_cause};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::time::timeout;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;

/// How long a member may take to answer before the next is asked.
const PATIENCE: Duration = Duration::from_secs(1);

/// Most bytes of an answer: all that is stored comes in one.
const ANSWER_BYTES: usize = 1 << 30;

/// Where etcd is, and how it is talked to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Members {
    /// Where each member listens for clients, "host:port".
    pub addresses: Vec<String>,
    /// How connections are protected.
    pub protection: Protection,
}

/// Calls to etcd.
#[derive(Clone, Debug)]
pub(super) struct Client {
    members: Arc<Members>,
    /// Has the connections.
    runtime: Handle,
    /// The member that is asked, and the connection with it.
    current: Arc<Mutex<(usize, Option<Channel>)>>,
}

impl Client {
    /// Connects when it is asked first; `runtime` is to run as long as it is.
    pub(super) fn new(members: Members, runtime: Handle) -> Self {
        Self { members: Arc::new(members), runtime, current: Arc::default() }
    }

    pub(super) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    pub(super) async fn range(&self, range: Range) -> Result<RangeReply, Status> {
        self.unary("/etcdserverpb.KV/Range", range).await
    }

    /// May be carried out though an error is returned.
    pub(super) async fn transact(&self, transaction: Transaction) -> Result<TransactionReply, Status> {
        self.unary("/etcdserverpb.KV/Txn", transaction).await
    }

    pub(super) async fn grant(&self, seconds: i64) -> Result<LeaseGrantReply, Status> {
        self.unary("/etcdserverpb.Lease/LeaseGrant", LeaseGrant { ttl: seconds }).await
    }

    pub(super) async fn revoke(&self, id: i64) -> Result<(), Status> {
        let _: Done = self.unary("/etcdserverpb.Lease/LeaseRevoke", Lease { id }).await?;
        Ok(())
    }

    /// Keeps a lease for its time from now on. False where it is over.
    pub(super) async fn keep(&self, id: i64) -> Result<bool, Status> {
        let path = PathAndQuery::from_static("/etcdserverpb.Lease/LeaseKeepAlive");
        let kept = self.ask(|mut etcd| {
            let path = path.clone();
            async move {
                let codec = ProstCodec::<Lease, LeaseKept>::default();
                let request = Request::new(tokio_stream::once(Lease { id }));
                let kept = etcd.streaming(request, path, codec).await?.into_inner().message().await?;
                kept.ok_or_else(|| Status::unavailable("no word of the lease"))
            }
        });
        Ok(kept.await?.ttl > 0)
    }

    async fn unary<Q, R>(&self, path: &'static str, request: Q) -> Result<R, Status>
    where
        Q: prost::Message + Clone + 'static,
        R: prost::Message + Default + 'static,
    {
        let path = PathAndQuery::from_static(path);
        let ask = |mut etcd: Grpc<Channel>| {
            let (path, request) = (path.clone(), request.clone());
            async move {
                let codec = ProstCodec::<Q, R>::default();
                etcd.unary(Request::new(request), path, codec).await.map(tonic::Response::into_inner)
            }
        };
        self.ask(ask).await
    }

    /// Asks one member after the other until one has an answer, each once.
    async fn ask<R, F: Future<Output = Result<R, Status>>>(
        &self,
        ask: impl Fn(Grpc<Channel>) -> F,
    ) -> Result<R, Status> {
        let mut last = Status::unavailable("no member is named");
        for _ in 0..self.members.addresses.len() {
            let (at, channel) = self.channel();
            let answered = timeout(PATIENCE, async {
                let mut etcd = Grpc::new(channel?).max_decoding_message_size(ANSWER_BYTES);
                etcd.ready().await.map_err(|error| Status::unavailable(root_cause(&error)))?;
                ask(etcd).await
            });
            let silent = |_| Err(Status::deadline_exceeded(format!("no answer within {PATIENCE:?}")));
            let status = match answered.await.unwrap_or_else(silent) {
                Ok(answer) => return Ok(answer),
                Err(status) => status,
            };
            if matches!(status.code(), Code::InvalidArgument | Code::NotFound | Code::FailedPrecondition) {
                return Err(status);
            }
            let member = self.members.addresses.get(at).map_or("", String::as_str);
            last = Status::new(status.code(), format!("{member}: {}", status.message()));
            self.leave(at);
        }
        Err(last)
    }

    /// The member that is asked now, and a connection with it. Certificates are read for each anew.
    fn channel(&self) -> (usize, Result<Channel, Status>) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let (at, known) = &mut *current;
        let address = self.members.addresses.get(*at).map_or("", String::as_str);
        let channel = match known {
            Some(channel) => Ok(channel.clone()),
            None => {
                let _runs_there = self.runtime.enter();
                let settings = |endpoint: Endpoint| endpoint.connect_timeout(PATIENCE).tcp_nodelay(true);
                let made = Remote::at(&self.members.protection, ETCD, address);
                made.map(|server| server.with(settings).connect_lazy())
                    .map_err(|error| Status::unavailable(error.to_string()))
                    .inspect(|channel| *known = Some(channel.clone()))
            }
        };
        (*at, channel)
    }

    /// The next member is asked from now on, unless it is already.
    fn leave(&self, from: usize) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.0 == from {
            *current = ((from + 1) % self.members.addresses.len().max(1), None);
        }
    }
}
