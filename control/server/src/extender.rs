//! The scheduler extender: Kubernetes' scheduler asks which nodes can take a job's pod, and which are best for it.
//!
//! Pods belong to a job by their labels; about others nothing is said. A host is scored by what the planner predicts, as a number from 0 to
//! 10. What is not answered in time, or is refused, the scheduler does without.

mod placements;
mod wire;

use crate::access::Current;
use crate::actor::Command;
use crate::http::{for_operators, refusal};
use crate::leader::Commands;
use crate::state::{Candidates, Controller, NextWorker, Unfit};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, FromRequest, Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use harmonaize_identity::Connection;
use harmonaize_planner::MAX_NODES;
use placements::Placements;
use serde::Serialize;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::timeout;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use wire::{Args, FilterResult, HostPriority};

/// What the log calls it.
const WHAT: &str = "scheduler extender";

/// Most bytes of a request: a pod, and the names of as many nodes as a topology has hosts.
const MAX_BODY: usize = 4 << 20;

/// Most bytes of a part of an answer. A connection takes one part after another.
const PART: usize = 64 << 10;

/// How long a request may take to come and to be answered, and as long again its answer to be read. By default the scheduler waits 5 s.
const PATIENCE: Duration = Duration::from_secs(3);

/// How long after a request came hosts are scored by predictions. Further ones are scored by their place alone.
const SCORING: Duration = Duration::from_secs(2);

/// Pods for which nodes are scored at a time. A scheduler asks for one after another.
const SCORED: usize = 2;

/// Requests that are read and answered at a time; others wait.
const TURNS: usize = 4;

/// The right to hold a request, what the state finds, and the answer. It ends where the last of them does. Scores have turns of their own.
type Turn = OwnedSemaphorePermit;

/// What requests are answered from.
struct Extender {
    commands: Commands,
    access: Arc<Current>,
    turns: Arc<Semaphore>,
    /// For scores, so that other pods' questions do not wait for them.
    scored: Arc<Semaphore>,
    placements: Mutex<Placements>,
    begun: Instant,
}

/// Serves schedulers until the connections end.
pub(crate) async fn serve(
    connections: impl Stream<Item = io::Result<Connection>> + Unpin,
    access: Arc<Current>,
    commands: Commands,
) {
    let router = Router::new()
        .route("/filter", post(filter))
        .route("/prioritize", post(prioritize))
        .fallback(async || (StatusCode::NOT_FOUND, "the extender has /filter and /prioritize\n"))
        .with_state(Arc::new(Extender::new(commands, Arc::clone(&access))))
        .layer(DefaultBodyLimit::max(MAX_BODY));
    crate::http::serve(connections, for_operators(router, access, WHAT)).await;
}

async fn filter(State(extender): State<Arc<Extender>>, request: Request) -> Response {
    let answered = async {
        let (args, names, turn) = extender.read(request).await?;
        extender.filter(&args, names, turn).await
    };
    respond(answered).await
}

async fn prioritize(State(extender): State<Arc<Extender>>, request: Request) -> Response {
    let until = Instant::now() + SCORING;
    let answered = async {
        let (args, names, turn) = extender.read(request).await?;
        extender.prioritize(&args, names, turn, until).await
    };
    respond(answered).await
}

/// The answer as JSON, if it comes in time.
async fn respond<T: Serialize>(answered: impl Future<Output = Result<(T, Turn), Refused>>) -> Response {
    let (reply, turn) = match timeout(PATIENCE, answered).await {
        Ok(Ok(reply)) => reply,
        Ok(Err(refused)) => return refused.into_response(),
        Err(_) => {
            let text = format!("no answer within {} s; try again", PATIENCE.as_secs());
            return refuse(StatusCode::SERVICE_UNAVAILABLE, &text).into_response();
        }
    };
    match serde_json::to_vec(&reply) {
        Ok(text) => {
            // With its length, one that was cut off is no whole one.
            let length = text.len().to_string();
            let head =
                [(header::CONTENT_TYPE, "application/json"), (header::CONTENT_LENGTH, length.as_str())];
            (head, guarded(text, turn)).into_response()
        }
        Err(error) => refuse(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()).into_response(),
    }
}

