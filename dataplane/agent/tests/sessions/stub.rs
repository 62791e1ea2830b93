//! An agent whose engine is a stub: every rank is alone, so that all collectives copy.

use harmonaize_abi::session::{
    Agreement, Event, EventBatch, EventCursor, EventKind, FailureDetail, JoinRefusal, JoinRefused,
    Negotiated, Refusal,
};
use harmonaize_abi::{
    ABI_VERSION, CommunicatorHandle, Completion, Rank, Region, Status, StragglerCause, Submission, Tag,
};
use harmonaize_agent::counters::Counters;
use harmonaize_agent::session::{
    AttachmentId, BindError, Joined, Question, Quota, RdmaRules, SessionRequest, SessionServer, SocketRules,
    TenantRules,
};
use harmonaize_client::{Access, AgentAddress, AttachOptions, RdmaOptions, Secret};
use harmonaize_shm::{AgentEnd, EndError, Memory, Span};
use harmonaize_verbs::PortOptions;
use harmonaize_verbs::fake::Fabric;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Longest time that anything in these tests may take.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// What a test sets, and sees.
#[derive(Debug, Default)]
pub(crate) struct Knobs {
    /// Descriptors are taken, and their operations not run until this is false again.
    pub(crate) hold: AtomicBool,
    /// Every operation fails with a mismatch.
    pub(crate) fail: AtomicBool,
    /// Descriptors taken so far.
    pub(crate) taken: AtomicU64,
    /// Joins, leaves, ends, in words.
    pub(crate) log: Mutex<Vec<String>>,
}

impl Knobs {
    pub(crate) fn log_line(&self, what: String) {
        self.log.lock().unwrap().push(what);
    }

    /// Waits until the log holds a line that contains `text`.
    pub(crate) fn expect(&self, text: &str) {
        until(|| {
            let log = self.log.lock().unwrap();
            let held = log.iter().any(|line| line.contains(text));
            if held { Ok(()) } else { Err(format!("no \"{text}\" in {log:?}")) }
        });
    }

    /// Waits until so many descriptors have been taken.
    pub(crate) fn until_taken(&self, least: u64) {
        until(|| (self.taken.load(Ordering::Relaxed) >= least).then_some(()).ok_or("not taken"));
    }
}

/// Tries until it succeeds.
#[track_caller]
pub(crate) fn until<T, E: Debug>(mut attempt: impl FnMut() -> Result<T, E>) -> T {
    let start = Instant::now();
    loop {
        match attempt() {
            Ok(done) => return done,
            Err(error) => assert!(start.elapsed() < LIMIT, "{error:?}"),
        }
        std::thread::yield_now();
    }
}

/// The agent. Stopped, with its socket removed, when dropped.
pub(crate) struct Stub {
    pub(crate) path: PathBuf,
    /// Where it listens over TCP.
    pub(crate) network: SocketAddr,
    /// With the agent's device, "agent", and the tenants', "tenant".
    pub(crate) fabric: Fabric,
    pub(crate) knobs: Arc<Knobs>,
    pub(crate) counters: Counters,
    /// Whom it is to serve; none: nobody any more.
    serve: mpsc::UnboundedSender<Option<Wanted>>,
    threads: Vec<std::thread::JoinHandle<()>>,
    _folder: tempfile::TempDir,
}

/// Tenants, and where to say what came of them.
type Wanted = (Vec<TenantRules>, std::sync::mpsc::Sender<Result<(), BindError>>);

/// What a test may adjust.
pub(crate) struct Setup {
    pub(crate) tenants: Vec<TenantRules>,
    pub(crate) rdma: RdmaRules,
}

pub(crate) const AGENT_DEVICE: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
pub(crate) const TENANT_DEVICE: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);

/// A secret that one byte decides.
pub(crate) fn secret(byte: u8) -> Secret {
    Secret::new(&[byte; 32]).unwrap()
}

/// The tenant's address over TCP, from the stub's.
pub(crate) fn over_tcp(address: SocketAddr) -> AgentAddress {
    AgentAddress::Tcp { address, tenant: "acme".into(), secret: secret(b'a') }
}

