//! The little HTTP that a scrape needs: one GET a connection, bounded in bytes, time and number.

use crate::telemetry::failed;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;

/// Most bytes of a request.
const REQUEST: usize = 8 << 10;
/// How long a request, and its answer, may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Connections at a time; others wait.
const CONNECTIONS: usize = 8;

/// Answers scrapes with what `scrape` gives, none once that has ended, until `closed` says so.
pub(crate) async fn serve<F>(
    scrape: impl Fn() -> F + Clone + Send + 'static,
    listener: TcpListener,
    mut closed: watch::Receiver<bool>,
) where
    F: Future<Output = Option<String>> + Send + 'static,
{
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = closed.wait_for(|closed| *closed) => return,
        };
        match accepted {
            Ok((stream, _)) => {
                let scrape = scrape.clone();
                tokio::spawn(async move {
                    // Who is too slow, or gone, gets nothing.
                    let _ = timeout(PATIENCE, answer(stream, scrape())).await;
                    drop(place);
                });
            }
            Err(error) => {
                failed("taking a scrape", &error);
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn answer(mut stream: TcpStream, text: impl Future<Output = Option<String>>) -> std::io::Result<()> {
    let mut request = Vec::new();
    let head = loop {
        if let Some(end) = request.windows(4).position(|four| four == b"\r\n\r\n") {
            break request.get(..end).unwrap_or_default();
        }
        if request.len() > REQUEST {
            return reply(&mut stream, "431 Request Header Fields Too Large", "too long\n").await;
        }
        let mut more = [0; 1024];
        let count = stream.read(&mut more).await?;
        if count == 0 {
            return Ok(());
        }
        request.extend(more.iter().take(count));
    };
    let line =
        String::from_utf8_lossy(head.split(|byte| *byte == b'\r').next().unwrap_or_default()).into_owned();
    let mut words = line.split(' ');
    match (words.next(), words.next().map(|path| path.split('?').next().unwrap_or_default())) {
        (Some("GET"), Some("/metrics")) => {}
        (Some("GET"), Some(_)) => {
            return reply(&mut stream, "404 Not Found", "metrics are at /metrics\n").await;
        }
        _ => return reply(&mut stream, "405 Method Not Allowed", "only GET\n").await,
    }
    match text.await {
        Some(text) => reply(&mut stream, "200 OK", &text).await,
        None => reply(&mut stream, "503 Service Unavailable", "what was measured has ended\n").await,
    }
}

async fn reply(stream: &mut TcpStream, status: &str, body: &str) -> std::io::Result<()> {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    stream.shutdown().await
}
