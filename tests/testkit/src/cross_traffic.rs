//! A flow that is none of the provider's. It is UDP at a stated rate from one host to another, over a stated switch. The kernel's
//! shaper keeps the rate, from a queue that the sender keeps full: a steady flow, also where processors are busy.

use crate::clock::{monotonic_ns, realtime_ns};
use crate::fabric::Fabric;
use crate::route::{self, Flow, Protocol};
use anyhow::{Context, Result};
use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Bytes of a datagram: a full packet of 1500 bytes.
const DATAGRAM: usize = 1472;
/// Bits of a packet, its headers of IPv4 and UDP included.
pub const PACKET_BITS: u64 = 8 * (DATAGRAM as u64 + 28);
/// The first source port that is tried.
const FIRST_PORT: u16 = 40_000;
/// How long what waits to leave keeps the flow going, and at most lasts after its end.
const QUEUE: Duration = Duration::from_millis(25);

/// The flow, until it is stopped or dropped.
#[derive(Debug)]
pub struct CrossTraffic {
    began_ns: u64,
    began_realtime_ns: u64,
    stop: Arc<AtomicBool>,
    sent: Arc<AtomicU64>,
    sender: Option<JoinHandle<()>>,
    /// Holds the receiver's port; nobody reads it.
    _sink: UdpSocket,
}

impl CrossTraffic {
    /// Finds a source port whose packets cross the switch `via`, and begins to send `rate` bits a second. The sender's links are shaped
    /// to that from then on.
    pub fn start(fabric: &Fabric, from: &str, to: &str, via: &str, rate: u64) -> Result<Self> {
        let (sender, receiver) = (fabric.host(from)?, fabric.host(to)?);
        let target = *receiver.addresses.first().with_context(|| format!("{to} has no address"))?;
        let source = *sender.addresses.first().with_context(|| format!("{from} has no address"))?;
        let sink = receiver.namespace.enter(|| UdpSocket::bind((target, 0)))??;
        let target = sink.local_addr()?;
        let mut flow = Flow {
            protocol: Protocol::Udp,
            from: from.to_owned(),
            to: to.to_owned(),
            source_port: FIRST_PORT,
            destination_port: target.port(),
        };
        let socket = loop {
            let port = route::port_via(fabric, &flow, via)?;
            match sender.namespace.enter(|| UdpSocket::bind(SocketAddr::from((source, port))))? {
                // Another flow of this host has it.
                Err(error) if error.kind() == ErrorKind::AddrInUse => flow.source_port = port + 1,
                bound => break bound.with_context(|| format!("port {port} of {from}"))?,
            }
        };
        socket.connect(target)?;
        fabric.set_rate(from, Some(rate))?;
        // The kernel counts twice what it is asked for, and half as much again as a packet has.
        let queue = (rate as f64 / 8.0 * QUEUE.as_secs_f64() * 0.75) as usize;
        rustix::net::sockopt::set_socket_send_buffer_size_force(&socket, queue)?;
        let (stop, sent) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (ended, counter) = (Arc::clone(&stop), Arc::clone(&sent));
        let (began_ns, began_realtime_ns) = (monotonic_ns()?, realtime_ns()?);
        let sender = std::thread::spawn(move || send(&socket, &ended, &counter));
        Ok(Self { began_ns, began_realtime_ns, stop, sent, sender: Some(sender), _sink: sink })
    }

    /// When it began, by CLOCK_MONOTONIC.
    pub fn began_ns(&self) -> u64 {
        self.began_ns
    }

    /// When it began, by CLOCK_REALTIME.
    pub fn began_realtime_ns(&self) -> u64 {
        self.began_realtime_ns
    }

    /// Packets sent so far.
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Ends it; when, by CLOCK_REALTIME.
    pub fn stop(mut self) -> Result<u64> {
        self.end();
        realtime_ns()
    }

    fn end(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if self.sender.take().is_some_and(|sender| sender.join().is_err()) {
            eprintln!("warning: a sender of cross traffic has panicked");
        }
    }
}

impl Drop for CrossTraffic {
    fn drop(&mut self) {
        self.end();
    }
}

fn send(socket: &UdpSocket, stop: &AtomicBool, sent: &AtomicU64) {
    let packet = [0x5a_u8; DATAGRAM];
    // What it stands for has processors of its own. Without the privilege it goes on as it is.
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), -20);
    while !stop.load(Ordering::Relaxed) {
        // Waits for room in the queue.
        if socket.send(&packet).is_ok() {
            sent.fetch_add(1, Ordering::Relaxed);
        }
    }
    std::thread::sleep(QUEUE);
}