pub(crate) fn rules(path: PathBuf) -> TenantRules {
    TenantRules {
        tenant: "acme".into(),
        socket: Some(SocketRules { path, uids: vec![rustix::process::getuid().as_raw()] }),
        secret: Some(secret(b'a')),
        addresses: [Ipv4Addr::LOCALHOST, TENANT_DEVICE].map(IpAddr::V4).to_vec(),
        quota: Quota::default(),
        remote: true,
        rdma: true,
        handshake: Duration::from_secs(5),
    }
}

impl Stub {
    pub(crate) fn start() -> Self {
        Self::with(|_| {})
    }

    pub(crate) fn with(adjust: impl FnOnce(&mut TenantRules)) -> Self {
        Self::setup(|setup| adjust(&mut setup.tenants[0]))
    }

    pub(crate) fn setup(adjust: impl FnOnce(&mut Setup)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("acme.sock");
        let fabric = Fabric::new();
        fabric.add("agent", AGENT_DEVICE).unwrap();
        fabric.add("tenant", TENANT_DEVICE).unwrap();
        let rdma = RdmaRules {
            devices: fabric.devices(),
            port: PortOptions::default(),
            address: AGENT_DEVICE.into(),
            listen: Some("127.0.0.1:0".parse().unwrap()),
            handshake: Duration::from_secs(5),
        };
        let mut setup = Setup { tenants: vec![rules(path.clone())], rdma };
        adjust(&mut setup);
        let (knobs, counters) = (Arc::new(Knobs::default()), Counters::default());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (requests, inbox) = mpsc::channel(64);
        let mut server = {
            let _context = runtime.enter();
            let mut server = SessionServer::bind(Some(setup.rdma), requests, counters.clone()).unwrap();
            server.apply(&setup.tenants).unwrap();
            server
        };
        let network = server.network_address().unwrap();
        let (serve, mut wanted) = mpsc::unbounded_channel::<Option<Wanted>>();
        let engine = Engine {
            inbox,
            knobs: Arc::clone(&knobs),
            attachments: BTreeMap::new(),
            readers: Vec::new(),
            seen: Vec::new(),
            next: 1,
        };
        let threads = vec![
            std::thread::spawn(move || {
                runtime.block_on(async {
                    while let Some((tenants, applied)) = wanted.recv().await.flatten() {
                        applied.send(server.apply(&tenants)).unwrap();
                    }
                    server.stop();
                    server.ended().await;
                });
            }),
            std::thread::spawn(move || engine.run()),
        ];
        Self { path, network, fabric, knobs, counters, serve, threads, _folder: folder }
    }

    /// Serves these tenants from now on.
    pub(crate) fn apply(&self, tenants: Vec<TenantRules>) -> Result<(), BindError> {
        let (applied, outcome) = std::sync::mpsc::channel();
        self.serve.send(Some((tenants, applied))).unwrap();
        outcome.recv_timeout(LIMIT).unwrap()
    }

    /// Options for an arena of 1 MiB, over RDMA on the tenants' device.
    pub(crate) fn options(&self, access: Access) -> AttachOptions {
        let device = Some("tenant".to_owned());
        let rdma = RdmaOptions { device, devices: self.fabric.devices(), ..RdmaOptions::default() };
        AttachOptions { access, arena_bytes: 1 << 20, rdma, ..Default::default() }
    }
}

impl Drop for Stub {
    fn drop(&mut self) {
        let _ = self.serve.send(None);
        for thread in self.threads.drain(..) {
            let joined = thread.join();
            assert!(joined.is_ok() || std::thread::panicking());
        }
        assert!(!self.path.exists() || std::thread::panicking());
    }
}

struct Engine {
    inbox: mpsc::Receiver<SessionRequest>,
    knobs: Arc<Knobs>,
    attachments: BTreeMap<AttachmentId, Attachment>,
    /// Readers of events that wait until some rank leaves, and then are told that nothing came.
    readers: Vec<tokio::sync::oneshot::Sender<Result<EventBatch, Refusal>>>,
    /// Every attachment there was, in order: the log counts them from 1.
    seen: Vec<AttachmentId>,
    next: u32,
}

