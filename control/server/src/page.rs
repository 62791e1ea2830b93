//! The page that operators' browsers read: what is served, and to whom. It changes nothing.
//!
//! A browser gets three files and one stream of events. Each event is JSON: first everything, then what has changed. All browsers
//! are served from the same [`Feed`], which alone asks the state.

mod facts;
mod feed;

pub(crate) use feed::Feed;

use crate::access::{Current, Role, refused};
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::header::{self, HeaderName, HeaderValue};
use axum::http::{StatusCode, Uri};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router};
use feed::Watcher;
use harmonaize_identity::{Connection, Identity, Peer};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use std::convert::Infallible;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::server::Connected;
use tonic::{Code, Status};

/// Connections at a time; others wait.
const MAX_CONNECTIONS: usize = 128;

/// Most bytes of a request's head.
const MAX_HEAD: usize = 16 << 10;

/// How long a request's head may take, and an answer to a ping.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// Streams at a time of a connection.
const MAX_STREAMS: u32 = 16;

/// How long a browser may take to read an event.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// How long nothing may be sent through a stream of events.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// What a browser may do with what it gets: run and show the files of this origin, and nothing else.
const HEADERS: [(HeaderName, &str); 6] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::REFERRER_POLICY, "no-referrer"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    (header::CACHE_CONTROL, "no-store"),
];

/// Serves browsers until the connections end.
pub(crate) async fn serve(
    mut connections: impl Stream<Item = io::Result<Connection>> + Unpin,
    access: Arc<Current>,
    feed: Arc<Feed>,
) {
    let files = [
        ("/", "text/html; charset=utf-8", include_str!("../page/index.html")),
        ("/page.js", "text/javascript; charset=utf-8", include_str!("../page/page.js")),
        ("/page.css", "text/css; charset=utf-8", include_str!("../page/page.css")),
        ("/icon.svg", "image/svg+xml", include_str!("../page/icon.svg")),
    ];
    let mut router = Router::new();
    for (path, kind, text) in files {
        router = router.route(path, get(async move || ([(header::CONTENT_TYPE, kind)], text)));
    }
    let router = router
        .route("/snapshot", get(snapshot))
        .route("/events", get(events))
        .fallback(async || StatusCode::NOT_FOUND)
        .with_state((Arc::clone(&access), feed))
        .layer(from_fn_with_state(access, guard));
    let mut http = Builder::new(TokioExecutor::new());
    http.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT).max_buf_size(MAX_HEAD);
    http.http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(MAX_HEAD as u32)
        .keep_alive_interval(HEAD_TIMEOUT)
        .keep_alive_timeout(HEAD_TIMEOUT);
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let connection = match connections.next().await {
            None => return,
            Some(Err(_)) => continue,
            Some(Ok(connection)) => connection,
        };
        let service = TowerToHyperService::new(router.clone().layer(Extension(connection.connect_info())));
        let http = http.clone();
        tokio::spawn(async move {
            // Who is too slow, or gone, gets nothing.
            let _ = http.serve_connection(TokioIo::new(connection), service).await;
            drop(place);
        });
    }
}

type Shared = (Arc<Current>, Arc<Feed>);

/// Lets operators in alone, and says to all what their browsers may do with the answer.
async fn guard(
    State(access): State<Arc<Current>>,
    Extension(peer): Extension<Peer>,
    request: Request,
    next: Next,
) -> Response {
    let mut response = match admit(&access, &peer, &request) {
        Ok(()) => next.run(request).await,
        Err(status) => refusal(&status),
    };
    for (name, value) in HEADERS {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

fn admit(access: &Current, peer: &Peer, request: &Request) -> Result<(), Status> {
    // Without certificates a page of somebody else's would read ours, were its name resolved to this machine: it asks for its own.
    if peer.identity == Identity::Local && !is_this_machine(request) {
        let why = "without certificates the page is at 127.0.0.1 or localhost alone";
        return Err(refused(peer, "page", why));
    }
    access.caller(&of(peer), Role::Viewer, "page").map(drop)
}

/// A call from there, as other listeners have them.
fn of(peer: &Peer) -> tonic::Request<()> {
    let mut request = tonic::Request::new(());
    request.extensions_mut().insert(peer.clone());
    request
}

/// Whether a request is for this machine's loopback by its name or an address.
fn is_this_machine(request: &Request) -> bool {
    let header = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
    let asked = header.and_then(|host| host.parse::<Uri>().ok());
    let Some(host) = request.uri().host().or_else(|| asked.as_ref()?.host()) else { return false };
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || bare.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn refusal(status: &Status) -> Response {
    let code = match status.code() {
        Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
        Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::FORBIDDEN,
    };
    (code, format!("{}\n", status.message())).into_response()
}

/// Everything, once.
async fn snapshot(State((_, feed)): State<Shared>) -> Response {
    let Some(mut watcher) = feed.watch() else { return refuse_more() };
    let Some(update) = watcher.next().await else { return StatusCode::SERVICE_UNAVAILABLE.into_response() };
    match update.all() {
        Ok(all) => ([(header::CONTENT_TYPE, "application/json")], all).into_response(),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response(),
    }
}

/// Everything, and then what changes, for as long as the browser looks on and may.
async fn events(State((access, feed)): State<Shared>, Extension(peer): Extension<Peer>) -> Response {
    let Some(watcher) = feed.watch() else { return refuse_more() };
    let (events, stream) = mpsc::channel(1);
    tokio::spawn(follow(watcher, access, peer, events));
    let kind = [(header::CONTENT_TYPE, "text/event-stream")];
    (kind, Body::from_stream(ReceiverStream::new(stream))).into_response()
}

fn refuse_more() -> Response {
    (StatusCode::TOO_MANY_REQUESTS, "as many browsers look on as may\n").into_response()
}

async fn follow(
    mut watcher: Watcher,
    access: Arc<Current>,
    peer: Peer,
    events: mpsc::Sender<Result<Bytes, Infallible>>,
) {
    let mut seen = None;
    loop {
        let event = tokio::select! {
            next = timeout(KEEP_ALIVE, watcher.next()) => match next {
                Ok(Some(update)) => {
                    let event = update.event(seen);
                    seen = update.number();
                    event
                }
                Ok(None) => return,
                Err(_) => Bytes::from_static(b":\n\n"),
            },
            () = events.closed() => return,
        };
        // The role may be his no longer.
        if access.get().caller(&of(&peer), Role::Viewer, "page").is_err() {
            return;
        }
        if !matches!(timeout(READ_TIMEOUT, events.send(Ok(event))).await, Ok(Ok(()))) {
            return;
        }
    }
}
