//! One connection: the handshake, then requests and answers until either side goes away.

use super::listener::{Grant, Tenant};
use super::{AttachmentId, SessionRequest};
use harmonaize_abi::session::{
    Access, Answer, Bounded, Hello, JoinRefusal, JoinRefused, MAX_NAME, MessageError, RefusalKind, Refused,
    Request, Welcome, decode, decode_first, encode, encode_first, length,
};
use harmonaize_abi::{ABI_VERSION, Rank};
use harmonaize_shm::{AgentEnd, EndError, MAX_ENTRIES, MappedEnd, RemoteEnd, send_with_descriptors};
use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;

/// Most bytes of a hello; other first messages are not waited for.
const MAX_HELLO: usize = 1024;
/// Most requests of one attachment that wait for the agent.
const MAX_PENDING: usize = 256;
/// Answers that wait for the process to read them.
const MAX_ANSWERS: usize = 64;

/// A connection of one of the tenant's users.
pub(super) struct Connection {
    tenant: Arc<Tenant>,
    stream: UnixStream,
    _grant: Grant,
}

/// What a handshake created.
struct Accepted {
    end: Box<dyn AgentEnd>,
    /// To be sent along with the welcome.
    descriptors: Vec<OwnedFd>,
    welcome: Welcome,
    grant: Grant,
}

impl Connection {
    pub(super) fn new(tenant: Arc<Tenant>, stream: UnixStream, grant: Grant) -> Self {
        Self { tenant, stream, _grant: grant }
    }

    /// Serves the connection to its end.
    pub(super) async fn run(
        mut self,
        requests: mpsc::Sender<SessionRequest>,
        mut stop: watch::Receiver<bool>,
    ) {
        let tenant = self.tenant.socket.tenant.clone();
        let limit = self.tenant.socket.handshake;
        let mut stopping = stop.clone();
        let opened = tokio::select! {
            opened = tokio::time::timeout(limit, self.handshake(&requests)) => opened,
            _ = stopping.wait_for(|stop| *stop) => return,
        };
        let slow = || {
            let text = format!("no hello within {limit:?}");
            Refused { kind: RefusalKind::Slow, text }
        };
        let (attachment, grant) = match opened.unwrap_or_else(|_| Err(Some(slow()))) {
            Ok(opened) => opened,
            Err(refused) => {
                if let Some(refused) = refused {
                    tracing::warn!(tenant, "refused: {}", refused.text);
                    self.refuse(&refused);
                }
                return;
            }
        };
        tracing::info!(tenant, %attachment, "attached");
        let why = Attached::new(attachment, Arc::clone(&self.tenant), requests.clone());
        let why = tokio::select! {
            why = why.serve(self.stream) => why,
            _ = stop.wait_for(|stop| *stop) => "the agent goes down".into(),
        };
        tracing::info!(tenant, %attachment, "detached: {why}");
        let _ = requests.send(SessionRequest::Detached { attachment }).await;
        drop(grant);
    }

    /// An attachment that the agent knows of, or why it is refused (`None`: the process went away).
    async fn handshake(
        &mut self,
        requests: &mpsc::Sender<SessionRequest>,
    ) -> Result<(AttachmentId, Grant), Option<Refused>> {
        let malformed = |error: MessageError| {
            let kind = match error {
                MessageError::Version(_) => RefusalKind::Version,
                _ => RefusalKind::Malformed,
            };
            let text = match error {
                MessageError::Version(theirs) => format!(
                    "the process speaks version {theirs}, this agent version {ABI_VERSION}; install the client library that belongs to it"
                ),
                error => format!("no hello: {error}"),
            };
            Some(Refused { kind, text })
        };
        let gone = |_| None;
        let mut prefix = [0; 4];
        self.stream.read_exact(&mut prefix).await.map_err(gone)?;
        let bytes = length(prefix).map_err(malformed)?;
        if bytes > MAX_HELLO {
            return Err(malformed(MessageError::Length(bytes)));
        }
        let mut message = vec![0; bytes];
        self.stream.read_exact(&mut message).await.map_err(gone)?;
        let hello: Hello = decode_first(&message).map_err(malformed)?;
        let Accepted { end, descriptors, welcome, grant } = self.accept(&hello).map_err(Some)?;
        let permit = requests.reserve().await.map_err(|_| {
            let text = "the agent goes down".into();
            Some(Refused { kind: RefusalKind::Agent, text })
        })?;
        self.welcome(&welcome, &descriptors).await.map_err(gone)?;
        let (attachment, tenant) = (AttachmentId::next(), self.tenant.socket.tenant.clone());
        permit.send(SessionRequest::Attached { attachment, tenant, end });
        Ok((attachment, grant))
    }