struct Attachment {
    end: Box<dyn AgentEnd>,
    pending: Vec<Submission>,
    operations: u64,
    /// Remote: operations whose bytes are on their way, by tag.
    moving: HashMap<Tag, (Submission, Arc<Memory>, bool)>,
    tag: Tag,
}

impl Engine {
    /// Polls for a while, then sleeps on the ends; ends when the socket has gone down.
    fn run(mut self) {
        let mut idle = Instant::now();
        loop {
            match self.inbox.try_recv() {
                Ok(request) => {
                    self.request(request);
                    idle = Instant::now();
                }
                Err(mpsc::error::TryRecvError::Disconnected) => return,
                Err(mpsc::error::TryRecvError::Empty) => {}
            }
            if self.progress() > 0 {
                idle = Instant::now();
            } else if idle.elapsed() < Duration::from_micros(50) {
                std::thread::yield_now();
            } else {
                self.sleep();
                idle = Instant::now();
            }
        }
    }

    fn sleep(&mut self) {
        let held = self.attachments.values().any(|attachment| !attachment.pending.is_empty());
        if self.attachments.values_mut().all(|attachment| attachment.end.prepare_sleep()) && !held {
            let mut fds: Vec<_> = self
                .attachments
                .values()
                .map(|attachment| {
                    let fd = attachment.end.wake_fd();
                    rustix::event::PollFd::from_borrowed_fd(fd, rustix::event::PollFlags::IN)
                })
                .collect();
            // Requests have no descriptor in this stub, so it looks for them now and then.
            let timeout = rustix::event::Timespec { tv_sec: 0, tv_nsec: 2_000_000 };
            rustix::event::poll(&mut fds, Some(&timeout)).unwrap();
        }
        for attachment in self.attachments.values_mut() {
            attachment.end.cancel_sleep(true);
        }
    }

