//! Questions of operators that agents answer with rows, or with parts of a trace. Control asks, and hands each host's rows on as they come.
//!
//! Nothing is stored. A question holds at most [`PARTS`] parts that its reader has not taken, and one more of each agent, which waits
//! in its own call until there is room. A reader who takes none for [`SLOW`] is cut off.

use crate::access::refused;
use crate::state::SessionId;
use harmonaize_api::v1::{AnswerPart, AskReply, HostEnd, Question, ToAgent, to_agent};
use harmonaize_identity::Peer;
use prost::Message;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{self, OwnedPermit, WeakSender};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

/// Most questions at once: each takes a stream of every agent's connection.
const QUESTIONS: usize = 4;

/// Parts that wait for a reader, beside those that wait in agents' calls.
const PARTS: usize = 32;

/// Most bytes of a part; an agent that follows the protocol stays far below.
const PART_BYTES: usize = 256 << 10;

/// Most rows, and bytes, of an answer that ends.
const MOST: (u64, u64) = (1_000_000, 512 << 20);

/// How long a reader may take no part while some wait.
const SLOW: Duration = Duration::from_secs(10);

/// How long an agent may take for the first part of its call.
const FIRST_PART: Duration = Duration::from_secs(5);

/// What an agent's stream carries.
pub(crate) type Downstream = Result<ToAgent, Status>;

/// How often hosts that came back are asked, by who follows.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// What an operator's call reads.
pub(crate) type Replies = ReceiverStream<Result<AskReply, Status>>;

/// The agents that have a session, and the questions that are open.
pub(crate) struct Relay {
    /// Whose agents have said hello, and are not welcome yet.
    greeted: Mutex<BTreeMap<SessionId, (String, WeakSender<Downstream>)>>,
    agents: Mutex<BTreeMap<String, (SessionId, WeakSender<Downstream>)>>,
    open: Mutex<BTreeMap<u64, Arc<Open>>>,
    places: Arc<Semaphore>,
}

/// Where a host's answer stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// It has no session.
    Away,
    /// It was asked in this session.
    Asked(SessionId),
    /// It answers.
    Answers(SessionId),
    /// It has answered, or will not.
    Over(SessionId),
}

