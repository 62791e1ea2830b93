//! Datagrams over UDP in batches: what aggregation on the way sends and receives, at both of its ends.
//!
//! One socket, without threads or queues of its own but a batch to be sent. What goes to the same address leaves in its order and, where
//! it is of the same length, as one message that the kernel or the device cuts (UDP_SEGMENT); what arrives together is taken in
//! together (UDP_GRO): a message is most of what a datagram costs. Where the kernel has neither, they go one by one. Nothing is
//! allocated after [`Datagrams::bind`]. Datagrams are lost, doubled and overtaken as in any network, and no error of one of them is
//! the socket's end.

mod endpoint;
mod rdma;
mod sys;

pub use endpoint::{Address, Endpoint};
pub use harmonaize_verbs::Gid;
pub use rdma::{RdmaAddress, RdmaDatagrams, RdmaPort};

use socket2::{Domain, Protocol, Socket, Type};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use sys::{Arrival, Calls};

/// Most bytes of a datagram here, the headers of IP and UDP not counted. They are those of a frame of 9,000 bytes.
pub const MAX_DATAGRAM: usize = 8972;
/// Most bytes that leave as one message.
const MESSAGE_BYTES: usize = 65_000;
/// Bytes of a message that came, before it is cut into datagrams: the most that UDP has.
const ARRIVAL_BYTES: usize = 1 << 16;
/// Messages that are taken in by one call.
const ARRIVALS: usize = 16;
/// Errors of the network for earlier datagrams (ICMP) that are read in one call. Each is reported once, and is nothing of the
/// socket's.
const MAX_DEFERRED_ERRORS: usize = 8;

/// How an endpoint is made.
#[derive(Clone, Copy, Debug)]
pub struct DatagramConfig {
    /// Most bytes of a datagram, at most [`MAX_DATAGRAM`].
    pub bytes: usize,
    /// Datagrams that wait to be sent, at most.
    pub batch: usize,
    /// Datagrams that leave as one message, at most 64; 1 leaves cutting to nobody. A queue on the way that is full drops a
    /// message whole.
    pub gso_segments: usize,
    /// Bytes that the kernel keeps in each direction; less is no fault.
    pub socket_buffer: u32,
}

impl Default for DatagramConfig {
    fn default() -> Self {
        Self { bytes: 1472, batch: 64, gso_segments: 16, socket_buffer: 4 << 20 }
    }
}

/// What has gone through an endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DatagramCounters {
    /// Datagrams that the kernel took.
    pub sent: u64,
    /// Messages in which they left, of one or more.
    pub messages: u64,
    /// Datagrams that it refused: no way to the address, a firewall, no memory, too long.
    pub unsent: u64,
    /// Datagrams that arrived.
    pub received: u64,
    /// Messages that arrived and were dropped by the kernel because nobody took them in.
    pub overrun: u64,
    /// Datagrams that were longer than [`DatagramConfig::bytes`], or of no known sender: dropped.
    pub unrecognized: u64,
    /// Calls into the kernel, to send and to receive, that did something.
    pub calls: u64,
}

impl DatagramCounters {
    /// Of two endpoints together.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            sent: self.sent + other.sent,
            messages: self.messages + other.messages,
            unsent: self.unsent + other.unsent,
            received: self.received + other.received,
            overrun: self.overrun + other.overrun,
            unrecognized: self.unrecognized + other.unrecognized,
            calls: self.calls + other.calls,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    to: SocketAddr,
    /// Its bytes lie in `out` at this place times the most bytes.
    place: usize,
    bytes: usize,
}

/// Whether an error may be what the network reports of an earlier datagram. Then what is to be done now is to be tried
/// again.
fn is_deferred(error: &io::Error) -> bool {
    let known = [
        libc::ECONNREFUSED,
        libc::EHOSTUNREACH,
        libc::ENETUNREACH,
        libc::EHOSTDOWN,
        libc::EPROTO,
        libc::ENOPROTOOPT,
    ];
    known.map(Some).contains(&error.raw_os_error())
}

/// Whether an error says that there is no route to an address. There is none at all, or none from the address that the socket was connected
/// with, which the host has no more (older kernels say EINVAL).
fn is_unroutable(error: &io::Error) -> bool {
    let known = [libc::ENETUNREACH, libc::EHOSTUNREACH, libc::ENETDOWN, libc::EADDRNOTAVAIL, libc::EINVAL];
    known.map(Some).contains(&error.raw_os_error())
}

/// An endpoint. It never blocks.
#[derive(Debug)]
pub struct Datagrams {
    socket: Socket,
    address: SocketAddr,
    config: DatagramConfig,
    waiting: Vec<Waiting>,
    /// Of these, how many are sent.
    done: usize,
    out: Box<[u8]>,
    /// Cut by the kernel: whether it can.
    gso: bool,
    arrived: Box<[u8]>,
    calls: Calls,
    counters: DatagramCounters,
    /// What the kernel last said it had dropped.
    overrun: u32,
    /// The network says that nobody is where datagrams were sent.
    refused: bool,
    /// See [`Datagrams::has_no_route`].
    no_route: bool,
}