    fn request(&mut self, request: SessionRequest) {
        match request {
            SessionRequest::Attached { attachment, tenant, end, .. } => {
                self.seen.push(attachment);
                self.knobs.log_line(format!("attached {} of {tenant}", self.seen.len()));
                let (held, moving) = (Vec::new(), HashMap::new());
                self.attachments.insert(
                    attachment,
                    Attachment { end, pending: held, operations: 0, moving, tag: Tag(0) },
                );
            }
            SessionRequest::AddRegion { attachment, base, memory, reply } => {
                self.knobs.log_line(format!("{} bytes more at {base}", memory.bytes()));
                let attachment = self.attachments.get_mut(&attachment);
                let added = attachment.is_some_and(|it| it.end.add_region(base, memory).is_ok());
                let _ = reply.send(added);
            }
            SessionRequest::RemoveRegion { attachment, base, reply } => {
                let attachment = self.attachments.get_mut(&attachment);
                let free = attachment.filter(|attachment| attachment.pending.is_empty());
                let gone = free.is_some_and(|it| it.end.remove_region(base).is_some());
                self.knobs.log_line(format!("region at {base} {}", if gone { "gone" } else { "kept" }));
                let _ = reply.send(gone);
            }
            SessionRequest::Join { name, rank, ranks, reply, .. } if name == "never" => {
                self.knobs.log_line(format!("join {rank}/{ranks}"));
                let knobs = Arc::clone(&self.knobs);
                std::thread::spawn(move || {
                    let start = Instant::now();
                    while !reply.is_closed() && start.elapsed() < LIMIT {
                        std::thread::yield_now();
                    }
                    knobs.log_line("join given up".into());
                });
            }
            SessionRequest::Join { name, rank, ranks, reply, .. } => {
                self.next += 1;
                let missing: Vec<Rank> = (0..ranks).map(Rank).filter(|other| *other != rank).collect();
                let answer = match ranks {
                    1 => Ok(Joined {
                        communicator: CommunicatorHandle(self.next),
                        name,
                        rank,
                        ranks,
                        before: Vec::new(),
                    }),
                    _ => Err(JoinRefused {
                        kind: JoinRefusal::Timeout,
                        text: "some ranks never came".into(),
                        ranks: missing,
                    }),
                };
                let _ = reply.send(answer);
            }
            SessionRequest::Regroup { who, key, min_ranks: least, reply, .. } => {
                self.knobs.log_line(format!("regroup {who:?} by {key}, {least} at least"));
                self.next += 1;
                let before = vec![Some(Rank(1)), None];
                let _ = reply.send(Ok(Joined {
                    communicator: CommunicatorHandle(self.next),
                    name: "job".into(),
                    rank: Rank(0),
                    ranks: 2,
                    before,
                }));
            }
            SessionRequest::Split { communicator, color, key, reply, .. } => {
                self.knobs.log_line(format!("split {communicator} by {color:?} and {key}"));
                self.next += 1;
                let (kind, text) = (JoinRefusal::LeftOut, "the rank named no color".to_owned());
                let refused = JoinRefused { kind, text, ranks: Vec::new() };
                let joined = color.map(|color| Joined {
                    communicator: CommunicatorHandle(self.next),
                    name: format!("job#1.{color}"),
                    rank: Rank(0),
                    ranks: 1,
                    before: Vec::new(),
                });
                let _ = reply.send(joined.ok_or(refused));
            }
            SessionRequest::Leave { communicator, .. } => {
                self.knobs.log_line(format!("left {communicator}"));
                for reader in self.readers.drain(..) {
                    let cursor = EventCursor { feed: 0, next: 0 };
                    let _ = reader.send(Ok(EventBatch { missed: 0, events: Vec::new(), cursor }));
                }
            }
            SessionRequest::Abort { communicator, .. } => {
                self.knobs.log_line(format!("aborted {communicator}"));
            }
            SessionRequest::SetBudget { communicator, budget, .. } => {
                self.knobs.log_line(format!("budget of {communicator}: {budget:?}"));
            }
            SessionRequest::Detail { reply, .. } => {
                let detail = FailureDetail {
                    status: Status::Mismatch,
                    operation: 7,
                    signature: None,
                    ranks: vec![Rank(3)],
                    calls: Vec::new(),
                    text: "because the test says so".into(),
                };
                let _ = reply.send(Some(detail));
            }
            SessionRequest::Ask { question, .. } => self.handle_question(question),
            SessionRequest::Detached { attachment } => {
                self.knobs.log_line(format!("detached {}", self.ordinal(attachment)));
                self.attachments.remove(&attachment);
            }
        }
    }

    fn handle_question(&mut self, question: Question) {
        match question {
            Question::Events { from, wait, reply } => {
                self.knobs.log_line(format!("events from {from:?} within {wait:?}"));
                match from {
                    Some(EventCursor { feed: 0, .. }) => self.readers.push(reply),
                    Some(EventCursor { feed, next }) => {
                        let kind =
                            EventKind::Failure { ranks: (0..5000).map(Rank).collect(), regroup_by_ns: 0 };
                        let event =
                            |number, kind| Event { number, communicator: "job".into(), kind, since_ns: 1 };
                        let mut events = vec![event(next, kind)];
                        if feed == 8 {
                            let (cause, ranks) = (StragglerCause::Network, vec![Rank(3)]);
                            events.push(event(next + 1, EventKind::Stragglers { cause, ranks }));
                        }
                        let cursor = EventCursor { feed, next: next + events.len() as u64 };
                        let _ = reply.send(Ok(EventBatch { missed: 2, events, cursor }));
                    }
                    None => drop(reply.send(Err("none today".into()))),
                }
            }
            // Who only asks finds nobody to ask.
            Question::Negotiate { communicator, propose, reply } => {
                self.knobs.log_line(format!("negotiates for {communicator}"));
                // What makes no sense finds nobody either.
                if let Some(constraints) = propose.filter(|propose| propose.weight == 2) {
                    let agreement = Agreement { number: 3, constraints, ..Agreement::default() };
                    let _ = reply.send(Ok(Negotiated::Agreed(agreement)));
                }
            }
            Question::Iteration { reply, .. } => drop(reply),
            Question::Runner { reply, .. } => drop(reply),
            Question::Bid { reply, .. } => drop(reply),
            Question::Hint { communicator, hints, reply } => {
                self.knobs.log_line(format!("hints for {communicator}: {hints:?}"));
                if communicator == "none" {
                    drop(reply.send(Err(Refusal::NoCommunicator("none runs".into()))));
                    return;
                }
                if hints.period.is_some() {
                    let _ = reply.send(Ok(()));
                }
            }
        }
    }