/// An open question.
struct Open {
    question: Question,
    replies: mpsc::Sender<Result<AskReply, Status>>,
    /// Room for the text that cuts the reader off.
    last: Mutex<Option<OwnedPermit<Result<AskReply, Status>>>>,
    hosts: Mutex<BTreeMap<String, Standing>>,
    changed: Notify,
    closed: watch::Sender<bool>,
    rows: AtomicU64,
    bytes: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Relay {
    pub(crate) fn new() -> Self {
        let places = Arc::new(Semaphore::new(QUESTIONS));
        Self { greeted: Mutex::default(), agents: Mutex::default(), open: Mutex::default(), places }
    }

    /// A host's agent has said hello.
    pub(crate) fn greeted(&self, host: &str, session: SessionId, agent: WeakSender<Downstream>) {
        lock(&self.greeted).insert(session, (host.to_owned(), agent));
    }

    /// Sends an agent its welcome. From then on it is asked: no question comes before, which it would not take, and who asks once it
    /// is welcome finds it. One that is refused takes no questions from another session of its host.
    ///
    /// # Errors
    /// That of sending.
    pub(crate) fn welcome(
        &self,
        session: SessionId,
        send: impl FnOnce() -> Result<(), TrySendError<()>>,
    ) -> Result<(), TrySendError<()>> {
        let (mut greeted, mut agents) = (lock(&self.greeted), lock(&self.agents));
        send()?;
        if let Some((host, agent)) = greeted.remove(&session) {
            agents.insert(host, (session, agent));
        }
        Ok(())
    }

    /// A session is over.
    pub(crate) fn disconnected(&self, session: SessionId) {
        let (mut greeted, mut agents) = (lock(&self.greeted), lock(&self.agents));
        greeted.remove(&session);
        agents.retain(|_, (of, _)| *of != session);
    }

    /// Asks hosts. Their replies come as the agents send them.
    ///
    /// # Errors
    /// Too many questions are open.
    pub(crate) fn ask(
        self: &Arc<Self>,
        mut question: Question,
        hosts: Vec<String>,
        patience: Duration,
    ) -> Result<Replies, Status> {
        let full =
            |_| Status::resource_exhausted(format!("{QUESTIONS} questions are open already; try again"));
        let place = Arc::clone(&self.places).try_acquire_owned().map_err(full)?;
        question.id = RandomState::new().hash_one(place.num_permits());
        let (replies, stream) = mpsc::channel(PARTS + 1);
        let open = Arc::new(Open {
            last: Mutex::new(replies.clone().try_reserve_owned().ok()),
            question,
            replies,
            hosts: Mutex::new(hosts.into_iter().map(|host| (host, Standing::Away)).collect()),
            changed: Notify::new(),
            closed: watch::Sender::new(false),
            rows: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        });
        lock(&self.open).insert(open.question.id, Arc::clone(&open));
        tokio::spawn(Arc::clone(self).conduct(open, patience, place));
        Ok(ReceiverStream::new(stream))
    }

    /// Asks hosts and waits: for all their answers, or, where they are followed, until the reader goes.
    async fn conduct(self: Arc<Self>, open: Arc<Open>, patience: Duration, _place: OwnedSemaphorePermit) {
        let deadline = Instant::now() + patience;
        let (mut ticks, mut closed) = (interval(ASK_AGAIN), open.closed.subscribe());
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (follow, mut late, mut named) = (open.question.follow, false, false);
        while open.is_running() {
            self.ask_hosts(&open);
            if !follow && open.is_over() {
                break;
            }
            if late && !named {
                named = true;
                open.name_silent("no answer in time").await;
            }
            tokio::select! {
                _ = ticks.tick() => {}
                () = open.changed.notified() => {}
                () = sleep_until(deadline), if !late => {
                    late = true;
                    if !follow {
                        break;
                    }
                }
                () = open.replies.closed() => break,
                _ = closed.wait_for(|closed| *closed) => break,
            }
        }
        lock(&self.open).remove(&open.question.id);
        if open.is_running() {
            open.name_silent("no end of its answer in time").await;
        }
        // Agents' calls end.
        open.closed.send_replace(true);
        drop(lock(&open.last).take());
    }

    /// Asks agents that have a session in which they were not asked. Where nobody follows, it asks only those that have not answered.
    fn ask_hosts(&self, open: &Open) {
        let agents = lock(&self.agents);
        for (host, standing) in lock(&open.hosts).iter_mut() {
            // An answer that ends is given once: a second would stand behind one that broke off, and a trace would begin twice.
            if !open.question.follow && matches!(standing, Standing::Answers(_) | Standing::Over(_)) {
                continue;
            }
            let Some((session, agent)) = agents.get(host) else {
                if !matches!(standing, Standing::Answers(_)) {
                    *standing = Standing::Away;
                }
                continue;
            };
            let before = match standing {
                Standing::Away => None,
                Standing::Asked(of) | Standing::Answers(of) | Standing::Over(of) => Some(*of),
            };
            if before == Some(*session) {
                continue;
            }
            let message = to_agent::Message::Question(open.question.clone());
            let asked = agent
                .upgrade()
                .is_some_and(|agent| agent.try_send(Ok(ToAgent { message: Some(message) })).is_ok());
            if asked {
                *standing = Standing::Asked(*session);
            }
        }
    }

    /// Takes an agent's answer in until it ends, or nobody wants more.
    ///
    /// # Errors
    /// The agent speaks for another host, was not asked, or breaks a limit.
    pub(crate) async fn answer(&self, peer: &Peer, mut parts: Streaming<AnswerPart>) -> Result<(), Status> {
        let first = timeout(FIRST_PART, parts.message()).await;
        let first = first.map_err(|_| Status::deadline_exceeded("no part in time"))??;
        let first = first.ok_or_else(|| Status::invalid_argument("an answer has a part at least"))?;
        if !peer.identity.may_be_host(&first.host) {
            let why = format!("the certificate is of {}, and not of {}", peer.identity, first.host);
            return Err(refused(peer, "answer", why));
        }
        let over = || Status::not_found("nobody asks that any more");
        let open = lock(&self.open).get(&first.id).cloned().ok_or_else(over)?;
        let host = first.host.clone();
        let session = open.begin(&host).ok_or_else(over)?;
        let mut closed = open.closed.subscribe();
        let taken = async {
            let mut end = HostEnd::default();
            let mut next = Some(first);
            while let Some(part) = next {
                open.take(&host, part, &mut end).await?;
                next = parts.message().await.map_err(|status| Cut::Broken(status.code().to_string()))?;
            }
            Ok(end)
        };
        let (end, outcome) = tokio::select! {
            taken = taken => match taken {
                Ok(end) => (end, Ok(())),
                Err(Cut::Reader) => return Err(Status::cancelled("the reader is gone")),
                Err(Cut::Broken(why)) => {
                    let failure = format!("its answer broke off: {why}");
                    (HostEnd { failure, omitted: 0 }, Err(Status::invalid_argument(why)))
                }
            },
            _ = closed.wait_for(|closed| *closed) => return Ok(()),
        };
        let reply = AskReply { host: host.clone(), end: Some(end), ..AskReply::default() };
        let _ = open.reply(reply).await;
        open.stand(&host, Standing::Over(session));
        outcome
    }
}

/// Why an answer is not taken to its end.
enum Cut {
    /// Nobody reads any more.
    Reader,
    /// It breaks the protocol, or off.
    Broken(String),
}

impl Open {
    fn is_running(&self) -> bool {
        !*self.closed.borrow() && !self.replies.is_closed()
    }

