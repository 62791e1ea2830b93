//! What trains need of the kernel's sockets. They need the time at which it took a datagram in, room, and many
//! datagrams in one call.

use rustix::net::sockopt;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsFd, AsRawFd};

/// A datagram as it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Received {
    pub(super) from: SocketAddrV4,
    pub(super) bytes: usize,
    /// CLOCK_REALTIME when the kernel took it in; none where it does not say.
    pub(super) at_ns: Option<u64>,
}

/// Room for the one control message that is asked for, aligned as control messages are.
#[repr(C, align(8))]
struct Room([u8; 128]);

/// Has the kernel say of each datagram when it came (SO_TIMESTAMPNS, socket(7)).
pub(super) fn enable_timestamps(socket: impl AsFd) -> io::Result<()> {
    set(socket, libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 1)
}

/// Has the kernel cut what is sent from now on into datagrams of so many bytes. They leave together (UDP_SEGMENT,
/// udp(7)).
pub(super) fn enable_gso(socket: impl AsFd, bytes: u16) -> io::Result<()> {
    set(socket, libc::SOL_UDP, libc::UDP_SEGMENT, bytes.into())
}

/// Enlarges the send buffer; beyond the usual limit where the process may. Less is no error.
pub(crate) fn enlarge_send_buffer(socket: impl AsFd, bytes: u32) {
    let bytes = bytes as usize;
    let _ = sockopt::set_socket_send_buffer_size_force(&socket, bytes)
        .or_else(|_| sockopt::set_socket_send_buffer_size(&socket, bytes));
}

/// Enlarges the receive buffer; beyond the usual limit where the process may. Less is no error.
pub(crate) fn enlarge_receive_buffer(socket: impl AsFd, bytes: u32) {
    let bytes = bytes as usize;
    let _ = sockopt::set_socket_recv_buffer_size_force(&socket, bytes)
        .or_else(|_| sockopt::set_socket_recv_buffer_size(&socket, bytes));
}

fn set(socket: impl AsFd, level: libc::c_int, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
    let bytes = size_of::<libc::c_int>() as libc::socklen_t;
    let at: *const libc::c_int = &raw const value;
    let descriptor = socket.as_fd().as_raw_fd();
    // SAFETY: the kernel reads `bytes` bytes from `at`, which is alive and of that size.
    let result = unsafe { libc::setsockopt(descriptor, level, option, at.cast(), bytes) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Takes a datagram in, cut to the length of `into`; never blocks.
pub(super) fn receive(socket: impl AsFd, into: &mut [u8]) -> io::Result<Received> {
    let mut piece = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let mut room = Room([0; 128]);
    // SAFETY: all-zero is a valid address, and a valid msghdr: no address, no pieces, no control data.
    let (mut name, mut message): (libc::sockaddr_in, libc::msghdr) =
        unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    message.msg_name = (&raw mut name).cast();
    message.msg_namelen = size_of::<libc::sockaddr_in>() as libc::socklen_t;
    message.msg_iov = &raw mut piece;
    message.msg_iovlen = 1;
    message.msg_control = room.0.as_mut_ptr().cast();
    message.msg_controllen = room.0.len() as _;
    // SAFETY: `message` describes `name`, `into` and `room`, which are alive, borrowed mutably and of the lengths it says.
    let got = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
    let bytes = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
    if i32::from(name.sin_family) != libc::AF_INET {
        return Err(io::Error::other("a datagram of another family"));
    }
    let address = Ipv4Addr::from(u32::from_be(name.sin_addr.s_addr));
    let from = SocketAddrV4::new(address, u16::from_be(name.sin_port));
    // SAFETY: the kernel has filled `message` in, which describes `room`.
    let at_ns = unsafe { time_of(&message) };
    Ok(Received { from, bytes, at_ns })
}

/// The time that a control message says.
///
/// # Safety
/// `message` must be as recvmsg left it, its control data alive.
unsafe fn time_of(message: &libc::msghdr) -> Option<u64> {
    // SAFETY: as the caller promises; the macros stay within the control data (cmsg(3)).
    let mut header = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !header.is_null() {
        // SAFETY: a header that the macros gave lies whole within the control data, which is aligned for it.
        let (level, kind, length) =
            unsafe { ((*header).cmsg_level, (*header).cmsg_type, (*header).cmsg_len as usize) };
        // SAFETY: arithmetic alone.
        let whole = unsafe { libc::CMSG_LEN(size_of::<libc::timespec>() as u32) } as usize;
        if level == libc::SOL_SOCKET && kind == libc::SCM_TIMESTAMPNS && length >= whole {
            // SAFETY: the data follows the header and is, by its length, a whole timespec, of which any bits are valid.
            let time: libc::timespec =
                unsafe { libc::CMSG_DATA(header).cast::<libc::timespec>().read_unaligned() };
            let seconds = u64::try_from(time.tv_sec).ok()?;
            return seconds.checked_mul(1_000_000_000)?.checked_add(u64::try_from(time.tv_nsec).ok()?);
        }
        // SAFETY: as for the first.
        header = unsafe { libc::CMSG_NXTHDR(message, header) };
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;
    use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

    #[test]
    fn a_datagram_says_when_it_came() {
        let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
        let (from, to) = (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
        enable_timestamps(&to).unwrap();
        assert_eq!(receive(&to, &mut [0; 8]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let before = now();
        from.send_to(b"0123456789", to.local_addr().unwrap()).unwrap();
        let (mut into, deadline) = ([0; 4], Instant::now() + Duration::from_secs(20));
        let received = loop {
            match receive(&to, &mut into) {
                Ok(received) => break received,
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
        };
        assert_eq!((received.bytes, &into), (4, b"0123"));
        assert_eq!(std::net::SocketAddr::from(received.from), from.local_addr().unwrap());
        assert!((before..=now()).contains(&received.at_ns.unwrap()));
    }
}
