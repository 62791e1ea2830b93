//! Tracing over raw sockets: what a [`Trace`] wants sent leaves, and what ICMP says of it comes in.

use crate::trace::{Question, Trace, TracedRoute};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use std::io::{self, ErrorKind, Read};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// IPPROTO_RAW: what is sent has its IP header, and nothing is ever received (raw(7)).
const RAW: i32 = 255;
/// No message of ICMP that quotes a header is longer than what is read of it.
const MESSAGE: usize = 1024;
/// Messages in a row; others' come here too.
const MESSAGES: usize = 4096;

/// A pair of raw sockets; needs CAP_NET_RAW.
#[derive(Debug)]
pub struct Tracer {
    sender: Socket,
    icmp: Socket,
}

impl Tracer {
    /// One whose packets leave from `source`, an address of this host.
    ///
    /// # Errors
    /// `PermissionDenied` without CAP_NET_RAW in the network namespace's user namespace.
    pub fn open(source: Ipv4Addr) -> io::Result<Self> {
        let sender = Socket::new(Domain::IPV4, Type::RAW.nonblocking(), Some(Protocol::from(RAW)))?;
        let icmp = Socket::new(Domain::IPV4, Type::RAW.nonblocking(), Some(Protocol::ICMPV4))?;
        // The sender too: the kernel chooses a route by the address that a socket has, not by that in the packet.
        let source = SockAddr::from(SocketAddrV4::new(source, 0));
        sender.bind(&source)?;
        icmp.bind(&source)?;
        Ok(Self { sender, icmp })
    }

    /// Traces for at most `patience`; what is not known by then is left out. Blocks the thread.
    ///
    /// # Errors
    /// If packets cannot be sent (no route, no such source address).
    pub fn trace(&mut self, question: Question, patience: Duration) -> io::Result<Vec<TracedRoute>> {
        let deadline = Instant::now() + patience;
        let mut key = [0; 32];
        getrandom::fill(&mut key).map_err(io::Error::other)?;
        let to = SockAddr::from(SocketAddrV4::new(question.destination, 0));
        let mut trace = Trace::new(question, &key);
        loop {
            let now = Instant::now();
            while let Some(packet) = trace.poll(now) {
                match self.sender.send_to(&packet, &to) {
                    Ok(_) => {}
                    // As if the network had lost it.
                    Err(error) if transient(&error) => break,
                    Err(error) => return Err(error),
                }
            }
            let now = Instant::now();
            if trace.is_over() || now >= deadline {
                return Ok(trace.found());
            }
            let until = trace.poll_timeout().map_or(deadline, |due| due.min(deadline));
            self.wait(until.saturating_duration_since(now));
            self.listen(&mut trace);
        }
    }

    fn wait(&self, left: Duration) {
        // A timeout that has passed in the meantime is looked at once more.
        let left = left.max(Duration::from_micros(100));
        let left = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        // An interrupted sleep is a short one.
        let _ = poll(&mut [PollFd::from_borrowed_fd(self.icmp.as_fd(), PollFlags::IN)], Some(&left));
    }

    fn listen(&mut self, trace: &mut Trace) {
        let mut message = [0; MESSAGE];
        for _ in 0..MESSAGES {
            match (&self.icmp).read(&mut message) {
                Ok(length) => drop(trace.handle_icmp(message.get(..length).unwrap_or_default())),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    }
}

/// Whether the same may work a moment later.
fn transient(error: &io::Error) -> bool {
    error.kind() == ErrorKind::WouldBlock
        || error.kind() == ErrorKind::Interrupted
        || error.raw_os_error() == Some(libc::ENOBUFS)
}
