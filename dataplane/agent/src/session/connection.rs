//! One connection: the handshake, then what follows it.

use super::attached::{AttachedSession, Rejoining};
use super::handover::SessionImage;
use super::memory::AttachedMemory;
use super::rdma::{Places, Rdma};
use super::stream::{ReadError, Stream};
use super::tenant::{Grant, Tenant, metered};
use super::{AttachmentId, SessionRequest, TenantLimits};
use crate::counters::Counted;
use harmonaize_abi::ABI_VERSION;
use harmonaize_abi::session::{
    Access, Hello, MessageError, Offer, RefusalKind, Refused, Welcome, decode, decode_first, encode,
    encode_first,
};
use harmonaize_shm::{AgentEnd, EndError, MAX_ENTRIES, MappedEnd, RemoteEnd};
use harmonaize_verbs::attachment::AgentOffer;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::sync::mpsc::Permit;
use tokio::task::JoinSet;

/// Most bytes of a first message; others are not waited for.
pub(super) const MAX_HELLO: usize = 1024;
/// Most bytes of an offer, or of a response.
pub(super) const MAX_OFFER: usize = 256;

/// A connection of a process that is the tenant's.
pub(super) struct Connection {
    tenant: Arc<Tenant>,
    stream: Stream,
    /// Whether the agent's first message to this hello has been sent.
    welcomed: bool,
    _grant: Grant,
}

/// What a hello asks for, as far as it is made.
enum End {
    /// Whole, with the descriptors that go along with the welcome.
    Local(Box<dyn AgentEnd>, Vec<OwnedFd>),
    /// To be connected.
    Rdma(Arc<Rdma>, Box<AgentOffer>),
}

/// A refusal, or nothing: the process went away.
type Denied = Option<Refused>;

impl Connection {
    pub(super) fn new(tenant: Arc<Tenant>, stream: Stream, grant: Grant) -> Self {
        Self { tenant, stream, welcomed: false, _grant: grant }
    }

    /// Serves the connection to its end.
    pub(super) async fn run(mut self, requests: mpsc::Sender<SessionRequest>) {
        let tenant = self.tenant.name.clone();
        let ended = Arc::clone(&self.tenant).ended();
        let opened = tokio::select! {
            opened = self.handshake(&requests) => opened,
            _ = ended => return,
        };
        let (attachment, memory, grant, size) = match opened {
            Ok(opened) => opened,
            Err(refused) => {
                if let Some(refused) = refused {
                    self.tenant.log(|| tracing::warn!(tenant, "refused: {}", refused.text));
                    self.refuse(&refused).await;
                }
                return;
            }
        };
        self.tenant.log(|| tracing::info!(tenant, %attachment, "attached"));
        let (tenant, ours) = (Arc::clone(&self.tenant), requests.clone());
        let session = AttachedSession::new(attachment, tenant, memory, ours, size);
        self.serve(attachment, session, grant, requests).await;
    }

    /// Serves a session that another process of the agent's has served so far, to its end.
    pub(super) async fn resume(
        self,
        image: SessionImage,
        descriptors: Vec<OwnedFd>,
        (memory, rejoining): (AttachedMemory, Option<Rejoining>),
        grant: Arc<Grant>,
        requests: mpsc::Sender<SessionRequest>,
    ) {
        let SessionImage { attachment, size, joined, received, .. } = image;
        let (tenant, ours) = (Arc::clone(&self.tenant), requests.clone());
        let session = AttachedSession::new(attachment, tenant, memory, ours, size);
        let session = session.resume(joined, (&received, descriptors), rejoining);
        self.serve(attachment, session, grant, requests).await;
    }

    async fn serve(
        self,
        attachment: AttachmentId,
        session: AttachedSession,
        grant: Arc<Grant>,
        requests: mpsc::Sender<SessionRequest>,
    ) {
        let tenant = self.tenant.name.clone();
        // A task of its own: what panics in it ends this session alone, and the agent hears of its end. Aborted with the set.
        let mut serving = JoinSet::new();
        serving.spawn(metered(Arc::clone(&self.tenant), session.serve(self.stream)));
        match serving.join_next().await {
            Some(Ok(why)) => self.tenant.log(|| tracing::info!(tenant, %attachment, "detached: {why}")),
            Some(Err(error)) => {
                self.tenant.counters().add(Counted::SessionPanic);
                tracing::error!(tenant, %attachment, "the session is over: {error}");
            }
            None => {}
        }
        self.tenant.leaves(&grant);
        drop(grant);
        let _ = requests.send(SessionRequest::Detached { attachment }).await;
    }