    fn stand(&self, host: &str, standing: Standing) {
        if let Some(at) = lock(&self.hosts).get_mut(host) {
            *at = standing;
        }
        self.changed.notify_one();
    }

    /// A host that was asked answers: once in a session.
    fn begin(&self, host: &str) -> Option<SessionId> {
        match lock(&self.hosts).get_mut(host) {
            Some(standing) => match *standing {
                Standing::Asked(session) => {
                    *standing = Standing::Answers(session);
                    Some(session)
                }
                _ => None,
            },
            None => None,
        }
    }

    /// Whether no host is waited for. Those that are away are not: they had until the first look.
    fn is_over(&self) -> bool {
        lock(&self.hosts).values().all(|standing| matches!(standing, Standing::Over(_) | Standing::Away))
    }

    /// Hands a part on.
    async fn take(&self, host: &str, part: AnswerPart, end: &mut HostEnd) -> Result<(), Cut> {
        let bytes = part.encoded_len();
        if bytes > PART_BYTES {
            return Err(Cut::Broken(format!("a part of {bytes} bytes, of {PART_BYTES} at most")));
        }
        end.omitted = end.omitted.saturating_add(part.omitted);
        if !part.refused.is_empty() {
            end.failure = part.refused.chars().filter(|c| !c.is_control()).take(256).collect();
        }
        let rows = (part.flows.len() + part.findings.len()) as u64;
        if rows == 0 && part.trace.is_none() {
            return Ok(());
        }
        let rows = self.rows.fetch_add(rows, Ordering::Relaxed) + rows;
        let bytes = self.bytes.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
        if !self.question.follow && (rows > MOST.0 || bytes > MOST.1) {
            let text =
                format!("more than {} rows or {} bytes; ask for fewer, or fewer hosts", MOST.0, MOST.1);
            self.cut(Status::resource_exhausted(text));
            return Err(Cut::Reader);
        }
        let AnswerPart { time_ns, flows, findings, trace, .. } = part;
        self.reply(AskReply { host: host.to_owned(), time_ns, flows, findings, end: None, trace }).await
    }

    async fn reply(&self, reply: AskReply) -> Result<(), Cut> {
        match timeout(SLOW, self.replies.send(Ok(reply))).await {
            Ok(sent) => sent.map_err(|_| Cut::Reader),
            Err(_) => {
                let text = format!("the reader took no row for {} s, and is cut off", SLOW.as_secs());
                self.cut(Status::resource_exhausted(text));
                Err(Cut::Reader)
            }
        }
    }

    /// Ends the question with a text for its reader.
    fn cut(&self, status: Status) {
        if let Some(last) = lock(&self.last).take() {
            last.send(Err(status));
        }
        self.closed.send_replace(true);
    }

    /// Names the hosts that do not answer.
    async fn name_silent(&self, silent: &str) {
        let follow = self.question.follow;
        let failure = |standing: &Standing| match standing {
            Standing::Away => Some("its agent has no session with control"),
            Standing::Asked(_) => Some(silent),
            Standing::Answers(_) => (!follow).then_some(silent),
            Standing::Over(_) => None,
        };
        let named: Vec<_> = lock(&self.hosts)
            .iter()
            .filter_map(|(host, standing)| Some((host.clone(), failure(standing)?.to_owned())))
            .collect();
        for (host, failure) in named {
            let end = Some(HostEnd { failure, omitted: 0 });
            if self.reply(AskReply { host, end, ..AskReply::default() }).await.is_err() {
                return;
            }
        }
    }
}
