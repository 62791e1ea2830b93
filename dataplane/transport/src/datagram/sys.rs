//! The system calls on many datagrams at once, and what they tell beside the bytes.

use crate::retry::retry;
use rustix::net::sockopt;
use socket2::SockAddr;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// Bytes for control messages: one or two of an integer each, with their headers.
const CONTROL: usize = 64;

/// Room for control messages, aligned as they are.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Control([u8; CONTROL]);

/// Enlarges the send buffer; beyond the usual limit where the process may. Less is no error.
pub(super) fn enlarge_send_buffer(socket: impl AsFd, bytes: u32) {
    let bytes = bytes as usize;
    let _ = sockopt::set_socket_send_buffer_size_force(&socket, bytes)
        .or_else(|_| sockopt::set_socket_send_buffer_size(&socket, bytes));
}

/// Enlarges the receive buffer; beyond the usual limit where the process may. Less is no error.
pub(super) fn enlarge_receive_buffer(socket: impl AsFd, bytes: u32) {
    let bytes = bytes as usize;
    let _ = sockopt::set_socket_recv_buffer_size_force(&socket, bytes)
        .or_else(|_| sockopt::set_socket_recv_buffer_size(&socket, bytes));
}

/// Has the kernel say with each message how many it has dropped (SO_RXQ_OVFL, socket(7)).
pub(super) fn enable_overrun_counts(socket: impl AsFd) {
    let _ = set(socket, libc::SOL_SOCKET, libc::SO_RXQ_OVFL, 1);
}

/// Has the kernel hand over datagrams of one sender and length together (UDP_GRO, udp(7), since Linux 5.0).
pub(super) fn enable_gro(socket: impl AsFd) {
    let _ = set(socket, libc::SOL_UDP, libc::UDP_GRO, 1);
}

/// Whether the kernel cuts messages into datagrams (UDP_SEGMENT, udp(7), since Linux 4.18).
pub(super) fn supports_gso(socket: impl AsFd) -> bool {
    // No cutting unless a message asks for it.
    set(socket, libc::SOL_UDP, libc::UDP_SEGMENT, 0).is_ok()
}

fn set(socket: impl AsFd, level: libc::c_int, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
    let bytes = size_of::<libc::c_int>() as libc::socklen_t;
    let at: *const libc::c_int = &raw const value;
    // SAFETY: the kernel reads `bytes` bytes from `at`, which is alive and of that size.
    let result = unsafe { libc::setsockopt(socket.as_fd().as_raw_fd(), level, option, at.cast(), bytes) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// One message to be sent: where to, and how many pieces of how many bytes.
struct Outgoing {
    to: SockAddr,
    pieces: usize,
    /// Bytes of each datagram, if there is more than one.
    segment_bytes: Option<u16>,
}

/// A message that came.
pub(super) struct Arrival {
    /// From whom, if it is an address of IP.
    pub(super) from: Option<SocketAddr>,
    pub(super) bytes: usize,
    /// Bytes of each datagram in it but the last; none if it is one.
    pub(super) segment_bytes: Option<usize>,
    /// How many messages the kernel has dropped so far, modulo 2^32, if it says.
    pub(super) overrun: Option<u32>,
    /// Whether it had room.
    pub(super) whole: bool,
}

/// What calls on many messages need beside the messages.
pub(super) struct Calls {
    outgoing: Vec<Outgoing>,
    headers: Vec<libc::mmsghdr>,
    pieces: Vec<libc::iovec>,
    names: Vec<libc::sockaddr_storage>,
    controls: Vec<Control>,
}

// SAFETY: the pointers in it are written before each call, and used by nobody after it; what they pointed to then is not touched
// through them again.
unsafe impl Send for Calls {}

impl std::fmt::Debug for Calls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Calls")
    }
}

fn blank() -> libc::mmsghdr {
    // SAFETY: all-zero is a valid mmsghdr: no address, no pieces, no control data.
    unsafe { std::mem::zeroed() }
}

impl Calls {
    /// For so many datagrams to send, and so many messages to receive, at once.
    pub(super) fn new(send: usize, receive: usize) -> Self {
        let most = send.max(receive);
        // SAFETY: all-zero is a valid sockaddr_storage, of no family.
        let name: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        Self {
            outgoing: Vec::with_capacity(send),
            headers: Vec::with_capacity(most),
            pieces: Vec::with_capacity(most),
            names: vec![name; receive],
            controls: vec![Control([0; CONTROL]); most],
        }
    }