    /// An attachment that the agent knows of, or why it is refused.
    async fn handshake(
        &mut self,
        requests: &mpsc::Sender<SessionRequest>,
    ) -> Result<(AttachmentId, AttachedMemory, Arc<Grant>, (u64, u32)), Denied> {
        let rules = self.tenant.rules();
        let limit = rules.handshake;
        let hello = within(limit, "hello", self.hello()).await?;
        let welcome = self.check(&hello).map_err(Some)?;
        let grant = self.tenant.attachment_when_free(welcome.arena_bytes, welcome.entries).await;
        let grant = Arc::new(grant.map_err(Some)?);
        let end = self.create(hello.access, &welcome, &grant).await.map_err(Some)?;
        let (permit, end) = match end {
            End::Local(end, descriptors) => {
                let permit = reserve(requests).await?;
                self.welcome(&welcome, &descriptors).await.map_err(|_| None)?;
                (permit, end)
            }
            End::Rdma(rdma, ours) => {
                self.welcome(&welcome, &[]).await.map_err(|_| None)?;
                // Registering an arena takes the process about a second a GiB at worst.
                let limit = limit.saturating_add(Duration::from_secs(welcome.arena_bytes >> 30));
                let offer = within(limit, "offer", self.exchange(&ours)).await?;
                let life = self.stream.as_fd().try_clone_to_owned().map_err(|error| {
                    tracing::error!("cannot copy a session's descriptor: {error}");
                    Some(failed("the agent has no descriptor left; try again later"))
                })?;
                let here = matches!(self.stream, Stream::Unix(_));
                let places = Places { here, addresses: &rules.addresses };
                let connected = rdma.connect(*ours, offer, welcome.arena_bytes, places, life).await;
                let end = connected.map_err(Some)?;
                let permit = reserve(requests).await?;
                self.stream.send(&Ok::<(), Refused>(())).await.map_err(|_| None)?;
                (permit, end)
            }
        };
        let (attachment, tenant) = (AttachmentId::next(), self.tenant.name.clone());
        let operation_timeout = rules.quota.operation_timeout;
        let limits = TenantLimits(Arc::clone(&self.tenant));
        permit.send(SessionRequest::Attached { attachment, tenant, end, operation_timeout, limits });
        let memory = AttachedMemory::new(Arc::clone(&self.tenant), hello.access, welcome.arena_bytes);
        Ok((attachment, memory, grant, (welcome.arena_bytes, welcome.entries)))
    }

    async fn hello(&mut self) -> Result<Hello, Denied> {
        let message = self.stream.read_message(MAX_HELLO).await.map_err(|why| unread("hello", why))?;
        decode_first(&message).map_err(|error| Some(malformed("hello", error)))
    }

    /// Sends this end of the queue pair; the process's.
    async fn exchange(&mut self, ours: &AgentOffer) -> Result<Offer, Denied> {
        self.stream.send(&ours.end()).await.map_err(|_| None)?;
        let message = self.stream.read_message(MAX_OFFER).await.map_err(|why| unread("offer", why))?;
        decode(&message).map_err(|error| Some(malformed("offer", error)))
    }

    /// What the process will be granted, if the tenant has so much left.
    fn check(&self, hello: &Hello) -> Result<Welcome, Refused> {
        let quota = self.tenant.rules().quota;
        let most = quota.entries.min(MAX_ENTRIES);
        if !hello.entries.is_power_of_two() || hello.entries > most {
            let text = format!(
                "{} ring entries were asked for; a power of two up to {most} is possible",
                hello.entries
            );
            return Err(Refused { kind: RefusalKind::Entries, text });
        }
        let page = rustix::param::page_size() as u64;
        let arena_bytes = hello.arena_bytes.checked_next_multiple_of(page).unwrap_or(u64::MAX);
        let operation_timeout_ns = u64::try_from(quota.operation_timeout.as_nanos()).unwrap_or(u64::MAX);
        Ok(Welcome {
            arena_bytes,
            entries: hello.entries,
            communicators: quota.communicators,
            operation_timeout_ns,
        })
    }

    async fn create(&self, access: Access, welcome: &Welcome, grant: &Arc<Grant>) -> Result<End, Refused> {
        let (arena_bytes, entries) = (welcome.arena_bytes, welcome.entries);
        let rules = self.tenant.rules();
        let refused = |text: &str| Err(Refused { kind: RefusalKind::Access, text: text.into() });
        match (access, &self.stream) {
            (Access::Rdma, _) => match &self.tenant.rdma {
                Some(rdma) if rules.rdma => {
                    let offer = rdma.offer(arena_bytes, entries).await?;
                    Ok(End::Rdma(Arc::clone(rdma), Box::new(offer)))
                }
                _ => refused("attachments over RDMA are not offered here; attach mapped"),
            },
            (_, Stream::Tcp(_)) => refused("over TCP, attachments over RDMA alone are possible"),
            (Access::Mapped, _) => mapped(arena_bytes, entries, grant).map_err(no_memory),
            (Access::Remote, _) if rules.remote => {
                let (end, socket) = RemoteEnd::create(arena_bytes, entries).map_err(no_memory)?;
                Ok(End::Local(Box::new(end), vec![socket]))
            }
            (Access::Remote, _) => refused("remote attachments are not offered here; attach mapped"),
        }
    }

    async fn welcome(&mut self, welcome: &Welcome, descriptors: &[OwnedFd]) -> std::io::Result<()> {
        let message = encode_first(&Ok::<_, Refused>(welcome)).map_err(std::io::Error::other)?;
        let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
        self.welcomed = true;
        self.stream.send_with(&message, &descriptors).await
    }