impl Datagrams {
    /// Binds an address; port 0 is any.
    ///
    /// # Errors
    /// If the kernel refuses the socket or the address.
    pub fn bind(address: SocketAddr, config: DatagramConfig) -> io::Result<Self> {
        let bytes = config.bytes.clamp(1, MAX_DATAGRAM);
        let config = DatagramConfig {
            bytes,
            batch: config.batch.max(1),
            gso_segments: config.gso_segments.clamp(1, 64).min(MESSAGE_BYTES / bytes),
            ..config
        };
        let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
        socket.set_nonblocking(true)?;
        sys::enlarge_send_buffer(&socket, config.socket_buffer);
        sys::enlarge_receive_buffer(&socket, config.socket_buffer);
        socket.bind(&address.into())?;
        let address = socket.local_addr()?.as_socket().unwrap_or(address);
        sys::enable_overrun_counts(&socket);
        sys::enable_gro(&socket);
        Ok(Self {
            gso: config.gso_segments > 1 && sys::supports_gso(&socket),
            socket,
            address,
            waiting: Vec::with_capacity(config.batch),
            done: 0,
            out: vec![0; config.batch * bytes].into_boxed_slice(),
            arrived: vec![0; ARRIVALS * ARRIVAL_BYTES].into_boxed_slice(),
            calls: Calls::new(config.batch, ARRIVALS),
            counters: DatagramCounters::default(),
            overrun: 0,
            refused: false,
            no_route: false,
            config,
        })
    }

    /// From now on datagrams of `peer` alone are taken in, and [`Datagrams::take_refusal`] says when nobody is there (ICMP's port unreachable). Where
    /// there is no way to it at present datagrams of all are.
    ///
    /// An endpoint that was kept to a peer before, and bound to no address, is so anew, from the address that the host has now and another port:
    /// a socket keeps the address that it was connected with, whether or not the host has it still.
    pub fn restrict_to(&mut self, peer: SocketAddr) {
        let forgotten = rustix::net::connect_unspec(&self.socket).map_err(io::Error::from);
        let connected = forgotten.and_then(|()| self.socket.connect(&peer.into()));
        let address = connected.and_then(|()| self.socket.local_addr()).ok().and_then(|it| it.as_socket());
        self.no_route = address.is_none();
        let Some(address) = address else { return };
        self.address = address;
    }

    /// Whether the last attempt to keep to the peer found no route, or datagrams have found none since. [`Datagrams::restrict_to`] may
    /// mend that.
    pub fn has_no_route(&self) -> bool {
        self.no_route
    }

    /// Whether the network has said since the last call that nobody is at the peer's address. It may have been anybody who said so.
    pub fn take_refusal(&mut self) -> bool {
        std::mem::take(&mut self.refused)
    }

