//! The page that operators' browsers read: what is served, and to whom. It changes nothing.
//!
//! A browser gets three files and one stream of events. Each event is JSON: first everything, then what has changed. All browsers
//! are served from the same [`Feed`], which alone asks the state.

mod facts;
mod feed;

pub(crate) use feed::Feed;

use crate::access::{Current, Role};
use crate::http::{call_from, for_operators};
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::{self, HeaderName, HeaderValue};
use axum::middleware::map_response;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router};
use feed::Watcher;
use harmonaize_identity::{Connection, Peer};
use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;

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
    connections: impl Stream<Item = io::Result<Connection>> + Unpin,
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
        .with_state((Arc::clone(&access), feed));
    let router = for_operators(router, access, "page").layer(map_response(with_headers));
    crate::http::serve(connections, router).await;
}

type Shared = (Arc<Current>, Arc<Feed>);

/// Says to all what their browsers may do with an answer, a refusal too.
async fn with_headers(mut response: Response) -> Response {
    for (name, value) in HEADERS {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
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
        if access.get().caller(&call_from(&peer), Role::Viewer, "page").is_err() {
            return;
        }
        if !matches!(timeout(READ_TIMEOUT, events.send(Ok(event))).await, Ok(Ok(()))) {
            return;
        }
    }
}
