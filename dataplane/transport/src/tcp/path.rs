//! One authenticated connection: what goes out, what comes in, and whether the peer still lives.

use super::inbox::{Inbox, Input};
use super::inherit::{PathImage, RecordsImage};
use super::liveness::Silence;
use super::outbox::Outbox;
use super::poll::Ready;
use super::pulse::Pulse;
use super::records::Records;
use super::sender::Loan;
use super::sys;
use crate::rings::Rings;
use crate::{DownReason, Event, Landing, SendError};
use harmonaize_abi::Tag;
use harmonaize_shm::Span;
use socket2::Socket;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Frames that a path may deliver before another has its turn.
const QUANTUM_FRAMES: usize = 64;

/// More bytes than these, taken by the kernel and not sent, are a backlog.
const BACKLOG_BYTES: usize = 64 << 10;

#[derive(Debug)]
pub(super) struct Path {
    pub(super) pulse: Arc<Pulse>,
    inbox: Inbox,
    /// The kernel may have input, or room. It is cleared when the kernel has reported that it has not, and set by the
    /// kernel's next edge.
    readable: bool,
    writable: bool,
    hung_up: bool,
    /// The inbox may hold a whole frame.
    buffered: bool,
    /// Whether the path stands in the queue of those with work.
    pub(super) in_queue: bool,
    /// The peer has closed.
    pub(super) ended: bool,
    /// The sender writes; or it has ceased to, and nobody has looked.
    pub(super) lent: bool,
    /// Why nothing can be written any more; reading goes on to its end.
    broken: Option<DownReason>,
    silence: Silence,
    /// What its keys come from; empty on a path without protection.
    salt: Vec<u8>,
    /// Whether it reads no frame but that which is coming in.
    frozen: bool,
}

/// The reason for an error of a connection.
pub(super) fn reason(error: &io::Error) -> DownReason {
    match error.kind() {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::UnexpectedEof => {
            DownReason::Closed
        }
        _ => DownReason::Network(error.to_string()),
    }
}

impl Path {
    pub(super) fn new(
        socket: Socket,
        queue_frames: usize,
        read_buffer: usize,
        records: Option<Records>,
        lends: bool,
    ) -> Self {
        let mut salt = Vec::new();
        let parts = records.map(|records| {
            salt = records.salt;
            (records.sealer, records.opener)
        });
        let (sealer, opener) = parts.unzip();
        Self {
            pulse: Arc::new(Pulse::new(
                socket,
                Outbox::new(queue_frames, sealer),
                Loan::new(lends.then_some(queue_frames)),
            )),
            inbox: Inbox::new(read_buffer, opener),
            readable: true,
            writable: true,
            hung_up: false,
            buffered: false,
            in_queue: false,
            ended: false,
            lent: false,
            broken: None,
            silence: Silence::begin(Instant::now()),
            salt,
            frozen: false,
        }
    }

    /// From now on it reads no frame but that which is coming in, or it does again.
    pub(super) fn freeze(&mut self, frozen: bool) {
        self.frozen = frozen;
        self.pulse.outbox().freeze(frozen);
    }

    /// Whether it is at the end of a frame, with nothing left to send.
    pub(super) fn rests(&self) -> bool {
        let reading = !self.ended && self.broken.is_none() && self.inbox.is_between();
        reading && !self.lent && self.pulse.outbox().is_empty()
    }

    /// What another process needs to go on with the connection.
    pub(super) fn image(&self) -> PathImage {
        let outbox = self.pulse.outbox();
        let records = outbox.sealer().zip(self.inbox.opener()).map(|(sealer, opener)| {
            let (next, opened, unopened) = opener.image();
            let (opened, unopened) = (opened.to_vec(), unopened.to_vec());
            RecordsImage { salt: self.salt.clone(), next: (sealer.next(), next), opened, unopened }
        });
        PathImage { plain: self.inbox.ahead().to_vec(), records }
    }

    /// Goes on with what another process has read; none where there is no room for it.
    pub(super) fn resume(&mut self, ahead: &[u8]) -> Option<()> {
        self.buffered = true;
        self.inbox.resume(ahead)
    }

    /// Whether what has come, or comes, may be read.
    fn reads(&self) -> bool {
        !self.frozen || !self.inbox.is_between()
    }

    pub(super) fn socket(&self) -> &Socket {
        &self.pulse.socket
    }

    /// The link is up: from now on the peer is to give signs of life.
    pub(super) fn begin(&mut self, now: Instant) {
        self.silence.broken(now);
    }

    pub(super) fn ready(&mut self, ready: Ready) {
        self.readable |= ready.readable;
        self.writable |= ready.writable;
        self.hung_up |= ready.hung_up;
    }

    /// Whether the kernel has anything left to send, and whether that is more than it takes, or sends soon.
    pub(super) fn unsent(&self) -> (bool, bool) {
        let full = !self.lent && !self.writable && !self.pulse.outbox().is_empty();
        let bytes = sys::unsent(&self.pulse.socket).unwrap_or(0);
        (full || bytes > 0, full || bytes > BACKLOG_BYTES)
    }

    /// Whether [`Path::work`] would do anything.
    pub(super) fn has_work(&self) -> bool {
        let write = || self.may_write() && !self.pulse.outbox().is_empty();
        !self.ended && (self.reads() && (self.readable || self.buffered) || write())
    }

    /// Whether writing is this end's, and may do something.
    fn may_write(&self) -> bool {
        !self.lent && self.writable && self.broken.is_none()
    }

    /// Whether so many bytes of payloads or more are queued, and could be written.
    pub(super) fn has_queued(&self, bytes: usize) -> bool {
        self.may_write() && !self.ended && self.pulse.outbox().payload_bytes() >= bytes
    }