    async fn refuse(self, refused: &Refused) {
        let message = match self.welcomed {
            false => encode_first(&Err::<Welcome, _>(refused)),
            true => encode(&Err::<(), _>(refused)),
        };
        if let Ok(message) = message {
            self.stream.close_with(&message).await;
        }
    }
}

/// What comes in time, or a refusal that names what did not.
async fn within<T>(
    limit: Duration,
    what: &str,
    coming: impl Future<Output = Result<T, Denied>>,
) -> Result<T, Denied> {
    tokio::time::timeout(limit, coming).await.unwrap_or_else(|_| Err(Some(slow(what, limit))))
}

pub(super) fn slow(what: &str, limit: Duration) -> Refused {
    Refused { kind: RefusalKind::Slow, text: format!("no {what} within {limit:?}") }
}

pub(super) fn malformed(what: &str, error: MessageError) -> Refused {
    match error {
        MessageError::Version(theirs) => Refused {
            kind: RefusalKind::Version,
            text: format!(
                "the process speaks version {theirs}, this agent version {ABI_VERSION}; install the client library that belongs to it"
            ),
        },
        error => Refused { kind: RefusalKind::Malformed, text: format!("no {what}: {error}") },
    }
}

fn unread(what: &str, why: ReadError) -> Denied {
    match why {
        ReadError::Gone => None,
        ReadError::Bad(error) => Some(malformed(what, error)),
    }
}

fn failed(text: &str) -> Refused {
    Refused { kind: RefusalKind::Agent, text: text.into() }
}

async fn reserve(requests: &mpsc::Sender<SessionRequest>) -> Result<Permit<'_, SessionRequest>, Denied> {
    requests.reserve().await.map_err(|_| Some(failed("the agent goes down")))
}

/// What failed inside the agent is the provider's business, not the tenant's.
fn no_memory(error: EndError) -> Refused {
    tracing::error!("cannot make an attachment: {error}");
    failed("the agent could not create the attachment's memory")
}

/// The quota's part comes back once the arena's memory is free.
fn mapped(arena_bytes: u64, entries: u32, grant: &Arc<Grant>) -> Result<End, EndError> {
    let (end, descriptors) = MappedEnd::create(arena_bytes, entries, Box::new(Arc::clone(grant)))?;
    Ok(End::Local(Box::new(end), descriptors.into()))
}

#[cfg(test)]
mod tests {
    use super::super::{Quota, TenantLimits};
    use super::*;
    use crate::counters::Counters;
    use harmonaize_abi::session::{Answer, Request, length};
    use std::time::Instant;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::UnixStream;

    async fn message(stream: &mut UnixStream) -> Option<Vec<u8>> {
        let mut prefix = [0; 4];
        stream.read_exact(&mut prefix).await.ok()?;
        let mut message = vec![0; length(prefix).unwrap()];
        stream.read_exact(&mut message).await.ok()?;
        Some(message)
    }

    #[tokio::test]
    async fn a_panic_in_a_session_ends_that_session_alone() {
        let counters = Counters::default();
        let limits = TenantLimits::of(Quota::default(), &counters);
        let tenant = &limits.0;
        let (requests, mut asked) = mpsc::channel(8);
        let (mut streams, mut attachments) = (Vec::new(), Vec::new());
        for _ in 0..2 {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            let grant = tenant.connection(Instant::now()).unwrap();
            let connection = Connection::new(Arc::clone(tenant), Stream::Unix(ours), grant);
            tokio::spawn(connection.run(requests.clone()));
            let hello = Hello { access: Access::Mapped, arena_bytes: 1 << 16, entries: 4 };
            theirs.write_all(&encode_first(&hello).unwrap()).await.unwrap();
            message(&mut theirs).await.unwrap();
            let Some(SessionRequest::Attached { attachment, end, .. }) = asked.recv().await else {
                panic!("not attached");
            };
            streams.push(theirs);
            attachments.push((attachment, end));
        }
        let detail = |communicator| encode(&Request::Detail { id: 1, communicator }).unwrap();
        streams[0].write_all(&detail(u32::MAX)).await.unwrap();
        assert_eq!(message(&mut streams[0]).await, None, "the session is over");
        let Some(SessionRequest::Detached { attachment }) = asked.recv().await else {
            panic!("the agent does not hear of it");
        };
        assert_eq!(attachment, attachments[0].0);
        assert_eq!(counters.get(Counted::SessionPanic), 1);
        streams[1].write_all(&detail(5)).await.unwrap();
        let answer: Answer = decode(&message(&mut streams[1]).await.unwrap()).unwrap();
        assert_eq!(answer, Answer::Detail { id: 1, detail: None });
        // Its part of the quota is free again once the engine has let go of its memory.
        drop(attachments.remove(0));
        let rest: Vec<_> = (0..).map_while(|_| tenant.attachment(1 << 16, 4).ok()).collect();
        assert_eq!(rest.len(), 63);
    }
}
