//! TCP streams from one thread to another, as fast as they go. It is the goodput that a link gives to bare sockets, by each method that
//! Linux has to send.

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand, ValueEnum};
use harmonaize_testkit::clock::monotonic_ns;
use io_uring::{IoUring, cqueue, opcode, types};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::time::{ClockId, clock_gettime};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// Bytes of one write and read.
const BUFFER: usize = 256 << 10;
/// Buffers of a stream that the kernel may hold at once, where it takes no copy.
const BUFFERS: usize = 8;
/// How long either end waits for the other.
const PATIENCE: Duration = Duration::from_secs(20);
/// A message is sent whole before the ring says that it is done.
const WHOLE: i32 = libc::MSG_WAITALL;
const POLL: Timespec = Timespec { tv_sec: PATIENCE.as_secs().cast_signed(), tv_nsec: 0 };

/// Measures the goodput of TCP streams.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    end: End,
}

#[derive(Subcommand)]
enum End {
    /// Listens on an address (port 0: any), prints it, takes the streams, and prints as JSON: bytes a second after the warm-up, and
    /// seconds of the processor in all
    Receive {
        /// Where
        address: SocketAddr,
        /// Streams
        #[arg(long, default_value_t = 1)]
        streams: usize,
        /// Bytes at the beginning that are not timed
        #[arg(long, default_value_t = 4 << 20)]
        warmup: u64,
    },
    /// Sends, and prints as JSON: seconds of the processor in all
    Send {
        /// Where to
        address: SocketAddr,
        /// Streams
        #[arg(long, default_value_t = 1)]
        streams: usize,
        /// How many bytes, on all streams together
        #[arg(long, default_value_t = 64 << 20)]
        bytes: u64,
        /// How
        #[arg(long, value_enum, default_value_t = Method::Write)]
        method: Method,
    },
    /// Is silent and then sends as fast as it goes, again and again, which congests a link at a known moment; each burst is a line of
    /// JSON with its beginning and end in nanoseconds of CLOCK_MONOTONIC
    Bursts {
        /// Where to
        address: SocketAddr,
        /// How many bursts
        #[arg(long, default_value_t = 50)]
        bursts: u32,
        /// Bytes of each
        #[arg(long, default_value_t = 12 << 20)]
        bytes: u64,
        /// Silence before each, in milliseconds
        #[arg(long, default_value_t = 500)]
        pause_ms: u64,
    },
}

/// How bytes are given to the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Method {
    /// By the system call
    Write,
    /// By a ring of `io_uring`
    Ring,
    /// By such a ring from registered buffers, of which the kernel takes no copy where the device needs none
    ZeroCopy,
}

fn main() -> Result<()> {
    match Arguments::parse().end {
        End::Receive { address, streams, warmup } => receive(address, streams, warmup)?,
        End::Send { address, streams, bytes, method } => {
            let connected = (0..streams).map(|_| connect(address)).collect::<Result<Vec<_>>>()?;
            match method {
                Method::Write => write(connected, bytes)?,
                Method::Ring | Method::ZeroCopy => ring(&connected, bytes, method)?,
            }
            println!("{{\"processor_seconds\":{}}}", processor_seconds());
        }
        End::Bursts { address, bursts, bytes, pause_ms } => {
            let (mut stream, buffer) = (connect(address)?, vec![0x5a; BUFFER]);
            for _ in 0..bursts {
                std::thread::sleep(Duration::from_millis(pause_ms));
                let began_ns = monotonic_ns()?;
                write_all(&mut stream, &buffer, bytes)?;
                println!("{{\"began_ns\":{began_ns},\"handed_over_ns\":{}}}", monotonic_ns()?);
            }
        }
    }
    Ok(())
}

fn processor_seconds() -> f64 {
    let spent = clock_gettime(ClockId::ProcessCPUTime);
    spent.tv_sec as f64 + spent.tv_nsec as f64 / 1e9
}

/// Waits until some of the streams can go on; which.
fn ready(streams: &[TcpStream], events: PollFlags) -> Result<Vec<bool>> {
    let mut polled: Vec<PollFd<'_>> = streams.iter().map(|stream| PollFd::new(stream, events)).collect();
    ensure!(poll(&mut polled, Some(&POLL))? > 0, "the other end has done nothing for {PATIENCE:?}");
    Ok(polled.iter().map(|one| !one.revents().is_empty()).collect())
}

