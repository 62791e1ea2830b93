//! HTTP beside gRPC: connections to the page and to the scheduler extender, and who may ask there.

use crate::access::{Current, Role, refused};
use axum::extract::{Request, State};
use axum::http::{StatusCode, Uri, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Router};
use harmonaize_identity::{Connection, Identity, Peer};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio_stream::{Stream, StreamExt};
use tonic::service::Routes;
use tonic::transport::server::Connected;
use tonic::{Code, Status};

/// Connections of a listener at a time; others wait.
const MAX_CONNECTIONS: usize = 128;

/// Most bytes of a request's head.
const MAX_HEAD: usize = 16 << 10;

/// Most characters of a path in the log.
const MAX_SHOWN: usize = 128;

/// How long a request's head may take, and an answer to a ping.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// Streams at a time of a connection.
const MAX_STREAMS: u32 = 16;

/// Answers requests until the connections end. Each request has the connection's [`Peer`] as an extension.
pub(crate) async fn serve(
    mut connections: impl Stream<Item = io::Result<Connection>> + Unpin,
    router: Router,
) {
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

/// Lets operators of any role alone ask a router, which is called `what` where others are refused.
pub(crate) fn for_operators(router: Router, access: Arc<Current>, what: &'static str) -> Router {
    router.layer(from_fn_with_state((access, what), guard))
}

async fn guard(
    State((access, what)): State<(Arc<Current>, &'static str)>,
    Extension(peer): Extension<Peer>,
    request: Request,
    next: Next,
) -> Response {
    match admit(&access, &peer, &request, what) {
        Ok(()) => next.run(request).await,
        Err(status) => refusal(&status).into_response(),
    }
}

/// Whether a request may go on: its peer is an operator, of any role.
fn admit(access: &Current, peer: &Peer, request: &Request, what: &'static str) -> Result<(), Status> {
    // Without certificates a page of somebody else's would read ours, were its name resolved to this machine: it asks for its own.
    if peer.identity == Identity::Local && !is_this_machine(request) {
        let why = format!("without certificates the {what} is at 127.0.0.1 or localhost alone");
        return Err(refused(peer, what, why));
    }
    access.caller(&call_from(peer), Role::Viewer, what).map(drop)
}

/// Has calls of services that a listener lacks logged as refused. They get the answer `Unimplemented`.
pub(crate) fn log_unknown(routes: Routes) -> Routes {
    routes.into_axum_router().fallback(unknown).into()
}

async fn unknown(request: Request) -> Response {
    let why = format!("there is no {} here", shown(request.uri().path()));
    if let Some(peer) = request.extensions().get::<Peer>() {
        refused(peer, "call", why.as_str());
    }
    Status::unimplemented(why).into_http()
}

/// A path as the log may have it: its beginning, where every character is seen.
fn shown(path: &str) -> String {
    let seen = |this: char| if this.is_ascii_graphic() { this } else { '?' };
    path.chars().take(MAX_SHOWN).map(seen).collect()
}

/// A call from a peer, as other listeners have them.
pub(crate) fn call_from(peer: &Peer) -> tonic::Request<()> {
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

/// The answer to who gets none.
pub(crate) fn refusal(status: &Status) -> (StatusCode, String) {
    let code = match status.code() {
        Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
        Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::FORBIDDEN,
    };
    (code, format!("{}\n", status.message()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_logged_by_a_beginning_that_is_seen() {
        assert_eq!(shown("/a.B/C"), "/a.B/C");
        assert_eq!(shown("/a\n\u{202e} b"), "/a???b");
        assert_eq!(shown(&"x".repeat(1 << 10)).len(), MAX_SHOWN);
    }
}
