//! A transport around another, with hooks on what passes.

use harmonaize_abi::Tag;
use harmonaize_shm::Span;
use harmonaize_transport::{DownReason, Event, Introduction, Landing, LinkId, Ring, SendError, Transport};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

/// Hooks on what passes a transport; each does nothing unless it is given.
pub(crate) trait Hooks: Send {
    /// Where peers are to connect to in its place.
    fn address(&self) -> Option<SocketAddr> {
        None
    }

    /// A link is to be opened.
    fn open(&mut self) {}

    /// A link is to be closed.
    fn close(&mut self) {}

    /// Whether a link has room for a frame.
    fn has_room(&mut self, _link: LinkId) -> bool {
        true
    }

    /// A payload is to be sent. Returns what is sent in its place.
    fn payload(&mut self, payload: Span) -> Span {
        payload
    }

    /// Something has happened.
    fn event(&mut self, _event: &Event<'_>) {}
}

/// A transport with hooks.
pub(crate) struct Tap<H> {
    pub(crate) inner: Box<dyn Transport + Send>,
    pub(crate) hooks: H,
}

impl<H: Hooks> Transport for Tap<H> {
    fn local_address(&self) -> SocketAddr {
        self.hooks.address().unwrap_or_else(|| self.inner.local_address())
    }

    fn open(&mut self, introduction: Introduction) -> Result<LinkId, DownReason> {
        self.hooks.open();
        self.inner.open(introduction)
    }

    fn attach_ring(&mut self, link: LinkId, ring: u16, memory: Ring) -> Result<(), DownReason> {
        self.inner.attach_ring(link, ring, memory)
    }

    fn post(&mut self, link: LinkId, landing: Landing, span: Span) -> bool {
        self.inner.post(link, landing, span)
    }

    fn send(
        &mut self,
        link: LinkId,
        path: u16,
        header: &[u8],
        payload: Option<(Landing, Span, Tag)>,
    ) -> Result<(), SendError> {
        if !self.hooks.has_room(link) {
            return Err(SendError::Full);
        }
        let payload = payload.map(|(landing, span, tag)| (landing, self.hooks.payload(span), tag));
        self.inner.send(link, path, header, payload)
    }

    fn progress(&mut self, budget: usize, sink: &mut dyn FnMut(LinkId, Event<'_>)) -> usize {
        let Self { inner, hooks } = self;
        inner.progress(budget, &mut |link, event| {
            hooks.event(&event);
            sink(link, event);
        })
    }

    fn close(&mut self, link: LinkId) {
        self.hooks.close();
        self.inner.close(link);
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wake_fd()
    }
}
