//! Frames through a stream socket, both ways, as far as it goes without blocking. Tensor bytes go straight between the socket
//! and memory; nothing is allocated after creation.

use super::frame::{BODY, HEADER, Header};
use crate::{Breach, EndError, Span};
use rustix::event::epoll;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use zerocopy::{FromBytes, IntoBytes};

/// System calls each way of one round of progress.
const BUDGET: usize = 16;

/// What follows a header.
#[derive(Debug)]
pub(crate) enum Landing {
    /// So many bytes, at most [`BODY`].
    Body(usize),
    /// Tensor bytes, which land here.
    Tensor(Span),
}

/// Who understands frames.
pub(crate) trait Receiver {
    /// Whether another frame can be taken now.
    fn ready(&self) -> bool;
    /// What follows this header.
    fn landing(&mut self, header: &Header) -> Result<Landing, EndError>;
    /// The frame is complete; what to answer, if anything.
    fn arrived(&mut self, header: &Header, body: &[u8]) -> Result<Option<Frame>, EndError>;
}

/// A frame to be sent.
#[derive(Debug)]
pub(crate) struct Frame {
    start: [u8; HEADER + BODY],
    start_bytes: usize,
    tensor: Option<Span>,
    sent: usize,
}

impl Frame {
    /// A frame with a body of at most [`BODY`] bytes.
    pub(crate) fn new(header: &Header, body: &[u8]) -> Self {
        Self::of(header.as_bytes().iter().chain(body))
    }

    fn of<'a>(bytes: impl Iterator<Item = &'a u8>) -> Self {
        let mut start = [0; HEADER + BODY];
        let mut start_bytes = 0;
        for (to, from) in start.iter_mut().zip(bytes) {
            *to = *from;
            start_bytes += 1;
        }
        Self { start, start_bytes, tensor: None, sent: 0 }
    }

    /// A frame that these tensor bytes follow.
    pub(crate) fn with_tensor(header: &Header, tensor: Span) -> Self {
        Self { tensor: Some(tensor), ..Self::new(header, &[]) }
    }

    fn bytes(&self) -> usize {
        self.start_bytes + self.tensor.as_ref().map_or(0, Span::bytes)
    }
}

#[derive(Debug)]
enum Phase {
    Header,
    Body(usize),
    Tensor(Span),
}

/// One end of the socket.
#[derive(Debug)]
pub(crate) struct Channel {
    socket: OwnedFd,
    /// Readable when the socket is, and, while frames wait to be sent, when it is writable.
    wake: OwnedFd,
    wants_output: bool,
    outbox: VecDeque<Frame>,
    capacity: usize,
    unsent_tensors: usize,
    phase: Phase,
    header: [u8; HEADER],
    body: [u8; BODY],
    /// Bytes of the current phase that have arrived.
    filled: usize,
    closed: bool,
}

fn system(call: &'static str) -> impl Fn(Errno) -> EndError {
    move |source| EndError::System { call, source }
}

impl Channel {
    /// An end with room for `capacity` unsent frames.
    pub(crate) fn new(socket: OwnedFd, capacity: usize) -> Result<Self, EndError> {
        let wake = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system("epoll_create"))?;
        epoll::add(&wake, &socket, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
            .map_err(system("epoll_ctl"))?;
        Ok(Self {
            socket,
            wake,
            wants_output: false,
            outbox: VecDeque::with_capacity(capacity),
            capacity,
            unsent_tensors: 0,
            phase: Phase::Header,
            header: [0; HEADER],
            body: [0; BODY],
            filled: 0,
            closed: false,
        })
    }

    /// Queues a frame.
    pub(crate) fn push(&mut self, frame: Frame) -> Result<(), EndError> {
        if self.outbox.len() >= self.capacity {
            return Err(EndError::Full);
        }
        self.unsent_tensors += usize::from(frame.tensor.is_some());
        self.outbox.push_back(frame);
        Ok(())
    }

    /// Frames with tensor bytes that have not left whole.
    pub(crate) fn unsent_tensors(&self) -> usize {
        self.unsent_tensors
    }

