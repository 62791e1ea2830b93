//! The system calls that take raw memory.

use crate::retry::retry;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// Bytes to send, or room to receive into. Never a reference: tenants may change the bytes meanwhile.
pub(super) type Piece = libc::iovec;

/// No bytes.
pub(super) const NOTHING: Piece = Piece { iov_base: std::ptr::null_mut(), iov_len: 0 };

/// Sends from all pieces in order; never blocks, never raises SIGPIPE.
///
/// # Safety
/// Each piece must be readable for the time of the call.
pub(super) unsafe fn send(socket: BorrowedFd<'_>, pieces: &[Piece]) -> io::Result<usize> {
    // SAFETY: all-zero is a valid msghdr: no address, no pieces, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_ptr().cast_mut();
    message.msg_iovlen = pieces.len() as _;
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    retry(|| {
        // SAFETY: `message` describes `pieces`, which the caller vouches for; the kernel does not write through it.
        unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) }
    })
}

/// Receives into all pieces in order; never blocks. 0 is the end of the stream.
///
/// # Safety
/// Each piece must be writable for the time of the call, and covered by no reference.
pub(super) unsafe fn receive(socket: BorrowedFd<'_>, pieces: &mut [Piece]) -> io::Result<usize> {
    // SAFETY: as in `send`.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_mut_ptr();
    message.msg_iovlen = pieces.len() as _;
    retry(|| {
        // SAFETY: `message` describes `pieces`, which the caller vouches for.
        unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) }
    })
}

/// Sends ordinary bytes.
pub(super) fn send_bytes(socket: impl AsFd, bytes: &[u8]) -> io::Result<usize> {
    let piece = Piece { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: the piece is `bytes`, which is only read.
    unsafe { send(socket.as_fd(), &[piece]) }
}

/// Receives into ordinary bytes.
pub(super) fn receive_bytes(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<usize> {
    let piece = Piece { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: the piece is `bytes`, borrowed mutably for the call.
    unsafe { receive(socket.as_fd(), &mut [piece]) }
}

/// Bounds the rate at which a connection's segments leave, in bytes a second (SO_MAX_PACING_RATE, socket(7)); `u64::MAX` for no bound.
/// TCP keeps to it by itself where the interface's queue is none that paces (tcp(7), since Linux 4.20).
pub(super) fn set_pacing(socket: impl AsFd, bytes_per_second: u64) -> io::Result<()> {
    let bytes = size_of::<u64>() as libc::socklen_t;
    let rate: *const u64 = &raw const bytes_per_second;
    let (level, option) = (libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE);
    // SAFETY: the kernel reads `bytes` bytes of `rate`, which is alive and of that size.
    let result = unsafe { libc::setsockopt(socket.as_fd().as_raw_fd(), level, option, rate.cast(), bytes) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// How many bytes a connection has taken that were never sent (SIOCOUTQNSD, tcp(7)).
pub(super) fn unsent(socket: impl AsFd) -> io::Result<usize> {
    const SIOCOUTQNSD: libc::Ioctl = 0x894b;
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes one integer, which is alive and of that size.
    let result = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), SIOCOUTQNSD, &raw mut bytes) };
    if result == 0 { Ok(usize::try_from(bytes).unwrap_or(0)) } else { Err(io::Error::last_os_error()) }
}

/// Throws away what has arrived, without copying it; 0 is the end of the stream.
pub(super) fn discard(socket: impl AsFd) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
    // SAFETY: with MSG_TRUNC a TCP socket writes nothing to the (null) buffer (tcp(7)).
    retry(|| unsafe { libc::recv(socket.as_fd().as_raw_fd(), std::ptr::null_mut(), 1 << 20, flags) })
}
