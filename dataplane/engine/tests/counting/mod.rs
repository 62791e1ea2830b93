//! A transport that counts what landed where it was posted, and its links.

use harmonaize_shm::Span;
use harmonaize_transport::{DownReason, Event, Introduction, Landing, LinkId, Ring, SendError, Transport};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What was counted.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    /// Bytes that lay where they had been posted for.
    pub(crate) posted: AtomicU64,
    /// Links opened.
    pub(crate) opened: AtomicU64,
    /// Links closed, by this end or by the other one.
    pub(crate) closed: AtomicU64,
}

pub(crate) struct Counting {
    inner: Box<dyn Transport + Send>,
    counts: Arc<Counts>,
}

impl Counting {
    /// With the counts.
    pub(crate) fn around(inner: Box<dyn Transport + Send>) -> (Box<dyn Transport + Send>, Arc<Counts>) {
        let counts = Arc::new(Counts::default());
        (Box::new(Self { inner, counts: Arc::clone(&counts) }), counts)
    }
}

impl Transport for Counting {
    fn local_address(&self) -> SocketAddr {
        self.inner.local_address()
    }

    fn open(&mut self, introduction: Introduction) -> Result<LinkId, DownReason> {
        self.counts.opened.fetch_add(1, Ordering::Relaxed);
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
        payload: Option<(Landing, Span, u64)>,
    ) -> Result<(), SendError> {
        self.inner.send(link, path, header, payload)
    }

    fn progress(&mut self, budget: usize, sink: &mut dyn FnMut(LinkId, Event<'_>)) -> usize {
        let Counts { posted: bytes, closed, .. } = &*self.counts;
        self.inner.progress(budget, &mut |link, event| {
            if let Event::Received { payload: Some((_, length)), posted: true, .. } = event {
                bytes.fetch_add(length.into(), Ordering::Relaxed);
            }
            closed.fetch_add(matches!(event, Event::Down { .. }).into(), Ordering::Relaxed);
            sink(link, event);
        })
    }

    fn close(&mut self, link: LinkId) {
        self.counts.closed.fetch_add(1, Ordering::Relaxed);
        self.inner.close(link);
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wake_fd()
    }
}