    /// Bytes of a frame that has not come whole, and of frames that are still to be sent. None where there are tensor bytes among them.
    pub(crate) fn partial_frames(&self) -> Option<(Vec<u8>, Vec<u8>)> {
        let came = match self.phase {
            Phase::Header => self.header.get(..self.filled)?.to_vec(),
            Phase::Body(_) => [self.header.as_slice(), self.body.get(..self.filled)?].concat(),
            Phase::Tensor(_) => return None,
        };
        let mut unsent = Vec::new();
        for frame in &self.outbox {
            if frame.tensor.is_some() {
                return None;
            }
            unsent.extend_from_slice(frame.start.get(frame.sent..frame.start_bytes)?);
        }
        Some((came, unsent))
    }

    /// Goes on where another process stands with this end. Bytes came to it, and others it was still to send; neither are a tensor's.
    pub(crate) fn resume(
        &mut self,
        mut came: &[u8],
        unsent: &[u8],
        receiver: &mut impl Receiver,
    ) -> Result<(), EndError> {
        for bytes in unsent.chunks(HEADER + BODY) {
            self.push(Frame::of(bytes.iter()))?;
        }
        while !came.is_empty() {
            let room = match &self.phase {
                Phase::Header => self.header.get_mut(self.filled..),
                Phase::Body(bytes) => self.body.get_mut(self.filled..*bytes),
                Phase::Tensor(_) => None,
            };
            let room = room.ok_or(EndError::Protocol(Breach::Unasked))?;
            let taken = room.len().min(came.len());
            let (now, later) = came.split_at(taken);
            room.iter_mut().zip(now).for_each(|(to, from)| *to = *from);
            let whole = taken == room.len();
            (self.filled, came) = (self.filled + taken, later);
            if whole {
                self.advance(receiver)?;
            }
        }
        Ok(())
    }

    /// Another descriptor of the socket.
    pub(crate) fn socket(&self) -> Result<OwnedFd, EndError> {
        rustix::io::fcntl_dupfd_cloexec(&self.socket, 0).map_err(system("fcntl(F_DUPFD)"))
    }

    /// Whether the other side was seen to be gone, or this side has given up.
    pub(crate) fn closed(&self) -> bool {
        self.closed
    }

    /// Sends what the socket takes. One system call a frame.
    pub(crate) fn send(&mut self) -> Result<usize, EndError> {
        let sent = self.try_send();
        self.closed |= sent.is_err();
        sent
    }

