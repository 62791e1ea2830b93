//! Connections on which each end says a few bytes now and then, and nothing else. That is the least that it costs to see whether
//! peers live.
#![forbid(unsafe_code)]

use anyhow::{Context, Result};
use clap::Parser;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

/// Bytes of a sign of life, with what authenticates it.
const SIGN: [u8; 32] = [0; 32];
/// How long the other end may take to listen.
const PATIENCE: Duration = Duration::from_secs(10);

/// Gives signs of life, and reads those of the other end, until it is ended.
#[derive(Parser)]
struct Arguments {
    /// Where to accept the connections
    #[arg(long)]
    listen: Option<SocketAddr>,
    /// Where to connect to
    #[arg(long, required_unless_present = "listen")]
    to: Option<SocketAddr>,
    /// How many there are
    #[arg(long)]
    connections: usize,
    /// Milliseconds between two signs of life
    #[arg(long)]
    every: u64,
}

fn connect(to: SocketAddr) -> Result<TcpStream> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match TcpStream::connect(to) {
            Err(_) if Instant::now() < deadline => thread::sleep(Duration::from_millis(50)),
            connected => return connected.with_context(|| format!("cannot connect to {to}")),
        }
    }
}

fn main() -> Result<()> {
    let Arguments { listen, to, connections, every } = Arguments::parse();
    let mut streams = Vec::new();
    if let Some(listen) = listen {
        let listener = TcpListener::bind(listen)?;
        for _ in 0..connections {
            streams.push(listener.accept()?.0);
        }
    } else {
        let to = to.context("neither --listen nor --to")?;
        for _ in 0..connections {
            streams.push(connect(to)?);
        }
    }
    let set = epoll::create(CreateFlags::CLOEXEC)?;
    let mut readers = Vec::new();
    for (number, stream) in (0..).zip(&streams) {
        stream.set_nodelay(true)?;
        let reader = stream.try_clone()?;
        epoll::add(&set, &reader, EventData::new_u64(number), EventFlags::IN)?;
        readers.push(reader);
    }
    println!("{connections} connections");
    thread::spawn(move || {
        let mut due = Instant::now();
        loop {
            for mut stream in &streams {
                if stream.write_all(&SIGN).is_err() {
                    return;
                }
            }
            due += Duration::from_millis(every);
            thread::sleep(due.saturating_duration_since(Instant::now()));
        }
    });
    let (mut room, mut bytes) = ([MaybeUninit::uninit(); 64], [0; 4096]);
    loop {
        let (events, _) = epoll::wait(&set, &mut room, None)?;
        for event in events {
            let number = usize::try_from(event.data.u64())?;
            let mut reader = readers.get(number).context("no such connection")?;
            // The other end has gone: so does this one.
            if reader.read(&mut bytes)? == 0 {
                return Ok(());
            }
        }
    }
}