    fn ordinal(&self, attachment: AttachmentId) -> usize {
        1 + self.seen.iter().position(|seen| *seen == attachment).unwrap()
    }

    fn progress(&mut self) -> usize {
        let (mut done, mut broken) = (0, Vec::new());
        for (id, attachment) in &mut self.attachments {
            match attachment.progress(&self.knobs) {
                Ok(more) => done += more,
                Err(error) => broken.push((*id, error)),
            }
        }
        for (id, error) in broken {
            self.knobs.log_line(format!("broken {}: {error}", self.ordinal(id)));
            self.attachments.remove(&id);
        }
        done
    }
}

impl Attachment {
    fn progress(&mut self, knobs: &Knobs) -> Result<usize, EndError> {
        let mut ended = Vec::new();
        let mut done = self.end.progress(&mut |tag| ended.push(tag))?;
        for tag in ended {
            self.moved(tag)?;
        }
        while let Some(submission) = self.end.submission()? {
            done += 1;
            knobs.taken.fetch_add(1, Ordering::Relaxed);
            let Submission { iteration, tensor_class, priority, deadline_ns, timeout_ns, .. } = submission;
            if iteration > 0 {
                knobs.log_line(format!(
                    "iteration {iteration}: class {tensor_class}, priority {priority}, deadline {deadline_ns}, time-out {timeout_ns}"
                ));
            }
            self.pending.push(submission);
        }
        if !knobs.hold.load(Ordering::Relaxed) {
            for submission in std::mem::take(&mut self.pending) {
                done += 1;
                match knobs.fail.load(Ordering::Relaxed) {
                    true => self.complete(&submission, Status::Mismatch)?,
                    false => self.execute(submission)?,
                }
            }
        }
        if done > 0 {
            self.end.flush()?;
        }
        Ok(done)
    }

    fn complete(&mut self, submission: &Submission, status: Status) -> Result<(), EndError> {
        let operation = self.operations;
        self.operations += 1;
        let completion = Completion {
            version: ABI_VERSION,
            status: status.code(),
            communicator: submission.communicator,
            cookie: submission.cookie,
            operation,
            algorithm: 1,
            ..Default::default()
        };
        self.end.complete(&completion)
    }

    fn execute(&mut self, submission: Submission) -> Result<(), EndError> {
        let (Region { offset, bytes }, output) = (submission.input, submission.output);
        let held = self.end.holds(offset, bytes) && self.end.holds(output.offset, bytes);
        if !held || bytes != output.bytes {
            return self.complete(&submission, Status::OutOfRange);
        }
        if bytes == 0 {
            return self.complete(&submission, Status::Ok);
        }
        if let Some(memory) = self.end.memory() {
            let mut copied = vec![0; bytes as usize];
            memory.read(offset, &mut copied)?;
            memory.write(output.offset, &copied)?;
            return self.complete(&submission, Status::Ok);
        }
        let staging = Memory::private(bytes as usize)?;
        self.tag = self.tag.next();
        self.end.fetch(self.tag, offset, Span::new(&staging, 0, bytes)?)?;
        self.moving.insert(self.tag, (submission, staging, false));
        Ok(())
    }

    fn moved(&mut self, tag: Tag) -> Result<(), EndError> {
        let (submission, staging, stored) = self.moving.remove(&tag).expect("a tag that was given");
        if stored {
            return self.complete(&submission, Status::Ok);
        }
        let span = Span::new(&staging, 0, submission.output.bytes)?;
        self.end.store(tag, span, submission.output.offset)?;
        self.moving.insert(tag, (submission, staging, true));
        Ok(())
    }
}