    fn accept(&self, hello: &Hello) -> Result<Accepted, Refused> {
        let socket = &self.tenant.socket;
        let most = socket.quota.entries.min(MAX_ENTRIES);
        if !hello.entries.is_power_of_two() || hello.entries > most {
            let text = format!(
                "{} ring entries were asked for; a power of two up to {most} is possible",
                hello.entries
            );
            return Err(Refused { kind: RefusalKind::Entries, text });
        }
        let page = rustix::param::page_size() as u64;
        let arena_bytes = hello.arena_bytes.checked_next_multiple_of(page).unwrap_or(u64::MAX);
        let grant = self.tenant.attachment(arena_bytes)?;
        let (end, descriptors) = create(hello.access, arena_bytes, hello.entries, socket.remote)?;
        let communicators = socket.quota.communicators;
        let welcome = Welcome { arena_bytes, entries: hello.entries, communicators };
        Ok(Accepted { end, descriptors, welcome, grant })
    }

    async fn welcome(&self, welcome: &Welcome, descriptors: &[OwnedFd]) -> std::io::Result<()> {
        let message = encode_first(&Ok::<_, Refused>(welcome)).map_err(std::io::Error::other)?;
        let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
        let send = || Ok(send_with_descriptors(self.stream.as_fd(), &message, &descriptors)?);
        let sent = self.stream.async_io(Interest::WRITABLE, send).await?;
        // Nothing was sent before, so the socket's buffer takes it whole.
        if sent == message.len() { Ok(()) } else { Err(std::io::ErrorKind::WriteZero.into()) }
    }

    fn refuse(&self, refused: &Refused) {
        if let Ok(message) = encode_first(&Err::<Welcome, _>(refused)) {
            let _ = self.stream.try_write(&message);
        }
    }
}

fn create(
    access: Access,
    arena_bytes: u64,
    entries: u32,
    remote: bool,
) -> Result<(Box<dyn AgentEnd>, Vec<OwnedFd>), Refused> {
    // What failed inside the agent is the provider's business, not the tenant's.
    let failed = |error: EndError| {
        tracing::error!("cannot make an attachment: {error}");
        Refused {
            kind: RefusalKind::Agent,
            text: "the agent could not create the attachment's memory".into(),
        }
    };
    match access {
        Access::Mapped => {
            let (end, doorbell) = MappedEnd::create(arena_bytes, entries).map_err(failed)?;
            let copy = |fd: BorrowedFd<'_>| {
                let copied = fd.try_clone_to_owned().map_err(|error| {
                    let source = rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::MFILE);
                    EndError::System { call: "dup", source }
                });
                copied.map_err(failed)
            };
            let mut descriptors = Vec::new();
            for fd in end.descriptors().into_iter().flatten() {
                descriptors.push(copy(fd)?);
            }
            descriptors.push(doorbell);
            Ok((Box::new(end), descriptors))
        }
        Access::Remote if remote => {
            let (end, socket) = RemoteEnd::create(arena_bytes, entries).map_err(failed)?;
            Ok((Box::new(end), vec![socket]))
        }
        Access::Remote => Err(Refused {
            kind: RefusalKind::Access,
            text: "remote attachments are not offered here; attach mapped".into(),
        }),
        Access::Rdma => Err(Refused {
            kind: RefusalKind::Access,
            text: "attachments over RDMA are not offered here; attach mapped".into(),
        }),
    }
}

/// A connection after the handshake.
struct Attached {
    attachment: AttachmentId,
    tenant: Arc<Tenant>,
    requests: mpsc::Sender<SessionRequest>,
    /// Handles that the process has joined and not left.
    joined: HashSet<u32>,
    /// Joins and questions that the agent has not answered.
    pending: JoinSet<Answer>,
    joining: u32,
}

impl Attached {
    fn new(attachment: AttachmentId, tenant: Arc<Tenant>, requests: mpsc::Sender<SessionRequest>) -> Self {
        Self { attachment, tenant, requests, joined: HashSet::new(), pending: JoinSet::new(), joining: 0 }
    }

    /// Serves requests; says why it ended.
    async fn serve(mut self, stream: UnixStream) -> String {
        let (read, write) = stream.into_split();
        let mut reader = Reader { stream: read, received: Vec::new() };
        let (answers, unsent) = mpsc::channel(MAX_ANSWERS);
        // Aborted with the set when this future is dropped.
        let mut writer = JoinSet::new();
        writer.spawn(write_answers(write, unsent));
        loop {
            let answer = tokio::select! {
                Some(answered) = self.pending.join_next() => match answered {
                    Ok(answer) => Some(self.finish(answer)),
                    Err(error) => return format!("a request failed: {error}"),
                },
                request = reader.next(), if self.pending.len() < MAX_PENDING => match request {
                    Ok(Some(request)) => match self.request(request).await {
                        Ok(answer) => answer,
                        Err(why) => return why,
                    },
                    Ok(None) => return "the process is gone".into(),
                    Err(why) => return why,
                },
            };
            if let Some(answer) = answer
                && answers.send(answer).await.is_err()
            {
                return "the process is gone".into();
            }
        }
    }