/// An answer in parts. It has its turn until the connection has taken the last part, or has taken too long.
fn guarded(text: Vec<u8>, turn: Turn) -> Body {
    let (parts, stream) = mpsc::channel(1);
    tokio::spawn(async move {
        let sent = async {
            for part in text.chunks(PART) {
                let part = Bytes::copy_from_slice(part);
                if parts.send(Ok::<_, Infallible>(part)).await.is_err() {
                    return;
                }
            }
        };
        let _ = timeout(PATIENCE, sent).await;
        drop((text, turn));
    });
    Body::from_stream(ReceiverStream::new(stream))
}

/// Why a request has no answer, as a code and as text.
type Refused = (StatusCode, String);

fn refuse(code: StatusCode, text: &str) -> Refused {
    (code, format!("{text}\n"))
}

impl Extender {
    fn new(commands: Commands, access: Arc<Current>) -> Self {
        let [turns, scored] = [TURNS, SCORED].map(|most| Arc::new(Semaphore::new(most)));
        Self { commands, access, turns, scored, placements: Mutex::default(), begun: Instant::now() }
    }

    /// Reads a request's body. Returns what it says, its nodes, and the turn that it has until its answer is read.
    async fn read(&self, request: Request) -> Result<(Args, Vec<String>, Turn), Refused> {
        // A browser sends this type to its own origin alone.
        let kind = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
        if !kind.is_some_and(|kind| kind.starts_with("application/json")) {
            let text = "the content's type must be application/json";
            return Err(refuse(StatusCode::UNSUPPORTED_MEDIA_TYPE, text));
        }
        let gone = |_| refuse(StatusCode::SERVICE_UNAVAILABLE, "control is going down");
        let turn = Arc::clone(&self.turns).acquire_owned().await.map_err(gone)?;
        let body = Bytes::from_request(request, &()).await.map_err(|rejection| match rejection.status() {
            code @ StatusCode::PAYLOAD_TOO_LARGE => {
                refuse(code, &format!("a request has at most {} MiB", MAX_BODY >> 20))
            }
            code => refuse(code, &rejection.body_text()),
        })?;
        let wrong = |text: String| refuse(StatusCode::BAD_REQUEST, &text);
        let mut args: Args = serde_json::from_slice(&body)
            .map_err(|error| wrong(format!("this is no ExtenderArgs of kube-scheduler: {error}")))?;
        let missing =
            || wrong("there are no NodeNames; set nodeCacheCapable: true for this extender".to_owned());
        let names = args.node_names.take().ok_or_else(missing)?;
        if names.len() > MAX_NODES {
            return Err(wrong(format!(
                "{} NodeNames: a request has at most {MAX_NODES}, as many as a topology has hosts",
                names.len()
            )));
        }
        Ok((args, names, turn))
    }