    /// Forgets what was to be sent.
    pub(super) fn clear(&mut self) {
        self.outgoing.clear();
        self.pieces.clear();
    }

    /// A message of one datagram, for now. The bytes must stay as they are until [`Calls::send`].
    pub(super) fn begin(&mut self, piece: &[u8], to: SocketAddr) {
        self.outgoing.push(Outgoing { to: to.into(), pieces: 1, segment_bytes: None });
        self.pieces.push(as_piece(piece));
    }

    /// One datagram more in the last message, of which all but the last have `cut` bytes.
    pub(super) fn join(&mut self, piece: &[u8], cut: usize) {
        if let Some(last) = self.outgoing.last_mut() {
            last.pieces += 1;
            last.segment_bytes = u16::try_from(cut).ok();
            self.pieces.push(as_piece(piece));
        }
    }

    /// Datagrams in the first so many messages.
    pub(super) fn datagrams(&self, messages: usize) -> usize {
        self.outgoing.iter().take(messages).map(|message| message.pieces).sum()
    }

    /// Sends the messages; how many were taken, at least one.
    ///
    /// # Errors
    /// The first message's.
    pub(super) fn send(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let Self { outgoing, headers, pieces, controls, .. } = self;
        headers.clear();
        let mut first = 0;
        for (message, control) in outgoing.iter().zip(controls) {
            let mut header = blank();
            header.msg_hdr.msg_name = message.to.as_ptr().cast_mut().cast();
            header.msg_hdr.msg_namelen = message.to.len();
            let Some(its) = pieces.get_mut(first..first + message.pieces) else { break };
            header.msg_hdr.msg_iov = its.as_mut_ptr();
            header.msg_hdr.msg_iovlen = message.pieces as _;
            first += message.pieces;
            if let Some(cut) = message.segment_bytes {
                set_gso_segment(&mut header.msg_hdr, control, cut);
            }
            headers.push(header);
        }
        let count = headers.len() as libc::c_uint;
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        retry(|| {
            // SAFETY: each header describes an address and control data that `self` holds and pieces that the caller of `begin`
            // and `join` keeps; the kernel writes to the headers alone, which are borrowed mutably.
            unsafe { libc::sendmmsg(socket.as_raw_fd(), headers.as_mut_ptr(), count, flags as _) }
        })
    }

    /// Receives messages of at most `each` bytes into `into`, one after another at multiples of that. Returns how many
    /// came, at least one.
    ///
    /// # Errors
    /// If there is none, or the socket has an error to tell.
    pub(super) fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        into: &mut [u8],
        each: usize,
    ) -> io::Result<usize> {
        let Self { headers, pieces, names, controls, .. } = self;
        headers.clear();
        pieces.clear();
        let rooms = into.chunks_exact_mut(each.max(1)).take(names.len());
        pieces.extend(rooms.map(|room| libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: each }));
        for ((piece, name), control) in pieces.iter_mut().zip(names).zip(controls) {
            let mut header = blank();
            header.msg_hdr.msg_name = (&raw mut *name).cast();
            header.msg_hdr.msg_namelen = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
            header.msg_hdr.msg_iov = piece;
            header.msg_hdr.msg_iovlen = 1;
            header.msg_hdr.msg_control = control.0.as_mut_ptr().cast();
            header.msg_hdr.msg_controllen = CONTROL as _;
            headers.push(header);
        }
        let (count, flags) = (headers.len() as libc::c_uint, libc::MSG_DONTWAIT);
        let none = std::ptr::null_mut();
        retry(|| {
            // SAFETY: each header describes a name and control data that `self` holds and a part of `into`, all borrowed mutably and
            // of the lengths it says; there is no time-out.
            unsafe { libc::recvmmsg(socket.as_raw_fd(), headers.as_mut_ptr(), count, flags as _, none) }
        })
    }

    /// What came as message `at` of the last call to receive.
    pub(super) fn arrival(&self, at: usize) -> Option<Arrival> {
        let (header, name) = (self.headers.get(at)?, self.names.get(at)?);
        let from = address_of(name, header.msg_hdr.msg_namelen as usize);
        // SAFETY: the kernel has filled the header in, whose control data `self` holds.
        let (cut, overrun) = unsafe { parse_control(&header.msg_hdr) };
        let whole = header.msg_hdr.msg_flags & libc::MSG_TRUNC == 0;
        Some(Arrival { from, bytes: header.msg_len as usize, segment_bytes: cut, overrun, whole })
    }
}