fn receive(address: SocketAddr, streams: usize, warmup: u64) -> Result<()> {
    let listener = TcpListener::bind(address).with_context(|| format!("cannot listen on {address}"))?;
    println!("{}", listener.local_addr()?);
    let mut open = Vec::new();
    for _ in 0..streams {
        let (stream, _) = listener.accept()?;
        stream.set_nonblocking(true)?;
        open.push(stream);
    }
    let (mut buffer, mut total, mut began) = (vec![0; BUFFER], 0u64, None);
    while !open.is_empty() {
        let mut ready = ready(&open, PollFlags::IN)?.into_iter();
        let mut failed = None;
        open.retain_mut(|stream| {
            if ready.next() != Some(true) {
                return true;
            }
            match stream.read(&mut buffer) {
                Ok(0) => false,
                Ok(got) => {
                    total += got as u64;
                    true
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => true,
                Err(error) => {
                    failed = Some(error);
                    false
                }
            }
        });
        if let Some(error) = failed {
            return Err(error.into());
        }
        if total >= warmup && began.is_none() {
            began = Some((Instant::now(), total));
        }
    }
    let (began, before) = began.context("the stream ended within its warm-up")?;
    let seconds = began.elapsed().as_secs_f64();
    ensure!(total > before && seconds > 0.0, "the stream ended within its warm-up");
    let goodput = (total - before) as f64 / seconds;
    println!("{{\"bytes_per_second\":{goodput},\"processor_seconds\":{}}}", processor_seconds());
    Ok(())
}

fn connect(address: SocketAddr) -> Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&address, PATIENCE)
        .with_context(|| format!("cannot connect to {address}"))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// Writes so many bytes, which the buffer has in turn.
fn write_all(stream: &mut TcpStream, buffer: &[u8], mut left: u64) -> Result<()> {
    while left > 0 {
        let part = usize::try_from(left.min(buffer.len() as u64))?;
        stream.write_all(buffer.get(..part).context("buffer")?)?;
        left -= part as u64;
    }
    Ok(())
}

fn write(mut streams: Vec<TcpStream>, bytes: u64) -> Result<()> {
    let buffer = vec![0x5a; BUFFER];
    if let [stream] = streams.as_mut_slice() {
        return write_all(stream, &buffer, bytes);
    }
    let mut left = bytes;
    streams.iter().try_for_each(|stream| stream.set_nonblocking(true))?;
    while left > 0 {
        let ready = ready(&streams, PollFlags::OUT)?;
        for (stream, _) in streams.iter_mut().zip(ready).filter(|(_, ready)| *ready) {
            let part = usize::try_from(left.min(BUFFER as u64))?;
            match stream.write(buffer.get(..part).context("buffer")?) {
                Ok(sent) => left -= sent as u64,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

/// Sends by a ring, with one message at a time under way in each stream. Bytes of one stream keep their order
/// so.
#[expect(unsafe_code, reason = "the kernel reads buffers by their address")]
fn ring(streams: &[TcpStream], bytes: u64, method: Method) -> Result<()> {
    let each = if method == Method::ZeroCopy { BUFFERS } else { 1 };
    let mut buffers = vec![vec![0x5a_u8; BUFFER]; streams.len() * each];
    let mut ring = IoUring::new(64.max(2 * buffers.len() as u32))?;
    if method == Method::ZeroCopy {
        let vectors: Vec<libc::iovec> = buffers
            .iter_mut()
            .map(|buffer| libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: BUFFER })
            .collect();
        // SAFETY: the buffers outlive the ring's use below, and nobody moves them.
        unsafe { ring.submitter().register_buffers(&vectors) }.context("cannot register buffers")?;
    }
    let mut free = vec![true; buffers.len()];
    let mut busy = vec![false; streams.len()];
    let (mut left, mut in_flight) = (bytes, 0usize);
    while left > 0 || in_flight > 0 {
        for (index, stream) in streams.iter().enumerate() {
            let mut own = index * each..(index + 1) * each;
            let Some(buffer) = own.find(|buffer| free.get(*buffer) == Some(&true)) else { continue };
            let part = u32::try_from(left.min(BUFFER as u64))?;
            if part == 0 || busy.get(index) != Some(&false) {
                continue;
            }
            let data = buffers.get(buffer).context("buffer")?.as_ptr();
            let to = types::Fd(stream.as_raw_fd());
            let entry = match method {
                Method::ZeroCopy => opcode::SendZc::new(to, data, part)
                    .buf_index(Some(u16::try_from(buffer)?))
                    .flags(WHOLE)
                    .build(),
                Method::Write | Method::Ring => opcode::Send::new(to, data, part).flags(WHOLE).build(),
            };
            // SAFETY: the buffer stays until the kernel has said that it is done with it.
            unsafe { ring.submission().push(&entry.user_data(buffer as u64))? };
            if let (Some(free), Some(busy)) = (free.get_mut(buffer), busy.get_mut(index)) {
                (*free, *busy) = (false, true);
            }
            left -= u64::from(part);
            in_flight += 1;
        }
        ring.submit_and_wait(1)?;
        for done in ring.completion() {
            let buffer = usize::try_from(done.user_data())?;
            let notice = cqueue::notif(done.flags());
            if !notice {
                ensure!(done.result() > 0, "a message failed: {}", done.result());
                if let Some(busy) = busy.get_mut(buffer / each) {
                    *busy = false;
                }
            }
            if (notice || !cqueue::more(done.flags()))
                && let Some(free) = free.get_mut(buffer)
            {
                *free = true;
                in_flight -= 1;
            }
        }
    }
    Ok(())
}