    /// Returns what `read` finds in the state. The turn lasts until then, also where nobody waits for it any more.
    async fn query<T: Send + 'static>(
        &self,
        turn: Turn,
        read: impl FnOnce(&mut Controller, Duration) -> T + Send + 'static,
    ) -> Result<(T, Turn), Refused> {
        let look = |answer: oneshot::Sender<(T, Turn)>| {
            Command::Look(Box::new(move |state, now| drop(answer.send((read(state, now), turn)))))
        };
        self.commands.ask(look).await.map_err(|status| refusal(&status))
    }

    /// Leaves out nodes that cannot have a worker of the pod's job.
    async fn filter(
        &self,
        args: &Args,
        names: Vec<String>,
        turn: Turn,
    ) -> Result<(FilterResult, Turn), Refused> {
        let worker = match args.pod.metadata.worker(&self.access.get().namespaces) {
            Ok(Some(worker)) => worker,
            Ok(None) => return Ok((FilterResult { node_names: names, ..FilterResult::default() }, turn)),
            // The tenant reads it among the pod's events.
            Err(error) => {
                let text = error.to_string();
                let failed = filtered(names.into_iter().map(|name| (name, Some(text.clone()))));
                return Ok((failed, turn));
            }
        };
        let look = move |state: &mut Controller, now: Duration| {
            let fits = state.queries(now).fits(&worker.tenant, &names);
            (names, fits)
        };
        let ((names, fits), turn) = self.query(turn, look).await?;
        if fits.contains(&Err(Unfit::NotYet)) {
            return Err(refuse(StatusCode::SERVICE_UNAVAILABLE, &Unfit::NotYet.to_string()));
        }
        let why = fits.into_iter().map(|fit| fit.err().map(|unfit| unfit.to_string()));
        Ok((filtered(names.into_iter().zip(why)), turn))
    }

    /// Scores nodes for the next worker of the pod's job. Others' pods leave all nodes alike.
    async fn prioritize(
        &self,
        args: &Args,
        names: Vec<String>,
        turn: Turn,
        until: Instant,
    ) -> Result<(Vec<HostPriority>, Turn), Refused> {
        let metadata = &args.pod.metadata;
        let Ok(Some(mut worker)) = metadata.worker(&self.access.get().namespaces) else {
            return Ok((prioritized(names, &BTreeMap::new()), turn));
        };
        let (tenant, job) = (worker.tenant.clone(), worker.job.clone());
        let key = (tenant.as_str(), job.as_str());
        worker.assumed = self.placements().others(self.begun.elapsed(), key, &metadata.uid);
        let (names, scores, turn) = self.scores(worker, names, turn, until).await?;
        // Of the best ones the first by name.
        let some = scores.iter().rev().filter(|(_, score)| **score > 0);
        if let Some((host, _)) = some.max_by_key(|(_, score)| **score) {
            self.placements().add(self.begun.elapsed(), key, &metadata.uid, host);
        }
        Ok((prioritized(names, &scores), turn))
    }

    /// The scores of those nodes that fit, all names again, and a turn for them instead of the request's. They are computed where nobody
    /// waits, and where the scheduler has left before, the turn ends with that.
    async fn scores(
        &self,
        worker: NextWorker,
        names: Vec<String>,
        turn: Turn,
        until: Instant,
    ) -> Result<(Vec<String>, BTreeMap<String, u8>, Turn), Refused> {
        let busy =
            |_| refuse(StatusCode::SERVICE_UNAVAILABLE, "nodes are being scored for others; try again");
        let scored = Arc::clone(&self.scored).try_acquire_owned().map_err(busy)?;
        let look = move |state: &mut Controller, now: Duration| {
            let candidates = state.queries(now).candidates(&worker, &names);
            (names, candidates)
        };
        let ((names, candidates), turn): ((Vec<String>, Result<Candidates, Unfit>), Turn) =
            self.query(turn, look).await?;
        let not_yet = |unfit: Unfit| refuse(StatusCode::SERVICE_UNAVAILABLE, &unfit.to_string());
        let candidates = candidates.map_err(not_yet)?;
        drop(turn);
        let computed = tokio::task::spawn_blocking(move || {
            let scores = candidates.scores(|| Instant::now() >= until).into_iter();
            let scores: BTreeMap<String, u8> = scores.map(|(host, score)| (host.to_owned(), score)).collect();
            (scores, scored)
        });
        let failed =
            |error: tokio::task::JoinError| refuse(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string());
        let (scores, scored) = computed.await.map_err(failed)?;
        Ok((names, scores, scored))
    }

    fn placements(&self) -> std::sync::MutexGuard<'_, Placements> {
        self.placements.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Nodes, and why some of them cannot be taken.
fn filtered(nodes: impl Iterator<Item = (String, Option<String>)>) -> FilterResult {
    let mut result = FilterResult::default();
    for (name, why) in nodes {
        match why {
            None => result.node_names.push(name),
            Some(why) => drop(result.failed_nodes.insert(name, why)),
        }
    }
    result.failed_and_unresolvable_nodes.clone_from(&result.failed_nodes);
    result
}