/// An address of IP as the kernel writes it (ip(7), ipv6(7)).
fn address_of(name: &libc::sockaddr_storage, bytes: usize) -> Option<SocketAddr> {
    let at = std::ptr::from_ref(name);
    match i32::from(name.ss_family) {
        libc::AF_INET if bytes >= size_of::<libc::sockaddr_in>() => {
            // SAFETY: sockaddr_storage is aligned and long enough for every address, and any bits are a valid one.
            let v4 = unsafe { &*at.cast::<libc::sockaddr_in>() };
            let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
            Some(SocketAddrV4::new(ip, u16::from_be(v4.sin_port)).into())
        }
        libc::AF_INET6 if bytes >= size_of::<libc::sockaddr_in6>() => {
            // SAFETY: as above.
            let v6 = unsafe { &*at.cast::<libc::sockaddr_in6>() };
            let (ip, port) = (Ipv6Addr::from(v6.sin6_addr.s6_addr), u16::from_be(v6.sin6_port));
            Some(SocketAddrV6::new(ip, port, v6.sin6_flowinfo, v6.sin6_scope_id).into())
        }
        _ => None,
    }
}

fn as_piece(bytes: &[u8]) -> libc::iovec {
    // The kernel reads it alone.
    libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
}

/// Puts the control message on a header that has a message cut into datagrams of so many bytes.
fn set_gso_segment(header: &mut libc::msghdr, control: &mut Control, cut: u16) {
    header.msg_control = control.0.as_mut_ptr().cast();
    // SAFETY: arithmetic alone.
    header.msg_controllen = unsafe { libc::CMSG_SPACE(size_of::<u16>() as u32) } as _;
    // SAFETY: the control data is there, aligned, and has room for a header and an integer, so that the macro gives its start.
    let to = unsafe { libc::CMSG_FIRSTHDR(header) };
    if to.is_null() {
        return;
    }
    // SAFETY: `to` is the start of the control data, aligned for a header; the integer behind it is in it, too.
    unsafe {
        (*to).cmsg_level = libc::SOL_UDP;
        (*to).cmsg_type = libc::UDP_SEGMENT;
        (*to).cmsg_len = libc::CMSG_LEN(size_of::<u16>() as u32) as _;
        libc::CMSG_DATA(to).cast::<u16>().write_unaligned(cut);
    }
}

/// What control messages say: how the message is to be cut, and how many were dropped.
///
/// # Safety
/// `header` must be as recvmmsg left it, its control data alive.
unsafe fn parse_control(header: &libc::msghdr) -> (Option<usize>, Option<u32>) {
    let (mut cut, mut overrun) = (None, None);
    // SAFETY: as the caller promises; the macros stay within the control data (cmsg(3)).
    let mut at = unsafe { libc::CMSG_FIRSTHDR(header) };
    while !at.is_null() {
        // SAFETY: a header that the macros gave lies whole within the control data, which is aligned for it.
        let (level, kind, length) = unsafe { ((*at).cmsg_level, (*at).cmsg_type, (*at).cmsg_len as usize) };
        // SAFETY: arithmetic alone.
        let whole = unsafe { libc::CMSG_LEN(size_of::<u32>() as u32) } as usize;
        if length >= whole {
            // SAFETY: the data follows the header and is, by its length, at least four bytes, of which any bits are valid.
            let value = unsafe { libc::CMSG_DATA(at).cast::<u32>().read_unaligned() };
            match (level, kind) {
                (libc::SOL_UDP, libc::UDP_GRO) => cut = usize::try_from(value).ok().filter(|cut| *cut > 0),
                (libc::SOL_SOCKET, libc::SO_RXQ_OVFL) => overrun = Some(value),
                _ => {}
            }
        }
        // SAFETY: as for the first.
        at = unsafe { libc::CMSG_NXTHDR(header, at) };
    }
    (cut, overrun)
}
