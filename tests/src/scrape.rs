//! What the programs show to Prometheus.

use anyhow::{Context, Result, ensure};
use harmonaize_testkit::namespace::Namespace;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Where control, agents and aggregators serve it by default.
pub const PORTS: [u16; 3] = [9476, 9477, 9478];
/// How long a page may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// The page at a port of a namespace's loopback.
///
/// # Errors
/// Where nobody serves it there, or what comes is none.
pub fn scrape(namespace: &Namespace, port: u16) -> Result<String> {
    body(&answer(namespace, port, "/metrics")?)
}

/// The page at a port of the caller's own loopback.
///
/// # Errors
/// As for [`scrape`].
pub fn scrape_here(port: u16) -> Result<String> {
    body(&request(port, "/metrics")?)
}

/// What is answered, with its head, where a path is asked for at a port of a namespace's loopback.
///
/// # Errors
/// Where nobody answers there, or what comes is no text.
pub fn answer(namespace: &Namespace, port: u16, path: &str) -> Result<String> {
    Ok(namespace.enter(|| request(port, path))??)
}

fn request(port: u16, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes())?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

fn body(text: &str) -> Result<String> {
    let (head, body) = text.split_once("\r\n\r\n").context("an answer without an end of its head")?;
    ensure!(head.contains("200 OK") && head.contains("application/openmetrics-text"), "{head}");
    Ok(body.to_owned())
}