    /// Queues a frame.
    pub(super) fn push(&self, header: &[u8], payload: Option<(Landing, Span, Tag)>) -> Result<(), SendError> {
        if self.lent {
            let mut loan = self.pulse.loan();
            if loan.is_lent() {
                return loan.push(header, payload);
            }
        }
        self.pulse.outbox().push(header, payload)
    }

    /// Nothing can be written any more. What the peer said before it went is still to be read.
    pub(super) fn fail_writing(&mut self, reason: DownReason) {
        self.broken = Some(reason);
        self.readable = true;
    }

    /// At most one write, one read and `budget` frames; says how much it was.
    pub(super) fn work(
        &mut self,
        rings: &mut Rings,
        budget: usize,
        sink: &mut dyn FnMut(Event<'_>),
    ) -> Result<usize, DownReason> {
        let mut done = 0;
        if self.may_write() {
            done += usize::from(self.write(sink));
        }
        let mut frames = budget.clamp(1, QUANTUM_FRAMES);
        done += self.deliver(rings, &mut frames, sink)?;
        if frames > 0 && self.readable && !self.ended && self.reads() {
            done += 1;
            self.receive(rings)?;
            done += self.deliver(rings, &mut frames, sink)?;
        }
        Ok(done)
    }

    /// One system call, if there is anything to write; whether there was.
    fn write(&mut self, sink: &mut dyn FnMut(Event<'_>)) -> bool {
        let mut outbox = self.pulse.outbox();
        if outbox.is_empty() {
            return false;
        }
        match outbox.write(self.pulse.socket.as_fd(), &mut |tag| sink(Event::Sent { tag })) {
            Ok((bytes, all)) => {
                self.pulse.note_write(bytes);
                self.writable = all;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.writable = false,
            Err(error) => {
                drop(outbox);
                self.fail_writing(reason(&error));
            }
        }
        true
    }

    fn deliver(
        &mut self,
        rings: &mut Rings,
        frames: &mut usize,
        sink: &mut dyn FnMut(Event<'_>),
    ) -> Result<usize, DownReason> {
        let mut done = 0;
        while self.buffered && *frames > 0 && self.reads() {
            self.buffered = self.inbox.next(rings, sink)?;
            *frames -= 1;
            done += usize::from(self.buffered);
        }
        Ok(done)
    }

    fn receive(&mut self, rings: &Rings) -> Result<(), DownReason> {
        match self.inbox.read(self.pulse.socket.as_fd(), rings)? {
            Ok(Input::End) => self.ended = true,
            // Only what is verified is a sign of life: else who is on the way could keep up a link that is gone.
            Ok(Input::Partial) => self.readable = self.hung_up || self.broken.is_some(),
            Ok(input) => {
                self.silence.broken(Instant::now());
                self.pulse.note_read();
                self.buffered = true;
                // After a hang-up there is no further edge: read on to the end of the stream.
                self.readable = input == Input::More || self.hung_up || self.broken.is_some();
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => match self.broken.take() {
                Some(reason) => return Err(reason),
                None => self.readable = false,
            },
            Err(error) => match reason(&error) {
                DownReason::Closed => self.ended = true,
                reason => return Err(reason),
            },
        }
        Ok(())
    }

    /// A tick has passed. Returns how long the peer has been silent while this end was there, which it was not for
    /// `away`.
    pub(super) fn tick(&mut self, now: Instant, away: Duration) -> Duration {
        self.silence.lasted(now, away)
    }

    /// Whether there is input that was not read yet; if so, it is read next.
    pub(super) fn input_waits(&mut self) -> bool {
        let waits = rustix::io::ioctl_fionread(self.socket()).is_ok_and(|bytes| bytes > 0);
        self.readable |= waits;
        waits
    }
}

impl Drop for Path {
    /// Nothing reads payloads any more, not even for a sign of life that is being given.
    fn drop(&mut self) {
        self.pulse.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::handshake::Hello;
    use crate::tcp::records::LinkProtection;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    /// Else whoever is on the way could keep up a link whose peer is gone.
    #[test]
    fn a_part_of_a_record_is_no_sign_of_life() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().unwrap();
        stream.set_nonblocking(true).unwrap();
        let hello = Hello::new([1; 16], 0, 1, LinkProtection::Encrypted, [2; 32]);
        let records =
            |initiate| Records::derive(LinkProtection::Encrypted, initiate, &[3; 32], &hello, &[4; 32]);
        let mut theirs = Outbox::new(1, records(true).unwrap().map(|records| records.sealer));
        theirs.push(b"hello", None).unwrap();
        let record = theirs.take_pending(&[]);
        let mut path = Path::new(stream.into(), 8, 256, records(false).unwrap(), false);
        let begun = Instant::now();
        path.begin(begun);
        let (silent, mut heard) = (Duration::from_secs(10), 0);
        let (part, rest) = record.split_at(record.len() - 1);
        for (bytes, frames) in [(part, 0), (rest, 1)] {
            peer.write_all(bytes).unwrap();
            while !path.input_waits() {}
            path.work(&mut Rings::default(), 8, &mut |_| heard += 1).unwrap();
            assert_eq!(heard, frames);
            assert_eq!(path.tick(begun + silent, Duration::ZERO) >= silent, frames == 0);
        }
    }

    #[test]
    fn input_that_nobody_has_read_yet_is_a_sign_of_life() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().unwrap();
        stream.set_nonblocking(true).unwrap();
        let mut path = Path::new(stream.into(), 8, 256, None, false);
        path.work(&mut Rings::default(), 1, &mut |_| {}).unwrap();
        assert!(!path.has_work() && !path.input_waits());
        peer.write_all(&[0]).unwrap();
        assert!(path.input_waits() && path.has_work());
    }
}
