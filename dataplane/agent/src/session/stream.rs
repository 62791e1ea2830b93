//! A connection's bytes, through a Unix socket or over TCP.

use bytes::BytesMut;
use harmonaize_abi::session::{MessageError, encode, length};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, sockopt};
use serde::Serialize;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, Interest, ReadBuf};
use tokio::net::{TcpStream, UnixStream};

/// Over TCP, a process's host that is silent for so long is gone.
const SILENCE: Duration = Duration::from_secs(10);
/// How long what was already under way is taken in after last words, and how much of it. So the last words are not
/// lost.
const LINGER: Duration = Duration::from_secs(1);
const MAX_LINGER: usize = 256 << 10;
/// Bytes taken with one call.
const CHUNK: usize = 4096;

/// A connection with a tenant's process.
#[derive(Debug)]
pub(super) enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

/// Why no message came.
#[derive(Debug)]
pub(super) enum ReadError {
    /// The process went away.
    Gone,
    /// It sent something else.
    Bad(MessageError),
}

impl From<MessageError> for ReadError {
    fn from(error: MessageError) -> Self {
        Self::Bad(error)
    }
}

impl Stream {
    /// One from a TCP listener. Small messages go at once, and a host that vanishes without a word is noticed.
    pub(super) fn accepted(stream: TcpStream) -> Result<Self, Errno> {
        sockopt::set_tcp_nodelay(&stream, true)?;
        sockopt::set_socket_keepalive(&stream, true)?;
        sockopt::set_tcp_keepidle(&stream, SILENCE / 2)?;
        sockopt::set_tcp_keepintvl(&stream, SILENCE / 5)?;
        sockopt::set_tcp_user_timeout(&stream, SILENCE.as_millis() as u32)?;
        Ok(Self::Tcp(stream))
    }

    /// A message without its length, of at most `most` bytes.
    pub(super) async fn read_message(&mut self, most: usize) -> Result<Vec<u8>, ReadError> {
        let mut prefix = [0; 4];
        self.read_exact(&mut prefix).await.map_err(|_| ReadError::Gone)?;
        let bytes = length(prefix)?;
        if bytes > most {
            return Err(MessageError::Length(bytes).into());
        }
        let mut message = vec![0; bytes];
        self.read_exact(&mut message).await.map_err(|_| ReadError::Gone)?;
        Ok(message)
    }

    /// Sends a message that is not the first.
    pub(super) async fn send(&mut self, message: &impl Serialize) -> io::Result<()> {
        self.write_all(&encode(message).map_err(io::Error::other)?).await
    }

    /// Sends a short message with descriptors, which go through Unix sockets alone.
    pub(super) async fn send_with(
        &mut self,
        message: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        match self {
            Self::Unix(stream) => {
                let sent = send_some(stream, message, descriptors).await?;
                // Nothing was sent before, so the socket's buffer takes it whole.
                if sent == message.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
            }
            Self::Tcp(_) if !descriptors.is_empty() => Err(io::ErrorKind::Unsupported.into()),
            Self::Tcp(stream) => stream.write_all(message).await,
        }
    }

    /// Sends an answer, with a descriptor if it has one, which goes through Unix sockets alone. Another may receive meanwhile.
    pub(super) async fn answer(&self, mut message: &[u8], descriptor: Option<OwnedFd>) -> io::Result<()> {
        let mut descriptor = descriptor.as_ref().map(AsFd::as_fd);
        while !message.is_empty() {
            let sent = match self {
                Self::Unix(stream) => send_some(stream, message, descriptor.as_slice()).await?,
                Self::Tcp(_) if descriptor.is_some() => return Err(io::ErrorKind::Unsupported.into()),
                Self::Tcp(stream) => {
                    stream.async_io(Interest::WRITABLE, || stream.try_write(message)).await?
                }
            };
            // It goes with the first byte.
            descriptor = None;
            message = message.get(sent..).unwrap_or_default();
        }
        Ok(())
    }

    /// Waits for bytes, at most some thousand, and takes the descriptors that come with them; none at the end. May be dropped
    /// without losing any.
    pub(super) async fn receive(
        &self,
        into: &mut BytesMut,
        descriptors: &mut VecDeque<OwnedFd>,
    ) -> io::Result<usize> {
        let mut chunk = [0; CHUNK];
        let received = match self {
            Self::Unix(stream) => {
                let receive = || {
                    let flags = RecvFlags::DONTWAIT;
                    Ok(harmonaize_shm::receive_with_descriptors(stream.as_fd(), &mut chunk, flags)?)
                };
                let (received, came) = stream.async_io(Interest::READABLE, receive).await?;
                descriptors.extend(came);
                received
            }
            Self::Tcp(stream) => stream.async_io(Interest::READABLE, || stream.try_read(&mut chunk)).await?,
        };
        into.extend_from_slice(chunk.get(..received).unwrap_or_default());
        Ok(received)
    }

    /// Says last words, as far as the socket's buffer takes them (always, as little was sent before).
    pub(super) async fn close_with(mut self, message: &[u8]) {
        match &mut self {
            Self::Unix(stream) => drop(stream.try_write(message)),
            Self::Tcp(stream) => {
                let _ = stream.try_write(message);
                // Closing over unread bytes would reset the connection, and the words with it.
                let _ = tokio::time::timeout(LINGER, drain(stream)).await;
            }
        }
    }
}

/// Sends the first bytes of a message; how many.
async fn send_some(stream: &UnixStream, message: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let flags = SendFlags::DONTWAIT;
    let send = || Ok(harmonaize_shm::send_with_descriptors(stream.as_fd(), message, descriptors, flags)?);
    stream.async_io(Interest::WRITABLE, send).await
}

async fn drain(stream: &mut TcpStream) {
    let _ = stream.shutdown().await;
    let (mut taken, mut waste) = (0, [0; 4096]);
    while taken < MAX_LINGER {
        match stream.read(&mut waste).await {
            Ok(0) | Err(_) => return,
            Ok(more) => taken += more,
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(stream) => stream.as_fd(),
            Self::Tcp(stream) => stream.as_fd(),
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Unix(stream) => Pin::new(stream).poll_read(context, into),
            Self::Tcp(stream) => Pin::new(stream).poll_read(context, into),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Unix(stream) => Pin::new(stream).poll_write(context, from),
            Self::Tcp(stream) => Pin::new(stream).poll_write(context, from),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Unix(stream) => Pin::new(stream).poll_flush(context),
            Self::Tcp(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Unix(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    #[tokio::test]
    async fn a_silent_host_is_given_up_after_ten_seconds() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let _process = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let stream = Stream::accepted(listener.accept().await.unwrap().0).unwrap();
        assert!(sockopt::socket_keepalive(&stream).unwrap() && sockopt::tcp_nodelay(&stream).unwrap());
        assert!(sockopt::tcp_keepidle(&stream).unwrap() + sockopt::tcp_keepintvl(&stream).unwrap() < SILENCE);
        assert_eq!(sockopt::tcp_user_timeout(&stream).unwrap(), 10_000);
    }
}
