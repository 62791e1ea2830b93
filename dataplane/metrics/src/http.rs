//! Scrapes over HTTP: one GET a connection, bounded in bytes, time and number.

use axum::Router;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use axum::routing::get;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::timeout;

/// The most bytes of a request's head.
const MAX_HEAD: usize = 8 << 10;
/// How long a connection may take.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How soon an address that is taken is tried again.
const AGAIN: Duration = Duration::from_millis(20);
/// Connections at a time. One more ends the oldest that has not sent its whole head, or waits if all have.
const MAX_CONNECTIONS: usize = 8;

/// Listens for scrapes. Where the address cannot be had within `patience`, the log says so, and the program goes on without. Within a tokio
/// runtime.
pub async fn listen(address: SocketAddr, patience: Duration) -> Option<TcpListener> {
    let begun = Instant::now();
    let mut listener = TcpListener::bind(address).await;
    while listener.is_err() && begun.elapsed() < patience {
        tokio::time::sleep(AGAIN).await;
        listener = TcpListener::bind(address).await;
    }
    listener.inspect_err(|error| tracing::error!("no metrics: cannot listen on {address}: {error}")).ok()
}

/// Answers scrapes with what `scrape` gives, none once that has ended, until `closed` says so.
pub async fn serve<F>(
    scrape: impl Fn() -> F + Clone + Send + Sync + 'static,
    listener: TcpListener,
    mut closed: watch::Receiver<bool>,
) where
    F: Future<Output = Option<String>> + Send + 'static,
{
    let metrics = async move || match scrape().await {
        Some(text) => ([(CONTENT_TYPE, OPENMETRICS)], text).into_response(),
        None => (StatusCode::SERVICE_UNAVAILABLE, "what was measured has ended\n").into_response(),
    };
    let elsewhere = async || (StatusCode::NOT_FOUND, "metrics are at /metrics\n");
    let service =
        TowerToHyperService::new(Router::new().route("/metrics", get(metrics)).fallback(get(elsewhere)));
    let mut http = http1::Builder::new();
    http.keep_alive(false).max_buf_size(MAX_HEAD);
    let (mut connections, mut tasks) = (Connections::default(), JoinSet::new());
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept(), if !connections.are_busy() => accepted,
            Some(_) = tasks.join_next() => {
                connections.forget_ended();
                continue;
            }
            _ = closed.wait_for(|closed| *closed) => break,
        };
        match accepted {
            Ok((stream, _)) => {
                connections.make_room();
                let complete = Arc::new(AtomicBool::new(false));
                let (service, whole) = (service.clone(), Arc::clone(&complete));
                let answer = service_fn(move |request: Request<Incoming>| {
                    whole.store(true, Ordering::Relaxed);
                    service.call(request)
                });
                let connection = http.serve_connection(TokioIo::new(stream), answer);
                // Who is too slow, or gone, gets nothing.
                let task = tasks.spawn(async move { drop(timeout(TIMEOUT, connection).await) });
                connections.0.push_back(Connection { task, complete });
            }
            Err(error) => {
                tracing::warn!(%error, "a scrape was not taken");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
    // What was asked is answered still.
    tasks.detach_all();
}

/// Connections that are open, the oldest first.
#[derive(Debug, Default)]
struct Connections(VecDeque<Connection>);

/// A connection that is open.
#[derive(Debug)]
struct Connection {
    task: AbortHandle,
    /// Whether its request's head has come whole.
    complete: Arc<AtomicBool>,
}

impl Connections {
    /// Whether there are as many as there may be, and each is being answered.
    fn are_busy(&self) -> bool {
        self.0.len() >= MAX_CONNECTIONS && self.first_silent().is_none()
    }

    /// Returns the place of the oldest that has not sent its whole head.
    fn first_silent(&self) -> Option<usize> {
        self.0.iter().position(|connection| !connection.complete.load(Ordering::Relaxed))
    }

    /// Ends the oldest that has not sent its whole head, if there are as many as there may be.
    fn make_room(&mut self) {
        self.forget_ended();
        if self.0.len() < MAX_CONNECTIONS {
            return;
        }
        if let Some(silent) = self.first_silent().and_then(|at| self.0.remove(at)) {
            silent.task.abort();
        }
    }

    /// Forgets those that have ended.
    fn forget_ended(&mut self) {
        self.0.retain(|connection| !connection.task.is_finished());
    }
}

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    /// Serves one page on an address of its own, until the sender says so.
    async fn server() -> (SocketAddr, watch::Sender<bool>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, (close, closed)) = (listener.local_addr().unwrap(), watch::channel(false));
        tokio::spawn(serve(|| async { Some("a page\n".to_owned()) }, listener, closed));
        (address, close)
    }

    async fn scrape(address: SocketAddr) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        text
    }

    #[tokio::test]
    async fn silent_connections_give_way_to_a_scrape() {
        let (address, _close) = server().await;
        let mut silent = Vec::new();
        for at in 0..2 * MAX_CONNECTIONS {
            let mut stream = TcpStream::connect(address).await.unwrap();
            if at % 2 == 1 {
                stream.write_all(b"GET /metrics HTTP/1.1\r\n").await.unwrap();
            }
            silent.push(stream);
        }
        let text = timeout(TIMEOUT / 2, scrape(address)).await.expect("in time");
        assert!(text.starts_with("HTTP/1.1 200") && text.ends_with("a page\n"), "{text}");
        // The oldest have ended, the youngest go on.
        let mut first = silent.remove(0);
        let ended = timeout(TIMEOUT / 2, first.read_u8()).await.expect("it has ended");
        assert!(ended.is_err());
        let mut last = silent.pop().unwrap();
        last.write_all(b"Host: a\r\n\r\n").await.unwrap();
        let mut text = String::new();
        last.read_to_string(&mut text).await.unwrap();
        assert!(text.ends_with("a page\n"), "{text}");
    }

    #[tokio::test]
    async fn connections_that_are_answered_give_no_way() {
        let mut connections = Connections::default();
        let tasks: Vec<_> =
            (0..=MAX_CONNECTIONS).map(|_| tokio::spawn(std::future::pending::<()>())).collect();
        for (at, task) in tasks.iter().enumerate().take(MAX_CONNECTIONS) {
            assert!(!connections.are_busy());
            let complete = Arc::new(AtomicBool::new(at != 3));
            connections.0.push_back(Connection { task: task.abort_handle(), complete });
        }
        assert!(!connections.are_busy(), "one is silent");
        connections.make_room();
        assert_eq!(connections.0.len(), MAX_CONNECTIONS - 1);
        let (task, complete) = (tasks[MAX_CONNECTIONS].abort_handle(), Arc::new(AtomicBool::new(true)));
        connections.0.push_back(Connection { task, complete });
        assert!(connections.are_busy());
        connections.make_room();
        assert_eq!(connections.0.len(), MAX_CONNECTIONS);
    }
}
