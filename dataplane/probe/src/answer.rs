//! The end that answers trains: a thread that measures how far apart their packets come.

use crate::sys::{enable_timestamps, enlarge_receive_buffer, receive};
use crate::train::{Arrivals, InterfaceBytes, PAYLOAD, TrainKey};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How many datagrams are read in [`SPAN`]. Then the thread pauses, and the kernel drops what does not fit its queue.
const MOST: u32 = 5_000;
const SPAN: Duration = Duration::from_millis(100);
/// What the socket's queue should hold: some trains.
const QUEUE: u32 = 4 << 20;
/// The thread's niceness: it goes before others where processors are busy, and has little to do. What came beside a train is known
/// where the thread is there while it comes.
const NICE: i32 = -10;

/// Answers trains until it is dropped.
#[derive(Debug)]
pub struct Answerer {
    address: SocketAddrV4,
    bell: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Answerer {
    /// Listens at a UDP address; port 0 for any. `counts`: the kernel's interfaces count all that comes in, so that what came beside a
    /// train is known. They do not where a card takes RDMA in. `keys`: the key of trains from an address; others are not looked at.
    ///
    /// # Errors
    /// If the address cannot be had, or no thread.
    pub fn bind(
        address: SocketAddrV4,
        counts: bool,
        keys: impl Fn(Ipv4Addr) -> TrainKey + Send + 'static,
    ) -> io::Result<Self> {
        let socket = Socket::new(Domain::IPV4, Type::DGRAM.nonblocking(), Some(Protocol::UDP))?;
        enlarge_receive_buffer(&socket, QUEUE);
        enable_timestamps(&socket)?;
        socket.bind(&SockAddr::from(address))?;
        let address = socket.local_addr()?.as_socket_ipv4();
        let address = address.ok_or_else(|| io::Error::other("the socket has no address"))?;
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let rings = Arc::clone(&bell);
        let thread = std::thread::Builder::new()
            .name("trains".into())
            .spawn(move || serve(&socket, &rings, counts, Arrivals::new(Box::new(keys))))?;
        Ok(Self { address, bell, thread: Some(thread) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddrV4 {
        self.address
    }
}

impl Drop for Answerer {
    fn drop(&mut self) {
        let _ = rustix::io::write(&*self.bell, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that answers trains has panicked");
        }
    }
}

fn serve(socket: &Socket, bell: &OwnedFd, counts: bool, mut arrivals: Arrivals) {
    // Without the privilege (CAP_SYS_NICE) it takes its turn.
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICE);
    let (mut since, mut taken) = (Instant::now(), 0);
    let mut datagram = [0; PAYLOAD];
    loop {
        let now = Instant::now();
        if now.saturating_duration_since(since) >= SPAN {
            (since, taken) = (now, 0);
        }
        // Whoever floods is looked at for a part of the time; only the bell is heard in the rest of it.
        let rests = taken >= MOST;
        let mut fds = vec![PollFd::from_borrowed_fd(bell.as_fd(), PollFlags::IN)];
        fds.extend((!rests).then(|| PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)));
        let rest = Timespec { tv_sec: 0, tv_nsec: SPAN.subsec_nanos().into() };
        let _ = poll(&mut fds, rests.then_some(&rest));
        if fds.first().is_some_and(|bell| !bell.revents().is_empty()) {
            return;
        }
        while taken < MOST {
            taken += 1;
            let received = match receive(socket, &mut datagram) {
                Ok(received) => received,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // Of an answer that could not be delivered.
                Err(_) => continue,
            };
            let at_ns = received.at_ns.unwrap_or_else(realtime_ns);
            let bytes = datagram.get(..received.bytes).unwrap_or_default();
            let mut look = || if counts { carried() } else { InterfaceBytes::default() };
            if let Some(answer) = arrivals.take(Instant::now(), received.from, at_ns, bytes, &mut look) {
                // Lost: it is asked again.
                let _ = socket.send_to(&answer.to_bytes(), &SockAddr::from(received.from));
            }
        }
    }
}

/// What interfaces have taken in, as the kernel counts it. It is of this process's network namespace, and nothing where
/// it cannot be read.
fn carried() -> InterfaceBytes {
    let text = std::fs::read_to_string("/proc/self/net/dev").unwrap_or_default();
    InterfaceBytes { at_ns: realtime_ns(), bytes: text.lines().filter_map(interface).collect() }
}

/// Reads `  eth0: 1296 10 0 ...`: of an interface, what it has received.
fn interface(line: &str) -> Option<(String, u64)> {
    let (name, counters) = line.split_once(':')?;
    Some((name.trim().to_owned(), counters.split_whitespace().next()?.parse().ok()?))
}

fn realtime_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_interfaces_took_in_is_read() {
        assert_eq!(interface("  eth0: 1296 10 0 0 0 0 0 0 0 0"), Some(("eth0".to_owned(), 1296)));
        for line in ["Inter-|   Receive", " face |bytes    packets", "eth0:", "eth0: many", ""] {
            assert_eq!(interface(line), None, "{line}");
        }
        assert!(carried().bytes.contains_key("lo"));
    }
}
