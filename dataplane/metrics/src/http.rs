//! Scrapes over HTTP: one GET a connection, bounded in bytes, time and number.

use axum::Router;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use axum::routing::get;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;

/// The most bytes of a request's head.
const MAX_HEAD: usize = 8 << 10;
/// How long a connection may take.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How soon an address that is taken is tried again.
const AGAIN: Duration = Duration::from_millis(20);
/// Connections at a time; others wait.
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
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = closed.wait_for(|closed| *closed) => return,
        };
        match accepted {
            Ok((stream, _)) => {
                let connection = http.serve_connection(TokioIo::new(stream), service.clone());
                tokio::spawn(async move {
                    // Who is too slow, or gone, gets nothing.
                    let _ = timeout(TIMEOUT, connection).await;
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "a scrape was not taken");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