/// Nodes with their scores; 0 for those that have none.
fn prioritized(names: Vec<String>, scores: &BTreeMap<String, u8>) -> Vec<HostPriority> {
    let score = |name: &String| scores.get(name).copied().unwrap_or(0);
    names.into_iter().map(|host| HostPriority { score: score(&host), host }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::Access;
    use crate::leader::Leader;
    use axum::body::to_bytes;

    /// A question about a pod of a job.
    fn question() -> Request {
        let args = r#"{"Pod":{"metadata":{"labels":{"harmonaize.dev/job":"j"}}},"NodeNames":["h0"]}"#;
        let request = Request::post("/").header(header::CONTENT_TYPE, "application/json");
        request.body(Body::from(args)).unwrap()
    }

    fn extender(commands: Commands) -> Arc<Extender> {
        Arc::new(Extender::new(commands, Arc::new(Current::new(Access::insecure_loopback()))))
    }

    async fn parts(response: Response) -> (StatusCode, String) {
        let code = response.status();
        let body = to_bytes(response.into_body(), MAX_BODY).await.unwrap();
        (code, String::from_utf8(body.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn a_control_that_follows_names_the_leader() {
        let (leads, commands) = Commands::new();
        leads.send_replace(Leader::Elsewhere(Some("10.0.0.2:7000".to_owned())));
        let extender = extender(commands);
        let filtered = parts(filter(State(Arc::clone(&extender)), question()).await).await;
        for (code, text) in [filtered, parts(prioritize(State(extender), question()).await).await] {
            assert_eq!(code, StatusCode::SERVICE_UNAVAILABLE);
            assert!(text.contains("10.0.0.2:7000"), "{text}");
        }
    }

    #[tokio::test]
    async fn a_state_that_stands_still_is_not_waited_for() {
        let (leads, commands) = Commands::new();
        let (queue, asked) = mpsc::channel(16);
        leads.send_replace(Leader::Here(queue));
        let extender = extender(commands);
        let (code, text) = parts(filter(State(Arc::clone(&extender)), question()).await).await;
        assert_eq!(
            (code, text.as_str()),
            (StatusCode::SERVICE_UNAVAILABLE, "no answer within 3 s; try again\n")
        );
        // The state still has the names.
        assert_eq!(extender.turns.available_permits(), TURNS - 1);
        drop(asked);
        assert_eq!(extender.turns.available_permits(), TURNS);
    }

    #[tokio::test]
    async fn more_scores_than_can_be_made_are_refused_at_once() {
        let (_leads, commands) = Commands::new();
        let extender = extender(commands);
        let all = Arc::clone(&extender.scored).acquire_many_owned(SCORED as u32).await.unwrap();
        let (code, text) = parts(prioritize(State(Arc::clone(&extender)), question()).await).await;
        let expected = "nodes are being scored for others; try again\n";
        assert_eq!((code, text.as_str()), (StatusCode::SERVICE_UNAVAILABLE, expected));
        // What fits is asked nevertheless.
        let (code, text) = parts(filter(State(Arc::clone(&extender)), question()).await).await;
        assert_eq!(
            (code, text.as_str()),
            (StatusCode::SERVICE_UNAVAILABLE, "no control is known to lead now\n")
        );
        drop(all);
        let (_, text) = parts(prioritize(State(extender), question()).await).await;
        assert_eq!(text, "no control is known to lead now\n");
    }

    /// An answer of several parts, and the turns of which it has one.
    async fn answer() -> (Body, Arc<Semaphore>) {
        let turns = Arc::new(Semaphore::new(1));
        let turn = Arc::clone(&turns).acquire_owned().await.unwrap();
        (guarded(vec![b'x'; 8 * PART], turn), turns)
    }

    #[tokio::test]
    async fn an_answer_has_its_turn_until_it_is_read() {
        let (body, turns) = answer().await;
        tokio::task::yield_now().await;
        assert_eq!(turns.available_permits(), 0);
        assert_eq!(to_bytes(body, MAX_BODY).await.unwrap().len(), 8 * PART);
        drop(turns.acquire().await.unwrap());
    }

    #[tokio::test]
    async fn an_answer_that_nobody_reads_is_cut_off() {
        let (body, turns) = answer().await;
        drop(turns.acquire().await.unwrap());
        assert!(to_bytes(body, MAX_BODY).await.unwrap().len() < 8 * PART);
        let (body, turns) = answer().await;
        drop(body);
        drop(turns.acquire().await.unwrap());
    }
}
