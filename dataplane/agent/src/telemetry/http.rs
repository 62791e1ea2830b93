//! The little HTTP that a scrape needs: one GET a connection, bounded in bytes, time and number.

use crate::telemetry::metrics::{Labels, text};
use crate::telemetry::{Handle, failed};
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

/// Answers scrapes until `closed` says so.
pub(crate) async fn serve(handle: Handle, listener: TcpListener, mut closed: watch::Receiver<bool>) {
    let (labels, places) = (Arc::new(Labels::default()), Arc::new(Semaphore::new(CONNECTIONS)));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = closed.wait_for(|closed| *closed) => return,
        };
        match accepted {
            Ok((stream, _)) => {
                let (handle, labels) = (handle.clone(), Arc::clone(&labels));
                tokio::spawn(async move {
                    // Who is too slow, or gone, gets nothing.
                    let _ = timeout(PATIENCE, answer(stream, &handle, &labels)).await;
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

async fn answer(mut stream: TcpStream, handle: &Handle, labels: &Labels) -> std::io::Result<()> {
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
    let text = handle.read(false).await.and_then(|reading| text(reading, labels).ok());
    match text {
        Some(text) => reply(&mut stream, "200 OK", &text).await,
        None => reply(&mut stream, "503 Service Unavailable", "telemetry has ended\n").await,
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
