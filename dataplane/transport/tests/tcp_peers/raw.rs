//! A peer made of plain blocking sockets, which can misbehave as it likes. It is written from the protocol, not from
//! the code.

use harmonaize_transport::tcp::{Config, LinkProtection, TcpTransport};
use harmonaize_transport::{DownReason, Event, Introduction, LinkId, Transport};
use hmac::{Hmac, KeyInit, Mac};
use std::io::{Read, Result, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

pub(crate) const SECRET: [u8; 32] = [5; 32];
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Patient: a machine may leave this thread aside for a while. Without protection, of which raw peers have none.
pub(crate) fn config() -> Config {
    Config {
        protection: LinkProtection::None,
        connect_timeout: PATIENCE,
        handshake_timeout: PATIENCE,
        ..Config::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
    }
}

pub(crate) fn introduction(name: u8, peer: SocketAddr, initiate: bool) -> Introduction {
    let (name, secret, source_ports) = ([name; 16], SECRET, vec![0]);
    Introduction { name, secret, peer, initiate, source_ports, over_tcp: false }
}

/// What an endpoint reported, kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Seen {
    Up,
    Frame(Vec<u8>),
    Sent,
    Down(DownReason),
}

pub(crate) type Log = Vec<(LinkId, Seen)>;

/// Lets the endpoint work once, and keeps what it reports.
pub(crate) fn turn(end: &mut TcpTransport, log: &mut Log) -> usize {
    end.progress(64, &mut |link, event| {
        let seen = match event {
            Event::Up => Seen::Up,
            Event::Received { header, .. } => Seen::Frame(header.to_vec()),
            Event::Sent { .. } => Seen::Sent,
            Event::Completed { .. } => return,
            Event::Down { reason } => Seen::Down(reason),
        };
        log.push((link, seen));
    })
}

/// Lets the endpoints work until `until` holds; false if it never does.
pub(crate) fn drive(ends: &mut [(&mut TcpTransport, &mut Log)], until: &dyn Fn(&[&Log]) -> bool) -> bool {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        let done: usize = ends.iter_mut().map(|(end, log)| turn(end, log)).sum();
        let logs: Vec<&Log> = ends.iter().map(|(_, log)| &**log).collect();
        if until(&logs) {
            return true;
        }
        if done == 0 {
            std::thread::yield_now();
        }
    }
    false
}

pub(crate) fn hello(version: u16, name: u8, path: u16, paths: u16) -> [u8; 64] {
    let mut hello = [9; 64];
    hello[..8].copy_from_slice(b"HZlinkQ\n");
    hello[8..10].copy_from_slice(&version.to_le_bytes());
    hello[10..12].copy_from_slice(&path.to_le_bytes());
    hello[12..14].copy_from_slice(&paths.to_le_bytes());
    hello[14..16].fill(0);
    hello[16..32].fill(name);
    hello
}

/// A connection from another of this host's loopback addresses.
pub(crate) fn connect_from(from: [u8; 4], to: SocketAddr) -> TcpStream {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from((from, 0)).into()).unwrap();
    socket.connect(&to.into()).unwrap();
    socket.into()
}

/// Says hello, and hears the reply, while `turn` lets the endpoint work.
pub(crate) fn ask(to: SocketAddr, hello: &[u8], mut turn: impl FnMut()) -> Result<(TcpStream, [u8; 80])> {
    let mut stream = TcpStream::connect(to)?;
    stream.write_all(hello)?;
    let mut reply = [0; 80];
    read_exactly(&mut stream, &mut reply, &mut turn)?;
    Ok((stream, reply))
}

/// Reads all of `room`, while `turn` lets the endpoint work.
pub(crate) fn read_exactly(stream: &mut TcpStream, room: &mut [u8], turn: &mut dyn FnMut()) -> Result<()> {
    stream.set_read_timeout(Some(Duration::from_millis(1)))?;
    let (mut have, deadline) = (0, Instant::now() + PATIENCE);
    while have < room.len() && Instant::now() < deadline {
        turn();
        match stream.read(&mut room[have..]) {
            Ok(0) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => have += count,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    if have == room.len() { Ok(()) } else { Err(std::io::ErrorKind::TimedOut.into()) }
}

/// The initiator's proof message for a reply.
pub(crate) fn proof(secret: &[u8; 32], hello: &[u8], reply: &[u8; 80]) -> [u8; 40] {
    let mut mac = Hmac::<sha2::Sha256>::new_from_slice(secret).unwrap_or_else(|_| unreachable!());
    mac.update(b"initiator");
    mac.update(hello);
    mac.update(&reply[16..48]);
    let mut message = [0; 40];
    message[8..].copy_from_slice(&mac.finalize().into_bytes());
    message
}

/// An authenticated connection as path `path` of a link of `paths`.
pub(crate) fn join(
    to: SocketAddr,
    name: u8,
    (path, paths): (u16, u16),
    mut turn: impl FnMut(),
) -> Result<TcpStream> {
    let hello = hello(1, name, path, paths);
    let (mut stream, reply) = ask(to, &hello, &mut turn)?;
    stream.write_all(&proof(&SECRET, &hello, &reply))?;
    let mut welcome = [1; 8];
    read_exactly(&mut stream, &mut welcome, &mut turn)?;
    if welcome == [0; 8] { Ok(stream) } else { Err(std::io::Error::other("not welcome")) }
}
