//! Support for end-to-end tests: fabrics in network namespaces, and conversations between their nodes.

#![forbid(unsafe_code)]

pub mod aggregated;
pub mod c_program;
pub mod job;
pub mod load;
pub mod place;
pub mod replay;
pub mod scrape;
mod worker;

use anyhow::{Context, Result, ensure};
use harmonaize_testkit::fabric::Fabric;
use harmonaize_testkit::namespace::Namespace;
use harmonaize_testkit::strict;
use harmonaize_testkit::topology::Topology;
pub use harmonaize_testkit::topology::{
    racks, racks_with_aggregators, racks_with_unmanaged_hosts, star, star_with_aggregator,
};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

/// How long one step of a test may take before the test fails.
pub const STEP: Duration = Duration::from_secs(20);

/// Builds a fabric; `None`, loudly, where the privilege for namespaces is missing.
pub fn fabric(topology: &str) -> Option<Result<Fabric>> {
    if !strict::can_make_namespaces() {
        return None;
    }
    Some(Topology::parse(topology).and_then(|topology| Fabric::build(&topology)))
}

/// Sends a text from one namespace to an address in another and back over TCP; returns what came back.
pub fn echo(from: &Namespace, to: &Namespace, address: Ipv4Addr, text: &str) -> Result<String> {
    let listener = to.enter(|| TcpListener::bind((address, 0)))?.context("cannot listen")?;
    let target = listener.local_addr()?;
    std::thread::scope(|scope| {
        let answer = scope.spawn(move || -> Result<()> {
            let (mut stream, _) = listener.accept()?;
            stream.set_read_timeout(Some(STEP))?;
            let mut bytes = Vec::new();
            stream.read_to_end(&mut bytes)?;
            stream.write_all(&bytes)?;
            Ok(())
        });
        let asked = request(from, target, text);
        if asked.is_err() {
            // Whoever never connected leaves the listener waiting: this lets it go.
            let _ = request(to, target, "");
        }
        ensure!(answer.join().is_ok_and(|answer| answer.is_ok()), "the answering side failed");
        asked
    })
}

fn request(from: &Namespace, target: SocketAddr, text: &str) -> Result<String> {
    let connected = from.enter(|| TcpStream::connect_timeout(&target, STEP))?;
    let mut stream = connected.with_context(|| format!("{} cannot reach {target}", from.name()))?;
    stream.set_read_timeout(Some(STEP))?;
    stream.write_all(text.as_bytes())?;
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut back = String::new();
    stream.read_to_string(&mut back)?;
    Ok(back)
}