    /// An address of the family of `peer` from which it can be reached, with any port.
    pub fn unspecified_for(peer: SocketAddr) -> SocketAddr {
        let any: IpAddr = match peer {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        SocketAddr::new(any, 0)
    }

    /// From now on its datagrams carry this code point of differentiated services, from 0 to 63.
    ///
    /// # Errors
    /// If the kernel refuses it.
    pub fn set_dscp(&self, dscp: u8) -> io::Result<()> {
        let field = u32::from(dscp) << 2;
        match self.address.ip().to_canonical() {
            IpAddr::V4(_) => self.socket.set_tos_v4(field),
            IpAddr::V6(_) => self.socket.set_tclass_v6(field),
        }
    }

    /// Where it is bound.
    pub fn local_address(&self) -> SocketAddr {
        self.address
    }

    /// Whether the kernel cuts messages into datagrams.
    pub fn has_gso(&self) -> bool {
        self.gso
    }

    /// What has gone through it.
    pub fn counters(&self) -> DatagramCounters {
        self.counters
    }

    /// Datagrams that wait to be sent.
    pub fn waiting(&self) -> usize {
        self.waiting.len() - self.done
    }

    /// Has `write` write a datagram, and return where it goes and its length in bytes. The datagram has at most
    /// [`DatagramConfig::bytes`], and waits for [`Datagrams::flush`]. `None` of `write` leaves things as they were.
    /// False if there is no room for more, or nothing was written.
    pub fn push(&mut self, write: impl FnOnce(&mut [u8]) -> Option<(SocketAddr, usize)>) -> bool {
        if self.waiting.len() == self.config.batch && !self.flush() {
            return false;
        }
        let place = self.waiting.len();
        let at = place * self.config.bytes;
        let Some(room) = self.out.get_mut(at..at + self.config.bytes) else { return false };
        match write(room) {
            Some((to, bytes)) if bytes <= self.config.bytes => {
                self.waiting.push(Waiting { to, place, bytes });
                true
            }
            Some(_) => {
                self.counters.unsent += 1;
                false
            }
            None => false,
        }
    }

    /// Hands everything that waits to the kernel; false if it takes no more now, and something waits still.
    pub fn flush(&mut self) -> bool {
        let mut earlier = MAX_DEFERRED_ERRORS;
        while self.done < self.waiting.len() {
            self.gather();
            match self.calls.send(self.socket.as_fd()) {
                Ok(messages) => {
                    self.counters.calls += 1;
                    let datagrams: usize = self.calls.datagrams(messages);
                    self.counters.sent += datagrams as u64;
                    self.counters.messages += messages as u64;
                    self.done += datagrams;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
                Err(error) if earlier > 0 && is_deferred(&error) => {
                    self.refused |= error.kind() == io::ErrorKind::ConnectionRefused;
                    earlier -= 1;
                }
                Err(error) => self.refused(&error),
            }
        }
        self.waiting.clear();
        self.done = 0;
        true
    }

    /// Describes what waits to the kernel: a message for each run of datagrams that can leave together.
    ///
    /// Cost: a sort of the batch, which is sorted already where it has one address.
    fn gather(&mut self) {
        self.calls.clear();
        let bytes = self.config.bytes;
        if let Some(left) = self.waiting.get_mut(self.done..).filter(|_| self.gso) {
            left.sort_unstable_by_key(|one| (one.to, one.place));
        }
        let mut run: Option<(Waiting, usize)> = None;
        for one in self.waiting.iter().skip(self.done) {
            let at = one.place * bytes;
            let Some(piece) = self.out.get(at..at + one.bytes) else { return };
            // The last of a message may be shorter than the others.
            let joins = run.filter(|(first, count)| {
                self.gso
                    && first.to == one.to
                    && one.bytes <= first.bytes
                    && one.bytes > 0
                    && *count < self.config.gso_segments
            });
            run = match joins {
                Some((first, count)) => {
                    self.calls.join(piece, first.bytes);
                    // Nothing follows a shorter one.
                    (one.bytes == first.bytes).then_some((first, count + 1))
                }
                None => {
                    self.calls.begin(piece, one.to);
                    Some((*one, 1))
                }
            };
        }
    }

    /// The first message that waits was refused. It is dropped, unless cutting may be the reason, which sending one by
    /// one will show.
    fn refused(&mut self, error: &io::Error) {
        let datagrams = self.calls.datagrams(1);
        // A device without checksums cannot cut (EIO), and no piece may be longer than a frame (udp(7)).
        let cutting = [libc::EIO, libc::EINVAL, libc::EMSGSIZE].map(Some).contains(&error.raw_os_error());
        if datagrams > 1 && cutting {
            self.gso = false;
            return;
        }
        self.no_route |= is_unroutable(error);
        self.counters.unsent += datagrams as u64;
        self.done += datagrams.max(1);
    }

    /// Takes in what has arrived, one call's worth, and shows `sink` each datagram with its sender. How many
    /// there were; 0: no more.
    pub fn receive(&mut self, sink: &mut dyn FnMut(SocketAddr, &[u8])) -> usize {
        let mut earlier = MAX_DEFERRED_ERRORS;
        let messages = loop {
            match self.calls.receive(self.socket.as_fd(), &mut self.arrived, ARRIVAL_BYTES) {
                Ok(messages) => break messages,
                Err(error) if earlier > 0 && is_deferred(&error) => {
                    self.refused |= error.kind() == io::ErrorKind::ConnectionRefused;
                    earlier -= 1;
                }
                // Nothing there.
                Err(_) => return 0,
            }
        };
        self.counters.calls += 1;
        let mut taken = 0;
        for at in 0..messages {
            let Some(Arrival { from, bytes, segment_bytes: cut, overrun, whole }) = self.calls.arrival(at)
            else {
                continue;
            };
            if let Some(overrun) = overrun {
                self.counters.overrun += u64::from(overrun.wrapping_sub(self.overrun));
                self.overrun = overrun;
            }
            let start = at * ARRIVAL_BYTES;
            let message = self.arrived.get(start..start + bytes).unwrap_or_default();
            let (Some(from), true) = (from, whole) else {
                self.counters.unrecognized += 1;
                taken += 1;
                continue;
            };
            let mut left = message;
            loop {
                let (datagram, rest) = left.split_at(cut.unwrap_or(left.len()).min(left.len()));
                taken += 1;
                self.counters.received += 1;
                if datagram.len() > self.config.bytes {
                    self.counters.unrecognized += 1;
                } else {
                    sink(from, datagram);
                }
                left = rest;
                if left.is_empty() {
                    break;
                }
            }
        }
        taken
    }

    /// Readable when something has arrived; the same descriptor is writable when the kernel takes datagrams.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