    fn finish(&mut self, answer: Answer) -> Answer {
        match &answer {
            Answer::Joined { communicator, .. } => {
                self.joining -= 1;
                self.joined.insert(*communicator);
            }
            Answer::JoinRefused { .. } => self.joining -= 1,
            _ => {}
        }
        answer
    }

    /// Passes a request on; the answer, if there is one at once.
    async fn request(&mut self, request: Request) -> Result<Option<Answer>, String> {
        let attachment = self.attachment;
        let (passed_on, answer) = match request {
            Request::Join { id, name, rank, ranks, timeout_ns } => {
                if let Err(refused) = self.check_join(&name, rank, ranks) {
                    return Ok(Some(Answer::JoinRefused { id, refused }));
                }
                let (reply, answer) = oneshot::channel::<Result<u32, JoinRefused>>();
                self.joining += 1;
                self.pending.spawn(async move {
                    match answer.await {
                        Ok(Ok(communicator)) => Answer::Joined { id, communicator },
                        Ok(Err(refused)) => Answer::JoinRefused { id, refused: refused.bounded() },
                        Err(_) => Answer::JoinRefused { id, refused: dropped() },
                    }
                });
                let timeout = Duration::from_nanos(timeout_ns);
                (Some(SessionRequest::Join { attachment, name, rank, ranks, timeout, reply }), None)
            }
            Request::Leave { id, communicator } => {
                let known = self.joined.remove(&communicator);
                let leave = SessionRequest::Leave { attachment, communicator };
                (known.then_some(leave), Some(Answer::Left { id }))
            }
            Request::Detail { id, communicator } if self.joined.contains(&communicator) => {
                let (reply, answer) = oneshot::channel::<Option<_>>();
                self.pending.spawn(async move {
                    Answer::Detail { id, detail: answer.await.ok().flatten().map(Bounded::bounded) }
                });
                (Some(SessionRequest::Detail { attachment, communicator, reply }), None)
            }
            Request::Detail { id, .. } => (None, Some(Answer::Detail { id, detail: None })),
        };
        if let Some(request) = passed_on {
            self.requests.send(request).await.map_err(|_| "the agent goes down".to_owned())?;
        }
        Ok(answer)
    }

    fn check_join(&self, name: &str, rank: Rank, ranks: u32) -> Result<(), JoinRefused> {
        let quota = self.tenant.socket.quota;
        let refused = |kind, text| Err(JoinRefused { kind, text, ranks: Vec::new() });
        if name.is_empty() || name.len() > MAX_NAME || name.chars().any(char::is_control) {
            let text = format!("a name has 1 to {MAX_NAME} bytes and no control characters");
            return refused(JoinRefusal::Name, text);
        }
        if rank.0 >= ranks {
            return refused(JoinRefusal::Rank, format!("rank {rank} of {ranks}; ranks count from 0"));
        }
        if ranks > quota.ranks {
            let text = format!("{ranks} ranks; this tenant's communicators have at most {}", quota.ranks);
            return refused(JoinRefusal::Quota, text);
        }
        if self.joined.len() as u64 + u64::from(self.joining) >= u64::from(quota.communicators) {
            let text =
                format!("this attachment is in {} communicators, as many as it may be", quota.communicators);
            return refused(JoinRefusal::Quota, text);
        }
        Ok(())
    }
}

fn dropped() -> JoinRefused {
    JoinRefused {
        kind: JoinRefusal::Internal,
        text: "the agent dropped the request; try again".into(),
        ranks: Vec::new(),
    }
}

async fn write_answers(mut stream: OwnedWriteHalf, mut answers: mpsc::Receiver<Answer>) {
    while let Some(answer) = answers.recv().await {
        let Ok(message) = encode(&answer) else { return };
        if stream.write_all(&message).await.is_err() {
            return;
        }
    }
}

/// Reads requests; may be dropped at any await without losing bytes.
struct Reader {
    stream: OwnedReadHalf,
    received: Vec<u8>,
}

impl Reader {
    /// The next request; `None` when the process is gone.
    async fn next(&mut self) -> Result<Option<Request>, String> {
        loop {
            if let Some(request) =
                self.parse().map_err(|error| format!("the process sent nonsense: {error}"))?
            {
                return Ok(Some(request));
            }
            match self.stream.read_buf(&mut self.received).await {
                Ok(0) | Err(_) => return Ok(None),
                Ok(_) => {}
            }
        }
    }

    fn parse(&mut self) -> Result<Option<Request>, MessageError> {
        let Some((prefix, rest)) = self.received.split_first_chunk::<4>() else { return Ok(None) };
        let bytes = length(*prefix)?;
        let Some(message) = rest.get(..bytes) else { return Ok(None) };
        let request = decode(message)?;
        self.received.drain(..4 + bytes);
        Ok(Some(request))
    }
}