    fn try_send(&mut self) -> Result<usize, EndError> {
        let mut done = 0;
        while done < BUDGET {
            let Some(frame) = self.outbox.front_mut() else { break };
            let start =
                frame.start.get(frame.sent.min(frame.start_bytes)..frame.start_bytes).unwrap_or_default();
            let mut pieces = [Piece::new(start.as_ptr(), start.len()), Piece::new(start.as_ptr(), 0)];
            if let Some(tensor) = &frame.tensor {
                let skip = frame.sent.saturating_sub(frame.start_bytes);
                if let Some(rest) = tensor.view().range(skip, tensor.bytes() - skip) {
                    pieces[1] = Piece::new(rest.pointer(), rest.bytes());
                }
            }
            // SAFETY: the first piece lies in `frame.start`, the second in the mapping that `frame.tensor` keeps alive, or is
            // empty.
            match unsafe { send(self.socket.as_fd(), &mut pieces) } {
                Ok(sent) => {
                    frame.sent += sent;
                    done += 1;
                    if frame.sent >= frame.bytes() {
                        self.unsent_tensors -= usize::from(frame.tensor.is_some());
                        self.outbox.pop_front();
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(EndError::Closed),
                Err(error) => return Err(system("sendmsg")(error)),
            }
        }
        Ok(done)
    }

    /// Receives what there is, frame by frame.
    pub(crate) fn receive(&mut self, receiver: &mut impl Receiver) -> Result<usize, EndError> {
        if self.closed {
            return Err(EndError::Closed);
        }
        let received = self.try_receive(receiver);
        self.closed |= received.is_err();
        received
    }

    fn try_receive(&mut self, receiver: &mut impl Receiver) -> Result<usize, EndError> {
        for done in 0..BUDGET {
            if matches!(self.phase, Phase::Header) && self.filled == 0 && !receiver.ready() {
                return Ok(done);
            }
            let (start, bytes) = match &mut self.phase {
                Phase::Header => (self.header.as_mut_ptr(), HEADER),
                Phase::Body(bytes) => (self.body.as_mut_ptr(), *bytes),
                Phase::Tensor(span) => (span.view_mut().pointer(), span.bytes()),
            };
            let room = Piece::new(start.wrapping_add(self.filled), bytes - self.filled);
            // SAFETY: `filled` is less than `bytes`, and the piece lies in this channel's own buffers or in the mapping that
            // the phase's span keeps alive.
            match unsafe { receive(self.socket.as_fd(), room) } {
                Ok(0) => return Err(EndError::Closed),
                Ok(received) => {
                    self.filled += received;
                    if self.filled >= bytes {
                        self.advance(receiver)?;
                    }
                }
                Err(Errno::AGAIN) => return Ok(done),
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET) => return Err(EndError::Closed),
                Err(error) => return Err(system("recvmsg")(error)),
            }
        }
        Ok(BUDGET)
    }

    /// Ends a phase that is complete, and those after it that are empty.
    fn advance(&mut self, receiver: &mut impl Receiver) -> Result<(), EndError> {
        self.filled = 0;
        let header = Header::read_from_bytes(&self.header).map_err(|_| EndError::Protocol(Breach::Header))?;
        let body = match std::mem::replace(&mut self.phase, Phase::Header) {
            Phase::Header => {
                if header.reserved != 0 {
                    return Err(EndError::Protocol(Breach::Reserved));
                }
                match receiver.landing(&header)? {
                    Landing::Body(0) => 0,
                    Landing::Tensor(span) if span.bytes() == 0 => 0,
                    Landing::Body(bytes) => {
                        self.phase = Phase::Body(bytes.min(BODY));
                        return Ok(());
                    }
                    Landing::Tensor(span) => {
                        self.phase = Phase::Tensor(span);
                        return Ok(());
                    }
                }
            }
            Phase::Body(bytes) => bytes,
            Phase::Tensor(_) => 0,
        };
        if let Some(answer) = receiver.arrived(&header, self.body.get(..body).unwrap_or_default())? {
            self.push(answer).map_err(|_| EndError::Protocol(Breach::TooManyRequests))?;
        }
        Ok(())
    }

    /// Makes the wake descriptor mind output as long as frames wait. A system call only when that changes.
    pub(crate) fn arm(&mut self) -> Result<(), EndError> {
        let wants_output = !self.outbox.is_empty();
        if wants_output != self.wants_output {
            let output = if wants_output { epoll::EventFlags::OUT } else { epoll::EventFlags::empty() };
            let (data, flags) = (epoll::EventData::new_u64(0), epoll::EventFlags::IN | output);
            epoll::modify(&self.wake, &self.socket, data, flags).map_err(system("epoll_ctl"))?;
            self.wants_output = wants_output;
        }
        Ok(())
    }

    pub(crate) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

/// Bytes behind a raw pointer.
#[repr(transparent)]
struct Piece(libc::iovec);

impl Piece {
    fn new(start: *const u8, bytes: usize) -> Self {
        Self(libc::iovec { iov_base: start.cast_mut().cast(), iov_len: bytes })
    }
}

fn result(returned: isize) -> Result<usize, Errno> {
    usize::try_from(returned)
        .map_err(|_| Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
}

/// # Safety
/// Each piece must be readable.
unsafe fn send(socket: BorrowedFd<'_>, pieces: &mut [Piece]) -> Result<usize, Errno> {
    // SAFETY: all zeros is an empty message.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_mut_ptr().cast();
    message.msg_iovlen = pieces.len() as _;
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: the caller vouches for the pieces; the message lives during the call.
    result(unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) })
}

/// # Safety
/// The piece must be writable.
unsafe fn receive(socket: BorrowedFd<'_>, room: Piece) -> Result<usize, Errno> {
    // SAFETY: the caller vouches for the piece.
    result(unsafe { libc::recv(socket.as_raw_fd(), room.0.iov_base, room.0.iov_len, libc::MSG_DONTWAIT) })
}
